//! The patches of this project against the two trees that it is for.

use kv::patch::{self, Outcome, Patch};
use kv::source::{self, Source, Tree};

fn patches() -> Vec<Patch> {
    patch::load(&kv::project_root().join("patches")).expect("patches/ can be read")
}

#[test]
fn a_patch_is_a_seam_not_a_home() {
    let added: usize = patches().iter().map(|p| p.added).sum();
    assert!(added < 400, "the patches add {added} lines together; they must stay under 400");
}

#[test]
fn every_patch_has_its_reason_on_top_and_a_number() {
    for p in patches() {
        assert!(p.prose.split_whitespace().count() >= 8, "{} begins without a reason", p.name);
        assert!(p.name.len() > 5 && p.name[..4].bytes().all(|b| b.is_ascii_digit()), "{} has no number", p.name);
    }
}

fn fits(tree: Tree, may_skip: bool) {
    let dir = source::pristine(&Source::Pinned(tree)).expect("the tree can be fetched");
    let patches = patches();
    let outcomes = patch::plan(&dir, &patches).expect("the patches can be tried").outcomes;
    for (p, outcome) in patches.iter().zip(outcomes) {
        match outcome {
            Outcome::Applies => {}
            Outcome::Skipped(_) if may_skip => {}
            other => panic!("{}: {other}: {other:?}", p.name),
        }
    }
}

#[test]
fn they_fit_the_full_tree() {
    fits(Tree::Full, false);
}

#[test]
fn they_fit_the_tree_of_the_crate() {
    fits(Tree::Crate, true);
}
