// Kimi Delta Attention (model.md 2.3): convolution, and the gated delta rule as a recurrence for prompts and decode.
//
// Per token and head, for every value column v (lanes) and in ascending order of the key index k:
//   d += S[k] · (alpha[k] · k[k]);  e += S[k] · (alpha[k] · q[k])        (even and odd k in chains of their own)
//   r = beta · (v - d);  o = e + r · (k·q);  S[k] = S[k] · alpha[k] + r · k[k]
// Both kernels do exactly this, so a prompt leaves the bits that the same tokens leave one step at a time.
#pragma once

#include "rowwise.h"

namespace k3 {
namespace K3_ISA {

constexpr int64_t TOKENS = 16;  // of a prompt prepared at a time
#if defined(K3_AVX512)
constexpr int COLUMNS = 4;  // blocks of 16 value columns per pass
#else
constexpr int COLUMNS = 1;
#endif

// [channels, width] → [width, channels]
static void turn_taps(const Conv& conv, float* taps) {
    for (int64_t j = 0; j < conv.width; j += LANES)
        for (int64_t c = 0; c < conv.channels; c += LANES) {
            F16 block[LANES];
            for (int64_t i = 0; i < LANES; ++i) {
                const bool is_channel = c + i < conv.channels;
                block[i] = is_channel ? lanes_load(conv.weight + (c + i) * conv.width + j, conv.width - j) : zero();
            }
            transpose(block);
            for (int64_t i = 0; i < least(LANES, conv.width - j); ++i)
                lanes_store(taps + (j + i) * conv.channels + c, block[i], conv.channels - c);
        }
}

// y = silu(sum over j of rows[j] · taps[j]), in ascending order of j; W is the width, or 0 for any. Meanwhile a state
// is asked for that will be needed next.
template <int W>
static void conv_row(const float* const* rows, const float* taps, int64_t width, int64_t channels, const float* ahead,
                     float* y) {
    const int64_t count = W ? W : width;
    for (int64_t c = 0; c < channels; c += LANES) {
        const int64_t left = channels - c;
        F16 total = mul(lanes_load(rows[0] + c, left), lanes_load(taps + c, left));
        for (int64_t j = 1; j < count; ++j) {
            total = fma(lanes_load(rows[j] + c, left), lanes_load(taps + j * channels + c, left), total);
            if (ahead) __builtin_prefetch(ahead + c * (count - 1) + (j - 1) * LANES, 1);
        }
        lanes_store(y + c, silu(total), left);
    }
}

static void conv(Context* context, const Conv* conv, const Step* step, const float* u, int64_t stride, float* y) {
    const int64_t channels = conv->channels, width = conv->width, tail = width - 1;
    float* taps = reinterpret_cast<float*>(scratch(context, -1, (width + 1) * channels * 4));
    float* none = taps + width * channels;  // a row before the first one
    if (y) turn_taps(*conv, taps);
    for (int64_t c = 0; c < channels; ++c) none[c] = 0.0f;
    const auto state_of = [&](int64_t index) {
        return conv->state + step->sequences[least(index, step->num_sequences - 1)].slot * tail * channels;
    };
    auto body = [&](int64_t index, int worker) {
        const Sequence& own = step->sequences[index];
        float* state = state_of(index);
        const float* first = u + own.row * stride;
        // Row `at` of the sequence; those before its own ones are in the state, oldest first.
        const auto row_at = [&](int64_t at) -> const float* {
            return at >= 0 ? first + at * stride : own.is_fresh ? none : state + (at + tail) * channels;
        };
        const float** rows = reinterpret_cast<const float**>(scratch(context, worker, width * 8));
        for (int64_t t = 0; t < (y ? own.length : 0); ++t) {
            for (int64_t j = 0; j < width; ++j) rows[j] = row_at(t - tail + j);
            const float* ahead = t == 0 ? state_of(index + 1) : nullptr;
            float* to = y + (own.row + t) * channels;
            if (width == 4)
                conv_row<4>(rows, taps, width, channels, ahead, to);
            else
                conv_row<0>(rows, taps, width, channels, ahead, to);
        }
        // In place: a row moves to where an older one was.
        for (int64_t i = 0; i < (step->keeps_states ? 0 : tail); ++i) {
            const float* row = row_at(own.length - tail + i);
            for (int64_t c = 0; c < channels; c += LANES)
                lanes_store(state + i * channels + c, lanes_load(row + c, channels - c), channels - c);
        }
    };
    parallel(context, step->num_sequences, body);
}

// Token and head: normed keys and queries, decay and mixing factors.
struct Token {
    float* decayed_q;  // alpha · q
    float* decayed_k;  // alpha · k
    float* k;
    float* alpha;
    float beta;
    float kq;
};

constexpr int64_t TOKEN_ROWS = 4;  // arrays of a token

K3_INLINE Token token_in(float* memory, int64_t wide) {
    return {memory, memory + wide, memory + 2 * wide, memory + 3 * wide, 0.0f, 0.0f};
}

K3_INLINE F16 decay(const Kda& kda, F16 f, F16 a) {
    if (kda.has_lower_bound) return exp(mul(set1(kda.lower_bound), sigmoid(mul(a, f))));
    const F16 limit = set1(20.0f);  // above it softplus is the identity
    return exp(mul(negated(a), select_less(limit, f, f, softplus(f))));
}

// Asks memory for states some way ahead of where they are read and written, so that it works all the while: for the
// lines up to `end`, and then for those from `next` on.
struct StateAhead {
    static constexpr int64_t BYTES = 8192;

