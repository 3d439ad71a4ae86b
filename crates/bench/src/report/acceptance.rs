//! What drafts yield: tokens a step, and acceptance by depth.

use super::inputs::Inputs;
use super::page::{Figure, Key, Row, Section, Table, counts, names, numbers};
use super::plot::{Anchor, Frame, Rows, Scale, Shape, Svg, ends, spread};
use super::{Config, by_kind, kind_name};
use crate::acceptance::{AcceptanceReport, Yield};
use crate::record::Kind;

/// Configurations in the picture: the last ones that ran. The table has all.
const SHOWN: usize = 16;

pub(super) fn section(inputs: &Inputs, configs: &[Config]) -> Section {
    let mut figures = Vec::new();
    figures.extend(by_depth(&inputs.acceptance));
    for (kind, configs) in by_kind(configs) {
        figures.extend(yields(kind, &configs));
    }
    let mut missing = Vec::new();
    if inputs.acceptance.is_empty() {
        missing.push(
            "Acceptance by depth is drawn from `--acceptance FILE`, what `chiku bench acceptance --json` printed; a file for each drafter \
             or target."
                .to_string(),
        );
    }
    if !figures.iter().any(|f| f.id.starts_with("yield")) {
        missing.push("Tokens a step are drawn from runs with drafts: `chiku bench run --drafter DIR`.".to_string());
    }
    Section {
        id: "acceptance",
        title: "Acceptance",
        lead: "How many tokens does a step yield, and how deep do drafts hold?",
        figures,
        missing,
    }
}

/// Tokens a step of the configurations whose steps yield more than one.
fn yields(kind: Kind, configs: &[&Config]) -> Option<Figure> {
    let of = |c: &&Config| {
        let run = c.last()?;
        let result = run.result.as_ref()?;
        let steps: usize = run.samples.iter().map(|s| s.steps).sum();
        result.tokens_per_step.filter(|t| *t > 1.0).map(|t| (c.name.clone(), t, result.step_ms, steps))
    };
    let all: Vec<(String, f64, Option<f64>, usize)> = configs.iter().filter_map(of).collect();
    if all.is_empty() {
        return None;
    }
    let shown = &all[all.len().saturating_sub(SHOWN)..];
    let rows = Rows::new(shown.len(), 34.0, 220.0, 130.0);
    let mut svg = Svg::new(rows.frame);
    let most = shown.iter().map(|s| s.1).fold(1.0, f64::max);
    let x = Scale::between(0.0, most * 1.08, rows.frame.x().0, rows.frame.x().1);
    rows.x_axis(&mut svg, &x, &format!("tokens a step ({})", kind_name(kind)), 7);
    rows.names(&mut svg, shown.iter().map(|s| s.0.as_str()));
    let (bottom, top) = rows.frame.y();
    svg.line("limit", (x.at(1.0), bottom), (x.at(1.0), top));
    svg.text("limit-name", (x.at(1.0) + 4.0, top + 6.0), Anchor::Start, "plain decoding");
    for (i, (name, tokens, step_ms, _)) in shown.iter().enumerate() {
        let step = step_ms.map_or(String::new(), |ms| format!(", a step takes {ms:.3} ms"));
        let lines = [name.clone(), format!("{tokens:.3} tokens a step{step} ({})", kind_name(kind))];
        svg.line("whisker s0", (x.at(0.0), rows.at(i)), (x.at(*tokens), rows.at(i)));
        svg.mark("s0", Shape::Dot, (x.at(*tokens), rows.at(i)), &lines, &[]);
        svg.text("remark", (rows.frame.x().1 + 14.0, rows.at(i) + 4.0), Anchor::Start, &format!("{tokens:.2}"));
    }
    let row = |(name, tokens, step_ms, steps): &(String, f64, Option<f64>, usize)| -> Row {
        vec![
            name.clone(),
            format!("{tokens:.3}"),
            step_ms.map_or(String::new(), |ms| format!("{ms:.3}")),
            steps.to_string(),
        ]
        .into()
    };
    let table = Table {
        caption: "Last run of each configuration whose steps yield more than one token".into(),
        columns: vec![
            names("configuration"),
            numbers("tokens a step", kind),
            numbers("ms a step", kind),
            counts("steps"),
        ],
        rows: all.iter().map(row).collect(),
    };
    let title = "Tokens a step";
    let note = "A step yields one token without drafts; each accepted draft adds one.".to_string();
    let svg = svg.finish(title, "");
    Some(Figure::plain(format!("yield-{}", kind_name(kind)), kind_name(kind), title, note, Some(svg), table))
}

