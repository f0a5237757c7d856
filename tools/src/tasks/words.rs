//! Words, names, numbers and sentences that mean nothing, from a seed.

use ggml_ext::random::Noise;

const ADJECTIVES: [&str; 24] = [
    "amber", "brittle", "calm", "dusty", "early", "faded", "gentle", "hollow", "idle", "jagged", "keen", "lonely",
    "muddy", "narrow", "old", "pale", "quiet", "rusty", "silver", "tall", "uneven", "vivid", "wide", "young",
];
const NOUNS: [&str; 32] = [
    "anchor", "barrel", "candle", "door", "engine", "fence", "garden", "hammer", "island", "jacket", "kettle",
    "ladder", "mirror", "needle", "orchard", "piano", "quarry", "river", "saddle", "table", "umbrella", "valley",
    "wagon", "yard", "bridge", "clock", "drawer", "field", "glove", "harbour", "lantern", "mill",
];
const VERBS: [&str; 12] =
    ["covered", "followed", "found", "held", "hid", "lit", "moved", "passed", "pulled", "reached", "touched", "turned"];
const PLACES: [&str; 12] = [
    "after the rain",
    "at noon",
    "before winter",
    "behind the house",
    "beside the road",
    "by the sea",
    "during the night",
    "in the morning",
    "near the station",
    "on the hill",
    "under the roof",
    "without a sound",
];

pub fn chosen<'a>(noise: &mut Noise, words: &[&'a str]) -> &'a str {
    words[noise.below(words.len())]
}

/// "rusty lantern"
pub fn thing(noise: &mut Noise) -> String {
    format!("{} {}", chosen(noise, &ADJECTIVES), chosen(noise, &NOUNS))
}

/// "The pale wagon passed the quiet mill near the station."
pub fn sentence(noise: &mut Noise) -> String {
    let (subject, object) = (thing(noise), thing(noise));
    format!("The {subject} {} the {object} {}.", chosen(noise, &VERBS), chosen(noise, &PLACES))
}

/// Five digits, of which the first is not 0.
pub fn number(noise: &mut Noise) -> String {
    (10_000 + noise.below(90_000)).to_string()
}

/// As RFC 9562 writes a random one, version 4.
pub fn uuid(noise: &mut Noise) -> String {
    let high = (noise.bits() & !0xf000) | 0x4000;
    let low = (noise.bits() & (u64::MAX >> 2)) | 1 << 63;
    format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        high >> 32,
        high >> 16 & 0xffff,
        high & 0xffff,
        low >> 48,
        low & 0xffff_ffff_ffff
    )
}

/// Names of three syllables that begin with a capital, each once: "Tovaki".
#[derive(Default)]
pub struct Names(Vec<String>);

impl Names {
    pub fn next(&mut self, noise: &mut Noise) -> String {
        loop {
            let letters: Vec<u8> = (0..6)
                .map(|i| [&b"bdfghklmnprstvz"[..], b"aeiou"][i % 2])
                .map(|set| set[noise.below(set.len())])
                .collect();
            let mut name = String::from_utf8_lossy(&letters).into_owned();
            name[..1].make_ascii_uppercase();
            if !self.0.contains(&name) {
                self.0.push(name.clone());
                return name;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_have_the_form_of_version_4() {
        let mut noise = Noise::new(1);
        for _ in 0..1000 {
            let uuid = uuid(&mut noise);
            let lengths: Vec<usize> = uuid.split('-').map(str::len).collect();
            assert_eq!(lengths, [8, 4, 4, 4, 12], "{uuid}");
            assert_eq!(&uuid[14..15], "4", "{uuid}");
            assert!("89ab".contains(&uuid[19..20]), "{uuid}");
        }
    }

    #[test]
    fn names_are_not_repeated() {
        let (mut names, mut noise) = (Names::default(), Noise::new(2));
        let mut all: Vec<String> = (0..2000).map(|_| names.next(&mut noise)).collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 2000);
        assert!(all.iter().all(|name| name.len() == 6 && name.starts_with(|c: char| c.is_ascii_uppercase())));
    }
}
