//! Counted work: a step of a model of osoi5's shape on the emulator. Every weight is read once, and the table `kernels/WORK.md` says what
//! each launch reads; `CHIKU_UPDATE_WORK=1` writes it.

#![cfg(target_arch = "x86_64")]

use std::fmt::Write;

use half::bf16;
use kernels::{
    cpu::{Data, Matrix, MatrixView},
    device::{Buffer, Device, Emulation, Launch},
    gemm::{Input, Linear, Output, Scratch},
    layout::Tiles,
    packing::Bits,
    roofline::{DeviceProfile, StepBytes},
    step::{
        attention::AttentionScratch,
        decide::{Sequence, Tree},
        draft::{DraftLayer, DraftModel, Drafter, Format as DraftFormat},
        kv::{KvCache, KvShape},
        layer::{Activations, Layer, Norms, Pass, Planned, Surroundings, Widths},
        rows::{PerLayer, Rotations, Table, combine_per_layer, embed},
    },
};

// The shape: 37 layers, of which 7 see everything, and the last 16 read keys and values of layers 19 and 20.
const HIDDEN: usize = 2560;
const INNER: usize = 10240;
const SIZE: usize = 256;
const LAYERS: usize = 37;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const WINDOW: usize = 512;
const HEAD_ROWS: usize = 12288;
const GROUP: usize = 128;
const EPS: f32 = 1e-6;
/// Layers of each kind: with keys of their own (sliding, full), and without.
const KINDS: [[usize; 2]; 2] = [[17, 4], [13, 3]];

const ROWS: usize = 8;
const CONTEXT: usize = 1024;
/// Rows of the tables of embeddings, of which a step reads eight whatever their number.
const VOCABULARY: usize = 64;

/// Bytes that repeat nowhere near.
fn bytes(seed: u64, n: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut words = Vec::with_capacity(n + 8);
    while words.len() < n {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        words.extend((state >> 16).to_le_bytes().into_iter().take(4));
    }
    words.truncate(n);
    words
}

fn repeated16(value: f32, n: usize) -> Vec<u8> {
    bf16::from_f32(value).to_le_bytes().repeat(n)
}

fn repeated32(value: f32, n: usize) -> Vec<u8> {
    value.to_le_bytes().repeat(n)
}

/// An int4 matrix of a file: its words and scales.
fn weights(n: usize, k: usize, group: usize) -> (Vec<u8>, Vec<u8>) {
    (bytes((n * 3 + k) as u64, n * k / 2), repeated16(0.004, n * k / group))
}

fn matrix(weights: &(Vec<u8>, Vec<u8>), n: usize, k: usize, group: usize) -> MatrixView<'_> {
    let data = Data::Packed { bits: Bits::Four, packed: &weights.0[..], scales: &weights.1[..], group };
    Matrix::new(n, k, data).unwrap()
}

fn linear(device: &Device, name: &str, n: usize, k: usize, group: usize) -> Linear {
    let weights = weights(n, k, group);
    Linear::new(device, name, &Tiles::pack(matrix(&weights, n, k, group)).unwrap()).unwrap()
}

/// The matrices of one kind of layer.
struct Matrices {
    qkv: Linear,
    q: Linear,
    o: Linear,
    gate_up: Linear,
    down: Linear,
    gate: Linear,
    projection: Linear,
}

impl Matrices {
    fn new(device: &Device, dim: usize) -> Matrices {
        let of = |name, n, k| linear(device, name, n, k, GROUP);
        let (gate, up) = (weights(INNER, HIDDEN, GROUP), weights(INNER, HIDDEN, GROUP));
        let view = |w| matrix(w, INNER, HIDDEN, GROUP);
        let gate_up = Linear::new(device, "gate and up", &Tiles::gated(view(&gate), view(&up)).unwrap()).unwrap();
        Matrices {
            qkv: of("qkv", (HEADS + 2 * KV_HEADS) * dim, HIDDEN),
            q: of("q", HEADS * dim, HIDDEN),
            o: of("o", HIDDEN, HEADS * dim),
            gate_up,
            down: of("down", HIDDEN, INNER),
            gate: of("per-layer gate", SIZE, HIDDEN),
            projection: of("per-layer projection", HIDDEN, SIZE),
        }
    }

    fn all(&self) -> [&Linear; 7] {
        [&self.qkv, &self.q, &self.o, &self.gate_up, &self.down, &self.gate, &self.projection]
    }
}

