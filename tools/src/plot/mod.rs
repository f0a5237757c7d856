//! Results as pictures. Here: KL divergence and decode speed, each against bits per value.
//!
//! It must be readable printed in grey: a model is a shape, whether a type is this project's or llama.cpp's is filled
//! or hollow, and every point has its name. Colours only help.

mod axis;
pub mod curves;
mod labels;
mod legend;
mod names;
mod svg;

use std::path::Path;

use anyhow::{bail, ensure, Context, Result};

use axis::{number, Axis};
use labels::{Area, Line};
use names::{Label, Mark};
use svg::{Anchor, Color, Svg, WHITE};

/// One pair of one model.
pub struct Dot {
    pub name: String,
    pub bits: f64,
    pub kld: Option<f64>,
    /// Decode speed over f16's.
    pub speed: Option<f64>,
    /// All of llama.cpp's own?
    pub upstream: bool,
}

/// One model.
pub struct Series {
    pub name: String,
    pub dots: Vec<Dot>,
}

/// Asked before anything is measured: a wrong name shall not cost an hour.
pub fn check_name(path: &Path) -> Result<()> {
    let svg = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("svg"));
    ensure!(svg, "--plot {}: the name must end in .svg", path.display());
    Ok(())
}

/// Pixels of a panel: for one model, and more for each further one.
const PANEL: (f64, f64) = (560.0, 470.0);
const PANEL_MORE: (f64, f64) = (45.0, 50.0);
/// Bits per value that are written below a panel.
const BITS: [f64; 12] = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0];
const HEADER: f64 = 26.0;
const LEGEND_LINE: f64 = 20.0;
/// Font sizes: of all text, and of the points' names.
const TEXT: f64 = 10.5;
const NAME: f64 = 9.7;
const RADIUS: f64 = 5.0;

pub fn write(path: &Path, series: &[Series]) -> Result<()> {
    std::fs::write(path, Picture::new(series)?.svg()).with_context(|| format!("cannot write {}", path.display()))
}

/// Told apart without colour up to seven models; with it, many more.
const SHAPES: usize = 7;
/// Distinct to all eyes (Okabe and Ito).
const COLORS: [Color; 6] = [
    Color(0, 114, 178),
    Color(213, 94, 0),
    Color(0, 140, 100),
    Color(170, 80, 140),
    Color(60, 60, 60),
    Color(180, 130, 0),
];
const INK: Color = Color(40, 40, 40);
const GREY: Color = Color(226, 226, 226);

/// All that is drawn.
struct Picture<'a> {
    series: &'a [Series],
    panels: Vec<Panel>,
    /// Of each panel.
    contents: Vec<Contents<'a>>,
    legend: Vec<legend::Line>,
}

struct Panel {
    title: &'static str,
    x: Axis,
    y: Axis,
    value: fn(&Dot) -> Option<f64>,
    /// Is less better? Then the least for the bits is joined by a line.
    least: bool,
}

impl Panel {
    fn x(&self, inside: Area, bits: f64) -> f64 {
        inside.left + self.x.place(bits) * (inside.right - inside.left)
    }

    fn y(&self, inside: Area, value: f64) -> f64 {
        inside.bottom - self.y.place(value) * (inside.bottom - inside.top)
    }
}

/// What a panel shows, where it is.
struct Contents<'a> {
    inside: Area,
    /// The least for the bits, one a series.
    steps: Vec<Vec<(f64, f64)>>,
    marks: Vec<Mark<'a>>,
    labels: Vec<Label>,
}

