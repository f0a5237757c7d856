//! The result as a picture: KL divergence and decode speed, each against bits per value.
//!
//! It must be readable printed in grey: a model is a shape, whether a type is this project's or llama.cpp's is filled
//! or hollow, and every point has its name, or a number that is explained below. Colours only help.

mod axis;
mod labels;
mod legend;
mod names;
mod stroke_font;

use std::path::Path;

use anyhow::{anyhow, bail, Context, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::FontTransform;

use axis::{number, Axis};
use labels::{Area, Line};
use names::{Label, Mark};
use stroke_font::StrokeText;

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

/// What can be written, told by the name of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Svg,
    Png,
}

/// Asked before anything is measured: a wrong name shall not cost an hour.
pub fn kind(path: &Path) -> Result<Kind> {
    match path.extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase).as_deref() {
        Some("svg") => Ok(Kind::Svg),
        Some("png") => Ok(Kind::Png),
        _ => bail!("--plot {}: the name must end in .svg or .png", path.display()),
    }
}

/// Pixels of a panel at scale 1: for one model, and more for each further one.
const PANEL: (f64, f64) = (560.0, 470.0);
const PANEL_MORE: (f64, f64) = (45.0, 50.0);
/// Bits per value that are written below a panel.
const BITS: [f64; 12] = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0];
const HEADER: f64 = 26.0;
const LEGEND_LINE: f64 = 20.0;
const TEXT: f64 = 13.0;
const RADIUS: f64 = 5.0;
/// The SVG is drawn on a grid of half pixels; the PNG is twice the size, from four times the pixels.
const SVG_SCALE: f64 = 2.0;
const PNG_SCALE: f64 = 4.0;
const PNG_SHRINK: usize = 2;

pub fn write(path: &Path, series: &[Series]) -> Result<()> {
    let picture = Picture::new(series)?;
    match kind(path)? {
        Kind::Svg => std::fs::write(path, picture.svg()?).with_context(|| format!("cannot write {}", path.display())),
        Kind::Png => picture.png(path),
    }
}

/// Told apart without colour up to seven models; with it, many more.
const SHAPES: usize = 7;
/// Distinct to all eyes (Okabe and Ito).
const COLORS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 140, 100),
    RGBColor(170, 80, 140),
    RGBColor(60, 60, 60),
    RGBColor(180, 130, 0),
];
const INK: RGBColor = RGBColor(40, 40, 40);
const GREY: RGBColor = RGBColor(226, 226, 226);

