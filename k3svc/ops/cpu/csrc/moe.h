// Router and experts.
#pragma once

#include "rowwise.h"

namespace k3 {
namespace K3_ISA {

constexpr float RENORMALISE_EPS = 1e-20f;
constexpr int64_t ROUTED = 8;  // rows whose experts are chosen in turns, so that none waits for its own last choice
constexpr int64_t EXPERT_BYTES = 16 << 20;  // of intermediates, unless one row needs more

// Index of the largest of values, the lowest on ties; NaN counts as the smallest. -1: there are only NaN and -infinity.
// `count` is a multiple of 16.
K3_INLINE int64_t best_of(const float* values, int64_t count) {
    alignas(64) static const float numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F16 best = set1(-__builtin_inff()), index = set1(-1.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        const F16 value = load(values + i);
        index = select_less(best, value, add(load(numbers), set1(static_cast<float>(i))), index);
        best = select_less(best, value, value, best);
    }
    const F16 worse = set1(-__builtin_inff());
    return -static_cast<int64_t>(max(select_less(best, set1(max(best)), worse, negated(index))));
}

// Sets the values of all but the top groups to -infinity; a group counts as the sum of its two best.
K3_INLINE void keep_groups(float* ranked, int64_t num_experts, const Router& router, float* value) {
    const int64_t size = num_experts / router.num_groups;
    for (int64_t g = 0; g < router.num_groups; ++g) {
        float first = -__builtin_inff(), second = -__builtin_inff();
        for (int64_t i = g * size; i < (g + 1) * size; ++i) {
            if (ranked[i] > first) {
                second = first;
                first = ranked[i];
            } else if (ranked[i] > second) {
                second = ranked[i];
            }
        }
        value[g] = size > 1 ? first + second : first;
    }
    for (int64_t g = 0; g < router.num_groups; ++g) {
        int64_t better = 0;
        for (int64_t other = 0; other < router.num_groups; ++other)
            better += value[other] > value[g] || (value[other] == value[g] && other < g);
        if (better >= router.top_groups)
            for (int64_t i = g * size; i < (g + 1) * size; ++i) ranked[i] = -__builtin_inff();
    }
}

static void route(Context* context, const Weight* weight, const Router* router, const float* x, int64_t stride,
                  int64_t num_rows, int64_t* ids, float* weights) {
    const int64_t num_experts = weight->out, width = round_up(num_experts, LANES), top_k = router->top_k;
    float* scores = reinterpret_cast<float*>(scratch(context, -1, num_rows * num_experts * 4));
    linear(context, weight, x, stride, num_rows, scores);
    auto block = [&](int64_t index, int worker) {
        const int64_t first = index * ROUTED, count = least(ROUTED, num_rows - first);
        float* ranked = reinterpret_cast<float*>(scratch(context, worker, (2 * ROUTED * width + router->num_groups) * 4));
        float* probability = ranked + ROUTED * width;
        for (int64_t row = 0; row < count; ++row) {
            for (int64_t i = 0; i < num_experts; i += LANES) {
                const int64_t left = num_experts - i;
                const F16 score = sigmoid(lanes_load(scores + (first + row) * num_experts + i, left));
                store(probability + row * width + i, score);
                store(ranked + row * width + i, add(score, lanes_load(router->bias + i, left)));
            }
            for (int64_t i = num_experts; i < width; ++i) ranked[row * width + i] = -__builtin_inff();
            if (router->num_groups > 1)
                keep_groups(ranked + row * width, num_experts, *router, probability + ROUTED * width);
        }
        for (int64_t k = 0; k < top_k; ++k)
            for (int64_t row = 0; row < count; ++row) {
                int64_t best = best_of(ranked + row * width, width);
                if (best < 0) best = k;  // nothing but NaN is left: any expert of the layer
                ids[(first + row) * top_k + k] = best;
                weights[(first + row) * top_k + k] = probability[row * width + best];
                ranked[row * width + best] = -__builtin_inff();
            }
        for (int64_t row = 0; row < count; ++row) {
            float* own = weights + (first + row) * top_k;
            float total = 0.0f;
            for (int64_t k = 0; k < top_k; ++k) total = total + own[k];
            for (int64_t k = 0; k < top_k; ++k) {
                if (router->renormalize) own[k] = own[k] / (total + RENORMALISE_EPS);
                own[k] = own[k] * router->scale;
            }
        }
    };
    parallel(context, (num_rows + ROUTED - 1) / ROUTED, block);
}

K3_INLINE Weight expert(const Weight& all, int64_t index) {
    Weight one = all;
    one.data = static_cast<const char*>(all.data) + index * all.num_bytes;
    return one;
}

// Rows of x that fit the intermediates: pairs of row and chosen expert sorted by expert, so that an expert's weights
// are read once; rows are read in place.
static void expert_block(Context* context, const Weight& gate_up, const Weight& down, int64_t num_experts,
                         const Glu& kind, const float* x, int64_t stride, int64_t num_rows, const int64_t* ids,
                         const float* weights, int64_t top_k, float* y) {
    const int64_t pairs = num_rows * top_k, wide = gate_up.out, inner = wide / 2, width = down.out;
    char* memory = scratch(context, -1, pairs * (16 + 4 * (wide + width)) + (num_experts + 1) * 8 + 128);
    int64_t* begin = reinterpret_cast<int64_t*>(memory);
    int64_t* row_of = begin + num_experts + 1;
    int64_t* place_of = row_of + pairs;
    float* hidden = reinterpret_cast<float*>(memory + round_up((num_experts + 1 + 2 * pairs) * 8, 64));
    float* results = hidden + pairs * wide;

    for (int64_t e = 0; e <= num_experts; ++e) begin[e] = 0;
    for (int64_t pair = 0; pair < pairs; ++pair) ++begin[ids[pair] + 1];
    for (int64_t e = 0; e < num_experts; ++e) begin[e + 1] += begin[e];
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t place = begin[ids[pair]]++;
        row_of[place] = pair / top_k;
        place_of[pair] = place;
    }
    // begin[e] is now where expert e ends.
    const auto after = [&](int64_t e) {
        for (int64_t other = e + 1; other < num_experts; ++other)
            if (begin[other] > begin[e]) return expert(gate_up, other).data;
        return upcoming(context);
    };
    auto run_expert = [&](int64_t e, int worker) {
        const int64_t first = e == 0 ? 0 : begin[e - 1], count = begin[e] - first;
        if (count == 0) return;
        float* space = reinterpret_cast<float*>(scratch(context, worker, MULTIPLY_BYTES));
        const Weight up = expert(gate_up, e), back = expert(down, e);
        float* own = hidden + first * wide;
        multiply({x, stride, row_of + first}, count, up, 0, num_panels(up), own, wide, space, back.data);
        for (int64_t i = 0; i < count; ++i) glu_row(kind, own + i * wide, inner, own + i * wide);
        multiply({own, wide, nullptr}, count, back, 0, num_panels(back), results + first * width, width, space, after(e));
    };
    parallel(context, num_experts, run_expert);
    auto combine = [&](int64_t row) {
        const int64_t* place = place_of + row * top_k;
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t left = width - i;
            F16 total = mul(set1(weights[row * top_k]), lanes_load(results + place[0] * width + i, left));
            for (int64_t k = 1; k < top_k; ++k)
                total = fma(set1(weights[row * top_k + k]), lanes_load(results + place[k] * width + i, left), total);
            lanes_store(y + row * width + i, total, left);
        }
    };
    for_rows(context, num_rows, combine);
}

static void experts(Context* context, const Weight* gate_up, const Weight* down, int64_t num_experts, const Glu* kind,
                    const float* x, int64_t stride, int64_t num_rows, const int64_t* ids, const float* weights,
                    int64_t top_k, float* y) {
    const int64_t row_bytes = top_k * 4 * (gate_up->out + down->out);
    const int64_t block = row_bytes < EXPERT_BYTES ? EXPERT_BYTES / row_bytes : 1;
    for (int64_t row = 0; row < num_rows; row += block)
        expert_block(context, *gate_up, *down, num_experts, *kind, x + row * stride, stride,
                     least(block, num_rows - row), ids + row * top_k, weights + row * top_k, top_k,
                     y + row * down->out);
}

}  // namespace K3_ISA
}  // namespace k3