/// What a launch moved, in bytes, and multiplied.
#[derive(Default, Clone, Copy)]
struct Work {
    /// Of matrices and tables: what they hold, and what was read.
    held: u64,
    weights: u64,
    /// Between launches: read, written.
    activations: [u64; 2],
    /// Sums that wait for others, of products and of attention: read and written.
    partial: u64,
    /// Keys and values: read, of how many different ones, written.
    kv: [u64; 3],
    products: u64,
}

impl Work {
    fn add(&mut self, other: &Work, times: usize) {
        let n = times as u64;
        self.held += n * other.held;
        self.weights += n * other.weights;
        self.partial += n * other.partial;
        self.products += n * other.products;
        (0..2).for_each(|i| self.activations[i] += n * other.activations[i]);
        (0..3).for_each(|i| self.kv[i] += n * other.kv[i]);
    }

    /// Least time on an A10G: weights once and visible keys and values once, at the bandwidth that reads have reached there.
    fn projected_us(&self) -> f64 {
        let profile = DeviceProfile::by_name("a10g").unwrap();
        let step = StepBytes { weights: self.weights, kv: self.kv[1], drafter: 0 };
        step.floor_ms(profile.gb_s()) * 1e3
    }
}

/// Buffers by what they count as.
struct Groups<'a> {
    weights: Vec<&'a Buffer>,
    partial: Vec<&'a Buffer>,
    kv: &'a Buffer,
    activations: Vec<&'a Buffer>,
}

impl Groups<'_> {
    /// Runs a launch; `held` are the buffers of weights that it reads, and `visible` the bytes of different keys and values.
    fn run(&self, device: &Device, launch: &Launch, held: &[&Linear], visible: u64) -> Work {
        // SAFETY: typed launches.
        unsafe { device.launch(launch) }.unwrap();
        let sum = |buffers: &[&Buffer]| {
            let traffic = buffers.iter().map(|b| b.traffic().unwrap());
            traffic.fold([0, 0], |[read, written], t| [read + t.read, written + t.written])
        };
        let kv = self.kv.traffic().unwrap();
        Work {
            held: held.iter().flat_map(|l| l.buffers()).map(|b| b.bytes() as u64).sum(),
            weights: sum(&self.weights)[0],
            activations: sum(&self.activations),
            partial: sum(&self.partial).iter().sum(),
            kv: [kv.read, visible, kv.written],
            products: device.counts().unwrap().products,
        }
    }
}

/// A line of a table, and how often its launch is made.
struct Line {
    op: String,
    launches: usize,
    work: Option<Work>,
}

fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let comma =
        |(i, c): (usize, char)| if i > 0 && (digits.len() - i).is_multiple_of(3) { vec![',', c] } else { vec![c] };
    digits.chars().enumerate().flat_map(comma).collect()
}

fn table(text: &mut String, title: &str, lines: &[Line]) {
    let head = "op | launches | weights held | weights read | activations read | written | partial sums | KV read | KV written | mma | projected us";
    write!(text, "\n## {title}\n\n| {head} |\n|---|{}\n", "---:|".repeat(10)).unwrap();
    let mut total = Work::default();
    for Line { op, launches, work } in lines {
        let Some(work) = work else {
            writeln!(text, "| {op} | {launches} |{}", "  |".repeat(9)).unwrap();
            continue;
        };
        let mut all = Work::default();
        all.add(work, *launches);
        total.add(&all, 1);
        row(text, op, *launches, &all);
    }
    row(text, "**all**", lines.iter().map(|l| l.launches).sum(), &total);
}

fn row(text: &mut String, op: &str, launches: usize, w: &Work) {
    let counts = [w.held, w.weights, w.activations[0], w.activations[1], w.partial, w.kv[0], w.kv[2], w.products];
    let counts: Vec<String> = counts.into_iter().map(grouped).collect();
    writeln!(text, "| {op} | {launches} | {} | {:.1} |", counts.join(" | "), w.projected_us()).unwrap();
}

