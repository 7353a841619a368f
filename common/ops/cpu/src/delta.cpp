// The delta rules as the recurrence itself, token by token: per value head a state [key_dim, value_dim], with one decay
// per head (gated delta, arXiv 2412.06464) or one per channel of the key (Kimi delta, arXiv 2510.26692). Columns do not
// depend on each other, so a strip of them stays in the first-level cache.
#include <cmath>

#include "step.h"

namespace tandem {
namespace {

constexpr int64_t kRows = 32;  // tokens per pass over the state
constexpr int64_t kCopyRows = 4;  // from this many tokens on, a strip is copied to adjacent memory first
constexpr int kNarrow = kLanes == 16 ? 2 : 4;  // vectors across a copied strip: 16 KiB at 128 channels
constexpr int kWide = kLanes == 16 ? 8 : 4;    // vectors across a strip in place
constexpr float kNormEps = 1e-6f;              // added to squared norms, as in common/ops/torch/delta.py

struct DeltaArgs {
    const void* query;
    int64_t query_dtype, query_stride, query_head_stride;  // [num_rows, key_heads, key_dim]
    const void* key;
    int64_t key_dtype, key_stride, key_head_stride;
    const void* value;
    int64_t value_dtype, value_stride, value_head_stride;  // [num_rows, value_heads, value_dim]
    const void* decay;
    int64_t decay_dtype, decay_stride, decay_head_stride;  // [num_rows, value_heads(, key_dim)], its logarithm
    const void* beta;
    int64_t beta_dtype, beta_stride, beta_head_stride;
    float* pool;
    int64_t slot_stride;
    void* out;  // [num_rows, value_heads, value_dim] in value's dtype
    int64_t key_heads, value_heads, key_dim, value_dim, num_threads;
};

// What advance_strip reads of each token. qg, kg: [rows, key_stride] times the decay; keep: [rows] or, per channel,
// [rows, key_stride]; v and y: [rows, value_stride].
struct Tokens {
    const float *qg, *kg, *k, *keep, *v, *rate, *dot;
    float* y;
    int64_t rows, key_stride, value_stride;
};

// A strip of Vectors x kLanes columns over some tokens. Rows of a state are often a power of two apart, so a strip in
// place falls into few sets of the cache: for many tokens it is copied to adjacent memory. With s the state before the
// token and g its decay: what the key reads is (g * k) . s, and what the query reads afterwards is
// (g * q) . s + (q . k) * delta. So one pass over the strip writes the state after a token and reads it for the next one.
template <int Vectors, bool kPerChannel>
inline void advance_strip(float* state, int64_t state_stride, int64_t key_dim, const Tokens& x, int64_t column,
                          float* strip) {
    const bool copied = x.rows >= kCopyRows;
    const int64_t stride = copied ? Vectors * kLanes : state_stride;
    float* s = copied ? strip : state;
    if (copied)
        for (int64_t i = 0; i < key_dim; i++) std::memcpy(s + i * stride, state + i * state_stride, stride * 4);
    vf read[Vectors], past[Vectors], delta[Vectors];
    for (int j = 0; j < Vectors; j++) read[j] = past[j] = vf{};
    for (int64_t i = 0; i < key_dim; i++) {
        if (!copied) ask_ahead(s + i * stride, Vectors * kLanes);
        const vf ki = splat(x.kg[i]), qi = splat(x.qg[i]);
        for (int j = 0; j < Vectors; j++) {
            const vf z = load(s + i * stride + j * kLanes);
            read[j] = fma(z, ki, read[j]);
            past[j] = fma(z, qi, past[j]);
        }
    }
    for (int64_t t = 0; t < x.rows; t++) {
        const int64_t place = t * x.value_stride + column;
        for (int j = 0; j < Vectors; j++) {
            delta[j] = (load(x.v + place + j * kLanes) - read[j]) * splat(x.rate[t]);
            store(x.y + place + j * kLanes, fma(splat(x.dot[t]), delta[j], past[j]));
            read[j] = past[j] = vf{};
        }
        const float* k = x.k + t * x.key_stride;
        const float* keep = x.keep + (kPerChannel ? t * x.key_stride : t);
        const vf g = splat(*keep);
        if (t + 1 == x.rows) {
            for (int64_t i = 0; i < key_dim; i++) {
                const vf ki = splat(k[i]), gi = kPerChannel ? splat(keep[i]) : g;
                for (int j = 0; j < Vectors; j++) {
                    float* z = s + i * stride + j * kLanes;
                    store(z, fma(ki, delta[j], load(z) * gi));
                }
            }
            break;
        }
        const float *kg = x.kg + (t + 1) * x.key_stride, *qg = x.qg + (t + 1) * x.key_stride;
        for (int64_t i = 0; i < key_dim; i++) {
            const vf ki = splat(k[i]), gi = kPerChannel ? splat(keep[i]) : g;
            const vf next_k = splat(kg[i]), next_q = splat(qg[i]);
            for (int j = 0; j < Vectors; j++) {
                float* place = s + i * stride + j * kLanes;
                const vf z = fma(ki, delta[j], load(place) * gi);
                store(place, z);
                read[j] = fma(z, next_k, read[j]);
                past[j] = fma(z, next_q, past[j]);
            }
        }
    }
    if (copied)
        for (int64_t i = 0; i < key_dim; i++) std::memcpy(state + i * state_stride, s + i * stride, stride * 4);
}

// Columns [column, stride) in strips of Vectors, as far as they go.
template <int Vectors, bool kPerChannel>
inline int64_t advance_strips(float* state, int64_t stride, int64_t key_dim, const Tokens& x, int64_t column,
                              float* strip) {
    for (; column + Vectors * kLanes <= stride; column += Vectors * kLanes)
        advance_strip<Vectors, kPerChannel>(state + column, stride, key_dim, x, column, strip);
    return column;
}

inline void normalise(float* x, int64_t n, float scale) {
    vf squares = vf{};
    for (int64_t i = 0; i < n; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    const vf factor = splat(scale / std::sqrt(sum(squares) + kNormEps));
    for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i) * factor);
}

template <bool kPerChannel>
void scan_head(const DeltaArgs& a, const Step& step, int64_t segment, int64_t head) {
    const int64_t keys = padded(a.key_dim), stride = padded(a.value_dim);
    const int64_t key_head = head / (a.value_heads / a.key_heads);
    float* qg = scratch(kRows * (4 * keys + 2 * stride + 2) + a.key_dim * (4 * kLanes + stride));
    float* kg = qg + kRows * keys;
    float* k = kg + kRows * keys;
    float* keep = k + kRows * keys;
    float* v = keep + kRows * keys;
    float* y = v + kRows * stride;
    float* rate = y + kRows * stride;
    float* dot = rate + kRows;
    float* strip = dot + kRows;
    HeadState state(a.pool, a.slot_stride, head * a.key_dim * a.value_dim, a.key_dim, a.value_dim, step, segment,
                    strip + a.key_dim * 4 * kLanes);
    const float scale = 1.0f / std::sqrt(float(a.key_dim));
    const auto prepare = [&](int64_t row, int64_t t) {  // everything of packed row `row` but its decay per head
        float *qt = qg + t * keys, *kt = k + t * keys;
        load_row(qt, a.query, a.query_dtype, row * a.query_stride + key_head * a.query_head_stride, a.key_dim);
        load_row(kt, a.key, a.key_dtype, row * a.key_stride + key_head * a.key_head_stride, a.key_dim);
        load_row(v + t * stride, a.value, a.value_dtype, row * a.value_stride + head * a.value_head_stride,
                 a.value_dim);
        rate[t] = load_one(a.beta, a.beta_dtype, row * a.beta_stride + head * a.beta_head_stride);
        normalise(qt, keys, scale);
        normalise(kt, keys, 1.0f);
        vf product = vf{};
        for (int64_t i = 0; i < keys; i += kLanes) product = fma(load(qt + i), load(kt + i), product);
        dot[t] = sum(product);
        if (!kPerChannel) return;
        float* gt = keep + t * keys;
        load_row(gt, a.decay, a.decay_dtype, row * a.decay_stride + head * a.decay_head_stride, a.key_dim);
        for (int64_t i = 0; i < keys; i += kLanes) store(gt + i, exp(load(gt + i)));
    };
    const auto advance = [&](int64_t row, int64_t last) {
        for (; row < last; row += kRows) {
            const int64_t rows = last - row < kRows ? last - row : kRows;
            for (int64_t t = row + kRows; t < row + 2 * kRows && t < last; t++) {
                prefetch_row(a.query, a.query_dtype, t * a.query_stride + key_head * a.query_head_stride, a.key_dim);
                prefetch_row(a.key, a.key_dtype, t * a.key_stride + key_head * a.key_head_stride, a.key_dim);
                prefetch_row(a.value, a.value_dtype, t * a.value_stride + head * a.value_head_stride, a.value_dim);
            }
            for (int64_t t = 0; t < rows; t++) prepare(row + t, t);
            if (!kPerChannel) {
                for (int64_t t = 0; t < padded(rows); t++)
                    keep[t] = t < rows ? load_one(a.decay, a.decay_dtype,
                                                  (row + t) * a.decay_stride + head * a.decay_head_stride) : 0;
                for (int64_t t = 0; t < rows; t += kLanes) store(keep + t, exp(load(keep + t)));
            }
            for (int64_t t = 0; t < rows; t++) {
                for (int64_t i = 0; i < keys; i += kLanes) {
                    const int64_t place = t * keys + i;
                    const vf g = kPerChannel ? load(keep + place) : splat(keep[t]);
                    store(kg + place, load(k + place) * g);
                    store(qg + place, load(qg + place) * g);
                }
            }
            const Tokens tokens = {qg, kg, k, keep, v, rate, dot, y, rows, keys, stride};
            int64_t column = 0;
            if (rows < kCopyRows)  // whole rows: memory is read in order
                column = advance_strips<kWide, kPerChannel>(state.data, stride, a.key_dim, tokens, column, strip);
            column = advance_strips<kNarrow, kPerChannel>(state.data, stride, a.key_dim, tokens, column, strip);
            advance_strips<1, kPerChannel>(state.data, stride, a.key_dim, tokens, column, strip);
            for (int64_t t = 0; t < rows; t++)
                store_row(a.out, a.value_dtype, ((row + t) * a.value_heads + head) * a.value_dim, y + t * stride,
                          a.value_dim);
        }
    };
    walk(step, segment, advance, [&](int64_t slot) { state.save(slot); });
    state.save(step.dst_slot[segment]);
}

template <bool kPerChannel>
void scan(const int64_t* words, const int64_t* step_words) {
    const DeltaArgs& a = *reinterpret_cast<const DeltaArgs*>(words);
    const Step& step = *reinterpret_cast<const Step*>(step_words);
    const int64_t work = step.num_rows() * a.value_heads * a.key_dim * a.value_dim * 2;
    parallel(step.num_segments * a.value_heads, a.num_threads, work,
             [&](int64_t i) { scan_head<kPerChannel>(a, step, i / a.value_heads, i % a.value_heads); });
}

}  // namespace
}  // namespace tandem

extern "C" void tandem_gated_delta(const int64_t* words, const int64_t* step_words) {
    tandem::scan<false>(words, step_words);
}

extern "C" void tandem_kimi_delta(const int64_t* words, const int64_t* step_words) {
    tandem::scan<true>(words, step_words);
}
