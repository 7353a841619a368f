// Linear layers on packed weights, for any number of rows: out[m, n] = sum_k x[m, k] * w[n, k] + bias[n].
//
// A weight is packed once: panels of kPanel output channels, in each one machine word per channel and step of k (two
// bfloat16 or one float32). So a kernel reads one stream from front to back, for one row as for a thousand. Every
// output is the same float32 sum over k, whatever else is in the call: its bits do not depend on the other rows.
//
// Rows are taken in groups of up to kMaxRows, whose sums stay in registers while a panel passes; x is repacked to
// [step][row of the group] first. A panel comes from memory once, then from the L2 cache for the other groups.
#include <algorithm>
#include <vector>

#include "amx.h"
#include "step.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace tandem {
namespace {

constexpr int kVectors = 2;
constexpr int64_t kPanel = kVectors * kLanes;
constexpr int kMaxRows = kLanes == 16 ? 12 : 6;  // 24 of 32 registers hold sums, or 12 of 16
constexpr int kWideRows = 4;                     // up to here two panels pass side by side: more sums to work on
constexpr int64_t kBlockSteps = 256;             // sums of so many steps are added up: one long sum loses digits
// How far ahead a panel is fetched, in words; best of 0 to 16384 on a Zen 4 (25 to 41 GB/s, where a plain read gives 32).
constexpr int64_t kNearWords = 256, kFarWords = 2048;

struct Linear {
    const void* x;  // [num_rows, in]
    int64_t x_stride;
    void* out;  // [num_rows, out]
    int64_t out_stride;
    const uint32_t* weight;  // packed, [num_groups, panels, steps, kPanel]
    int64_t dtype;           // of x, weight and out
    const void* bias;        // [out] or null
    int64_t bias_dtype;
    int64_t in_features, out_features;
    int64_t num_groups;    // weights one behind the other: 1, or the experts of a layer
    const int64_t* begin;  // [num_groups + 1] first row of each group
    int64_t num_threads;
};

struct Layout {  // of one packed weight
    int64_t steps, panels;
    Layout(int64_t dtype, int64_t in, int64_t out)
        : steps(dtype == kFloat32 ? in : (in + 1) / 2), panels((out + kPanel - 1) / kPanel) {
        if (dtype == kBFloat16 && has_amx()) steps = (steps + kTileSteps - 1) / kTileSteps * kTileSteps;
    }
    int64_t words() const { return panels * steps * kPanel; }
};

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

inline void store_panel(const Linear& args, int64_t row, int64_t channel, const vf* sums) {
    const int64_t count = std::min(kPanel, args.out_features - channel);
    alignas(64) float bias[kPanel], out[kPanel];
    if (args.bias != nullptr) load_row(bias, args.bias, args.bias_dtype, channel, count);
    for (int v = 0; v * kLanes < count; v++) {
        store(out + v * kLanes, args.bias == nullptr ? sums[v] : sums[v] + load(bias + v * kLanes));
    }
    store_row(args.out, args.dtype, row * args.out_stride + channel, out, count);
}

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

#if defined(TANDEM_AMX)
constexpr int64_t kBlockTiles = kBlockSteps / kTileSteps;
constexpr int64_t kCachedBytes = 768 << 10;  // of x, which every panel reads: they stay in the L2 cache
constexpr int64_t kMaxCachedRows = 512;
// Best of 1024 to 8192, to the first-level cache, on a Sapphire Rapids: 8.5 GB/s where 2048 to the second got 8.0 and a
// plain read gives 9.1.
constexpr int64_t kTileFarWords = 4096;
constexpr int64_t kTaskPanels = 4;

struct Chunk {  // rows [first, last), all of one weight
    int64_t weight, first, last;
};

// sums [count, kPanel] -> rows [first, first + count) of the output.
void store_rows(const Linear& args, int64_t first, int64_t count, int64_t channel, const float* sums) {
    const bool is_plain = args.bias == nullptr && channel + kPanel <= args.out_features;
    uint16_t* out = static_cast<uint16_t*>(args.out) + first * args.out_stride + channel;
    for (int64_t r = 0; r < count; r++, sums += kPanel, out += args.out_stride) {
        const vf both[kVectors] = {load(sums), load(sums + kLanes)};
        if (is_plain) {
            const auto rounded = _mm512_cvtne2ps_pbh((__m512)both[1], (__m512)both[0]);
            std::memcpy(out, &rounded, sizeof rounded);
        } else {
            store_panel(args, first + r, channel, both);
        }
    }
}

// One panel for the rows of a chunk. totals: [rows, kPanel]
void run_panel(const Linear& args, const Layout& layout, Tiles& tiles, const Chunk& chunk, int64_t panel, const char* x,
               int64_t row_bytes, float* totals) {
    const uint32_t* weight = args.weight + (chunk.weight * layout.panels + panel) * layout.steps * kPanel;
    const int64_t num_tiles = layout.steps / kTileSteps;
    const bool is_single = chunk.last - chunk.first <= kGroupRows;
    for (int64_t begin = 0; begin < num_tiles; begin += kBlockTiles) {  // a block of the panel stays in the L1 cache
        const int64_t end = std::min(begin + kBlockTiles, num_tiles);
        for (int64_t first = chunk.first; first < chunk.last; first += kGroupRows) {
            const int64_t count = std::min(kGroupRows, chunk.last - first);
            const auto multiply = count > kTileRows ? multiply_tiles<true> : multiply_tiles<false>;
            tiles.set_rows(count);
            float* sums = totals + (first - chunk.first) * kPanel;
            multiply(x + first * row_bytes + begin * 64, row_bytes, weight + begin * kTileSteps * kPanel, end - begin,
                     begin != 0, is_single ? kTileFarWords : 0, sums);
            if (end == num_tiles) store_rows(args, first, count, panel * kPanel, sums);
        }
    }
}

void run_amx(const Linear& args) {
    const Layout layout(args.dtype, args.in_features, args.out_features);
    const int64_t num_rows = args.begin[args.num_groups];
    const char* x = static_cast<const char*>(args.x);
    int64_t row_bytes = args.x_stride * 2;
    if (args.in_features != 2 * layout.steps) {  // rows must be whole tiles wide
        const int64_t from_bytes = row_bytes;
        row_bytes = layout.steps * 4;
        char* padded_x = reinterpret_cast<char*>(scratch(num_rows * layout.steps));
        for (int64_t r = 0; r < num_rows; r++) {
            std::memcpy(padded_x + r * row_bytes, x + r * from_bytes, args.in_features * 2);
            std::memset(padded_x + r * row_bytes + args.in_features * 2, 0, row_bytes - args.in_features * 2);
        }
        x = padded_x;
    }
    const int64_t fitting = kCachedBytes / (layout.steps * 4) / kGroupRows * kGroupRows;
    const int64_t chunk_rows = std::min(std::max(fitting, kGroupRows), kMaxCachedRows);
    std::vector<Chunk> chunks;
    for (int64_t g = 0; g < args.num_groups; g++) {
        for (int64_t first = args.begin[g]; first < args.begin[g + 1]; first += chunk_rows) {
            chunks.push_back({g, first, std::min(first + chunk_rows, args.begin[g + 1])});
        }
    }
    const int64_t tasks = (layout.panels + kTaskPanels - 1) / kTaskPanels;
    parallel(tasks * int64_t(chunks.size()), args.num_threads, num_rows * args.in_features * args.out_features,
             [&](int64_t task) {
                 static thread_local std::vector<float> totals;
                 const Chunk& chunk = chunks[task / tasks];
                 const int64_t begin = task % tasks * kTaskPanels, end = std::min(begin + kTaskPanels, layout.panels);
                 totals.resize(chunk_rows * kPanel);
                 Tiles tiles;
                 for (int64_t panel = begin; panel < end; panel++) {
                     run_panel(args, layout, tiles, chunk, panel, x, row_bytes, totals.data());
                 }
             });
}
#endif

struct Pack {
    const void* weight;  // [num_groups, out, in], dense
    uint32_t* packed;
    int64_t dtype;
    int64_t in_features, out_features;
    int64_t num_groups;
    int64_t num_threads;
};

constexpr int64_t kLineWords = 16;  // a cache line of a row is read at once: rows may all be in one set of the cache

inline uint32_t word(const Pack& args, const void* row, int64_t step) {
    if (args.dtype == kFloat32) {
        uint32_t bits;
        std::memcpy(&bits, static_cast<const float*>(row) + step, 4);
        return bits;
    }
    const uint16_t* p = static_cast<const uint16_t*>(row) + 2 * step;
    if (2 * step >= args.in_features) return 0;
    return 2 * step + 1 < args.in_features ? p[0] | uint32_t(p[1]) << 16 : p[0];
}

struct Unpack {
    const uint32_t* packed;
    int64_t dtype;
    int64_t in_features, out_features;
    const int64_t* channels;  // [count]
    int64_t count;
    void* out;  // [count, in], dense
    int64_t num_threads;
};

}  // namespace

