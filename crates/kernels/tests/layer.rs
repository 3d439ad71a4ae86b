//! A pass through decoder layers as `step::layer` plans it, against the formulas in f64; and against itself, row by row.

#![cfg(target_arch = "x86_64")]

use half::bf16;
use kernels::{
    cpu::{Data, Matrix},
    device::{Buffer, Device, Emulation},
    gemm::{GemmError, Linear, Scratch},
    layout::Tiles,
    step::{
        Own, Rows, StepError,
        attention::AttentionScratch,
        kv::{KvCache, KvShape},
        layer::{Activations, Layer, Norms, Pass, Surroundings, Widths},
        rows::Rotations,
    },
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

const HIDDEN: usize = 96;
const INNER: usize = 80;
const SIZE: usize = 32;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const LAYERS: usize = 3;
const DIMS: [usize; 2] = [32, 48];
const CONTEXT: usize = 40;
const EPS: f32 = 1e-6;

/// A matrix of a layer, or the weight of a norm: what it holds, and where it is.
struct Weights {
    values: Vec<f64>,
    linear: Option<Linear>,
    buffers: Vec<Buffer>,
}

/// Three layers on a device.
struct Model {
    device: Device,
    layers: Vec<Vec<Weights>>,
    last_norm: Weights,
    scratch: Scratch,
    rotations: [Rotations; 2],
    frequencies: [Vec<f32>; 2],
}

/// Rows of inputs: the stream and the per-layer inputs.
struct Inputs {
    stream: Vec<f32>,
    per_layer: Vec<f32>,
}

// A layer's weights by number: matrices, the five norms over the stream, those of a head.
const QKV: usize = 0;
const O: usize = 1;
const GATE: usize = 2;
const UP: usize = 3;
const DOWN: usize = 4;
const PL_GATE: usize = 5;
const PL_PROJECTION: usize = 6;
const NORMS: usize = 7;
const QUERY: usize = 12;
const KEY: usize = 13;
const SCALARS: [f32; LAYERS] = [0.75, 1.25, 0.5];

/// Layer 0 slides, layers 1 and 2 see everything; layer 2 reads the keys of layer 1.
fn kind(layer: usize) -> usize {
    usize::from(layer > 0)
}
fn has_keys(layer: usize) -> bool {
    layer < 2
}
const WINDOW: usize = 3;

fn floats(random: &mut StdRng, n: usize, low: f32, high: f32) -> Vec<f32> {
    (0..n).map(|_| bf16::from_f32(random.random_range(low..high)).to_f32()).collect()
}

fn bytes16(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect()
}

fn bytes32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v.into()).collect()
}

impl Model {
    fn new() -> Model {
        let device = Device::emulated(Emulation { multiprocessors: 3, ..Emulation::default() }).unwrap();
        let mut random = StdRng::seed_from_u64(5);
        let mut layers = Vec::new();
        for layer in 0..LAYERS {
            let dim = DIMS[kind(layer)];
            let q = (HEADS + if has_keys(layer) { 2 * KV_HEADS } else { 0 }) * dim;
            let shapes = [
                (q, HIDDEN),
                (HIDDEN, HEADS * dim),
                (INNER, HIDDEN),
                (INNER, HIDDEN),
                (HIDDEN, INNER),
                (SIZE, HIDDEN),
                (HIDDEN, SIZE),
            ];
            let drawn = shapes.map(|(n, k)| floats(&mut random, n * k, -0.3, 0.3));
            let packed = |i: usize| (bytes16(&drawn[i]), shapes[i]);
            let tiles = |i: usize| {
                let (bytes, (n, k)) = packed(i);
                Tiles::pack(Matrix::new(n, k, Data::Bf16(&bytes[..])).unwrap()).unwrap()
            };
            let mut weights = Vec::new();
            for (i, values) in drawn.iter().enumerate() {
                let linear = match i {
                    UP => None,
                    GATE => {
                        let ((gate, (n, k)), (up, _)) = (packed(GATE), packed(UP));
                        let view = |b| Matrix::new(n, k, Data::Bf16(b)).unwrap();
                        Some(Tiles::gated(view(&gate[..]), view(&up[..])).unwrap())
                    }
                    _ => Some(tiles(i)),
                };
                let linear = linear.map(|tiles| Linear::new(&device, "w", &tiles).unwrap());
                weights.push(Weights { values: wide(values), linear, buffers: Vec::new() });
            }
            let mut norm = |width: usize| Model::norm(&device, &mut random, width);
            weights.extend((0..5).map(|_| norm(HIDDEN)));
            weights.extend((0..2).map(|_| norm(dim)));
            layers.push(weights);
        }
        let last_norm = Model::norm(&device, &mut random, HIDDEN);
        let linears = layers.iter().flatten().filter_map(|w| w.linear.as_ref());
        let scratch = Scratch::new(&device, linears).unwrap();
        let frequencies = DIMS.map(|dim| {
            let all = |m: usize| if m < dim / 3 { 100f64.powf(-2.0 * m as f64 / dim as f64) as f32 } else { 0.0 };
            (0..dim / 2).map(all).collect::<Vec<_>>()
        });
        let rotations = [0, 1].map(|i| Rotations::new(&device, &frequencies[i], CONTEXT + 16).unwrap());
        Model { device, layers, last_norm, scratch, rotations, frequencies }
    }