/// Launches of the drafter: a tiny one has as many as any other.
fn drafter_launches(
    device: &Device,
    kv: &KvCache,
    embedding: &Table,
    rotations: [&Rotations; 2],
    sequence: &Sequence,
) -> usize {
    let (hidden, heads, dim) = (16, 2, 256);
    let zeros = vec![0; 2 * HIDDEN * heads * dim * 2];
    let view = |n: usize, k: usize| Matrix::new(n, k, Data::Bf16(&zeros[..n * k * 2])).unwrap();
    let norm = vec![1.0; HIDDEN.max(dim)];
    let of = |n: usize| &norm[..n];
    let layer = DraftLayer {
        kv_layer: 0,
        sliding: true,
        norms: [of(hidden), of(dim), of(hidden), of(hidden), of(hidden)],
        q: view(heads * dim, hidden),
        o: view(hidden, heads * dim),
        gate: view(16, hidden),
        up: view(16, hidden),
        down: view(hidden, 16),
        scalar: 1.0,
    };
    let model = DraftModel {
        heads,
        pre: view(hidden, 2 * HIDDEN),
        post: view(HIDDEN, hidden),
        layers: vec![layer],
        final_norm: of(hidden),
        head: view(VOCABULARY, hidden),
        clusters: None,
        eps: EPS,
        back: 0,
        window: WINDOW,
    };
    let drafter = Drafter::new(device, &model, DraftFormat::Bf16, kv, embedding, rotations).unwrap();
    let carried = device.allocate("carried", HIDDEN * 2).unwrap();
    drafter.persistent(sequence, &carried, ROWS - 1).unwrap().len()
}

