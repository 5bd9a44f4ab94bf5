"""Every runnable kernel of gated_delta_rule_step against the float64 reference."""

import numpy as np
import pytest
from conftest import BF16, F16, F32, REAL, Guarded, contract, delta_inputs, each_variant, same_bits, states

import fidelta
from fidelta import reference

each_variant = each_variant("gated_delta_rule_step")


def check(x, pool, variant, token_states=False, **more):
    """Runs the op on a copy of the pool, between guard zones, and holds it against the reference. Returns (o, pool)."""
    memory = Guarded()
    arguments = memory({**x, **more})
    B, T, HV, V = x["v"].shape
    out = memory.empty(x["v"].shape, arguments.pop("out_dtype", x["v"].dtype))
    wanted_pool = pool.astype(np.float64)
    after = memory.empty((B, T, *pool.shape[1:]), pool.dtype) if token_states else None
    want = reference.gated_delta_rule_step(**{**arguments, "state": wanted_pool, "return_token_states": True})
    mine = memory.copy(pool)
    got = fidelta.gated_delta_rule_step(**arguments, state=mine, out=out, token_states=after, variant=variant)
    assert (got[0] if token_states else got) is out
    memory.check()
    contract(out, want[0])
    changed = [s for s in range(len(pool)) if not np.array_equal(wanted_pool[s], pool[s].astype(np.float64), equal_nan=True)]
    kept = [s for s in range(len(pool)) if s not in changed]
    contract(mine[changed], wanted_pool[changed])
    same_bits(mine[kept], pool[kept])
    if token_states:
        real = want[1].any(axis=(2, 3, 4))
        contract(after[real], want[1][real])
    return out, mine


@each_variant
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_every_token_count(rng, variant, dtype):
    for T in range(0, 17):
        x = delta_inputs(rng, B=2, T=T, H=1, HV=2, K=20, V=12, dtype=dtype)
        check(x, states(rng, 2, 2, 20, 12), variant, token_states=True)


@each_variant
def test_seventeen_tokens_are_refused(rng, variant):
    x = delta_inputs(rng, T=17, K=8, V=8)
    pool = np.zeros((1, 1, 8, 8), F32)
    with pytest.raises(ValueError, match="16"):
        fidelta.gated_delta_rule_step(**x, state=pool, variant=variant)
    assert not pool.any()


@each_variant
@pytest.mark.parametrize("K, V", [(1, 1), (1, 17), (2, 3), (4, 4), (7, 9), (8, 8), (9, 7), (15, 17), (16, 16), (17, 15),
                                  (31, 33), (33, 31), (60, 60), (64, 128), (128, 64), (100, 100), (128, 128), (256, 8),
                                  (8, 256), (256, 256)])
def test_widths(rng, variant, K, V):
    for dtype, layout in ((F32, "kv"), (BF16, "vk")):
        x = delta_inputs(rng, T=3, H=1, HV=1, K=K, V=V, dtype=dtype)
        check(x, states(rng, 1, 1, K, V, state_layout=layout), variant, state_layout=layout)


@each_variant
@pytest.mark.parametrize("H, HV", [(1, 1), (3, 3), (2, 4), (2, 6), (2, 8), (1, 5)])
@pytest.mark.parametrize("head_map", ["grouped", "tiled"])
def test_heads(rng, variant, H, HV, head_map):
    x = delta_inputs(rng, B=2, T=2, H=H, HV=HV, K=16, V=16)
    check(x, states(rng, 2, HV, 16, 16), variant, head_map=head_map)


@each_variant
@pytest.mark.parametrize("gate", ["log", "factor", "raw"])
@pytest.mark.parametrize("beta_kind", ["value", "logit"])
def test_gates(rng, variant, gate, beta_kind):
    for dtype in (F32, BF16, F16):
        for gate_dtype in {F32, dtype}:
            for more in ({}, {"qk_l2norm": True}, {"qk_l2norm": True, "l2norm_eps": 0.1, "scale": -0.7},
                         {"scale": 0.0}, {"rounding": "hf", "out_dtype": F32}):
                x = delta_inputs(rng, T=4, H=1, HV=2, K=24, V=16, dtype=dtype, gate=gate, beta_kind=beta_kind,
                                 gate_dtype=gate_dtype)
                check(x, states(rng, 1, 2, 24, 16), variant, **more)


