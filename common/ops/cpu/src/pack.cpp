// Weights from the order of a checkpoint to the order of the kernels (linear.h), and single rows of them back.
#include "linear.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace tandem {
namespace {

struct Pack {
    const void* weight;  // [num_groups, out, in], dense
    uint32_t* packed;
    Book* books;  // [num_groups], written; null: nothing is to be compact
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

// One panel of one group, plain, -> out [steps, kPanel].
void pack_panel(const Pack& args, const Layout& layout, int64_t group, int64_t panel, uint32_t* out) {
    const int64_t row_bytes = args.in_features * item_bytes(args.dtype), channel = panel * kPanel;
    const char* rows = static_cast<const char*>(args.weight) + (group * args.out_features + channel) * row_bytes;
    const int64_t count = std::min(kPanel, args.out_features - channel);
    std::memset(out, 0, layout.steps * kPanel * 4);
    for (int64_t begin = 0; begin < layout.steps; begin += kLineWords) {
        const int64_t end = std::min(begin + kLineWords, layout.steps);
        for (int64_t n = 0; n < count; n++) {
            for (int64_t s = begin; s < end; s++) out[s * kPanel + n] = word(args, rows + n * row_bytes, s);
        }
    }
}

void pack_plain(const Pack& args, const Layout& layout, int64_t group) {
    uint32_t* out = args.packed + group * layout.words();
    parallel(layout.panels, args.num_threads, layout.words(), [&](int64_t panel) {
        pack_panel(args, layout, group, panel, out + panel * layout.steps * kPanel);
    });
}

#if defined(TANDEM_AMX)
constexpr int kAllExponents = 256;  // that a bfloat16 can have

inline int exponent(uint16_t value) { return (value & kExponentMask) >> kExponentShift; }

struct Counts {
    int64_t of[kAllExponents] = {};
};

// How often each exponent comes in one group's weight, padding included.
Counts count_exponents(const Pack& args, const Layout& layout, int64_t group) {
    constexpr int kRuns = 4;  // counters in turn: with one, equal exponents that follow each other wait for its memory
    const uint16_t* values = static_cast<const uint16_t*>(args.weight) + group * args.out_features * args.in_features;
    std::vector<Counts> counts(layout.panels);
    parallel(layout.panels, args.num_threads, layout.words(), [&](int64_t panel) {
        Counts runs[kRuns];
        const int64_t first = panel * kPanel, last = std::min(first + kPanel, args.out_features);
        const uint16_t *at = values + first * args.in_features, *end = values + last * args.in_features;
        for (; at + kRuns <= end; at += kRuns) {
            for (int i = 0; i < kRuns; i++) runs[i].of[exponent(at[i])]++;
        }
        for (; at < end; at++) runs[0].of[exponent(*at)]++;
        for (const Counts& run : runs) {
            for (int e = 0; e < kAllExponents; e++) counts[panel].of[e] += run.of[e];
        }
    });
    Counts all;
    for (const Counts& each : counts) {
        for (int e = 0; e < kAllExponents; e++) all.of[e] += each.of[e];
    }
    all.of[0] += 2 * layout.words() - args.out_features * args.in_features;
    return all;
}

// The exponents that come most often. False: too many weights have another one, or there is nothing to gain.
bool choose(const Counts& counts, const Layout& layout, Book& book, uint8_t* codes) {
    int order[kAllExponents];
    for (int e = 0; e < kAllExponents; e++) order[e] = e;
    std::stable_sort(order, order + kAllExponents, [&](int a, int b) { return counts.of[a] > counts.of[b]; });
    int64_t num_exceptions = 2 * layout.words();
    std::memset(codes, kNumExponents, kAllExponents);
    for (int code = 0; code < kNumExponents; code++) {
        const int e = order[code];
        num_exceptions -= counts.of[e];
        codes[e] = uint8_t(code);
        book.exponents[code] = book.exponents[code + kNumExponents] = uint16_t(e << kExponentShift);
    }
    return num_exceptions * kMinPerException <= 2 * layout.words() && layout.steps * kStepValues <= kMaxPlaces;
}

// One plain tile -> its compact form; what has no code is added to exceptions.
void compact_tile(const uint16_t* values, const uint8_t* codes, int64_t place, uint8_t* out,
                  std::vector<uint32_t>& exceptions) {
    constexpr int64_t kHalf = kStepValues / 2;
    for (int64_t s = 0; s < kTileSteps; s++, values += kStepValues, place += kStepValues) {
        uint8_t *pairs = out + s * kHalf, *rest = out + kCodeBytes + s * kStepValues;
        uint8_t found = 0;
        for (int64_t i = 0; i < kHalf; i++) {
            const uint8_t low = codes[exponent(values[i])], high = codes[exponent(values[kHalf + i])];
            pairs[i] = uint8_t(low % kNumExponents | high << 4);
            found |= low | high;
        }
        for (int64_t i = 0; i < kStepValues; i++) rest[i] = uint8_t((values[i] & 0x7f) | (values[i] >> 8 & 0x80));
        if (found < kNumExponents) continue;
        for (int64_t i = 0; i < kStepValues; i++) {
            const int e = exponent(values[i]);
            if (codes[e] == kNumExponents) exceptions.push_back(uint32_t(place + i) << 8 | uint32_t(e));
        }
    }
}

// False: plain is better.
bool pack_compact(const Pack& args, const Layout& layout, int64_t group) {
    Book& book = args.books[group];
    uint8_t codes[kAllExponents];
    if (!choose(count_exponents(args, layout, group), layout, book, codes)) return false;
    uint32_t* out = args.packed + group * layout.words();
    const int64_t panel_tiles = layout.steps / kTileSteps;
    std::vector<std::vector<uint32_t>> found(layout.panels);
    parallel(layout.panels, args.num_threads, layout.words(), [&](int64_t panel) {
        static thread_local std::vector<uint32_t> plain;
        plain.resize(layout.steps * kPanel);
        pack_panel(args, layout, group, panel, plain.data());
        uint8_t* to = reinterpret_cast<uint8_t*>(out) + panel * panel_tiles * kCompactTileBytes;
        for (int64_t t = 0; t < panel_tiles; t++, to += kCompactTileBytes) {
            const auto* values = reinterpret_cast<const uint16_t*>(plain.data()) + t * kTileValues;
            compact_tile(values, codes, t * kTileValues, to, found[panel]);
        }
    });
    uint32_t* begins = out + layout.panels * panel_tiles * kCompactTileBytes / 4;
    uint32_t* list = begins + layout.panels + 1;
    uint32_t count = 0;
    for (int64_t panel = 0; panel < layout.panels; panel++) {
        begins[panel] = count;
        std::copy(found[panel].begin(), found[panel].end(), list + count);
        count += uint32_t(found[panel].size());
    }
    begins[layout.panels] = count;
    return true;
}

// The plain form of one panel -> out [steps, kPanel].
void expand_panel(const Book& book, const uint32_t* weight, const Layout& layout, int64_t panel, uint32_t* out) {
    const int64_t panel_tiles = layout.steps / kTileSteps;
    const char* from = reinterpret_cast<const char*>(weight) + panel * panel_tiles * kCompactTileBytes;
    uint16_t* values = reinterpret_cast<uint16_t*>(out);
    const Expansion expansion = {from, values, true};
    expansion.run(Expander(book), 0, layout.steps);
    exceptions(weight, layout.panels, panel_tiles, panel).patch(values, 0, panel_tiles * kTileValues);
}
#endif

struct Unpack {
    const uint32_t* packed;
    const Book* book;  // or null
    int64_t dtype;
    int64_t in_features, out_features;
    const int64_t* channels;  // [count]
    int64_t count;
    void* out;  // [count, in], dense
    int64_t num_threads;
};

// The panel that a channel is in, plain.
const uint32_t* plain_panel(const Unpack& args, const Layout& layout, int64_t panel) {
#if defined(TANDEM_AMX)
    if (args.book != nullptr && args.book->is_compact) {
        static thread_local std::vector<uint32_t> plain;
        plain.resize(layout.steps * kPanel);
        expand_panel(*args.book, args.packed, layout, panel, plain.data());
        return plain.data();
    }
#endif
    return args.packed + panel * layout.steps * kPanel;
}

}  // namespace

extern "C" {

// 32-bit words of one packed weight, which a compact one uses in part.
int64_t tandem_packed_words(int64_t dtype, int64_t in, int64_t out) { return Layout(dtype, in, out).words(); }

// 32-bit words that must be there before all of it.
int64_t tandem_lead_words() { return kLead; }

// 32-bit words of a Book.
int64_t tandem_book_words() { return sizeof(Book) / 4; }

// Bytes of a packed weight that are in use.
int64_t tandem_used_bytes(const Book* book, const uint32_t* packed, int64_t dtype, int64_t in, int64_t out) {
    const Layout layout(dtype, in, out);
    if (!book->is_compact) return layout.words() * 4;
    const int64_t begins = layout.panels * (layout.steps / kTileSteps) * kCompactTileBytes / 4;
    return (begins + layout.panels + 1 + packed[begins + layout.panels]) * 4;
}

void tandem_pack(const Pack* args, const int64_t*) {
    const Layout layout(args->dtype, args->in_features, args->out_features);
    for (int64_t group = 0; group < args->num_groups; group++) {
#if defined(TANDEM_AMX)
        if (args->books != nullptr && args->dtype == kBFloat16 && has_amx()) {
            args->books[group].is_compact = pack_compact(*args, layout, group);
            if (args->books[group].is_compact) continue;
        }
#endif
        pack_plain(*args, layout, group);
    }
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
        char* to = static_cast<char*>(args->out) + i * row_bytes;
        if (channel < 0 || channel >= args->out_features) {
            std::memset(to, 0, row_bytes);
            return;
        }
        const uint32_t* from = plain_panel(*args, layout, channel / kPanel) + channel % kPanel;
        const int64_t whole = args->in_features / per_word;
        for (int64_t s = 0; s < whole; s++) std::memcpy(to + 4 * s, from + s * kPanel, 4);
        if (per_word * whole < args->in_features) std::memcpy(to + 4 * whole, from + whole * kPanel, 2);
    });
}

}  // extern "C"
}  // namespace tandem
