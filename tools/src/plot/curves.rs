//! Curves over a number: a line for each pair, with its name at the end.

use std::path::Path;

use anyhow::{Context, Result};

use super::axis::{number, Axis};
use super::svg::{Anchor, Svg};
use super::{color, draw_marker, GREY, INK, NAME, TEXT};

pub struct Curve {
    pub name: String,
    /// From left to right.
    pub points: Vec<(f64, f64)>,
}

/// What a picture of curves is called, what is along its lower edge, and how its values are drawn.
pub struct Frame<'a> {
    pub above: &'a str,
    pub below: &'a str,
    pub scale: Scale,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    Linear,
    /// Logarithmic where the values differ much.
    Fitting,
}

const SIZE: (f64, f64) = (720.0, 420.0);
/// Around the panel: left, top, right (for names), bottom.
const AROUND: (f64, f64, f64, f64) = (62.0, 34.0, 120.0, 44.0);
/// Values of which the largest is so many times the least are drawn on a logarithmic scale.
const WIDE: f64 = 15.0;
/// Names stand at least so far apart.
const APART: f64 = 12.0;

pub fn write(path: &Path, frame: &Frame, curves: &[Curve]) -> Result<()> {
    std::fs::write(path, drawn(frame, curves)?).with_context(|| format!("cannot write {}", path.display()))
}

fn drawn(frame: &Frame, curves: &[Curve]) -> Result<String> {
    let all = || curves.iter().flat_map(|c| &c.points);
    let values = || all().map(|p| p.1).filter(|v| *v > 0.0);
    let (least, most) = values().fold((f64::INFINITY, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
    let logarithmic = frame.scale == Scale::Fitting && most > WIDE * least;
    let y = if logarithmic { Axis::logarithmic(values(), 1.3) } else { Axis::from_zero(values()) };
    // A zero has no place on a logarithmic scale.
    let is_shown = |p: &&(f64, f64)| p.1.is_finite() && (!logarithmic || p.1 > 0.0);
    let axes = Axis::from_zero(all().map(|p| p.0)).zip(y);
    let (x, y) = axes.context("nothing was measured that could be plotted")?;
    let (left, top, right, bottom) = (AROUND.0, AROUND.1, SIZE.0 - AROUND.2, SIZE.1 - AROUND.3);
    let place = |p: (f64, f64)| (left + x.place(p.0) * (right - left), bottom - y.place(p.1) * (bottom - top));

    let mut svg = Svg::default();
    for tick in x.ticks(8) {
        let (at, _) = place((tick, most));
        svg.line(&[(at, top), (at, bottom)], GREY, 1.0);
        svg.text(&number(tick), (at, bottom + 6.0), Anchor::Top, INK, TEXT);
    }
    for tick in y.ticks(10) {
        let (_, at) = place((0.0, tick));
        svg.line(&[(left, at), (right, at)], GREY, 1.0);
        svg.text(&number(tick), (left - 7.0, at), Anchor::Right, INK, TEXT);
    }
    svg.line(&[(left, top), (left, bottom), (right, bottom)], INK, 1.2);
    svg.text(frame.below, ((left + right) / 2.0, bottom + 24.0), Anchor::Top, INK, TEXT);
    svg.text(frame.above, (left - 40.0, top - 18.0), Anchor::Left, INK, TEXT);

    // Names from top to bottom, each below the one before.
    let mut names: Vec<(usize, (f64, f64))> = Vec::new();
    for (i, curve) in curves.iter().enumerate() {
        let points: Vec<(f64, f64)> = curve.points.iter().filter(is_shown).map(|p| place(*p)).collect();
        svg.line(&points, color(i), 1.6);
        points.iter().for_each(|at| draw_marker(&mut svg, i, *at, true));
        names.extend(points.last().map(|at| (i, *at)));
    }
    names.sort_by(|a, b| a.1 .1.total_cmp(&b.1 .1));
    let count = names.len();
    let mut above = f64::NEG_INFINITY;
    for (place, (i, at)) in names.into_iter().enumerate() {
        // Those that follow have room above the lower edge.
        let lowest = bottom - APART * (count - 1 - place) as f64;
        above = at.1.min(lowest).max(above + APART);
        svg.text(&curves[i].name, (at.0 + 10.0, above), Anchor::Left, color(i).darker(), NAME);
    }
    Ok(svg.finish(SIZE))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(name: &str, values: &[f64]) -> Curve {
        Curve {
            name: name.into(),
            points: values.iter().enumerate().map(|(i, v)| (512.0 + 1024.0 * i as f64, *v)).collect(),
        }
    }

    #[test]
    fn a_line_and_a_name_for_each() {
        let titles = Frame { above: "KL divergence", below: "tokens", scale: Scale::Fitting };
        let text = drawn(&titles, &[curve("srft4", &[0.02, 0.03]), curve("q4_0", &[0.06, 0.07])]).unwrap();
        assert!(
            text.contains(">srft4</text>") && text.contains(">q4_0</text>") && text.contains(">KL divergence</text>")
        );
        assert!(text.contains(">0.05</text>") && text.contains(">1000</text>"), "round numbers: {text}");
        // four points, and a name that stands lower is that of the smaller value
        assert_eq!(text.matches("<polygon").count(), 4);
        let at = |name: &str| text.find(&format!(">{name}</text>")).unwrap();
        assert!(at("q4_0") < at("srft4"));
    }

    #[test]
    fn wide_ranges_and_nothing() {
        let titles = Frame { above: "", below: "", scale: Scale::Fitting };
        let text = drawn(&titles, &[curve("srft4", &[0.02, 0.0]), curve("q4_0", &[6.0, 7.0])]).unwrap();
        assert!(text.contains(">0.1</text>") && text.contains(">1</text>"), "decades: {text}");
        assert_eq!(text.matches("<polygon").count(), 3, "a zero has no place there");
        let linear = Frame { scale: Scale::Linear, ..titles };
        let text = drawn(&linear, &[curve("srft4", &[95.0, 90.0]), curve("q4_0", &[5.0, 0.0])]).unwrap();
        assert_eq!(text.matches("<polygon").count(), 4);
        assert!(drawn(&titles, &[curve("f16", &[0.0])]).is_err());
    }
}
