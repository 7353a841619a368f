// Mamba-2 scan as the recurrence itself, token by token: per head a state [head_dim, state] that stays in the cache,
// so nothing depends on where a chunk ends. arXiv 2405.21060.
#include "step.h"

namespace tandem {
namespace {

constexpr int64_t kRows = 16;  // tokens per pass over the state

struct Mamba2Args {
    const void* x;
    int64_t x_dtype, x_stride, x_head_stride;  // [num_rows, heads, head_dim]
    const void* dt;
    int64_t dt_dtype, dt_stride, dt_head_stride;  // [num_rows, heads] before bias, softplus and limits
    const void* dt_bias;
    int64_t dt_bias_dtype;  // [heads] or null
    int64_t softplus;
    const float* limits;  // smallest and largest step size
    const void* a;
    int64_t a_dtype;  // [heads]
    const void* b;
    int64_t b_dtype, b_stride, b_group_stride;  // [num_rows, groups, state]
    const void* c;
    int64_t c_dtype, c_stride, c_group_stride;
    const void* d;
    int64_t d_dtype;  // [heads] or null
    float* pool;
    int64_t slot_stride;
    void* out;  // [num_rows, heads, head_dim] in x's dtype
    int64_t heads, groups, head_dim, state, num_threads;
};

// A tile of Rows x (Vectors * kLanes) of the state over `rows` tokens, in registers meanwhile. What it adds to the
// output of row i and token t goes to partial + (i * rows + t) * kLanes, after what columns before it added there.
// decay [rows], scaled [rows, scaled_stride], b, c [rows, key_stride].
template <int Rows, int Vectors, bool kFirst>
inline void advance_tile(float* s, int64_t stride, int64_t key_stride, int64_t rows, const float* decay,
                         const float* scaled, int64_t scaled_stride, const float* b, const float* c, float* partial) {
    vf tile[Rows][Vectors];
    for (int i = 0; i < Rows; i++)
        for (int j = 0; j < Vectors; j++) tile[i][j] = load(s + i * stride + j * kLanes);
    for (int64_t t = 0; t < rows; t++) {
        const vf keep = splat(decay[t]);
        vf x[Rows], sums[Rows];
        for (int i = 0; i < Rows; i++) {
            x[i] = splat(scaled[t * scaled_stride + i]);
            sums[i] = kFirst ? vf{} : load(partial + (i * rows + t) * kLanes);
        }
        for (int j = 0; j < Vectors; j++) {
            const vf key = load(b + t * key_stride + j * kLanes), query = load(c + t * key_stride + j * kLanes);
            for (int i = 0; i < Rows; i++) {
                tile[i][j] = fma(x[i], key, tile[i][j] * keep);
                sums[i] = fma(tile[i][j], query, sums[i]);
            }
        }
        for (int i = 0; i < Rows; i++) store(partial + (i * rows + t) * kLanes, sums[i]);
    }
    for (int i = 0; i < Rows; i++)
        for (int j = 0; j < Vectors; j++) store(s + i * stride + j * kLanes, tile[i][j]);
}

// Rows [0, Rows) of the state, all columns.
template <int Rows>
inline void advance_rows(float* s, int64_t stride, int64_t key_stride, int64_t rows, const float* decay,
                         const float* scaled, int64_t scaled_stride, const float* b, const float* c, float* partial) {
    constexpr int kWide = kLanes == 16 ? 8 : 4;
    int64_t n = 0;
    if (kWide * kLanes <= stride) {
        advance_tile<Rows, kWide, true>(s, stride, key_stride, rows, decay, scaled, scaled_stride, b, c, partial);
        n = kWide * kLanes;
    } else {
        for (int64_t i = 0; i < rows * Rows; i++) store(partial + i * kLanes, vf{});
    }
    for (; n + kWide * kLanes <= stride; n += kWide * kLanes)
        advance_tile<Rows, kWide, false>(s + n, stride, key_stride, rows, decay, scaled, scaled_stride, b + n, c + n,
                                         partial);
    for (; n < stride; n += kLanes)
        advance_tile<Rows, 1, false>(s + n, stride, key_stride, rows, decay, scaled, scaled_stride, b + n, c + n,
                                     partial);
}

#if defined(__AVX512F__)
constexpr int64_t kTurnedRows = 8;  // from this many tokens on, the state is transposed first

// Sums of kLanes partial sums in the order of sums() in vector.h, as they come: leaf l of the tree is the partial sum of
// lane l, and leaves come in the order of kLeaf, so that no more than one vector a level waits for its other half.
constexpr int kLeaf[kLanes] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

// One lane of the state's columns, n = lane + j * kLanes, times Vectors x kLanes of its rows, over `rows` tokens: with rows
// of the state side by side there is nothing to add up across a vector. turned: [Columns * kLanes, dims].
// scaled [rows, dims], b, c [rows, key_stride]; waiting: [levels, rows, Vectors * kLanes]; y: [rows, dims].
template <int Columns, int Vectors>
inline void advance_lane(float* turned, int64_t dims, int64_t key_stride, int64_t rows, const float* decay,
                         const float* scaled, const float* b, const float* c, int leaf, float* waiting, float* y) {
    vf tile[Columns][Vectors];
    const int lane = kLeaf[leaf];
    for (int j = 0; j < Columns; j++)
        for (int v = 0; v < Vectors; v++) tile[j][v] = load(turned + (j * kLanes + lane) * dims + v * kLanes);
    const int64_t level_size = rows * Vectors * kLanes;
    const int merged = leaf == kLanes - 1 ? 4 : __builtin_ctz(leaf + 1);  // as many halves are complete with this one
    for (int64_t t = 0; t < rows; t++) {
        const vf keep = splat(decay[t]);
        vf x[Vectors], total[Vectors];
        for (int v = 0; v < Vectors; v++) x[v] = load(scaled + t * dims + v * kLanes), total[v] = vf{};
        for (int j = 0; j < Columns; j++) {
            const vf key = splat(b[t * key_stride + j * kLanes + lane]);
            const vf query = splat(c[t * key_stride + j * kLanes + lane]);
            for (int v = 0; v < Vectors; v++) {
                tile[j][v] = fma(x[v], key, tile[j][v] * keep);
                total[v] = fma(tile[j][v], query, total[v]);
            }
        }
        for (int v = 0; v < Vectors; v++) {
            float* place = waiting + (t * Vectors + v) * kLanes;
            for (int level = 0; level < merged; level++) total[v] = load(place + level * level_size) + total[v];
            store(merged == 4 ? y + t * dims + v * kLanes : place + merged * level_size, total[v]);
        }
    }
    for (int j = 0; j < Columns; j++)
        for (int v = 0; v < Vectors; v++) store(turned + (j * kLanes + lane) * dims + v * kLanes, tile[j][v]);
}

template <int Columns>
void advance_turned(float* turned, int64_t dims, int64_t key_stride, int64_t rows, const float* decay,
                    const float* scaled, const float* b, const float* c, float* waiting, float* y) {
    constexpr int kVectors = Columns > 8 ? 1 : 2;
    int64_t p = 0;
    for (; p + kVectors * kLanes <= dims; p += kVectors * kLanes)
        for (int leaf = 0; leaf < kLanes; leaf++)
            advance_lane<Columns, kVectors>(turned + p, dims, key_stride, rows, decay, scaled + p, b, c, leaf, waiting,
                                            y + p);
    for (; p < dims; p += kLanes)
        for (int leaf = 0; leaf < kLanes; leaf++)
            advance_lane<Columns, 1>(turned + p, dims, key_stride, rows, decay, scaled + p, b, c, leaf, waiting, y + p);
}

using AdvanceTurned = decltype(&advance_turned<8>);

// Null: a state of this size is not transposed.
inline AdvanceTurned find_turned(int64_t head_dim, int64_t state) {
    if (head_dim % kLanes != 0) return nullptr;
    switch (state) {
        case 1 * kLanes: return advance_turned<1>;
        case 2 * kLanes: return advance_turned<2>;
        case 4 * kLanes: return advance_turned<4>;
        case 8 * kLanes: return advance_turned<8>;
        case 16 * kLanes: return advance_turned<16>;
        default: return nullptr;
    }
}

// [rows, columns] -> [columns, rows], both whole vectors.
inline void turn(const float* from, int64_t rows, int64_t columns, float* to) {
    for (int64_t r = 0; r < rows; r += kLanes)
        for (int64_t c = 0; c < columns; c += kLanes) {
            vf square[kLanes];
            for (int i = 0; i < kLanes; i++) square[i] = load(from + (r + i) * columns + c);
            transpose(square);
            for (int i = 0; i < kLanes; i++) store(to + (c + i) * rows + r, square[i]);
        }
}
#else
constexpr int64_t kTurnedRows = 0;
using AdvanceTurned = void (*)(float*, int64_t, int64_t, int64_t, const float*, const float*, const float*, const float*,
                               float*, float*);
inline AdvanceTurned find_turned(int64_t, int64_t) { return nullptr; }
inline void turn(const float*, int64_t, int64_t, float*) {}
#endif

// The sums of `count` partials; what lies behind them is read as well.
inline void collect(const float* partial, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += kLanes) store(out + i, sums(partial + i * kLanes));
}

void scan_head(const Mamba2Args& a, const Step& step, int64_t segment, int64_t head) {
    const int64_t stride = padded(a.state), dims = padded(a.head_dim);
    const int64_t key_stride = stride + 16;  // rows a power of two apart would share few sets of the cache
    const int64_t group = head / (a.heads / a.groups);
    const int64_t most_partials = dims > 2 * kRows ? dims : 2 * kRows;
    const AdvanceTurned advance_turned = find_turned(a.head_dim, a.state);
    float* x = scratch(kRows * (3 * dims + 2 * key_stride + 2) + most_partials * kLanes + 2 * a.head_dim * stride +
                       4 * kRows * 2 * kLanes);
    float* scaled = x + kRows * dims;
    float* y = scaled + kRows * dims;  // [dims, kRows], for one token [dims]
    float* b = y + kRows * dims;
    float* c = b + kRows * key_stride;
    float* decay = c + kRows * key_stride;
    float* size = decay + kRows;
    float* partial = size + kRows;
    HeadState state(a.pool, a.slot_stride, head * a.head_dim * a.state, a.head_dim, a.state, step, segment,
                    partial + most_partials * kLanes);
    float* turned = partial + most_partials * kLanes + a.head_dim * stride;  // [state, head_dim]
    float* waiting = turned + a.head_dim * stride;
    const float rate = load_one(a.a, a.a_dtype, head);
    const float bias = a.dt_bias ? load_one(a.dt_bias, a.dt_bias_dtype, head) : 0.0f;
    const vf skip = splat(a.d ? load_one(a.d, a.d_dtype, head) : 0.0f);
    const auto advance = [&](int64_t row, int64_t last) {
        const bool is_turned = advance_turned != nullptr && last - row >= kTurnedRows;
        if (is_turned) turn(state.data, a.head_dim, a.state, turned);
        for (; row < last; row += kRows) {
            const int64_t rows = last - row < kRows ? last - row : kRows;
            for (int64_t t = 0; t < padded(rows); t++)
                size[t] = t < rows ? load_one(a.dt, a.dt_dtype, (row + t) * a.dt_stride + head * a.dt_head_stride) : 0;
            for (int64_t t = 0; t < rows; t += kLanes) {
                vf d = load(size + t) + splat(bias);
                if (a.softplus) d = softplus(d);
                d = select(d < splat(a.limits[0]), splat(a.limits[0]), d);
                d = select(d > splat(a.limits[1]), splat(a.limits[1]), d);
                store(size + t, d);
                store(decay + t, exp(d * splat(rate)));
            }
            for (int64_t t = row + kRows; t < row + 2 * kRows && t < last; t++) {
                prefetch_row(a.x, a.x_dtype, t * a.x_stride + head * a.x_head_stride, a.head_dim);
                prefetch_row(a.b, a.b_dtype, t * a.b_stride + group * a.b_group_stride, a.state);
                prefetch_row(a.c, a.c_dtype, t * a.c_stride + group * a.c_group_stride, a.state);
            }
            for (int64_t t = 0; t < rows; t++) {
                load_row(x + t * dims, a.x, a.x_dtype, (row + t) * a.x_stride + head * a.x_head_stride, a.head_dim);
                load_row(b + t * key_stride, a.b, a.b_dtype,
                         (row + t) * a.b_stride + group * a.b_group_stride, a.state);
                load_row(c + t * key_stride, a.c, a.c_dtype,
                         (row + t) * a.c_stride + group * a.c_group_stride, a.state);
                for (int64_t p = 0; p < dims; p += kLanes)
                    store(scaled + t * dims + p, load(x + t * dims + p) * splat(size[t]));
            }
            if (is_turned) {
                advance_turned(turned, dims, key_stride, rows, decay, scaled, b, c, waiting, y);
                for (int64_t t = 0; t < rows; t++) {
                    for (int64_t p = 0; p < dims; p += kLanes)
                        store(y + t * dims + p, fma(skip, load(x + t * dims + p), load(y + t * dims + p)));
                    store_row(a.out, a.x_dtype, ((row + t) * a.heads + head) * a.head_dim, y + t * dims, a.head_dim);
                }
                continue;
            }
            const bool one = rows == 1;  // then the partials of all rows of the state are summed together
            int64_t p = 0;
            for (; p + 2 <= a.head_dim; p += 2) {
                if (one) ask_ahead(state.data + p * stride, 2 * stride);
                advance_rows<2>(state.data + p * stride, stride, key_stride, rows, decay, scaled + p, dims, b, c,
                                partial + (one ? p * kLanes : 0));
                if (!one) collect(partial, rows, y + p * kRows), collect(partial + rows * kLanes, rows, y + (p + 1) * kRows);
            }
            for (; p < a.head_dim; p++) {
                advance_rows<1>(state.data + p * stride, stride, key_stride, rows, decay, scaled + p, dims, b, c,
                                partial + (one ? p * kLanes : 0));
                if (!one) collect(partial, rows, y + p * kRows);
            }
            if (one) collect(partial, a.head_dim, y);
            float result[kLanes];
            for (int64_t first = 0; first < a.head_dim; first += kLanes) {
                const int64_t count = a.head_dim - first < kLanes ? a.head_dim - first : kLanes;
                for (int64_t t0 = 0; t0 < rows; t0 += kLanes) {
                    vf outputs[kLanes];
                    for (int i = 0; i < kLanes; i++) outputs[i] = load(y + (one ? first : (first + i) * kRows + t0));
                    if (!one) transpose(outputs);
                    for (int64_t t = t0; t < rows && t < t0 + kLanes; t++) {
                        store(result, fma(skip, load(x + t * dims + first), outputs[t - t0]));
                        store_row(a.out, a.x_dtype, ((row + t) * a.heads + head) * a.head_dim + first, result, count);
                    }
                }
            }
        }
        if (is_turned) turn(turned, a.state, a.head_dim, state.data);
    };
    walk(step, segment, advance, [&](int64_t slot) { state.save(slot); });
    state.save(step.dst_slot[segment]);
}

}  // namespace
}  // namespace tandem

extern "C" void tandem_mamba2(const int64_t* words, const int64_t* step_words) {
    using namespace tandem;
    const Mamba2Args& a = *reinterpret_cast<const Mamba2Args*>(words);
    const Step& step = *reinterpret_cast<const Step*>(step_words);
    const int64_t work = step.num_rows() * a.heads * a.head_dim * a.state * 2;
    parallel(step.num_segments * a.heads, a.num_threads, work,
             [&](int64_t i) { scan_head(a, step, i / a.heads, i % a.heads); });
}
