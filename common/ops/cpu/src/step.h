// What every op is told of the step: which packed rows belong to which segment, its slots, saves and blocks.
//
// Arguments arrive as arrays of 64-bit words; the structs below name them, in order. Pointers are words too.
#pragma once

#include <cstdint>
#include <cstring>

#include "vector.h"

namespace tandem {

struct Step {
    int64_t num_segments;
    int64_t block_size;
    const int64_t* begin;       // [num_segments + 1] first packed row of each segment
    const int64_t* src_slot;    // [num_segments]
    const int64_t* dst_slot;    // [num_segments]
    const int64_t* start;       // [num_segments] position of the first row
    const int64_t* write_from;  // [num_segments] K/V of earlier positions is not written
    const int64_t* save_begin;  // [num_segments + 1] into the next two
    const int64_t* save_offset; // rows of the segment before the save, ascending within a segment
    const int64_t* save_slot;
    const int64_t* table_begin; // [num_segments] into table
    const int64_t* table;       // block ids
    const int64_t* seen_end;    // [num_rows] behind the last position that a row sees; null: its own is the last

    int64_t rows(int64_t segment) const { return begin[segment + 1] - begin[segment]; }
    int64_t num_rows() const { return begin[num_segments]; }
};

// Runs over the rows of a segment in pieces that end where a state is saved: advance(first, last), save(slot).
template <class Advance, class Save>
inline void walk(const Step& step, int64_t segment, Advance advance, Save save) {
    int64_t row = step.begin[segment];
    for (int64_t i = step.save_begin[segment]; i < step.save_begin[segment + 1]; i++) {
        const int64_t cut = step.begin[segment] + step.save_offset[i];
        if (cut > row) advance(row, cut);
        row = cut;
        save(step.save_slot[i]);
    }
    if (step.begin[segment + 1] > row) advance(row, step.begin[segment + 1]);
}

// Multiply-adds below which work stays on the calling thread: waking another one would take longer.
constexpr int64_t kSerialWork = 1 << 17;

// While it lives, this thread treats subnormal numbers (below 1.2e-38) as zero. A decaying state passes through them,
// and each product with one goes through slow microcode: a Mamba-2 scan took four times as long.
class FlushTiny {
   public:
    FlushTiny() : before_(get()) { set(before_ | kTinyIsZero); }
    ~FlushTiny() { set(before_); }
    FlushTiny(const FlushTiny&) = delete;
    FlushTiny& operator=(const FlushTiny&) = delete;

   private:
#if defined(__SSE2__)
    using Control = unsigned;
    static constexpr Control kTinyIsZero = 0x8040;  // results, operands
    static Control get() { return __builtin_ia32_stmxcsr(); }
    static void set(Control control) {
        asm volatile("" ::: "memory");  // nothing is computed from memory on the wrong side of it
        __builtin_ia32_ldmxcsr(control);
        asm volatile("" ::: "memory");
    }
#elif defined(__aarch64__)
    using Control = uint64_t;
    static constexpr Control kTinyIsZero = 1 << 24;
    static Control get() {
        Control control;
        asm volatile("mrs %0, fpcr" : "=r"(control));
        return control;
    }
    static void set(Control control) { asm volatile("msr fpcr, %0" ::"r"(control) : "memory"); }
#else
    using Control = int;
    static constexpr Control kTinyIsZero = 0;
    static Control get() { return 0; }
    static void set(Control) {}
#endif
    Control before_;
};

struct AsTorch {};  // a mode that changes nothing: for operations whose results must have torch's own bits

// task(i) for every i below count. `Mode` is in force on each thread meanwhile.
template <class Mode = FlushTiny, class Task>
inline void parallel(int64_t count, [[maybe_unused]] int64_t num_threads, [[maybe_unused]] int64_t work, Task task) {
#if defined(_OPENMP)
    if (num_threads > 1 && count > 1 && work >= kSerialWork) {
#pragma omp parallel num_threads(num_threads)
        {
            [[maybe_unused]] const Mode mode;
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < count; i++) task(i);
        }
        return;
    }
#endif
    [[maybe_unused]] const Mode mode;
    for (int64_t i = 0; i < count; i++) task(i);
}

// A state is read and written once for each token of a sequence that generates, and comes from memory each time: lines
// are asked for so many floats ahead of their use (8 KiB), the next head's among them, which lie behind.
constexpr int64_t kStateAhead = 2048;

// Asks for what is kStateAhead behind `state` [count], to be written too.
inline void ask_ahead(const float* state, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(state + kStateAhead + i, 1);
    asm volatile("" ::"r"(state));  // as in prefetch_row
}

// The state of one head in float32, [rows, columns]: in place in its destination when rows are whole vectors, else in
// a padded copy. Columns are padded with zeros.
class HeadState {
   public:
    HeadState(float* pool, int64_t slot_stride, int64_t offset, int64_t rows, int64_t columns, const Step& step,
              int64_t segment, float* buffer)
        : pool_(pool), slot_stride_(slot_stride), offset_(offset), rows_(rows), columns_(columns),
          stride(padded(columns)) {
        const float* src = at(step.src_slot[segment]);
        float* dst = at(step.dst_slot[segment]);
        in_place_ = stride == columns;
        data = in_place_ ? dst : buffer;
        if (!in_place_) {
            for (int64_t r = 0; r < rows_; r++) load_row(data + r * stride, src, kFloat32, r * columns_, columns_);
        } else if (src != dst) {
            std::memcpy(dst, src, rows_ * columns_ * 4);
        }
    }
    void save(int64_t slot) const {
        float* to = at(slot);
        if (to == data) return;
        if (in_place_) {
            std::memcpy(to, data, rows_ * columns_ * 4);
        } else {
            for (int64_t r = 0; r < rows_; r++) std::memcpy(to + r * columns_, data + r * stride, columns_ * 4);
        }
    }

   private:
    float* at(int64_t slot) const { return pool_ + slot * slot_stride_ + offset_; }
    float* pool_;
    int64_t slot_stride_, offset_, rows_, columns_;
    bool in_place_;

   public:
    int64_t stride;
    float* data;
};

}  // namespace tandem
