// Memories without a type of ours: their states are llama.cpp's own, whatever they write and read, nothing included. A
// draft that shares the cache of another context has such a memory; here is one that does as much as each case needs.

#include "life.h"

#include "ggml-ext-state.h"

#include <cstring>

namespace {

using Bytes = std::vector<uint8_t>;

class Writer : public llama_io_write_i {
  public:
    Bytes bytes;

    void   write(const void * src, size_t size) override { bytes.insert(bytes.end(), (const uint8_t *) src, (const uint8_t *) src + size); }
    void   write_tensor(ggml_tensor *, size_t, size_t) override { check(false, "nobody has rows"); }
    size_t n_bytes() override { return bytes.size(); }
};

class Reader : public llama_io_read_i {
  public:
    explicit Reader(const Bytes & bytes) : bytes(bytes) {}

    void read(void * dst, size_t size) override {
        if (size > bytes.size() - at) {
            throw std::runtime_error("unexpectedly reached end of buffer");
        }
        memcpy(dst, bytes.data() + at, size);
        at += size;
    }
    void   read_tensor(ggml_tensor *, size_t, size_t) override { check(false, "nobody has rows"); }
    size_t n_bytes() override { return at; }

  private:
    const Bytes & bytes;
    size_t        at = 0;
};

// Writes parts of these sizes.
struct Memory {
    std::vector<size_t> sizes;
    Bytes               held;
    bool                touched = false;

    explicit Memory(std::vector<size_t> sizes) : sizes(std::move(sizes)) {}

    void state_write(llama_io_write_i & io, llama_seq_id, llama_state_seq_flags) const {
        for (size_t size : sizes) {
            io.write(Bytes(size, (uint8_t) size).data(), size);
        }
    }
    void state_read(llama_io_read_i & io, llama_seq_id, llama_state_seq_flags) {
        for (size_t size : sizes) {
            Bytes part(size);
            io.read(part.data(), size);
            touched = true;
            held.insert(held.end(), part.begin(), part.end());
        }
    }
    void clear(bool) { touched = true; }
    bool seq_rm(llama_seq_id, llama_pos, llama_pos) { return touched = true; }
};

void test_parts(const std::vector<size_t> & sizes, const std::string & what) {
    for (llama_seq_id seq : { -1, 0 }) {
        Memory memory(sizes);
        Writer own, ours;
        memory.state_write(own, seq, 0);
        ggml_ext_state_write(ours, memory, seq, 0);
        check(ours.bytes == own.bytes, what + " writes what it writes without us");
        check(ggml_ext_state_flags(&memory, seq, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) == LLAMA_STATE_SEQ_FLAGS_ON_DEVICE, what + " keeps its flags");
        Reader reader(own.bytes);
        try {
            ggml_ext_state_read(reader, memory, seq, 0);
        } catch (const std::exception & e) {
            check(false, what + " reads what it has written: " + e.what());
        }
        check(reader.n_bytes() == own.bytes.size() && memory.held == own.bytes, what + " reads every byte of it and no other");
    }
}

}  // namespace

void test_memories() {
    if (begin_case("memories without a type of ours")) {
        test_parts({}, "a memory that writes nothing");
        test_parts({ 4, 8, 4 }, "a memory that begins with a number");
        test_parts({ 1, 4 }, "a memory that begins with a byte");
        test_parts({ 16 }, "a memory that begins with more than a number");
        check(ggml_ext_state_flags((const Memory *) nullptr, 0, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) == LLAMA_STATE_SEQ_FLAGS_ON_DEVICE, "no memory at all");

        // a state of ours is refused at its first number
        Memory memory({ 4, 8 });
        const uint32_t magic = GGML_EXT_STATE_MAGIC;
        Bytes state(64);
        memcpy(state.data(), &magic, sizeof(magic));
        Reader reader(state);
        std::string why;
        try {
            ggml_ext_state_read(reader, memory, 0, 0);
        } catch (const std::exception & e) {
            why = e.what();
        }
        check(why.find("cannot be restored here") != std::string::npos, "a state of ours is refused: " + why);
        check(!memory.touched, "a state of ours touches nothing");
    }
}
