/* One call's check in progress, shared by check.c (shapes), overlap.c (memory) and values.c (contents). */
#ifndef CHECK_H
#define CHECK_H

#include "spec.h"

typedef struct {
    const Spec *spec;
    void *args;
    Error *err;
    int64_t dim[MAX_DIMS];  /* -1: not known yet */
    int source[MAX_DIMS];   /* the arg that fixed it, or -1 */
    int without[MAX_DIMS];  /* the arg whose absence fixed it, or -1 */
    int stars, star_source; /* leading axes of `*` shapes; -1: not known yet */
    int device_source;      /* the first arg given, or -1 */
    uintptr_t low[MAX_ARGS],
        high[MAX_ARGS]; /* bytes low .. high - 1 of every arg; equal when it has none */
} Check;

/* A message put together in pieces; what does not fit is cut. */
typedef struct {
    char text[640];
    size_t length;
} Text;

__attribute__((format(printf, 2, 3))) void text_add(Text *text, const char *format, ...);

/* " with D = 64 from x": adds the dim and what fixed it; the first call says "with", later ones a comma. */
void text_add_dim(Text *text, const Check *c, int dim, int *first);

/* The same for every dim that the extent names. */
void text_add_extent(Text *text, const Check *c, const Extent *e, int *first);

static inline Tensor *check_tensor(const Check *c, int arg)
{
    return arg_tensor(c->spec, c->args, arg);
}

static inline const char *arg_name(const Check *c, int arg)
{
    return c->spec->arg[arg].name;
}

static inline int arg_is_output(const Check *c, int arg)
{
    return c->spec->arg[arg].role >= OUT;
}

/* Fills low and high. BAD_LAYOUT when the tensor reaches beyond the address space, is not aligned, or is an output
   whose elements may overlap each other. */
Status memory_check(Check *c, int arg);

/* No output may touch another argument, except as SHARE rows allow. */
Status overlap_check(Check *c);

/* The rows about contents: OFFSETS SPANS SLOTS INDEX POSITIONS LONGEST LONGEST_IF RANGE_IF. */
Status values_check(Check *c);

#endif
