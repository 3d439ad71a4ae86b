//! The emulator's own tests: each mistake of `kernels/emulator/tests/exercise.cu` is found, and kernels without one are not accused,
//! in any schedule.

#![cfg(target_arch = "x86_64")]

use half::{bf16, f16};
use kernels::device::{Argument, Buffer, Counts, Device, DeviceError, Emulation, Launch, Traffic};

fn device() -> Device {
    Device::emulated(Emulation::default()).unwrap()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn read_words(buffer: &Buffer) -> Vec<u32> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.read(0, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect()
}

fn read_floats(buffer: &Buffer) -> Vec<f32> {
    read_words(buffer).into_iter().map(f32::from_bits).collect()
}

/// A kernel of exercise.cu with buffers of its own.
struct Case {
    device: Device,
    launch: Launch,
    output: Buffer,
    expected: Vec<f32>,
    /// Where a mistake goes in the arguments.
    bug: usize,
    counters: Option<Buffer>,
}

fn input(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 37) % 101) as f32 - 50.0).collect()
}

fn case(kernel: &'static str) -> Case {
    let device = device();
    let launch = |grid: u32, block: u32, shared_bytes: u32, arguments: Vec<Argument>| Launch {
        kernel,
        grid: [grid, 1, 1],
        block,
        shared_bytes,
        cooperative: kernel == "rounds",
        arguments,
    };
    let output = |n: usize| device.allocate("y", n * 4).unwrap();
    let constant = |x: &[f32]| device.constant("x", &floats(x)).unwrap();
    let zeros = |name: &str, n: usize| {
        let buffer = device.allocate(name, n * 4).unwrap();
        buffer.fill(0).unwrap();
        buffer
    };
    let bug = Argument::I32(0);
    match kernel {
        "ring_sum" => {
            let (blocks, tiles) = (3, 7);
            let x = input(blocks * tiles * 512);
            let expected = x.chunks(tiles * 512).map(|c| c.iter().sum()).collect();
            let y = output(blocks);
            let arguments = vec![constant(&x).at(0), y.at(0), Argument::I32(tiles as i32), bug];
            let launch = launch(blocks as u32, 128, 3 * 512 * 4, arguments);
            Case { device, launch, output: y, expected, bug: 3, counters: None }
        }
        "last_block_sum" => {
            let blocks = 5;
            let x = input(blocks * 64);
            let expected = (0..64).map(|t| (0..blocks).map(|b| x[b * 64 + t]).sum()).collect();
            let (y, counter) = (output(64), zeros("counter", 1));
            let part = device.allocate("part", blocks * 64 * 4).unwrap();
            let arguments = vec![constant(&x).at(0), part.at(0), counter.at(0), y.at(0), bug];
            let launch = launch(blocks as u32, 64, 4, arguments);
            Case { device, launch, output: y, expected, bug: 4, counters: Some(counter) }
        }
        "two_sums" => {
            let x = input(128);
            let expected = vec![x.iter().sum(), x.iter().map(|v| v * v).sum()];
            let y = output(2);
            let launch = launch(1, 128, 16, vec![constant(&x).at(0), y.at(0), bug]);
            Case { device, launch, output: y, expected, bug: 2, counters: None }
        }
        "warp_reverse" => {
            let x = input(64);
            // Reversed in the warp, then the neighbour in the half (t ^ 15) of that.
            let reversed: Vec<f32> = (0..64).map(|t| x[t / 32 * 32 + 31 - t % 32]).collect();
            let expected = (0..64).map(|t| reversed[t ^ 15]).collect();
            let y = output(64);
            let launch = launch(1, 64, 256, vec![constant(&x).at(0), y.at(0), bug]);
            Case { device, launch, output: y, expected, bug: 2, counters: None }
        }
        "hand_over" => {
            let x = input(32);
            let expected = x.iter().rev().copied().collect();
            let y = output(32);
            let launch = launch(1, 64, 128, vec![constant(&x).at(0), y.at(0), bug]);
            Case { device, launch, output: y, expected, bug: 2, counters: None }
        }
        "rounds" => {
            let (blocks, rounds) = (4, 6);
            let (state, barrier) = (zeros("state", blocks * 2), zeros("barrier", 3));
            // Words, not floats: what every block holds after each round is the number of the round.
            let expected = [vec![rounds as u32; blocks], vec![rounds as u32 - 1; blocks]].concat();
            let expected = expected.into_iter().map(f32::from_bits).collect();
            let arguments = vec![state.at(0), barrier.at(0), Argument::I32(rounds), bug];
            let launch = launch(blocks as u32, 64, 0, arguments);
            Case { device, launch, output: state, expected, bug: 3, counters: Some(barrier) }
        }
        "slips" => {
            let x = input(64);
            let y = output(128);
            let scratch = device.allocate("scratch", 256).unwrap();
            let arguments = vec![constant(&x).at(0), y.at(0), scratch.at(0), bug];
            let launch = launch(2, 64, 256, arguments);
            Case { device, launch, output: y, expected: [x.clone(), x].concat(), bug: 3, counters: None }
        }
        _ => unreachable!("{kernel}"),
    }
}

