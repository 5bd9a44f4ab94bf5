/* The C core without Python: rows that must not compile, and checks on tensors made by hand. Run under ASan and UBSan
   (make asan); prints what failed and returns its number. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "extent.h"

/* registry.c once more, over a backend made here, whatever this file is linked with. */
#define cpu_backend fake_backend
#define kernel_find fake_find
#include "registry.c"

static int failures;

static void expect(int holds, const char *what, const char *text)
{
    if (holds)
        return;
    failures++;
    printf("FAILED: %s: %s\n", what, text);
}

/* Rows that stop the import ------------------------------------------------------------------------------------------ */

typedef struct {
    Call call;
    int64_t A, B;
    Tensor x, y;
    double eps;
    int64_t pad;
    int flag, mode;
} Args;

static void rows_fail(const char *what, const Row *last, const char *text)
{
    Row rows[] = {
        {.kind = ROW_DIM, .name = "A", .at = offsetof(Args, A)},
        {.kind = ROW_ARG,
         .name = "x",
         .role = IN,
         .second = "A 3",
         .third = "float32",
         .layout = ANY,
         .at = offsetof(Args, x)},
        *last,
    };
    static Spec spec;
    Error err = {OK, ""};
    Status status =
        rows_compile((OpRows){"op", "doc", sizeof(Args), rows, 3}, OP_l2norm, &spec, &err);
    expect(status == BAD_VALUE && strstr(err.text, text), what,
           status == OK ? "compiled" : err.text);
}

#define BAD(words, text, ...) rows_fail(text, &(Row){__VA_ARGS__}, words)

static void test_bad_rows(void)
{
    BAD("the shape cannot be read", "unknown dim", .kind = ROW_ARG, .name = "y", .role = OUT,
        .second = "A C", .third = "float32");
    BAD("the shape cannot be read", "no step", .kind = ROW_ARG, .name = "y", .role = OUT,
        .second = "A+", .third = "float32");
    BAD("the shape cannot be read", "division by zero", .kind = ROW_ARG, .name = "y", .role = OUT,
        .second = "A/0", .third = "float32");
    BAD("the shape cannot be read", "too many axes", .kind = ROW_ARG, .name = "y", .role = OUT,
        .second = "1 1 1 1 1 1 1 1 1", .third = "float32");
    BAD("the shape cannot be read", "left out before the end", .kind = ROW_ARG, .name = "y",
        .role = OUT, .second = "A? A", .third = "float32");
    BAD("the shape cannot be read", "empty", .kind = ROW_ARG, .name = "y", .role = OUT,
        .second = "", .third = "float32");
    BAD("the dtypes cannot be read", "unknown dtype", .kind = ROW_ARG, .name = "y", .role = OUT,
        .second = "A", .third = "float31");
    BAD("the dtypes cannot be read", "dtype of nothing", .kind = ROW_ARG, .name = "y", .role = OUT,
        .second = "A", .third = "=z");
    BAD("no argument fixes this dim", "a dim of nothing", .kind = ROW_DIM, .name = "C",
        .at = offsetof(Args, B));
    BAD("neither true nor false", "flag", .kind = ROW_FLAG, .name = "flag", .second = "maybe",
        .at = offsetof(Args, flag));
    BAD("the default cannot be read", "number", .kind = ROW_NUM, .name = "eps", .second = "C^2",
        .at = offsetof(Args, eps));
    BAD("the default cannot be read", "power", .kind = ROW_NUM, .name = "eps", .second = "A^",
        .at = offsetof(Args, eps));
    BAD("the default cannot be read", "integer", .kind = ROW_INT, .name = "pad", .second = "one",
        .at = offsetof(Args, pad));
    BAD("the values cannot be read", "choice", .kind = ROW_CHOICE, .name = "mode", .second = "a||b",
        .at = offsetof(Args, mode));
    BAD("has no enumerator", "choice without a name in C", .kind = ROW_CHOICE, .name = "mode",
        .second = "a|b", .at = offsetof(Args, mode));
    BAD("no such argument", "rule for nothing", .kind = ROW_RULE_IF, .name = "z",
        .second = "A >= 1");
    BAD("names nothing", "rule's sign", .kind = ROW_RULE, .second = "A > 1");
    BAD("names nothing", "rule's dim", .kind = ROW_RULE, .second = "C >= 1");
    BAD("names nothing", "rule's end", .kind = ROW_RULE, .second = "A >= 1 x");
    BAD("names nothing", "needs nothing", .kind = ROW_NEEDS, .name = "x", .second = "z");
    BAD("names nothing", "shares nothing", .kind = ROW_SHARE, .name = "x", .second = "z");
    BAD("names nothing", "absent", .kind = ROW_ABSENT, .name = "x", .second = "A", .third = "C");
    BAD("names nothing", "given if", .kind = ROW_GIVEN_IF, .name = "x", .second = "mode=a");
    BAD("names nothing", "slots", .kind = ROW_SLOTS, .name = "x", .second = "A", .third = "pad");
    BAD("names nothing", "index", .kind = ROW_INDEX, .name = "x", .second = "C");
    BAD("no such argument", "alias", .kind = ROW_ALIAS, .name = "z", .second = "out");
    BAD("names nothing", "range of nothing", .kind = ROW_NUM_RANGE, .name = "eps", .high = 1);
    BAD("names nothing", "hint", .kind = ROW_HINT, .name = "x", .second = "C A");
    BAD("no such argument, choice or value", "alt", .kind = ROW_ALT, .name = "x",
        .second = "mode=a", .third = "3 A");
}

