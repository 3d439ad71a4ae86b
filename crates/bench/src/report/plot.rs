//! SVG, written by hand: scales with round ticks, marks that carry what they stand for, text that stays text.
//!
//! What always holds: every text and attribute that comes from data is escaped here, and nowhere else does data enter the markup; the same
//! input gives the same bytes; a mark has its shape besides its colour.

use std::fmt::Write;

/// Escapes a text for element content and double-quoted attributes; a character that XML does not know becomes U+FFFD.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' => out.push_str("&#10;"),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// A coordinate with as many digits as a screen has use for.
pub(super) fn px(v: f64) -> String {
    let text = format!("{v:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_string)
}

/// A number in about four digits, thousands set apart.
pub(super) fn number(v: f64) -> String {
    let digits = match v.abs() {
        a if a >= 1000.0 => 0,
        a if a >= 100.0 => 1,
        a if a >= 1.0 || a == 0.0 => 2,
        _ => 4,
    };
    grouped(&format!("{v:.digits$}"))
}

/// Thousands of a plain decimal number set apart by thin spaces.
fn grouped(text: &str) -> String {
    let (sign, rest) = text.strip_prefix('-').map_or(("", text), |rest| ("\u{2212}", rest));
    let (whole, fraction) = rest.split_once('.').map_or((rest, None), |(w, f)| (w, Some(f)));
    let mut out = sign.to_string();
    for (i, c) in whole.chars().enumerate() {
        if i > 0 && whole.len() > 4 && (whole.len() - i).is_multiple_of(3) {
            out.push('\u{202f}');
        }
        out.push(c);
    }
    if let Some(fraction) = fraction {
        out.push('.');
        out.push_str(fraction);
    }
    out
}

/// From data to pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    log: bool,
}

impl Scale {
    /// Linear over the values with 6 % to spare on both sides; values that are all equal get room around them.
    pub fn linear(values: impl IntoIterator<Item = f64>, from: f64, to: f64) -> Scale {
        let (low, high) = span(values);
        let room = if high > low { (high - low) * 0.06 } else { (low.abs() * 0.1).max(1e-9) };
        Scale { low: low - room, high: high + room, from, to, log: false }
    }

    /// Linear between two ends that stay what they are.
    pub fn between(low: f64, high: f64, from: f64, to: f64) -> Scale {
        let high = if high > low { high } else { low + 1.0 };
        Scale { low, high, from, to, log: false }
    }

    /// Logarithmic over positive values; those that no measurement gives are left out, since room around them would be infinite.
    pub fn log(values: impl IntoIterator<Item = f64>, from: f64, to: f64) -> Scale {
        let (low, high) = span(values.into_iter().filter(|v| (1e-100..=1e100).contains(v)));
        let (low, high) = if low > 0.0 { (low, high) } else { (1.0, 10.0) };
        let room = (high / low).powf(0.05).max(1.02);
        Scale { low: low / room, high: high * room, from, to, log: true }
    }

    /// Where a value lies.
    pub fn at(&self, v: f64) -> f64 {
        let share = match self.log {
            true => (v / self.low).ln() / (self.high / self.low).ln(),
            false => (v - self.low) / (self.high - self.low),
        };
        self.from + share * (self.to - self.from)
    }

    /// Least and greatest value.
    pub fn domain(&self) -> (f64, f64) {
        (self.low, self.high)
    }

    /// Round values inside, about as many as asked for.
    pub fn ticks(&self, about: usize) -> Vec<f64> {
        if self.log {
            let decades = (self.high / self.low).log10();
            let steps: &[f64] = if decades > 3.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
            let first = self.low.log10().floor() as i32;
            let last = self.high.log10().ceil() as i32;
            let all = (first..=last).flat_map(|e| steps.iter().map(move |s| s * 10f64.powi(e)));
            return all.filter(|v| (self.low..=self.high).contains(v)).collect();
        }
        let raw = (self.high - self.low) / about.max(1) as f64;
        let power = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].iter().map(|m| m * power).find(|s| *s >= raw).unwrap_or(raw);
        let first = (self.low / step).ceil() as i64;
        let last = (self.high / step).floor() as i64;
        (first..=last).map(|i| i as f64 * step).collect()
    }

    /// A tick in as few digits as tell it from its neighbours.
    pub fn tick_text(&self, v: f64, ticks: &[f64]) -> String {
        let step = ticks.windows(2).map(|w| (w[1] - w[0]).abs()).fold(f64::INFINITY, f64::min);
        let step = if self.log || !step.is_finite() { v.abs() } else { step };
        let digits = (0..6).find(|&d| ((step * 10f64.powi(d)).round() - step * 10f64.powi(d)).abs() < 1e-6);
        grouped(&format!("{v:.*}", digits.unwrap_or(6) as usize))
    }
}

