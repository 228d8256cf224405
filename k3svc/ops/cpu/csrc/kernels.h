// What the files of the library share: arguments of the kernels, the table that each instruction set fills in, and the
// threads and scratch memory that a kernel may use.
//
// All pointers are to C-contiguous memory, except that rows of float32 inputs may lie `*_stride` elements apart.
#pragma once

#include <cstdint>

namespace k3 {

struct Context;

// Calls fn(argument, index, worker) for every index below count, in any order, on workers 0 .. num_threads - 1.
void run(Context* context, int64_t count, void (*fn)(void*, int64_t, int), void* argument);
int num_threads(const Context* context);
// Memory of a worker, aligned to 64 bytes; valid until that worker asks again. Worker -1 is the caller of `run`, apart
// from the workers, so that it can hold what they share.
char* scratch(Context* context, int worker, int64_t num_bytes);
// What the next product of a replayed step reads first, to be asked for ahead; null when that is not known.
const void* upcoming(const Context* context);

// [out, in] in panels of 32 outputs, each [in][32], the last one filled up with zeros.
struct Weight {
    const void* data;
    int64_t in;
    int64_t out;
    int64_t is_bf16;
    int64_t num_bytes;  // of one matrix; experts lie one after the other
};

struct Glu {
    int32_t is_situ;
    int32_t has_linear_beta;
    float beta;
    float linear_beta;
};

// A live sequence of a step.
struct Sequence {
    int64_t slot;
    int64_t row;       // first packed row
    int64_t length;    // rows
    int64_t start;     // tokens before them
    int64_t is_fresh;  // begins with zero states
    int64_t table;     // row of the block tables
};

struct Step {
    const Sequence* sequences;
    int64_t num_sequences;
    int64_t num_rows;
    const int64_t* slot_mapping;
    const int64_t* block_tables;
    int64_t table_width;
    int64_t page_size;
    int64_t keeps_states;  // conv and KDA states stay as they are
};

struct Conv {
    const float* weight;  // [channels, width]
    float* state;         // [slots, width - 1, channels]
    int64_t channels;
    int64_t width;
};

struct Kda {
    const float* a;
    const float* dt_bias;
    float* state;  // [slots, heads, V, K]
    int64_t heads;
    int64_t key_dim;
    int64_t value_dim;
    float lower_bound;
    int32_t has_lower_bound;
};

struct Mla {
    const float* w_kc;  // [heads, nope, rank]
    const float* w_vc;  // [heads, value_dim, rank]
    const float* rows;  // [pages, page_size, rank + rope]
    int64_t heads;
    int64_t nope;
    int64_t rank;
    int64_t rope;
    int64_t value_dim;
    float scale;
};

struct Router {
    const float* bias;
    int64_t top_k;
    int64_t num_groups;
    int64_t top_groups;
    float scale;
    int32_t renormalize;
};

// Heads of grouped-query rows of a draft.
struct NormRope {
    const float* q_weight;
    const float* k_weight;
    int64_t heads;
    int64_t key_heads;
    int64_t width;
    float eps;
};

// A step of draft blocks.
struct Blocks {
    const int64_t* slots;
    const int64_t* base_lens;
    const int64_t* starts;
    int64_t num_blocks;
    int64_t num_rows;  // of a block
    int64_t window;
    int64_t capacity;  // cells of a ring
};

// A layer's context cells, whose heads lie side by side, and the shape of its heads.
struct BlockAttention {
    const float* keys;
    const float* values;
    int64_t key_slot_stride;
    int64_t key_cell_stride;
    int64_t value_slot_stride;
    int64_t value_cell_stride;
    int64_t heads;
    int64_t key_heads;
    int64_t key_width;
    int64_t value_width;
    float scale;
    int32_t is_causal;
};

// Sampling parameters of rows.
struct Draws {
    const float* temperature;
    const int64_t* top_k;
    const float* top_p;
    const float* min_p;
    const int64_t* seed;
    const int64_t* sample_index;
    const int64_t* position;
};

struct Kernels {
    void (*linear)(Context*, const Weight*, const float* x, int64_t x_stride, int64_t num_rows, float* y);
    void (*rms_norm)(Context*, const float* x, int64_t x_stride, const float* weight, int64_t num_rows, int64_t width,
                     float eps, float* y);
    void (*gated_norm)(Context*, const float* o, const float* z, int64_t z_stride, const float* weight,
                       int64_t num_rows, int64_t heads, int64_t width, float eps, float* y);
    void (*mix_residual)(Context*, const float* const* rows, const int64_t* strides, int64_t count, const float* score,
                         int64_t num_rows, int64_t width, float eps, float* y);
    void (*add_rows)(Context*, const float* x, int64_t x_stride, const float* y, int64_t y_stride, int64_t num_rows,
                int64_t width, float* sums);
    void (*glu)(Context*, const Glu*, const float* x, int64_t x_stride, int64_t num_rows, int64_t width, float* y);
    void (*sigmoid_gate)(Context*, const float* x, int64_t x_stride, const float* gate, int64_t gate_stride,
                         int64_t num_rows, int64_t width, float* y);
    void (*route)(Context*, const Weight*, const Router*, const float* x, int64_t x_stride, int64_t num_rows,
                  int64_t* ids, float* weights);
    void (*experts)(Context*, const Weight* gate_up, const Weight* down, int64_t num_experts, const Glu*,
                    const float* x, int64_t x_stride, int64_t num_rows, const int64_t* ids, const float* weights,
                    int64_t top_k, float* y);
    // Of conv and kda_extend, a result that is null is not wanted, only what becomes of the states.
    void (*conv)(Context*, const Conv*, const Step*, const float* u, int64_t u_stride, float* y);
    void (*kda_extend)(Context*, const Kda*, const Step*, const float* qkv, int64_t qkv_stride, const float* f,
                       int64_t f_stride, const float* b, int64_t b_stride, float* o);
    void (*kda_decode)(Context*, const Kda*, const Step*, const float* qkv, int64_t qkv_stride, const float* f,
                       int64_t f_stride, const float* b, int64_t b_stride, float* o);
    void (*mla_extend)(Context*, const Mla*, const Step*, const float* q, int64_t q_stride, float* o);
    void (*mla_decode)(Context*, const Mla*, const Step*, const float* q, int64_t q_stride, float* o);
    void (*sample)(Context*, const Draws*, const float* logits, int64_t stride, int64_t num_rows, int64_t count,
                   int64_t* tokens);
    void (*rotation)(Context*, const int64_t* positions, int64_t count, int64_t num_rows, const float* frequencies,
                     int64_t half, float amplitude, float* cos, float* sin);
    void (*norm_rope)(Context*, const NormRope*, const float* x, int64_t stride, int64_t num_rows, const float* cos,
                      const float* sin, float* q, float* k);
    void (*rotate)(Context*, const float* x, int64_t row_stride, int64_t head_stride, int64_t num_rows, int64_t heads,
                   int64_t width, const float* cos, const float* sin, int64_t interleaved, float* y);
    void (*block_attention)(Context*, const BlockAttention*, const Blocks*, const float* q, int64_t q_stride,
                            const float* k, int64_t k_stride, const float* v, int64_t v_stride, float* o);
    void (*recur)(Context*, const float* joint, int64_t stride, const float* memory, int64_t memory_stride,
                  int64_t num_rows, int64_t width, float* mixed, float* after);
    void (*confidences)(Context*, const float* states, int64_t width, const float* embedded, int64_t rank,
                        const float* weight, float bias, const float* temperatures, int64_t count, int64_t num_rows,
                        float* y);
    void (*choose)(Context*, const Draws*, const float* logits, int64_t stride, const float* bias, int64_t banned,
                   int64_t offset, int64_t num_rows, int64_t count, float* scores, int64_t* tokens);
};

}  // namespace k3
