// What draft models need: rotary rows, attention of blocks over a ring of context cells, heads, and the choice of drafts.
#pragma once

#include "mla.h"
#include "sampling.h"

namespace k3 {
namespace K3_ISA {

// Rows of cos and sin of num_rows positions from each of `count` ones on.
static void rotation(Context* context, const int64_t* positions, int64_t count, int64_t num_rows,
                     const float* frequencies, int64_t half, float amplitude, float* cos, float* sin) {
    auto body = [&](int64_t row) {
        const float position = static_cast<float>(positions[row / num_rows] + row % num_rows);
        for (int64_t i = 0; i < half; ++i) {
            const float angle = position * frequencies[i];
            cos[row * half + i] = __builtin_cosf(angle) * amplitude;
            sin[row * half + i] = __builtin_sinf(angle) * amplitude;
        }
    };
    for_rows(context, count * num_rows, body);
}

// Channels i and i + half of a head turn together; y may be x.
K3_INLINE void turn_halves(const float* x, const float* cos, const float* sin, int64_t half, float* y) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        const F16 first = lanes_load(x + i, left), second = lanes_load(x + half + i, left);
        const F16 c = lanes_load(cos + i, left), s = lanes_load(sin + i, left);
        lanes_store(y + i, sub(mul(first, c), mul(second, s)), left);
        lanes_store(y + half + i, add(mul(second, c), mul(first, s)), left);
    }
}

static void norm_rope(Context* context, const NormRope* own, const float* x, int64_t stride, int64_t num_rows,
                      const float* cos, const float* sin, float* q, float* k) {
    const int64_t width = own->width, half = width / 2;
    auto body = [&](int64_t row) {
        for (int64_t head = 0; head < own->heads + own->key_heads; ++head) {
            const bool is_query = head < own->heads;
            const float* from = x + row * stride + head * width;
            const float* weight = is_query ? own->q_weight : own->k_weight;
            float* to = is_query ? q + (row * own->heads + head) * width
                                 : k + (row * own->key_heads + head - own->heads) * width;
            const F16 scale = set1(inverse_rms(from, width, own->eps));
            for (int64_t i = 0; i < width; i += LANES) {
                const int64_t left = width - i;
                lanes_store(to + i, mul(mul(lanes_load(from + i, left), scale), lanes_load(weight + i, left)), left);
            }
            turn_halves(to, cos + row * half, sin + row * half, half, to);
        }
    };
    for_rows(context, num_rows, body);
}

static void rotate(Context* context, const float* x, int64_t row_stride, int64_t head_stride, int64_t num_rows,
                   int64_t heads, int64_t width, const float* cos, const float* sin, int64_t interleaved, float* y) {
    const int64_t half = width / 2;
    auto body = [&](int64_t row) {
        for (int64_t head = 0; head < heads; ++head) {
            const float* from = x + row * row_stride + head * head_stride;
            float* to = y + (row * heads + head) * width;
            if (!interleaved) turn_halves(from, cos + row * half, sin + row * half, half, to);
            for (int64_t i = 0; interleaved && i < half; ++i) {
                const float c = cos[row * half + i], s = sin[row * half + i];
                to[2 * i] = from[2 * i] * c - from[2 * i + 1] * s;
                to[2 * i + 1] = from[2 * i + 1] * c + from[2 * i] * s;
            }
        }
    };
    for_rows(context, num_rows, body);
}

// `count` rows of keys, the others up to 64 being zeros, turned: [width][64].
K3_INLINE void turn_keys(const float* const* from, int64_t count, int64_t width, float* turned) {
    for (int64_t key = 0; key < KEYS; key += LANES)
        for (int64_t c = 0; c < width; c += LANES) {
            F16 square[LANES];
            for (int64_t i = 0; i < LANES; ++i)
                square[i] = key + i < count ? lanes_load(from[key + i] + c, width - c) : zero();
            transpose(square);
            for (int64_t j = 0; j < least(LANES, width - c); ++j) store(turned + (c + j) * KEYS + key, square[j]);
        }
}

