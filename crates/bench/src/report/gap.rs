//! Public against private prompts.

use super::claims::GATE;
use super::inputs::Inputs;
use super::page::{Figure, Key, Row, Section, Table, names, numbers};
use super::plot::{Anchor, Frame, Rows, Scale, Shape, Svg, number, short, spread};
use super::{Config, Sums, by_kind, kind_name};
use crate::error::Result;
use crate::gap::pairs::{Pair, Pairs, Verdict};
use crate::gap::{Gap, Request};
use crate::history::Configuration;
use crate::record::Kind;
use crate::stats::{BootstrapOptions, Throughput};

/// Pairs of prompt sets that are shown; bootstrapping each takes a while.
const SHOWN: usize = 24;

pub(super) fn section(inputs: &Inputs, configs: &[Config]) -> Result<Section> {
    let (mut figures, mut missing) = (Vec::new(), Vec::new());
    match &inputs.pairs {
        Some((_, pairs)) if !pairs.exact.is_empty() => figures.push(of_pairs(pairs)),
        Some(_) => missing.push("The pairs that were given have no row with two exact results.".to_string()),
        None => missing.push(
            "What others lose on private prompts is drawn from `--pairs pairs.csv` (see `chiku bench gap`).".into(),
        ),
    }
    let before = figures.len();
    for (kind, configs) in by_kind(configs) {
        figures.extend(of_records(kind, &configs)?);
    }
    if figures.len() == before {
        missing.push(
            "Our own gap is drawn where one configuration has records on the public prompts and on others: run it once more with \
             `chiku bench run --prompts heldout`."
                .into(),
        );
    }
    Ok(Section {
        id: "gap",
        title: "Public against private",
        lead: "Does the speed hold on prompts that nobody tuned for?",
        figures,
        missing,
    })
}

fn of_pairs(pairs: &Pairs) -> Figure {
    let mut sorted: Vec<&Pair> = pairs.exact.iter().collect();
    sorted.sort_by(|a, b| b.public.total_cmp(&a.public));
    let frame = Frame { width: 920.0, height: 400.0, left: 56.0, right: 230.0, top: 40.0, bottom: 52.0 };
    let mut svg = Svg::new(frame);
    let x = Scale::linear(sorted.iter().map(|p| p.public), frame.x().0, frame.x().1);
    let deltas = || sorted.iter().map(|p| p.delta_pct());
    let y = Scale::linear(deltas().chain([0.0, GATE * 100.0 + 1.0]), frame.y().0, frame.y().1);
    let (left, right) = frame.x();
    let gate = y.at(GATE * 100.0);
    svg.rect("inside", (left, gate), right - left, (y.at(0.0) - gate).max(0.0));
    svg.y_axis(&y, "lost on private prompts, % of public (published)", 6);
    svg.x_axis(&x, "public tokens/s (published)", 7);
    svg.line("limit", (left, gate), (right, gate));
    let mut remarks = vec![(gate, format!("gate, {:.0} %", GATE * 100.0))];
    let report = pairs.report(0.95).ok();
    if let Some(r) = &report {
        let (low, high) = (r.interval.interval.low, r.interval.interval.high);
        svg.rect("interval", (left, y.at(high)), right - left, y.at(low) - y.at(high));
        svg.line("mean", (left, y.at(r.mean_delta_pct)), (right, y.at(r.mean_delta_pct)));
        remarks.push((y.at(r.mean_delta_pct), format!("mean {:.2} % [{low:.2}, {high:.2}]", r.mean_delta_pct)));
    }
    let heights = spread(&remarks.iter().map(|r| r.0).collect::<Vec<_>>(), 15.0, (frame.top, frame.y().0));
    for ((at, text), height) in remarks.iter().zip(heights) {
        svg.line("leader", (right + 3.0, *at), (right + 14.0, height));
        svg.text("direct", (right + 18.0, height + 4.0), Anchor::Start, text);
    }
    for p in &sorted {
        let (state, shape) = state(p.verdict);
        let lines = [
            short(&p.config, 70),
            format!("public {:.2}, private {:.2} tokens/s (published)", p.public, p.private),
            format!("lost {:.2} %, {state}", p.delta_pct()),
        ];
        svg.mark(state, shape, (x.at(p.public), y.at(p.delta_pct())), &lines, &[]);
    }
    let row = |p: &&Pair| Row {
        state: state(p.verdict).0.into(),
        cells: vec![
            p.config.clone(),
            p.public.to_string(),
            p.private.to_string(),
            format!("{:.3}", p.delta_pct()),
            state(p.verdict).0.into(),
        ],
    };
    let table = Table {
        caption: format!("All {} exact pairs, fastest first", sorted.len()),
        columns: vec![
            names("configuration"),
            numbers("public tokens/s", Kind::Published),
            numbers("private tokens/s", Kind::Published),
            numbers("lost, %", Kind::Published),
            names("verdict"),
        ],
        rows: sorted.iter().map(row).collect(),
    };
    let or_none = |v: Option<f64>| v.map_or("none".into(), |v| format!("{v:.2} %"));
    let note = match &report {
        Some(r) => format!(
            "{} exact pairs lose {:.2} % on average (sd {:.2}). The largest loss that was valid is {}, the smallest that was not {}. Left out: \
             {} rounded pairs, {} rows with one number.",
            r.pairs,
            r.mean_delta_pct,
            r.sd,
            or_none(r.valid_max),
            or_none(r.invalid_min),
            r.rounded,
            r.one_sided
        ),
        None => "One exact pair: no spread can be told.".into(),
    };
    let title = "What the field's runs lose";
    let svg = svg.finish(title, "");
    let mut figure = Figure::plain("pairs", kind_name(Kind::Published), title, note, Some(svg), table);
    figure.legend = vec![
        Key::new("dot valid", "within the gate"),
        Key::new("cross invalid", "outside"),
        Key::new("ring pending", "no verdict"),
    ];
    figure.states = ["valid", "invalid", "pending"].map(String::from).into();
    figure
}

