// ggml-metal-device.h and ggml-metal-context.h without Metal: what ggml's Metal backend needs from the system, on the CPU.
//
// The C++ files of the backend are the real ones. A library is a shader that was translated to C++ and compiled (dev/src/metal):
// KV_METAL_LIBRARIES names a folder that holds for each one NAME.metal, the text that Metal's compiler would get, and NAME.so.
// A library from source is found by its text, byte for byte; the backend's own library is ggml.so.
//
// An encoder keeps its dispatches until a barrier or its end, and then runs them in reverse: a GPU promises no order
// between barriers, so a missing one shows. Buffers are memory; a dispatch that names one which is not there fails.

#include "cpu-device.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml-metal-common.h"
#include "ggml-metal-context.h"
#include "ggml-metal-device.h"
#include "ggml-metal-fusion.h"
#include "ggml-metal-ops.h"

#include "../runtime.h"

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

int              lane_order = MSL_FORWARD;
uint32_t         lane_seed  = 1;
bool             barriers_ignored = false;
cpu_metal_counts counts = {};

// A shader's library, as tests/metal/runtime.h has it.
struct Shader {
    void * handle = nullptr;
    bool   strict = true;

    template <class F> F * get(const char * name) const {
        void * at = dlsym(handle, name);
        if (!at) GGML_ABORT("a shader's library has no %s", name);
        return (F *) at;
    }

    bool has(const char * kernel) const {
        auto * name_of = get<const char *(size_t)>("msl_kernel_name");
        for (size_t i = 0; const char * name = name_of(i); ++i) {
            if (strcmp(name, kernel) == 0) return true;
        }
        return false;
    }
};

std::string folder() {
    const char * dir = getenv("KV_METAL_LIBRARIES");
    if (!dir) GGML_ABORT("KV_METAL_LIBRARIES does not name the folder of translated shaders");
    return dir;
}

