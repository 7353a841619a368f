// bfloat16 weights in 12 bits each, without loss: decode waits for weights to come from memory, and so waits less.
//
// The exponents of a layer's weights are few: sixteen of them cover all but some in ten thousand. So a weight is a byte
// with its sign and mantissa, and four bits that say which of sixteen exponents. The others are exceptions, listed with
// their place. A tile (kTileSteps steps of 32 channels) is expanded right before a product reads it, to the same bits
// that a plain one has.
//
// A compact weight has its panels' tiles one behind the other; behind them, in words, [panels + 1] where each panel's
// exceptions begin, then the exceptions: place << 8 | exponent, the place being 64 * step + value in the panel. In a
// tile, step s has 32 bytes of exponents from 32 * s on (byte i: value i in the low half, value 32 + i in the high one)
// and 64 bytes of signs and mantissas from kCodeBytes + 64 * s on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "amx.h"

namespace tandem {

constexpr int64_t kStepValues = 64, kTileValues = kTileSteps * kStepValues;
constexpr int64_t kCodeBytes = kTileValues / 2, kCompactTileBytes = kCodeBytes + kTileValues;
constexpr int64_t kMinPerException = 256;         // values for each exception: a weight with more of them stays plain
constexpr int64_t kMaxPlaces = int64_t(1) << 24;  // values of a panel: a place has 24 bits in the list of exceptions
constexpr int kNumExponents = 16, kExponentShift = 7;  // of a bfloat16
constexpr uint16_t kExponentMask = 0x7f80;

struct Book {  // the code of one compact weight
    int64_t is_compact;
    uint16_t exponents[2 * kNumExponents];  // in their place in a bfloat16; twice, so that a look-up may ignore a bit
};

struct Exceptions {  // of one panel, from `next` on
    const uint32_t *next, *end;

    // Puts those of places [begin, end_place) right, which lie at values.
    void patch(uint16_t* values, int64_t begin, int64_t end_place) {
        for (; next != end && int64_t(*next >> 8) < end_place; next++) {
            uint16_t& value = values[int64_t(*next >> 8) - begin];
            value = uint16_t((value & ~kExponentMask) | (*next & 0xff) << kExponentShift);
        }
    }
};

// The exceptions of a panel; `weight` is the compact one.
inline Exceptions exceptions(const uint32_t* weight, int64_t panels, int64_t panel_tiles, int64_t panel) {
    const uint32_t* begins = weight + panels * panel_tiles * kCompactTileBytes / 4;
    const uint32_t* list = begins + panels + 1;
    return {list + begins[panel], list + begins[panel + 1]};
}

#if defined(TANDEM_AMX)
class Expander {
   public:
    explicit Expander(const Book& book) : exponents_(_mm512_loadu_si512(book.exponents)) {}

    // Step s of the tile at `from` -> its 64 values at `to`. Exceptions have some other exponent.
    __attribute__((always_inline)) void step(const char* from, int64_t s, uint16_t* to) const {
        const auto load = [from](int64_t at) {
            return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
        };
        const __m512i kept = _mm512_set1_epi16(int16_t(~kExponentMask));
        const __m512i codes = _mm512_cvtepu8_epi16(load(32 * s));
        const __m512i first = _mm512_permutexvar_epi16(codes, exponents_);
        const __m512i second = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), exponents_);
        const int64_t at = kCodeBytes + kStepValues * s;
        // Widened with its sign, a byte has it where a bfloat16 has it.
        constexpr int kAndOr = 0xea;
        const __m512i low = _mm512_cvtepi8_epi16(load(at)), high = _mm512_cvtepi8_epi16(load(at + 32));
        _mm512_storeu_si512(to, _mm512_ternarylogic_epi32(low, kept, first, kAndOr));
        _mm512_storeu_si512(to + 32, _mm512_ternarylogic_epi32(high, kept, second, kAndOr));
    }

   private:
    __m512i exponents_;
};

// A block of tiles, expanded some steps at a time; what follows it in memory is fetched meanwhile.
struct Expansion {
    const char* from;
    uint16_t* to;
    bool is_near;  // what is fetched goes to the first-level cache, else to the second

    __attribute__((always_inline)) void run(const Expander& expander, int64_t begin, int64_t end) const {
        for (int64_t i = begin; i < end; i++) {
            const int64_t tile = int64_t(uint64_t(i) / kTileSteps), s = int64_t(uint64_t(i) % kTileSteps);
            expander.step(from + tile * kCompactTileBytes, s, to + i * kStepValues);
            fetch(from + i * (kCompactTileBytes / kTileSteps) + kFarBytes, i % 2 != 0);
        }
    }

    // As run() of all steps of one tile.
    __attribute__((always_inline)) void run_tile(const Expander& expander, int64_t tile) const {
        const char* at = from + tile * kCompactTileBytes;
        uint16_t* values = to + tile * kTileValues;
#pragma GCC unroll 4
        for (int64_t s = 0; s < kTileSteps; s++) {
            expander.step(at, s, values + s * kStepValues);
            fetch(at + s * (kCompactTileBytes / kTileSteps) + kFarBytes, s % 2 != 0);
        }
    }

   private:
    static constexpr int64_t kFarBytes = 24 << 10;

    // Two steps are three lines.
    __attribute__((always_inline)) void fetch(const char* at, bool is_odd) const {
        if (is_near) {
            __builtin_prefetch(at, 0, 3);
            if (is_odd) __builtin_prefetch(at + kLineBytes, 0, 3);
        } else {
            __builtin_prefetch(at, 0, 2);
            if (is_odd) __builtin_prefetch(at + kLineBytes, 0, 2);
        }
    }
};

// The block that comes next, expanded while a product computes: some steps with every tile of k.
struct ExpandNext {
    const Expander& expander;
    Expansion block;
    int64_t begin, end;  // this product's part of the block's steps
    int64_t steps;       // per tile
    FetchRows rows;

    __attribute__((always_inline)) void step(int64_t tile) const {
        const int64_t first = begin + tile * steps;
        if (steps == kTileSteps && first + steps <= end) {
            block.run_tile(expander, first / kTileSteps);
        } else {
            block.run(expander, first, std::min(first + steps, end));
        }
        rows.step(tile);
    }
};
#endif

}  // namespace tandem
