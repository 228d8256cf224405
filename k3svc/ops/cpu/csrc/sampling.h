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

// The k-th largest of values; memory of as many integers. Bisection over the bits, whose order is that of the values.
static float kth_largest(const float* values, int64_t count, int64_t k, int32_t* order) {
    for (int64_t i = 0; i < count; ++i) {
        int32_t bits;
        __builtin_memcpy(&bits, values + i, 4);
        order[i] = bits ^ ((bits >> 31) & INT32_MAX);
    }
    int64_t low = INT32_MIN, high = INT32_MAX;  // the largest number that at least k reach
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        const int32_t bound = static_cast<int32_t>(middle);
        int32_t reach = 0;
        for (int64_t i = 0; i < count; ++i) reach += order[i] >= bound;
        if (reach >= k)
            low = middle;
        else
            high = middle - 1;
    }
    const int32_t key = static_cast<int32_t>(low), bits = key ^ ((key >> 31) & INT32_MAX);
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

struct Filters {
    int64_t top_k;
    float top_p;
    float min_p;
};

// Whether id stays of what top-k left, with masses in float64 as reference_sampling.py (kept_ids) has them.
static bool stays_exactly(const float* logits, int64_t count, double temperature, const Filters& filters, float peak,
                          float floor, int64_t id) {
    const double top = static_cast<double>(peak) / temperature;
    const auto mass = [&](int64_t i) { return __builtin_exp(static_cast<double>(logits[i]) / temperature - top); };
    if (mass(id) < static_cast<double>(filters.min_p)) return false;
    if (filters.top_p >= 1.0f) return true;
    double whole = 0.0, before = 0.0;
    for (int64_t i = 0; i < count; ++i) {
        if (logits[i] < floor) continue;
        const double own = mass(i);
        whole += own;
        if (!(logits[i] > logits[id] || (logits[i] == logits[id] && i > id))) before += own;
    }
    return before > (1.0 - static_cast<double>(filters.top_p)) * whole;
}

// The pick among what top-k, top-p and min-p leave (reference_sampling.py, kept_ids). In the order of logit and id each
// of them drops a beginning: if the pick over all ids is dropped, so is all before it, and the next pick is among the
// rest. Masses are float32 where these can tell, float64 where not. space holds 3 * count floats.
static int64_t filtered_pick(const float* logits, int64_t count, double temperature, const Filters& filters,
                             uint64_t key, float* space) {
    float *mass = space + count, *scores = space + 2 * count;
    const float peak = logits[best_id(logits, count)], warmth = static_cast<float>(1.0 / temperature);
    if (!(peak - peak == 0.0f)) return pick(logits, count, temperature, key, space);
    float floor = -__builtin_inff();
    if (filters.top_k > 0 && filters.top_k < count)
        floor = kth_largest(logits, count, filters.top_k, reinterpret_cast<int32_t*>(space));
    const F16 lowest = set1(-__builtin_inff());
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t left = count - i;
        const F16 logit = lanes_load(logits + i, left);
        lanes_store(scores + i, select_less(logit, set1(floor), lowest, logit), left);
        const F16 power = exp(mul(sub(logit, set1(peak)), set1(warmth)));
        lanes_store(mass + i, select_less(logit, set1(floor), zero(), power), left);
    }
    double whole = 0.0;
    for (int64_t i = 0; i < count; ++i) whole += static_cast<double>(mass[i]);
    const double dropped = (1.0 - static_cast<double>(filters.top_p)) * whole, least_mass = static_cast<double>(filters.min_p);
    const double doubt = 1e-4;  // covers the rounding of float32 masses, and of their sum
    for (;;) {
        const int64_t chosen = pick(scores, count, temperature, key, space);
        const float own = scores[chosen];
        double before = 0.0;  // mass up to the chosen id, itself included
        bool is_last = true;
        for (int64_t i = 0; i < count; ++i) {
            const bool is_after = scores[i] > own || (scores[i] == own && i > chosen);
            if (is_after) is_last = false;
            // What an earlier pick dropped lies before as well.
            if (!is_after) before += static_cast<double>(mass[i]);
        }
        if (is_last) return chosen;
        const double own_mass = static_cast<double>(mass[chosen]);
        const bool has_mass = own_mass >= least_mass, is_nucleus = filters.top_p >= 1.0f || before > dropped;
        const bool is_doubtful = __builtin_fabs(own_mass - least_mass) <= doubt * least_mass ||
                                 (filters.top_p < 1.0f && __builtin_fabs(before - dropped) <= doubt * whole);
        if (is_doubtful ? stays_exactly(logits, count, temperature, filters, peak, floor, chosen)
                        : has_mass && is_nucleus)
            return chosen;
        for (int64_t i = 0; i < count; ++i)
            if (!(scores[i] > own || (scores[i] == own && i > chosen))) scores[i] = -__builtin_inff();
    }
}

// The token of a row of logits, its position `offset` further.
static int64_t drawn(Context* context, int worker, const Draws& draws, int64_t row, int64_t offset,
                     const float* logits, int64_t count) {
    const double temperature = static_cast<double>(draws.temperature[row]);
    if (temperature == 0.0) return best_id(logits, count);
    const uint64_t key = noise_key(draws.seed[row], draws.sample_index[row], draws.position[row] + offset);
    const Filters filters = {draws.top_k[row], draws.top_p[row], draws.min_p[row]};
    float* space = reinterpret_cast<float*>(scratch(context, worker, 3 * count * 4));
    if (filters.top_k > 0 || filters.top_p < 1.0f || filters.min_p > 0.0f)
        return filtered_pick(logits, count, temperature, filters, key, space);
    return pick(logits, count, temperature, key, space);
}

static void sample(Context* context, const Draws* draws, const float* logits, int64_t stride, int64_t num_rows,
                   int64_t count, int64_t* tokens) {
    auto body = [&](int64_t row, int worker) {
        tokens[row] = drawn(context, worker, *draws, row, 0, logits + row * stride, count);
    };
    parallel(context, num_rows, body);
}

}  // namespace K3_ISA
}  // namespace k3
