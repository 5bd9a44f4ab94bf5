/* What every isa_*.c needs before it sets its instruction set: the contract, and single numbers of
   each narrow type. */
#ifndef KERNEL_H
#define KERNEL_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "threads.h"

static inline int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float bf16_widen(uint16_t h)
{
    return float_of((uint32_t)h << 16);
}

/* To nearest even; a NaN stays one. */
static inline uint16_t bf16_round(float x)
{
    uint32_t u = bits_of(x);
    if (x != x)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline float f16_widen(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest < 0x400) /* zero or subnormal: in units of 2^-24 */
        return float_of(sign | bits_of((float)rest * 0x1p-24f));
    uint32_t bias = rest < 0x7c00 ? 112u << 23 : 224u << 23;
    return float_of(sign | ((rest << 13) + bias));
}

/* To nearest even; a NaN stays one, and what rounds past 65504 is infinite. */
static inline uint16_t f16_round(float x)
{
    uint32_t u = bits_of(x), sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (u >> 13 & 0x3ff));
    if (u >= 0x477ff000)
        return (uint16_t)(sign | 0x7c00);
    if (u < 0x38800000) /* subnormal: the last bit of 0.5 weighs 2^-24 */
        return (uint16_t)(sign | (bits_of(float_of(u) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((u + 0xfff + (u >> 13 & 1) - (112u << 23)) >> 13));
}

#endif
