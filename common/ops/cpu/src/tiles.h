// Products of small matrices for attention: keys and values of a tile packed for the product, and the product itself.
//
// Kind says what a word (32 bits) holds. kFloats: one float32. kPairs: two bfloat16, multiplied and added pair by pair by
// the instruction that CPUs with AVX512_BF16 have; sums are float32 either way.
#pragma once

#include "vector.h"

namespace tandem {

enum class Kind { kFloats, kPairs };
template <Kind kKind>
constexpr int64_t kPerWord = kKind == Kind::kPairs ? 2 : 1;

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

template <Kind kKind>
inline vf multiply_add(vf a, vf b, vf sum) {
#if defined(__AVX512BF16__)
    if (kKind == Kind::kPairs) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
    return fma(a, b, sum);
}

inline constexpr int64_t kTile = 128;  // keys of a tile

// Words [0, words) of `count` keys -> to [words, kStride], column i for key i, zeros up to a whole vector of keys.
template <Kind kKind, int64_t kStride = kTile>
inline void pack_keys(const char* const* keys, int64_t count, int64_t dtype, int64_t head_size, float* to) {
    const bool widened = kKind == Kind::kFloats && dtype == kBFloat16;
    const int64_t words = kKind == Kind::kPairs ? (head_size + 1) / 2 : head_size;
    const int64_t bytes = head_size * item_bytes(dtype), word_bytes = widened ? 2 : 4;
    const auto read = [&](const char* p) {
        return widened ? load_bf16(reinterpret_cast<const uint16_t*>(p)) : load(reinterpret_cast<const float*>(p));
    };
    for (int64_t first = 0; first < count; first += kLanes) {
        for (int64_t word = 0; word < words; word += kLanes) {
            const int64_t at = word * word_bytes;
            vf square[kLanes];
            if (first + kLanes <= count && at + kLanes * word_bytes <= bytes) {
#pragma GCC unroll 16
                for (int i = 0; i < kLanes; i++) square[i] = read(keys[first + i] + at);
            } else {
                for (int i = 0; i < kLanes; i++) {
                    char part[kLanes * 4] = {};
                    const int64_t left = bytes - at < kLanes * word_bytes ? bytes - at : kLanes * word_bytes;
                    if (first + i < count) std::memcpy(part, keys[first + i] + at, left);
                    square[i] = read(part);
                }
            }
            transpose(square);
            const int64_t kept = words - word < kLanes ? words - word : kLanes;
            if (kept == kLanes) {
#pragma GCC unroll 16
                for (int j = 0; j < kLanes; j++) store(to + (word + j) * kStride + first, square[j]);
            } else {
                for (int64_t j = 0; j < kept; j++) store(to + (word + j) * kStride + first, square[j]);
            }
        }
    }
}

// Values of `count` keys -> to [steps, stride], a step being one key or a pair of them; zeros up to a whole vector of
// keys, and in columns up to `stride`.
template <Kind kKind>
inline void pack_values(const char* const* values, int64_t count, int64_t dtype, int64_t head_size, int64_t stride,
                        float* to) {
    if (kKind == Kind::kFloats) {
        for (int64_t k = 0; k < count; k++) load_row(to + k * stride, values[k], dtype, 0, head_size);
        std::memset(to + count * stride, 0, (padded(count) - count) * stride * 4);
        return;
    }
    static const uint16_t nothing[kLanes] = {};
    uint16_t part[2][kLanes] = {};
    for (int64_t k = 0; k < padded(count); k += 2) {
        for (int64_t d = 0; d < stride; d += kLanes) {
            const uint16_t* both[2];
            for (int i = 0; i < 2; i++) {
                both[i] = k + i < count ? reinterpret_cast<const uint16_t*>(values[k + i]) + d : nothing;
                if (d + kLanes > head_size && k + i < count) {
                    std::memcpy(part[i], both[i], (head_size - d) * 2);
                    both[i] = part[i];
                }
            }
            store(to + k / 2 * stride + d, (vf)(widen(both[0]) | (widen(both[1]) << 16)));
        }
    }
}

// sums [Rows, Vectors] += a [Rows, steps] x b [steps, Vectors * kLanes], all words; b(step, j) is vector j of a step.
template <Kind kKind, int Rows, int Vectors, class Matrix>
[[gnu::always_inline]] inline void multiply(const float* a, int64_t a_stride, int64_t first, int64_t last,
                                            const Matrix& b, vf (&sums)[Rows][Vectors]) {
    for (int64_t i = first; i < last; i++) {
        vf row[Vectors];
        for (int j = 0; j < Vectors; j++) row[j] = b(i, j);
        for (int r = 0; r < Rows; r++) {
            const vf x = splat(a[r * a_stride + i]);
            for (int j = 0; j < Vectors; j++) sums[r][j] = multiply_add<kKind>(x, row[j], sums[r][j]);
        }
    }
}

// Calls part.run<Rows, Vectors>(column) for columns [0, columns) in pieces as wide as the registers allow.
template <int Rows, class Part>
[[gnu::always_inline]] inline void in_pieces(int64_t columns, const Part& part) {
    constexpr int kRegisters = kLanes == 8 ? 16 : 32;
    constexpr int kWide = (Rows <= 2 ? 8 : 4) / (kRegisters / 16 == 1 ? 2 : 1);
    int64_t c = 0;
    for (; c + kWide * kLanes <= columns; c += kWide * kLanes) part.template run<Rows, kWide>(c);
    for (; c + 2 * kLanes <= columns; c += 2 * kLanes) part.template run<Rows, 2>(c);
    for (; c < columns; c += kLanes) part.template run<Rows, 1>(c);
}

}  // namespace tandem
