//! Heads that the product's own launch finishes: the bits of a product and a second launch.

use half::bf16;
use kernels::{
    device::{Buffer, Device, Emulation, Launch},
    gemm::{GemmError, Input, Linear, Output, Scratch, Stream},
    layout::{Format, Tiles},
    step::{
        Own, Rows, StepError,
        kv::{KvCache, KvShape, KvStorage},
        rows::{Heads, Rotations},
    },
};
use rand::RngExt;

use crate::case::{Weights, emulation, random, words};

const EPS: f32 = 1e-6;
const CONTEXT: usize = 64;

/// A layer's queries, keys and values as one matrix, and what becomes of them.
pub struct Attending {
    pub device: Device,
    linear: Linear,
    pub scratch: Scratch,
    stream: Buffer,
    norm: Buffer,
    weights: [Buffer; 2],
    rotations: Rotations,
    shape: KvShape,
    storage: KvStorage,
    heads: usize,
    own: bool,
}

/// What a layer leaves, as bits: products, queries, keys and values.
#[derive(Debug, PartialEq, Clone)]
pub struct Found {
    projected: Vec<u32>,
    queries: Vec<u32>,
    kv: Vec<u32>,
}

impl Attending {
    /// `heads` query heads of `dim`, and `kv_heads` of keys and values where the layer has them.
    pub fn new(
        format: Format,
        group: Option<usize>,
        k: usize,
        dim: usize,
        (heads, kv_heads, own): (usize, usize, bool),
    ) -> Attending {
        let device = Device::emulated(emulation(0)).unwrap();
        let n = (heads + if own { 2 * kv_heads } else { 0 }) * dim;
        let weights = Weights::random(format, n, k, group.unwrap_or(k));
        let linear = Linear::new(&device, "qkv", &Tiles::pack(weights.matrix()).unwrap()).unwrap();
        let scratch = Scratch::new(&device, [&linear]).unwrap();
        let mut random = random(n + k + dim);
        let mut floats = |name: &str, n: usize, low: f32| {
            let bytes: Vec<u8> = (0..n).flat_map(|_| random.random_range(low..2.0f32).to_le_bytes()).collect();
            device.constant(name, &bytes).unwrap()
        };
        let (stream, weights) =
            (floats("stream", 16 * k, -2.0), [floats("q norm", dim, 0.5), floats("k norm", dim, 0.5)]);
        let norm: Vec<u8> = (0..k).flat_map(|i| bf16::from_f32(0.5 + i as f32 / k as f32).to_le_bytes()).collect();
        let norm = device.constant("norm", &norm).unwrap();
        // A quarter of the pairs does not turn.
        let frequency =
            |m: usize| if m < dim / 2 - dim / 8 { 1e4f64.powf(-2.0 * m as f64 / dim as f64) as f32 } else { 0.0 };
        let frequencies: Vec<f32> = (0..dim / 2).map(frequency).collect();
        let rotations = Rotations::new(&device, &frequencies, CONTEXT + 16).unwrap();
        let shape = KvShape { kv_heads, head_dim: dim, window: None };
        let storage = KvStorage::Bf16;
        Attending { device, linear, scratch, stream, norm, weights, rotations, shape, storage, heads, own }
    }

    fn cached_as(self, storage: KvStorage) -> Attending {
        Attending { storage, ..self }
    }

    /// One launch or two, of which the first runs as `with` has changed it.
    pub fn run(&self, rows: usize, fused: bool, with: impl Fn(Launch) -> Launch) -> Result<Found, GemmError> {
        let (device, n, dim) = (&self.device, self.linear.channels(), self.shape.head_dim);
        let kv = KvCache::with_storage(device, &[self.shape], CONTEXT, self.storage)?;
        kv.buffer().fill(0)?;
        // Eleven rows of the chain, then branches, each in a side slot of its own.
        let own = |row: usize| (CONTEXT - 1 + row % 11, if row < 11 { Own::Cached } else { Own::Side(row * 5 % 16) });
        let table = Rows::new(device)?;
        table.set(&(0..rows).map(own).collect::<Vec<_>>())?;
        let projected = device.allocate("projected", rows * n * 4)?;
        let queries = device.allocate("queries", rows * self.heads * dim * 2)?;
        let heads = Heads {
            projected: &projected,
            query_weight: &self.weights[0],
            key_weight: self.own.then_some(&self.weights[1]),
            rotations: &self.rotations,
            heads: self.heads,
            kv: &kv,
            layer: 0,
            table: &table,
            rows,
            queries: &queries,
            eps: EPS,
        };
        let output = if fused { Output::Heads(heads) } else { Output::Plain(&projected) };
        let launch = with(self.linear.launch(self.input(), rows, output, &self.scratch)?);
        // SAFETY: what the library planned; a planted mistake is an error of the emulator.
        unsafe { device.launch(&launch) }?;
        if !fused {
            // SAFETY: as above.
            unsafe { device.launch(&heads.launch()?) }?;
        } else {
            let written = kv.buffer().traffic().unwrap().written as usize;
            let position = match self.storage {
                KvStorage::Bf16 => self.shape.width() * 2,
                KvStorage::Int8 => self.shape.width() + self.shape.kv_heads * 4,
            };
            let expected = if self.own { rows * 2 * position } else { 0 };
            assert_eq!(written, expected, "each row's key and value is written once, and nothing else");
        }
        Ok(Found { projected: words(&projected), queries: words(&queries), kv: words(kv.buffer()) })
    }

