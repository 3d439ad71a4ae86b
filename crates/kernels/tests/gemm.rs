//! `gemm_int4.cu` on the emulator: accurate, free of races, and the same bits for a row in any company, order and grid.

#![cfg(target_arch = "x86_64")]

use half::bf16;
use kernels::{
    cpu::{Data, Matrix},
    device::{Buffer, Device, Emulation},
    gemm::{GemmError, Int4Linear, MOST_ROWS, Scratch},
    packing::Bits,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// An int4 matrix, inputs for 16 rows, and both on a device.
struct Case {
    device: Device,
    n: usize,
    k: usize,
    group: usize,
    packed: Vec<u8>,
    scales: Vec<u8>,
    x: Vec<bf16>,
    linear: Int4Linear,
    scratch: Scratch,
}

fn emulation(seed: u64) -> Emulation {
    Emulation { seed, ..Emulation::default() }
}

impl Case {
    fn new(n: usize, k: usize, group: usize) -> Case {
        let mut random = StdRng::seed_from_u64((n * 31 + k * 7 + group) as u64);
        let packed: Vec<u8> = (0..n * k.div_ceil(8) * 4).map(|_| random.random()).collect();
        let scales: Vec<u8> = (0..n * k.div_ceil(group))
            .flat_map(|_| bf16::from_f32(random.random_range(0.005..0.02)).to_le_bytes())
            .collect();
        let x = (0..MOST_ROWS * k).map(|_| bf16::from_f32(random.random_range(-2.0..2.0))).collect();
        Case::with(n, k, group, packed, scales, x)
    }

    fn with(n: usize, k: usize, group: usize, packed: Vec<u8>, scales: Vec<u8>, x: Vec<bf16>) -> Case {
        let device = Device::emulated(emulation(0)).unwrap();
        let data = Data::Packed { bits: Bits::Four, packed: &packed[..], scales: &scales[..], group };
        let linear = Int4Linear::new(&device, "w", Matrix::new(n, k, data).unwrap()).unwrap();
        let scratch = Scratch::new(&device, [&linear]).unwrap();
        Case { device, n, k, group, packed, scales, x, linear, scratch }
    }

    /// The rows of `x` that `rows` names, on the device; and room for as many of y.
    fn buffers(&self, rows: &[usize]) -> (Buffer, Buffer) {
        let bytes: Vec<u8> =
            rows.iter().flat_map(|&r| &self.x[r * self.k..(r + 1) * self.k]).flat_map(|v| v.to_le_bytes()).collect();
        let x = self.device.allocate("x", bytes.len()).unwrap();
        x.write(0, &bytes).unwrap();
        (x, self.device.allocate("y", rows.len() * self.n * 4).unwrap())
    }

    /// y of these rows, as bits.
    fn run(&self, rows: &[usize]) -> Result<Vec<u32>, GemmError> {
        let (x, y) = self.buffers(rows);
        self.linear.run(&x, rows.len(), &y, &self.scratch)?;
        Ok(words(&y))
    }

    /// y of all rows in f64, and as plain f32 sums give it.
    fn references(&self) -> (Vec<f64>, Vec<f32>) {
        let data =
            Data::Packed { bits: Bits::Four, packed: &self.packed[..], scales: &self.scales[..], group: self.group };
        let matrix = Matrix::new(self.n, self.k, data).unwrap();
        let w: Vec<Vec<f32>> = (0..self.n).map(|row| matrix.row(row)).collect();
        let dot = |row: usize, n: usize| self.x[row * self.k..].iter().map(|v| v.to_f32()).zip(&w[n]);
        let places = || (0..MOST_ROWS * self.n).map(|i| (i / self.n, i % self.n));
        let exact = places().map(|(r, n)| dot(r, n).map(|(x, w)| f64::from(x) * f64::from(*w)).sum()).collect();
        let naive = places().map(|(r, n)| dot(r, n).map(|(x, w)| x * w).sum()).collect();
        (exact, naive)
    }
}

fn words(buffer: &Buffer) -> Vec<u32> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.read(0, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect()
}

const ALL: [usize; MOST_ROWS] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// Shapes with fewer units than stages, more, several segments, padding in both directions; every kind of group.
const SHAPES: [(usize, usize, usize); 8] = [
    (64, 256, 128),
    (16, 16, 128),
    (80, 1040, 32),
    (128, 2560, 64),
    (144, 336, 128),
    (64, 2304, 2304),
    (208, 784, 784),
    (64, 512, 32),
];

#[test]
fn errors_are_those_of_plain_sums() {
    for (n, k, group) in SHAPES {
        let case = Case::new(n, k, group);
        let (exact, naive) = case.references();
        let y: Vec<f32> = case.run(&ALL).unwrap().into_iter().map(f32::from_bits).collect();
        let worst = |v: &[f32]| v.iter().zip(&exact).map(|(v, e)| (f64::from(*v) - e).abs()).fold(0.0, f64::max);
        let (ours, plain) = (worst(&y), worst(&naive));
        assert!(ours <= 2.0 * plain, "[{n}, {k}] group {group}: {ours:e}, plain sums {plain:e}");
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    for (n, k, group) in SHAPES {
        let case = Case::new(n, k, group);
        let alone: Vec<Vec<u32>> = ALL.iter().map(|&r| case.run(&[r]).unwrap()).collect();
        let order = [11, 3, 7, 0, 14, 9, 5, 1, 15, 2, 8, 13, 4, 12, 6, 10];
        for m in 1..=MOST_ROWS {
            let together = case.run(&order[..m]).unwrap();
            for (place, &row) in order[..m].iter().enumerate() {
                assert_eq!(together[place * n..][..n], alone[row], "[{n}, {k}] group {group}, row {row} of {m}");
            }
        }
    }
}

#[test]
fn any_grid_gives_the_same_bits_in_any_schedule() {
    for (n, k, group) in [(128, 2560, 64), (208, 784, 784), (80, 1040, 32)] {
        let case = Case::new(n, k, group);
        let expected = case.run(&ALL).unwrap();
        for (i, multiprocessors) in [1, 7, 72, 80, 132].into_iter().enumerate() {
            for seed in [0, 1 + i as u64] {
                case.device.emulate(Emulation { multiprocessors, ..emulation(seed) });
                assert_eq!(case.run(&ALL).unwrap(), expected, "{multiprocessors} multiprocessors, seed {seed}");
            }
        }
        case.device.emulate(Emulation { checked: false, ..emulation(0) });
        assert_eq!(case.run(&ALL).unwrap(), expected, "unchecked");
    }
}

#[test]
fn rows_beyond_the_last_are_not_read_and_not_written() {
    // The buffers are exactly as long as the rows: an access beyond them is an error of the emulator.
    let case = Case::new(80, 272, 32);
    for m in 1..=MOST_ROWS {
        let (x, y) = case.buffers(&ALL[..m]);
        case.linear.run(&x, m, &y, &case.scratch).unwrap();
        assert_eq!(y.traffic().unwrap().written, (m * 80 * 4) as u64);
    }
}

#[test]
fn weights_are_read_once_and_every_product_counted() {
    for (rows, tiles) in [(1, 1), (8, 1), (16, 2)] {
        let (n, k) = (320, 2560);
        let case = Case::new(n, k, 128);
        case.run(&ALL[..rows]).unwrap();
        let [weights, scales] = case.linear.buffers();
        assert_eq!(weights.traffic().unwrap().read, (n * k / 2) as u64, "{rows} rows");
        assert_eq!(scales.traffic().unwrap().read, (n * k / 128 * 2) as u64, "{rows} rows");
        assert_eq!(case.device.counts().unwrap().products, (n / 16 * k / 16 * tiles) as u64, "{rows} rows");
        let partial = case.scratch.partial().traffic().unwrap();
        assert_eq!(partial.read, partial.written, "every segment's sum is added once");
    }
}

#[test]
fn a_product_after_an_aborted_one_is_right_once_the_counters_are_reset() {
    let case = Case::new(64, 2560, 128);
    let expected = case.run(&ALL).unwrap();
    let mut late = false;
    for abort_after in [10, 2_000, 20_000, 60_000] {
        case.device.emulate(Emulation { abort_after, ..emulation(0) });
        assert!(case.run(&ALL).unwrap_err().to_string().contains("ended here on request"));
        case.device.emulate(emulation(0));
        // Without the reset, a launch that got as far as a counter takes the wrong block for the last.
        late |= !matches!(case.run(&ALL), Ok(y) if y == expected);
        case.scratch.reset().unwrap();
        assert_eq!(case.run(&ALL).unwrap(), expected);
        assert_eq!(case.run(&ALL).unwrap(), expected, "the counters are zero again");
    }
    assert!(late, "no abort came between the first counter and the last");
}

#[test]
fn one_flipped_bit_of_weights_scales_or_inputs_shows() {
    let (n, k, group) = (64, 2560, 128);
    let case = Case::new(n, k, group);
    let expected = case.run(&ALL).unwrap();
    let differs = |packed: &[u8], scales: &[u8], x: &[bf16]| -> Vec<usize> {
        let y = Case::with(n, k, group, packed.to_vec(), scales.to_vec(), x.to_vec()).run(&ALL).unwrap();
        (0..y.len()).filter(|&i| y[i] != expected[i]).collect()
    };
    let mut packed = case.packed.clone();
    packed[17 * k / 2 + 900] ^= 0x40;
    let changed = differs(&packed, &case.scales, &case.x);
    assert!(!changed.is_empty() && changed.iter().all(|i| i % n == 17), "{changed:?}");
    let mut scales = case.scales.clone();
    scales[(33 * k / group + 7) * 2] ^= 0x10;
    let changed = differs(&case.packed, &scales, &case.x);
    assert!(!changed.is_empty() && changed.iter().all(|i| i % n == 33), "{changed:?}");
    let mut x = case.x.clone();
    x[5 * k + 2559] = -x[5 * k + 2559];
    let changed = differs(&case.packed, &case.scales, &x);
    assert!(changed.len() > n / 2 && changed.iter().all(|i| i / n == 5), "{changed:?}");
}

#[test]
fn products_that_do_not_fit_are_refused() {
    let case = Case::new(64, 256, 128);
    let (x, y) = case.buffers(&ALL);
    let run = |x: &Buffer, rows, y: &Buffer| case.linear.run(x, rows, y, &case.scratch);
    assert!(matches!(run(&x, 0, &y), Err(GemmError::Rows { rows: 0 })));
    assert!(matches!(run(&x, 17, &y), Err(GemmError::Rows { rows: 17 })));
    let short = case.device.allocate("short", 8 * 256 * 2).unwrap();
    match run(&short, 9, &y) {
        Err(GemmError::Short { name, expected, found, .. }) => {
            assert_eq!((name.as_str(), expected, found), ("short", 9 * 256 * 2, 8 * 256 * 2));
        }
        other => panic!("{other:?}"),
    }
}

/// What the emulator costs at full size; run with `--ignored --nocapture`.
#[test]
#[ignore = "full size, for measuring"]
fn the_largest_matrix_of_e4b() {
    let case = Case::new(10240, 2560, 128);
    let (x, y) = case.buffers(&ALL);
    for checked in [false, true] {
        case.device.emulate(Emulation { checked, ..emulation(0) });
        let begin = std::time::Instant::now();
        case.linear.run(&x, 16, &y, &case.scratch).unwrap();
        let seconds = begin.elapsed().as_secs_f64();
        println!("[10240, 2560] at 16 rows, checked {checked}: {seconds:.2} s, {:?}", case.device.counts().unwrap());
    }
}
