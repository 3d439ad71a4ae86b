//! `draft.cuh` on the emulator: the drafter's passes against plain f64, a kernel a phase against one persistent kernel, bit for bit.

#![cfg(target_arch = "x86_64")]

use half::bf16;
use kernels::{
    cpu::{Data, Matrix},
    device::{Buffer, Device, DeviceError, Emulation, Launch},
    step::{
        StepError,
        decide::{CANDIDATES, Sequence},
        draft::{DraftClusters, DraftLayer, DraftModel, Drafter, Format},
        kv::{KvCache, KvShape},
        rows::{Rotations, Table},
    },
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HIDDEN: usize = 32;
const BACKBONE: usize = 48;
const INNER: usize = 64;
const VOCABULARY: usize = 96;
const CLUSTERS: usize = 12;
const CHOSEN: usize = 3;
const WINDOW: usize = 20;
const CONTEXT: usize = 200;
const EPS: f32 = 1e-6;
/// Head sizes of the sliding and of the full layer.
const DIMS: [usize; 2] = [16, 32];

type Dense = Matrix<Vec<u8>>;

/// Rows of random bf16, exact in every format of comparison.
fn dense(rows: usize, cols: usize, spread: f32, random: &mut StdRng) -> Dense {
    let values = (0..rows * cols).map(|_| bf16::from_f32(random.random_range(-spread..spread)));
    let bytes: Vec<u8> = values.flat_map(|v| v.to_le_bytes()).collect();
    Matrix::new(rows, cols, Data::Bf16(bytes)).unwrap()
}

fn vector(len: usize, random: &mut StdRng) -> Vec<f32> {
    (0..len).map(|_| random.random_range(0.5f32..1.5)).collect()
}

struct Layer {
    norms: Vec<Vec<f32>>,
    /// q, o, gate, up, down.
    matrices: Vec<Dense>,
    scalar: f32,
}

/// A drafter of two layers, one of each kind, and the target's state that it reads.
struct Case {
    device: Device,
    pre: Dense,
    post: Dense,
    head: Dense,
    centroids: Dense,
    order: Vec<u32>,
    final_norm: Vec<f32>,
    layers: Vec<Layer>,
    embedding: Table,
    embedded: Vec<f32>,
    frequencies: [Vec<f32>; 2],
    rotations: [Rotations; 2],
    kv: KvCache,
    /// Of each layer, `[positions, kv_heads, dim]`.
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    sequence: Sequence,
    hidden: Vec<f32>,
    carried: Buffer,
    length: usize,
}

fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect()
}

fn run(device: &Device, launches: &[Launch]) -> Result<(), DeviceError> {
    // SAFETY: typed launches; the planted kernel takes the same arguments.
    launches.iter().try_for_each(|launch| unsafe { device.launch(launch) })
}

