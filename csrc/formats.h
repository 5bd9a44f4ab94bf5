/* THE CONTRACT. Every op is described here, once, as rows; what is valid is decided nowhere else. Checks, messages,
   argument structs, docs/formats.md, _core.pyi, test inputs and rejection tests all come from these rows.

   This header is included once for each thing made from the rows: define the row macros you want, include it, and it
   undefines them all (args.h makes the structs, formats.c the tables). Rows of one op stand between OP and END.

     OP(op, doc)                       begins an op
     DIM(name, doc)                    an extent that shapes speak of
     ARG(name, role, shape, dtypes, layout, doc)
         role    IN | OPT (may be None) | OUT | OUT_OPT (may be None) | INOUT
         shape   extents, outermost first: a NUMBER or a NAME with steps /n *n +n -n applied left to right;
                 `*` first = any leading axes, the same in every argument of the op that has it;
                 a last `NAME?` may be left out and then has extent 1.
                 A name is fixed by the first row that has it bare or with one +n, -n, *n step.
         dtypes  names from dtypes.def, or `=x`: the dtype of argument x
         layout  ROWS (last axis has stride 1) | DENSE (C-contiguous) | ANY (the kernel reads every stride)
     ALIAS(arg, name)                  the public function's name of arg, and the one that messages call it by
     ALT(arg, choice, value, shape)    when CHOICE choice is value, arg has its axes in this order; checked as
                                       written, then put in the first order by swapping strides; nothing is copied
     ABSENT(arg, name, extent)         without arg, the dim `name` is `extent`
     HINT(arg, shape, text)            tried after a shape mismatch only; if it fits, text ends the message
     NUM(name, default, doc)           float64; a default may be an extent to a power: "K^-0.5"
     NUM_RANGE(name, low, high)        NUM name lies in low .. high; every NUM has one, since kernels compute in float32
     INT(name, default, doc)           int64
     FLAG(name, default, doc)          bool
     CHOICE(name, values, doc)         one of the values divided by |; the first is the default
     RULE(rule)                        EXTENT op EXTENT, op one of <= >= == %   (a % b: a is a multiple of b)
     RULE_IF(arg, rule)                holds when arg is given
     GIVEN_IF(arg, choice, value)      arg must be given when choice is value, and must not be given otherwise
     NEEDS(arg, other)                 arg may be given only together with other
     EXCLUDES(arg, other)              arg must not be given together with other
     SPANS(arg, name)                  values: pairs with 0 <= first <= end <= dim `name`
     OFFSETS(arg, name)                values: first 0, never falling, last = dim `name`
     SLOTS(arg, name, use, pad)        values: 0 .. dim `name` - 1, or the value of INT `pad`; use READ, or WRITE: no
                                       slot written twice, none written that another sequence reads; or BOTH: read,
                                       and its first column written to when the WRITE slots are left out
     INDEX(arg, low, extent)           values: low .. extent - 1
     POSITIONS(arg, name)              values: pairs of a sequence, 0 .. dim `name` - 1, and a number of its tokens
     LONGEST(extent)                   no sequence (by OFFSETS, SPANS, or their dim) has more tokens than this
     LONGEST_IF(arg, name)             when arg is given with dim `name` > 1, no sequence has more than `name` tokens
     RANGE_IF(arg, choice, value, low, high, text)
                                       values in low .. high when choice is value (NaN passes: it shows itself in
                                       the result); text ends the message
     SHARE(out, arg)                   out may be the very same memory as arg (otherwise outputs overlap nothing)
     END(op)

   Values are read only when FLAG check_values is on (it is by default), and only from host memory. */