#[test]
fn a_step_reads_every_weight_once_in_seven_launches_a_layer() {
    let device = Device::emulated(Emulation::default()).unwrap();
    let dims = [256, 512];
    let shapes = [
        KvShape { kv_heads: KV_HEADS, head_dim: dims[0], window: Some(WINDOW) },
        KvShape { kv_heads: KV_HEADS, head_dim: dims[1], window: None },
    ];
    let matrices = dims.map(|dim| Matrices::new(&device, dim));
    let model_projection = linear(&device, "per-layer model projection", LAYERS * SIZE, HIDDEN, GROUP);
    let head = linear(&device, "head", HEAD_ROWS, HIDDEN, HIDDEN);
    let linears: Vec<&Linear> = matrices.iter().flat_map(Matrices::all).chain([&model_projection, &head]).collect();
    let scratch = Scratch::new(&device, linears.iter().copied()).unwrap();
    let attention = AttentionScratch::new(&device, HEADS, &shapes, CONTEXT + ROWS).unwrap();
    let kv = KvCache::new(&device, &shapes, CONTEXT + ROWS).unwrap();
    kv.buffer().fill(0).unwrap();
    let widths = Widths {
        hidden: HIDDEN,
        projected: (HEADS + 2 * KV_HEADS) * dims[1],
        attended: HEADS * dims[1],
        inner: INNER,
        per_layer: SIZE,
    };
    let activations = Activations::new(&device, widths).unwrap();
    let per_layer = device.allocate("per-layer inputs", ROWS * LAYERS * SIZE * 4).unwrap();
    let hidden16 = device.constant("norm", &repeated16(1.0, HIDDEN)).unwrap();
    let hidden32 = device.constant("norm", &repeated32(1.0, HIDDEN)).unwrap();
    let head32 = device.constant("head norm", &repeated32(1.0, dims[1])).unwrap();
    let rotations = [(dims[0] / 2, 1e4f64, dims[0]), (dims[1] / 8, 1e6, dims[1])].map(|(pairs, theta, dim)| {
        let turns = |m: usize| if m < pairs { theta.powf(-2.0 * m as f64 / dim as f64) as f32 } else { 0.0 };
        Rotations::new(&device, &(0..dim / 2).map(turns).collect::<Vec<_>>(), CONTEXT + 2 * ROWS).unwrap()
    });
    let of_tokens = |name: &str, width: usize| {
        let buffer = device.constant(name, &repeated16(0.5, VOCABULARY * width)).unwrap();
        Table { buffer, vocabulary: VOCABULARY, width }
    };
    let (embedding, per_layer_table) = (of_tokens("embedding", HIDDEN), of_tokens("per-layer", LAYERS * SIZE));
    let sequence = Sequence::new(&device, CONTEXT + ROWS, 2).unwrap();
    let tree = Tree::new(&[0; ROWS - 1]).unwrap();
    sequence.begin(&[7; CONTEXT + 1], 100).unwrap();
    sequence.set_drafts(&(0..ROWS as u32 - 1).map(|d| vec![d + 1]).collect::<Vec<_>>()).unwrap();
    let ids = device.constant("ids", &(0..HEAD_ROWS as u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>()).unwrap();
    let stops = device.constant("stops", &[0; 8]).unwrap();

    let groups = Groups {
        weights: linears.iter().flat_map(|l| l.buffers()).chain([&embedding.buffer, &per_layer_table.buffer]).collect(),
        partial: vec![scratch.partial(), attention.partial(), attention.stats()],
        kv: kv.buffer(),
        activations: activations.all().chain([&per_layer]).collect(),
    };
    // Different keys and values that a layer of this kind reads.
    let visible = |kind: usize| {
        let positions = CONTEXT + ROWS - 1 - if kind == 0 { CONTEXT - (WINDOW - 1) } else { 0 };
        (positions * shapes[kind].width() * 2 * 2) as u64
    };
    let mut step: Vec<Line> = Vec::new();
    let one = |op: &str, work| Line { op: op.into(), launches: 1, work };

    // In front of the layers. The counters' reset is a node of the graph like any launch.
    scratch.reset().unwrap();
    step.push(one("counters zeroed", None));
    let run = |launch: &Launch, held: &[&Linear]| Some(groups.run(&device, launch, held, 0));
    step.push(one("tokens and places of the rows", run(&sequence.place(tree), &[])));
    let launch = embed(&embedding, &sequence.tokens, ROWS, activations.stream(), activations.rounded()).unwrap();
    step.push(one("embedding", run(&launch, &[])));
    let input = Input::Rows(activations.rounded());
    let launch = model_projection.launch(input, ROWS, Output::Plain(&per_layer), &scratch).unwrap();
    step.push(one("per-layer model projection", run(&launch, &[&model_projection])));
    let spec = PerLayer { table: &per_layer_table, layers: LAYERS, hidden: HIDDEN, weight: &head32, eps: EPS };
    let launch = combine_per_layer(spec, &sequence.tokens, ROWS, &per_layer).unwrap();
    step.push(one("per-layer inputs", run(&launch, &[])));

    // One layer of each kind with keys of its own, then what differs in those without.
    let surroundings = Surroundings {
        device: &device,
        activations: &activations,
        scratch: &scratch,
        attention: &attention,
        kv: &kv,
        table: &sequence.table,
        per_layer: &per_layer,
        layers: LAYERS,
        rows: ROWS,
        eps: EPS,
    };
    let norms = Norms {
        input: &hidden16,
        after_attention: &hidden16,
        before_mlp: &hidden16,
        after_mlp: &hidden16,
        after_per_layer: &hidden16,
    };
    let layer = |kind: usize, own: bool, number: usize| {
        let m = &matrices[kind];
        Layer {
            number,
            qkv: if own { &m.qkv } else { &m.q },
            o: &m.o,
            gate_up: &m.gate_up,
            down: &m.down,
            per_layer_gate: &m.gate,
            per_layer_projection: &m.projection,
            norms,
            query_weight: &head32,
            key_weight: own.then_some(&head32),
            rotations: &rotations[kind],
            heads: HEADS,
            kv_layer: kind,
            scalar: 0.5,
        }
    };
    let mut pass = Pass::new(surroundings).unwrap();
    let mut text = String::new();
    let mut found: Vec<Vec<Line>> = Vec::new();
    for (kind, name) in ["A sliding layer", "A full layer"].into_iter().enumerate() {
        let m = &matrices[kind];
        let held =
            [vec![&m.qkv], vec![], vec![], vec![&m.o], vec![&m.gate_up], vec![&m.down], vec![&m.gate, &m.projection]];
        let planned = pass.layer(&layer(kind, true, kind)).unwrap();
        assert_eq!(planned.len(), 7, "launches of a layer");
        let lines: Vec<Line> = planned
            .iter()
            .zip(&held)
            .map(|(Planned { op, launch }, held)| {
                let visible = if *op == "attention" { visible(kind) } else { 0 };
                one(op, Some(groups.run(&device, launch, held, visible)))
            })
            .collect();
        for Line { op, work, .. } in &lines {
            let work = work.unwrap();
            assert!(
                work.weights >= work.held && work.weights * 100 <= work.held * 102,
                "{name}, {op}: every weight once"
            );
        }
        table(&mut text, &format!("{name} with keys and values of its own"), &lines);

        // One that reads another's: the same launches, but for the first.
        let mut shared = Pass::new(surroundings).unwrap();
        let other = shared.layer(&layer(kind, false, 30)).unwrap();
        let same = |(a, b): (&Planned, &Planned)| a.launch.kernel == b.launch.kernel && a.launch.grid == b.launch.grid;
        assert!(other.len() == 7 && other.iter().zip(&planned).skip(1).all(same));
        let first = groups.run(&device, &other[0].launch, &[&m.q], 0);
        assert_eq!((first.weights, first.kv[2]), (first.held, 0), "queries alone append nothing");
        let mut lines: Vec<Line> = lines;
        lines.push(one(other[0].op, Some(first)));
        found.push(lines);
    }
    for (kind, lines) in found.iter().enumerate() {
        let name = ["sliding", "full"][kind];
        let [own, reading] = KINDS.map(|of| of[kind]);
        for (i, Line { op, work, .. }) in lines.iter().enumerate() {
            let launches = if i == 0 {
                own
            } else if i == 7 {
                reading
            } else {
                own + reading
            };
            step.push(Line { op: format!("{op} ({name})"), launches, work: *work });
        }
    }
    assert_eq!(KINDS.concat().iter().sum::<usize>(), LAYERS);

    // Behind the layers.
    let last = pass.end(&hidden32, &hidden32).unwrap();
    step.push(one(last.op, run(&last.launch, &[])));
    let best = Output::Best(sequence.best(Some(&ids), Some(30.0)));
    let launch = head.launch(Input::Rows(activations.rounded()), ROWS, best, &scratch).unwrap();
    step.push(one("head and best tokens", run(&launch, &[&head])));
    step.push(one("acceptance", run(&sequence.accept(tree, &stops, 0).unwrap(), &[])));
    let layers = sequence.layer_table(&kv).unwrap();
    let carried = device.allocate("carried", HIDDEN * 2).unwrap();
    let launch = sequence.settle(tree, &kv, &layers, activations.rounded(), &carried, HIDDEN).unwrap();
    step.push(one("accepted branch and state", run(&launch, &[])));
    assert_eq!(sequence.record(0).unwrap().ended, None, "the step ran to its end");
    let [sliding, full] = &rotations;
    let launches = drafter_launches(&device, &kv, &embedding, [sliding, full], &sequence);
    step.push(Line { op: "drafter, all passes".into(), launches, work: None });

    let launches: usize = step.iter().map(|l| l.launches).sum();
    assert!(launches <= 7 * LAYERS + 20, "{launches} launches of a step");
    table(&mut text, "A step", &step);
    let expected = format!("{}{text}", preface(launches));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels/WORK.md");
    if std::env::var_os("CHIKU_UPDATE_WORK").is_some() {
        std::fs::write(path, &expected).unwrap();
    }
    let recorded = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        recorded == expected,
        "kernels/WORK.md is not what the launches do; run this test with CHIKU_UPDATE_WORK=1 and look at the diff"
    );
}