    const char* at;
    const char* end;
    const char* next;

    StateAhead(const float* state, const float* next_state, int64_t bytes)
        : at(reinterpret_cast<const char*>(state) + least(BYTES, bytes)),
          end(reinterpret_cast<const char*>(state) + bytes),
          next(reinterpret_cast<const char*>(next_state)) {}

    // Goes on by `bytes`, at most a line.
    void fetch(int64_t bytes) {
        __builtin_prefetch(at, 1);
        at += bytes;
        if (at >= end) {
            at = next;
            end = next + BYTES;
        }
    }
};

// FETCHES lines of a state each 16 keys.
template <int FETCHES>
K3_INLINE void prepare_decay(const Kda& kda, const float* f, int64_t head, const Token& token, StateAhead* ahead) {
    const F16 a = set1(kda.a[head]);
    for (int64_t i = 0; i < kda.key_dim; i += LANES) {
        const int64_t left = kda.key_dim - i;
        const F16 bias = lanes_load(kda.dt_bias + head * kda.key_dim + i, left);
        store(token.alpha + i, decay(kda, add(lanes_load(f + i, left), bias), a));
#pragma GCC unroll 16
        for (int line = 0; line < FETCHES; ++line) ahead->fetch(64);
    }
}

// What a token takes beside decay and beta.
K3_INLINE void prepare_token(const Kda& kda, const float* q, const float* k, Token& token) {
    const int64_t width = kda.key_dim;
    const float eps = 1e-6f;  // inside the root
    const float q_norm = 1.0f / __builtin_sqrtf(square_sum(q, width) + eps);
    const F16 q_scale = set1(q_norm * (1.0f / __builtin_sqrtf(static_cast<float>(width))));
    const F16 k_scale = set1(1.0f / __builtin_sqrtf(square_sum(k, width) + eps));
    F16 products = zero();
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t left = width - i;
        const F16 own_q = mul(lanes_load(q + i, left), q_scale), own_k = mul(lanes_load(k + i, left), k_scale);
        const F16 alpha = load(token.alpha + i);
        products = fma(own_k, own_q, products);
        store(token.decayed_q + i, mul(alpha, own_q));
        store(token.decayed_k + i, mul(alpha, own_k));
        store(token.k + i, own_k);
    }
    token.kq = sum(products);
}

// The mixing factors of up to 16 tokens, whose b lie stride apart.
K3_INLINE void prepare_beta(const float* b, int64_t stride, int64_t count, Token* tokens) {
    alignas(64) float lanes[LANES] = {};
    for (int64_t t = 0; t < count; ++t) lanes[t] = b[t * stride];
    store(lanes, sigmoid(load(lanes)));
    for (int64_t t = 0; t < count; ++t) tokens[t].beta = lanes[t];
}

// 16 value columns of a state [V, K], `count` of them real. FULL: all of them, and K a multiple of 16. The states ahead
// are asked for at `pace` bytes every other row.
template <bool FULL>
static void decode_columns(float* state, int64_t K, int64_t count, const float* values, const Token& token, float* o,
                           StateAhead& ahead, int64_t pace) {
    F16 d[2] = {zero(), zero()}, e[2] = {zero(), zero()};
    for (int64_t k = 0; k < K; k += LANES) {
        F16 columns[LANES];
        if constexpr (FULL) {
            load_transposed(state + k, K, columns);
        } else {
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; ++i) columns[i] = i < count ? lanes_load(state + i * K + k, K - k) : zero();
            transpose(columns);
        }
#pragma GCC unroll 16
        for (int64_t j = 0; j < LANES; ++j) {
            if (!FULL && j >= K - k) break;
            if (j % 2) ahead.fetch(pace);
            d[j % 2] = fma(columns[j], set1(token.decayed_k[k + j]), d[j % 2]);
            e[j % 2] = fma(columns[j], set1(token.decayed_q[k + j]), e[j % 2]);
        }
    }
    const F16 r = mul(set1(token.beta), sub(lanes_load(values, count), add(d[0], d[1])));
    lanes_store(o, fma(r, set1(token.kq), add(e[0], e[1])), count);
    alignas(64) float each[LANES];
    store(each, r);
    for (int64_t k = 0; k < K; k += LANES) {
        const F16 alpha = load(token.alpha + k), own_k = load(token.k + k);
        const int64_t left = FULL ? LANES : K - k;
#pragma GCC unroll 4
        for (int64_t i = 0; i < (FULL ? LANES : count); ++i) {
            float* cell = state + i * K + k;
            if (i % 2) ahead.fetch(pace);
            lanes_store(cell, fma(set1(each[i]), own_k, mul(lanes_load(cell, left), alpha)), left);
        }
    }
}

