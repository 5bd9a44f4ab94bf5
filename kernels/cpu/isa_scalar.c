/* Any machine: 4 lanes of the compiler's own vector type, no intrinsics, vfma rounds twice. */
#include "kernel.h"

#define ISA_NAME(f) f##_scalar
#define VLEN 4
#define VREGS 16

typedef float vec __attribute__((vector_size(16)));

static inline vec vload(const float *p)
{
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void vstore(float *p, vec v)
{
    memcpy(p, &v, sizeof v);
}

static inline vec vload_part(const float *p, int n)
{
    vec v = {0, 0, 0, 0};
    for (int i = 0; i < n; i++)
        v[i] = p[i];
    return v;
}

static inline void vstore_part(float *p, vec v, int n)
{
    for (int i = 0; i < n; i++)
        p[i] = v[i];
}

static inline vec vset(float x)
{
    return (vec){x, x, x, x};
}
static inline vec vzero(void)
{
    return (vec){0, 0, 0, 0};
}
static inline vec vadd(vec a, vec b)
{
    return a + b;
}
static inline vec vsub(vec a, vec b)
{
    return a - b;
}
static inline vec vmul(vec a, vec b)
{
    return a * b;
}
static inline vec vdiv(vec a, vec b)
{
    return a / b;
}
static inline vec vfma(vec a, vec b, vec c)
{
    return a * b + c;
}
static inline vec vfnma(vec a, vec b, vec c)
{
    return c - a * b;
}

/* With a NaN, the second. */
static inline vec vmax(vec a, vec b)
{
    for (int i = 0; i < VLEN; i++)
        b[i] = a[i] > b[i] ? a[i] : b[i];
    return b;
}

static inline vec vmin(vec a, vec b)
{
    for (int i = 0; i < VLEN; i++)
        b[i] = a[i] < b[i] ? a[i] : b[i];
    return b;
}

/* To the nearest whole number, for |a| < 2^22: adding 1.5 * 2^23 leaves no fraction bits. */
static inline vec vround(vec a)
{
    return a + vset(12582912.0f) - vset(12582912.0f);
}

static inline float pow2(int n)
{
    uint32_t bits = (uint32_t)(n + 127) << 23;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* In two factors, so that both are normal numbers for n in -252 .. 254. A NaN in n comes with a NaN in a. */
static inline vec vscale(vec a, vec n)
{
    for (int i = 0; i < VLEN; i++) {
        int whole = n[i] == n[i] ? (int)n[i] : 0, half = whole / 2;
        a[i] = a[i] * pow2(half) * pow2(whole - half);
    }
    return a;
}

static inline float vsum(vec v)
{
    return (v[0] + v[2]) + (v[1] + v[3]);
}

static inline vec vload_f16(const uint16_t *p)
{
    return (vec){f16_widen(p[0]), f16_widen(p[1]), f16_widen(p[2]), f16_widen(p[3])};
}
static inline vec vload_bf16(const uint16_t *p)
{
    return (vec){bf16_widen(p[0]), bf16_widen(p[1]), bf16_widen(p[2]), bf16_widen(p[3])};
}

static inline void vstore_f16(uint16_t *p, vec v)
{
    for (int i = 0; i < VLEN; i++)
        p[i] = f16_round(v[i]);
}

static inline void vstore_bf16(uint16_t *p, vec v)
{
    for (int i = 0; i < VLEN; i++)
        p[i] = bf16_round(v[i]);
}

#include "all.inc"