/// All that is drawn, at scale 1.
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
    fn new(panel: &Panel, series: &'a [Series], inside: Area, numbered: &mut Vec<String>) -> Contents<'a> {
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
        let labels = names::labels_of(&marks, &lines, inside, numbered);
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
        let mut numbered = Vec::new();
        for (i, panel) in self.panels.iter().enumerate() {
            let left = width * i as f64;
            let inside = Area {
                left: left + 62.0,
                top: HEADER + 8.0,
                right: left + width - 14.0,
                bottom: HEADER + height - 40.0,
            };
            self.contents.push(Contents::new(panel, self.series, inside, &mut numbered));
        }
        self.legend = legend::lines(self.series, &self.how_to_read(), &numbered, self.size().0);
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

    fn pixels(&self, scale: f64) -> (u32, u32) {
        let (w, h) = self.size();
        ((w * scale).round() as u32, (h * scale).round() as u32)
    }

    fn svg(&self) -> Result<String> {
        let mut text = String::new();
        let (w, h) = self.pixels(SVG_SCALE);
        self.draw(SVGBackend::with_string(&mut text, (w, h)), SVG_SCALE)?;
        // Shown at scale 1, with all its halves of pixels.
        let (small_w, small_h) = self.pixels(1.0);
        let header = format!("width=\"{w}\" height=\"{h}\"");
        if !text.contains(&header) {
            bail!("unexpected SVG: {}", text.chars().take(200).collect::<String>());
        }
        Ok(text.replacen(&header, &format!("width=\"{small_w}\" height=\"{small_h}\""), 1))
    }

    fn png(&self, path: &Path) -> Result<()> {
        let (w, h) = self.pixels(PNG_SCALE);
        let mut fine = vec![0u8; 3 * (w * h) as usize];
        self.draw(StrokeText(BitMapBackend::with_buffer(&mut fine, (w, h))), PNG_SCALE)?;
        let (w, h, pixels) = shrink(&fine, w as usize, h as usize, PNG_SHRINK);
        let fail = |e: String| anyhow!("cannot write {}: {e}", path.display());
        let mut file = BitMapBackend::new(path, (w as u32, h as u32));
        file.blit_bitmap((0, 0), (w as u32, h as u32), &pixels).map_err(|e| fail(e.to_string()))?;
        file.present().map_err(|e| fail(e.to_string()))
    }

    fn draw<B: DrawingBackend>(&self, backend: B, scale: f64) -> Result<()> {
        let root = backend.into_drawing_area();
        let pen = Pen { root: &root, scale };
        pen.clear()?;
        for (panel, contents) in self.panels.iter().zip(&self.contents) {
            draw_axes(&pen, panel, contents.inside)?;
            draw_contents(&pen, contents)?;
        }
        self.draw_legend(&pen)?;
        root.present().map_err(|e| anyhow!("{e}"))
    }

    fn draw_legend<B: DrawingBackend>(&self, pen: &Pen<B>) -> Result<()> {
        let top = HEADER + self.panel_size().1 + 12.0;
        for (i, line) in self.legend.iter().enumerate() {
            let y = top + LEGEND_LINE * i as f64;
            if let Some(series) = line.series {
                pen.marker(series, (line.left - 30.0, y), true)?;
                pen.marker(series, (line.left - 14.0, y), false)?;
            }
            pen.text(&line.text, (line.left, y), HPos::Left, VPos::Center, INK)?;
        }
        Ok(())
    }

    fn how_to_read(&self) -> Vec<&'static str> {
        let mut lines = vec!["filled: types of this project; hollow: llama.cpp's own"];
        if self.panels.iter().any(|p| p.least) {
            lines.push("line: the least divergence for the bits");
        }
        lines
    }
}

fn draw_axes<B: DrawingBackend>(pen: &Pen<B>, panel: &Panel, inside: Area) -> Result<()> {
    let Area { left, top, right, bottom } = inside;
    for tick in panel.x.ticks_of(&BITS) {
        let x = panel.x(inside, tick);
        pen.line(&[(x, top), (x, bottom)], GREY, 1.0)?;
        pen.text(&number(tick), (x, bottom + 6.0), HPos::Center, VPos::Top, INK)?;
    }
    for tick in panel.y.ticks(12) {
        let y = panel.y(inside, tick);
        pen.line(&[(left, y), (right, y)], GREY, 1.0)?;
        pen.text(&number(tick), (left - 7.0, y), HPos::Right, VPos::Center, INK)?;
    }
    pen.line(&[(left, top), (left, bottom), (right, bottom)], INK, 1.2)?;
    pen.text("bits per value", ((left + right) / 2.0, bottom + 24.0), HPos::Center, VPos::Top, INK)?;
    pen.text(panel.title, (left - 40.0, HEADER - 10.0), HPos::Left, VPos::Center, INK)
}

fn draw_contents<B: DrawingBackend>(pen: &Pen<B>, contents: &Contents) -> Result<()> {
    for (i, steps) in contents.steps.iter().enumerate() {
        pen.line(steps, lighter(color(i)), 1.2)?;
    }
    for (i, dot, at) in &contents.marks {
        pen.marker(*i, *at, !dot.upstream)?;
    }
    contents.labels.iter().try_for_each(|label| draw_label(pen, label))
}