#ifndef OP
#define OP(op, doc)
#endif
#ifndef DIM
#define DIM(name, doc)
#endif
#ifndef ARG
#define ARG(name, role, shape, dtypes, layout, doc)
#endif
#ifndef ALIAS
#define ALIAS(arg, name)
#endif
#ifndef ALT
#define ALT(arg, choice, value, shape)
#endif
#ifndef ABSENT
#define ABSENT(arg, name, extent)
#endif
#ifndef HINT
#define HINT(arg, shape, text)
#endif
#ifndef NUM
#define NUM(name, standard, doc)
#endif
#ifndef NUM_RANGE
#define NUM_RANGE(name, low, high)
#endif
#ifndef INT
#define INT(name, standard, doc)
#endif
#ifndef FLAG
#define FLAG(name, standard, doc)
#endif
#ifndef CHOICE
#define CHOICE(name, values, doc)
#endif
#ifndef RULE
#define RULE(rule)
#endif
#ifndef RULE_IF
#define RULE_IF(arg, rule)
#endif
#ifndef GIVEN_IF
#define GIVEN_IF(arg, choice, value)
#endif
#ifndef NEEDS
#define NEEDS(arg, other)
#endif
#ifndef EXCLUDES
#define EXCLUDES(arg, other)
#endif
#ifndef SPANS
#define SPANS(arg, name)
#endif
#ifndef OFFSETS
#define OFFSETS(arg, name)
#endif
#ifndef SLOTS
#define SLOTS(arg, name, use, pad)
#endif
#ifndef INDEX
#define INDEX(arg, low, extent)
#endif
#ifndef POSITIONS
#define POSITIONS(arg, name)
#endif
#ifndef LONGEST
#define LONGEST(extent)
#endif
#ifndef LONGEST_IF
#define LONGEST_IF(arg, name)
#endif
#ifndef RANGE_IF
#define RANGE_IF(arg, choice, value, low, high, text)
#endif
#ifndef SHARE
#define SHARE(out, arg)
#endif
#ifndef END
#define END(op)
#endif

#define REAL "float32 float16 bfloat16"
#define WHOLE "int32 int64"
#define LARGEST 3.4e38 /* of float32, rounded down */

