// Latent attention (model.md 2.6), NoPE: online softmax over blocks of 64 keys from position 0, in ascending order.
// Keys that a row does not see weigh 0 and unwritten memory is never read, so the cut of a prompt leaves no trace.
#pragma once

#include "rowwise.h"

namespace k3 {
namespace K3_ISA {

constexpr int64_t KEYS = 64;

// The rows of a sequence from a position on, one after the other.
class CacheRows {
public:
    CacheRows(const Mla& mla, const Step& step, const Sequence& own, int64_t position)
        : _pool(mla.rows),
          _width(mla.rank + mla.rope),
          _page_size(step.page_size),
          _page(step.block_tables + own.table * step.table_width + position / step.page_size),
          _place(position % step.page_size) {}

    const float* next() {
        if (_place == _page_size) {
            ++_page;
            _place = 0;
        }
        return _pool + (*_page * _page_size + _place++) * _width;
    }

private:
    const float* _pool;
    int64_t _width;
    int64_t _page_size;
    const int64_t* _page;
    int64_t _place;
};

// Up to 64 keys of a sequence.
struct Block {
    const Sequence& own;
    int64_t first;
    int64_t count;

    int64_t columns() const { return round_up(count, PANEL); }
};

K3_INLINE Block block_at(const Sequence& own, int64_t first) {
    return {own, first, least(KEYS, own.start + own.length - first)};
}

// Asks for the rows of a block, some each time.
class RowsAhead {
public:
    RowsAhead(const Mla& mla, const Step& step, const Block& block, int64_t times)
        : _rows(mla, step, block.own, block.first),
          _width(mla.rank + mla.rope),
          _left(block.count),
          _share((block.count + times - 1) / times) {}

    void ask() {
        for (int64_t i = least(_share, _left); i > 0; --i, --_left) {
            const float* row = _rows.next();
            for (int64_t c = 0; c < _width; c += LANES) __builtin_prefetch(row + c);
        }
    }

private:
    CacheRows _rows;
    int64_t _width;
    int64_t _left;
    int64_t _share;
};

// The latents of a block [columns][depth], and its rows turned [width][64]; behind the last key it is repeated. The rows
// of the block that comes next are asked for, some after each 16 keys.
static void load_keys(const Mla& mla, const Step& step, const Block& block, const Block& next, float* latents,
                      float* turned) {
    const int64_t width = mla.rank + mla.rope, depth = round_up(mla.rank, PANEL), columns = block.columns();
    CacheRows own(mla, step, block.own, block.first), ahead(mla, step, next.own, next.first);
    const float *row = nullptr, *from[LANES];
    int64_t asked = 0;
    for (int64_t key = 0; key < columns; key += LANES) {
        for (int64_t i = 0; i < LANES; ++i) {
            if (key + i < block.count) row = own.next();
            from[i] = row;
        }
        for (const int64_t end = least(next.count, (key + LANES) * KEYS / columns); asked < end; ++asked) {
            const float* wanted = ahead.next();
            for (int64_t c = 0; c < width; c += LANES) __builtin_prefetch(wanted + c);
        }
        for (int64_t c = 0; c < width; c += LANES) {
            F16 tile[LANES];
            const int64_t left = width - c;
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; ++i) tile[i] = lanes_load(from[i] + c, left);
            if (c < depth)
#pragma GCC unroll 16
                for (int64_t i = 0; i < LANES; ++i) store(latents + (key + i) * depth + c, tile[i]);
            transpose(tile);
            for (int64_t j = 0; j < least(LANES, left); ++j) store(turned + (c + j) * KEYS + key, tile[j]);
        }
    }
}

struct Softmax {
    float best;
    float mass;
};

// Scores of 64 keys, of which the first `visible` count, become their weights; returns what earlier sums are to be multiplied with.
K3_INLINE float soften(float* scores, int64_t visible, float scale, Softmax& softmax) {
    alignas(64) static constexpr float LANE[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F16 s[4], top;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        s[i] = select_less(load(LANE), set1(static_cast<float>(visible - i * LANES)),
                           mul(load(scores + i * LANES), set1(scale)), set1(-__builtin_inff()));
    top = max(max(s[0], s[1]), max(s[2], s[3]));
    const float block = max(top), best = block > softmax.best ? block : softmax.best;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        s[i] = exp(sub(s[i], set1(best)));
        store(scores + i * LANES, s[i]);
    }
    alignas(64) float kept[LANES];
    store(kept, exp(set1(softmax.best - best)));
    softmax.mass = softmax.mass * kept[0] + sum(add(add(s[0], s[1]), add(s[2], s[3])));
    softmax.best = best;
    return kept[0];
}

// total = total · kept + block
K3_INLINE void add_block(float* total, const float* block, float kept, int64_t padded) {
    for (int64_t i = 0; i < padded; i += LANES)
        store(total + i, fma(load(total + i), set1(kept), load(block + i)));
}

K3_INLINE void fill_zero(float* x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) lanes_store(x + i, zero(), count - i);
}

