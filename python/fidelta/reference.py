"""The ops in plain float64 NumPy: slow, obvious, and the oracle of every test.

Same names and arguments as fidelta.ops. Inputs may be NumPy arrays (with ml_dtypes), torch tensors or anything NumPy can
read; results are float64 NumPy arrays, rounded nowhere (but for rounding="hf", which is a rounding). States given as
final_state or state are updated in place, rounded to their dtype, and so are `out`, `snapshots` and `token_states`;
what is returned is always the unrounded float64. out_dtype, state_dtype, check_values, num_threads and variant are
accepted and change nothing. Formulas and equation numbers: docs/algorithms.
"""

import functools

import numpy as np

from . import _core

CHUNK = 64

CHOICES = {op: {row["name"]: row["values"].split("|") for row in form["rows"] if row["kind"] == "CHOICE"}
           for op, form in _core.formats().items()}


def _checked(function):
    """The op, refusing a choice that is none of its values."""
    op = function.__name__
    choices = CHOICES[op.removesuffix("_stages")]

    @functools.wraps(function)
    def checked(*args, **kwargs):
        for name, values in choices.items():
            if name in kwargs and kwargs[name] not in values:
                expected = " or ".join(f'"{value}"' for value in values)
                raise ValueError(f"{op}: {name} is {kwargs[name]!r}; expected {expected}")
        return function(*args, **kwargs)

    return checked


def _f64(x):
    """A float64 NumPy copy of any tensor."""
    if x is None:
        return None
    if hasattr(x, "detach"):  # torch: NumPy cannot read its bfloat16
        return x.detach().double().cpu().numpy().copy()
    if not isinstance(x, np.ndarray) and hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
        x = np.from_dlpack(x)
    with np.errstate(invalid="ignore"):  # fresh memory may hold signalling NaN
        return np.array(x, np.float64)


def _ints(x):
    return None if x is None else _f64(x).astype(np.int64)


def _store(target, value, index=...):
    """target[index] = value in target's own dtype; a target of None is nobody's."""
    if target is not None and np.size(value):
        target[index] = target.new_tensor(np.ascontiguousarray(value)) if hasattr(target, "new_tensor") else value


def _rounded(x, like):
    """x rounded to the dtype of the tensor `like`, as float64."""
    if hasattr(like, "new_tensor"):
        return _f64(like.new_tensor(x))
    return x.astype(np.asarray(like).dtype).astype(np.float64)


def _sigmoid(x):
    return 1 / (1 + np.exp(-np.maximum(x, -700.0)))


def _silu(x):
    return x * _sigmoid(x)


def _softplus(x):
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def _l2(x, eps):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)


def _spans(B, T, cu_seqlens, token_range):
    """(row, first token, end) of every sequence."""
    if cu_seqlens is not None:
        ends = _ints(cu_seqlens)
        return [(0, int(first), int(end)) for first, end in zip(ends, ends[1:])]
    if token_range is not None:
        return [(b, int(first), int(end)) for b, (first, end) in enumerate(_ints(token_range))]
    return [(b, 0, T) for b in range(B)]


def _starts(states, zero, count, read_slots, has_initial_state, pad_slot):
    """The state each sequence starts from, None for a padded one."""
    starts = []
    for n in range(count):
        slot = n if read_slots is None else int(read_slots[n])
        if read_slots is not None and slot == pad_slot:
            starts.append(None)
        elif states is None or (has_initial_state is not None and not has_initial_state[n]):
            starts.append(zero.copy())
        else:
            starts.append(states[slot].copy())
    return starts


def _delta_inputs(q, k, v, g, beta, gate, beta_kind, A_log, dt_bias, scale, qk_l2norm, head_map, l2norm_eps, rounding):
    """q (scaled) and k of each value head, v, log decay g, beta: float64, eq. 5 to 8."""
    b_given = beta
    q, k, v, g, beta = _f64(q), _f64(k), _f64(v), _f64(g), _f64(beta)
    H, HV, K = q.shape[2], v.shape[2], q.shape[3]
    if qk_l2norm:
        q, k = _l2(q, l2norm_eps), _l2(k, l2norm_eps)
    key_head = np.arange(HV) % H if head_map == "tiled" else np.arange(HV) // (HV // H)
    q = q[:, :, key_head] * (K**-0.5 if scale is None else scale)
    k = k[:, :, key_head]
    if gate == "raw":
        g = -np.exp(_f64(A_log)) * _softplus(g + _f64(dt_bias))
    elif gate == "factor":
        with np.errstate(divide="ignore"):
            g = np.log(g)
    if beta_kind == "logit":
        beta = _sigmoid(beta)
        if rounding == "hf":
            beta = _rounded(beta, b_given)
    return q, k, v, g, beta


