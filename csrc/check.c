/* spec_check: one call's arguments held against the rows, in the order of the rows. */
#include "check.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "extent.h"

void text_add(Text *text, const char *format, ...)
{
    if (text->length >= sizeof text->text - 1)
        return;
    va_list words;
    va_start(words, format);
    int n = vsnprintf(text->text + text->length, sizeof text->text - text->length, format, words);
    va_end(words);
    text->length += n > 0 ? (size_t)n : 0;
}

void text_add_dim(Text *text, const Check *c, int dim, int *first)
{
    text_add(text, "%s%s = %lld", *first ? " with " : ", ", c->spec->dim[dim]->name,
             (long long)c->dim[dim]);
    *first = 0;
    if (c->source[dim] >= 0)
        text_add(text, " from %s", arg_name(c, c->source[dim]));
    if (c->without[dim] >= 0)
        text_add(text, " without %s", arg_name(c, c->without[dim]));
}

void text_add_extent(Text *text, const Check *c, const Extent *e, int *first)
{
    if (e->dim >= 0 && c->dim[e->dim] >= 0)
        text_add_dim(text, c, e->dim, first);
    for (int i = 0; i < e->steps; i++)
        if (e->step[i].dim >= 0 && c->dim[e->step[i].dim] >= 0)
            text_add_dim(text, c, e->step[i].dim, first);
}

static void text_add_tuple(Text *text, const int64_t *numbers, int count)
{
    text_add(text, "(");
    for (int i = 0; i < count; i++)
        text_add(text, i ? ", %lld" : "%lld", (long long)numbers[i]);
    text_add(text, count == 1 ? ",)" : ")");
}

static void text_add_device(Text *text, Device device)
{
    switch (device.type) {
    case DEVICE_CPU:
        text_add(text, "cpu");
        break;
    case DEVICE_CUDA:
        text_add(text, "cuda:%d", device.id);
        break;
    case DEVICE_ROCM:
        text_add(text, "rocm:%d", device.id);
        break;
    default:
        text_add(text, "DLPack device %d:%d", device.type, device.id);
        break;
    }
}

/* Given when it must be, absent when it must be. */
static Status presence_check(Check *c)
{
    const Spec *spec = c->spec;
    for (int i = 0; i < spec->args; i++)
        if (!check_tensor(c, i)->given && spec->arg[i].role != OPT && spec->arg[i].role != OUT_OPT)
            return fail(c->err, BAD_TYPE, "%s: %s is None; expected a tensor", spec->name,
                        arg_name(c, i));
    for (int i = spec->first[ROW_GIVEN_IF]; i < spec->first[ROW_GIVEN_IF + 1]; i++) {
        const Rule *r = &spec->rule[i];
        const Scalar *s = &spec->scalar[r->scalar];
        int given = check_tensor(c, r->arg)->given, now = scalar_int(spec, c->args, r->scalar);
        if (given && now != r->value)
            return fail(c->err, BAD_VALUE,
                        "%s: %s is given with %s=\"%s\"; expected None unless %s=\"%s\"",
                        spec->name, arg_name(c, r->arg), s->row->name, s->value[now], s->row->name,
                        s->value[r->value]);
        if (!given && now == r->value)
            return fail(c->err, BAD_VALUE, "%s: %s is None; expected a tensor with %s=\"%s\"",
                        spec->name, arg_name(c, r->arg), s->row->name, s->value[now]);
    }
    for (int i = spec->first[ROW_NEEDS]; i < spec->first[ROW_NEEDS + 1]; i++) {
        const Rule *r = &spec->rule[i];
        if (check_tensor(c, r->arg)->given && !check_tensor(c, r->other)->given)
            return fail(c->err, BAD_VALUE, "%s: %s is None; expected a tensor, since %s is given",
                        spec->name, arg_name(c, r->other), arg_name(c, r->arg));
    }
    for (int i = spec->first[ROW_EXCLUDES]; i < spec->first[ROW_EXCLUDES + 1]; i++) {
        const Rule *r = &spec->rule[i];
        if (check_tensor(c, r->arg)->given && check_tensor(c, r->other)->given)
            return fail(c->err, BAD_VALUE, "%s: %s is given; expected None, since %s is given",
                        spec->name, arg_name(c, r->arg), arg_name(c, r->other));
    }
    return OK;
}

