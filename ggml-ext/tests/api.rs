//! The names that programs depend on, and their signatures: none changes or goes away without a new version of the crate.
//!
//! tests/api/ has a list for the version of today. The interface is small and lies in seven modules that write it plainly,
//! so the list is read from their text; a compiler that could say it (rustdoc's JSON) is a nightly one. What the list says
//! is used below as programs use it, so that text that does not mean what it seems to does not compile.

use std::fs;
use std::path::Path;

use ggml_ext::{attend, cache_bytes, decode, encode, largest_context};
use ggml_ext::{AttendOptions, Cache, CacheSize, ContextShape, Error, Gguf, KvType, LayerShape, ModelShape};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const MODULES: [&str; 7] = ["attend", "cache", "error", "gguf", "kv_type", "memory", "shape"];

/// What others see of a module: items, fields and methods that are `pub`, traits, and what is derived. One a line.
fn surface(source: &str) -> Vec<String> {
    let source = source.split("#[cfg(test)]\nmod tests").next().unwrap_or(source);
    let (mut found, mut owner, mut before) = (Vec::new(), String::new(), Vec::new());
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        let text = line.trim();
        if text.starts_with("#[derive") || text == "#[non_exhaustive]" {
            before.push(text.to_string());
            continue;
        }
        let starts = |word: &str| text.starts_with(word);
        if !(starts("pub ") || starts("impl") || starts("enum ") || starts("struct ")) {
            continue;
        }
        // A signature goes on to its body, its end, or the comma behind a field.
        let mut item = text.to_string();
        while !item.ends_with(['{', ';', ',', '}']) || item.matches('(').count() > item.matches(')').count() {
            let Some(more) = lines.next() else { break };
            item = item + " " + more.trim();
        }
        let head = item.trim_end_matches("{}").trim_end_matches(['{', ';', ',']).trim();
        let value = if starts("pub const ") { head.find(" = ") } else { None };
        let head = head[..value.unwrap_or(head.len())].replace("( ", "(").replace(", )", ")");
        if let Some(of) = head.strip_prefix("impl ") {
            owner = of.to_string();
            if head.contains(" for ") {
                found.push(head);
            }
        } else if let Some(visible) = head.strip_prefix("pub ") {
            let attributes: String = before.drain(..).map(|a| a + " ").collect();
            if line.starts_with("pub ") {
                // What a tuple holds is nobody's business.
                let visible = visible.split('(').next().filter(|_| visible.starts_with("struct ")).unwrap_or(visible);
                found.push(format!("{attributes}{visible}"));
                owner = visible.split(' ').nth(1).unwrap_or_default().to_string();
            } else {
                found.push(format!("{owner}::{visible}"));
            }
        }
        before.clear();
    }
    found
}

