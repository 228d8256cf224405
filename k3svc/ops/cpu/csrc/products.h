// Matrix products. An output is a sum over blocks of 256 inputs, in ascending order, each a chain of fused
// multiply-adds in ascending order: it depends on its own row and weights alone, never on the tile that computed it.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace k3 {
namespace K3_ISA {

constexpr int64_t PANEL = 32;
constexpr int64_t DEPTH = 256;
constexpr int64_t GROUP_TILES = 8;  // row tiles that share a pass over the weights

#if defined(K3_AVX512)
constexpr int ROWS = 12;  // of a tile over packed rows or float32 blocks
constexpr bool PACKS = true;
#else
constexpr int ROWS = 3;
constexpr bool PACKS = false;
#endif
constexpr int64_t PACKED_FROM = 49;  // rows; fewer are not read often enough to pay for it

// Rows of a tile that reads them in place.
template <class W>
constexpr int direct_tile() {
#if defined(K3_AVX512)
    return 8;
#elif defined(K3_AVX2)
    return sizeof(W) == 2 ? 6 : 3;
#else
    return 3;
#endif
}

// Strips of 16 columns that a tile of M rows takes at once: enough sums to keep the adders busy, and no more than the
// registers hold; bfloat16 needs two of them to be taken apart.
template <int M, class W>
constexpr int strips() {
#if defined(K3_AVX512)
    return M == 1 ? 8 : M == 2 ? 4 : 2;
#elif defined(K3_AVX2)
    return M == 1 ? 4 : M == 2 || (M == 3 && sizeof(W) == 4) ? 2 : 1;
#else
    return M == 1 ? 4 : 2;
#endif
}

template <class F>
K3_INLINE void parallel(Context* context, int64_t count, F& body) {
    run(context, count, [](void* f, int64_t index, int worker) { (*static_cast<F*>(f))(index, worker); }, &body);
}

struct Rows {
    const float* x;
    int64_t stride;
    const int64_t* index;  // rows to take, or null for all in order

    const float* at(int64_t i) const { return x + (index ? index[i] : i) * stride; }
};

// Memory that a tile asks for while it computes: `lines` of them an input, `step` bytes apart, from `at` on.
struct Ahead {
    const char* at;
    int64_t step;
};

template <int LINES>
K3_INLINE void fetch(const Ahead& ahead, int64_t k) {
#pragma GCC unroll 8
    for (int line = 0; line < LINES; ++line) __builtin_prefetch(ahead.at + (k * LINES + line) * ahead.step);
}

// M rows times S strips from w on: strips of one panel lie side by side, panels panel_stride apart.
template <int M, int S, int LINES, class W>
K3_INLINE void dot_tile(const float* const* rows, const W* w, int64_t panel_stride, int64_t ldw, int64_t depth,
                        const Ahead& ahead, F16 (&acc)[M][S]) {
    constexpr bool MIXES = sizeof(W) == 2 && S % 2 == 0;
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
        for (int s = 0; s < S; ++s) acc[i][s] = zero();
    for (int64_t k = 0; k < depth; ++k) {
        F16 column[S];
        fetch<LINES>(ahead, k);
        if constexpr (MIXES) {
#pragma GCC unroll 4
            for (int s = 0; s < S; s += 2) load_mixed(w + s / 2 * panel_stride + k * ldw, column[s], column[s + 1]);
        } else {
#pragma GCC unroll 8
            for (int s = 0; s < S; ++s) column[s] = load(w + s / 2 * panel_stride + k * ldw + s % 2 * LANES);
        }
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
            const F16 x = set1(rows[i][k]);
#pragma GCC unroll 8
            for (int s = 0; s < S; ++s) acc[i][s] = fma(x, column[s], acc[i][s]);
        }
    }
    if constexpr (MIXES) {
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
            for (int s = 0; s < S; s += 2) unmix(acc[i][s], acc[i][s + 1]);
    }
}

// Rows of a product, taken from `row` on, and panels of weights up to `last`; `next` is read after those, or null.
struct Pass {
    const Rows& x;
    const Weight& weight;
    int64_t last;
    const void* next;
    float* y;
    int64_t ldy;
    int64_t tiles;
};

