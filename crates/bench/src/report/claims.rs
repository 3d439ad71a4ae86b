//! Repeated runs of one configuration, the luck in the best of them, and what a claim on it is worth.

use std::collections::BTreeMap;

use super::inputs::{Groups, Inputs};
use super::page::{Figure, Key, Row, Section, Table, counts, names, numbers};
use super::plot::{Anchor, Frame, Rows, Scale, Shape, Svg, ends, number, short, spread};
use super::{Config, by_kind, kind_name};
use crate::claim::{ClaimReport, Evidence, Rules};
use crate::error::Result;
use crate::gap::pairs::{Pairs, Verdict};
use crate::import::board::Verification;
use crate::luck::{Draw, Group};
use crate::record::Kind;
use crate::stats::median;

/// Draws below which a group has no spread worth a picture.
const FEWEST: usize = 3;
/// Draws below which no claim is projected from a group.
const FEWEST_FOR_CLAIM: usize = 5;
/// Groups in a picture; the table has all.
const SHOWN: usize = 12;
/// Numbers of draws that a claim is projected for.
const NS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// The field's gate: a private run may lose so much of the public result.
pub(super) const GATE: f64 = 0.05;

pub(super) fn section(inputs: &Inputs, configs: &[Config]) -> Result<Section> {
    let (mut figures, mut missing) = (Vec::new(), Vec::new());
    for (kind, configs) in by_kind(configs) {
        let groups: Groups = configs.iter().map(|c| (c.name.clone(), draws_of(c))).collect();
        figures.extend(luck(kind, &groups)?);
    }
    if figures.is_empty() {
        missing.push(format!(
            "The spread of our own runs is drawn for configurations with {FEWEST} finished runs and more: repeat `chiku bench run`."
        ));
    }
    match &inputs.draws {
        Some((_, groups)) => figures.extend(luck(Kind::Published, groups)?),
        None => missing.push(
            "The spread of others' runs is drawn from `--draws draws.csv` (see `chiku bench import draws`).".into(),
        ),
    }
    match curves(inputs)? {
        Ok(figure) => figures.push(figure),
        Err(why) => missing.push(why),
    }
    Ok(Section {
        id: "claims",
        title: "Luck and claims",
        lead: "How much of a result is the draw, and what is the best of N draws worth once it is run again?",
        figures,
        missing,
    })
}

fn draws_of(c: &Config) -> Vec<Draw> {
    let draw = |r: &&super::Run| {
        let result = r.result.as_ref()?;
        Some(Draw { tps: result.tokens_per_s, class: Some(result.trajectory.clone()) })
    };
    c.runs.iter().filter_map(draw).collect()
}

