//! Text in pictures of pixels, without a font file.
//!
//! A machine that measures need not have fonts, and a picture without its words is none. So letters are strokes, as a
//! pen plotter draws them: each is a few paths on a grid, written below as pairs of digits, x then y. The baseline is
//! at y = 2, small letters reach 6, capitals 8, tails 0. A path that begins with ~ is a curve: its corners are cut.
//!
//! [`StrokeText`] is a backend of plotters around another: it draws text this way and hands on everything else.

use plotters::style::text_anchor::{HPos, VPos};
use plotters::style::FontTransform;
use plotters_backend::{BackendColor, BackendCoord, BackendStyle, BackendTextStyle, DrawingBackend, DrawingErrorKind};

/// Grid units between letters.
const GAP: f64 = 1.9;
/// Units of the em: what plotters calls the size of a font.
const EM: f64 = 10.5;
const BASELINE: f64 = 2.0;
const CAPITAL: f64 = 8.0;

#[rustfmt::skip]
const GLYPHS: &[(char, &str)] = &[
    ('0', "~22120307183847433222"), ('1', "072822"), ('2', "~071838474602 0242"),
    ('3', "~07183847463525 ~25354443321203"), ('4', "380444 3832"), ('5', "480805 ~0516364543321203"),
    ('6', "~381704 ~040312324344351504"), ('7', "084812"), ('8', "~25150607183847463525 ~25150403123243443525"),
    ('9', "~123346 ~464738180706153546"), ('A', "022842 1434"), ('B', "0208 ~083847463505 ~053544433202"),
    ('C', "~4738180703123243"), ('D', "0208 ~082846442202"), ('E', "48080242 0535"), ('F', "480802 0535"),
    ('G', "~4738180703123243 434525"), ('H', "0802 4842 0545"), ('I', "0208"), ('J', "~3833221203"),
    ('K', "0802 4804 1542"), ('L', "080242"), ('M', "0208254842"), ('N', "02084248"), ('O', "~22120307183847433222"),
    ('P', "0208 ~083847463505"), ('Q', "~22120307183847433222 2442"), ('R', "0208 ~083847463505 2542"),
    ('S', "~473818070615354443321203"), ('T', "0848 2822"), ('U', "~080312324348"), ('V', "082248"),
    ('W', "0812253248"), ('X', "0842 0248"), ('Y', "082548 2522"), ('Z', "08480242"), ('a', "4642 ~4536160503123243"),
    ('b', "0802 ~0516364543321203"), ('c', "~4536160503123243"), ('d', "4842 ~4536160503123243"),
    ('e', "0444 ~444536160503123243"), ('f', "~38281712 0626"), ('g', "~4536160503123243 ~4641301001"),
    ('h', "0802 ~0516364542"), ('i', "0602 0708"), ('j', "~161100 1718"), ('k', "0802 3604 1532"), ('l', "0802"),
    ('m', "0602 ~0516263532 ~3546566562"), ('n', "0602 ~0516364542"), ('o', "~22120305163645433222"),
    ('p', "0600 ~0516364543321203"), ('q', "4640 ~4536160503123243"), ('r', "0602 ~05162636"),
    ('s', "~45361605143443321203"), ('t', "~18132232 0636"), ('u', "4642 ~0603123243"), ('v', "062246"),
    ('w', "0612243246"), ('x', "0642 0246"), ('y', "0622 4610"), ('z', "06460242"), ('.', "0203"), (',', "0301"),
    (':', "0203 0506"), (';', "0301 0506"), ('-', "0535"), ('_', "0141"), ('/', "0138"), ('=', "0444 0646"),
    ('+', "0545 2327"), ('%', "0248 0717180807 3242433332"), ('(', "~19070311"), (')', "~09171301"),
    ('×', "0246 0642"), ('<', "370533"), ('>', "073503"), ('[', "19090111"), (']', "09191101"), ('\'', "0908"),
    ('#', "1218 3238 0444 0646"), ('!', "0203 0508"), ('*', "2733 2337 0545"),
];