impl Case {
    /// `length` tokens, of which all but the newest are cached.
    fn new(length: usize) -> Case {
        let mut random = StdRng::seed_from_u64(5 + length as u64);
        let device =
            Device::emulated(Emulation { checked: false, multiprocessors: 3, ..Emulation::default() }).unwrap();
        let matrix =
            |rows: usize, cols: usize, random: &mut StdRng| dense(rows, cols, 2.0 / (cols as f32).sqrt(), random);
        let layers = DIMS
            .iter()
            .map(|&dim| Layer {
                norms: [HIDDEN, dim, HIDDEN, HIDDEN, HIDDEN].map(|n| vector(n, &mut random)).to_vec(),
                matrices: [
                    (HEADS * dim, HIDDEN),
                    (HIDDEN, HEADS * dim),
                    (INNER, HIDDEN),
                    (INNER, HIDDEN),
                    (HIDDEN, INNER),
                ]
                .map(|(rows, cols)| matrix(rows, cols, &mut random))
                .into_iter()
                .collect(),
                scalar: 0.75,
            })
            .collect();
        let rounded = |n: usize, spread: f32, random: &mut StdRng| -> Vec<f32> {
            (0..n).map(|_| bf16::from_f32(random.random_range(-spread..spread)).to_f32()).collect()
        };
        let embedded = rounded(VOCABULARY * BACKBONE, 0.3, &mut random);
        let embedding = Table {
            buffer: device.constant("embedding", &bf16_bytes(&embedded)).unwrap(),
            vocabulary: VOCABULARY,
            width: BACKBONE,
        };
        let frequency = |theta: f64, dim: usize, pairs: usize| -> Vec<f32> {
            let turning = |m: usize| if m < pairs { theta.powf(-2.0 * m as f64 / dim as f64) as f32 } else { 0.0 };
            (0..dim / 2).map(turning).collect()
        };
        let frequencies = [frequency(1e4, DIMS[0], DIMS[0] / 2), frequency(1e6, DIMS[1], DIMS[1] / 8)];
        let rotations = [0, 1].map(|i| Rotations::new(&device, &frequencies[i], CONTEXT + 16).unwrap());
        let shapes = [0, 1].map(|i| KvShape { kv_heads: KV_HEADS, head_dim: DIMS[i], window: [Some(WINDOW), None][i] });
        let kv = KvCache::new(&device, &shapes, CONTEXT).unwrap();
        kv.buffer().fill(0xff).unwrap();
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for layer in kv.layers() {
            let width = layer.shape.width();
            for (part, all) in [&mut keys, &mut values].into_iter().enumerate() {
                let cached = rounded((length - 1) * width, 0.6, &mut random);
                // What a ring has lost is lost.
                for position in (length - 1).saturating_sub(layer.capacity)..length - 1 {
                    let at = layer.offsets[part] + position % layer.capacity * width * 2;
                    kv.buffer().write(at, &bf16_bytes(&cached[position * width..(position + 1) * width])).unwrap();
                }
                all.push(cached);
            }
        }
        let mut order: Vec<u32> = (0..VOCABULARY as u32).collect();
        (0..VOCABULARY).for_each(|i| order.swap(i, random.random_range(0..VOCABULARY)));
        let sequence = Sequence::new(&device, CONTEXT, 2).unwrap();
        let tokens: Vec<u32> = (0..length).map(|_| random.random_range(0..VOCABULARY as u32)).collect();
        sequence.begin(&tokens, 100).unwrap();
        let hidden = rounded(BACKBONE, 1.0, &mut random);
        let carried = device.allocate("carried", BACKBONE * 2).unwrap();
        carried.write(0, &bf16_bytes(&hidden)).unwrap();
        Case {
            pre: matrix(HIDDEN, 2 * BACKBONE, &mut random),
            post: matrix(BACKBONE, HIDDEN, &mut random),
            head: matrix(VOCABULARY, HIDDEN, &mut random),
            centroids: matrix(CLUSTERS, HIDDEN, &mut random),
            final_norm: vector(HIDDEN, &mut random),
            device,
            order,
            layers,
            embedding,
            embedded,
            frequencies,
            rotations,
            kv,
            keys,
            values,
            sequence,
            hidden,
            carried,
            length,
        }
    }

