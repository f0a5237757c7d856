//! MSL, preprocessed, to C++ that `tests/metal/msl.h` understands.
//!
//! ```text
//! constant int N [[function_constant(3)]];      a variable that the host sets before a launch
//! constant int M = N/2;                         a function, since its value follows
//! kernel void f(… [[buffer(0)]], …) {           a function, and an entry that binds its parameters
//! template [[host_name("f_4")]] kernel t f<4>;  an entry for that instance
//! threadgroup float x[32];                      a reference to storage that the threadgroup shares
//! v.zyx, v.xy = w                               v.swizzle<2, 1, 0>(), v.swizzle_ref<0, 1>() = w
//! 1.5h                                          half(1.5f)
//! ```
//!
//! Address spaces and the remaining attributes are dropped; the lint looks at the former.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use anyhow::{bail, Context, Result};

use super::token::{closing, joined, next_real, previous_real, tokens, Kind, Token};

/// `source` is the output of the preprocessor; of its kernels those that `wanted` names are compiled, or all.
pub fn translate(source: &str, wanted: &[&str]) -> Result<String> {
    let mut t = Translator { tokens: tokens(source), ..Translator::default() };
    t.drop_pragmas();
    t.function_constants()?;
    t.derived_constants();
    t.kernels()?;
    t.instances()?;
    t.threadgroup_variables()?;
    t.swizzles_and_halves();
    t.drop_attributes()?;
    t.address_spaces();
    for name in wanted {
        if !t.entries.iter().any(|e| e.0 == *name) {
            bail!("there is no kernel {name}");
        }
    }
    t.entries.retain(|e| wanted.is_empty() || wanted.contains(&e.0.as_str()));
    let mut text = String::from("#include \"msl.h\"\n");
    text += &joined(&t.tokens);
    for (n, (name, call, arguments)) in t.entries.iter().enumerate() {
        writeln!(text, "static void msl_entry_{n}(const ::msl::Call & msl_call) {{ {call}({arguments}); }}")?;
        writeln!(text, "static ::msl::KernelEntry msl_entry_{n}_(\"{name}\", msl_entry_{n});")?;
    }
    Ok(text)
}

#[derive(Default)]
struct Translator {
    tokens: Vec<Token>,
    /// Function constants and what follows from them.
    constants: BTreeSet<String>,
    /// What a kernel is called with.
    parameters: BTreeMap<String, String>,
    /// Name for the host, what to call, with what.
    entries: Vec<(String, String, String)>,
}

impl Translator {
    fn real_after(&self, i: usize) -> Option<usize> {
        next_real(&self.tokens, i + 1)
    }

    fn real_before(&self, i: usize) -> Option<usize> {
        previous_real(&self.tokens, i)
    }

    fn is(&self, i: Option<usize>, text: &str) -> bool {
        i.is_some_and(|i| self.tokens[i].is(text))
    }

    fn blank(&mut self, from: usize, to: usize) {
        for t in &mut self.tokens[from..=to] {
            // Lines stay where they were, for the compiler's messages.
            let lines = "\n".repeat(t.text.matches('\n').count());
            t.replace(lines);
            t.kind = Kind::Space;
        }
    }

    /// The next `;` outside of brackets.
    fn statement_end(&self, from: usize) -> Option<usize> {
        let mut i = from;
        while i < self.tokens.len() {
            match self.tokens[i].text.as_str() {
                ";" => return Some(i),
                "(" | "{" | "[" if self.tokens[i].kind == Kind::Sign => i = closing(&self.tokens, i)?,
                _ => {}
            }
            i += 1;
        }
        None
    }

    fn text(&self, from: usize, to: usize) -> String {
        self.tokens[from..to].iter().filter(|t| t.kind != Kind::Directive).map(|t| t.text.as_str()).collect()
    }

    fn drop_pragmas(&mut self) {
        for t in &mut self.tokens {
            let pragma = t.kind == Kind::Directive && t.text.trim_start_matches(['#', ' ']).starts_with("pragma");
            if pragma {
                t.replace("\n");
                t.kind = Kind::Space;
            }
        }
    }