#if defined(K3_AVX2)
// Key indices k .. k + 4 of 8 value columns of a state, which lie K apart: lane v of out[i] is column v.
K3_INLINE void load_turned(const float* state, int64_t K, __m256 (&out)[4]) {
    __m256 x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const float* low = state + i * K;
        x[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(low + 4 * K), 1);
    }
    const __m256 a = _mm256_unpacklo_ps(x[0], x[1]), b = _mm256_unpackhi_ps(x[0], x[1]);
    const __m256 c = _mm256_unpacklo_ps(x[2], x[3]), d = _mm256_unpackhi_ps(x[2], x[3]);
    out[0] = _mm256_shuffle_ps(a, c, 0x44);
    out[1] = _mm256_shuffle_ps(a, c, 0xEE);
    out[2] = _mm256_shuffle_ps(b, d, 0x44);
    out[3] = _mm256_shuffle_ps(b, d, 0xEE);
}

// decode_columns<true> for 8 columns, whose sums fit the registers beside what is turned.
static void decode_eight(float* state, int64_t K, const float* values, const Token& token, float* o, StateAhead& ahead,
                         int64_t pace) {
    __m256 d[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, e[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t k = 0; k < K; k += 4) {
        __m256 columns[4];
        ahead.fetch(pace);
        load_turned(state + k, K, columns);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            d[j % 2] = _mm256_fmadd_ps(columns[j], _mm256_set1_ps(token.decayed_k[k + j]), d[j % 2]);
            e[j % 2] = _mm256_fmadd_ps(columns[j], _mm256_set1_ps(token.decayed_q[k + j]), e[j % 2]);
        }
    }
    const __m256 error = _mm256_sub_ps(_mm256_loadu_ps(values), _mm256_add_ps(d[0], d[1]));
    const __m256 r = _mm256_mul_ps(_mm256_set1_ps(token.beta), error);
    _mm256_storeu_ps(o, _mm256_fmadd_ps(r, _mm256_set1_ps(token.kq), _mm256_add_ps(e[0], e[1])));
    alignas(32) float each[8];
    _mm256_store_ps(each, r);
    __m256 own[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) own[i] = _mm256_set1_ps(each[i]);
    for (int64_t k = 0; k < K; k += 8) {
        const __m256 alpha = _mm256_loadu_ps(token.alpha + k), own_k = _mm256_loadu_ps(token.k + k);
        ahead.fetch(pace);
        ahead.fetch(pace);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            float* cell = state + i * K + k;
            const __m256 decayed = _mm256_mul_ps(_mm256_loadu_ps(cell), alpha);
            _mm256_storeu_ps(cell, _mm256_fmadd_ps(own[i], own_k, decayed));
        }
    }
}

