//! What the time of a step is made of: drafting, the target's pass (verify) by op, acceptance, the host's own work.
//!
//! Every row is measured by itself, but two: what of a pass no op claims (`verify: other`, the argmax above all), and the residual, what
//! of the wall time no step claims. So the rows add up to the wall time, and what was overlooked shows as a row and not as a
//! smaller sum. The wall time is that of decoding: prefill stands beside it.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ppl::paths::Prompt;
use runtime::drafter::Drafter;
use runtime::generate::GenerateOptions;
use runtime::names;
use runtime::op_clock::{Op, OpClock};
use runtime::speculate::Shape;
use runtime::speculative::speculative;
use runtime::{Engine, Model};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::record::{Figure, Kind};

/// A part of the wall time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Part {
    /// `draft`, `verify: OP`, `verify: other`, `accept`, `host`, or `residual`.
    pub name: String,
    /// Time of it in a mean step, in ms.
    pub ms_per_step: f64,
    /// Share of the wall time in percent; all parts add up to 100.
    pub percent: f64,
}

/// What a mean step is made of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Profile {
    /// Measured.
    pub kind: Kind,
    /// Prompts that were finished.
    pub prompts: usize,
    /// Steps.
    pub steps: usize,
    /// Wall time of decoding in ms, prefill apart.
    pub wall_ms: f64,
    /// That of a mean step.
    pub ms_per_step: f64,
    /// Tokens of a mean step.
    pub tokens_per_step: f64,
    /// Mean time to the first token in ms.
    pub prefill_ms: f64,
    /// The target's pass as a whole, in percent of the wall time.
    pub verify_percent: f64,
    /// What adds up to the wall time.
    pub parts: Vec<Part>,
    /// What each op takes of the roofline; `None` where nobody asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roofline: Option<OpRoofline>,
}

/// The ops that read weights against the time in which this machine could read them. Projected: bytes are sizes, and a floor is a
/// quotient. A model that a cache holds can be faster than memory, and then lies above 100 %.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OpRoofline {
    /// Projected.
    pub kind: Kind,
    /// Read bandwidth in 10^9 bytes a second.
    pub read_gb_per_s: Figure,
    /// Each op that reads weights.
    pub ops: Vec<OpBound>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OpBound {
    /// Name, as in [`Part::name`] without `verify: `.
    pub op: String,
    /// Bytes of its weights in a step, each read once.
    pub bytes: u64,
    /// Least time to read them in ms.
    pub floor_ms: f64,
    /// That over the time of the op, in percent: 100 is the roofline.
    pub percent: f64,
}

/// Which linears an op multiplies with, by the end of their names.
const LINEARS: [(Op, &[&str]); 6] = [
    (Op::Qkv, &["q_proj", "k_proj", "v_proj"]),
    (Op::Output, &["o_proj"]),
    (Op::GateUp, &["gate_proj", "up_proj"]),
    (Op::Down, &["down_proj"]),
    (Op::PerLayer, &["per_layer_input_gate", "per_layer_projection", names::PLE_MODEL_PROJECTION]),
    (Op::Head, &[names::LM_HEAD]),
];

/// Bytes of the weights that each op of a step reads.
fn op_bytes(model: &Model) -> Vec<(Op, u64)> {
    let layers = model.config().layers.len();
    let of_layers = (0..layers).flat_map(|l| names::LAYER_LINEARS.map(|rest| names::layer(l, rest)));
    let modules: Vec<String> =
        of_layers.chain([names::PLE_MODEL_PROJECTION.to_string(), names::LM_HEAD.to_string()]).collect();
    let bytes = |ends: &[&str]| {
        let own = modules.iter().filter(|m| ends.iter().any(|end| m.ends_with(end)));
        own.filter_map(|m| model.weights(m)).map(|w| w.bytes() as u64).sum()
    };
    LINEARS.iter().map(|(op, ends)| (*op, bytes(ends))).filter(|(_, bytes)| *bytes > 0).collect()
}

