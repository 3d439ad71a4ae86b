//! Speed over time: our configurations over commits, a board's claims over days.

use super::inputs::Inputs;
use super::page::{Figure, Key, Row, Section, Table, commit, names, numbers};
use super::plot::{Anchor, Frame, Scale, Shape, Svg, number, short};
use super::{Run, kind_name};
use crate::error::Result;
use crate::history::{History, Series};
use crate::import::board::{Board, Claim, Verification};
use crate::record::Kind;

/// Series in the picture: those with the most runs. The table has all.
const SHOWN: usize = 10;
/// Height of a series.
const PITCH: f64 = 96.0;

pub(super) fn section(inputs: &Inputs, runs: &[&Run]) -> Result<Section> {
    let (mut figures, mut missing) = (Vec::new(), Vec::new());
    let history = History::new(runs)?;
    for kind in [Kind::Measured, Kind::Projected, Kind::Published] {
        let series: Vec<&Series> = history.series.iter().filter(|s| s.kind == kind).collect();
        if !series.is_empty() {
            figures.push(of_series(kind, &series));
        }
    }
    let measured: Vec<&Series> = history.series.iter().filter(|s| s.kind == Kind::Measured).collect();
    match super::op_share::figure(&measured) {
        Some(figure) => figures.push(figure),
        None => missing.push(
            "What each op takes of the roofline is drawn from runs that were taken apart: `chiku bench run --profile`."
                .to_string(),
        ),
    }
    if history.series.is_empty() {
        missing
            .push("Our history is drawn from finished runs under `results/`: each `chiku bench run` adds one.".into());
    } else if history.series.iter().all(|s| s.points.len() < 3) {
        missing.push("No configuration has three runs yet: a change of level shows from there on.".into());
    }
    match inputs.board.as_ref().and_then(|(_, board)| of_board(board)) {
        Some(figure) => figures.push(figure),
        None => missing.push(
            "The field's frontier over time is drawn from a board with times: `--board leaderboard.json`.".into(),
        ),
    }
    Ok(Section {
        id: "history",
        title: "History",
        lead: "Did it get faster, and where did the level change? A change point says where to look; `bench compare` decides.",
        figures,
        missing,
    })
}

