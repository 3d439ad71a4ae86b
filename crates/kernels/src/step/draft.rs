//! The drafter's passes on a device (`kernels/draft.cuh`): K tokens and up to four further candidates of each, from the target's keys and
//! values, its hidden state and the newest token.
//!
//! [`Drafter::launches`] is a kernel a phase, [`Drafter::persistent`] one cooperative kernel for all; their results are the same bits.

use super::{
    StepError,
    attention::shared_bytes,
    decide::{MOST_DEPTH, Sequence},
    int,
    kv::{KvCache, KvShape, KvStorage},
    require, require_bytes,
    rows::{Rotations, Table},
};
use crate::{
    cpu::MatrixView,
    device::{Argument, Buffer, Device, Launch},
};

/// As in the source.
const THREADS: u32 = 256;
const HEADER_WORDS: usize = 64;
const LAYER_WORDS: usize = 32;
const PHASES_OF_LAYER: usize = 7;
const PHASES_OF_END: usize = 4;

/// How a drafter's matrices are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// bf16.
    Bf16,
    /// int8 with an f32 scale a channel, rounded to the nearest.
    Int8,
}

/// One layer.
#[derive(Clone, Copy)]
pub struct DraftLayer<'a> {
    /// Layer of the target's [`KvCache`] whose keys and values it reads.
    pub kv_layer: usize,
    /// Whether it sees a window.
    pub sliding: bool,
    /// Norms: of the input, of a query head, after attention, before and after the MLP.
    pub norms: [&'a [f32]; 5],
    /// `[heads * head_dim, hidden]`.
    pub q: MatrixView<'a>,
    /// `[hidden, heads * head_dim]`.
    pub o: MatrixView<'a>,
    /// `[inner, hidden]`.
    pub gate: MatrixView<'a>,
    /// `[inner, hidden]`.
    pub up: MatrixView<'a>,
    /// `[hidden, inner]`.
    pub down: MatrixView<'a>,
    /// Multiplies the residual stream at the layer's end.
    pub scalar: f32,
}

/// A head that looks into the best clusters only.
#[derive(Clone, Copy)]
pub struct DraftClusters<'a> {
    /// `[clusters, hidden]`.
    pub centroids: MatrixView<'a>,
    /// Tokens in the order of clusters, `[vocabulary]`.
    pub order: &'a [u32],
    /// Clusters that are looked into.
    pub chosen: usize,
}

/// A drafter's weights and sizes.
#[derive(Clone)]
pub struct DraftModel<'a> {
    /// Query heads.
    pub heads: usize,
    /// `[hidden, 2 * backbone]`.
    pub pre: MatrixView<'a>,
    /// `[backbone, hidden]`.
    pub post: MatrixView<'a>,
    /// Layers.
    pub layers: Vec<DraftLayer<'a>>,
    /// `[hidden]`.
    pub final_norm: &'a [f32],
    /// `[vocabulary, hidden]`.
    pub head: MatrixView<'a>,
    /// How the head is narrowed, where it is.
    pub clusters: Option<DraftClusters<'a>>,
    /// Inside every root.
    pub eps: f32,
    /// Positions that the query stands before the newest token: 0 as transformers has it, 1 as vLLM.
    pub back: usize,
    /// Cached positions that sliding layers see.
    pub window: usize,
}

/// A drafter on a device, bound to a target's cache and embedding.
pub struct Drafter {
    device: Device,
    format: Format,
    storage: KvStorage,
    layers: usize,
    backbone: usize,
    shared_bytes: usize,
    weights: Buffer,
    plan: Buffer,
    scratch: Buffer,
    table: Buffer,
    embedding: Table,
    rotations: [Rotations; 2],
    kv: Buffer,
}

/// Bytes in pieces of 16.
#[derive(Default)]
struct Arena(Vec<u8>);

impl Arena {
    fn place(&mut self, bytes: impl IntoIterator<Item = u8>) -> u32 {
        let at = self.0.len() / 16;
        self.0.extend(bytes);
        self.0.resize(self.0.len().next_multiple_of(16), 0);
        at as u32
    }

    fn floats(&mut self, values: &[f32]) -> u32 {
        self.place(values.iter().flat_map(|v| v.to_le_bytes()))
    }

