//! Where the time of a request goes.

use super::inputs::Inputs;
use super::page::{Figure, Row, Section, Table, names, numbers};
use super::plot::{Anchor, Rows, Scale, Svg, number};
use super::{Config, by_kind, kind_name};
use crate::import::steptime::StepTimes;
use crate::profile::Profile;
use crate::record::Kind;

/// Configurations in the picture: the last ones that ran. The table has all.
const SHOWN: usize = 16;

/// A part of a whole, in ms.
struct Part {
    name: String,
    ms: f64,
}

/// A whole and its parts, which add up to it.
struct Whole {
    name: String,
    ms: f64,
    parts: Vec<Part>,
}

pub(super) fn section(inputs: &Inputs, configs: &[Config]) -> Section {
    let (mut figures, mut missing) = (Vec::new(), Vec::new());
    for (kind, configs) in by_kind(configs) {
        let wholes: Vec<Whole> = configs.iter().filter_map(|c| of_config(c)).collect();
        if !wholes.is_empty() {
            figures.push(of_requests(kind, &wholes));
        }
    }
    if figures.is_empty() {
        missing.push("Our own requests are taken apart from records: `chiku bench run` makes one.".to_string());
    }
    for kind in [Kind::Measured, Kind::Projected, Kind::Published] {
        // Of each configuration the last record that has one, and what was given besides.
        let recorded =
            configs.iter().filter_map(|c| Some((&c.name, c.runs.iter().rev().find_map(|r| r.profile.as_ref())?)));
        let given = inputs.profiles.iter().map(|(name, p)| (name, p));
        let wholes: Vec<Whole> =
            recorded.chain(given).filter(|(_, p)| p.kind == kind).map(|(name, p)| of_profile(name, p)).collect();
        if !wholes.is_empty() {
            let note = "A mean step after prefill: drafting, the target's pass by op, acceptance, the host's own work, and the residual that \
                        none of them accounts for.";
            figures.push(bars(&format!("profile-{}", kind_name(kind)), kind, "A step by op", note.into(), &wholes));
        }
    }
    if figures.iter().all(|f| !f.id.starts_with("profile-")) {
        missing.push(
            "A step is taken apart by op from records of `chiku bench run --profile`, and from `--profile FILE`, what `chiku bench \
             profile --json` printed."
                .into(),
        );
    }
    match &inputs.steptime {
        Some((_, t)) => figures.push(of_server(t)),
        None => missing.push(
            "A step of another server is taken apart from its step-time log: `--steptime job_logs.txt` (see `chiku bench import steptime`)."
                .into(),
        ),
    }
    Section {
        id: "anatomy",
        title: "Anatomy of a step",
        lead: "Where does the time go? Bars close to 100 %: what no part accounts for is a part of its own.",
        figures,
        missing,
    }
}

/// Mean times of a request of the last run.
fn of_config(c: &Config) -> Option<Whole> {
    let run = c.last()?;
    let n = run.samples.len() as f64;
    let mean = |of: fn(&super::Sums) -> f64| run.samples.iter().map(of).sum::<f64>() / n;
    let (wall, prefill, decode) = (mean(|s| s.wall_ms), mean(|s| s.prefill_ms), mean(|s| s.decode_ms));
    if wall.is_nan() || wall <= 0.0 {
        return None;
    }
    let parts = vec![
        Part { name: "prefill".into(), ms: prefill },
        Part { name: "steps".into(), ms: decode },
        Part { name: "residual".into(), ms: wall - prefill - decode },
    ];
    Some(Whole { name: c.name.clone(), ms: wall, parts })
}

fn of_profile(name: &str, p: &Profile) -> Whole {
    let parts = p.parts.iter().map(|part| Part { name: part.name.clone(), ms: part.ms_per_step }).collect();
    Whole { name: name.to_string(), ms: p.ms_per_step, parts }
}

fn of_requests(kind: Kind, wholes: &[Whole]) -> Figure {
    let note = "Mean over the requests of each configuration's last run: to the first token, all steps after it, and what lies outside of \
                both (the residual)."
        .to_string();
    bars(&format!("anatomy-{}", kind_name(kind)), kind, "Time of a request", note, wholes)
}

