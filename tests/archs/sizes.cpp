// What llama.cpp allocates for the caches of every fixture, in contexts of several kinds.

#include "sizes.h"

#include "fixtures.h"

#include "../harness/harness.h"
#include "../harness/tokens.h"

#include "../src/llama-ext.h"
#include "ggml-backend.h"

namespace {

struct Types {
    const char * k;
    const char * v;
    bool         flash_attn;
};

const Types TYPES[] = {
    { "f16",             "f16",   true  },
    { "f16",             "f16",   false },
    { "q8_0",            "q8_0",  true  },
    { "srft8",           "srft8", true  },
    { "srft4",           "srft4", true  },
    { "delta4",          "srft4", true  },
    { "srft4,recent=40", "srft2", true  },
    { "srft3,swa=srft8", "f16",   true  },
    { "srft4",           "f16",   false },
};

struct Kind {
    uint32_t n_ctx, n_seq;
    bool     unified;
    uint32_t n_ubatch;
    bool     swa_full;
};

const Kind KINDS[] = {
    { 512,  1, false, 256, false },
    { 4096, 3, false, 128, false },
    { 5000, 4, true,  64,  false },
    { 2048, 1, false, 512, true  },
};

// Bytes of the buffers of a context's memory; -1 where it is refused.
long long bytes_of(llama_model * model, const Types & types, const Kind & kind) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx           = kind.n_ctx;
    p.n_batch         = 512;
    p.n_ubatch        = kind.n_ubatch;
    p.n_seq_max       = kind.n_seq;
    p.kv_unified      = kind.unified;
    p.swa_full        = kind.swa_full;
    p.n_threads       = 1;
    p.n_threads_batch = 1;
    p.type_k          = cache_type(types.k);
    p.type_v          = cache_type(types.v);
    p.flash_attn_type = types.flash_attn ? LLAMA_FLASH_ATTN_TYPE_AUTO : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    const Context ctx(llama_init_from_model(model, p), llama_free);
    take_log();
    if (!ctx) {
        return -1;
    }
    long long res = 0;
    for (const auto & [_, data] : llama_get_memory_breakdown(ctx.get())) {
        res += (long long) data.context;
    }
    return res;
}

}  // namespace

void print_sizes(const std::string & dir) {
    const size_t alignment = ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
    for (const Fixture & fixture : fixtures()) {
        if (!begin_case(fixture.name)) {
            continue;
        }
        const std::string path = dir + "/" + fixture.name + ".gguf";
        const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(fixture.load(1), llama_model_free);
        check(fixture.write(path) && model, "the model is made, and its header written");
        for (const Kind & kind : KINDS) {
            // kimi-linear's graph cannot be built for several sequences, with stock types too
            if (!model || (kind.n_seq > 1 && (fixture.encodes || fixture.arch == "kimi-linear"))) {
                continue;
            }
            for (const Types & types : TYPES) {
                printf("size\t%s\t%s\t%s\t%u\t%u\t%d\t%u\t%d\t%d\t%zu\t%lld\n", path.c_str(), types.k, types.v, kind.n_ctx, kind.n_seq,
                       kind.unified, kind.n_ubatch, kind.swa_full, types.flash_attn, alignment, bytes_of(model.get(), types, kind));
                fflush(stdout);
            }
            if (quick) {
                break;
            }
        }
    }
}
