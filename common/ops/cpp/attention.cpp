// Paged attention in place: keys and values of earlier steps are read from their blocks, those of this step from the
// packed rows. Query heads that share a K/V head are rows of one product, so K/V is read once for all of them.
//
// Keys are taken in tiles that begin at multiples of kTile of their own position, with a running maximum and sum
// (arXiv 2205.14135). A row sees the same tiles in the same order whether it is computed alone or in a long chunk.
#include "step.h"

namespace tandem {
namespace {

constexpr int64_t kTile = 64;      // keys
constexpr int64_t kQueryRows = 64; // (token, head) rows of one task, about

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
    int64_t heads, kv_heads, head_size, head_size_v, num_threads;
};

// Where the keys (or values) of one K/V head of one segment are.
struct Source {
    const char* pool;
    const char* packed;  // of position `start`
    const int64_t* table;
    int64_t block_bytes, row_bytes, packed_bytes, block_size, start;

    // Addresses of positions [first, first + count), then the last one again up to kTile.
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
        for (; i < kTile; i++) out[i] = out[count - 1];
    }
};

// Scores of Rows queries against kTile / ... keys, 8 / Rows keys at a time; q [Rows, stride], out [Rows, kTile].
template <int Rows>
inline void score(const float* q, int64_t stride, const float* const* keys, int64_t num_keys, float* out) {
    constexpr int kKeys = 8 / Rows;
    for (int64_t first = 0; first < num_keys; first += kKeys) {
        vf sums[Rows][kKeys];
        for (int r = 0; r < Rows; r++)
            for (int k = 0; k < kKeys; k++) sums[r][k] = vf{};
        const float* key[kKeys];
        for (int k = 0; k < kKeys; k++) key[k] = keys[first + k];
        for (int64_t d = 0; d < stride; d += kLanes) {
            vf row[Rows];
            for (int r = 0; r < Rows; r++) row[r] = load(q + r * stride + d);
            for (int k = 0; k < kKeys; k++) {
                const vf x = load(key[k] + d);
                for (int r = 0; r < Rows; r++) sums[r][k] = fma(row[r], x, sums[r][k]);
            }
        }
        for (int r = 0; r < Rows; r++)
            for (int k = 0; k < kKeys; k += 4)
                sum4(sums[r][k], sums[r][k + 1], sums[r][k + 2], sums[r][k + 3], out + r * kTile + first + k);
    }
}

// out [Rows, stride] = out * shrink + weights [Rows, kTile] x values, columns [d, d + Vectors * kLanes).
template <int Rows, int Vectors>
inline void gather(float* out, int64_t stride, const float* shrink, const float* weights, const float* const* values,
                   int64_t num_keys, int64_t d) {
    vf sums[Rows][Vectors];
    for (int r = 0; r < Rows; r++)
        for (int j = 0; j < Vectors; j++) sums[r][j] = load(out + r * stride + d + j * kLanes) * splat(shrink[r]);
    for (int64_t k = 0; k < num_keys; k++) {
        vf x[Vectors];
        for (int j = 0; j < Vectors; j++) x[j] = load(values[k] + d + j * kLanes);
        for (int r = 0; r < Rows; r++) {
            const vf w = splat(weights[r * kTile + k]);
            for (int j = 0; j < Vectors; j++) sums[r][j] = fma(w, x[j], sums[r][j]);
        }
    }
    for (int r = 0; r < Rows; r++)
        for (int j = 0; j < Vectors; j++) store(out + r * stride + d + j * kLanes, sums[r][j]);
}

template <int Rows, int Vectors>
inline void gather_rows(float* out, int64_t stride, const float* shrink, const float* weights,
                        const float* const* values, int64_t num_keys) {
    int64_t d = 0;
    for (; d + Vectors * kLanes <= stride; d += Vectors * kLanes)
        gather<Rows, Vectors>(out, stride, shrink, weights, values, num_keys, d);
    for (; d < stride; d += kLanes) gather<Rows, 1>(out, stride, shrink, weights, values, num_keys, d);
}

