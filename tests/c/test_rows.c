/* What every kernel stands on, for each variant this machine can run: all 65536 numbers of both narrow types in, all
   roundings out, and the gates over the whole range of exp. Through linear (one output: x 1) and gdn_gate. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel.h"
#include "registry.h"

enum { COUNT = 1 << 16 };

static Tensor matrix(void *data, DType type, int64_t rows, int64_t columns)
{
    Tensor t = {.data = data, .given = 1, .ndim = 2, .dtype = type, .device = {DEVICE_CPU, 0}};
    t.shape[0] = rows;
    t.shape[1] = columns;
    t.stride[0] = columns;
    t.stride[1] = 1;
    return t;
}

static int same(float a, float b)
{
    return (a != a && b != b) || memcmp(&a, &b, sizeof a) == 0;
}

/* y = x . (1, 2^-12), where x are pairs of narrow numbers. In float32 the sum is rounded once, then to the type. */
static int rounding_test(const Kernel *kernel, DType type, uint32_t seed)
{
    static uint16_t x[COUNT][2], y[COUNT];
    static float weight[2] = {1, 0x1p-12f};
    for (int i = 0; i < COUNT; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i][0] = (uint16_t)i;
        x[i][1] = (uint16_t)(seed >> 16);
    }
    linear_args a = {.call = {.num_threads = 2}, .N = 1, .K = 2};
    a.x = matrix(x, type, COUNT, 2);
    a.weight = matrix(weight, F32, 1, 2);
    a.y = matrix(y, type, COUNT, 1);
    Error err;
    if (kernel->run(&a, &err) != OK)
        return 1;
    for (int i = 0; i < COUNT; i++) {
        float p = type == BF16 ? bf16_widen(x[i][0]) : f16_widen(x[i][0]);
        float q = type == BF16 ? bf16_widen(x[i][1]) : f16_widen(x[i][1]);
        float sum = p + q * 0x1p-12f;
        uint16_t want = type == BF16 ? bf16_round(sum) : f16_round(sum);
        float got = type == BF16 ? bf16_widen(y[i]) : f16_widen(y[i]);
        if (!same(got, type == BF16 ? bf16_widen(want) : f16_widen(want)) && got != 0) {
            printf("%s, type %d: %g + %g gave %g\n", kernel->variant, type, p, q, got);
            return 1;
        }
    }
    return 0;
}

/* Eight numbers a row, so that whole vectors are loaded, and the same numbers one a row, so that parts are. */
static int widening_test(const Kernel *kernel, DType type)
{
    static uint16_t x[COUNT];
    static float y[COUNT], one[1] = {1};
    for (int i = 0; i < COUNT; i++)
        x[i] = (uint16_t)i;
    linear_args a = {.call = {.num_threads = 2}, .N = COUNT, .K = 1};
    a.x = matrix(one, F32, 1, 1);
    a.weight = matrix(x, type, COUNT, 1);
    a.y = matrix(y, F32, 1, COUNT);
    Error err;
    if (kernel->run(&a, &err) != OK)
        return 1;
    for (int i = 0; i < COUNT; i++) {
        float want = type == BF16 ? bf16_widen(x[i]) : f16_widen(x[i]);
        if (!same(y[i], want) && !(y[i] == 0 && want == 0)) {
            printf("%s, type %d: %x gave %g\n", kernel->variant, type, x[i], y[i]);
            return 1;
        }
    }
    return 0;
}

/* Whole vectors of narrow a and b into gdn_gate: loads in full width, and exp at every size. */
static int gate_test(const Kernel *kernel, DType type)
{
    enum { HV = 256 };
    static uint16_t x[COUNT], zero[HV];
    static float g[COUNT], beta[COUNT];
    for (int i = 0; i < COUNT; i++)
        x[i] = (uint16_t)i;
    gdn_gate_args a = {.call = {.num_threads = 1}, .HV = HV};
    a.a = a.b = matrix(x, type, COUNT / HV, HV);
    a.A_log = a.dt_bias = matrix(zero, type, 1, HV);
    a.A_log.ndim = a.dt_bias.ndim = 1;
    a.A_log.stride[0] = a.dt_bias.stride[0] = 1;
    a.g = matrix(g, F32, COUNT / HV, HV);
    a.beta = matrix(beta, F32, COUNT / HV, HV);
    Error err;
    if (kernel->run(&a, &err) != OK)
        return 1;
    for (int i = 0; i < COUNT; i++) {
        double v = type == BF16 ? bf16_widen(x[i]) : f16_widen(x[i]);
        double want_g = v > 40 ? -v : -log1p(exp(v)), want_beta = 1 / (1 + exp(-v));
        int good = v != v     ? g[i] != g[i] && beta[i] != beta[i]
                   : isinf(v) ? beta[i] == (v > 0) && (v > 0 ? isinf(g[i]) : g[i] == 0)
                              : fabs(g[i] - want_g) <= 4e-7 * fabs(want_g) + 1e-37 &&
                                    fabs(beta[i] - want_beta) <= 4e-7 * want_beta + 1e-37;
        if (!good) {
            printf("%s, type %d: %g gave g %.9g, beta %.9g\n", kernel->variant, type, v, g[i],
                   beta[i]);
            return 1;
        }
    }
    return 0;
}

int main(void)
{
    const Backend *backend = cpu_backend();
    const KernelTable *linear = &backend->tables[OP_linear], *gates = &backend->tables[OP_gdn_gate];
    int failed = 0, tried = 0;
    for (int i = 0; i < linear->count; i++) {
        if (linear->rows[i].needs & ~backend->features(0))
            continue;
        for (DType type = F16; type <= BF16; type++, tried++) {
            failed += widening_test(&linear->rows[i], type) + gate_test(&gates->rows[i], type);
            for (uint32_t seed = 1; seed <= 8; seed++)
                failed += rounding_test(&linear->rows[i], type, seed);
        }
    }
    printf("test_rows: %d variants and types, %d failed\n", tried, failed);
    return failed != 0;
}