/// With a thin line from the point where it is not beside it.
fn draw_label<B: DrawingBackend>(pen: &Pen<B>, label: &Label) -> Result<()> {
    let Label { text, series, point: at, area } = label;
    let to = area.nearest(*at);
    let far = (to.0 - at.0).hypot(to.1 - at.1);
    if far > 2.4 * RADIUS {
        let t = 1.3 * RADIUS / far;
        let from = (at.0 + (to.0 - at.0) * t, at.1 + (to.1 - at.1) * t);
        pen.line(&[from, to], lighter(color(*series)), 0.8)?;
    }
    pen.sized_text(text, area.center(), (HPos::Center, VPos::Center), darker(color(*series)), names::SIZE)
}

fn color(series: usize) -> RGBColor {
    COLORS[series % COLORS.len()]
}

fn mixed(color: RGBColor, with: f64, share: f64) -> RGBColor {
    let mix = |c: u8| (f64::from(c) * (1.0 - share) + with * share).round() as u8;
    RGBColor(mix(color.0), mix(color.1), mix(color.2))
}

fn lighter(color: RGBColor) -> RGBColor {
    mixed(color, 255.0, 0.55)
}

fn darker(color: RGBColor) -> RGBColor {
    mixed(color, 0.0, 0.35)
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

/// Each pixel the mean of a square of `by` times `by`: what makes lines smooth.
fn shrink(fine: &[u8], width: usize, height: usize, by: usize) -> (usize, usize, Vec<u8>) {
    let (w, h) = (width / by, height / by);
    let mut pixels = Vec::with_capacity(3 * w * h);
    for y in 0..h {
        for x in 0..w {
            for channel in 0..3 {
                let square = (0..by * by).map(|i| 3 * ((y * by + i / by) * width + x * by + i % by) + channel);
                let sum: usize = square.map(|at| usize::from(fine[at])).sum();
                pixels.push((sum / (by * by)) as u8);
            }
        }
    }
    (w, h, pixels)
}

/// Draws at a scale.
struct Pen<'a, B: DrawingBackend> {
    root: &'a DrawingArea<B, Shift>,
    scale: f64,
}