OP(gated_delta_rule, "Gated delta rule over whole sequences (prefill), in chunks: S = exp(g) S; S += k (beta (v - S'k))'; o = S' q scale")
    DIM(B, "batch") DIM(T, "time") DIM(H, "key heads") DIM(HV, "value heads") DIM(K, "key width") DIM(V, "value width")
    DIM(N, "sequences") DIM(S, "states to read from") DIM(SW, "states to write to") DIM(P, "snapshots")
    ARG(q,                 IN,  "B T H K",    REAL,          ROWS,  "queries")
    ARG(k,                 IN,  "B T H K",    "=q",          ROWS,  "keys")
    ARG(v,                 IN,  "B T HV V",   "=q",          ROWS,  "values")
    ARG(g,                 IN,  "B T HV",     "float32 =q",  ANY,   "gate: the log of the decay, the decay itself, or the projection a (see gate)")
    ARG(beta,              IN,  "B T HV",     "float32 =q",  ANY,   "write strength, or its logit (see beta_kind)")
    ARG(A_log,             OPT, "HV",         REAL,          ANY,   "gate=\"raw\": the log of the decay rate")
    ARG(dt_bias,           OPT, "HV",         REAL,          ANY,   "gate=\"raw\": added to a before softplus")
    ARG(cu_seqlens,        OPT, "N+1",        WHOLE,         ANY,   "packed sequences: the first token of each, and the end")
    ARG(token_range,       OPT, "B 2",        WHOLE,         ANY,   "padded batches: (first, end) of each row's real tokens; the others are skipped and their output is zero")
    ARG(initial_state,     OPT, "S HV K V",   REAL,          ANY,   "states before the first token, one a sequence, or a pool of slots")
    ARG(read_slots,        OPT, "N",          WHOLE,         ANY,   "the slot of initial_state that each sequence starts from")
    ARG(has_initial_state, OPT, "N",          "bool",        ANY,   "false: that sequence starts from zero, whatever its slot holds")
    ARG(write_slots,       OPT, "N",          WHOLE,         ANY,   "the slot of final_state that each sequence ends in")
    ARG(final_state,   OUT_OPT, "SW HV K V",  REAL,          ANY,   "states after the last token")
    ARG(snapshot_at,       OPT, "P 2",        WHOLE,         ANY,   "(sequence, number of tokens) of each snapshot")
    ARG(snapshots,     OUT_OPT, "P HV K V",   REAL,          ANY,   "the state after that many tokens: what final_state would be had the sequence ended there")
    ARG(o,                 OUT, "B T HV V",   "float32 =q",  ROWS,  "output")
    ALIAS(snapshot_at, snapshot_positions) ALIAS(o, out)
    ALT(initial_state, state_layout, vk, "S HV V K")
    ALT(final_state,   state_layout, vk, "SW HV V K")
    ALT(snapshots,     state_layout, vk, "P HV V K")
    ABSENT(cu_seqlens, N, "B")
    ABSENT(read_slots, S, "N")
    ABSENT(write_slots, SW, "N")
    HINT(q, "B H T K", "the axes are (batch, time, heads, width); this fits head-first tensors: pass q.swapaxes(1, 2)")
    HINT(k, "B H T K", "the axes are (batch, time, heads, width); this fits a head-first tensor")
    HINT(v, "B HV T V", "the axes are (batch, time, heads, width); this fits a head-first tensor")
    HINT(g, "B HV T", "the axes are (batch, time, heads); this fits a head-first tensor")
    HINT(beta, "B HV T", "the axes are (batch, time, heads); this fits a head-first tensor")
    HINT(initial_state, "S HV V K", "this fits state_layout=\"vk\"")
    HINT(final_state, "SW HV V K", "this fits state_layout=\"vk\"")
    NUM(scale, "K^-0.5", "multiplies q")
    NUM(l2norm_eps, "1e-6", "added to the sum of squares inside the root when qk_l2norm is on")
    INT(pad_slot, "-1", "a slot of this number marks a padded sequence: its output is zero, no state is touched")
    FLAG(qk_l2norm, "false", "normalise q and k over their width first")
    FLAG(check_values, "true", "read cu_seqlens, slots and gates and refuse what contradicts")
    CHOICE(gate, "log|factor|raw", "what g holds: log decay (<= 0), decay factor (0 .. 1), or a of g = -exp(A_log) softplus(a + dt_bias)")
    CHOICE(beta_kind, "value|logit", "what beta holds: the value, or b of beta = sigmoid(b)")
    CHOICE(head_map, "grouped|tiled", "the key head of value head h: h // (HV/H), or h % H")
    CHOICE(state_layout, "kv|vk", "axis order of every state's last two axes")
    CHOICE(rounding, "float32|hf", "hf: beta = sigmoid(b) is rounded to beta's dtype, as transformers does")
    NUM_RANGE(scale, -LARGEST, LARGEST) NUM_RANGE(l2norm_eps, 0, LARGEST)
    RULE("H >= 1") RULE("HV % H") RULE("K >= 1") RULE("K <= 256") RULE("V >= 1") RULE("V <= 256")
    RULE_IF(cu_seqlens, "B == 1")
    GIVEN_IF(A_log, gate, raw) GIVEN_IF(dt_bias, gate, raw)
    NEEDS(read_slots, initial_state) NEEDS(has_initial_state, initial_state) NEEDS(write_slots, final_state)
    NEEDS(snapshots, snapshot_at) NEEDS(snapshot_at, snapshots)
    OFFSETS(cu_seqlens, T)
    EXCLUDES(token_range, cu_seqlens) SPANS(token_range, T)
    SLOTS(read_slots, S, READ, pad_slot) SLOTS(write_slots, SW, WRITE, pad_slot)
    POSITIONS(snapshot_at, N)
    RANGE_IF(g, gate, log, -INFINITY, 0, "a positive log decay makes the state grow; was the decay factor (gate=\"factor\") or the projection a (gate=\"raw\") meant?")
    RANGE_IF(g, gate, factor, 0, 1, "a decay factor lies in 0 .. 1; was its logarithm (gate=\"log\") meant?")
    SHARE(final_state, initial_state)
END(gated_delta_rule)

