/* The CPU backend: kernels.def as one table an op. */
#include <pthread.h>

#include "cpu_features.h"
#include "registry.h"

/* A variant of another architecture has no code here, so its rows vanish. */
#if defined(__x86_64__)
#define ON_avx512(row) row
#define ON_avx2(row) row
#define ON_neon(row)
#elif defined(__aarch64__)
#define ON_avx512(row)
#define ON_avx2(row)
#define ON_neon(row) row
#else
#define ON_avx512(row)
#define ON_avx2(row)
#define ON_neon(row)
#endif
#define ON_scalar(row) row

#define KERNEL(op, variant, needs) \
    ON_##variant(Status op##_##variant(const void *args, Error *err);)
#include "kernels.def"
#undef KERNEL

typedef struct {
    OpId op;
    Kernel kernel;
} Row;

#define BRACED(...) {__VA_ARGS__},
#define KERNEL_ROW(op, variant, needs) BRACED(OP_##op, {#variant, needs, NULL, op##_##variant})
#define KERNEL(op, variant, needs) ON_##variant(KERNEL_ROW(op, variant, needs))
static const Row rows[] = {
#include "kernels.def"
};
#undef KERNEL

enum { ROWS = sizeof rows / sizeof rows[0] };

static Kernel kernels[ROWS];
static Backend backend;
static pthread_once_t made = PTHREAD_ONCE_INIT;

/* Rows of one op stand together in kernels.def. */
static void backend_make(void)
{
    backend.abi = BACKEND_ABI;
    backend.device_type = DEVICE_CPU;
    backend.name = "cpu";
    backend.features = cpu_features;
    backend.feature_names = cpu_feature_names;
    backend.check = cpu_features_check;
    for (int i = 0; i < ROWS; i++) {
        KernelTable *table = &backend.tables[rows[i].op];
        kernels[i] = rows[i].kernel;
        if (!table->rows)
            table->rows = &kernels[i];
        table->count++;
    }
}

const Backend *cpu_backend(void)
{
    pthread_once(&made, backend_make);
    return &backend;
}
