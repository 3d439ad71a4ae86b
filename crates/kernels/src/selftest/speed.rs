//! How long parts of a step take on keys, values and weights that no cache holds: attention at a thousand positions, a layer with a chain
//! and with a star of branches, the drafter's passes.

use super::{Check, Failure, Measurement, Subject, cases::draft, gemm::Weights, median, vectors, within_peak};
use crate::{
    device::{Buffer, Command},
    gemm::{Input, Linear, Output, Scratch},
    layout::{Format, Tiles},
    step::{
        MOST_ROWS, Own, Rows,
        attention::{Attention, AttentionScratch},
        draft::Format as DraftFormat,
        kv::{KvCache, KvShape},
    },
};

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "attention speed",
        what: "attention of E4B's layers at 1024 positions runs as a graph, and how fast",
        timed: true,
        run: attention,
    },
    Check {
        name: "layer speed",
        what: "a layer's products and attention run as a graph, and what a star of 16 rows costs over a chain of 8",
        timed: true,
        run: layer,
    },
    Check {
        name: "draft speed",
        what: "seven passes of E4B's drafter run as a graph, and how fast",
        timed: true,
        run: draft,
    },
];

/// Position of a step's first row.
const POSITION: usize = 1024;
/// Rows of a chain: the newest token and seven drafts.
const CHAIN: usize = 8;
/// Passes of the drafter.
const DEPTH: usize = CHAIN - 1;
/// Things in a timed graph at least, so that its beginning and end do not count.
const LEAST: usize = 200;

/// Attention of a kind of layer: query heads, its shape, and where a step begins.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    heads: usize,
    shape: KvShape,
    position: usize,
}

impl Kind {
    /// Those of E4B; small ones on the emulator.
    fn all(subject: &Subject) -> [Kind; 2] {
        let (heads, position) = (subject.size(8, 4), subject.size(POSITION, 70));
        let shape = |dim, window| KvShape { kv_heads: 2, head_dim: dim, window };
        let sliding = shape(subject.size(256, 16), Some(subject.size(512, 20)));
        let full = shape(subject.size(512, 32), None);
        [("sliding", sliding), ("full", full)].map(|(name, shape)| Kind { name, heads, shape, position })
    }

    /// Bytes of keys and values that a step of `rows` rows of a chain sees.
    fn bytes(&self, rows: usize) -> usize {
        let last = self.position + rows - 1;
        let first = self.shape.window.map_or(0, |w| (self.position + 1).saturating_sub(w));
        (last - first) * self.shape.width() * 2 * 2
    }
}

/// A chain of [`CHAIN`] rows, or a star: as many branches beside it.
fn rows(position: usize, star: bool) -> Vec<(usize, Own)> {
    let chain = (0..CHAIN).map(|i| (position + i, Own::Cached));
    let branches = (0..CHAIN).map(|i| (position + 1 + i % DEPTH, Own::Side(i)));
    chain.chain(branches.take(if star { CHAIN } else { 0 })).collect()
}

/// Attention of many layers alike, each with keys and values of its own.
struct Layers {
    kind: Kind,
    kv: KvCache,
    scratch: AttentionScratch,
    table: Rows,
    queries: Buffer,
    outputs: Vec<Buffer>,
}

impl Layers {
    /// So many layers for steps of at most 16 rows. What keys and values hold takes no time.
    fn new(subject: &Subject, kind: Kind, layers: usize) -> Result<Layers, Failure> {
        let device = &subject.device;
        let context = 2 * kind.position;
        let kv = KvCache::new(device, &vec![kind.shape; layers], context)?;
        kv.buffer().fill(0x3c)?;
        let bytes = MOST_ROWS * kind.heads * kind.shape.head_dim * 2;
        let queries = device.allocate("queries", bytes)?;
        queries.fill(0x3c)?;
        let output = |i: usize| device.allocate(&format!("out{i}"), bytes);
        Ok(Layers {
            kind,
            kv,
            scratch: AttentionScratch::new(device, kind.heads, &[kind.shape], context)?,
            table: Rows::new(device)?,
            queries,
            outputs: (0..layers).map(output).collect::<Result<_, _>>()?,
        })
    }

    /// Attention of one layer.
    fn commands(&self, subject: &Subject, layer: usize, rows: usize) -> Result<Vec<Command>, Failure> {
        let attention = Attention {
            queries: &self.queries,
            heads: self.kind.heads,
            kv: &self.kv,
            layer,
            window: self.kind.shape.window,
            table: &self.table,
            rows,
            out: &self.outputs[layer],
        };
        let launches = attention.launches(&self.scratch, subject.properties.multiprocessors)?;
        Ok(launches.map(Command::from).to_vec())
    }
}

