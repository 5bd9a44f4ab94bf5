/* Where the arguments lie in memory: alignment, reach, and whether an output touches anything else. */
#include "check.h"

#include <string.h>

static int has_elements(const Tensor *t)
{
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] <= 0)
            return 0;
    return 1;
}

/* Strides in rising order, each at least the reach of the axes inside it: then no two indices meet. Every view that
   slicing and transposing make of a dense tensor passes. */
static int elements_apart(const Tensor *t)
{
    int64_t inner = 0, last = 0;
    for (int done = 0; done < t->ndim; done++) {
        int64_t stride = INT64_MAX;
        for (int i = 0; i < t->ndim; i++)
            if (t->shape[i] > 1 && t->stride[i] > last && t->stride[i] < stride)
                stride = t->stride[i];
        if (stride == INT64_MAX)
            break;
        int axes = 0;
        if (stride <= inner)
            return 0;
        for (int i = 0; i < t->ndim; i++)
            if (t->shape[i] > 1 && t->stride[i] == stride) {
                inner += (t->shape[i] - 1) * stride; /* memory_check saw that the sum fits */
                axes++;
            }
        if (axes > 1)
            return 0;
        last = stride;
    }
    return 1;
}

Status memory_check(Check *c, int arg)
{
    const Tensor *t = check_tensor(c, arg);
    int64_t size = DTYPE_SIZE[t->dtype], reach = 0;
    uintptr_t low = (uintptr_t)t->data, high = low;
    c->low[arg] = c->high[arg] = 0;
    if (!has_elements(t))
        return OK;
    int overflow = 0;
    for (int i = 0; i < t->ndim; i++) {
        int64_t axis = 0;
        if (t->shape[i] == 1)
            continue;
        overflow |= __builtin_mul_overflow(t->shape[i] - 1, t->stride[i], &axis);
        overflow |= __builtin_add_overflow(reach, axis, &reach);
    }
    overflow |= __builtin_add_overflow(reach, 1, &reach);
    overflow |= __builtin_mul_overflow(reach, size, &reach);
    overflow |= __builtin_add_overflow(low, (uintptr_t)reach, &high);
    if (overflow)
        return fail(c->err, BAD_LAYOUT,
                    "%s: %s has strides that reach beyond the address space; expected less",
                    c->spec->name, arg_name(c, arg));
    if (!t->data)
        return fail(c->err, BAD_LAYOUT, "%s: %s has no memory; expected a data pointer",
                    c->spec->name, arg_name(c, arg));
    if (low % (uintptr_t)size)
        return fail(c->err, BAD_LAYOUT,
                    "%s: %s is not aligned; expected a multiple of its element size %lld",
                    c->spec->name, arg_name(c, arg), (long long)size);
    if (arg_is_output(c, arg) && !elements_apart(t))
        return fail(c->err, BAD_LAYOUT,
                    "%s: %s has elements that share memory; expected an output without overlap",
                    c->spec->name, arg_name(c, arg));
    c->low[arg] = low;
    c->high[arg] = high;
    return OK;
}

static int64_t gcd(int64_t a, int64_t b)
{
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Bytes from the first to the last byte over the axes with strides below `limit`; the others' strides go into *period
   as their greatest common divisor. */
static int64_t inner_width(const Tensor *t, int64_t limit, int64_t *period)
{
    int64_t size = DTYPE_SIZE[t->dtype], width = size;
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 1 || t->stride[i] == 0)
            continue;
        if (t->stride[i] * size < limit)
            width += (t->shape[i] - 1) * t->stride[i] * size;
        else
            *period = gcd(t->stride[i] * size, *period);
    }
    return width;
}

/* Interleaved views: modulo a common period of the outer strides, both fall into intervals that do not meet. Every
   stride is tried as the border between inner and outer. */
static int interleaved(const Tensor *a, const Tensor *b)
{
    const Tensor *both[2] = {a, b};
    for (int which = 0; which < 2; which++)
        for (int i = 0; i < both[which]->ndim; i++) {
            if (both[which]->shape[i] == 1 || both[which]->stride[i] == 0)
                continue;
            int64_t limit = both[which]->stride[i] * DTYPE_SIZE[both[which]->dtype], period = 0;
            int64_t width_a = inner_width(a, limit, &period),
                    width_b = inner_width(b, limit, &period);
            uintptr_t low_a = (uintptr_t)a->data, low_b = (uintptr_t)b->data, p = (uintptr_t)period;
            int64_t apart = (int64_t)(low_b % p) - (int64_t)(low_a % p);
            if (apart < 0)
                apart += period;
            if (apart >= width_a && apart + width_b <= period)
                return 1;
        }
    return 0;
}

static int same_view(const Tensor *a, const Tensor *b)
{
    return a->data == b->data && a->ndim == b->ndim && a->dtype == b->dtype &&
           !memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) &&
           !memcmp(a->stride, b->stride, (size_t)a->ndim * sizeof *a->stride);
}

static int may_share(const Check *c, int out, int arg)
{
    for (int i = c->spec->first[ROW_SHARE]; i < c->spec->first[ROW_SHARE + 1]; i++)
        if (c->spec->rule[i].arg == out && c->spec->rule[i].other == arg)
            return 1;
    return 0;
}

static Status pair_check(Check *c, int out, int arg)
{
    const Tensor *a = check_tensor(c, out), *b = check_tensor(c, arg);
    int share = may_share(c, out, arg);
    if ((share && same_view(a, b)) || interleaved(a, b))
        return OK;
    return fail(c->err, BAD_LAYOUT, "%s: %s overlaps %s; expected memory of its own%s",
                c->spec->name, arg_name(c, out), arg_name(c, arg),
                share ? ", or the very same tensor" : "");
}

Status overlap_check(Check *c)
{
    for (int out = 0; out < c->spec->args; out++) {
        if (!arg_is_output(c, out) || !check_tensor(c, out)->given)
            continue;
        for (int arg = 0; arg < c->spec->args; arg++) {
            if (arg == out || !check_tensor(c, arg)->given || (arg < out && arg_is_output(c, arg)))
                continue;
            if (c->low[out] >= c->high[arg] || c->low[arg] >= c->high[out])
                continue;
            Status status = pair_check(c, out, arg);
            if (status != OK)
                return status;
        }
    }
    return OK;
}
