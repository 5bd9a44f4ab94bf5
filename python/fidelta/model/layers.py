"""The parts of a layer, on float32 activations x [T,hidden] of packed sequences.

`w(name)` gives a weight of the layer, `see(stage, array)` shows an intermediate result, `cu` [N+1] holds the first token
of each sequence and the end. With states (of one sequence), a layer goes on from them and updates them.
"""

import numpy as np

from .. import ops

SCORES = 2**22  # most attention scores held at once: a block of queries is as large as that allows


def norm(x, weight, eps):
    """Zero-centred RMS norm, weight 1 + w: all norms but the gated one."""
    return ops.rms_norm(x, weight, eps=eps, weight_kind="1+w")


def mlp(x, w):
    """down(silu(gate x) * up x)."""
    gate, up = ops.linear(x, w("mlp.gate_proj.weight")), ops.linear(x, w("mlp.up_proj.weight"))
    gate *= sigmoid(gate)
    gate *= up
    return ops.linear(gate, w("mlp.down_proj.weight"))


def linear_attention(x, w, see, cu, sizes, settings, state):
    """Mixer of a linear attention layer: projections, convolution, gated delta rule, gated norm, projection."""
    s, T = sizes, len(x)
    qkv = ops.linear(x, w("linear_attn.in_proj_qkv.weight"))
    see("qkv", qkv)
    taps = np.asarray(w("linear_attn.conv1d.weight"), np.float32).reshape(s.conv_dim, s.W)
    conv = _convolve(qkv[None], taps, cu, state)
    see("conv", conv[0])
    g, beta = ops.gdn_gate(ops.linear(x, w("linear_attn.in_proj_a.weight")), ops.linear(x, w("linear_attn.in_proj_b.weight")),
                           w("linear_attn.A_log"), w("linear_attn.dt_bias"))
    see("g", g)
    see("beta", beta)
    q, k, v = np.split(conv, (s.key_dim, 2 * s.key_dim), axis=-1)
    q, k, v = q.reshape(1, T, s.H, s.K), k.reshape(1, T, s.H, s.K), v.reshape(1, T, s.HV, s.V)
    o, delta = _delta_rule((q, k, v, g[None], beta[None]), cu, state)
    see("o", o[0])
    see("state", delta)
    z = ops.linear(x, w("linear_attn.in_proj_z.weight")).reshape(T, s.HV, s.V)
    y = ops.rms_norm_gated(o[0], z, w("linear_attn.norm.weight"), eps=settings.eps)
    return ops.linear(y.reshape(T, s.value_dim), w("linear_attn.out_proj.weight"))


def _convolve(x, taps, cu, state):
    if state is None:
        return ops.causal_conv1d(x, taps, activation="silu", cu_seqlens=cu)
    if x.shape[1] == 1:
        return ops.causal_conv1d_step(x, taps, state.conv, activation="silu")
    return ops.causal_conv1d(x, taps, activation="silu", initial_state=state.conv, final_state=state.conv)[0]


def _delta_rule(inputs, cu, state):
    if state is None:
        return ops.gated_delta_rule(*inputs, qk_l2norm=True, cu_seqlens=cu, return_state=True)
    if inputs[0].shape[1] == 1:
        return ops.gated_delta_rule_step(*inputs, state.delta, qk_l2norm=True), state.delta
    return ops.gated_delta_rule(*inputs, qk_l2norm=True, initial_state=state.delta, final_state=state.delta)


def full_attention(x, w, see, cu, sizes, settings, state):
    """Mixer of a full attention layer: heads normalised, rotated, causal softmax, times sigmoid(gate), projection."""
    s, T = sizes, len(x)
    both = ops.linear(x, w("self_attn.q_proj.weight")).reshape(T, s.heads, 2, s.head_dim)  # a head: query, then gate
    q, gate = both[:, :, 0], both[:, :, 1]
    k = ops.linear(x, w("self_attn.k_proj.weight")).reshape(T, s.kv_heads, s.head_dim)
    v = ops.linear(x, w("self_attn.v_proj.weight")).reshape(T, s.kv_heads, s.head_dim)
    first = 0 if state is None else state.length
    cos, sin = _rotation(first + np.arange(T) - np.repeat(cu[:-1], np.diff(cu)), settings)
    q = _rotate(norm(q, w("self_attn.q_norm.weight"), settings.eps), cos, sin)
    k = _rotate(norm(k, w("self_attn.k_norm.weight"), settings.eps), cos, sin)
    see("q", q)
    see("k", k)
    see("v", v)
    o = np.empty((T, s.heads, s.head_dim), np.float32)
    if state is not None:
        state.append(k, v)
        attend(q, state.k, state.v, o)
    else:
        for begin, end in zip(cu, cu[1:]):
            attend(q[begin:end], k[begin:end], v[begin:end], o[begin:end])
    see("o", o)
    o = o * sigmoid(gate)
    return ops.linear(o.reshape(T, s.heads * s.head_dim), w("self_attn.o_proj.weight"))


def _rotation(positions, settings):
    """cos and sin [T,1,rotary/2] of each token's angles."""
    frequency = settings.rope_theta ** -(np.arange(0, settings.rotary, 2) / settings.rotary)
    angle = positions[:, None, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _rotate(x, cos, sin):
    """Rotate the first dims of each head in place: dim i with dim i + rotary/2."""
    half = cos.shape[-1]
    a, b = x[..., :half].copy(), x[..., half:2 * half].copy()
    x[..., :half] = a * cos - b * sin
    x[..., half:2 * half] = b * cos + a * sin
    return x


def attend(q, k, v, out):
    """Causal softmax attention of one sequence into out: q, out [T,heads,D], k, v [S,kv_heads,D]; the last T of S tokens ask.

    Blocks of queries bound the memory; a block reads only the keys it may see. All queries that share a key head are the
    rows of one matrix product, since many small products cost far more than one large."""
    (T, heads, D), (S, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    rows = max(1, SCORES // max(1, group * S))
    for begin in range(0, T, rows):
        end = min(begin + rows, T)
        own, seen = end - begin, S - T + end
        later = np.triu(np.ones((own, own), bool), 1)[:, None]
        for head in range(kv_heads):
            asking = slice(head * group, (head + 1) * group)
            scores = q[begin:end, asking].reshape(own * group, D) * np.float32(D**-0.5) @ k[:seen, head].T
            np.copyto(scores.reshape(own, group, seen)[..., seen - own:], -np.inf, where=later)
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            out[begin:end, asking] = (scores @ v[:seen, head]).reshape(own, group, D)


def sigmoid(x):
    """1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)
