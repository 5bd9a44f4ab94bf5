/* What this processor can run, as bits; kernels.def names them as the needs of a kernel. */
#ifndef CPU_FEATURES_H
#define CPU_FEATURES_H

#include <stdint.h>

#include "status.h"

/* FEATURE(id, bit, name): AVX2 includes FMA and F16C, AVX512 is F + BW + DQ + VL. */
#define CPU_FEATURES(FEATURE)              \
    FEATURE(AVX2, 0, "avx2")               \
    FEATURE(AVX512, 1, "avx512")           \
    FEATURE(AVX512_VNNI, 2, "avx512_vnni") \
    FEATURE(AVX512_BF16, 3, "avx512_bf16") \
    FEATURE(AVX512_FP16, 4, "avx512_fp16") \
    FEATURE(AMX_TILE, 5, "amx_tile")       \
    FEATURE(AMX_INT8, 6, "amx_int8")       \
    FEATURE(AMX_BF16, 7, "amx_bf16")       \
    FEATURE(NEON, 8, "neon")

#define FEATURE(id, bit, name) id = 1 << bit,
enum { CPU_FEATURES(FEATURE) };
#undef FEATURE

/* Bits of this machine, less what the environment variable FIDELTA_CPU caps. Zero (only scalar kernels) when the
   variable holds an unknown value; cpu_features_check() says so. */
uint64_t cpu_features(int device_id);

/* Name of bit i, NULL after the last. */
extern const char *const cpu_feature_names[];

/* BAD_VALUE when FIDELTA_CPU holds none of the known values. To be asked once, at import. */
Status cpu_features_check(Error *err);

#endif
