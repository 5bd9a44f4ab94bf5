"""The references against independent implementations: torch and transformers, and the chunked form against the loop."""

import math

import numpy as np
import pytest
from conftest import F32, delta_inputs, error, f64, states

from fidelta import reference


@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("options", [
    {}, {"qk_l2norm": True, "head_map": "tiled"}, {"state_layout": "vk", "scale": 0.3}, {"gate": "raw"},
    {"gate": "factor", "beta_kind": "logit"},
])
def test_stages_reproduce_the_recurrence(rng, options, chunk_size):
    x = delta_inputs(rng, B=2, T=150, H=2, HV=4, K=12, V=20, **{n: options[n] for n in ("gate", "beta_kind") if n in options})
    x.update({n: value for n, value in options.items() if n not in ("gate", "beta_kind")})
    layout = options.get("state_layout", "kv")
    x["initial_state"] = states(rng, 2, 4, 12, 20, state_layout=layout)
    o, state = reference.gated_delta_rule(**x, return_state=True)
    stages = reference.gated_delta_rule_stages(**x, chunk_size=chunk_size)
    assert error(stages["o"], o) < 1e-12
    assert error(stages["final_state"], state) < 1e-12
    assert stages["states"].shape[1] == math.ceil(150 / chunk_size)
    assert error(stages["states"][:, 0], x["initial_state"]) < 1e-12


def test_stages_of_packed_sequences(rng):
    x = delta_inputs(rng, T=200, H=1, HV=3, K=8, V=8)
    cu = np.array([0, 0, 1, 65, 129, 200])
    o, state, snapshots = reference.gated_delta_rule(**x, cu_seqlens=cu, return_state=True, snapshot_every=1)
    stages = reference.gated_delta_rule_stages(**x, cu_seqlens=cu)
    assert stages["states"].shape[:2] == (1, 0 + 1 + 1 + 1 + 2)
    assert error(stages["o"], o) < 1e-12 and error(stages["final_state"], state) < 1e-12
    assert snapshots.shape[0] == 3                      # 64 tokens of the sequences with 64, 64 and 71
    assert error(snapshots[2], stages["states"][0, 4]) < 1e-12


def test_stages_survive_a_closed_gate(rng):
    x = delta_inputs(rng, T=130, H=1, HV=2, K=8, V=8)
    x["g"][0, [0, 5, 6, 63, 64, 100], 0] = -np.inf
    x["g"][0, :, 1] = -90
    o, state = reference.gated_delta_rule(**x, return_state=True)
    stages = reference.gated_delta_rule_stages(**x)
    assert error(stages["o"], o) < 1e-12 and error(stages["final_state"], state) < 1e-12
    assert all(np.isfinite(stage).all() for name, stage in stages.items() if name not in ("g", "gamma"))


def torch_pieces():
    torch = pytest.importorskip("torch", reason="torch is an oracle here; install the test extra")
    return torch, lambda x: torch.from_numpy(np.ascontiguousarray(x))