fn of_server(t: &StepTimes) -> Figure {
    let mut parts = vec![Part { name: "verify".into(), ms: t.exec_ms_p50 }];
    parts.extend(t.draft_ms_p50.map(|ms| Part { name: "draft".into(), ms }));
    let busy: f64 = parts.iter().map(|p| p.ms).sum();
    // Host time of the pass and between passes make up the wall; without them the parts are all that is known.
    let wall = t.exec_cpu_ms_p50.zip(t.gap_ms_p50).map_or(busy, |(cpu, gap)| cpu + gap);
    parts.push(Part { name: "residual".into(), ms: wall - busy });
    let note = format!(
        "Medians over {} passes of the target. The wall time of a step is the host's time in the pass and between two; medians need not add up, \
         and the residual is what they leave.",
        t.n
    );
    let whole = Whole { name: "server".into(), ms: wall, parts };
    bars("anatomy-server", Kind::Published, "A step of the field's server", note, &[whole])
}

fn bars(id: &str, kind: Kind, title: &str, note: String, wholes: &[Whole]) -> Figure {
    let mut kinds: Vec<&str> = Vec::new();
    for part in wholes.iter().flat_map(|w| &w.parts) {
        if !kinds.contains(&part.name.as_str()) {
            kinds.push(&part.name);
        }
    }
    let style = |name: &str| match name {
        "residual" => "rest".to_string(),
        _ => format!("s{}", kinds.iter().position(|k| *k == name).unwrap_or(0) % 8),
    };
    let shown = &wholes[wholes.len().saturating_sub(SHOWN)..];
    let rows = Rows::new(shown.len(), 36.0, 220.0, 130.0);
    let mut svg = Svg::new(rows.frame);
    let x = Scale::between(0.0, 100.0, rows.frame.x().0, rows.frame.x().1);
    rows.x_axis(&mut svg, &x, "percent of wall time", 5);
    rows.names(&mut svg, shown.iter().map(|w| w.name.as_str()));
    for (i, w) in shown.iter().enumerate() {
        let mut from = 0.0;
        for p in &w.parts {
            let share = p.ms / w.ms * 100.0;
            // A residual below zero (medians that overlap) has no width; its figure stands in the table.
            let width = x.at(from + share.max(0.0)) - x.at(from);
            let lines = [
                format!("{}, {}", w.name, p.name),
                format!("{} ms, {share:.1} % of {} ms ({})", number(p.ms), number(w.ms), kind_name(kind)),
            ];
            svg.bar(&style(&p.name), (x.at(from), rows.at(i) - 10.0), width, 20.0, &lines);
            let text = format!("{} {share:.1} %", p.name);
            if width > 7.0 * text.chars().count() as f64 {
                svg.text(
                    &format!("inside-bar on-{}", style(&p.name)),
                    (x.at(from) + 7.0, rows.at(i) + 4.0),
                    Anchor::Start,
                    &text,
                );
            }
            from += share.max(0.0);
        }
        svg.text("remark", (rows.frame.x().1 + 14.0, rows.at(i) + 4.0), Anchor::Start, &format!("{} ms", number(w.ms)));
    }
    let row = |w: &Whole| -> Row {
        let part = |k: &&str| w.parts.iter().find(|p| p.name == **k);
        let mut cells = vec![w.name.clone(), number(w.ms)];
        for k in &kinds {
            cells.push(part(k).map_or(String::new(), |p| number(p.ms)));
            cells.push(part(k).map_or(String::new(), |p| format!("{:.1}", p.ms / w.ms * 100.0)));
        }
        cells.into()
    };
    let mut columns = vec![names("what"), numbers("wall, ms", kind)];
    for k in &kinds {
        columns.push(numbers(&format!("{k}, ms"), kind));
        columns.push(numbers(&format!("{k}, %"), kind));
    }
    let caption = match wholes.len() - shown.len() {
        0 => "Each whole with its parts".to_string(),
        n => format!("Each whole with its parts; the picture leaves out the {n} oldest"),
    };
    let table = Table { caption, columns, rows: wholes.iter().map(row).collect() };
    let mut figure = Figure::plain(id, kind_name(kind), title, note, Some(svg.finish(title, "")), table);
    figure.legend = kinds.iter().map(|k| super::page::Key::new(&format!("box {}", style(k)), *k)).collect();
    figure
}
