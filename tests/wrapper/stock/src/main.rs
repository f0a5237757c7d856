//! Prints the tokens that the original llama-cpp-sys-2 gives: `stock-tokens MODEL PROMPT N`.

#[path = "../../tokens.rs"]
mod tokens;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let [_, model, prompt, n] = &args[..] else { panic!("stock-tokens MODEL PROMPT N") };
    let found = tokens::greedy(model, prompt, n.parse().expect("a number of tokens"));
    println!("{}", found.iter().map(ToString::to_string).collect::<Vec<_>>().join(","));
}