@each_variant
@pytest.mark.parametrize("state_layout", ["kv", "vk"])
@pytest.mark.parametrize("state_dtype", REAL, ids=str)
def test_state_dtypes_and_layouts(rng, variant, state_layout, state_dtype):
    for dtype in (F32, BF16):
        x = delta_inputs(rng, B=2, T=3, H=1, HV=2, K=20, V=12, dtype=dtype)
        check(x, states(rng, 2, 2, 20, 12, state_dtype, state_layout), variant, token_states=True,
              state_layout=state_layout)


@each_variant
@pytest.mark.parametrize("whole", [np.int32, np.int64])
def test_slots_and_pads(rng, variant, whole):
    x = delta_inputs(rng, B=6, T=2, H=1, HV=2, K=16, V=20)
    pool = states(rng, 9, 2, 16, 20)
    pool[[2, 8]] = np.nan                                # 2 is started from zero, nobody reads 8
    slots = np.array([3, -1, 0, 7, 2, 5], whole)
    starts = np.array([True, True, True, True, False, True])
    o, mine = check(x, pool, variant, read_slots=slots, has_initial_state=starts)
    assert not o[1].any() and np.isfinite(mine[[0, 2, 3, 5, 7]]).all()
    check(x, pool, variant, read_slots=slots, has_initial_state=starts,
          write_slots=np.array([4, 6, -1, 7, 2, 8], whole))
    check(x, pool, variant, read_slots=np.where(slots < 0, 99, slots), has_initial_state=starts, pad_slot=99)


@each_variant
def test_the_whole_batch_is_padding(rng, variant):
    x = delta_inputs(rng, B=2, T=1, H=1, HV=2, K=16, V=20)
    pool = states(rng, 1, 2, 16, 20)
    o, mine = check(x, pool, variant, read_slots=np.array([-1, -1]))
    assert not o.any()


@each_variant
@pytest.mark.parametrize("whole", [np.int32, np.int64])
def test_speculative_decoding(rng, variant, whole):
    """Verify 4 drafts a sequence into 4 slots each, accept some, go on from the accepted slot."""
    B, T = 4, 4
    slots = np.arange(B * T, dtype=whole).reshape(B, T)[:, ::-1].copy()
    accepted = np.array([0, 1, 2, 3], whole)
    pool = states(rng, B * T + 1, 2, 16, 20)
    x = delta_inputs(rng, B=B, T=T, H=1, HV=2, K=16, V=20)
    o, pool = check(x, pool, variant, token_states=True, read_slots=slots, accepted=accepted, write_slots=slots)
    more = delta_inputs(rng, B=B, T=T, H=1, HV=2, K=16, V=20)
    o, pool = check(more, pool, variant, read_slots=slots, accepted=accepted, write_slots=slots)
    check(more, pool, variant, read_slots=slots, accepted=accepted)
    check(more, pool, variant, read_slots=slots, accepted=accepted, write_slots=np.array([16, -1, 0, 5], whole))


@each_variant
def test_accepting_a_draft_is_plain_decoding(rng, variant):
    T = 4
    x = delta_inputs(rng, B=1, T=T, H=1, HV=2, K=16, V=20)
    start = states(rng, 1, 2, 16, 20)
    plain, outputs, after = start.copy(), [], []
    for t in range(T):
        token = {n: a[:, t:t + 1] if isinstance(a, np.ndarray) else a for n, a in x.items()}
        outputs.append(fidelta.gated_delta_rule_step(**token, state=plain, variant=variant))
        after.append(plain.copy())
    pool = np.concatenate([start, np.full((T, 2, 16, 20), np.nan, F32)])
    o, token_states = fidelta.gated_delta_rule_step(**x, state=pool, read_slots=np.array([0]), return_token_states=True,
                                                    write_slots=np.array([[1, 2, 3, 4]]), variant=variant)
    same_bits(o, np.concatenate(outputs, 1))
    same_bits(pool, np.concatenate([start, *after]))
    same_bits(token_states[0], np.concatenate(after))


@each_variant
def test_packed_and_padded_batches(rng, variant):
    cu = np.array([0, 3, 3, 4, 20, 22], np.int32)
    x = delta_inputs(rng, T=22, H=1, HV=2, K=16, V=20)
    pool = states(rng, 8, 2, 16, 20)
    o, mine = check(x, pool[:5], variant, token_states=True, cu_seqlens=cu)
    same_bits(mine[1], pool[1])
    check(x, pool, variant, token_states=True, cu_seqlens=cu, read_slots=np.array([7, 3, -1, 0, 2]),
          write_slots=np.array([7, 1, 4, 5, 2]))
    x = delta_inputs(rng, B=3, T=6, H=1, HV=2, K=16, V=20)
    spans = np.array([[0, 4], [2, 6], [3, 3]])
    o, mine = check(x, pool[:3], variant, token_range=spans)
    assert not o[0, 4:].any() and not o[1, :2].any() and not o[2].any()


