"""torch's and transformers' own code behind the signatures of fidelta.ops, for compare(). Needs both installed."""


def _tensor(x):
    """A torch tensor of any array; NumPy's bfloat16 is unknown to torch and goes by its bits."""
    import numpy as np
    import torch

    if isinstance(x, np.ndarray) and x.dtype.name == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x


def _refuse(op, left):
    used = [name for name, value in left.items() if value is not None and name not in ("check_values", "num_threads", "variant")]
    if used:
        raise TypeError(f"torch's {op} does not take {', '.join(used)}")


def _gated_delta_rule(function, q, k, v, g, beta, *, gate="log", beta_kind="value", A_log=None, dt_bias=None, scale=None,
                      qk_l2norm=False, head_map="grouped", initial_state=None, state_layout="kv", cu_seqlens=None,
                      return_state=False, **left):
    import torch

    _refuse("gated_delta_rule", left)
    q, k, v, g, beta = map(_tensor, (q, k, v, g, beta))
    if gate == "raw":
        g = -_tensor(A_log).float().exp() * torch.nn.functional.softplus(g.float() + _tensor(dt_bias).float())
    elif gate == "factor":
        g = g.float().log()
    if beta_kind == "logit":
        beta = beta.sigmoid()
    groups = v.shape[2] // q.shape[2]
    if groups > 1:
        q, k = (x.repeat(1, 1, groups, 1) if head_map == "tiled" else x.repeat_interleave(groups, 2) for x in (q, k))
    start = None if initial_state is None else _tensor(initial_state).float()
    if start is not None and state_layout == "vk":
        start = start.transpose(2, 3)
    ends = [0, v.shape[1]] if cu_seqlens is None else _tensor(cu_seqlens).tolist()
    o, final = [], []
    for n, (first, end) in enumerate(zip(ends, ends[1:])):
        mine = start if start is None or cu_seqlens is None else start[n:n + 1]
        part = [x[:, first:end] for x in (q, k, v, g, beta)]
        out, state = function(*part[:3], g=part[3], beta=part[4], initial_state=mine, output_final_state=True,
                              use_qk_l2norm_in_kernel=qk_l2norm)
        o.append(out)
        final.append(state)
    o, final = torch.cat(o, 1), torch.cat(final)
    if scale is not None:  # theirs is always K^-0.5, and the output is linear in q
        o = (o.float() * (scale * q.shape[-1] ** 0.5)).to(o.dtype)
    return (o, final.transpose(2, 3) if state_layout == "vk" else final) if return_state else o


def _causal_conv1d(x, weight, *, bias=None, activation="none", layout="btd", initial_state=None, return_state=False, **left):
    import torch

    _refuse("causal_conv1d", left)
    x, weight = _tensor(x), _tensor(weight)
    x = x if layout == "bdt" else x.transpose(1, 2)
    columns = weight.shape[1] - 1
    start = x.new_zeros(*x.shape[:2], columns) if initial_state is None else _tensor(initial_state).to(x.dtype)
    long = torch.cat([start, x], -1)
    y = torch.nn.functional.conv1d(long[..., start.shape[2] - columns:], weight.to(x.dtype)[:, None],
                                   None if bias is None else _tensor(bias).to(x.dtype), groups=x.shape[1])
    y = torch.nn.functional.silu(y) if activation == "silu" else y
    y = y if layout == "bdt" else y.transpose(1, 2)
    return (y, long[..., long.shape[2] - start.shape[2]:]) if return_state else y


def _l2norm(x, *, eps=1e-6, **left):
    _refuse("l2norm", left)
    x = _tensor(x)
    return x * ((x * x).sum(-1, keepdim=True) + eps).rsqrt()


def _rms_norm(x, weight, *, eps=1e-6, weight_kind="w", **left):
    import torch

    _refuse("rms_norm", left)
    x, weight = _tensor(x), _tensor(weight).float()
    weight = weight + 1 if weight_kind == "1+w" else weight
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def _rms_norm_gated(x, z, weight, *, eps=1e-6, activation="silu", **left):
    import torch

    _refuse("rms_norm_gated", left)
    z = _tensor(z).float()
    gate = torch.sigmoid(z) if activation == "sigmoid" else torch.nn.functional.silu(z)
    return (_rms_norm(_tensor(x).float(), weight, eps=eps) * gate).to(_tensor(x).dtype)


def _gdn_gate(a, b, A_log, dt_bias, **left):
    import torch

    _refuse("gdn_gate", left)
    a, b, A_log, dt_bias = map(_tensor, (a, b, A_log, dt_bias))
    return -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float()), b.sigmoid()


def _linear(x, weight, *, bias=None, **left):
    import torch

    _refuse("linear", left)
    x = _tensor(x)
    return torch.nn.functional.linear(x, _tensor(weight).to(x.dtype), None if bias is None else _tensor(bias).to(x.dtype))


def torch_oracle(op, detail=""):
    """The oracle of an op: "" is the chunked code, "recurrent" the token-wise one (gated_delta_rule only)."""
    simple = {"causal_conv1d": _causal_conv1d, "l2norm": _l2norm, "rms_norm": _rms_norm, "rms_norm_gated": _rms_norm_gated,
              "gdn_gate": _gdn_gate, "linear": _linear}
    if op in simple:
        return simple[op]
    if op != "gated_delta_rule":
        raise ValueError(f"compare: torch has no code of its own for {op}")
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    function = qwen.torch_recurrent_gated_delta_rule if detail == "recurrent" else qwen.torch_chunk_gated_delta_rule
    return lambda **inputs: _gated_delta_rule(function, **inputs)
