// Causal depthwise convolution over packed rows, states [num_slots, channels, kernel - 1] in place.
#include "step.h"

namespace tandem {
namespace {

constexpr int64_t kChannels = 64;  // of one task
constexpr int64_t kRows = 32;      // held in float32 at a time

struct ConvArgs {
    const void* x;
    int64_t x_dtype, x_stride;  // [num_rows, channels], a row is contiguous
    const void* weight;
    int64_t weight_dtype;  // [channels, kernel]
    const void* bias;
    int64_t bias_dtype;  // [channels] or null
    char* pool;
    int64_t pool_dtype, slot_stride;
    void* out;  // [num_rows, channels] in x's dtype
    int64_t channels, kernel, silu, num_threads;
    // [num_rows, channels] in x's dtype, a row is contiguous, or null: inputs and results are multiplied by these.
    const void* in_gate;
    int64_t in_gate_stride;
    const void* out_gate;
    int64_t out_gate_stride;
};

// [rows, columns] -> [columns, kChannels], rows being channels.
inline void transpose(const float* from, int64_t rows, int64_t columns, float* to) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) to[c * kChannels + r] = from[r * columns + c];
}

// values *= gate[i, i + n), to dtype's precision: a state holds them like that.
inline void gate_row(float* values, float* gate, const void* gates, int64_t dtype, int64_t i, int64_t n) {
    load_row(gate, gates, dtype, i, n);
    for (int64_t c = 0; c < n; c += kLanes) {
        const vf product = load(values + c) * load(gate + c);
        store(values + c, dtype == kFloat32 ? product : rounded_to_bf16(product));
    }
}

// Channels [first, first + kChannels) of the segments [begin, end).
template <int Kernel>  // 0: known at run time only
void convolve(const ConvArgs& a, const Step& step, int64_t first, int64_t begin, int64_t end) {
    const int64_t kernel = Kernel ? Kernel : a.kernel;
    const int64_t width = kernel - 1, count = a.channels - first < kChannels ? a.channels - first : kChannels;
    float* weight = scratch((2 * kernel + 3 + width + kRows) * kChannels);  // [kernel, kChannels]
    float* bias = weight + kernel * kChannels;
    float* window = bias + kChannels;  // [width + kRows, kChannels], oldest first
    float* result = window + (width + kRows) * kChannels;
    float* gate = result + kChannels;
    float* columns = gate + kChannels;  // [kChannels, kernel]
    std::memset(weight, 0, (kernel + 1 + width) * kChannels * 4);
    load_row(columns, a.weight, a.weight_dtype, first * kernel, count * kernel);
    transpose(columns, count, kernel, weight);
    if (a.bias) load_row(bias, a.bias, a.bias_dtype, first, count);
    const int64_t slot_bytes = a.slot_stride * item_bytes(a.pool_dtype), vectors = padded(count);
    // The first `width` rows of the window: the last inputs before what comes next.
    const auto save = [&](int64_t slot) {
        for (int64_t c = 0; c < count; c++)
            for (int64_t j = 0; j < width; j++) columns[c * width + j] = window[j * kChannels + c];
        store_row(a.pool + slot * slot_bytes, a.pool_dtype, first * width, columns, count * width);
    };
    const auto advance = [&](int64_t row, int64_t last) {
        for (; row < last; row += kRows) {
            const int64_t rows = last - row < kRows ? last - row : kRows;
            for (int64_t t = 0; t < rows; t++) {
                float* values = window + (width + t) * kChannels;
                load_row(values, a.x, a.x_dtype, (row + t) * a.x_stride + first, count);
                if (a.in_gate)
                    gate_row(values, gate, a.in_gate, a.x_dtype, (row + t) * a.in_gate_stride + first, count);
            }
            for (int64_t t = 0; t < rows; t++) {
                for (int64_t c = 0; c < vectors; c += kLanes) {
                    vf sum = load(bias + c);
                    for (int64_t k = 0; k < kernel; k++)
                        sum = fma(load(window + (t + k) * kChannels + c), load(weight + k * kChannels + c), sum);
                    store(result + c, a.silu ? silu(sum) : sum);
                }
                if (a.out_gate)
                    gate_row(result, gate, a.out_gate, a.x_dtype, (row + t) * a.out_gate_stride + first, count);
                store_row(a.out, a.x_dtype, (row + t) * a.channels + first, result, count);
            }
            std::memmove(window, window + rows * kChannels, width * kChannels * 4);
        }
    };
    for (int64_t segment = begin; segment < end; segment++) {
        load_row(columns, a.pool + step.src_slot[segment] * slot_bytes, a.pool_dtype, first * width, count * width);
        transpose(columns, count, width, window);
        walk(step, segment, advance, save);
        save(step.dst_slot[segment]);
    }
}

}  // namespace
}  // namespace tandem

extern "C" void tandem_conv1d(const int64_t* words, const int64_t* step_words) {
    using namespace tandem;
    const ConvArgs& a = *reinterpret_cast<const ConvArgs*>(words);
    const Step& step = *reinterpret_cast<const Step*>(step_words);
    const int64_t groups = (a.channels + kChannels - 1) / kChannels;
    const int64_t parts = step.num_segments < a.num_threads ? step.num_segments : a.num_threads;
    parallel(groups * parts, a.num_threads, step.num_rows() * a.channels * a.kernel, [&](int64_t i) {
        const int64_t first = i / parts * kChannels, part = i % parts;
        const int64_t begin = step.num_segments * part / parts, end = step.num_segments * (part + 1) / parts;
        switch (a.kernel) {
            case 3: convolve<3>(a, step, first, begin, end); break;
            case 4: convolve<4>(a, step, first, begin, end); break;
            default: convolve<0>(a, step, first, begin, end);
        }
    });
}
