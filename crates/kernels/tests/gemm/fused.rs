//! What stands before and behind a product: norms, the residual stream, gates.

use half::bf16;
use kernels::{
    device::{Buffer, Device, Emulation},
    gemm::{Delta, Input, Linear, Operands, Output, Scratch, Stream},
    layout::{Format, Tiles},
};
use rand::RngExt;

use crate::case::{Kind, ROWS, SIXTEEN, Weights, emulation, random, words, worst};

const EPS: f32 = 1e-6;
const SCALAR: f32 = 0.75;

/// Two sublayers: `first` makes what is normed and added to the stream in front of `second`.
struct Layer {
    device: Device,
    first: (Weights, Linear),
    second: (Weights, Linear),
    gated: bool,
    scratch: Scratch,
    kind: Kind,
    x: Vec<f32>,
    stream: Vec<f32>,
    post_norm: Vec<bf16>,
    norm: Vec<bf16>,
    factor: Vec<f32>,
}

/// What the two launches leave, one row after the other, as bits: stream, product, and the product with gates.
#[derive(Debug, PartialEq, Clone)]
struct Found {
    stream: Vec<u32>,
    plain: Vec<u32>,
    operands: Vec<u16>,
}

fn bf16_bytes(values: &[bf16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + (0.7978845608028654 * (x + 0.044715 * x * x * x)).tanh())
}

impl Layer {
    /// From `inputs` to `hidden` to `n`; the second product is gates and ups, or what is scaled by factors.
    fn new(kind: impl Into<Kind>, inputs: usize, hidden: usize, n: usize, group: Option<usize>, gated: bool) -> Layer {
        let (device, kind) = (Device::emulated(emulation(0)).unwrap(), kind.into());
        let mut random = random(inputs + hidden + n);
        let weights = |n, k| Weights::random(kind.0, n, k, group.unwrap_or(k));
        let first = weights(hidden, inputs);
        let second = weights(n, hidden);
        let tiles = if gated {
            // The rows of `second` are in the order of the tiles; as a file has them they are all gates and then all ups.
            let row = |i: usize| i / 8 * 16 + i % 8;
            let pick =
                |add| second.matrix().select_rows::<Vec<u8>>(&(0..n / 2).map(|i| row(i) + add).collect::<Vec<_>>());
            Tiles::gated(pick(0).view(), pick(8).view()).unwrap()
        } else {
            Tiles::pack(second.matrix()).unwrap()
        };
        let on = |name, tiles: &Tiles| Linear::new(&device, name, tiles).unwrap().with_operands(kind.1).unwrap();
        let linears = (on("first", &Tiles::pack(first.matrix()).unwrap()), on("second", &tiles));
        let scratch = Scratch::new(&device, [&linears.0, &linears.1]).unwrap();
        let mut values =
            |n: usize, low: f32, high: f32| -> Vec<f32> { (0..n).map(|_| random.random_range(low..high)).collect() };
        let x = values(ROWS * inputs, -2.0, 2.0).into_iter().map(|v| kind.round(v)).collect();
        let rounded = |v: Vec<f32>| v.into_iter().map(bf16::from_f32).collect();
        Layer {
            kind,
            x,
            stream: values(ROWS * hidden, -3.0, 3.0),
            post_norm: rounded(values(hidden, 0.5, 1.5)),
            norm: rounded(values(hidden, 0.5, 1.5)),
            factor: values(ROWS * (n + 16), -1.0, 1.0),
            first: (first, linears.0),
            second: (second, linears.1),
            gated,
            device,
            scratch,
        }
    }

    fn rows<T: Copy>(all: &[T], width: usize, rows: &[usize]) -> Vec<T> {
        rows.iter().flat_map(|&r| all[r * width..(r + 1) * width].iter().copied()).collect()
    }

