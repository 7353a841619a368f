// Float vectors of the width that this CPU has, written once for every width.
//
// Everything is computed in float32. The library is compiled without floating-point contraction and without
// -ffast-math; where a fused multiply-add is wanted it is written as fma(). So the same expression gives the same bits
// wherever it is inlined, which the independence from chunk boundaries rests on.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace tandem {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vh __attribute__((vector_size(kLanes * 2)));

// Element types of tensors, as the Python side numbers them.
enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1 };

inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
inline int64_t item_bytes(int64_t dtype) { return dtype == kFloat32 ? 4 : 2; }

inline vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline vf splat(float x) { return x - vf{}; }

inline vf fma(vf a, vf b, vf c) {  // a * b + c
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

inline vf select(vi mask, vf a, vf b) { return mask ? a : b; }
inline vf larger(vf a, vf b) { return a > b ? a : b; }

// Transposes the square of kLanes vectors.
inline void transpose(vf* v) {
#if defined(__AVX512F__)
    for (int i = 0; i < 16; i += 2) {
        const vf a = v[i], b = v[i + 1];
        v[i] = _mm512_unpacklo_ps(a, b);
        v[i + 1] = _mm512_unpackhi_ps(a, b);
    }
    for (int i = 0; i < 16; i += 4) {  // now v[i + j], lane 4 q + k: rows i + k of column 4 q + j
        const __m512d a = _mm512_castps_pd(v[i]), b = _mm512_castps_pd(v[i + 1]);
        const __m512d c = _mm512_castps_pd(v[i + 2]), d = _mm512_castps_pd(v[i + 3]);
        v[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        v[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        v[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        v[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    for (int j = 0; j < 4; j++) {  // a transpose of 4 x 4 quarters
        const vf a = _mm512_shuffle_f32x4(v[j], v[j + 4], 0x44), b = _mm512_shuffle_f32x4(v[j], v[j + 4], 0xee);
        const vf c = _mm512_shuffle_f32x4(v[j + 8], v[j + 12], 0x44);
        const vf d = _mm512_shuffle_f32x4(v[j + 8], v[j + 12], 0xee);
        v[j] = _mm512_shuffle_f32x4(a, c, 0x88);
        v[j + 4] = _mm512_shuffle_f32x4(a, c, 0xdd);
        v[j + 8] = _mm512_shuffle_f32x4(b, d, 0x88);
        v[j + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
#elif defined(__AVX__)
    for (int i = 0; i < 8; i += 2) {
        const vf a = v[i], b = v[i + 1];
        v[i] = _mm256_unpacklo_ps(a, b);
        v[i + 1] = _mm256_unpackhi_ps(a, b);
    }
    for (int i = 0; i < 8; i += 4) {
        const vf a = v[i], b = v[i + 1], c = v[i + 2], d = v[i + 3];
        v[i] = _mm256_shuffle_ps(a, c, 0x44);
        v[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
        v[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
        v[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    for (int j = 0; j < 4; j++) {
        const vf a = v[j], b = v[j + 4];
        v[j] = _mm256_permute2f128_ps(a, b, 0x20);
        v[j + 4] = _mm256_permute2f128_ps(a, b, 0x31);
    }
#else
    for (int i = 0; i < kLanes; i++)
        for (int j = 0; j < i; j++) {
            const float x = v[i][j];
            v[i][j] = v[j][i];
            v[j][i] = x;
        }
#endif
}

// Sums of kLanes vectors, all in the same order of lanes: lane i of the result is the sum of v[i].
inline vf sums(const float* v) {
    vf each[kLanes];
    for (int i = 0; i < kLanes; i++) each[i] = load(v + i * kLanes);
    transpose(each);
    for (int n = kLanes / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) each[i] += each[i + n];
    return each[0];
}

// Sums of four vectors, each in the same fixed order of its lanes.
inline void sum4(vf a, vf b, vf c, vf d, float* out) {
#if defined(__AVX__)
#if defined(__AVX512F__)
    const auto fold = [](vf v) {
        return _mm256_add_ps(_mm512_castps512_ps256(v),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
    };
    const __m256 e = fold(a), f = fold(b), g = fold(c), h = fold(d);
#else
    const __m256 e = a, f = b, g = c, h = d;
#endif
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(e, f), _mm256_hadd_ps(g, h));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    const vf* all[4] = {&a, &b, &c, &d};
    for (int i = 0; i < 4; i++) out[i] = ((*all[i])[0] + (*all[i])[1]) + ((*all[i])[2] + (*all[i])[3]);
#endif
}
inline float sum(vf a) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(a);
#else
    float out[4];
    sum4(a, a, a, a, out);
    return out[0];
#endif
}
inline float max_lane(vf a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(a);
#else
    float best = a[0];
    for (int i = 1; i < kLanes; i++) best = a[i] > best ? a[i] : best;
    return best;
#endif
}

// To the nearest whole number; |x| < 2^22.
inline vf rounded(vf x) {
#if defined(__AVX512F__)
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const vf magic = splat(12582912.0f);
    return x + magic - magic;
#endif
}
// p * 2^n, n whole and -126 <= n <= 128.
inline vf scaled(vf p, vf n) {
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, n);
#else
    const vf half = rounded(n * splat(0.5f));  // in two factors: 2^128 alone is infinite
    const auto power = [](vf x) { return (vf)((__builtin_convertvector(x, vi) + 127) << 23); };
    return p * power(half) * power(n - half);
#endif
}

// e^x within 2 units in the last place; 0 below -87.3, infinity above 88.7, exactly 1 at 0. Cephes' polynomial.
inline vf exp(vf x) {
    const vi tiny = x < splat(-87.33654f), huge = x > splat(88.72283f);
    const vf z = select(tiny, vf{}, select(huge, splat(88.72283f), x));
    const vf n = rounded(z * splat(1.44269504088896341f));
    vf r = fma(n, splat(-0.693359375f), z);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    return select(tiny, vf{}, select(huge, splat(__builtin_inff()), scaled(p, n)));
}

// 2^x for |x| <= 0.5. Cephes' polynomial.
inline vf exp2_part(vf x) {
    vf p = splat(1.535336188319500e-4f);
    p = fma(p, x, splat(1.339887440266574e-3f));
    p = fma(p, x, splat(9.618437357674640e-3f));
    p = fma(p, x, splat(5.550332471162809e-2f));
    p = fma(p, x, splat(2.402264791363012e-1f));
    p = fma(p, x, splat(6.931472028550421e-1f));
    return fma(p, x, splat(1.0f));
}

// 2^x for x <= 0 within 2 units in the last place, 0 below -126.
inline vf exp2_negative(vf x) {
    const vi tiny = x < splat(-126.0f);
    const vf z = select(tiny, vf{}, x), n = rounded(z);
    return select(tiny, vf{}, scaled(exp2_part(z - n), n));
}

// Natural logarithm of a normal number >= 1. Cephes' polynomial.
inline vf log(vf x) {
    const vi bits = (vi)x;
    vf e = __builtin_convertvector(((bits >> 23) & 0xff) - 126, vf);
    vf m = (vf)((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
    const vi small = m < splat(0.707106781186547524f);
    e = e - select(small, splat(1.0f), vf{});
    m = m - splat(1.0f) + select(small, m, vf{});
    vf p = splat(7.0376836292e-2f);
    p = fma(p, m, splat(-1.1514610310e-1f));
    p = fma(p, m, splat(1.1676998740e-1f));
    p = fma(p, m, splat(-1.2420140846e-1f));
    p = fma(p, m, splat(1.4249322787e-1f));
    p = fma(p, m, splat(-1.6668057665e-1f));
    p = fma(p, m, splat(2.0000714765e-1f));
    p = fma(p, m, splat(-2.4999993993e-1f));
    p = fma(p, m, splat(3.3333331174e-1f));
    vf y = p * m * (m * m);
    y = fma(e, splat(-2.12194440e-4f), y);
    y = fma(m * m, splat(-0.5f), y);
    return fma(e, splat(0.693359375f), m + y);
}

// log(1 + e^x), and x itself above 20 as in torch.
inline vf softplus(vf x) {
    const vf e = exp(x), u = e + splat(1.0f), added = u - splat(1.0f);
    const vi lost = added == vf{};  // 1 + e is 1
    const vf l = log(u) * (e / select(lost, splat(1.0f), added));
    return select(x > splat(20.0f), x, select(lost, e, l));
}

// 1 / (1 + e^-x) within 3 units in the last place for |x| <= 87, beyond that as at 87; NaN stays NaN.
inline vf sigmoid(vf x) {
#if defined(__AVX512F__)  // half the instructions of the general form, and no division
    // The limits come first: of a NaN and a number these give the second.
    const __m512 y = _mm512_max_ps(_mm512_set1_ps(-87.0f), _mm512_min_ps(_mm512_set1_ps(87.0f), x));
    const vf n = rounded(y * splat(-1.44269504088896341f));
    const vf r = fma(y, splat(-1.925963033500e-8f), fma(y, splat(-1.44269502162933350f), -n));
    const vf e = scaled(exp2_part(r), n) + splat(1.0f), guess = _mm512_rcp14_ps(e);
    return fma(guess, fma(-e, guess, splat(1.0f)), guess);
#else
    return splat(1.0f) / (splat(1.0f) + exp(-x));
#endif
}
inline vf silu(vf x) { return x * sigmoid(x); }

inline vu widen(const uint16_t* p) {
#if defined(__AVX512F__)  // gcc 12 makes four instructions of the general form
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    vh h;
    std::memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, vu);
#endif
}
inline vf load_bf16(const uint16_t* p) { return (vf)(widen(p) << 16); }
inline vh to_bf16(vf v) {  // to the nearest, ties to even
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh(v);
#else
    const vu u = (vu)v;
    const vu nearest = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const vu is_nan = (vu)(v != v);
    return __builtin_convertvector((nearest & ~is_nan) | (0x7fc0u & is_nan), vh);
#endif
}
inline void store_bf16(uint16_t* p, vf v) {
    const vh h = to_bf16(v);
    std::memcpy(p, &h, sizeof h);
}
inline vf rounded_to_bf16(vf v) {
    uint16_t h[kLanes];
    store_bf16(h, v);
    return load_bf16(h);
}

inline float load_one(const void* base, int64_t dtype, int64_t i) {
    if (dtype == kFloat32) return static_cast<const float*>(base)[i];
    const uint32_t bits = uint32_t(static_cast<const uint16_t*>(base)[i]) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// n elements from index i on -> out[0, padded(n)), zeros behind.
inline void load_row(float* out, const void* base, int64_t dtype, int64_t i, int64_t n) {
    int64_t j = 0;
    if (dtype == kFloat32) {
        const float* p = static_cast<const float*>(base) + i;
        for (; j + kLanes <= n; j += kLanes) store(out + j, load(p + j));
    } else {
        const uint16_t* p = static_cast<const uint16_t*>(base) + i;
        for (; j + kLanes <= n; j += kLanes) store(out + j, load_bf16(p + j));
    }
    if (j < n) {
        store(out + j, vf{});
        for (; j < n; j++) out[j] = load_one(base, dtype, i + j);
    }
}

// Asks for n elements from index i on ahead of their use: rows of one head lie pages apart, where no hardware
// prefetcher follows.
inline void prefetch_row(const void* base, int64_t dtype, int64_t i, int64_t n) {
    const char* p = static_cast<const char*>(base) + i * item_bytes(dtype);
    for (int64_t j = 0; j < n * item_bytes(dtype); j += 64) __builtin_prefetch(p + j);
    asm volatile("" ::"r"(p));  // gcc drops calls of functions that only prefetch: they seem to have no effect
}

// in[0, padded(n)) -> n elements from index i on.
inline void store_row(void* base, int64_t dtype, int64_t i, const float* in, int64_t n) {
    if (dtype == kFloat32) {
        std::memcpy(static_cast<float*>(base) + i, in, n * 4);
        return;
    }
    uint16_t* p = static_cast<uint16_t*>(base) + i;
    int64_t j = 0;
    for (; j + kLanes <= n; j += kLanes) store_bf16(p + j, load(in + j));
    if (j < n) {
        uint16_t rest[kLanes];
        store_bf16(rest, load(in + j));
        std::memcpy(p + j, rest, (n - j) * 2);
    }
}

// Memory of the calling thread that lives until its next call of scratch(); 64 bytes aligned.
inline float* scratch(int64_t num_floats) {
    static thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < num_floats + 16) {
        std::vector<float>().swap(memory);  // its contents are nobody's: not copied, nor there beside the larger one
        memory.resize(num_floats + 16);
    }
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((address + 63) & ~uintptr_t(63));
}

}  // namespace tandem
