//! Which type each layer's K and V get: those that lose least together in the bytes that there are.
//!
//! This is the knapsack problem with one choice for each part. Losses add up, and bytes are few different numbers, so it is
//! solved exactly: the least loss of the parts so far, for each number of bytes, counted in their greatest common divisor.

/// A type that a part may have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Of a cell.
    pub bytes: u64,
    pub loss: f64,
}

/// The K or the V of a layer.
#[derive(Clone, Debug)]
pub struct Part {
    /// Parts of one pool share their bytes: layers with a window have fewer cells than others.
    pub pool: usize,
    pub choices: Vec<Choice>,
    /// The choice that it has where all layers are alike.
    pub usual: usize,
}

/// The choice of each part. A pool takes at most `growth` percent more bytes than its usual choices; of plans that lose the same,
/// the one with more of these is taken.
pub fn choose(parts: &[Part], growth: f64) -> Vec<usize> {
    let mut chosen: Vec<usize> = parts.iter().map(|part| part.usual).collect();
    let pools = parts.iter().map(|part| part.pool + 1).max().unwrap_or(0);
    for pool in 0..pools {
        let members: Vec<usize> = (0..parts.len()).filter(|&i| parts[i].pool == pool).collect();
        let of_pool: Vec<&Part> = members.iter().map(|&i| &parts[i]).collect();
        for (i, choice) in members.into_iter().zip(choose_in_pool(&of_pool, growth)) {
            chosen[i] = choice;
        }
    }
    chosen
}

/// What a part adds to a plan; of equal losses the fewer changes count.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
struct Cost {
    loss: f64,
    changes: u32,
}

fn choose_in_pool(parts: &[&Part], growth: f64) -> Vec<usize> {
    let unit = parts.iter().flat_map(|part| &part.choices).map(|c| c.bytes).fold(0, gcd).max(1);
    let usual: u64 = parts.iter().map(|part| part.choices[part.usual].bytes).sum();
    let budget = ((usual as f64 * (1.0 + growth.max(0.0) / 100.0)) as u64).max(usual) / unit;
    let budget = usize::try_from(budget).unwrap_or(usize::MAX - 1);
    // least[b]: of the parts so far, with no more than b units. Which choice that took is kept for each part.
    let mut least = vec![Some(Cost { loss: 0.0, changes: 0 }); budget + 1];
    let mut taken: Vec<Vec<u8>> = Vec::with_capacity(parts.len());
    for part in parts {
        let mut next = vec![None; budget + 1];
        let mut took = vec![0; budget + 1];
        for (c, choice) in part.choices.iter().enumerate() {
            let units = (choice.bytes / unit) as usize;
            for b in units..=budget {
                let Some(before) = least[b - units] else { continue };
                let changes = before.changes + u32::from(c != part.usual);
                let cost = Cost { loss: before.loss + choice.loss, changes };
                if next[b].is_none_or(|known| cost < known) {
                    (next[b], took[b]) = (Some(cost), c as u8);
                }
            }
        }
        least = next;
        taken.push(took);
    }
    let mut left = budget;
    let mut chosen: Vec<usize> = Vec::with_capacity(parts.len());
    for (part, took) in parts.iter().zip(&taken).rev() {
        let choice = usize::from(took[left]);
        left -= (part.choices[choice].bytes / unit) as usize;
        chosen.push(choice);
    }
    chosen.reverse();
    chosen
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        gcd(b, a % b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ggml_ext::random::Noise;

    /// Types of 2, 3, 4 and 8 bits at head size 64, of which the second has a ninth of the first's error, and so on.
    fn part(loss: f64, usual: usize) -> Part {
        let bytes = [18, 26, 34, 68];
        let shares = [1.0, 0.22, 0.052, 0.0002];
        let choices = bytes.iter().zip(shares).map(|(&bytes, share)| Choice { bytes, loss: loss * share }).collect();
        Part { pool: 0, choices, usual }
    }

    fn sums(parts: &[Part], chosen: &[usize]) -> (u64, f64) {
        let all = parts.iter().zip(chosen).map(|(part, &c)| part.choices[c]);
        all.fold((0, 0.0), |(bytes, loss), c| (bytes + c.bytes, loss + c.loss))
    }

    fn usual(parts: &[Part]) -> Vec<usize> {
        parts.iter().map(|part| part.usual).collect()
    }

    /// Every plan there is.
    fn by_brute_force(parts: &[Part], growth: f64) -> f64 {
        let most = (sums(parts, &usual(parts)).0 as f64 * (1.0 + growth / 100.0)) as u64;
        let mut best = f64::INFINITY;
        let plans: usize = parts.iter().map(|part| part.choices.len()).product();
        for mut n in 0..plans {
            let mut plan = Vec::new();
            for part in parts {
                plan.push(n % part.choices.len());
                n /= part.choices.len();
            }
            let (bytes, loss) = sums(parts, &plan);
            if bytes <= most {
                best = best.min(loss);
            }
        }
        best
    }

    #[test]
    fn no_plan_loses_less() {
        let mut random = Noise::new(7);
        for round in 0..60 {
            let parts: Vec<Part> = (0..2 + round % 5)
                .map(|_| {
                    let mut part = part(f64::from(random.uniform()).powi(3), 0);
                    part.choices.truncate(2 + (random.bits() % 3) as usize);
                    part.choices.iter_mut().for_each(|c| c.bytes += 2 * (random.bits() % 3));
                    part.usual = (random.bits() % part.choices.len() as u64) as usize;
                    part
                })
                .collect();
            for growth in [0.0, 0.5, 10.0] {
                let chosen = choose(&parts, growth);
                let (bytes, loss) = sums(&parts, &chosen);
                let most = sums(&parts, &usual(&parts)).0 as f64 * (1.0 + growth / 100.0);
                assert!(bytes as f64 <= most, "{bytes} bytes of {most}");
                let best = by_brute_force(&parts, growth);
                assert!((loss - best).abs() <= 1e-12, "round {round}: {loss} instead of {best}");
            }
        }
    }

    #[test]
    fn a_huge_loss_gets_bits_and_small_ones_pay() {
        let mut parts = vec![part(0.01, 2); 12];
        parts[5] = part(1.0, 2);
        parts[7] = part(0.001, 2);
        let chosen = choose(&parts, 0.0);
        assert_eq!(chosen[5], 3);
        assert!(chosen[7] < 2);
        assert!(sums(&parts, &chosen).0 <= 12 * 34);
    }

    #[test]
    fn equal_losses_change_nothing() {
        for usual in 0..4 {
            let parts = vec![part(0.01, usual); 20];
            assert_eq!(choose(&parts, 0.0), vec![usual; 20]);
        }
        assert_eq!(choose(&[part(0.0, 2), part(0.0, 2)], 0.0), [2, 2], "nothing to gain");
        assert_eq!(choose(&[], 0.5), [0; 0]);
    }

    #[test]
    fn a_pool_does_not_pay_for_another() {
        let mut parts = vec![part(0.001, 2); 8];
        parts.push(Part { pool: 1, ..part(1.0, 2) });
        let chosen = choose(&parts, 0.0);
        assert_eq!(chosen, [2; 9]);
        parts.iter_mut().for_each(|part| part.pool = 1);
        assert_eq!(choose(&parts, 0.0)[8], 3);
    }
}