fn of_series(kind: Kind, all: &[&Series]) -> Figure {
    let mut shown: Vec<&Series> = all.to_vec();
    shown.sort_by_key(|s| std::cmp::Reverse(s.points.len()));
    shown.truncate(SHOWN);
    let kind_text = kind_name(kind);
    let height = 40.0 + PITCH * shown.len() as f64;
    let frame = Frame { width: 920.0, height, left: 240.0, right: 90.0, top: 20.0, bottom: 20.0 };
    let mut svg = Svg::new(frame);
    let (left, right) = frame.x();
    for (i, s) in shown.iter().enumerate() {
        let (top, bottom) = (frame.top + PITCH * i as f64 + 12.0, frame.top + PITCH * (i + 1) as f64 - 22.0);
        let ends = s
            .points
            .iter()
            .flat_map(|p| [p.tokens_per_s, p.low.unwrap_or(p.tokens_per_s), p.high.unwrap_or(p.tokens_per_s)]);
        let y = Scale::linear(ends, bottom, top);
        // A run is a place: runs of a commit stand side by side.
        let x = Scale::between(-0.5, s.points.len() as f64 - 0.5, left, right);
        svg.text("row-name", (left - 60.0, top + 18.0), Anchor::End, &short(&s.configuration.label, 26));
        svg.text("row-sub", (left - 60.0, top + 34.0), Anchor::End, &short(&s.configuration.machine, 28));
        let ticks = y.ticks(3);
        for &t in &ticks {
            svg.line("grid", (left, y.at(t)), (right, y.at(t)));
            svg.text("tick", (left - 6.0, y.at(t) + 4.0), Anchor::End, &y.tick_text(t, &ticks));
        }
        let places: Vec<(f64, f64)> =
            s.points.iter().enumerate().map(|(k, p)| (x.at(k as f64), y.at(p.tokens_per_s))).collect();
        if s.points.len() <= 200 {
            for (p, at) in s.points.iter().zip(&places) {
                if let (Some(low), Some(high)) = (p.low, p.high) {
                    svg.line("whisker s0", (at.0, y.at(low)), (at.0, y.at(high)));
                }
            }
        }
        svg.path("curve s0 thin", &places);
        for c in &s.changes {
            let at = x.at(c.at as f64 - 0.5);
            svg.line("change", (at, bottom + 4.0), (at, top - 4.0));
            svg.text("change-name", (at + 4.0, top + 2.0), Anchor::Start, &format!("{:+.1} %", c.change_pct));
        }
        for (p, at) in s.points.iter().zip(&places) {
            let lines = [
                format!("{} tokens/s ({kind_text})", number(p.tokens_per_s)),
                format!("commit {}, {}", commit(p.commit.as_deref()), p.time),
            ];
            svg.mark("s0 small", Shape::Dot, *at, &lines, &[]);
        }
        if let (Some(first), Some(last)) = (s.points.first(), s.points.last()) {
            let day = |time: &str| time.get(..10).unwrap_or(time).to_string();
            svg.text(
                "tick",
                (left, bottom + 16.0),
                Anchor::Start,
                &format!("{} {}", day(&first.time), commit(first.commit.as_deref())),
            );
            if s.points.len() > 1 {
                svg.text(
                    "tick",
                    (right, bottom + 16.0),
                    Anchor::End,
                    &format!("{} {}", day(&last.time), commit(last.commit.as_deref())),
                );
            }
            let (_, at) = places[places.len() - 1];
            svg.text("direct", (right + 8.0, at + 4.0), Anchor::Start, &number(last.tokens_per_s));
        }
        svg.line("rule", (8.0, bottom + 22.0), (frame.width - 8.0, bottom + 22.0));
    }
    let mut rows: Vec<Row> = Vec::new();
    for s in all {
        for (k, p) in s.points.iter().enumerate() {
            let or_none = |v: Option<f64>, digits: usize| v.map_or(String::new(), |v| format!("{v:.digits$}"));
            let change = s.changes.iter().find(|c| c.at == k).map_or(String::new(), |c| {
                let step = c.step_speed_pct.map_or(String::new(), |s| format!(", steps {s:+.1} %"));
                let text = if c.other_text { ", other text" } else { "" };
                format!("{:+.1} %{step}{text}", c.change_pct)
            });
            rows.push(
                vec![
                    s.configuration.label.clone(),
                    s.configuration.machine.clone(),
                    p.time.clone(),
                    commit(p.commit.as_deref()),
                    number(p.tokens_per_s),
                    p.low.zip(p.high).map_or(String::new(), |(l, h)| format!("{} to {}", number(l), number(h))),
                    or_none(p.step_ms, 3),
                    or_none(p.tokens_per_step, 3),
                    change,
                ]
                .into(),
            );
        }
    }
    let table = Table {
        caption: format!("All {} finished runs", rows.len()),
        columns: vec![
            names("configuration"),
            names("machine"),
            names("time"),
            names("commit"),
            numbers("tokens/s", kind),
            numbers("95 % interval over prompts", kind),
            numbers("ms a step", kind),
            numbers("tokens a step", kind),
            names("change of level"),
        ],
        rows,
    };
    let changes: usize = all.iter().map(|s| s.changes.len()).sum();
    let more = all.len() - shown.len();
    let rest =
        if more == 0 { String::new() } else { format!(" {more} series with fewer runs are in the table alone.") };
    let note = format!(
        "Finished runs in the order of their time, a line for each configuration and machine, with 95 % intervals over prompts; {changes} \
         changes of level.{rest}"
    );
    let title = "Runs over commits";
    let svg = svg.finish(title, "");
    let mut figure = Figure::plain(format!("history-{kind_text}"), kind_text, title, note, Some(svg), table);
    figure.legend = vec![Key::new("dot s0", "a run"), Key::new("vline change", "change of level")];
    figure.filter = true;
    figure
}

/// Minutes since 1970 of `2026-06-20 15:00 UTC`, or of any RFC 3339 time.
fn minutes(time: &str) -> Option<f64> {
    let plain = time.trim().strip_suffix(" UTC").map(|t| format!("{}:00Z", t.trim().replacen(' ', "T", 1)));
    let parsed: jiff::Timestamp = plain.as_deref().unwrap_or(time.trim()).parse().ok()?;
    Some(parsed.as_second() as f64 / 60.0)
}