    /// Where weights and scales of a matrix are.
    fn matrix(&mut self, matrix: MatrixView<'_>, format: Format) -> [u32; 2] {
        let begin = (self.0.len() / 16) as u32;
        let mut scales = Vec::new();
        for row in 0..matrix.rows() {
            let values = matrix.row(row);
            match format {
                Format::Bf16 => self.0.extend(values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes())),
                Format::Int8 => {
                    let scale = values.iter().fold(0.0f32, |most, v| most.max(v.abs())) / 127.0;
                    let divisor = if scale > 0.0 { scale } else { 1.0 };
                    self.0.extend(values.iter().map(|v| (v / divisor).round_ties_even() as i8 as u8));
                    scales.push(scale);
                }
            }
        }
        self.0.resize(self.0.len().next_multiple_of(16), 0);
        [begin, self.floats(&scales)]
    }
}

impl Drafter {
    /// Lays the weights out and copies them to the device.
    ///
    /// # Errors
    /// [`StepError::Shape`] where sizes do not fit each other, the target's cache or the kernels.
    pub fn new(
        device: &Device,
        model: &DraftModel<'_>,
        format: Format,
        kv: &KvCache,
        embedding: &Table,
        rotations: [&Rotations; 2],
    ) -> Result<Drafter, StepError> {
        let (hidden, backbone, vocabulary) = (model.pre.rows(), embedding.width, embedding.vocabulary);
        let heads = model.heads;
        require(heads > 0, "query heads of the drafter", heads, "at least one")?;
        let shaped = |what: &'static str, matrix: MatrixView<'_>, rows: usize, cols: usize| {
            require(matrix.rows() == rows, what, matrix.rows(), format!("{rows} outputs"))?;
            require(matrix.cols() == cols, what, matrix.cols(), format!("{cols} inputs"))?;
            require(cols > 0 && cols.is_multiple_of(16), what, cols, "inputs in a multiple of 16")
        };
        shaped("pre_projection", model.pre, hidden, 2 * backbone)?;
        shaped("post_projection", model.post, backbone, hidden)?;
        shaped("head of the drafter", model.head, vocabulary, hidden)?;
        require(model.final_norm.len() == hidden, "final norm of the drafter", model.final_norm.len(), "hidden")?;
        require(model.back <= 1, "position of the drafter's query", model.back, "0 or 1 before the newest token")?;
        let bytes = vocabulary * backbone * 2;
        require_bytes("the drafter", &[(&embedding.buffer, bytes)])?;

        let mut arena = Arena::default();
        // Scratch memory is laid out in the same way, but holds nothing yet.
        let mut used = 0;
        let mut room = |bytes: usize| {
            let at = used / 16;
            used += bytes.max(16).next_multiple_of(128);
            at as u32
        };
        let (mut inner, mut wide, mut partial, mut stats) = (0, 0, 0, 0);
        let mut plan = vec![0; HEADER_WORDS];
        let mut shared = 2 * backbone * 4;
        for layer in &model.layers {
            let of_cache = kv.layer(layer.kv_layer)?;
            let KvShape { kv_heads, head_dim: dim, window } = of_cache.shape;
            let multiple = heads.is_multiple_of(kv_heads);
            require(multiple, "query heads of the drafter", heads, format!("multiples of {kv_heads}"))?;
            let (q_width, own_inner) = (heads * dim, layer.gate.rows());
            for (what, matrix, rows, cols) in [
                ("q_proj of the drafter", layer.q, q_width, hidden),
                ("o_proj of the drafter", layer.o, hidden, q_width),
                ("gate_proj of the drafter", layer.gate, own_inner, hidden),
                ("up_proj of the drafter", layer.up, own_inner, hidden),
                ("down_proj of the drafter", layer.down, hidden, own_inner),
            ] {
                shaped(what, matrix, rows, cols)?;
            }
            let lengths = [hidden, dim, hidden, hidden, hidden];
            for (norm, length) in layer.norms.iter().zip(lengths) {
                require(norm.len() == length, "norm of the drafter", norm.len(), length.to_string())?;
            }
            let turns = rotations[usize::from(!layer.sliding)];
            require(turns.pairs() <= dim / 2, "rotating pairs", turns.pairs(), format!("at most {}", dim / 2))?;
            // A row without a key of its own sees one position fewer than its window counts.
            let seen = if layer.sliding { model.window + 1 } else { 0 };
            let most = window.map_or(usize::MAX, |w| w + 2);
            let inside = (layer.sliding && (2..=most).contains(&seen)) || (!layer.sliding && window.is_none());
            require(inside, "window of the drafter", model.window, "the target's window, or one more")?;
            let chunks = KvShape { window: layer.sliding.then_some(seen), ..of_cache.shape }.most_chunks(kv.context());
            let mut words = vec![dim, kv_heads, own_inner, seen, of_cache.capacity];
            words.extend([of_cache.offsets[0] / 16, of_cache.offsets[1] / 16, usize::from(!layer.sliding)]);
            words.extend([turns.positions(), turns.pairs(), chunks]);
            let mut words: Vec<u32> = words.into_iter().map(|w| w as u32).collect();
            words.push(layer.scalar.to_bits());
            let [input, query, attention, mlp, product] = layer.norms;
            for norm in [input, query, attention, mlp, product] {
                words.push(arena.floats(norm));
            }
            for matrix in [layer.q, layer.o, layer.gate, layer.up, layer.down] {
                words.extend(arena.matrix(matrix, format));
            }
            words.resize(LAYER_WORDS, 0);
            plan.extend(words);
            inner = inner.max(own_inner);
            wide = wide.max(q_width);
            partial = partial.max(chunks * q_width);
            stats = stats.max(chunks * heads);
            shared = shared.max(shared_bytes(kv.storage(), 2, dim));
        }
        let (mut clusters, mut chosen, mut order) = (0, 0, 0);
        let mut centroids = [0; 2];
        if let Some(c) = model.clusters {
            clusters = c.centroids.rows();
            chosen = c.chosen;
            shaped("centroids", c.centroids, clusters, hidden)?;
            let divides = clusters > 0 && vocabulary.is_multiple_of(clusters);
            require(divides, "clusters", clusters, format!("a divisor of {vocabulary}"))?;
            require((1..=clusters).contains(&chosen), "clusters looked into", chosen, format!("1 to {clusters}"))?;
            let known = c.order.len() == vocabulary && c.order.iter().all(|&t| (t as usize) < vocabulary);
            require(known, "order of tokens", c.order.len(), format!("{vocabulary} tokens of the vocabulary"))?;
            centroids = arena.matrix(c.centroids, format);
            order = arena.place(c.order.iter().flat_map(|t| t.to_le_bytes()));
        }
        let tokens = vocabulary.checked_div(clusters).map_or(vocabulary, |of_cluster| chosen * of_cluster);
        let sizes = [model.layers.len(), hidden, backbone, heads, vocabulary, clusters, chosen, model.back];
        let mut header: Vec<u32> = sizes.into_iter().map(|s| s as u32).collect();
        header.extend([model.eps.to_bits(), (backbone as f32).sqrt().to_bits()]);
        header.extend(arena.matrix(model.pre, format));
        header.extend(arena.matrix(model.post, format));
        header.extend(centroids);
        header.extend(arena.matrix(model.head, format));
        header.extend([order, arena.floats(model.final_norm)]);
        // X, middle, sum; projected queries, queries, attended; product; carried, normed; scores, chosen, ranks; partial, stats; barrier.
        let parts = [
            hidden * 4,
            hidden * 4,
            hidden * 4,
            wide * 4,
            wide * 2,
            wide * 4,
            inner * 4,
            backbone * 4,
            hidden * 4,
            clusters * 4,
            chosen * 4,
            tokens * 8,
            partial * 4,
            stats * 8,
            8,
        ];
        header.extend(parts.map(&mut room));
        plan[..header.len()].copy_from_slice(&header);
        shared = shared.max(128 + 4 * hidden.max(wide).max(inner)).max(128 + clusters * 8);
        let most = device.properties().shared_bytes as usize;
        require(shared <= most, "shared memory of the drafter", shared, format!("at most {most} bytes"))?;
        let words: Vec<u8> = plan.iter().flat_map(|w| w.to_le_bytes()).collect();
        Ok(Drafter {
            device: device.clone(),
            format,
            storage: kv.storage(),
            layers: model.layers.len(),
            backbone,
            shared_bytes: shared,
            weights: device.constant("drafter", &arena.0)?,
            plan: device.constant("drafter.plan", &words)?,
            scratch: device.allocate("drafter.scratch", used)?,
            table: device.allocate("drafter.rows", 8)?,
            embedding: embedding.clone(),
            rotations: rotations.map(Clone::clone),
            kv: kv.buffer().clone(),
        })
    }