    /// `constant T name [[function_constant(n)]];`
    fn function_constants(&mut self) -> Result<()> {
        for i in 0..self.tokens.len() {
            if !self.tokens[i].is("function_constant") {
                continue;
            }
            let open = self.real_before(i).filter(|&o| self.tokens[o].is("[["));
            let name = open.and_then(|o| self.real_before(o));
            let (Some(open), Some(name)) = (open, name) else { continue };
            let start = (0..name).rev().find(|&j| self.tokens[j].is("constant"));
            let end = self.statement_end(open);
            let (Some(start), Some(end)) = (start, end) else {
                bail!("line {}: a function constant that is no declaration", self.tokens[i].line);
            };
            let kind = self.text(start + 1, name).trim().to_string();
            let index = self.real_after(i).filter(|&p| self.tokens[p].is("("));
            let (Some(from), Some(to)) = (index, index.and_then(|p| closing(&self.tokens, p))) else {
                bail!("line {}: a function constant without an index", self.tokens[i].line);
            };
            let (index, constant) = (self.text(from + 1, to), self.tokens[name].text.clone());
            self.blank(start, end);
            self.tokens[start].replace(format!(
                "static {kind} {constant}; static ::msl::ConstantEntry {constant}_entry(\"{constant}\", {index}, \
                 &{constant}, ::msl::set_constant<{kind}>);"
            ));
            self.constants.insert(constant);
        }
        for i in 0..self.tokens.len() {
            if !self.tokens[i].is("is_function_constant_defined") {
                continue;
            }
            if let Some(name) = self.real_after(i).and_then(|p| self.real_after(p)) {
                self.tokens[i].replace("::msl::constant_is_set");
                self.tokens[name].text.insert(0, '&');
            }
        }
        Ok(())
    }

    /// `constant T name = expression of function constants;` at file scope: evaluated where it is used.
    fn derived_constants(&mut self) {
        let mut i = 0;
        while i < self.tokens.len() {
            let t = &self.tokens[i];
            if t.kind == Kind::Sign && (t.is("{") || t.is("(")) {
                i = closing(&self.tokens, i).unwrap_or(i);
            }
            if self.tokens[i].is("constant") {
                if let Some(end) = self.derived_constant(i) {
                    i = end;
                }
            }
            i += 1;
        }
    }

    fn derived_constant(&mut self, start: usize) -> Option<usize> {
        let end = self.statement_end(start)?;
        let equals = (start..end).find(|&i| self.tokens[i].is("="))?;
        let name = self.real_before(equals)?;
        let value = &self.tokens[equals + 1..end];
        let mentions = |t: &Token| t.kind == Kind::Name && self.constants.contains(t.text.trim_start_matches('&'));
        if self.tokens[name].kind != Kind::Name || !value.iter().any(mentions) {
            return None;
        }
        let constant = self.tokens[name].text.clone();
        self.tokens[start].replace("static inline");
        self.tokens[name].text.push_str("()");
        self.tokens[equals].replace("{ return");
        self.tokens[end].replace("; }");
        for t in &mut self.tokens[end + 1..] {
            if t.is(&constant) {
                t.text.push_str("()");
            }
        }
        self.constants.insert(format!("{constant}()"));
        Some(end)
    }

    /// `kernel void name(parameters) {`
    fn kernels(&mut self) -> Result<()> {
        for i in 0..self.tokens.len() {
            if !self.tokens[i].is("kernel") {
                continue;
            }
            let name = self.real_after(i).filter(|&v| self.tokens[v].is("void")).and_then(|v| self.real_after(v));
            let open = name.and_then(|n| self.real_after(n)).filter(|&o| self.tokens[o].is("("));
            let (Some(name), Some(open)) = (name, open) else { continue };
            let close = closing(&self.tokens, open).with_context(|| format!("line {}", self.tokens[i].line))?;
            if !self.is(self.real_after(close), "{") {
                continue;
            }
            let kernel = self.tokens[name].text.clone();
            let arguments = self.arguments(open, close).with_context(|| format!("kernel {kernel}"))?;
            let before = self.real_before(i);
            let is_template = self.is(before, ">");
            // [[host_name("…")]] stands in front of a kernel that is no template.
            let host_name = before.filter(|&b| self.tokens[b].is("]")).and_then(|b| {
                (b.saturating_sub(16)..b).rev().find(|&j| self.tokens[j].kind == Kind::Text).map(|j| &self.tokens[j])
            });
            if !is_template {
                let host_name = host_name.map_or(kernel.clone(), |t| t.text.trim_matches('"').to_string());
                self.entries.push((host_name, kernel.clone(), arguments.clone()));
            }
            self.tokens[i].replace(if is_template { "inline" } else { "static" });
            self.parameters.insert(kernel, arguments);
        }
        Ok(())
    }

