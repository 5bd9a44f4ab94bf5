/* The rows of formats.h as data, read once at import, and the check that every call passes through. No Python here
   and no kernels. */
#ifndef SPEC_H
#define SPEC_H

#include <stddef.h>

#include "args.h"

enum {
    MAX_DIMS = 16,
    MAX_ARGS = 24,
    MAX_SCALARS = 16,
    MAX_RULES = 48,
    MAX_STEPS = 4,
    MAX_VALUES = 4
};

typedef enum { IN, OPT, OUT, OUT_OPT, INOUT } Role;
typedef enum { ROWS, DENSE, ANY } Layout;
typedef enum { READ, WRITE, BOTH } SlotUse;

/* clang-format off */
typedef enum {
    ROW_DIM, ROW_ARG, ROW_ALT, ROW_ABSENT, ROW_HINT, ROW_NUM, ROW_INT, ROW_FLAG, ROW_CHOICE, ROW_RULE,
    ROW_RULE_IF, ROW_GIVEN_IF, ROW_NEEDS, ROW_EXCLUDES, ROW_SPANS, ROW_OFFSETS, ROW_SLOTS, ROW_INDEX,
    ROW_POSITIONS, ROW_LONGEST, ROW_LONGEST_IF, ROW_RANGE_IF, ROW_SHARE, ROW_NUM_RANGE, ROW_ALIAS,
    ROW_KINDS
} RowKind;
/* clang-format on */

/* One row as it is written. What the fields hold, by kind, stands in formats.c. */
typedef struct {
    RowKind kind;
    const char *name;
    const char *second, *third;
    const char *doc;
    int role, layout, use;
    double low, high;
    size_t at; /* offset in the args struct of DIM, ARG, NUM, INT, FLAG, CHOICE */
} Row;

/* A NAME or NUMBER and the steps applied to it, left to right. */
typedef struct {
    char op; /* one of / ^ * + -, where ^ divides and rounds up */
    int dim; /* the operand: a dim, or -1 for the number */
    int64_t number;
} Step;

typedef struct {
    int dim; /* -1: number */
    int64_t number;
    int steps;
    Step step[MAX_STEPS];
} Extent;

typedef struct {
    const char *text;
    int count;    /* extents, without the star */
    int star;     /* any leading axes before them */
    int optional; /* the last one may be left out */
    Extent extent[MAX_NDIM];
} Shape;

typedef struct {
    const Row *row;
    const char *name; /* in messages: the ALIAS, or the row's */
    size_t at;
    Role role;
    Layout layout;
    uint32_t dtypes; /* bit i: dtype i */
    int same_as;     /* the arg whose dtype is accepted too, or -1 */
    Shape shape;
    int alt_choice; /* the CHOICE that picks the second axis order, or -1 */
    int alt_value;
    Shape alt;
    int order[MAX_NDIM]; /* axis i of the first order is axis order[i] of the second */
} Arg;

typedef struct {
    const Row *row;
    size_t at;
    double number; /* default of NUM; of FLAG and INT as well */
    int64_t integer;
    Extent base; /* NUM "K^-0.5": base K, number -0.5 */
    int from_extent;
    int values; /* of a CHOICE */
    char value[MAX_VALUES][16];
} Scalar;

/* Every row that is neither DIM, ARG nor scalar. Fields that its kind does not use are -1 or empty. */
typedef struct {
    const Row *row;
    int arg, other; /* args */
    int dim;
    int scalar, value; /* the CHOICE and its value; the INT pad of SLOTS; the NUM of NUM_RANGE */
    char op;           /* RULE: l g = % */
    Extent left, right;
    Shape shape;
} Rule;

typedef struct {
    const char *name, *doc;
    OpId op;
    size_t size; /* of the args struct */
    const Row *rows;
    int row_count, dims, args, scalars, rules;
    const Row *dim[MAX_DIMS];
    Arg arg[MAX_ARGS];
    Scalar scalar[MAX_SCALARS];
    Rule rule[MAX_RULES];     /* in the order of their kinds: */
    int first[ROW_KINDS + 1]; /* rules of kind k are first[k] .. first[k + 1] - 1 */
    int check_values;         /* the FLAG of that name, or -1 */
} Spec;

/* The rows of an op as written (formats.c). */
typedef struct {
    const char *name, *doc;
    size_t size;
    const Row *rows;
    int count;
} OpRows;

OpRows op_rows(OpId op);

/* The C name of each choice's values, so that a kernel's enumerator and the row cannot drift apart (formats.c). */
Status choices_check(const Spec *spec, Error *err);

/* Reads the rows of an op. BAD_VALUE with the row's text when a row cannot be read or names nothing. */
Status spec_compile(OpId op, Spec *spec, Error *err);
Status rows_compile(OpRows rows, OpId op, Spec *spec, Error *err);

/* Writes every scalar's default; a NUM that depends on an extent becomes NaN, which spec_check replaces. */
void spec_defaults(const Spec *spec, void *args);

/* Holds args against the rows, resolves the dims, puts tensors in their first axis order and gives axes of extent 1
   the stride that a dense tensor has. Fails with the first row that does not hold. */
Status spec_check(const Spec *spec, void *args, Error *err);

/* Whether any output has an element, so that there is something to compute. */
int spec_has_work(const Spec *spec, const void *args);

/* "float32, float16 or bfloat16 from q": what an argument may hold. same is that argument's dtype, or -1. */
void dtypes_text(const Spec *spec, int arg, int same, char *text, size_t size);

/* The place in an args struct. */
static inline Tensor *arg_tensor(const Spec *spec, const void *args, int arg)
{
    return (Tensor *)((char *)args + spec->arg[arg].at);
}

static inline int scalar_int(const Spec *spec, const void *args, int scalar)
{
    return *(const int *)((const char *)args + spec->scalar[scalar].at);
}

extern const char *const DTYPE_NAME[DTYPE_COUNT];
extern const int DTYPE_SIZE[DTYPE_COUNT]; /* bytes an element */

#endif