// `count` rows, the others up to 64 being zeros, `padded` wide.
K3_INLINE void copy_rows(const float* const* from, int64_t count, int64_t width, int64_t padded, float* to) {
    for (int64_t key = 0; key < KEYS; ++key)
        for (int64_t c = 0; c < padded; c += LANES)
            store(to + key * padded + c, key < count && c < width ? lanes_load(from[key] + c, width - c) : zero());
}

// One block and the query heads of one key head: online softmax over blocks of 64 keys, the visible context from its
// oldest row on and then the block, so that neither place in the ring nor other blocks leave a trace.
static void attend_block(const BlockAttention& own, const Blocks& blocks, int64_t block, int64_t head, const float* q,
                         int64_t q_stride, const float* k, int64_t k_stride, const float* v, int64_t v_stride, float* o,
                         float* space) {
    const int64_t group = own.heads / own.key_heads, num = blocks.num_rows * group;
    const int64_t padded = round_up(own.key_width, PANEL), depth = round_up(own.value_width, PANEL);
    const int64_t base = blocks.base_lens[block];
    int64_t oldest = base - blocks.window > blocks.starts[block] ? base - blocks.window : blocks.starts[block];
    oldest = oldest > 0 ? oldest : 0;
    const int64_t length = base > oldest ? base - oldest : 0, total = length + blocks.num_rows;
    float* queries = space;                 // [rows][heads of the group][padded]
    float* turned = queries + num * padded; // [padded][64]
    float* values = turned + padded * KEYS; // [64][depth]
    float* scores = values + KEYS * depth;  // [num][64]
    float* sums = scores + num * KEYS;      // [num][depth]
    float* totals = sums + num * depth;     // [num][depth]
    float* kept = totals + num * depth;     // [num], and room for a multiple of 16
    Softmax* softmax = reinterpret_cast<Softmax*>(kept + round_up(num, LANES));
    for (int64_t i = 0; i < num; ++i) {
        const float* from = q + (block * blocks.num_rows + i / group) * q_stride + (head * group + i % group) * own.key_width;
        for (int64_t c = 0; c < padded; c += LANES)
            store(queries + i * padded + c, c < own.key_width ? lanes_load(from + c, own.key_width - c) : zero());
        softmax[i] = {-__builtin_inff(), 0.0f};
    }
    fill_zero(totals, num * depth);
    for (int64_t first = 0; first < total; first += KEYS) {
        const int64_t count = least(KEYS, total - first);
        const float* key_rows[KEYS];
        const float* value_rows[KEYS];
        for (int64_t i = 0; i < count; ++i) {
            const int64_t place = first + i;
            if (place < length) {
                const int64_t slot = blocks.slots[block], cell = (oldest + place) % blocks.capacity;
                key_rows[i] = own.keys + slot * own.key_slot_stride + cell * own.key_cell_stride + head * own.key_width;
                value_rows[i] =
                    own.values + slot * own.value_slot_stride + cell * own.value_cell_stride + head * own.value_width;
            } else {
                const int64_t row = block * blocks.num_rows + place - length;
                key_rows[i] = k + row * k_stride + head * own.key_width;
                value_rows[i] = v + row * v_stride + head * own.value_width;
            }
        }
        turn_keys(key_rows, count, own.key_width, turned);
        copy_rows(value_rows, count, own.value_width, depth, values);
        outer(queries, padded, num, turned, KEYS, own.key_width, scores, KEYS, KEYS);
        const auto visible = [&](int64_t i) {
            const int64_t seen = own.is_causal ? least(count, length + i / group + 1 - first) : count;
            return seen > 0 ? seen : 0;
        };
        soften(scores, num, visible, own.scale, softmax, kept);
        outer(scores, KEYS, num, values, depth, count, sums, depth, depth);
        for (int64_t i = 0; i < num; ++i) add_block(totals + i * depth, sums + i * depth, kept[i], depth);
    }
    for (int64_t i = 0; i < num; ++i) {
        float* to = o + ((block * blocks.num_rows + i / group) * own.heads + head * group + i % group) * own.value_width;
        for (int64_t c = 0; c < own.value_width; c += LANES)
            lanes_store(to + c, div(load(totals + i * depth + c), set1(softmax[i].mass)), own.value_width - c);
    }
}