/// The claims of a board over time; `None` where none has a time.
fn of_board(board: &Board) -> Option<Figure> {
    let mut claims: Vec<(f64, &Claim)> =
        board.claims.iter().filter_map(|c| Some((minutes(&c.timestamp)?, c))).collect();
    claims.sort_by(|a, b| a.0.total_cmp(&b.0));
    if claims.is_empty() {
        return None;
    }
    let frame = Frame { width: 920.0, height: 380.0, left: 56.0, right: 150.0, top: 40.0, bottom: 52.0 };
    let mut svg = Svg::new(frame);
    let x = Scale::linear(claims.iter().map(|c| c.0), frame.x().0, frame.x().1);
    let y = Scale::linear(claims.iter().map(|c| c.1.tps), frame.y().0, frame.y().1);
    svg.y_axis(&y, "tokens/s (published)", 6);
    days(&mut svg, &frame, &x);
    let (_, right) = frame.x();
    let frontier = |of: fn(&Claim) -> bool| {
        let mut line: Vec<(f64, f64)> = Vec::new();
        let mut best = f64::NEG_INFINITY;
        for (at, c) in claims.iter().filter(|c| of(c.1) && c.1.verification != Verification::Invalid) {
            if c.tps > best {
                let before = if best.is_finite() { best } else { c.tps };
                line.push((x.at(*at), y.at(before)));
                line.push((x.at(*at), y.at(c.tps)));
                best = c.tps;
            }
        }
        if best.is_finite() {
            line.push((right, y.at(best)));
        }
        (line, best)
    };
    let claimed = frontier(|_| true);
    let valid = frontier(|c| c.verification == Verification::Valid);
    svg.path("curve front-claimed", &claimed.0);
    svg.path("curve front-valid", &valid.0);
    for (at, c) in &claims {
        let (state, shape) = match c.verification {
            Verification::Valid => ("valid", Shape::Dot),
            Verification::Pending => ("pending", Shape::Ring),
            Verification::Invalid => ("invalid", Shape::Cross),
        };
        let lines = [
            format!("{}: {}", c.agent, short(&c.method, 80)),
            format!("{:.2} tokens/s, {state} (published)", c.tps),
            c.timestamp.clone(),
        ];
        svg.mark(&format!("{state} small"), shape, (x.at(*at), y.at(c.tps)), &lines, &[]);
    }
    let ends: Vec<(f64, String)> = [(claimed.1, "claimed"), (valid.1, "verified")]
        .into_iter()
        .filter(|e| e.0.is_finite())
        .map(|(best, word)| (y.at(best), format!("{word} {best:.1}")))
        .collect();
    let heights = super::plot::spread(&ends.iter().map(|e| e.0).collect::<Vec<_>>(), 15.0, (frame.top, frame.y().0));
    for ((_, text), height) in ends.iter().zip(heights) {
        svg.text("direct", (right + 10.0, height + 4.0), Anchor::Start, text);
    }
    let row = |(_, c): &(f64, &Claim)| -> Row {
        let state = match c.verification {
            Verification::Valid => "valid",
            Verification::Pending => "pending",
            Verification::Invalid => "invalid",
        };
        vec![c.timestamp.clone(), c.agent.clone(), state.to_string(), format!("{:.2}", c.tps)].into()
    };
    let untimed = board.claims.len() - claims.len();
    let note = format!(
        "Each claim at its time, with the fastest so far: of all claims that were not found invalid, and of the verified ones.{}",
        if untimed == 0 {
            String::new()
        } else {
            format!(" {untimed} claims have no time and stand in the landscape alone.")
        }
    );
    let table = Table {
        caption: format!("{} claims with a time, oldest first", claims.len()),
        columns: vec![names("time"), names("agent"), names("state"), numbers("tokens/s", Kind::Published)],
        rows: claims.iter().map(row).collect(),
    };
    let title = "The field's frontier";
    let mut figure =
        Figure::plain("frontier", kind_name(Kind::Published), title, note, Some(svg.finish(title, "")), table);
    figure.legend = vec![
        Key::new("dot valid", "verified"),
        Key::new("ring pending", "pending"),
        Key::new("cross invalid", "invalid"),
        Key::new("curve front-claimed", "fastest claimed"),
        Key::new("curve front-valid", "fastest verified"),
    ];
    Some(figure)
}

/// A horizontal axis of days.
fn days(svg: &mut Svg, frame: &Frame, x: &Scale) {
    const DAY: f64 = 1440.0;
    let (low, high) = x.domain();
    let (bottom, _) = frame.y();
    let span = (high - low) / DAY;
    let step = [1.0, 2.0, 7.0, 14.0, 30.0, 90.0, 365.0].into_iter().find(|s| span / s <= 8.0).unwrap_or(span / 8.0);
    let first = (low / DAY / step).ceil() as i64;
    let last = (high / DAY / step).floor() as i64;
    svg.line("base", (frame.x().0, bottom), (frame.x().1, bottom));
    for k in first..=last {
        let minute = k as f64 * step * DAY;
        let Ok(time) = jiff::Timestamp::from_second((minute * 60.0) as i64) else { continue };
        svg.line("stub", (x.at(minute), bottom), (x.at(minute), bottom + 5.0));
        svg.text("tick", (x.at(minute), bottom + 18.0), Anchor::Middle, &time.strftime("%Y-%m-%d").to_string());
    }
}