impl<B: DrawingBackend> Pen<'_, B> {
    fn at(&self, point: (f64, f64)) -> (i32, i32) {
        ((point.0 * self.scale).round() as i32, (point.1 * self.scale).round() as i32)
    }

    fn width(&self, width: f64) -> u32 {
        (width * self.scale).round().max(1.0) as u32
    }

    fn clear(&self) -> Result<()> {
        self.root.fill(&WHITE).map_err(|e| anyhow!("{e}"))
    }

    fn line(&self, points: &[(f64, f64)], color: RGBColor, width: f64) -> Result<()> {
        let style = ShapeStyle { color: color.to_rgba(), filled: false, stroke_width: self.width(width) };
        let points: Vec<_> = points.iter().map(|p| self.at(*p)).collect();
        if points.len() < 2 {
            return Ok(());
        }
        self.root.draw(&PathElement::new(points, style)).map_err(|e| anyhow!("{e}"))
    }

    fn text(&self, text: &str, at: (f64, f64), h: HPos, v: VPos, color: RGBColor) -> Result<()> {
        self.sized_text(text, at, (h, v), color, TEXT)
    }

    fn sized_text(&self, text: &str, at: (f64, f64), pos: (HPos, VPos), color: RGBColor, size: f64) -> Result<()> {
        let style = TextStyle::from(("sans-serif", size * self.scale).into_font().transform(FontTransform::None));
        let style = style.color(&color).pos(Pos::new(pos.0, pos.1));
        self.root.draw(&Text::new(text.to_string(), self.at(at), style)).map_err(|e| anyhow!("{e}"))
    }

    /// The shape of a series; hollow ones show white, so that lines end at them.
    fn marker(&self, series: usize, at: (f64, f64), filled: bool) -> Result<()> {
        let ink = color(series);
        let fill = if filled { ink } else { WHITE };
        let points: Vec<(f64, f64)> =
            shape(series % SHAPES).iter().map(|p| (at.0 + p.0 * RADIUS, at.1 + p.1 * RADIUS)).collect();
        let corners: Vec<_> = points.iter().map(|p| self.at(*p)).collect();
        self.root.draw(&Polygon::new(corners, fill.filled())).map_err(|e| anyhow!("{e}"))?;
        let closed: Vec<_> = points.iter().chain(points.first()).copied().collect();
        self.line(&closed, ink, 1.6)
    }
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
    fn names_of_files_decide() {
        assert_eq!(kind(Path::new("a/b.SVG")).unwrap(), Kind::Svg);
        assert_eq!(kind(Path::new("b.png")).unwrap(), Kind::Png);
        assert!(kind(Path::new("b.jpg")).is_err() && kind(Path::new("svg")).is_err());
    }

    #[test]
    fn the_svg_names_every_point_and_model() {
        let series = series();
        let text = Picture::new(&series).unwrap().svg().unwrap();
        assert_eq!(text.matches(">\nsrft4\n<").count(), 4, "two models on two panels\n{text}");
        // f16 is only on the panel of speed
        assert_eq!(text.matches(">\nf16\n<").count(), 1);
        assert!(text.contains("SmolLM2-135M") && text.contains("Gemma &lt;3&gt;"));
        assert!(text.starts_with("<svg width=\"1210\""), "{}", &text[..80]);
    }

    #[test]
    fn a_name_without_room_is_told_below_the_picture() {
        let mut series = series();
        let height = Picture::new(&series).unwrap().size().1;
        let long = format!("srft4{}", (0..20).map(|i| format!(",{i}=srft8")).collect::<String>());
        series[0].dots.push(dot(&long, 5.0, 0.03, 1.5));
        let picture = Picture::new(&series).unwrap();
        let text = picture.svg().unwrap();
        assert_eq!(text.matches(">\n#1\n<").count(), 2, "on both panels");
        assert_eq!(text.matches("#1: srft4,0=srft8").count(), 1);
        assert!(picture.size().1 > height, "there is room for the line");
    }

    #[test]
    fn the_legend_stays_within_the_picture() {
        let name = "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M (ctx 2048; f16 decodes 26.3 tokens/s at depth 4096)";
        let mut series = series();
        series.truncate(1);
        series[0].name = name.into();
        series[0].dots.iter_mut().for_each(|d| d.speed = None);
        let picture = Picture::new(&series).unwrap();
        let right = |line: &legend::Line| line.left + stroke_font::size_of(&line.text, TEXT).0;
        assert!(picture.legend.iter().all(|line| right(line) < picture.size().0));
        let shown: String = picture.legend.iter().map(|line| format!("{} ", line.text)).collect();
        assert!(shown.contains(name), "{shown}");
    }

    #[test]
    fn the_png_is_one_with_ink_on_it() {
        let dir = crate::cache::Scratch::new().unwrap();
        let path = dir.path().join("p.png");
        write(&path, &series()).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(&bytes[1..4], b"PNG");
        // width and height in the header
        assert_eq!(u32::from_be_bytes(bytes[16..20].try_into().unwrap()), 2420);
        assert!(bytes.len() > 20_000, "{} bytes are an empty picture", bytes.len());
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

    #[test]
    fn shrinking_is_averaging() {
        let fine: Vec<u8> = (0..4 * 2 * 3).map(|i| (i * 10) as u8).collect();
        let (w, h, small) = shrink(&fine, 4, 2, 2);
        assert_eq!((w, h), (2, 1));
        // of the first square: pixels 0, 1, 4, 5, channel 0
        assert_eq!(small[0], ((30 + 120 + 150) / 4) as u8);
    }
}
