"""The gated delta rule kernels, every runnable variant, against a plain float64 loop; and what must agree bit for bit."""

import math

import numpy as np
import pytest
from conftest import BF16, F16, F32, Guarded, contract, delta_inputs, each_variant, error, f64, same_bits, states, variants

from fidelta import _core

LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130)
WIDTHS = ((128, 128), (64, 32), (60, 100), (1, 3), (256, 256))
HEADS = ((1, 1), (2, 4), (1, 3), (2, 6))


def oracle(made, state=None, every=False):
    """o [B T HV V] and the states [B HV K V] after the last token (or after each: [B T HV K V]), one token at a time."""
    q, k, v, g, beta = (f64(made[name]) for name in ("q", "k", "v", "g", "beta"))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    head = np.arange(HV) % H if made.get("head_map") == "tiled" else np.arange(HV) // (HV // H)
    if made.get("gate", "log") == "raw":
        g = -np.exp(f64(made["A_log"])) * np.logaddexp(0, g + f64(made["dt_bias"]))
    decay = g if made.get("gate") == "factor" else np.exp(g)
    if made.get("beta_kind") == "logit":
        beta = 1 / (1 + np.exp(-beta))
        if made.get("rounding") == "hf":
            beta = f64(beta.astype(F32).astype(made["beta"].dtype))
    if made.get("qk_l2norm"):
        eps = made.get("l2norm_eps", 1e-6)
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + eps)
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + eps)
    q = q * made.get("scale", K**-0.5)
    S = np.zeros((B, HV, K, V)) if state is None else f64(state).copy()
    o, seen = np.zeros((B, T, HV, V)), np.zeros((B, T if every else 0, HV, K, V))
    for t in range(T):
        qt, kt = q[:, t, head], k[:, t, head]
        S = S * decay[:, t, :, None, None]
        d = beta[:, t, :, None] * (v[:, t] - (kt[:, :, None] @ S)[:, :, 0])
        S = S + kt[..., None] * d[:, :, None]
        o[:, t] = (qt[:, :, None] @ S)[:, :, 0]
        if every:
            seen[:, t] = S
    return o, seen if every else S


def prefill(made, memory=None, state_dtype=F32, vk=False, slots=None, snapshots=0, inplace=False, keep=True, **more):
    """Runs _core.gated_delta_rule in guarded memory; returns o, final_state, snapshots (None where not asked for)."""
    arguments = {**made, **more}
    HV, V = arguments["v"].shape[2:]
    K = arguments["q"].shape[3]
    N = len(arguments["cu_seqlens"]) - 1 if "cu_seqlens" in arguments else arguments["q"].shape[0]
    memory = memory or Guarded()
    arguments = memory(arguments)
    tail = (HV, V, K) if vk else (HV, K, V)
    if vk:
        arguments["state_layout"] = "vk"
    final = arguments.get("initial_state") if inplace else memory.empty((slots or N, *tail), state_dtype)
    if not keep:
        final = None
    taken = memory.empty((snapshots, *tail), state_dtype) if snapshots else None
    o = memory.empty(arguments["v"].shape, arguments["v"].dtype if "o_dtype" not in arguments else arguments.pop("o_dtype"))
    _core.gated_delta_rule(**arguments, final_state=final, snapshots=taken, o=o)
    memory.check()
    return o, final, taken


def step(made, state, memory=None, every=False, **more):
    """Runs _core.gated_delta_rule_step on a guarded copy of the pool; returns o, the pool, token_states."""
    memory = memory or Guarded()
    arguments = memory({**made, **more})
    pool = memory.copy(state)
    B, T = made["q"].shape[:2]
    seen = memory.empty((B, T, *state.shape[1:]), state.dtype) if every else None
    o = memory.empty(made["v"].shape, made["v"].dtype)
    _core.gated_delta_rule_step(**arguments, state=pool, token_states=seen, o=o)
    memory.check()
    return o, pool, seen


def cut(made, first, end):
    """The tokens first .. end-1 of every input."""
    return {name: x[:, first:end] if name in ("q", "k", "v", "g", "beta") else x for name, x in made.items()}


def row(made, b):
    return {name: x[b:b + 1] if name in ("q", "k", "v", "g", "beta") else x for name, x in made.items()}


