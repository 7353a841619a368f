// Paged attention in place: keys and values of earlier steps are read from their blocks, those of this step from the
// packed rows. Query heads that share a K/V head are rows of one product, so K/V is read once for all of them.
//
// Keys are taken in tiles that begin at multiples of kTile of their own position, with a running maximum and sum
// (arXiv 2205.14135). A row sees the same tiles in the same order, and in each of them the same sums in the same order,
// whether it is computed alone or in a long chunk.
//
// Pairs are multiplied on AMX tiles where the CPU has them, for one row as for many: tiles round in another order than
// vectors do.
#include <algorithm>
#include <optional>

#include "amx.h"
#include "step.h"
#include "tiles.h"

namespace tandem {
namespace {

constexpr int64_t kQueryRows = 96;  // (token, head) rows of one task, about
constexpr int kBlockRows = kLanes == 8 ? 3 : 6;  // rows of one product

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
    int64_t heads, kv_heads, head_size, head_size_v, window, num_threads;  // window 0: none
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

// The queries of one K/V head in one task and what they have seen so far. Row r is token first + r / group and head
// kv_head * group + r % group.
struct Rows {
    float* query;  // [rows, words]
    float* out;    // [rows, dims_v]
    float *maxima, *sums;
    int64_t words, dims_v;
};

// Keys [low, high) of a tile that a row may see; none when high <= low.
struct Range {
    int64_t low, high;
};

template <Kind kKind>
struct Scores {
    const float *query, *keys;
    int64_t words;
    float* out;  // [kBlockRows, kTile]

    template <int Rows, int Vectors>
    void run(int64_t column) const {
        vf sums[Rows][Vectors] = {};
        multiply<kKind>(query, words, keys + column, kTile, words, sums);
        for (int r = 0; r < Rows; r++)
            for (int j = 0; j < Vectors; j++) store(out + r * kTile + column + j * kLanes, sums[r][j]);
    }
};

// out = out * shrink + weights x values
template <Kind kKind>
struct Gather {
    const float *weights, *values, *shrink;
    int64_t steps, dims_v;
    float* out;

