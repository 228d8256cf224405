// Norms, gates and the residual mixture: rows that know nothing of each other.
#pragma once

#include "functions.h"
#include "products.h"

namespace k3 {
namespace K3_ISA {

constexpr int64_t ROW_BLOCK = 32;  // rows of a unit of work

template <class F>
K3_INLINE void for_rows(Context* context, int64_t num_rows, F& body) {
    auto block = [&](int64_t index, int) {
        const int64_t end = least((index + 1) * ROW_BLOCK, num_rows);
        for (int64_t row = index * ROW_BLOCK; row < end; ++row) body(row);
    };
    parallel(context, (num_rows + ROW_BLOCK - 1) / ROW_BLOCK, block);
}

K3_INLINE float square_sum(const float* x, int64_t width) {
    F16 total = zero();
    for (int64_t i = 0; i < width; i += LANES) {
        const F16 value = lanes_load(x + i, width - i);
        total = fma(value, value, total);
    }
    return sum(total);
}

K3_INLINE float inverse_rms(const float* x, int64_t width, float eps) {
    return 1.0f / __builtin_sqrtf(square_sum(x, width) / static_cast<float>(width) + eps);
}

static void rms_norm(Context* context, const float* x, int64_t stride, const float* weight, int64_t num_rows,
                     int64_t width, float eps, float* y) {
    auto body = [&](int64_t row) {
        const float* from = x + row * stride;
        const F16 scale = set1(inverse_rms(from, width, eps));
        for (int64_t i = 0; i < width; i += LANES) {
            const F16 normed = mul(lanes_load(from + i, width - i), scale);
            lanes_store(y + row * width + i, mul(normed, lanes_load(weight + i, width - i)), width - i);
        }
    };
    for_rows(context, num_rows, body);
}

static void gated_norm(Context* context, const float* o, const float* z, int64_t z_stride, const float* weight,
                       int64_t num_rows, int64_t heads, int64_t width, float eps, float* y) {
    auto body = [&](int64_t row) {
        for (int64_t head = 0; head < heads; ++head) {
            const float* from = o + (row * heads + head) * width;
            const float* gate = z + row * z_stride + head * width;
            float* to = y + (row * heads + head) * width;
            const F16 scale = set1(inverse_rms(from, width, eps));
            for (int64_t i = 0; i < width; i += LANES) {
                const int64_t left = width - i;
                const F16 normed = mul(mul(lanes_load(from + i, left), scale), lanes_load(weight + i, left));
                lanes_store(to + i, div(normed, sigmoid_divisor(lanes_load(gate + i, left))), left);
            }
        }
    };
    for_rows(context, num_rows, body);
}

constexpr int64_t MIXED = 8;  // rows that are mixed at a time, so that none waits for the sums and weights of another

static void mix_residual(Context* context, const float* const* rows, const int64_t* strides, int64_t count,
                         const float* score, int64_t num_rows, int64_t width, float eps, float* y) {
    auto body = [&](int64_t index, int) {
        alignas(64) float weights[MIXED][LANES];
        const int64_t first = index * MIXED, own_rows = least(MIXED, num_rows - first);
        for (int64_t own = 0; own < own_rows; ++own) {
            store(weights[own], set1(-__builtin_inff()));
            for (int64_t r = 0; r < count; ++r) {
                const float* x = rows[r] + (first + own) * strides[r];
                F16 squares = zero(), dots = zero();
                for (int64_t i = 0; i < width; i += LANES) {
                    const F16 value = lanes_load(x + i, width - i);
                    squares = fma(value, value, squares);
                    dots = fma(value, lanes_load(score + i, width - i), dots);
                }
                const float mean = sum(squares) / static_cast<float>(width);
                weights[own][r] = sum(dots) / __builtin_sqrtf(mean + eps);
            }
        }
        for (int64_t own = 0; own < own_rows; ++own) {
            const F16 scores = load(weights[own]);
            const F16 powers = exp(sub(scores, set1(max(scores))));
            store(weights[own], div(powers, set1(sum(powers))));
        }
        for (int64_t own = 0; own < own_rows; ++own) {
            const int64_t row = first + own;
            for (int64_t i = 0; i < width; i += LANES) {
                F16 mixed = mul(set1(weights[own][0]), lanes_load(rows[0] + row * strides[0] + i, width - i));
                for (int64_t r = 1; r < count; ++r)
                    mixed = fma(set1(weights[own][r]), lanes_load(rows[r] + row * strides[r] + i, width - i), mixed);
                lanes_store(y + row * width + i, mixed, width - i);
            }
        }
    };
    parallel(context, (num_rows + MIXED - 1) / MIXED, body);
}

static void add_rows(Context* context, const float* x, int64_t x_stride, const float* y, int64_t y_stride, int64_t num_rows,
                int64_t width, float* sums) {
    auto body = [&](int64_t row) {
        for (int64_t i = 0; i < width; i += LANES) {
            const F16 total = add(lanes_load(x + row * x_stride + i, width - i), lanes_load(y + row * y_stride + i, width - i));
            lanes_store(sums + row * width + i, total, width - i);
        }
    };
    for_rows(context, num_rows, body);
}

// SiTU as one quotient: tanh(a) = -m / (2 + m) with m = exp(-2|a|) - 1 and the sign of a, and sigmoid(g) = e / (1 + e)
// with e = exp(-|g|), or 1 / (1 + e) where g is not negative. All divisors lie between 1 and 2.
K3_INLINE F16 situ_lanes(const Glu& glu, F16 gate, F16 up) {
    const F16 size = abs(gate), one = set1(1.0f), two = set1(2.0f);
    const F16 e = exp(negated(size)), m = expm1_of_negative(mul(size, set1(-2.0f / glu.beta)));
    const float scale = glu.has_linear_beta ? glu.beta * glu.linear_beta : glu.beta;
    const F16 over = mul(mul(set1(scale), copy_sign(m, gate)), select_less(gate, zero(), e, one));
    const F16 under = mul(add(two, m), add(one, e));
    if (!glu.has_linear_beta) return mul(div(over, under), up);
    const F16 m_up = expm1_of_negative(mul(abs(up), set1(-2.0f / glu.linear_beta)));
    return div(mul(over, copy_sign(m_up, up)), mul(under, add(two, m_up)));
}

K3_INLINE F16 glu_lanes(const Glu& glu, F16 gate, F16 up) {
    return glu.is_situ ? situ_lanes(glu, gate, up) : mul(silu(gate), up);
}

// [gate | up] → y, which may be x itself.
K3_INLINE void glu_row(const Glu& glu, const float* x, int64_t width, float* y) {
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t left = width - i;
        lanes_store(y + i, glu_lanes(glu, lanes_load(x + i, left), lanes_load(x + width + i, left)), left);
    }
}

static void glu(Context* context, const Glu* kind, const float* x, int64_t stride, int64_t num_rows, int64_t width,
                float* y) {
    auto body = [&](int64_t row) { glu_row(*kind, x + row * stride, width, y + row * width); };
    for_rows(context, num_rows, body);
}

static void sigmoid_gate(Context* context, const float* x, int64_t x_stride, const float* gate, int64_t gate_stride,
                         int64_t num_rows, int64_t width, float* y) {
    auto body = [&](int64_t row) {
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t left = width - i;
            const F16 divisor = sigmoid_divisor(lanes_load(gate + row * gate_stride + i, left));
            lanes_store(y + row * width + i, div(lanes_load(x + row * x_stride + i, left), divisor), left);
        }
    };
    for_rows(context, num_rows, body);
}

}  // namespace K3_ISA
}  // namespace k3
