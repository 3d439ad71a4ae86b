//! A drafter of random weights, the target's state that it reads, and its passes in f64.

use half::bf16;

use super::{
    super::{
        Failure,
        vectors::{random, uniform},
    },
    bytes16, gelu, numbers16, rms, turned, words,
};
use crate::{
    cpu::{Data, Matrix},
    device::{Buffer, Device, Launch},
    step::{
        decide::{CANDIDATES, Sequence},
        draft::{DraftClusters, DraftLayer, DraftModel, Drafter, Format},
        kv::{KvCache, KvShape, KvStorage},
        rows::{Rotations, Table},
    },
};

/// Inside every root.
pub const EPS: f32 = 1e-6;

/// Sizes of a drafter and of the target that it reads.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads of the target.
    pub kv_heads: usize,
    /// Width of the drafter's stream.
    pub hidden: usize,
    /// Width of the target's.
    pub backbone: usize,
    /// Width of the MLP.
    pub inner: usize,
    /// Tokens.
    pub vocabulary: usize,
    /// Clusters of tokens.
    pub clusters: usize,
    /// Clusters that are looked into.
    pub chosen: usize,
    /// Cached positions of sliding layers.
    pub window: usize,
    /// Positions of the context.
    pub context: usize,
    /// Head sizes of sliding and of full layers.
    pub dims: [usize; 2],
    /// How many sliding layers; one full layer follows them.
    pub sliding: usize,
}

impl Sizes {
    /// A layer of each kind, odd sizes.
    pub const SMALL: Sizes = Sizes {
        heads: 4,
        kv_heads: 2,
        hidden: 32,
        backbone: 48,
        inner: 64,
        vocabulary: 96,
        clusters: 12,
        chosen: 3,
        window: 20,
        context: 200,
        dims: [16, 32],
        sliding: 1,
    };

    /// The drafter of E4B: 11.4 M weights and 48 clusters of 128 tokens a pass.
    pub const E4B: Sizes = Sizes {
        heads: 4,
        kv_heads: 2,
        hidden: 256,
        backbone: 2560,
        inner: 2048,
        vocabulary: 262_144,
        clusters: 2048,
        chosen: 48,
        window: 512,
        context: 2048,
        dims: [256, 512],
        sliding: 3,
    };

    /// Bytes that one pass reads, of weights of so many bytes each, and of keys and values, behind `length` tokens.
    pub fn pass_bytes(&self, weight: usize, length: usize) -> usize {
        let Sizes {
            heads, kv_heads, hidden, backbone, inner, vocabulary, clusters, chosen, window, dims, sliding, ..
        } = *self;
        let layer = |dim: usize| 2 * heads * dim * hidden + 3 * inner * hidden;
        let dense = 3 * backbone * hidden + sliding * layer(dims[0]) + layer(dims[1]) + clusters * hidden;
        let head = chosen * (vocabulary / clusters) * hidden;
        let cached = |dim: usize, positions: usize| 2 * positions * kv_heads * dim * 2;
        let keys = sliding * cached(dims[0], window.min(length)) + cached(dims[1], length);
        (dense + head) * weight + keys
    }
}

type Dense = Matrix<Vec<u8>>;

/// One layer's weights.
pub struct Layer {
    sliding: bool,
    norms: Vec<Vec<f32>>,
    /// q, o, gate, up, down.
    matrices: Vec<Dense>,
    scalar: f32,
}

/// A drafter, and the target's state that it reads.
pub struct Case {
    /// The device.
    pub device: Device,
    /// Sizes.
    pub sizes: Sizes,
    /// `[clusters, hidden]`.
    pub centroids: Dense,
    /// Tokens in the order of clusters.
    pub order: Vec<u32>,
    /// The target's embedding.
    pub embedding: Table,
    /// Of sliding and of full layers.
    pub rotations: [Rotations; 2],
    /// A layer of each kind; NaN beyond what is cached.
    pub kv: KvCache,
    /// Behind `length` tokens.
    pub sequence: Sequence,
    /// The target's state of the newest one, bf16 `[backbone]`.
    pub carried: Buffer,
    pre: Dense,
    post: Dense,
    head: Dense,
    final_norm: Vec<f32>,
    layers: Vec<Layer>,
    embedded: Vec<bf16>,
    frequencies: [Vec<f32>; 2],
    /// Of each layer of the cache, keys and values `[positions, kv_heads, dim]`.
    cached: Vec<[Vec<bf16>; 2]>,
    hidden: Vec<bf16>,
    length: usize,
}