    fn input(&self) -> Input<'_> {
        Input::Stream(Stream { stream: &self.stream, delta: None, norm: Some(&self.norm), eps: EPS, out: None })
    }

    fn one(&self, rows: usize) -> Result<Found, GemmError> {
        self.run(rows, true, |launch| launch)
    }

    fn two(&self, rows: usize) -> Found {
        self.run(rows, false, |launch| launch).unwrap()
    }
}

/// Heads shorter than a column and longer, that begin inside of one and with one; one segment and several; the last without keys.
fn layers() -> Vec<Attending> {
    vec![
        Attending::new(Format::Int4, Some(128), 528, 16, (5, 2, true)),
        Attending::new(Format::Bf16, None, 128, 32, (4, 2, true)),
        Attending::new(Format::Int3, Some(64), 272, 48, (3, 1, true)),
        Attending::new(Format::Bf16, None, 128, 64, (4, 1, true)),
        Attending::new(Format::Int2, None, 512, 80, (2, 1, true)),
        Attending::new(Format::Int4, Some(32), 512, 256, (2, 1, true)),
        Attending::new(Format::Int8, Some(128), 256, 512, (1, 1, true)),
        Attending::new(Format::Int4, Some(64), 784, 144, (3, 1, false)),
        Attending::new(Format::Int4, Some(128), 272, 80, (2, 2, true)).cached_as(KvStorage::Int8),
    ]
}

#[test]
fn one_launch_has_the_bits_of_two_for_any_number_of_rows() {
    for layer in layers() {
        for rows in 1..=16 {
            if layer.shape.head_dim > 200 && ![1, 3, 8, 9, 16].contains(&rows) {
                continue;
            }
            let (one, two) = (layer.one(rows).unwrap(), layer.two(rows));
            assert!(one == two, "heads of {}, {rows} rows", layer.shape.head_dim);
            assert!(two.queries.iter().all(|&v| v != 0), "every query is there");
        }
    }
}

#[test]
fn any_grid_finishes_the_same_heads_in_any_schedule() {
    for layer in layers() {
        let expected = layer.two(13);
        for (i, multiprocessors) in [1, 7, 80].into_iter().enumerate() {
            for seed in [0, 5 + i as u64, 9 + i as u64] {
                layer.device.emulate(Emulation { multiprocessors, ..emulation(seed) });
                let found = layer.one(13).unwrap();
                assert!(found == expected, "heads of {}, {multiprocessors} blocks, {seed}", layer.shape.head_dim);
            }
        }
    }
}

#[test]
fn heads_after_an_aborted_launch_are_right_once_the_counters_are_reset() {
    let layer = Attending::new(Format::Int4, Some(128), 2560, 96, (2, 1, true));
    let expected = layer.two(16);
    let mut late = false;
    for abort_after in [10, 20_000, 200_000, 280_000, 320_000] {
        layer.device.emulate(Emulation { abort_after, ..emulation(0) });
        let ended = layer.one(16).err().map(|error| error.to_string());
        layer.device.emulate(emulation(0));
        if let Some(error) = ended {
            assert!(error.contains("ended here on request"), "{error}");
            late |= !matches!(layer.one(16), Ok(found) if found == expected);
        }
        layer.scratch.reset().unwrap();
        assert!(layer.one(16).unwrap() == expected);
        assert!(layer.one(16).unwrap() == expected, "the counters are zero again");
    }
    assert!(late, "no launch ended between the first counter and the last");
}

#[test]
fn heads_that_do_not_fit_the_product_are_refused() {
    let layer = Attending::new(Format::Bf16, None, 128, 32, (4, 2, true));
    let kv = KvCache::new(&layer.device, &[layer.shape], CONTEXT).unwrap();
    let table = Rows::new(&layer.device).unwrap();
    let room = |bytes| layer.device.allocate("room", bytes).unwrap();
    let (projected, queries) = (room(17 * 8 * 32 * 4), room(17 * 4 * 32 * 2));
    let heads = Heads {
        projected: &projected,
        query_weight: &layer.weights[0],
        key_weight: Some(&layer.weights[1]),
        rotations: &layer.rotations,
        heads: 4,
        kv: &kv,
        layer: 0,
        table: &table,
        rows: 5,
        queries: &queries,
        eps: EPS,
    };
    let plan = |rows, heads| layer.linear.launch(layer.input(), rows, Output::Heads(heads), &layer.scratch);
    let refused = |rows, heads| match plan(rows, heads).err() {
        Some(GemmError::Step(StepError::Shape { what, .. })) => what,
        other => panic!("{other:?}"),
    };
    assert!(plan(5, heads).is_ok());
    assert_eq!(refused(4, heads), "rows of the heads");
    assert_eq!(refused(5, Heads { heads: 3, ..heads }), "channels of the heads");
    assert_eq!(refused(5, Heads { key_weight: None, ..heads }), "channels of the heads");
    assert_eq!(refused(5, Heads { layer: 1, ..heads }), "key/value layer");
    let stream = layer.device.allocate("long", 17 * 128 * 4).unwrap();
    let input = Stream { stream: &stream, delta: None, norm: Some(&layer.norm), eps: EPS, out: None };
    let wide = Output::Heads(Heads { rows: 17, ..heads });
    let error = layer.linear.launch(Input::Stream(input), 17, wide, &layer.scratch).err();
    assert!(
        matches!(error, Some(GemmError::Step(StepError::Shape { what: "rows", .. }))),
        "wide products have two launches"
    );
    let short = room(5 * 8 * 32 * 4 - 1);
    assert!(matches!(plan(5, Heads { projected: &short, ..heads }), Err(GemmError::Step(StepError::Short { .. }))));
}