/// The spread of groups of runs, as a picture and a table; `None` where no group has enough.
fn luck(kind: Kind, groups: &Groups) -> Result<Option<Figure>> {
    let mut all: Vec<(&str, &Vec<Draw>, Group)> = Vec::new();
    for (name, draws) in groups.iter().filter(|(_, d)| !d.is_empty()) {
        all.push((name, draws, Group::new(draws)?));
    }
    all.sort_by_key(|(_, draws, _)| std::cmp::Reverse(draws.len()));
    let shown: Vec<&(&str, &Vec<Draw>, Group)> = all.iter().filter(|(_, d, _)| d.len() >= FEWEST).take(SHOWN).collect();
    if shown.is_empty() {
        return Ok(None);
    }
    let of_mean = |tps: f64, g: &Group| (tps / g.mean - 1.0) * 100.0;
    let rows = Rows::new(shown.len(), 40.0, 240.0, 290.0);
    let mut svg = Svg::new(rows.frame);
    // One group that varies much more than the others must not flatten them: what lies beyond is drawn at the end of the axis.
    let farthest =
        |(_, draws, g): &&(&str, &Vec<Draw>, Group)| draws.iter().map(|d| of_mean(d.tps, g).abs()).fold(0.0, f64::max);
    let spans: Vec<f64> = shown.iter().map(farthest).collect();
    let limit = spans.iter().copied().fold(0.0, f64::max).min(4.0 * median(&spans).unwrap_or(0.0)).max(1e-3);
    let x = Scale::linear([-limit, limit], rows.frame.x().0, rows.frame.x().1);
    rows.x_axis(&mut svg, &x, "percent from the group's mean", 7);
    rows.names(&mut svg, shown.iter().map(|s| s.0));
    let (bottom, top) = rows.frame.y();
    svg.line("zero", (x.at(0.0), bottom), (x.at(0.0), top));
    for (row, (name, draws, g)) in shown.iter().enumerate() {
        let class: BTreeMap<&str, usize> = g.by_class.iter().enumerate().map(|(i, c)| (c.class.as_str(), i)).collect();
        let mut sorted: Vec<&Draw> = draws.iter().collect();
        sorted.sort_by(|a, b| a.tps.total_cmp(&b.tps));
        let mut last = (f64::NEG_INFINITY, 0usize);
        for d in sorted {
            let away = of_mean(d.tps, g);
            let at = x.at(away.clamp(-1.05 * limit, 1.05 * limit));
            // Marks that would hide each other take turns above and below the line.
            last = if at - last.0 < 8.0 { (at, last.1 + 1) } else { (at, 0) };
            let turn = [0.0, -8.0, 8.0, -4.0, 4.0][last.1 % 5];
            let index = d.class.as_deref().and_then(|c| class.get(c));
            let (style, shape) = index.map_or(("unknown".into(), Shape::Ring), |i| (format!("s{}", i % 8), Shape::Dot));
            let lines = [
                short(name, 60),
                format!(
                    "{:.2} tokens/s, {away:+.2} % from the mean ({}){}",
                    d.tps,
                    kind_name(kind),
                    if away.abs() > 1.05 * limit { ", beyond the axis" } else { "" }
                ),
                d.class.as_ref().map_or("text not known".into(), |c| format!("text {}", short(c, 13))),
            ];
            svg.mark(&style, shape, (at, rows.at(row) + turn), &lines, &[]);
        }
        let explained = g.explained.map_or(String::new(), |e| format!("; text explains {:.1} %", e * 100.0));
        let sd = g.sd.map_or(String::new(), |sd| format!(", sd {:.2} %", sd / g.mean * 100.0));
        let remark = format!("{} runs{sd}{explained}", g.n);
        svg.text("remark", (rows.frame.x().1 + 14.0, rows.at(row) + 4.0), Anchor::Start, &remark);
    }
    let cells = |(name, _, g): &(&str, &Vec<Draw>, Group)| -> Row {
        let or_none = |v: Option<f64>, digits: usize| v.map_or(String::new(), |v| format!("{v:.digits$}"));
        vec![
            name.to_string(),
            g.n.to_string(),
            format!("{:.2}", g.mean),
            or_none(g.sd, 2),
            g.classes.to_string(),
            or_none(g.explained.map(|e| e * 100.0), 1),
            or_none(g.within_sd_pct, 3),
        ]
        .into()
    };
    let table = Table {
        caption: format!("All {} groups", all.len()),
        columns: vec![
            names("group"),
            counts("runs"),
            numbers("tokens/s, mean", kind),
            numbers("sd", kind),
            counts("texts"),
            numbers("explained by text, %", kind),
            numbers("sd within a text, % of mean", kind),
        ],
        rows: all.iter().map(cells).collect(),
    };
    let more = all.len() - shown.len();
    let rest =
        if more == 0 { String::new() } else { format!(" {more} groups with fewer runs are in the table alone.") };
    let note = format!(
        "Runs of one configuration, each at its distance from their mean; a colour is a text that the run wrote. Where colours cluster, \
         luck is the text.{rest}"
    );
    let title = "Repeated runs";
    let svg = svg.finish(title, "");
    let id = format!("draws-{}", kind_name(kind));
    let mut figure = Figure::plain(id, kind_name(kind), title, note, Some(svg), table);
    figure.legend =
        vec![Key::new("dot s0", "a colour for each text, slowest first"), Key::new("ring unknown", "text not known")];
    Ok(Some(figure))
}

