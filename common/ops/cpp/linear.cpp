// Linear layers for any number of rows: out[m, n] = sum_k x[m, k] * w[n, k] + bias[n].
//
// Every output is the same float32 sum over k, whatever else is in the call: its bits do not depend on the other rows.
// Here on vectors, in linear_tiles.cpp on tiles.
//
// Rows are taken in groups of up to kMaxRows, whose sums stay in registers while a panel passes; x is repacked to
// [step][row of the group] first. A panel comes from memory once, then from the L2 cache for the other groups.
#include "linear.h"

namespace tandem {
namespace {

constexpr int kMaxRows = kLanes == 16 ? 12 : 6;  // 24 of 32 registers hold sums, or 12 of 16
constexpr int kWideRows = 4;                     // up to here two panels pass side by side: more sums to work on
constexpr int64_t kBlockSteps = 256;             // sums of so many steps are added up: one long sum loses digits
// How far ahead a panel is fetched, in words; best of 0 to 16384 on a Zen 4 (25 to 41 GB/s, where a plain read gives 32).
constexpr int64_t kNearWords = 256, kFarWords = 2048;

inline vu load_words(const uint32_t* p) {
    vu v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// How one step of k is added: x holds kWords words for each row and step.
struct Float32 {
    static constexpr int64_t kWords = 1;
    static vf add(vf sum, const uint32_t* x, vu w) {
        float value;
        std::memcpy(&value, x, 4);
        return fma(splat(value), (vf)w, sum);
    }
};
#if defined(__AVX512BF16__)
struct BFloat16 {
    static constexpr int64_t kWords = 1;
    static vf add(vf sum, const uint32_t* x, vu w) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(*x)), (__m512bh)w);
    }
};
#else
struct BFloat16 {  // x in float32
    static constexpr int64_t kWords = 2;
    static vf add(vf sum, const uint32_t* x, vu w) {
        float even, odd;
        std::memcpy(&even, x, 4);
        std::memcpy(&odd, x + 1, 4);
        sum = fma(splat(even), (vf)(w << 16), sum);
        return fma(splat(odd), (vf)(w & 0xffff0000u), sum);
    }
};
#endif

struct Rows {  // rows [first, first + count) of x, repacked at x
    int64_t first, count;
    const uint32_t* x;
};

struct Tile {  // what a kernel call computes: these rows, and panels that begin at this channel
    const Linear& args;
    const Layout& layout;
    const uint32_t* weight;
    const Rows& rows;
    int64_t channel;
    int64_t ahead;  // words: what to fetch meanwhile, 0: nothing
};

template <class Type, int kRows, int kPanels>
void multiply(const Tile& tile) {
    constexpr int kSums = kPanels * kVectors;
    vf totals[kRows][kSums];
    const int64_t steps = tile.layout.steps, panel_words = steps * kPanel;
    const int64_t ahead = kPanels > 1 ? kNearWords : tile.ahead;
    const uint32_t *w = tile.weight, *x = tile.rows.x;
    for (int64_t begin = 0; begin < steps; begin += kBlockSteps) {
        vf sums[kRows][kSums] = {};
        const int64_t end = std::min(begin + kBlockSteps, steps);
        for (int64_t s = begin; s < end; s++, w += kPanel, x += kRows * Type::kWords) {
            vu words[kSums];
#pragma GCC unroll 4
            for (int v = 0; v < kSums; v++) {
                const uint32_t* at = w + v / kVectors * panel_words + v % kVectors * kLanes;
                words[v] = load_words(at);
                if (ahead != 0) __builtin_prefetch(at + ahead, 0, 2);
            }
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
                for (int v = 0; v < kSums; v++) sums[r][v] = Type::add(sums[r][v], x + r * Type::kWords, words[v]);
            }
        }
        for (int r = 0; r < kRows; r++) {
            for (int v = 0; v < kSums; v++) totals[r][v] = begin == 0 ? sums[r][v] : totals[r][v] + sums[r][v];
        }
    }
    for (int r = 0; r < kRows; r++) {
        for (int p = 0; p < kPanels; p++) {
            const int64_t channel = tile.channel + p * kPanel;
            if (channel < tile.args.out_features) {
                store_panel(tile.args, tile.rows.first + r, channel, totals[r] + p * kVectors);
            }
        }
    }
}