def swap(state):
    return np.ascontiguousarray(np.swapaxes(state, -1, -2))


# Against the loop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K, V", WIDTHS)
@pytest.mark.parametrize("T", LENGTHS)
def test_prefill_sizes(T, K, V, rng):
    H, HV = HEADS[LENGTHS.index(T) % len(HEADS)]
    made = delta_inputs(rng, B=2, T=T, H=H, HV=HV, K=K, V=V, unit_keys=True)
    initial = states(rng, 2, HV, K, V)
    want_o, want_state = oracle(made, initial)
    for variant in variants("gated_delta_rule"):
        o, final, _ = prefill(made, initial_state=initial, variant=variant)
        contract(o, want_o)
        contract(final, want_state)


@pytest.mark.parametrize("H, HV", HEADS)
@pytest.mark.parametrize("head_map", ("grouped", "tiled"))
@each_variant("gated_delta_rule")
def test_prefill_heads(variant, head_map, H, HV, rng):
    made = delta_inputs(rng, T=70, H=H, HV=HV, K=32, V=48, unit_keys=True)
    want_o, want_state = oracle({**made, "head_map": head_map})
    for threads in (1, 2, 7):
        o, final, _ = prefill(made, head_map=head_map, variant=variant, num_threads=threads)
        contract(o, want_o)
        contract(final, want_state)


@each_variant("gated_delta_rule")
def test_prefill_real_model(variant, rng):
    made = delta_inputs(rng, T=97, H=16, HV=48, K=128, V=128, dtype=BF16, gate="raw", beta_kind="logit", gate_dtype=BF16)
    made["qk_l2norm"] = True
    want_o, want_state = oracle(made)
    o, final, _ = prefill(made, variant=variant)
    contract(o, want_o)
    contract(final, want_state)


@pytest.mark.parametrize("size, eps", ((1e19, 1e-6), (1e36, 1e-6), (1e-25, 0.0), (1e-25, 1e-6)))
@each_variant("gated_delta_rule")
def test_prefill_l2norm_of_any_size(variant, size, eps, rng):
    made = delta_inputs(rng, T=70, H=1, HV=2, K=64, V=32)
    made.update(q=made["q"] * np.float32(size), k=made["k"] * np.float32(size), qk_l2norm=True, l2norm_eps=eps)
    want_o, want_state = oracle(made)
    o, final, _ = prefill(made, variant=variant)
    contract(o, want_o)
    contract(final, want_state)


@pytest.mark.parametrize("dtype", (F32, BF16, F16))
@pytest.mark.parametrize("gate", ("log", "factor", "raw"))
@pytest.mark.parametrize("beta_kind, rounding", (("value", "float32"), ("logit", "float32"), ("logit", "hf")))
@each_variant("gated_delta_rule")
def test_prefill_choices(variant, beta_kind, rounding, gate, dtype, rng):
    made = delta_inputs(rng, B=1, T=50, H=2, HV=4, K=48, V=40, dtype=dtype, gate=gate, beta_kind=beta_kind,
                        gate_dtype=dtype)
    made.update(rounding=rounding, qk_l2norm=True, scale=0.3, l2norm_eps=1e-3)
    initial = states(rng, 1, 4, 48, 40, dtype)
    want_o, want_state = oracle(made, initial)
    o, final, _ = prefill(made, initial_state=initial, state_dtype=dtype, variant=variant)
    # sigmoid that falls beside a rounding boundary moves beta by a unit of its dtype
    loose = 20 if rounding == "hf" and dtype != F32 else 1.05
    contract(o, want_o, rounded=loose)
    contract(final, want_state, rounded=loose)


@each_variant("gated_delta_rule")
def test_prefill_long(variant, rng):
    made = delta_inputs(rng, T=4096, H=1, HV=2, K=64, V=64, unit_keys=True)
    want_o, want_state = oracle(made)
    o, final, _ = prefill(made, variant=variant)
    contract(o, want_o)
    contract(final, want_state)


