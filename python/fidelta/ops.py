"""The ops: one function each. Fill in defaults, allocate outputs in the caller's library, call `_core` once.

What shapes, types and values are valid stands in docs/formats.md and is checked by `_core`; nothing is checked, cast or
copied here. Errors: ShapeError, LayoutError, DTypeError and DeviceError (all ValueError), ValueError for values and
options, TypeError for what is not a tensor, a missing argument or an unknown keyword.

Arguments that every op takes:
    out            where the result goes (a preallocated tensor); a new one in the caller's library when left out
    out_dtype      the dtype of a new result: a name ("float32") or the library's own object; the input's when left out
    num_threads    threads of this call; the setting of set_num_threads() when left out
    variant        force one kernel, such as "avx2"; the best one for the machine when left out
"""

import sys
from types import FunctionType

import ml_dtypes
import numpy as np

from . import _core

CHUNK = 64  # tokens: the unit of snapshot_every, and splitting a sequence at its multiples changes no bit

OPS = ("gated_delta_rule", "gated_delta_rule_step", "causal_conv1d", "causal_conv1d_step", "gdn_gate", "l2norm",
       "rms_norm", "rms_norm_gated", "linear")


def _no_dtype(op, what, dtype, library):
    return _core.DTypeError(f"{op}: {what} is {dtype!r:.100}; expected a name such as \"float32\", or a dtype of {library}")


