//! What matrix products do beside multiplying, on a device as on the emulator: norms and residual sums in front, gates behind, and heads,
//! best tokens and a second product in the same launch, which have the bits of launches of their own.

use half::bf16;

use super::{
    Check, Failure, Measurement, Subject,
    cases::{bytes16, bytes32, gelu, numbers, numbers16, read16, read32, rms, rows::wide, weights32, words},
    gemm::Weights,
    wrong,
};
use crate::{
    device::{Buffer, Launch},
    gemm::{Delta, Input, Linear, Operands, Output, Pair, Scratch, Stream},
    layout::Format,
    step::{
        MOST_ROWS, Own, Rows,
        decide::Sequence,
        kv::{KvCache, KvShape},
        rows::{Heads, Rotations},
    },
};

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "fused stream",
        what: "norms and residual sums in front of a product and gates behind it are those of f64; a row has its bits in any company",
        timed: false,
        run: stream,
    },
    Check {
        name: "fused heads",
        what: "heads that a product finishes have the bits of a launch of their own",
        timed: false,
        run: heads,
    },
    Check {
        name: "fused choice",
        what: "the best tokens that the head's product keeps are those among its logits",
        timed: false,
        run: choice,
    },
    Check {
        name: "fused pair",
        what: "two products in one cooperative launch have the bits of two launches",
        timed: false,
        run: pair,
    },
];

/// Under every root.
const EPS: f32 = 1e-6;
/// Rows of a launch: one kernel's, and the other's.
const ROWS: [usize; 4] = [1, 8, 9, 16];
/// Half a unit in the last place of a bf16 operand, twice over, and a little for sums.
const OPERAND: f64 = 1.0 / 255.0;

fn run(subject: &Subject, launch: &Launch) -> Result<(), Failure> {
    // SAFETY: what the library planned.
    Ok(unsafe { subject.device.launch(launch) }?)
}

/// Weights of a format on the device.
fn linear(subject: &Subject, weights: &Weights) -> Result<Linear, Failure> {
    Ok(Linear::new(&subject.device, "w", &weights.tiles()?)?)
}

/// Weights of a norm in bf16, from 0.5 to 1.5.
fn norm_weights(seed: u32, width: usize) -> Vec<bf16> {
    numbers(seed, width, 0.5).into_iter().map(|v| bf16::from_f32(1.0 + v)).collect()
}

fn single(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|v| v.to_f32()).collect()
}

/// A residual stream of 16 rows, what is added to it, and the norms.
struct Residual {
    k: usize,
    stream: Vec<f32>,
    delta: Vec<f32>,
    post: Vec<bf16>,
    norm: Vec<bf16>,
}

impl Residual {
    const SCALAR: f32 = 0.75;

    fn new(k: usize) -> Residual {
        let of = |seed| numbers(seed, MOST_ROWS * k, 2.0);
        Residual { k, stream: of(31), delta: of(32), post: norm_weights(33, k), norm: norm_weights(34, k) }
    }

    /// Sums of squares of 64 columns each, as the product before leaves them.
    fn squares(&self, row: usize) -> Vec<f32> {
        self.delta[row * self.k..][..self.k].chunks(64).map(|c| c.iter().map(|v| v * v).sum()).collect()
    }

    /// The new stream of a row and the operands made of it, in f64.
    fn reference(&self, row: usize) -> [Vec<f64>; 2] {
        let of = |all: &[f32]| wide(&all[row * self.k..][..self.k]);
        let added = rms(&of(&self.delta), Some(&single(&self.post)), EPS);
        let sum: Vec<f64> =
            of(&self.stream).iter().zip(&added).map(|(s, d)| (s + d) * f64::from(Residual::SCALAR)).collect();
        let operands = rms(&sum, Some(&single(&self.norm)), EPS);
        [sum, operands]
    }

    /// Rows on the device: stream, delta, squares, both norms.
    fn upload(&self, subject: &Subject, rows: &[usize]) -> Result<[Buffer; 5], Failure> {
        let device = &subject.device;
        let pick = |all: &[f32]| rows.iter().flat_map(|&r| &all[r * self.k..][..self.k]).copied().collect::<Vec<_>>();
        let squares: Vec<f32> = rows.iter().flat_map(|&r| self.squares(r)).collect();
        Ok([
            device.constant("stream", &bytes32(&pick(&self.stream)))?,
            device.constant("delta", &bytes32(&pick(&self.delta)))?,
            device.constant("squares", &bytes32(&squares))?,
            device.constant("post norm", &bytes16(&self.post))?,
            device.constant("norm", &bytes16(&self.norm))?,
        ])
    }
}

