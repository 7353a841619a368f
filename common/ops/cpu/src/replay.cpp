// Kernel calls in a row without anything between them, and the element by element operations that are left between
// kernels: sums, products, copies, each rounded as torch rounds it, and functions of one element, which depend on that
// element alone (torch computes the last ones of a tensor with other instructions than the rest).
#include "step.h"

namespace tandem {
namespace {

struct Call {
    void (*function)(const int64_t* words, const int64_t* step_words);
    const int64_t* words;
    const int64_t* step;
};

enum Kind : int64_t { kCopy = 0, kAdd = 1, kSub = 2, kMul = 3, kNeg = 4, kSilu = 5, kSiluMul = 6,
                      kSigmoid = 7, kSoftplus = 8 };

constexpr int kDims = 4;  // dimensions of a tensor, at most (_DIMS in elementwise.py)

struct Elementwise {
    int64_t kind;
    void* out;
    int64_t out_dtype;
    const void* a;
    int64_t a_dtype;
    const void* b;  // null: the scalar
    int64_t b_dtype;
    const float* scalar;
    int64_t shape[kDims], out_stride[kDims], a_stride[kDims], b_stride[kDims];  // the last one innermost
    int64_t num_threads;
};

template <Kind kKind>
inline vf compute(vf a, vf b) {
    switch (kKind) {
        case kAdd: return a + b;
        case kSub: return a - b;
        case kMul: return a * b;
        case kNeg: return -a;
        case kSilu: return silu(a);
        case kSiluMul: return silu(a) * b;
        case kSigmoid: return sigmoid(a);
        case kSoftplus: return softplus(a);
        default: return a;
    }
}

constexpr int64_t kPiece = 16 * kLanes;  // elements that are converted to float32 at a time

inline void load_piece(float* to, const void* base, int64_t dtype, int64_t at, int64_t stride, int64_t count) {
    if (stride == 1) return load_row(to, base, dtype, at, count);
    if (stride == 0) {
        const vf x = splat(load_one(base, dtype, at));
        for (int64_t i = 0; i < count; i += kLanes) store(to + i, x);
        return;
    }
    for (int64_t i = 0; i < count; i++) to[i] = load_one(base, dtype, at + i * stride);
}

inline void store_piece(void* base, int64_t dtype, int64_t at, int64_t stride, const float* from, int64_t count) {
    if (stride == 1) return store_row(base, dtype, at, from, count);
    for (int64_t i = 0; i < count; i++) store_row(base, dtype, at + i * stride, from + i, 1);
}

template <Kind kKind>
void run_row(const Elementwise& e, int64_t out, int64_t a, int64_t b) {
    const int64_t size = e.shape[kDims - 1], last = kDims - 1;
    alignas(64) float x[kPiece + kLanes], y[kPiece + kLanes];
    const vf scalar = splat(*e.scalar);
    const bool is_scalar = e.b == nullptr;
    for (int64_t i = 0; i < size; i += kPiece) {
        const int64_t count = size - i < kPiece ? size - i : kPiece;
        load_piece(x, e.a, e.a_dtype, a + i * e.a_stride[last], e.a_stride[last], count);
        if (!is_scalar) load_piece(y, e.b, e.b_dtype, b + i * e.b_stride[last], e.b_stride[last], count);
        for (int64_t j = 0; j < count; j += kLanes) {
            store(x + j, compute<kKind>(load(x + j), is_scalar ? scalar : load(y + j)));
        }
        store_piece(e.out, e.out_dtype, out + i * e.out_stride[last], e.out_stride[last], x, count);
    }
}

}  // namespace

extern "C" {

void tandem_replay(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].function(calls[i].words, calls[i].step);
}

void tandem_elementwise(const Elementwise* args, const int64_t*) {
    constexpr decltype(&run_row<kCopy>) all[] = {run_row<kCopy>, run_row<kAdd>,  run_row<kSub>,
                                                 run_row<kMul>,  run_row<kNeg>,  run_row<kSilu>,
                                                 run_row<kSiluMul>, run_row<kSigmoid>, run_row<kSoftplus>};
    const Elementwise& e = *args;
    const auto run = all[e.kind];
    const int64_t rows = e.shape[0] * e.shape[1] * e.shape[2];
    parallel<AsTorch>(rows, e.num_threads, rows * e.shape[3], [&](int64_t row) {
        const int64_t i = row / (e.shape[1] * e.shape[2]), j = row / e.shape[2] % e.shape[1], k = row % e.shape[2];
        run(e, i * e.out_stride[0] + j * e.out_stride[1] + k * e.out_stride[2],
            i * e.a_stride[0] + j * e.a_stride[1] + k * e.a_stride[2],
            i * e.b_stride[0] + j * e.b_stride[1] + k * e.b_stride[2]);
    });
}

}  // extern "C"
}  // namespace tandem
