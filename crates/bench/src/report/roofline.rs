//! Bytes of a step against the time that it takes.

use kernels::roofline::DEVICES;

use super::page::{Figure, Key, Row, Section, Table, names, numbers};
use super::plot::{Anchor, Frame, Scale, Shape, Svg, number, short, spread};
use super::{Config, by_kind, kind_name};
use crate::record::Kind;

/// Configurations that are named in the picture.
const NAMED: usize = 12;

struct Step {
    name: String,
    machine: String,
    bytes: f64,
    ms: f64,
    source: String,
}

impl Step {
    /// 10^9 bytes a second.
    fn rate(&self) -> f64 {
        self.bytes / self.ms / 1e6
    }
}

pub(super) fn section(configs: &[Config]) -> Section {
    let mut figures = Vec::new();
    for (kind, configs) in by_kind(configs) {
        let of = |c: &&Config| {
            let result = c.last()?.result.as_ref()?;
            let (bytes, ms) = result.bytes_per_step.as_ref().zip(result.step_ms)?;
            let positive = bytes.value > 0.0 && ms > 0.0;
            positive.then(|| Step {
                name: c.name.clone(),
                machine: c.configuration.machine.clone(),
                bytes: bytes.value,
                ms,
                source: bytes.source.clone(),
            })
        };
        let steps: Vec<Step> = configs.iter().filter_map(of).collect();
        if !steps.is_empty() {
            figures.push(figure(kind, &steps));
        }
    }
    let missing = match figures.is_empty() {
        true => vec![
            "A step is set against its bytes where a record has both: `chiku bench run` counts them for models that it runs itself; \
             `chiku bench roofline` projects any checkpoint."
                .to_string(),
        ],
        false => Vec::new(),
    };
    Section {
        id: "roofline",
        title: "Roofline",
        lead: "How far is a step from what memory allows? At batch 1 a step reads every weight once; a lower bandwidth cannot be beaten.",
        figures,
        missing,
    }
}

fn figure(kind: Kind, steps: &[Step]) -> Figure {
    let kind_text = kind_name(kind);
    let frame = Frame { width: 920.0, height: 460.0, left: 66.0, right: 210.0, top: 40.0, bottom: 52.0 };
    let mut svg = Svg::new(frame);
    // Room for the fastest device below, and for a step ten times slower above.
    let x = Scale::log(steps.iter().flat_map(|s| [s.bytes / 2.0, s.bytes * 2.0]), frame.x().0, frame.x().1);
    let fastest = DEVICES.iter().map(|d| d.gb_s()).fold(1.0, f64::max);
    let floors = steps.iter().map(|s| s.bytes / fastest / 1e6);
    let y = Scale::log(steps.iter().map(|s| s.ms * 2.0).chain(floors), frame.y().0, frame.y().1);
    svg.y_axis(&y, &format!("ms a step ({kind_text})"), 6);
    let megabytes = Scale::log(steps.iter().flat_map(|s| [s.bytes / 2e6, s.bytes * 2e-6]), frame.x().0, frame.x().1);
    svg.x_axis(&megabytes, "MB a step must read (projected)", 6);
    let (left, right) = frame.x();
    let (bottom, top) = frame.y();
    let (low, high) = x.domain();
    // Where a device's line leaves the plot at the right, or at the top before that.
    let mut remarks: Vec<(f64, String)> = Vec::new();
    for d in &DEVICES {
        let ms = |bytes: f64| bytes / d.gb_s() / 1e6;
        let line: Vec<(f64, f64)> = (0..=40)
            .map(|i| low * (high / low).powf(f64::from(i) / 40.0))
            .map(|b| (x.at(b), y.at(ms(b))))
            .filter(|p| (top..=bottom).contains(&p.1))
            .collect();
        let Some(end) = line.last().copied() else { continue };
        svg.path("roof", &line);
        if end.0 > right - 12.0 {
            remarks.push((end.1, format!("{} {:.0} GB/s", d.name.to_uppercase(), d.gb_s())));
        }
    }
    let heights = spread(&remarks.iter().map(|r| r.0).collect::<Vec<_>>(), 15.0, (top, bottom));
    for ((at, text), height) in remarks.iter().zip(heights) {
        svg.line("leader", (right + 3.0, *at), (right + 14.0, height));
        svg.text("roof-name", (right + 18.0, height + 4.0), Anchor::Start, text);
    }
    let wanted: Vec<f64> = steps.iter().map(|s| y.at(s.ms)).collect();
    let heights = spread(&wanted, 14.0, (top + 4.0, bottom - 6.0));
    for (i, s) in steps.iter().enumerate() {
        let at = (x.at(s.bytes), y.at(s.ms));
        let lines = [
            s.name.clone(),
            format!("{:.3} ms a step ({kind_text})", s.ms),
            format!("{} MB (projected): {} GB/s", number(s.bytes / 1e6), number(s.rate())),
            s.machine.clone(),
        ];
        let data = [("id", i.to_string())];
        svg.mark("s0", Shape::Dot, at, &lines, &data);
        if steps.len() <= NAMED {
            let (dx, anchor) =
                if at.0 - left > (right - left) / 2.0 { (-12.0, Anchor::End) } else { (12.0, Anchor::Start) };
            svg.label(i, at, (dx, heights[i] - at.1), anchor, &short(&s.name, 34));
        }
    }
    let row = |s: &Step| -> Row {
        let mut cells =
            vec![s.name.clone(), s.machine.clone(), format!("{:.3}", s.ms), number(s.bytes / 1e6), number(s.rate())];
        cells.extend(DEVICES.iter().map(|d| format!("{:.4}", s.bytes / d.gb_s() / 1e6)));
        cells.push(s.source.clone());
        cells.into()
    };
    let mut columns = vec![
        names("configuration"),
        names("machine"),
        numbers("ms a step", kind),
        numbers("MB a step", Kind::Projected),
        numbers("GB/s implied", Kind::Projected),
    ];
    columns.extend(DEVICES.iter().map(|d| numbers(&format!("floor on {}, ms", d.name), Kind::Projected)));
    columns.push(names("bytes counted as"));
    let table = Table {
        caption: "Last run of each configuration; floors are bytes over the best bandwidth that reads reached, or the data sheet's".into(),
        columns,
        rows: steps.iter().map(row).collect(),
    };
    let note = "A mark is a configuration on its own machine. A line is the time that a device's memory alone would take for so many bytes; only a \
                mark of that device can be held against it. Bytes and lines are projected, times are not."
        .to_string();
    let title = "Time of a step against its bytes";
    let svg = svg.finish(title, "");
    let mut figure = Figure::plain(format!("roofline-{kind_text}"), kind_text, title, note, Some(svg), table);
    figure.legend = vec![
        Key::new("dot s0", format!("a configuration ({kind_text})")),
        Key::new("curve roof", "bandwidth of a device (projected)"),
    ];
    figure
}
