/* The argument struct of each op, made from the rows of formats.h. A kernel gets a const pointer to one, checked:
   dims resolved, tensors in the first axis order, choices as the index of their value in the row. */
#ifndef ARGS_H
#define ARGS_H

#include <math.h>

#include "status.h"
#include "tensor.h"

typedef enum {
#define OP(op, doc) OP_##op,
#include "formats.h"
    OP_COUNT
} OpId;

/* clang-format off */
#define OP(op, doc) typedef struct op##_args { Call call;
#define DIM(name, doc) int64_t name;
#define ARG(name, role, shape, dtypes, layout, doc) Tensor name;
#define NUM(name, standard, doc) double name;
#define INT(name, standard, doc) int64_t name;
#define FLAG(name, standard, doc) int name;
#define CHOICE(name, values, doc) int name;
#define END(op) } op##_args;
/* clang-format on */
#include "formats.h"

/* The values of every CHOICE, in the order of its row. Checked against the rows at import (formats.c). */
enum { GATE_LOG, GATE_FACTOR, GATE_RAW };
enum { BETA_VALUE, BETA_LOGIT };
enum { HEADS_GROUPED, HEADS_TILED };
enum { STATE_KV, STATE_VK };
enum { ROUNDING_FLOAT32, ROUNDING_HF };
enum { ACTIVATION_NONE, ACTIVATION_SILU };
enum { GATED_SILU, GATED_SIGMOID };
enum { LAYOUT_BTD, LAYOUT_BDT };
enum { HISTORY_LINEAR, HISTORY_CIRCULAR, HISTORY_DRAFT };
enum { WEIGHT_W, WEIGHT_ONE_PLUS_W };

#endif