/// What a launch leaves of each row: the new stream and squares, as bits, and the product, as a number.
struct Left {
    bits: Vec<Vec<u32>>,
    product: Vec<Vec<f32>>,
}

/// Kinds of output.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Squares,
    Gated,
    Scaled,
}

struct Sublayer<'a> {
    subject: &'a Subject,
    weights: Weights,
    linear: Linear,
    scratch: Scratch,
    residual: Residual,
    factor: Vec<f32>,
}

impl Sublayer<'_> {
    fn run(&self, kind: Kind, rows: &[usize]) -> Result<Left, Failure> {
        let (device, n, m) = (&self.subject.device, self.weights.n, rows.len());
        let [stream, delta, squares, post, norm] = self.residual.upload(self.subject, rows)?;
        let delta = Delta { y: &delta, squares: &squares, norm: &post, scalar: Residual::SCALAR };
        let out = device.allocate("new stream", m * self.residual.k * 4)?;
        let input = Stream { stream: &stream, delta: Some(delta), norm: Some(&norm), eps: EPS, out: Some(&out) };
        let factor: Vec<f32> = rows.iter().flat_map(|&r| &self.factor[r * n..][..n]).copied().collect();
        let factor = weights32(device, &factor)?;
        let (columns, width) = (n.div_ceil(64), if kind == Kind::Gated { n / 2 } else { n });
        let y = device.allocate("y", m * width * if kind == Kind::Squares { 4 } else { 2 })?;
        let y_squares = device.allocate("y squares", m * columns * 4)?;
        y_squares.fill(0)?;
        let output = match kind {
            Kind::Squares => Output::Squares(&y, &y_squares),
            Kind::Gated => Output::Gated(&y, Operands::Bf16),
            Kind::Scaled => Output::Scaled { y: &y, operands: Operands::Bf16, factor: &factor, offset: 0, stride: n },
        };
        self.linear.run(Input::Stream(input), m, output, &self.scratch)?;
        let product = if kind == Kind::Squares { read32(&y)? } else { read16(&y, 0, m * width)? };
        let (out, y_squares) = (words(&out)?, words(&y_squares)?);
        let bits = |row: usize| {
            let own = product[row * width..][..width].iter().map(|v| v.to_bits());
            let stream = out[row * self.residual.k..][..self.residual.k].iter().copied();
            own.chain(stream).chain(y_squares[row * columns..][..columns].iter().copied()).collect()
        };
        Ok(Left {
            bits: (0..m).map(bits).collect(),
            product: product.chunks_exact(width).map(<[f32]>::to_vec).collect(),
        })
    }

    /// The plain product of a row in f64, and by how much rounded operands may move each of its numbers.
    fn reference(&self, row: usize) -> Result<(Vec<f64>, Vec<f64>), Failure> {
        let [_, operands] = self.residual.reference(row);
        let matrix = self.weights.matrix()?;
        let terms = |channel: usize| -> Vec<f64> {
            matrix.row(channel).iter().zip(&operands).map(|(w, x)| f64::from(*w) * x).collect()
        };
        let both = (0..self.weights.n).map(|channel| {
            let terms = terms(channel);
            (terms.iter().sum::<f64>(), terms.iter().map(|t| t.abs()).sum::<f64>() * OPERAND)
        });
        Ok(both.unzip())
    }
}