static void block_attention(Context* context, const BlockAttention* own, const Blocks* blocks, const float* q,
                            int64_t q_stride, const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                            float* o) {
    const int64_t num = blocks->num_rows * (own->heads / own->key_heads);
    const int64_t padded = round_up(own->key_width, PANEL), depth = round_up(own->value_width, PANEL);
    const int64_t floats = num * (padded + KEYS + 2 * depth + 2) + round_up(num, LANES) + KEYS * (padded + depth);
    auto body = [&](int64_t index, int worker) {
        float* space = reinterpret_cast<float*>(scratch(context, worker, floats * 4));
        attend_block(*own, *blocks, index / own->key_heads, index % own->key_heads, q, q_stride, k, k_stride, v,
                     v_stride, o, space);
    };
    parallel(context, blocks->num_blocks * own->key_heads, body);
}

// joint [gate | change | out] and the memory before → tanh(out) and the memory after.
static void recur(Context* context, const float* joint, int64_t stride, const float* memory, int64_t memory_stride,
                  int64_t num_rows, int64_t width, float* mixed, float* after) {
    auto body = [&](int64_t row) {
        const float* from = joint + row * stride;
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t left = width - i;
            const F16 gate = sigmoid(lanes_load(from + i, left));
            const F16 change = tanh(lanes_load(from + width + i, left));
            const F16 old = mul(gate, lanes_load(memory + row * memory_stride + i, left));
            lanes_store(after + row * width + i, add(old, mul(sub(set1(1.0f), gate), change)), left);
            lanes_store(mixed + row * width + i, tanh(lanes_load(from + 2 * width + i, left)), left);
        }
    };
    for_rows(context, num_rows, body);
}

K3_INLINE F16 products(const float* x, const float* weight, int64_t width, F16 total) {
    for (int64_t i = 0; i < width; i += LANES)
        total = fma(lanes_load(x + i, width - i), lanes_load(weight + i, width - i), total);
    return total;
}

// sigmoid(([state | embedded] · weight + bias) / temperature) of num_rows rows of each block.
static void confidences(Context* context, const float* states, int64_t width, const float* embedded, int64_t rank,
                        const float* weight, float bias, const float* temperatures, int64_t count, int64_t num_rows,
                        float* y) {
    auto body = [&](int64_t row) {
        F16 total = products(states + row * width, weight, width, zero());
        if (embedded) total = products(embedded + row * rank, weight + width, rank, total);
        store(y + row, sigmoid(set1((sum(total) + bias) / temperatures[row % num_rows])), 1);
    };
    for_rows(context, count * num_rows, body);
}

// logits + bias without one id → scores, and a token of each row; draws null: greedy.
static void choose(Context* context, const Draws* draws, const float* logits, int64_t stride, const float* bias,
                   int64_t banned, int64_t offset, int64_t num_rows, int64_t count, float* scores, int64_t* tokens) {
    auto body = [&](int64_t row, int worker) {
        const float* from = logits + row * stride;
        float* own = scores + row * count;
        for (int64_t i = 0; i < count; i += LANES) {
            const int64_t left = count - i;
            const F16 given = lanes_load(from + i, left);
            lanes_store(own + i, bias ? add(given, lanes_load(bias + row * count + i, left)) : given, left);
        }
        own[banned] = -__builtin_inff();
        tokens[row] = draws ? drawn(context, worker, *draws, row, offset, own, count) : best_id(own, count);
    };
    parallel(context, num_rows, body);
}

}  // namespace K3_ISA
}  // namespace k3
