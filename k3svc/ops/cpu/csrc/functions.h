// exp, logarithm and what is made of them, from polynomials (Cephes, single precision, about 1 to 2 ulp), so that no
// mathematical library decides bits. NaN goes in and comes out.
#pragma once

#include "vector.h"

namespace k3 {
namespace K3_ISA {

// exp(x) = scale · (1 + r + r² · p), scale a power of two, for x from -87.3 to 88.3.
struct Power {
    F16 scale;
    F16 r;
    F16 p;
};

K3_INLINE Power power(F16 x) {
    const F16 shift = set1(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
    const F16 shifted = fma(x, set1(1.44269504088896341f), shift);
    const F16 n = sub(shifted, shift);
    F16 r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    F16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    return {pow2_of_shifted(shifted), r, p};
}

// 0 below -87.3, and 2^127 · 1.3 from 88.3 on.
K3_INLINE F16 exp(F16 x) {
    const F16 low = set1(-87.3f);
    const Power own = power(max(low, min(set1(88.3f), x)));
    return select_less(x, low, zero(), mul(fma(own.p, mul(own.r, own.r), add(own.r, set1(1.0f))), own.scale));
}

// exp(x) - 1 for x <= 0, near 0 as exact as far from it.
K3_INLINE F16 expm1_of_negative(F16 x) {
    const Power own = power(max(set1(-87.3f), x));
    return fma(own.scale, fma(own.p, mul(own.r, own.r), own.r), sub(own.scale, set1(1.0f)));
}

K3_INLINE F16 negated(F16 x) { return mul(x, set1(-1.0f)); }

// 1 + exp(-x): the divisor that makes a sigmoid.
K3_INLINE F16 sigmoid_divisor(F16 x) { return add(set1(1.0f), exp(negated(x))); }
K3_INLINE F16 sigmoid(F16 x) { return div(set1(1.0f), sigmoid_divisor(x)); }
K3_INLINE F16 silu(F16 x) { return div(x, sigmoid_divisor(x)); }

K3_INLINE F16 tanh(F16 x) {
    const F16 size = abs(x);
    const F16 z = mul(x, x);
    F16 p = set1(-5.70498872745e-3f);
    p = fma(p, z, set1(2.06390887954e-2f));
    p = fma(p, z, set1(-5.37397155531e-2f));
    p = fma(p, z, set1(1.33314422036e-1f));
    p = fma(p, z, set1(-3.33332819422e-1f));
    const F16 small = fma(mul(p, z), x, x);
    const F16 grown = add(exp(add(size, size)), set1(1.0f));
    const F16 large = copy_sign(sub(set1(1.0f), div(set1(2.0f), grown)), x);
    return select_less(size, set1(0.625f), small, large);
}

// log(1 + t) for t in [0, 1].
K3_INLINE F16 log1p_unit(F16 t) {
    const F16 one = set1(1.0f);
    const F16 u = add(one, t);
    const F16 lost = div(sub(t, sub(u, one)), u);
    const F16 root2 = set1(1.41421356237f);
    const F16 halves = select_less(root2, u, one, zero());
    const F16 x = sub(select_less(root2, u, mul(u, set1(0.5f)), u), one);
    const F16 z = mul(x, x);
    F16 p = set1(7.0376836292e-2f);
    p = fma(p, x, set1(-1.1514610310e-1f));
    p = fma(p, x, set1(1.1676998740e-1f));
    p = fma(p, x, set1(-1.2420140846e-1f));
    p = fma(p, x, set1(1.4249322787e-1f));
    p = fma(p, x, set1(-1.6668057665e-1f));
    p = fma(p, x, set1(2.0000714765e-1f));
    p = fma(p, x, set1(-2.4999993993e-1f));
    p = fma(p, x, set1(3.3333331174e-1f));
    F16 y = mul(mul(x, z), p);
    y = fma(halves, set1(-2.12194440e-4f), y);
    y = fma(z, set1(-0.5f), y);
    y = add(x, y);
    y = fma(halves, set1(0.693359375f), y);
    return add(y, lost);
}

// log(1 + exp(x))
K3_INLINE F16 softplus(F16 x) { return add(max(zero(), x), log1p_unit(exp(negated(abs(x))))); }

}  // namespace K3_ISA
}  // namespace k3