def hard(name, rng):
    T = 10000 if name == "no decay, long" else 130
    made = delta_inputs(rng, T=T, H=1, HV=2, K=32, V=32, unit_keys=True)
    g, beta, k = made["g"], made["beta"], made["k"]
    if name == "no decay, long":
        g[:] = 0
    elif name == "near-parallel keys":
        k[:] = k[:, :1] + 1e-3 * rng.standard_normal(k.shape)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        g[:] = 0
        beta[:] = 1
    elif name == "same key":
        k[:] = k[:, :1] / np.linalg.norm(k[:, :1])
        g[:] = -1e-3
        beta[:] = 1
    elif name == "strong gates":
        g[:] = -60
    elif name == "strong, then weak":
        g[:] = -1e-3
        g[:, ::40] = -90
        g[:, 5::40] = -3000
    elif name == "forgets all":
        g[:, 7::29] = -np.inf
    elif name == "always forgets":
        g[:] = -np.inf
    elif name == "enormous":
        g[:, ::3] = -3e38
    elif name == "no writes":
        beta[:] = 0
    elif name == "factor zero":
        made["gate"] = "factor"
        made["g"] = np.exp(g)
        made["g"][:, 11::31] = 0
        made["g"][:, 12::31] = 1
    return made


HARD = ("no decay, long", "near-parallel keys", "same key", "strong gates", "strong, then weak", "forgets all",
        "always forgets", "enormous", "no writes", "factor zero")


@pytest.mark.parametrize("name", HARD)
def test_prefill_hard(name, rng):
    made = hard(name, rng)
    initial = states(rng, 1, 2, 32, 32)
    want_o, want_state = oracle(made, initial)
    for variant in variants("gated_delta_rule"):
        o, final, _ = prefill(made, initial_state=initial, variant=variant)
        loose = 1e-4 if name == "near-parallel keys" else 5e-6
        contract(o, want_o, float32=loose)
        contract(final, want_state, float32=loose)


@each_variant("gated_delta_rule")
def test_prefill_later_nan_leaves_earlier_tokens(variant, rng):
    made = delta_inputs(rng, T=65, H=1, HV=2, K=32, V=32, unit_keys=True)
    clean, _, _ = prefill(made, variant=variant)
    for name in ("q", "k", "v", "g", "beta"):
        spoiled = {**made, name: made[name].copy()}
        spoiled[name][:, 41] = np.nan
        o, _, _ = prefill(spoiled, variant=variant)
        same_bits(o[:, :41], clean[:, :41])
        assert np.isnan(o[:, 41]).any()


# Bit for bit ---------------------------------------------------------------------------------------------------------


SMALL = {"H": 2, "HV": 4, "K": 40, "V": 72}


@each_variant("gated_delta_rule")
def test_alone_is_in_batch(variant, rng):
    made = delta_inputs(rng, B=3, T=77, **SMALL)
    initial = states(rng, 3, 4, 40, 72)
    o, final, _ = prefill(made, initial_state=initial, variant=variant)
    for b in range(3):
        alone, last, _ = prefill(row(made, b), initial_state=initial[b:b + 1], variant=variant)
        same_bits(alone, o[b:b + 1])
        same_bits(last, final[b:b + 1])


@pytest.mark.parametrize("index", (np.int32, np.int64))
@each_variant("gated_delta_rule")
def test_packed_is_separate(variant, index, rng):
    cu = np.array([0, 5, 5, 69, 133, 210], index)
    made = delta_inputs(rng, T=210, **SMALL)
    initial = states(rng, 5, 4, 40, 72)
    o, final, _ = prefill(made, cu_seqlens=cu, initial_state=initial, variant=variant)
    for n, (first, end) in enumerate(zip(cu, cu[1:])):
        alone, last, _ = prefill(cut(made, first, end), initial_state=initial[n:n + 1], variant=variant)
        same_bits(alone, o[:, first:end])
        same_bits(last, final[n:n + 1])
    same_bits(final[1], initial[1])


@each_variant("gated_delta_rule")
def test_split_is_whole(variant, rng):
    made = delta_inputs(rng, T=200, dtype=BF16, **SMALL)
    initial = states(rng, 1, 4, 40, 72)
    o, final, _ = prefill(made, initial_state=initial, variant=variant)
    for at in (64, 128, 192):
        first, middle, _ = prefill(cut(made, 0, at), initial_state=initial, variant=variant)
        second, last, _ = prefill(cut(made, at, 200), initial_state=middle, variant=variant)
        same_bits(np.concatenate([first, second], 1), o)
        same_bits(last, final)


