// Root mean square norms with their gate, one pass over each row in float32, rounded once.
#include <algorithm>
#include <cmath>

#include "step.h"

namespace tandem {
namespace {

enum Gate : int64_t { kNone = 0, kSiluBefore = 1, kSiluAfter = 2, kSigmoidAfter = 3 };

struct Norm {
    const void* x;  // [num_rows, size]
    int64_t x_dtype, x_stride;
    const void* gate;  // [num_rows, size] or null
    int64_t gate_dtype, gate_stride;
    int64_t gate_kind;
    const void* weight;  // [size]
    int64_t weight_dtype;
    void* out;  // [num_rows, size], dense, in x's dtype
    int64_t num_rows, size;
    int64_t group;        // channels that are normalised together; divides size
    const float* params;  // epsilon, what is added to the weight
    int64_t num_threads;
};

constexpr int64_t kTaskRows = 16;  // rows of one task, which share the weight in float32

float sum_of_squares(const float* x, int64_t n) {
    vf total = {};
    int64_t j = 0;
    for (; j + kLanes <= n; j += kLanes) total = fma(load(x + j), load(x + j), total);
    float rest = 0.0f;
    for (; j < n; j++) rest += x[j] * x[j];
    return sum(total) + rest;
}

// One row in a buffer of [3, padded(size)] floats. weight: [padded(size)], with what is added to it.
void norm_row(const Norm& args, int64_t row, const float* weight, float* buffer) {
    const int64_t size = args.size, width = padded(size);
    float *x = buffer, *gate = buffer + width, *scale = buffer + 2 * width;
    load_row(x, args.x, args.x_dtype, row * args.x_stride, size);
    if (args.gate_kind != kNone) load_row(gate, args.gate, args.gate_dtype, row * args.gate_stride, size);
    if (args.gate_kind == kSiluBefore) {
        for (int64_t j = 0; j < width; j += kLanes) store(x + j, load(x + j) * silu(load(gate + j)));
    }
    const auto factor = [&](int64_t begin) {
        return 1.0f / std::sqrt(sum_of_squares(x + begin, args.group) / float(args.group) + args.params[0]);
    };
    if (args.group == size) {
        const vf all = splat(factor(0));
        for (int64_t j = 0; j < width; j += kLanes) store(x + j, load(x + j) * all * load(weight + j));
    } else {
        for (int64_t begin = 0; begin < size; begin += args.group) {
            std::fill_n(scale + begin, args.group, factor(begin));
        }
        for (int64_t j = 0; j < width; j += kLanes) store(x + j, load(x + j) * load(scale + j) * load(weight + j));
    }
    if (args.gate_kind == kSiluAfter) {
        for (int64_t j = 0; j < width; j += kLanes) store(x + j, load(x + j) * silu(load(gate + j)));
    } else if (args.gate_kind == kSigmoidAfter) {
        for (int64_t j = 0; j < width; j += kLanes) store(x + j, load(x + j) * sigmoid(load(gate + j)));
    }
    store_row(args.out, args.x_dtype, row * size, x, size);
}

}  // namespace

extern "C" void tandem_norm(const Norm* args, const int64_t*) {
    const int64_t width = padded(args->size), tasks = (args->num_rows + kTaskRows - 1) / kTaskRows;
    parallel(tasks, args->num_threads, args->num_rows * args->size * 8, [&](int64_t task) {
        float *weight = scratch(4 * width), *buffer = weight + width;
        load_row(weight, args->weight, args->weight_dtype, 0, args->size);
        for (int64_t j = 0; j < width; j += kLanes) store(weight + j, load(weight + j) + splat(args->params[1]));
        const int64_t end = std::min(args->num_rows, (task + 1) * kTaskRows);
        for (int64_t row = task * kTaskRows; row < end; row++) norm_row(*args, row, weight, buffer);
    });
}

}  // namespace tandem