void attend(const AttentionArgs& a, const Step& step, int64_t segment, int64_t kv_head, int64_t first, int64_t count) {
    const int64_t group = a.heads / a.kv_heads, num_rows = count * group;
    const int64_t dims = padded(a.head_size), dims_v = padded(a.head_size_v);
    const int64_t bytes = item_bytes(a.kv_dtype), begin = step.begin[segment], start = step.start[segment];
    const int64_t num_keys = start + first + count;  // of the last row
    const bool direct_k = a.kv_dtype == kFloat32 && dims == a.head_size;
    const bool direct_v = a.kv_dtype == kFloat32 && dims_v == a.head_size_v;

    float* q = scratch(num_rows * (dims + dims_v + kTile + 3) + kTile * (dims + dims_v));
    float* out = q + num_rows * dims;
    float* tile_k = out + num_rows * dims_v;
    float* tile_v = tile_k + kTile * dims;
    float* weights = tile_v + kTile * dims_v;
    float* maxima = weights + num_rows * kTile;
    float* sums = maxima + num_rows;
    float* shrink = sums + num_rows;
    std::memset(out, 0, num_rows * dims_v * 4);

    // Row r is token first + r / group and head kv_head * group + r % group.
    for (int64_t r = 0; r < num_rows; r++) {
        load_row(q + r * dims, a.query, a.query_dtype,
                 (begin + first + r / group) * a.query_stride + (kv_head * group + r % group) * a.query_head_stride,
                 a.head_size);
        for (int64_t d = 0; d < dims; d += kLanes) store(q + r * dims + d, load(q + r * dims + d) * splat(*a.scale));
        sums[r] = 0.0f;
    }
    const int64_t* table = step.table + step.table_begin[segment];
    const Source k_source = {a.k_pool + kv_head * a.k_head_stride * bytes,
                             a.key + (begin * a.key_stride + kv_head * a.key_head_stride) * bytes,
                             table, a.k_block_stride * bytes, a.k_row_stride * bytes, a.key_stride * bytes,
                             step.block_size, start};
    const Source v_source = {a.v_pool + kv_head * a.v_head_stride * bytes,
                             a.value + (begin * a.value_stride + kv_head * a.value_head_stride) * bytes,
                             table, a.v_block_stride * bytes, a.v_row_stride * bytes, a.value_stride * bytes,
                             step.block_size, start};
    const char* addresses[kTile];
    const float *keys[kTile], *values[kTile];
    const auto fetch = [&](const Source& source, int64_t tile, int64_t size, bool direct, float* buffer,
                           int64_t stride, int64_t row, const float** to) {
        source.addresses(tile, size, addresses);
        for (int64_t i = 0; i < kTile; i++) {
            if (direct) {
                to[i] = reinterpret_cast<const float*>(addresses[i]);
            } else {
                to[i] = buffer + (i < size ? i : size - 1) * stride;
                if (i < size) load_row(buffer + i * stride, addresses[i], a.kv_dtype, 0, row);
            }
        }
    };

    for (int64_t tile = 0; tile < num_keys; tile += kTile) {
        const int64_t size = num_keys - tile < kTile ? num_keys - tile : kTile;
        fetch(k_source, tile, size, direct_k, tile_k, dims, a.head_size, keys);
        fetch(v_source, tile, size, direct_v, tile_v, dims_v, a.head_size_v, values);
        // The first token that sees a key of this tile.
        const int64_t token = tile - start - first > 0 ? tile - start - first : 0;
        const int64_t row0 = token * group;
        int64_t r = row0;
        for (; r + 2 <= num_rows; r += 2) score<2>(q + r * dims, dims, keys, size, weights + r * kTile);
        for (; r < num_rows; r++) score<1>(q + r * dims, dims, keys, size, weights + r * kTile);

        for (r = row0; r < num_rows; r++) {
            float* w = weights + r * kTile;
            const int64_t seen = start + first + r / group + 1 - tile;
            const int64_t visible = seen < kTile ? seen : kTile;
            float best = tile ? maxima[r] : w[0];
            int64_t k = 0;
            if (visible >= kLanes) {
                vf most = load(w);
                for (k = kLanes; k + kLanes <= visible; k += kLanes) most = larger(load(w + k), most);
                const float top = max_lane(most);
                best = top > best ? top : best;
            }
            for (; k < visible; k++) best = w[k] > best ? w[k] : best;
            shrink[r] = tile ? exp(splat(maxima[r] - best))[0] : 0.0f;
            maxima[r] = best;
            for (k = visible; k < padded(visible); k++) w[k] = best;  // whatever: set to nothing below
            vf total = vf{};
            for (k = 0; k < padded(visible); k += kLanes) {
                vf e = exp(load(w + k) - splat(best));
                if (k + kLanes > visible)
                    for (int64_t i = visible - k; i < kLanes; i++) e[i] = 0.0f;
                store(w + k, e);
                total += e;
            }
            for (; k < kTile; k += kLanes) store(w + k, vf{});
            sums[r] = sums[r] * shrink[r] + sum(total);
        }
        r = row0;
        for (; r + 4 <= num_rows; r += 4)
            gather_rows<4, 2>(out + r * dims_v, dims_v, shrink + r, weights + r * kTile, values, size);
        for (; r + 2 <= num_rows; r += 2)
            gather_rows<2, 4>(out + r * dims_v, dims_v, shrink + r, weights + r * kTile, values, size);
        for (; r < num_rows; r++)
            gather_rows<1, 4>(out + r * dims_v, dims_v, shrink + r, weights + r * kTile, values, size);
    }
    for (int64_t r = 0; r < num_rows; r++) {
        float* row = out + r * dims_v;
        const vf factor = splat(1.0f / sums[r]);
        for (int64_t d = 0; d < dims_v; d += kLanes) store(row + d, load(row + d) * factor);
        store_row(a.out, a.query_dtype,
                  ((begin + first + r / group) * a.heads + kv_head * group + r % group) * a.head_size_v, row,
                  a.head_size_v);
    }
}

