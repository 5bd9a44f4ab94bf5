/* Every kernel of the CPU table that this machine can run, against the scalar one of its op, on inputs made from the
   rows of formats.h. Without Python, so it runs under sanitizers and, cross-compiled, under an emulator: each tensor
   has exactly its own memory, and outputs start as NaN. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "extent.h"
#include "registry.h"
#include "spec.h"

enum { MAX_BYTES = 1 << 14 };

static uint32_t seed = 1;

static float uniform(void)
{
    seed = seed * 1664525u + 1013904223u;
    return (float)(seed >> 8) * 0x1p-24f;
}

static uint16_t narrow(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x8000) >> 16);
}

static float read(const Tensor *t, int64_t i)
{
    if (t->dtype == F32)
        return ((const float *)t->data)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)t->data)[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void write(Tensor *t, int64_t i, float x)
{
    if (t->dtype == F32)
        ((float *)t->data)[i] = x;
    else
        ((uint16_t *)t->data)[i] = narrow(x);
}

static int64_t elements(const Tensor *t)
{
    int64_t count = 1;
    for (int i = 0; i < t->ndim; i++)
        count *= t->shape[i];
    return count;
}

/* The sizes of one case, by the name of the dim; leading axes of a `*` shape are one of 5. */
typedef struct {
    const char *name;
    int64_t value;
} Size;

typedef struct {
    OpId op;
    const char *given; /* optional arguments, each between blanks */
    Size size[12];
} Case;

static int64_t size_of(const Case *c, const char *name)
{
    for (int i = 0; i < 12 && c->size[i].name; i++)
        if (!strcmp(c->size[i].name, name))
            return c->size[i].value;
    return 1;
}

static int is_given(const Case *c, const Arg *arg)
{
    char word[64];
    snprintf(word, sizeof word, " %s ", arg->row->name);
    return arg->role == IN || arg->role == OUT || arg->role == INOUT || strstr(c->given, word);
}

/* A dense tensor of the arg's shape, filled with what its meaning allows. */
static void tensor_make(const Case *c, const Spec *spec, int n, DType narrow_type, Tensor *t)
{
    const Arg *arg = &spec->arg[n];
    int64_t dim[MAX_DIMS];
    for (int i = 0; i < spec->dims; i++)
        dim[i] = size_of(c, spec->dim[i]->name);
    *t = (Tensor){.given = 1, .device = {DEVICE_CPU, 0}};
    if (arg->shape.star)
        t->shape[t->ndim++] = 5;
    for (int i = 0; i < arg->shape.count; i++)
        if (!extent_value(&arg->shape.extent[i], dim, &t->shape[t->ndim++]))
            abort();
    int64_t step = 1;
    for (int i = t->ndim - 1; i >= 0; i--, step *= t->shape[i + 1])
        t->stride[i] = step;
    t->dtype = F32;
    if (arg->dtypes >> narrow_type & 1 && strncmp(arg->row->name, "A_log", 5))
        t->dtype = narrow_type;
    if (arg->same_as >= 0 && !(arg->dtypes >> F32 & 1))
        t->dtype = arg_tensor(spec, (const char *)t - arg->at, arg->same_as)->dtype;
    int64_t count = elements(t);
    t->data = malloc((size_t)count * (size_t)DTYPE_SIZE[t->dtype] + !count);
    int key = !strcmp(arg->row->name, "q") || !strcmp(arg->row->name, "k");
    for (int64_t i = 0; i < count; i++) {
        float x = 2 * uniform() - 1;
        if (arg->role == OUT || arg->role == OUT_OPT)
            x = NAN;
        else if (!strcmp(arg->row->name, "g"))
            x = -0.5f * uniform();
        else if (!strcmp(arg->row->name, "beta") || !strcmp(arg->row->name, "A_log"))
            x = uniform();
        else if (key)
            x *= sqrtf(3.0f / (float)t->shape[t->ndim - 1]);
        write(t, i, x);
    }
}

