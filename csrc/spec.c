/* spec_compile: the rows of one op, read once. Whatever a row names must exist, so that a slip in formats.h stops the
   import with the row's text and never reaches a call. */
#include "spec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "extent.h"

static Status bad_row(const Spec *spec, const Row *row, const char *what, Error *err)
{
    return fail(err, BAD_VALUE, "formats.h: %s: row (%s%s%s%s%s): %s", spec->name,
                row->name ? row->name : "", row->second ? ", " : "", row->second ? row->second : "",
                row->third ? ", " : "", row->third ? row->third : "", what);
}

static int arg_named(const Spec *spec, const char *name)
{
    for (int i = 0; i < spec->args; i++)
        if (!strcmp(spec->arg[i].row->name, name))
            return i;
    return -1;
}

static int dim_named(const Spec *spec, const char *name)
{
    for (int i = 0; i < spec->dims; i++)
        if (!strcmp(spec->dim[i]->name, name))
            return i;
    return -1;
}

static int scalar_named(const Spec *spec, const char *name, RowKind kind)
{
    for (int i = 0; i < spec->scalars; i++)
        if (spec->scalar[i].row->kind == kind && !strcmp(spec->scalar[i].row->name, name))
            return i;
    return -1;
}

/* "choice=value" */
static int choice_read(const Spec *spec, const char *text, int *scalar, int *value)
{
    char choice[32] = "";
    size_t length = strcspn(text, "=");
    if (!text[length] || length >= sizeof choice)
        return 0;
    memcpy(choice, text, length);
    *scalar = scalar_named(spec, choice, ROW_CHOICE);
    for (int i = 0; *scalar >= 0 && i < spec->scalar[*scalar].values; i++)
        if (!strcmp(spec->scalar[*scalar].value[i], text + length + 1)) {
            *value = i;
            return 1;
        }
    return 0;
}

static int dtypes_read(Spec *spec, const char *text, Arg *arg)
{
    arg->same_as = -1;
    while (*text) {
        char word[32] = "";
        size_t length = strcspn(text, " ");
        if (length == 0 || length >= sizeof word)
            return 0;
        memcpy(word, text, length);
        text += length + (text[length] == ' ');
        int known = 0;
        for (int i = 0; i < DTYPE_COUNT; i++)
            if (!strcmp(word, DTYPE_NAME[i])) {
                arg->dtypes |= UINT32_C(1) << i;
                known = 1;
            }
        if (word[0] == '=' && arg->same_as < 0)
            known = (arg->same_as = arg_named(spec, word + 1)) >= 0;
        if (!known)
            return 0;
    }
    return 1;
}

static Status arg_compile(Spec *spec, const Row *row, Error *err)
{
    if (spec->args == MAX_ARGS)
        return bad_row(spec, row, "too many arguments", err);
    Arg *arg = &spec->arg[spec->args];
    *arg = (Arg){.row = row,
                 .name = row->name,
                 .at = row->at,
                 .role = (Role)row->role,
                 .layout = (Layout)row->layout,
                 .alt_choice = -1};
    if (!shape_read(spec, row->second, &arg->shape))
        return bad_row(spec, row, "the shape cannot be read", err);
    if (!dtypes_read(spec, row->third, arg))
        return bad_row(spec, row, "the dtypes cannot be read", err);
    spec->args++;
    return OK;
}

static Status scalar_compile(Spec *spec, const Row *row, Error *err)
{
    if (spec->scalars == MAX_SCALARS)
        return bad_row(spec, row, "too many scalars", err);
    Scalar *s = &spec->scalar[spec->scalars++];
    *s = (Scalar){.row = row, .at = row->at};
    char *end = NULL;
    if (row->kind == ROW_NUM) {
        s->number = strtod(row->second, &end);
        if (*end) {
            const char *text = row->second;
            s->from_extent = 1;
            if (!extent_read(spec, &text, &s->base) || *text != '^')
                return bad_row(spec, row, "the default cannot be read", err);
            s->number = strtod(++text, &end);
            if (end == text)
                return bad_row(spec, row, "the default cannot be read", err);
        }
    } else if (row->kind == ROW_INT) {
        s->integer = strtoll(row->second, &end, 10);
    } else if (row->kind == ROW_FLAG) {
        s->integer = !strcmp(row->second, "true");
        if (!s->integer && strcmp(row->second, "false"))
            return bad_row(spec, row, "the default is neither true nor false", err);
        if (!strcmp(row->name, "check_values"))
            spec->check_values = spec->scalars - 1;
    }
    if (end && (*end || end == row->second))
        return bad_row(spec, row, "the default cannot be read", err);
    for (const char *text = row->second; row->kind == ROW_CHOICE && *text;) {
        size_t length = strcspn(text, "|");
        if (s->values == MAX_VALUES || length == 0 || length >= sizeof s->value[0])
            return bad_row(spec, row, "the values cannot be read", err);
        memcpy(s->value[s->values++], text, length);
        text += length + (text[length] == '|');
    }
    return OK;
}

