//! Documents with questions that have one right answer, from a seed.
//!
//! A question stands behind its document and ends where the answer begins, so that a model that was never taught to chat can
//! answer it. What is asked for is spread evenly over the document.

use clap::ValueEnum;
use ggml_ext::random::Noise;
use serde::{Deserialize, Serialize};

use super::words::{number, sentence, thing, uuid, Names};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// The value of a key, among pairs of random UUIDs
    Pairs,
    /// The number that a register holds, among numbered registers, one on a line
    Lines,
    /// The number that a variable has by two assignments from others, in prose
    Variables,
    /// Four numbers that belong to one name, in prose
    Needles,
    /// A list of sixteen lines, word for word, from the middle
    Copy,
}

impl Task {
    pub fn name(self) -> String {
        self.to_possible_value().map(|v| v.get_name().to_string()).unwrap_or_default()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    pub text: String,
    pub questions: Vec<Question>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    pub text: String,
    pub wanted: Wanted,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// The answer begins with it.
    Text(String),
    /// The answer has all of them, in any order.
    All(Vec<String>),
}

impl Wanted {
    pub fn is_in(&self, answer: &str) -> bool {
        match self {
            Wanted::Text(text) => first_word_end(answer.trim_start(), text),
            Wanted::All(texts) => texts.iter().all(|text| has_word(answer, text)),
        }
    }