    /// What the parameters between two brackets are bound to.
    fn arguments(&self, open: usize, close: usize) -> Result<String> {
        let mut arguments = Vec::new();
        let mut next_buffer = 0;
        for (from, to) in self.parts(open + 1, close) {
            let attribute = (from..to).find(|&i| self.tokens[i].is("[["));
            let (name, index) = match attribute {
                Some(a) => self.attribute(a)?,
                None => ("buffer".to_string(), Some(next_buffer)),
            };
            arguments.push(match (name.as_str(), index) {
                ("buffer", Some(n)) => {
                    next_buffer = n + 1;
                    format!("::msl::Buffer{{ msl_call.buffers[{n}] }}")
                }
                ("threadgroup", Some(n)) => format!("::msl::Buffer{{ msl_call.threadgroup[{n}] }}"),
                (
                    "threadgroup_position_in_grid"
                    | "thread_position_in_threadgroup"
                    | "thread_position_in_grid"
                    | "threads_per_threadgroup"
                    | "threadgroups_per_grid"
                    | "threads_per_grid",
                    None,
                ) => format!("::msl::Position{{ msl_call.place->{name} }}"),
                (
                    "thread_index_in_threadgroup"
                    | "thread_index_in_simdgroup"
                    | "simdgroup_index_in_threadgroup"
                    | "simdgroups_per_threadgroup",
                    None,
                ) => format!("msl_call.place->{name}"),
                ("threads_per_simdgroup" | "thread_execution_width", None) => "::msl::LANES".to_string(),
                _ => bail!("line {}: [[{name}]] is not known here", self.tokens[from].line),
            });
        }
        Ok(arguments.join(", "))
    }

    /// `[[name]]` or `[[name(n)]]`
    fn attribute(&self, open: usize) -> Result<(String, Option<u32>)> {
        let line = self.tokens[open].line;
        let name = self.real_after(open).with_context(|| format!("line {line}: an attribute without a name"))?;
        let text = self.tokens[name].text.clone();
        let bracket = self.real_after(name).filter(|&b| self.tokens[b].is("("));
        let Some(number) = bracket.and_then(|b| self.real_after(b)) else { return Ok((text, None)) };
        let number = self.tokens[number].text.parse();
        Ok((text, Some(number.with_context(|| format!("line {line}: an index that is no number"))?)))
    }

    /// Where the parts between commas begin and end.
    fn parts(&self, from: usize, to: usize) -> Vec<(usize, usize)> {
        let (mut parts, mut start, mut i) = (Vec::new(), from, from);
        while i < to {
            match self.tokens[i].text.as_str() {
                "(" | "[" | "[[" | "{" | "<" => i = closing(&self.tokens, i).unwrap_or(i),
                "," => {
                    parts.push((start, i));
                    start = i + 1;
                }
                _ => {}
            }
            i += 1;
        }
        if next_real(&self.tokens, start).is_some_and(|n| n < to) {
            parts.push((start, to));
        }
        parts
    }