fn stream(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    for (format, n, k, group) in
        [(Format::Int4, 80, 1040, 32), (Format::Int3, 144, 336, 64), (Format::Bf16, 64, 272, 272)]
    {
        let weights = Weights::new(format, n, k, group);
        let linear = linear(subject, &weights)?;
        let scratch = Scratch::new(&subject.device, [&linear])?;
        let (residual, factor) = (Residual::new(k), numbers(35, MOST_ROWS * n, 1.0));
        let layer = Sublayer { subject, weights, linear, scratch, residual, factor };
        let order: Vec<usize> = (0..MOST_ROWS).map(|i| (i * 7 + 3) % MOST_ROWS).collect();
        for kind in [Kind::Squares, Kind::Gated, Kind::Scaled] {
            let what = format!("{format:?} [{n}, {k}], {kind:?}");
            let together = layer.run(kind, &order)?;
            for (place, &row) in order.iter().enumerate() {
                if subject.properties.emulated && ![0, 5, 15].contains(&row) {
                    continue;
                }
                if together.bits[place] != layer.run(kind, &[row])?.bits[0] {
                    return wrong(format!("{what}: row {row} has other bits among 16 than alone"));
                }
                let (exact, most) = layer.reference(row)?;
                for (i, &found) in together.product[place].iter().enumerate() {
                    let (expected, most) = match kind {
                        Kind::Squares => (exact[i], most[i]),
                        Kind::Gated => {
                            // Gates and ups alternate by eights; here rows of the matrix are in the order of the tiles.
                            let (g, u) = (i / 8 * 16 + i % 8, i / 8 * 16 + 8 + i % 8);
                            // A gate's slope is at most 1.13.
                            let moved =
                                1.13 * most[g] * exact[u].abs() + gelu(exact[g]).abs() * most[u] + most[g] * most[u];
                            (gelu(exact[g]) * exact[u], moved)
                        }
                        Kind::Scaled => {
                            let factor = f64::from(layer.factor[row * n + i]);
                            (gelu(exact[i]) * factor, 1.13 * most[i] * factor.abs())
                        }
                    };
                    let error = (f64::from(found) - expected).abs();
                    if error.is_nan() || error > most + expected.abs() / 200.0 + 1e-5 {
                        return wrong(format!("{what}: row {row}, channel {i} is {found}, in f64 {expected}"));
                    }
                }
            }
        }
        let left = layer.run(Kind::Squares, &[4])?;
        let [sum, _] = layer.residual.reference(4);
        let found = left.bits[0][n..][..k].iter().map(|&b| f64::from(f32::from_bits(b)));
        if let Some((found, expected)) =
            found.zip(&sum).find(|(f, e)| (f - *e).is_nan() || (f - *e).abs() > 1e-5 * e.abs().max(1.0))
        {
            return wrong(format!("{format:?} [{n}, {k}]: the new stream holds {found}, in f64 {expected}"));
        }
    }
    Ok(Vec::new())
}

/// Heads of `dim`, and what they are made of.
struct HeadLayer<'a> {
    subject: &'a Subject,
    linear: Linear,
    scratch: Scratch,
    dim: usize,
    heads: usize,
    kv_heads: usize,
    weights: [Buffer; 2],
    rotations: Rotations,
    x: Vec<bf16>,
}

impl HeadLayer<'_> {
    /// Queries, keys and values of so many rows, in one launch or in two.
    fn run(&self, rows: usize, fused: bool) -> Result<[Vec<u32>; 3], Failure> {
        let (device, n) = (&self.subject.device, self.linear.channels());
        let shape = KvShape { kv_heads: self.kv_heads, head_dim: self.dim, window: None };
        let kv = KvCache::new(device, &[shape], 64)?;
        kv.buffer().fill(0)?;
        let table = Rows::new(device)?;
        // Eleven rows of the chain, then branches, each in a side slot of its own.
        let own = |row: usize| (63 + row % 11, if row < 11 { Own::Cached } else { Own::Side(row * 5 % 16) });
        table.set(&(0..rows).map(own).collect::<Vec<_>>())?;
        let projected = device.allocate("projected", rows * n * 4)?;
        let queries = device.allocate("queries", rows * self.heads * self.dim * 2)?;
        let heads = Heads {
            projected: &projected,
            query_weight: &self.weights[0],
            key_weight: Some(&self.weights[1]),
            rotations: &self.rotations,
            heads: self.heads,
            kv: &kv,
            layer: 0,
            table: &table,
            rows,
            queries: &queries,
            eps: EPS,
        };
        let x = device.constant("x", &bytes16(&self.x[..rows * self.linear.inputs()]))?;
        let output = if fused { Output::Heads(heads) } else { Output::Plain(&projected) };
        run(self.subject, &self.linear.launch(Input::Rows(&x), rows, output, &self.scratch)?)?;
        if !fused {
            run(self.subject, &heads.launch()?)?;
        }
        Ok([words(&projected)?, words(&queries)?, words(kv.buffer())?])
    }
}

fn heads(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let device = &subject.device;
    // Heads shorter than a column and longer, that begin inside of one and with one; one segment and several.
    for (format, group, k, dim, heads, kv_heads) in [
        (Format::Int4, 128, 528, 16, 5, 2),
        (Format::Int3, 64, 336, 48, 3, 1),
        (Format::Bf16, 128, 128, 64, 4, 1),
        (Format::Int4, 32, 512, 256, 2, 1),
    ] {
        let weights = Weights::new(format, (heads + 2 * kv_heads) * dim, k, group);
        let linear = linear(subject, &weights)?;
        let frequencies: Vec<f32> = (0..dim / 2).map(|m| 1e4f64.powf(-2.0 * m as f64 / dim as f64) as f32).collect();
        let layer = HeadLayer {
            subject,
            scratch: Scratch::new(device, [&linear])?,
            linear,
            dim,
            heads,
            kv_heads,
            weights: [weights32(device, &numbers(41, dim, 2.0))?, weights32(device, &numbers(42, dim, 2.0))?],
            rotations: Rotations::new(device, &frequencies, 80)?,
            x: numbers16(43, MOST_ROWS * k, 2.0),
        };
        for rows in ROWS {
            let expected = layer.run(rows, false)?;
            for round in 0..subject.size(50, 1) {
                if layer.run(rows, true)? != expected {
                    return wrong(format!(
                        "{format:?} weights, heads of {dim}, {rows} rows, run {round}: one launch has other bits than two"
                    ));
                }
            }
        }
    }
    Ok(Vec::new())
}