OP(gated_delta_rule_step, "Gated delta rule for 1 to 16 new tokens a sequence (decode, speculative verify), the state pool updated in place")
    DIM(B, "batch") DIM(T, "time") DIM(H, "key heads") DIM(HV, "value heads") DIM(K, "key width") DIM(V, "value width")
    DIM(N, "sequences") DIM(S, "slots of the pool") DIM(R, "states to choose from") DIM(W, "write slots a sequence")
    ARG(q,                 IN,  "B T H K",    REAL,          ROWS,  "queries")
    ARG(k,                 IN,  "B T H K",    "=q",          ROWS,  "keys")
    ARG(v,                 IN,  "B T HV V",   "=q",          ROWS,  "values")
    ARG(g,                 IN,  "B T HV",     "float32 =q",  ANY,   "gate: the log of the decay, the decay itself, or the projection a (see gate)")
    ARG(beta,              IN,  "B T HV",     "float32 =q",  ANY,   "write strength, or its logit (see beta_kind)")
    ARG(A_log,             OPT, "HV",         REAL,          ANY,   "gate=\"raw\": the log of the decay rate")
    ARG(dt_bias,           OPT, "HV",         REAL,          ANY,   "gate=\"raw\": added to a before softplus")
    ARG(cu_seqlens,        OPT, "N+1",        WHOLE,         ANY,   "packed sequences: the first token of each, and the end")
    ARG(token_range,       OPT, "B 2",        WHOLE,         ANY,   "padded batches: (first, end) of each row's real tokens; the others are skipped and their output is zero")
    ARG(state,           INOUT, "S HV K V",   REAL,          ANY,   "the states, one a sequence, or a pool of slots")
    ARG(read_slots,        OPT, "N R?",       WHOLE,         ANY,   "the slot that each sequence starts from; with accepted, R slots to choose from")
    ARG(accepted,          OPT, "N",          WHOLE,         ANY,   "sequence n starts from read_slots[n, accepted[n]]")
    ARG(has_initial_state, OPT, "N",          "bool",        ANY,   "false: that sequence starts from zero, whatever its slot holds")
    ARG(write_slots,       OPT, "N W?",       WHOLE,         ANY,   "W = 1: the slot for the state after the last token; otherwise one for the state after each token; read_slots[:, 0] when left out")
    ARG(token_states,  OUT_OPT, "B T HV K V", REAL,          ANY,   "the state after each token")
    ARG(o,                 OUT, "B T HV V",   "float32 =q",  ROWS,  "output")
    ALIAS(o, out)
    ALT(state,        state_layout, vk, "S HV V K")
    ALT(token_states, state_layout, vk, "B T HV V K")
    ABSENT(cu_seqlens, N, "B")
    ABSENT(read_slots, S, "N")
    ABSENT(accepted, R, "1")
    ABSENT(write_slots, W, "1")
    HINT(q, "B H T K", "the axes are (batch, time, heads, width); this fits head-first tensors: pass q.swapaxes(1, 2)")
    HINT(k, "B H T K", "the axes are (batch, time, heads, width); this fits a head-first tensor")
    HINT(v, "B HV T V", "the axes are (batch, time, heads, width); this fits a head-first tensor")
    HINT(g, "B HV T", "the axes are (batch, time, heads); this fits a head-first tensor")
    HINT(beta, "B HV T", "the axes are (batch, time, heads); this fits a head-first tensor")
    HINT(state, "S HV V K", "this fits state_layout=\"vk\"")
    NUM(scale, "K^-0.5", "multiplies q")
    NUM(l2norm_eps, "1e-6", "added to the sum of squares inside the root when qk_l2norm is on")
    INT(pad_slot, "-1", "read: marks a padded sequence, whose output is zero and whose slots are untouched; write: that state is not kept")
    FLAG(qk_l2norm, "false", "normalise q and k over their width first")
    FLAG(check_values, "true", "read cu_seqlens, slots and gates and refuse what contradicts")
    CHOICE(gate, "log|factor|raw", "what g holds: log decay (<= 0), decay factor (0 .. 1), or a of g = -exp(A_log) softplus(a + dt_bias)")
    CHOICE(beta_kind, "value|logit", "what beta holds: the value, or b of beta = sigmoid(b)")
    CHOICE(head_map, "grouped|tiled", "the key head of value head h: h // (HV/H), or h % H")
    CHOICE(state_layout, "kv|vk", "axis order of every state's last two axes")
    CHOICE(rounding, "float32|hf", "hf: beta = sigmoid(b) is rounded to beta's dtype, as transformers does")
    NUM_RANGE(scale, -LARGEST, LARGEST) NUM_RANGE(l2norm_eps, 0, LARGEST)
    RULE("H >= 1") RULE("HV % H") RULE("K >= 1") RULE("K <= 256") RULE("V >= 1") RULE("V <= 256")
    RULE_IF(cu_seqlens, "B == 1")
    GIVEN_IF(A_log, gate, raw) GIVEN_IF(dt_bias, gate, raw)
    NEEDS(accepted, read_slots) NEEDS(write_slots, read_slots)
    OFFSETS(cu_seqlens, T)
    EXCLUDES(token_range, cu_seqlens) SPANS(token_range, T)
    SLOTS(read_slots, S, BOTH, pad_slot) SLOTS(write_slots, S, WRITE, pad_slot)
    INDEX(accepted, 0, "R")
    LONGEST("16") LONGEST_IF(write_slots, W)
    RANGE_IF(g, gate, log, -INFINITY, 0, "a positive log decay makes the state grow; was the decay factor (gate=\"factor\") or the projection a (gate=\"raw\") meant?")
    RANGE_IF(g, gate, factor, 0, 1, "a decay factor lies in 0 .. 1; was its logarithm (gate=\"log\") meant?")