    template <int Rows, int Vectors>
    void run(int64_t column) const {
        vf sums[Rows][Vectors];
        for (int r = 0; r < Rows; r++)
            for (int j = 0; j < Vectors; j++)
                sums[r][j] = load(out + r * dims_v + column + j * kLanes) * splat(shrink[r]);
        multiply<kKind>(weights, kTile / (kKind == Kind::kPairs ? 2 : 1), values + column, dims_v, steps, sums);
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

// Count rows from `row` on against a packed tile; seen(r) is the range of row r.
template <Kind kKind, int Count, class Seen>
void attend_block(const Rows& rows, int64_t row, const float* keys, const float* values, float factor, float* scores,
                  float* weights, Seen seen) {
    Range each[Count], whole = {kTile, 0};
    for (int r = 0; r < Count; r++) {
        each[r] = seen(row + r);
        if (each[r].high <= each[r].low) continue;
        whole.low = each[r].low < whole.low ? each[r].low : whole.low;
        whole.high = each[r].high > whole.high ? each[r].high : whole.high;
    }
    if (whole.high <= whole.low) return;
    whole = {whole.low / kLanes * kLanes, padded(whole.high)};
    in_pieces<Count>(whole.high - whole.low,
                     Scores<kKind>{rows.query + row * rows.words, keys + whole.low, rows.words, scores + whole.low});
    constexpr int64_t kPerWord = kKind == Kind::kPairs ? 2 : 1;
    float shrink[Count];
    for (int r = 0; r < Count; r++) {
        float* w = weights + r * (kTile / kPerWord);
        if (each[r].high <= each[r].low) {
            shrink[r] = 1.0f;
            std::memset(w + whole.low / kPerWord, 0, (whole.high - whole.low) / kPerWord * 4);
        } else {
            shrink[r] = weigh<kKind>(scores + r * kTile, each[r], whole, factor, rows.maxima[row + r],
                                     rows.sums[row + r], w);
        }
    }
    in_pieces<Count>(rows.dims_v, Gather<kKind>{weights + whole.low / kPerWord,
                                                values + whole.low / kPerWord * rows.dims_v, shrink,
                                                (whole.high - whole.low) / kPerWord, rows.dims_v,
                                                rows.out + row * rows.dims_v});
}

#if defined(TANDEM_AMX)
constexpr int64_t kSpan = 2 * kTileSteps;  // keys whose weights are multiplied at a time

// As attend_block, for up to kGroupRows rows on tiles.
template <bool kTwo, class Seen>
void attend_tiles(const Rows& rows, int64_t row, int64_t count, const float* keys, const float* values, float factor,
                  float* scores, float* weights, Seen seen) {
    Range each[kGroupRows], whole = {kTile, 0};
    for (int64_t r = 0; r < count; r++) {
        each[r] = seen(row + r);
        if (each[r].high <= each[r].low) continue;
        whole.low = std::min(whole.low, each[r].low);
        whole.high = std::max(whole.high, each[r].high);
    }
    if (whole.high <= whole.low) return;
    whole = {whole.low / kSpan * kSpan, (whole.high + kSpan - 1) / kSpan * kSpan};
    for (int64_t column = whole.low; column < whole.high; column += 2 * kTileSteps)
        multiply_words<kTwo, 2>(rows.query + row * rows.words, rows.words * 4, keys + column, kTile * 4,
                                rows.words / kTileSteps, false, scores + column, kTile * 4);
    float* out = rows.out + row * rows.dims_v;
    for (int64_t r = 0; r < count; r++) {
        float* w = weights + r * (kTile / 2);
        if (each[r].high <= each[r].low) {
            std::memset(w + whole.low / 2, 0, (whole.high - whole.low) / 2 * 4);
            continue;
        }
        const float shrink = weigh<Kind::kPairs>(scores + r * kTile, each[r], whole, factor, rows.maxima[row + r],
                                                 rows.sums[row + r], w);
        if (shrink == 1.0f) continue;
        float* mine = out + r * rows.dims_v;
        for (int64_t d = 0; d < rows.dims_v; d += kLanes) store(mine + d, load(mine + d) * splat(shrink));
    }
    const float* w = weights + whole.low / 2;
    const float* v = values + whole.low / 2 * rows.dims_v;
    const int64_t num_tiles = (whole.high - whole.low) / kSpan, bytes = rows.dims_v * 4;
    int64_t d = 0;
    for (; d + 2 * kLanes <= rows.dims_v; d += 2 * kLanes)
        multiply_words<kTwo, 2>(w, kTile * 2, v + d, bytes, num_tiles, true, out + d, bytes);
    if (d < rows.dims_v) multiply_words<kTwo, 1>(w, kTile * 2, v + d, bytes, num_tiles, true, out + d, bytes);
}
#endif

// Rows [first, first + count) of a segment and K/V heads [head, last_head): tile by tile, and in each of them head by
// head, so that with all heads blocks are read from end to end.
template <Kind kKind, bool kOnTiles>
void attend(const AttentionArgs& a, const Step& step, int64_t segment, int64_t head, int64_t last_head, int64_t first,
            int64_t count) {
    const int64_t group = a.heads / a.kv_heads, num_rows = count * group, num_heads = last_head - head;
    const int64_t own_words = kKind == Kind::kPairs ? (a.head_size + 1) / 2 : a.head_size;
    const int64_t words = kOnTiles ? padded(own_words) : own_words, dims_v = padded(a.head_size_v);
    constexpr int64_t kRows = kOnTiles ? kGroupRows : kBlockRows;
    const int64_t bytes = item_bytes(a.kv_dtype), begin = step.begin[segment], start = step.start[segment];
    const int64_t end = start + first + count;  // after the last row's own position
    const auto earliest = [&](int64_t position) {
        return a.window && position >= a.window ? position - a.window + 1 : 0;
    };

    float* keys = scratch(kTile * (padded(words) + dims_v + 2 * kRows) +
                          num_heads * num_rows * (words + dims_v + 2) + kLanes);
    float* values = keys + kTile * padded(words);
    float* scores = values + kTile * dims_v;
    float* weights = scores + kRows * kTile;
    Rows all;  // of the first head; the next head's follow behind
    all.words = words;
    all.dims_v = dims_v;
    all.out = weights + kRows * kTile;
    all.query = all.out + num_heads * num_rows * dims_v;
    all.maxima = all.query + num_heads * num_rows * words + kLanes;  // load_row may fill up its last vector
    all.sums = all.maxima + num_heads * num_rows;
    const auto rows_of = [&](int64_t h) {
        return Rows{all.query + h * num_rows * words, all.out + h * num_rows * dims_v, all.maxima + h * num_rows,
                    all.sums + h * num_rows, words, dims_v};
    };
    std::memset(all.out, 0, num_heads * num_rows * dims_v * 4);
    for (int64_t i = 0; i < num_heads * num_rows; i++) {
        const int64_t r = i % num_rows, query_head = (head + i / num_rows) * group + r % group;
        const int64_t place = (begin + first + r / group) * a.query_stride + query_head * a.query_head_stride;
        float* to = all.query + i * words;
        if (kKind == Kind::kPairs) {
            for (int64_t word = own_words - 1; word < words; word++) to[word] = 0.0f;
            std::memcpy(to, static_cast<const uint16_t*>(a.query) + place, a.head_size * 2);
        } else {
            load_row(to, a.query, a.query_dtype, place, a.head_size);
        }
        all.maxima[i] = -__builtin_inff();
        all.sums[i] = 0.0f;
    }
    const int64_t* table = step.table + step.table_begin[segment];
    const Source k_source = {a.k_pool, a.key + begin * a.key_stride * bytes, table, a.k_block_stride * bytes,
                             a.k_row_stride * bytes, a.key_stride * bytes, step.block_size, start};
    const Source v_source = {a.v_pool, a.value + begin * a.value_stride * bytes, table, a.v_block_stride * bytes,
                             a.v_row_stride * bytes, a.value_stride * bytes, step.block_size, start};
    const char *k_rows[2][kTile], *v_rows[2][kTile];  // of this tile and the next, without the head
    const auto find = [&](int64_t tile, int side) {
        const int64_t size = end - tile > kTile ? kTile : end - tile > 0 ? end - tile : 0;
        k_source.addresses(tile, size, k_rows[side]);
        v_source.addresses(tile, size, v_rows[side]);
        return size;
    };
    const auto place_of = [&](int64_t position, int64_t stride, int64_t pool_stride, int64_t h) {
        return (position < start ? pool_stride : stride) * (head + h);
    };
    const auto ask_for = [&](int64_t tile, int side, int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++)
            for (int64_t h = 0; h < num_heads; h++) {
                prefetch_row(k_rows[side][i], a.kv_dtype, place_of(tile + i, a.key_head_stride, a.k_head_stride, h),
                             a.head_size);
                prefetch_row(v_rows[side][i], a.kv_dtype, place_of(tile + i, a.value_head_stride, a.v_head_stride, h),
                             a.head_size_v);
            }
    };
    const float factor = *a.scale * 1.44269504088896341f;
#if defined(TANDEM_AMX)
    [[maybe_unused]] std::optional<Tiles> tiles;
    if constexpr (kOnTiles) {
        tiles.emplace();
        // Steps that fill up the last tile: never written again.
        std::memset(keys + own_words * kTile, 0, (words - own_words) * kTile * 4);
    }
#endif
    int64_t tile = earliest(start + first) / kTile * kTile, size = find(tile, 0);
    ask_for(tile, 0, 0, size);
    for (int side = 0; tile < end; tile += kTile, side ^= 1) {
        const int64_t next = find(tile + kTile, side ^ 1);
        const auto seen = [&](int64_t r) {
            const int64_t position = start + first + r / group, low = earliest(position) - tile;
            const int64_t high = position + 1 - tile;
            return Range{low > 0 ? low : 0, high < size ? high : size};
        };
        for (int64_t h = 0; h < num_heads; h++) {
            ask_for(tile + kTile, side ^ 1, next * h / num_heads, next * (h + 1) / num_heads);
            const char *k[kTile], *v[kTile];
            for (int64_t i = 0; i < size; i++) {
                k[i] = k_rows[side][i] + bytes * place_of(tile + i, a.key_head_stride, a.k_head_stride, h);
                v[i] = v_rows[side][i] + bytes * place_of(tile + i, a.value_head_stride, a.v_head_stride, h);
            }
            pack_keys<kKind>(k, size, a.kv_dtype, a.head_size, keys);
            pack_values<kKind>(v, size, a.kv_dtype, a.head_size_v, dims_v, values);
            const Rows rows = rows_of(h);
            // The first token that sees a key of this tile.
            const int64_t token = tile - start - first > 0 ? tile - start - first : 0;
            int64_t r = token * group;
#if defined(TANDEM_AMX)
            if constexpr (kOnTiles) {
                // Spans reach beyond what is packed, and what is still held: what has no weight must be a number.
                const int64_t lowest = earliest(start + first) - tile, packed = padded(size) / 2;
                if (lowest >= kLanes) std::memset(values, 0, lowest / kLanes * kLanes / 2 * dims_v * 4);
                const int64_t spanned = (size + kSpan - 1) / kSpan * kSpan / 2;
                std::memset(values + packed * dims_v, 0, (spanned - packed) * dims_v * 4);
                for (; r < num_rows; r += kGroupRows) {
                    const int64_t left = std::min(num_rows - r, kGroupRows);
                    tiles->set_rows(left);
                    const auto run = left > kTileRows ? attend_tiles<true, decltype(seen)>
                                                      : attend_tiles<false, decltype(seen)>;
                    run(rows, r, left, keys, values, factor, scores, weights, seen);
                }
                continue;
            }
#endif
            for (; r + kBlockRows <= num_rows; r += kBlockRows)
                attend_block<kKind, kBlockRows>(rows, r, keys, values, factor, scores, weights, seen);
            for (; kBlockRows > 4 && r + 4 <= num_rows; r += 4)
                attend_block<kKind, 4>(rows, r, keys, values, factor, scores, weights, seen);
            for (; r + 2 <= num_rows; r += 2)
                attend_block<kKind, 2>(rows, r, keys, values, factor, scores, weights, seen);
            for (; r < num_rows; r++)
                attend_block<kKind, 1>(rows, r, keys, values, factor, scores, weights, seen);
        }
        size = next;
    }
    for (int64_t i = 0; i < num_heads * num_rows; i++) {
        const int64_t r = i % num_rows, query_head = (head + i / num_rows) * group + r % group;
        float* row = all.out + i * dims_v;
        const vf share = splat(1.0f / all.sums[i]);
        for (int64_t d = 0; d < dims_v; d += kLanes) store(row + d, load(row + d) * share);
        store_row(a.out, a.query_dtype, ((begin + first + r / group) * a.heads + query_head) * a.head_size_v, row,
                  a.head_size_v);
    }
}

}  // namespace
}  // namespace tandem

extern "C" void tandem_attention(const int64_t* words, const int64_t* step_words) {
    using namespace tandem;
    const AttentionArgs& a = *reinterpret_cast<const AttentionArgs*>(words);
    const Step& step = *reinterpret_cast<const Step*>(step_words);
    const int64_t group = a.heads / a.kv_heads;
    const int64_t tokens = group < kQueryRows ? kQueryRows / group : 1;  // of one task
    struct Task {
        int64_t segment, head, last_head, first;
    };
    std::vector<Task> tasks;
    int64_t work = 0;
    for (int64_t s = 0; s < step.num_segments; s++) {
        work += step.rows(s) * (step.start[s] + step.rows(s)) * a.heads * (a.head_size + a.head_size_v);
        // One token: all heads at once, or as many parts as there are threads when there are few segments.
        const int64_t parts = step.rows(s) > 1 ? a.kv_heads : step.num_segments < a.num_threads ? a.num_threads : 1;
        const int64_t heads = (a.kv_heads + parts - 1) / parts;
        for (int64_t first = 0; first < step.rows(s); first += tokens)
            for (int64_t h = 0; h < a.kv_heads; h += heads)
                tasks.push_back({s, h, h + heads < a.kv_heads ? h + heads : a.kv_heads, first});
    }
    const bool pairs = kHasPairs && a.kv_dtype == kBFloat16 && a.query_dtype == kBFloat16;
    constexpr Kind kBest = kHasPairs ? Kind::kPairs : Kind::kFloats;
#if defined(TANDEM_AMX)
    const auto on_pairs = has_amx() ? attend<kBest, true> : attend<kBest, false>;
#else
    const auto on_pairs = attend<kBest, false>;
#endif
    const auto run = pairs ? on_pairs : attend<Kind::kFloats, false>;
    const int64_t count = int64_t(tasks.size());
    parallel(count, a.num_threads, work, [&](int64_t i) {
        const Task& task = tasks[count - 1 - i];  // the later rows of a chunk have more to do: first
        const int64_t left = step.rows(task.segment) - task.first;
        run(a, step, task.segment, task.head, task.last_head, task.first, left < tokens ? left : tokens);
    });
}