/* axis i of the first order is axis order[i] of the second: the one with the same extent's text. */
static int order_read(Arg *arg)
{
    if (arg->alt.count != arg->shape.count || arg->alt.star || arg->shape.star)
        return 0;
    int used = 0;
    for (int i = 0; i < arg->shape.count; i++) {
        int found = -1;
        for (int j = 0; j < arg->alt.count; j++)
            if (!memcmp(&arg->shape.extent[i], &arg->alt.extent[j], sizeof(Extent)))
                found = j;
        if (found < 0 || used >> found & 1)
            return 0;
        used |= 1 << found;
        arg->order[i] = found;
    }
    return 1;
}

static Status alt_compile(Spec *spec, const Row *row, Error *err)
{
    int index = arg_named(spec, row->name);
    Arg *arg = index >= 0 ? &spec->arg[index] : NULL;
    if (!arg || arg->alt_choice >= 0 ||
        !choice_read(spec, row->second, &arg->alt_choice, &arg->alt_value))
        return bad_row(spec, row, "no such argument, choice or value", err);
    if (!shape_read(spec, row->third, &arg->alt) || !order_read(arg))
        return bad_row(spec, row, "the shape does not hold the first order's extents", err);
    return OK;
}

static Status alias_compile(Spec *spec, const Row *row, Error *err)
{
    int index = arg_named(spec, row->name);
    if (index < 0)
        return bad_row(spec, row, "no such argument", err);
    spec->arg[index].name = row->second;
    return OK;
}

/* EXTENT op EXTENT */
static int rule_read(const Spec *spec, const char *text, Rule *rule)
{
    if (!extent_read(spec, &text, &rule->left) || *text++ != ' ')
        return 0;
    rule->op = *text == '<' ? 'l' : *text == '>' ? 'g' : *text;
    if (!strchr("lg=%", rule->op) || (rule->op != '%' && text[1] != '='))
        return 0;
    text += rule->op == '%' ? 1 : 2;
    return *text++ == ' ' && extent_read(spec, &text, &rule->right) && !*text;
}

static int text_is_extent(const Spec *spec, const char *text, Extent *e)
{
    return extent_read(spec, &text, e) && !*text;
}

static int rule_fields(Spec *spec, const Row *row, Rule *rule)
{
    switch (row->kind) {
    case ROW_ABSENT:
        return (rule->dim = dim_named(spec, row->second)) >= 0 &&
               text_is_extent(spec, row->third, &rule->right);
    case ROW_HINT:
        return shape_read(spec, row->second, &rule->shape);
    case ROW_RULE:
    case ROW_RULE_IF:
        return rule_read(spec, row->second, rule);
    case ROW_GIVEN_IF:
    case ROW_RANGE_IF:
        return choice_read(spec, row->second, &rule->scalar, &rule->value);
    case ROW_NEEDS:
    case ROW_EXCLUDES:
    case ROW_SHARE:
        return (rule->other = arg_named(spec, row->second)) >= 0;
    case ROW_SPANS:
    case ROW_OFFSETS:
    case ROW_POSITIONS:
    case ROW_LONGEST_IF:
        return (rule->dim = dim_named(spec, row->second)) >= 0;
    case ROW_SLOTS:
        rule->scalar = scalar_named(spec, row->third, ROW_INT);
        return (rule->dim = dim_named(spec, row->second)) >= 0 && rule->scalar >= 0;
    case ROW_NUM_RANGE:
        rule->scalar = scalar_named(spec, row->name, ROW_NUM);
        return rule->scalar >= 0 && row->low <= row->high;
    case ROW_INDEX:
        return !row->second[0] || text_is_extent(spec, row->second, &rule->right);
    case ROW_LONGEST:
        return text_is_extent(spec, row->second, &rule->right);
    default:
        return 0;
    }
}

static Status rule_compile(Spec *spec, const Row *row, Error *err)
{
    if (spec->rules == MAX_RULES)
        return bad_row(spec, row, "too many rules", err);
    Rule *rule = &spec->rule[spec->rules++];
    *rule = (Rule){.row = row, .arg = -1, .other = -1, .dim = -1, .scalar = -1};
    int names_arg = row->name && row->kind != ROW_NUM_RANGE;
    if (names_arg && (rule->arg = arg_named(spec, row->name)) < 0)
        return bad_row(spec, row, "no such argument", err);
    if (!rule_fields(spec, row, rule))
        return bad_row(spec, row, "it names nothing, or cannot be read", err);
    return OK;
}

