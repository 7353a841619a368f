// What attention over prompts (attention.cpp) and over single tokens (attention_token.cpp) share, down to the bits: a
// row's scores, weights and output are the same sums in the same order in both.
#pragma once

#include <algorithm>
#include <type_traits>

#include "step.h"
#include "tiles.h"

namespace tandem {

constexpr int kBlockRows = kLanes == 8 ? 3 : 6;  // query rows of one product: as many as its sums have registers for

struct AttentionArgs {
    const void* query;
    int64_t query_dtype, query_stride, query_head_stride;  // [num_rows, heads, head_size]
    const char* key;
    int64_t key_stride, key_head_stride;  // [num_rows, kv_heads, head_size]; K/V and pools have one dtype
    const char* value;
    int64_t value_stride, value_head_stride;
    const char* k_pool;
    int64_t k_block_stride, k_row_stride, k_head_stride;  // [num_blocks, block_size, kv_heads, head_size]
    const char* v_pool;
    int64_t v_block_stride, v_row_stride, v_head_stride;
    int64_t kv_dtype;
    void* out;  // [num_rows, heads, head_size_v] in the query's dtype
    const float* scale;
    int64_t heads, kv_heads, head_size, head_size_v, window, num_threads;  // window in tokens, 0: none

    // The first position that a row at `position` sees.
    int64_t earliest(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
    int64_t own_words(bool is_pairs) const { return is_pairs ? (head_size + 1) / 2 : head_size; }
};

// Where the keys (or values) of one segment are, of the first K/V head.
struct Source {
    const char* pool;
    const char* packed;  // of position `start`
    const int64_t* table;
    int64_t block_bytes, row_bytes, packed_bytes, block_size, start;

    // Addresses of positions [first, first + count).
    void addresses(int64_t first, int64_t count, const char** out) const {
        int64_t i = 0;
        const int64_t pooled = start - first < count ? start - first : count;
        while (i < pooled) {
            const int64_t position = first + i, offset = position % block_size;
            const char* row = pool + table[position / block_size] * block_bytes + offset * row_bytes;
            const int64_t run = pooled - i < block_size - offset ? pooled - i : block_size - offset;
            for (int64_t j = 0; j < run; j++) out[i + j] = row + j * row_bytes;
            i += run;
        }
        for (; i < count; i++) out[i] = packed + (first + i - start) * packed_bytes;
    }
};

// Keys [low, high) of a tile that a row may see; none when high <= low.
struct Range {
    int64_t low, high;
};

template <Kind kKind, int64_t kStride>
struct Scores {
    const float *query, *keys;  // [rows, words], [words, kStride]
    int64_t words;
    float* out;  // [rows, kTile]

    template <int Rows, int Vectors>
    void run(int64_t column) const {
        vf sums[Rows][Vectors] = {};
        const auto key = [&](int64_t word, int j) { return load(keys + word * kStride + column + j * kLanes); };
        multiply<kKind>(query, words, 0, words, key, sums);
        for (int r = 0; r < Rows; r++)
            for (int j = 0; j < Vectors; j++) store(out + r * kTile + column + j * kLanes, sums[r][j]);
    }
};

// out = out * shrink + weights x values, for steps [first, last) of a tile. values(step, d): elements from d on.
template <Kind kKind, class Values>
struct Gather {
    const float* weights;  // [rows, kTile / kPerWord]
    const Values& values;
    const float* shrink;
    int64_t first, last, dims_v;
    float* out;

    template <int Rows, int Vectors>
    void run(int64_t column) const {
        vf sums[Rows][Vectors];
        for (int r = 0; r < Rows; r++)
            for (int j = 0; j < Vectors; j++)
                sums[r][j] = load(out + r * dims_v + column + j * kLanes) * splat(shrink[r]);
        const auto value = [&](int64_t step, int j) { return values(step, column + j * kLanes); };
        multiply<kKind>(weights, kTile / kPerWord<kKind>, first, last, value, sums);
        for (int r = 0; r < Rows; r++)
            for (int j = 0; j < Vectors; j++) store(out + r * dims_v + column + j * kLanes, sums[r][j]);
    }
};

// Scores -> weights of one row, its maximum and sum brought up to date. `factor` turns scores into exponents of 2.
// Weights of `whole`, a range of whole vectors, are written, those outside of `seen` as 0. Returns what shrinks the
// output so far.
template <Kind kKind>
inline float weigh(float* scores, Range seen, Range whole, float factor, float& maximum, float& sum, float* weights) {
    vi lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    const vf nothing = splat(-__builtin_inff());
    const int64_t first = seen.low / kLanes * kLanes, last = padded(seen.high);
    vf most = nothing;
    for (int64_t k = first; k < last; k += kLanes) {
        vf x = load(scores + k);
        if (k < seen.low || k + kLanes > seen.high) {
            const vi place = lane + int32_t(k);
            x = select((place >= int32_t(seen.low)) & (place < int32_t(seen.high)), x, nothing);
            store(scores + k, x);
        }
        most = larger(x, most);
    }
    const float top = max_lane(most), best = top > maximum ? top : maximum;
    const float shrink = exp2_negative(splat((maximum - best) * factor))[0];
    const vf offset = splat(-best * factor), scale = splat(factor);
    const auto put = [&](int64_t k, vf w) {  // gives back what the product will see, so that weights sum up to 1
        if (kKind == Kind::kFloats) {
            store(weights + k, w);
            return w;
        }
        uint16_t* place = reinterpret_cast<uint16_t*>(weights) + k;
        store_bf16(place, w);
        return load_bf16(place);
    };
    vf total = vf{};
    for (int64_t k = whole.low; k < first; k += kLanes) put(k, vf{});
    for (int64_t k = first; k < last; k += kLanes) {
        total += put(k, exp2_negative(fma(load(scores + k), scale, offset)));
    }
    for (int64_t k = last; k < whole.high; k += kLanes) put(k, vf{});
    sum = sum * shrink + tandem::sum(total);
    maximum = best;
    return shrink;
}

// Calls part(count, row) for rows [row, num_rows) in blocks of as many as one product takes; count is a constant.
template <class Part>
[[gnu::always_inline]] inline void in_blocks(int64_t row, int64_t num_rows, const Part& part) {
    for (; row + kBlockRows <= num_rows; row += kBlockRows) part(std::integral_constant<int, kBlockRows>(), row);
    for (; kBlockRows > 4 && row + 4 <= num_rows; row += 4) part(std::integral_constant<int, 4>(), row);
    for (; row + 2 <= num_rows; row += 2) part(std::integral_constant<int, 2>(), row);
    for (; row < num_rows; row++) part(std::integral_constant<int, 1>(), row);
}

// The one row of segment `segment` that it has in this step, K/V heads [head, last_head). kind: kPairs only where there
// are such. Whole vectors of values only.
void attend_token(const AttentionArgs& args, const Step& step, Kind kind, int64_t segment, int64_t head,
                  int64_t last_head);

}  // namespace tandem
