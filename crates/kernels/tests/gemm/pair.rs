//! Two products in one cooperative launch: the bits of two launches.

use half::bf16;
use kernels::{
    device::{Buffer, Device, Emulation, Launch},
    gemm::{Delta, GemmError, Linear, Pair, Scratch, Stream},
    layout::{Format, Tiles},
    step::StepError,
};
use rand::RngExt;

use crate::case::{Weights, emulation, random, words};

const EPS: f32 = 1e-6;

/// A layer's per-layer gate and projection.
struct PerLayer {
    device: Device,
    first: Linear,
    second: Linear,
    scratch: Scratch,
    stream: Buffer,
    delta: Buffer,
    delta_squares: Buffer,
    norm: Buffer,
    factor: Buffer,
}

/// What they leave, as bits: the new stream, the middle, the product and its sums of squares.
type Found = [Vec<u32>; 4];

impl PerLayer {
    fn new(format: Format, group: Option<usize>, hidden: usize, inner: usize) -> PerLayer {
        let device = Device::emulated(emulation(0)).unwrap();
        let linear = |name, n, k: usize| {
            let weights = Weights::random(format, n, k, group.unwrap_or(k));
            Linear::new(&device, name, &Tiles::pack(weights.matrix()).unwrap()).unwrap()
        };
        let (first, second) = (linear("gate", inner, hidden), linear("projection", hidden, inner));
        let scratch = Scratch::new(&device, [&first, &second]).unwrap();
        let mut random = random(hidden + inner);
        let mut floats = |name: &str, n: usize, low: f32| {
            let bytes: Vec<u8> = (0..n).flat_map(|_| random.random_range(low..2.0f32).to_le_bytes()).collect();
            device.constant(name, &bytes).unwrap()
        };
        let norm: Vec<u8> = (0..hidden).flat_map(|i| bf16::from_f32(0.5 + i as f32 / 999.0).to_le_bytes()).collect();
        PerLayer {
            stream: floats("stream", 16 * hidden, -2.0),
            delta: floats("delta", 16 * hidden, -2.0),
            delta_squares: floats("squares", 16 * hidden.div_ceil(64), 0.5),
            factor: floats("factor", 16 * (inner + 48), -2.0),
            norm: device.constant("norm", &norm).unwrap(),
            first,
            second,
            scratch,
            device,
        }
    }

