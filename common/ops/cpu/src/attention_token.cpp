// Attention of one token: few rows meet a key, which is not worth packing for a whole tile.
//
// Keys and values come from memory in the order in which they lie: a block's heads one after the other. A head's rows
// are too few for a processor to fetch them ahead by itself, so they are asked for: while keys of a tile are packed, as
// many of its values, and while these are multiplied, as many of the next tile's keys. (Where each line was read just
// before it was packed, a Zen 5 waited in four fifths of the time.)
#include "attention.h"

namespace tandem {
namespace {

constexpr int64_t kPiece = 32;   // keys of one head that are read and packed at a time: 8 KiB at a head size of 64
constexpr int64_t kValues = 16;  // keys whose values, of one head, are read and multiplied at a time

template <Kind kKind, bool kNarrow>
vf value_words(const char* const* rows, int64_t size, int64_t step, int64_t d) {
    if constexpr (kKind == Kind::kPairs) {
        const auto read = [&](int64_t key) { return widen(reinterpret_cast<const uint16_t*>(rows[key]) + d); };
        const vu low = read(2 * step);
        return (vf)(2 * step + 1 < size ? low | (read(2 * step + 1) << 16) : low);
    } else if constexpr (kNarrow) {
        return load_bf16(reinterpret_cast<const uint16_t*>(rows[step]) + d);
    } else {
        return load(reinterpret_cast<const float*>(rows[step]) + d);
    }
}

// kNarrow: keys and values are bfloat16.
template <Kind kKind, bool kNarrow>
void attend(const AttentionArgs& a, const Step& step, int64_t segment, int64_t head, int64_t last_head) {
    const int64_t group = a.heads / a.kv_heads, num_heads = last_head - head, num_rows = num_heads * group;
    const int64_t words = a.own_words(kKind == Kind::kPairs), dims_v = a.head_size_v;
    const int64_t bytes = item_bytes(a.kv_dtype), row = step.begin[segment], position = step.start[segment];
    constexpr int64_t kWeights = kTile / kPerWord<kKind>;

    float* piece = scratch(kPiece * padded(words) + num_rows * (words + dims_v + kTile + kWeights + 3) + kLanes);
    float* scores = piece + kPiece * padded(words);
    float* weights = scores + num_rows * kTile;
    float* out = weights + num_rows * kWeights;
    float* query = out + num_rows * dims_v;
    float* maxima = query + num_rows * words + kLanes;  // load_row may fill up its last vector
    float *sums = maxima + num_rows, *shrink = sums + num_rows;
    std::memset(out, 0, num_rows * dims_v * 4);
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t place = row * a.query_stride + (head * group + r) * a.query_head_stride;
        float* to = query + r * words;
        if (kKind == Kind::kPairs) {
            to[words - 1] = 0.0f;
            std::memcpy(to, static_cast<const uint16_t*>(a.query) + place, a.head_size * 2);
        } else {
            load_row(to, a.query, a.query_dtype, place, a.head_size);
        }
        maxima[r] = -__builtin_inff();
        sums[r] = 0.0f;
    }
    const int64_t* table = step.table + step.table_begin[segment];
    const Source k_source = {a.k_pool + head * a.k_head_stride * bytes,
                             a.key + (row * a.key_stride + head * a.key_head_stride) * bytes,
                             table, a.k_block_stride * bytes, a.k_row_stride * bytes, a.key_stride * bytes,
                             step.block_size, position};
    const Source v_source = {a.v_pool + head * a.v_head_stride * bytes,
                             a.value + (row * a.value_stride + head * a.value_head_stride) * bytes,
                             table, a.v_block_stride * bytes, a.v_row_stride * bytes, a.value_stride * bytes,
                             step.block_size, position};
    const float factor = *a.scale * 1.44269504088896341f;
    const int64_t lowest = a.earliest(position);
    const char *keys[kTile], *values[kTile];  // rows of the tile, of one head after the other
    const char* next_keys[kTile];             // of the next tile and the first head, as far as they are in blocks
    const auto num_pooled = [&](int64_t tile) { return std::clamp<int64_t>(position - tile, 0, kTile); };
    const auto ask_for_keys = [&](int64_t low, int64_t high, int64_t h) {
        for (int64_t i = low; i < high; i++) prefetch_row(next_keys[i], a.kv_dtype, h * a.k_head_stride, a.head_size);
    };
    const auto ask_for_values = [&](int64_t low, int64_t high, int64_t h) {
        for (int64_t i = low; i < high; i++) prefetch_row(values[i], a.kv_dtype, h * a.v_head_stride, a.head_size_v);
    };
    const int64_t first = lowest / kTile * kTile;
    k_source.addresses(first, num_pooled(first), next_keys);
    for (int64_t h = 0; h < num_heads; h++) ask_for_keys(0, num_pooled(first), h);
    for (int64_t tile = first; tile <= position; tile += kTile) {
        const int64_t size = std::min(kTile, position + 1 - tile), num_values = num_pooled(tile);
        const int64_t num_next = num_pooled(tile + kTile);
        const Range seen = {std::max<int64_t>(lowest - tile, 0), size};
        const Range whole = {seen.low / kLanes * kLanes, padded(size)};
        k_source.addresses(tile, size, keys);
        v_source.addresses(tile, size, values);
        k_source.addresses(tile + kTile, num_next, next_keys);
        const auto next_head = [&](const char** rows, Range part, int64_t pool_stride, int64_t stride) {
            for (int64_t i = part.low; i < part.high; i++) {
                rows[i] += (tile + i < position ? pool_stride : stride) * bytes;
            }
        };
        for (int64_t low = whole.low; low < size; low += kPiece) {
            const int64_t count = std::min(size - low, kPiece);
            for (int64_t h = 0; h < num_heads; h++) {
                ask_for_values(low, std::min(low + count, num_values), h);
                pack_keys<kKind, kPiece>(keys + low, count, a.kv_dtype, a.head_size, piece);
                next_head(keys, {low, low + count}, a.k_head_stride, a.key_head_stride);
                in_blocks(h * group, (h + 1) * group, [&](auto rows, int64_t r) {
                    const Scores<kKind, kPiece> part = {query + r * words, piece, words, scores + r * kTile + low};
                    in_pieces<rows>(padded(count), part);
                });
            }
        }
        for (int64_t r = 0; r < num_rows; r++) {
            float* mine = weights + r * kWeights;
            shrink[r] = weigh<kKind>(scores + r * kTile, seen, whole, factor, maxima[r], sums[r], mine);
        }
        const auto value = [&](int64_t s, int64_t d) { return value_words<kKind, kNarrow>(values, size, s, d); };
        for (int64_t low = whole.low; low < size; low += kValues) {
            const int64_t high = std::min(size, low + kValues);
            constexpr int64_t kWords = kPerWord<kKind>;
            for (int64_t h = 0; h < num_heads; h++) {
                ask_for_keys(low, std::min(high, num_next), h);
                in_blocks(h * group, (h + 1) * group, [&](auto rows, int64_t r) {
                    in_pieces<rows>(dims_v, Gather<kKind, decltype(value)>{
                                                weights + r * kWeights, value, shrink + r, low / kWords,
                                                (high + kWords - 1) / kWords, dims_v, out + r * dims_v});
                });
                next_head(values, {low, high}, a.v_head_stride, a.value_head_stride);
            }
            std::fill(shrink, shrink + num_rows, 1.0f);
        }
    }
    for (int64_t r = 0; r < num_rows; r++) {
        float* mine = out + r * dims_v;
        const vf share = splat(1.0f / sums[r]);
        for (int64_t d = 0; d < dims_v; d += kLanes) store(mine + d, load(mine + d) * share);
        store_row(a.out, a.query_dtype, (row * a.heads + head * group + r) * dims_v, mine, dims_v);
    }
}

}  // namespace

void attend_token(const AttentionArgs& a, const Step& step, Kind kind, int64_t segment, int64_t head,
                  int64_t last_head) {
    constexpr Kind kBest = kHasPairs ? Kind::kPairs : Kind::kFloats;
    const auto on_floats = a.kv_dtype == kBFloat16 ? attend<Kind::kFloats, true> : attend<Kind::kFloats, false>;
    const auto run = kind == Kind::kPairs ? attend<kBest, true> : on_floats;
    run(a, step, segment, head, last_head);
}

}  // namespace tandem