static Status dtype_check(Check *c, int arg)
{
    const Arg *a = &c->spec->arg[arg];
    const Tensor *t = check_tensor(c, arg);
    int same = -1;
    if ((unsigned)t->dtype < DTYPE_COUNT && a->dtypes >> t->dtype & 1)
        return OK;
    if (a->same_as >= 0) {
        const Tensor *other = check_tensor(c, a->same_as);
        if (other->given && other->dtype == t->dtype)
            return OK;
        same = other->given ? (int)other->dtype : -1;
    }
    char expected[256] = "";
    dtypes_text(c->spec, arg, same, expected, sizeof expected);
    return fail(c->err, BAD_DTYPE, "%s: %s has dtype %s; expected %s", c->spec->name,
                arg_name(c, arg),
                (unsigned)t->dtype < DTYPE_COUNT ? DTYPE_NAME[t->dtype] : "unknown", expected);
}

/* Leading axes that `*` stands for; -1 when the rank cannot fit. */
static int shape_stars(const Shape *shape, const Tensor *t)
{
    if (shape->star)
        return t->ndim >= shape->count ? t->ndim - shape->count : -1;
    return t->ndim == shape->count || (shape->optional && t->ndim == shape->count - 1) ? 0 : -1;
}

/* The bit of each extent that does not hold; dims that the shape fixes are written to dim. */
static unsigned shape_match(const Shape *shape, const Tensor *t, int stars, int64_t *dim)
{
    unsigned wrong = 0;
    for (int i = 0; i < shape->count; i++) {
        const Extent *e = &shape->extent[i];
        int64_t came = stars + i < t->ndim ? t->shape[stars + i] : 1, expected;
        if (extent_value(e, dim, &expected)) {
            if (came != expected)
                wrong |= 1u << i;
        } else if (!extent_fixes(e) || !extent_solve(e, came, &dim[e->dim])) {
            wrong |= 1u << i;
        }
    }
    return wrong;
}

static Status shape_fail(Check *c, int arg, const Shape *shape, unsigned wrong, int star_wrong)
{
    const Tensor *t = check_tensor(c, arg);
    Text text = {0};
    int first = 1;
    text_add(&text, "%s: %s has shape ", c->spec->name, arg_name(c, arg));
    text_add_tuple(&text, t->shape, t->ndim);
    text_add(&text, "; expected (%s)", shape->text);
    if (star_wrong) {
        text_add(&text, " with * = ");
        text_add_tuple(&text, check_tensor(c, c->star_source)->shape, c->stars);
        text_add(&text, " from %s", arg_name(c, c->star_source));
        first = 0;
    }
    for (int i = 0; i < shape->count; i++)
        if (wrong >> i & 1)
            text_add_extent(&text, c, &shape->extent[i], &first);
    for (int i = c->spec->first[ROW_HINT]; i < c->spec->first[ROW_HINT + 1]; i++) {
        const Rule *r = &c->spec->rule[i];
        int64_t dim[MAX_DIMS];
        memcpy(dim, c->dim, sizeof dim);
        if (r->arg != arg || shape_stars(&r->shape, t) < 0 ||
            shape_match(&r->shape, t, shape_stars(&r->shape, t), dim))
            continue;
        text_add(&text, "; %s", r->row->doc);
        break;
    }
    return fail(c->err, BAD_SHAPE, "%s", text.text);
}

static Status shape_check(Check *c, int arg, const Shape *shape)
{
    const Tensor *t = check_tensor(c, arg);
    int stars = shape_stars(shape, t), star_wrong = 0;
    if (stars < 0)
        return shape_fail(c, arg, shape, 0, 0);
    if (shape->star && c->stars < 0) {
        c->stars = stars;
        c->star_source = arg;
    } else if (shape->star) {
        star_wrong = stars != c->stars || memcmp(t->shape, check_tensor(c, c->star_source)->shape,
                                                 (size_t)stars * sizeof *t->shape) != 0;
    }
    int64_t dim[MAX_DIMS];
    memcpy(dim, c->dim, sizeof dim);
    unsigned wrong = shape_match(shape, t, stars, dim);
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] < 0)
            wrong |= 1u << 31;
    if (wrong || star_wrong)
        return shape_fail(c, arg, shape, wrong, star_wrong);
    for (int i = 0; i < c->spec->dims; i++)
        if (dim[i] != c->dim[i]) {
            c->dim[i] = dim[i];
            c->source[i] = arg;
        }
    return OK;
}