@each_variant
def test_the_step_is_the_rule(rng, variant):
    """Decoding token by token after a prefill ends where one prefill would, within float32."""
    x = delta_inputs(rng, B=2, T=90, H=2, HV=4, K=32, V=16)
    want, want_state = reference.gated_delta_rule(**x, return_state=True)
    part = {n: a[:, :70] if isinstance(a, np.ndarray) else a for n, a in x.items()}
    o, state = fidelta.gated_delta_rule(**part, return_state=True)
    outputs = [o]
    for t in range(70, 90):
        token = {n: a[:, t:t + 1] if isinstance(a, np.ndarray) else a for n, a in x.items()}
        outputs.append(fidelta.gated_delta_rule_step(**token, state=state, variant=variant))
    contract(np.concatenate(outputs, 1), want)
    contract(state, want_state)


@each_variant
def test_thousands_of_steps(variant):
    rng = np.random.default_rng(5)
    T = 2000
    x = delta_inputs(rng, T=T, H=1, HV=1, K=16, V=16)
    x["qk_l2norm"] = True
    x["g"][:] = 0
    want, want_state = reference.gated_delta_rule(**x, return_state=True)
    state, outputs = np.zeros((1, 1, 16, 16), F32), []
    for t in range(0, T, 16):
        part = {n: a[:, t:t + 16] if isinstance(a, np.ndarray) else a for n, a in x.items()}
        outputs.append(fidelta.gated_delta_rule_step(**part, state=state, variant=variant))
    contract(np.concatenate(outputs, 1), want)
    contract(state, want_state)


@each_variant
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_real_model_shape(variant, dtype):
    rng = np.random.default_rng(3)
    x = delta_inputs(rng, B=2, T=2, H=16, HV=32, K=128, V=128, dtype=dtype, gate="raw", beta_kind="logit", gate_dtype=dtype)
    check(x, states(rng, 2, 32, 128, 128), variant, qk_l2norm=True)


@each_variant
@pytest.mark.parametrize("g", [0.0, -np.inf, -90.0, -1e-9])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_hard_gates(rng, variant, g, beta):
    x = delta_inputs(rng, B=2, T=5, H=1, HV=2, K=16, V=20, unit_keys=True)
    x["g"][:, 1::2] = g
    x["beta"][:, ::2] = beta
    check(x, states(rng, 2, 2, 16, 20), variant, token_states=True)


@each_variant
def test_views(rng, variant):
    x = delta_inputs(rng, B=2, T=3, H=2, HV=4, K=16, V=16, dtype=BF16)
    wide = np.full((2, 3, 8, 40), np.nan, BF16)
    views = {**x, "q": wide[:, :, :2, :16], "k": wide[:, :, 2:4, 20:36], "v": wide[:, :, 4:, 3:19]}
    for name in ("q", "k", "v"):
        views[name][...] = x[name]
    memory = np.full((2, 4, 20, 18), np.nan, F32)
    pool = memory[:, :, 1:17, 2:]
    start = states(rng, 2, 4, 16, 16)
    pool[...] = start
    o = fidelta.gated_delta_rule_step(**views, state=pool, variant=variant)
    same_bits(o, fidelta.gated_delta_rule_step(**x, state=start, variant=variant))
    same_bits(pool, start)
    assert np.isnan(memory[:, :, [0, 17, 18, 19]]).all() and np.isnan(memory[..., :2]).all()


def refused(message, **change):
    rng = np.random.default_rng(1)
    x = {**delta_inputs(rng, B=2, T=2, K=8, V=8), "state": states(rng, 4, 1, 8, 8), "read_slots": np.array([0, 1]), **change}
    before = x["state"].copy()
    with pytest.raises(ValueError, match=message):
        fidelta.gated_delta_rule_step(**x)
    same_bits(x["state"], before)


def test_wrong_slots_are_refused():
    refused("read_slots", read_slots=np.array([0, 4]))
    refused("read_slots", read_slots=np.array([-2, 0]))
    refused("write_slots", write_slots=np.array([2, 2]))
    refused("write_slots", write_slots=np.array([1, 3]))         # sequence 1 reads slot 1
    refused("write_slots", write_slots=np.array([2, 4]))
    refused("write_slots", write_slots=np.array([[2, 3], [3, 1]]))
    refused("accepted", read_slots=np.array([[0, 1], [2, 3]]), accepted=np.array([0, 2]))
    refused("accepted", read_slots=np.array([[0, 1], [2, 3]]), accepted=np.array([-1, 1]))
