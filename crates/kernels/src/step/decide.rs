//! What a step decides (`kernels/decide.cuh`): the best token of each row, acceptance, the next step's start, and the record that the
//! host reads.
//!
//! All of a sequence's state is in device words ([`Sequence`]). A replayed step reads the newest token and the drafts from there and
//! leaves the next ones there; the host only reads records from the ring. The rules are those of speculative decoding with a star of
//! branches: longest accepted prefix, then at the next depth the first branch that holds the target's choice, then one token of the
//! target's own; cut at a stop token, at the room left, and where the context ends. After the end, steps change nothing and record nothing.

use super::{
    MOST_ROWS, Rows, StepError, int,
    kv::KvCache,
    require, require_bytes, require_rows,
    rows::{NO_TOKEN, Tokens},
};
use crate::device::{Argument, Buffer, Device, Launch, Pinned};

/// As in the source.
const THREADS: u32 = 256;
const STATE_WORDS: usize = 16;
const RECORD_WORDS: usize = 36;
const RING_HEADER: usize = 16;
/// Candidates of a depth: the main draft and up to four branches.
pub const CANDIDATES: usize = 5;
/// Deepest chain.
pub const MOST_DEPTH: usize = MOST_ROWS - 1;

/// The rows of a step: the newest token, a main draft for each depth, and further candidates of some depths as branches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tree {
    main: usize,
    rows: usize,
    /// Depth of each row, four bits each.
    depths: u64,
}

impl Tree {
    /// `branches[d - 1]` branches at depth d, beside the main draft.
    ///
    /// # Errors
    /// [`StepError::Shape`] for more than 16 rows or 4 branches at one depth.
    pub fn new(branches: &[usize]) -> Result<Tree, StepError> {
        let main = branches.len();
        require(main <= MOST_DEPTH, "depth of the chain", main, format!("at most {MOST_DEPTH}"))?;
        let most = branches.iter().copied().max().unwrap_or(0);
        require(most < CANDIDATES, "branches at one depth", most, format!("at most {}", CANDIDATES - 1))?;
        let rows = 1 + main + branches.iter().sum::<usize>();
        require_rows(rows)?;
        let beside = branches.iter().enumerate().flat_map(|(d, &count)| std::iter::repeat_n(d + 1, count));
        let depths = (0..=main).chain(beside).enumerate().fold(0, |packed, (row, d)| packed | (d as u64) << (4 * row));
        Ok(Tree { main, rows, depths })
    }

    /// Rows of a step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Depth of the main chain.
    pub fn main(&self) -> usize {
        self.main
    }
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// A stop token, which is the last one output.
    StopToken,
    /// No tokens are left to be output.
    Length,
    /// The context is full.
    Context,
    /// A logit was NaN or infinite: the model or a kernel is broken. The step's tokens are not output.
    BadLogits,
}

/// What a step reports to the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepRecord {
    /// Tokens output, in order.
    pub output: Vec<u32>,
    /// Main drafts accepted, whether output or cut.
    pub accepted: usize,
    /// Branch accepted after them.
    pub branch: Option<usize>,
    /// Whether the sequence ended here.
    pub ended: Option<Ended>,
    /// Tokens of the rows; [`NO_TOKEN`] for drafts that were not made.
    pub rows: Vec<u32>,
}

/// Where a head's product leaves the best token of each row: see [`Sequence::best`].
#[derive(Clone, Copy)]
pub struct Best<'a> {
    best: &'a Buffer,
    state: &'a Buffer,
    ids: Option<&'a Buffer>,
    cap: f32,
}

