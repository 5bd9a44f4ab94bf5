/* cpuid says what the processor has, xgetbv what the system saves on a task switch: a feature needs both.
   __builtin_cpu_supports is not used: clang 14 does not know "f16c". */
#include "cpu_features.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define FEATURE(id, bit, name) name,
const char *const cpu_feature_names[] = {CPU_FEATURES(FEATURE) NULL};
#undef FEATURE

typedef struct {
    const char *name;
    uint64_t keep;
} Cap;

static const Cap caps[] = {
    {"scalar", 0},
#if defined(__x86_64__)
    {"avx2", AVX2},
    {"avx512", AVX2 | AVX512},
    {"avx512_vnni", AVX2 | AVX512 | AVX512_VNNI},
    {"avx512_bf16", AVX2 | AVX512 | AVX512_VNNI | AVX512_BF16},
    {"amx", ~(uint64_t)0},
#elif defined(__aarch64__)
    {"neon", NEON},
#endif
};

enum { CAPS = sizeof caps / sizeof caps[0] };

#if defined(__x86_64__)

static uint64_t saved_state(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static uint64_t has(uint32_t word, int bit, uint64_t feature)
{
    return word >> bit & 1 ? feature : 0;
}

static uint64_t detect(void)
{
    enum { YMM = 0x6, ZMM = 0xe6, TILES = 0x60000 };
    uint32_t a, b, c, d, b7 = 0, c7 = 0, d7 = 0, a71 = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) /* OSXSAVE */
        return 0;
    int fma = c >> 12 & 1, f16c = c >> 29 & 1;
    if (__get_cpuid_count(7, 0, &a, &b7, &c7, &d7) && a >= 1)
        __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    uint64_t saved = saved_state(), bits = 0;
    if ((saved & YMM) != YMM || !fma || !f16c || !(b7 >> 5 & 1))
        return 0;
    bits |= AVX2;
    uint32_t avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F DQ BW VL */
    if ((saved & ZMM) != ZMM || (b7 & avx512) != avx512)
        return bits;
    bits |= AVX512 | has(c7, 11, AVX512_VNNI) | has(a71, 5, AVX512_BF16) | has(d7, 23, AVX512_FP16);
    if ((saved & TILES) == TILES)
        bits |= has(d7, 24, AMX_TILE) | has(d7, 25, AMX_INT8) | has(d7, 22, AMX_BF16);
    return bits;
}

#elif defined(__aarch64__)

static uint64_t detect(void)
{
    return NEON; /* every aarch64 has it */
}

#else

static uint64_t detect(void)
{
    return 0;
}

#endif

/* The row of the variable's value; NULL when it is not set, empty or unknown. */
static const Cap *cap_find(const char *value)
{
    for (int i = 0; value && i < CAPS; i++)
        if (strcmp(value, caps[i].name) == 0)
            return &caps[i];
    return NULL;
}

static const char *cap_value(void)
{
    const char *value = getenv("FIDELTA_CPU");
    return value && *value ? value : NULL;
}

/* Asked once, at import: in a virtual machine each cpuid is a trap of some ten microseconds, and a later change of the
   environment must not move calls to other kernels. Threads that race write the same. */
uint64_t cpu_features(int device_id)
{
    static _Atomic uint64_t known;
    static const uint64_t ASKED = (uint64_t)1 << 63;
    (void)device_id;
    uint64_t bits = known;
    if (!bits) {
        const char *value = cap_value();
        const Cap *cap = cap_find(value);
        bits = value && !cap ? 0 : cap ? detect() & cap->keep : detect();
        known = bits |= ASKED;
    }
    return bits & ~ASKED;
}

Status cpu_features_check(Error *err)
{
    const char *value = cap_value();
    if (!value || cap_find(value)) {
        cpu_features(0);
        return OK;
    }
    char known[128] = "";
    for (int i = 0; i < CAPS; i++) {
        strcat(known, i ? ", " : "");
        strcat(known, caps[i].name);
    }
    return fail(err, BAD_VALUE, "environment variable FIDELTA_CPU is \"%s\"; expected one of %s",
                value, known);
}
