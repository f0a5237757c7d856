//! The shape of a model's caches, from its GGUF header: what llama.cpp's `load_hparams` and `create_memory` make of it.
//!
//! Most architectures keep K and V in every layer, with heads that may differ by layer. What is special is listed here by
//! architecture: sliding windows and their pattern, layers that are recurrent and keep a state instead, layers that use
//! another layer's K and V, caches beside the main one. Keys that an architecture does not read are not read here either:
//! files may have them.

use crate::error::Error;
use crate::gguf::Gguf;
use crate::guard::LayerWeights;
use crate::memory::{LayerShape, ModelShape};

/// How an architecture has sliding windows.
struct Sliding {
    arch: &'static str,
    window: Window,
    /// Of so many layers one is full: the last, or the first; 0: none is. A key or an array in the file says otherwise.
    pattern: usize,
    full_first: bool,
}

enum Window {
    /// What the file says; nothing, or 0, means none.
    Said,
    /// What the file says, otherwise this.
    SaidOr(usize),
    /// This, unless the file says nothing or 0.
    IfSaid(usize),
    /// This, unless the file says 0.
    Unless0(usize),
}

const fn sliding(arch: &'static str, window: Window, pattern: usize, full_first: bool) -> Sliding {
    Sliding { arch, window, pattern, full_first }
}

const SLIDING: [Sliding; 24] = [
    sliding("afmoe", Window::Said, 4, false),
    sliding("cohere2", Window::Said, 4, false),
    sliding("cohere2moe", Window::Said, 4, true),
    sliding("deepseek4", Window::Said, 0, false),
    sliding("dots3note", Window::Said, 1, false),
    sliding("exaone-moe", Window::SaidOr(128), 4, false),
    sliding("exaone4", Window::SaidOr(4096), 4, false),
    sliding("gemma2", Window::SaidOr(4096), 2, false),
    sliding("gemma3", Window::Said, 6, false),
    sliding("gemma3n", Window::Said, 5, false),
    sliding("gemma4", Window::Said, 1, false),
    sliding("gpt-oss", Window::Said, 2, false),
    sliding("granite_swa", Window::Said, 1, false),
    sliding("laguna", Window::Said, 4, true),
    sliding("llama4", Window::Unless0(8192), 4, false),
    sliding("maple", Window::Said, 1, false),
    sliding("mellum", Window::Said, 4, false),
    sliding("mimo2", Window::Said, 1, false),
    sliding("muse-glimmer", Window::Said, 4, false),
    sliding("olmo2", Window::Said, 4, false),
    sliding("plamo3", Window::Said, 8, false),
    sliding("smallthinker", Window::IfSaid(4096), 4, true),
    sliding("spark2_5", Window::Said, 1, false),
    sliding("step35", Window::Said, 1, false),
];

