/* libFuzzer target: tensors and arguments made of any bytes against spec_check of every op. Each tensor owns exactly
   the memory that its shape and strides reach, so ASan sees every read of a values row that goes astray; or lies with
   the others in one arena, where what was accepted is held against a map of bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "spec.h"

enum { ARENA = 1 << 13, REACH = 1 << 14 };

typedef struct {
    const uint8_t *at, *end;
} Bytes;

static unsigned take(Bytes *b, unsigned limit)
{
    unsigned value = b->at < b->end ? *b->at++ : 0;
    return value % limit;
}

typedef union {
#define OP(op, doc) op##_args op;
#include "formats.h"
} AnyArgs;

static Spec specs[OP_COUNT];

static int64_t extent_guess(const Extent *e, const int64_t *dim)
{
    int64_t n = e->dim >= 0 ? dim[e->dim] : e->number;
    for (int i = 0; i < e->steps; i++) {
        int64_t m = e->step[i].dim >= 0 ? dim[e->step[i].dim] : e->step[i].number;
        n = e->step[i].op == '+'   ? n + m
            : e->step[i].op == '-' ? n - m
            : e->step[i].op == '*' ? n * m
                                   : n / (m ? m : 1);
    }
    return n > 0 ? n : 0;
}

/* Mostly what the row says, now and then anything. */
static void shape_make(Bytes *b, const Shape *shape, const int64_t *dim, int64_t leading, Tensor *t)
{
    t->ndim = 0;
    if (shape->star)
        for (unsigned i = 0; i < (unsigned)leading; i++)
            t->shape[t->ndim++] = 2;
    for (int i = 0; i < shape->count && t->ndim < MAX_NDIM; i++)
        t->shape[t->ndim++] = extent_guess(&shape->extent[i], dim);
    unsigned how = take(b, 64);
    if (how == 1 && t->ndim > 0)
        t->ndim--;
    if (how == 2 && t->ndim < MAX_NDIM)
        t->shape[t->ndim++] = take(b, 3);
    if (how == 3 && t->ndim > 0)
        t->shape[take(b, (unsigned)t->ndim)] = (int64_t)take(b, 8) - 1;
    if (how == 4 && t->ndim > 0)
        t->shape[take(b, (unsigned)t->ndim)] = INT64_MAX - take(b, 3);
    int64_t dense = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        t->stride[i] = dense;
        if (t->shape[i] > 0 && __builtin_mul_overflow(dense, t->shape[i], &dense))
            dense = INT64_MAX / 2;
    }
    how = take(b, 24);
    if (how < 6 && t->ndim > 0)
        t->stride[take(b, (unsigned)t->ndim)] = (int64_t)take(b, 40) - (how == 0 ? 20 : 0);
    for (int i = 0; how > 20 && i < t->ndim; i++)
        t->stride[i] *= t->stride[i] < 1000 ? 2 : 1;
    if (how == 7 && t->ndim > 0)
        t->stride[take(b, (unsigned)t->ndim)] = INT64_MAX / (1 + take(b, 4));
}

/* Bytes from the first to behind the last element; 0: none; -1: too many for a test, or not to be had. */
static int64_t reach_of(const Tensor *t)
{
    int64_t reach = 1, size = DTYPE_SIZE[t->dtype];
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] <= 0)
            return 0;
        int64_t stride = t->shape[i] == 1 ? 0 : t->stride[i], axis;
        if (stride < 0 || t->shape[i] > 4096 ||
            __builtin_mul_overflow(t->shape[i] - 1, stride, &axis) || axis > REACH ||
            (reach += axis) > REACH)
            return -1;
    }
    return reach * size;
}

/* A broadcast of huge extents has little memory and yet takes for ever to read; no use in that here. */
static int is_endless(const Tensor *t)
{
    double elements = 1;
    for (int i = 0; i < t->ndim; i++)
        elements *= t->shape[i] > 0 ? (double)t->shape[i] : 0;
    return elements > 1e5;
}

static void values_make(Bytes *b, Tensor *t, int64_t reach, int64_t top)
{
    int64_t count = reach / DTYPE_SIZE[t->dtype], rising = 0;
    unsigned how = take(b, 8);
    for (int64_t i = 0; i < count; i++) {
        rising += take(b, 3);
        int64_t value = how == 0         ? (int64_t)take(b, 16) - 2
                        : how == 1       ? i
                        : how == 2       ? INT64_MIN + i
                        : how == 3       ? count - i - 1
                        : i == count - 1 ? top
                        : rising < top   ? rising
                                         : top;
        switch (t->dtype) {
        case I32:
            ((int32_t *)t->data)[i] = (int32_t)value;
            break;
        case I64:
            ((int64_t *)t->data)[i] = value;
            break;
        case F32:
            ((float *)t->data)[i] = -(float)value;
            break;
        default:
            memset((char *)t->data + i * DTYPE_SIZE[t->dtype], (int)value,
                   (size_t)DTYPE_SIZE[t->dtype]);
            break;
        }
    }
}

static DType dtype_make(Bytes *b, const Spec *spec, const Arg *arg, const void *args)
{
    unsigned wanted = take(b, 40);
    if (wanted < DTYPE_COUNT)
        return (DType)wanted;
    if (arg->same_as >= 0)
        return arg_tensor(spec, args, arg->same_as)->dtype;
    for (int i = 0; i < DTYPE_COUNT; i++)
        if (arg->dtypes >> i & 1)
            return (DType)i;
    return F32;
}

