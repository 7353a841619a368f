// Mamba-1 selective scan as the recurrence itself, token by token: per channel a state [state]. arXiv 2312.00752.
#include "step.h"

namespace tandem {
namespace {

constexpr int64_t kRows = 16;      // tokens per pass over the state
constexpr int64_t kChannels = 32;  // channels of one task

struct Mamba1Args {
    const void* x;
    int64_t x_dtype, x_stride, x_channel_stride;  // [num_rows, channels]
    const void* dt;
    int64_t dt_dtype, dt_stride, dt_channel_stride;  // [num_rows, channels] before bias and softplus
    const void* dt_bias;
    int64_t dt_bias_dtype;  // [channels] or null
    int64_t softplus;
    const float* limits;  // smallest and largest step size
    const void* a;
    int64_t a_dtype;  // [channels, state]
    const void* b;
    int64_t b_dtype, b_stride, b_state_stride;  // [num_rows, state]
    const void* c;
    int64_t c_dtype, c_stride, c_state_stride;
    const void* d;
    int64_t d_dtype;  // [channels] or null
    float* pool;
    int64_t slot_stride;
    float* out;  // [num_rows, channels]
    int64_t channels, state, num_threads;
};

// Channels [0, Count) over `rows` tokens; rates and s [Count, stride], size and input [rows, kChannels].
template <int Count>
inline void advance_channels(float* s, const float* rates, int64_t stride, int64_t rows, const float* size,
                             const float* input, const float* b, const float* c, float* y) {
    for (int64_t t = 0; t < rows; t++) {
        vf sums[4] = {vf{}, vf{}, vf{}, vf{}}, dt[Count], in[Count];
        for (int i = 0; i < Count; i++) {
            dt[i] = splat(size[t * kChannels + i]);
            in[i] = dt[i] * splat(input[t * kChannels + i]);
        }
        for (int64_t n = 0; n < stride; n += kLanes) {
            const vf key = load(b + t * stride + n), query = load(c + t * stride + n);
            for (int i = 0; i < Count; i++) {
                float* place = s + i * stride + n;
                const vf v = fma(in[i], key, load(place) * exp(dt[i] * load(rates + i * stride + n)));
                store(place, v);
                sums[i] = fma(v, query, sums[i]);
            }
        }
        float out[4];
        sum4(sums[0], sums[1], sums[2], sums[3], out);
        for (int i = 0; i < Count; i++) y[t * kChannels + i] = out[i];
    }
}

// A tile [rows, columns] of a tensor with any strides -> out [rows, out_stride], zeros behind; read along the dimension
// whose elements are neighbours.
inline void load_tile(float* out, int64_t out_stride, const void* base, int64_t dtype, int64_t place,
                      int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns) {
    if (column_stride == 1) {
        for (int64_t t = 0; t < rows; t++)
            load_row(out + t * out_stride, base, dtype, place + t * row_stride, columns);
        return;
    }
    for (int64_t j = 0; j < padded(columns); j++)
        for (int64_t t = 0; t < rows; t++)
            out[t * out_stride + j] =
                j < columns ? load_one(base, dtype, place + t * row_stride + j * column_stride) : 0.0f;
}

void scan_channels(const Mamba1Args& a, const Step& step, int64_t segment, int64_t first) {
    const int64_t count = a.channels - first < kChannels ? a.channels - first : kChannels, stride = padded(a.state);
    float* rates = scratch(2 * kChannels * stride + 2 * kRows * stride + (3 * kRows + 2) * kChannels);
    float* buffer = rates + kChannels * stride;
    float* b = buffer + kChannels * stride;
    float* c = b + kRows * stride;
    float* x = c + kRows * stride;
    float* size = x + kRows * kChannels;
    float* y = size + kRows * kChannels;
    float* bias = y + kRows * kChannels;
    float* skip = bias + kChannels;
    std::memset(bias, 0, 2 * kChannels * 4);
    if (a.dt_bias) load_row(bias, a.dt_bias, a.dt_bias_dtype, first, count);
    if (a.d) load_row(skip, a.d, a.d_dtype, first, count);
    for (int64_t i = 0; i < count; i++) load_row(rates + i * stride, a.a, a.a_dtype, (first + i) * a.state, a.state);
    HeadState state(a.pool, a.slot_stride, first * a.state, count, a.state, step, segment, buffer);
    const auto advance = [&](int64_t row, int64_t last) {
        for (; row < last; row += kRows) {
            const int64_t rows = last - row < kRows ? last - row : kRows, vectors = padded(count);
            load_tile(b, stride, a.b, a.b_dtype, row * a.b_stride, a.b_stride, a.b_state_stride, rows, a.state);
            load_tile(c, stride, a.c, a.c_dtype, row * a.c_stride, a.c_stride, a.c_state_stride, rows, a.state);
            load_tile(x, kChannels, a.x, a.x_dtype, row * a.x_stride + first * a.x_channel_stride, a.x_stride,
                      a.x_channel_stride, rows, count);
            load_tile(size, kChannels, a.dt, a.dt_dtype, row * a.dt_stride + first * a.dt_channel_stride, a.dt_stride,
                      a.dt_channel_stride, rows, count);
            for (int64_t t = 0; t < rows; t++) {
                float* steps = size + t * kChannels;
                for (int64_t i = 0; i < vectors; i += kLanes) {
                    vf d = load(steps + i) + load(bias + i);
                    if (a.softplus) d = softplus(d);
                    d = select(d < splat(a.limits[0]), splat(a.limits[0]), d);
                    store(steps + i, select(d > splat(a.limits[1]), splat(a.limits[1]), d));
                }
            }
            int64_t i = 0;
            for (; i + 4 <= count; i += 4)
                advance_channels<4>(state.data + i * stride, rates + i * stride, stride, rows, size + i, x + i, b, c,
                                    y + i);
            for (; i < count; i++)
                advance_channels<1>(state.data + i * stride, rates + i * stride, stride, rows, size + i, x + i, b, c,
                                    y + i);
            for (int64_t t = 0; t < rows; t++) {
                float* yt = y + t * kChannels;
                for (int64_t j = 0; j < vectors; j += kLanes)
                    store(yt + j, fma(load(skip + j), load(x + t * kChannels + j), load(yt + j)));
                store_row(a.out, kFloat32, (row + t) * a.channels + first, yt, count);
            }
        }
    };
    walk(step, segment, advance, [&](int64_t slot) { state.save(slot); });
    state.save(step.dst_slot[segment]);
}

}  // namespace
}  // namespace tandem

extern "C" void tandem_mamba1(const int64_t* words, const int64_t* step_words) {
    using namespace tandem;
    const Mamba1Args& a = *reinterpret_cast<const Mamba1Args*>(words);
    const Step& step = *reinterpret_cast<const Step*>(step_words);
    const int64_t groups = (a.channels + kChannels - 1) / kChannels;
    parallel(step.num_segments * groups, a.num_threads, step.num_rows() * a.channels * a.state * 8,
             [&](int64_t i) { scan_channels(a, step, i / groups, i % groups * kChannels); });
}
