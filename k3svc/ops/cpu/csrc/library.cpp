// The C interface: contexts with their threads and scratch memory, the choice of an instruction set, and the calls.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "checked_copy.h"
#include "kernels.h"

namespace k3 {

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

struct Arena {
    char* data = nullptr;
    int64_t size = 0;

    ~Arena() { std::free(data); }

    char* take(int64_t num_bytes) {
        if (num_bytes > size) {
            std::free(data);
            // Vector loads and stores may touch a line past the end.
            size = (num_bytes + num_bytes / 2 + 4096) / 64 * 64;
            data = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(size)));
            if (!data) {
                std::fprintf(stderr, "k3svc: no memory for %lld bytes of intermediates\n", static_cast<long long>(size));
                std::abort();
            }
        }
        return data;
    }
};

// Rests of a waiting thread before it sleeps, some 20 us: more than lies between most kernels of a step.
constexpr int RESTS = 1000;

// Waits a little for a condition that another thread makes true; whether it came.
template <class F>
static bool comes_soon(const F& condition) {
    for (int i = 0; i < RESTS; ++i) {
        if (condition()) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    return false;
}

// Threads that help the caller of `run`. One that wakes after the work is done is not waited for, so that a machine
// without a free core costs little more than one thread does.
struct Context {
    const Kernels* kernels;
    std::vector<Arena> arenas;
    std::vector<std::thread> helpers;
    std::mutex mutex;
    std::condition_variable begin, done;
    // The job, left alone while its gate is open or helpers are inside.
    int64_t count = 0;
    void (*fn)(void*, int64_t, int) = nullptr;
    void* argument = nullptr;
    std::atomic<int64_t> next{0};
    // JOB times the number of jobs so far, CLOSED, and the number of helpers inside.
    static constexpr int64_t CLOSED = 1 << 16, JOB = CLOSED * 2;
    std::atomic<int64_t> gate{CLOSED};
    std::atomic<bool> stops{false};
    const void* upcoming = nullptr;

    Context(const Kernels* chosen, int threads) : kernels(chosen), arenas(static_cast<size_t>(threads) + 1) {
        for (int worker = 1; worker < threads; ++worker) helpers.emplace_back([this, worker] { serve(worker); });
    }

    ~Context() {
        stops = true;
        open_gate();
        for (std::thread& helper : helpers) helper.join();
    }

    void open_gate() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            gate = (gate / JOB + 1) * JOB;
        }
        begin.notify_all();
    }

    bool enter() {
        int64_t seen = gate;
        while (!(seen & CLOSED))
            if (gate.compare_exchange_weak(seen, seen + 1)) return true;
        return false;
    }

    void leave() {
        if (--gate % JOB != CLOSED) return;
        std::lock_guard<std::mutex> lock(mutex);
        done.notify_one();
    }

    void work(int worker) {
        for (int64_t index = next++; index < count; index = next++) fn(argument, index, worker);
    }

    void serve(int worker) {
        for (int64_t jobs = 0;;) {
            const auto called = [&] { return gate / JOB != jobs; };
            if (!comes_soon(called)) {
                std::unique_lock<std::mutex> lock(mutex);
                begin.wait(lock, called);
            }
            if (stops) return;
            jobs = gate / JOB;
            if (!enter()) continue;
            work(worker);
            leave();
        }
    }

    void share(int64_t own_count, void (*own_fn)(void*, int64_t, int), void* own_argument) {
        fn = own_fn;
        argument = own_argument;
        count = own_count;
        next = 0;
        open_gate();
        work(0);
        gate |= CLOSED;
        const auto finished = [&] { return gate % JOB == CLOSED; };
        if (comes_soon(finished)) return;
        std::unique_lock<std::mutex> lock(mutex);
        done.wait(lock, finished);
    }
};

void run(Context* context, int64_t count, void (*fn)(void*, int64_t, int), void* argument) {
    if (context->helpers.empty() || count <= 1) {
        for (int64_t index = 0; index < count; ++index) fn(argument, index, 0);
        return;
    }
    context->share(count, fn, argument);
}

int num_threads(const Context* context) { return static_cast<int>(context->arenas.size()) - 1; }