    /// `template [[host_name("x")]] kernel type name<arguments>;`
    fn instances(&mut self) -> Result<()> {
        for i in 0..self.tokens.len() {
            if !self.tokens[i].is("host_name") {
                continue;
            }
            let template = self.real_before(i).and_then(|o| self.real_before(o));
            let Some(start) = template.filter(|&t| self.tokens[t].is("template")) else { continue };
            let line = self.tokens[i].line;
            let end = self.statement_end(i).with_context(|| format!("line {line}: an instance without an end"))?;
            let text = (i..end).find(|&j| self.tokens[j].kind == Kind::Text);
            let kernel = (i..end)
                .find(|&j| self.parameters.contains_key(&self.tokens[j].text) && self.is(self.real_after(j), "<"));
            let (Some(text), Some(kernel)) = (text, kernel) else {
                bail!("line {line}: an instance of a kernel that is not known");
            };
            let angle = self.real_after(kernel).unwrap_or(kernel);
            let close = closing(&self.tokens, angle).with_context(|| format!("line {line}"))?;
            let call: String = self.text(kernel, close + 1).split_whitespace().collect::<Vec<_>>().join(" ");
            let name = self.tokens[text].text.trim_matches('"').to_string();
            self.entries.push((name, call, self.parameters[&self.tokens[kernel].text].clone()));
            self.blank(start, end);
        }
        Ok(())
    }

    /// `threadgroup T a[2], b;` in a function: storage, where `threadgroup T * p` is a pointer.
    fn threadgroup_variables(&mut self) -> Result<()> {
        let mut declarations = 0;
        for i in 0..self.tokens.len() {
            let begins = self.real_before(i).is_none_or(|b| [";", "{", "}", ")"].iter().any(|s| self.tokens[b].is(s)));
            if !self.tokens[i].is("threadgroup") || !begins {
                continue;
            }
            let Some(end) = self.statement_end(i) else { continue };
            let storage = !(i..end).any(|j| ["*", "&", "="].iter().any(|s| self.tokens[j].is(s)));
            if !storage {
                continue;
            }
            let mut statement = String::new();
            let mut kind = String::new();
            for (n, (from, to)) in self.parts(i + 1, end).into_iter().enumerate() {
                let dimensions = (from..to).find(|&j| self.tokens[j].is("[")).unwrap_or(to);
                let name = self.real_before(dimensions).filter(|&j| j >= from && self.tokens[j].kind == Kind::Name);
                let line = self.tokens[i].line;
                let name = name.with_context(|| format!("line {line}: threadgroup storage without a name"))?;
                if n == 0 {
                    kind = self.text(from, name);
                }
                let (variable, dimensions) = (&self.tokens[name].text, self.text(dimensions, to));
                declarations += 1;
                write!(
                    statement,
                    "typedef {} {variable}_shared{dimensions}; {variable}_shared & {variable} = \
                     ::msl::shared<{variable}_shared>({declarations});",
                    kind.trim()
                )?;
            }
            self.blank(i, end);
            self.tokens[i].replace(statement);
        }
        Ok(())
    }

    fn swizzles_and_halves(&mut self) {
        for i in 0..self.tokens.len() {
            let t = &self.tokens[i];
            if t.kind == Kind::Number {
                let is_half = !t.text.starts_with("0x") && t.text.ends_with(['h', 'H']);
                if is_half {
                    let digits = t.text[..t.text.len() - 1].to_string();
                    let dot = if digits.contains(['.', 'e', 'E']) { "" } else { "." };
                    self.tokens[i].replace(format!("half({digits}{dot}f)"));
                }
                continue;
            }
            let member = self.real_before(i).is_some_and(|b| self.tokens[b].is(".") || self.tokens[b].is("->"));
            let Some(places) = swizzle(&t.text).filter(|_| t.kind == Kind::Name && member) else { continue };
            let assigned = self
                .real_after(i)
                .is_some_and(|n| ["=", "+=", "-=", "*=", "/="].iter().any(|sign| self.tokens[n].is(sign)));
            let function = if assigned { "swizzle_ref" } else { "swizzle" };
            self.tokens[i].replace(format!("template {function}<{places}>()"));
        }
    }

    fn drop_attributes(&mut self) -> Result<()> {
        for i in 0..self.tokens.len() {
            if self.tokens[i].is("[[") {
                let close = closing(&self.tokens, i)
                    .with_context(|| format!("line {}: an attribute without an end", self.tokens[i].line))?;
                self.blank(i, close);
            }
        }
        Ok(())
    }