/* Dims that an argument left out decides, as soon as their extent is known. */
static void absent_apply(Check *c)
{
    const Spec *spec = c->spec;
    for (int i = spec->first[ROW_ABSENT]; i < spec->first[ROW_ABSENT + 1]; i++) {
        const Rule *r = &spec->rule[i];
        int64_t value;
        if (c->dim[r->dim] >= 0 || check_tensor(c, r->arg)->given ||
            !extent_value(&r->right, c->dim, &value))
            continue;
        c->dim[r->dim] = value;
        c->source[r->dim] = r->right.dim >= 0 ? c->source[r->right.dim] : -1;
        c->without[r->dim] = r->arg;
    }
}

static Status device_check(Check *c, int arg)
{
    Tensor *t = check_tensor(c, arg);
    if (t->device.type == DEVICE_CUDA_HOST || t->device.type == DEVICE_ROCM_HOST)
        t->device = (Device){DEVICE_CPU, 0};
    if (c->device_source < 0) {
        c->device_source = arg;
        return OK;
    }
    Device expected = check_tensor(c, c->device_source)->device;
    if (t->device.type == expected.type && t->device.id == expected.id)
        return OK;
    Text text = {0};
    text_add(&text, "%s: %s is on ", c->spec->name, arg_name(c, arg));
    text_add_device(&text, t->device);
    text_add(&text, "; expected ");
    text_add_device(&text, expected);
    return fail(c->err, BAD_DEVICE, "%s from %s", text.text, arg_name(c, c->device_source));
}

static Status layout_fail(Check *c, int arg, const char *expected)
{
    const Tensor *t = check_tensor(c, arg);
    Text text = {0};
    text_add(&text, "%s: %s has strides ", c->spec->name, arg_name(c, arg));
    text_add_tuple(&text, t->stride, t->ndim);
    text_add(&text, " for shape ");
    text_add_tuple(&text, t->shape, t->ndim);
    return fail(c->err, BAD_LAYOUT, "%s; expected %s", text.text, expected);
}

/* Strides of axes with one element mean nothing; they become what a dense tensor has. */
static Status layout_check(Check *c, int arg)
{
    Tensor *t = check_tensor(c, arg);
    int64_t dense = 1;
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0)
            return OK;
    for (int i = t->ndim - 1; i >= 0; i--) {
        Layout layout = c->spec->arg[arg].layout;
        if (t->shape[i] == 1) {
            int64_t inner = 1;
            if (i + 1 < t->ndim &&
                __builtin_mul_overflow(t->shape[i + 1], t->stride[i + 1], &inner))
                inner = 0;
            t->stride[i] = inner;
            continue;
        }
        if (t->stride[i] < 0)
            return layout_fail(c, arg, "no negative stride");
        if (layout == ROWS && i == t->ndim - 1 && t->stride[i] != 1)
            return layout_fail(c, arg, "stride 1 in the last axis");
        if (layout == DENSE && t->stride[i] != dense)
            return layout_fail(c, arg, "a C-contiguous tensor");
        if (arg_is_output(c, arg) && t->stride[i] == 0)
            return layout_fail(c, arg, "no stride 0 in an output");
        if (layout == DENSE && __builtin_mul_overflow(dense, t->shape[i], &dense))
            return layout_fail(c, arg, "a tensor that fits the address space");
    }
    return OK;
}

/* Second axis order to first, and a last axis that was left out put in. */
static void axes_put(Tensor *t, const Arg *a, int second)
{
    if (a->shape.optional && t->ndim == a->shape.count - 1) {
        t->shape[t->ndim] = 1;
        t->stride[t->ndim++] = 1;
    }
    if (!second)
        return;
    int64_t shape[MAX_NDIM], stride[MAX_NDIM];
    memcpy(shape, t->shape, sizeof shape);
    memcpy(stride, t->stride, sizeof stride);
    for (int i = 0; i < t->ndim; i++) {
        t->shape[i] = shape[a->order[i]];
        t->stride[i] = stride[a->order[i]];
    }
}

static Status arg_check(Check *c, int arg)
{
    const Arg *a = &c->spec->arg[arg];
    Tensor *t = check_tensor(c, arg);
    int second = a->alt_choice >= 0 && scalar_int(c->spec, c->args, a->alt_choice) == a->alt_value;
    Status status = dtype_check(c, arg);
    if (status == OK)
        status = shape_check(c, arg, second ? &a->alt : &a->shape);
    if (status == OK)
        status = device_check(c, arg);
    if (status == OK)
        status = layout_check(c, arg);
    if (status == OK && t->readonly && arg_is_output(c, arg))
        status = fail(c->err, BAD_LAYOUT, "%s: %s is read-only; expected writable memory",
                      c->spec->name, arg_name(c, arg));
    if (status == OK)
        status = memory_check(c, arg);
    if (status == OK)
        axes_put(t, a, second);
    return status;
}