// q · w_kc | q_rope of a head, for m rows of q lying stride apart and rows of out ldo apart.
K3_INLINE void absorb(const Mla& mla, const float* q, int64_t stride, int64_t m, int64_t head, float* out, int64_t ldo) {
    const float* w = mla.w_kc + head * mla.nope * mla.rank;
    const int64_t whole = mla.rank / PANEL * PANEL;
    outer(q, stride, m, w, mla.rank, mla.nope, out, ldo, whole);
    for (int64_t i = 0; i < m; ++i) {
        const float* row = q + i * stride;
        for (int64_t r = whole; r < mla.rank; r += LANES) {
            F16 total = zero();
            for (int64_t n = 0; n < mla.nope; ++n)
                total = fma(set1(row[n]), lanes_load(w + n * mla.rank + r, mla.rank - r), total);
            lanes_store(out + i * ldo + r, total, mla.rank - r);
        }
        for (int64_t e = 0; e < mla.rope; ++e) out[i * ldo + mla.rank + e] = row[mla.nope + e];
    }
}

// x · row j of those that lie stride apart, for j < least(count, 16): chains of every sixteenth input, then the tree of
// `sum`.
K3_INLINE F16 dots(const float* x, const float* rows, int64_t stride, int64_t count, int64_t depth) {
#if defined(K3_AVX512)
    constexpr int AT_ONCE = 8;
#else
    constexpr int AT_ONCE = 4;
#endif
    F16 products[LANES];
    const int64_t whole = depth / LANES * LANES;
#pragma GCC unroll 4
    for (int first = 0; first < LANES; first += AT_ONCE) {
        const float* row[AT_ONCE];
        F16 acc[AT_ONCE];
#pragma GCC unroll 8
        for (int j = 0; j < AT_ONCE; ++j) {
            row[j] = rows + least(first + j, count - 1) * stride;
            acc[j] = zero();
        }
        for (int64_t c = 0; c < whole; c += LANES) {
            const F16 value = load(x + c);
#pragma GCC unroll 8
            for (int j = 0; j < AT_ONCE; ++j) acc[j] = fma(value, load(row[j] + c), acc[j]);
        }
        if (whole < depth) {
            const F16 value = lanes_load(x + whole, depth - whole);
#pragma GCC unroll 8
            for (int j = 0; j < AT_ONCE; ++j)
                acc[j] = fma(value, lanes_load(row[j] + whole, depth - whole), acc[j]);
        }
#pragma GCC unroll 8
        for (int j = 0; j < AT_ONCE; ++j) products[first + j] = acc[j];
    }
    return sums(products);
}

// Rows of a block `stride` apart.
struct BlockRows {
    const float* rows;
    int64_t stride;
};

// In place where a page holds the block and latents are as long as the products that take them, else in `space`
// [count][padded].
static BlockRows rows_of(const Mla& mla, const Step& step, const Block& block, int64_t padded, float* space) {
    const int64_t width = mla.rank + mla.rope;
    CacheRows own(mla, step, block.own, block.first);
    if (block.first % step.page_size + block.count <= step.page_size && mla.rank % PANEL == 0) return {own.next(), width};
    for (int64_t key = 0; key < block.count; ++key) {
        const float* row = own.next();
        for (int64_t c = 0; c < padded; c += LANES)
            store(space + key * padded + c, c < width ? lanes_load(row + c, width - c) : zero());
    }
    return {space, padded};
}

// Few heads meet the rows of the cache as they lie; for more of them it pays to turn a block. The order of sums differs,
// so nothing but the model decides.
constexpr int64_t FEW_HEADS = 8;