@each_variant("gated_delta_rule")
def test_prefix_is_whole(variant, rng):
    made = delta_inputs(rng, T=100, **SMALL)
    o, _, _ = prefill(made, variant=variant)
    for T in (1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 99):
        same_bits(prefill(cut(made, 0, T), variant=variant)[0], o[:, :T])


@each_variant("gated_delta_rule")
def test_any_thread_count(variant, rng):
    made = delta_inputs(rng, B=2, T=70, H=2, HV=12, K=24, V=24)
    one = prefill(made, variant=variant, num_threads=1)
    for threads in (2, 3, 8, 40):
        more = prefill(made, variant=variant, num_threads=threads)
        same_bits(one[0], more[0])
        same_bits(one[1], more[1])


@pytest.mark.parametrize("dtype", (F32, BF16, F16))
@pytest.mark.parametrize("K, V", ((40, 72), (60, 100), (1, 3), (128, 128)))
@each_variant("gated_delta_rule")
def test_vk_is_kv(variant, K, V, dtype, rng):
    made = delta_inputs(rng, T=45, H=1, HV=2, K=K, V=V)
    initial, at = states(rng, 1, 2, K, V, dtype), np.array([[0, 32], [0, 40]])
    plain = prefill(made, initial_state=initial, state_dtype=dtype, snapshot_at=at, snapshots=2, variant=variant)
    turned = prefill(made, initial_state=swap(initial), state_dtype=dtype, snapshot_at=at, snapshots=2, vk=True,
                     variant=variant)
    same_bits(plain[0], turned[0])
    same_bits(plain[1], swap(turned[1]))
    same_bits(plain[2], swap(turned[2]))


@pytest.mark.parametrize("vk", (False, True))
@each_variant("gated_delta_rule")
def test_slots(variant, vk, rng):
    """In place in a pool: a padded sequence, one that is not kept, one that starts from zero, one that moves."""
    made = delta_inputs(rng, B=5, T=40, **SMALL)
    pool = states(rng, 9, 4, 40, 72)
    pool[3] = np.nan
    read = np.array([2, -1, 5, 3, 7])
    write = np.array([2, 8, -1, 3, 6])
    fresh = np.array([True, True, True, False, True])
    given = swap(pool) if vk else pool
    o, final, _ = prefill(made, initial_state=given, read_slots=read, write_slots=write, has_initial_state=fresh,
                          inplace=True, vk=vk, variant=variant)
    final = swap(final) if vk else final
    assert not o[1].any()
    for n in (0, 2, 3, 4):
        start = pool[read[n]:read[n] + 1] if fresh[n] else None
        want, last, _ = prefill(row(made, n), **({"initial_state": start} if fresh[n] else {}), variant=variant)
        same_bits(o[n:n + 1], want)
        if write[n] >= 0:
            same_bits(final[write[n]], last[0])
    for slot in set(range(9)) - {2, 3, 6}:
        same_bits(final[slot], pool[slot])


@each_variant("gated_delta_rule")
def test_token_range_skips(variant, rng):
    made = delta_inputs(rng, B=3, T=50, **SMALL)
    spans = np.array([[3, 50], [20, 20], [0, 37]])
    for name in ("q", "k", "v", "g", "beta"):
        for b, (first, end) in enumerate(spans):
            made[name][b, :first] = made[name][b, end:] = np.nan
    initial = states(rng, 3, 4, 40, 72)
    at = np.array([[2, 30], [0, 47], [1, 0]])
    o, final, taken = prefill(made, token_range=spans, initial_state=initial, snapshot_at=at, snapshots=3, variant=variant)
    for b, (first, end) in enumerate(spans):
        alone, last, _ = prefill(cut(row(made, b), first, end), initial_state=initial[b:b + 1], variant=variant)
        same_bits(o[b:b + 1, first:end], alone)
        same_bits(final[b:b + 1], last)
        assert not o[b, :first].any() and not o[b, end:].any()
    same_bits(taken[1], final[0])
    same_bits(taken[2], initial[1])