/// Architectures whose layers without KV heads keep a recurrent state.
const RECURRENT_WITHOUT_HEADS: [&str; 9] =
    ["jamba", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next"];

/// Those of which every so many layers one has attention.
const RECURRENT_BY_INTERVAL: [(&str, usize); 5] =
    [("qwen3next", 4), ("qwen35", 4), ("qwen35moe", 4), ("qwen4exp", 4), ("minimax-01", 8)];

const RECURRENT: [&str; 6] = ["mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"];

/// Encoders and models of diffusion: no cache.
const WITHOUT_MEMORY: &str = "bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert \
    gemma-embedding wavtokenizer-dec dream llada llada-moe rnd1 clip";

/// Whose cache is a part of another model's.
const DRAFTS: &str = "eagle3 dflash gemma4-assistant";

/// All others that llama.cpp knows: K and V in every layer.
const PLAIN: &str = "llama deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bloom stablelm qwen qwen2 qwen2moe \
    qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe phi2 phi3 phimoe plamo codeshell orion internlm2 minicpm minicpm3 gemma starcoder2 \
    xverse command-r dbrx olmo olmoe openelm arctic deepseek deepseek2 deepseek2-ocr deepseek32 chatglm glm4 glm4moe glm-dsa \
    bitnet t5 t5encoder jais jais2 nemotron exaone granite granitemoe graniteswitch chameleon plm bailingmoe bailingmoe2 dots1 \
    arcee ernie4_5 ernie4_5-moe hunyuan-moe hunyuan-dense hunyuan_vl hy_v3 hy_v4 smollm3 seed_oss grovemoe apertus hrm_text \
    minimax-m2 minimax-m3 cogvlm pangu-embedded mistral3 mistral4 paddleocr llama-embed maincoder talkie nanbeige qwen3tts \
    pockettts nemotron_h nemotron_h_moe falcon-h1";

/// Of numbers in a file that may be anything.
fn product(factors: &[usize]) -> usize {
    factors.iter().fold(1usize, |all, &n| all.saturating_mul(n)).min(1 << 48)
}

fn listed(list: &str, arch: &str) -> bool {
    list.split_whitespace().any(|name| name == arch)
}

impl Gguf {
    /// The shape of the model's caches, layer by layer, with what the guard looks at.
    ///
    /// # Errors
    /// Where the header lacks what llama.cpp needs, and for an architecture that is not known if its layers differ.
    pub fn shape(&self) -> Result<ModelShape, Error> {
        Header::of(self)?.shape()
    }

    /// Is its architecture one that this crate knows? The layers of others are taken to be all alike.
    pub fn architecture_is_known(&self) -> bool {
        let arch = self.architecture();
        [WITHOUT_MEMORY, DRAFTS, PLAIN].iter().any(|list| listed(list, arch))
            || RECURRENT.contains(&arch)
            || RECURRENT_WITHOUT_HEADS.contains(&arch)
            || RECURRENT_BY_INTERVAL.iter().any(|r| r.0 == arch)
            || SLIDING.iter().any(|s| s.arch == arch)
    }
}

/// The numbers that the caches follow from.
struct Header<'a> {
    file: &'a Gguf,
    arch: &'a str,
    /// With those that predict further tokens, which the main context has no cache for.
    all_layers: usize,
    layers: usize,
    embedding: usize,
    heads: Vec<usize>,
    kv_heads: Vec<usize>,
    /// Head sizes of K and V, and those of layers with a window.
    size: (usize, usize),
    window_size: (usize, usize),
    window: Option<usize>,
    slides: Vec<bool>,
    recurrent: Vec<bool>,
    mla: bool,
}