    fn run(&self, rows: &[usize]) -> Found {
        let (device, m) = (&self.device, rows.len());
        let (hidden, n) = (self.first.0.n, self.second.0.n);
        let constant = |name, bytes: Vec<u8>| device.constant(name, &bytes).unwrap();
        let room = |name, bytes| device.allocate(name, bytes).unwrap();
        let x = constant("x", self.kind.1.bytes(&Layer::rows(&self.x, self.first.0.k, rows)));
        let stream = constant("stream", f32_bytes(&Layer::rows(&self.stream, hidden, rows)));
        let post_norm = constant("post norm", bf16_bytes(&self.post_norm));
        let norm = constant("norm", bf16_bytes(&self.norm));
        let factor = constant("factor", f32_bytes(&Layer::rows(&self.factor, n + 16, rows)));
        let y = room("delta", m * hidden * 4);
        let squares = room("squares", m * hidden.div_ceil(64) * 4);
        self.first.1.run(self.first.1.rows(&x), m, Output::Squares(&y, &squares), &self.scratch).unwrap();

        let out = room("new stream", m * hidden * 4);
        let delta = Some(Delta { y: &y, squares: &squares, norm: &post_norm, scalar: SCALAR });
        let input = |out| Input::Stream(Stream { stream: &stream, delta, norm: Some(&norm), eps: EPS, out });
        let plain = room("plain", m * n * 4);
        let run = |input, output| self.second.1.run(input, m, output, &self.scratch).unwrap();
        run(input(Some(&out)), Output::Plain(&plain));
        assert_eq!(out.traffic().unwrap().written, (m * hidden * 4) as u64, "the stream is written once");
        let y16 = room("y16", m * n * if self.gated { 1 } else { 2 });
        let scaled = Output::Scaled { y: &y16, operands: self.kind.1, factor: &factor, offset: 16, stride: n + 16 };
        let last = if self.gated { Output::Gated(&y16, self.kind.1) } else { scaled };
        run(input(None), last);
        Found { stream: words(&out), plain: words(&plain), operands: halves(&y16) }
    }

    /// Stream, product and gated product of the first `m` rows, in f64 or as a plain program in f32 with 16-bit operands computes them.
    fn reference(&self, m: usize, exact: bool) -> [Vec<f64>; 3] {
        let round = |v: f64| if exact { v } else { f64::from(v as f32) };
        let operand = |v: f64| if exact { v } else { f64::from(self.kind.round(v as f32)) };
        let product = |x: &[f64], w: &[Vec<f32>]| -> Vec<f64> {
            w.iter().map(|w| x.iter().zip(w).fold(0.0, |sum, (x, w)| round(sum + round(x * f64::from(*w))))).collect()
        };
        let norm = |x: &[f64], w: &[bf16]| -> Vec<f64> {
            let squares = x.iter().fold(0.0, |sum, x| round(sum + round(x * x)));
            let factor = round(1.0 / round(squares / x.len() as f64 + f64::from(EPS)).sqrt());
            x.iter().zip(w).map(|(x, w)| round(round(x * factor) * f64::from(*w))).collect()
        };
        let (first, second) = (self.first.0.rows(), self.second.0.rows());
        let (inputs, hidden, n) = (self.first.0.k, self.first.0.n, self.second.0.n);
        let mut found = [Vec::new(), Vec::new(), Vec::new()];
        for row in 0..m {
            let x: Vec<f64> = self.x[row * inputs..][..inputs].iter().map(|&v| v.into()).collect();
            let delta = norm(&product(&x, &first), &self.post_norm);
            let stream = self.stream[row * hidden..].iter().zip(&delta);
            let stream: Vec<f64> = stream.map(|(&s, d)| round(round(f64::from(s) + d) * f64::from(SCALAR))).collect();
            let operands: Vec<f64> = norm(&stream, &self.norm).into_iter().map(operand).collect();
            let plain = product(&operands, &second);
            found[2].extend((0..if self.gated { n / 2 } else { n }).map(|i| {
                operand(match self.gated {
                    true => round(gelu(plain[i / 8 * 16 + i % 8])) * plain[i / 8 * 16 + i % 8 + 8],
                    false => round(gelu(plain[i])) * f64::from(self.factor[row * (n + 16) + 16 + i]),
                })
            }));
            found[0].extend(stream);
            found[1].extend(plain);
        }
        found
    }
}

fn halves(buffer: &Buffer) -> Vec<u16> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.read(0, &mut bytes).unwrap();
    bytes.as_chunks::<2>().0.iter().map(|&b| u16::from_le_bytes(b)).collect()
}