def transformers_functions():
    pytest.importorskip("transformers", reason="transformers is an oracle here; install the test extra")
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    return qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_gated_delta_rule_against_transformers(rng, which, T):
    torch, t = torch_pieces()
    function = transformers_functions()[which]
    x = delta_inputs(rng, B=2, T=T, H=3, HV=3, K=16, V=24)
    start = states(rng, 2, 3, 16, 24)
    o, state = reference.gated_delta_rule(**x, qk_l2norm=True, initial_state=start, return_state=True)
    theirs, their_state = function(t(x["q"]), t(x["k"]), t(x["v"]), g=t(x["g"]), beta=t(x["beta"]), initial_state=t(start),
                                   output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert error(theirs, o) < 1e-5 and error(their_state, state) < 1e-5  # theirs is float32


def test_grouped_heads_are_repeat_interleave(rng):
    x = delta_inputs(rng, T=20, H=2, HV=6, K=8, V=8)
    o = reference.gated_delta_rule(**x)
    wide = {**x, "q": np.repeat(x["q"], 3, 2), "k": np.repeat(x["k"], 3, 2)}
    assert np.array_equal(o, reference.gated_delta_rule(**wide))
    tiled = {**x, "q": np.tile(x["q"], (1, 1, 3, 1)), "k": np.tile(x["k"], (1, 1, 3, 1))}
    assert np.array_equal(reference.gated_delta_rule(**x, head_map="tiled"), reference.gated_delta_rule(**tiled))


def test_step_continues_the_rule(rng):
    x = delta_inputs(rng, B=2, T=21, H=1, HV=2, K=8, V=12)
    o, state = reference.gated_delta_rule(**x, return_state=True)
    pool = np.zeros((2, 2, 8, 12))
    parts = []
    for first, end in ((0, 16), (16, 17), (17, 21)):
        part = {n: a[:, first:end] if isinstance(a, np.ndarray) else a for n, a in x.items()}
        parts.append(reference.gated_delta_rule_step(**part, state=pool))
    assert error(np.concatenate(parts, 1), o) < 1e-14 and error(pool, state) < 1e-14


def test_step_slots_accepted_and_pads(rng):
    x = delta_inputs(rng, B=3, T=4, H=1, HV=1, K=4, V=4)
    pool = states(rng, 9, 1, 4, 4)
    before = pool.copy()
    read = np.array([[0, 1, 2], [3, 4, 5], [-1, -1, -1]])
    write = np.array([[0, 1, 2, -1], [3, 4, 5, 6], [7, 8, 7, 8]])
    o, after = reference.gated_delta_rule_step(**x, state=pool, read_slots=read, accepted=np.array([2, 0, 1]),
                                               write_slots=write, return_token_states=True)
    plain, _, snapshots = reference.gated_delta_rule(
        **x, initial_state=before[[2, 3, 8]], return_state=True,
        snapshot_positions=[(n, t) for n in range(2) for t in range(1, 5)])
    assert error(o[:2], plain[:2]) < 1e-14 and not o[2].any()
    assert error(pool[:3], snapshots[:3]) < 1e-6 and error(pool[3:7], snapshots[4:]) < 1e-6
    assert np.array_equal(pool[7:], before[7:])
    assert error(after[0], snapshots[:4]) < 1e-14 and not after[2].any()


@pytest.mark.parametrize("W", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("T", [1, 2, 3, 40])
def test_causal_conv1d_against_torch(rng, W, T):
    torch, t = torch_pieces()
    B, D = 2, 5
    x, weight, bias = (rng.standard_normal(shape) for shape in ((B, D, T), (D, W), (D,)))
    start = rng.standard_normal((B, D, W + 1))
    y, final = reference.causal_conv1d(x, weight, bias=bias, activation="silu", layout="bdt", initial_state=start,
                                       return_state=True)
    long = torch.cat([t(start)[..., 2:], t(x)], -1)
    theirs = torch.nn.functional.silu(torch.nn.functional.conv1d(long, t(weight)[:, None], t(bias), groups=D))
    assert error(theirs, y) < 1e-13
    assert np.array_equal(final, np.concatenate([start, x], 2)[..., -(W + 1):])


@pytest.mark.parametrize("history", ["linear", "circular", "draft"])
def test_conv_step_continues_the_convolution(rng, history):
    B, D, T, W = 2, 3, 12, 4
    x, weight = rng.standard_normal((B, T, D)), rng.standard_normal((D, W))
    y = reference.causal_conv1d(x, weight)
    L = 5 if history == "circular" else 7
    pool = np.zeros((B, D, L))
    parts, seen = [], 0
    extra = {}
    for count in (1, 3, 2, 4, 2):
        if history == "circular":
            extra = {"positions": np.full(B, seen)}
        elif history == "draft":  # after the call before, the history begins with its W-1 taps; all its tokens were kept
            extra = {"offsets": np.full(B, 0 if seen == 0 else kept)}
        parts.append(reference.causal_conv1d_step(x[:, seen:seen + count], weight, pool, history=history, **extra))
        seen, kept = seen + count, count
    assert error(np.concatenate(parts, 1), y) < 1e-14


def test_gates_and_norms_against_torch(rng):
    torch, t = torch_pieces()
    a, b, z = (rng.standard_normal((3, 7, 6)) * 8 for _ in range(3))
    A_log, dt_bias, weight = (rng.standard_normal(6) for _ in range(3))
    g, beta = reference.gdn_gate(a, b, A_log, dt_bias)
    assert error(-t(A_log).exp() * torch.nn.functional.softplus(t(a) + t(dt_bias)), g) < 1e-8  # theirs is linear above 20
    assert error(t(b).sigmoid(), beta) < 1e-14
    norm = torch.nn.functional.rms_norm(t(a), (6,), eps=1e-6)
    assert error(norm * (1 + t(weight)), reference.rms_norm(a, weight, weight_kind="1+w")) < 1e-14
    assert error(norm * t(weight) * torch.nn.functional.silu(t(z)), reference.rms_norm_gated(a, z, weight)) < 1e-14
    assert error(norm * t(weight) * t(z).sigmoid(), reference.rms_norm_gated(a, z, weight, activation="sigmoid")) < 1e-14
    assert error(torch.nn.functional.normalize(t(a), dim=-1), reference.l2norm(a)) < 1e-6
    assert not reference.l2norm(np.zeros((2, 4))).any()
    assert error(torch.nn.functional.linear(t(a), t(z[0]), t(weight).repeat(2)[:7]),
                 reference.linear(a, z[0], bias=np.tile(weight, 2)[:7])) < 1e-14


def test_inputs_of_every_library(rng):
    torch, t = torch_pieces()
    x = delta_inputs(rng, T=9, H=1, HV=2, K=4, V=4)
    o = reference.gated_delta_rule(**x)
    assert np.array_equal(o, reference.gated_delta_rule(**{n: t(a) if isinstance(a, np.ndarray) else a for n, a in x.items()}))
    half = {n: t(a).bfloat16() if isinstance(a, np.ndarray) else a for n, a in x.items()}
    narrow = {n: a.float().numpy() if hasattr(a, "float") else a for n, a in half.items()}
    assert np.array_equal(reference.gated_delta_rule(**half), reference.gated_delta_rule(**narrow))
    pool, mine = torch.zeros(1, 2, 4, 4, dtype=torch.bfloat16), np.zeros((1, 2, 4, 4), F32)
    reference.gated_delta_rule_step(**half, state=pool)
    reference.gated_delta_rule_step(**half, state=mine)
    assert np.array_equal(f64(pool), f64(torch.from_numpy(mine).bfloat16()))


def test_rounding_hf_rounds_beta_to_its_dtype(rng):
    torch, t = torch_pieces()
    b = t(rng.standard_normal((1, 5, 2))).bfloat16()
    zeros = t(np.zeros(2))
    assert np.array_equal(reference.gdn_gate(b, b, zeros, zeros, rounding="hf")[1], f64(b.double().sigmoid().bfloat16()))
    assert not np.array_equal(reference.gdn_gate(b, b, zeros, zeros)[1], f64(b.double().sigmoid().bfloat16()))


@pytest.mark.parametrize("op", [op for op in reference.CHOICES if reference.CHOICES[op]])
def test_unknown_choices_are_refused(op):
    for name in reference.CHOICES[op]:
        with pytest.raises(ValueError, match=f"{op}: {name} is 'junk'; expected "):
            getattr(reference, op)(**{name: "junk"})
