//! What the translation lets pass and Metal does not: pointers without an address space, variables that are not
//! `constant` at file scope, threadgroup storage outside of kernels, words of C++ that MSL does not have.
//!
//! It reads the sources as they are, before the preprocessor, and knows types by their names.

use std::collections::BTreeSet;

use super::token::{closing, next_real, previous_real, tokens, Kind, Token};

const FORBIDDEN: [&str; 15] = [
    "double",
    "new",
    "delete",
    "virtual",
    "throw",
    "try",
    "catch",
    "goto",
    "typeid",
    "dynamic_cast",
    "std",
    "thread_local",
    "volatile",
    "asm",
    "union",
];
const SPACES: [&str; 4] = ["device", "constant", "threadgroup", "thread"];
const SCALARS: [&str; 13] =
    ["bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float", "void"];

/// Files with their names, which may use each other's types; one message a finding.
pub fn lint(files: &[(String, String)]) -> Vec<String> {
    let types = files.iter().flat_map(|(_, source)| types(&tokens(source))).collect();
    files.iter().flat_map(|(name, source)| lint_file(name, source, &types)).collect()
}

fn lint_file(name: &str, source: &str, types: &BTreeSet<String>) -> Vec<String> {
    let all = tokens(source);
    let mut findings = Vec::new();
    let mut say = |t: &Token, what: String| findings.push(format!("{name}:{}: {what}", t.line));
    for (i, t) in all.iter().enumerate().filter(|(_, t)| t.kind == Kind::Name) {
        let member = previous_real(&all, i).is_some_and(|b| all[b].is(".") || all[b].is("->"));
        if FORBIDDEN.contains(&t.text.as_str()) && !member {
            say(t, format!("MSL has no {}", t.text));
        }
        let next = next_real(&all, i + 1).map(|n| &all[n]);
        let points = next.is_some_and(|n| n.is("*") || n.is("&"));
        if points && is_type(types, &t.text) && !has_space(&all, i) {
            say(t, format!("a pointer or reference to {} without an address space", t.text));
        }
    }
    file_scope(&all, &mut say);
    findings
}

/// Structs, aliases and type parameters of the text.
fn types(all: &[Token]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (i, t) in all.iter().enumerate() {
        if ["struct", "typename", "using", "class"].iter().any(|w| t.is(w)) {
            if let Some(n) = next_real(all, i + 1).filter(|&n| all[n].kind == Kind::Name) {
                names.insert(all[n].text.clone());
            }
        }
    }
    names
}

/// `float4`, `uint8_t`, `packed_uchar4`, `auto`, or a name of the text's own.
fn is_type(types: &BTreeSet<String>, name: &str) -> bool {
    let name = name.strip_prefix("packed_").unwrap_or(name);
    let scalar = name.trim_end_matches(['2', '3', '4']);
    let sized = name.strip_suffix("_t").is_some_and(|n| n.trim_start_matches('u').starts_with("int") || n == "size");
    types.contains(name) || SCALARS.contains(&scalar) || sized || name == "auto"
}

/// Is there an address space in the declaration that the type at `i` belongs to?
fn has_space(all: &[Token], i: usize) -> bool {
    let is_space = |t: &Token| SPACES.iter().any(|s| t.is(s));
    let starts = |t: &Token| [";", "{", "}", "(", ",", "<", "="].iter().any(|s| t.is(s));
    let before = all[..i].iter().rev().take_while(|t| !starts(t)).any(is_space);
    // `float const device * p`, and a pointer's own qualifiers.
    before || all[i..].iter().skip(1).take_while(|t| !t.is("*") && !t.is("&")).any(is_space)
}

fn file_scope(all: &[Token], say: &mut impl FnMut(&Token, String)) {
    let mut i = 0;
    while let Some(start) = next_real(all, i) {
        // A declaration ends with `;` or with the body of a function.
        let mut at = start;
        let mut words: Vec<&Token> = Vec::new();
        while at < all.len() && !all[at].is(";") {
            words.push(&all[at]);
            let body = all[at].is("{");
            if matches!(all[at].text.as_str(), "(" | "{" | "[[") && all[at].kind == Kind::Sign {
                let end = closing(all, at).unwrap_or(all.len() - 1);
                if body {
                    body_of(all, &words, at, end, say);
                }
                at = end;
            }
            at += 1;
            if body && !words.iter().any(|w| w.is("=") || w.is("struct") || w.is("enum")) {
                break;
            }
        }
        let has = |name: &str| words.iter().any(|w| w.is(name));
        let plain = !["template", "using", "typedef", "enum", "struct", "static_assert"].iter().any(|w| has(w));
        if has("=") && plain && !has("constant") {
            say(&all[start], "a variable at file scope that is not constant".into());
        }
        i = at + 1;
    }
}

/// Threadgroup storage belongs to kernels.
fn body_of(all: &[Token], head: &[&Token], from: usize, to: usize, say: &mut impl FnMut(&Token, String)) {
    if head.iter().any(|w| w.is("kernel")) {
        return;
    }
    for i in (from..to).filter(|&i| all[i].is("threadgroup")) {
        let begins = previous_real(all, i).is_some_and(|b| [";", "{", "}"].iter().any(|s| all[b].is(s)));
        let statement = all[i..to].iter().take_while(|t| !t.is(";"));
        if begins && !statement.clone().any(|t| t.is("*") || t.is("&")) {
            say(&all[i], "threadgroup storage in a function that is not a kernel".into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(source: &str) -> Vec<String> {
        lint(&[("a.h".into(), source.into())])
    }

    #[test]
    fn types_of_other_files_are_known() {
        let files = [("a.h", "struct A { int x; };"), ("b.h", "void f(A * a) {}")];
        let found = lint(&files.map(|(name, text)| (name.to_string(), text.to_string())));
        assert!(found.len() == 1 && found[0].starts_with("b.h:1: "), "{found:?}");
    }

    #[test]
    fn findings() {
        for (source, what) in [
            ("void f(float * x) {}", "1: a pointer or reference to float without"),
            ("struct A { int x; };\nvoid f(const A & a) {}", "2: a pointer or reference to A"),
            ("void f() { auto p = (uchar4 *) q; }", "a pointer or reference to uchar4"),
            ("template <typename T> void f(T * x) {}", "reference to T without"),
            ("void f() { double x; }", "MSL has no double"),
            ("const float t[2] = { 1, 2 };", "not constant"),
            ("void f() { threadgroup float x[3]; }", "threadgroup storage in a function"),
        ] {
            let found = one(source);
            assert!(found.len() == 1 && found[0].contains(what), "{source}: {found:?}");
        }
    }

    #[test]
    fn nothing_to_find() {
        for source in [
            "constant float t[2] = { 1, 2 };\nstatic constant int N [[function_constant(0)]];",
            "void f(device const float * x, thread float4 & y, float const device * z) { float a = b * c & d; }",
            "kernel void f(device float * x [[buffer(0)]]) { threadgroup float s[4]; threadgroup float * p = s; }",
            "struct A { float x; }; template <typename T> T f(constant A & a, const device T * x) { return x[0]; }",
            "// a double * is fine here\nint f(int a) { int b = 2; return a*b; }",
            "template <int N> void f() { threadgroup float * p = 0; x.new_; }",
        ] {
            assert_eq!(one(source), Vec::<String>::new(), "{source}");
        }
    }
}