/// One segment and several, units of both lengths, padding of the last unit and of the last column.
fn layers() -> Vec<Layer> {
    vec![
        Layer::new(Format::Int4, 256, 1280, 96, Some(128), true),
        Layer::new(Format::Int3, 144, 272, 80, Some(64), true),
        Layer::new(Format::Int2, 512, 512, 64, None, false),
        Layer::new(Format::Int8, 128, 336, 48, Some(32), false),
        Layer::new(Format::Bf16, 64, 400, 80, None, true),
        Layer::new(Kind(Format::Int4, Operands::F16), 256, 1280, 96, Some(128), true),
        Layer::new(Kind(Format::Int3, Operands::F16), 144, 272, 80, None, false),
        Layer::new(Kind(Format::Int2, Operands::F16), 256, 272, 64, Some(32), true),
    ]
}

#[test]
fn errors_are_those_of_a_plain_program() {
    for layer in layers() {
        let Found { stream, plain, operands: y16 } = layer.run(&SIXTEEN);
        let float = |v: Vec<u32>| -> Vec<f64> { v.into_iter().map(|v| f32::from_bits(v).into()).collect() };
        let y16 = y16.into_iter().map(|v| f64::from(layer.kind.1.read(v))).collect();
        let (exact, naive) = (layer.reference(16, true), layer.reference(16, false));
        for (i, (what, ours)) in
            [("stream", float(stream)), ("product", float(plain)), ("gated", y16)].into_iter().enumerate()
        {
            assert_eq!(ours.len(), exact[i].len());
            let (ours, plain) = (worst(ours, &exact[i]), worst(naive[i].iter().copied(), &exact[i]));
            assert!(ours <= 2.0 * plain, "{:?} {what}: {ours:e}, a plain program {plain:e}", layer.kind);
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    for layer in layers() {
        let (hidden, n) = (layer.first.0.n, layer.second.0.n);
        let half_width = if layer.gated { n / 2 } else { n };
        let alone: Vec<Found> = (0..20).map(|r| layer.run(&[r])).collect();
        let order: Vec<usize> = (0..20).map(|i| i * 7 % 20).collect();
        for m in [2, 7, 8, 9, 15, 16, 17, 20] {
            let Found { stream, plain, operands } = layer.run(&order[..m]);
            for (place, &row) in order[..m].iter().enumerate() {
                let found = Found {
                    stream: stream[place * hidden..][..hidden].to_vec(),
                    plain: plain[place * n..][..n].to_vec(),
                    operands: operands[place * half_width..][..half_width].to_vec(),
                };
                assert_eq!(found, alone[row], "{:?}, row {row} of {m}", layer.kind);
            }
        }
    }
}

#[test]
fn any_grid_gives_the_same_bits_in_any_schedule() {
    for layer in layers() {
        let expected = layer.run(&SIXTEEN[..11]);
        for (i, multiprocessors) in [1, 7, 72, 80, 132].into_iter().enumerate() {
            layer.device.emulate(Emulation { multiprocessors, ..emulation(1 + i as u64) });
            assert_eq!(layer.run(&SIXTEEN[..11]), expected, "{multiprocessors} multiprocessors");
        }
    }
}

#[test]
fn a_stream_without_a_sum_or_a_norm_is_taken_as_it_is() {
    // One unit and identity-like weights would hide a factor: the product of the plain stream must scale with it exactly.
    let layer = Layer::new(Format::Int4, 256, 512, 64, Some(128), true);
    let run = |factor: f32| {
        let values: Vec<f32> = layer.stream[..4 * 512].iter().map(|v| v * factor).collect();
        let stream = layer.device.constant("stream", &f32_bytes(&values)).unwrap();
        let out = layer.device.allocate("out", 4 * 512 * 4).unwrap();
        let y = layer.device.allocate("y", 4 * 64 * 4).unwrap();
        let input = Stream { stream: &stream, delta: None, norm: None, eps: EPS, out: Some(&out) };
        layer.second.1.run(Input::Stream(input), 4, Output::Plain(&y), &layer.scratch).unwrap();
        assert_eq!(words(&out), values.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
        words(&y).into_iter().map(f32::from_bits).collect::<Vec<_>>()
    };
    let (one, four) = (run(1.0), run(4.0));
    assert!(one.iter().zip(&four).all(|(a, b)| a * 4.0 == *b && *a != 0.0));
}
