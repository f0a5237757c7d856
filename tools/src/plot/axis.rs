//! Scales: values to places on a panel, and the numbers written beside it.

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    low: f64,
    high: f64,
    logarithmic: bool,
}

impl Axis {
    /// From the values' range, with some air; the values are positive. None where there is nothing to show.
    pub fn logarithmic(values: impl Iterator<Item = f64>, air: f64) -> Option<Axis> {
        let (low, high) = range(values.filter(|v| *v > 0.0))?;
        Some(Axis { low: low / air, high: high * air, logarithmic: true })
    }

    /// From 0 to a little above the largest.
    pub fn from_zero(values: impl Iterator<Item = f64>) -> Option<Axis> {
        let (_, high) = range(values)?;
        (high > 0.0).then_some(Axis { low: 0.0, high: 1.12 * high, logarithmic: false })
    }

    /// 0 at the low end, 1 at the high one.
    pub fn place(&self, value: f64) -> f64 {
        if self.logarithmic {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        }
    }

    /// Those of `numbers` that are within.
    pub fn ticks_of(&self, numbers: &[f64]) -> Vec<f64> {
        numbers.iter().copied().filter(|t| (self.low..=self.high).contains(t)).collect()
    }

    /// Round numbers within, about `wanted` of them.
    pub fn ticks(&self, wanted: usize) -> Vec<f64> {
        if !self.logarithmic {
            let step = round_up((self.high - self.low) / wanted as f64);
            let first = (self.low / step).ceil() as i64;
            return (first..).map(|i| i as f64 * step).take_while(|t| *t <= self.high).collect();
        }
        let decades = (self.low.log10().floor() as i32)..=(self.high.log10().ceil() as i32);
        let within = |digits: &[f64]| -> Vec<f64> {
            let all = decades.clone().flat_map(|e| digits.iter().map(move |d| d * 10f64.powi(e)));
            all.filter(|t| (self.low..=self.high).contains(t)).collect()
        };
        let sets: [&[f64]; 3] = [&[1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0], &[1.0, 2.0, 5.0], &[1.0]];
        sets.iter().map(|digits| within(digits)).find(|ticks| ticks.len() <= wanted).unwrap_or_else(|| within(&[1.0]))
    }
}

fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.filter(|v| v.is_finite()).fold(None, |range, v| match range {
        None => Some((v, v)),
        Some((low, high)) => Some((v.min(low), v.max(high))),
    })
}

/// 1, 2 or 5 times a power of ten.
fn round_up(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|d| d * power).into_iter().find(|s| *s >= step).unwrap_or(10.0 * power)
}

/// "0.02", "16", "1.5"
pub fn number(value: f64) -> String {
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_ends() {
        let axis = Axis::logarithmic([0.004, 0.6, f64::NAN, -1.0].into_iter(), 1.5).unwrap();
        assert!((axis.place(0.004 / 1.5)).abs() < 1e-12 && (axis.place(0.9) - 1.0).abs() < 1e-12);
        assert_eq!(Axis::from_zero([2.0, 1.0].into_iter()).unwrap().place(0.0), 0.0);
        assert_eq!(Axis::logarithmic([0.0, f64::NAN].into_iter(), 2.0), None);
    }

    #[test]
    fn ticks_are_round_and_few() {
        let axis = Axis::logarithmic([0.004, 0.6].into_iter(), 1.5).unwrap();
        let shown: Vec<String> = axis.ticks(9).into_iter().map(number).collect();
        assert_eq!(shown, ["0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5"]);
        let linear: Vec<String> =
            Axis::from_zero([2.1].into_iter()).unwrap().ticks(6).into_iter().map(number).collect();
        assert_eq!(linear, ["0", "0.5", "1", "1.5", "2"]);
    }

    #[test]
    fn given_ticks_stay_within() {
        let axis = Axis::logarithmic([2.5, 8.5].into_iter(), 1.0).unwrap();
        assert_eq!(axis.ticks_of(&[1.0, 2.0, 3.0, 8.0, 16.0]), [3.0, 8.0]);
    }

    #[test]
    fn wide_ranges_keep_decades() {
        let axis = Axis::logarithmic([1e-5, 10.0].into_iter(), 1.0).unwrap();
        assert_eq!(axis.ticks(8).len(), 7);
    }
}
