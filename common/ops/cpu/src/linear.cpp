// Linear layers for any number of rows: out[m, n] = sum_k x[m, k] * w[n, k] + bias[n].
//
// Every output is the same float32 sum over k, whatever else is in the call: its bits do not depend on the other rows.
// Here on vectors, in linear_tiles.cpp on tiles.
//
// Rows are taken in pieces of up to kMaxRows, whose sums stay in registers while a panel passes; x is repacked to
// [step][row of the piece] first. A panel meets all pieces of a batch, whose rows stay in the L2 cache; where words are
// float32, which is twice as much to load, and pieces are many, block by block in the L1 cache. A last piece of few
// rows takes two panels at once, as with one it has too few sums to be busy while each waits for its last multiply-add;
// not where one stream comes faster from memory than two.
#include "linear.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <type_traits>

namespace tandem {
namespace {

// Rows of a piece, at most: their sums take 24 of 32 registers, or 12 of 16.
constexpr int kMaxRows = kLanes == 16 ? 12 : 6;
// Words of a channel in one partial sum. Partial sums are added up, because one long sum loses digits. A panel's words
// of one partial sum are a block of 16 KiB.
constexpr int64_t kBlockWords = 4096 / kPanel;
constexpr int kStreamPieces = 2;  // float32 batches of more pieces than this are taken block by block
// Pieces of a batch: as many as keep its rows within kBatchWords words (256 KiB, which stay in the L2 cache), within
// these bounds.
constexpr int kMaxPieces = 16, kMinPieces = 8;
constexpr int64_t kBatchWords = 1 << 16;
// How far ahead of its use a panel is fetched, in words, by two panels side by side and by one. Best of 0 to 16384 on a
// Zen 4 (25 to 41 GB/s, where a plain read gives 32).
constexpr int64_t kNearWords = 256, kFarWords = 2048;
constexpr int kLineVectors = std::min(kVectors, 16 / kLanes);  // vectors of a panel in one cache line

// On a Zen 5 one panel comes from memory at 40 GB/s, two side by side at 30. Others keep two, which pay on a Zen 3.
inline bool prefers_one_stream() {
#if defined(__x86_64__)
    constexpr unsigned kZen5 = 0x1a, kAmd = 0x68747541;  // families; "Auth" of "AuthenticAMD"
    static const unsigned family = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (!__get_cpuid(0, &a, &b, &c, &d) || b != kAmd || !__get_cpuid(1, &a, &b, &c, &d)) return 0u;
        return (a >> 8 & 0xf) + (a >> 20 & 0xff);
    }();
    return family >= kZen5;
#else
    return false;
#endif
}

inline vu load_words(const uint32_t* p, int64_t offset = 0) {  // offset: bytes
    vu v;
    std::memcpy(&v, reinterpret_cast<const char*>(p) + offset, sizeof v);
    return v;
}

// How one step of k is added: x holds kWords words for each step and row, [step][word][row], which meet as many of w.
// Up to kWideRows two panels pass side by side.
struct Float32 {
    static constexpr int64_t kWords = 1, kWideRows = 4;
    static vu word(const uint32_t* w, int) { return load_words(w); }
    static vf add(vf sum, const uint32_t* x, vu w) {
        float value;
        std::memcpy(&value, x, 4);
        const vf factor = splat(value);
#if defined(__FMA__) && !defined(__AVX512F__)  // gcc 12 would load w again for each row, and move sums about
        asm("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"(factor), "x"(w));
        return sum;
#else
        return fma(factor, (vf)w, sum);
#endif
    }
};
#if defined(__AVX512BF16__)
struct BFloat16 {
    static constexpr int64_t kWords = 1, kWideRows = 4;
    static vu word(const uint32_t* w, int) { return load_words(w); }
    static vf add(vf sum, const uint32_t* x, vu w) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(*x)), (__m512bh)w);
    }
};
#else
struct BFloat16 {  // x is repacked to float32
    static constexpr int64_t kWords = 2, kWideRows = kLanes == 16 ? 4 : 2;
    // The first of two values gets into the high half of its lane by reading from two bytes before the word. A shift
    // does the same, but on the ports on which a Zen 3 does its multiply-adds: 5 % of 8 rows' time, 4 % of 12.
    static vu word(const uint32_t* w, int i) { return load_words(w, i == 0 ? -2 : 0) & 0xffff0000u; }
    static vf add(vf sum, const uint32_t* x, vu w) { return Float32::add(sum, x, w); }
};
#endif

struct Rows {  // rows [first, first + count) of x, repacked at x
    int64_t first, count;
    const uint32_t* x;
};

struct Fetch {       // what to fetch meanwhile
    int64_t ahead;   // words
    unsigned lines;  // of the cache lines of each step, bit by bit
};
constexpr unsigned kNoLine = 0, kFirstLine = 1, kAllLines = ~0u;