// Lines that S strips have an input.
template <int S, class W>
constexpr int lines() {
    return S * LANES * sizeof(W) > 64 ? S * LANES * sizeof(W) / 64 : 1;
}

// The share of a tile in asking for the panels after those of its strips.
template <int S, class W>
K3_INLINE Ahead ahead_of(const Pass& pass, int64_t strip, int64_t tile) {
    constexpr int64_t passes = S < 2 ? 2 : 1, bytes = S * LANES * sizeof(W) / lines<S, W>();
    const int64_t panel = (strip + S + 1) / 2, panel_bytes = pass.weight.in * PANEL * sizeof(W);
    const char* own = static_cast<const char*>(pass.weight.data);
    const char* next = panel < pass.last ? own + panel * panel_bytes : static_cast<const char*>(pass.next);
    if (!next) return {own, 0};
    const int64_t step = (bytes + pass.tiles - 1) / pass.tiles;
    return {next + (tile * passes + (S < 2 ? strip % 2 : 0)) * pass.weight.in * lines<S, W>() * step, step};
}

// What a tile made of a block of inputs, added to what it made of the blocks before.
template <int M, int S>
K3_INLINE void store_tile(const F16 (&acc)[M][S], bool is_first, float* y, int64_t ldy, int64_t left) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
        for (int s = 0; s < S; ++s) {
            const int64_t columns = left - s * LANES;
            if (columns <= 0) continue;
            float* out = y + i * ldy + s * LANES;
            lanes_store(out, is_first ? acc[i][s] : add(lanes_load(out, columns), acc[i][s]), columns);
        }
}

// Few rows: all blocks of S strips in one go.
template <int M, int S, class W>
static void direct_strips(const Pass& pass, int64_t row, int64_t tile, int64_t strip) {
    const Weight& weight = pass.weight;
    const int64_t panel_stride = weight.in * PANEL, column = strip * LANES;
    const W* w = static_cast<const W*>(weight.data) + strip / 2 * panel_stride + strip % 2 * LANES;
    Ahead ahead = ahead_of<S, W>(pass, strip, tile);
    for (int64_t k = 0; k < weight.in; k += DEPTH) {
        const float* rows[M];
        for (int i = 0; i < M; ++i) rows[i] = pass.x.at(row + i) + k;
        F16 acc[M][S];
        dot_tile<M, S, lines<S, W>(), W>(rows, w + k * PANEL, panel_stride, PANEL, least(DEPTH, weight.in - k), ahead,
                                         acc);
        ahead.at += DEPTH * lines<S, W>() * ahead.step;
        store_tile(acc, k == 0, pass.y + row * pass.ldy + column, pass.ldy, weight.out - column);
    }
}

// Panels first .. last.
template <int M, class W>
static void direct_rows(const Pass& pass, int64_t row, int64_t tile, int64_t first, int64_t last) {
    constexpr int S = strips<M, W>();
    int64_t strip = 2 * first;
    for (; strip + S <= 2 * last; strip += S) direct_strips<M, S, W>(pass, row, tile, strip);
    for (; strip < 2 * last; strip += 2) direct_strips<M, S < 2 ? S : 2, W>(pass, row, tile, strip);
}

// Panels go through all tiles while they are in the first-level cache.
template <class W>
static void direct(const Rows& x, int64_t num_rows, const Weight& weight, int64_t first, int64_t last, float* y,
                   int64_t ldy, const void* next) {
    constexpr int MOST = direct_tile<W>();
    const int64_t tiles = (num_rows + MOST - 1) / MOST, step = tiles == 1 ? last - first : 1;
    const Pass pass = {x, weight, last, next, y, ldy, tiles};
    for (int64_t panel = first; panel < last; panel += step)
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t row = num_rows * tile / tiles;
            switch (num_rows * (tile + 1) / tiles - row) {
#define K3_CASE(M) \
    case M: direct_rows<(M < MOST ? M : MOST), W>(pass, row, tile, panel, panel + step); break;
                K3_CASE(1) K3_CASE(2) K3_CASE(3) K3_CASE(4) K3_CASE(5) K3_CASE(6) K3_CASE(7) K3_CASE(8)
#undef K3_CASE
            }
        }
}

