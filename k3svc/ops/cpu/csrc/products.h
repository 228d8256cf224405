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
constexpr int ROWS = 12;    // accumulators: 12 x 2 registers
constexpr int DIRECT = 4;   // up to here rows are read in place, above they are packed
constexpr bool PACKS = true;
#elif defined(K3_AVX2)
constexpr int ROWS = 3;
constexpr int DIRECT = 3;
constexpr bool PACKS = false;
#else
constexpr int ROWS = 3;
constexpr int DIRECT = 3;
constexpr bool PACKS = false;
#endif

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

// M rows times P panels whose blocks begin at w and lie panel_stride apart.
template <int M, int P, class W>
K3_INLINE void dot_tile(const float* const* rows, const W* w, int64_t panel_stride, int64_t ldw, int64_t depth,
                        F16 (&acc)[M][P][2]) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) acc[i][p][0] = acc[i][p][1] = zero();
    for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const F16 w0 = load(w + p * panel_stride + k * ldw);
            const F16 w1 = load(w + p * panel_stride + k * ldw + LANES);
#pragma GCC unroll 16
            for (int i = 0; i < M; ++i) {
                const F16 x = set1(rows[i][k]);
                acc[i][p][0] = fma(x, w0, acc[i][p][0]);
                acc[i][p][1] = fma(x, w1, acc[i][p][1]);
            }
        }
    }
}

// Few rows: all blocks of P panels in one go.
template <int M, int P, class W>
static void direct_panels(const Rows& x, int64_t row, const Weight& weight, int64_t panel, float* y, int64_t ldy) {
    const int64_t panel_stride = weight.in * PANEL;
    const W* w = static_cast<const W*>(weight.data) + panel * panel_stride;
    F16 total[M][P][2];
    for (int64_t k = 0; k < weight.in; k += DEPTH) {
        const float* rows[M];
        for (int i = 0; i < M; ++i) rows[i] = x.at(row + i) + k;
        F16 acc[M][P][2];
        dot_tile<M, P, W>(rows, w + k * PANEL, panel_stride, PANEL, least(DEPTH, weight.in - k), acc);
        for (int i = 0; i < M; ++i)
            for (int p = 0; p < P; ++p)
                for (int half = 0; half < 2; ++half)
                    total[i][p][half] = k == 0 ? acc[i][p][half] : add(total[i][p][half], acc[i][p][half]);
    }
    for (int i = 0; i < M; ++i)
        for (int p = 0; p < P; ++p)
            for (int half = 0; half < 2; ++half) {
                const int64_t column = (panel + p) * PANEL + half * LANES;
                if (column < weight.out)
                    lanes_store(y + (row + i) * ldy + column, total[i][p][half], weight.out - column);
            }
}

template <int M, int P, class W>
static void direct_rows(const Rows& x, int64_t row, const Weight& weight, int64_t first, int64_t last, float* y,
                        int64_t ldy) {
    int64_t panel = first;
    for (; panel + P <= last; panel += P) direct_panels<M, P, W>(x, row, weight, panel, y, ldy);
    for (; panel < last; ++panel) direct_panels<M, 1, W>(x, row, weight, panel, y, ldy);
}

