// Sixteen float lanes. Every instruction set gives the same bits: no operation here depends on how many lanes a register
// holds, products and sums are fused only where `fma` says so, and sums over lanes follow one fixed tree.
//
// min and max return the second argument when either is NaN, so that clamps written as max(low, x) keep a NaN.
// Sixteen bfloat16 lie in memory as pairs of lanes i and i + 8: a shift and a mask take eight pairs apart.
// No standard library in here: its inline functions would be merged over files compiled for different machines.
#pragma once

#include <cstdint>

#if defined(K3_AVX512) || defined(K3_AVX2)
#include <immintrin.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
// Checked code is too large to be inlined everywhere.
#define K3_INLINE [[maybe_unused]] static inline
#else
#define K3_INLINE static inline __attribute__((always_inline))
#endif

namespace k3 {
namespace K3_ISA {

constexpr int LANES = 16;

#if defined(K3_AVX512)

struct F16 {
    __m512 v;
};

K3_INLINE __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
K3_INLINE F16 set1(float x) { return {_mm512_set1_ps(x)}; }
K3_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
K3_INLINE F16 load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
K3_INLINE void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
K3_INLINE void store(float* p, F16 x, int n) { _mm512_mask_storeu_ps(p, first(n), x.v); }
K3_INLINE F16 load(const uint16_t* p) {
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    // Bytes of a lane, from its group of four lanes, 80 for zeros: the lower word of a pair goes up in the first eight
    // lanes, the upper one stays in the others. One instruction, where a permutation across all lanes is two.
    const __m128i lower = _mm_set_epi32(0x0D0C8080, 0x09088080, 0x05048080, 0x01008080);
    const __m128i upper = _mm_set_epi32(0x0F0E8080, 0x0B0A8080, 0x07068080, 0x03028080);
    const __m512i from = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_broadcastsi128_si256(lower)),
                                            _mm256_broadcastsi128_si256(upper), 1);
    return {_mm512_castsi512_ps(_mm512_shuffle_epi8(twice, from))};
}
// Two sixteens that lie side by side, by a shift and a mask of both at once: the ports that shuffle multiply too. x gets
// the first eight lanes of both, y the last; `unmix` brings what was made of them back into order.
K3_INLINE void load_mixed(const uint16_t* p, F16& x, F16& y) {
    const __m512i pairs = _mm512_loadu_si512(p);
    x.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    y.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
K3_INLINE void unmix(F16& x, F16& y) {
    const __m512 low = x.v, high = y.v;
    x.v = _mm512_shuffle_f32x4(low, high, 0x44);
    y.v = _mm512_shuffle_f32x4(low, high, 0xEE);
}
K3_INLINE F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
K3_INLINE F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
K3_INLINE F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
K3_INLINE F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
K3_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
K3_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
K3_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
K3_INLINE F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
// a < b ? x : y
K3_INLINE F16 select_less(F16 a, F16 b, F16 x, F16 y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
K3_INLINE F16 copy_sign(F16 magnitude, F16 sign) {
    const __m512i top = _mm512_set1_epi32(INT32_MIN);
    const __m512i bits = _mm512_ternarylogic_epi32(top, _mm512_castps_si512(sign.v), _mm512_castps_si512(magnitude.v), 0xCA);
    return {_mm512_castsi512_ps(bits)};
}
// 2^n of n + 1.5 · 2^23
K3_INLINE F16 pow2_of_shifted(F16 n) {
    const __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(n.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x3F800000)))};
}

// Rows become columns.
K3_INLINE void transpose(F16 r[16]) {
    __m512 a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        a[2 * i] = _mm512_unpacklo_ps(r[2 * i].v, r[2 * i + 1].v);
        a[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i].v, r[2 * i + 1].v);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        b[4 * i] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
        b[4 * i + 1] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0xEE);
        b[4 * i + 2] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
        b[4 * i + 3] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xEE);
    }
    // b[4i + j]: rows 4i..4i+3, columns j, j + 4, j + 8, j + 12.
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512 low = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88);
        const __m512 high = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xDD);
        const __m512 low2 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);
        const __m512 high2 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xDD);
        r[j].v = _mm512_shuffle_f32x4(low, low2, 0x88);
        r[j + 8].v = _mm512_shuffle_f32x4(low, low2, 0xDD);
        r[j + 4].v = _mm512_shuffle_f32x4(high, high2, 0x88);
        r[j + 12].v = _mm512_shuffle_f32x4(high, high2, 0xDD);
    }
}