END(gated_delta_rule_step)

OP(causal_conv1d, "Depthwise causal convolution over time: y[t] = act(bias + sum_w weight[w] x[t - (W-1) + w]), x before the first token from the history")
    DIM(B, "batch") DIM(T, "time") DIM(D, "channels") DIM(W, "filter taps") DIM(N, "sequences")
    DIM(S, "histories to read from") DIM(SW, "histories to write to") DIM(L, "columns of a history")
    ARG(x,                 IN,  "B T D",      REAL,          ANY,   "input")
    ARG(weight,            IN,  "D W",        "float32 =x",  ANY,   "one filter a channel; the last tap meets the current token")
    ARG(bias,              OPT, "D",          "float32 =x",  ANY,   "added before the activation")
    ARG(cu_seqlens,        OPT, "N+1",        WHOLE,         ANY,   "packed sequences: the first token of each, and the end")
    ARG(token_range,       OPT, "B 2",        WHOLE,         ANY,   "padded batches: (first, end) of each row's real tokens; the others are skipped and their output is zero")
    ARG(initial_state,     OPT, "S D L",      "float32 =x",  ANY,   "inputs before the first token, oldest first; the last W-1 columns count")
    ARG(read_slots,        OPT, "N",          WHOLE,         ANY,   "the slot of initial_state that each sequence starts from")
    ARG(has_initial_state, OPT, "N",          "bool",        ANY,   "false: that sequence starts from zeros, whatever its slot holds")
    ARG(write_slots,       OPT, "N",          WHOLE,         ANY,   "the slot of final_state that each sequence ends in")
    ARG(final_state,   OUT_OPT, "SW D L",     "float32 =x",  ANY,   "the last L inputs: of the initial history followed by x")
    ARG(y,                 OUT, "B T D",      "float32 =x",  ANY,   "output")
    ALIAS(y, out)
    ALT(x, layout, bdt, "B D T")
    ALT(y, layout, bdt, "B D T")
    ABSENT(cu_seqlens, N, "B")
    ABSENT(read_slots, S, "N")
    ABSENT(write_slots, SW, "N")
    HINT(weight, "W D", "this fits a filter stored tap by tap; pass weight.T")
    HINT(weight, "D 1 W", "this fits the checkpoint's [D, 1, W]; pass weight[:, 0, :]")
    HINT(weight, "T W", "this fits x in the other axis order: was layout=\"bdt\" meant?")
    HINT(initial_state, "S L D", "the axes are (slot, channel, column)")
    INT(pad_slot, "-1", "a slot of this number marks a padded sequence: its output is zero, no history is touched")
    FLAG(check_values, "true", "read cu_seqlens and slots and refuse what contradicts")
    CHOICE(activation, "none|silu", "applied to y")
    CHOICE(layout, "btd|bdt", "axis order of x and y")
    CHOICE(rounding, "float32|hf", "hf: the sum is rounded to x's dtype before the activation, as transformers' torch code does")
    RULE("W >= 2") RULE("W <= 6")
    RULE_IF(initial_state, "L >= W-1") RULE_IF(final_state, "L >= W-1")
    RULE_IF(cu_seqlens, "B == 1")
    NEEDS(read_slots, initial_state) NEEDS(has_initial_state, initial_state) NEEDS(write_slots, final_state)
    OFFSETS(cu_seqlens, T)
    EXCLUDES(token_range, cu_seqlens) SPANS(token_range, T)
    SLOTS(read_slots, S, READ, pad_slot) SLOTS(write_slots, SW, WRITE, pad_slot)
    SHARE(final_state, initial_state)