// M packed rows [depth][M] times a panel block [depth][32].
template <int M, class W>
static void packed_tile(const float* x, const W* w, int64_t depth, bool is_first, float* y, int64_t ldy, int64_t left) {
    F16 acc[M][2];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) acc[i][0] = acc[i][1] = zero();
    for (int64_t k = 0; k < depth; ++k) {
        const F16 w0 = load(w + k * PANEL);
        const F16 w1 = load(w + k * PANEL + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
            const F16 value = set1(x[k * M + i]);
            acc[i][0] = fma(value, w0, acc[i][0]);
            acc[i][1] = fma(value, w1, acc[i][1]);
        }
    }
    store_tile(acc, is_first, y, ldy, left);
}

template <class W>
static void packed_tile_of(int64_t m, const float* x, const W* w, int64_t depth, bool is_first, float* y, int64_t ldy,
                           int64_t left) {
    switch (m) {
#define K3_CASE(M) \
    case M: packed_tile<M, W>(x, w, depth, is_first, y, ldy, left); break;
        K3_CASE(1) K3_CASE(2) K3_CASE(3) K3_CASE(4) K3_CASE(5) K3_CASE(6)
        K3_CASE(7) K3_CASE(8) K3_CASE(9) K3_CASE(10) K3_CASE(11) K3_CASE(12)
#undef K3_CASE
    }
}

// Rows row .. row + m, inputs k .. k + depth → [depth][m]; writes up to 16 floats past the end.
static void pack_rows(const Rows& x, int64_t row, int64_t m, int64_t k, int64_t depth, float* out) {
    for (int64_t first = 0; first < depth; first += LANES) {
        F16 block[LANES];
        const int64_t left = depth - first;
        for (int64_t i = 0; i < LANES; ++i) block[i] = i < m ? lanes_load(x.at(row + i) + k + first, left) : zero();
        transpose(block);
        for (int64_t j = 0; j < least(left, LANES); ++j) store(out + (first + j) * m, block[j]);
    }
}

constexpr int64_t PACKED_FLOATS = GROUP_TILES * (DEPTH * ROWS + LANES);
constexpr int64_t MULTIPLY_BYTES = (PACKED_FLOATS + DEPTH * PANEL) * 4;

template <class W>
static void packed(const Rows& x, int64_t num_rows, const Weight& weight, int64_t first, int64_t last, float* y,
                   int64_t ldy, float* space) {
    float* wide = space + PACKED_FLOATS;
    const int64_t tiles = (num_rows + ROWS - 1) / ROWS;
    for (int64_t group = 0; group < tiles; group += GROUP_TILES) {
        const int64_t end = least(group + GROUP_TILES, tiles);
        for (int64_t k = 0; k < weight.in; k += DEPTH) {
            const int64_t depth = least(DEPTH, weight.in - k);
            for (int64_t tile = group; tile < end; ++tile) {
                const int64_t row = num_rows * tile / tiles;
                pack_rows(x, row, num_rows * (tile + 1) / tiles - row, k, depth,
                          space + (tile - group) * (DEPTH * ROWS + LANES));
            }
            for (int64_t panel = first; panel < last; ++panel) {
                const W* w = static_cast<const W*>(weight.data) + (panel * weight.in + k) * PANEL;
                const int64_t column = panel * PANEL;
                const bool widens = sizeof(W) == 2 && end - group > 1;
                if (widens)
                    for (int64_t i = 0; i < depth * PANEL; i += LANES) store(wide + i, load(w + i));
                for (int64_t tile = group; tile < end; ++tile) {
                    const int64_t row = num_rows * tile / tiles, m = num_rows * (tile + 1) / tiles - row;
                    const float* rows = space + (tile - group) * (DEPTH * ROWS + LANES);
                    float* out = y + row * ldy + column;
                    if (widens)
                        packed_tile_of<float>(m, rows, wide, depth, k == 0, out, ldy, weight.out - column);
                    else
                        packed_tile_of<W>(m, rows, w, depth, k == 0, out, ldy, weight.out - column);
                }
            }
        }
    }
}

template <class W>
static void multiply_by(const Rows& x, int64_t num_rows, const Weight& weight, int64_t first, int64_t last, float* y,
                        int64_t ldy, float* space, const void* next) {
    if (PACKS && num_rows >= PACKED_FROM)
        packed<W>(x, num_rows, weight, first, last, y, ldy, space);
    else
        direct<W>(x, num_rows, weight, first, last, y, ldy, next);
}

