"""Looking after states: health of a pool, its axis order, its share of a tensor-parallel rank, foreign L2 norms."""

import math

import numpy as np

from .reference import _f64


def check_state(pool, *, limit=None, every=False):
    """What is wrong in a pool of states or histories [S, ...]: {slot: {"nan": count, "inf": count, "absmax": value}}.

    Slots with NaN or Inf, and with `limit` those with a finite value beyond it; every=True lists all slots. absmax is
    over the finite values. One bad slot that is never overwritten poisons each request that gets it: logits of NaN are
    often printed as token 0 ("!") over and over.
    """
    found = {}
    for slot in range(len(pool)):
        values, nan, inf = pool[slot], 0, 0
        absmax = max(float(values.max()), -float(values.min())) if 0 not in values.shape else 0.0
        if not math.isfinite(absmax):  # NaN passes through max and min, so a healthy slot is read twice and never copied
            values = _f64(values)
            nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
            absmax = float(np.abs(values[np.isfinite(values)]).max(initial=0))
        if every or nan or inf or (limit is not None and absmax > limit):
            found[slot] = {"nan": nan, "inf": inf, "absmax": absmax}
    return found


def detect_state_layout(state, k, v):
    """"kv" or "vk": the axis order of a [.., K, V] or [.., V, K] state after one token from zero, with this k [.., K] and v [.., V].

    After one token the state is k (beta v)': each of its rows is a multiple of v (kv) or of k (vk). The scale of k, of v
    and of beta does not matter. ValueError when both orders fit (k and v parallel) or neither does. Heads of k that are
    fewer than those of the state are taken as grouped.
    """
    S, k, v = _f64(state), _f64(k), _f64(v)
    K, V = k.shape[-1], v.shape[-1]
    S = S.reshape(-1, *S.shape[-2:])
    k, v = (np.repeat(x.reshape(-1, x.shape[-1]), len(S) // x.reshape(-1, x.shape[-1]).shape[0], 0) for x in (k, v))
    misfit = {}
    for layout, left, right in (("kv", k, v), ("vk", v, k)):
        if S.shape[1:] != (left.shape[1], right.shape[1]):
            continue
        product = left[:, :, None] * right[:, None, :]
        scale = (S * product).sum((1, 2)) / np.maximum((product**2).sum((1, 2)), 1e-300)  # best beta of each head
        misfit[layout] = np.linalg.norm(S - scale[:, None, None] * product) / max(np.linalg.norm(S), 1e-300)
    if not misfit:
        raise ValueError(f"detect_state_layout: state has shape {tuple(_f64(state).shape)}; expected (.., {K}, {V}) or (.., {V}, {K})")
    if not np.any(S):
        raise ValueError("detect_state_layout: state is zero; expected the state after one token")
    fits = [layout for layout, error in misfit.items() if error < 0.02]
    if len(fits) != 1:
        errors = ", ".join(f"{layout} misses by {error:.2g}" for layout, error in misfit.items())
        reason = "both orders fit" if fits else "no order fits; is this the state after exactly one token from zero?"
        raise ValueError(f"detect_state_layout: {reason} ({errors})")
    return fits[0]


def _shard(x, axis, blocks, tp, rank, what):
    """This rank's part of every block along an axis, joined: blocks are (name, size), one after the other."""
    if not 0 <= rank < tp:
        raise ValueError(f"{what}: rank is {rank}; expected 0 .. {tp - 1}")
    total = sum(size for _, size in blocks)
    if x.shape[axis] != total:
        sizes = " + ".join(f"{name} {size}" for name, size in blocks)
        raise ValueError(f"{what}: axis {axis} has {x.shape[axis]} entries; expected {total} = {sizes}")
    rows, start = [], 0
    for name, size in blocks:
        if size % tp:
            raise ValueError(f"{what}: {name} has {size} entries, which is not a multiple of tp = {tp}")
        part = size // tp
        rows.append(np.arange(start + rank * part, start + (rank + 1) * part))
        start += size
    rows = np.concatenate(rows)
    index = [slice(None)] * len(x.shape)
    index[axis] = rows
    return x[tuple(index)]


def shard_conv_state(state, key_dim, value_dim, tp, rank):
    """The conv history [S, 2 key_dim + value_dim, L] of one tensor-parallel rank. Channels are the blocks q, k and v, and
    each block is cut by heads: 1/tp of the whole would straddle them. Sizes that tp does not divide are a ValueError."""
    return _shard(state, 1, (("q", key_dim), ("k", key_dim), ("v", value_dim)), tp, rank, "shard_conv_state")


def shard_conv_weight(weight, key_dim, value_dim, tp, rank):
    """conv1d.weight [2 key_dim + value_dim, W] (or [.., 1, W], or a bias) of one rank; blocks as in shard_conv_state."""
    return _shard(weight, 0, (("q", key_dim), ("k", key_dim), ("v", value_dim)), tp, rank, "shard_conv_weight")


def shard_in_proj(weight, key_dim, value_dim, tp, rank, *, kind="qkv", heads=None):
    """The rows of an input projection [rows, hidden] that belong to one rank.

    kind  "qkv"   Qwen3.5's in_proj_qkv: blocks q, k, v
          "qkvz"  Qwen3-Next's in_proj_qkvz: q, k, v, z of key head 0, then of key head 1, ...; heads = number of key heads
          "z"     value_dim rows; "a" or "b": one row a value head, value_dim = number of value heads
    """
    if kind == "qkv":
        blocks = (("q", key_dim), ("k", key_dim), ("v", value_dim))
    elif kind == "qkvz":  # whole key heads stand one after the other, so a plain cut is right if it falls between heads
        if heads is None or heads % tp:
            raise ValueError(f"shard_in_proj: kind \"qkvz\" has {heads} key heads, which is not a multiple of tp = {tp}")
        blocks = (("qkvz", 2 * key_dim + 2 * value_dim),)
    elif kind in ("z", "a", "b"):
        blocks = ((kind, value_dim),)
    else:
        raise ValueError(f"shard_in_proj: kind is {kind!r}; expected qkv, qkvz, z, a or b")
    return _shard(weight, 0, blocks, tp, rank, "shard_in_proj")


L2_FORMULAS = {
    "x / sqrt(sum x^2 + eps)": lambda x, s, eps: x / np.sqrt(s + eps),
    "x / (sqrt(sum x^2) + eps)": lambda x, s, eps: x / (np.sqrt(s) + eps),
    "x / sqrt(sum x^2)": lambda x, s, eps: x / np.sqrt(np.maximum(s, 1e-300)),
    "x / max(sqrt(sum x^2), eps)": lambda x, s, eps: x / np.maximum(np.sqrt(s), eps),
    "x / sqrt(mean x^2 + eps)": lambda x, s, eps: x / np.sqrt(s / x.shape[-1] + eps),
    "x (no norm)": lambda x, s, eps: x,
}


def diagnose_l2norm(function, *, width=128):
    """Which formula a foreign L2 norm uses. `function` takes a float32 NumPy array [rows, width] and returns the result.

    Rows of norm 10 down to 1e-7, and 0, tell eps inside the root from eps outside and from none. Returns a dict: formula and
    eps of the best fit, error (its largest relative error), zero_row ("zero", "nan" or "other"), rounding ("float32",
    "bfloat16" or "float16": the coarsest that explains the error).
    """
    directions = np.random.default_rng(0).standard_normal((7, width))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    x = (directions * np.array([[10], [1], [1e-2], [1e-3], [1e-4], [1e-7], [0]])).astype(np.float32)
    got = _f64(function(x.copy()))
    x = x.astype(np.float64)
    s = (x * x).sum(-1, keepdims=True)
    size = np.linalg.norm(got[:-1], axis=1)
    best = None
    for name, formula in L2_FORMULAS.items():
        for eps in (1e-6, 1e-5, 1e-8, 1e-12) if "eps" in name else (0.0,):
            expected = formula(x[:-1], s[:-1], eps)
            error = np.linalg.norm(got[:-1] - expected, axis=1) / np.linalg.norm(expected, axis=1)
            error = float(np.where(np.isfinite(size), error, np.inf).max())
            if best is None or error < best["error"] * 0.999:
                best = {"formula": name, "eps": eps, "error": error}
    zero = got[-1]
    best["zero_row"] = "nan" if np.isnan(zero).any() else "zero" if not zero.any() else "other"
    limits = (("float32", 1e-5), ("float16", 1e-3), ("bfloat16", 1e-2))
    best["rounding"] = next((name for name, limit in limits if best["error"] <= limit), "unknown")
    return best