END(causal_conv1d)

OP(causal_conv1d_step, "Depthwise causal convolution for a few new tokens a sequence (decode), the history pool updated in place")
    DIM(B, "batch") DIM(T, "time") DIM(D, "channels") DIM(W, "filter taps") DIM(N, "sequences")
    DIM(S, "slots of the pool") DIM(L, "columns of a history")
    ARG(x,                 IN,  "B T D",      REAL,          ANY,   "input")
    ARG(weight,            IN,  "D W",        "float32 =x",  ANY,   "one filter a channel; the last tap meets the current token")
    ARG(bias,              OPT, "D",          "float32 =x",  ANY,   "added before the activation")
    ARG(cu_seqlens,        OPT, "N+1",        WHOLE,         ANY,   "packed sequences: the first token of each, and the end")
    ARG(token_range,       OPT, "B 2",        WHOLE,         ANY,   "padded batches: (first, end) of each row's real tokens; the others are skipped and their output is zero")
    ARG(state,           INOUT, "S D L",      "float32 =x",  ANY,   "the histories, one a sequence, or a pool of slots")
    ARG(read_slots,        OPT, "N",          WHOLE,         ANY,   "the slot that each sequence starts from")
    ARG(write_slots,       OPT, "N",          WHOLE,         ANY,   "the slot that each sequence ends in; read_slots when left out")
    ARG(has_initial_state, OPT, "N",          "bool",        ANY,   "false: that sequence starts from zeros, whatever its slot holds")
    ARG(positions,         OPT, "N",          WHOLE,         ANY,   "history=\"circular\": tokens seen so far; the next input goes to column positions % L")
    ARG(offsets,           OPT, "N",          WHOLE,         ANY,   "history=\"draft\": the first column that the first new token's taps read")
    ARG(y,                 OUT, "B T D",      "float32 =x",  ANY,   "output")
    ALIAS(y, out)
    ALT(x, layout, bdt, "B D T")
    ALT(y, layout, bdt, "B D T")
    ABSENT(cu_seqlens, N, "B")
    ABSENT(read_slots, S, "N")
    HINT(weight, "W D", "this fits a filter stored tap by tap; pass weight.T")
    HINT(weight, "D 1 W", "this fits the checkpoint's [D, 1, W]; pass weight[:, 0, :]")
    HINT(weight, "T W", "this fits x in the other axis order: was layout=\"bdt\" meant?")
    HINT(state, "S L D", "the axes are (slot, channel, column)")
    INT(pad_slot, "-1", "read: marks a padded sequence, whose output is zero and whose slots are untouched; write: that history is not kept")
    FLAG(check_values, "true", "read cu_seqlens, slots, positions and offsets and refuse what contradicts")
    CHOICE(activation, "none|silu", "applied to y")
    CHOICE(layout, "btd|bdt", "axis order of x and y")
    CHOICE(history, "linear|circular|draft", "linear: the last L of (history, x). circular: a ring written at positions % L. draft: taps start at column offsets[n]; then the history is old[offset : offset+W-1] followed by x from column 0 on, its last L columns if that is longer")
    CHOICE(rounding, "float32|hf", "hf: the sum is rounded to x's dtype before the activation, as transformers' torch code does")
    RULE("W >= 2") RULE("W <= 6") RULE("L >= W-1")
    RULE_IF(cu_seqlens, "B == 1")
    RULE_IF(offsets, "L >= T+W-2")
    GIVEN_IF(positions, history, circular) GIVEN_IF(offsets, history, draft)
    NEEDS(write_slots, read_slots)
    OFFSETS(cu_seqlens, T)
    EXCLUDES(token_range, cu_seqlens) SPANS(token_range, T)
    SLOTS(read_slots, S, BOTH, pad_slot) SLOTS(write_slots, S, WRITE, pad_slot)
    INDEX(positions, 0, "") INDEX(offsets, 0, "L-W+2")
    SHARE(y, x)
END(causal_conv1d_step)