impl<'a> Best<'a> {
    /// The largest ranks, u64 `[16]`, of a logit's order and a token each: what acceptance reads and zeroes.
    pub fn ranks(&self) -> &'a Buffer {
        self.best
    }

    /// What a kernel is given for `rows` rows of `count` logits.
    pub(crate) fn arguments(&self, rows: usize, count: usize) -> Result<[Argument; 4], StepError> {
        require_rows(rows)?;
        require_bytes("the best token", &[(self.best, rows * 8)])?;
        if let Some(ids) = self.ids {
            require_bytes("the best token", &[(ids, count * 4)])?;
        }
        let ids = self.ids.map_or(Argument::U64(0), |b| b.at(0));
        Ok([ids, self.best.at(0), self.state.at(0), Argument::F32(self.cap)])
    }
}

/// State of a sequence, in device words.
pub struct Sequence {
    device: Device,
    context: usize,
    records: usize,
    state: Buffer,
    best: Buffer,
    drafts: Buffer,
    history: Buffer,
    ring: Pinned,
    /// Tokens of the step's rows.
    pub tokens: Tokens,
    /// Positions and side slots of the step's rows.
    pub table: Rows,
}

fn words(values: impl IntoIterator<Item = u32>) -> Vec<u8> {
    values.into_iter().flat_map(u32::to_le_bytes).collect()
}

impl Sequence {
    /// A sequence in a context of so many positions. The ring keeps the last `records` steps: the host must not replay further ahead of
    /// what it has read.
    pub fn new(device: &Device, context: usize, records: usize) -> Result<Sequence, StepError> {
        require((1..1 << 24).contains(&context), "context", context, "1 to 16777215 positions")?;
        require((1..1 << 16).contains(&records), "records of the ring", records, "1 to 65535")?;
        let zeroed = |name: &str, bytes: usize| {
            let buffer = device.allocate(name, bytes)?;
            buffer.fill(0).map(|()| buffer)
        };
        Ok(Sequence {
            device: device.clone(),
            context,
            records,
            state: zeroed("state", STATE_WORDS * 4)?,
            best: zeroed("best", MOST_ROWS * 8)?,
            drafts: zeroed("drafts", MOST_DEPTH * CANDIDATES * 4)?,
            history: zeroed("history", (context + MOST_ROWS + 1) * 4)?,
            ring: device.pinned("ring", RING_HEADER + records * RECORD_WORDS)?,
            tokens: Tokens::new(device)?,
            table: Rows::new(device)?,
        })
    }

    /// Starts from `tokens`, the last of which is decided but not run, with `room` tokens still to be output.
    ///
    /// # Errors
    /// [`StepError::Shape`] where the tokens do not fit into the context.
    pub fn begin(&self, tokens: &[u32], room: usize) -> Result<(), StepError> {
        let fits = (1..=self.context).contains(&tokens.len());
        require(fits, "tokens of the sequence", tokens.len(), format!("1 to {} positions", self.context))?;
        let newest = tokens.len() - 1;
        let room = room.min(u32::MAX as usize / 2) as u32;
        let mut state = [0; STATE_WORDS];
        (state[0], state[1], state[2]) = (newest as u32, tokens[newest], room);
        state[3] = if room == 0 { 2 } else { 0 };
        self.state.write(0, &words(state))?;
        self.history.write(0, &words(tokens.iter().copied()))?;
        self.best.fill(0)?;
        Ok(self.ring.buffer().fill(0)?)
    }

    /// Position of the newest token: the cache holds the positions before.
    pub fn base(&self) -> Result<usize, StepError> {
        let mut word = [0; 4];
        self.state.read(0, &mut word)?;
        Ok(u32::from_le_bytes(word) as usize)
    }

    /// The drafts `[depth, CANDIDATES]` of the next step, best first, [`NO_TOKEN`] where there is none: what a drafter writes.
    pub fn drafts(&self) -> &Buffer {
        &self.drafts
    }

    /// The words that kernels share.
    pub fn state(&self) -> &Buffer {
        &self.state
    }

    /// Writes drafts from the host, best first, for each depth.
    pub fn set_drafts(&self, ranked: &[Vec<u32>]) -> Result<(), StepError> {
        require(ranked.len() <= MOST_DEPTH, "depth of the drafts", ranked.len(), format!("at most {MOST_DEPTH}"))?;
        let mut all = [NO_TOKEN; MOST_DEPTH * CANDIDATES];
        for (to, from) in all.chunks_exact_mut(CANDIDATES).zip(ranked) {
            to.iter_mut().zip(from).for_each(|(t, &f)| *t = f);
        }
        Ok(self.drafts.write(0, &words(all))?)
    }

