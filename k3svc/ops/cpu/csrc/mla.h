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

// Scores [rows][64] become weights, of which the first visible(row) count. Earlier sums of a row are to be multiplied by
// its `kept`, which has room for a multiple of 16 rows.
template <class F>
K3_INLINE void soften(float* scores, int64_t rows, const F& visible, float scale, Softmax* softmax, float* kept) {
    alignas(64) static constexpr float LANE[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t r = 0; r < rows; ++r) {
        float* own = scores + r * KEYS;
        const int64_t count = visible(r);
        F16 s[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            s[i] = select_less(load(LANE), set1(static_cast<float>(count - i * LANES)),
                               mul(load(own + i * LANES), set1(scale)), set1(-__builtin_inff()));
            store(own + i * LANES, s[i]);
        }
        const float block = max(max(max(s[0], s[1]), max(s[2], s[3]))), before = softmax[r].best;
        softmax[r].best = block > before ? block : before;
        kept[r] = before - softmax[r].best;
    }
    for (int64_t r = 0; r < rows; r += LANES) store(kept + r, exp(load(kept + r)));
    for (int64_t r = 0; r < rows; ++r) {
        float* own = scores + r * KEYS;
        F16 s[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            s[i] = exp(sub(load(own + i * LANES), set1(softmax[r].best)));
            store(own + i * LANES, s[i]);
        }
        softmax[r].mass = softmax[r].mass * kept[r] + sum(add(add(s[0], s[1]), add(s[2], s[3])));
    }
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

// x times row j of those that lie stride apart, j < least(count, 16): chains of every sixteenth input, then the tree of
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
    const bool is_whole = block.first % step.page_size + block.count <= step.page_size;
    if (is_whole && mla.rank % PANEL == 0) return {own.next(), width};
    for (int64_t key = 0; key < block.count; ++key) {
        const float* row = own.next();
        for (int64_t c = 0; c < padded; c += LANES)
            store(space + key * padded + c, c < width ? lanes_load(row + c, width - c) : zero());
    }
    return {space, padded};
}

// Few heads meet the rows of the cache as they lie; for more of them it pays to turn a block. The order of sums differs:
// nothing but the model decides.
constexpr int64_t FEW_HEADS = 8;

// What a worker takes together.
struct Share {
    const Sequence* sequences;
    int64_t num_sequences;
    const Sequence& next;  // whose keys come after
    int64_t head;          // the first of `heads`
    int64_t heads;

    int64_t row() const { return sequences->row; }
    // With those of padding that lie between.
    int64_t num_rows() const {
        const Sequence& last = sequences[num_sequences - 1];
        return last.row + last.length - row();
    }
};

// Intermediates of a share.
struct Attention {
    int64_t padded;    // round_up(rank + rope, PANEL)
    int64_t depth;     // round_up(rank, PANEL)
    float* queries;    // [rows][heads][padded]
    float* totals;     // [rows][heads][depth]
    Softmax* softmax;  // [rows][heads]
    float* scores;     // [rows][heads][64]
    float* latents;    // [64][depth]
    float* turned;     // [width][64], or rows [64][padded] that no page holds together
    float* block;      // [heads][depth]
    float* kept;       // [heads], and room for a multiple of 16
};

// All rows of a sequence, each at a position of its own: keys are loaded once for all of them and all heads.
static void attend(const Mla& mla, const Step& step, const Share& share, const Sequence& own, const Sequence& next,
                   const Attention& all) {
    const int64_t width = mla.rank + mla.rope, padded = all.padded, depth = all.depth, heads = share.heads;
    const int64_t skipped = (own.row - share.row()) * heads, num = own.length * heads;
    const float* queries = all.queries + skipped * padded;
    float* totals = all.totals + skipped * depth;
    Softmax* softmax = all.softmax + skipped;
    const int64_t end = own.start + own.length;
    for (int64_t first = 0; first < end; first += KEYS) {
        const Block keys = block_at(own, first);
        const Block coming = first + KEYS < end ? block_at(own, first + KEYS) : block_at(next, 0);
        // Rows that stand before this block see none of it.
        const int64_t begin = first > own.start ? first - own.start : 0;
        BlockRows rows = {all.latents, depth};
        if (mla.heads <= FEW_HEADS) {
            rows = rows_of(mla, step, keys, padded, all.turned);
            RowsAhead ahead(mla, step, coming, (keys.count + LANES - 1) / LANES * (num - begin * heads));
            for (int64_t key = 0; key < keys.count; key += LANES)
                for (int64_t i = begin * heads; i < num; ++i) {
                    ahead.ask();
                    store(all.scores + i * KEYS + key, dots(queries + i * padded, rows.rows + key * rows.stride,
                                                            rows.stride, keys.count - key, width));
                }
        } else {
            load_keys(mla, step, keys, coming, all.latents, all.turned);
            outer(queries + begin * heads * padded, padded, num - begin * heads, all.turned, KEYS, width,
                  all.scores + begin * heads * KEYS, KEYS, keys.columns());
        }
        for (int64_t t = begin; t < own.length; ++t) {
            const int64_t visible = least(KEYS, own.start + t + 1 - first);
            float* weights = all.scores + t * heads * KEYS;
            soften(weights, heads, [&](int64_t) { return visible; }, mla.scale, softmax + t * heads, all.kept);
            outer(weights, KEYS, heads, rows.rows, rows.stride, visible, all.block, depth, depth);
            for (int64_t h = 0; h < heads; ++h)
                add_block(totals + (t * heads + h) * depth, all.block + h * depth, all.kept[h], depth);
        }
    }
}