fn span(values: impl IntoIterator<Item = f64>) -> (f64, f64) {
    let ends = values.into_iter().filter(|v| v.is_finite());
    let (low, high) = ends.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low <= high { (low, high) } else { (0.0, 1.0) }
}

/// Shape of a mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// Filled circle.
    Dot,
    /// Circle.
    Ring,
    /// Two crossed strokes.
    Cross,
}

/// Where text is held.
#[derive(Debug, Clone, Copy)]
pub(super) enum Anchor {
    /// At its start.
    Start,
    /// In its middle.
    Middle,
    /// At its end.
    End,
}

/// The inner rectangle of a plot and what is around it, in pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frame {
    pub width: f64,
    pub height: f64,
    pub left: f64,
    pub right: f64,
    pub top: f64,
    pub bottom: f64,
}

impl Frame {
    /// Pixels of the horizontal axis: left end, right end.
    pub fn x(&self) -> (f64, f64) {
        (self.left, self.width - self.right)
    }

    /// Pixels of the vertical axis: lower end, upper end.
    pub fn y(&self) -> (f64, f64) {
        (self.height - self.bottom, self.top)
    }
}

/// A plot of a row for each name: names at the left, `right` pixels for remarks at the right.
pub(super) struct Rows {
    pub frame: Frame,
    pitch: f64,
}

impl Rows {
    pub fn new(count: usize, pitch: f64, left: f64, right: f64) -> Rows {
        let (top, bottom) = (34.0, 50.0);
        let height = top + bottom + pitch * count.max(1) as f64;
        Rows { frame: Frame { width: 920.0, height, left, right, top, bottom }, pitch }
    }

    /// The middle of a row.
    pub fn at(&self, row: usize) -> f64 {
        self.frame.top + self.pitch * (row as f64 + 0.5)
    }

    /// Names at the left and a line between rows.
    pub fn names<'a>(&self, svg: &mut Svg, names: impl Iterator<Item = &'a str>) {
        let most = ((self.frame.left - 16.0) / 6.6) as usize;
        for (row, name) in names.enumerate() {
            svg.text("row-name", (self.frame.left - 10.0, self.at(row) + 4.0), Anchor::End, &ends(name, most));
            let y = self.at(row) + self.pitch / 2.0;
            svg.line("rule", (8.0, y), (self.frame.width - 8.0, y));
        }
    }

    /// Vertical grid lines with figures below.
    pub fn x_axis(&self, svg: &mut Svg, scale: &Scale, name: &str, about: usize) {
        let (bottom, top) = self.frame.y();
        for t in scale.ticks(about) {
            svg.line("grid", (scale.at(t), bottom), (scale.at(t), top));
        }
        svg.x_axis(scale, name, about);
    }
}

/// A drawing that grows.
pub(super) struct Svg {
    frame: Frame,
    body: String,
    marks: usize,
}

impl Svg {
    pub fn new(frame: Frame) -> Svg {
        Svg { frame, body: String::new(), marks: 0 }
    }

    pub fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        let (x1, y1, x2, y2) = (px(x1), px(y1), px(x2), px(y2));
        let _ = write!(self.body, r#"<line class="{class}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>"#);
    }