fn state(verdict: Option<Verdict>) -> (&'static str, Shape) {
    match verdict {
        Some(Verdict::Valid) => ("valid", Shape::Dot),
        Some(Verdict::Invalid) => ("invalid", Shape::Cross),
        None => ("pending", Shape::Ring),
    }
}

/// A configuration on two prompt sets.
struct TwoSided {
    name: String,
    other: String,
    gap: Gap,
}

fn request(s: &Sums) -> Request {
    let total = Throughput { tokens: s.completion_tokens as f64, seconds: s.wall_ms / 1e3 };
    Request { total, steps: Some((s.steps as f64, s.decode_ms / 1e3)) }
}

fn is_public(c: &Config) -> bool {
    c.configuration.prompts.starts_with("public")
}

fn of_records(kind: Kind, configs: &[&Config]) -> Result<Option<Figure>> {
    // All but the prompts.
    let rest = |c: &Config| Configuration {
        prompts: String::new(),
        prompts_blake3: String::new(),
        requests: 0,
        ..c.configuration.clone()
    };
    let options = BootstrapOptions { resamples: 2000, ..BootstrapOptions::default() };
    let mut rows: Vec<TwoSided> = Vec::new();
    let (mut skipped, mut short_runs) = (0, 0);
    for public in configs.iter().filter(|c| is_public(c)) {
        for other in configs.iter().filter(|o| !is_public(o) && rest(o) == rest(public)) {
            let (Some(a), Some(b)) = (public.last(), other.last()) else { continue };
            if a.samples.len() < 2 || b.samples.len() < 2 {
                short_runs += 1;
                continue;
            }
            if rows.len() == SHOWN {
                skipped += 1;
                continue;
            }
            let side = |samples: &[Sums]| samples.iter().map(request).collect::<Vec<Request>>();
            let gap = Gap::new(&side(&a.samples), &side(&b.samples), GATE * 100.0, &options)?;
            let name = format!("{}: {}", public.configuration.label, public.configuration.machine);
            rows.push(TwoSided { name, other: other.configuration.prompts.clone(), gap });
        }
    }
    if rows.is_empty() {
        return Ok(None);
    }
    let plot = Rows::new(rows.len(), 34.0, 260.0, 150.0);
    let mut svg = Svg::new(plot.frame);
    let ends = rows.iter().flat_map(|r| [r.gap.delta_pct.interval.low, r.gap.delta_pct.interval.high]);
    let x = Scale::linear(ends.chain([0.0, GATE * 100.0]), plot.frame.x().0, plot.frame.x().1);
    plot.x_axis(&mut svg, &x, &format!("lost on other prompts, % of public ({})", kind_name(kind)), 7);
    plot.names(&mut svg, rows.iter().map(|r| r.name.as_str()));
    let (bottom, top) = plot.frame.y();
    svg.line("zero", (x.at(0.0), bottom), (x.at(0.0), top));
    svg.line("limit", (x.at(GATE * 100.0), bottom), (x.at(GATE * 100.0), top));
    svg.text("limit-name", (x.at(GATE * 100.0) + 4.0, top + 8.0), Anchor::Start, "gate");
    for (i, r) in rows.iter().enumerate() {
        let d = &r.gap.delta_pct;
        let y = plot.at(i);
        svg.line("whisker s0", (x.at(d.interval.low), y), (x.at(d.interval.high), y));
        let lines = [
            format!("{}, against {}", r.name, r.other),
            format!("lost {:.2} % [{:.2}, {:.2}] ({})", d.value, d.interval.low, d.interval.high, kind_name(kind)),
            format!("a gate on one run passes with probability {:.2}", r.gap.gate.p_valid),
        ];
        svg.mark("s0", Shape::Dot, (x.at(d.value), y), &lines, &[]);
        svg.text("remark", (plot.frame.x().1 + 14.0, y + 4.0), Anchor::Start, &format!("{:.2} %", d.value));
    }
    let part = |r: &TwoSided, of: fn(&crate::gap::Decomposition) -> crate::stats::Estimate| {
        r.gap.parts.as_ref().map_or(String::new(), |p| {
            let e = of(p);
            format!("{:.2} [{:.2}, {:.2}]", e.value, e.interval.low, e.interval.high)
        })
    };
    let row = |r: &TwoSided| -> Row {
        let d = &r.gap.delta_pct;
        vec![
            r.name.clone(),
            r.other.clone(),
            number(r.gap.public_tps),
            number(r.gap.private_tps),
            format!("{:.2} [{:.2}, {:.2}]", d.value, d.interval.low, d.interval.high),
            part(r, |p| p.acceptance),
            part(r, |p| p.context_length),
            part(r, |p| p.residual),
            format!("{:.2}", r.gap.gate.standard_error_pct),
            format!("{:.2}", r.gap.gate.p_valid),
        ]
        .into()
    };
    let table = Table {
        caption: "Last run on either prompt set; losses in percent with 95 % intervals over both sets".into(),
        columns: vec![
            names("configuration"),
            names("other prompts"),
            numbers("public tokens/s", kind),
            numbers("other tokens/s", kind),
            numbers("lost, %", kind),
            numbers("by acceptance", kind),
            numbers("by context length", kind),
            numbers("by the rest", kind),
            numbers("standard error from prompts", kind),
            numbers("chance to pass one run", Kind::Projected),
        ],
        rows: rows.iter().map(row).collect(),
    };
    let mut note = "Both prompt sets are samples, and both are resampled: the line is a 95 % interval.".to_string();
    if skipped > 0 {
        note += &format!(" {skipped} more pairs of prompt sets are not shown.");
    }
    if short_runs > 0 {
        note += &format!(" {short_runs} pairs have a run of one request.");
    }
    let title = "What our configurations lose";
    let svg = svg.finish(title, "");
    Ok(Some(Figure::plain(format!("gap-{}", kind_name(kind)), kind_name(kind), title, note, Some(svg), table)))
}