    /// Plans with buffers of its own, and what they hold after `run`.
    fn with(&self, rows: usize, run: impl FnOnce(Pair<'_>) -> Result<(), GemmError>) -> Result<Found, GemmError> {
        let (inner, hidden) = (self.first.channels(), self.second.channels());
        let room = |name, bytes| self.device.allocate(name, bytes).unwrap();
        let (out, middle) = (room("out", rows * hidden * 4), room("middle", rows * inner * 2));
        let (y, squares) = (room("y", rows * hidden * 4), room("squares", rows * hidden.div_ceil(64) * 4));
        let delta = Delta { y: &self.delta, squares: &self.delta_squares, norm: &self.norm, scalar: 0.75 };
        let stream = Stream { stream: &self.stream, delta: Some(delta), norm: None, eps: EPS, out: Some(&out) };
        let (first, second, factor) = (&self.first, &self.second, &self.factor);
        let (middle, y, squares) = (&middle, &y, &squares);
        run(Pair { first, second, stream, factor, offset: 16, stride: inner + 48, middle, y, squares })?;
        Ok([&out, middle, y, squares].map(words))
    }

    fn launch(&self, launch: &Launch) -> Result<(), GemmError> {
        // SAFETY: what the library planned; a planted mistake is an error of the emulator.
        Ok(unsafe { self.device.launch(launch) }?)
    }

    fn one(&self, rows: usize) -> Result<Found, GemmError> {
        self.with(rows, |pair| self.launch(&pair.launch(rows, &self.scratch)?))
    }

    fn two(&self, rows: usize) -> Found {
        let both = |pair: Pair<'_>| pair.launches(rows, &self.scratch)?.iter().try_for_each(|l| self.launch(l));
        self.with(rows, both).unwrap()
    }
}

/// One segment and several, padding in both directions, and nano's sizes.
fn layers() -> Vec<PerLayer> {
    vec![
        PerLayer::new(Format::Int4, Some(128), 1280, 256),
        PerLayer::new(Format::Int3, Some(64), 272, 80),
        PerLayer::new(Format::Int2, None, 512, 64),
        PerLayer::new(Format::Int8, Some(32), 336, 48),
        PerLayer::new(Format::Bf16, None, 128, 16),
    ]
}

#[test]
fn one_launch_has_the_bits_of_two_for_any_number_of_rows() {
    for layer in layers() {
        for rows in 1..=16 {
            let (one, two) = (layer.one(rows).unwrap(), layer.two(rows));
            assert!(one == two, "{}, {rows} rows", layer.first.channels());
            assert!(two.iter().all(|words| words.iter().any(|&w| w != 0)));
        }
    }
}

#[test]
fn any_grid_gives_the_same_bits_in_any_schedule() {
    for layer in layers() {
        let expected = layer.two(11);
        for (i, multiprocessors) in [1, 7, 80].into_iter().enumerate() {
            for seed in [0, 3 + i as u64, 8 + i as u64] {
                layer.device.emulate(Emulation { multiprocessors, ..emulation(seed) });
                assert!(layer.one(11).unwrap() == expected, "{multiprocessors} blocks, schedule {seed}");
            }
        }
    }
}

#[test]
fn weights_of_both_are_read_once() {
    let layer = PerLayer::new(Format::Int4, Some(128), 2560, 256);
    layer.one(8).unwrap();
    for linear in [&layer.first, &layer.second] {
        let [weights, scales] = linear.buffers().map(|b| (b.traffic().unwrap().read, b.bytes() as u64));
        assert_eq!((weights.0, scales.0), (weights.1, scales.1));
    }
}

#[test]
fn a_pair_after_an_aborted_one_is_right_once_the_counters_are_reset() {
    let layer = PerLayer::new(Format::Int4, Some(128), 512, 256);
    layer.device.emulate(Emulation { multiprocessors: 4, ..emulation(0) });
    let expected = layer.two(5);
    let mut late = false;
    for abort_after in [10, 40_000, 60_000, 80_000] {
        layer.device.emulate(Emulation { multiprocessors: 4, abort_after, ..emulation(0) });
        let ended = layer.one(5).err().map(|error| error.to_string());
        layer.device.emulate(Emulation { multiprocessors: 4, ..emulation(0) });
        if let Some(error) = ended {
            assert!(error.contains("ended here on request"), "{error}");
            late |= !matches!(layer.one(5), Ok(found) if found == expected);
        }
        layer.scratch.reset().unwrap();
        assert!(layer.one(5).unwrap() == expected);
        assert!(layer.one(5).unwrap() == expected, "the barrier stands as it stood");
    }
    assert!(late, "no launch ended with blocks at the barrier or columns half counted");
}

#[test]
fn a_pair_without_its_barrier_is_found() {
    let layer = PerLayer::new(Format::Int4, Some(128), 256, 256);
    layer.device.emulate(Emulation { multiprocessors: 4, ..emulation(0) });
    let planted = |pair: Pair<'_>| {
        let launch = pair.launch(8, &layer.scratch)?;
        assert_eq!(launch.kernel, "pair_int4_g128_m8");
        layer.launch(&Launch { kernel: "pair_no_barrier", ..launch })
    };
    let error = layer.with(8, planted).unwrap_err().to_string();
    assert!(error.contains("RACE") || error.contains("UNINITIALISED"), "{error}");
}

#[test]
fn pairs_that_are_none_are_refused() {
    let layer = PerLayer::new(Format::Int4, Some(128), 512, 256);
    let other = PerLayer::new(Format::Int4, Some(32), 512, 256);
    let plan = |rows, change: &dyn Fn(&mut Pair<'_>)| {
        let mut found = None;
        let room = layer.with(5, |pair| {
            let mut pair = pair;
            change(&mut pair);
            found = Some(pair.launch(rows, &layer.scratch).map(|_| ()));
            Err(GemmError::Rows { rows: 0 })
        });
        assert!(room.is_err());
        found.unwrap()
    };
    assert!(plan(5, &|_| ()).is_ok());
    assert!(matches!(plan(17, &|_| ()), Err(GemmError::Step(StepError::Shape { what: "rows", .. }))));
    assert!(matches!(plan(6, &|_| ()), Err(GemmError::Short { .. })));
    assert!(plan(5, &|pair| assert!(pair.is_one())).is_ok());
    let mixed = layer.with(5, |pair| {
        let pair = Pair { second: &other.second, ..pair };
        assert!(!pair.is_one());
        pair.launch(5, &layer.scratch).map(|_| ())
    });
    assert!(matches!(mixed, Err(GemmError::Kind { .. })), "groups of 128 and of 32");
    let turned = layer.with(5, |pair| Pair { second: pair.first, ..pair }.launch(5, &layer.scratch).map(|_| ()));
    assert!(matches!(turned, Err(GemmError::Step(StepError::Shape { what: "inputs of the second product", .. }))));
}
