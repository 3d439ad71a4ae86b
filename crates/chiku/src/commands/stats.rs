//! What drafts yielded, as JSON and as text.

use runtime::speculate::{MAX_ROWS, best_plan};
use runtime::speculative::Speculation;
use serde_json::{Value, json};

/// For an acceptance that stays near zero.
pub const MISMATCH: &str = "hardly any draft was accepted: the drafter and the target most likely do not belong together \
                            (another base model, or a vocabulary in another order)";

/// The `speculation` object of `generate --json`: a stable door.
pub fn json(s: &Speculation) -> Value {
    let steps = &s.steps;
    json!({
        "drafts": steps.iter().map(|s| &s.main).collect::<Vec<_>>(),
        "branches": steps.iter().map(|s| &s.branches).collect::<Vec<_>>(),
        "accepted": steps.iter().map(|s| s.accepted).collect::<Vec<_>>(),
        "tokens_per_step": s.tokens_per_step(),
        "accept_by_depth": s.acceptance.by_depth(),
        "steps": steps.len(),
        "ms_per_step": times(s).map(|[draft, verify, other]| json!({"draft": draft, "verify": verify, "other": other})),
        "best_shapes": shapes(s),
        "mismatch": s.looks_mismatched(),
    })
}

/// Mean times of a step in ms: drafting, the target's pass, and the rest.
fn times(s: &Speculation) -> Option<[f64; 3]> {
    let mean =
        |f: &dyn Fn(&runtime::speculative::Step) -> f64| s.steps.iter().map(f).sum::<f64>() / s.steps.len() as f64;
    (!s.steps.is_empty()).then(|| {
        let (draft, verify) = (mean(&|s| s.draft_ms), mean(&|s| s.verify_ms));
        [draft, verify, mean(&|s| s.total_ms) - draft - verify]
    })
}

/// The best star and the best chain for the rows of a pass, by what was measured.
fn shapes(s: &Speculation) -> Value {
    let plan = |branches| {
        let plan = best_plan(&s.acceptance, MAX_ROWS, branches);
        json!({"shape": plan.shape.to_string(), "rows": plan.shape.rows(), "expected_tokens_per_step": plan.tokens_per_step})
    };
    json!({"kind": "projected", "star": plan(true), "chain": plan(false)})
}

/// The same for a reader.
pub fn text(s: &Speculation) -> String {
    let (Some(tokens), Some([draft, verify, other])) = (s.tokens_per_step(), times(s)) else {
        return "no step was drafted\n".into();
    };
    let depths: Vec<String> = s.acceptance.by_depth().iter().map(|a| format!("{:.0}%", a * 100.0)).collect();
    let mut out = format!("{} steps, {tokens:.3} tokens a step (measured)\n", s.steps.len());
    out += &format!("accepted by depth: {}\n", depths.join(" "));
    out += &format!("ms a step: draft {draft:.3}, verify {verify:.3}, other {other:.3}\n");
    for (name, branches) in [("star", true), ("chain", false)] {
        let plan = best_plan(&s.acceptance, MAX_ROWS, branches);
        let (rows, expected) = (plan.shape.rows(), plan.tokens_per_step);
        out += &format!(
            "best {name} in {MAX_ROWS} rows: {} ({rows} rows), {expected:.3} tokens a step expected (projected)\n",
            plan.shape
        );
    }
    out
}