// All rows of a sequence, each at a position of its own, and `count` heads: keys are loaded once for all of them.
static void decode_rows(const Mla& mla, const Step& step, const Sequence& own, const Sequence& next, const float* q,
                        int64_t stride, int64_t head, int64_t count, float* o, float* space) {
    const int64_t width = mla.rank + mla.rope, padded = round_up(width, PANEL), depth = round_up(mla.rank, PANEL);
    const int64_t num = own.length * count, deep = mla.nope + mla.rope;
    float* latents = space;                   // [64][depth]
    float* turned = latents + KEYS * depth;   // [width][64], or rows [64][padded] that no page holds together
    float* queries = turned + padded * KEYS;  // [length][count][padded]
    float* scores = queries + num * padded;   // [length][count][64]
    float* totals = scores + num * KEYS;      // [length][count][depth]
    float* block = totals + num * depth;      // [count][depth]
    float* kept = block + count * depth;      // [count]
    Softmax* softmax = reinterpret_cast<Softmax*>(kept + count);
    for (int64_t h = 0; h < count; ++h)
        absorb(mla, q + own.row * stride + (head + h) * deep, stride, own.length, head + h, queries + h * padded, count * padded);
    for (int64_t i = 0; i < num; ++i) softmax[i] = {-__builtin_inff(), 0.0f};
    fill_zero(totals, num * depth);
    const int64_t end = own.start + own.length;
    for (int64_t first = 0; first < end; first += KEYS) {
        const Block keys = block_at(own, first);
        const Block coming = first + KEYS < end ? block_at(own, first + KEYS) : block_at(next, 0);
        // Rows that stand before this block see none of it.
        const int64_t begin = first > own.start ? first - own.start : 0;
        BlockRows rows = {latents, depth};
        if (mla.heads <= FEW_HEADS) {
            rows = rows_of(mla, step, keys, padded, turned);
            RowsAhead ahead(mla, step, coming, (keys.count + LANES - 1) / LANES * (num - begin * count));
            for (int64_t key = 0; key < keys.count; key += LANES)
                for (int64_t i = begin * count; i < num; ++i) {
                    ahead.ask();
                    store(scores + i * KEYS + key,
                          dots(queries + i * padded, rows.rows + key * rows.stride, rows.stride, keys.count - key, width));
                }
        } else {
            load_keys(mla, step, keys, coming, latents, turned);
            outer(queries + begin * count * padded, padded, num - begin * count, turned, KEYS, width,
                  scores + begin * count * KEYS, KEYS, keys.columns());
        }
        for (int64_t t = begin; t < own.length; ++t) {
            const int64_t visible = least(KEYS, own.start + t + 1 - first);
            float* weights = scores + t * count * KEYS;
            for (int64_t h = 0; h < count; ++h)
                kept[h] = soften(weights + h * KEYS, visible, mla.scale, softmax[t * count + h]);
            outer(weights, KEYS, count, rows.rows, rows.stride, visible, block, depth, depth);
            for (int64_t h = 0; h < count; ++h)
                add_block(totals + (t * count + h) * depth, block + h * depth, kept[h], depth);
        }
    }
    for (int64_t i = 0; i < num; ++i) {
        const float* total = totals + i * depth;
        const float inverse = 1.0f / softmax[i].mass;
        const int64_t own_head = head + i % count;
        float* to = o + ((own.row + i / count) * mla.heads + own_head) * mla.value_dim;
        for (int64_t v = 0; v < mla.value_dim; v += LANES) {
            const float* w = mla.w_vc + (own_head * mla.value_dim + v) * mla.rank;
            const int64_t left = mla.value_dim - v;
            lanes_store(to + v, mul(dots(total, w, mla.rank, left, mla.rank), set1(inverse)), left);
        }
    }
}

static void mla_decode(Context* context, const Mla* mla, const Step* step, const float* q, int64_t stride, float* o) {
    const int64_t padded = round_up(mla->rank + mla->rope, PANEL), depth = round_up(mla->rank, PANEL);
    // Heads that share the keys of a sequence: all, unless that leaves threads idle.
    const int64_t threads = num_threads(context);
    const int64_t parts = step->num_sequences >= threads ? 1 : least(threads, mla->heads);
    auto body = [&](int64_t index, int worker) {
        const Sequence& own = step->sequences[index / parts];
        const Sequence& next = step->sequences[least(index + 1, step->num_sequences * parts - 1) / parts];
        const int64_t part = index % parts, head = mla->heads * part / parts;
        const int64_t count = mla->heads * (part + 1) / parts - head, num = own.length * count;
        const int64_t floats = KEYS * (padded + depth) + num * (padded + KEYS + depth + 2) + count * (depth + 1);
        float* space = reinterpret_cast<float*>(scratch(context, worker, floats * 4));
        decode_rows(*mla, *step, own, next, q, stride, head, count, o, space);
    };
    parallel(context, step->num_sequences * parts, body);
}