    /// As a model would write it.
    pub fn shown(&self) -> String {
        match self {
            Wanted::Text(text) => text.clone(),
            Wanted::All(texts) => texts.join(", "),
        }
    }
}

/// Does `answer` begin with `text`, and does a word end there?
fn first_word_end(answer: &str, text: &str) -> bool {
    answer.strip_prefix(text).is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
}

fn has_word(answer: &str, text: &str) -> bool {
    let begins = |at: usize| !answer[..at].ends_with(char::is_alphanumeric);
    answer.match_indices(text).any(|(at, _)| begins(at) && first_word_end(&answer[at..], text))
}

/// Lines of a list to copy: about a hundred tokens.
const LIST: usize = 16;
/// Numbers that belong to one name.
const NEEDLES: usize = 4;
/// Names in a chain of assignments.
const CHAIN: usize = 3;

/// A document of `units` (pairs, lines, sentences or lists; at least as many as questions) with `questions` about it.
pub fn document(task: Task, seed: u64, units: usize, questions: usize) -> Document {
    let mut noise = Noise::new(seed);
    match task {
        Task::Pairs => pairs(&mut noise, units, questions),
        Task::Lines => lines(&mut noise, units, questions),
        Task::Variables => variables(&mut noise, units, questions),
        Task::Needles => needles(&mut noise, units, questions),
        Task::Copy => copy(&mut noise, units, questions),
    }
}

/// One place of `units` in each of `questions` parts of equal length.
fn places(noise: &mut Noise, units: usize, questions: usize) -> Vec<usize> {
    let begin = |part: usize| part * units / questions;
    (0..questions).map(|part| begin(part) + noise.below((begin(part + 1) - begin(part)).max(1))).collect()
}

fn pairs(noise: &mut Noise, units: usize, questions: usize) -> Document {
    let all: Vec<[String; 2]> = (0..units).map(|_| [uuid(noise), uuid(noise)]).collect();
    let listed: String = all.iter().map(|[key, value]| format!("\"{key}\": \"{value}\"\n")).collect();
    let ask = |place: usize| {
        let [key, value] = &all[place];
        let text = format!("The pair whose key is \"{key}\", once more:\n\"{key}\": \"");
        Question { text, wanted: Wanted::Text(value.clone()) }
    };
    Document {
        text: format!("These are pairs of a key and its value. No key is there twice.\n\n{listed}\n"),
        questions: places(noise, units, questions).into_iter().map(ask).collect(),
    }
}

fn lines(noise: &mut Noise, units: usize, questions: usize) -> Document {
    let all: Vec<String> = (0..units).map(|_| number(noise)).collect();
    let listed: String = all.iter().enumerate().map(|(i, number)| format!("Register {}: {number}\n", i + 1)).collect();
    let ask = |place: usize| {
        let text = format!("Which number does register {0} hold?\nRegister {0}:", place + 1);
        Question { text, wanted: Wanted::Text(all[place].clone()) }
    };
    Document {
        text: format!("Every line has the number of a register and the number that it holds.\n\n{listed}\n"),
        questions: places(noise, units, questions).into_iter().map(ask).collect(),
    }
}

/// Sentences with other lines among them, those of one question in their order.
fn scattered(noise: &mut Noise, units: usize, hidden: &[Vec<String>]) -> String {
    let mut before: Vec<Vec<&str>> = vec![Vec::new(); units];
    for lines in hidden {
        // One in each part, so that they are far from each other, and the question needs all of the document.
        for (line, place) in lines.iter().zip(places(noise, units, lines.len())) {
            before[place].push(line);
        }
    }
    let mut text = String::new();
    for lines in before {
        lines.iter().for_each(|line| text += &format!("{line}\n"));
        text += &sentence(noise);
        text += "\n";
    }
    text
}

fn variables(noise: &mut Noise, units: usize, questions: usize) -> Document {
    let mut names = Names::default();
    let mut hidden = Vec::new();
    let mut asked = Vec::new();
    for _ in 0..questions {
        let chain: Vec<String> = (0..CHAIN).map(|_| names.next(noise)).collect();
        let value = number(noise);
        let values = std::iter::once(&value).chain(&chain);
        hidden.push(chain.iter().zip(values).map(|(name, value)| format!("Variable {name} = {value}")).collect());
        let last = &chain[CHAIN - 1];
        let text = format!(
            "Which number does variable {last} hold? Go back from variable to variable until you find it.\nVariable {last} holds \
             the number"
        );
        asked.push(Question { text, wanted: Wanted::Text(value) });
    }
    let text = scattered(noise, units, &hidden);
    Document {
        text: format!(
            "Variables are assigned in this text: to a number, or to a variable that was assigned before.\n\n{text}\n"
        ),
        questions: asked,
    }
}

fn needles(noise: &mut Noise, units: usize, questions: usize) -> Document {
    let mut names = Names::default();
    let mut hidden = Vec::new();
    let mut asked = Vec::new();
    for _ in 0..questions {
        let name = names.next(noise);
        let numbers: Vec<String> = (0..NEEDLES).map(|_| number(noise)).collect();
        hidden
            .push(numbers.iter().map(|number| format!("One of the special numbers of {name} is {number}.")).collect());
        let text = format!(
            "What are the {NEEDLES} special numbers of {name} in this text?\nThe {NEEDLES} special numbers of {name} are"
        );
        asked.push(Question { text, wanted: Wanted::All(numbers) });
    }
    let text = scattered(noise, units, &hidden);
    Document { text: format!("Special numbers are hidden in this text. Remember them.\n\n{text}\n"), questions: asked }
}

fn copy(noise: &mut Noise, units: usize, questions: usize) -> Document {
    let mut names = Names::default();
    let list = |noise: &mut Noise| (1..=LIST).map(|i| format!("{i}. {}", thing(noise))).collect::<Vec<_>>().join("\n");
    let all: Vec<(String, String)> = (0..units).map(|_| (names.next(noise), list(noise))).collect();
    let listed: String = all.iter().map(|(name, list)| format!("List {name}\n{list}\n\n")).collect();
    // Neither at the beginning nor at the end.
    let margin = (units - questions).min(units / 2) / 2;
    let ask = |place: usize| {
        let (name, list) = &all[margin + place];
        let text = format!("List {name} once more, word for word:\n\nList {name}\n");
        Question { text, wanted: Wanted::Text(list.clone()) }
    };
    Document {
        text: format!("These are lists. Each has a name and {LIST} lines.\n\n{listed}"),
        questions: places(noise, units - 2 * margin, questions).into_iter().map(ask).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Task; 5] = [Task::Pairs, Task::Lines, Task::Variables, Task::Needles, Task::Copy];

    fn number_after<'a>(text: &'a str, mark: &str) -> Vec<&'a str> {
        text.split(mark).skip(1).filter_map(|rest| rest.split(['.', '\n', '"']).next()).collect()
    }

    #[test]
    fn a_seed_is_a_document() {
        for task in ALL {
            let one = document(task, 7, 60, 10);
            assert_eq!(one, document(task, 7, 60, 10), "{task:?}");
            assert_ne!(one, document(task, 8, 60, 10), "{task:?}");
            assert_eq!(one.questions.len(), 10);
            assert!(document(task, 7, 61, 10).text.len() > one.text.len(), "{task:?}");
            assert!(one.text.ends_with("\n\n"));
            // As few units as there are questions are enough.
            assert_eq!(document(task, 7, 10, 10).questions.len(), 10);
        }
    }

    #[test]
    fn the_right_answer_can_be_found_by_reading() {
        for seed in 0..20 {
            for question in document(Task::Pairs, seed, 40, 8).questions {
                let text = document(Task::Pairs, seed, 40, 8).text;
                let cue = question.text.lines().last().unwrap().to_string();
                assert_eq!(number_after(&text, &cue), [question.wanted.shown()]);
            }
            let lines = document(Task::Lines, seed, 40, 8);
            for question in lines.questions {
                let cue = format!("{} ", question.text.lines().last().unwrap());
                assert_eq!(number_after(&lines.text, &cue), [question.wanted.shown()]);
            }
            let lists = document(Task::Copy, seed, 40, 8);
            for question in lists.questions {
                let cue = format!("{}\n", question.text.lines().last().unwrap());
                let after = lists.text.split(&cue).nth(1).unwrap();
                assert_eq!(after.split("\n\n").next(), Some(question.wanted.shown().as_str()));
                assert_eq!(lists.text.matches(&cue).count(), 1);
            }
        }
    }

    #[test]
    fn variables_lead_to_their_number() {
        let document = document(Task::Variables, 3, 200, 10);
        for question in &document.questions {
            let words: Vec<&str> = question.text.split_whitespace().collect();
            let mut name = words[words.iter().position(|w| *w == "variable").unwrap() + 1].to_string();
            let mut places = Vec::new();
            for _ in 0..CHAIN {
                let cue = format!("Variable {name} = ");
                assert_eq!(document.text.matches(&cue).count(), 1);
                places.push(document.text.find(&cue).unwrap());
                name = number_after(&document.text, &cue)[0].to_string();
            }
            assert_eq!(Wanted::Text(name), question.wanted);
            assert!(places.is_sorted_by(|a, b| a > b), "a name is used before it is assigned: {places:?}");
        }
    }

    #[test]
    fn needles_of_a_name_are_spread() {
        let document = document(Task::Needles, 3, 200, 10);
        for question in &document.questions {
            let name = question.text.split_whitespace().find(|w| w.starts_with(char::is_uppercase) && *w != "What");
            let cue = format!("One of the special numbers of {} is ", name.unwrap());
            let found = number_after(&document.text, &cue);
            assert!(question.wanted.is_in(&found.join(" and ")) && found.len() == NEEDLES, "{found:?}");
            assert!(!question.wanted.is_in(&found[1..].join(" and ")));
            let first = document.text.find(&cue).unwrap();
            let last = document.text.rfind(&cue).unwrap();
            assert!(last - first > document.text.len() / 4, "{first}..{last} of {}", document.text.len());
        }
    }

    #[test]
    fn questions_are_spread_over_the_document() {
        for (task, first, last) in [(Task::Pairs, 0.0, 1.0), (Task::Lines, 0.0, 1.0), (Task::Copy, 0.2, 0.8)] {
            let document = document(task, 5, 100, 10);
            let length = document.text.len() as f64;
            let places: Vec<f64> = document
                .questions
                .iter()
                .map(|q| document.text.find(&q.wanted.shown()).unwrap() as f64 / length)
                .collect();
            let width = (last - first) / 10.0;
            for (i, place) in places.iter().enumerate() {
                let part = first + i as f64 * width;
                assert!((part - 0.03..part + width + 0.03).contains(place), "{task:?}: {places:?}");
            }
        }
    }

    #[test]
    fn answers_are_right_or_wrong() {
        let text = Wanted::Text("4821".into());
        assert!(text.is_in(" 4821.") && text.is_in("4821") && text.is_in("\n4821 and more"));
        assert!(!text.is_in("48210") && !text.is_in("the 4821") && !text.is_in("") && !text.is_in("482"));
        let all = Wanted::All(vec!["11".into(), "22".into()]);
        assert!(all.is_in(" 22, 11.") && all.is_in("11 and 22"));
        assert!(!all.is_in("11, 220") && !all.is_in("11") && !all.is_in("1122"));
    }
}