    fn model(&self, back: usize, clustered: bool) -> DraftModel<'_> {
        let layer = |i: usize| {
            let Layer { norms, matrices, scalar } = &self.layers[i];
            let [q, o, gate, up, down] = [0, 1, 2, 3, 4].map(|m| matrices[m].view());
            let norms = [0, 1, 2, 3, 4].map(|n| &norms[n][..]);
            DraftLayer { kv_layer: i, sliding: i == 0, norms, q, o, gate, up, down, scalar: *scalar }
        };
        DraftModel {
            heads: HEADS,
            pre: self.pre.view(),
            post: self.post.view(),
            layers: (0..self.layers.len()).map(layer).collect(),
            final_norm: &self.final_norm,
            head: self.head.view(),
            clusters: clustered.then(|| DraftClusters {
                centroids: self.centroids.view(),
                order: &self.order,
                chosen: CHOSEN,
            }),
            eps: EPS,
            back,
            window: WINDOW + 1 - back,
        }
    }

    fn drafter(&self, back: usize, clustered: bool, format: Format) -> Drafter {
        let [sliding, full] = &self.rotations;
        let model = self.model(back, clustered);
        Drafter::new(&self.device, &model, format, &self.kv, &self.embedding, [sliding, full]).unwrap()
    }

    /// Drafts of `depth` passes, and the last state.
    fn outcome(&self, drafter: &Drafter, depth: usize) -> (Vec<u32>, Vec<f32>) {
        let mut bytes = vec![0; depth * CANDIDATES * 4];
        self.sequence.drafts().read(0, &mut bytes).unwrap();
        let drafts = bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect();
        (drafts, drafter.state().unwrap())
    }

    fn by_phases(&self, drafter: &Drafter, depth: usize) -> (Vec<u32>, Vec<f32>) {
        self.sequence.drafts().fill(0).unwrap();
        run(&self.device, &drafter.launches(&self.sequence, &self.carried, depth).unwrap()).unwrap();
        self.outcome(drafter, depth)
    }

    fn persistent(&self, drafter: &Drafter, depth: usize) -> (Vec<u32>, Vec<f32>) {
        self.sequence.drafts().fill(0).unwrap();
        run(&self.device, &drafter.persistent(&self.sequence, &self.carried, depth).unwrap()).unwrap();
        self.outcome(drafter, depth)
    }

    /// One pass in f64: logits of every token that counts, and the next state.
    fn reference(&self, token: u32, state: &[f64], back: usize, clustered: bool) -> (Vec<(u32, f64)>, Vec<f64>) {
        let times = |m: &Dense, x: &[f64]| -> Vec<f64> {
            (0..m.rows()).map(|r| m.row(r).iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
        };
        let rms = |x: &[f64], w: &[f32]| -> Vec<f64> {
            let scale = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + f64::from(EPS)).sqrt().recip();
            x.iter().zip(w).map(|(v, w)| v * scale * f64::from(*w)).collect()
        };
        let add = |x: &[f64], y: &[f64]| -> Vec<f64> { x.iter().zip(y).map(|(a, b)| a + b).collect() };
        let gelu = |z: f64| 0.5 * z * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (z + 0.044715 * z.powi(3))).tanh());
        let mut input: Vec<f64> = self.embedded[token as usize * BACKBONE..][..BACKBONE]
            .iter()
            .map(|&e| f64::from(e) * (BACKBONE as f64).sqrt())
            .collect();
        input.extend(state);
        let mut x = times(&self.pre, &input);
        let cached = self.length - 1;
        for (l, layer) in self.layers.iter().enumerate() {
            let dim = DIMS[l];
            let [q, o, gate, up, down] = [0, 1, 2, 3, 4].map(|m| &layer.matrices[m]);
            let projected = times(q, &rms(&x, &layer.norms[0]));
            let begin = if l == 0 { cached.saturating_sub(WINDOW + 1 - back) } else { 0 };
            let mut attended = Vec::new();
            for (h, head) in projected.chunks(dim).enumerate() {
                let normed = rms(head, &layer.norms[1]);
                let mut query = normed.clone();
                for m in 0..dim / 2 {
                    let angle = f64::from((cached - back) as f32 * self.frequencies[l][m]);
                    query[m] = normed[m] * angle.cos() - normed[m + dim / 2] * angle.sin();
                    query[m + dim / 2] = normed[m + dim / 2] * angle.cos() + normed[m] * angle.sin();
                }
                let at = |p: usize| (p * KV_HEADS + h / (HEADS / KV_HEADS)) * dim;
                let scores: Vec<f64> = (begin..cached)
                    .map(|p| query.iter().zip(&self.keys[l][at(p)..]).map(|(a, b)| a * f64::from(*b)).sum())
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                for d in 0..dim {
                    let weighted = scores.iter().zip(begin..cached);
                    let value: f64 =
                        weighted.map(|(s, p)| (s - top).exp() * f64::from(self.values[l][at(p) + d])).sum();
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
        let mut tokens: Vec<u32> = (0..VOCABULARY as u32).collect();
        if clustered {
            let scores = times(&self.centroids, &out);
            let mut best: Vec<usize> = (0..CLUSTERS).collect();
            best.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            let size = VOCABULARY / CLUSTERS;
            tokens = best[..CHOSEN].iter().flat_map(|&c| &self.order[c * size..(c + 1) * size]).copied().collect();
        }
        let logits = times(&self.head, &out);
        let mut ranked: Vec<(u32, f64)> = tokens.iter().map(|&t| (t, logits[t as usize])).collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        (ranked, times(&self.post, &out))
    }
}

#[test]
fn drafts_and_states_are_those_of_plain_f64() {
    for (length, back, clustered) in [(2, 0, true), (19, 1, false), (22, 0, true), (70, 0, true), (150, 1, true)] {
        let case = Case::new(length);
        let drafter = case.drafter(back, clustered, Format::Bf16);
        let depth = 3;
        let (drafts, state) = case.by_phases(&drafter, depth);
        let mut bytes = [0; 4];
        case.sequence.state().read(4, &mut bytes).unwrap();
        let mut token = u32::from_le_bytes(bytes);
        let mut exact: Vec<f64> = case.hidden.iter().map(|&v| f64::from(v)).collect();
        for d in 0..depth {
            let (ranked, next) = case.reference(token, &exact, back, clustered);
            for (i, draft) in drafts[d * CANDIDATES..][..CANDIDATES].iter().enumerate() {
                // Queries and softmax weights are bf16: what is closer than this may change places.
                let found = ranked.iter().find(|r| r.0 == *draft).unwrap_or_else(|| panic!("{draft} at depth {d}"));
                assert!((found.1 - ranked[i].1).abs() < 0.05, "length {length}, depth {d}: {draft} as number {i}");
            }
            token = drafts[d * CANDIDATES];
            exact = next;
        }
        let spread = exact.iter().map(|v| v.abs()).fold(0.0, f64::max);
        for (found, expected) in state.iter().zip(&exact) {
            assert!((f64::from(*found) - expected).abs() < 0.02 * spread, "{found} for {expected}");
        }
    }
}

#[test]
fn int8_weights_are_within_their_rounding() {
    let case = Case::new(60);
    let (wide, narrow) = (case.drafter(0, true, Format::Bf16), case.drafter(0, true, Format::Int8));
    assert!(narrow.weight_bytes() < wide.weight_bytes() * 2 / 3);
    let (_, expected) = case.by_phases(&wide, 1);
    let (_, state) = case.by_phases(&narrow, 1);
    let spread = expected.iter().fold(0.0f32, |most, v| most.max(v.abs()));
    let error = state.iter().zip(&expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(error > 0.0 && error < 0.1 * spread, "{error} of {spread}");
}

#[test]
fn one_persistent_kernel_gives_the_bits_of_a_kernel_a_phase() {
    for (length, clustered, format) in [(70, true, Format::Bf16), (70, true, Format::Int8), (9, false, Format::Bf16)] {
        let case = Case::new(length);
        let drafter = case.drafter(0, clustered, format);
        let expected = case.by_phases(&drafter, 4);
        for blocks in [1, 2, 5, 8] {
            case.device.emulate(Emulation { checked: false, multiprocessors: blocks, ..Emulation::default() });
            assert!(case.persistent(&drafter, 4) == expected, "{blocks} blocks");
            assert!(case.by_phases(&drafter, 4) == expected, "{blocks} blocks, by phases");
        }
    }
}

#[test]
fn no_schedule_of_the_persistent_kernel_has_a_race() {
    let case = Case::new(40);
    let drafter = case.drafter(0, true, Format::Bf16);
    let expected = case.persistent(&drafter, 2);
    for seed in 0..3 {
        case.device.emulate(Emulation { multiprocessors: 2 + seed as u32, seed, ..Emulation::default() });
        assert!(case.persistent(&drafter, 2) == expected, "seed {seed}");
    }
    // Without one of the barriers.
    let [begin, mut all] = drafter.persistent(&case.sequence, &case.carried, 1).unwrap();
    all.kernel = "draft_all_dropped_barrier";
    let error = run(&case.device, &[begin, all]).unwrap_err().to_string();
    assert!(error.contains("RACE") || error.contains("stale"), "{error}");
}

#[test]
fn a_round_after_an_aborted_one_is_right() {
    let case = Case::new(40);
    let drafter = case.drafter(0, true, Format::Bf16);
    let expected = case.persistent(&drafter, 1);
    case.device.emulate(Emulation { multiprocessors: 2, abort_after: 30_000, ..Emulation::default() });
    assert!(run(&case.device, &drafter.persistent(&case.sequence, &case.carried, 1).unwrap()).is_err());
    case.device.emulate(Emulation { checked: false, multiprocessors: 2, ..Emulation::default() });
    assert!(case.persistent(&drafter, 1) == expected);
}

#[test]
fn a_drafter_that_does_not_fit_is_refused() {
    let case = Case::new(10);
    let [sliding, full] = &case.rotations;
    let refused = |model: DraftModel<'_>| {
        let made = Drafter::new(&case.device, &model, Format::Bf16, &case.kv, &case.embedding, [sliding, full]);
        match made.map(|_| ()) {
            Err(StepError::Shape { what, .. }) => what,
            Err(_) => "something else",
            Ok(()) => "nothing",
        }
    };
    let good = || case.model(0, true);
    assert_eq!(refused(good()), "nothing");
    assert_eq!(refused(DraftModel { heads: 3, ..good() }), "query heads of the drafter");
    assert_eq!(refused(DraftModel { head: case.centroids.view(), ..good() }), "head of the drafter");
    assert_eq!(refused(DraftModel { back: 2, ..good() }), "position of the drafter's query");
    assert_eq!(refused(DraftModel { window: WINDOW + 2, ..good() }), "window of the drafter");
    let clusters = |chosen| Some(DraftClusters { centroids: case.centroids.view(), order: &case.order, chosen });
    assert_eq!(refused(DraftModel { clusters: clusters(13), ..good() }), "clusters looked into");
    let drafter = case.drafter(0, true, Format::Bf16);
    assert!(drafter.launches(&case.sequence, &case.carried, 16).is_err());
    let short = case.device.allocate("short", BACKBONE).unwrap();
    assert!(matches!(drafter.persistent(&case.sequence, &short, 1), Err(StepError::Short { .. })));
}