    pub fn rect(&mut self, class: &str, (x, y): (f64, f64), width: f64, height: f64) {
        let (x, y, w, h) = (px(x), px(y), px(width.max(0.0)), px(height.max(0.0)));
        let _ = write!(self.body, r#"<rect class="{class}" x="{x}" y="{y}" width="{w}" height="{h}"/>"#);
    }

    /// A line through points.
    pub fn path(&mut self, class: &str, points: &[(f64, f64)]) {
        let mut d = String::new();
        for (i, (x, y)) in points.iter().enumerate() {
            let _ = write!(d, "{}{} {}", if i == 0 { "M" } else { "L" }, px(*x), px(*y));
        }
        let _ = write!(self.body, r#"<path class="{class}" d="{d}"/>"#);
    }

    pub fn text(&mut self, class: &str, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let (x, y, text) = (px(x), px(y), escape(text));
        let _ = write!(self.body, r#"<text class="{class}" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>"#);
    }

    /// A mark that tells what it stands for: its lines are its accessible name and its tooltip. `data` are attributes for the page's script.
    pub fn mark(&mut self, class: &str, shape: Shape, (x, y): (f64, f64), lines: &[String], data: &[(&str, String)]) {
        // One stop of the Tab key for a plot; arrow keys go on from there.
        let tab = if self.marks == 0 { 0 } else { -1 };
        self.marks += 1;
        let name = escape(&lines.join("\n"));
        let shape = match shape {
            Shape::Dot => r#"<circle r="4.5"/>"#,
            Shape::Ring => r#"<circle r="4"/>"#,
            Shape::Cross => r#"<path d="M-4-4L4 4M-4 4L4-4"/>"#,
        };
        let mut attributes = String::new();
        for (key, value) in data {
            let _ = write!(attributes, r#" data-{key}="{}""#, escape(value));
        }
        let (x, y) = (px(x), px(y));
        let _ = write!(
            self.body,
            r#"<g class="mark {class}" transform="translate({x} {y})" tabindex="{tab}" role="img" aria-label="{name}"{attributes}>{shape}</g>"#
        );
    }

    /// A line between two marks, by their `data-id`, that follows them.
    pub fn edge(&mut self, class: &str, (from, a): (usize, (f64, f64)), (to, b): (usize, (f64, f64))) {
        let (x1, y1, x2, y2) = (px(a.0), px(a.1), px(b.0), px(b.1));
        let _ = write!(
            self.body,
            r#"<line class="edge {class}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" data-from="{from}" data-to="{to}"/>"#
        );
    }

    /// The name of a mark, by its `data-id`, that follows it, with a line to it where it stands apart.
    pub fn label(&mut self, id: usize, (x, y): (f64, f64), (dx, dy): (f64, f64), anchor: Anchor, text: &str) {
        let (tx, ty) = (px(x), px(y));
        let _ = write!(self.body, r#"<g class="label" data-of="{id}" transform="translate({tx} {ty})">"#);
        if dy.abs() > 4.0 || dx.abs() > 30.0 {
            self.line("leader", (dx.signum() * 5.0, 0.0), (dx - dx.signum() * 3.0, dy));
        }
        self.text("direct", (dx, dy + 4.0), anchor, text);
        self.close();
    }

    /// A bar that tells what it stands for.
    pub fn bar(&mut self, class: &str, (x, y): (f64, f64), width: f64, height: f64, lines: &[String]) {
        let tab = if self.marks == 0 { 0 } else { -1 };
        self.marks += 1;
        let name = escape(&lines.join("\n"));
        let (x, y, w, h) = (px(x), px(y), px(width.max(0.5)), px(height.max(0.5)));
        let _ = write!(
            self.body,
            r#"<rect class="mark bar {class}" x="{x}" y="{y}" width="{w}" height="{h}" tabindex="{tab}" role="img" aria-label="{name}"/>"#
        );
    }

    /// Opens a group, with attributes that the program wrote.
    pub fn open(&mut self, attributes: &str) {
        let _ = write!(self.body, "<g {attributes}>");
    }

    pub fn close(&mut self) {
        self.body.push_str("</g>");
    }

    /// Grid lines and figures of the vertical axis, its name above it.
    pub fn y_axis(&mut self, scale: &Scale, name: &str, about: usize) {
        let (left, right) = self.frame.x();
        let ticks = scale.ticks(about);
        self.open(r#"class="axis y""#);
        for &t in &ticks {
            let y = scale.at(t);
            self.line("grid", (left, y), (right, y));
            self.text("tick", (left - 8.0, y + 4.0), Anchor::End, &scale.tick_text(t, &ticks));
        }
        self.close();
        self.text("axis-name", (8.0, self.frame.top - 12.0), Anchor::Start, name);
    }

    /// Figures of the horizontal axis, its name below it.
    pub fn x_axis(&mut self, scale: &Scale, name: &str, about: usize) {
        let (bottom, _) = self.frame.y();
        let (left, right) = self.frame.x();
        let ticks = scale.ticks(about);
        self.open(r#"class="axis x""#);
        for &t in &ticks {
            self.line("stub", (scale.at(t), bottom), (scale.at(t), bottom + 5.0));
            self.text("tick", (scale.at(t), bottom + 18.0), Anchor::Middle, &scale.tick_text(t, &ticks));
        }
        self.close();
        self.line("base", (left, bottom), (right, bottom));
        self.text("axis-name", ((left + right) / 2.0, bottom + 37.0), Anchor::Middle, name);
    }

    /// The whole element. `attributes` are those that the program wrote for the page's script.
    pub fn finish(self, name: &str, attributes: &str) -> String {
        let (w, h, name) = (px(self.frame.width), px(self.frame.height), escape(name));
        format!(
            r#"<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" role="group" aria-label="{name}"{attributes}>{}</svg>"#,
            self.body
        )
    }
}

/// Heights for labels that want to stand at `wanted` and need `gap` between them, between two ends; in the order given.
pub(super) fn spread(wanted: &[f64], gap: f64, (top, bottom): (f64, f64)) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|&a, &b| wanted[a].total_cmp(&wanted[b]).then(a.cmp(&b)));
    let mut out = wanted.to_vec();
    let mut least = top;
    for &i in &order {
        out[i] = out[i].max(least);
        least = out[i] + gap;
    }
    let mut most = bottom;
    for &i in order.iter().rev() {
        out[i] = out[i].min(most);
        most = out[i] - gap;
    }
    out
}

/// A text cut to a number of characters, with a sign that it was.
pub(super) fn short(text: &str, most: usize) -> String {
    match text.chars().count() > most {
        true => text.chars().take(most.saturating_sub(1)).chain(['\u{2026}']).collect(),
        false => text.to_string(),
    }
}

/// The same with the middle left out: names of variants differ at their ends.
pub(super) fn ends(text: &str, most: usize) -> String {
    let count = text.chars().count();
    if count <= most {
        return text.to_string();
    }
    let (head, tail) = (most / 2, most.saturating_sub(most / 2 + 1));
    text.chars().take(head).chain(['\u{2026}']).chain(text.chars().skip(count - tail)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_never_becomes_markup() {
        let frame = Frame { width: 100.0, height: 50.0, left: 10.0, right: 10.0, top: 10.0, bottom: 10.0 };
        let mut svg = Svg::new(frame);
        let hostile = "\"><script>alert('x')</script>\n&\u{0}";
        svg.text("t", (1.0, 2.0), Anchor::Start, hostile);
        svg.mark("m", Shape::Dot, (1.0, 2.0), &[hostile.into()], &[("name", hostile.into())]);
        svg.bar("m", (1.0, 2.0), 3.0, 4.0, &[hostile.into()]);
        let out = svg.finish(hostile, "");
        assert!(!out.contains("<script") && !out.contains("'x'") && !out.contains('\0'), "{out}");
        assert_eq!(
            out.matches("&quot;&gt;&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&#10;&amp;\u{fffd}").count(),
            5
        );
        // The tags are those that were drawn.
        assert_eq!(out.matches('<').count(), 2 + 2 + 4 + 1 - 1, "{out}");
    }

    #[test]
    fn an_axis_is_finite_whatever_a_record_says() {
        let s = Scale::log([1e307, 2.0, 3.0, 5e-324], 0.0, 100.0);
        assert!(s.domain().0 > 1.0 && s.domain().1 < 4.0 && s.ticks(5).len() < 10, "{:?}", s.domain());
    }

    #[test]
    fn ticks_are_round_and_inside() {
        let s = Scale::linear([97.0, 536.0], 0.0, 100.0);
        let ticks = s.ticks(5);
        assert_eq!(ticks, [100.0, 200.0, 300.0, 400.0, 500.0]);
        assert_eq!(s.tick_text(100.0, &ticks), "100");
        assert!((s.at(97.0) - 100.0 * 0.06 / 1.12).abs() < 1e-9);
        let s = Scale::between(1.98, 2.46, 0.0, 1.0);
        let ticks = s.ticks(5);
        assert_eq!(
            ticks.iter().map(|t| s.tick_text(*t, &ticks)).collect::<Vec<_>>(),
            ["2.0", "2.1", "2.2", "2.3", "2.4"]
        );
        let l = Scale::log([1.0, 128.0], 0.0, 1.0);
        let ticks = l.ticks(5);
        assert_eq!(ticks, [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(l.tick_text(50.0, &ticks), "50");
        // Nothing to scale, one value, and a value that is none.
        for values in [vec![], vec![5.0], vec![f64::NAN, 5.0], vec![0.0, 0.0]] {
            for s in [Scale::linear(values.clone(), 0.0, 10.0), Scale::log(values, 0.0, 10.0)] {
                assert!(s.at(5.0).is_finite() && s.ticks(4).len() < 20, "{s:?}");
            }
        }
    }

    #[test]
    fn labels_make_room_for_each_other() {
        let out = spread(&[50.0, 51.0, 10.0, 52.0], 12.0, (0.0, 100.0));
        assert_eq!(out, [50.0, 62.0, 10.0, 74.0]);
        let low = spread(&[99.0, 98.0], 12.0, (0.0, 100.0));
        assert_eq!(low, [100.0, 88.0]);
    }

    #[test]
    fn numbers_are_short() {
        let all = [536.15, 12_345.6, 2.3912, 0.04321, -1234.0, 0.0].map(number);
        assert_eq!(all, ["536.1", "12\u{202f}346", "2.39", "0.0432", "\u{2212}1234", "0.00"]);
        assert_eq!(px(3.0), "3");
        assert_eq!(px(2.7512), "2.8");
        assert_eq!((short("abcdef", 4), short("abcd", 4)), ("abc\u{2026}".into(), "abcd".into()));
        assert_eq!((ends("abcdefghij", 6), ends("abc", 6)), ("abc\u{2026}ij".into(), "abc".into()));
    }
}