static void decode_full(float* state, int64_t K, const float* values, const Token& token, float* o, StateAhead& ahead,
                        int64_t pace) {
    decode_eight(state, K, values, token, o, ahead, pace);
    decode_eight(state + 8 * K, K, values + 8, token, o + 8, ahead, pace);
}
#else
static void decode_full(float* state, int64_t K, const float* values, const Token& token, float* o, StateAhead& ahead,
                        int64_t pace) {
    decode_columns<true>(state, K, LANES, values, token, o, ahead, pace);
}
#endif

static void kda_decode(Context* context, const Kda* kda, const Step* step, const float* qkv, int64_t qkv_stride,
                       const float* f, int64_t f_stride, const float* b, int64_t b_stride, float* o) {
    const int64_t H = kda->heads, K = kda->key_dim, V = kda->value_dim, wide = round_up(K, LANES);
    const int64_t count = step->num_sequences * H;
    const auto state_of = [&](int64_t index) {
        return kda->state + (step->sequences[index / H].slot * H + index % H) * V * K;
    };
    auto body = [&](int64_t index, int worker) {
        const Sequence& own = step->sequences[index / H];
        const int64_t head = index % H;
        float* state = state_of(index);
        StateAhead ahead(state, state_of(index + 1 < count ? index + 1 : index), V * K * 4);
        // A state has V / 16 lines for each line that is asked for while its token is prepared.
        const int64_t pace = V > LANES ? 64 - 64 * LANES / V : 0;
        Token token = token_in(reinterpret_cast<float*>(scratch(context, worker, TOKEN_ROWS * wide * 4)), wide);
        const float* row = qkv + own.row * qkv_stride;
        prepare_beta(b + own.row * b_stride + head, 0, 1, &token);
        prepare_decay<LANES>(*kda, f + own.row * f_stride + head * K, head, token, &ahead);
        prepare_token(*kda, row + head * K, row + (H + head) * K, token);
        const float* values = row + 2 * H * K + head * V;
        float* out = o + (own.row * H + head) * V;
        for (int64_t v = 0; v < V; v += LANES) {
            if (K == wide && V - v >= LANES)
                decode_full(state + v * K, K, values + v, token, out + v, ahead, pace);
            else
                decode_columns<false>(state + v * K, K, least(LANES, V - v), values + v, token, out + v, ahead, pace);
        }
    };
    parallel(context, count, body);
}

// A state for the passes over a prompt: blocks of 16 value columns, COLUMNS of them at a time side by side as
// [K][COLUMNS][16] and what is left one by one as [K][16]. Apart they would lie multiples of 4 KiB from each other, and
// each read would wait for the write before it, which looks like its own.
struct Columns {
    float* of_block;  // for key 0
    int64_t stride;   // to the next key
};

K3_INLINE Columns columns_at(float* columns, int64_t V, int64_t K, int64_t v) {
    const int64_t blocks = (V + LANES - 1) / LANES, block = v / LANES, in_pass = block % COLUMNS;
    if (block >= blocks / COLUMNS * COLUMNS) return {columns + block * K * LANES, LANES};
    return {columns + (block - in_pass) * K * LANES + in_pass * LANES, COLUMNS * LANES};
}