/* Calls visit with the address of every element. */
static int elements_each(const Tensor *t, int (*visit)(uint8_t *map, int64_t at, int64_t size),
                         uint8_t *map, const char *arena)
{
    int64_t index[MAX_NDIM] = {0}, size = DTYPE_SIZE[t->dtype];
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0)
            return 0;
    for (;;) {
        int64_t at = (const char *)t->data - arena;
        for (int i = 0; i < t->ndim; i++)
            at += index[i] * t->stride[i] * size;
        if (visit(map, at, size))
            return 1;
        int i = t->ndim - 1;
        while (i >= 0 && ++index[i] == t->shape[i])
            index[i--] = 0;
        if (i < 0)
            return 0;
    }
}

static int mark(uint8_t *map, int64_t at, int64_t size)
{
    for (int64_t i = 0; i < size; i++)
        if (map[at + i]++)
            return 1; /* two elements of one output share a byte */
    return 0;
}

static int meets(uint8_t *map, int64_t at, int64_t size)
{
    for (int64_t i = 0; i < size; i++)
        if (map[at + i])
            return 1;
    return 0;
}

static int shared(const Spec *spec, int out, int arg)
{
    for (int i = spec->first[ROW_SHARE]; i < spec->first[ROW_SHARE + 1]; i++)
        if (spec->rule[i].arg == out && spec->rule[i].other == arg)
            return 1;
    return 0;
}

static void accepted_verify(const Spec *spec, const AnyArgs *args, const char *arena)
{
    static uint8_t map[ARENA + REACH * 8];
    for (int out = 0; out < spec->args; out++) {
        const Tensor *o = arg_tensor(spec, args, out);
        if (spec->arg[out].role < OUT || !o->given || o->readonly)
            continue;
        memset(map, 0, sizeof map);
        if (elements_each(o, mark, map, arena))
            abort();
        for (int arg = 0; arg < spec->args; arg++) {
            const Tensor *t = arg_tensor(spec, args, arg);
            if (arg != out && t->given && elements_each(t, meets, map, arena) &&
                !shared(spec, out, arg) && !shared(spec, arg, out))
                abort();
        }
    }
}

static void scalars_make(Bytes *b, const Spec *spec, AnyArgs *args)
{
    spec_defaults(spec, args);
    for (int i = 0; i < spec->scalars; i++) {
        const Scalar *s = &spec->scalar[i];
        void *at = (char *)args + s->at;
        if (s->row->kind == ROW_CHOICE && take(b, 3) == 0)
            *(int *)at = (int)take(b, (unsigned)s->values);
        if (s->row->kind == ROW_FLAG && take(b, 8) == 0)
            *(int *)at = (int)take(b, 2);
        if (s->row->kind == ROW_INT && take(b, 8) == 0)
            *(int64_t *)at = (int64_t)take(b, 5) - 2;
    }
}

static char arena[ARENA + REACH * 8];

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    Bytes b = {data, data + size};
    Error err = {OK, ""};
    static AnyArgs args;
    void *owned[MAX_ARGS] = {NULL};
    int64_t dim[MAX_DIMS];
    if (!specs[0].name)
        for (int op = 0; op < OP_COUNT; op++)
            if (spec_compile((OpId)op, &specs[op], &err) != OK)
                abort();
    const Spec *spec = &specs[take(&b, OP_COUNT)];
    unsigned in_arena = take(&b, 2), leading = take(&b, 4), given = 0;
    memset(&args, 0, sizeof args);
    for (int i = 0; i < spec->dims; i++)
        dim[i] = take(&b, 7);
    scalars_make(&b, spec, &args);
    for (int i = 0; i < spec->args; i++) {
        const Arg *arg = &spec->arg[i];
        Tensor *t = arg_tensor(spec, &args, i);
        int must = arg->role != OPT && arg->role != OUT_OPT;
        t->given = must ? take(&b, 200) != 199 : take(&b, 3) == 2;
        if (!t->given)
            continue;
        int second =
            arg->alt_choice >= 0 && scalar_int(spec, &args, arg->alt_choice) == arg->alt_value;
        t->dtype = dtype_make(&b, spec, arg, &args);
        t->readonly = take(&b, 60) == 7;
        t->device = (Device){take(&b, 80) == 3 ? 2 : 1, 0};
        shape_make(&b, second ? &arg->alt : &arg->shape, dim, leading, t);
        int64_t reach = reach_of(t);
        if (is_endless(t) && reach >= 0)
            t->shape[0] = 0, reach = 0;
        if (reach < 0)
            t->data = arena + 64, given |= 1; /* must be refused, or never be read: see below */
        else if (in_arena)
            t->data = arena + (take(&b, 255) * 32 + (take(&b, 30) == 0)) % ARENA;
        else if (reach > 0)
            t->data = owned[i] = malloc((size_t)reach);
        if (reach > 0 && ((uintptr_t)t->data & 7) == 0)
            values_make(&b, t, reach, dim[take(&b, (unsigned)spec->dims)]);
    }
    /* A tensor whose memory could not be made is honest only when it is refused; with value rows it might be read. */
    if (given && spec->check_values >= 0)
        *(int *)((char *)&args + spec->scalar[spec->check_values].at) = 0;
    Status status = spec_check(spec, &args, &err);
    if (status != OK &&
        (!err.text[0] || strncmp(err.text, spec->name, strlen(spec->name)) || err.status != status))
        abort();
    if (status == OK && in_arena && !given)
        accepted_verify(spec, &args, arena);
    for (int i = 0; i < MAX_ARGS; i++)
        free(owned[i]);
    return 0;
}