static Tensor copy(const Spec *spec, const Tensor *t)
{
    (void)spec;
    Tensor other = *t;
    size_t bytes = (size_t)elements(t) * (size_t)DTYPE_SIZE[t->dtype];
    other.data = malloc(bytes + !bytes);
    memcpy(other.data, t->data, bytes);
    return other;
}

/* Relative root mean square difference; infinite when either is not finite. */
static double difference(const Tensor *a, const Tensor *b)
{
    double size = 0, miss = 0;
    for (int64_t i = 0; i < elements(a); i++) {
        double x = read(a, i), y = read(b, i);
        if (!isfinite(x) || !isfinite(y))
            return INFINITY;
        size += y * y;
        miss += (x - y) * (x - y);
    }
    return sqrt(miss / (size > 0 ? size : 1));
}

static int variant_test(const Case *c, const Spec *spec, const Kernel *kernel, const void *inputs,
                        const void *expected, int threads)
{
    _Alignas(16) char args[MAX_BYTES];
    Error err = {OK, ""};
    memcpy(args, inputs, spec->size);
    ((Call *)args)->num_threads = threads;
    for (int n = 0; n < spec->args; n++)
        if (arg_tensor(spec, args, n)->given)
            *arg_tensor(spec, args, n) = copy(spec, arg_tensor(spec, inputs, n));
    int failed = 0;
    if (spec_check(spec, args, &err) != OK || kernel->run(args, &err) != OK) {
        printf("%s %s: %s\n", spec->name, kernel->variant, err.text);
        failed = 1;
    }
    for (int n = 0; n < spec->args; n++) {
        Tensor *t = arg_tensor(spec, args, n), *input = (Tensor *)arg_tensor(spec, inputs, n);
        if (!t->given)
            continue;
        double limit = t->dtype == F32 ? 2e-6 : 5e-3, miss;
        if (spec->arg[n].role < OUT)
            miss = memcmp(t->data, input->data, (size_t)elements(t) * (size_t)DTYPE_SIZE[t->dtype])
                       ? INFINITY
                       : 0;
        else
            miss = expected ? difference(t, arg_tensor(spec, expected, n)) : difference(t, t);
        if (!failed && !(miss <= limit)) {
            printf("%s %s, %d threads: %s differs by %g (given:%s)\n", spec->name, kernel->variant,
                   threads, spec->arg[n].row->name, miss, c->given);
            failed = 1;
        }
        if (expected)
            free(t->data);
        else
            *input = *t; /* the scalar kernel's results stay, as what is expected */
    }
    return failed;
}

static void tensors_free(const Spec *spec, const void *args)
{
    for (int n = 0; n < spec->args; n++)
        if (arg_tensor(spec, args, n)->given)
            free(arg_tensor(spec, args, n)->data);
}

static int case_test(const Case *c, DType narrow_type)
{
    static Spec spec;
    Error err = {OK, ""};
    if (spec_compile(c->op, &spec, &err) != OK || spec.size > MAX_BYTES) {
        printf("spec_compile: %s\n", err.text);
        return 1;
    }
    _Alignas(16) char inputs[MAX_BYTES] = {0}, expected[MAX_BYTES];
    spec_defaults(&spec, inputs);
    for (int n = 0; n < spec.args; n++)
        if (is_given(c, &spec.arg[n]))
            tensor_make(c, &spec, n, narrow_type, arg_tensor(&spec, inputs, n));
    const KernelTable *table = &cpu_backend()->tables[c->op];
    if (table->count == 0) {
        printf("%s: no kernels\n", spec.name);
        tensors_free(&spec, inputs);
        return 1;
    }
    uint64_t features = cpu_backend()->features(0);
    memcpy(expected, inputs, spec.size);
    for (int n = 0; n < spec.args; n++)
        if (arg_tensor(&spec, inputs, n)->given)
            *arg_tensor(&spec, expected, n) = copy(&spec, arg_tensor(&spec, inputs, n));
    _Alignas(16) char scalar[MAX_BYTES];
    memcpy(scalar, expected, spec.size);
    int failed = variant_test(c, &spec, &table->rows[table->count - 1], scalar, NULL, 1);
    for (int i = 0; i < table->count && !failed; i++)
        if ((table->rows[i].needs & ~features) == 0)
            for (int threads = 1; threads <= 3; threads += 2)
                failed |= variant_test(c, &spec, &table->rows[i], inputs, scalar, threads);
    tensors_free(&spec, inputs);
    tensors_free(&spec, expected);
    tensors_free(&spec, scalar);
    return failed;
}