/// Drafts `[depth, CANDIDATES]`, and the last state as bits.
pub type Outcome = (Vec<u32>, Vec<u32>);

/// A seed after another.
struct Seeds(u32);

impl Seeds {
    fn next(&mut self) -> u32 {
        self.0 += 1;
        self.0
    }

    /// A matrix of random bf16, exact in every format of comparison.
    fn dense(&mut self, rows: usize, cols: usize) -> Result<Dense, Failure> {
        let values = numbers16(self.next(), rows * cols, 2.0 / (cols as f32).sqrt());
        Matrix::new(rows, cols, Data::Bf16(bytes16(&values))).map_err(|e| Failure::Wrong(e.to_string()))
    }

    /// Weights of a norm.
    fn vector(&mut self, len: usize) -> Vec<f32> {
        let seed = self.next();
        (0..len).map(|i| uniform(seed, i, 0.5, 1.5)).collect()
    }
}

impl Case {
    /// [`Sizes::SMALL`] behind `length` tokens, of which all but the newest are cached.
    pub fn new(device: &Device, length: usize) -> Result<Case, Failure> {
        Case::cached_as(device, length, KvStorage::Bf16)
    }

    /// The same with a cache of another kind.
    pub fn cached_as(device: &Device, length: usize, storage: KvStorage) -> Result<Case, Failure> {
        let Sizes { vocabulary, backbone, .. } = Sizes::SMALL;
        let embedded = numbers16(4, vocabulary * backbone, 0.3);
        let buffer = device.constant("embedding", &bytes16(&embedded))?;
        Case::with(device, Sizes::SMALL, length, storage, buffer, embedded)
    }

    /// [`Sizes::E4B`] with embeddings that are all alike: what they hold takes no time, and no memory of the host.
    pub fn large(device: &Device, length: usize) -> Result<Case, Failure> {
        let buffer = device.allocate("embedding", Sizes::E4B.vocabulary * Sizes::E4B.backbone * 2)?;
        buffer.fill(0x3c)?;
        Case::with(device, Sizes::E4B, length, KvStorage::Bf16, buffer, Vec::new())
    }