    /// Weights as stored, in bytes.
    pub fn weight_bytes(&self) -> usize {
        self.weights.bytes()
    }

    /// The state that the last pass left, f32 `[backbone]`, for comparison: bytes in the scratch memory.
    pub fn state(&self) -> Result<Vec<f32>, StepError> {
        let mut word = [0; 4];
        // The word CARRIED.
        self.plan.read((20 + 7) * 4, &mut word)?;
        let mut bytes = vec![0; self.backbone * 4];
        self.scratch.read(u32::from_le_bytes(word) as usize * 16, &mut bytes)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
    }

    fn launch(&self, kernel: &'static str, blocks: u32, sequence: &Sequence, carried: &Buffer) -> Launch {
        let [sliding, full] = &self.rotations;
        let arguments = vec![
            self.weights.at(0),
            self.plan.at(0),
            self.embedding.buffer.at(0),
            sliding.buffer().at(0),
            full.buffer().at(0),
            self.kv.at(0),
            sequence.state().at(0),
            carried.at(0),
            self.table.at(0),
            self.scratch.at(0),
            sequence.drafts().at(0),
        ];
        let shared_bytes = self.shared_bytes as u32;
        Launch { kernel, grid: [blocks, 1, 1], block: THREADS, shared_bytes, cooperative: false, arguments }
    }