/// Drafters in the picture; the table has all.
const DRAWN: usize = 6;

/// Share of the steps whose drafts hold down to each depth; `None` where no report drafted.
fn by_depth(reports: &[(String, AcceptanceReport)]) -> Option<Figure> {
    let depths = reports.iter().map(|(_, r)| r.all.accept_by_depth.len()).max().filter(|d| *d > 0)?;
    let frame = Frame { width: 920.0, height: 380.0, left: 56.0, right: 250.0, top: 40.0, bottom: 52.0 };
    let mut svg = Svg::new(frame);
    let x = Scale::between(0.5, depths as f64 + 0.5, frame.x().0, frame.x().1);
    let y = Scale::between(0.0, 100.0, frame.y().0, frame.y().1);
    svg.y_axis(&y, "drafts accepted down to a depth, % of steps (measured)", 5);
    svg.x_axis(&x, "depth of the draft", depths.min(15));
    let mut names_at: Vec<(f64, (f64, f64), String, String)> = Vec::new();
    for (i, (name, r)) in reports.iter().take(DRAWN).enumerate() {
        for (y_of, what, line) in [(&r.all, "all steps", ""), (&r.off_loop, "outside repetition loops", " dashed")] {
            let style = format!("s{i}");
            let shares = &y_of.accept_by_depth;
            let places: Vec<(f64, f64)> =
                shares.iter().enumerate().map(|(d, a)| (x.at(d as f64 + 1.0), y.at(a * 100.0))).collect();
            svg.path(&format!("curve {style}{line}"), &places);
            for ((d, a), at) in shares.iter().enumerate().zip(&places) {
                let lines = [
                    name.clone(),
                    format!("depth {}: {:.1} % of {} steps ({what}, measured)", d + 1, a * 100.0, y_of.steps),
                ];
                let shape = if line.is_empty() { Shape::Dot } else { Shape::Ring };
                svg.mark(
                    &format!("{style} small{}", if line.is_empty() { "" } else { " hollow" }),
                    shape,
                    *at,
                    &lines,
                    &[],
                );
            }
            if let (Some(last), true) = (places.last(), line.is_empty()) {
                names_at.push((last.1, *last, ends(name, 30), style));
            }
        }
    }
    let heights = spread(&names_at.iter().map(|n| n.0).collect::<Vec<_>>(), 15.0, (frame.top + 4.0, frame.y().0 - 4.0));
    for ((_, at, name, style), height) in names_at.iter().zip(heights) {
        svg.line(&format!("leader {style}"), (at.0 + 6.0, at.1), (frame.x().1 + 14.0, height));
        svg.text("direct", (frame.x().1 + 18.0, height + 4.0), Anchor::Start, name);
    }
    let row = |name: &str, what: &str, loops: String, y: &Yield| -> Row {
        let tokens = y
            .tokens_per_step
            .map_or(String::new(), |e| format!("{:.3} [{:.3}, {:.3}]", e.value, e.interval.low, e.interval.high));
        let mut cells = vec![name.to_string(), what.to_string(), y.steps.to_string(), loops, tokens];
        let share = |d: usize| y.accept_by_depth.get(d).map_or(String::new(), |a| format!("{:.1}", a * 100.0));
        cells.extend((0..depths).map(share));
        cells.into()
    };
    let rows = reports.iter().flat_map(|(name, r)| {
        let loops = format!("{:.1}", r.loop_share * 100.0);
        [row(name, "all", loops, &r.all), row(name, "outside loops", String::new(), &r.off_loop)]
    });
    let mut columns = vec![
        names("drafter or target"),
        names("steps"),
        counts("number"),
        numbers("in loops, %", Kind::Measured),
        numbers("tokens a step", Kind::Measured),
    ];
    columns.extend((1..=depths).map(|d| numbers(&format!("depth {d}, %"), Kind::Measured)));
    let table = Table { caption: "Acceptance, with 95 % intervals over prompts".into(), columns, rows: rows.collect() };
    let note = "A draft is accepted down to a depth if all drafts up to it are. Text that repeats itself is easy to draft: the dashed line \
                leaves such steps out, and says what drafts are worth elsewhere."
        .to_string();
    let title = "Acceptance by depth";
    let svg = svg.finish(title, "");
    let mut figure = Figure::plain("depth", kind_name(Kind::Measured), title, note, Some(svg), table);
    figure.legend = vec![Key::new("curve s0", "all steps"), Key::new("curve s0 dashed", "outside repetition loops")];
    Some(figure)
}
