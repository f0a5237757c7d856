//! Random numbers for tests, examples and tools: the same in every run and on every machine.
//!
//! Marsaglia's xorshift64 (13, 7, 17) from a state of `seed * 0x9e3779b97f4a7c15 | 1`, all modulo 2^64. Golden instruction
//! counts depend on the sequence. The signs of rotations do not come from here: they are part of the formats, see
//! `rotation`.

/// A generator.
#[derive(Clone)]
pub struct Noise(u64);

impl Noise {
    /// Any seed will do, 0 too.
    pub fn new(seed: u64) -> Noise {
        Noise(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// 0..n
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 20) as usize % n
    }

    /// \[0, 1)
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// A normal value of variance 1.
    pub fn gaussian(&mut self) -> f32 {
        (-2.0 * self.uniform().max(1e-9).ln()).sqrt() * (std::f32::consts::TAU * self.uniform()).cos()
    }

    /// `n` normal values.
    pub fn row(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.gaussian()).collect()
    }

    /// `n` values in -1..1 that no library function has a part in.
    pub fn flat_row(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| 2.0 * self.uniform() - 1.0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_stays() {
        let mut noise = Noise::new(1);
        assert_eq!([noise.bits(), noise.bits()], [0xdc1b_77ae_0bf3_4dad, 0x64f0_eeb9_026e_6076]);
        assert_eq!(Noise::new(0).bits(), 0x0000_0000_4082_2041);
    }
}