struct WriteArgs {
    const char* key;
    int64_t key_stride, key_head_stride;
    const char* value;
    int64_t value_stride, value_head_stride;
    char* k_pool;
    int64_t k_block_stride, k_row_stride, k_head_stride;
    char* v_pool;
    int64_t v_block_stride, v_row_stride, v_head_stride;
    int64_t item, kv_heads, head_size, head_size_v;
};

struct Rows {
    const char* from;
    int64_t row_stride, head_stride;
    char* pool;
    int64_t pool_block_stride, pool_row_stride, pool_head_stride, size;
};

void write_rows(const Rows& r, int64_t item, int64_t heads, const Step& step, int64_t segment) {
    const int64_t start = step.start[segment], end = start + step.rows(segment);
    const int64_t* table = step.table + step.table_begin[segment];
    int64_t position = start < step.write_from[segment] ? step.write_from[segment] : start;
    for (; position < end; position++) {
        const char* row = r.from + (step.begin[segment] + position - start) * r.row_stride * item;
        char* to = r.pool + (table[position / step.block_size] * r.pool_block_stride +
                             position % step.block_size * r.pool_row_stride) * item;
        for (int64_t h = 0; h < heads; h++)
            std::memcpy(to + h * r.pool_head_stride * item, row + h * r.head_stride * item, r.size * item);
    }
}

}  // namespace
}  // namespace tandem

extern "C" void tandem_write_kv(const int64_t* words, const int64_t* step_words) {
    using namespace tandem;
    const WriteArgs& a = *reinterpret_cast<const WriteArgs*>(words);
    const Step& step = *reinterpret_cast<const Step*>(step_words);
    const Rows key = {a.key, a.key_stride, a.key_head_stride, a.k_pool,
                      a.k_block_stride, a.k_row_stride, a.k_head_stride, a.head_size};
    const Rows value = {a.value, a.value_stride, a.value_head_stride, a.v_pool,
                        a.v_block_stride, a.v_row_stride, a.v_head_stride, a.head_size_v};
    for (int64_t s = 0; s < step.num_segments; s++) {
        write_rows(key, a.item, a.kv_heads, step, s);
        write_rows(value, a.item, a.kv_heads, step, s);
    }
}

extern "C" void tandem_attention(const int64_t* words, const int64_t* step_words) {
    using namespace tandem;
    const AttentionArgs& a = *reinterpret_cast<const AttentionArgs*>(words);
    const Step& step = *reinterpret_cast<const Step*>(step_words);
    const int64_t group = a.heads / a.kv_heads;
    const int64_t tokens = group < kQueryRows ? kQueryRows / group : 1;  // of one task
    struct Task {
        int64_t segment, first;
    };
    std::vector<Task> tasks;
    int64_t work = 0;
    for (int64_t s = 0; s < step.num_segments; s++) {
        work += step.rows(s) * (step.start[s] + step.rows(s)) * a.heads * (a.head_size + a.head_size_v);
        for (int64_t first = 0; first < step.rows(s); first += tokens) tasks.push_back({s, first});
    }
    parallel(int64_t(tasks.size()) * a.kv_heads, a.num_threads, work, [&](int64_t i) {
        const Task& task = tasks[i / a.kv_heads];
        const int64_t left = step.rows(task.segment) - task.first;
        attend(a, step, task.segment, i % a.kv_heads, task.first, left < tokens ? left : tokens);
    });
}
