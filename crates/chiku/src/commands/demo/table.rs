//! What the demo prints.

use bake::inspect::Inspection;
use bench::record::Record;
use ppl::verify::VerifyReport;

use super::Report;
use crate::output::megabytes;

/// The model in a few lines.
pub fn overview(i: &Inspection) -> String {
    let sources: Vec<String> = i.sources.iter().map(|(kind, layer)| format!("{kind} from layer {layer}")).collect();
    let c = &i.components;
    format!(
        "   {} layers, the last {} read shared keys and values ({}); vocabulary {}\n   \
         {} in all: body {}, embeddings {} + {} (per layer)\n",
        i.layers,
        i.kv_shared,
        sources.join(", "),
        i.head_rows,
        megabytes(c.total()),
        megabytes(c.body),
        megabytes(c.embed),
        megabytes(c.ple_embed),
    )
}

/// The gate in a few lines.
pub fn verdict(v: &VerifyReport) -> String {
    let i = &v.identity;
    let mut out = format!("   {}: {} prompts x {} tokens", i.status.as_str(), i.prompts, i.tokens / i.prompts.max(1));
    for p in &i.paths {
        let delta = match p.max_logit_delta {
            None => String::new(),
            Some(0.0) => ", every logit bit for bit".into(),
            Some(d) => format!(", logits apart by up to {d:e}"),
        };
        out += &format!("\n     {} = {} on {} of {}{delta}", p.path, i.reference, p.identical_prompts, i.prompts);
    }
    let ppl = v.ppl.map_or_else(|| "none".into(), |p| format!("{p:.3}"));
    out +=
        &format!("\n   perplexity {ppl} of at most {:.3}: {}", v.ppl_cap, if v.passed { "PASSED" } else { "FAILED" });
    v.failures.iter().for_each(|f| out += &format!("\n   {f}"));
    out + "\n"
}

/// The one table, and where the files are.
pub fn summary(r: &Report) -> String {
    let rows = [
        ("", "original".to_string(), "baked".to_string()),
        ("bytes per step (projected)", bytes(&r.bench.baseline), bytes(&r.bench.baked)),
        ("perplexity (measured)", ppl(r.bake.baseline_ppl), ppl(r.verify.ppl)),
        ("its own decoding paths agree", "".into(), r.verify.identity.status.as_str().into()),
        ("prompts with the same text", "".into(), same_text(&r.bench.baked)),
        ("tokens/s (measured)", rate(&r.bench.baseline), rate(&r.bench.baked)),
    ];
    let mut out = String::new();
    for (name, original, baked) in &rows {
        out += &format!("   {name:<28} {original:>28} {baked:>28}\n");
    }
    if let Some(c) = &r.bench.baked.comparison {
        let i = c.speedup.interval;
        out += &format!(
            "   baked / original: {:.3} times as fast, 95 % interval [{:.3}, {:.3}] over {} prompts\n",
            c.speedup.value, i.low, i.high, c.pairs
        );
        out += "   (nano's weights fit this processor's caches, so fewer bytes need not be faster here)\n";
    }
    out += &format!("\n   baked checkpoint  {}\n", r.bake.path.display());
    out += &format!("   record            {}\n", r.bench.record.display());
    out + &format!("   {:.1} s in all", r.seconds)
}

fn bytes(r: &Record) -> String {
    let figure = r.result.as_ref().and_then(|r| r.bytes_per_step.as_ref());
    figure.map_or_else(|| "?".into(), |f| megabytes(f.value as u64))
}

/// On how many of the measured prompts the two checkpoints wrote the same text. They are different models: int4 changes some paths.
fn same_text(r: &Record) -> String {
    let comparison = r.comparison.as_ref();
    comparison.map_or_else(|| "?".into(), |c| format!("{} of {}", c.pairs - c.different_outputs, c.pairs))
}

fn ppl(value: Option<f64>) -> String {
    value.map_or_else(|| "none".into(), |p| format!("{p:.3}"))
}

fn rate(r: &Record) -> String {
    let Some(result) = &r.result else { return "?".into() };
    match result.interval {
        Some(i) => format!("{:.0} [{:.0}, {:.0}]", result.tokens_per_s, i.low, i.high),
        None => format!("{:.0}", result.tokens_per_s),
    }
}
