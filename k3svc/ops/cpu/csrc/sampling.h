// The choice of a token by Gumbel noise: the argmax of logit / temperature + noise over the whole vocabulary, lowest id
// on ties, in float64. The noise is that of k3svc/ops/reference_sampling.py.
//
// Only few ids need their noise. An id with scaled logit s beats the best score so far iff -ln(u) < exp(s - best), and
// 1 - u <= -ln(u): where 1 - u, a matter of integers, is above that bound, the id is out.
#pragma once

#include "functions.h"
#include "kernels.h"

namespace k3 {
namespace K3_ISA {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
constexpr double STEPS = 4503599627370496.0;  // 2^52 values of u

K3_INLINE uint64_t mix_bits(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

K3_INLINE double gumbel(uint64_t step) {
    return -__builtin_log(-__builtin_log((static_cast<double>(step) + 0.5) / STEPS));
}

// The lowest of the ids with the largest logit; NaN counts as the smallest.
K3_INLINE int64_t best_id(const float* logits, int64_t count) {
    F16 tops = set1(-__builtin_inff());
    int64_t id = 0;
    for (; id + LANES <= count; id += LANES) tops = max(load(logits + id), tops);
    float top = max(tops);
    for (; id < count; ++id) top = logits[id] > top ? logits[id] : top;
    for (id = 0; id < count; ++id)
        if (logits[id] == top) return id;
    return 0;
}

K3_INLINE uint64_t noise_key(int64_t seed, int64_t sample_index, int64_t position) {
    uint64_t key = mix_bits(static_cast<uint64_t>(seed) + GOLDEN);
    key = mix_bits((key ^ static_cast<uint64_t>(sample_index)) + GOLDEN);
    return mix_bits((key ^ static_cast<uint64_t>(position)) + GOLDEN);
}

// Temperature 0 picks without noise. space holds as many floats as there are logits.
static int64_t pick(const float* logits, int64_t count, double temperature, uint64_t key, float* space) {
    const auto step = [&](int64_t id) { return mix_bits(key + GOLDEN * static_cast<uint64_t>(id + 1)) >> 12; };
    const auto scaled = [&](int64_t id) { return static_cast<double>(logits[id]) / temperature; };

    int64_t chosen = best_id(logits, count);
    if (temperature == 0.0) return chosen;
    const double peak = scaled(chosen);
    double best = peak + gumbel(step(chosen));
    const F16 top = set1(logits[chosen]), warmth = set1(static_cast<float>(1.0 / temperature));
    for (int64_t id = 0; id < count; id += LANES) {
        const F16 below = mul(sub(lanes_load(logits + id, count - id), top), warmth);
        lanes_store(space + id, exp(below), count - id);
    }
    const double slack = 1.001;  // covers the rounding of what is in space
    double reach = __builtin_exp(peak - best) * slack * STEPS;
    for (int64_t id = 0; id < count; ++id) {
        const uint64_t own = step(id);
        const double rest = STEPS - 0.5 - static_cast<double>(static_cast<int64_t>(own));
        if (rest > static_cast<double>(space[id]) * reach) continue;
        const double score = scaled(id) + gumbel(own);
        if (score > best || (score == best && id < chosen)) {
            best = score;
            chosen = id;
            reach = __builtin_exp(peak - best) * slack * STEPS;
        }
    }
    return chosen;
}

static int64_t gumbel_pick(Context* context, const float* logits, int64_t count, double temperature, int64_t seed,
                           int64_t sample_index, int64_t position) {
    float* space = reinterpret_cast<float*>(scratch(context, -1, count * 4));
    return pick(logits, count, temperature, noise_key(seed, sample_index, position), space);
}

}  // namespace K3_ISA
}  // namespace k3
