/* AVX-512 F + BW + DQ + VL: 16 lanes. */
#include "kernel.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#define ISA_NAME(f) f##_avx512
#define VLEN 16
#define VREGS 32

typedef __m512 vec;

static inline vec vload(const float *p)
{
    return _mm512_loadu_ps(p);
}
static inline void vstore(float *p, vec v)
{
    _mm512_storeu_ps(p, v);
}
static inline __mmask16 first(int n)
{
    return (__mmask16)((1u << n) - 1);
}
static inline vec vload_part(const float *p, int n)
{
    return _mm512_maskz_loadu_ps(first(n), p);
}
static inline void vstore_part(float *p, vec v, int n)
{
    _mm512_mask_storeu_ps(p, first(n), v);
}
static inline vec vset(float x)
{
    return _mm512_set1_ps(x);
}
static inline vec vzero(void)
{
    return _mm512_setzero_ps();
}
static inline vec vadd(vec a, vec b)
{
    return _mm512_add_ps(a, b);
}
static inline vec vsub(vec a, vec b)
{
    return _mm512_sub_ps(a, b);
}
static inline vec vmul(vec a, vec b)
{
    return _mm512_mul_ps(a, b);
}
static inline vec vdiv(vec a, vec b)
{
    return _mm512_div_ps(a, b);
}
static inline vec vfma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}
static inline vec vfnma(vec a, vec b, vec c)
{
    return _mm512_fnmadd_ps(a, b, c);
}
static inline vec vmax(vec a, vec b)
{
    return _mm512_max_ps(a, b);
}
static inline vec vmin(vec a, vec b)
{
    return _mm512_min_ps(a, b);
}
static inline vec vround(vec a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vec vscale(vec a, vec n)
{
    return _mm512_scalef_ps(a, n);
}

static inline float vsum(vec v)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

static inline vec vload_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

static inline vec vload_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline void vstore_f16(uint16_t *p, vec v)
{
    _mm256_storeu_si256((__m256i *)p,
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline void vstore_bf16(uint16_t *p, vec v)
{
    __m512i u = _mm512_castps_si512(v), high = _mm512_srli_epi32(u, 16);
    __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(rounded));
}

#include "all.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
