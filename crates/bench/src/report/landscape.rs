//! Tokens a second against perplexity: what a configuration gives and what it costs the model.

use super::inputs::Inputs;
use super::page::{Figure, Key, Row, Section, Table, names, numbers};
use super::plot::{Anchor, Frame, Scale, Shape, Svg, number, short, spread};
use super::{Config, by_kind, kind_name};
use crate::import::board::{Board, Claim, Verification};
use crate::record::Kind;
use crate::stats::mean;

/// The field's cap on perplexity, 1.05 times the reference's 2.30.
const FIELD_CAP: f64 = 2.42;

const FRAME: Frame = Frame { width: 920.0, height: 500.0, left: 56.0, right: 200.0, top: 40.0, bottom: 52.0 };
/// Left and right end of the strip for what states no perplexity.
const STRIP: (f64, f64) = (748.0, 912.0);

pub(super) fn section(inputs: &Inputs, configs: &[Config]) -> Section {
    let mut figures = Vec::new();
    let mut missing = Vec::new();
    match &inputs.board {
        Some((_, board)) => figures.push(of_board(board)),
        None => missing.push(
            "What others claim is drawn from a leaderboard: `chiku bench report --board leaderboard.json`.".to_string(),
        ),
    }
    for (kind, configs) in by_kind(configs) {
        if configs.iter().any(|c| !c.runs.is_empty()) {
            figures.push(of_configs(kind, &configs));
        }
    }
    if !configs.iter().any(|c| !c.runs.is_empty()) {
        missing.push("Our own configurations are drawn from records: `chiku bench run` makes one.".into());
    }
    Section {
        id: "landscape",
        title: "Landscape",
        lead: "How fast, and at what cost to the model? Up is faster, left is closer to the text that the model should write.",
        figures,
        missing,
    }
}

/// A place on the landscape.
struct Item {
    ppl: Option<f64>,
    tps: f64,
    state: &'static str,
    lines: Vec<String>,
    label: Option<String>,
}

fn state_shape(state: &str) -> Shape {
    match state {
        "valid" | "passed" => Shape::Dot,
        "invalid" | "failed" => Shape::Cross,
        _ => Shape::Ring,
    }
}