    fn address_spaces(&mut self) {
        for i in 0..self.tokens.len() {
            if self.tokens[i].kind != Kind::Name {
                continue;
            }
            match self.tokens[i].text.as_str() {
                "device" | "threadgroup" | "thread" | "kernel" => self.tokens[i].replace(""),
                "constant" => {
                    let twice = self.is(self.real_before(i), "const") || self.is(self.real_after(i), "const");
                    self.tokens[i].replace(if twice { "" } else { "const" });
                }
                _ => {}
            }
        }
    }
}

/// `zyx` -> `2, 1, 0`; one letter is a member.
fn swizzle(name: &str) -> Option<String> {
    let places: Option<Vec<String>> = name.chars().map(|c| "xyzw".find(c).map(|p| p.to_string())).collect();
    places.filter(|p| (2..=4).contains(&p.len())).map(|p| p.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(source: &str, wanted: &[&str]) {
        let squeeze = |s: &str| s.split_whitespace().collect::<Vec<_>>().join(" ");
        let text = squeeze(&translate(source, &[]).unwrap());
        for w in wanted {
            assert!(text.contains(&squeeze(w)), "{w}\nis not in\n{text}");
        }
    }

    #[test]
    fn kernels_get_entries() {
        has(
            "kernel void f(constant A & a [[buffer(2)]], device float * x, threadgroup half * s [[threadgroup(1)]],\n\
             uint3 p [[threadgroup_position_in_grid]], ushort l [[thread_index_in_simdgroup]]) { }",
            &[
                "static void f(const A & a , float * x, half * s",
                "f(::msl::Buffer{ msl_call.buffers[2] }, ::msl::Buffer{ msl_call.buffers[3] }, \
                 ::msl::Buffer{ msl_call.threadgroup[1] }, ::msl::Position{ msl_call.place->threadgroup_position_in_grid }, \
                 msl_call.place->thread_index_in_simdgroup)",
                "KernelEntry msl_entry_0_(\"f\", msl_entry_0)",
            ],
        );
        assert!(translate("kernel void f(uint x [[stage_in]]) {}", &[]).is_err());
        assert!(translate("kernel void f() {}", &["g"]).is_err());
    }

    #[test]
    fn instances_get_entries() {
        has(
            "template <int N, typename T> kernel void f(device T * x [[buffer(0)]]) {}\n\
             typedef decltype(f<1, float>) f_t;\n\
             template [[host_name(\"f_4\")]] kernel f_t f<4, vec<half, 4>>;",
            &[
                "inline void f",
                "{ f<4, vec<half, 4>>(::msl::Buffer{ msl_call.buffers[0] }); }",
                "(\"f_4\", msl_entry_0)",
            ],
        );
    }

    #[test]
    fn function_constants_are_variables_and_what_follows_is_a_function() {
        has(
            "constant int N [[function_constant(3)]]; constant int M = N/2; static const constant float t[2] = { 1, 2 };\n\
             constant bool B = is_function_constant_defined(N) && M; void f() { return M + N + B; }",
            &[
                "static int N; static ::msl::ConstantEntry N_entry(\"N\", 3, &N, ::msl::set_constant<int>);",
                "static inline int M() { return N/2; }",
                "static const float t[2] = { 1, 2 };",
                "static inline bool B() { return ::msl::constant_is_set(&N) && M(); }",
                "return M() + N + B();",
            ],
        );
    }

    #[test]
    fn threadgroup_storage_is_shared_and_pointers_are_not() {
        has(
            "void f() { threadgroup float a[2][3], b; threadgroup float4 * p = (threadgroup float4 *) a; }",
            &[
                "typedef float a_shared[2][3]; a_shared & a = ::msl::shared<a_shared>(1);",
                "typedef float b_shared; b_shared & b = ::msl::shared<b_shared>(2);",
                "float4 * p = ( float4 *) a;",
            ],
        );
    }

    #[test]
    fn members_and_literals() {
        has(
            "void f() { v.xy = p->zyx; v.x = 1.5h + 2h + 0x1h; v.yx += s.size; }",
            &[
                "v.template swizzle_ref<0, 1>() = p->template swizzle<2, 1, 0>();",
                "v.x = half(1.5f) + half(2.f) + 0x1h;",
                "v.template swizzle_ref<1, 0>() += s.size;",
            ],
        );
    }
}