fn today() -> String {
    let read = |path: &str| fs::read_to_string(Path::new(ROOT).join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    let mut list = String::new();
    for line in read("src/lib.rs").lines().filter(|l| l.starts_with("pub use ")) {
        list += &format!("{line}\n");
    }
    for module in MODULES {
        list += &format!("\n{module}\n");
        for item in surface(&read(&format!("src/{module}.rs"))) {
            list += &format!("    {item}\n");
        }
    }
    list
}

#[test]
fn names_and_signatures_are_those_of_this_version() {
    let version = concat!(env!("CARGO_PKG_VERSION_MAJOR"), ".", env!("CARGO_PKG_VERSION_MINOR"));
    let path = Path::new(ROOT).join(format!("tests/api/{version}.txt"));
    let (kept, today) = (fs::read_to_string(&path).unwrap_or_default().replace('\r', ""), today());
    if kept == today {
        return;
    }
    let other = |a: &str, b: &str| a.lines().filter(|l| !b.lines().any(|m| m == *l)).collect::<Vec<_>>().join("\n");
    let now = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{version}.txt"));
    fs::write(&now, &today).expect("cargo's own folder for this");
    panic!(
        "\nthe interface of version {version} is another.\n\ngone:\n{}\n\nnew:\n{}\n\nPrograms break over what is gone: that needs \
         another version in Cargo.toml. What is only new needs a new list: today's is in\n{}\n",
        other(&kept, &today),
        other(&today, &kept),
        now.display()
    );
}

/// Each function by the type that it has for its callers.
#[test]
fn functions_are_what_the_list_says() {
    type Result<T> = std::result::Result<T, Error>;
    type Attend = fn(&[f32], usize, &Cache, &Cache, usize, &AttendOptions) -> Result<Vec<f32>>;
    let _: Attend = attend;
    let _: fn(KvType, usize, &[f32]) -> Result<Vec<u8>> = encode;
    let _: fn(KvType, usize, &[u8]) -> Result<Vec<f32>> = decode;
    let _: fn(&ModelShape, usize, KvType, KvType) -> Result<u64> = cache_bytes;
    let _: fn(&ModelShape, u64, KvType, KvType) -> Result<usize> = largest_context;
    let _: fn(KvType, usize, usize, usize) -> Result<Cache> = Cache::new;
    let _: fn(KvType, usize, usize, Vec<u8>) -> Result<Cache> = Cache::from_bytes;
    let _: fn(&mut Cache, usize, &[f32]) -> Result<()> = Cache::write;
    let _: fn(&Cache, usize) -> Result<Vec<f32>> = Cache::read;
    let _: fn(&Cache) -> &[u8] = Cache::as_bytes;
    let _: [fn(&Cache) -> usize; 3] = [Cache::head_size, Cache::heads, Cache::cells];
    let _: fn(&Cache) -> KvType = Cache::kind;
    let _: fn(i32) -> Option<KvType> = KvType::from_id;
    let _: fn(KvType) -> i32 = KvType::id;
    let _: [fn(KvType) -> bool; 3] = [KvType::is_ours, KvType::serves_k, KvType::serves_v];
    let _: fn(KvType, usize, usize, bool) -> KvType = KvType::for_layer;
    let _: fn(KvType) -> Vec<usize> = KvType::head_sizes;
    let _: fn(KvType, usize) -> bool = KvType::serves_head_size;
    let _: fn(KvType, usize) -> Option<usize> = KvType::row_bytes;
    let _: fn(KvType, usize) -> Option<f64> = KvType::bits_per_value;
    let _: fn(KvType, usize) -> Option<KvType> = KvType::at;
    let _: fn(usize, usize) -> LayerShape = LayerShape::new;
    let _: fn(usize, usize, usize) -> ModelShape = ModelShape::uniform;
    let _: fn(Vec<LayerShape>) -> ModelShape = ModelShape::from_layers;
    let _: fn(&ModelShape) -> bool = ModelShape::shares_rows;
    let _: fn(usize) -> ContextShape = ContextShape::new;
    let _: fn(&ModelShape, &ContextShape, KvType, KvType) -> Result<CacheSize> = CacheSize::of;
    let _: fn(&CacheSize) -> u64 = CacheSize::bytes;
    let _: fn(&CacheSize) -> f64 = CacheSize::bits_per_value;
    let _: fn(&Path) -> Result<Gguf> = Gguf::open;
    let _: fn(&Gguf) -> Result<ModelShape> = Gguf::shape;
    let _: [fn(&Gguf) -> Result<u64>; 2] = [Gguf::weight_bytes, Gguf::weight_bytes_per_token];
    let _: [fn(&Gguf, &str) -> Option<usize>; 2] = [Gguf::number, Gguf::largest_number];
    // What threads and maps ask of them.
    fn plain<T: Clone + std::fmt::Debug + Send + Sync + 'static>() {}
    let _: [fn(); 5] = [plain::<KvType>, plain::<Cache>, plain::<Error>, plain::<ModelShape>, plain::<LayerShape>];
    let _: [fn(); 3] = [plain::<Gguf>, plain::<ContextShape>, plain::<CacheSize>];
    fn value<T: Copy + Eq + std::hash::Hash + std::fmt::Display + std::str::FromStr<Err = Error>>() {}
    let _: fn() = value::<KvType>;
    fn number<T: From<KvType>>() {}
    let _: [fn(); 2] = [number::<u32>, number::<i32>];
    fn error<T: std::error::Error>() {}
    let _: fn() = error::<Error>;
}