/// What is not in the table: a box.
const UNKNOWN: &str = "0208484202";

type Point = (f64, f64);

fn paths(glyph: char) -> Vec<Vec<Point>> {
    let code = GLYPHS.iter().find(|g| g.0 == glyph).map_or(UNKNOWN, |g| g.1);
    let path = |text: &str| {
        let digits: Vec<f64> = text.chars().filter_map(|c| c.to_digit(10)).map(f64::from).collect();
        let points: Vec<Point> = digits.chunks_exact(2).map(|p| (p[0], p[1])).collect();
        if text.starts_with('~') {
            (0..3).fold(points, |points, _| cut_corners(&points))
        } else {
            points
        }
    };
    match glyph {
        ' ' => Vec::new(),
        _ => code.split(' ').map(path).collect(),
    }
}

/// Each corner becomes two, a quarter of the way along its sides; the ends stay.
fn cut_corners(points: &[Point]) -> Vec<Point> {
    let between = |a: Point, b: Point, t: f64| (a.0 + (b.0 - a.0) * t, a.1 + (b.1 - a.1) * t);
    let mut cut = Vec::with_capacity(2 * points.len());
    cut.extend(points.first());
    for pair in points.windows(2) {
        cut.extend([between(pair[0], pair[1], 0.25), between(pair[0], pair[1], 0.75)]);
    }
    cut.extend(points.last());
    cut
}

fn advance(glyph: char) -> f64 {
    match glyph {
        ' ' => 3.0 + GAP,
        _ => paths(glyph).iter().flatten().map(|p| p.0).fold(0.0, f64::max) + GAP,
    }
}

/// Width and height of the capitals, in pixels.
pub fn size_of(text: &str, font_size: f64) -> (f64, f64) {
    let width: f64 = text.chars().map(advance).sum::<f64>() - if text.is_empty() { 0.0 } else { GAP };
    (width * font_size / EM, (CAPITAL - BASELINE) * font_size / EM)
}

/// The strokes of a text whose baseline begins at the origin, y downwards.
fn strokes(text: &str, font_size: f64) -> Vec<Vec<Point>> {
    let unit = font_size / EM;
    let mut x = 0.0;
    let mut all = Vec::new();
    for glyph in text.chars() {
        for path in paths(glyph) {
            all.push(path.iter().map(|p| ((x + p.0) * unit, (BASELINE - p.1) * unit)).collect());
        }
        x += advance(glyph);
    }
    all
}

/// Draws text as strokes; everything else is `inner`'s.
pub struct StrokeText<B>(pub B);

struct Ink {
    color: BackendColor,
    width: u32,
}

impl BackendStyle for Ink {
    fn color(&self) -> BackendColor {
        self.color
    }
    fn stroke_width(&self) -> u32 {
        self.width
    }
}

type Outcome<B> = Result<(), DrawingErrorKind<<B as DrawingBackend>::ErrorType>>;

impl<B: DrawingBackend> DrawingBackend for StrokeText<B> {
    type ErrorType = B::ErrorType;

    fn get_size(&self) -> (u32, u32) {
        self.0.get_size()
    }

    fn ensure_prepared(&mut self) -> Outcome<B> {
        self.0.ensure_prepared()
    }

    fn present(&mut self) -> Outcome<B> {
        self.0.present()
    }

    fn draw_pixel(&mut self, point: BackendCoord, color: BackendColor) -> Outcome<B> {
        self.0.draw_pixel(point, color)
    }

    fn draw_line<S: BackendStyle>(&mut self, from: BackendCoord, to: BackendCoord, style: &S) -> Outcome<B> {
        self.0.draw_line(from, to, style)
    }

    fn draw_rect<S: BackendStyle>(&mut self, a: BackendCoord, b: BackendCoord, style: &S, fill: bool) -> Outcome<B> {
        self.0.draw_rect(a, b, style, fill)
    }