    /// Steps recorded so far. The ring is memory of the host: reading it waits for nothing.
    pub fn recorded(&self) -> Result<usize, StepError> {
        Ok(self.ring.load(0)? as usize)
    }

    /// The record of step `step`, counted from 0.
    ///
    /// # Errors
    /// [`StepError::Shape`] where the step is not in the ring: not yet, or not any more.
    pub fn record(&self, step: usize) -> Result<StepRecord, StepError> {
        let count = self.recorded()?;
        let kept = count.saturating_sub(self.records)..count;
        require(kept.contains(&step), "step", step, format!("steps {} to {} of the ring", kept.start, kept.end))?;
        let begin = RING_HEADER + step % self.records * RECORD_WORDS;
        let record = (begin..begin + RECORD_WORDS).map(|word| self.ring.load(word));
        let record: Vec<u32> = record.collect::<Result<_, _>>()?;
        let ended = [None, Some(Ended::StopToken), Some(Ended::Length), Some(Ended::Context)];
        Ok(StepRecord {
            output: record[4..4 + (record[0] as usize).min(MOST_ROWS)].to_vec(),
            accepted: record[1] as usize,
            branch: (record[2] as usize).checked_sub(1),
            ended: ended.get(record[3] as usize).copied().unwrap_or(Some(Ended::BadLogits)),
            rows: record[20..].to_vec(),
        })
    }

    fn launch(
        &self,
        kernel: &'static str,
        grid: [usize; 2],
        block: u32,
        shared: u32,
        arguments: Vec<Argument>,
    ) -> Launch {
        let grid = [grid[0] as u32, grid[1] as u32, 1];
        Launch { kernel, grid, block, shared_bytes: shared, cooperative: false, arguments }
    }

    /// Tokens and places of a step's rows, from the newest token and the drafts.
    pub fn place(&self, tree: Tree) -> Launch {
        let mut arguments = vec![self.state.at(0), self.drafts.at(0), self.tokens.buffer().at(0)];
        arguments.extend([self.table.buffer().at(0), int(tree.rows), int(tree.main), Argument::U64(tree.depths)]);
        self.launch("place_rows", [1, 1], 32, 0, arguments)
    }

    /// The best token of each row of `logits`, f32 `[rows, count]`, after the softcap `cap`. `ids` are the tokens of the head's rows where
    /// it does not have one for each.
    pub fn choose(
        &self,
        logits: &Buffer,
        ids: Option<&Buffer>,
        rows: usize,
        count: usize,
        cap: Option<f32>,
    ) -> Result<Launch, StepError> {
        require_rows(rows)?;
        require((1..1 << 30).contains(&count), "rows of the head", count, "1 to 2^30")?;
        require_bytes("best_token", &[(logits, rows * count * 4), (ids.unwrap_or(logits), count * 4)])?;
        let mut arguments = vec![logits.at(0), ids.map_or(Argument::U64(0), |b| b.at(0))];
        arguments.extend([self.best.at(0), self.state.at(0), int(count), Argument::F32(cap.unwrap_or(0.0))]);
        // About four logits a thread, on at most two blocks a multiprocessor.
        let most = (2 * self.device.properties().multiprocessors as usize).div_ceil(rows);
        let slices = count.div_ceil(4 * THREADS as usize).clamp(1, most.max(1));
        Ok(self.launch("best_token", [slices, rows], THREADS, 64, arguments))
    }

    /// The same choice, made by the product that gives the logits ([`crate::gemm::Output::Best`]), which are never written.
    pub fn best<'a>(&'a self, ids: Option<&'a Buffer>, cap: Option<f32>) -> Best<'a> {
        Best { best: &self.best, state: &self.state, ids, cap: cap.unwrap_or(0.0) }
    }