// [V, K] → columns, or back.
static void load_columns(const float* state, int64_t V, int64_t K, bool is_fresh, float* columns) {
    for (int64_t v = 0; v < V; v += LANES) {
        const Columns own = columns_at(columns, V, K, v);
        for (int64_t k = 0; k < K; k += LANES) {
            F16 block[LANES];
            for (int64_t i = 0; i < LANES; ++i)
                block[i] = !is_fresh && v + i < V ? lanes_load(state + (v + i) * K + k, K - k) : zero();
            transpose(block);
            for (int64_t j = 0; j < least(LANES, K - k); ++j) store(own.of_block + (k + j) * own.stride, block[j]);
        }
    }
}

static void store_columns(float* columns, int64_t V, int64_t K, float* state) {
    for (int64_t v = 0; v < V; v += LANES) {
        const Columns own = columns_at(columns, V, K, v);
        for (int64_t k = 0; k < K; k += LANES) {
            F16 block[LANES];
            for (int64_t j = 0; j < LANES; ++j)
                block[j] = k + j < K ? load(own.of_block + (k + j) * own.stride) : zero();
            transpose(block);
            for (int64_t i = 0; i < least(LANES, V - v); ++i) lanes_store(state + (v + i) * K + k, block[i], K - k);
        }
    }
}

// One pass over B blocks of columns: writes the token before (r, when has_before) and reads this one.
template <int B, bool has_before>
K3_INLINE void token_pass(float* columns, int64_t K, const F16 (&r)[B], const float* k_before, const Token& token,
                          F16 (&d)[B][2], F16 (&e)[B][2]) {
#pragma GCC unroll 4
    for (int i = 0; i < B; ++i) d[i][0] = d[i][1] = e[i][0] = e[i][1] = zero();
    const auto key = [&](int64_t k, int chain) __attribute__((always_inline)) {
        const F16 alpha = set1(token.alpha[k]), to_d = set1(token.decayed_k[k]), to_e = set1(token.decayed_q[k]);
#pragma GCC unroll 4
        for (int i = 0; i < B; ++i) {
            float* cell = columns + (k * B + i) * LANES;
            F16 value = load(cell);
            if (has_before) value = fma(r[i], set1(k_before[k]), value);
            store(cell, mul(value, alpha));
            d[i][chain] = fma(value, to_d, d[i][chain]);
            e[i][chain] = fma(value, to_e, e[i][chain]);
        }
    };
    int64_t k = 0;
    for (; k + 2 <= K; k += 2) {
        key(k, 0);
        key(k + 1, 1);
    }
    if (k < K) key(k, 0);
}

// The columns of a head in consecutive rows.
struct Strip {
    const float* first;
    int64_t stride;
};

struct Chunk {
    const Token* tokens;
    int64_t count;
    const float* values;  // of the first token and head, stride apart
    int64_t value_stride;
    float* out;  // or null
    int64_t out_stride;
    Strip strips[5];      // all that a token reads and writes, from the first token on
    int64_t tokens_left;  // of the sequence, from the first one on
};

// Asks memory for the share of a token of the next chunk that falls to value columns v .. v + 16; where there are more
// keys than values, not for the rest. Rows lie far apart: asked for at once, all of them keep the preparation waiting,
// while memory idles in the passes.
K3_INLINE void ask_ahead(const Chunk& chunk, int64_t t, int64_t v) {
    if (t + TOKENS >= chunk.tokens_left) return;
#pragma GCC unroll 5
    for (int i = 0; i < 5; ++i) __builtin_prefetch(chunk.strips[i].first + (t + TOKENS) * chunk.strips[i].stride + v);
}