// sums += x [steps, kRows] * w [steps, kPanel], for each of the panels.
template <class Type, int kRows, int kSums>
[[gnu::always_inline]] inline void add_steps(vf (&sums)[kRows][kSums], const uint32_t* x, const uint32_t* w,
                                             int64_t panel_words, int64_t steps, Fetch fetch) {
    const auto place = [&](int v) { return v / kVectors * panel_words + v % kVectors * kLanes; };
    for (int64_t s = 0; s < steps; s++, w += kPanel, x += kRows * Type::kWords) {
#pragma GCC unroll 4
        for (int v = 0; v < kSums; v += kLineVectors) {
            if (fetch.lines >> v / kLineVectors & 1) __builtin_prefetch(w + place(v) + fetch.ahead, 0, 2);
        }
        // Every sum takes one word before the first sum takes its next: a multiply-add waits for the one before it in
        // the same sum.
#pragma GCC unroll 2
        for (int i = 0; i < Type::kWords; i++) {
            const uint32_t* from = w;
            // The compiler must read the words again: kept in registers, they would push sums out.
            if constexpr (Type::kWords > 1) asm volatile("" : "+r"(from));
            vu words[kSums];
#pragma GCC unroll 4
            for (int v = 0; v < kSums; v++) {
                words[v] = Type::word(from + place(v), i);
#if defined(__AVX512F__)  // gcc 12 would load two panels' words again for each row
                if constexpr (Type::kWords == 1 && kSums > kVectors) asm("" : "+v"(words[v]));
#endif
            }
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
                for (int v = 0; v < kSums; v++) sums[r][v] = Type::add(sums[r][v], x + i * kRows + r, words[v]);
            }
        }
    }
}

struct Tile {  // what a kernel call computes: these rows, and panels that begin at this channel
    const Linear& args;
    const Layout& layout;
    const uint32_t* weight;
    const Rows& rows;
    int64_t channel;
    Fetch fetch;
};