    /// A norm's weight in bf16 and in f32.
    fn norm(device: &Device, random: &mut StdRng, width: usize) -> Weights {
        let values = floats(random, width, 0.5, 1.5);
        let buffers = [bytes16(&values), bytes32(&values)].map(|b| device.constant("norm", &b).unwrap());
        Weights { values: wide(&values), linear: None, buffers: buffers.to_vec() }
    }

    fn layer(&self, number: usize) -> Layer<'_> {
        let w = &self.layers[number];
        let linear = |i: usize| w[i].linear.as_ref().unwrap();
        let norm = |i: usize| &w[NORMS + i].buffers[0];
        Layer {
            number,
            qkv: linear(QKV),
            o: linear(O),
            gate_up: linear(GATE),
            down: linear(DOWN),
            per_layer_gate: linear(PL_GATE),
            per_layer_projection: linear(PL_PROJECTION),
            norms: Norms {
                input: norm(0),
                after_attention: norm(1),
                before_mlp: norm(2),
                after_mlp: norm(3),
                after_per_layer: norm(4),
            },
            query_weight: &w[QUERY].buffers[1],
            key_weight: has_keys(number).then_some(&w[KEY].buffers[1]),
            rotations: &self.rotations[kind(number)],
            heads: HEADS,
            kv_layer: kind(number),
            scalar: SCALARS[number],
        }
    }

    /// What a pass needs beside the layers.
    fn with<T>(&self, rows: usize, use_it: impl FnOnce(Surroundings<'_>) -> T) -> T {
        let shape = |i: usize| KvShape { kv_heads: KV_HEADS, head_dim: DIMS[i], window: [Some(WINDOW), None][i] };
        let shapes = [shape(0), shape(1)];
        let kv = KvCache::new(&self.device, &shapes, CONTEXT).unwrap();
        kv.buffer().fill(0xff).unwrap();
        let attention = AttentionScratch::new(&self.device, HEADS, &shapes, CONTEXT).unwrap();
        let widths = Widths {
            hidden: HIDDEN,
            projected: (HEADS + 2 * KV_HEADS) * DIMS[1],
            attended: HEADS * DIMS[1],
            inner: INNER,
            per_layer: SIZE,
        };
        let activations = Activations::new(&self.device, widths).unwrap();
        let per_layer = self.device.allocate("per-layer inputs", 16 * LAYERS * SIZE * 4).unwrap();
        let table = Rows::new(&self.device).unwrap();
        use_it(Surroundings {
            device: &self.device,
            activations: &activations,
            scratch: &self.scratch,
            attention: &attention,
            kv: &kv,
            table: &table,
            per_layer: &per_layer,
            layers: LAYERS,
            rows,
            eps: EPS,
        })
    }

    /// Hidden states of the positions from 0 on, `chunk` rows a pass, as bf16 bits.
    fn pass(&self, inputs: &Inputs, chunk: usize) -> Vec<u16> {
        let rows = inputs.stream.len() / HIDDEN;
        self.with(chunk, |with| {
            let mut found = Vec::new();
            for begin in (0..rows).step_by(chunk) {
                let count = chunk.min(rows - begin);
                let with = Surroundings { rows: count, ..with };
                let (a, width) = (with.activations, LAYERS * SIZE);
                a.stream().write(0, &bytes32(&inputs.stream[begin * HIDDEN..(begin + count) * HIDDEN])).unwrap();
                with.per_layer.write(0, &bytes32(&inputs.per_layer[begin * width..(begin + count) * width])).unwrap();
                with.table.set(&(begin..begin + count).map(|p| (p, Own::Cached)).collect::<Vec<_>>()).unwrap();
                let mut pass = Pass::new(with).unwrap();
                let mut planned = Vec::new();
                for layer in 0..LAYERS {
                    let launches = pass.layer(&self.layer(layer)).unwrap();
                    assert_eq!(launches.len(), 7);
                    planned.extend(launches);
                }
                let last = &self.layers[LAYERS - 1][NORMS + 4].buffers[1];
                planned.push(pass.end(last, &self.last_norm.buffers[1]).unwrap());
                for step in &planned {
                    // SAFETY: typed launches.
                    unsafe { self.device.launch(&step.launch) }.unwrap_or_else(|e| panic!("{}: {e}", step.op));
                }
                let mut bytes = vec![0; count * HIDDEN * 2];
                a.rounded().read(0, &mut bytes).unwrap();
                found.extend(bytes.as_chunks::<2>().0.iter().map(|&b| u16::from_le_bytes(b)));
            }
            found
        })
    }

    /// The same by the formulas.
    fn reference(&self, inputs: &Inputs) -> Vec<f64> {
        let rows = inputs.stream.len() / HIDDEN;
        let mut stream: Vec<Vec<f64>> = inputs.stream.chunks_exact(HIDDEN).map(wide).collect();
        let mut keys: [Vec<Vec<f64>>; 2] = [Vec::new(), Vec::new()];
        let mut values = keys.clone();
        for (number, w) in self.layers.iter().enumerate() {
            let (kind, dim) = (kind(number), DIMS[kind(number)]);
            let add = |stream: &mut [Vec<f64>], added: Vec<Vec<f64>>, norm: usize, scalar: f64| {
                for (row, added) in stream.iter_mut().zip(added) {
                    let normed = rms(&added, Some(&w[NORMS + norm].values));
                    row.iter_mut().zip(normed).for_each(|(x, a)| *x = (*x + a) * scalar);
                }
            };
            let product =
                |rows: &[Vec<f64>], i: usize| -> Vec<Vec<f64>> { rows.iter().map(|x| dot(&w[i].values, x)).collect() };
            let normed: Vec<Vec<f64>> = stream.iter().map(|x| rms(x, Some(&w[NORMS].values))).collect();
            let projected = product(&normed, QKV);
            let head = |row: usize, h: usize| &projected[row][h * dim..(h + 1) * dim];
            let turned = |x: Vec<f64>, position: usize| turn(&x, position, &self.frequencies[kind]);
            if has_keys(number) {
                let of = |first: usize, row: usize, weight: Option<&[f64]>| -> Vec<f64> {
                    (first..first + KV_HEADS)
                        .flat_map(|h| {
                            let x = rms(head(row, h), weight);
                            if weight.is_some() { turned(x, row) } else { x }
                        })
                        .collect()
                };
                keys[kind] = (0..rows).map(|r| of(HEADS, r, Some(&w[KEY].values))).collect();
                values[kind] = (0..rows).map(|r| of(HEADS + KV_HEADS, r, None)).collect();
            }
            let attended = (0..rows).map(|row| {
                let of_head = |h: usize| -> Vec<f64> {
                    let query = turned(rms(head(row, h), Some(&w[QUERY].values)), row);
                    let at = h / (HEADS / KV_HEADS) * dim;
                    let low = if kind == 0 { (row + 1).saturating_sub(WINDOW) } else { 0 };
                    let score = |p: usize| query.iter().zip(&keys[kind][p][at..]).map(|(q, k)| q * k).sum::<f64>();
                    let scores: Vec<f64> = (low..=row).map(score).collect();
                    let top = scores.iter().copied().fold(f64::MIN, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                    let all: f64 = weights.iter().sum();
                    (0..dim)
                        .map(|i| weights.iter().zip(low..).map(|(w, p)| w * values[kind][p][at + i]).sum::<f64>() / all)
                        .collect()
                };
                (0..HEADS).flat_map(of_head).collect()
            });
            let attended: Vec<Vec<f64>> = attended.collect();
            add(&mut stream, product(&attended, O), 1, 1.0);
            let normed: Vec<Vec<f64>> = stream.iter().map(|x| rms(x, Some(&w[NORMS + 2].values))).collect();
            let (gate, up) = (product(&normed, GATE), product(&normed, UP));
            let inner: Vec<Vec<f64>> =
                gate.iter().zip(&up).map(|(g, u)| g.iter().zip(u).map(|(g, u)| gelu(*g) * u).collect()).collect();
            add(&mut stream, product(&inner, DOWN), 3, 1.0);
            let middle = product(&stream, PL_GATE);
            let factor = |row: usize, i: usize| f64::from(inputs.per_layer[(row * LAYERS + number) * SIZE + i]);
            let middle: Vec<Vec<f64>> = (0..rows)
                .map(|row| middle[row].iter().enumerate().map(|(i, y)| gelu(*y) * factor(row, i)).collect())
                .collect();
            add(&mut stream, product(&middle, PL_PROJECTION), 4, SCALARS[number].into());
        }
        stream.iter().flat_map(|x| rms(x, Some(&self.last_norm.values))).collect()
    }
}

fn dot(matrix: &[f64], x: &[f64]) -> Vec<f64> {
    matrix.chunks_exact(x.len()).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn rms(x: &[f64], weight: Option<&[f64]>) -> Vec<f64> {
    let scale = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + f64::from(EPS)).sqrt().recip();
    x.iter().enumerate().map(|(i, v)| v * scale * weight.map_or(1.0, |w| w[i])).collect()
}

fn turn(head: &[f64], position: usize, frequencies: &[f32]) -> Vec<f64> {
    let (low, high) = head.split_at(head.len() / 2);
    let turns: Vec<(f64, f64)> = frequencies.iter().map(|f| f64::from(position as f32 * f).sin_cos()).collect();
    let mut out: Vec<f64> = (0..low.len()).map(|m| low[m] * turns[m].1 - high[m] * turns[m].0).collect();
    out.extend((0..low.len()).map(|m| high[m] * turns[m].1 + low[m] * turns[m].0));
    out
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + (0.7978845608028654 * (x + 0.044715 * x * x * x)).tanh())
}

