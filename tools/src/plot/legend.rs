//! The lines below the picture: what each mark and sign means, broken where the picture is not wide enough.

use super::{svg, Series, TEXT};

/// Where lines begin, and where those with marks before them do.
const LEFT: f64 = 28.0;
const BEHIND_MARKS: f64 = 64.0;
const RIGHT: f64 = 14.0;

/// One line.
pub struct Line {
    pub left: f64,
    pub text: String,
    /// The model whose marks stand before it.
    pub series: Option<usize>,
}

/// All lines for a picture of that width.
pub fn lines(series: &[Series], how_to_read: &[&str], width: f64) -> Vec<Line> {
    let mut all = Vec::new();
    let mut add = |text: &str, left: f64, series: Option<usize>| {
        let room = width - left - RIGHT;
        for (i, text) in wrapped(text, room).into_iter().enumerate() {
            all.push(Line { left, text, series: series.filter(|_| i == 0) });
        }
    };
    for (i, one) in series.iter().enumerate() {
        add(&one.name, BEHIND_MARKS, Some(i));
    }
    for how in how_to_read {
        add(how, LEFT, None);
    }
    all
}

/// Broken behind blanks, commas and slashes, and anywhere in a word that is wider than a line.
fn wrapped(text: &str, room: f64) -> Vec<String> {
    let fits =
        |line: &str, more: &str| line.is_empty() || svg::size_of(&format!("{line}{}", more.trim_end()), TEXT).0 <= room;
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_inclusive([' ', ',', '/']) {
        if !fits(&line, word) {
            lines.push(std::mem::take(&mut line));
        }
        for letter in word.chars() {
            if !fits(&line, letter.encode_utf8(&mut [0; 4])) {
                lines.push(std::mem::take(&mut line));
            }
            line.push(letter);
        }
    }
    lines.push(line);
    lines.iter().map(|line| line.trim().to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_and_lose_nothing() {
        let text = "SmolLM2-135M-Instruct.Q4_1 (ctx 1024; f16 decodes 26.3 tokens/s at depth 4096)";
        let wide = |line: &String| svg::size_of(line, TEXT).0;
        let room = wide(&text.to_string());
        assert_eq!(wrapped(text, room), [text]);
        for room in [room - 1.0, 300.0, 60.0, 1.0] {
            let lines = wrapped(text, room);
            assert!(lines.len() > 1 && lines.iter().all(|l| wide(l) <= room || l.chars().count() == 1), "{lines:?}");
            let without_blanks = |text: &str| text.replace(' ', "");
            assert_eq!(without_blanks(&lines.concat()), without_blanks(text));
        }
        assert_eq!(wrapped(text, room - 1.0), [text.strip_suffix(" 4096)").unwrap(), "4096)"]);
    }

    #[test]
    fn marks_stand_before_the_first_line_of_a_model() {
        let series = [Series { name: "word ".repeat(30), dots: Vec::new() }];
        let lines = lines(&series, &["how"], 400.0);
        let marks: Vec<_> = lines.iter().map(|l| l.series).collect();
        assert!(marks.len() > 3 && marks[0] == Some(0) && marks[1..].iter().all(Option::is_none), "{marks:?}");
        assert_eq!(lines.last().unwrap().text, "how");
    }
}