// Columns of 16 rows that lie `stride` apart. Halves of rows i and i + 4 come into a register by loads alone, so that a
// quarter of the shuffles of `transpose` is not needed.
K3_INLINE void load_transposed(const float* rows, int64_t stride, F16 (&out)[LANES]) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        __m512 r[8], a[8], b[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const float* row = rows + (i % 4 + i / 4 * 8) * stride + half * 8;
            r[i] = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(row)), _mm256_loadu_ps(row + 4 * stride), 1);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            a[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            a[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            b[4 * i] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
            b[4 * i + 1] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0xEE);
            b[4 * i + 2] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
            b[4 * i + 3] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xEE);
        }
        // b[4i + j]: rows 8i..8i+3 of columns j and j + 4 of this half, then rows 8i+4..8i+7 of them.
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            out[half * 8 + j].v = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88);
            out[half * 8 + 4 + j].v = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xDD);
        }
    }
}

// Lane i becomes the sum of r[i], by the tree of `sum`.
K3_INLINE F16 sums(const F16 r[16]) {
    __m512 eights[8], fours[4], twos[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const __m512 x = r[i % 4 + i / 4 * 8].v, y = r[i % 4 + i / 4 * 8 + 4].v;
        eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xEE));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512 x = eights[i], y = eights[i + 4];
        fours[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m512 x = fours[2 * i], y = fours[2 * i + 1];
        twos[i] = _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xEE));
    }
    return {_mm512_add_ps(_mm512_shuffle_ps(twos[0], twos[1], 0x88), _mm512_shuffle_ps(twos[0], twos[1], 0xDD))};
}

K3_INLINE __m256 low_half(F16 x) { return _mm512_castps512_ps256(x.v); }
K3_INLINE __m256 high_half(F16 x) { return _mm512_extractf32x8_ps(x.v, 1); }

#elif defined(K3_AVX2)

struct F16 {
    __m256 a, b;
};

K3_INLINE __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
K3_INLINE F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
K3_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
K3_INLINE F16 load(const float* p, int n) {
    return {_mm256_maskload_ps(p, first(n)), _mm256_maskload_ps(p + 8, first(n - 8))};
}
K3_INLINE void store(float* p, F16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
K3_INLINE void store(float* p, F16 x, int n) {
    _mm256_maskstore_ps(p, first(n), x.a);
    _mm256_maskstore_ps(p + 8, first(n - 8), x.b);
}
K3_INLINE F16 load(const uint16_t* p) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i upper = _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(upper)};
}
K3_INLINE F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
K3_INLINE F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
K3_INLINE F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
K3_INLINE F16 div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
K3_INLINE F16 fma(F16 x, F16 y, F16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
K3_INLINE F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
K3_INLINE F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
K3_INLINE F16 abs(F16 x) {
    const __m256 top = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(top, x.a), _mm256_andnot_ps(top, x.b)};
}
K3_INLINE F16 select_less(F16 a, F16 b, F16 x, F16 y) {
    return {
        _mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
        _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ)),
    };
}
K3_INLINE __m256 copy_sign8(__m256 magnitude, __m256 sign) {
    const __m256 top = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_and_ps(top, sign), _mm256_andnot_ps(top, magnitude));
}
K3_INLINE F16 copy_sign(F16 magnitude, F16 sign) {
    return {copy_sign8(magnitude.a, sign.a), copy_sign8(magnitude.b, sign.b)};
}
K3_INLINE __m256 pow2_of_shifted8(__m256 n) {
    const __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(0x3F800000)));
}
K3_INLINE F16 pow2_of_shifted(F16 n) { return {pow2_of_shifted8(n.a), pow2_of_shifted8(n.b)}; }

K3_INLINE void transpose8(__m256 r[8]) {
    __m256 a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
        b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xEE);
        b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
        b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        r[j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
        r[j + 4] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
    }
}

K3_INLINE void transpose(F16 r[16]) {
    __m256 block[4][8];
    for (int i = 0; i < 8; ++i) {
        block[0][i] = r[i].a;
        block[1][i] = r[i].b;
        block[2][i] = r[i + 8].a;
        block[3][i] = r[i + 8].b;
    }
    for (int i = 0; i < 4; ++i) transpose8(block[i]);
    for (int i = 0; i < 8; ++i) {
        r[i] = {block[0][i], block[2][i]};
        r[i + 8] = {block[1][i], block[3][i]};
    }
}

K3_INLINE __m256 sums8(const F16 r[8]) {
    __m256 fours[4], twos[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m256 x = _mm256_add_ps(r[i].a, r[i].b), y = _mm256_add_ps(r[i + 4].a, r[i + 4].b);
        fours[i] = _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m256 x = fours[2 * i], y = fours[2 * i + 1];
        twos[i] = _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xEE));
    }
    return _mm256_add_ps(_mm256_shuffle_ps(twos[0], twos[1], 0x88), _mm256_shuffle_ps(twos[0], twos[1], 0xDD));
}
K3_INLINE F16 sums(const F16 r[16]) { return {sums8(r), sums8(r + 8)}; }

