// Random lives: the same operations on two contexts, one with an f32 cache, and what both say next is compared.
//
// A walk is a sequence of what programs do with a cache: append to sequences, one or several at a time; take back the last
// tokens and go on differently; drop, copy and keep sequences; cut a piece out and close the gap (context shift); group
// positions (self-extend); save and restore; clear. After each append the divergence of the next token's distribution is
// added to the walk. The mean is bounded by what the family loses on this model, and by four times what it loses in a walk
// that does nothing but append (a shift rounds keys once more); nothing may be NaN, and nothing may fail.

#include "life.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr uint32_t CELLS = 512;
constexpr int      N_SEQ = 3;

class Walk {
  public:
    // `plain`: nothing but appending and dropping whole sequences, to compare with.
    Walk(const Shape & shape, const Pair & types, bool unified, int recent, bool plain, int threads, uint64_t seed)
        : rng(seed), unified(unified), recent(recent), plain(plain), threads(threads), ref(make(shape, { "f32", "f32" })), our(make(shape, types)), shifts(llama_memory_can_shift(mem(our))) {}

    // False: something failed, and a check has said so.
    bool run(int n_steps) {
        for (int i = 0; i < n_steps && step(); i++) {
            count("operations on caches");
        }
        return good;
    }

    double mean() const { return n_compared ? sum/n_compared : 0.0; }
    int    compared() const { return n_compared; }

  private:
    Rng     rng;
    bool    unified;
    int     recent;
    bool    plain;
    int     threads;
    Context ref, our;
    bool    shifts;
    bool    good = true;
    double  sum = 0.0;
    int     n_compared = 0, n_saved = 0;
    std::vector<uint8_t> kept_ref, kept_our;
    llama_pos next[N_SEQ] = {};   // position behind the last
    llama_pos kept_next   = 0;

    Context make(const Shape & shape, const Pair & types) {
        return new_context(shape, types, { CELLS, N_SEQ, unified, threads, rng.state%2 == 0, recent });
    }

    static llama_memory_t mem(const Context & ctx) { return llama_get_memory(ctx.get()); }

    template <typename F> void both(F f) {
        f(ref);
        f(our);
    }

    void fail(const std::string & what) {
        good = false;
        check(false, what + ": " + take_log());
    }

    // Positions from the cache itself: windows may have dropped some.
    void look() {
        for (int s = 0; s < N_SEQ; s++) {
            const llama_pos a = llama_memory_seq_pos_max(mem(ref), s), b = llama_memory_seq_pos_max(mem(our), s);
            if (a != b) {
                fail("sequence " + std::to_string(s) + " ends at " + std::to_string(b) + ", wanted " + std::to_string(a));
            }
            next[s] = a + 1;
        }
    }

    int used() const { return next[0] + next[1] + next[2]; }

    void append(const std::vector<int> & seqs, int n) {
        std::vector<Token> batch;
        for (int s : seqs) {
            for (int i = 0; i < n; i++) {
                batch.push_back({ (llama_token) rng.below(N_VOCAB), next[s] + i, s, i + 1 == n });
            }
        }
        const auto a = decode(ref.get(), batch), b = decode(our.get(), batch);
        if (a.empty() || a.size() != b.size()) {
            return fail("decoding " + std::to_string(a.size()) + " and " + std::to_string(b.size()) + " logits");
        }
        if (!all_finite(b)) {
            return fail("a logit that is no number");
        }
        for (const double kl : kl_divergences(a, b, N_VOCAB)) {
            if (std::isnan(kl)) {
                return fail("a divergence that is no number");
            }
            sum += kl;
            n_compared++;
        }
        count("distributions compared", (int64_t) (a.size()/N_VOCAB));
    }

    void drop(int s, llama_pos from, llama_pos to) {
        bool a = false, b = false;
        a = llama_memory_seq_rm(mem(ref), s, from, to);
        b = llama_memory_seq_rm(mem(our), s, from, to);
        if (a != b) {
            fail("seq_rm");
        }
    }

    void save(int s) {
        kept_ref  = save_state(ref.get(), s);
        kept_our  = save_state(our.get(), s);
        kept_next = next[s];
    }

    void restore(int s) {
        if (kept_our.empty() || used() - next[s] + kept_next > (int) CELLS - 100) {
            return;
        }
        if (!restore_state(ref.get(), kept_ref, s) || !restore_state(our.get(), kept_our, s)) {
            fail("a state was not restored");
        }
    }

