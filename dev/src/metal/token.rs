//! MSL as tokens. Enough of C++'s grammar to find declarations and member names, nothing more.

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Name,
    Number,
    Text,
    /// Operators of several characters are several tokens, except where `two_chars` says so.
    Sign,
    Space,
    /// A whole line that begins with `#`.
    Directive,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    pub kind: Kind,
    pub text: String,
    /// Counted from 1 in the text that was read.
    pub line: usize,
}

impl Token {
    pub fn is(&self, text: &str) -> bool {
        self.text == text && matches!(self.kind, Kind::Name | Kind::Sign)
    }

    /// Takes its place without a trace.
    pub fn replace(&mut self, text: impl Into<String>) {
        self.text = text.into();
        if self.text.is_empty() {
            self.kind = Kind::Space;
        }
    }
}

const TWO_CHARS: [&str; 14] = ["->", "::", "+=", "-=", "*=", "/=", "==", "<=", ">=", "!=", "[[", "&&", "||", "++"];

/// Never fails: what it does not know is a sign.
pub fn tokens(source: &str) -> Vec<Token> {
    let mut all = Vec::new();
    let mut rest = source;
    let mut line = 1;
    let mut line_start = true;
    while let Some(first) = rest.chars().next() {
        let (kind, length) = next(rest, first, line_start);
        let (text, after) = rest.split_at(length);
        let lines = text.matches('\n').count();
        line_start = if kind == Kind::Space { line_start || lines > 0 } else { kind == Kind::Directive };
        all.push(Token { kind, text: text.to_string(), line });
        line += lines;
        rest = after;
    }
    all
}

fn next(rest: &str, first: char, line_start: bool) -> (Kind, usize) {
    let while_ = |test: fn(char) -> bool| rest.find(|c| !test(c)).unwrap_or(rest.len());
    if first.is_whitespace() {
        return (Kind::Space, while_(char::is_whitespace));
    }
    if rest.starts_with("//") {
        return (Kind::Space, rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("/*") {
        return (Kind::Space, rest.find("*/").map_or(rest.len(), |end| end + 2));
    }
    if first == '#' && line_start {
        return (Kind::Directive, directive_length(rest));
    }
    if first == '"' || first == '\'' {
        return (Kind::Text, text_length(rest, first));
    }
    if first.is_ascii_digit() || (first == '.' && rest[1..].starts_with(|c: char| c.is_ascii_digit())) {
        return (Kind::Number, number_length(rest));
    }
    if first.is_alphabetic() || first == '_' {
        return (Kind::Name, while_(|c| c.is_alphanumeric() || c == '_'));
    }
    let two = TWO_CHARS.iter().any(|two| rest.starts_with(two));
    (Kind::Sign, if two { 2 } else { first.len_utf8() })
}

/// To the end of the line, lines that end in a backslash included.
fn directive_length(rest: &str) -> usize {
    let mut at = 0;
    loop {
        let Some(end) = rest[at..].find('\n') else { return rest.len() };
        at += end + 1;
        if !rest[..at].ends_with("\\\n") {
            return at;
        }
    }
}

fn text_length(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// Signs belong to it behind an exponent: 1e-3f, 0x1p-24f.
fn number_length(rest: &str) -> usize {
    let hex = rest.starts_with("0x") || rest.starts_with("0X");
    let mut before = ' ';
    for (at, c) in rest.char_indices() {
        let exponent = if hex { matches!(before, 'p' | 'P') } else { matches!(before, 'e' | 'E') };
        if !(c.is_alphanumeric() || c == '.' || (exponent && matches!(c, '+' | '-'))) {
            return at;
        }
        before = c;
    }
    rest.len()
}

/// The text again.
pub fn joined(tokens: &[Token]) -> String {
    tokens.iter().map(|t| t.text.as_str()).collect()
}

/// Index of the next token that is neither space nor directive.
pub fn next_real(tokens: &[Token], from: usize) -> Option<usize> {
    (from..tokens.len()).find(|&i| !matches!(tokens[i].kind, Kind::Space | Kind::Directive))
}

/// Index of the one before `from`.
pub fn previous_real(tokens: &[Token], from: usize) -> Option<usize> {
    (0..from).rev().find(|&i| !matches!(tokens[i].kind, Kind::Space | Kind::Directive))
}

/// The closing sign of the opening one at `open`.
pub fn closing(tokens: &[Token], open: usize) -> Option<usize> {
    let (opens, closes) = match tokens[open].text.as_str() {
        "(" => ("(", ")"),
        "{" => ("{", "}"),
        "<" => ("<", ">"),
        "[" => ("[", "]"),
        "[[" => {
            let inner = tokens[open..].windows(2).position(|two| two[0].is("]") && two[1].is("]"))?;
            return Some(open + inner + 1);
        }
        _ => return None,
    };
    let mut depth = 0;
    for (i, t) in tokens.iter().enumerate().skip(open) {
        if t.is(opens) {
            depth += 1;
        } else if t.is(closes) {
            depth -= 1;
            if depth == 0 {
                return Some(i);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn real(source: &str) -> Vec<String> {
        tokens(source).into_iter().filter(|t| t.kind != Kind::Space).map(|t| t.text).collect()
    }

    #[test]
    fn nothing_is_lost() {
        let source = "kernel void f(device const float4 * x [[buffer(0)]]) { // why\n  x[1e-3f] += .5h; \"a\\\"b\"; /* c */ }\n# 1 \"f\"\n";
        assert_eq!(joined(&tokens(source)), source);
        assert_eq!(joined(&tokens("a \u{2264} b")), "a \u{2264} b");
    }

    #[test]
    fn numbers_and_members() {
        assert_eq!(real("0x1p-24f+v.xy"), ["0x1p-24f", "+", "v", ".", "xy"]);
        assert_eq!(real("1.0f-2e+3-x"), ["1.0f", "-", "2e+3", "-", "x"]);
    }

    #[test]
    fn directives_are_whole_lines() {
        let t = tokens("a\n #pragma x \\\n y\nb # c");
        let directives: Vec<_> = t.iter().filter(|t| t.kind == Kind::Directive).map(|t| t.text.as_str()).collect();
        assert_eq!(directives, ["#pragma x \\\n y\n"]);
        assert_eq!(t.iter().find(|t| t.text == "b").map(|t| t.line), Some(4));
    }

    #[test]
    fn brackets() {
        let t = tokens("f(a[b[0]], (c)) [[buffer(x[0])]] g");
        let open = t.iter().position(|t| t.is("(")).unwrap();
        assert_eq!(joined(&t[open..=closing(&t, open).unwrap()]), "(a[b[0]], (c))");
        let open = t.iter().position(|t| t.is("[[")).unwrap();
        assert!(joined(&t[open..=closing(&t, open).unwrap()]).ends_with("]]"));
    }
}