OP(gdn_gate, "The gates of a GDN layer: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)")
    DIM(HV, "value heads")
    ARG(a,       IN,  "* HV", REAL,         ANY, "gate projection")
    ARG(b,       IN,  "* HV", REAL,         ANY, "write strength projection (a logit)")
    ARG(A_log,   IN,  "HV",   REAL,         ANY, "the log of the decay rate")
    ARG(dt_bias, IN,  "HV",   REAL,         ANY, "added to a before softplus")
    ARG(g,       OUT, "* HV", "float32",    ANY, "log decay, <= 0")
    ARG(beta,    OUT, "* HV", "float32 =b", ANY, "write strength, 0 .. 1")
    ALIAS(g, g_out) ALIAS(beta, beta_out)
    CHOICE(rounding, "float32|hf", "hf: beta is rounded to b's dtype, as transformers does")
END(gdn_gate)

OP(l2norm, "y = x / sqrt(sum x^2 + eps) over the last axis")
    DIM(D, "width")
    ARG(x, IN,  "* D", REAL,         ROWS, "input")
    ARG(y, OUT, "* D", "float32 =x", ROWS, "output")
    ALIAS(y, out)
    NUM(eps, "1e-6", "added to the sum of squares, inside the root")
    NUM_RANGE(eps, 0, LARGEST)
    SHARE(y, x)
END(l2norm)

OP(rms_norm, "y = x / sqrt(mean x^2 + eps) times the weight, over the last axis")
    DIM(D, "width")
    ARG(x,      IN,  "* D", REAL,         ROWS, "input")
    ARG(weight, IN,  "D",   REAL,         ANY,  "weight, or its offset from one (see weight_kind)")
    ARG(y,      OUT, "* D", "float32 =x", ROWS, "output")
    ALIAS(y, out)
    NUM(eps, "1e-6", "added to the mean of squares, inside the root")
    CHOICE(weight_kind, "w|1+w", "what multiplies: the weight, or one plus it (Qwen3-Next and Qwen3.5, all norms but the gated one)")
    NUM_RANGE(eps, 0, LARGEST)
    RULE("D >= 1")
    SHARE(y, x)
END(rms_norm)

OP(rms_norm_gated, "y = x / sqrt(mean x^2 + eps) times the weight times act(z), over the last axis: the norm first, then the gate")
    DIM(D, "width")
    ARG(x,      IN,  "* D", REAL,         ROWS, "input")
    ARG(z,      IN,  "* D", REAL,         ROWS, "gate")
    ARG(weight, IN,  "D",   REAL,         ANY,  "weight")
    ARG(y,      OUT, "* D", "float32 =x", ROWS, "output")
    ALIAS(y, out)
    NUM(eps, "1e-6", "added to the mean of squares, inside the root")
    CHOICE(activation, "silu|sigmoid", "of z")
    NUM_RANGE(eps, 0, LARGEST)
    RULE("D >= 1")
    SHARE(y, x)
END(rms_norm_gated)

OP(linear, "y = x weight' + bias, accumulated in float32")
    DIM(N, "outputs") DIM(K, "inputs")
    ARG(x,      IN,  "* K", REAL,         ROWS, "input")
    ARG(weight, IN,  "N K", REAL,         ROWS, "weight, read in its own dtype")
    ARG(bias,   OPT, "N",   REAL,         ANY,  "added to every row")
    ARG(y,      OUT, "* N", "float32 =x", ROWS, "output")
    ALIAS(y, out)
    HINT(weight, "K N", "this fits a transposed weight; pass weight.T stored row by row")
END(linear)

#undef REAL
#undef WHOLE
#undef LARGEST
#undef OP
#undef DIM
#undef ARG
#undef ALIAS
#undef ALT
#undef ABSENT
#undef HINT
#undef NUM
#undef NUM_RANGE
#undef INT
#undef FLAG
#undef CHOICE
#undef RULE
#undef RULE_IF
#undef GIVEN_IF
#undef NEEDS
#undef EXCLUDES
#undef SPANS
#undef OFFSETS
#undef SLOTS
#undef INDEX
#undef POSITIONS
#undef LONGEST
#undef LONGEST_IF
#undef RANGE_IF
#undef SHARE
#undef END