template <class Type, int kRows, int kPanels>
void multiply(const Tile& tile) {
    constexpr int kSums = kPanels * kVectors;
    constexpr int64_t kBlock = kBlockWords / Type::kWords;
    vf totals[kRows][kSums];
    const int64_t steps = tile.layout.steps, panel_words = steps * kPanel;
    for (int64_t begin = 0; begin < steps; begin += kBlock) {
        vf sums[kRows][kSums] = {};
        const uint32_t *x = tile.rows.x + begin * kRows * Type::kWords, *w = tile.weight + begin * kPanel;
        add_steps<Type>(sums, x, w, panel_words, std::min(kBlock, steps - begin), tile.fetch);
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

template <class Type, int kPanels, int kRows = (kPanels > 1 ? Type::kWideRows : kMaxRows)>
void dispatch(const Tile& tile) {
    if (tile.rows.count == kRows) return multiply<Type, kRows, kPanels>(tile);
    if constexpr (kRows > 1) dispatch<Type, kPanels, kRows - 1>(tile);
}

// One block of a panel for one piece. totals [kRows, kPanel], written when the block is the first, else added to.
template <class Type, int kRows>
void multiply_block(const uint32_t* x, const uint32_t* w, int64_t steps, Fetch fetch, bool is_first, vf* totals) {
    vf sums[kRows][kVectors] = {};
    add_steps<Type>(sums, x, w, 0, steps, fetch);
    for (int r = 0; r < kRows; r++) {
        for (int v = 0; v < kVectors; v++) {
            vf& total = totals[r * kVectors + v];
            total = is_first ? sums[r][v] : total + sums[r][v];
        }
    }
}

template <class Type, int kRows = kMaxRows, class... Args>
void dispatch_block(int64_t num_rows, const Args&... args) {
    if (num_rows == kRows) return multiply_block<Type, kRows>(args...);
    if constexpr (kRows > 1) dispatch_block<Type, kRows - 1>(num_rows, args...);
}

// One panel for a batch of pieces [begin, end), a step being a word.
template <class Type>
void multiply_blocks(const Linear& args, const Layout& layout, const uint32_t* weight, int64_t channel,
                     const Rows* begin, const Rows* end) {
    vf totals[kMaxPieces][kMaxRows * kVectors];
    for (int64_t step = 0; step < layout.steps; step += kBlockWords) {
        const int64_t steps = std::min(kBlockWords, layout.steps - step);
        for (const Rows* rows = begin; rows < end; rows++) {
            // The last piece fetches the block that comes next.
            const Fetch fetch = {kBlockWords * kPanel, rows + 1 == end ? kAllLines : kNoLine};
            dispatch_block<Type>(rows->count, rows->x + step * rows->count, weight + step * kPanel, steps, fetch,
                                 step == 0, &totals[rows - begin][0]);
        }
    }
    for (const Rows* rows = begin; rows < end; rows++) {
        for (int64_t r = 0; r < rows->count; r++) {
            store_panel(args, rows->first + r, channel, totals[rows - begin] + r * kVectors);
        }
    }
}

// One row of x as words -> out[word * count + place], for a piece of count rows.
template <class Type>
void repack(const Linear& args, int64_t row, uint32_t* out, int64_t count) {
    const int64_t in = args.in_features, from = row * args.x_stride;
    if constexpr (std::is_same_v<Type, Float32>) {
        const float* x = static_cast<const float*>(args.x) + from;
        for (int64_t k = 0; k < in; k++) std::memcpy(out + k * count, x + k, 4);
    } else {
        const uint16_t* x = static_cast<const uint16_t*>(args.x) + from;
        if constexpr (Type::kWords == 1) {  // pairs
            for (int64_t s = 0; s < in / 2; s++) std::memcpy(out + s * count, x + 2 * s, 4);
            if (in % 2) out[in / 2 * count] = x[in - 1];
        } else {
            for (int64_t k = 0; k < in; k++) out[k * count] = uint32_t(x[k]) << 16;
            if (in % 2) out[in * count] = 0;
        }
    }
}

struct Batch {  // rows of one weight that pass a panel together: pieces [first, last) of all
    int64_t weight, first, last;
};

template <class Type>
void run(const Linear& args) {
    const Layout layout(args.dtype, args.in_features, args.out_features);
    const int64_t row_words = layout.steps * Type::kWords, num_rows = args.begin[args.num_groups];
    uint32_t* packed = reinterpret_cast<uint32_t*>(scratch(num_rows * row_words));
    const int64_t most = std::clamp<int64_t>(kBatchWords / (kMaxRows * row_words), kMinPieces, kMaxPieces);
    const bool may_be_wide = !prefers_one_stream();
    const auto in_blocks = [](int64_t pieces) { return std::is_same_v<Type, Float32> && pieces > kStreamPieces; };
    std::vector<Rows> all;
    std::vector<Batch> batches;
    for (int64_t g = 0; g < args.num_groups; g++) {
        const int64_t begin = args.begin[g], count = args.begin[g + 1] - begin;
        const int64_t pieces = (count + kMaxRows - 1) / kMaxRows, old = int64_t(all.size());
        // Pieces have one size, or are full but for a last one of so few rows that it takes two panels at once. Eight
        // rows as 6 + 2 instead of 4 + 4: 85 GF/s instead of 78 on a Zen 3. (Not measured with 32 registers.)
        const int64_t rest = count % kMaxRows;
        const bool has_rest = may_be_wide && kLanes == 8 && 0 < rest && rest <= Type::kWideRows && !in_blocks(pieces);
        const auto bound = [&](int64_t i) {
            return begin + (has_rest ? std::min(i * kMaxRows, count) : count * i / pieces);
        };
        for (int64_t i = 0; i < pieces; i++) {
            all.push_back({bound(i), bound(i + 1) - bound(i), packed + bound(i) * row_words});
        }
        const int64_t num = (pieces + most - 1) / most;
        for (int64_t i = 0; i < num; i++) {
            batches.push_back({g, old + pieces * i / num, old + pieces * (i + 1) / num});
        }
    }
    parallel(int64_t(all.size()), args.num_threads, num_rows * row_words, [&](int64_t i) {
        const Rows& rows = all[i];
        for (int64_t r = 0; r < rows.count; r++) {
            repack<Type>(args, rows.first + r, packed + rows.first * row_words + r, rows.count);
        }
    });
    const int64_t pairs = (layout.panels + 1) / 2, work = num_rows * args.in_features * args.out_features;
    parallel(pairs * int64_t(batches.size()), args.num_threads, work, [&](int64_t task) {
        const Batch& batch = batches[task / pairs];
        const int64_t num_pieces = batch.last - batch.first, panel_words = layout.steps * kPanel;
        const int64_t begin = task % pairs * 2, end = std::min(begin + 2, layout.panels);
        const Rows *first = &all[batch.first], *last = &all[batch.last - 1];
        const auto weight = [&](int64_t panel) {
            return args.weight + batch.weight * layout.words() + panel * panel_words;
        };
        if (in_blocks(num_pieces)) {
            for (int64_t panel = begin; panel < end; panel++) {
                multiply_blocks<Float32>(args, layout, weight(panel), panel * kPanel, first, last + 1);
            }
            return;
        }
        const bool is_wide = may_be_wide && end - begin == 2 && last->count <= Type::kWideRows;
        // One piece fetches what it reads soon. Of several, the last two fetch the panel that the first reads next, each
        // a line of every step where a step has two: memory would rest while one of two pieces computes.
        const auto fetch = [&](const Rows* rows) {
            if (is_wide) return Fetch{kFarWords, rows == first ? kAllLines : kNoLine};
            if (num_pieces == 1) return Fetch{kFarWords, kAllLines};
            constexpr bool kHasTwo = kVectors == 2 * kLineVectors;
            const unsigned by_last = kHasTwo ? ~kFirstLine : kAllLines, by_other = kHasTwo ? kFirstLine : kNoLine;
            return Fetch{panel_words, rows == last ? by_last : rows + 1 == last ? by_other : kNoLine};
        };
        for (int64_t panel = begin; panel < end; panel++) {
            for (const Rows* rows = first; rows <= last - is_wide; rows++) {
                dispatch<Type, 1>({args, layout, weight(panel), *rows, panel * kPanel, fetch(rows)});
            }
        }
        if (is_wide) {
            const Fetch near = {kNearWords, num_pieces == 1 ? kAllLines : kNoLine};
            dispatch<Type, 2>({args, layout, weight(begin), *last, begin * kPanel, near});
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