    fn check(&self, carried: &Buffer, depth: usize) -> Result<(), StepError> {
        require((1..=MOST_DEPTH).contains(&depth), "depth of the draft", depth, format!("1 to {MOST_DEPTH}"))?;
        require_bytes("the drafter", &[(carried, self.backbone * 2)])
    }

    fn begin(&self, sequence: &Sequence, carried: &Buffer) -> Launch {
        Launch { block: 32, shared_bytes: 0, ..self.launch("draft_begin", 1, sequence, carried) }
    }

    /// `depth` passes from the sequence's newest token and the target's state `carried`, bf16 `[backbone]`, a kernel a phase. The drafts
    /// go where [`Sequence::place`] reads them.
    pub fn launches(&self, sequence: &Sequence, carried: &Buffer, depth: usize) -> Result<Vec<Launch>, StepError> {
        self.check(carried, depth)?;
        let kernel = match (self.format, self.storage) {
            (Format::Bf16, KvStorage::Bf16) => "draft_phase_bf16",
            (Format::Bf16, KvStorage::Int8) => "draft_phase_bf16_kv8",
            (Format::Int8, KvStorage::Bf16) => "draft_phase_int8",
            (Format::Int8, KvStorage::Int8) => "draft_phase_int8_kv8",
        };
        let phases = 1 + self.layers * PHASES_OF_LAYER + PHASES_OF_END;
        let blocks = self.device.properties().multiprocessors;
        let mut launches = vec![self.begin(sequence, carried)];
        for (depth, phase) in (0..depth).flat_map(|d| (0..phases).map(move |p| (d, p))) {
            let mut launch = self.launch(kernel, blocks, sequence, carried);
            launch.arguments.extend([int(depth), int(phase)]);
            launches.push(launch);
        }
        Ok(launches)
    }

    /// The same in one cooperative kernel, after a first one that sets its barrier up.
    pub fn persistent(&self, sequence: &Sequence, carried: &Buffer, depth: usize) -> Result<[Launch; 2], StepError> {
        self.check(carried, depth)?;
        let kernel = match (self.format, self.storage) {
            (Format::Bf16, KvStorage::Bf16) => "draft_all_bf16",
            (Format::Bf16, KvStorage::Int8) => "draft_all_bf16_kv8",
            (Format::Int8, KvStorage::Bf16) => "draft_all_int8",
            (Format::Int8, KvStorage::Int8) => "draft_all_int8_kv8",
        };
        let blocks = self.device.properties().multiprocessors;
        let mut all = Launch { cooperative: true, ..self.launch(kernel, blocks, sequence, carried) };
        all.arguments.push(Argument::I32(depth as i32));
        Ok([self.begin(sequence, carried), all])
    }
}