/* Every name of an extent that does not fix it must be fixed by an argument that is always there. */
static Status names_check(const Spec *spec, Error *err)
{
    int known[MAX_DIMS] = {0};
    for (int i = 0; i < spec->args; i++)
        for (int j = 0; j < spec->arg[i].shape.count; j++) {
            const Extent *e = &spec->arg[i].shape.extent[j];
            if (extent_fixes(e) && (!known[e->dim] || spec->arg[i].role == IN))
                known[e->dim] = 1;
            if (e->dim >= 0 && !known[e->dim])
                return bad_row(spec, spec->arg[i].row,
                               "an extent's name is fixed by no row before it", err);
            for (int k = 0; k < e->steps; k++)
                if (e->step[k].dim >= 0 && !known[e->step[k].dim])
                    return bad_row(spec, spec->arg[i].row,
                                   "a step's name is fixed by no row before it", err);
        }
    for (int i = 0; i < spec->dims; i++)
        if (!known[i])
            return bad_row(spec, spec->dim[i], "no argument fixes this dim", err);
    return OK;
}

static Status row_compile(Spec *spec, const Row *row, Error *err)
{
    switch (row->kind) {
    case ROW_DIM:
        if (spec->dims == MAX_DIMS)
            return bad_row(spec, row, "too many dims", err);
        spec->dim[spec->dims++] = row;
        return OK;
    case ROW_ARG:
        return arg_compile(spec, row, err);
    case ROW_NUM:
    case ROW_INT:
    case ROW_FLAG:
    case ROW_CHOICE:
        return scalar_compile(spec, row, err);
    case ROW_ALIAS:
        return alias_compile(spec, row, err);
    case ROW_ALT:
        return alt_compile(spec, row, err);
    default:
        return rule_compile(spec, row, err);
    }
}

/* Stable, and the kinds are few. */
static void rules_sort(Spec *spec)
{
    Rule sorted[MAX_RULES];
    int count = 0;
    for (int kind = 0; kind < ROW_KINDS; kind++) {
        spec->first[kind] = count;
        for (int i = 0; i < spec->rules; i++)
            if ((int)spec->rule[i].row->kind == kind)
                sorted[count++] = spec->rule[i];
    }
    spec->first[ROW_KINDS] = count;
    memcpy(spec->rule, sorted, (size_t)count * sizeof *sorted);
}

Status spec_compile(OpId op, Spec *spec, Error *err)
{
    return rows_compile(op_rows(op), op, spec, err);
}

Status rows_compile(OpRows rows, OpId op, Spec *spec, Error *err)
{
    memset(spec, 0, sizeof *spec);
    spec->name = rows.name;
    spec->doc = rows.doc;
    spec->op = op;
    spec->size = rows.size;
    spec->rows = rows.rows;
    spec->row_count = rows.count;
    spec->check_values = -1;
    /* First what is named, then what names it, so that rows may stand in any order. */
    for (int pass = 0; pass < 3; pass++)
        for (int i = 0; i < rows.count; i++) {
            RowKind kind = rows.rows[i].kind;
            int scalar =
                kind == ROW_NUM || kind == ROW_INT || kind == ROW_FLAG || kind == ROW_CHOICE;
            int when = kind == ROW_DIM ? 0 : kind == ROW_ARG || scalar ? 1 : 2;
            Status status = when == pass ? row_compile(spec, &rows.rows[i], err) : OK;
            if (status != OK)
                return status;
        }
    rules_sort(spec);
    Status status = names_check(spec, err);
    return status != OK ? status : choices_check(spec, err);
}

void spec_defaults(const Spec *spec, void *args)
{
    for (int i = 0; i < spec->scalars; i++) {
        const Scalar *s = &spec->scalar[i];
        void *at = (char *)args + s->at;
        switch (s->row->kind) {
        case ROW_NUM:
            *(double *)at = s->from_extent ? NAN : s->number;
            break;
        case ROW_INT:
            *(int64_t *)at = s->integer;
            break;
        case ROW_FLAG:
            *(int *)at = (int)s->integer;
            break;
        default:
            *(int *)at = 0;
            break;
        }
    }
}

void dtypes_text(const Spec *spec, int arg, int same, char *text, size_t size)
{
    const Arg *a = &spec->arg[arg];
    char word[DTYPE_COUNT + 1][64];
    int words = 0;
    for (int i = 0; i < DTYPE_COUNT; i++)
        if (a->dtypes >> i & 1 && i != same)
            snprintf(word[words++], sizeof word[0], "%s", DTYPE_NAME[i]);
    if (a->same_as >= 0 && same >= 0)
        snprintf(word[words++], sizeof word[0], "%s from %s", DTYPE_NAME[same],
                 spec->arg[a->same_as].name);
    else if (a->same_as >= 0)
        snprintf(word[words++], sizeof word[0], "the dtype of %s", spec->arg[a->same_as].name);
    size_t length = 0;
    for (int i = 0; i < words && length < size; i++)
        length += (size_t)snprintf(text + length, size - length, "%s%s",
                                   i == 0           ? ""
                                   : i == words - 1 ? " or "
                                                    : ", ",
                                   word[i]);
}