    fn draw_path<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(&mut self, path: I, style: &S) -> Outcome<B> {
        self.0.draw_path(path, style)
    }

    fn draw_circle<S: BackendStyle>(&mut self, center: BackendCoord, radius: u32, style: &S, fill: bool) -> Outcome<B> {
        self.0.draw_circle(center, radius, style, fill)
    }

    fn fill_polygon<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(&mut self, v: I, style: &S) -> Outcome<B> {
        self.0.fill_polygon(v, style)
    }

    fn estimate_text_size<T: BackendTextStyle>(
        &self,
        text: &str,
        style: &T,
    ) -> Result<(u32, u32), DrawingErrorKind<B::ErrorType>> {
        let (width, height) = size_of(text, style.size());
        Ok((width.ceil() as u32, height.ceil() as u32))
    }

    fn draw_text<T: BackendTextStyle>(&mut self, text: &str, style: &T, pos: BackendCoord) -> Outcome<B> {
        let (width, height) = size_of(text, style.size());
        let anchor = style.anchor();
        let left = match anchor.h_pos {
            HPos::Left => 0.0,
            HPos::Center => -width / 2.0,
            HPos::Right => -width,
        };
        let baseline = match anchor.v_pos {
            VPos::Top => height,
            VPos::Center => height / 2.0,
            VPos::Bottom => 0.0,
        };
        let ink = Ink { color: style.color(), width: (style.size() / 11.0).round().max(1.0) as u32 };
        for stroke in strokes(text, style.size()) {
            let turned = stroke.iter().map(|p| {
                let (x, y) = (p.0 + left, p.1 + baseline);
                let (x, y) = match style.transform() {
                    FontTransform::None => (x, y),
                    FontTransform::Rotate90 => (-y, x),
                    FontTransform::Rotate180 => (-x, -y),
                    FontTransform::Rotate270 => (y, -x),
                };
                (pos.0 + x.round() as i32, pos.1 + y.round() as i32)
            });
            self.0.draw_path(turned, &ink)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_glyph_is_on_the_grid() {
        for (glyph, code) in GLYPHS {
            for path in code.split(' ') {
                let digits = path.trim_start_matches('~');
                assert!(digits.len() % 2 == 0 && digits.len() >= 4, "{glyph}: {path}");
                assert!(digits.chars().all(|c| c.is_ascii_digit()), "{glyph}: {path}");
            }
        }
    }

    #[test]
    fn no_glyph_is_there_twice_and_names_have_no_boxes() {
        for (i, (glyph, _)) in GLYPHS.iter().enumerate() {
            assert!(GLYPHS[i + 1..].iter().all(|g| g.0 != *glyph), "{glyph}");
        }
        let needed = "SmolLM2-135M-Instruct.Q4_1.gguf q8_0/srft4,0-1=srft8 KLD bits/value (f16: 26.3 tok/s) × 95%";
        for c in needed.chars().filter(|c| *c != ' ').chain('a'..='z').chain('A'..='Z').chain('0'..='9') {
            assert!(GLYPHS.iter().any(|g| g.0 == c), "{c}");
        }
    }

    #[test]
    fn width_is_that_of_the_strokes() {
        for text in ["srft4", "f16", "W", "MmM"] {
            let right = strokes(text, 12.0).iter().flatten().map(|p| p.0).fold(0.0, f64::max);
            assert!((size_of(text, 12.0).0 - right).abs() < 1e-9, "{text}");
        }
        assert_eq!(size_of("", 12.0).0, 0.0);
    }

    #[test]
    fn curves_keep_their_ends_and_lose_their_corners() {
        let square = [(0.0, 0.0), (4.0, 0.0), (4.0, 4.0)];
        let cut = cut_corners(&square);
        assert_eq!((cut[0], *cut.last().unwrap()), (square[0], square[2]));
        assert!(!cut.contains(&square[1]));
    }
}