impl Case {
    fn run(&self, bug: i32) -> Result<(), DeviceError> {
        let mut launch = self.launch.clone();
        launch.arguments[self.bug] = Argument::I32(bug);
        // SAFETY: every kernel of exercise.cu stays inside of these buffers unless a mistake is planted, and then the launch is checked.
        unsafe { self.device.launch(&launch) }
    }

    fn emulate(&self, emulation: Emulation) {
        assert!(self.device.emulate(emulation));
    }

    fn check(&self) {
        let found: Vec<u32> = read_floats(&self.output).iter().map(|v| v.to_bits()).collect();
        let expected: Vec<u32> = self.expected.iter().map(|v| v.to_bits()).collect();
        assert_eq!(found, expected, "{}", self.launch.kernel);
    }
}

const CLEAN: [&str; 7] = ["ring_sum", "last_block_sum", "two_sums", "warp_reverse", "hand_over", "rounds", "slips"];

#[test]
fn clean_kernels_are_not_accused_in_any_schedule() {
    for kernel in CLEAN {
        let case = case(kernel);
        for seed in 0..=100 {
            case.emulate(Emulation { seed, ..Emulation::default() });
            if kernel == "rounds" {
                case.output.fill(0).unwrap();
            }
            case.run(0).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            case.check();
        }
    }
}

#[test]
fn unchecked_launches_compute_the_same() {
    for kernel in CLEAN {
        let case = case(kernel);
        case.emulate(Emulation { checked: false, ..Emulation::default() });
        case.run(0).unwrap();
        case.check();
    }
}