@each_variant("gated_delta_rule")
def test_snapshots_are_final_states(variant, rng):
    made = delta_inputs(rng, T=150, **SMALL)
    cu = np.array([0, 70, 150])
    initial = states(rng, 2, 4, 40, 72)
    at = np.array([[1, 80], [0, 1], [0, 31], [0, 32], [1, 5], [0, 33], [0, 64], [0, 70], [0, 0], [1, 6], [1, 64], [0, 33]])
    for keep in (True, False):
        _, _, taken = prefill(made, cu_seqlens=cu, initial_state=initial, snapshot_at=at, snapshots=len(at), keep=keep,
                              variant=variant)
        for (n, tokens), snapshot in zip(at, taken):
            part = cut(made, cu[n], cu[n] + tokens)
            same_bits(snapshot, prefill(part, initial_state=initial[n:n + 1], variant=variant)[1][0])


@each_variant("gated_delta_rule")
def test_snapshot_out_of_range(variant, rng):
    made = delta_inputs(rng, T=10, **SMALL)
    for at in ([[1, 0]], [[0, 11]], [[-1, 0]], [[0, -1]]):
        with pytest.raises(ValueError, match="snapshot_positions"):
            prefill(made, snapshot_at=np.array(at), snapshots=1, variant=variant)


@each_variant("gated_delta_rule")
def test_narrow_state_rounds_once(variant, rng):
    made = delta_inputs(rng, T=90, **SMALL)
    _, exact, _ = prefill(made, variant=variant)
    for dtype in (BF16, F16):
        _, final, _ = prefill(made, state_dtype=dtype, variant=variant)
        same_bits(final, exact.astype(dtype))


@each_variant("gated_delta_rule")
def test_strided_inputs(variant, rng):
    """q, k, v as views of one projection; g and beta with any strides, also zero."""
    made = delta_inputs(rng, B=2, T=40, H=2, HV=2, K=16, V=24)
    packed = np.concatenate([made["q"].reshape(2, 40, -1), made["k"].reshape(2, 40, -1), made["v"].reshape(2, 40, -1)], -1)
    views = {"q": packed[..., :32].reshape(2, 40, 2, 16), "k": packed[..., 32:64].reshape(2, 40, 2, 16),
             "v": packed[..., 64:].reshape(2, 40, 2, 24)}
    want, o = np.empty_like(made["v"]), np.full((2, 40, 2, 24), np.nan, F32)
    _core.gated_delta_rule(**made, o=want, variant=variant)
    g = np.ascontiguousarray(made["g"].transpose(2, 1, 0)).transpose(2, 1, 0)
    _core.gated_delta_rule(**{**made, **views, "g": g}, o=o, variant=variant)
    same_bits(o, want)
    flat = {**made, "beta": np.broadcast_to(F32.type(0.5), (2, 40, 2))}
    _core.gated_delta_rule(**flat, o=o, variant=variant)
    _core.gated_delta_rule(**{**flat, "beta": flat["beta"].copy()}, o=want, variant=variant)
    same_bits(o, want)


@pytest.mark.parametrize("dtype", (F32, BF16))
@each_variant("gated_delta_rule")
def test_strided_states(variant, dtype, rng):
    """States that are views with no unit stride at all, padded slots, and a view of every second head."""
    made = delta_inputs(rng, B=2, T=40, H=2, HV=2, K=20, V=36)
    short = cut(made, 0, 2)
    initial = states(rng, 2, 2, 20, 36, dtype)
    want_o, want, _ = prefill(made, initial_state=initial, state_dtype=dtype, variant=variant)
    want_step, want_pool, _ = step(short, initial, variant=variant)
    for index in ((slice(0, 4, 2), slice(0, 4, 2), slice(1, 41, 2), slice(1, 73, 2)),
                  (slice(1, 3), slice(1, 3), slice(0, 20), slice(2, 38))):
        memory = np.full((5, 5, 42, 74), np.nan, dtype)
        held, kept = memory.copy(), memory.copy()
        held[index] = initial
        o = np.full_like(want_o, np.nan)
        _core.gated_delta_rule(**made, initial_state=held[index], final_state=kept[index], o=o, variant=variant)
        same_bits(o, want_o)
        same_bits(kept[index], want)
        kept[index] = np.nan
        assert np.isnan(f64(kept)).all()
        o = np.full_like(want_step, np.nan)
        _core.gated_delta_rule_step(**short, state=held[index], o=o, variant=variant)
        same_bits(o, want_step)
        same_bits(held[index], want_pool)
        held[index] = np.nan
        assert np.isnan(f64(held)).all()


