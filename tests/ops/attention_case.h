// One attention over a cache, laid out and written as llama.cpp does it.
#pragma once

#include "ops.h"
#include "reference.h"

enum class Mask { none, causal, per_head, alibi, rows_gone, window };

struct AttentionCase {
    AttentionShape shape;
    ggml_type      type_k = GGML_TYPE_F16;
    ggml_type      type_v = GGML_TYPE_F16;
    ggml_type      type_q = GGML_TYPE_F32;
    Mask           mask   = Mask::causal;
    bool           sinks  = false;
    bool           mla    = false;  // V is the first dv values of K's rows
    bool           poison = false;  // NaN and inf in cells that no query sees
    float          loud   = 1.0f;   // values are as many times as large; if it is not 1, every fifth row is zero, of K and of V
    // Precise rows of recent cells, 0 for none: slots of a window, and rows of the batch.
    int64_t        slots     = 0;
    int64_t        batch     = 0;
    bool           scattered = true;  // of cells anywhere in the cache, else of its last cells

    int64_t     columns() const { return slots + batch; }
    std::string name() const;
};

// Heads of dk and dv values of these types by name, n_q queries over n_kv cells; all else as it is by default.
AttentionCase make_case(const std::string & k, const std::string & v, int dk, int dv, int n_q, int n_kv);
AttentionCase make_case(const std::string & k, const std::string & v, int d, int n_q, int n_kv);
// V is the first 512 values of K's rows of 576, one KV head for all.
AttentionCase make_mla_case(const std::string & type, int n_q, int n_kv);
// Other masks, a bias with a cap and sinks and streams, rows without cells, an f16 query: what every device must know.
std::vector<AttentionCase> meanings_of(const AttentionCase & base);
// The case with precise rows: windows of several sizes, with a batch and without, by turns.
AttentionCase with_recent(AttentionCase c, int turn);

// The cache is [d*n_head_kv, kv_size, n_stream] with kv_size > n_kv; rows go in by SET_ROWS in random order, attention
// reads a permuted view of the first n_kv cells. Bytes outside those cells are 0xff, not a number in every type, but for
// types whose cells are coded together. Precise rows hold other values than the rows that they stand for; some columns
// have no cell, and some one beyond n_kv.
class AttentionRun {
  public:
    explicit AttentionRun(const AttentionCase & c);

    bool               write();                       // SET_ROWS, and GET_ROWS of what was written
    bool               attend(int n_threads = 2);     // FLASH_ATTN_EXT alone, on the cache as it is
    std::vector<float> output() const { return get_floats(out_); }

    ggml_tensor * k_cache() const { return k_cache_; }
    ggml_tensor * v_cache() const { return v_cache_; }

    std::vector<double> want_from_decoded() const;    // from what was written, read back
    std::vector<double> want_from_original() const;

    // Is this cell hidden from every query?
    bool hidden(int64_t stream, int64_t cell) const;

    // Overwrites the rows that precise rows stand for, and the precise rows of no cell. Groups stay as they are.
    void spoil_unseen();

  private:
    AttentionCase c_;
    int64_t       kv_size_;
    int64_t       mask_heads_;

    std::vector<float>   q_, k_, v_, mask_, sinks_;
    std::vector<float>   precise_k_, precise_v_;  // [n_stream][columns][n_head_kv][d]
    std::vector<int64_t> columns_;                // [n_stream][columns]: their cells

    Graph         write_, attend_;
    ggml_tensor * k_cache_ = nullptr;
    ggml_tensor * v_cache_ = nullptr;
    ggml_tensor * k_read_  = nullptr;
    ggml_tensor * v_read_  = nullptr;
    ggml_tensor * out_     = nullptr;

    // Of the window and of the batch.
    struct Precise {
        int64_t       first, count;  // columns
        ggml_tensor * k_cache = nullptr, * v_cache = nullptr, * k_read = nullptr, * v_read = nullptr;
    };
    std::vector<Precise> precise_;

    // The keys that scores are products with.
    std::vector<float> keys() const;

    // Rows as attention sees them: those that have precise rows replaced by these.
    std::vector<float> replaced(std::vector<float> rows, const std::vector<float> & precise, int64_t d) const;

    void make_values(Rng & rng);
    void make_recent(Rng & rng);
    void make_write(Rng & rng);
    void make_attend();
};