fn choice(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let device = &subject.device;
    for (format, n, k, group) in
        [(Format::Int4, 208, 784, 784), (Format::Int3, 144, 336, 64), (Format::Bf16, 144, 272, 272)]
    {
        let linear = linear(subject, &Weights::new(format, n, k, group))?;
        let scratch = Scratch::new(device, [&linear])?;
        // Descending, so that among equals the last channel wins.
        let ids: Vec<u8> = (0..n as u32).flat_map(|i| (9000 - 3 * i).to_le_bytes()).collect();
        let ids = device.constant("ids", &ids)?;
        let x = device.constant("x", &bytes16(&numbers16(51, MOST_ROWS * k, 2.0)))?;
        let chosen = |rows: usize, ids: Option<&Buffer>, cap: Option<f32>, fused: bool| -> Result<Vec<u32>, Failure> {
            let sequence = Sequence::new(device, 8, 1)?;
            sequence.begin(&[1], 8)?;
            let best = sequence.best(ids, cap);
            let logits = device.allocate("logits", rows * n * 4)?;
            let output = if fused { Output::Best(best) } else { Output::Plain(&logits) };
            run(subject, &linear.launch(Input::Rows(&x), rows, output, &scratch)?)?;
            if !fused {
                run(subject, &sequence.choose(&logits, ids, rows, n, cap)?)?;
            }
            Ok(words(best.ranks())?[..2 * rows].to_vec())
        };
        for rows in ROWS {
            // A softcap so low that every positive logit is the same: the lowest token wins.
            for (ids, cap) in [(None, None), (Some(&ids), Some(30.0)), (None, Some(1e-3)), (Some(&ids), Some(1e-3))] {
                if chosen(rows, ids, cap, true)? != chosen(rows, ids, cap, false)? {
                    return wrong(format!("{format:?} weights, {rows} rows, softcap {cap:?}: another token is chosen"));
                }
            }
        }
    }
    Ok(Vec::new())
}

fn pair(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let device = &subject.device;
    for (format, group, hidden, inner) in
        [(Format::Int4, Some(128), 1280, 256), (Format::Int3, Some(64), 272, 80), (Format::Bf16, None, 128, 16)]
    {
        let of = |n, k: usize| linear(subject, &Weights::new(format, n, k, group.unwrap_or(k)));
        let (first, second) = (of(inner, hidden)?, of(hidden, inner)?);
        let scratch = Scratch::new(device, [&first, &second])?;
        let residual = Residual::new(hidden);
        let factor = weights32(device, &numbers(61, MOST_ROWS * (inner + 48), 2.0))?;
        for rows in ROWS {
            let [stream, delta, squares, post, _] = residual.upload(subject, &(0..rows).collect::<Vec<_>>())?;
            let delta = Delta { y: &delta, squares: &squares, norm: &post, scalar: Residual::SCALAR };
            let with = |one: bool| -> Result<[Vec<u32>; 4], Failure> {
                let room = |name, bytes| device.allocate(name, bytes);
                let (out, middle) = (room("out", rows * hidden * 4)?, room("middle", rows * inner * 2)?);
                let (y, squares) = (room("y", rows * hidden * 4)?, room("squares", rows * hidden.div_ceil(64) * 4)?);
                let stream = Stream { stream: &stream, delta: Some(delta), norm: None, eps: EPS, out: Some(&out) };
                let (first, second, factor) = (&first, &second, &factor);
                let (offset, stride) = (16, inner + 48);
                let pair =
                    Pair { first, second, stream, factor, offset, stride, middle: &middle, y: &y, squares: &squares };
                match one {
                    true => run(subject, &pair.launch(rows, &scratch)?)?,
                    false => pair.launches(rows, &scratch)?.iter().try_for_each(|launch| run(subject, launch))?,
                }
                Ok([words(&out)?, words(&middle)?, words(&y)?, words(&squares)?])
            };
            let expected = with(false)?;
            for round in 0..subject.size(50, 1) {
                if with(true)? != expected {
                    return wrong(format!(
                        "{format:?} weights, {hidden} and {inner}, {rows} rows, run {round}: one launch has other bits than two"
                    ));
                }
            }
        }
    }
    Ok(Vec::new())
}
