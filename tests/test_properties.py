"""Bit for bit: results depend on nothing but a sequence's own numbers. Every runnable kernel, sizes drawn by hypothesis."""

import numpy as np
import pytest
from conftest import BF16, F32, delta_inputs, same_bits, states, variants

import fidelta

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis draws the sizes; install the test extra")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as draw  # noqa: E402

settings.register_profile("fidelta", deadline=None, max_examples=12, derandomize=True,
                          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
settings.load_profile("fidelta")

rules = pytest.mark.parametrize("variant", variants("gated_delta_rule"))
steps = pytest.mark.parametrize("variant", variants("gated_delta_rule_step"))
convolutions = pytest.mark.parametrize("variant", variants("causal_conv1d"))
conv_steps = pytest.mark.parametrize("variant", variants("causal_conv1d_step"))

lengths = draw.lists(draw.integers(0, 150), min_size=1, max_size=4)
short = draw.lists(draw.integers(0, 16), min_size=1, max_size=5)


@draw.composite
def shapes(pick):
    H, r = pick(draw.integers(1, 2)), pick(draw.integers(1, 4))
    return {"H": H, "HV": H * r, "K": pick(draw.sampled_from([3, 8, 16, 20, 33, 64])),
            "V": pick(draw.sampled_from([2, 8, 16, 17, 40, 64])), "dtype": pick(draw.sampled_from([F32, BF16])),
            "gate": pick(draw.sampled_from(["log", "factor", "raw"]))}


def make(seed, T, shape, B=1, **more):
    rng = np.random.default_rng(seed)
    x = {**delta_inputs(rng, B=B, T=T, **shape), "qk_l2norm": True, **more}
    return x, states(rng, 4, shape["HV"], shape["K"], shape["V"])


def tokens(x, first, end, row=slice(None)):
    """The arguments cut to some tokens (and rows)."""
    per_token = ("q", "k", "v", "g", "beta")
    return {name: a[row, first:end] if name in per_token else a for name, a in x.items()}


@rules
@given(seed=draw.integers(0, 99), parts=lengths, shape=shapes())
def test_packed_is_separate(variant, seed, parts, shape):
    x, start = make(seed, sum(parts), shape, variant=variant)
    start = start[:len(parts)]
    cu = np.cumsum([0, *parts])
    o, state = fidelta.gated_delta_rule(**x, cu_seqlens=cu, initial_state=start, return_state=True)
    for n, (first, end) in enumerate(zip(cu, cu[1:])):
        alone, alone_state = fidelta.gated_delta_rule(**tokens(x, first, end), initial_state=start[n:n + 1], return_state=True)
        same_bits(o[:, first:end], alone)
        same_bits(state[n:n + 1], alone_state)


@rules
@given(seed=draw.integers(0, 99), T=draw.integers(0, 150), B=draw.integers(1, 4), shape=shapes())
def test_alone_is_in_a_batch(variant, seed, T, B, shape):
    x, start = make(seed, T, shape, B=B, variant=variant)
    o, state = fidelta.gated_delta_rule(**x, initial_state=start[:B], return_state=True)
    for b in range(B):
        alone, alone_state = fidelta.gated_delta_rule(**tokens(x, 0, T, slice(b, b + 1)), initial_state=start[b:b + 1],
                                                      return_state=True)
        same_bits(o[b:b + 1], alone)
        same_bits(state[b:b + 1], alone_state)


@rules
@given(seed=draw.integers(0, 99), T=draw.integers(1, 330), cuts=draw.sets(draw.integers(0, 5)), shape=shapes())
def test_one_call_is_split_at_chunks(variant, seed, T, cuts, shape):
    x, start = make(seed, T, shape, variant=variant)
    want, want_state = fidelta.gated_delta_rule(**x, initial_state=start[:1], return_state=True)
    ends = sorted({min(cut * fidelta.CHUNK, T) for cut in cuts} | {0, T})
    state, parts = start[:1], []
    for first, end in zip(ends, ends[1:]):
        o, state = fidelta.gated_delta_rule(**tokens(x, first, end), initial_state=state, return_state=True)
        parts.append(o)
    same_bits(np.concatenate(parts, 1), want)
    same_bits(state, want_state)


@rules
@given(seed=draw.integers(0, 99), parts=lengths, threads=draw.integers(1, 5), shape=shapes())
def test_threads_and_repeats(variant, seed, parts, threads, shape):
    x, start = make(seed, sum(parts), shape, variant=variant, cu_seqlens=np.cumsum([0, *parts]))
    x.update(initial_state=start[:len(parts)], return_state=True)
    want, want_state = fidelta.gated_delta_rule(**x, num_threads=1)
    for _ in range(2):
        o, state = fidelta.gated_delta_rule(**x, num_threads=threads)
        same_bits(o, want)
        same_bits(state, want_state)


@rules
@given(seed=draw.integers(0, 99), T=draw.integers(0, 150), shape=shapes())
def test_kv_is_vk(variant, seed, T, shape):
    x, start = make(seed, T, shape, B=2, variant=variant)
    o, state = fidelta.gated_delta_rule(**x, initial_state=start[:2], return_state=True)
    vk, vk_state = fidelta.gated_delta_rule(**x, initial_state=start[:2].swapaxes(2, 3).copy(), state_layout="vk",
                                            return_state=True)
    same_bits(vk, o)
    same_bits(vk_state.swapaxes(2, 3), state)


@rules
@given(seed=draw.integers(0, 99), T=draw.integers(0, 150), order=draw.permutations(range(4)), shape=shapes())
def test_slots_are_no_slots(variant, seed, T, order, shape):
    x, pool = make(seed, T, shape, B=3, variant=variant)
    read = np.array(order[:3])
    want, want_state = fidelta.gated_delta_rule(**x, initial_state=pool[read], return_state=True)
    o = fidelta.gated_delta_rule(**x, initial_state=pool, read_slots=read, write_slots=read, final_state=pool)[0]
    same_bits(o, want)
    same_bits(pool[read], want_state)


@rules
@given(seed=draw.integers(0, 99), T=draw.integers(1, 150), pads=draw.tuples(draw.integers(0, 9), draw.integers(0, 9)),
       shape=shapes())
def test_padding_is_no_padding(variant, seed, T, pads, shape):
    x, start = make(seed, T, shape, variant=variant)
    want, want_state = fidelta.gated_delta_rule(**x, initial_state=start[:1], return_state=True)
    wide = {name: np.pad(a, [(0, 0), pads, *[(0, 0)] * (a.ndim - 2)], constant_values=np.nan)
            if name in ("q", "k", "v", "g", "beta") else a for name, a in x.items()}
    o, state = fidelta.gated_delta_rule(**wide, initial_state=start[:1], return_state=True,
                                        token_range=np.array([[pads[0], pads[0] + T]]))
    same_bits(o[:, pads[0]:pads[0] + T], want)
    same_bits(state, want_state)


@steps
@given(seed=draw.integers(0, 99), parts=short, threads=draw.integers(1, 5), order=draw.permutations(range(6)),
       vk=draw.booleans(), shape=shapes())
def test_step_packed_slots_threads_and_layouts(variant, seed, parts, threads, order, vk, shape):
    x, _ = make(seed, sum(parts), shape, variant=variant)
    pool = states(np.random.default_rng(seed + 1), 6, shape["HV"], shape["K"], shape["V"])
    before, slots = pool.copy(), np.array(order[:len(parts)])
    mine = pool.swapaxes(2, 3).copy() if vk else pool
    cu = np.cumsum([0, *parts])
    o = fidelta.gated_delta_rule_step(**x, state=mine, cu_seqlens=cu, read_slots=slots, num_threads=threads,
                                      state_layout="vk" if vk else "kv")
    mine = mine.swapaxes(2, 3) if vk else mine
    for n, (first, end) in enumerate(zip(cu, cu[1:])):
        state = before[slots[n]][None].copy()
        same_bits(o[:, first:end], fidelta.gated_delta_rule_step(**tokens(x, first, end), state=state, num_threads=1))
        same_bits(mine[slots[n]], state[0])
    same_bits(mine[list(order[len(parts):])], before[list(order[len(parts):])])


@steps
@given(seed=draw.integers(0, 99), T=draw.integers(1, 16), shape=shapes())
def test_step_tokens_together_are_one_by_one(variant, seed, T, shape):
    x, pool = make(seed, T, shape, B=2, variant=variant)
    together, apart = pool[:2].copy(), pool[:2].copy()
    o, after = fidelta.gated_delta_rule_step(**x, state=together, return_token_states=True)
    for t in range(T):
        same_bits(fidelta.gated_delta_rule_step(**tokens(x, t, t + 1), state=apart), o[:, t:t + 1])
        same_bits(apart, after[:, t])
    same_bits(together, apart)


@convolutions
@given(seed=draw.integers(0, 99), parts=lengths, W=draw.integers(2, 6), D=draw.integers(1, 70), threads=draw.integers(1, 5),
       cut=draw.integers(0, 150), bdt=draw.booleans())
def test_convolution(variant, seed, parts, W, D, threads, cut, bdt):
    """Packed is separate, any thread count, split anywhere, either axis order."""
    rng = np.random.default_rng(seed)
    T = sum(parts)
    x, weight = rng.standard_normal((1, T, D)).astype(F32), rng.standard_normal((D, W)).astype(F32)
    start = rng.standard_normal((len(parts), D, W - 1)).astype(F32)
    cu = np.cumsum([0, *parts])
    given_x = x.swapaxes(1, 2).copy() if bdt else x
    y, state = fidelta.causal_conv1d(given_x, weight, activation="silu", cu_seqlens=cu, initial_state=start,
                                     return_state=True, num_threads=threads, layout="bdt" if bdt else "btd", variant=variant)
    y = y.swapaxes(1, 2) if bdt else y
    for n, (first, end) in enumerate(zip(cu, cu[1:])):
        middle = min(first + cut, end)
        head, between = fidelta.causal_conv1d(x[:, first:middle], weight, activation="silu", initial_state=start[n:n + 1],
                                              return_state=True, num_threads=1, variant=variant)
        tail, final = fidelta.causal_conv1d(x[:, middle:end], weight, activation="silu", initial_state=between,
                                            return_state=True, num_threads=1, variant=variant)
        same_bits(y[:, first:end], np.concatenate([head, tail], 1))
        same_bits(state[n:n + 1], final)


@conv_steps
@given(seed=draw.integers(0, 99), W=draw.integers(2, 6), D=draw.integers(1, 70), counts=short)
def test_convolution_step_is_the_convolution(variant, seed, W, D, counts):
    rng = np.random.default_rng(seed)
    T = sum(counts)
    x, weight = rng.standard_normal((2, T, D)).astype(F32), rng.standard_normal((D, W)).astype(F32)
    state = rng.standard_normal((2, D, W - 1)).astype(F32)
    want, want_state = fidelta.causal_conv1d(x, weight, activation="silu", initial_state=state, return_state=True,
                                             variant=variant)
    parts, first = [], 0
    for count in counts:
        parts.append(fidelta.causal_conv1d_step(x[:, first:first + count], weight, state, activation="silu", variant=variant))
        first += count
    same_bits(np.concatenate(parts, 1), want)
    same_bits(state, want_state)