// All rows of a sequence, one head: each block of keys is expanded once and met by the rows that see any of it.
static void extend_head(const Mla& mla, const Step& step, const Sequence& own, const float* q, int64_t stride,
                        int64_t head, float* o, float* space) {
    const int64_t padded = round_up(mla.rank + mla.rope, PANEL), depth = round_up(mla.rank, PANEL);
    const int64_t deep = mla.nope + mla.rope, value_pad = round_up(mla.value_dim, PANEL), end = own.start + own.length;
    float* latents = space;                         // [64][depth]
    float* turned = latents + KEYS * depth;         // [padded][64]
    float* keys = turned + padded * KEYS;           // [deep][64]
    float* values = keys + deep * KEYS;             // [64][value_pad]
    float* w_v = values + KEYS * value_pad;         // [rank][value_pad]
    float* scores = w_v + mla.rank * value_pad;     // [ROWS][64]
    float* block = scores + ROWS * KEYS;            // [ROWS][value_pad]
    float* totals = block + ROWS * value_pad;       // [length][value_pad]
    Softmax* softmax = reinterpret_cast<Softmax*>(totals + own.length * value_pad);

    const float* w_k = mla.w_kc + head * mla.nope * mla.rank;
    for (int64_t r = 0; r < mla.rank; ++r)
        for (int64_t v = 0; v < value_pad; ++v)
            w_v[r * value_pad + v] =
                v < mla.value_dim ? mla.w_vc[(head * mla.value_dim + v) * mla.rank + r] : 0.0f;
    fill_zero(totals, own.length * value_pad);
    for (int64_t t = 0; t < own.length; ++t) softmax[t] = {-__builtin_inff(), 0.0f};

    for (int64_t first = 0; first < end; first += KEYS) {
        const Block cached = block_at(own, first);
        load_keys(mla, step, cached, first + KEYS < end ? block_at(own, first + KEYS) : cached, latents, turned);
        outer(w_k, mla.rank, mla.nope, turned, KEYS, mla.rank, keys, KEYS, cached.columns());
        for (int64_t i = 0; i < mla.rope * KEYS; i += LANES)
            store(keys + mla.nope * KEYS + i, load(turned + mla.rank * KEYS + i));
        outer(latents, depth, cached.count, w_v, value_pad, mla.rank, values, value_pad, value_pad);
        for (int64_t t = first > own.start ? first - own.start : 0; t < own.length; t += ROWS) {
            const int64_t count = least(ROWS, own.length - t);
            outer(q + (own.row + t) * stride + head * deep, stride, count, keys, KEYS, deep, scores, KEYS, cached.columns());
            float kept[ROWS];
            for (int64_t i = 0; i < count; ++i) {
                const int64_t visible = least(KEYS, own.start + t + i + 1 - first);
                kept[i] = soften(scores + i * KEYS, visible, mla.scale, softmax[t + i]);
            }
            outer(scores, KEYS, count, values, value_pad, cached.count, block, value_pad, value_pad);
            for (int64_t i = 0; i < count; ++i)
                add_block(totals + (t + i) * value_pad, block + i * value_pad, kept[i], value_pad);
        }
    }
    for (int64_t t = 0; t < own.length; ++t) {
        const F16 mass = set1(softmax[t].mass);
        float* to = o + ((own.row + t) * mla.heads + head) * mla.value_dim;
        for (int64_t v = 0; v < mla.value_dim; v += LANES)
            lanes_store(to + v, div(load(totals + t * value_pad + v), mass), mla.value_dim - v);
    }
}

static void mla_extend(Context* context, const Mla* mla, const Step* step, const float* q, int64_t stride, float* o) {
    const int64_t padded = round_up(mla->rank + mla->rope, PANEL), depth = round_up(mla->rank, PANEL);
    const int64_t value_pad = round_up(mla->value_dim, PANEL);
    const int64_t fixed = KEYS * (padded + depth) + (mla->nope + mla->rope) * KEYS + KEYS * value_pad +
                          mla->rank * value_pad + ROWS * (KEYS + value_pad);
    auto body = [&](int64_t index, int worker) {
        const Sequence& own = step->sequences[index / mla->heads];
        const int64_t floats = fixed + own.length * (value_pad + 2);
        float* space = reinterpret_cast<float*>(scratch(context, worker, floats * 4));
        extend_head(*mla, *step, own, q, stride, index % mla->heads, o, space);
    };
    parallel(context, step->num_sequences * mla->heads, body);
}

}  // namespace K3_ISA
}  // namespace k3
