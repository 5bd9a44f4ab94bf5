/* AVX2 + FMA + F16C: 8 lanes. */
#include "kernel.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define ISA_NAME(f) f##_avx2
#define VLEN 8
#define VREGS 16

typedef __m256 vec;

static inline __m256i first(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline vec vload(const float *p)
{
    return _mm256_loadu_ps(p);
}
static inline void vstore(float *p, vec v)
{
    _mm256_storeu_ps(p, v);
}
static inline vec vload_part(const float *p, int n)
{
    return _mm256_maskload_ps(p, first(n));
}
static inline void vstore_part(float *p, vec v, int n)
{
    _mm256_maskstore_ps(p, first(n), v);
}
static inline vec vset(float x)
{
    return _mm256_set1_ps(x);
}
static inline vec vzero(void)
{
    return _mm256_setzero_ps();
}
static inline vec vadd(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}
static inline vec vsub(vec a, vec b)
{
    return _mm256_sub_ps(a, b);
}
static inline vec vmul(vec a, vec b)
{
    return _mm256_mul_ps(a, b);
}
static inline vec vdiv(vec a, vec b)
{
    return _mm256_div_ps(a, b);
}
static inline vec vfma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}
static inline vec vfnma(vec a, vec b, vec c)
{
    return _mm256_fnmadd_ps(a, b, c);
}
static inline vec vmax(vec a, vec b)
{
    return _mm256_max_ps(a, b);
}
static inline vec vmin(vec a, vec b)
{
    return _mm256_min_ps(a, b);
}
static inline vec vround(vec a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline vec vpow2(__m256i n)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

/* In two factors, so that both are normal numbers for n in -252 .. 254. */
static inline vec vscale(vec a, vec n)
{
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    return vmul(vmul(a, vpow2(half)), vpow2(_mm256_sub_epi32(whole, half)));
}

static inline float vsum(vec v)
{
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

static inline vec vload_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

static inline vec vload_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline void vstore_f16(uint16_t *p, vec v)
{
    _mm_storeu_si128((__m128i *)p,
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline void vstore_bf16(uint16_t *p, vec v)
{
    __m256i u = _mm256_castps_si256(v), high = _mm256_srli_epi32(u, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}

#include "all.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