/// How many copies of so many bytes are needed that none is found in the cache when its turn comes again.
fn copies(subject: &Subject, bytes: usize) -> usize {
    subject.size((4 * subject.properties.l2_bytes).div_ceil(bytes) + 1, 2)
}

/// Microseconds of each of `count` things that read `bytes` each, held against the measured peak of reads where there is one.
fn each(
    subject: &Subject,
    what: String,
    bytes: usize,
    count: usize,
    samples_ms: Vec<f64>,
) -> Result<Measurement, Failure> {
    let us = median(&samples_ms) * 1e3 / count as f64;
    let gb_s = bytes as f64 / us / 1e3;
    let of_peak = subject.read_gb_s.get().map(|peak| within_peak(&what, gb_s, peak)).transpose()?;
    Ok(Measurement { what, value: us, unit: "us", of_peak, samples_ms })
}

fn attention(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let mut measured = Vec::new();
    for kind in Kind::all(subject) {
        let layers = Layers::new(subject, kind, copies(subject, kind.bytes(1)))?;
        let count = layers.outputs.len();
        for (what, star, rows_of) in
            [("1 row", false, 1), ("a chain of 8", false, CHAIN), ("a star of 16", true, MOST_ROWS)]
        {
            layers.table.set(&rows(kind.position, star)[..rows_of])?;
            let rounds = subject.size(LEAST.div_ceil(count), 1);
            let mut commands = Vec::new();
            for layer in (0..rounds).flat_map(|_| 0..count) {
                commands.extend(layers.commands(subject, layer, rows_of)?);
            }
            // SAFETY: typed launches.
            let graph = unsafe { subject.record(commands) }?;
            let what = format!("{} attention, {} positions, {what}", kind.name, kind.position);
            let samples = subject.time(&what, &graph, &layers.outputs.iter().collect::<Vec<_>>())?;
            let bytes = kind.bytes(rows_of.min(CHAIN));
            measured.extend(samples.map(|samples| each(subject, what, bytes, count * rounds, samples)).transpose()?);
        }
    }
    Ok(measured)
}

/// The matrices of a sliding layer of E4B, each as often as the layer, and buffers for what they multiply and give.
struct Products {
    linears: Vec<Vec<Linear>>,
    scratch: Scratch,
    inputs: Vec<Buffer>,
    outputs: Vec<Vec<Buffer>>,
    bytes: usize,
}

/// Channels and inputs of q, k and v, of o, of gate and up, of down; in front of the third stands attention.
const MATRICES: [(usize, usize); 4] = [(3072, 2560), (2560, 2048), (20_480, 2560), (2560, 10_240)];
/// For the emulator.
const SMALL_MATRICES: [(usize, usize); 4] = [(128, 64), (64, 64), (128, 64), (64, 128)];

impl Products {
    fn new(subject: &Subject) -> Result<Products, Failure> {
        let device = &subject.device;
        let shapes = if subject.properties.emulated { SMALL_MATRICES } else { MATRICES };
        let group = subject.size(128, 64);
        let tiles = shapes.map(|(n, k)| Weights::new(Format::Int4, n, k, group).tiles());
        let tiles: Vec<Tiles> = tiles.into_iter().collect::<Result<_, _>>()?;
        let bytes = tiles.iter().map(|t| t.weights.len() + t.scales.len()).sum();
        let mut linears = Vec::new();
        let mut outputs = Vec::new();
        for copy in 0..copies(subject, bytes) {
            let of_layer = tiles.iter().map(|t| Linear::new(device, "w", t)).collect::<Result<Vec<_>, _>>()?;
            let y = |(i, l): (usize, &Linear)| device.allocate(&format!("y{copy}.{i}"), MOST_ROWS * l.channels() * 4);
            outputs.push(of_layer.iter().enumerate().map(y).collect::<Result<Vec<_>, _>>()?);
            linears.push(of_layer);
        }
        let input = |&(_, k): &(usize, usize)| -> Result<Buffer, Failure> {
            let x = vectors::inputs(MOST_ROWS, k).iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
            Ok(device.constant("x", &x)?)
        };
        Ok(Products {
            scratch: Scratch::new(device, linears.iter().flatten())?,
            inputs: shapes.iter().map(input).collect::<Result<_, _>>()?,
            linears,
            outputs,
            bytes,
        })
    }
}

