//! What stands beside a point: its name.

use super::labels::{self, Area, Line, Wanted};
use super::{svg, Dot, NAME, RADIUS};

/// Longer names, of specs by layer, are cut: the table has them in full.
const LONGEST: usize = 32;

/// A mark on a panel: its series, its point, its place.
pub type Mark<'a> = (usize, &'a Dot, (f64, f64));

pub struct Label {
    pub text: String,
    pub series: usize,
    pub point: (f64, f64),
    pub area: Area,
}

/// The labels of a panel: once where several models have the same at the same place.
pub fn labels_of(marks: &[Mark], lines: &[Line], panel: Area) -> Vec<Label> {
    let named = named_once(marks);
    let points: Vec<_> = marks.iter().map(|mark| mark.2).collect();
    let texts: Vec<String> = named.iter().map(|(_, dot, _)| shortened(&dot.name)).collect();
    let wanted: Vec<Wanted> = texts.iter().zip(&named).map(|(text, mark)| wanted(text, mark.2)).collect();
    let places = labels::place(&wanted, &points, lines, 2.0 * RADIUS + 2.0, panel);
    let label = |((text, (series, _, point)), area)| Label { text, series, point, area };
    texts.into_iter().zip(named).zip(places).map(label).collect()
}

fn shortened(name: &str) -> String {
    match name.char_indices().nth(LONGEST) {
        Some((at, _)) => format!("{}…", &name[..at]),
        None => name.to_string(),
    }
}

fn named_once<'a>(marks: &[Mark<'a>]) -> Vec<Mark<'a>> {
    let near = |a: (f64, f64), b: (f64, f64)| (a.0 - b.0).hypot(a.1 - b.1) < RADIUS;
    let mut named: Vec<Mark> = Vec::new();
    for mark in marks {
        if !named.iter().any(|other| other.1.name == mark.1.name && near(other.2, mark.2)) {
            named.push(*mark);
        }
    }
    named
}

fn wanted(text: &str, point: (f64, f64)) -> Wanted {
    let (width, height) = svg::size_of(text, NAME);
    Wanted { point, width: width + 3.0, height: height + 5.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PANEL: Area = Area { left: 0.0, top: 0.0, right: 300.0, bottom: 200.0 };

    fn dot(name: &str) -> Dot {
        Dot { name: name.into(), bits: 4.5, kld: None, speed: None, upstream: false }
    }

    #[test]
    fn every_point_has_a_name_and_long_ones_are_cut() {
        let (short, long) = (dot("srft4"), dot("srft4,0-1=srft8,2-3=srft8,4-5=srft8,-1=f16/srft3,0-1=srft8"));
        let marks = [(0, &short, (50.0, 50.0)), (0, &long, (150.0, 100.0)), (1, &long, (160.0, 150.0))];
        let labels = labels_of(&marks, &[], PANEL);
        let texts: Vec<&str> = labels.iter().map(|l| l.text.as_str()).collect();
        let cut = "srft4,0-1=srft8,2-3=srft8,4-5=sr…";
        assert_eq!(texts, ["srft4", cut, cut]);
        assert!(labels.iter().all(|l| PANEL.right >= l.area.right && l.area.left >= PANEL.left));
    }

    #[test]
    fn the_same_at_the_same_place_is_named_once() {
        let (a, b) = (dot("srft4"), dot("srft4"));
        let labels = |x: f64| labels_of(&[(0, &a, (50.0, 50.0)), (1, &b, (x, 50.0))], &[], PANEL);
        assert_eq!((labels(51.0).len(), labels(80.0).len()), (1, 2));
    }
}