impl<'a> Contents<'a> {
    fn new(panel: &Panel, series: &'a [Series], inside: Area) -> Contents<'a> {
        let at = |(bits, value)| (panel.x(inside, bits), panel.y(inside, value));
        let mut steps: Vec<Vec<_>> = Vec::new();
        let mut marks: Vec<Mark> = Vec::new();
        for (i, series) in series.iter().enumerate() {
            if panel.least {
                steps.push(frontier(&series.dots, panel.value).into_iter().map(at).collect());
            }
            marks.extend(series.dots.iter().filter_map(|d| Some((i, d, at((d.bits, (panel.value)(d)?))))));
        }
        let lines: Vec<Line> = steps.iter().flat_map(|s| s.windows(2).map(|w| (w[0], w[1]))).collect();
        let labels = names::labels_of(&marks, &lines, inside);
        Contents { inside, steps, marks, labels }
    }
}

fn kld(dot: &Dot) -> Option<f64> {
    // f16 is what the others are measured against: its zero has no place on the scale.
    dot.kld.filter(|kld| *kld > 0.0 && dot.name != "f16")
}

fn speed(dot: &Dot) -> Option<f64> {
    dot.speed.filter(|s| s.is_finite())
}

impl<'a> Picture<'a> {
    fn new(series: &'a [Series]) -> Result<Picture<'a>> {
        let dots = || series.iter().flat_map(|s| &s.dots);
        let panel = |title, value: fn(&Dot) -> Option<f64>, y: Option<Axis>, least| {
            let x = Axis::logarithmic(dots().filter(|d| value(d).is_some()).map(|d| d.bits), 1.2);
            x.zip(y).map(|(x, y)| Panel { title, x, y, value, least })
        };
        let divergence = Axis::logarithmic(dots().filter_map(kld), 1.6);
        let pace = Axis::from_zero(dots().filter_map(speed));
        let panels: Vec<Panel> = [
            panel("KL divergence against f16", kld, divergence, true),
            panel("decode speed, × f16", speed, pace, false),
        ]
        .into_iter()
        .flatten()
        .collect();
        if panels.is_empty() {
            bail!("nothing was measured that could be plotted");
        }
        let mut picture = Picture { series, panels, contents: Vec::new(), legend: Vec::new() };
        picture.lay_out();
        Ok(picture)
    }

    /// Before anything is drawn, because the legend's height is part of the size.
    fn lay_out(&mut self) {
        let (width, height) = self.panel_size();
        for (i, panel) in self.panels.iter().enumerate() {
            let left = width * i as f64;
            let inside = Area {
                left: left + 62.0,
                top: HEADER + 8.0,
                right: left + width - 14.0,
                bottom: HEADER + height - 40.0,
            };
            self.contents.push(Contents::new(panel, self.series, inside));
        }
        self.legend = legend::lines(self.series, &self.how_to_read(), self.size().0);
    }

    fn panel_size(&self) -> (f64, f64) {
        let more = (self.series.len().clamp(1, 6) - 1) as f64;
        (PANEL.0 + more * PANEL_MORE.0, PANEL.1 + more * PANEL_MORE.1)
    }

    fn legend_height(&self) -> f64 {
        LEGEND_LINE * self.legend.len() as f64 + 12.0
    }

    fn size(&self) -> (f64, f64) {
        let (width, height) = self.panel_size();
        (width * self.panels.len() as f64, HEADER + height + self.legend_height())
    }

    fn svg(&self) -> String {
        let mut svg = Svg::default();
        for (panel, contents) in self.panels.iter().zip(&self.contents) {
            draw_axes(&mut svg, panel, contents.inside);
            draw_contents(&mut svg, contents);
        }
        self.draw_legend(&mut svg);
        svg.finish(self.size())
    }

    fn draw_legend(&self, svg: &mut Svg) {
        let top = HEADER + self.panel_size().1 + 12.0;
        for (i, line) in self.legend.iter().enumerate() {
            let y = top + LEGEND_LINE * i as f64;
            if let Some(series) = line.series {
                draw_marker(svg, series, (line.left - 30.0, y), true);
                draw_marker(svg, series, (line.left - 14.0, y), false);
            }
            svg.text(&line.text, (line.left, y), Anchor::Left, INK, TEXT);
        }
    }

    fn how_to_read(&self) -> Vec<&'static str> {
        let mut lines = vec!["filled: types of this project; hollow: llama.cpp's own"];
        if self.panels.iter().any(|p| p.least) {
            lines.push("line: the least divergence for the bits");
        }
        lines
    }
}

fn draw_axes(svg: &mut Svg, panel: &Panel, inside: Area) {
    let Area { left, top, right, bottom } = inside;
    for tick in panel.x.ticks_of(&BITS) {
        let x = panel.x(inside, tick);
        svg.line(&[(x, top), (x, bottom)], GREY, 1.0);
        svg.text(&number(tick), (x, bottom + 6.0), Anchor::Top, INK, TEXT);
    }
    for tick in panel.y.ticks(12) {
        let y = panel.y(inside, tick);
        svg.line(&[(left, y), (right, y)], GREY, 1.0);
        svg.text(&number(tick), (left - 7.0, y), Anchor::Right, INK, TEXT);
    }
    svg.line(&[(left, top), (left, bottom), (right, bottom)], INK, 1.2);
    svg.text("bits per value", ((left + right) / 2.0, bottom + 24.0), Anchor::Top, INK, TEXT);
    svg.text(panel.title, (left - 40.0, HEADER - 10.0), Anchor::Left, INK, TEXT);
}

fn draw_contents(svg: &mut Svg, contents: &Contents) {
    for (i, steps) in contents.steps.iter().enumerate() {
        svg.line(steps, color(i).lighter(), 1.2);
    }
    for (i, dot, at) in &contents.marks {
        draw_marker(svg, *i, *at, !dot.upstream);
    }
    contents.labels.iter().for_each(|label| draw_label(svg, label));
}

/// With a thin line from the point where it is not beside it.
fn draw_label(svg: &mut Svg, label: &Label) {
    let Label { text, series, point: at, area } = label;
    let to = area.nearest(*at);
    let far = (to.0 - at.0).hypot(to.1 - at.1);
    if far > 2.4 * RADIUS {
        let t = 1.3 * RADIUS / far;
        let from = (at.0 + (to.0 - at.0) * t, at.1 + (to.1 - at.1) * t);
        svg.line(&[from, to], color(*series).lighter(), 0.8);
    }
    svg.text(text, area.center(), Anchor::Center, color(*series).darker(), NAME);
}

/// The shape of a series; hollow ones show white, so that lines end at them.
fn draw_marker(svg: &mut Svg, series: usize, at: (f64, f64), filled: bool) {
    let ink = color(series);
    let points: Vec<(f64, f64)> =
        shape(series % SHAPES).iter().map(|p| (at.0 + p.0 * RADIUS, at.1 + p.1 * RADIUS)).collect();
    svg.polygon(&points, if filled { ink } else { WHITE }, ink, 1.6);
}

fn color(series: usize) -> Color {
    COLORS[series % COLORS.len()]
}

/// From many bits to few: each point that is better than all with as many bits or fewer.
fn frontier(dots: &[Dot], value: fn(&Dot) -> Option<f64>) -> Vec<(f64, f64)> {
    let mut all: Vec<(f64, f64)> = dots.iter().filter_map(|d| Some((d.bits, value(d)?))).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let mut best = f64::INFINITY;
    all.retain(|&(_, v)| {
        let better = v < best;
        best = best.min(v);
        better
    });
    all
}

/// Corners within a circle of radius about 1, y downwards.
fn shape(number: usize) -> Vec<(f64, f64)> {
    let ring = |n: usize, turn: f64, radius: f64| -> Vec<(f64, f64)> {
        let angle = |i: usize| (i as f64 / n as f64 + turn) * std::f64::consts::TAU;
        (0..n).map(|i| (radius * angle(i).sin(), -radius * angle(i).cos())).collect()
    };
    match number {
        0 => ring(24, 0.0, 1.0),
        1 => ring(4, 0.125, 1.25),
        2 => ring(3, 0.0, 1.35),
        3 => ring(4, 0.0, 1.3),
        4 => ring(3, 0.5, 1.35),
        5 => ring(5, 0.0, 1.2),
        _ => {
            let (outer, inner) = (ring(5, 0.0, 1.5), ring(5, 0.1, 0.65));
            outer.into_iter().zip(inner).flat_map(|(a, b)| [a, b]).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dot(name: &str, bits: f64, kld: f64, speed: f64) -> Dot {
        let upstream = !name.contains("srft");
        Dot { name: name.into(), bits, kld: Some(kld), speed: Some(speed), upstream }
    }

    fn series() -> Vec<Series> {
        vec![
            Series {
                name: "SmolLM2-135M".into(),
                dots: vec![
                    dot("f16", 16.0, 0.0, 1.0),
                    dot("q8_0", 8.5, 0.0039, 0.86),
                    dot("q4_0", 4.5, 0.0484, 0.58),
                    dot("srft4", 4.5, 0.0381, 1.86),
                    dot("srft3", 3.5, 0.15, 1.86),
                ],
            },
            Series { name: "Gemma <3>".into(), dots: vec![dot("srft4", 4.5, 0.08, 1.4), dot("srft2", 2.5, 0.9, 1.9)] },
        ]
    }

    #[test]
    fn only_svg_is_written() {
        check_name(Path::new("a/b.SVG")).unwrap();
        assert!(check_name(Path::new("b.png")).is_err() && check_name(Path::new("svg")).is_err());
    }

    #[test]
    fn the_svg_names_every_point_and_model() {
        let series = series();
        let text = Picture::new(&series).unwrap().svg();
        assert_eq!(text.matches(">srft4</text>").count(), 4, "two models on two panels\n{text}");
        // f16 is only on the panel of speed
        assert_eq!(text.matches(">f16</text>").count(), 1);
        assert!(text.contains("SmolLM2-135M") && text.contains("Gemma &lt;3&gt;"));
        assert!(text.starts_with("<svg width=\"1210\""), "{}", &text[..80]);
    }

    #[test]
    fn the_legend_stays_within_the_picture() {
        let name = "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M (ctx 2048; f16 decodes 26.3 tokens/s at depth 4096)";
        let mut series = series();
        series.truncate(1);
        series[0].name = name.into();
        series[0].dots.iter_mut().for_each(|d| d.speed = None);
        let picture = Picture::new(&series).unwrap();
        let right = |line: &legend::Line| line.left + svg::size_of(&line.text, TEXT).0;
        assert!(picture.legend.iter().all(|line| right(line) < picture.size().0));
        let shown: String = picture.legend.iter().map(|line| format!("{} ", line.text)).collect();
        assert!(shown.contains(name), "{shown}");
    }

    #[test]
    fn only_what_was_measured_has_a_panel() {
        let mut series = series();
        series.iter_mut().flat_map(|s| &mut s.dots).for_each(|d| d.speed = None);
        assert_eq!(Picture::new(&series).unwrap().panels.len(), 1);
        series.iter_mut().flat_map(|s| &mut s.dots).for_each(|d| d.kld = None);
        assert!(Picture::new(&series).is_err());
    }

    #[test]
    fn the_frontier_only_falls() {
        let series = series();
        assert_eq!(frontier(&series[0].dots, kld), [(3.5, 0.15), (4.5, 0.0381), (8.5, 0.0039)]);
    }
}
