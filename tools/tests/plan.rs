//! `cargo kv plan` on headers of large models, whose caches are computed by hand here.

use std::path::PathBuf;

use ggml_ext::{ContextShape, Gguf};
use kv::plan::Model;

/// A GGUF file without weights, in the making.
struct Header {
    values: Vec<u8>,
    n_values: u64,
    tensors: Vec<u8>,
    n_tensors: u64,
    arch: &'static str,
}

const F32: u32 = 0;
const F16: u32 = 1;

fn text(s: &str) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes(), s.as_bytes()].concat()
}

impl Header {
    fn new(arch: &'static str, numbers: &[(&str, u32)]) -> Header {
        let mut header = Header { values: Vec::new(), n_values: 0, tensors: Vec::new(), n_tensors: 0, arch };
        header.value("general.architecture", 8, &text(arch));
        // A vocabulary, which is skipped.
        let tokens = [&8u32.to_le_bytes()[..], &2u64.to_le_bytes(), &text("a"), &text("bc")].concat();
        header.value("tokenizer.ggml.tokens", 9, &tokens);
        numbers.iter().for_each(|(key, n)| header.number(key, *n));
        header
    }

    fn value(&mut self, key: &str, kind: u32, bytes: &[u8]) {
        self.values.extend([&text(key), &kind.to_le_bytes()[..], bytes].concat());
        self.n_values += 1;
    }

    fn number(&mut self, key: &str, n: u32) {
        self.value(&format!("{}.{key}", self.arch), 4, &n.to_le_bytes());
    }

    fn numbers(&mut self, key: &str, all: &[u32]) {
        let all: Vec<u8> = all.iter().flat_map(|n| n.to_le_bytes()).collect();
        let n = all.len() as u64 / 4;
        self.value(&format!("{}.{key}", self.arch), 9, &[&4u32.to_le_bytes()[..], &n.to_le_bytes(), &all].concat());
    }

    /// Of f16, or of f32 where it is a vector.
    fn tensor(&mut self, name: &str, shape: &[u64]) {
        let kind = if shape.len() == 1 { F32 } else { F16 };
        let shape_bytes: Vec<u8> = shape.iter().flat_map(|n| n.to_le_bytes()).collect();
        let n = shape.len() as u32;
        self.tensors.extend([&text(name), &n.to_le_bytes()[..], &shape_bytes, &kind.to_le_bytes(), &[0; 8]].concat());
        self.n_tensors += 1;
    }