# Steps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K, V", WIDTHS)
@pytest.mark.parametrize("T", (0, 1, 2, 5, 16))
@each_variant("gated_delta_rule_step")
def test_step_sizes(variant, T, K, V, rng):
    H, HV = HEADS[(T + K) % len(HEADS)]
    made = delta_inputs(rng, B=2, T=T, H=H, HV=HV, K=K, V=V, unit_keys=True)
    state = states(rng, 2, HV, K, V)
    want_o, want = oracle(made, state, every=True)
    o, pool, seen = step(made, state, every=True, variant=variant)
    contract(o, want_o)
    contract(seen, want)
    same_bits(pool, seen[:, -1] if T else state)


@pytest.mark.parametrize("dtype", (F32, BF16, F16))
@pytest.mark.parametrize("gate", ("log", "factor", "raw"))
@pytest.mark.parametrize("head_map", ("grouped", "tiled"))
@each_variant("gated_delta_rule_step")
def test_step_choices(variant, head_map, gate, dtype, rng):
    made = delta_inputs(rng, B=2, T=3, H=2, HV=6, K=48, V=80, dtype=dtype, gate=gate, beta_kind="logit", gate_dtype=dtype)
    made.update(qk_l2norm=True, head_map=head_map, scale=0.2)
    state = states(rng, 2, 6, 48, 80, dtype)
    want_o, want = oracle(made, state)
    o, pool, _ = step(made, state, variant=variant)
    contract(o, want_o)
    contract(pool, want)


@pytest.mark.parametrize("name", HARD[1:])
@each_variant("gated_delta_rule_step")
def test_step_hard(variant, name, rng):
    made = cut(hard(name, rng), 0, 16)
    state = states(rng, 1, 2, 32, 32)
    want_o, want = oracle(made, state)
    o, pool, _ = step(made, state, variant=variant)
    contract(o, want_o)
    contract(pool, want)


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("K, V", ((40, 72), (60, 100), (1, 3), (128, 128)))
@each_variant("gated_delta_rule_step")
def test_step_vk_is_kv(variant, K, V, dtype, rng):
    made = delta_inputs(rng, B=2, T=3, H=1, HV=2, K=K, V=V)
    state = states(rng, 2, 2, K, V, dtype)
    plain = step(made, state, every=True, variant=variant)
    turned = step(made, swap(state), every=True, state_layout="vk", variant=variant)
    same_bits(plain[0], turned[0])
    same_bits(plain[1], swap(turned[1]))
    same_bits(plain[2], swap(turned[2]))


@each_variant("gated_delta_rule_step")
def test_step_alone_is_in_batch(variant, rng):
    """Alone, packed, with any thread count, and one token a call: the same bits."""
    made = delta_inputs(rng, B=4, T=5, **SMALL)
    state = states(rng, 4, 4, 40, 72)
    o, pool, _ = step(made, state, variant=variant, num_threads=1)
    flat = {name: x.reshape(1, 20, *x.shape[2:]) if isinstance(x, np.ndarray) else x for name, x in made.items()}
    packed, packed_pool, _ = step(flat, state, cu_seqlens=np.arange(0, 21, 5), variant=variant, num_threads=40)
    same_bits(packed.reshape(o.shape), o)
    same_bits(packed_pool, pool)
    for b in range(4):
        alone, last, _ = step(row(made, b), state[b:b + 1], variant=variant, num_threads=3)
        same_bits(alone, o[b:b + 1])
        same_bits(last, pool[b:b + 1])
    single = state
    for t in range(5):
        part, single, _ = step(cut(made, t, t + 1), single, variant=variant)
        same_bits(part, o[:, t:t + 1])
    same_bits(single, pool)