fn preface(launches: usize) -> String {
    let profile = DeviceProfile::by_name("a10g").unwrap();
    format!(
        "\
# Work of a verify step

What the launches of a step read, write and multiply, counted on the emulator by `crates/kernels/tests/work.rs`, which compares this file
(`CHIKU_UPDATE_WORK=1` writes it). Bytes and matrix products are counted; times are `projected`.

The shape is osoi5's: {LAYERS} layers of {HIDDEN}, int4 in groups of {GROUP}, {HEADS} query heads on {KV_HEADS} of keys, heads of 256 in sliding
layers (window {WINDOW}) and of 512 in full ones, an MLP of {INNER}, per-layer inputs of {SIZE}, a head of {HEAD_ROWS} tokens in int4 by
channel; the last 16 layers read the keys and values of two others. {ROWS} rows of a chain at a context of {CONTEXT}, 80 blocks.

- *weights held*: bytes of the matrices that the launch multiplies, scales included; *weights read*: bytes of them, and of rows of the tables of
  embeddings, that it reads from global memory. A layer's are equal; the head's scales, one a channel, are read again for every segment.
- *activations*, *partial sums* (of products and of attention, read and written) and *KV* are counted where they are read, which is L2 more
  often than memory: every block reads what its part of the work needs, and attention reads a tile once for every 16 packed rows.
- *projected us*: `(weights read + bytes of different visible keys and values) / bandwidth`, by `kernels::roofline`, with the {gb_s} GB/s
  that reads have reached on an A10G (published). It is the least time that memory allows; what lies between launches, L2 and arithmetic is not in it.
- A step has {launches} launches, of at most 7 a layer and 20 more: {most}. The drafter's are counted, its work is not: it is not part of verification.
",
        gb_s = profile.gb_s(),
        most = 7 * LAYERS + 20,
    )
}