// y[i, panels first .. last] = row i of x times weight; space holds MULTIPLY_BYTES. Asks for `next`, if any, as what
// will be read after the weight.
static void multiply(const Rows& x, int64_t num_rows, const Weight& weight, int64_t first, int64_t last, float* y,
                     int64_t ldy, float* space, const void* next = nullptr) {
    if (num_rows == 0) return;
    if (weight.is_bf16)
        multiply_by<uint16_t>(x, num_rows, weight, first, last, y, ldy, space, next);
    else
        multiply_by<float>(x, num_rows, weight, first, last, y, ldy, space, next);
}

static int64_t num_panels(const Weight& weight) { return (weight.out + PANEL - 1) / PANEL; }

static const void* panel_at(const Weight& weight, int64_t panel) {
    return static_cast<const char*>(weight.data) + panel * weight.in * PANEL * (weight.is_bf16 ? 2 : 4);
}

static void linear_rows(Context* context, const Weight& weight, const Rows& x, int64_t num_rows, float* y) {
    const int64_t panels = num_panels(weight), threads = num_threads(context);
    const bool by_rows = num_rows >= threads * GROUP_TILES * ROWS;
    const int64_t units = threads == 1 ? 1 : by_rows ? num_rows / (GROUP_TILES * ROWS) : least(threads * 2, panels);
    const void* const next = upcoming(context);
    auto body = [&](int64_t unit, int worker) {
        float* space = reinterpret_cast<float*>(scratch(context, worker, MULTIPLY_BYTES));
        if (by_rows) {
            const int64_t row = num_rows * unit / units, end = num_rows * (unit + 1) / units;
            const Rows part = {x.x + row * x.stride, x.stride, nullptr};
            multiply(part, end - row, weight, 0, panels, y + row * weight.out, weight.out, space, next);
        } else {
            const int64_t first = panels * unit / units, last = panels * (unit + 1) / units;
            multiply(x, num_rows, weight, first, last, y, weight.out, space,
                     last < panels ? panel_at(weight, last) : next);
        }
    };
    parallel(context, units, body);
}

static void linear(Context* context, const Weight* weight, const float* x, int64_t stride, int64_t num_rows, float* y) {
    linear_rows(context, *weight, {x, stride, nullptr}, num_rows, y);
}

// out[i, 0 .. columns] = rows[i] · b, b [depth, ldb]; columns a multiple of 32.
template <int M>
static void outer_tile(const float* const* rows, const float* b, int64_t ldb, int64_t depth, float* out, int64_t ldo,
                       int64_t columns) {
    constexpr int S = strips<M, float>() < 2 ? 1 : 2;
    for (int64_t column = 0; column < columns; column += S * LANES) {
        F16 acc[M][S];
        dot_tile<M, S, 0, float>(rows, b + column, 0, ldb, depth, Ahead{}, acc);
        for (int i = 0; i < M; ++i)
            for (int s = 0; s < S; ++s) store(out + i * ldo + column + s * LANES, acc[i][s]);
    }
}

// The same for m rows of a, lda apart. One chain over the whole depth.
static void outer(const float* a, int64_t lda, int64_t m, const float* b, int64_t ldb, int64_t depth, float* out,
                  int64_t ldo, int64_t columns) {
    const int64_t tiles = (m + ROWS - 1) / ROWS;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const float* rows[ROWS];
        const int64_t row = m * tile / tiles, count = m * (tile + 1) / tiles - row;
        for (int64_t i = 0; i < count; ++i) rows[i] = a + (row + i) * lda;
        float* to = out + row * ldo;
        switch (count) {
#define K3_CASE(M) \
    case M: outer_tile<(M < ROWS ? M : ROWS)>(rows, b, ldb, depth, to, ldo, columns); break;
            K3_CASE(1) K3_CASE(2) K3_CASE(3) K3_CASE(4) K3_CASE(5) K3_CASE(6)
            K3_CASE(7) K3_CASE(8) K3_CASE(9) K3_CASE(10) K3_CASE(11) K3_CASE(12)
#undef K3_CASE
        }
    }
}

}  // namespace K3_ISA
}  // namespace k3