impl Profile {
    /// With what each op takes of a read bandwidth in 10^9 bytes a second.
    pub fn against(mut self, model: &Model, read_gb_per_s: Figure) -> Profile {
        let spent = |op: Op| {
            let name = format!("verify: {}", op.name());
            self.parts.iter().find(|p| p.name == name).map_or(0.0, |p| p.ms_per_step)
        };
        let bound = |(op, bytes): (Op, u64)| {
            let floor_ms = bytes as f64 / read_gb_per_s.value / 1e6;
            OpBound { op: op.name().into(), bytes, floor_ms, percent: floor_ms / spent(op) * 100.0 }
        };
        let ops = op_bytes(model).into_iter().map(bound).filter(|b| b.percent.is_finite()).collect();
        self.roofline = Some(OpRoofline { kind: Kind::Projected, read_gb_per_s, ops });
        self
    }
}

/// Sums over all steps, in ms.
#[derive(Default)]
struct Sums {
    prompts: usize,
    steps: usize,
    tokens: usize,
    wall: f64,
    prefill: f64,
    draft: f64,
    verify: f64,
    accept: f64,
    total: f64,
    ops: [f64; Op::ALL.len()],
}

impl Sums {
    fn profile(&self) -> Result<Profile> {
        if self.steps == 0 || self.wall <= 0.0 {
            return Err(Error::TooFew { what: "a profile (decode steps)", needed: 1, found: self.steps });
        }
        let steps = self.steps as f64;
        let part = |name: String, ms: f64| Part { name, ms_per_step: ms / steps, percent: ms / self.wall * 100.0 };
        let mut parts = vec![part("draft".into(), self.draft)];
        parts.extend(Op::ALL.into_iter().zip(self.ops).map(|(op, ms)| part(format!("verify: {}", op.name()), ms)));
        parts.push(part("verify: other".into(), self.verify - self.ops.iter().sum::<f64>()));
        parts.push(part("accept".into(), self.accept));
        parts.push(part("host".into(), self.total - self.draft - self.verify - self.accept));
        parts.push(part("residual".into(), self.wall - self.total));
        Ok(Profile {
            kind: Kind::Measured,
            prompts: self.prompts,
            steps: self.steps,
            wall_ms: self.wall,
            ms_per_step: self.wall / steps,
            tokens_per_step: self.tokens as f64 / steps,
            prefill_ms: self.prefill / self.prompts as f64,
            verify_percent: self.verify / self.wall * 100.0,
            parts,
            roofline: None,
        })
    }
}

/// Decodes each prompt, running through end-of-sequence, and says where the time went. The first prompt is run once before, untimed. A
/// shape of depth 0 is plain decoding. `cancel` ends it after the prompt in progress; what is done counts.
///
/// # Errors
/// No prompt, no step, and those of the runtime.
pub fn profile(
    engine: &mut Engine,
    drafter: &mut dyn Drafter,
    shape: &Shape,
    prompts: &[Prompt],
    max_tokens: usize,
    cancel: &AtomicBool,
    mut progress: impl FnMut(),
) -> Result<Profile> {
    let Some(first) = prompts.first() else {
        return Err(Error::TooFew { what: "a profile (prompts)", needed: 1, found: 0 });
    };
    let clock = Arc::new(OpClock::default());
    engine.set_clock(Some(clock.clone()));
    let options = GenerateOptions { max_tokens, ..Default::default() };
    let mut sums = Sums::default();
    let warmed = once(engine, drafter, shape, first, &options, cancel, &clock);
    let run = || -> Result<()> {
        warmed?;
        for prompt in prompts {
            if cancel.load(Ordering::Relaxed) {
                break;
            }
            let Some(s) = once(engine, drafter, shape, prompt, &options, cancel, &clock)? else { break };
            sums.prompts += 1;
            sums.steps += s.steps;
            sums.tokens += s.tokens;
            sums.wall += s.wall;
            sums.prefill += s.prefill;
            sums.draft += s.draft;
            sums.verify += s.verify;
            sums.accept += s.accept;
            sums.total += s.total;
            sums.ops.iter_mut().zip(s.ops).for_each(|(sum, ms)| *sum += ms);
            progress();
        }
        Ok(())
    };
    let done = run();
    engine.set_clock(None);
    done?;
    sums.profile()
}

