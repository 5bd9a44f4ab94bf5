/* NEON of aarch64: 4 lanes. */
#include "kernel.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#define ISA_NAME(f) f##_neon
#define VLEN 4
#define VREGS 32

typedef float32x4_t vec;

static inline vec vload(const float *p)
{
    return vld1q_f32(p);
}
static inline void vstore(float *p, vec v)
{
    vst1q_f32(p, v);
}

static inline vec vload_part(const float *p, int n)
{
    float lanes[4] = {0, 0, 0, 0};
    for (int i = 0; i < n; i++)
        lanes[i] = p[i];
    return vld1q_f32(lanes);
}

static inline void vstore_part(float *p, vec v, int n)
{
    float lanes[4];
    vst1q_f32(lanes, v);
    for (int i = 0; i < n; i++)
        p[i] = lanes[i];
}

static inline vec vset(float x)
{
    return vdupq_n_f32(x);
}
static inline vec vzero(void)
{
    return vdupq_n_f32(0);
}
static inline vec vadd(vec a, vec b)
{
    return vaddq_f32(a, b);
}
static inline vec vsub(vec a, vec b)
{
    return vsubq_f32(a, b);
}
static inline vec vmul(vec a, vec b)
{
    return vmulq_f32(a, b);
}
static inline vec vdiv(vec a, vec b)
{
    return vdivq_f32(a, b);
}
static inline vec vfma(vec a, vec b, vec c)
{
    return vfmaq_f32(c, a, b);
}
static inline vec vfnma(vec a, vec b, vec c)
{
    return vfmsq_f32(c, a, b);
}
static inline vec vmax(vec a, vec b)
{
    return vmaxq_f32(a, b);
}
static inline vec vmin(vec a, vec b)
{
    return vminq_f32(a, b);
}
static inline vec vround(vec a)
{
    return vrndnq_f32(a);
}

static inline vec vpow2(int32x4_t n)
{
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}

/* In two factors, so that both are normal numbers for n in -252 .. 254. */
static inline vec vscale(vec a, vec n)
{
    int32x4_t whole = vcvtnq_s32_f32(n), half = vshrq_n_s32(whole, 1);
    return vmul(vmul(a, vpow2(half)), vpow2(vsubq_s32(whole, half)));
}

static inline float vsum(vec v)
{
    float32x2_t pair = vadd_f32(vget_low_f32(v), vget_high_f32(v));
    return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}

static inline vec vload_f16(const uint16_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
static inline vec vload_bf16(const uint16_t *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
static inline void vstore_f16(uint16_t *p, vec v)
{
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v)));
}

static inline void vstore_bf16(uint16_t *p, vec v)
{
    uint32x4_t u = vreinterpretq_u32_f32(v), high = vshrq_n_u32(u, 16);
    uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
    uint32x4_t rounded = vshrq_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    uint32x4_t number = vceqq_f32(v, v);
    vst1_u16(p, vmovn_u32(vbslq_u32(number, rounded, vorrq_u32(high, vdupq_n_u32(0x40)))));
}

#include "all.inc"

#endif