/// (kernel, mistake, a kind that must be reported, words that the report must hold).
const PLANTED: [(&str, i32, &str, &[&str]); 34] = [
    ("ring_sum", 1, "RACE(", &["exercise.cu:", "shared memory + "]),
    ("ring_sum", 2, "COPY-IN-FLIGHT", &[]),
    ("ring_sum", 3, "OUT-OF-BOUNDS", &["x + ", "which has 43008"]),
    ("ring_sum", 4, "COPY-NOT-WAITED", &[]),
    ("last_block_sum", 5, "RACE(read-after-write)", &["part + ", "the other access is at exercise.cu:"]),
    ("last_block_sum", 6, "RACE(read-after-write)", &["part + "]),
    ("last_block_sum", 7, "RACE(read-after-write)", &["shared memory + 0"]),
    ("last_block_sum", 8, "STALE-READ", &["part + ", "use ld_cg"]),
    ("last_block_sum", 9, "STALE-READ", &["ld_nc of part"]),
    ("two_sums", 10, "RACE(write-after-read)", &["shared memory + "]),
    ("warp_reverse", 11, "RACE(read-after-write)", &[]),
    ("warp_reverse", 12, "RACE(", &[]),
    ("hand_over", 13, "RACE(", &["shared memory + "]),
    ("hand_over", 14, "DEADLOCK", &["32 threads wait for a barrier at exercise.cu:"]),
    ("rounds", 15, "RACE(", &["state + "]),
    ("rounds", 16, "STALE-READ", &["state + "]),
    ("rounds", 17, "DEADLOCK", &["poll a word that does not change"]),
    ("slips", 20, "BARRIER-AFTER-EXIT", &["32 threads ended"]),
    ("slips", 21, "DIVERGENT-BARRIER", &[]),
    ("slips", 22, "DEADLOCK", &["the other lanes of a warp operation at exercise.cu:"]),
    ("slips", 23, "SHUFFLE-INACTIVE", &["asks lane 20"]),
    ("slips", 24, "OUT-OF-BOUNDS", &["shared memory + 256, of which the block has 256"]),
    ("slips", 25, "UNINITIALISED", &["shared memory + 0"]),
    ("slips", 26, "RACE(write-write)", &["scratch + 0"]),
    ("slips", 27, "MISALIGNED", &["exercise.cu:"]),
    ("slips", 28, "OUT-OF-BOUNDS", &["index 4 of an array"]),
    ("slips", 29, "UNINITIALISED", &["scratch + 0"]),
    ("slips", 30, "WILD-POINTER", &["0x12340"]),
    ("slips", 31, "TRAP", &["thread 5"]),
    ("slips", 32, "WARP-DIVERGENCE", &[]),
    ("slips", 33, "SHIFT", &["shift by 32"]),
    ("slips", 34, "DEADLOCK", &["not cooperative"]),
    ("slips", 35, "WRITE-TO-CONSTANT", &["x + 0"]),
    ("slips", 36, "UNINITIALISED", &["scratch + "]),
];