K3_INLINE __m256 low_half(F16 x) { return x.a; }
K3_INLINE __m256 high_half(F16 x) { return x.b; }

#else

struct F16 {
    float v[16];
};

#define K3_LANES(expression)                  \
    F16 out;                                  \
    for (int i = 0; i < 16; ++i) out.v[i] = (expression); \
    return out

K3_INLINE float of_bits(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
K3_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}
K3_INLINE F16 set1(float x) { K3_LANES(x); }
K3_INLINE F16 load(const float* p) { K3_LANES(p[i]); }
K3_INLINE F16 load(const float* p, int n) { K3_LANES(i < n ? p[i] : 0.0f); }
K3_INLINE void store(float* p, F16 x) {
    for (int i = 0; i < 16; ++i) p[i] = x.v[i];
}
K3_INLINE void store(float* p, F16 x, int n) {
    for (int i = 0; i < n; ++i) p[i] = x.v[i];
}
K3_INLINE F16 load(const uint16_t* p) {
    K3_LANES(of_bits(static_cast<uint32_t>(p[i < 8 ? 2 * i : 2 * i - 15]) << 16));
}
K3_INLINE F16 add(F16 a, F16 b) { K3_LANES(a.v[i] + b.v[i]); }
K3_INLINE F16 sub(F16 a, F16 b) { K3_LANES(a.v[i] - b.v[i]); }
K3_INLINE F16 mul(F16 a, F16 b) { K3_LANES(a.v[i] * b.v[i]); }
K3_INLINE F16 div(F16 a, F16 b) { K3_LANES(a.v[i] / b.v[i]); }
K3_INLINE F16 fma(F16 a, F16 b, F16 c) { K3_LANES(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
K3_INLINE F16 min(F16 a, F16 b) { K3_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
K3_INLINE F16 max(F16 a, F16 b) { K3_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
K3_INLINE F16 abs(F16 a) { K3_LANES(of_bits(bits_of(a.v[i]) & 0x7FFFFFFFu)); }
K3_INLINE F16 select_less(F16 a, F16 b, F16 x, F16 y) { K3_LANES(a.v[i] < b.v[i] ? x.v[i] : y.v[i]); }
K3_INLINE F16 copy_sign(F16 m, F16 s) {
    K3_LANES(of_bits((bits_of(s.v[i]) & 0x80000000u) | (bits_of(m.v[i]) & 0x7FFFFFFFu)));
}
K3_INLINE F16 pow2_of_shifted(F16 n) { K3_LANES(of_bits((bits_of(n.v[i]) << 23) + 0x3F800000u)); }
K3_INLINE void transpose(F16 r[16]) {
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < i; ++j) {
            const float x = r[i].v[j];
            r[i].v[j] = r[j].v[i];
            r[j].v[i] = x;
        }
}
K3_INLINE float sum(F16 x) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x.v[i] = x.v[i] + x.v[i + width];
    return x.v[0];
}
K3_INLINE F16 sums(const F16 r[16]) {
    F16 out;
    for (int i = 0; i < 16; ++i) out.v[i] = sum(r[i]);
    return out;
}
K3_INLINE float max(F16 x) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x.v[i] = x.v[i] > x.v[i + width] ? x.v[i] : x.v[i + width];
    return x.v[0];
}

#undef K3_LANES
#endif

#if defined(K3_AVX512) || defined(K3_AVX2)
// Lane i with lane i + 8, then + 4, + 2, + 1.
K3_INLINE float sum(F16 x) {
    const __m256 eight = _mm256_add_ps(low_half(x), high_half(x));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
K3_INLINE float max(F16 x) {
    const __m256 eight = _mm256_max_ps(low_half(x), high_half(x));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#endif

#if !defined(K3_AVX512)
K3_INLINE void load_mixed(const uint16_t* p, F16& x, F16& y) {
    x = load(p);
    y = load(p + LANES);
}
K3_INLINE void unmix(F16&, F16&) {}
K3_INLINE void load_transposed(const float* rows, int64_t stride, F16 (&out)[LANES]) {
    for (int i = 0; i < LANES; ++i) out[i] = load(rows + i * stride);
    transpose(out);
}
#endif

K3_INLINE F16 zero() { return set1(0.0f); }
K3_INLINE F16 lanes_load(const float* p, int64_t left) {
    return left >= LANES ? load(p) : load(p, static_cast<int>(left));
}
K3_INLINE void lanes_store(float* p, F16 x, int64_t left) {
    if (left >= LANES)
        store(p, x);
    else
        store(p, x, static_cast<int>(left));
}
K3_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
K3_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace K3_ISA
}  // namespace k3