    fn with(
        device: &Device,
        sizes: Sizes,
        length: usize,
        storage: KvStorage,
        embedding: Buffer,
        embedded: Vec<bf16>,
    ) -> Result<Case, Failure> {
        let Sizes { heads, kv_heads, hidden, backbone, inner, vocabulary, clusters, window, context, dims, .. } = sizes;
        let mut seeds = Seeds(1000 * length as u32);
        let mut layers = Vec::new();
        for sliding in std::iter::repeat_n(true, sizes.sliding).chain([false]) {
            let width = heads * dims[usize::from(!sliding)];
            let lengths = [hidden, width / heads, hidden, hidden, hidden];
            let shapes = [(width, hidden), (hidden, width), (inner, hidden), (inner, hidden), (hidden, inner)];
            let matrices = shapes.map(|(rows, cols)| seeds.dense(rows, cols)).into_iter().collect::<Result<_, _>>()?;
            let norms = lengths.map(|n| seeds.vector(n)).to_vec();
            layers.push(Layer { sliding, norms, matrices, scalar: 0.75 });
        }
        let frequency = |theta: f64, dim: usize, pairs: usize| -> Vec<f32> {
            let turning = |m: usize| if m < pairs { theta.powf(-2.0 * m as f64 / dim as f64) as f32 } else { 0.0 };
            (0..dim / 2).map(turning).collect()
        };
        let frequencies = [frequency(1e4, dims[0], dims[0] / 2), frequency(1e6, dims[1], dims[1] / 8)];
        let rotations = [
            Rotations::new(device, &frequencies[0], context + 16)?,
            Rotations::new(device, &frequencies[1], context + 16)?,
        ];
        let shapes = [0, 1].map(|i| KvShape { kv_heads, head_dim: dims[i], window: [Some(window), None][i] });
        let kv = KvCache::with_storage(device, &shapes, context, storage)?;
        kv.buffer().fill(0xff)?;
        let mut cached = Vec::new();
        for layer in kv.layers() {
            let width = layer.shape.width();
            let mut both = [seeds.next(), seeds.next()].map(|seed| numbers16(seed, (length - 1) * width, 0.6));
            for (part, values) in both.iter_mut().enumerate() {
                // What a ring has lost is lost.
                for position in (length - 1).saturating_sub(layer.capacity)..length - 1 {
                    let components = &mut values[position * width..(position + 1) * width];
                    let bytes = layer.encode(&components.iter().map(|v| v.to_f32()).collect::<Vec<_>>());
                    kv.buffer()
                        .write(layer.offsets[part] + position % layer.capacity * layer.position_bytes(), &bytes)?;
                    components.iter_mut().zip(layer.decode(&bytes)).for_each(|(v, is)| *v = bf16::from_f32(is));
                }
            }
            cached.push(both);
        }
        let mut order: Vec<u32> = (0..vocabulary as u32).collect();
        let seed = seeds.next();
        (0..vocabulary).for_each(|i| order.swap(i, random(seed, i) as usize % vocabulary));
        let sequence = Sequence::new(device, context, 2)?;
        let seed = seeds.next();
        let tokens: Vec<u32> = (0..length).map(|i| random(seed, i) % vocabulary as u32).collect();
        sequence.begin(&tokens, 100)?;
        let state = numbers16(seeds.next(), backbone, 1.0);
        let carried = device.allocate("carried", backbone * 2)?;
        carried.write(0, &bytes16(&state))?;
        Ok(Case {
            device: device.clone(),
            sizes,
            pre: seeds.dense(hidden, 2 * backbone)?,
            post: seeds.dense(backbone, hidden)?,
            head: seeds.dense(vocabulary, hidden)?,
            centroids: seeds.dense(clusters, hidden)?,
            final_norm: seeds.vector(hidden),
            order,
            layers,
            embedding: Table { buffer: embedding, vocabulary, width: backbone },
            embedded,
            frequencies,
            rotations,
            kv,
            cached,
            sequence,
            hidden: state,
            carried,
            length,
        })
    }