#[test]
fn every_planted_mistake_is_found_in_the_default_order() {
    let mut missed = Vec::new();
    for (kernel, bug, kind, words) in PLANTED {
        match case(kernel).run(bug) {
            Err(DeviceError::Kernel { report, .. }) => {
                let line = report.lines().find(|l| l.starts_with(kind) && words.iter().all(|w| l.contains(w)));
                if line.is_none() {
                    missed.push(format!("{kernel} {bug}: {kind} {words:?} is not in\n{report}"));
                }
            }
            other => missed.push(format!("{kernel} {bug}: {other:?}")),
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn every_planted_mistake_is_found_in_other_orders() {
    for (kernel, bug, ..) in PLANTED {
        for seed in 1..=4 {
            let case = case(kernel);
            case.emulate(Emulation { seed, ..Emulation::default() });
            assert!(case.run(bug).is_err(), "{kernel} {bug}, seed {seed}");
        }
    }
}

#[test]
fn schedules_are_reproducible() {
    let report = |seed| {
        let case = case("last_block_sum");
        case.emulate(Emulation { seed, ..Emulation::default() });
        case.run(5).unwrap_err().to_string()
    };
    assert_eq!(report(7), report(7));
    assert!((1..20).any(|seed| report(seed) != report(7)));
}

#[test]
fn a_launch_after_an_aborted_one_computes_the_same() {
    for kernel in CLEAN {
        let case = case(kernel);
        // Ended early, in the middle, and late; each leaves other counters, copies and waiting threads behind.
        for abort_after in [3, 40, 200, 450] {
            case.emulate(Emulation { abort_after, ..Emulation::default() });
            if let Err(error) = case.run(0) {
                assert!(error.to_string().contains("ended here on request"), "{error}");
            }
            // A launch that ended early leaves its counters as they were: whoever replays sets them, as a step does before its first kernel.
            case.counters.iter().for_each(|counters| counters.fill(0).unwrap());
            case.emulate(Emulation::default());
            for _ in 0..2 {
                if kernel == "rounds" {
                    case.output.fill(0).unwrap();
                }
                case.run(0).unwrap();
                case.check();
            }
            if let Some(counters) = &case.counters {
                assert!(read_words(counters).iter().all(|&c| c == 0), "{kernel} leaves its counters");
            }
        }
        let mut ended = case.run(0).is_ok();
        case.emulate(Emulation { abort_after: 1, ..Emulation::default() });
        ended &= case.run(0).is_err();
        assert!(ended);
    }
}

#[test]
fn work_is_counted() {
    let case = case("ring_sum");
    case.run(0).unwrap();
    let x = match &case.launch.arguments[0] {
        Argument::Pointer(buffer, _) => buffer.clone(),
        _ => unreachable!(),
    };
    let elements = 3 * 7 * 512;
    assert_eq!(x.traffic(), Some(Traffic { read: elements * 4, written: 0 }));
    assert_eq!(case.output.traffic(), Some(Traffic { read: 0, written: 3 * 4 }));
    let Counts { threads, operations, products, barriers, shared_bytes } = case.device.counts().unwrap();
    assert_eq!((threads, products, barriers, shared_bytes), (3 * 128, 0, 3 * (7 + 2), 6144));
    assert!(operations > elements, "each element is at least loaded: {operations}");
}

#[test]
fn a_product_is_exact_on_integers_in_every_format() {
    let device = device();
    let value = |i: usize, k: usize| ((i * 7 + k * 3) % 13) as f32 - 6.0;
    for is_bf16 in [false, true] {
        let encode = |v: f32| if is_bf16 { bf16::from_f32(v).to_bits() } else { f16::from_f32(v).to_bits() };
        let matrix = |rows: usize, salt: usize| -> Vec<u8> {
            (0..rows * 16).flat_map(|i| encode(value(i / 16 + salt, i % 16)).to_le_bytes()).collect()
        };
        let (a, b) = (device.constant("a", &matrix(16, 0)).unwrap(), device.constant("b", &matrix(8, 5)).unwrap());
        let d = device.allocate("d", 16 * 8 * 4).unwrap();
        let arguments = vec![a.at(0), b.at(0), d.at(0), Argument::I32(is_bf16.into())];
        let kernel = "one_product";
        let launch = Launch { kernel, grid: [1, 1, 1], block: 32, shared_bytes: 768, cooperative: false, arguments };
        // SAFETY: a is [16, 16], b [8, 16] and d [16, 8], as the kernel says.
        unsafe { device.launch(&launch) }.unwrap();
        for (i, found) in read_floats(&d).into_iter().enumerate() {
            let expected: f32 = (0..16).map(|k| value(i / 8, k) * value(i % 8 + 5, k)).sum();
            assert_eq!(found, expected, "bf16 {is_bf16}, element {i}");
        }
        assert_eq!(device.counts().unwrap().products, 1);
    }

    let byte = |i: usize, k: usize| (((i * 31 + k * 17) % 256) as i32 - 128) as i8;
    let matrix =
        |rows: usize, salt: usize| -> Vec<u8> { (0..rows * 32).map(|i| byte(i / 32 + salt, i % 32) as u8).collect() };
    let (a, b) = (device.constant("a", &matrix(16, 0)).unwrap(), device.constant("b", &matrix(8, 9)).unwrap());
    let d = device.allocate("d", 16 * 8 * 4).unwrap();
    d.write(0, &(0..128_i32).flat_map(|i| (i * 1000).to_le_bytes()).collect::<Vec<_>>()).unwrap();
    let arguments = vec![a.at(0), b.at(0), d.at(0)];
    let kernel = "one_product_s8";
    let launch = Launch { kernel, grid: [1, 1, 1], block: 32, shared_bytes: 0, cooperative: false, arguments };
    // SAFETY: a is [16, 32], b [8, 32] and d [16, 8], as the kernel says.
    unsafe { device.launch(&launch) }.unwrap();
    for (i, found) in read_words(&d).into_iter().enumerate() {
        let sum: i32 = (0..32).map(|k| i32::from(byte(i / 8, k)) * i32::from(byte(i % 8 + 9, k))).sum();
        assert_eq!(found as i32, sum + i as i32 * 1000, "element {i}");
    }
}

#[test]
fn a_transposed_load_gives_columns() {
    let device = device();
    // 16-bit value (row, column) = row * 8 + column.
    let x: Vec<u8> = (0..256_u16).flat_map(u16::to_le_bytes).collect();
    let (x, y) = (device.constant("x", &x).unwrap(), device.allocate("y", 512).unwrap());
    let arguments = vec![x.at(0), y.at(0)];
    let kernel = "transpose_load";
    let launch = Launch { kernel, grid: [1, 1, 1], block: 32, shared_bytes: 512, cooperative: false, arguments };
    // SAFETY: both are 32 rows of 16 bytes.
    unsafe { device.launch(&launch) }.unwrap();
    for (i, word) in read_words(&y).into_iter().enumerate() {
        let (lane, matrix) = (i / 4, i % 4);
        let at = |row: usize| (matrix * 64 + row * 8 + lane / 4) as u32;
        assert_eq!(word, at(lane % 4 * 2) | at(lane % 4 * 2 + 1) << 16, "lane {lane}, matrix {matrix}");
    }
}

#[test]
fn launches_that_do_not_fit_are_refused_by_name() {
    let good = case("two_sums");
    let refused = |change: &dyn Fn(&mut Launch)| {
        let mut launch = good.launch.clone();
        change(&mut launch);
        // SAFETY: refused before it runs.
        match unsafe { good.device.launch(&launch) } {
            Err(DeviceError::Launch { launch, reason }) => format!("{launch}: {reason}"),
            other => panic!("{other:?}"),
        }
    };
    assert!(
        refused(&|l| l.kernel = "none")
            .contains("none<<<(1, 1, 1), 128, 16 bytes shared>>>(x[512], y[8], 0): no such kernel")
    );
    assert!(refused(&|l| l.arguments.truncate(2)).contains("other arguments"));
    assert!(refused(&|l| l.arguments[2] = Argument::U64(0)).contains("other arguments"));
    assert!(refused(&|l| l.block = 256).contains("launch bound"));
    assert!(refused(&|l| l.shared_bytes = 100 << 10).contains("at most 101376 bytes"));
    assert!(refused(&|l| l.grid[1] = 0).contains("without threads"));
    let stranger = device().allocate("stranger", 8).unwrap();
    assert!(refused(&|l| l.arguments[1] = stranger.at(0)).contains("stranger belongs to another device"));
    assert!(matches!(good.output.write(4, &[0; 8]), Err(DeviceError::Range { size: 8, offset: 4, bytes: 8, .. })));
}

#[test]
fn a_graph_is_its_launches_in_order() {
    let (first, second) = (case("two_sums"), case("two_sums"));
    let mut launches = vec![first.launch.clone()];
    // The second reads what the first wrote: reuse the first's device and output.
    let y = first.device.allocate("y of y", 8).unwrap();
    let x = first.device.allocate("x of y", 512).unwrap();
    x.fill(0).unwrap();
    let mut next = second.launch;
    next.arguments = vec![x.at(0), y.at(0), Argument::I32(0)];
    launches.push(next);
    // SAFETY: x of y has 128 floats and y of y two.
    let graph = unsafe { first.device.record(launches) }.unwrap();
    assert_eq!(graph.launches(), 2);
    for factor in [1.0, 2.0] {
        x.write(0, &floats(&[factor; 128])).unwrap();
        graph.replay().unwrap();
        first.check();
        assert_eq!(read_floats(&y), [128.0 * factor, 128.0 * factor * factor]);
    }
}