fn layer(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let products = Products::new(subject)?;
    let [kind, _] = Kind::all(subject);
    let count = products.linears.len();
    let layers = Layers::new(subject, kind, count)?;
    let rounds = subject.size(LEAST.div_ceil(4 * count), 1);
    let mut measured = Vec::new();
    let mut of_both = Vec::new();
    for (what, star, rows_of) in [("a chain of 8 rows", false, CHAIN), ("a star of 16 rows", true, MOST_ROWS)] {
        layers.table.set(&rows(kind.position, star))?;
        let mut commands = Vec::new();
        for layer in (0..rounds).flat_map(|_| 0..count) {
            for (i, linear) in products.linears[layer].iter().enumerate() {
                if i == 1 {
                    commands.extend(layers.commands(subject, layer, rows_of)?);
                }
                let (x, y) = (&products.inputs[i], &products.outputs[layer][i]);
                let launch = linear.launch(Input::Rows(x), rows_of, Output::Plain(y), &products.scratch)?;
                commands.push(launch.into());
            }
        }
        // SAFETY: typed launches.
        let graph = unsafe { subject.record(commands) }?;
        let what = format!("products of int4 weights and attention of a sliding layer, {what}");
        let outputs: Vec<&Buffer> = products.outputs.iter().flatten().chain(&layers.outputs).collect();
        if let Some(samples) = subject.time(&what, &graph, &outputs)? {
            of_both.push(median(&samples));
            measured.push(each(subject, what, products.bytes + kind.bytes(CHAIN), count * rounds, samples)?);
        }
    }
    if let [chain, star] = of_both[..] {
        let what = "time of the star over that of the chain".into();
        measured.push(Measurement { what, value: star / chain, unit: "x", of_peak: None, samples_ms: Vec::new() });
    }
    Ok(measured)
}

fn draft(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let device = &subject.device;
    let case = match subject.properties.emulated {
        true => draft::Case::new(device, 40)?,
        false => draft::Case::large(device, POSITION)?,
    };
    let (depth, length) = (subject.size(DEPTH, 1), subject.size(POSITION, 40));
    let rounds = subject.size(4, 1);
    let mut measured = Vec::new();
    for (format, bytes) in [(DraftFormat::Bf16, 2), (DraftFormat::Int8, 1)] {
        let drafter = case.drafter(0, true, format)?;
        let persistent = drafter.persistent(&case.sequence, &case.carried, depth)?.to_vec();
        let by_phases = drafter.launches(&case.sequence, &case.carried, depth)?;
        for (what, launches) in [("one persistent kernel", persistent), ("a kernel a phase", by_phases)] {
            let what = format!("{depth} passes of a drafter of {format:?} weights, {what}");
            // SAFETY: typed launches.
            let graph = unsafe { subject.record((0..rounds).flat_map(|_| launches.clone())) }?;
            let Some(samples) = subject.time(&what, &graph, &[case.sequence.drafts()])? else { continue };
            let pass = case.sizes.pass_bytes(bytes, length);
            // What stays in the cache from pass to pass is not read from memory again, and no part of its peak.
            measured.push(match pass >= 4 * subject.properties.l2_bytes {
                true => each(subject, what, pass * depth, rounds, samples)?,
                false => {
                    let value = median(&samples) * 1e3 / rounds as f64;
                    Measurement { what, value, unit: "us", of_peak: None, samples_ms: samples }
                }
            });
        }
    }
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_layers_of_e4b() {
        let kind = |dim, window| Kind {
            name: "",
            heads: 8,
            shape: KvShape { kv_heads: 2, head_dim: dim, window },
            position: 1024,
        };
        // 511 cached positions and those of the seven rows before the last, of 2 KiB each; the full layer's of 4 KiB.
        assert_eq!(kind(256, Some(512)).bytes(8), (511 + 7) * 2048);
        assert_eq!(kind(512, None).bytes(1), 1024 * 4096);
    }

    #[test]
    fn a_star_has_the_chain_and_as_many_branches() {
        let star = rows(100, true);
        assert_eq!(star[..CHAIN], rows(100, false)[..]);
        assert_eq!(star.len(), MOST_ROWS);
        assert!(star[CHAIN..].iter().all(|&(p, own)| (101..=107).contains(&p) && matches!(own, Own::Side(_))));
    }

    #[test]
    fn a_pass_of_the_drafter_reads_what_is_published_of_it() {
        // 11.4 M weights beside the head; 48 clusters of 128 tokens; four layers of keys and values.
        let sizes = draft::Sizes::E4B;
        let (dense, head) = (11.4e6, 48.0 * 128.0 * 256.0);
        let keys = sizes.pass_bytes(0, 1024) as f64;
        let found = sizes.pass_bytes(2, 1024) as f64 - keys;
        assert!((found / 2.0 - dense - head).abs() < 0.1e6, "{found}");
        assert_eq!(keys, (3.0 * 512.0 * 2048.0) + 1024.0 * 4096.0);
    }
}