extern "C" {

void tandem_linear(const Linear* args, const int64_t*) {
    if (args->dtype == kFloat32) return run<Float32>(*args);
#if defined(TANDEM_AMX)
    if (has_amx()) return run_amx(*args);
#endif
    run<BFloat16>(*args);
}

// 32-bit words of one packed weight.
int64_t tandem_packed_words(int64_t dtype, int64_t in, int64_t out) { return Layout(dtype, in, out).words(); }

void tandem_pack(const Pack* args, const int64_t*) {
    const Layout layout(args->dtype, args->in_features, args->out_features);
    const int64_t row_bytes = args->in_features * item_bytes(args->dtype);
    parallel(args->num_groups * layout.panels, args->num_threads, layout.words(), [&](int64_t task) {
        const int64_t group = task / layout.panels, channel = task % layout.panels * kPanel;
        const char* rows = static_cast<const char*>(args->weight) + (group * args->out_features + channel) * row_bytes;
        const int64_t count = std::min(kPanel, args->out_features - channel);
        uint32_t* out = args->packed + task * layout.steps * kPanel;
        std::memset(out, 0, layout.steps * kPanel * 4);
        for (int64_t begin = 0; begin < layout.steps; begin += kLineWords) {
            const int64_t end = std::min(begin + kLineWords, layout.steps);
            for (int64_t n = 0; n < count; n++) {
                for (int64_t s = begin; s < end; s++) out[s * kPanel + n] = word(*args, rows + n * row_bytes, s);
            }
        }
    });
}

// Memory that is not read again: its whole pages go back to the system, even while others of the same file stay mapped.
void tandem_forget([[maybe_unused]] char* begin, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
    const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), address = reinterpret_cast<uintptr_t>(begin);
    const uintptr_t first = (address + page - 1) / page * page, last = (address + bytes) / page * page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#endif
}

// The rows of the weight that belong to some channels, as they were before packing; zeros for one that there is not.
void tandem_unpack(const Unpack* args, const int64_t*) {
    const Layout layout(args->dtype, args->in_features, args->out_features);
    const int64_t per_word = args->dtype == kFloat32 ? 1 : 2, row_bytes = args->in_features * item_bytes(args->dtype);
    parallel(args->count, args->num_threads, args->count * args->in_features, [&](int64_t i) {
        const int64_t channel = args->channels[i];
        const uint32_t* from = args->packed + channel / kPanel * layout.steps * kPanel + channel % kPanel;
        char* to = static_cast<char*>(args->out) + i * row_bytes;
        if (channel < 0 || channel >= args->out_features) {
            std::memset(to, 0, row_bytes);
            return;
        }
        const int64_t whole = args->in_features / per_word;
        for (int64_t s = 0; s < whole; s++) std::memcpy(to + 4 * s, from + s * kPanel, 4);
        if (per_word * whole < args->in_features) std::memcpy(to + 4 * whole, from + whole * kPanel, 2);
    });
}

}  // extern "C"
}  // namespace tandem