std::string text_of(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

Shader open_shader(const std::string & name, bool strict) {
    Shader shader;
    shader.handle = dlopen((folder() + "/" + name + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
    shader.strict = strict;
    if (!shader.handle) fprintf(stderr, "%s\n", dlerror());
    return shader;
}

struct Dispatch {
    ggml_metal_pipeline_t pipeline;
    std::map<int, ggml_metal_buffer_id> buffers;
    std::map<int, std::vector<uint8_t>> bytes;
    std::map<int, size_t> memory;
    uint32_t grid[3], group[3];
};

}  // namespace

void cpu_metal_set_order(int order, uint32_t seed) {
    lane_order = order;
    lane_seed  = seed;
}

void cpu_metal_ignore_barriers(bool ignore) {
    barriers_ignored = ignore;
}

cpu_metal_counts cpu_metal_count() {
    return counts;
}

bool cpu_metal_is_cpu() {
    return true;
}

// function constants

struct ggml_metal_cv {
    std::map<int32_t, double> values;
};

ggml_metal_cv_t ggml_metal_cv_init(void) {
    return new ggml_metal_cv();
}

void ggml_metal_cv_free(ggml_metal_cv_t cv) {
    delete cv;
}

void ggml_metal_cv_set_int16(ggml_metal_cv_t cv, int16_t value, int32_t idx) {
    cv->values[idx] = value;
}

void ggml_metal_cv_set_int32(ggml_metal_cv_t cv, int32_t value, int32_t idx) {
    cv->values[idx] = value;
}

void ggml_metal_cv_set_bool(ggml_metal_cv_t cv, bool value, int32_t idx) {
    cv->values[idx] = value;
}

// pipelines and libraries

struct ggml_metal_pipeline {
    Shader                    shader;
    std::string               kernel;
    std::map<int32_t, double> constants;
};

ggml_metal_pipeline_t ggml_metal_pipeline_init(void) {
    return new ggml_metal_pipeline();
}

void ggml_metal_pipeline_free(ggml_metal_pipeline_t pipeline) {
    delete pipeline;
}

int ggml_metal_pipeline_max_theads_per_threadgroup(ggml_metal_pipeline_with_params) {
    return 1024;
}

struct ggml_metal_library {
    ggml_metal_device_t    dev;
    Shader                 shader;
    ggml_metal_pipelines_t pipelines;
};

static ggml_metal_library_t new_library(ggml_metal_device_t dev, const Shader & shader) {
    return new ggml_metal_library{ dev, shader, ggml_metal_pipelines_init() };
}

ggml_metal_library_t ggml_metal_library_init(ggml_metal_device_t dev) {
    // ggml's own kernels count on what the language leaves open
    return new_library(dev, open_shader("ggml", /*strict =*/ false));
}

ggml_metal_library_t ggml_metal_library_init_from_source(ggml_metal_device_t dev, const char * source, bool) {
    if (!source) {
        return nullptr;
    }
    std::ifstream list(folder() + "/list");
    for (std::string name; std::getline(list, name);) {
        if (text_of(folder() + "/" + name + ".metal") == source) {
            const Shader shader = open_shader(name, /*strict =*/ true);
            return shader.handle ? new_library(dev, shader) : nullptr;
        }
    }
    GGML_LOG_ERROR("no library was made of this text of %zu bytes\n", strlen(source));
    return nullptr;
}

void ggml_metal_library_free(ggml_metal_library_t lib) {
    if (lib) {
        ggml_metal_pipelines_free(lib->pipelines);
        delete lib;
    }
}

ggml_metal_device_t ggml_metal_library_get_device(ggml_metal_library_t lib) {
    return lib->dev;
}

ggml_metal_pipeline_with_params ggml_metal_library_get_pipeline(ggml_metal_library_t lib, const char * name) {
    ggml_metal_pipeline_with_params res = {};
    res.pipeline = ggml_metal_pipelines_get(lib->pipelines, name);
    return res;
}

ggml_metal_pipeline_with_params ggml_metal_library_compile_pipeline(ggml_metal_library_t lib, const char * base, const char * name, ggml_metal_cv_t cv) {
    ggml_metal_pipeline_with_params res = ggml_metal_library_get_pipeline(lib, name);
    if (res.pipeline) {
        return res;
    }
    if (!lib->shader.handle || !lib->shader.has(base)) {
        GGML_LOG_ERROR("there is no kernel %s\n", base);
        return res;
    }
    res.pipeline = ggml_metal_pipeline_init();
    res.pipeline->shader = lib->shader;
    res.pipeline->kernel = base;
    if (cv) {
        res.pipeline->constants = cv->values;
    }
    ggml_metal_pipelines_add(lib->pipelines, name, res.pipeline);
    counts.pipelines++;
    return res;
}

// encoders

struct ggml_metal_encoder {
    Dispatch              next = {};
    std::vector<Dispatch> waiting;
};

static void run(const Dispatch & d) {
    const Shader & shader = d.pipeline->shader;
    shader.get<void()>("msl_clear_constants")();
    for (const auto & [index, value] : d.pipeline->constants) {
        // a library has the constants of all its kernels
        shader.get<int(long, double)>("msl_set_constant")(index, value);
    }
    // every constant that the kernel's file declares is one that the backend must set
    if (const char * unset = shader.get<const char *()>("msl_unset_constant")(); unset && shader.strict) {
        GGML_ABORT("%s: function constant %s is not set", d.pipeline->kernel.c_str(), unset);
    }
    std::vector<void *> buffers(32, nullptr);
    for (const auto & [index, buffer] : d.buffers) {
        GGML_ASSERT(buffer.metal && "a dispatch with a buffer that is not there");
        buffers[index] = (char *) buffer.metal + buffer.offs;
    }
    for (const auto & [index, bytes] : d.bytes) {
        buffers[index] = (void *) bytes.data();
    }
    std::vector<size_t> memory;
    for (const auto & [index, size] : d.memory) {
        memory.resize(std::max<size_t>(memory.size(), index + 1));
        memory[index] = size;
    }
    struct msl_launch launch = {};
    launch.kernel = d.pipeline->kernel.c_str();
    memcpy(launch.grid, d.grid, sizeof(d.grid));
    memcpy(launch.group, d.group, sizeof(d.group));
    launch.buffers           = buffers.data();
    launch.n_buffers         = buffers.size();
    launch.threadgroup_bytes = memory.data();
    launch.n_threadgroup     = memory.size();
    launch.order             = lane_order;
    launch.seed              = lane_seed;
    launch.strict            = shader.strict;
    launch.ignored_barrier   = -1;
    struct msl_counts done;
    char message[512];
    if (shader.get<int(const struct msl_launch *, struct msl_counts *, char *, size_t)>("msl_launch")(&launch, &done, message, sizeof(message)) != 0) {
        GGML_ABORT("%s", message);
    }
    counts.dispatches++;
}

static void flush(ggml_metal_encoder_t encoder) {
    for (size_t i = encoder->waiting.size(); i-- > 0;) {
        run(encoder->waiting[i]);
    }
    encoder->waiting.clear();
}

ggml_metal_encoder_t ggml_metal_encoder_init(ggml_metal_cmd_buf_t, bool) {
    return new ggml_metal_encoder();
}

void ggml_metal_encoder_free(ggml_metal_encoder_t encoder) {
    delete encoder;
}

void ggml_metal_encoder_debug_group_push(ggml_metal_encoder_t, const char *) {}
void ggml_metal_encoder_debug_group_pop (ggml_metal_encoder_t) {}

void ggml_metal_encoder_set_pipeline(ggml_metal_encoder_t encoder, ggml_metal_pipeline_with_params pipeline) {
    GGML_ASSERT(pipeline.pipeline);
    encoder->next.pipeline = pipeline.pipeline;
}

void ggml_metal_encoder_set_bytes(ggml_metal_encoder_t encoder, void * data, size_t size, int idx) {
    encoder->next.buffers.erase(idx);
    encoder->next.bytes[idx].assign((const uint8_t *) data, (const uint8_t *) data + size);
}

void ggml_metal_encoder_set_buffer(ggml_metal_encoder_t encoder, ggml_metal_buffer_id buffer, int idx) {
    encoder->next.bytes.erase(idx);
    if (buffer.metal) {
        encoder->next.buffers[idx] = buffer;
    } else {
        encoder->next.buffers.erase(idx);
    }
}

void ggml_metal_encoder_set_threadgroup_memory_size(ggml_metal_encoder_t encoder, size_t size, int idx) {
    GGML_ASSERT(size % 16 == 0);
    encoder->next.memory[idx] = size;
}

void ggml_metal_encoder_dispatch_threadgroups(ggml_metal_encoder_t encoder, int tg0, int tg1, int tg2, int tptg0, int tptg1, int tptg2) {
    const int sizes[6] = { tg0, tg1, tg2, tptg0, tptg1, tptg2 };
    for (int i = 0; i < 3; i++) {
        GGML_ASSERT(sizes[i] > 0 && sizes[3 + i] > 0);
        encoder->next.grid[i]  = sizes[i];
        encoder->next.group[i] = sizes[3 + i];
    }
    encoder->waiting.push_back(encoder->next);
}

void ggml_metal_encoder_memory_barrier(ggml_metal_encoder_t encoder) {
    counts.barriers++;
    if (!barriers_ignored) {
        flush(encoder);
    }
}

void ggml_metal_encoder_end_encoding(ggml_metal_encoder_t encoder) {
    flush(encoder);
}

// the device

struct ggml_metal_device {
    ggml_metal_device_props  props;
    ggml_metal_library_t     library;
    ggml_metal_fusion_info * finfo;
};

const char * ggml_metal_device_id_token(enum ggml_metal_device_id) {
    return "cpu";
}

ggml_metal_device_t ggml_metal_device_init(int device, int) {
    ggml_metal_device_t dev = new ggml_metal_device();
    dev->props = {};
    dev->props.device = device;
    snprintf(dev->props.name, sizeof(dev->props.name), "MTL%d", device);
    snprintf(dev->props.desc, sizeof(dev->props.desc), "Metal shaders on the CPU");
    dev->props.max_buffer_size            = (size_t) 1 << 32;
    dev->props.max_working_set_size       = (size_t) 1 << 32;
    dev->props.max_theadgroup_memory_size = 32*1024;
    dev->props.has_simdgroup_reduction    = true;
    dev->props.has_simdgroup_mm           = true;
    dev->props.has_unified_memory         = true;
    dev->props.has_bfloat                 = true;
    dev->props.use_shared_buffers         = true;
    dev->library = ggml_metal_library_init(dev);
    dev->finfo   = ggml_metal_fusion_info_init(true, 0);
    return dev;
}

void ggml_metal_device_free(ggml_metal_device_t dev) {
    ggml_metal_library_free(dev->library);
    ggml_metal_fusion_info_free(dev->finfo);
    delete dev;
}

void * ggml_metal_device_get_obj  (ggml_metal_device_t dev) { return dev; }
void * ggml_metal_device_get_queue(ggml_metal_device_t dev) { return dev; }

ggml_metal_library_t ggml_metal_device_get_library(ggml_metal_device_t dev) {
    return dev->library;
}

void ggml_metal_device_rsets_add(ggml_metal_device_t, ggml_metal_rset_t) {}
void ggml_metal_device_rsets_rm (ggml_metal_device_t, ggml_metal_rset_t) {}
void ggml_metal_device_rsets_keep_alive(ggml_metal_device_t) {}

void ggml_metal_event_encode_signal(ggml_metal_event_t, ggml_metal_cmd_buf_t) {}
void ggml_metal_event_encode_wait  (ggml_metal_event_t, ggml_metal_cmd_buf_t) {}
// events are never waited for: everything is done when it was asked for
ggml_metal_event_t ggml_metal_device_event_init(ggml_metal_device_t dev) { return (ggml_metal_event_t) dev; }
void ggml_metal_device_event_free(ggml_metal_device_t, ggml_metal_event_t) {}
void ggml_metal_device_event_synchronize(ggml_metal_device_t, ggml_metal_event_t) {}

void ggml_metal_device_get_memory(ggml_metal_device_t dev, size_t * free, size_t * total) {
    *free = *total = dev->props.max_working_set_size;
}

// Of the ops without our types, those that fill a cache with one of ggml's own: the rest of the backend is not under test.
bool ggml_metal_device_supports_op(ggml_metal_device_t dev, const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_TRANSPOSE:
        case GGML_OP_PERMUTE:
            return true;
        case GGML_OP_SET_ROWS:
            return dev->library->shader.has((std::string("kernel_set_rows_f32_i64_") + ggml_type_name(op->type)).c_str());
        case GGML_OP_GET_ROWS:
            return dev->library->shader.has((std::string("kernel_get_rows_") + ggml_type_name(op->src[0]->type)).c_str());
        default:
            return false;
    }
}

const ggml_metal_device_props * ggml_metal_device_get_props(ggml_metal_device_t dev) {
    return &dev->props;
}

ggml_metal_fusion_info * ggml_metal_device_get_fusion_info(ggml_metal_device_t dev) {
    return dev->finfo;
}

// buffers

struct ggml_metal_buffer {
    char * data;
    size_t size;
    bool   owned;
    bool   shared;
};

ggml_metal_buffer_t ggml_metal_buffer_init(ggml_metal_device_t, size_t size, bool shared) {
    void * data = nullptr;
    if (posix_memalign(&data, 16384, std::max<size_t>(size, 1)) != 0) {
        return nullptr;
    }
    return new ggml_metal_buffer{ (char *) data, size, true, shared };
}

ggml_metal_buffer_t ggml_metal_buffer_map(ggml_metal_device_t, void * ptr, size_t size, size_t) {
    return new ggml_metal_buffer{ (char *) ptr, size, false, true };
}

void ggml_metal_buffer_free(ggml_metal_buffer_t buf) {
    if (buf->owned) {
        free(buf->data);
    }
    delete buf;
}

void * ggml_metal_buffer_get_base(ggml_metal_buffer_t buf) {
    return buf->data;
}

bool ggml_metal_buffer_is_shared(ggml_metal_buffer_t buf) {
    return buf->shared;
}

void ggml_metal_buffer_memset_tensor(ggml_metal_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    memset((char *) tensor->data + offset, value, size);
}

void ggml_metal_buffer_set_tensor(ggml_metal_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    memcpy((char *) tensor->data + offset, data, size);
}

void ggml_metal_buffer_get_tensor(ggml_metal_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    memcpy(data, (const char *) tensor->data + offset, size);
}

bool ggml_metal_buffer_cpy_tensor(ggml_metal_buffer_t, const ggml_tensor * src, ggml_tensor * dst) {
    memcpy(dst->data, src->data, ggml_nbytes(src));
    return true;
}

void ggml_metal_buffer_clear(ggml_metal_buffer_t buf, uint8_t value) {
    memset(buf->data, value, buf->size);
}

ggml_metal_buffer_id ggml_metal_buffer_get_id(ggml_metal_buffer_t buf, const ggml_tensor * t) {
    const ptrdiff_t offset = (char *) t->data - buf->data;
    GGML_ASSERT(offset >= 0 && offset + ggml_nbytes(t) <= buf->size);
    return { buf->data, (size_t) offset };
}

// the backend's context

struct ggml_metal {
    ggml_metal_device_t dev;
};

ggml_metal_t ggml_metal_init(ggml_metal_device_t dev) {
    return new ggml_metal{ dev };
}

void ggml_metal_free(ggml_metal_t ctx) {
    delete ctx;
}

const char * ggml_metal_get_name(ggml_metal_t ctx) {
    return ctx->dev->props.name;
}

void ggml_metal_synchronize(ggml_metal_t) {}

void ggml_metal_set_tensor_async(ggml_metal_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    memcpy((char *) tensor->data + offset, data, size);
}

void ggml_metal_get_tensor_async(ggml_metal_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    memcpy(data, (const char *) tensor->data + offset, size);
}

bool ggml_metal_cpy_tensor_async(ggml_metal_t, ggml_metal_t, const ggml_tensor * src, ggml_tensor * dst) {
    memcpy(dst->data, src->data, ggml_nbytes(src));
    return true;
}

ggml_status ggml_metal_graph_compute(ggml_metal_t ctx, ggml_cgraph * gf) {
    // one command buffer, dispatches side by side where the backend sees no barrier
    ggml_metal_op_t op = ggml_metal_op_init(ctx->dev, nullptr, gf, ctx->dev->finfo, 0, gf->n_nodes, true, false, 0);
    for (int i = 0; i < ggml_metal_op_n_nodes(op);) {
        const int n = ggml_metal_op_encode(op, i);
        if (n == 0) {
            return GGML_STATUS_FAILED;
        }
        i += n;
    }
    ggml_metal_op_free(op);
    return GGML_STATUS_SUCCESS;
}

void ggml_metal_graph_optimize(ggml_metal_t, ggml_cgraph * gf) {
    ggml_graph_optimize(gf);
}

void ggml_metal_event_record(ggml_metal_t, ggml_metal_event_t) {}
void ggml_metal_event_wait  (ggml_metal_t, ggml_metal_event_t) {}

ggml_metal_event_t ggml_metal_get_ev_cpy(ggml_metal_t ctx) {
    return (ggml_metal_event_t) ctx;
}

void ggml_metal_set_n_cb(ggml_metal_t, int) {}
void ggml_metal_set_abort_callback(ggml_metal_t, ggml_abort_callback, void *) {}

bool ggml_metal_supports_family(ggml_metal_t, int) {
    return true;
}

void ggml_metal_capture_next_compute(ggml_metal_t) {}
