//! Where the names of points go: beside them, over no other, and over no line where there is room elsewhere.

/// Left, top, right, bottom, in pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Area {
    pub left: f64,
    pub top: f64,
    pub right: f64,
    pub bottom: f64,
}

impl Area {
    pub fn around(center: (f64, f64), width: f64, height: f64) -> Area {
        let (w, h) = (width / 2.0, height / 2.0);
        Area { left: center.0 - w, top: center.1 - h, right: center.0 + w, bottom: center.1 + h }
    }

    pub fn center(&self) -> (f64, f64) {
        ((self.left + self.right) / 2.0, (self.top + self.bottom) / 2.0)
    }

    fn overlaps(&self, other: &Area) -> bool {
        self.left < other.right && other.left < self.right && self.top < other.bottom && other.top < self.bottom
    }

    fn holds(&self, other: &Area) -> bool {
        self.left <= other.left && self.top <= other.top && self.right >= other.right && self.bottom >= other.bottom
    }

    /// Does a straight line from one point to the other go through? Its part within both pairs of edges is looked for.
    fn is_crossed(&self, (from, to): Line) -> bool {
        let (mut begin, mut end) = (0.0f64, 1.0f64);
        for (at, way, low, high) in
            [(from.0, to.0 - from.0, self.left, self.right), (from.1, to.1 - from.1, self.top, self.bottom)]
        {
            if way == 0.0 {
                if at <= low || at >= high {
                    return false;
                }
                continue;
            }
            let (a, b) = ((low - at) / way, (high - at) / way);
            (begin, end) = (begin.max(a.min(b)), end.min(a.max(b)));
        }
        begin < end
    }

    /// The point of the area that is nearest to `to`.
    pub fn nearest(&self, to: (f64, f64)) -> (f64, f64) {
        (to.0.clamp(self.left, self.right), to.1.clamp(self.top, self.bottom))
    }
}

/// From one point to another.
pub type Line = ((f64, f64), (f64, f64));

/// Names go no further than so many rings from their points to keep off lines.
const NEAR_RINGS: usize = 5;

/// A point that wants its name written.
pub struct Wanted {
    pub point: (f64, f64),
    pub width: f64,
    pub height: f64,
}

/// Where names may not be.
struct Crowd {
    panel: Area,
    points: Vec<Area>,
    names: Vec<Area>,
}

impl Crowd {
    fn leaves(&self, area: &Area) -> bool {
        self.panel.holds(area) && !self.points.iter().chain(&self.names).any(|t| t.overlaps(area))
    }
}

/// A place for each name, in the order given: as near as there is room, and beside its point, over others, where there is
/// none. `clear` is kept free around all `points`, and `lines` are crossed only where there is no other place near by.
pub fn place(wanted: &[Wanted], points: &[(f64, f64)], lines: &[Line], clear: f64, panel: Area) -> Vec<Area> {
    let points = points.iter().map(|p| Area::around(*p, clear, clear)).collect();
    let mut crowd = Crowd { panel, points, names: Vec::new() };
    for w in wanted {
        let free = |area: &Area| crowd.leaves(area);
        let off_lines = |area: &Area| free(area) && !lines.iter().any(|line| area.is_crossed(*line));
        let near = candidates(w, clear).take(NEAR_RINGS * DIRECTIONS.len()).find(off_lines);
        let beside = || Area::around((w.point.0 + clear + w.width / 2.0, w.point.1), w.width, w.height);
        let found =
            near.or_else(|| candidates(w, clear).find(free)).or_else(|| on_grid(w, panel, free)).unwrap_or_else(beside);
        crowd.names.push(found);
    }
    crowd.names
}

/// The nearest free place in a grid over the whole panel.
fn on_grid(w: &Wanted, panel: Area, free: impl Fn(&Area) -> bool) -> Option<Area> {
    let far = |area: &Area| (area.center().0 - w.point.0).hypot(area.center().1 - w.point.1);
    let columns = ((panel.right - panel.left) / w.width) as u32;
    let rows = ((panel.bottom - panel.top) / w.height) as u32;
    let grid = (0..rows).flat_map(|y| (0..columns).map(move |x| (f64::from(x) + 0.5, f64::from(y) + 0.5)));
    grid.map(|(x, y)| Area::around((panel.left + x * w.width, panel.top + y * w.height), w.width, w.height))
        .filter(free)
        .min_by(|a, b| far(a).total_cmp(&far(b)))
}