static const char *const RULE_WORDS[] = {"<= ", ">= ", "", "a multiple of "};

static Status rule_check(Check *c, const Rule *r)
{
    int64_t left, right;
    if (r->row->kind == ROW_RULE_IF && !check_tensor(c, r->arg)->given)
        return OK;
    if (!extent_value(&r->left, c->dim, &left) || !extent_value(&r->right, c->dim, &right))
        return OK; /* a dim of arguments that were left out */
    int op = (int)(strchr("lg=%", r->op) - "lg=%");
    int holds = op == 0   ? left <= right
                : op == 1 ? left >= right
                : op == 2 ? left == right
                          : right > 0 && left % right == 0;
    if (holds)
        return OK;
    const char *text = r->row->second;
    int source = r->left.dim >= 0 ? c->source[r->left.dim] : -1, first = 1;
    Text message = {0};
    text_add(&message, "%s: %s has %.*s = %lld; expected ", c->spec->name,
             source >= 0 ? arg_name(c, source) : "it", (int)strcspn(text, " "), text,
             (long long)left);
    if (op != 3)
        text_add(&message, "%.*s ", (int)strcspn(text, " "), text);
    text_add(&message, "%s%s", op == 2 ? "== " : RULE_WORDS[op], strrchr(text, ' ') + 1);
    text_add_extent(&message, c, &r->right, &first);
    if (r->row->kind == ROW_RULE_IF && source != r->arg)
        text_add(&message, ", since %s is given", arg_name(c, r->arg));
    return fail(c->err, BAD_SHAPE, "%s", message.text);
}

/* NaN stands for the default of an extent, which is always in range. */
static Status numbers_check(Check *c)
{
    const Spec *spec = c->spec;
    for (int i = spec->first[ROW_NUM_RANGE]; i < spec->first[ROW_NUM_RANGE + 1]; i++) {
        const Row *row = spec->rule[i].row;
        const Scalar *s = &spec->scalar[spec->rule[i].scalar];
        double came = *(const double *)((const char *)c->args + s->at);
        if ((came >= row->low && came <= row->high) || (s->from_extent && isnan(came)))
            continue;
        return fail(c->err, BAD_VALUE, "%s: %s is %.12g; expected %g .. %g", spec->name, row->name,
                    came, row->low, row->high);
    }
    return OK;
}

/* Dims into the struct; a dim of arguments that were left out is 0. */
static void dims_store(Check *c)
{
    for (int i = 0; i < c->spec->dims; i++)
        *(int64_t *)((char *)c->args + c->spec->dim[i]->at) = c->dim[i] >= 0 ? c->dim[i] : 0;
    for (int i = 0; i < c->spec->scalars; i++) {
        const Scalar *s = &c->spec->scalar[i];
        double *at = (double *)((char *)c->args + s->at);
        int64_t base;
        if (s->from_extent && isnan(*at) && extent_value(&s->base, c->dim, &base))
            *at = s->number == -0.5 ? 1.0 / sqrt((double)base) : pow((double)base, s->number);
    }
}

Status spec_check(const Spec *spec, void *args, Error *err)
{
    Check c = {.spec = spec, .args = args, .err = err, .stars = -1, .device_source = -1};
    for (int i = 0; i < spec->dims; i++)
        c.dim[i] = c.source[i] = c.without[i] = -1;
    Status status = presence_check(&c);
    if (status == OK)
        status = numbers_check(&c);
    for (int i = 0; i < spec->args && status == OK; i++)
        if (check_tensor(&c, i)->given) {
            status = arg_check(&c, i);
            absent_apply(&c);
        }
    for (int i = spec->first[ROW_RULE]; i < spec->first[ROW_RULE_IF + 1] && status == OK; i++)
        status = rule_check(&c, &spec->rule[i]);
    if (status == OK)
        status = overlap_check(&c);
    if (status == OK && spec->check_values >= 0 && scalar_int(spec, args, spec->check_values))
        status = values_check(&c);
    if (status == OK)
        dims_store(&c);
    return status;
}

int spec_has_work(const Spec *spec, const void *args)
{
    for (int i = 0; i < spec->args; i++) {
        const Tensor *t = arg_tensor(spec, args, i);
        int elements = spec->arg[i].role >= OUT && t->given;
        for (int j = 0; elements && j < t->ndim; j++)
            elements = t->shape[j] > 0;
        if (elements)
            return 1;
    }
    return 0;
}