static void test_extents(void)
{
    Row dim[] = {{.name = "A"}, {.name = "HV"}};
    Spec spec = {.dims = 2, .dim = {&dim[0], &dim[1]}};
    int64_t known[MAX_DIMS] = {7, 130}, value = 0;
    static const struct {
        const char *text;
        int64_t value;
    } CASE[] = {{"A", 7},     {"12", 12},           {"A+1", 8},    {"A-HV", -123},
                {"HV/4", 32}, {"HV/^128*128", 256}, {"A*2-3", 11}, {"A/^7", 1}};
    for (size_t i = 0; i < sizeof CASE / sizeof *CASE; i++) {
        const char *text = CASE[i].text;
        Extent e;
        int ok = extent_read(&spec, &text, &e) && !*text && extent_value(&e, known, &value);
        expect(ok && value == CASE[i].value, "extent", CASE[i].text);
    }
    known[0] = -1;
    const char *text = "HV-A";
    Extent e;
    expect(extent_read(&spec, &text, &e) && !extent_value(&e, known, &value), "extent",
           "unknown dim");
    known[1] = INT64_MAX;
    text = "HV+1";
    expect(extent_read(&spec, &text, &e) && !extent_value(&e, known, &value), "extent", "overflow");
    expect(extent_fixes(&e) && extent_solve(&e, 5, &value) && value == 4, "extent", "solved");
    expect(!extent_solve(&e, 0, &value), "extent", "no negative dim");
}

/* Checks of one op --------------------------------------------------------------------------------------------------- */

static Tensor tensor(void *data, DType dtype, int ndim, const int64_t *shape)
{
    Tensor t = {.data = data, .given = 1, .ndim = ndim, .dtype = dtype, .device = {DEVICE_CPU, 0}};
    int64_t dense = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        t.shape[i] = shape[i];
        t.stride[i] = dense;
        dense *= shape[i];
    }
    return t;
}

#define SHAPE(...)    \
    (const int64_t[]) \
    {                 \
        __VA_ARGS__   \
    }

typedef struct {
    Spec spec;
    linear_args args;
    float x[6], weight[12], y[8];
} Linear;

static Linear *linear_make(void)
{
    Linear *l = calloc(1, sizeof *l);
    Error err;
    if (!l || spec_compile(OP_linear, &l->spec, &err) != OK)
        abort();
    spec_defaults(&l->spec, &l->args);
    l->args.x = tensor(l->x, F32, 2, SHAPE(2, 3));
    l->args.weight = tensor(l->weight, F32, 2, SHAPE(4, 3));
    l->args.y = tensor(l->y, F32, 2, SHAPE(2, 4));
    return l;
}

static void linear_is(const char *what, Linear *l, Status status, const char *text)
{
    Error err = {OK, ""};
    Status came = spec_check(&l->spec, &l->args, &err);
    expect(came == status && !strcmp(err.text, text), what, came == OK ? "accepted" : err.text);
    free(l);
}

static void test_linear(void)
{
    Linear *l = linear_make();
    linear_is("as it is", l, OK, "");
    l = linear_make();
    l->args.x.shape[0] = -1;
    linear_is("negative extent", l, BAD_SHAPE, "linear: x has shape (-1, 3); expected (* K)");
    l = linear_make();
    l->args.x.data = (char *)l->x + 1;
    linear_is("alignment", l, BAD_LAYOUT,
              "linear: x is not aligned; expected a multiple of its element size 4");
    l = linear_make();
    l->args.x.data = NULL;
    linear_is("no memory", l, BAD_LAYOUT, "linear: x has no memory; expected a data pointer");
    l = linear_make();
    l->args.x.stride[0] = INT64_MAX / 2;
    linear_is("reach", l, BAD_LAYOUT,
              "linear: x has strides that reach beyond the address space; expected less");
    l = linear_make();
    l->args.x.dtype = (DType)77;
    linear_is("no dtype", l, BAD_DTYPE,
              "linear: x has dtype unknown; expected float32, float16 or bfloat16");
    l = linear_make();
    l->args.weight.device = (Device){DEVICE_ROCM, 1};
    linear_is("device", l, BAD_DEVICE, "linear: weight is on rocm:1; expected cpu from x");
    l = linear_make();
    l->args.x.shape[0] = l->args.y.shape[0] = 0;
    l->args.x.data = l->args.y.data = NULL;
    l->args.x.stride[1] = -5;
    linear_is("empty", l, OK, "");
    l = linear_make();
    l->args.x.shape[0] = l->args.y.shape[0] = 1;
    l->args.x.stride[0] = -1000;
    linear_is("stride of one element", l, OK, "");
    l = linear_make();
    l->args.y.data = l->x;
    linear_is("overlap", l, BAD_LAYOUT, "linear: out overlaps x; expected memory of its own");
    l = linear_make();
    l->args.y.given = 0;
    linear_is("absent", l, BAD_TYPE, "linear: out is None; expected a tensor");
}