def _recurrence(S, q, k, v, g, beta):
    """Eq. 1 to 4 over one sequence: yields (o, S) after each token. S [HV,K,V]; q, k [T,HV,K]; v [T,HV,V]; g, beta [T,HV]."""
    for t in range(len(q)):
        S = np.exp(g[t])[:, None, None] * S                          # the decay comes first
        read = np.einsum("hk,hkv->hv", k[t], S)
        delta = beta[t][:, None] * (v[t] - read)
        S = S + k[t][:, :, None] * delta[:, None, :]
        yield np.einsum("hk,hkv->hv", q[t], S), S


def _kv(states, state_layout):
    """States with the key axis first (or back again)."""
    return states if states is None or state_layout == "kv" else np.swapaxes(states, -1, -2)


@_checked
def gated_delta_rule(q, k, v, g, beta, *, gate="log", beta_kind="value", A_log=None, dt_bias=None, scale=None,
                     qk_l2norm=False, head_map="grouped", initial_state=None, state_layout="kv", cu_seqlens=None,
                     return_state=False, out=None, token_range=None, read_slots=None, has_initial_state=None,
                     write_slots=None, final_state=None, snapshot_every=None, snapshot_positions=None, snapshots=None,
                     out_dtype=None, state_dtype=None, l2norm_eps=1e-6, pad_slot=-1, rounding="float32",
                     check_values=True, num_threads=None, variant=None):
    """The recurrence token by token, in float64. Arguments and results: fidelta.gated_delta_rule."""
    q, k, v, g, beta = _delta_inputs(q, k, v, g, beta, gate, beta_kind, A_log, dt_bias, scale, qk_l2norm, head_map,
                                     l2norm_eps, rounding)
    (B, T, HV, V), K = v.shape, k.shape[3]
    spans = _spans(B, T, cu_seqlens, token_range)
    reads, writes = _ints(read_slots), _ints(write_slots)
    starts = _starts(_kv(_f64(initial_state), state_layout), np.zeros((HV, K, V)), len(spans), reads, has_initial_state,
                     pad_slot)
    if snapshot_every is not None:
        step = snapshot_every * CHUNK
        snapshot_positions = [(n, tokens) for n, (b, first, end) in enumerate(spans) if starts[n] is not None
                              for tokens in range(step, end - first + 1, step)]
    wanted = [] if snapshot_positions is None else [tuple(row) for row in _ints(snapshot_positions).reshape(-1, 2)]

    o = np.zeros((B, T, HV, V))
    taken = np.zeros((len(wanted), HV, K, V))
    final = np.zeros((len(spans), HV, K, V)) if final_state is None else _kv(_f64(final_state), state_layout).copy()
    for n, (b, first, end) in enumerate(spans):
        S = starts[n]
        if S is None:
            continue
        part = slice(first, end)
        for p, position in enumerate(wanted):
            if position == (n, 0):
                taken[p] = S
        for t, (o_t, S) in enumerate(_recurrence(S, q[b, part], k[b, part], v[b, part], g[b, part], beta[b, part])):
            o[b, first + t] = o_t
            for p, position in enumerate(wanted):
                if position == (n, t + 1):
                    taken[p] = S
        slot = n if writes is None else int(writes[n])
        if writes is None or slot != pad_slot:
            final[slot] = S
            _store(final_state, _kv(S, state_layout), slot)
    _store(out, o)
    taken, final = _kv(taken, state_layout), _kv(final, state_layout)
    _store(snapshots, taken)
    result = (o, final) if return_state or final_state is not None else (o,)
    result += (taken,) if snapshot_positions is not None else ()
    return result if len(result) > 1 else o


def _columns(slots):
    return slots[:, None] if slots.ndim == 1 else slots