    bool step() {
        const int s = (int) rng.below(N_SEQ), t = (s + 1 + (int) rng.below(N_SEQ - 1))%N_SEQ;
        if (used() > (int) CELLS - 200) {
            drop(s, -1, -1);
        }
        look();
        // in a model with windows, only the end of a sequence may be cut and nothing be moved
        const llama_pos n = next[s];
        switch (good ? rng.below(plain ? 5 : 12) : 99) {
            case 0: case 1: case 2: append({ s }, 1 + (int) rng.below(6)); break;
            case 3: append({ s }, 20 + (int) rng.below(90)); break;
            case 4: append({ s, t }, 1 + (int) rng.below(8)); break;
            case 5: // rejected by a larger model
                if (n > 12) {
                    drop(s, n - 1 - (llama_pos) rng.below(8), -1);
                    look();
                    append({ s }, 1 + (int) rng.below(4));
                }
                break;
            case 6: // context shift
                if (n > 40 && shifts) {
                    const llama_pos cut = 1 + (llama_pos) rng.below(n/2);
                    drop(s, 4, 4 + cut);
                    both([&](Context & c) { llama_memory_seq_add(mem(c), s, 4 + cut, -1, -cut); });
                    look();
                    append({ s }, 2);
                }
                break;
            case 7: // self-extend
                if (n > 40 && shifts) {
                    const llama_pos half = n/2;
                    both([&](Context & c) { llama_memory_seq_div(mem(c), s, 0, half, 2); });
                    both([&](Context & c) { llama_memory_seq_add(mem(c), s, half, -1, -(half - half/2)); });
                    look();
                    append({ s }, 2);
                }
                break;
            case 8:
                if (unified || n > 0) {
                    drop(t, -1, -1);
                    both([&](Context & c) { llama_memory_seq_cp(mem(c), s, t, -1, -1); });
                    look();
                    append({ t }, 3);
                }
                break;
            case 9: n_saved++ % 2 == 0 && n > 0 ? save(s) : restore(t); break;
            case 10:
                if (rng.below(4) == 0) {
                    const bool data = rng.below(2) == 0;
                    both([&](Context & c) { llama_memory_clear(mem(c), data); });
                } else {
                    drop(s, -1, -1);
                }
                break;
            case 11:
                if (unified && rng.below(3) == 0) {
                    both([&](Context & c) { llama_memory_seq_keep(mem(c), s); });
                }
                break;
            default: break;
        }
        return good;
    }
};

}  // namespace

void test_walks() {
    std::vector<Pair> pairs = all_pairs();
    pairs.push_back({ "f16", "f16" });
    struct Place { const Shape * shape; bool unified; };
    const std::vector<Place> places = { { &HEADS_OF_64, true }, { &HEADS_OF_64, false }, { &HEADS_OF_80, true }, { &HEADS_OF_128, true }, { &WINDOWED, true } };
    const int windows[] = { 0, 1, 64, 128, 1000 };
    for (size_t i = 0; i < pairs.size()*places.size(); i++) {
        const Pair &  types  = pairs[i/places.size()];
        const size_t  p      = i%places.size();
        const Place & place  = places[p];
        const int     recent = windows[(i/places.size() + p)%5];
        if (!serves(types, *place.shape) || !begin_case("walks with " + types.name() + " " + place.shape->name +
                (place.unified ? " unified" : " streams") + ", " + std::to_string(recent) + " recent")) {
            continue;
        }
        // appending alone without precise rows and with them, and all operations
        double sum[3] = {};
        int    n[3]   = {};
        for (int w = 0; w < (soak ? 24 : 1); w++) {
            // graphs are tiny, and two threads that share a core with other work wait for each other: few walks have two
            const int threads = w%8 == 7 ? 2 : 1;
            for (int kind = 0; kind < 3; kind++) {
                Walk walk(*place.shape, types, place.unified, kind == 0 ? 0 : recent, kind < 2, threads, 1000*p + (uint64_t) w);
                walk.run(kind < 2 || quick ? 25 : 80);
                sum[kind] += walk.mean()*walk.compared();
                n[kind]   += walk.compared();
                count("walks");
            }
        }
        check(n[0] > 0 && n[1] > 0 && n[2] > 0, "something was compared");
        const auto mean = [&](int kind) { return sum[kind]/std::max(n[kind], 1); };
        check_below(mean(2), loss_of(types), "mean KL");
        check_below(mean(1), 1.1*mean(0) + 1e-5, "mean KL with precise rows, against none");
        // a cut takes precise rows away, and those before it have none
        check_below(mean(2), 4*mean(1) + (recent > 0 ? mean(0) : 0.0) + 1e-5, "mean KL, against appending alone");
    }
}