template <class W>
static void direct(const Rows& x, int64_t num_rows, const Weight& weight, int64_t first, int64_t last, float* y,
                   int64_t ldy) {
    constexpr int ALONE = DIRECT > 3 ? 4 : 2;
    const int64_t tiles = (num_rows + DIRECT - 1) / DIRECT;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t row = num_rows * tile / tiles;
        switch (num_rows * (tile + 1) / tiles - row) {
            case 1: direct_rows<1, ALONE, W>(x, row, weight, first, last, y, ldy); break;
            case 2: direct_rows<2, ALONE / 2, W>(x, row, weight, first, last, y, ldy); break;
            case 3: direct_rows<3, 1, W>(x, row, weight, first, last, y, ldy); break;
            default: direct_rows<DIRECT, 1, W>(x, row, weight, first, last, y, ldy); break;
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
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const int64_t columns = left - half * LANES;
            if (columns <= 0) continue;
            float* out = y + i * ldy + half * LANES;
            lanes_store(out, is_first ? acc[i][half] : add(lanes_load(out, columns), acc[i][half]), columns);
        }
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

// y[i, panels first .. last] = row i of x times weight; space holds MULTIPLY_BYTES.
static void multiply(const Rows& x, int64_t num_rows, const Weight& weight, int64_t first, int64_t last, float* y,
                     int64_t ldy, float* space) {
    if (num_rows == 0) return;
    if (weight.is_bf16) {
        if (PACKS && num_rows > DIRECT)
            packed<uint16_t>(x, num_rows, weight, first, last, y, ldy, space);
        else
            direct<uint16_t>(x, num_rows, weight, first, last, y, ldy);
    } else if (PACKS && num_rows > DIRECT) {
        packed<float>(x, num_rows, weight, first, last, y, ldy, space);
    } else {
        direct<float>(x, num_rows, weight, first, last, y, ldy);
    }
}

static int64_t num_panels(const Weight& weight) { return (weight.out + PANEL - 1) / PANEL; }

static void linear_rows(Context* context, const Weight& weight, const Rows& x, int64_t num_rows, float* y) {
    const int64_t panels = num_panels(weight), threads = num_threads(context);
    const bool by_rows = num_rows >= threads * GROUP_TILES * ROWS;
    const int64_t units = threads == 1 ? 1 : by_rows ? num_rows / (GROUP_TILES * ROWS) : least(threads * 2, panels);
    auto body = [&](int64_t unit, int worker) {
        float* space = reinterpret_cast<float*>(scratch(context, worker, MULTIPLY_BYTES));
        if (by_rows) {
            const int64_t row = num_rows * unit / units, end = num_rows * (unit + 1) / units;
            const Rows part = {x.x + row * x.stride, x.stride, nullptr};
            multiply(part, end - row, weight, 0, panels, y + row * weight.out, weight.out, space);
        } else {
            multiply(x, num_rows, weight, panels * unit / units, panels * (unit + 1) / units, y, weight.out, space);
        }
    };
    parallel(context, units, body);
}

static void linear(Context* context, const Weight* weight, const float* x, int64_t stride, int64_t num_rows, float* y) {
    linear_rows(context, *weight, {x, stride, nullptr}, num_rows, y);
}

// out[i, 0 .. 32] = rows[i] · b, b [depth, ldb].
template <int M>
static void outer_tile(const float* const* rows, const float* b, int64_t ldb, int64_t depth, float* out, int64_t ldo) {
    F16 acc[M][1][2];
    dot_tile<M, 1, float>(rows, b, 0, ldb, depth, acc);
    for (int i = 0; i < M; ++i) {
        store(out + i * ldo, acc[i][0][0]);
        store(out + i * ldo + LANES, acc[i][0][1]);
    }
}

// out[i, 0 .. columns] = a[i] · b for m rows of a, lda apart; columns a multiple of 32. One chain over the whole depth.
static void outer(const float* a, int64_t lda, int64_t m, const float* b, int64_t ldb, int64_t depth, float* out,
                  int64_t ldo, int64_t columns) {
    for (int64_t row = 0; row < m; row += ROWS) {
        const float* rows[ROWS];
        const int64_t count = least(ROWS, m - row);
        for (int64_t i = 0; i < count; ++i) rows[i] = a + (row + i) * lda;
        for (int64_t column = 0; column < columns; column += PANEL) {
            float* to = out + row * ldo + column;
            switch (count) {
#define K3_CASE(M) \
    case M: outer_tile<(M < ROWS ? M : ROWS)>(rows, b + column, ldb, depth, to, ldo); break;
                K3_CASE(1) K3_CASE(2) K3_CASE(3) K3_CASE(4) K3_CASE(5) K3_CASE(6)
                K3_CASE(7) K3_CASE(8) K3_CASE(9) K3_CASE(10) K3_CASE(11) K3_CASE(12)
#undef K3_CASE
            }
        }
    }
}

}  // namespace K3_ISA
}  // namespace k3