@_checked
def gated_delta_rule_step(q, k, v, g, beta, state, *, gate="log", beta_kind="value", A_log=None, dt_bias=None, scale=None,
                          qk_l2norm=False, head_map="grouped", state_layout="kv", cu_seqlens=None, token_range=None,
                          read_slots=None, accepted=None, has_initial_state=None, write_slots=None, token_states=None,
                          return_token_states=False, out=None, out_dtype=None, l2norm_eps=1e-6, pad_slot=-1,
                          rounding="float32", check_values=True, num_threads=None, variant=None):
    """The recurrence over a few tokens; `state` is updated in place. Arguments and results: fidelta.gated_delta_rule_step.

    The states of padded sequences and skipped tokens in the returned token states are zero."""
    q, k, v, g, beta = _delta_inputs(q, k, v, g, beta, gate, beta_kind, A_log, dt_bias, scale, qk_l2norm, head_map,
                                     l2norm_eps, rounding)
    (B, T, HV, V), K = v.shape, k.shape[3]
    spans = _spans(B, T, cu_seqlens, token_range)
    slots = np.arange(len(spans)) if read_slots is None else _ints(read_slots)
    slots = _columns(slots)
    chosen = slots[np.arange(len(spans)), 0 if accepted is None else _ints(accepted)]
    starts = _starts(_kv(_f64(state), state_layout), np.zeros((HV, K, V)), len(spans),
                     chosen if read_slots is not None else None, has_initial_state, pad_slot)
    writes = slots[:, :1] if write_slots is None else _columns(_ints(write_slots))

    def write(slot, S):
        if write_slots is None or slot != pad_slot:
            _store(state, _kv(S, state_layout), int(slot))

    o = np.zeros((B, T, HV, V))
    after = np.zeros((B, T, HV, K, V))
    for n, (b, first, end) in enumerate(spans):
        S = starts[n]
        if S is None:
            continue
        part = slice(first, end)
        for t, (o_t, S) in enumerate(_recurrence(S, q[b, part], k[b, part], v[b, part], g[b, part], beta[b, part])):
            o[b, first + t], after[b, first + t] = o_t, S
            if writes.shape[1] > 1:
                write(writes[n, t], S)
            if token_states is not None:
                _store(token_states, _kv(S, state_layout), (b, first + t))
        if writes.shape[1] == 1:
            write(writes[n, 0], S)
    _store(out, o)
    return (o, _kv(after, state_layout)) if return_token_states or token_states is not None else o