// The weights of a head meet all rows of a share at once, before and after its sequences attend.
static void decode_share(const Mla& mla, const Step& step, const Share& share, const float* q, int64_t stride, float* o,
                         const Attention& all) {
    const int64_t heads = share.heads, num_rows = share.num_rows(), num = num_rows * heads;
    for (int64_t h = 0; h < heads; ++h)
        absorb(mla, q + share.row() * stride + (share.head + h) * (mla.nope + mla.rope), stride, num_rows,
               share.head + h, all.queries + h * all.padded, heads * all.padded);
    for (int64_t i = 0; i < num; ++i) all.softmax[i] = {-__builtin_inff(), 0.0f};
    fill_zero(all.totals, num * all.depth);
    for (int64_t i = 0; i < share.num_sequences; ++i)
        attend(mla, step, share, share.sequences[i], i + 1 < share.num_sequences ? share.sequences[i + 1] : share.next,
               all);
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t v = 0; v < mla.value_dim; v += LANES) {
            const int64_t head = share.head + h, left = mla.value_dim - v;
            const float* w = mla.w_vc + (head * mla.value_dim + v) * mla.rank;
            for (int64_t row = 0; row < num_rows; ++row) {
                const float mass = all.softmax[row * heads + h].mass;
                if (mass == 0.0f) continue;  // padding
                const F16 values = dots(all.totals + (row * heads + h) * all.depth, w, mla.rank, left, mla.rank);
                lanes_store(o + ((share.row() + row) * mla.heads + head) * mla.value_dim + v,
                            mul(values, set1(1.0f / mass)), left);
            }
        }
}

constexpr int64_t SHARED_ROWS = 8;  // of a share, about: intermediates of many heads are to stay small

static void mla_decode(Context* context, const Mla* mla, const Step* step, const float* q, int64_t stride, float* o) {
    const int64_t padded = round_up(mla->rank + mla->rope, PANEL), depth = round_up(mla->rank, PANEL);
    const int64_t threads = num_threads(context), num = step->num_sequences;
    // Heads are split only where threads would be idle.
    const int64_t parts = num >= threads ? 1 : least(threads, mla->heads);
    const int64_t by_rows = (step->num_rows + SHARED_ROWS - 1) / SHARED_ROWS;
    const int64_t by_threads = threads > 1 ? 2 * threads : 1;
    const int64_t groups = parts > 1 ? num : least(num, by_rows > by_threads ? by_rows : by_threads);
    auto body = [&](int64_t index, int worker) {
        const int64_t group = index / parts, part = index % parts, head = mla->heads * part / parts;
        const int64_t begin = num * group / groups, end = num * (group + 1) / groups;
        const Sequence& next = step->sequences[part + 1 < parts ? begin : least(end, num - 1)];
        const Share share = {step->sequences + begin, end - begin, next, head, mla->heads * (part + 1) / parts - head};
        const int64_t heads = share.heads, rows = share.num_rows() * heads;
        const int64_t floats = KEYS * (padded + depth) + rows * (padded + KEYS + depth + 2) +
                               heads * depth + round_up(heads, LANES);
        Attention all;
        all.padded = padded;
        all.depth = depth;
        all.latents = reinterpret_cast<float*>(scratch(context, worker, floats * 4));
        all.turned = all.latents + KEYS * depth;
        all.queries = all.turned + padded * KEYS;
        all.totals = all.queries + rows * padded;
        all.scores = all.totals + rows * depth;
        all.block = all.scores + rows * KEYS;
        all.kept = all.block + heads * depth;
        all.softmax = reinterpret_cast<Softmax*>(all.kept + round_up(heads, LANES));
        decode_share(*mla, *step, share, q, stride, o, all);
    };
    parallel(context, groups * parts, body);
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
            float kept[LANES];
            soften(scores, count, [&](int64_t i) { return least(KEYS, own.start + t + i + 1 - first); }, mla.scale,
                   softmax + t, kept);
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
