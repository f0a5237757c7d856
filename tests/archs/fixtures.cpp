// llama.cpp's test is a program of one file whose fixtures are its own: it is compiled in as it is, with another name for its
// main. So a tree that brings a new architecture brings its fixture too.

#include "fixtures.h"

#define main upstream_main
#include "test-llama-archs.cpp"
#undef main

namespace {

// Three times upstream's: with its own weights all scores are nearly the same, and what is wrong with keys does not show.
constexpr float STDEV = 0.3f;

bool has_key(const gguf_context * gguf, const std::string & key) {
    return gguf_find_key(gguf, key.c_str()) >= 0;
}

gguf_context_ptr gguf_of(llm_arch arch, bool moe) {
    gguf_context_ptr res = get_gguf_ctx(arch, moe);
    if (arch == LLM_ARCH_BAILINGMOE3) {
        gguf_remove_key(res.get(), "bailingmoe3.kda.safe_gate"); // as upstream's test has it
    }
    return res;
}

llama_model * load(llm_arch arch, bool moe, size_t seed) {
    gguf_context_ptr gguf = gguf_of(arch, moe);
    tensor_data_params weights = { seed, STDEV };
    ggml_backend_dev_t none = nullptr;
    llama_model_params params = llama_model_default_params();
    params.progress_callback = silent_model_load_progress;
    params.devices           = &none;
    return llama_model_init_from_user(gguf.get(), set_tensor_data, &weights, params);
}

}  // namespace

std::vector<Fixture> fixtures() {
    std::vector<Fixture> res;
    for (const llm_arch arch : llm_arch_all()) {
        // those that upstream's test leaves out, too
        if (arch == LLM_ARCH_UNKNOWN || arch == LLM_ARCH_EAGLE3 || arch == LLM_ARCH_DFLASH || !arch_supported(arch)) {
            continue;
        }
        for (bool moe : { false, true }) {
            if (moe ? !moe_implemented(arch) : moe_mandatory(arch)) {
                continue;
            }
            const std::string name = llm_arch_name(arch);
            Fixture fixture;
            fixture.name     = name + (moe && !moe_mandatory(arch) ? ", MoE" : "");
            fixture.arch     = name;
            fixture.encodes  = arch == LLM_ARCH_T5 || arch == LLM_ARCH_DREAM || arch == LLM_ARCH_LLADA || arch == LLM_ARCH_LLADA_MOE || arch == LLM_ARCH_RND1;
            fixture.one_kind = arch == LLM_ARCH_DEEPSEEK4 || has_key(gguf_of(arch, moe).get(), name + ".attention.key_length_mla");
            fixture.load     = [=](size_t seed) { return load(arch, moe, seed); };
            fixture.write    = [=](const std::string & path) { return gguf_write_to_file(gguf_of(arch, moe).get(), path.c_str(), true); };
            res.push_back(std::move(fixture));
        }
    }
    return res;
}

double nmse_of(const std::vector<float> & wanted, const std::vector<float> & found) {
    return nmse(wanted, found);
}

// What else the file has.
[[maybe_unused]] static void * const unused[] = { (void *) upstream_main };