/// What a claim on each group would be worth, or why that cannot be said.
fn curves(inputs: &Inputs) -> Result<std::result::Result<Figure, String>> {
    let need = "Claim curves are projected from `--draws` (public runs by group), `--pairs` (what private runs lose) and the result to beat \
                (the board's fastest verified claim, or the fastest valid pair)";
    let (Some((_, groups)), Some((_, pairs))) = (&inputs.draws, &inputs.pairs) else {
        return Ok(Err(format!("{need}; not both files were given.")));
    };
    let Ok(gap) = pairs.report(0.95) else {
        return Ok(Err(format!("{need}; the pairs are too few for a spread.")));
    };
    let Some((sota, sota_from)) = to_beat(inputs, pairs) else {
        return Ok(Err(format!("{need}; nothing is valid yet.")));
    };
    let rules = Rules { sota, gate: GATE };
    let mut cases: Vec<(&str, usize, ClaimReport)> = Vec::new();
    let mut few = 0;
    for (name, draws) in groups {
        if draws.len() < FEWEST_FOR_CLAIM {
            few += 1;
            continue;
        }
        let public = Evidence::Draws(draws.iter().map(|d| d.tps).collect());
        let mean = public.spread()?.mean;
        let private = Evidence::Summary {
            mean: mean * (1.0 - gap.mean_delta_pct / 100.0),
            sd: mean * gap.sd / 100.0,
            n: Some(gap.pairs),
        };
        cases.push((name, draws.len(), ClaimReport::new(&public, &private, &rules, &NS, 0.5, 1)?));
    }
    if cases.is_empty() {
        return Ok(Err(format!("{need}; no group has {FEWEST_FOR_CLAIM} draws.")));
    }
    cases.sort_by(|a, b| b.2.optimum.p_both.total_cmp(&a.2.optimum.p_both));
    Ok(Ok(figure(&cases, few, sota, &sota_from, &gap)))
}

/// The result that a claim must beat, and where it is from.
fn to_beat(inputs: &Inputs, pairs: &Pairs) -> Option<(f64, String)> {
    let board = inputs.board.as_ref().and_then(|(_, b)| b.fastest(Verification::Valid));
    if let Some(claim) = board {
        return Some((claim.tps, format!("the board's fastest verified claim, by {}", claim.agent)));
    }
    let valid = pairs.exact.iter().filter(|p| p.verdict == Some(Verdict::Valid));
    let best = valid.max_by(|a, b| a.public.total_cmp(&b.public))?;
    Some((best.public, format!("the fastest valid pair, {}", best.config)))
}