@pytest.mark.parametrize("vk", (False, True))
@pytest.mark.parametrize("dtype", (F32, BF16))
@each_variant("gated_delta_rule_step")
def test_step_slots(variant, dtype, vk, rng):
    made = delta_inputs(rng, B=5, T=2, **SMALL)
    pool = states(rng, 9, 4, 40, 72, dtype)
    pool[3] = np.nan
    read, write = np.array([2, -1, 5, 3, 7]), np.array([2, 8, -1, 3, 6])
    fresh = np.array([True, True, True, False, True])
    layout = {"state_layout": "vk"} if vk else {}
    o, after, _ = step(made, swap(pool) if vk else pool, read_slots=read, write_slots=write, has_initial_state=fresh,
                       variant=variant, **layout)
    after = swap(after) if vk else after
    assert not o[1].any()
    for n in (0, 2, 3, 4):
        start = pool[read[n]:read[n] + 1] if fresh[n] else np.zeros_like(pool[:1])
        want, last, _ = step(row(made, n), start, variant=variant)
        same_bits(o[n:n + 1], want)
        if write[n] >= 0:
            same_bits(after[write[n]], last[0])
    for slot in set(range(9)) - {2, 3, 6}:
        same_bits(after[slot], pool[slot])


@pytest.mark.parametrize("K, V", ((40, 72), (128, 128)))
@pytest.mark.parametrize("dtype", (F32, F16))
@each_variant("gated_delta_rule_step")
def test_step_speculative(variant, dtype, K, V, rng):
    """A slot for the state after each token; the next call starts from the slot of the last accepted one."""
    made = delta_inputs(rng, B=2, T=3, H=1, HV=2, K=K, V=V)
    pool = states(rng, 8, 2, K, V, dtype)
    slots = np.array([[0, 5, 2], [7, 3, -1]])
    accepted = np.array([1, 0])
    o, after, seen = step(made, pool, every=True, read_slots=slots, accepted=accepted, write_slots=slots, variant=variant)
    for n in range(2):
        start = pool[slots[n, accepted[n]]][None]
        want, _, want_seen = step(row(made, n), start, every=True, variant=variant)
        same_bits(o[n:n + 1], want)
        same_bits(seen[n:n + 1], want_seen)
        for t in range(3):
            if slots[n, t] >= 0:
                same_bits(after[slots[n, t]], seen[n, t])
    for slot in (1, 4, 6):
        same_bits(after[slot], pool[slot])
    # without write_slots the state goes to the first of read_slots
    _, after, seen = step(made, pool, every=True, read_slots=slots, accepted=accepted, variant=variant)
    same_bits(after[slots[:, 0]], seen[:, -1])


@each_variant("gated_delta_rule_step")
def test_step_ragged(variant, rng):
    made = delta_inputs(rng, B=3, T=4, **SMALL)
    spans = np.array([[1, 4], [2, 2], [0, 3]])
    for name in ("q", "k", "v", "g", "beta"):
        for b, (first, end) in enumerate(spans):
            made[name][b, :first] = made[name][b, end:] = np.nan
    pool = states(rng, 6, 4, 40, 72)
    read, write = np.array([0, 1, 2]), np.array([3, 4, 5])
    o, after, _ = step(made, pool, token_range=spans, read_slots=read, write_slots=write, variant=variant)
    for b, (first, end) in enumerate(spans):
        alone, last, _ = step(cut(row(made, b), first, end), pool[b:b + 1], variant=variant)
        same_bits(o[b:b + 1, first:end], alone)
        same_bits(after[3 + b], last[0])
        assert not o[b, :first].any() and not o[b, end:].any()
    same_bits(after[4], pool[1])


@each_variant("gated_delta_rule_step")
def test_step_too_long(variant, rng):
    made = delta_inputs(rng, T=17, **SMALL)
    with pytest.raises(ValueError, match="at most 16"):
        step(made, states(rng, 1, 4, 40, 72), variant=variant)
    made = delta_inputs(rng, T=3, **SMALL)
    with pytest.raises(ValueError, match="3 tokens"):
        step(made, states(rng, 3, 4, 40, 72), read_slots=np.array([0]), write_slots=np.array([[1, 2]]), variant=variant)


@each_variant("gated_delta_rule_step")
def test_step_follows_prefill(variant, rng):
    """Prefill, then decode, is the loop over all tokens."""
    made = delta_inputs(rng, T=45, H=2, HV=4, K=64, V=64, unit_keys=True)
    want_o, want = oracle(made)
    first, middle, _ = prefill(cut(made, 0, 40), variant=variant)
    second, pool, _ = step(cut(made, 40, 45), middle, variant=variant)
    contract(np.concatenate([first, second], 1), want_o)
    contract(pool, want)
    assert error(second, first[:, :5]) > 1e-3 and math.isfinite(error(second, first[:, :5]))
