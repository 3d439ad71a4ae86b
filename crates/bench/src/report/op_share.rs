//! What each op of a step takes of the roofline, run by run.

use super::kind_name;
use super::page::{Figure, Key, Row, Table, commit, names, numbers};
use super::plot::{Anchor, Rows, Scale, Shape, Svg, number};
use crate::history::{Point, Series};
use crate::profile::{OpBound, OpRoofline};
use crate::record::Kind;

/// Series in the picture: those profiled last. The table has all.
const SHOWN: usize = 4;

/// The runs of a series that were taken apart, in the order of their time.
type Runs<'a> = Vec<(&'a Point, &'a OpRoofline)>;

fn profiled(s: &Series) -> Runs<'_> {
    s.points.iter().filter_map(|p| Some((p, p.roofline.as_ref()?))).collect()
}

/// `None` where no run was taken apart.
pub(super) fn figure(series: &[&Series]) -> Option<Figure> {
    let mut of: Vec<(&Series, Runs)> = series.iter().map(|s| (*s, profiled(s))).collect();
    of.retain(|(_, runs)| !runs.is_empty());
    if of.is_empty() {
        return None;
    }
    of.sort_by(|a, b| a.1[a.1.len() - 1].0.time.cmp(&b.1[b.1.len() - 1].0.time));
    let shown = &of[of.len().saturating_sub(SHOWN)..];
    let rows: Vec<(String, &Runs, &OpBound)> = shown
        .iter()
        .flat_map(|(s, runs)| {
            let ops = &runs[runs.len() - 1].1.ops;
            ops.iter().map(move |op| (format!("{}, {}", s.configuration.label, op.op), runs, op))
        })
        .collect();
    let plot = Rows::new(rows.len(), 26.0, 220.0, 130.0);
    let mut svg = Svg::new(plot.frame);
    let share = |runs: &[(&Point, &OpRoofline)], at: usize, op: &str| {
        runs[at].1.ops.iter().find(|o| o.op == op).map(|o| o.percent)
    };
    let all = rows.iter().flat_map(|(_, runs, op)| (0..runs.len()).filter_map(move |i| share(runs, i, &op.op)));
    let x = Scale::linear(all.chain([0.0, 100.0]), plot.frame.x().0, plot.frame.x().1);
    plot.x_axis(&mut svg, &x, "percent of the roofline (projected)", 6);
    plot.names(&mut svg, rows.iter().map(|r| r.0.as_str()));
    let (bottom, top) = plot.frame.y();
    svg.line("limit", (x.at(100.0), bottom), (x.at(100.0), top));
    for (row, (name, runs, op)) in rows.iter().enumerate() {
        for (i, (point, roofline)) in runs.iter().enumerate() {
            let Some(percent) = share(runs, i, &op.op) else { continue };
            let last = i + 1 == runs.len();
            let lines = [
                format!("{name}: {percent:.1} % of {} GB/s (projected)", number(roofline.read_gb_per_s.value)),
                format!("commit {}, {}", commit(point.commit.as_deref()), point.time),
            ];
            let (class, shape) = if last { ("s0", Shape::Dot) } else { ("pending small", Shape::Ring) };
            svg.mark(class, shape, (x.at(percent), plot.at(row)), &lines, &[]);
        }
        let text = format!("{:.1} %, {} MB", op.percent, number(op.bytes as f64 / 1e6));
        svg.text("remark", (plot.frame.x().1 + 14.0, plot.at(row) + 4.0), Anchor::Start, &text);
    }
    let mut table_rows: Vec<Row> = Vec::new();
    for (s, runs) in &of {
        for (point, roofline) in runs {
            for op in &roofline.ops {
                table_rows.push(
                    vec![
                        s.configuration.label.clone(),
                        s.configuration.machine.clone(),
                        point.time.clone(),
                        commit(point.commit.as_deref()),
                        op.op.clone(),
                        number(op.bytes as f64 / 1e6),
                        format!("{:.4}", op.floor_ms),
                        format!("{:.1}", op.percent),
                    ]
                    .into(),
                );
            }
        }
    }
    let table = Table {
        caption: "Each op of each run that was taken apart".into(),
        columns: vec![
            names("configuration"),
            names("machine"),
            names("time"),
            names("commit"),
            names("op"),
            numbers("MB a step", Kind::Projected),
            numbers("floor, ms", Kind::Projected),
            numbers("% of the roofline", Kind::Projected),
        ],
        rows: table_rows,
    };
    let note = "The time in which the machine could read an op's weights over the time that the op took. Where weights stay in a cache an op can \
                lie above 100 %. Earlier runs are rings."
        .to_string();
    let title = "What each op takes of the roofline";
    let kind = kind_name(Kind::Projected);
    let mut figure = Figure::plain("op-share", kind, title, note, Some(svg.finish(title, "")), table);
    figure.legend = vec![Key::new("dot s0", "last run"), Key::new("ring pending", "earlier runs")];
    Some(figure)
}