static void test_defaults(void)
{
    Spec *spec = calloc(1, sizeof *spec);
    static gated_delta_rule_args a;
    static float memory[64];
    Error err = {OK, ""};
    expect(spec && spec_compile(OP_gated_delta_rule, spec, &err) == OK, "gated_delta_rule",
           err.text);
    spec_defaults(spec, &a);
    a.q = a.k = tensor(memory, F32, 4, SHAPE(1, 2, 1, 4));
    a.v = tensor(memory, F32, 4, SHAPE(1, 2, 2, 3));
    a.g = a.beta = tensor(memory, F32, 3, SHAPE(1, 2, 2));
    a.o = tensor(memory + 40, F32, 4, SHAPE(1, 2, 2, 3));
    expect(spec_check(spec, &a, &err) == OK, "defaults", err.text);
    expect(a.scale == 0.5 && a.pad_slot == -1 && a.l2norm_eps == 1e-6, "defaults", "scalars");
    a.l2norm_eps = NAN;
    expect(spec_check(spec, &a, &err) == BAD_VALUE &&
               !strcmp(err.text, "gated_delta_rule: l2norm_eps is nan; expected 0 .. 3.4e+38"),
           "range", err.text);
    expect(a.B == 1 && a.T == 2 && a.N == 1 && a.S == 1 && a.SW == 1 && a.P == 0, "defaults",
           "dims");
    free(spec);
}

/* Which kernel ------------------------------------------------------------------------------------------------------- */

static Status run(const void *args, Error *err)
{
    (void)args, (void)err;
    return OK;
}

static int never(const void *args)
{
    (void)args;
    return 0;
}

static uint64_t features(int device)
{
    (void)device;
    return 1;
}

const Backend *cpu_backend(void)
{
    static const Kernel rows[] = {{"new", 2, NULL, run},
                                  {"narrow", 1, never, run},
                                  {"avx2", 1, NULL, run},
                                  {"scalar", 0, NULL, run}};
    static Backend backend = {
        .abi = BACKEND_ABI, .device_type = DEVICE_CPU, .name = "cpu", .features = features};
    backend.tables[OP_l2norm] = (KernelTable){rows, 4};
    return &backend;
}

static void finds(const char *variant, Device device, Status status, const char *text)
{
    const Kernel *kernel = NULL;
    Error err = {OK, ""};
    Status came = kernel_find(OP_l2norm, device, variant, NULL, &kernel, &err);
    const char *got = came == OK ? kernel->variant : err.text;
    expect(came == status && !strcmp(got, text), "kernel_find", got);
}

static void test_registry(void)
{
    Device cpu = {DEVICE_CPU, 0}, cuda = {DEVICE_CUDA, 1};
    finds(NULL, cpu, OK, "avx2");
    finds("scalar", cpu, OK, "scalar");
    finds("new", cpu, BAD_VALUE,
          "l2norm: variant is \"new\"; expected one that runs here: \"avx2\", \"scalar\"");
    finds(NULL, cuda, BAD_DEVICE,
          "l2norm: the tensors are on DLPack device 2:1; expected cpu, the one backend built");
    const Kernel *kernel;
    Error err;
    expect(kernel_find(OP_linear, cpu, NULL, NULL, &kernel, &err) == BAD_DEVICE, "kernel_find",
           "an op without kernels");
}

int main(void)
{
    static Spec spec;
    Error err = {OK, ""};
    for (int op = 0; op < OP_COUNT; op++)
        expect(spec_compile((OpId)op, &spec, &err) == OK, "compiles", err.text);
    char text[3000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    expect(fail(&err, BAD_VALUE, "%s", text) == BAD_VALUE &&
               strlen(err.text) == sizeof err.text - 1,
           "fail", "cuts");
    test_bad_rows();
    test_extents();
    test_linear();
    test_defaults();
    test_registry();
    printf(failures ? "%d failed\n" : "spec: all passed\n", failures);
    return failures != 0;
}