    /// The weights, with a query `back` positions before the newest token, and a head that looks into clusters or at every token.
    pub fn model(&self, back: usize, clustered: bool) -> DraftModel<'_> {
        let layers = self.layers.iter().map(|own| {
            let &Layer { sliding, ref norms, ref matrices, scalar } = own;
            let [q, o, gate, up, down] = [0, 1, 2, 3, 4].map(|m| matrices[m].view());
            let norms = [0, 1, 2, 3, 4].map(|n| &norms[n][..]);
            DraftLayer { kv_layer: usize::from(!sliding), sliding, norms, q, o, gate, up, down, scalar }
        });
        DraftModel {
            heads: self.sizes.heads,
            pre: self.pre.view(),
            post: self.post.view(),
            layers: layers.collect(),
            final_norm: &self.final_norm,
            head: self.head.view(),
            clusters: clustered.then(|| DraftClusters {
                centroids: self.centroids.view(),
                order: &self.order,
                chosen: self.sizes.chosen,
            }),
            eps: EPS,
            back,
            window: self.sizes.window + 1 - back,
        }
    }

    /// The same on the device.
    pub fn drafter(&self, back: usize, clustered: bool, format: Format) -> Result<Drafter, Failure> {
        let [sliding, full] = &self.rotations;
        let model = self.model(back, clustered);
        Ok(Drafter::new(&self.device, &model, format, &self.kv, &self.embedding, [sliding, full])?)
    }

    /// The newest token.
    pub fn newest(&self) -> Result<u32, Failure> {
        Ok(words(self.sequence.state())?[1])
    }

    /// Runs launches on so many blocks instead of one a multiprocessor; of a cooperative launch all must find room on the device.
    fn run(&self, launches: Vec<Launch>, blocks: Option<u32>) -> Result<(), Failure> {
        self.sequence.drafts().fill(0)?;
        for mut launch in launches {
            if launch.kernel != "draft_begin" {
                launch.grid[0] = blocks.unwrap_or(launch.grid[0]);
            }
            // SAFETY: typed launches; any number of blocks shares the work.
            unsafe { self.device.launch(&launch) }?;
        }
        Ok(())
    }

    fn outcome(&self, drafter: &Drafter, depth: usize) -> Result<Outcome, Failure> {
        let drafts = words(self.sequence.drafts())?[..depth * CANDIDATES].to_vec();
        Ok((drafts, drafter.state()?.into_iter().map(f32::to_bits).collect()))
    }

    /// Drafts of `depth` passes, a kernel a phase, on so many blocks.
    pub fn by_phases(&self, drafter: &Drafter, depth: usize, blocks: Option<u32>) -> Result<Outcome, Failure> {
        self.run(drafter.launches(&self.sequence, &self.carried, depth)?, blocks)?;
        self.outcome(drafter, depth)
    }

    /// The same by one persistent kernel.
    pub fn persistent(&self, drafter: &Drafter, depth: usize, blocks: Option<u32>) -> Result<Outcome, Failure> {
        self.run(drafter.persistent(&self.sequence, &self.carried, depth)?.to_vec(), blocks)?;
        self.outcome(drafter, depth)
    }

    /// The target's state in front of the first pass.
    pub fn state(&self) -> Vec<f64> {
        self.hidden.iter().map(|v| v.to_f64()).collect()
    }

    /// One pass in f64: logits of every token that counts, best first, and the next state.
    pub fn reference(&self, token: u32, state: &[f64], back: usize, clustered: bool) -> (Vec<(u32, f64)>, Vec<f64>) {
        let Sizes { heads, kv_heads, backbone, vocabulary, clusters, chosen, window, dims, .. } = self.sizes;
        let times = |m: &Dense, x: &[f64]| -> Vec<f64> {
            (0..m.rows()).map(|r| m.row(r).iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
        };
        let rms = |x: &[f64], w: &[f32]| rms(x, Some(w), EPS);
        let add = |x: &[f64], y: &[f64]| -> Vec<f64> { x.iter().zip(y).map(|(a, b)| a + b).collect() };
        let embedded = &self.embedded[token as usize * backbone..][..backbone];
        let mut input: Vec<f64> = embedded.iter().map(|e| e.to_f64() * (backbone as f64).sqrt()).collect();
        input.extend(state);
        let mut x = times(&self.pre, &input);
        let cached = self.length - 1;
        for layer in &self.layers {
            let kind = usize::from(!layer.sliding);
            let dim = dims[kind];
            let [q, o, gate, up, down] = [0, 1, 2, 3, 4].map(|m| &layer.matrices[m]);
            let projected = times(q, &rms(&x, &layer.norms[0]));
            let begin = if layer.sliding { cached.saturating_sub(window + 1 - back) } else { 0 };
            let mut attended = Vec::new();
            for (h, head) in projected.chunks(dim).enumerate() {
                let query = turned(&rms(head, &layer.norms[1]), cached - back, &self.frequencies[kind]);
                let at = |p: usize| (p * kv_heads + h / (heads / kv_heads)) * dim;
                let [keys, values] = &self.cached[kind];
                let scores: Vec<f64> = (begin..cached)
                    .map(|p| query.iter().zip(&keys[at(p)..]).map(|(a, b)| a * b.to_f64()).sum())
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                for d in 0..dim {
                    let weighted = scores.iter().zip(begin..cached);
                    let value: f64 = weighted.map(|(s, p)| (s - top).exp() * values[at(p) + d].to_f64()).sum();
                    attended.push(value / sum);
                }
            }
            x = add(&x, &rms(&times(o, &attended), &layer.norms[2]));
            let y = rms(&x, &layer.norms[3]);
            let product: Vec<f64> = times(gate, &y).iter().zip(times(up, &y)).map(|(g, u)| gelu(*g) * u).collect();
            x = add(&x, &rms(&times(down, &product), &layer.norms[4]));
            x.iter_mut().for_each(|v| *v *= f64::from(layer.scalar));
        }
        let out = rms(&x, &self.final_norm);
        let mut tokens: Vec<u32> = (0..vocabulary as u32).collect();
        if clustered {
            let scores = times(&self.centroids, &out);
            let mut best: Vec<usize> = (0..clusters).collect();
            best.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            let size = vocabulary / clusters;
            tokens = best[..chosen].iter().flat_map(|&c| &self.order[c * size..(c + 1) * size]).copied().collect();
        }
        let logits = times(&self.head, &out);
        let mut ranked: Vec<(u32, f64)> = tokens.iter().map(|&t| (t, logits[t as usize])).collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        (ranked, times(&self.post, &out))
    }
}