fn figure(
    cases: &[(&str, usize, ClaimReport)],
    few: usize,
    sota: f64,
    sota_from: &str,
    gap: &crate::gap::pairs::PairsReport,
) -> Figure {
    let frame = Frame { width: 920.0, height: 380.0, left: 56.0, right: 280.0, top: 40.0, bottom: 52.0 };
    let mut svg = Svg::new(frame);
    let x = Scale::log(NS.map(|n| n as f64), frame.x().0, frame.x().1);
    let drawn: Vec<&(&str, usize, ClaimReport)> = cases.iter().take(5).collect();
    let top = drawn.iter().flat_map(|(_, _, r)| &r.curve).map(|p| p.p_both).fold(0.0, f64::max);
    let y = Scale::between(0.0, (top * 1.15).clamp(0.05, 1.0), frame.y().0, frame.y().1);
    svg.y_axis(&y, "probability to beat and to verify (projected)", 5);
    svg.x_axis(&x, "public draws, of which the best is claimed", 8);
    let last: Vec<f64> = drawn.iter().map(|(_, _, r)| r.curve.last().map_or(0.0, |p| y.at(p.p_both))).collect();
    let heights = spread(&last, 15.0, (frame.top + 4.0, frame.y().0 - 4.0));
    for (i, (name, _, r)) in drawn.iter().enumerate() {
        let line: Vec<(f64, f64)> = r.curve.iter().map(|p| (x.at(p.n as f64), y.at(p.p_both))).collect();
        svg.path(&format!("curve s{i}"), &line);
        for (p, at) in r.curve.iter().zip(&line) {
            let interval = p.p_both_interval.map_or(String::new(), |[l, h]| format!(" [{l:.3}, {h:.3}]"));
            let lines = [
                short(name, 60),
                format!("best of {}: {:.3}{interval} (projected)", p.n, p.p_both),
                format!("beats {:.3}, verifies {:.3}", p.p_beat, p.p_verify),
            ];
            svg.mark(&format!("s{i} small"), Shape::Dot, *at, &lines, &[]);
        }
        let end = line.last().copied().unwrap_or((frame.x().1, frame.y().0));
        svg.line(&format!("leader s{i}"), (end.0 + 6.0, end.1), (frame.x().1 + 14.0, heights[i]));
        svg.text("direct", (frame.x().1 + 18.0, heights[i] + 4.0), Anchor::Start, &ends(name, 34));
    }
    let row = |(name, n, r): &(&str, usize, ClaimReport)| -> Row {
        let luck = r.luck.map_or(String::new(), |l| format!("{:.2}", l.luck));
        let mut cells = vec![
            name.to_string(),
            n.to_string(),
            format!("{:.2}", r.public.mean),
            format!("{:.2}", r.public.sd),
            luck,
            format!("{:.2}", r.private.mean),
            format!("{:.1}", r.ceiling),
            r.optimum.n.to_string(),
            format!("{:.3}", r.optimum.p_both),
            r.draws_needed.map_or("none".into(), |n| n.to_string()),
        ];
        cells.extend(r.curve.iter().map(|p| {
            let interval = p.p_both_interval.map_or(String::new(), |[l, h]| format!(" [{l:.3}, {h:.3}]"));
            format!("{:.3}{interval}", p.p_both)
        }));
        cells.into()
    };
    let mut columns = vec![
        names("group"),
        counts("draws"),
        numbers("public mean", Kind::Published),
        numbers("public sd", Kind::Published),
        numbers("luck in the best", Kind::Published),
        numbers("private mean", Kind::Projected),
        numbers("ceiling", Kind::Projected),
        numbers("best number of draws", Kind::Projected),
        numbers("probability there", Kind::Projected),
        numbers("draws for an even chance", Kind::Projected),
    ];
    columns.extend(NS.map(|n| numbers(&format!("N = {n}"), Kind::Projected)));
    let table = Table {
        caption: "What a claim on each group would be worth, with 95 % intervals over what the inputs may be".into(),
        columns,
        rows: cases.iter().map(row).collect(),
    };
    let left_out =
        if few == 0 { String::new() } else { format!(" {few} groups have fewer than {FEWEST_FOR_CLAIM} draws.") };
    let note = format!(
        "The best of N public draws must beat {} ({sota_from}), and one private run must be within {:.0} % of it. Private runs are taken to \
         lose what the pairs lost, {:.2} % (sd {:.2}, {} pairs). More draws beat more often and verify less: each curve has a top.{left_out}",
        number(sota),
        GATE * 100.0,
        gap.mean_delta_pct,
        gap.sd,
        gap.pairs
    );
    let title = "What the best of N draws is worth";
    let svg = svg.finish(title, "");
    Figure::plain("claim-curves", kind_name(Kind::Projected), title, note, Some(svg), table)
}
