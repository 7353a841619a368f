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

inline vf select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
inline vf larger(vf a, vf b) { return select(a > b, a, b); }

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
    float out[4];
    sum4(a, a, a, a, out);
    return out[0];
}
inline float max_lane(vf a) {
    float best = a[0];
    for (int i = 1; i < kLanes; i++) best = a[i] > best ? a[i] : best;
    return best;
}

// e^x within 2 units in the last place; 0 below -87.3, infinity above 88.7, exactly 1 at 0. Cephes' polynomial.
inline vf exp(vf x) {
    const vi tiny = x < splat(-87.33654f), huge = x > splat(88.72283f);
    const vf z = select(tiny, splat(-87.33654f), select(huge, splat(88.72283f), x));
    const vf magic = splat(12582912.0f);  // adding it rounds to a whole number
    vf n = fma(z, splat(1.44269504088896341f), magic) - magic;
    n = select(n > splat(127.0f), splat(127.0f), n);
    vf r = fma(n, splat(-0.693359375f), z);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    const vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    const vf y = p * (vf)power;
    return select(tiny, vf{}, select(huge, splat(__builtin_inff()), y));
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
    const vf e = exp(x), u = e + splat(1.0f), rounded = u - splat(1.0f);
    const vi lost = rounded == vf{};  // 1 + e is 1
    const vf l = log(u) * (e / select(lost, splat(1.0f), rounded));
    return select(x > splat(20.0f), x, select(lost, e, l));
}

inline vf silu(vf x) { return x / (splat(1.0f) + exp(-x)); }

inline vf load_bf16(const uint16_t* p) {
    vh h;
    std::memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}
inline void store_bf16(uint16_t* p, vf v) {  // to the nearest, ties to even
    const vu u = (vu)v;
    const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const vu is_nan = (vu)(v != v);
    const vh h = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0u & is_nan), vh);
    std::memcpy(p, &h, sizeof h);
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
    if (int64_t(memory.size()) < num_floats + 16) memory.resize(num_floats + 16);
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((address + 63) & ~uintptr_t(63));
}

}  // namespace tandem
