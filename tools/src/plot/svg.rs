//! A picture as text: the few elements of SVG that a plot takes.

use std::fmt::{self, Display, Formatter, Write};

pub type Point = (f64, f64);

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Color(pub u8, pub u8, pub u8);

pub const WHITE: Color = Color(255, 255, 255);

impl Color {
    fn mixed(self, with: f64, share: f64) -> Color {
        let mix = |c: u8| (f64::from(c) * (1.0 - share) + with * share).round() as u8;
        Color(mix(self.0), mix(self.1), mix(self.2))
    }

    pub fn lighter(self) -> Color {
        self.mixed(255.0, 0.55)
    }

    pub fn darker(self) -> Color {
        self.mixed(0.0, 0.35)
    }
}

impl Display for Color {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        write!(f, "#{:02X}{:02X}{:02X}", self.0, self.1, self.2)
    }
}

/// Which point of a text is given: across, and up or down.
#[derive(Clone, Copy)]
pub enum Anchor {
    Left,
    Right,
    Center,
    Top,
}

/// About what a browser's sans-serif takes. A little too much is better than names that touch.
pub fn size_of(text: &str, font_size: f64) -> (f64, f64) {
    (0.6 * font_size * text.chars().count() as f64, 0.72 * font_size)
}

#[derive(Default)]
pub struct Svg(String);

impl Svg {
    fn element(&mut self, text: fmt::Arguments) {
        // Writing to a String does not fail.
        let _ = self.0.write_fmt(text);
        self.0.push('\n');
    }

    pub fn line(&mut self, points: &[Point], color: Color, width: f64) {
        if points.len() > 1 {
            let points = listed(points);
            self.element(format_args!(
                r#"<polyline fill="none" stroke="{color}" stroke-width="{width}" points="{points}"/>"#
            ));
        }
    }

    pub fn polygon(&mut self, points: &[Point], fill: Color, color: Color, width: f64) {
        let points = listed(points);
        self.element(format_args!(
            r#"<polygon fill="{fill}" stroke="{color}" stroke-width="{width}" points="{points}"/>"#
        ));
    }

    pub fn text(&mut self, text: &str, (x, y): Point, anchor: Anchor, color: Color, size: f64) {
        let (across, down) = match anchor {
            Anchor::Left => ("start", "0.5ex"),
            Anchor::Right => ("end", "0.5ex"),
            Anchor::Center => ("middle", "0.5ex"),
            Anchor::Top => ("middle", "0.76em"),
        };
        let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        self.element(format_args!(
            r#"<text x="{x:.1}" y="{y:.1}" dy="{down}" text-anchor="{across}" font-size="{size}" fill="{color}">{text}</text>"#
        ));
    }

    /// The whole file.
    pub fn finish(self, (width, height): Point) -> String {
        format!(
            "<svg width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\" \
             font-family=\"sans-serif\" xmlns=\"http://www.w3.org/2000/svg\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"{WHITE}\"/>\n{}</svg>\n",
            self.0
        )
    }
}

fn listed(points: &[Point]) -> String {
    points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements() {
        let mut svg = Svg::default();
        svg.line(&[(0.0, 1.25), (2.0, 3.0)], Color(0, 114, 178), 1.5);
        svg.line(&[(0.0, 1.0)], WHITE, 1.0);
        svg.text("a < b & c", (1.0, 2.0), Anchor::Right, Color(255, 0, 0).darker(), 10.5);
        let text = svg.finish((100.0, 50.0));
        assert!(text.contains(r##"stroke="#0072B2" stroke-width="1.5" points="0.0,1.2 2.0,3.0"/>"##), "{text}");
        assert!(text.contains(r##"font-size="10.5" fill="#A60000">a &lt; b &amp; c</text>"##), "{text}");
        assert_eq!(text.matches("<polyline").count(), 1, "a point is no line");
        assert!(text.starts_with("<svg width=\"100\" height=\"50\" ") && text.ends_with("</svg>\n"));
    }
}