char* scratch(Context* context, int worker, int64_t num_bytes) {
    return context->arenas[static_cast<size_t>(worker) + 1].take(num_bytes);
}

const void* upcoming(const Context* context) { return context->upcoming; }

// The kernels of an instruction set, or null when this machine or build lacks it.
static const Kernels* kernels_of(const char* isa) {
    if (!std::strcmp(isa, "portable")) return &kernels_portable;
#if defined(__x86_64__)
    if (!std::strcmp(isa, "avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &kernels_avx2;
    if (!std::strcmp(isa, "avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return &kernels_avx512;
#endif
    return nullptr;
}

template <class T>
static T unpacked(int64_t word) {
    T value;
    std::memcpy(&value, &word, sizeof(T));
    return value;
}

template <class... A, size_t... I>
static void call(Context* context, void (*fn)(Context*, A...), const int64_t* words, std::index_sequence<I...>) {
    fn(context, unpacked<A>(words[I])...);
}

// fn with its arguments after the context from words, one each.
template <class... A>
static void call(Context* context, void (*fn)(Context*, A...), const int64_t* words) {
    call(context, fn, words, std::index_sequence_for<A...>{});
}

}  // namespace k3

using k3::Context;

extern "C" {

// Bumped with every change of this interface, and of an order of operations that decides bits.
int k3_abi_version() { return 9; }

// Whether k3_copy_crc32c does anything on this machine.
int k3_has_crc32c() { return k3::has_crc32c(); }

// Copies `count` bytes; the CRC32C of all since `checksum`, which is 0 at the beginning.
uint32_t k3_copy_crc32c(uint8_t* target, const uint8_t* source, int64_t count, uint32_t checksum) {
    return k3::copy_crc32c(target, source, count, checksum);
}

// The fastest instruction set of this machine.
const char* k3_best_isa() {
    for (const char* isa : {"avx512", "avx2"})
        if (k3::kernels_of(isa)) return isa;
    return "portable";
}

// Null when this machine or build lacks the instruction set.
Context* k3_open(const char* isa, int threads) {
    const k3::Kernels* kernels = k3::kernels_of(isa);
    return kernels ? new Context(kernels, threads) : nullptr;
}

void k3_close(Context* context) { delete context; }

void k3_linear(Context* c, const k3::Weight* weight, const float* x, int64_t stride, int64_t num_rows, float* y) {
    c->kernels->linear(c, weight, x, stride, num_rows, y);
}

void k3_rms_norm(Context* c, const float* x, int64_t stride, const float* weight, int64_t num_rows, int64_t width,
                 float eps, float* y) {
    c->kernels->rms_norm(c, x, stride, weight, num_rows, width, eps, y);
}

void k3_gated_norm(Context* c, const float* o, const float* z, int64_t z_stride, const float* weight, int64_t num_rows,
                   int64_t heads, int64_t width, float eps, float* y) {
    c->kernels->gated_norm(c, o, z, z_stride, weight, num_rows, heads, width, eps, y);
}

void k3_mix_residual(Context* c, const float* const* rows, const int64_t* strides, int64_t count, const float* score,
                     int64_t num_rows, int64_t width, float eps, float* y) {
    c->kernels->mix_residual(c, rows, strides, count, score, num_rows, width, eps, y);
}

void k3_add_rows(Context* c, const float* x, int64_t x_stride, const float* y, int64_t y_stride, int64_t num_rows,
            int64_t width, float* sum) {
    c->kernels->add_rows(c, x, x_stride, y, y_stride, num_rows, width, sum);
}

// Rows of x, or where there is an index those of its numbers; a number that is not below `limit` gives NaN.
void k3_take_rows(Context*, const float* x, int64_t stride, const int64_t* index, int64_t limit, int64_t num_rows,
                  int64_t width, float* y, int64_t y_stride) {
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t from = index ? index[row] : row;
        float* to = y + row * y_stride;
        if (from >= 0 && from < limit)
            std::memcpy(to, x + from * stride, static_cast<size_t>(width) * 4);
        else
            for (int64_t i = 0; i < width; ++i) to[i] = NAN;
    }
}

void k3_glu(Context* c, const k3::Glu* kind, const float* x, int64_t stride, int64_t num_rows, int64_t width, float* y) {
    c->kernels->glu(c, kind, x, stride, num_rows, width, y);
}

void k3_sigmoid_gate(Context* c, const float* x, int64_t x_stride, const float* gate, int64_t gate_stride,
                     int64_t num_rows, int64_t width, float* y) {
    c->kernels->sigmoid_gate(c, x, x_stride, gate, gate_stride, num_rows, width, y);
}

void k3_route(Context* c, const k3::Weight* weight, const k3::Router* router, const float* x, int64_t stride,
              int64_t num_rows, int64_t* ids, float* weights) {
    c->kernels->route(c, weight, router, x, stride, num_rows, ids, weights);
}

void k3_experts(Context* c, const k3::Weight* gate_up, const k3::Weight* down, int64_t num_experts, const k3::Glu* kind,
                const float* x, int64_t stride, int64_t num_rows, const int64_t* ids, const float* weights,
                int64_t top_k, float* y) {
    c->kernels->experts(c, gate_up, down, num_experts, kind, x, stride, num_rows, ids, weights, top_k, y);
}

void k3_conv(Context* c, const k3::Conv* conv, const k3::Step* step, const float* u, int64_t stride, float* y) {
    c->kernels->conv(c, conv, step, u, stride, y);
}

void k3_kda_extend(Context* c, const k3::Kda* kda, const k3::Step* step, const float* qkv, int64_t qkv_stride,
                   const float* f, int64_t f_stride, const float* b, int64_t b_stride, float* o) {
    c->kernels->kda_extend(c, kda, step, qkv, qkv_stride, f, f_stride, b, b_stride, o);
}

void k3_kda_decode(Context* c, const k3::Kda* kda, const k3::Step* step, const float* qkv, int64_t qkv_stride,
                   const float* f, int64_t f_stride, const float* b, int64_t b_stride, float* o) {
    c->kernels->kda_decode(c, kda, step, qkv, qkv_stride, f, f_stride, b, b_stride, o);
}

void k3_mla_write(Context*, const k3::Step* step, const float* rows, int64_t stride, int64_t width, float* pool) {
    for (int64_t row = 0; row < step->num_rows; ++row)
        if (step->slot_mapping[row] >= 0)
            std::memcpy(pool + step->slot_mapping[row] * width, rows + row * stride, static_cast<size_t>(width) * 4);
}

void k3_mla_extend(Context* c, const k3::Mla* mla, const k3::Step* step, const float* q, int64_t stride, float* o) {
    c->kernels->mla_extend(c, mla, step, q, stride, o);
}

void k3_mla_decode(Context* c, const k3::Mla* mla, const k3::Step* step, const float* q, int64_t stride, float* o) {
    c->kernels->mla_decode(c, mla, step, q, stride, o);
}

void k3_sample(Context* c, const k3::Draws* draws, const float* logits, int64_t stride, int64_t num_rows, int64_t count,
               int64_t* tokens) {
    c->kernels->sample(c, draws, logits, stride, num_rows, count, tokens);
}

void k3_rotation(Context* c, const int64_t* positions, int64_t count, int64_t num_rows, const float* frequencies,
                 int64_t half, float amplitude, float* cos, float* sin) {
    c->kernels->rotation(c, positions, count, num_rows, frequencies, half, amplitude, cos, sin);
}

void k3_norm_rope(Context* c, const k3::NormRope* own, const float* x, int64_t stride, int64_t num_rows,
                  const float* cos, const float* sin, float* q, float* k) {
    c->kernels->norm_rope(c, own, x, stride, num_rows, cos, sin, q, k);
}

void k3_rotate(Context* c, const float* x, int64_t row_stride, int64_t head_stride, int64_t num_rows, int64_t heads,
               int64_t width, const float* cos, const float* sin, int64_t interleaved, float* y) {
    c->kernels->rotate(c, x, row_stride, head_stride, num_rows, heads, width, cos, sin, interleaved, y);
}

void k3_block_attention(Context* c, const k3::BlockAttention* own, const k3::Blocks* blocks, const float* q,
                        int64_t q_stride, const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                        float* o) {
    c->kernels->block_attention(c, own, blocks, q, q_stride, k, k_stride, v, v_stride, o);
}

// Rows into cells of rings, position p of a slot into cell p % capacity.
void k3_write_context(Context*, const float* rows, int64_t stride, int64_t num_rows, int64_t width,
                      const int64_t* slots, const int64_t* positions, float* pool, int64_t slot_stride,
                      int64_t cell_stride, int64_t capacity) {
    for (int64_t row = 0; row < num_rows; ++row)
        std::memcpy(pool + slots[row] * slot_stride + positions[row] % capacity * cell_stride, rows + row * stride,
                    static_cast<size_t>(width) * 4);
}

void k3_recur(Context* c, const float* joint, int64_t stride, const float* memory, int64_t memory_stride,
              int64_t num_rows, int64_t width, float* mixed, float* after) {
    c->kernels->recur(c, joint, stride, memory, memory_stride, num_rows, width, mixed, after);
}

void k3_confidences(Context* c, const float* states, int64_t width, const float* embedded, int64_t rank,
                    const float* weight, float bias, const float* temperatures, int64_t count, int64_t num_rows,
                    float* y) {
    c->kernels->confidences(c, states, width, embedded, rank, weight, bias, temperatures, count, num_rows, y);
}

void k3_choose(Context* c, const k3::Draws* draws, const float* logits, int64_t stride, const float* bias,
               int64_t banned, int64_t offset, int64_t num_rows, int64_t count, float* scores, int64_t* tokens) {
    c->kernels->choose(c, draws, logits, stride, bias, banned, offset, num_rows, count, scores, tokens);
}

using Replay = void (*)(Context*, const int64_t*);

// What makes a recorded call of the function of this name; null for others.
Replay k3_replayed(const char* name) {
    static const struct {
        const char* name;
        Replay replay;
    } calls[] = {
#define K3_CALL(name) {#name, [](Context* c, const int64_t* words) { k3::call(c, name, words); }}
        K3_CALL(k3_linear),       K3_CALL(k3_rms_norm),   K3_CALL(k3_gated_norm), K3_CALL(k3_mix_residual),
        K3_CALL(k3_add_rows),          K3_CALL(k3_take_rows),  K3_CALL(k3_glu),        K3_CALL(k3_sigmoid_gate),
        K3_CALL(k3_route),        K3_CALL(k3_experts),    K3_CALL(k3_conv),       K3_CALL(k3_kda_extend),
        K3_CALL(k3_kda_decode),   K3_CALL(k3_mla_write),  K3_CALL(k3_mla_extend), K3_CALL(k3_mla_decode),
        K3_CALL(k3_rotation),     K3_CALL(k3_norm_rope),  K3_CALL(k3_rotate),     K3_CALL(k3_block_attention),
        K3_CALL(k3_write_context), K3_CALL(k3_recur),        K3_CALL(k3_confidences), K3_CALL(k3_choose),
#undef K3_CALL
    };
    for (const auto& own : calls)
        if (!std::strcmp(own.name, name)) return own.replay;
    return nullptr;
}

// Makes recorded calls, `width` words each: what `k3_replayed` gave, then the arguments after the context.
void k3_replay(Context* c, const int64_t* calls, int64_t count, int64_t width) {
    const auto replay_of = [&](int64_t index) { return k3::unpacked<Replay>(calls[index * width]); };
    const Replay products[] = {k3_replayed("k3_linear"), k3_replayed("k3_route"), k3_replayed("k3_experts")};
    const auto multiplies = [&](int64_t index) {
        return std::find(std::begin(products), std::end(products), replay_of(index)) != std::end(products);
    };
    int64_t product = 0;
    for (int64_t index = 0; index < count; ++index) {
        for (product = std::max(product, index + 1); product < count && !multiplies(product);) ++product;
        const int64_t* own = calls + index * width;
        c->upcoming = product < count ? k3::unpacked<const k3::Weight*>(calls[product * width + 1])->data : nullptr;
        replay_of(index)(c, own + 1);
    }
    c->upcoming = nullptr;
}

}  // extern "C"