    fn layers(&mut self, layers: std::ops::Range<u64>, tensors: &[(&str, &[u64])]) {
        for i in layers {
            tensors.iter().for_each(|(name, shape)| self.tensor(&format!("blk.{i}.{name}"), shape));
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let counts = [self.n_tensors.to_le_bytes(), self.n_values.to_le_bytes()].concat();
        [b"GGUF", &3u32.to_le_bytes()[..], &counts, &self.values, &self.tensors].concat()
    }

    fn model(&self) -> Model {
        let file = File::new(&format!("{}.gguf", self.arch), &self.bytes());
        Model::open(&file.0).unwrap()
    }
}

/// In the folder that cargo gives to tests.
struct File(PathBuf);

impl File {
    fn new(name: &str, bytes: &[u8]) -> File {
        let name = format!("{:?}-{name}", std::thread::current().id());
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&path, bytes).unwrap();
        File(path)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn cache(model: &Model, k: &str, v: &str, cells: usize, sequences: usize) -> u64 {
    let mut context = ContextShape::new(cells);
    context.sequences = sequences;
    model.cache(&context, k.parse().unwrap(), v.parse().unwrap()).unwrap().bytes()
}

fn llama3_70b() -> Header {
    let mut header = Header::new(
        "llama",
        &[
            ("block_count", 80),
            ("context_length", 8192),
            ("embedding_length", 8192),
            ("feed_forward_length", 28672),
            ("attention.head_count", 64),
            ("attention.head_count_kv", 8),
        ],
    );
    header.tensor("token_embd.weight", &[8192, 128256]);
    header.tensor("output.weight", &[8192, 128256]);
    header.tensor("output_norm.weight", &[8192]);
    header.layers(
        0..80,
        &[
            ("attn_q.weight", &[8192, 8192]),
            ("attn_k.weight", &[8192, 1024]),
            ("attn_v.weight", &[8192, 1024]),
            ("attn_output.weight", &[8192, 8192]),
            ("ffn_gate.weight", &[8192, 28672]),
            ("ffn_up.weight", &[8192, 28672]),
            ("ffn_down.weight", &[28672, 8192]),
            ("attn_norm.weight", &[8192]),
            ("ffn_norm.weight", &[8192]),
        ],
    );
    header
}

#[test]
fn llama_3_70b() {
    let model = llama3_70b().model();
    // 70,553,706,496 weights, of which 161 norms of 8192 are floats.
    assert_eq!(model.weights, 70_553_706_496 * 2 + 161 * 8192 * 2);
    assert_eq!(model.file.weight_bytes_per_token().unwrap(), model.weights - 128256 * 8192 * 2);
    // 80 layers, 8 heads, K and V: 256 bytes of f16, 68 of srft4, 136 for a recent cell.
    let rows = 80 * 8 * 2;
    assert_eq!(cache(&model, "f16", "f16", 8192, 1), 8192 * rows * 256);
    assert_eq!(cache(&model, "srft4", "srft4", 8192, 1), 8192 * rows * 68 + 129 * rows * 136);
    // 4 sequences of 2048 cells each, with slots for one in sixteen.
    assert_eq!(cache(&model, "srft4", "srft4", 8192, 4), 8192 * rows * 68 + 4 * 129 * rows * 136);
}

#[test]
fn deepseek_v3() {
    let mut header = Header::new(
        "deepseek2",
        &[
            ("block_count", 61),
            ("context_length", 163840),
            ("embedding_length", 7168),
            ("feed_forward_length", 18432),
            ("leading_dense_block_count", 3),
            ("expert_count", 256),
            ("expert_used_count", 8),
            ("attention.head_count", 128),
            ("attention.head_count_kv", 1),
            ("attention.key_length", 576),
            ("attention.value_length", 512),
            ("attention.key_length_mla", 192),
            ("attention.value_length_mla", 128),
            ("attention.kv_lora_rank", 512),
        ],
    );
    header.tensor("token_embd.weight", &[7168, 129280]);
    header.tensor("output.weight", &[7168, 129280]);
    let attention: [(&str, &[u64]); 6] = [
        ("attn_q_a.weight", &[7168, 1536]),
        ("attn_q_b.weight", &[1536, 24576]),
        ("attn_kv_a_mqa.weight", &[7168, 576]),
        ("attn_k_b.weight", &[128, 512, 128]),
        ("attn_v_b.weight", &[512, 128, 128]),
        ("attn_output.weight", &[16384, 7168]),
    ];
    header.layers(0..61, &attention);
    header.layers(
        0..3,
        &[("ffn_gate.weight", &[7168, 18432]), ("ffn_up.weight", &[7168, 18432]), ("ffn_down.weight", &[18432, 7168])],
    );
    let experts: [(&str, &[u64]); 7] = [
        ("ffn_gate_inp.weight", &[7168, 256]),
        ("ffn_gate_exps.weight", &[7168, 2048, 256]),
        ("ffn_up_exps.weight", &[7168, 2048, 256]),
        ("ffn_down_exps.weight", &[2048, 7168, 256]),
        ("ffn_gate_shexp.weight", &[7168, 2048]),
        ("ffn_up_shexp.weight", &[7168, 2048]),
        ("ffn_down_shexp.weight", &[2048, 7168]),
    ];
    header.layers(3..61, &experts);
    let model = header.model();
    // 671 billion weights, 37 of them for a token, without norms.
    let experts = 58 * 3 * 7168 * 2048 * 2;
    assert_eq!(model.weights / 2, 671_025_397_760);
    assert_eq!(model.file.weight_bytes_per_token().unwrap(), model.weights - 129280 * 7168 * 2 - 248 * experts);
    // A latent of 576 a layer, and V is a view of it.
    assert_eq!(cache(&model, "f16", "f16", 131072, 1), 61 * 576 * 2 * 131072);
    assert_eq!(cache(&model, "srft4", "srft4", 131072, 1), 61 * (306 * 131072 + 612 * 129));
    let refused = model.cache(&ContextShape::new(4096), "delta4".parse().unwrap(), "srft4".parse().unwrap());
    assert!(refused.unwrap_err().to_string().contains("one type for both"));
}

#[test]
fn gemma_3_27b() {
    let numbers = [
        ("block_count", 62),
        ("context_length", 131072),
        ("embedding_length", 5376),
        ("feed_forward_length", 21504),
        ("attention.head_count", 32),
        ("attention.head_count_kv", 16),
        ("attention.key_length", 128),
        ("attention.value_length", 128),
        ("attention.sliding_window", 1024),
    ];
    let model = Header::new("gemma3", &numbers).model();
    // Every sixth layer is full: 5, 11, … 59. The others have a window of 1024 tokens and room for a batch of 512.
    let cell = 16 * 2 * 128 * 2;
    assert_eq!(cache(&model, "f16", "f16", 131072, 1), (10 * 131072 + 52 * 1536) * cell);
    assert_eq!(cache(&model, "f16", "f16", 131072, 4), (10 * 131072 + 52 * 4 * 1536) * cell);
    let mut shared = ContextShape::new(131072);
    (shared.sequences, shared.unified) = (4, true);
    let f16 = "f16".parse().unwrap();
    // 4 · 1024 + 512 cells, a multiple of 256.
    assert_eq!(model.cache(&shared, f16, f16).unwrap().bytes(), (10 * 131072 + 52 * 4608) * cell);
    shared.full_windows = true;
    assert_eq!(model.cache(&shared, f16, f16).unwrap().bytes(), 62 * 131072 * cell);
}

#[test]
fn qwen3_30b_a3b() {
    let numbers = [
        ("block_count", 48),
        ("context_length", 40960),
        ("embedding_length", 2048),
        ("expert_feed_forward_length", 768),
        ("expert_count", 128),
        ("expert_used_count", 8),
        ("attention.head_count", 32),
        ("attention.head_count_kv", 4),
        ("attention.key_length", 128),
        ("attention.value_length", 128),
    ];
    let model = Header::new("qwen3moe", &numbers).model();
    // Heads of 128, though 2048 / 32 is 64.
    assert_eq!(cache(&model, "f16", "f16", 40960, 1), 48 * 4 * 2 * 256 * 40960);
    assert_eq!(cache(&model, "delta4", "srft4", 40960, 1), 48 * 4 * ((72 + 68) * 40960 + 2 * 136 * 129));
}

#[test]
fn gpt_oss_120b() {
    let numbers = [
        ("block_count", 36),
        ("context_length", 131072),
        ("embedding_length", 2880),
        ("expert_feed_forward_length", 2880),
        ("expert_count", 128),
        ("expert_used_count", 4),
        ("attention.head_count", 64),
        ("attention.head_count_kv", 8),
        ("attention.key_length", 64),
        ("attention.value_length", 64),
        ("attention.sliding_window", 128),
    ];
    let model = Header::new("gpt-oss", &numbers).model();
    // Every other layer has a window of 128: 128 + 512 cells, rounded up to 768.
    assert_eq!(cache(&model, "f16", "f16", 131072, 1), 18 * (131072 + 768) * 8 * 2 * 128);
    // Recent cells: 128 of the full layers, one in sixteen, 48, of the others.
    assert_eq!(cache(&model, "srft4", "srft4", 131072, 1), 18 * 8 * 2 * ((131072 + 768) * 34 + (129 + 49) * 68));
}

#[test]
fn heads_that_differ_by_layer() {
    let mut header = Header::new("deci", &[("block_count", 4), ("context_length", 4096), ("embedding_length", 1024)]);
    header.number("attention.head_count", 8);
    header.numbers("attention.head_count_kv", &[8, 0, 4, 1]);
    assert_eq!(cache(&header.model(), "f16", "f16", 1024, 1), 13 * 2 * 256 * 1024);
    header.arch = "deci2";
    header.value("general.architecture", 8, &text("deci2"));
    for (key, n) in [("block_count", 4), ("embedding_length", 1024), ("attention.head_count", 8)] {
        header.number(key, n);
    }
    let plain = header.model();
    assert!(!plain.file.architecture_is_known() && cache(&plain, "f16", "f16", 1024, 1) == 4 * 8 * 2 * 256 * 1024);
    header.numbers("attention.head_count_kv", &[8, 0, 4, 1]);
    let file = File::new("deci2.gguf", &header.bytes());
    let e = format!("{:#}", Model::open(&file.0).err().unwrap());
    assert!(e.contains("architecture deci2 is not known") && e.contains("head_count_kv"), "{e}");
}

#[test]
fn files_that_cannot_be_read() {
    let error = |name: &str, bytes: &[u8]| {
        let file = File::new(name, bytes);
        Gguf::open(&file.0).unwrap_err().to_string()
    };
    let whole = llama3_70b().bytes();
    assert!(error("text", b"Once upon a time").contains("not a GGUF file"));
    assert!(error("empty", b"").contains("not a GGUF file"));
    assert!(error("version", b"GGUF\x09\0\0\0").contains("version 9"));
    for end in (5..whole.len()).step_by(whole.len() / 50) {
        let e = error("cut", &whole[..end]);
        assert!(e.contains("truncated"), "{end}: {e}");
    }
    let huge = [b"GGUF", &3u32.to_le_bytes()[..], &[0xff; 16]].concat();
    assert!(error("huge", &huge).contains("truncated"));
    let short = Header::new("llama", &[("block_count", 2)]);
    let file = File::new("short.gguf", &short.bytes());
    let e = format!("{:#}", Model::open(&file.0).err().unwrap());
    assert!(e.contains("llama.embedding_length"), "{e}");
    assert!(Gguf::open("no/such/file.gguf".as_ref()).unwrap_err().to_string().contains("cannot read"));
}