fn draw(name: &str, items: &[Item], edges: &[(usize, usize)], cap: Option<f64>, y_name: &str) -> String {
    // Without a perplexity there is only the strip, which needs no such height.
    let frame = if items.iter().any(|i| i.ppl.is_some()) { FRAME } else { Frame { height: 280.0, ..FRAME } };
    let mut svg = Svg::new(frame);
    let stated = || items.iter().filter_map(|i| i.ppl);
    let x = Scale::linear(stated().chain(cap.filter(|_| stated().next().is_some())), frame.x().0, frame.x().1);
    let y = Scale::linear(items.iter().map(|i| i.tps), frame.y().0, frame.y().1);
    let (bottom, top) = frame.y();
    svg.rect("strip", (STRIP.0, top), STRIP.1 - STRIP.0, bottom - top);
    svg.y_axis(&y, y_name, 6);
    match stated().next() {
        Some(_) => svg.x_axis(&x, "perplexity (lower is better)", 6),
        None => {
            let (left, right) = frame.x();
            svg.line("base", (left, bottom), (right, bottom));
            svg.text("empty", ((left + right) / 2.0, (top + bottom) / 2.0), Anchor::Middle, "no perplexity stated yet");
        }
    }
    svg.text("axis-name", ((STRIP.0 + STRIP.1) / 2.0, bottom + 18.0), Anchor::Middle, "perplexity not stated");
    if let Some(cap) = cap.filter(|_| stated().next().is_some()) {
        svg.open(&format!(r#"class="vline" data-x="{cap}""#));
        svg.line("limit", (x.at(cap), bottom), (x.at(cap), top));
        svg.text("limit-name", (x.at(cap) + 4.0, top + 10.0), Anchor::Start, &format!("cap {cap}"));
        svg.close();
    }
    let places = place(items, &x, &y);
    svg.open(r#"class="edges""#);
    for &(from, to) in edges {
        svg.edge("", (from, places[from]), (to, places[to]));
    }
    svg.close();
    // Verified and failed ones come last: none is hidden behind the many that are neither.
    let neither = |i: &usize| state_shape(items[*i].state) != Shape::Ring;
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(neither);
    for id in order {
        let item = &items[id];
        let mut data = vec![("id", id.to_string()), ("state", item.state.to_string()), ("y", item.tps.to_string())];
        data.extend(item.ppl.map(|p| ("x", p.to_string())));
        svg.mark(item.state, state_shape(item.state), places[id], &item.lines, &data);
    }
    labels(&mut svg, &frame, items, &places);
    let ((x0, x1), (y0, y1)) = (x.domain(), y.domain());
    let (from, to) = frame.x();
    let data = format!(
        r#" data-zoom="1" data-x-domain="{x0} {x1}" data-y-domain="{y0} {y1}" data-x-range="{from} {to}" data-y-range="{bottom} {top}""#
    );
    svg.finish(name, &data)
}

/// Where each item is drawn; those without a perplexity stand in the strip, beside each other where they would overlap.
fn place(items: &[Item], x: &Scale, y: &Scale) -> Vec<(f64, f64)> {
    let mut order: Vec<usize> = (0..items.len()).filter(|&i| items[i].ppl.is_none()).collect();
    order.sort_by(|&a, &b| items[b].tps.total_cmp(&items[a].tps).then(a.cmp(&b)));
    // The lowest mark of each lane of the strip so far.
    let lanes = ((STRIP.1 - STRIP.0 - 16.0) / 10.0) as usize;
    let mut taken = vec![f64::NEG_INFINITY; lanes];
    let mut out: Vec<(f64, f64)> = items.iter().map(|i| (i.ppl.map_or(0.0, |p| x.at(p)), y.at(i.tps))).collect();
    for i in order {
        let at = out[i].1;
        let free = taken.iter().position(|&t| at - t >= 10.0);
        // A strip that is full starts again: better on top of each other than gone.
        let lane = free.unwrap_or(i % lanes);
        taken[lane] = at;
        out[i].0 = STRIP.0 + 10.0 + 10.0 * lane as f64;
    }
    out
}

fn labels(svg: &mut Svg, frame: &Frame, items: &[Item], places: &[(f64, f64)]) {
    let (left, right) = frame.x();
    let named: Vec<usize> = (0..items.len()).filter(|&i| items[i].label.is_some()).collect();
    let wanted: Vec<f64> = named.iter().map(|&i| places[i].1).collect();
    let (bottom, top) = frame.y();
    let heights = spread(&wanted, 14.0, (top + 4.0, bottom - 8.0));
    for (&i, height) in named.iter().zip(heights) {
        let Some(text) = &items[i].label else { continue };
        let (x, y) = places[i];
        // To the left of a mark and of its neighbours, unless that has no room.
        let near = |j: &&usize| {
            items[**j].ppl.is_some() && (places[**j].0 - x).abs() < 140.0 && (places[**j].1 - y).abs() < 90.0
        };
        let edge = named.iter().filter(near).map(|&j| places[j].0).fold(x, f64::min);
        let (dx, anchor) = match items[i].ppl {
            None => (STRIP.0 - 6.0 - x, Anchor::End),
            Some(_) if edge - left > 180.0 => (edge - x - 26.0, Anchor::End),
            Some(_) if right - x > 180.0 => (12.0, Anchor::Start),
            Some(_) => (-12.0, Anchor::End),
        };
        svg.label(i, (x, y), (dx, height - y), anchor, &short(text, 34));
    }
}

fn state_of(v: Verification) -> &'static str {
    match v {
        Verification::Valid => "valid",
        Verification::Pending => "pending",
        Verification::Invalid => "invalid",
    }
}

fn of_board(board: &Board) -> Figure {
    let mut claims: Vec<&Claim> = board.claims.iter().collect();
    claims.sort_by(|a, b| b.tps.total_cmp(&a.tps));
    let mut agents: Vec<&str> = claims.iter().map(|c| c.agent.as_str()).collect();
    agents.sort_unstable();
    agents.dedup();
    let named: Vec<Vec<&str>> = claims.iter().map(|c| c.names(&agents)).collect();
    let fastest_pending = claims.iter().position(|c| c.verification == Verification::Pending);
    let item = |(i, c): (usize, &&Claim)| {
        let ppl = c.stated_ppl();
        let mut lines = vec![
            format!("{}: {}", c.agent, short(&c.method, 80)),
            format!("{:.2} tokens/s, {} (published)", c.tps, state_of(c.verification)),
            ppl.map_or("perplexity not stated".into(), |p| format!("perplexity {p}, as stated")),
        ];
        lines.extend(Some(c.timestamp.clone()).filter(|t| !t.is_empty()));
        if !named[i].is_empty() {
            lines.push(format!("names {}", named[i].join(", ")));
        }
        lines.push(short(&c.description, 240));
        let shown = c.verification == Verification::Valid || Some(i) == fastest_pending || i + 1 == claims.len();
        Item {
            ppl,
            tps: c.tps,
            state: state_of(c.verification),
            lines,
            label: shown.then(|| format!("{} {:.1}", c.agent, c.tps)),
        }
    };
    let items: Vec<Item> = claims.iter().enumerate().map(item).collect();
    // To the named agent's last claim before this one, or else its first.
    let target = |agent: &str, time: &str| {
        let own: Vec<usize> = (0..claims.len()).filter(|&i| claims[i].agent == agent).collect();
        let key = |i: &usize| (claims[*i].timestamp.as_str(), *i);
        let before = own.iter().copied().filter(|&i| claims[i].timestamp.as_str() <= time).max_by_key(|i| key(i));
        before.or_else(|| own.iter().copied().min_by_key(|i| key(i)))
    };
    let mut edges = Vec::new();
    for (i, others) in named.iter().enumerate() {
        edges.extend(others.iter().filter_map(|o| target(o, &claims[i].timestamp)).map(|to| (i, to)));
    }
    let rows = claims.iter().zip(&named).map(|(c, named)| Row {
        state: state_of(c.verification).into(),
        cells: vec![
            c.agent.clone(),
            c.method.clone(),
            state_of(c.verification).into(),
            format!("{:.2}", c.tps),
            c.stated_ppl().map_or(String::new(), |p| p.to_string()),
            c.timestamp.clone(),
            named.join(", "),
            c.description.clone(),
        ],
    });
    let table = Table {
        caption: format!("All {} claims of the board, fastest first", claims.len()),
        columns: vec![
            names("agent"),
            names("method"),
            names("state"),
            numbers("tokens/s", Kind::Published),
            numbers("perplexity, as stated", Kind::Published),
            names("time"),
            names("names"),
            names("description"),
        ],
        rows: rows.collect(),
    };
    let counted = |state| board.count(state);
    let stated = items.iter().filter(|i| i.ppl.is_some()).count();
    let masked = match board.masked_valid() {
        0 => String::new(),
        n => {
            format!(" {n} verified claims stand below a faster one of the same agent; they are shown like all others.")
        }
    };
    let note = format!(
        "{} claims: {} verified, {} pending, {} invalid. {stated} state a perplexity in their description.{masked} A line leads from a \
         claim to the one whose agent its description names.",
        claims.len(),
        counted(Verification::Valid),
        counted(Verification::Pending),
        counted(Verification::Invalid)
    );
    let title = "What the field claims";
    let svg = draw(title, &items, &edges, Some(FIELD_CAP), "tokens/s (published)");
    let mut figure = Figure::plain("board", kind_name(Kind::Published), title, note, Some(svg), table);
    figure.legend = vec![
        Key::new("dot valid", "verified on private prompts"),
        Key::new("ring pending", "pending"),
        Key::new("cross invalid", "invalid"),
        Key::new("edge", "names the other's agent"),
    ];
    figure.states = ["valid", "pending", "invalid"].map(String::from).into();
    (figure.filter, figure.zoom) = (true, true);
    figure
}

/// The configuration whose checkpoint is the nearest ancestor of this one's: with the same drafter and machine, where there is one.
fn parent(configs: &[&Config], child: usize) -> Option<usize> {
    let last = configs[child].last()?;
    let like = |other: &Config| {
        let (a, b) = (&configs[child].configuration, &other.configuration);
        (a.machine == b.machine, a.flags == b.flags, a.precision == b.precision, a.prompts == b.prompts)
    };
    last.checkpoint.ancestors.iter().find_map(|ancestor| {
        let is = |c: &Config| {
            c.last().is_some_and(|r| !r.checkpoint.files.is_empty() && r.checkpoint.weights() == *ancestor)
        };
        let found = (0..configs.len()).filter(|&i| i != child && is(configs[i]));
        // The first of those that are most alike.
        found.rev().max_by_key(|&i| like(configs[i]))
    })
}

fn of_configs(kind: Kind, configs: &[&Config]) -> Figure {
    let configs: Vec<&Config> = configs.iter().copied().filter(|c| !c.runs.is_empty()).collect();
    let gate = |c: &Config| c.runs.iter().rev().find_map(|r| r.gate.clone());
    let state = |c: &Config| match gate(c) {
        Some(g) if g.passed => "passed",
        Some(_) => "failed",
        None => "no gate",
    };
    let kind_text = kind_name(kind);
    let item = |c: &&Config| {
        let tps = mean(&c.rates()).unwrap_or(0.0);
        let ppl = gate(c).and_then(|g| g.ppl);
        let lines = vec![
            c.name.clone(),
            format!("{} tokens/s, mean of {} runs ({kind_text})", number(tps), c.runs.len()),
            ppl.map_or("perplexity not recorded".into(), |p| format!("perplexity {p:.4}, gate {}", state(c))),
            c.configuration.describe(),
        ];
        Item { ppl, tps, state: state(c), lines, label: Some(c.name.clone()) }
    };
    let mut items: Vec<Item> = configs.iter().map(item).collect();
    if items.len() > 24 {
        // Too many names say nothing; the marks tell theirs.
        items.iter_mut().for_each(|i| i.label = None);
    }
    let mut edges: Vec<(usize, usize)> = Vec::new();
    for (i, c) in configs.iter().enumerate() {
        for r in &c.runs {
            let Some(comparison) = &r.comparison else { continue };
            let other = configs
                .iter()
                .position(|o| o.configuration.label == comparison.a && o.runs.iter().any(|other| other.time == r.time));
            edges.extend(other.filter(|&o| o != i).map(|o| (i, o)));
        }
    }
    let parents: Vec<Option<usize>> = (0..configs.len()).map(|i| parent(&configs, i)).collect();
    edges.extend(parents.iter().enumerate().filter_map(|(i, p)| Some((i, (*p)?))));
    edges.sort_unstable();
    edges.dedup();
    let rows = configs.iter().zip(&items).zip(&parents).map(|((c, i), parent)| Row {
        state: i.state.into(),
        cells: vec![
            c.name.clone(),
            c.configuration.checkpoint.clone(),
            parent.map_or_else(String::new, |p| configs[p].name.clone()),
            c.runs.len().to_string(),
            number(i.tps),
            i.ppl.map_or(String::new(), |p| format!("{p:.4}")),
            i.state.into(),
            c.configuration.machine.clone(),
        ],
    });
    let table = Table {
        caption: "Configurations, in the order of their first run".into(),
        columns: vec![
            names("configuration"),
            names("checkpoint"),
            names("baked from"),
            super::page::counts("runs"),
            numbers("tokens/s, mean", kind),
            numbers("perplexity", kind),
            names("gate"),
            names("machine"),
        ],
        rows: rows.collect(),
    };
    let without = items.iter().filter(|i| i.ppl.is_none()).count();
    let gates = match without {
        0 => String::new(),
        n => format!(" {n} have no perplexity in their records: speed without the gate is half a claim."),
    };
    let note = format!(
        "{} configurations, each at the mean of its runs. Machines differ: only what ran on one can be compared.{gates} A line leads to the \
         configuration that a run was interleaved with, or whose checkpoint its own was baked from.",
        configs.len()
    );
    let title = "Our configurations";
    let svg = draw(title, &items, &edges, None, &format!("tokens/s ({kind_text})"));
    let mut figure = Figure::plain(format!("configurations-{kind_text}"), kind_text, title, note, Some(svg), table);
    figure.legend = vec![
        Key::new("dot passed", "gate passed"),
        Key::new("cross failed", "gate failed"),
        Key::new("ring no", "no gate in the record"),
        Key::new("edge", "compared with, or baked from"),
    ];
    figure.states = ["passed", "failed", "no gate"].map(String::from).into();
    (figure.filter, figure.zoom) = (true, true);
    figure
}
