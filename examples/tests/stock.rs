//! With an f16 cache, ours is the original: the same tokens. `cargo kv test --only wrapper` runs the original first.

#[path = "../../tests/wrapper/tokens.rs"]
mod tokens;

mod common;

#[test]
fn f16_gives_the_tokens_of_the_original_crate() {
    let want = std::env::var("KV_STOCK_TOKENS").expect("KV_STOCK_TOKENS: what tests/wrapper/stock prints");
    let prompt = std::env::var("KV_STOCK_PROMPT").expect("KV_STOCK_PROMPT: what it was asked");
    let want: Vec<i32> = want.split(',').map(|t| t.parse().expect("tokens are numbers")).collect();
    assert!(want.len() >= 16, "too few tokens to compare");
    let model = common::options().model;
    assert_eq!(tokens::greedy(model.to_str().unwrap(), &prompt, want.len()), want);
}