    /// For scoring: of each row of `logits` `[rows, count]` the largest capped logit, the sum of `e^(logit - largest)` and the capped logit
    /// of its target, f32 `[rows, 3]`. `targets` are rows of the head, i32; -1 for a token without one, whose logit is minus infinity.
    pub fn score(
        &self,
        logits: &Buffer,
        targets: &Buffer,
        out: &Buffer,
        rows: usize,
        count: usize,
        cap: Option<f32>,
    ) -> Result<Launch, StepError> {
        require((1..1 << 20).contains(&rows), "rows", rows, "1 to 2^20")?;
        require((1..1 << 30).contains(&count), "rows of the head", count, "1 to 2^30")?;
        require_bytes("score", &[(logits, rows * count * 4), (targets, rows * 4), (out, rows * 12)])?;
        let mut arguments = vec![logits.at(0), targets.at(0), out.at(0), self.state.at(0)];
        arguments.extend([int(count), Argument::F32(cap.unwrap_or(0.0))]);
        Ok(self.launch("score", [rows, 1], THREADS, 64, arguments))
    }

    /// Acceptance: the choices of [`Sequence::choose`] against the rows' tokens. `stop_ids` are u32, `stops` of them.
    pub fn accept(&self, tree: Tree, stop_ids: &Buffer, stops: usize) -> Result<Launch, StepError> {
        require_bytes("accept", &[(stop_ids, stops * 4)])?;
        let mut arguments = vec![self.state.at(0), self.best.at(0), self.tokens.buffer().at(0), stop_ids.at(0)];
        arguments.extend([self.history.at(0), self.ring.buffer().at(0), int(tree.rows), int(tree.main)]);
        arguments.extend([Argument::U64(tree.depths), int(stops), int(self.context), int(self.records)]);
        Ok(self.launch("accept", [1, 1], 32, 64, arguments))
    }

    /// After acceptance: the accepted branch's keys and values move to its position in every layer of `kv`, and the hidden state of the
    /// row that the next draft continues from, of `hidden` bf16 `[rows, width]`, to `carried`. `layers` is [`Sequence::layer_table`].
    pub fn settle(
        &self,
        tree: Tree,
        kv: &KvCache,
        layers: &Buffer,
        hidden: &Buffer,
        carried: &Buffer,
        width: usize,
    ) -> Result<Launch, StepError> {
        let count = kv.layers().len();
        let needs = [(hidden, tree.rows * width * 2), (carried, width * 2), (layers, count * 32)];
        require_bytes("settle", &needs)?;
        let mut arguments = vec![self.state.at(0), kv.buffer().at(0), layers.at(0), self.table.buffer().at(0)];
        arguments.extend([hidden.at(0), carried.at(0), int(count), int(tree.main), int(width)]);
        Ok(self.launch("settle", [count + 1, 1], THREADS, 0, arguments))
    }

    /// Where keys and values of every layer are, for [`Sequence::settle`].
    pub fn layer_table(&self, kv: &KvCache) -> Result<Buffer, StepError> {
        let layer = |l: &super::kv::KvLayer| {
            let [keys, values, side_keys, side_values] = l.offsets.map(|offset| (offset / 128) as u32);
            [keys, values, side_keys, side_values, (l.position_bytes() / 16) as u32, l.capacity as u32, 0, 0]
        };
        let mut table = words(kv.layers().iter().flat_map(layer));
        table.resize(table.len().max(32), 0);
        Ok(self.device.constant("kv.layers", &table)?)
    }

    /// Drafts by prompt look-up: what followed the latest earlier occurrence of the longest suffix of at most three tokens.
    pub fn look_up(&self, tree: Tree) -> Launch {
        let arguments = vec![self.state.at(0), self.history.at(0), self.drafts.at(0), int(tree.main)];
        self.launch("look_up", [1, 1], THREADS, 64, arguments)
    }
}