/// One prompt; `None` where it was cancelled.
fn once(
    engine: &mut Engine,
    drafter: &mut dyn Drafter,
    shape: &Shape,
    prompt: &Prompt,
    options: &GenerateOptions,
    cancel: &AtomicBool,
    clock: &OpClock,
) -> Result<Option<Sums>> {
    let mut decoding: Option<Instant> = None;
    let watch = |_| {
        // The first token ends the prefill.
        decoding.get_or_insert_with(|| {
            clock.reset();
            Instant::now()
        });
        if cancel.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let (made, speculation) = speculative(engine, drafter, &prompt.token_ids, shape, options, watch)?;
    let wall = decoding.map_or(0.0, |d| d.elapsed().as_secs_f64() * 1e3);
    if cancel.load(Ordering::Relaxed) {
        return Ok(None);
    }
    let steps = &speculation.steps;
    let sum = |of: fn(&runtime::speculative::Step) -> f64| steps.iter().map(of).sum::<f64>();
    Ok(Some(Sums {
        prompts: 1,
        steps: steps.len(),
        tokens: made.token_ids.len().saturating_sub(1),
        wall,
        prefill: made.prefill_ms,
        draft: sum(|s| s.draft_ms),
        verify: sum(|s| s.verify_ms),
        accept: sum(|s| s.accept_ms),
        total: sum(|s| s.total_ms),
        ops: clock.spent_ms(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_to_the_wall_time_and_what_is_overlooked_shows() {
        let mut ops = [1.0; Op::ALL.len()];
        ops[Op::GateUp as usize] = 11.0;
        let sums = Sums {
            prompts: 2,
            steps: 10,
            tokens: 30,
            wall: 40.0,
            prefill: 6.0,
            draft: 5.0,
            verify: 22.0,
            accept: 1.0,
            total: 36.0,
            ops,
        };
        let p = sums.profile().unwrap();
        let part = |name: &str| p.parts.iter().find(|p| p.name == name).unwrap();
        assert!((p.parts.iter().map(|p| p.percent).sum::<f64>() - 100.0).abs() < 1e-9);
        assert!((p.parts.iter().map(|p| p.ms_per_step).sum::<f64>() - p.ms_per_step).abs() < 1e-12);
        let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-9, "{found}, not {expected}");
        near(part("verify: gate/up").percent, 27.5);
        near(part("verify: other").ms_per_step, 0.3);
        near(part("host").percent, 20.0);
        near(part("residual").percent, 10.0);
        near(p.verify_percent, 55.0);
        assert_eq!((p.tokens_per_step, p.prefill_ms), (3.0, 3.0));
        assert!(Sums::default().profile().unwrap_err().to_string().contains("at least 1"));
    }

    #[test]
    fn every_byte_of_a_step_belongs_to_one_op_and_floors_follow() {
        let checkpoint = runtime::checkpoint::Checkpoint::open(&runtime::nano::directory().unwrap()).unwrap();
        let model = Model::load(checkpoint).unwrap();
        let bytes = op_bytes(&model);
        assert_eq!(bytes.iter().map(|b| b.1).sum::<u64>(), model.step_weight_bytes(), "{bytes:?}");
        let ops = [2.0; Op::ALL.len()];
        let sums =
            Sums { prompts: 1, steps: 2, tokens: 2, wall: 20.0, verify: 18.0, total: 19.0, ops, ..Default::default() };
        let read = Figure { kind: Kind::Measured, value: 10.0, source: "test".into() };
        let roofline = sums.profile().unwrap().against(&model, read).roofline.unwrap();
        assert_eq!(roofline.ops.len(), bytes.len());
        for (bound, (op, bytes)) in roofline.ops.iter().zip(&bytes) {
            // 1 ms a step each, and 10^7 bytes a ms.
            assert_eq!((bound.op.as_str(), bound.bytes), (op.name(), *bytes));
            assert!((bound.percent - *bytes as f64 / 1e7 * 100.0).abs() < 1e-9, "{bound:?}");
        }
    }
}