@_checked
def gated_delta_rule_stages(q, k, v, g, beta, *, gate="log", beta_kind="value", A_log=None, dt_bias=None, scale=None,
                            qk_l2norm=False, head_map="grouped", initial_state=None, state_layout="kv", cu_seqlens=None,
                            token_range=None, read_slots=None, has_initial_state=None, l2norm_eps=1e-6, pad_slot=-1,
                            rounding="float32", chunk_size=CHUNK):
    """The chunked form (docs/algorithms/gated_delta_rule.md eq. 9 to 17), stage by stage, in the order it computes them.

    A dict of float64 arrays: q (scaled), k [B,T,HV,K], g, beta [B,T,HV] as the recurrence takes them; gamma [B,T,HV] the
    sum of g from the chunk's first token; A, T [B,T,HV,C], a row of the chunk's C x C matrix a token; U [B,T,HV,V];
    W [B,T,HV,K]; v_new [B,T,HV,V]; states [B,NT,HV,K,V] before each chunk (packed: [1,NT,...], the chunks of all
    sequences one after the other); o [B,T,HV,V]; final_state [N,HV,K,V]. Correct for g = -inf too, since the decay
    between two tokens is the exponential of a sum over the tokens between them, never of a difference of two sums.
    """
    q, k, v, g, beta = _delta_inputs(q, k, v, g, beta, gate, beta_kind, A_log, dt_bias, scale, qk_l2norm, head_map,
                                     l2norm_eps, rounding)
    (B, T, HV, V), K, C = v.shape, k.shape[3], chunk_size
    spans = _spans(B, T, cu_seqlens, token_range)
    starts = _starts(_kv(_f64(initial_state), state_layout), np.zeros((HV, K, V)), len(spans), _ints(read_slots),
                     has_initial_state, pad_slot)
    if cu_seqlens is None:
        base, chunks = [0] * len(spans), -(-T // C)
    else:
        counts = [-(-(end - first) // C) for b, first, end in spans]
        base, chunks = np.cumsum([0, *counts])[:-1], sum(counts)
    z = {"q": q, "k": k, "g": g, "beta": beta, "gamma": np.zeros((B, T, HV)), "A": np.zeros((B, T, HV, C)),
         "T": np.zeros((B, T, HV, C)), "U": np.zeros((B, T, HV, V)), "W": np.zeros((B, T, HV, K)),
         "v_new": np.zeros((B, T, HV, V)), "states": np.zeros((B, chunks, HV, K, V)), "o": np.zeros((B, T, HV, V)),
         "final_state": np.zeros((len(spans), HV, K, V))}
    for n, (b, first, end) in enumerate(spans):
        for h in range(HV if starts[n] is not None else 0):
            S = starts[n][h]
            for c, left in enumerate(range(first, end, C)):
                rows = slice(left, min(left + C, end))
                z["states"][b, base[n] + c, h] = S
                stages, S = _chunk(S, q[b, rows, h], k[b, rows, h], v[b, rows, h], g[b, rows, h], beta[b, rows, h])
                for name, value in stages.items():
                    where = (b, rows, h) if name not in "AT" else (b, rows, h, slice(len(value)))
                    z[name][where] = value
            z["final_state"][n, h] = S
    z["states"], z["final_state"] = _kv(z["states"], state_layout), _kv(z["final_state"], state_layout)
    return z


def _chunk(S, q, k, v, g, beta):
    """One chunk of one head: its stages, and the state after it."""
    n = len(g)
    later = np.arange(n)[:, None] > np.arange(n)                     # later[i, j]: i > j
    between = np.cumsum(np.where(later, g[:, None], 0.0), 0)         # sum of g over j+1 .. i
    G = np.where(later | np.eye(n, dtype=bool), np.exp(between), 0)  # decay from j to i
    gamma = np.cumsum(g)
    A = np.where(later, beta[:, None] * (k @ k.T) * G, 0)
    Tm = np.linalg.inv(np.eye(n) + A)
    U = Tm @ (beta[:, None] * v)
    W = Tm @ ((beta * np.exp(gamma))[:, None] * k)
    v_new = U - W @ S
    o = np.exp(gamma)[:, None] * (q @ S) + (G * (q @ k.T)) @ v_new
    S = np.exp(gamma[-1]) * S + k.T @ (G[-1][:, None] * v_new)
    return {"gamma": gamma, "A": A, "T": Tm, "U": U, "W": W, "v_new": v_new, "o": o}, S


def _convolve(history, x, weight, bias, activation, rounding, like):
    """y [D,T] of x [D,T] after the history's last W-1 columns (eq. 1)."""
    W, T = weight.shape[1], x.shape[1]
    taps = np.concatenate([history[:, history.shape[1] - (W - 1):], x], 1)
    y = np.zeros(x.shape) if bias is None else np.repeat(bias[:, None], T, 1)
    for w in range(W):
        y = y + weight[:, w:w + 1] * taps[:, w:w + T]
    if rounding == "hf":
        y = _rounded(y, like)
    return _silu(y) if activation == "silu" else y


@_checked
def causal_conv1d(x, weight, *, bias=None, activation="none", layout="btd", initial_state=None, return_state=False,
                  cu_seqlens=None, out=None, token_range=None, read_slots=None, has_initial_state=None, write_slots=None,
                  final_state=None, out_dtype=None, pad_slot=-1, rounding="float32", check_values=True, num_threads=None,
                  variant=None):
    """The convolution, sequence by sequence, in float64. Arguments and results: fidelta.causal_conv1d."""
    like = x
    x, weight, bias, initial = _f64(x), _f64(weight), _f64(bias), _f64(initial_state)
    x = x if layout == "bdt" else np.swapaxes(x, 1, 2)
    (B, D, T), W = x.shape, weight.shape[1]
    given = initial_state if initial_state is not None else final_state
    L = W - 1 if given is None else given.shape[2]
    spans = _spans(B, T, cu_seqlens, token_range)
    starts = _starts(initial, np.zeros((D, L)), len(spans), _ints(read_slots), has_initial_state, pad_slot)
    writes = _ints(write_slots)
    y = np.zeros((B, D, T))
    final = np.zeros((len(spans), D, L)) if final_state is None else _f64(final_state)
    for n, (b, first, end) in enumerate(spans):
        if starts[n] is None:
            continue
        part = x[b, :, first:end]
        y[b, :, first:end] = _convolve(starts[n], part, weight, bias, activation, rounding, like)
        slot = n if writes is None else int(writes[n])
        if writes is None or slot != pad_slot:
            final[slot] = np.concatenate([starts[n], part], 1)[:, end - first:]
            _store(final_state, final[slot], slot)
    y = y if layout == "bdt" else np.swapaxes(y, 1, 2)
    _store(out, y)
    return (y, final) if return_state or final_state is not None else y


@_checked
def causal_conv1d_step(x, weight, state, *, bias=None, activation="none", layout="btd", history="linear", positions=None,
                       offsets=None, cu_seqlens=None, token_range=None, read_slots=None, write_slots=None,
                       has_initial_state=None, out=None, out_dtype=None, pad_slot=-1, rounding="float32",
                       check_values=True, num_threads=None, variant=None):
    """The convolution over a few tokens; `state` is updated in place. Arguments and results: fidelta.causal_conv1d_step."""
    like = x
    x, weight, bias, old = _f64(x), _f64(weight), _f64(bias), _f64(state)
    x = x if layout == "bdt" else np.swapaxes(x, 1, 2)
    (B, D, T), W, L = x.shape, weight.shape[1], old.shape[2]
    spans = _spans(B, T, cu_seqlens, token_range)
    starts = _starts(old, np.zeros((D, L)), len(spans), _ints(read_slots), has_initial_state, pad_slot)
    writes = _ints(read_slots if write_slots is None else write_slots)
    y = np.zeros((B, D, T))
    for n, (b, first, end) in enumerate(spans):
        if starts[n] is None:
            continue
        part, count, start = x[b, :, first:end], end - first, starts[n]
        if history == "circular":
            seen = int(positions[n])
            taps = start[:, [(seen - (W - 1) + w) % L for w in range(W - 1)]]
            after = start
            for t in range(count):
                after[:, (seen + t) % L] = part[:, t]
        elif history == "draft":
            offset = int(offsets[n])
            taps = start[:, offset:offset + W - 1]
            after = np.concatenate([taps, part], 1)[:, -L:]
        else:
            taps = start
            after = np.concatenate([start, part], 1)[:, count:]
        y[b, :, first:end] = _convolve(taps, part, weight, bias, activation, rounding, like)
        slot = n if writes is None else int(writes[n])
        if writes is None or slot != pad_slot:
            _store(state, after, (slot, slice(None), slice(after.shape[1])))
    y = y if layout == "bdt" else np.swapaxes(y, 1, 2)
    _store(out, y)
    return y


@_checked
def gdn_gate(a, b, A_log, dt_bias, *, rounding="float32", g_out=None, beta_out=None, num_threads=None, variant=None):
    """g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b). Arguments and results: fidelta.gdn_gate."""
    g = -np.exp(_f64(A_log)) * _softplus(_f64(a) + _f64(dt_bias))
    beta = _sigmoid(_f64(b))
    if rounding == "hf":
        beta = _rounded(beta, b)
    _store(g_out, g)
    _store(beta_out, beta)
    return g, beta


@_checked
def l2norm(x, *, eps=1e-6, out=None, out_dtype=None, num_threads=None, variant=None):
    """y = x / sqrt(sum x^2 + eps). Arguments and results: fidelta.l2norm."""
    y = _l2(_f64(x), eps)
    _store(out, y)
    return y


def _rms(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


@_checked
def rms_norm(x, weight, *, eps=1e-6, weight_kind="w", out=None, out_dtype=None, num_threads=None, variant=None):
    """y = x / sqrt(mean x^2 + eps) times the weight. Arguments and results: fidelta.rms_norm."""
    y = _rms(_f64(x), eps) * (_f64(weight) + (weight_kind == "1+w"))
    _store(out, y)
    return y


@_checked
def rms_norm_gated(x, z, weight, *, eps=1e-6, activation="silu", out=None, out_dtype=None, num_threads=None,
                   variant=None):
    """y = x / sqrt(mean x^2 + eps) times the weight times act(z). Arguments and results: fidelta.rms_norm_gated."""
    z = _f64(z)
    y = _rms(_f64(x), eps) * _f64(weight) * (_sigmoid(z) if activation == "sigmoid" else _silu(z))
    _store(out, y)
    return y


@_checked
def linear(x, weight, *, bias=None, out=None, out_dtype=None, num_threads=None, variant=None):
    """y = x weight' + bias. Arguments and results: fidelta.linear."""
    y = _f64(x) @ _f64(weight).T
    if bias is not None:
        y = y + _f64(bias)
    _store(out, y)
    return y
