// Paged attention in place: keys and values of earlier steps are read from their blocks, those of this step from the
// packed rows. Query heads that share a K/V head are rows of one product, so K/V is read once for all of them.
//
// Keys are taken in tiles that begin at multiples of kTile of their own position, with a running maximum and sum
// (arXiv 2205.14135). A row sees the same tiles in the same order, and in each of them the same sums in the same order,
// whether it is computed alone or in a long chunk.
//
// Pairs are multiplied on AMX tiles where the CPU has them, for one row as for many: tiles round in another order than
// vectors do.
#include "attention.h"

#include <optional>

#include "amx.h"

namespace tandem {
namespace {

constexpr int64_t kQueryRows = 96;  // rows of one task, about, a row being one head of one token

// The queries of one K/V head in one task and what they have seen so far. Row r is token first + r / group and head
// kv_head * group + r % group.
struct Rows {
    float* query;  // [rows, words]
    float* out;    // [rows, dims_v]
    float *maxima, *sums;
    int64_t words, dims_v;
};

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
    in_pieces<Count>(whole.high - whole.low, Scores<kKind, kTile>{rows.query + row * rows.words, keys + whole.low,
                                                                  rows.words, scores + whole.low});
    constexpr int64_t kWords = kPerWord<kKind>;
    float shrink[Count];
    for (int r = 0; r < Count; r++) {
        float* w = weights + r * (kTile / kWords);
        if (each[r].high <= each[r].low) {
            shrink[r] = 1.0f;
            std::memset(w + whole.low / kWords, 0, (whole.high - whole.low) / kWords * 4);
        } else {
            shrink[r] = weigh<kKind>(scores + r * kTile, each[r], whole, factor, rows.maxima[row + r],
                                     rows.sums[row + r], w);
        }
    }
    const auto packed = [&](int64_t step, int64_t d) { return load(values + step * rows.dims_v + d); };
    in_pieces<Count>(rows.dims_v, Gather<kKind, decltype(packed)>{weights, packed, shrink, whole.low / kWords,
                                                                  whole.high / kWords, rows.dims_v,
                                                                  rows.out + row * rows.dims_v});
}

#if defined(TANDEM_AMX)
constexpr int64_t kSpan = 2 * kTileSteps;  // keys in one AMX tile of weights, two to a word

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
// head, so that with all heads blocks are read from end to end, and asked for a tile ahead.
template <Kind kKind, bool kOnTiles>
void attend(const AttentionArgs& a, const Step& step, int64_t segment, int64_t head, int64_t last_head, int64_t first,
            int64_t count) {
    const int64_t group = a.heads / a.kv_heads, num_rows = count * group, num_heads = last_head - head;
    const int64_t own_words = a.own_words(kKind == Kind::kPairs);
    const int64_t words = kOnTiles ? padded(own_words) : own_words, dims_v = padded(a.head_size_v);
    constexpr int64_t kRows = kOnTiles ? kGroupRows : kBlockRows;
    const int64_t bytes = item_bytes(a.kv_dtype), begin = step.begin[segment], start = step.start[segment];
    // Behind the last position that the row of a token sees.
    const auto seen_end = [&](int64_t token) {
        return step.seen_end ? step.seen_end[begin + first + token] : start + first + token + 1;
    };
    int64_t end = start + first + count;  // after the last row's own position, and what else a row sees
    if (step.seen_end)
        for (int64_t token = 0; token < count; token++) end = std::max(end, seen_end(token));

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
    const auto ask_for = [&](int64_t tile, int64_t size, int side, int64_t h) {
        for (int64_t i = 0; i < size; i++) {
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
    int64_t tile = a.earliest(start + first) / kTile * kTile, size = find(tile, 0);
    for (int64_t h = 0; h < num_heads; h++) ask_for(tile, size, 0, h);
    for (int side = 0; tile < end; tile += kTile, side ^= 1) {
        const int64_t next = find(tile + kTile, side ^ 1);
        const auto seen = [&](int64_t r) {
            const int64_t position = start + first + r / group, low = a.earliest(position) - tile;
            const int64_t high = seen_end(r / group) - tile;
            return Range{low > 0 ? low : 0, high < size ? high : size};
        };
        for (int64_t h = 0; h < num_heads; h++) {
            ask_for(tile + kTile, next, side ^ 1, h);
            const char *k[kTile], *v[kTile];
            for (int64_t i = 0; i < size; i++) {
                k[i] = k_rows[side][i] + bytes * place_of(tile + i, a.key_head_stride, a.k_head_stride, h);
                v[i] = v_rows[side][i] + bytes * place_of(tile + i, a.value_head_stride, a.v_head_stride, h);
            }
            pack_keys<kKind>(k, size, a.kv_dtype, a.head_size, keys);
            pack_values<kKind>(v, size, a.kv_dtype, a.head_size_v, dims_v, values);
            const Rows rows = rows_of(h);
            // The first token that sees a key of this tile.
            const int64_t token = !step.seen_end && tile - start - first > 0 ? tile - start - first : 0;
            int64_t r = token * group;
#if defined(TANDEM_AMX)
            if constexpr (kOnTiles) {
                // A span may reach beyond the values that are packed, to what the buffer still holds: values of weight
                // 0 must be numbers all the same.
                const int64_t lowest = a.earliest(start + first) - tile, packed = padded(size) / 2;
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
            in_blocks(r, num_rows, [&](auto rows_of_block, int64_t row) {
                attend_block<kKind, rows_of_block>(rows, row, keys, values, factor, scores, weights, seen);
            });
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
    const bool is_on_tiles = pairs && has_amx(), is_whole = a.head_size_v % kLanes == 0;
    const int64_t count = int64_t(tasks.size());
    parallel(count, a.num_threads, work, [&](int64_t i) {
        const Task& task = tasks[count - 1 - i];  // later rows of a chunk have more keys, so they go first
        const int64_t left = step.rows(task.segment) - task.first;
        if (step.rows(task.segment) == 1 && is_whole && !is_on_tiles) {
            const Kind kind = pairs ? Kind::kPairs : Kind::kFloats;
            return attend_token(a, step, kind, task.segment, task.head, task.last_head);
        }
        run(a, step, task.segment, task.head, task.last_head, task.first, left < tokens ? left : tokens);
    });
}