def _empty(like, shape, dtype, op, name, what="out_dtype"):
    """A new tensor of the library and on the device of `like`; `dtype` is a name, the library's own, or None for like's.

    `name` and `what` are the arguments that like and dtype come from."""
    if isinstance(like, np.ndarray):
        if dtype is None:
            return np.empty(shape, like.dtype)
        try:
            own = np.dtype(getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype)
        except (TypeError, ValueError, SyntaxError):
            raise _no_dtype(op, what, dtype, "NumPy") from None
        return np.empty(shape, own)
    if hasattr(like, "new_empty"):  # torch: its module is loaded, or there would be no such tensor
        if dtype is None:
            return like.new_empty(shape)
        own = getattr(sys.modules[type(like.dtype).__module__], dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(own, type(like.dtype)):
            raise _no_dtype(op, what, dtype, "torch")
        return like.new_empty(shape, dtype=own)
    library = type(like).__module__.partition(".")[0]
    if hasattr(like, "__array_namespace__") and library not in ("jax", "jaxlib"):  # JAX arrays cannot be written
        xp = like.__array_namespace__()
        own = like.dtype if dtype is None else getattr(xp, dtype, None) if isinstance(dtype, str) else dtype
        if own is None:
            raise _no_dtype(op, what, dtype, library)
        return xp.empty(shape, dtype=own, device=like.device)
    if hasattr(like, "__dlpack__"):
        raise TypeError(f"{op}: no writable tensor can be made in the library of {name} "
                        f"({type(like).__module__}.{type(like).__qualname__}); pass the outputs preallocated (out=...)")
    raise TypeError(f"{op}: {name} is {type(like).__qualname__}; expected a NumPy array or a tensor with DLPack")


def _extent(tensor, axis):
    """The extent of an axis, or 0 where there is none: `_core` then says what is wrong with the tensor."""
    shape = getattr(tensor, "shape", ())
    return shape[axis] if -len(shape) <= axis < len(shape) else 0


def _sequences(first, cu_seqlens):
    return _extent(first, 0) if cu_seqlens is None else max(_extent(cu_seqlens, 0) - 1, 0)


def _state_shape(count, k, v, state_layout):
    heads, key, value = _extent(v, 2), _extent(k, 3), _extent(v, 3)
    return (*count, heads, value, key) if state_layout == "vk" else (*count, heads, key, value)


def _snapshot_table(every, q, cu_seqlens, token_range, read_slots, pad_slot):
    """int64 [P, 2]: (sequence, tokens) at every multiple of `every` chunks that a sequence reaches. Reads the host values."""
    if isinstance(every, bool) or not isinstance(every, (int, np.integer)):
        raise TypeError(f"gated_delta_rule: snapshot_every is {type(every).__name__}; expected int")
    if every < 1:
        raise ValueError(f"gated_delta_rule: snapshot_every is {every}; expected at least 1 (chunk of {CHUNK} tokens)")
    for name, x, axes in (("cu_seqlens", cu_seqlens, 1), ("token_range", token_range, 2), ("read_slots", read_slots, 1)):
        if x is not None and not (hasattr(x, "tolist") and hasattr(x, "shape")):
            raise TypeError(f"gated_delta_rule: {name} is {type(x).__name__}; expected a tensor")
        if x is not None and (len(x.shape) != axes or axes == 2 and x.shape[1] != 2):
            raise _core.ShapeError(f"gated_delta_rule: {name} has shape {list(x.shape)}; expected [{('N', 'B, 2')[axes - 1]}]")
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        lengths = [end - first for first, end in zip(ends, ends[1:])]
    elif token_range is not None:
        lengths = [end - first for first, end in token_range.tolist()]
    else:
        lengths = [_extent(q, 1)] * _extent(q, 0)
    if not all(isinstance(length, int) for length in lengths):
        name = "token_range" if cu_seqlens is None else "cu_seqlens"
        raise _core.DTypeError(f"gated_delta_rule: {name} holds no integers; expected int32 or int64")
    longest = max(lengths, default=0)
    if longest > _extent(q, 1):  # never so many rows as a wrong number asks for
        name = "token_range" if cu_seqlens is None else "cu_seqlens"
        raise ValueError(f"gated_delta_rule: {name} has a sequence of {longest} tokens; q has {_extent(q, 1)}")
    slots = [None] * len(lengths) if read_slots is None else read_slots.tolist()
    step = int(every) * CHUNK
    rows = [(n, tokens) for n, (length, slot) in enumerate(zip(lengths, slots)) if slot is None or slot != pad_slot
            for tokens in range(step, length + 1, step)]
    return np.array(rows, np.int64).reshape(-1, 2)


def gated_delta_rule(q, k, v, g, beta, *, gate="log", beta_kind="value", A_log=None, dt_bias=None, scale=None,
                     qk_l2norm=False, head_map="grouped", initial_state=None, state_layout="kv", cu_seqlens=None,
                     return_state=False, out=None, token_range=None, read_slots=None, has_initial_state=None,
                     write_slots=None, final_state=None, snapshot_every=None, snapshot_positions=None, snapshots=None,
                     out_dtype=None, state_dtype=None, l2norm_eps=1e-6, pad_slot=-1, rounding="float32",
                     check_values=True, num_threads=None, variant=None):
    """Gated delta rule over whole sequences (prefill). For every sequence and value head, in float32:

        S = exp(g) S;  S += k (beta (v - S'k))';  o = scale S'q       docs/algorithms/gated_delta_rule.md eq. 1 to 4

    q, k [B,T,H,K], v [B,T,HV,V], g, beta [B,T,HV]; HV is a multiple of H; states [N,HV,K,V], or [N,HV,V,K] with
    state_layout="vk". float32, float16 or bfloat16; g and beta also float32 beside narrower q, k, v.

    gate            what g holds: "log" (log decay, <= 0, -inf allowed), "factor" (exp of it, 0 .. 1), or "raw": the
                    projection a of g = -exp(A_log) softplus(a + dt_bias), with A_log and dt_bias [HV]
    beta_kind       "value", or "logit": b of beta = sigmoid(b)
    scale           multiplies q; K**-0.5 when left out
    qk_l2norm       first q = q / sqrt(sum q^2 + l2norm_eps) over the width, k likewise
    head_map        key head of value head h: "grouped" h // (HV/H), "tiled" h % H
    cu_seqlens      int32 or int64 [N+1]: packed sequences, with B = 1
    token_range     int32 or int64 [B,2]: (first, end) of each row's real tokens; the output of the others is zero
    initial_state   one state a sequence, or with read_slots [N] a pool; has_initial_state bool [N]: false starts from zero
    final_state     where the states go, one a sequence, or with write_slots [N] a pool; may be initial_state itself.
                    With return_state=True and none given, a new one of state_dtype ("float32" when left out)
    snapshot_every  n: also the states after 64n, 128n, ... tokens of each sequence, sequence by sequence
    snapshot_positions  int [P,2] of (sequence, tokens): also the states after that many tokens
    snapshots       where those go: [P,HV,K,V] in the order of the positions; new in state_dtype when left out
    pad_slot        a read slot of this number marks a padded sequence (output zero, no state touched); a write slot of
                    this number keeps no state
    rounding        "hf": sigmoid(b) is rounded to beta's dtype, as transformers does
    check_values    False: cu_seqlens, slots and gates are not read for errors

    Returns o [B,T,HV,V]; (o, state) with return_state or final_state; snapshots, if asked for, come last.
    """
    if out is None:
        out = _empty(v, getattr(v, "shape", None), out_dtype, "gated_delta_rule", "v")
    if state_dtype is None:
        state_dtype = "float32"
    if return_state and final_state is None and write_slots is None:
        shape = _state_shape((_sequences(q, cu_seqlens),), k, v, state_layout)
        final_state = _empty(v, shape, state_dtype, "gated_delta_rule", "v", "state_dtype")
    if snapshot_every is not None:
        if snapshot_positions is not None:
            raise ValueError("gated_delta_rule: snapshot_every and snapshot_positions exclude each other")
        snapshot_positions = _snapshot_table(snapshot_every, q, cu_seqlens, token_range, read_slots, pad_slot)
    if snapshot_positions is not None and snapshots is None:
        shape = _state_shape((_extent(snapshot_positions, 0),), k, v, state_layout)
        snapshots = _empty(v, shape, state_dtype, "gated_delta_rule", "v", "state_dtype")
    _core.gated_delta_rule(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, token_range, initial_state, read_slots,
                           has_initial_state, write_slots, final_state, snapshot_positions, snapshots, out,
                           scale, l2norm_eps, pad_slot, qk_l2norm, check_values, gate, beta_kind, head_map,
                           state_layout, rounding, num_threads, variant)
    if final_state is None:
        return out if snapshots is None else (out, snapshots)
    return (out, final_state) if snapshots is None else (out, final_state, snapshots)


def gated_delta_rule_step(q, k, v, g, beta, state, *, gate="log", beta_kind="value", A_log=None, dt_bias=None, scale=None,
                          qk_l2norm=False, head_map="grouped", state_layout="kv", cu_seqlens=None, token_range=None,
                          read_slots=None, accepted=None, has_initial_state=None, write_slots=None, token_states=None,
                          return_token_states=False, out=None, out_dtype=None, l2norm_eps=1e-6, pad_slot=-1,
                          rounding="float32", check_values=True, num_threads=None, variant=None):
    """Gated delta rule for 1 to 16 new tokens a sequence (decode, speculative verify); `state` is updated in place.

    The same recurrence, shapes and options as gated_delta_rule (docs/algorithms/gated_delta_rule.md eq. 1 to 4).

    state           [S,HV,K,V] (or "vk"): one state a sequence, or with read_slots a pool
    read_slots      int32 or int64 [N], or [N,R] with accepted [N]: sequence n starts from read_slots[n, accepted[n]]
    write_slots     [N]: the slot for the state after the last token; [N,W]: column t for the state after token t;
                    the read slot (first column) when left out
    has_initial_state  bool [N]: false starts from zero, whatever the slot holds
    token_states    [B,T,HV,K,V]: filled with the state after each token; return_token_states=True makes a new one in
                    the dtype of state
    pad_slot        read: a padded sequence, its output is zero and its slots are untouched; write: not kept

    Returns o [B,T,HV,V], or (o, token_states).
    """
    if out is None:
        out = _empty(v, getattr(v, "shape", None), out_dtype, "gated_delta_rule_step", "v")
    if return_token_states and token_states is None:
        shape = _state_shape((_extent(v, 0), _extent(v, 1)), k, v, state_layout)
        token_states = _empty(state, shape, None, "gated_delta_rule_step", "state")
    _core.gated_delta_rule_step(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, token_range, state, read_slots, accepted,
                                has_initial_state, write_slots, token_states, out, scale, l2norm_eps, pad_slot,
                                qk_l2norm, check_values, gate, beta_kind, head_map, state_layout, rounding,
                                num_threads, variant)
    return out if token_states is None else (out, token_states)


def causal_conv1d(x, weight, *, bias=None, activation="none", layout="btd", initial_state=None, return_state=False,
                  cu_seqlens=None, out=None, token_range=None, read_slots=None, has_initial_state=None, write_slots=None,
                  final_state=None, out_dtype=None, pad_slot=-1, rounding="float32", check_values=True, num_threads=None,
                  variant=None):
    """Depthwise causal convolution over time (docs/algorithms/causal_conv1d.md eq. 1), in float32:

        y[t] = act(bias + sum_w weight[w] x[t - (W-1) + w]),   x before the first token from initial_state, or zero

    x [B,T,D] (or [B,D,T] with layout="bdt"), weight [D,W] with W in 2 .. 6, bias [D]; float32, float16 or bfloat16, and
    weight, bias and states also float32 beside a narrower x. Any strides.

    activation      "none" or "silu"
    initial_state   [N,D,L], oldest input first, of which the last W-1 columns count; with read_slots [N] a pool;
                    has_initial_state bool [N]: false starts from zeros
    final_state     [N,D,L]: where the last L inputs go; with write_slots [N] a pool; may be initial_state itself. With
                    return_state=True and none given: new, with the columns and dtype of initial_state, or W-1 and x's
    cu_seqlens, token_range, pad_slot, check_values    as in gated_delta_rule
    rounding        "hf": the sum is rounded to x's dtype before the activation, as transformers' torch code does

    Returns y of x's shape, or (y, state).
    """
    if out is None:
        out = _empty(x, getattr(x, "shape", None), out_dtype, "causal_conv1d", "x")
    if return_state and final_state is None and write_slots is None:
        channels = _extent(x, 1 if layout == "bdt" else 2)
        columns = _extent(weight, 1) - 1 if initial_state is None else _extent(initial_state, 2)
        like, name = (x, "x") if initial_state is None else (initial_state, "initial_state")
        final_state = _empty(like, (_sequences(x, cu_seqlens), channels, max(columns, 0)), None, "causal_conv1d", name)
    _core.causal_conv1d(x, weight, bias, cu_seqlens, token_range, initial_state, read_slots, has_initial_state,
                        write_slots, final_state, out, pad_slot, check_values, activation, layout, rounding,
                        num_threads, variant)
    return out if final_state is None else (out, final_state)


def causal_conv1d_step(x, weight, state, *, bias=None, activation="none", layout="btd", history="linear", positions=None,
                       offsets=None, cu_seqlens=None, token_range=None, read_slots=None, write_slots=None,
                       has_initial_state=None, out=None, out_dtype=None, pad_slot=-1, rounding="float32",
                       check_values=True, num_threads=None, variant=None):
    """Depthwise causal convolution for a few new tokens a sequence (decode); the history `state` is updated in place.

    The same formula, shapes and options as causal_conv1d (docs/algorithms/causal_conv1d.md eq. 1).

    state           [S,D,L], L >= W-1: one history a sequence, or with read_slots [N] a pool; write_slots [N]: the slot
                    each sequence ends in, read_slots when left out
    history         "linear": the last L of (history, x). "circular": a ring, the next input goes to column
                    positions[n] % L, positions [N] being the tokens seen so far. "draft": the first token's taps start at
                    column offsets[n]; then the history is old[offset : offset+W-1] followed by x (eq. 4)
    pad_slot        read: a padded sequence, its output is zero and its slots are untouched; write: not kept
    out             may be x itself

    Returns y of x's shape.
    """
    if out is None:
        out = _empty(x, getattr(x, "shape", None), out_dtype, "causal_conv1d_step", "x")
    _core.causal_conv1d_step(x, weight, bias, cu_seqlens, token_range, state, read_slots, write_slots, has_initial_state,
                             positions, offsets, out, pad_slot, check_values, activation, layout, history, rounding,
                             num_threads, variant)
    return out


def gdn_gate(a, b, A_log, dt_bias, *, rounding="float32", g_out=None, beta_out=None, num_threads=None, variant=None):
    """The gates of a GDN layer: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).

    a, b [..., HV], A_log, dt_bias [HV]; float32, float16 or bfloat16. softplus(x) is x above 20, else log1p(exp(x)).
    New results are float32. rounding="hf" rounds beta to b's dtype, as transformers does. beta_out may have b's dtype.
    Source: docs/algorithms/norms_and_gates.md eq. 1 and 2.

    Returns (g, beta), both of a's shape.
    """
    if g_out is None:
        g_out = _empty(a, getattr(a, "shape", None), "float32", "gdn_gate", "a")
    if beta_out is None:
        beta_out = _empty(b, getattr(b, "shape", None), "float32", "gdn_gate", "b")
    _core.gdn_gate(a, b, A_log, dt_bias, g_out, beta_out, rounding, num_threads, variant)
    return g_out, beta_out


def l2norm(x, *, eps=1e-6, out=None, out_dtype=None, num_threads=None, variant=None):
    """y = x / sqrt(sum x^2 + eps) over the last axis of x [..., D]. A row of zeros stays zero. `out` may be x itself.

    Source: docs/algorithms/norms_and_gates.md eq. 3.
    """
    if out is None:
        out = _empty(x, getattr(x, "shape", None), out_dtype, "l2norm", "x")
    _core.l2norm(x, out, eps, num_threads, variant)
    return out


def rms_norm(x, weight, *, eps=1e-6, weight_kind="w", out=None, out_dtype=None, num_threads=None, variant=None):
    """y = x / sqrt(mean x^2 + eps) times the weight, over the last axis of x [..., D]; weight [D].

    weight_kind says what multiplies: "w", or "1+w" (all norms of Qwen3-Next and Qwen3.5 but the gated one). `out` may be
    x itself. Source: docs/algorithms/norms_and_gates.md eq. 4.
    """
    if out is None:
        out = _empty(x, getattr(x, "shape", None), out_dtype, "rms_norm", "x")
    _core.rms_norm(x, weight, out, eps, weight_kind, num_threads, variant)
    return out


def rms_norm_gated(x, z, weight, *, eps=1e-6, activation="silu", out=None, out_dtype=None, num_threads=None,
                   variant=None):
    """y = x / sqrt(mean x^2 + eps) times weight times act(z), over the last axis of x, z [..., D]; weight [D].

    The norm comes first, then the gate; act is "silu" or "sigmoid". `out` may be x itself.
    Source: docs/algorithms/norms_and_gates.md eq. 5.
    """
    if out is None:
        out = _empty(x, getattr(x, "shape", None), out_dtype, "rms_norm_gated", "x")
    _core.rms_norm_gated(x, z, weight, out, eps, activation, num_threads, variant)
    return out


def linear(x, weight, *, bias=None, out=None, out_dtype=None, num_threads=None, variant=None):
    """y = x weight' + bias, accumulated in float32. x [..., K], weight [N,K], bias [N]; returns y [..., N] in x's dtype.

    The weight is read in its own dtype, whatever x's is; it is never expanded in memory.
    Source: docs/algorithms/linear.md eq. 1.
    """
    if out is None:
        shape = (*getattr(x, "shape", ())[:-1], _extent(weight, 0))
        out = _empty(x, shape, out_dtype, "linear", "x")
    _core.linear(x, weight, bias, out, num_threads, variant)
    return out


class _PathFinder:
    """Stands in for `_core` in a copy of an op: asks for the kernel instead of running it."""

    def __getattr__(self, op):
        def find(*row):
            self.path = _core.which_path(op, *row)

        return find


def which_path(op, *args, **kwargs):
    """The kernel that `op` (a name or a function of this module) would run with these arguments, such as "cpu/avx512".

    Does all that the op does, checks included, but compute.
    """
    name = getattr(op, "__name__", op)
    if name not in OPS:
        raise ValueError(f"which_path: op is {name!r}; expected one of {', '.join(OPS)}")
    function, finder = globals()[name], _PathFinder()
    copy = FunctionType(function.__code__, {**globals(), "_core": finder}, name, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy(*args, **kwargs)
    return finder.path


def set_num_threads(n):
    """Threads that a call without num_threads uses. 0 is the default: environment FIDELTA_NUM_THREADS, else
    OMP_NUM_THREADS, else the cores that this process may run on."""
    _core.set_num_threads(n)


def get_num_threads():
    """The number of threads that a call without num_threads uses."""
    return _core.get_num_threads()
