/* The rows of formats.h as tables. */
#include "spec.h"

#include <string.h>

const char *const DTYPE_NAME[DTYPE_COUNT] = {
#define DTYPE(id, name, code, bits) name,
#include "dtypes.def"
#undef DTYPE
};

const int DTYPE_SIZE[DTYPE_COUNT] = {
#define DTYPE(id, name, code, bits) bits / 8,
#include "dtypes.def"
#undef DTYPE
};

/* Each op's rows stand in a function of its own, so that Args can name its struct for offsetof. */
/* clang-format off */
#define OP(op, words) \
    static OpRows op##_rows(void) { typedef op##_args Args; static const Row rows[] = {
#define DIM(n, words) {.kind = ROW_DIM, .name = #n, .doc = words, .at = offsetof(Args, n)},
#define ARG(n, r, shape, dtypes, order, words) \
    {.kind = ROW_ARG, .name = #n, .role = r, .second = shape, .third = dtypes, .layout = order, .doc = words, \
     .at = offsetof(Args, n)},
#define ALIAS(arg, public) {.kind = ROW_ALIAS, .name = #arg, .second = #public},
#define ALT(arg, choice, value, shape) {.kind = ROW_ALT, .name = #arg, .second = #choice "=" #value, .third = shape},
#define ABSENT(arg, dim, extent) {.kind = ROW_ABSENT, .name = #arg, .second = #dim, .third = extent},
#define HINT(arg, shape, words) {.kind = ROW_HINT, .name = #arg, .second = shape, .doc = words},
#define NUM(n, standard, words) \
    {.kind = ROW_NUM, .name = #n, .second = standard, .doc = words, .at = offsetof(Args, n)},
#define NUM_RANGE(n, from, to) {.kind = ROW_NUM_RANGE, .name = #n, .low = from, .high = to},
#define INT(n, standard, words) \
    {.kind = ROW_INT, .name = #n, .second = standard, .doc = words, .at = offsetof(Args, n)},
#define FLAG(n, standard, words) \
    {.kind = ROW_FLAG, .name = #n, .second = standard, .doc = words, .at = offsetof(Args, n)},
#define CHOICE(n, values, words) \
    {.kind = ROW_CHOICE, .name = #n, .second = values, .doc = words, .at = offsetof(Args, n)},
#define RULE(rule) {.kind = ROW_RULE, .second = rule},
#define RULE_IF(arg, rule) {.kind = ROW_RULE_IF, .name = #arg, .second = rule},
#define GIVEN_IF(arg, choice, value) {.kind = ROW_GIVEN_IF, .name = #arg, .second = #choice "=" #value},
#define NEEDS(arg, other) {.kind = ROW_NEEDS, .name = #arg, .second = #other},
#define EXCLUDES(arg, other) {.kind = ROW_EXCLUDES, .name = #arg, .second = #other},
#define SPANS(arg, dim) {.kind = ROW_SPANS, .name = #arg, .second = #dim},
#define OFFSETS(arg, dim) {.kind = ROW_OFFSETS, .name = #arg, .second = #dim},
#define SLOTS(arg, dim, how, pad) {.kind = ROW_SLOTS, .name = #arg, .second = #dim, .use = how, .third = #pad},
#define INDEX(arg, from, extent) {.kind = ROW_INDEX, .name = #arg, .low = from, .second = extent},
#define POSITIONS(arg, dim) {.kind = ROW_POSITIONS, .name = #arg, .second = #dim},
#define LONGEST(extent) {.kind = ROW_LONGEST, .second = extent},
#define LONGEST_IF(arg, dim) {.kind = ROW_LONGEST_IF, .name = #arg, .second = #dim},
#define RANGE_IF(arg, choice, value, from, to, words) \
    {.kind = ROW_RANGE_IF, .name = #arg, .second = #choice "=" #value, .low = from, .high = to, .doc = words},
#define SHARE(out, arg) {.kind = ROW_SHARE, .name = #out, .second = #arg},
#define END(op) \
    }; return (OpRows){.size = sizeof(Args), .rows = rows, .count = (int)(sizeof rows / sizeof *rows)}; }
#include "formats.h"
/* clang-format on */

OpRows op_rows(OpId op)
{
    OpRows found = {0};
    switch (op) {
/* clang-format off */
#define OP(op, words) case OP_##op: found = op##_rows(); found.name = #op; found.doc = words; break;
/* clang-format on */
#include "formats.h"
    case OP_COUNT:
        break;
    }
    return found;
}

static const struct {
    const char *op; /* NULL: every op that has the choice */
    const char *choice, *value;
    int number;
} ENUMERATOR[] = {
    {NULL, "gate", "log", GATE_LOG},
    {NULL, "gate", "factor", GATE_FACTOR},
    {NULL, "gate", "raw", GATE_RAW},
    {NULL, "beta_kind", "value", BETA_VALUE},
    {NULL, "beta_kind", "logit", BETA_LOGIT},
    {NULL, "head_map", "grouped", HEADS_GROUPED},
    {NULL, "head_map", "tiled", HEADS_TILED},
    {NULL, "state_layout", "kv", STATE_KV},
    {NULL, "state_layout", "vk", STATE_VK},
    {NULL, "rounding", "float32", ROUNDING_FLOAT32},
    {NULL, "rounding", "hf", ROUNDING_HF},
    {"causal_conv1d", "activation", "none", ACTIVATION_NONE},
    {"causal_conv1d", "activation", "silu", ACTIVATION_SILU},
    {"causal_conv1d_step", "activation", "none", ACTIVATION_NONE},
    {"causal_conv1d_step", "activation", "silu", ACTIVATION_SILU},
    {"rms_norm_gated", "activation", "silu", GATED_SILU},
    {"rms_norm_gated", "activation", "sigmoid", GATED_SIGMOID},
    {NULL, "layout", "btd", LAYOUT_BTD},
    {NULL, "layout", "bdt", LAYOUT_BDT},
    {NULL, "history", "linear", HISTORY_LINEAR},
    {NULL, "history", "circular", HISTORY_CIRCULAR},
    {NULL, "history", "draft", HISTORY_DRAFT},
    {NULL, "weight_kind", "w", WEIGHT_W},
    {NULL, "weight_kind", "1+w", WEIGHT_ONE_PLUS_W},
};

static int enumerator_named(const Spec *spec, const Scalar *s, int number)
{
    for (size_t i = 0; i < sizeof ENUMERATOR / sizeof *ENUMERATOR; i++)
        if ((!ENUMERATOR[i].op || !strcmp(ENUMERATOR[i].op, spec->name)) &&
            !strcmp(ENUMERATOR[i].choice, s->row->name) &&
            !strcmp(ENUMERATOR[i].value, s->value[number]))
            return ENUMERATOR[i].number == number;
    return 0;
}

Status choices_check(const Spec *spec, Error *err)
{
    for (int i = 0; i < spec->scalars; i++)
        for (int number = 0; number < spec->scalar[i].values; number++)
            if (!enumerator_named(spec, &spec->scalar[i], number))
                return fail(err, BAD_VALUE,
                            "%s: CHOICE %s: value %s has no enumerator %d in args.h and formats.c",
                            spec->name, spec->scalar[i].row->name, spec->scalar[i].value[number],
                            number);
    return OK;
}