int main(void)
{
    static const Case cases[] = {
        {OP_gated_delta_rule,
         "",
         {{"B", 2}, {"T", 70}, {"H", 2}, {"HV", 4}, {"K", 64}, {"V", 64}, {"N", 2}}},
        {OP_gated_delta_rule,
         " initial_state final_state ",
         {{"B", 1},
          {"T", 131},
          {"H", 1},
          {"HV", 3},
          {"K", 60},
          {"V", 100},
          {"N", 1},
          {"S", 1},
          {"SW", 1}}},
        {OP_gated_delta_rule,
         " final_state ",
         {{"B", 1}, {"T", 1}, {"K", 1}, {"V", 1}, {"N", 1}, {"SW", 1}}},
        {OP_gated_delta_rule,
         " final_state ",
         {{"B", 3}, {"T", 17}, {"K", 128}, {"V", 33}, {"N", 3}, {"SW", 3}}},
        {OP_gated_delta_rule_step,
         " token_states ",
         {{"B", 3}, {"T", 4}, {"H", 2}, {"HV", 4}, {"K", 60}, {"V", 36}, {"N", 3}, {"S", 3}}},
        {OP_gated_delta_rule_step,
         "",
         {{"B", 2}, {"T", 1}, {"H", 2}, {"HV", 2}, {"K", 128}, {"V", 128}, {"S", 2}}},
        {OP_gated_delta_rule_step, "", {{"B", 1}, {"T", 16}, {"K", 7}, {"V", 5}, {"S", 1}}},
        {OP_causal_conv1d,
         " bias initial_state final_state ",
         {{"B", 2}, {"T", 37}, {"D", 67}, {"W", 4}, {"S", 2}, {"SW", 2}, {"L", 5}}},
        {OP_causal_conv1d, "", {{"B", 2}, {"T", 3}, {"D", 16}, {"W", 6}}},
        {OP_causal_conv1d,
         " final_state ",
         {{"B", 1}, {"T", 1}, {"D", 1}, {"W", 2}, {"SW", 1}, {"L", 1}}},
        {OP_causal_conv1d_step,
         " bias ",
         {{"B", 3}, {"T", 2}, {"D", 67}, {"W", 4}, {"S", 3}, {"L", 4}}},
        {OP_gdn_gate, "", {{"HV", 37}}},
        {OP_l2norm, "", {{"D", 67}}},
        {OP_rms_norm, "", {{"D", 130}}},
        {OP_rms_norm_gated, "", {{"D", 61}}},
        {OP_linear, " bias ", {{"N", 67}, {"K", 131}}},
        {OP_linear, "", {{"N", 1}, {"K", 1}}},
    };
    int count = (int)(sizeof cases / sizeof cases[0]), failed = 0;
    for (int i = 0; i < count; i++)
        failed += case_test(&cases[i], F32) + case_test(&cases[i], BF16);
    printf("test_kernels: %d cases, %d failed; kernels:", 2 * count, failed);
    const KernelTable *table = &cpu_backend()->tables[OP_linear];
    for (int i = 0; i < table->count; i++)
        if ((table->rows[i].needs & ~cpu_backend()->features(0)) == 0)
            printf(" %s", table->rows[i].variant);
    printf("\n");
    return failed != 0;
}