impl<'a> Header<'a> {
    fn of(file: &'a Gguf) -> Result<Header<'a>, Error> {
        let arch = file.architecture();
        if arch.is_empty() {
            return Err(Error::new("the file does not name an architecture (general.architecture): it is no model"));
        }
        if listed(DRAFTS, arch) {
            return Err(Error::new(format!(
                "{arch} is a draft model: its cache follows from the model that it drafts for"
            )));
        }
        if let Some((key, n)) = file.absurd() {
            return Err(Error::new(format!("the file says that {key} is {n}, which no model has")));
        }
        let need =
            |key: &str| file.number(key).ok_or_else(|| Error::new(format!("the file does not say {arch}.{key}")));
        let blocks = need("block_count")?;
        if blocks == 0 || blocks > 512 {
            return Err(Error::new(format!("{arch}.block_count is {blocks}: llama.cpp takes 1 to 512 layers")));
        }
        let embedding = need("embedding_length")?;
        let nextn = file.number("nextn_predict_layers").unwrap_or(0).min(blocks);
        let mut header = Header {
            file,
            arch,
            all_layers: blocks,
            layers: blocks - nextn,
            embedding,
            heads: vec![0; blocks],
            kv_heads: Vec::new(),
            size: (0, 0),
            window_size: (0, 0),
            window: None,
            slides: vec![false; blocks],
            // falcon-h1 has both in every layer.
            recurrent: vec![RECURRENT.contains(&arch) || arch == "falcon-h1"; blocks],
            mla: ["attention.key_length_mla", "attention.value_length_mla"]
                .iter()
                .all(|k| file.number(k).unwrap_or(0) > 0),
        };
        header.refuse_unknown()?;
        if let Some(heads) = header.per_layer("attention.head_count", blocks)? {
            header.heads = heads;
        }
        header.kv_heads = header.per_layer("attention.head_count_kv", blocks)?.unwrap_or_else(|| header.heads.clone());
        header.set_sizes();
        header.set_windows()?;
        header.set_recurrent()?;
        header.repeat_layers()?;
        Ok(header)
    }

    /// A plan for layers that are not understood would be wrong without anyone's notice.
    fn refuse_unknown(&self) -> Result<(), Error> {
        if self.file.architecture_is_known() {
            return Ok(());
        }
        const KEYS: [&str; 6] = [
            "attention.sliding_window",
            "attention.key_length_mla",
            "attention.indexer.key_length",
            "attention.recurrent_layers",
            "ssm.state_size",
            "attention.shared_kv_layers",
        ];
        let odd = KEYS.iter().find(|k| self.file.own(k).is_some() || self.file.own_ints(k).is_some());
        let arrays = ["attention.head_count", "attention.head_count_kv"];
        match odd.or_else(|| arrays.iter().find(|k| self.file.own_ints(k).is_some())) {
            None => Ok(()),
            Some(key) => Err(Error::new(format!(
                "architecture {0} is not known, and its layers differ ({0}.{key}): what they keep is not known",
                self.arch
            ))),
        }
    }

    /// A number for each layer: an array of as many, or one for all.
    fn per_layer(&self, key: &str, layers: usize) -> Result<Option<Vec<usize>>, Error> {
        let number = |n: i64| {
            usize::try_from(n)
                .ok()
                .filter(|&n| n <= 1 << 26)
                .ok_or_else(|| Error::new(format!("{}.{key} has the number {n}, which no model has", self.arch)))
        };
        match (self.file.own_ints(key), self.file.own(key)) {
            (Some(all), _) if all.len() != layers => {
                let (arch, n) = (self.arch, all.len());
                Err(Error::new(format!("{arch}.{key} has {n} numbers, the model has {layers} layers")))
            }
            (Some(all), _) => all.iter().map(|&n| number(n)).collect::<Result<_, _>>().map(Some),
            (None, Some(n)) => Ok(Some(vec![number(n)?; layers])),
            (None, None) => Ok(None),
        }
    }

    fn set_sizes(&mut self) {
        let said = |key: &str, or: usize| self.file.number(key).unwrap_or(or);
        let usual = self.embedding.checked_div(self.heads[0]);
        self.size = match usual {
            Some(usual) => (said("attention.key_length", usual), said("attention.value_length", usual)),
            None if self.arch == "plamo2" => (said("attention.key_length", 0), said("attention.value_length", 0)),
            None => (0, 0),
        };
        let (k, v) = self.size;
        self.window_size = (said("attention.key_length_swa", k), said("attention.value_length_swa", v));
    }

    fn set_windows(&mut self) -> Result<(), Error> {
        let said = self.file.number("attention.sliding_window");
        if let "lfm2" | "exaone4" = self.arch {
            self.window = said.filter(|&n| n > 0);
            if self.arch == "lfm2" {
                self.slides = self.kv_heads.iter().map(|&heads| self.window.is_some() && heads > 0).collect();
                return Ok(());
            }
            // Only the large one has windows; a number in the file of a small one is read all the same.
            if self.layers != 64 {
                return Ok(());
            }
        }
        let Some(rule) = SLIDING.iter().find(|s| s.arch == self.arch) else { return Ok(()) };
        self.window = match rule.window {
            Window::Said => said,
            Window::SaidOr(n) => Some(said.unwrap_or(n)),
            Window::IfSaid(n) => said.map(|s| s.min(1) * n),
            Window::Unless0(n) => Some(said.unwrap_or(1).min(1) * n),
        }
        .filter(|&n| n > 0);
        if self.window.is_none() {
            return Ok(());
        }
        const PATTERN: &str = "attention.sliding_window_pattern";
        // DeepSeek V4 has a window in every layer, whatever the file says.
        let said = |n: usize| if n == 0 { None } else { self.file.number(PATTERN) };
        if let Some(array) = self.file.own_ints(PATTERN).filter(|_| rule.pattern > 0) {
            self.slides.iter_mut().zip(array).for_each(|(slides, &n)| *slides = n != 0);
            return Ok(());
        }
        let pattern = said(rule.pattern).unwrap_or(rule.pattern);
        let full = if rule.full_first { 0 } else { pattern.saturating_sub(1) };
        for (i, slides) in self.slides.iter_mut().enumerate() {
            *slides = (i < self.layers || self.arch == "deepseek4") && (pattern == 0 || i % pattern != full);
        }
        Ok(())
    }

    fn set_recurrent(&mut self) -> Result<(), Error> {
        let layers = self.layers;
        if RECURRENT_WITHOUT_HEADS.contains(&self.arch) {
            self.recurrent = self.kv_heads.iter().enumerate().map(|(i, &heads)| i < layers && heads == 0).collect();
        } else if let "nemotron_h" | "nemotron_h_moe" = self.arch {
            let hidden = self.hidden()?;
            let recurrent = |i: usize| i < layers && self.kv_heads[i] == 0 && hidden[i] == 0;
            self.recurrent = (0..self.all_layers).map(recurrent).collect();
        } else if let Some((_, interval)) = RECURRENT_BY_INTERVAL.iter().find(|r| r.0 == self.arch) {
            let said = self.per_layer("attention.recurrent_layers", self.all_layers)?;
            let interval = self.file.number("full_attention_interval").unwrap_or(*interval).max(1);
            let usual = |i: usize| i < layers && !(i + 1).is_multiple_of(interval);
            self.recurrent = match said {
                Some(said) => said.iter().map(|&n| n != 0).collect(),
                None => (0..self.all_layers).map(usual).collect(),
            };
        }
        Ok(())
    }

    fn hidden(&self) -> Result<Vec<usize>, Error> {
        Ok(self.per_layer("feed_forward_length", self.all_layers)?.unwrap_or_else(|| vec![0; self.all_layers]))
    }

    /// Layers that are gone through several times have a cache for each time; a router has one of its own.
    fn repeat_layers(&mut self) -> Result<(), Error> {
        let times = if self.arch == "nanbeige" { self.file.number("num_loops").unwrap_or(1) } else { 1 };
        if times == 0 || times > 512 / self.all_layers {
            return Err(Error::new(format!(
                "{}.num_loops is {times}: llama.cpp takes up to 512 layers in all",
                self.arch
            )));
        }
        let router = usize::from(self.arch == "graniteswitch");
        self.layers = self.layers * times + router;
        self.all_layers = self.all_layers * times + router;
        self.kv_heads = self.kv_heads.repeat(times);
        self.kv_heads.resize(self.all_layers, 1);
        for flags in [&mut self.slides, &mut self.recurrent] {
            *flags = flags.repeat(times);
            flags.resize(self.all_layers, false);
        }
        Ok(())
    }

    fn shape(&self) -> Result<ModelShape, Error> {
        let mut shape = ModelShape { own_streams: self.arch == "deepseek4", ..ModelShape::default() };
        if listed(WITHOUT_MEMORY, self.arch) {
            return Ok(shape);
        }
        let hidden = self.hidden()?;
        for i in 0..self.all_layers {
            shape.layers.push(if self.keeps(i, &hidden) { self.layer(i) } else { LayerShape::new(0, 0) });
        }
        // Behind the model's own, only those that are kept count.
        let kept = shape.layers.iter().rposition(|l| l.kv_heads > 0).map_or(0, |last| last + 1);
        shape.layers.truncate(kept.max(self.layers));
        self.add_indexers(&mut shape)?;
        if self.arch == "deepseek4" {
            self.add_compressed(&mut shape)?;
        }
        self.add_states(&mut shape, &hidden)?;
        let caches = shape.layers.iter().chain(shape.beside.iter().map(|b| &b.1));
        if caches.into_iter().any(|l| l.kv_heads.saturating_mul(l.k_head_size + l.v_head_size) > 1 << 26) {
            return Err(Error::new("the file has a layer with more than 2^26 values of K and V, which no model has"));
        }
        shape.weights = (0..shape.layers.len()).map(|i| self.weights(i)).collect();
        Ok(shape)
    }

    /// Has the layer K and V of its own in the main context?
    fn keeps(&self, i: usize, hidden: &[usize]) -> bool {
        let own = match self.arch {
            "gemma3n" => i < 20,
            "gemma4" => {
                i < self.all_layers - self.file.number("attention.shared_kv_layers").unwrap_or(0).min(self.all_layers)
            }
            "nemotron_h" | "nemotron_h_moe" => !self.recurrent[i] && hidden[i] == 0,
            "falcon-h1" => true,
            _ => !self.recurrent[i],
        };
        // These have caches for the layers that predict, too.
        let all = ["minimax-m3", "hy_v4", "deepseek4", "nemotron_h", "nemotron_h_moe"].contains(&self.arch)
            || RECURRENT_WITHOUT_HEADS.contains(&self.arch) && self.arch != "glm5-next";
        own && (all || i < self.layers || self.layers == 0)
    }

    fn layer(&self, i: usize) -> LayerShape {
        let (k, v) = if self.slides[i] { self.window_size } else { self.size };
        let mut layer = LayerShape::new(self.kv_heads[i], k);
        layer.v_head_size = if self.mla || self.arch == "deepseek4" { 0 } else { v };
        layer.window = self.window.filter(|_| self.slides[i] || self.arch == "exaone4" && self.layers != 64);
        layer.keeps_all = !self.slides[i];
        layer
    }

    /// Keys by which an indexer chooses the cells to attend to.
    fn add_indexers(&self, shape: &mut ModelShape) -> Result<(), Error> {
        let number = |key: &str| self.file.number(key).unwrap_or(0);
        let mut size = number("attention.indexer.key_length");
        let types = self.per_layer("attention.indexer.types", self.layers);
        let full: Vec<bool> = match self.arch {
            "deepseek32" | "qwen4exp" => vec![true; self.layers],
            "minimax-m3" => (0..self.all_layers).map(|i| i >= number("leading_dense_block_count")).collect(),
            "hy_v4" if number("attention.indexer.top_k") == 0 => return Ok(()),
            "hy_v4" | "dots3note" => types?.unwrap_or_default().iter().map(|&n| n != 0).collect(),
            "glm5-next" => types?.map_or(vec![true; self.layers], |t| t.iter().map(|&n| n != 0).collect()),
            "glm-dsa" => match types? {
                Some(types) => types.iter().map(|&n| n != 0).collect(),
                // Files of before there were types: GLM 5.2 is known by its context.
                None if number("context_length") >= 1 << 20 => {
                    (0..self.layers).map(|i| i < 78 && (i < 2 || i % 4 == 2)).collect()
                }
                None => vec![true; self.layers],
            },
            _ => return Ok(()),
        };
        if number("attention.indexer.kpool") > 0 && self.arch == "glm5-next" {
            size *= 3;
        }
        for i in (0..full.len()).filter(|&i| full[i] && (!self.recurrent[i])) {
            let mut layer = LayerShape::new(1, size);
            layer.indexer = true;
            layer.v_head_size = if self.arch == "minimax-m3" { self.size.1 } else { 0 };
            shape.beside.push((i, layer));
        }
        Ok(())
    }

    /// DeepSeek V4 keeps a window of each layer, and of some layers one cell for 4 or for 128 tokens beside it.
    fn add_compressed(&self, shape: &mut ModelShape) -> Result<(), Error> {
        let ratios = self.file.own_ints("attention.compress_ratios").unwrap_or_default();
        if ratios.len() < self.all_layers {
            return Err(Error::new("deepseek4.attention.compress_ratios has fewer numbers than there are layers"));
        }
        let probe = format!("blk.{}.nextn.eh_proj.weight", self.layers);
        let with_state = if self.file.has_tensor(&probe) { self.layers } else { self.all_layers };
        let indexer = self.file.number("attention.indexer.key_length").unwrap_or(0);
        for (i, &ratio) in ratios.iter().enumerate().take(self.all_layers).filter(|(_, r)| [4, 128].contains(*r)) {
            let tokens = ratio as usize;
            let mut layer = LayerShape::new(self.kv_heads[i], self.window_size.0);
            (layer.v_head_size, layer.tokens_per_cell) = (0, tokens);
            shape.beside.push((i, layer));
            // Floats of what is not yet a whole cell, and of its weights: two rows of cells where neighbours overlap.
            let state = |size: usize, rows: usize| [4 * product(&[size, rows]) as u64; 2];
            if tokens == 4 {
                (layer.kv_heads, layer.k_head_size, layer.indexer) = (1, indexer, true);
                shape.beside.push((i, layer));
            }
            match tokens {
                _ if i >= with_state => {}
                4 => [self.window_size.0, indexer].iter().for_each(|&size| shape.states.extend(state(2 * size, 8))),
                _ => shape.states.extend(state(self.window_size.0, tokens)),
            }
        }
        Ok(())
    }

    /// What recurrent layers keep of a sequence: floats of a convolution's past, and of the state.
    fn add_states(&self, shape: &mut ModelShape, hidden: &[usize]) -> Result<(), Error> {
        if !self.recurrent.contains(&true) {
            return Ok(());
        }
        let number = |key: &str| self.file.number(key).unwrap_or(0);
        let (conv, kda, head) = (number("ssm.conv_kernel"), number("kda.head_dim"), self.heads[0]);
        let (past, state) = match self.arch {
            "rwkv6" | "rwkv6qwen2" | "rwkv7" | "arwkv7" => {
                let shifts = self.file.number("token_shift_count").unwrap_or(2);
                (product(&[shifts, self.embedding]), product(&[self.embedding, number("wkv.head_size")]))
            }
            "lfm2" | "lfm2moe" => (self.embedding * number("shortconv.l_cache").saturating_sub(1), 0),
            "kimi-linear" | "bailingmoe3" | "kimi-k3" | "glm5-next" => {
                (product(&[3, conv.checked_sub(1).unwrap_or(3), head, kda]), product(&[kda, kda, head]))
            }
            "minimax-01" => (0, product(&[self.size.0, self.size.0, head])),
            _ => {
                let (inner, states) = (number("ssm.inner_size"), number("ssm.state_size"));
                let groups = if let "mamba" | "jamba" = self.arch { 0 } else { number("ssm.group_count") };
                (product(&[conv.saturating_sub(1), inner + product(&[2, groups, states])]), product(&[states, inner]))
            }
        };
        // qwen4exp: the past of embeddings by n-gram.
        let hashed = self.file.own_ints("ple.layers").filter(|_| self.arch == "qwen4exp").unwrap_or_default();
        let past_rows =
            [number("ple.conv_kernel").saturating_sub(1), number("ple.ngram_size"), number("hyper_connection.count")];
        for i in (0..self.layers).filter(|&i| self.recurrent[i]) {
            if self.arch.starts_with("nemotron_h") && hidden[i] != 0 {
                continue;
            }
            shape.states.extend([past, state].map(|n| 4 * n as u64));
            if hashed.contains(&(i as i64)) {
                shape.states.push(4 * product(&[&past_rows[..], &[self.embedding]].concat()) as u64);
            }
        }
        Ok(())
    }

    /// What the guard looks at: as ggml_ext_layer_weights of the shim.
    fn weights(&self, i: usize) -> LayerWeights {
        let mut weights = LayerWeights { scale: self.scale(), ..LayerWeights::default() };
        if self.mla {
            return weights;
        }
        let read = |name: &str| self.file.floats(&format!("blk.{i}.{name}"));
        let size = if self.slides[i] { self.window_size.0 } else { self.size.0 };
        let n_k = product(&[size, self.kv_heads[i]]);
        let first = product(&[size, self.heads.get(i).copied().unwrap_or(0)]);
        if let Some(bias) = read("attn_qkv.bias") {
            weights.k_bias = bias.get(first..first + n_k).unwrap_or_default().to_vec();
        } else if let Some(bias) = read("attn_k.bias").filter(|b| b.len() == n_k) {
            weights.k_bias = bias;
        }
        if let Some((q, k)) = read("attn_q_norm.weight").zip(read("attn_k_norm.weight")) {
            (weights.q_norm, weights.k_norm) = (q, k);
        }
        weights
    }

    /// What scores are multiplied by, where the architecture says so; 0: one over the root of the head size.
    fn scale(&self) -> f32 {
        let root = |n: usize| 1.0 / (n as f32).sqrt();
        match self.arch {
            "gemma2" if self.layers == 46 => root(self.embedding / self.heads[0].max(1)),
            "gemma3" if self.layers == 62 => root(self.embedding / self.heads[0].max(1)),
            "gemma2" | "gemma3" => root(self.size.0),
            "gemma3n" | "gemma4" => 1.0,
            arch if arch.starts_with("granite") => self.file.own_float("attention.scale").unwrap_or(0.0),
            _ => 0.0,
        }
    }
}