/// Right, left, above, below, then the corners.
const DIRECTIONS: [(f64, f64); 12] = [
    (1.0, 0.0),
    (-1.0, 0.0),
    (0.0, -1.0),
    (0.0, 1.0),
    (1.0, -1.0),
    (-1.0, -1.0),
    (1.0, 1.0),
    (-1.0, 1.0),
    (1.0, -0.5),
    (-1.0, -0.5),
    (1.0, 0.5),
    (-1.0, 0.5),
];

/// In all directions, then the same further out.
fn candidates(w: &Wanted, clear: f64) -> impl Iterator<Item = Area> + '_ {
    (0..14).flat_map(move |ring| {
        let gap = clear * (0.62 + 0.5 * f64::from(ring));
        DIRECTIONS.iter().map(move |(x, y)| {
            let center = (w.point.0 + x * (gap + w.width / 2.0), w.point.1 + y * (gap + w.height / 2.0));
            Area::around(center, w.width, w.height)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PANEL: Area = Area { left: 0.0, top: 0.0, right: 400.0, bottom: 300.0 };

    fn placed(wanted: &[Wanted]) -> Vec<Area> {
        let points: Vec<_> = wanted.iter().map(|w| w.point).collect();
        place(wanted, &points, &[], 10.0, PANEL)
    }

    fn crowd(n: usize) -> Vec<Wanted> {
        (0..n)
            .map(|i| Wanted { point: (200.0 + (i % 5) as f64, 150.0 + (i / 5) as f64), width: 40.0, height: 10.0 })
            .collect()
    }

    #[test]
    fn a_lonely_name_is_at_the_right_of_its_point() {
        let area = placed(&crowd(1))[0];
        assert!(area.left > 204.0 && area.left < 212.0 && area.center().1 == 150.0, "{area:?}");
    }

    #[test]
    fn at_the_edge_it_goes_to_the_other_side() {
        let w = Wanted { point: (395.0, 5.0), width: 40.0, height: 10.0 };
        let area = placed(&[w])[0];
        assert!(area.right < 395.0 && PANEL.holds(&area));
    }

    #[test]
    fn names_meet_neither_points_nor_each_other() {
        let crowd = crowd(20);
        let places = placed(&crowd);
        for (i, a) in places.iter().enumerate() {
            assert!(places[i + 1..].iter().all(|b| !a.overlaps(b)), "{i}");
            assert!(crowd.iter().all(|w| !a.overlaps(&Area::around(w.point, 10.0, 10.0))), "{i}");
        }
    }

    #[test]
    fn a_name_keeps_off_lines_while_there_is_room() {
        let w = || Wanted { point: (200.0, 150.0), width: 40.0, height: 10.0 };
        let placed = |lines: &[Line]| place(&[w()], &[(200.0, 150.0)], lines, 10.0, PANEL)[0];
        let right = ((200.0, 150.0), (400.0, 152.0));
        let area = placed(&[right]);
        assert!(!area.is_crossed(right) && area.right < 200.0, "{area:?}");
        // Everywhere: then it is written over them, where it would be without.
        let all: Vec<Line> = (0..300).map(|y| ((0.0, f64::from(y)), (400.0, f64::from(y)))).collect();
        assert_eq!(placed(&all), placed(&[]));
    }

    #[test]
    fn lines_that_pass_by_do_not_cross() {
        let area = Area { left: 10.0, top: 10.0, right: 20.0, bottom: 14.0 };
        assert!(area.is_crossed(((0.0, 12.0), (30.0, 12.0))) && area.is_crossed(((15.0, 0.0), (15.0, 30.0))));
        assert!(area.is_crossed(((12.0, 12.0), (13.0, 12.5))), "from within to within");
        assert!(!area.is_crossed(((0.0, 12.0), (9.0, 12.0))), "ends before it");
        assert!(!area.is_crossed(((0.0, 9.0), (30.0, 9.0))) && !area.is_crossed(((0.0, 30.0), (30.0, 10.0))));
    }

    #[test]
    fn beyond_all_rings_the_nearest_free_place_is_taken() {
        let w = Wanted { point: (200.0, 150.0), width: 20.0, height: 10.0 };
        // Only the strip at the right edge is free.
        let area = on_grid(&w, PANEL, |area| area.left >= 370.0).unwrap();
        assert!(area.left >= 370.0 && (area.center().1 - 150.0).abs() <= 5.0 && PANEL.holds(&area), "{area:?}");
    }

    #[test]
    fn without_room_the_name_is_written_all_the_same() {
        let area = placed(&[Wanted { point: (200.0, 150.0), width: 500.0, height: 10.0 }])[0];
        assert!(area.left > 200.0 && area.center().1 == 150.0);
    }
}