template <int B>
static void chunk_pass(float* columns, int64_t K, int64_t V, int64_t v, const Chunk& chunk) {
    F16 r[B], d[B][2], e[B][2];
    for (int i = 0; i < B; ++i) r[i] = zero();
    for (int64_t t = 0; t < chunk.count; ++t) {
        const Token& token = chunk.tokens[t];
        if (t == 0)
            token_pass<B, false>(columns, K, r, token.k, token, d, e);
        else
            token_pass<B, true>(columns, K, r, chunk.tokens[t - 1].k, token, d, e);
#pragma GCC unroll 4
        for (int i = 0; i < B; ++i) {
            const int64_t column = v + i * LANES, left = V - column;
            ask_ahead(chunk, t, column);
            const F16 value = lanes_load(chunk.values + t * chunk.value_stride + column, left);
            r[i] = mul(set1(token.beta), sub(value, add(d[i][0], d[i][1])));
            const F16 out = fma(r[i], set1(token.kq), add(e[i][0], e[i][1]));
            if (chunk.out) lanes_store(chunk.out + t * chunk.out_stride + column, out, left);
        }
    }
    const float* last = chunk.tokens[chunk.count - 1].k;
    for (int i = 0; i < B; ++i)
        for (int64_t k = 0; k < K; ++k) {
            float* cell = columns + (k * B + i) * LANES;
            store(cell, fma(r[i], set1(last[k]), load(cell)));
        }
}

static void kda_extend(Context* context, const Kda* kda, const Step* step, const float* qkv, int64_t qkv_stride,
                       const float* f, int64_t f_stride, const float* b, int64_t b_stride, float* o) {
    const int64_t H = kda->heads, K = kda->key_dim, V = kda->value_dim;
    const int64_t wide = round_up(K, LANES), blocks = (V + LANES - 1) / LANES;
    auto body = [&](int64_t index, int worker) {
        const Sequence& own = step->sequences[index / H];
        const int64_t head = index % H;
        float* columns = reinterpret_cast<float*>(
            scratch(context, worker, (blocks * LANES * K + TOKEN_ROWS * TOKENS * wide) * 4));
        float* memory = columns + blocks * LANES * K;
        Token tokens[TOKENS];
        for (int64_t t = 0; t < TOKENS; ++t) tokens[t] = token_in(memory + t * TOKEN_ROWS * wide, wide);
        float* state = kda->state + (own.slot * H + head) * V * K;
        load_columns(state, V, K, own.is_fresh, columns);
        for (int64_t first = 0; first < own.length; first += TOKENS) {
            const int64_t count = least(TOKENS, own.length - first), begin = own.row + first;
            prepare_beta(b + begin * b_stride + head, b_stride, count, tokens);
            for (int64_t t = 0; t < count; ++t)
                prepare_decay<0>(*kda, f + (begin + t) * f_stride + head * K, head, tokens[t], nullptr);
            for (int64_t t = 0; t < count; ++t) {
                const float* row = qkv + (begin + t) * qkv_stride;
                prepare_token(*kda, row + head * K, row + (H + head) * K, tokens[t]);
            }
            const float* row = qkv + begin * qkv_stride;
            const float* values = row + 2 * H * K + head * V;
            float* out = o ? o + (begin * H + head) * V : nullptr;
            const Chunk chunk = {tokens, count, values, qkv_stride, out, H * V,
                                 {{row + head * K, qkv_stride},
                                  {row + (H + head) * K, qkv_stride},
                                  {f + begin * f_stride + head * K, f_stride},
                                  {values, qkv_stride},
                                  {out ? out : values, out ? H * V : qkv_stride}},
                                 own.length - first};
            int64_t block = 0;
            for (; block + COLUMNS <= blocks; block += COLUMNS)
                chunk_pass<COLUMNS>(columns + block * LANES * K, K, V, block * LANES, chunk);
            for (; block < blocks; ++block)
                chunk_pass<1>(columns + block * LANES * K, K, V, block * LANES, chunk);
        }
        if (!step->keeps_states) store_columns(columns, V, K, state);
    };
    parallel(context, step->num_sequences * H, body);
}

}  // namespace K3_ISA
}  // namespace k3
