#include "extent.h"

#include <string.h>

static int is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static int is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* NAME or NUMBER. */
static int operand_read(const Spec *spec, const char **text, int *dim, int64_t *number)
{
    const char *at = *text;
    *dim = -1;
    *number = 0;
    if (is_digit(*at)) {
        while (is_digit(*at) && *number < (INT64_C(1) << 40))
            *number = *number * 10 + (*at++ - '0');
        *text = at;
        return 1;
    }
    size_t length = 0;
    while (is_letter(at[length]) || (length && is_digit(at[length])))
        length++;
    for (int i = 0; length && i < spec->dims; i++)
        if (strlen(spec->dim[i]->name) == length && !memcmp(spec->dim[i]->name, at, length))
            *dim = i;
    *text = at + length;
    return *dim >= 0;
}

int extent_read(const Spec *spec, const char **text, Extent *e)
{
    memset(e, 0, sizeof *e);
    if (!operand_read(spec, text, &e->dim, &e->number))
        return 0;
    while (**text && strchr("/*+-", **text)) {
        if (e->steps == MAX_STEPS)
            return 0;
        Step *step = &e->step[e->steps++];
        step->op = *(*text)++;
        if (step->op == '/' && **text == '^') {
            step->op = '^';
            (*text)++;
        }
        if (!operand_read(spec, text, &step->dim, &step->number))
            return 0;
        if ((step->op == '/' || step->op == '^') && step->dim < 0 && step->number == 0)
            return 0;
    }
    return 1;
}

int shape_read(const Spec *spec, const char *text, Shape *shape)
{
    memset(shape, 0, sizeof *shape);
    shape->text = text;
    if (text[0] == '*' && text[1] == ' ') {
        shape->star = 1;
        text += 2;
    }
    while (*text) {
        if (shape->count == MAX_NDIM || shape->optional)
            return 0;
        if (!extent_read(spec, &text, &shape->extent[shape->count++]))
            return 0;
        if (*text == '?') {
            shape->optional = 1;
            text++;
        }
        if (*text && *text++ != ' ')
            return 0;
    }
    return shape->count > 0;
}

static int step_apply(char op, int64_t n, int64_t *value)
{
    switch (op) {
    case '+':
        return !__builtin_add_overflow(*value, n, value);
    case '-':
        return !__builtin_sub_overflow(*value, n, value);
    case '*':
        return !__builtin_mul_overflow(*value, n, value);
    default:
        break;
    }
    if (n <= 0)
        return 0;
    *value = *value / n + (op == '^' && *value % n > 0);
    return 1;
}

int extent_value(const Extent *e, const int64_t *dim, int64_t *value)
{
    if (e->dim >= 0 && dim[e->dim] < 0)
        return 0;
    *value = e->dim >= 0 ? dim[e->dim] : e->number;
    for (int i = 0; i < e->steps; i++) {
        const Step *step = &e->step[i];
        if (step->dim >= 0 && dim[step->dim] < 0)
            return 0;
        if (!step_apply(step->op, step->dim >= 0 ? dim[step->dim] : step->number, value))
            return 0;
    }
    return 1;
}

int extent_fixes(const Extent *e)
{
    if (e->dim < 0 || e->steps > 1)
        return 0;
    return e->steps == 0 ||
           (e->step[0].dim < 0 && strchr("+-*", e->step[0].op) && e->step[0].number > 0);
}

int extent_solve(const Extent *e, int64_t value, int64_t *dim)
{
    int64_t n = e->steps ? e->step[0].number : 0;
    if (e->steps && e->step[0].op == '*') {
        if (value % n)
            return 0;
        *dim = value / n;
    } else if (e->steps && e->step[0].op == '+') {
        *dim = value - n;
    } else if (__builtin_add_overflow(value, n, dim)) {
        return 0;
    }
    return *dim >= 0;
}