fn inputs(rows: usize) -> Inputs {
    let mut random = StdRng::seed_from_u64(9);
    Inputs {
        stream: floats(&mut random, rows * HIDDEN, -2.0, 2.0),
        per_layer: floats(&mut random, rows * LAYERS * SIZE, -2.0, 2.0),
    }
}

#[test]
fn a_pass_computes_what_the_formulas_say() {
    let model = Model::new();
    let inputs = inputs(14);
    let found: Vec<f64> = model.pass(&inputs, 14).into_iter().map(|v| bf16::from_bits(v).into()).collect();
    let expected = model.reference(&inputs);
    // Relative to the hidden states' size, which is 1: bf16 operands, and the noise of three layers of them.
    let errors = found.iter().zip(&expected).map(|(f, e)| (f - e).powi(2));
    let error = (errors.sum::<f64>() / expected.len() as f64).sqrt();
    assert!(error < 0.02, "{error}");
    // What a wrong order of the norms, or of the layers' inputs, would cost, to see that the bound can fail.
    let mut other = Inputs { stream: inputs.stream.clone(), per_layer: inputs.per_layer.clone() };
    other.per_layer.rotate_left(SIZE);
    let wrong = model.reference(&other);
    let errors = found.iter().zip(&wrong).map(|(f, e)| (f - e).powi(2));
    let wrong = (errors.sum::<f64>() / expected.len() as f64).sqrt();
    assert!(wrong > 0.1, "another layer's inputs would make no difference: {wrong}");
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    let model = Model::new();
    let inputs = inputs(14);
    let together = model.pass(&inputs, 14);
    for chunk in [1, 3, 9] {
        assert!(model.pass(&inputs, chunk) == together, "{chunk} rows a pass");
    }
}

#[test]
fn passes_that_cannot_be_are_refused() {
    let model = Model::new();
    model.with(17, |with| assert!(matches!(Pass::new(with), Err(StepError::Shape { what: "rows", .. }))));
    model.with(2, |with| {
        let norm = &model.last_norm.buffers[1];
        let empty = Pass::new(with).unwrap().end(norm, norm);
        assert!(matches!(empty, Err(StepError::Shape { what: "layers of the pass", .. })));
        let beyond = Layer { number: LAYERS, ..model.layer(0) };
        let error = Pass::new(with).unwrap().layer(&beyond).err();
        assert!(matches!(error, Some(GemmError::Step(StepError::Shape { what: "number of the layer", .. }))));
        let other = Layer { kv_layer: 1, ..model.layer(0) };
        let error = Pass::new(with).unwrap().layer(&other).err();
        assert!(matches!(error, Some(GemmError::Step(StepError::Shape { what: "channels of the heads", .. }))));
    });
}
