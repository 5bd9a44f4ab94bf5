/* The rows about contents. They read host memory only; what lies on a device is the caller's promise. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "extent.h"

/* Element (i, j) of an integer or bool tensor with one or two axes. */
static int64_t whole(const Tensor *t, int64_t i, int64_t j)
{
    const char *at =
        (const char *)t->data +
        (i * t->stride[0] + (t->ndim > 1 ? j * t->stride[1] : 0)) * DTYPE_SIZE[t->dtype];
    switch (t->dtype) {
    case I32:
        return *(const int32_t *)at;
    case I64:
        return *(const int64_t *)at;
    default:
        return *(const uint8_t *)at != 0;
    }
}

static float real(const Tensor *t, int64_t offset)
{
    const char *at = (const char *)t->data + offset * DTYPE_SIZE[t->dtype];
    uint32_t bits;
    float value;
    if (t->dtype == F32)
        return *(const float *)at;
    uint32_t half = *(const uint16_t *)at;
    if (t->dtype == F16) {
        uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
        value = exponent == 31  ? (fraction ? NAN : INFINITY)
                : exponent == 0 ? ldexpf((float)fraction, -24)
                                : ldexpf((float)(fraction | 1024), (int)exponent - 25);
        return half >> 15 ? -value : value;
    }
    bits = half << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int on_host(const Check *c)
{
    return c->device_source >= 0 && check_tensor(c, c->device_source)->device.type == DEVICE_CPU;
}

/* The first rule of a kind whose argument is given, or NULL. */
static const Rule *rule_given(const Check *c, RowKind kind)
{
    for (int i = c->spec->first[kind]; i < c->spec->first[kind + 1]; i++)
        if (check_tensor(c, c->spec->rule[i].arg)->given)
            return &c->spec->rule[i];
    return NULL;
}

static Status offsets_check(Check *c, const Rule *r)
{
    const Tensor *t = check_tensor(c, r->arg);
    int64_t count = t->shape[0], before = 0, last = c->dim[r->dim];
    for (int64_t i = 0; i < count; i++) {
        int64_t value = whole(t, i, 0);
        if (i == 0 && value != 0)
            return fail(c->err, BAD_VALUE, "%s: %s[0] is %lld; expected 0", c->spec->name,
                        arg_name(c, r->arg), (long long)value);
        if (value < before)
            return fail(c->err, BAD_VALUE,
                        "%s: %s[%lld] is %lld; expected at least %lld, the value before it",
                        c->spec->name, arg_name(c, r->arg), (long long)i, (long long)value,
                        (long long)before);
        before = value;
    }
    if (before == last)
        return OK;
    Text text = {0};
    int first = 1;
    text_add_dim(&text, c, r->dim, &first);
    return fail(c->err, BAD_VALUE, "%s: %s[%lld] is %lld; expected %s%s", c->spec->name,
                arg_name(c, r->arg), (long long)count - 1, (long long)before,
                c->spec->dim[r->dim]->name, text.text);
}

static Status spans_check(Check *c, const Rule *r)
{
    const Tensor *t = check_tensor(c, r->arg);
    for (int64_t i = 0; i < t->shape[0]; i++) {
        int64_t from = whole(t, i, 0), end = whole(t, i, 1);
        if (0 <= from && from <= end && end <= c->dim[r->dim])
            continue;
        Text text = {0};
        int first = 1;
        text_add_dim(&text, c, r->dim, &first);
        return fail(c->err, BAD_VALUE,
                    "%s: %s[%lld] is (%lld, %lld); expected 0 <= first <= end <= %s%s",
                    c->spec->name, arg_name(c, r->arg), (long long)i, (long long)from,
                    (long long)end, c->spec->dim[r->dim]->name, text.text);
    }
    return OK;
}

/* Sequences as cu_seqlens, token_range or the batch cut them. */
typedef struct {
    const Tensor *offsets, *spans; /* at most one is not NULL */
    int64_t count, time;
} Sequences;

static Sequences sequences(const Check *c)
{
    Sequences s = {NULL, NULL, 0, 0};
    const Spec *spec = c->spec;
    int row = spec->first[ROW_OFFSETS];
    if (row == spec->first[ROW_OFFSETS + 1])
        return s;
    const Rule *offsets = rule_given(c, ROW_OFFSETS), *spans = rule_given(c, ROW_SPANS);
    s.time = c->dim[spec->rule[row].dim];
    s.count = c->dim[spec->arg[spec->rule[row].arg].shape.extent[0].dim];
    if (offsets)
        s.offsets = check_tensor(c, offsets->arg);
    else if (spans)
        s.spans = check_tensor(c, spans->arg);
    return s;
}

static int64_t sequence_length(const Sequences *s, int64_t n)
{
    if (s->offsets)
        return whole(s->offsets, n + 1, 0) - whole(s->offsets, n, 0);
    return s->spans ? whole(s->spans, n, 1) - whole(s->spans, n, 0) : s->time;
}

static Status slot_fail(Check *c, int arg, int64_t n, int64_t t, int64_t value,
                        const char *expected)
{
    Text text = {0};
    text_add(&text, "%s: %s[%lld", c->spec->name, arg_name(c, arg), (long long)n);
    if (check_tensor(c, arg)->ndim > 1 && check_tensor(c, arg)->shape[1] > 1)
        text_add(&text, ", %lld", (long long)t);
    return fail(c->err, BAD_VALUE, "%s] is %lld; expected %s", text.text, (long long)value,
                expected);
}

/* How many columns of a slots tensor count for sequence n: all that are read; of those written, one a token. */
static int64_t columns_used(const Rule *r, const Tensor *t, const Sequences *s, int64_t n)
{
    int64_t columns = t->ndim > 1 ? t->shape[1] : 1;
    if (r->row->use != WRITE || columns == 1)
        return columns;
    int64_t length = sequence_length(s, n);
    return length < columns ? length : columns;
}

static Status slots_check(Check *c, const Rule *r, const Sequences *s)
{
    const Tensor *t = check_tensor(c, r->arg);
    int64_t pad = *(const int64_t *)((const char *)c->args + c->spec->scalar[r->scalar].at);
    for (int64_t n = 0; n < t->shape[0]; n++)
        for (int64_t i = 0; i < columns_used(r, t, s, n); i++) {
            int64_t slot = whole(t, n, i);
            if (slot == pad || (slot >= 0 && slot < c->dim[r->dim]))
                continue;
            Text text = {0};
            int first = 1;
            text_add(&text, "0 .. %s-1", c->spec->dim[r->dim]->name);
            text_add_dim(&text, c, r->dim, &first);
            text_add(&text, ", or %s = %lld", c->spec->scalar[r->scalar].row->name, (long long)pad);
            return slot_fail(c, r->arg, n, i, slot, text.text);
        }
    return OK;
}

/* Who reads and who writes which slot, with the defaults of what was left out put in. */
typedef struct {
    const Tensor *read, *write, *accepted; /* NULL: sequence n has slot n, or column 0 */
    int arg;                               /* who is told: the slots written to, else those read */
    const Rule *write_rule;
    int64_t pad;
    int shared; /* both are of one pool */
    int writes; /* there is a pool to write to, and slots that may meet */
} Slots;

static int64_t slot_read(const Slots *s, int64_t n)
{
    return s->read ? whole(s->read, n, s->accepted ? whole(s->accepted, n, 0) : 0) : n;
}

static int64_t slot_written(const Slots *s, int64_t n, int64_t column)
{
    return s->write ? whole(s->write, n, column) : n;
}

/* slot -> the sequence that writes it, by open addressing. */
typedef struct {
    int64_t *slot, *owner; /* owner -1: free */
    uint64_t mask;
} Owners;

static int64_t *owner_of(const Owners *o, int64_t slot)
{
    uint64_t at = ((uint64_t)slot * UINT64_C(0x9E3779B97F4A7C15)) >> 20 & o->mask;
    while (o->owner[at] >= 0 && o->slot[at] != slot)
        at = (at + 1) & o->mask;
    o->slot[at] = slot;
    return &o->owner[at];
}

/* Fills o. No slot may be written twice. */
static Status writers_check(Check *c, const Slots *s, const Sequences *seq, const Owners *o)
{
    for (int64_t n = 0; n < seq->count; n++) {
        if (slot_read(s, n) == s->pad)
            continue;
        int64_t columns = s->write && s->write_rule->row->use == WRITE
                              ? columns_used(s->write_rule, s->write, seq, n)
                              : 1;
        for (int64_t i = 0; i < columns; i++) {
            int64_t slot = slot_written(s, n, i);
            if (s->write && slot == s->pad)
                continue;
            int64_t *owner = owner_of(o, slot);
            if (*owner >= 0) {
                Text text = {0};
                text_add(&text, "a slot written once, but sequence %lld writes it too",
                         (long long)*owner);
                return slot_fail(c, s->arg, n, i, slot, text.text);
            }
            *owner = n;
        }
    }
    return OK;
}

/* No slot may be written that another sequence reads. */
static Status readers_check(Check *c, const Slots *s, const Sequences *seq, const Owners *o)
{
    for (int64_t n = 0; n < seq->count; n++) {
        int64_t slot = slot_read(s, n), owner = slot == s->pad ? -1 : *owner_of(o, slot);
        Text text = {0};
        if (owner < 0 || owner == n)
            continue;
        if (!s->write) {
            text_add(&text, "a slot that no other sequence writes, but sequence %lld writes it",
                     (long long)owner);
            return slot_fail(c, s->arg, n, s->accepted ? whole(s->accepted, n, 0) : 0, slot,
                             text.text);
        }
        int64_t column = 0;
        while (slot_written(s, owner, column) != slot)
            column++;
        text_add(&text, "a slot that no other sequence reads, but sequence %lld reads it",
                 (long long)n);
        return slot_fail(c, s->arg, owner, column, slot, text.text);
    }
    return OK;
}

/* The pool that a slots row indexes: the first argument whose first axis is that dim. */
static const Tensor *slots_pool(const Check *c, const Rule *r)
{
    for (int i = 0; i < c->spec->args; i++) {
        const Shape *shape = &c->spec->arg[i].shape;
        if (i != r->arg && !shape->star && shape->extent[0].dim == r->dim &&
            !shape->extent[0].steps)
            return check_tensor(c, i);
    }
    return NULL;
}

static Slots slots_find(const Check *c)
{
    const Spec *spec = c->spec;
    Slots s = {.arg = -1};
    const Tensor *from = NULL, *to = NULL;
    for (int i = spec->first[ROW_SLOTS]; i < spec->first[ROW_SLOTS + 1]; i++) {
        const Rule *r = &spec->rule[i];
        const Tensor *t = check_tensor(c, r->arg);
        int both = r->row->use == BOTH && t->given;
        s.pad = *(const int64_t *)((const char *)c->args + spec->scalar[r->scalar].at);
        if (r->row->use != WRITE) {
            from = slots_pool(c, r);
            s.read = t->given ? t : NULL;
        } else {
            to = slots_pool(c, r);
        }
        if (t->given)
            s.arg = r->arg;
        if (both || (t->given && r->row->use == WRITE)) {
            s.write = t;
            s.write_rule = r;
        }
    }
    const Rule *accepted = s.read && s.read->ndim > 1 ? rule_given(c, ROW_INDEX) : NULL;
    s.accepted = accepted ? check_tensor(c, accepted->arg) : NULL;
    s.shared = from && to && from->given && to->given && from->data == to->data;
    s.writes = to && to->given && (s.write || (s.shared && s.read));
    return s;
}

static Status conflicts_check(Check *c, const Sequences *seq)
{
    enum { SMALL = 512 };
    Slots s = slots_find(c);
    if (!s.writes || seq->count == 0)
        return OK;
    int64_t slot[SMALL], owner[SMALL];
    int64_t columns = s.write && s.write->ndim > 1 && s.write->shape[1] > 1 ? s.write->shape[1] : 1;
    uint64_t size = SMALL, entries;
    if (__builtin_mul_overflow((uint64_t)seq->count, (uint64_t)columns, &entries) || entries >> 48)
        return fail(c->err, NO_MEMORY, "%s: no memory to check %s", c->spec->name,
                    arg_name(c, s.arg));
    /* Twice as many places as entries: one a written slot, one a slot that is only looked up. */
    while (size / 4 < entries)
        size *= 2;
    Owners o = {slot, owner, size - 1};
    if (size > SMALL) {
        o.slot = malloc(2 * size * sizeof *o.slot);
        if (!o.slot)
            return fail(c->err, NO_MEMORY, "%s: no memory to check %s", c->spec->name,
                        arg_name(c, s.arg));
        o.owner = o.slot + size;
    }
    memset(o.owner, -1, size * sizeof *o.owner);
    Status status = writers_check(c, &s, seq, &o);
    if (status == OK && s.shared)
        status = readers_check(c, &s, seq, &o);
    if (o.slot != slot)
        free(o.slot);
    return status;
}

static Status index_check(Check *c, const Rule *r)
{
    const Tensor *t = check_tensor(c, r->arg);
    int64_t low = (int64_t)r->row->low, end = 0; /* used with an extent only */
    const char *extent = r->row->second;
    if (extent[0] && !extent_value(&r->right, c->dim, &end))
        return OK;
    for (int64_t i = 0; i < t->shape[0]; i++) {
        int64_t value = whole(t, i, 0);
        if (value >= low && (!extent[0] || value < end))
            continue;
        Text text = {0};
        int first = 1;
        if (extent[0]) {
            text_add(&text, "%lld .. %lld, below %s", (long long)low, (long long)end - 1, extent);
            text_add_extent(&text, c, &r->right, &first);
        } else {
            text_add(&text, "at least %lld", (long long)low);
        }
        return slot_fail(c, r->arg, i, 0, value, text.text);
    }
    return OK;
}

static Status positions_check(Check *c, const Rule *r, const Sequences *s)
{
    const Tensor *t = check_tensor(c, r->arg);
    for (int64_t i = 0; i < t->shape[0]; i++) {
        int64_t n = whole(t, i, 0), tokens = whole(t, i, 1);
        if (n < 0 || n >= s->count)
            return fail(c->err, BAD_VALUE,
                        "%s: %s[%lld] is (%lld, %lld); expected a sequence 0 .. %lld first",
                        c->spec->name, arg_name(c, r->arg), (long long)i, (long long)n,
                        (long long)tokens, (long long)s->count - 1);
        if (tokens < 0 || tokens > sequence_length(s, n))
            return fail(c->err, BAD_VALUE,
                        "%s: %s[%lld] is (%lld, %lld); expected 0 .. %lld tokens of that sequence",
                        c->spec->name, arg_name(c, r->arg), (long long)i, (long long)n,
                        (long long)tokens, (long long)sequence_length(s, n));
    }
    return OK;
}

static Status longest_check(Check *c, const Rule *r, const Sequences *s)
{
    int64_t limit = 0;
    if (r->row->kind == ROW_LONGEST_IF) {
        limit = c->dim[r->dim];
        if (!check_tensor(c, r->arg)->given || limit <= 1)
            return OK;
    } else if (!extent_value(&r->right, c->dim, &limit)) {
        return OK;
    }
    for (int64_t n = 0; n < s->count; n++) {
        if (sequence_length(s, n) <= limit)
            continue;
        Text text = {0};
        int first = 1;
        text_add(&text, "%s: sequence %lld has %lld tokens; expected at most ", c->spec->name,
                 (long long)n, (long long)sequence_length(s, n));
        if (r->row->kind == ROW_LONGEST_IF) {
            text_add(&text, "%s, or %s = 1,", r->row->second, r->row->second);
            text_add_dim(&text, c, r->dim, &first);
        } else {
            text_add(&text, "%s", r->row->second);
        }
        return fail(c->err, BAD_VALUE, "%s", text.text);
    }
    return OK;
}

/* A token that no sequence computes: outside its row's span, or of a padded sequence. Its values mean nothing. */
static int token_skipped(const Check *c, const Sequences *s, int64_t b, int64_t t)
{
    int64_t n = b;
    Slots slots = slots_find(c);
    if (s->spans && (t < whole(s->spans, b, 0) || t >= whole(s->spans, b, 1)))
        return 1;
    if (s->offsets)
        for (n = 0; n + 1 < s->count && t >= whole(s->offsets, n + 1, 0);)
            n++;
    return slots.read && slot_read(&slots, n) == slots.pad;
}

static Status range_fail(Check *c, const Rule *r, const int64_t *index, float value)
{
    const Scalar *s = &c->spec->scalar[r->scalar];
    Text text = {0};
    text_add(&text, "%s: %s[", c->spec->name, arg_name(c, r->arg));
    for (int i = 0; i < check_tensor(c, r->arg)->ndim; i++)
        text_add(&text, i ? ", %lld" : "%lld", (long long)index[i]);
    text_add(&text, "] is %g; expected ", (double)value);
    if (isinf(r->row->low))
        text_add(&text, "at most %g", r->row->high);
    else
        text_add(&text, "%g .. %g", r->row->low, r->row->high);
    return fail(c->err, BAD_VALUE, "%s with %s=\"%s\"; %s", text.text, s->row->name,
                s->value[r->value], r->row->doc);
}

static Status range_check(Check *c, const Rule *r, const Sequences *s)
{
    const Tensor *t = check_tensor(c, r->arg);
    if (t->ndim != 3 || !t->given || scalar_int(c->spec, c->args, r->scalar) != r->value)
        return OK;
    float low = (float)r->row->low, high = (float)r->row->high;
    int64_t i[3];
    for (i[0] = 0; i[0] < t->shape[0]; i[0]++)
        for (i[1] = 0; i[1] < t->shape[1]; i[1]++) {
            int64_t row = i[0] * t->stride[0] + i[1] * t->stride[1];
            for (i[2] = 0; i[2] < t->shape[2]; i[2]++) {
                float value = real(t, row + i[2] * t->stride[2]);
                if ((value < low || value > high) && !token_skipped(c, s, i[0], i[1]))
                    return range_fail(c, r, i, value);
            }
        }
    return OK;
}

static Status rule_values(Check *c, const Rule *r, const Sequences *s)
{
    if (r->arg >= 0 && !check_tensor(c, r->arg)->given)
        return OK;
    switch (r->row->kind) {
    case ROW_OFFSETS:
        return offsets_check(c, r);
    case ROW_SPANS:
        return spans_check(c, r);
    case ROW_SLOTS:
        return slots_check(c, r, s);
    case ROW_INDEX:
        return index_check(c, r);
    case ROW_POSITIONS:
        return positions_check(c, r, s);
    case ROW_LONGEST:
    case ROW_LONGEST_IF:
        return longest_check(c, r, s);
    case ROW_RANGE_IF:
        return range_check(c, r, s);
    default:
        return OK;
    }
}

Status values_check(Check *c)
{
    /* What cuts sequences comes first: the others lean on it. */
    static const RowKind ORDER[] = {ROW_OFFSETS, ROW_SPANS, ROW_LONGEST,   ROW_LONGEST_IF,
                                    ROW_SLOTS,   ROW_INDEX, ROW_POSITIONS, ROW_RANGE_IF};
    if (!on_host(c))
        return OK;
    Sequences s = sequences(c);
    for (size_t k = 0; k < sizeof ORDER / sizeof *ORDER; k++) {
        for (int i = c->spec->first[ORDER[k]]; i < c->spec->first[ORDER[k] + 1]; i++) {
            Status status = rule_values(c, &c->spec->rule[i], &s);
            if (status != OK)
                return status;
        }
        Status status = ORDER[k] == ROW_INDEX ? conflicts_check(c, &s) : OK;
        if (status != OK)
            return status;
    }
    return OK;
}
