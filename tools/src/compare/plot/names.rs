//! What stands beside a point: its name, or a number where there is no room for the name. Numbers are explained below the
//! picture, so that every point can be identified.

use super::labels::{self, Area, Line, Wanted};
use super::{stroke_font, Dot, RADIUS};

/// Size of the text.
pub const SIZE: f64 = super::TEXT - 1.0;

/// A mark on a panel: its series, its point, its place.
pub type Mark<'a> = (usize, &'a Dot, (f64, f64));

pub struct Label {
    pub text: String,
    pub series: usize,
    pub point: (f64, f64),
    pub area: Area,
}

/// The labels of a panel: once where several models have the same at the same place. Names that get numbers are added to
/// `numbered`, which all panels share.
pub fn labels_of(marks: &[Mark], lines: &[Line], panel: Area, numbered: &mut Vec<String>) -> Vec<Label> {
    let named = named_once(marks);
    let points: Vec<_> = marks.iter().map(|mark| mark.2).collect();
    let clear = 2.0 * RADIUS + 2.0;
    let names: Vec<Wanted> = named.iter().map(|(_, dot, point)| wanted(&dot.name, *point)).collect();
    let places = labels::place(&names, &points, lines, clear, panel);
    let mut taken: Vec<Area> = places.iter().copied().flatten().collect();
    let mut all = Vec::new();
    for ((series, dot, point), place) in named.into_iter().zip(places) {
        let (text, area) = match place {
            Some(area) => (dot.name.clone(), area),
            None => {
                let text = number_of(&dot.name, numbered);
                let area = labels::place_anywhere(&wanted(&text, point), &points, &taken, clear, panel);
                taken.push(area);
                (text, area)
            }
        };
        all.push(Label { text, series, point, area });
    }
    all
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
    let (width, height) = stroke_font::size_of(text, SIZE);
    Wanted { point, width: width + 3.0, height: height + 5.0 }
}

/// The same for a name on all panels and of all models: the mark tells the model.
fn number_of(name: &str, numbered: &mut Vec<String>) -> String {
    let at = numbered.iter().position(|n| n == name).unwrap_or_else(|| {
        numbered.push(name.into());
        numbered.len() - 1
    });
    number(at)
}

/// "#1" for the first.
pub fn number(at: usize) -> String {
    format!("#{}", at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PANEL: Area = Area { left: 0.0, top: 0.0, right: 300.0, bottom: 200.0 };

    fn dot(name: &str) -> Dot {
        Dot { name: name.into(), bits: 4.5, kld: None, speed: None, upstream: false }
    }

    #[test]
    fn what_has_no_room_has_a_number() {
        let long = "srft4,0-1=srft8,2-3=srft8,4-5=srft8,-1=f16/srft3,0-1=srft8";
        let (short, long) = (dot("srft4"), dot(long));
        let marks = [(0, &short, (50.0, 50.0)), (0, &long, (150.0, 100.0)), (1, &long, (160.0, 150.0))];
        let mut numbered = vec!["another".to_string()];
        let labels = labels_of(&marks, &[], PANEL, &mut numbered);
        let texts: Vec<&str> = labels.iter().map(|l| l.text.as_str()).collect();
        assert_eq!(texts, ["srft4", "#2", "#2"]);
        assert_eq!(numbered, ["another".to_string(), long.name.clone()]);
    }

    #[test]
    fn in_the_worst_crowd_each_point_has_a_label_of_its_own() {
        let dots: Vec<Dot> = (0..150).map(|i| dot(&format!("srft4,{i}=srft8"))).collect();
        let marks: Vec<Mark> = dots.iter().map(|d| (0, d, (150.0, 100.0))).collect();
        let mut numbered = Vec::new();
        let labels = labels_of(&marks, &[], PANEL, &mut numbered);
        assert!(numbered.len() > 50, "{}", numbered.len());
        for (dot, label) in dots.iter().zip(&labels) {
            let meant = label.text.strip_prefix('#').map(|n| numbered[n.parse::<usize>().unwrap() - 1].as_str());
            assert_eq!(meant.unwrap_or(&label.text), dot.name);
        }
    }

    #[test]
    fn the_same_at_the_same_place_is_named_once() {
        let (a, b) = (dot("srft4"), dot("srft4"));
        let labels = |x: f64| labels_of(&[(0, &a, (50.0, 50.0)), (1, &b, (x, 50.0))], &[], PANEL, &mut Vec::new());
        assert_eq!((labels(51.0).len(), labels(80.0).len()), (1, 2));
    }
}