template <class Type, int kRows>
void multiply_panels(const Tile& tile, int64_t panels) {
    if constexpr (kRows <= kWideRows) {
        if (panels == 2) return multiply<Type, kRows, 2>(tile);
    }
    for (int64_t p = 0; p < panels; p++) {
        const uint32_t* weight = tile.weight + p * tile.layout.steps * kPanel;
        multiply<Type, kRows, 1>({tile.args, tile.layout, weight, tile.rows, tile.channel + p * kPanel, tile.ahead});
    }
}

template <class Type, int kRows = kMaxRows>
void dispatch(const Tile& tile, int64_t panels) {
    if (tile.rows.count == kRows) return multiply_panels<Type, kRows>(tile, panels);
    if constexpr (kRows > 1) dispatch<Type, kRows - 1>(tile, panels);
}

// One row of x as words -> out[step * count + place], for a group of count rows.
template <class Type>
void repack(const Linear& args, int64_t row, uint32_t* out, int64_t count) {
    const int64_t in = args.in_features, from = row * args.x_stride;
    const bool is_pair = args.dtype == kBFloat16 && Type::kWords == 1;
    if (is_pair) {
        const uint16_t* x = static_cast<const uint16_t*>(args.x) + from;
        for (int64_t s = 0; s < in / 2; s++) std::memcpy(out + s * count, x + 2 * s, 4);
        if (in % 2) out[in / 2 * count] = x[in - 1];
        return;
    }
    constexpr int64_t words = Type::kWords;
    for (int64_t k = 0; k < (in + words - 1) / words * words; k++) {
        const float value = k < in ? load_one(args.x, args.dtype, from + k) : 0.0f;
        std::memcpy(out + k / words * count * words + k % words, &value, 4);
    }
}

struct Group {  // rows of one weight: pieces [first, last) of all
    int64_t weight, first, last;
};

template <class Type>
void run(const Linear& args) {
    const Layout layout(args.dtype, args.in_features, args.out_features);
    const int64_t row_words = layout.steps * Type::kWords, num_rows = args.begin[args.num_groups];
    uint32_t* packed = reinterpret_cast<uint32_t*>(scratch(num_rows * row_words));
    std::vector<Rows> all;
    std::vector<Group> groups;
    for (int64_t g = 0; g < args.num_groups; g++) {
        const int64_t begin = args.begin[g], count = args.begin[g + 1] - begin;
        const int64_t pieces = (count + kMaxRows - 1) / kMaxRows, old = int64_t(all.size());
        for (int64_t i = 0; i < pieces; i++) {
            const int64_t first = begin + count * i / pieces, last = begin + count * (i + 1) / pieces;
            all.push_back({first, last - first, packed + first * row_words});
        }
        if (pieces > 0) groups.push_back({g, old, old + pieces});
    }
    parallel(int64_t(all.size()), args.num_threads, num_rows * row_words, [&](int64_t i) {
        const Rows& rows = all[i];
        for (int64_t r = 0; r < rows.count; r++) {
            repack<Type>(args, rows.first + r, packed + rows.first * row_words + r * Type::kWords, rows.count);
        }
    });
    const int64_t pairs = (layout.panels + 1) / 2, work = num_rows * args.in_features * args.out_features;
    parallel(pairs * int64_t(groups.size()), args.num_threads, work, [&](int64_t task) {
        const Group& group = groups[task / pairs];
        const bool is_single = group.last - group.first == 1;  // one piece: its panels may go side by side
        const int64_t begin = task % pairs * 2, end = std::min(begin + 2, layout.panels);
        const int64_t step = is_single ? end - begin : 1, panel_words = layout.steps * kPanel;
        for (int64_t panel = begin; panel < end; panel += step) {
            const uint32_t* weight = args.weight + group.weight * layout.words() + panel * panel_words;
            for (int64_t i = group.first; i < group.last; i++) {
                // The last piece fetches the panel that the next one begins with.
                const int64_t ahead = is_single ? kFarWords : i + 1 == group.last ? panel_words : 0;
                dispatch<Type>({args, layout, weight, all[i], panel * kPanel, ahead}, step);
            }
        }
    });
}

}  // namespace

extern "C" {

void tandem_linear(const Linear* args, const int64_t*) {
    if (args->dtype == kFloat32) return run<Float32>(*args);
#if defined(TANDEM_AMX)
    if (has_amx()) return run_tiles(*args);
#endif
    run<BFloat16>(*args);
}

}  // extern "C"
}  // namespace tandem
