"""Faults that others have had, one named test each. The number is that of our notes; the docstring says what went wrong
where, in a line. What a fault of a backward pass or of another layer means for these ops stands in its test."""

import json
import mmap
import shutil
import warnings

import ml_dtypes
import numpy as np
import pytest

import fidelta

BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng


# ------------------------------------------------------------------------------------------------------------ tools


def inputs(B, T, H, HV, K, V, dtype=np.float32, seed=0):
    """q, k (normalised), v, g, beta of a plain layer."""
    r = RNG(seed)
    q, k = r.standard_normal((2, B, T, H, K))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True).clip(1e-12) for x in (q, k))
    v = r.standard_normal((B, T, HV, V))
    g = -r.exponential(0.1, (B, T, HV)).astype(np.float32)
    beta = r.uniform(0, 1, (B, T, HV)).astype(np.float32)
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), g, beta


def loop(q, k, v, g, beta, state=None, scale=None):
    """The recurrence in float64, token by token and head by head: independent of fidelta.reference."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    S = np.zeros((B, HV, K, V)) if state is None else np.asarray(state, np.float64).copy()
    o = np.zeros((B, T, HV, V))
    for b in range(B):
        for h in range(HV):
            for t in range(T):
                key, query = k[b, t, h // (HV // H)], q[b, t, h // (HV // H)]
                S[b, h] *= np.exp(g[b, t, h])
                S[b, h] += np.outer(key, beta[b, t, h] * (v[b, t, h] - S[b, h].T @ key))
                o[b, t, h] = S[b, h].T @ query * (K**-0.5 if scale is None else scale)
    return o, S


def error(got, expected):
    """Relative L2."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def guarded(x):
    """The same values in the middle of a buffer that is NaN elsewhere: directly before and behind."""
    buffer = np.full(x.size + 64, np.nan, x.dtype)
    buffer[32 : 32 + x.size] = x.ravel()
    return buffer[32 : 32 + x.size].reshape(x.shape)


def conv_loop(x, weight, history, silu=False):
    """x [T,D], weight [D,W], history [D,W-1] in float64."""
    x, weight, history = (np.asarray(a, np.float64) for a in (x, weight, history))
    rows = np.concatenate([history.T, x])
    y = np.stack([(rows[t : t + weight.shape[1]] * weight.T).sum(0) for t in range(len(x))]) if len(x) else x
    return y / (1 + np.exp(-y)) if silu else y


def norm(x):
    return x / np.sqrt((np.asarray(x, np.float64) ** 2).sum(-1, keepdims=True) + 1e-6)


# ------------------------------------------------------------------------------------ A. prefill and recurrent decode


@pytest.mark.parametrize("T", [18, 32])
def test_B01_time_and_heads_are_not_exchanged(T):
    """A reference read heads as time. With T = H no shape check can see it, so the values decide."""
    x = inputs(1, T, 32, 32, 128, 128)
    o, state = fidelta.gated_delta_rule(*x, return_state=True)
    expected, final = loop(*x)
    assert o.shape == (1, T, 32, 128) and state.shape == (1, 32, 128, 128)
    assert error(o, expected) < 5e-6 and error(state, final) < 5e-6


def test_B02_no_guess_from_sizes():
    """Short prompts were said to be head-first because T < H. Valid ones are silent, a real swap names its tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fidelta.gated_delta_rule(*inputs(1, 13, 16, 32, 128, 128))
        fidelta.gated_delta_rule(*inputs(1, 1, 32, 32, 128, 128))
    head_first = np.broadcast_to(np.zeros(128, np.float32), (1, 32, 4096, 128))
    g = np.zeros((1, 4096, 32), np.float32)
    with pytest.raises(fidelta.ShapeError, match=r"g has shape \(1, 4096, 32\); expected \(B T HV\)") as caught:
        fidelta.gated_delta_rule(head_first, head_first, head_first, g, g)
    assert "from q" in str(caught.value)


def test_B03_boundaries_are_never_dropped():
    """A mask overwrote the caller's boundaries. Two descriptions of the same thing are an error here."""
    x = inputs(1, 6, 1, 1, 8, 8)
    cu = np.array([0, 3, 6])
    o = fidelta.gated_delta_rule(*x, cu_seqlens=cu)
    parts = [fidelta.gated_delta_rule(*[a[:, s] for a in x]) for s in (slice(0, 3), slice(3, 6))]
    assert same(o, np.concatenate(parts, 1))
    assert error(o, fidelta.gated_delta_rule(*x)) > 1e-2
    with pytest.raises(ValueError, match="token_range.*cu_seqlens|cu_seqlens.*token_range"):
        fidelta.gated_delta_rule(*x, cu_seqlens=cu, token_range=np.array([[0, 6]]))
    with pytest.raises(ValueError, match="token_range.*cu_seqlens|cu_seqlens.*token_range"):
        fidelta.causal_conv1d(x[0][..., 0, :], np.ones((8, 4), np.float32), cu_seqlens=cu, token_range=np.array([[0, 6]]))


@pytest.mark.parametrize("cu", [[0, 128, 128, 256], [0, 0, 64], [0, 64, 64], [0, 0], [0, 0, 0]], ids=str)
def test_B05_empty_sequences(cu):
    """A zero-length sequence: a deadlock here, NaN there, a write out of bounds elsewhere."""
    N, T = len(cu) - 1, cu[-1]
    x = inputs(1, T, 2, 4, 16, 24)
    h0 = RNG(1).standard_normal((N, 4, 16, 24)).astype(np.float32)
    o, state = fidelta.gated_delta_rule(*x, cu_seqlens=np.array(cu, np.int32), initial_state=h0, return_state=True)
    assert o.shape == (1, T, 4, 24) and np.isfinite(o).all()
    _, zero = fidelta.gated_delta_rule(*x, cu_seqlens=np.array(cu, np.int64), return_state=True)
    for n, (first, end) in enumerate(zip(cu, cu[1:])):
        if first == end:
            assert same(state[n], h0[n]) and not zero[n].any()
        else:
            expected, final = loop(*[a[:, first:end] for a in x], h0[n : n + 1])
            assert error(o[:, first:end], expected) < 5e-6 and error(state[n], final[0]) < 5e-6
    history = RNG(2).standard_normal((N, 8, 3)).astype(np.float32)
    y, after = fidelta.causal_conv1d(
        np.ones((1, T, 8), np.float32), np.ones((8, 4), np.float32), cu_seqlens=np.array(cu), initial_state=history,
        return_state=True,
    )  # fmt: skip
    assert np.isfinite(y).all()
    assert all(same(after[n], history[n]) for n in range(N) if cu[n] == cu[n + 1])


@pytest.mark.parametrize(
    "cu, told",
    [
        ([0, 12, 8, 128], ["12", "8"]),
        ([0, 12, 16], ["16", "128"]),
        ([1, 64, 128], ["1"]),
        ([0, -5, 128], ["-5"]),
        ([0, 64, 2**40], [str(2**40)]),
        ([0, 64, 129], ["129", "128"]),
    ],
    ids=str,
)
def test_B06_boundaries_are_read(cu, told):
    """Nonsense boundaries were accepted and a normal-looking tensor came back. The value in question is printed."""
    x = inputs(1, 128, 1, 1, 8, 8)
    for dtype in (np.int64, np.int32):
        if max(cu) < np.iinfo(dtype).max:
            for call in (
                lambda c: fidelta.gated_delta_rule(*x, cu_seqlens=c),
                lambda c: fidelta.causal_conv1d(x[0][:, :, 0], np.ones((8, 4), np.float32), cu_seqlens=c),
            ):
                with pytest.raises(ValueError, match="cu_seqlens") as caught:
                    call(np.array(cu, dtype))
                assert all(word in str(caught.value) for word in told)


def test_B06_boundaries_of_a_wrong_kind():
    x = inputs(1, 8, 1, 1, 8, 8)
    for cu in (np.array([0.0, 8.0]), np.array([0, 8], np.int16), np.array([0, 8], np.uint64)):
        with pytest.raises(fidelta.DTypeError, match="cu_seqlens"):
            fidelta.gated_delta_rule(*x, cu_seqlens=cu)
    with pytest.raises(fidelta.ShapeError, match="cu_seqlens"):
        fidelta.gated_delta_rule(*x, cu_seqlens=np.array([[0, 8]]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        fidelta.gated_delta_rule(*x, cu_seqlens=np.zeros(0, np.int64))
    with pytest.raises(ValueError, match="cu_seqlens"):
        fidelta.gated_delta_rule(*x, cu_seqlens=np.array([0]))
    two = inputs(2, 8, 1, 1, 8, 8)
    with pytest.raises(ValueError, match="cu_seqlens"):
        fidelta.gated_delta_rule(*two, cu_seqlens=np.array([0, 8]))


@pytest.fixture
def far():
    """float16 tensors of few elements whose rows lie more than 2^31 elements apart, in memory that is only reserved."""
    step = 2**31 + 64
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)

    def make(x, axis):
        moved = np.moveaxis(np.asarray(x), axis, 0)
        inner = int(np.prod(moved.shape[1:]))
        try:
            memory = mmap.mmap(-1, ((len(moved) - 1) * step + inner) * x.itemsize, flags=flags)
        except OSError as reason:
            pytest.skip(f"no address space for it: {reason}")
        rest = [int(np.prod(moved.shape[a + 1 :])) for a in range(1, moved.ndim)]
        strides = [n * x.itemsize for n in (step, *rest)]
        view = np.lib.stride_tricks.as_strided(np.frombuffer(memory, x.dtype), moved.shape, strides)
        view[...] = moved
        return np.moveaxis(view, 0, axis)

    return make


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "time", "heads"])
def test_B08_offsets_are_64_bit(far, axis):
    """Base offsets in 32 bits: wrong numbers from 2^31 elements on. Here the strides alone cross it."""
    q, k, v, g, beta = inputs(3, 3, 3, 3, 8, 8, np.float16)
    near, near_state = fidelta.gated_delta_rule(q, k, v, g, beta, return_state=True)
    wide = [far(x, axis) for x in (q, k, v)]
    assert max(wide[0].strides) > 2**32 and np.array_equal(wide[1], k)
    o, state = fidelta.gated_delta_rule(*wide, g, beta, out=far(np.zeros_like(v), axis), return_state=True)
    assert same(o, near) and same(state, near_state)
    pool = np.zeros((3, 3, 8, 8), np.float16)
    near_o = fidelta.gated_delta_rule_step(q, k, v, g, beta, pool)
    far_pool = far(np.zeros_like(pool), min(axis, 1))
    far_o = fidelta.gated_delta_rule_step(*wide, g, beta, far_pool, out=far(np.zeros_like(v), axis))
    assert same(near_o, far_o) and same(pool, far_pool)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "time", "channels"])
def test_B08_offsets_are_64_bit_in_the_conv(far, axis):
    x = RNG(0).standard_normal((3, 3, 3)).astype(np.float16)
    weight = RNG(1).standard_normal((3, 4)).astype(np.float16)
    y, state = fidelta.causal_conv1d(x, weight, return_state=True)
    wide, pool = far(x, axis), far(np.zeros_like(state), axis)
    wide_y, _ = fidelta.causal_conv1d(wide, weight, out=far(np.zeros_like(x), axis), final_state=pool)
    assert same(wide_y, y) and same(pool, state)
    history, wide_history = np.zeros((3, 3, 3), np.float16), far(np.zeros((3, 3, 3), np.float16), axis)
    y = fidelta.causal_conv1d_step(x, weight, history)
    wide_y = fidelta.causal_conv1d_step(wide, weight, wide_history, out=far(np.zeros_like(x), axis))
    assert same(wide_y, y) and same(wide_history, history)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("K", [48, 60, 100])
def test_B11_widths_that_are_no_power_of_two(K, dtype):
    """Lanes beyond the width were loaded without a mask and NaN behind the tensor came in. Here NaN lies behind each."""
    x = inputs(1, 70, 2, 2, K, K, dtype)
    plain = fidelta.gated_delta_rule(*x, return_state=True)
    fenced = fidelta.gated_delta_rule(*[guarded(a) for a in x], return_state=True)
    assert np.isfinite(fenced[0].astype(np.float32)).all()
    assert all(same(a, b) for a, b in zip(plain, fenced))
    one = [a[:, :1] for a in x]
    plain, fenced = np.zeros((1, 2, K, K), np.float32), guarded(np.zeros((1, 2, K, K), np.float32))
    o = fidelta.gated_delta_rule_step(*one, plain)
    assert same(o, fidelta.gated_delta_rule_step(*[guarded(a) for a in one], fenced)) and same(plain, fenced)


@pytest.mark.parametrize("order", [(64, 48, 64), (48, 64, 48)])
def test_B11_one_width_does_not_disturb_the_next(order):
    """A cache of tiles lacked the width in its key, so a second geometry ran with the first one's."""
    for K in order:
        x = inputs(1, 70, 2, 2, K, K, seed=K)
        assert error(fidelta.gated_delta_rule(*x), loop(*x)[0]) < 5e-6


def test_B11_widths_beyond_the_limit_are_refused():
    with pytest.raises(fidelta.ShapeError, match="K.*256"):
        fidelta.gated_delta_rule(*inputs(1, 2, 1, 1, 257, 8))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_B15_l2norm(dtype):
    """Every port chose its own eps. Here: x / sqrt(sum x^2 + 1e-6) in float32; a zero vector gives zero."""
    x = RNG(0).standard_normal((4, 64))
    x *= np.array([[1.0], [1e-3], [1e-4], [0.0]]) / np.linalg.norm(x, axis=1, keepdims=True)
    x = x.astype(dtype)
    y = fidelta.l2norm(x)
    assert not y[3].any()
    tolerance = {np.float32: 1e-6, np.float16: 1e-3, BF16: 4e-3}[dtype]
    for row in range(3):
        assert error(y[row], norm(x[row].astype(np.float64))) < tolerance
    q, k, v, g, beta = inputs(1, 3, 1, 1, 64, 8, dtype)
    k[:, 1] = 0
    o = fidelta.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True)
    q64, k64 = (norm(np.asarray(a, np.float64)) for a in (q, k))
    assert error(o, loop(q64, k64, v, g, beta)[0]) < tolerance


def test_B15_a_foreign_l2norm_is_recognised():
    assert fidelta.diagnose_l2norm(fidelta.l2norm)["formula"] == "x / sqrt(sum x^2 + eps)"
    foreign = fidelta.diagnose_l2norm(lambda x: x / (np.sqrt((x * x).sum(-1, keepdims=True)) + 1e-6))
    assert foreign["formula"] == "x / (sqrt(sum x^2) + eps)"
    with np.errstate(invalid="ignore"):
        bare = fidelta.diagnose_l2norm(lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True)))
    assert bare["zero_row"] == "nan"


@pytest.mark.parametrize("case", ["closing", "one closed", "shut"])
@pytest.mark.parametrize("T", [33, 64, 130])
def test_B16_gates_that_almost_close(T, case):
    """exp(-cumsum g) overflows and 0 * inf follows."""
    q, k, v, g, beta = inputs(1, T, 2, 2, 32, 32)
    if case == "closing":
        g[...] = np.float32(np.log(1e-12))
    else:
        g[...] = 0
        g[:, 7] = -90 if case == "one closed" else -np.inf
    h0 = RNG(1).standard_normal((1, 2, 32, 32)).astype(np.float32)
    o, state = fidelta.gated_delta_rule(q, k, v, g, beta, initial_state=h0, return_state=True)
    expected, final = loop(q, k, v, g, beta, h0)
    assert np.isfinite(o).all() and np.isfinite(state).all()
    assert error(o, expected) < 5e-6 and error(state, final) < 5e-6
    step = h0.copy()
    for t in range(T):
        fidelta.gated_delta_rule_step(*[x[:, t : t + 1] for x in (q, k, v, g, beta)], step)
    assert error(step, final) < 5e-6


def test_B18_beta_is_float32_unless_asked():
    """sigmoid(b) rounded to bfloat16 in one path, kept in another. One gate function here, and rounding="hf" by name."""
    a, b = np.zeros((1, 1), BF16), np.full((1, 1), 0.5, BF16)
    zero = np.zeros(1, np.float32)
    assert fidelta.gdn_gate(a, b, zero, zero)[1][0, 0] == pytest.approx(0.62245935, abs=1e-7)
    assert fidelta.gdn_gate(a, b, zero, zero, rounding="hf")[1][0, 0] == 0.62109375


@pytest.mark.parametrize("rounding", ["float32", "hf"])
def test_B18_prefill_decode_and_verify_share_the_gate(rounding):
    q, k, v, _, _ = inputs(1, 8, 2, 4, 16, 16, BF16)
    a, b = RNG(1).standard_normal((2, 1, 8, 4)).astype(BF16)
    A_log, dt_bias = RNG(2).uniform(0, 2, (2, 4)).astype(np.float32)
    g, beta = fidelta.gdn_gate(a, b, A_log, dt_bias, rounding=rounding)
    raw = dict(gate="raw", A_log=A_log, dt_bias=dt_bias, beta_kind="logit", rounding=rounding)
    assert same(fidelta.gated_delta_rule(q, k, v, a, b, **raw), fidelta.gated_delta_rule(q, k, v, g, beta))
    one, two, many = (np.zeros((1, 4, 16, 16), np.float32) for _ in range(3))
    fused = fidelta.gated_delta_rule_step(q, k, v, a, b, one, **raw)
    assert same(fused, fidelta.gated_delta_rule_step(q, k, v, g, beta, two)) and same(one, two)
    for t in range(8):
        fidelta.gated_delta_rule_step(*[x[:, t : t + 1] for x in (q, k, v, a, b)], many, **raw)
    assert same(many, one)


def decode(T, dtype, beta=None):
    q, k, v, g, value = inputs(1, T, 1, 1, 32, 32)
    if beta is not None:
        value = beta
    state = np.zeros((1, 1, 32, 32), dtype)
    for t in range(T):
        fidelta.gated_delta_rule_step(*[x[:, t : t + 1] for x in (q, k, v, g, value)], state)
    return state, loop(q, k, v, g, value)[1]


def test_B18_2048_decode_steps():
    b = RNG(3).standard_normal((1, 2048, 1)).astype(BF16)
    value = 1 / (1 + np.exp(-b.astype(np.float64)))
    state, expected = decode(2048, np.float32, value.astype(np.float32))
    assert error(state, expected) < 1e-5


def test_B19_the_state_is_float32_unless_asked():
    """A state rounded to bfloat16 at each step gave a few good tokens, then repetition."""
    errors = {dtype: error(*decode(512, dtype)) for dtype in (np.float32, np.float16, BF16)}
    assert errors[np.float32] < 1e-4
    assert errors[BF16] > 10 * errors[np.float32] and errors[BF16] > errors[np.float16]
    x = inputs(1, 4, 1, 1, 8, 8, BF16)
    assert fidelta.gated_delta_rule(*x, return_state=True)[1].dtype == np.float32
    assert fidelta.gated_delta_rule(*x, return_state=True, state_dtype="bfloat16")[1].dtype == BF16
    with pytest.raises(fidelta.DTypeError, match="state"):
        fidelta.gated_delta_rule_step(*x, np.zeros((1, 1, 8, 8), np.float64))


def test_B20_state_layout():
    """Prefill handed its state to decode transposed; with K = V no shape check can notice, so a probe tells."""
    k, v = np.zeros((1, 1, 1, 4), np.float32), np.array([1, 2, 3, 4], np.float32).reshape(1, 1, 1, 4)
    k[..., 0] = 1
    g, beta = np.zeros((1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32)
    for layout in ("kv", "vk"):
        _, state = fidelta.gated_delta_rule(k, k, v, g, beta, return_state=True, state_layout=layout)
        S = state[0, 0] if layout == "kv" else state[0, 0].T
        assert S[0].tolist() == [1, 2, 3, 4] and not S[1:].any()
        assert fidelta.detect_state_layout(state, k, v) == layout


def test_B20_a_layout_that_shapes_can_show_is_refused():
    x = inputs(1, 3, 1, 2, 128, 64)
    _, kv = fidelta.gated_delta_rule(*x, return_state=True)
    _, vk = fidelta.gated_delta_rule(*x, return_state=True, state_layout="vk")
    assert kv.shape == (1, 2, 128, 64) and same(kv, vk.swapaxes(2, 3))
    with pytest.raises(fidelta.ShapeError, match='state.*state_layout="vk"'):
        fidelta.gated_delta_rule_step(*[a[:, :1] for a in x], vk)
    with pytest.raises(fidelta.ShapeError, match='initial_state.*state_layout="vk"'):
        fidelta.gated_delta_rule(*x, initial_state=vk)


def test_B21_gate_domain():
    """Log decay and decay factor are both float32 [T,HV]. The name decides, and the values must fit it."""
    q, k, v, _, beta = inputs(1, 9, 1, 1, 8, 8)
    log = np.full((1, 9, 1), -0.1, np.float32)
    o = fidelta.gated_delta_rule(q, k, v, log, beta)
    assert error(fidelta.gated_delta_rule(q, k, v, np.exp(log), beta, gate="factor"), o) < 1e-6
    state = np.zeros((1, 1, 8, 8), np.float32)
    for gate, value, text in (("log", 1.0, "factor"), ("factor", -0.1, "log"), ("factor", 1.5, "log")):
        bad = log * 0 + np.float32(value)
        with pytest.raises(ValueError, match=rf"g\[0, 0, 0\] is .*gate=\"{text}\""):
            fidelta.gated_delta_rule(q, k, v, bad, beta, gate=gate)
        with pytest.raises(ValueError, match=rf"g\[0, 0, 0\] is .*gate=\"{text}\""):
            fidelta.gated_delta_rule_step(q, k, v, bad, beta, state, gate=gate)
        fidelta.gated_delta_rule(q, k, v, bad, beta, gate=gate, check_values=False)
    assert not state.any()


STRIDES = {
    "interleaved gates": lambda x: (*x[:3], *np.moveaxis(np.stack(x[3:], -1).copy(), -1, 0)),
    "slices of one projection": lambda x: (*split(np.concatenate([a.reshape(1, 5, -1) for a in x[:3]], -1), x), *x[3:]),
    "head-first memory": lambda x: (*[a.swapaxes(1, 2).copy().swapaxes(1, 2) for a in x[:3]], *x[3:]),
    "every second token": lambda x: tuple(np.repeat(a, 2, 1)[:, ::2] for a in x),
    "rows of a wider buffer": lambda x: (*[np.pad(a, [(0, 0)] * 3 + [(0, 3)])[..., : a.shape[3]] for a in x[:3]], *x[3:]),
    "one beta for all": lambda x: (*x[:4], np.broadcast_to(np.float32(0.5), x[4].shape)),
    "one gate a head": lambda x: (*x[:3], np.broadcast_to(x[3][:, :1], x[3].shape), x[4]),
    "Fortran order of the gates": lambda x: (*x[:3], np.asfortranarray(x[3]), np.asfortranarray(x[4])),
}


def split(packed, x):
    ends = np.cumsum([a.shape[2] * a.shape[3] for a in x[:3]])[:-1]
    return [p.reshape(a.shape) for p, a in zip(np.split(packed, ends, -1), x)]


@pytest.mark.parametrize("HV", [16, 32])
@pytest.mark.parametrize("name", STRIDES)
def test_B24_real_strides_are_read(name, HV):
    """With as many value as key heads a reshape kept a strided view, which the kernel read as dense."""
    x = STRIDES[name](inputs(1, 5, 16, HV, 16, 16))
    dense = [np.ascontiguousarray(a) for a in x]
    assert same(fidelta.gated_delta_rule(*x), fidelta.gated_delta_rule(*dense))
    one, two = (np.zeros((1, HV, 16, 16), np.float32) for _ in range(2))
    assert same(fidelta.gated_delta_rule_step(*x, one), fidelta.gated_delta_rule_step(*dense, two)) and same(one, two)


def test_B24_what_is_not_read_is_refused():
    q, k, v, g, beta = inputs(1, 5, 16, 16, 16, 16)
    for bad in (q.swapaxes(2, 3).copy().swapaxes(2, 3), q[..., ::-1], q[:, ::-1]):
        with pytest.raises(fidelta.LayoutError, match="q .*stride"):
            fidelta.gated_delta_rule(bad, k, v, g, beta)
    with pytest.raises(fidelta.LayoutError, match="g .*stride"):
        fidelta.gated_delta_rule(q, k, v, g[:, ::-1], beta)


@pytest.mark.parametrize("T, H", [(512, 4), (2048, 2)])
def test_B25_gates_of_real_layers(T, H):
    """A float32 quantity went through bfloat16 and easy gates hid it. Decays of 1e-4 to 0.999; relative L2 a head."""
    q, k, v, _, beta = inputs(1, T, H, H, 64, 64)
    decay = np.geomspace(1e-4, 0.999, H)
    g = (np.log(decay) * RNG(5).uniform(0.5, 1.5, (1, T, H))).astype(np.float32)
    o, state = fidelta.gated_delta_rule(q, k, v, g, beta, return_state=True)
    expected, final = loop(q, k, v, g, beta)
    for h in range(H):
        assert error(o[:, :, h], expected[:, :, h]) < 5e-6, f"head {h}"
        assert error(state[:, h], final[:, h]) < 5e-6, f"head {h}"


@pytest.mark.parametrize("cut", [[64], [1], [30], [64, 65], [16, 32, 48]], ids=str)
@pytest.mark.parametrize("T", [65, 129])
def test_B30_split_invariance(T, cut):
    """One pass and prefill + decode disagreed by 0.125 in logits. Any split agrees; at whole chunks, in every bit."""
    x = inputs(1, T, 2, 4, 32, 32)
    whole, final = fidelta.gated_delta_rule(*x, return_state=True)
    state, parts, bounds = None, [], [0, *cut, T]
    for first, end in zip(bounds, bounds[1:]):
        o, state = fidelta.gated_delta_rule(*[a[:, first:end] for a in x], initial_state=state, return_state=True)
        parts.append(o)
    assert error(np.concatenate(parts, 1), whole) < 5e-6 and error(state, final) < 5e-6
    if all(c % fidelta.CHUNK == 0 for c in cut):
        assert same(np.concatenate(parts, 1), whole) and same(state, final)
    _, state = fidelta.gated_delta_rule(*[a[:, : T - 1] for a in x], return_state=True)
    last = fidelta.gated_delta_rule_step(*[a[:, T - 1 :] for a in x], state)
    assert error(last, whole[:, -1:]) < 5e-6 and error(state, final) < 5e-6


@pytest.mark.parametrize("N", [2, 8, 62])
def test_B31_alone_as_in_a_batch(N):
    """The same prompt gave other tokens when batched. Here no bit depends on the neighbours or on the threads."""
    lengths = RNG(N).integers(1, 150, N)
    lengths[N // 2] = 100
    cu = np.concatenate([[0], lengths.cumsum()])
    x = inputs(1, cu[-1], 2, 4, 32, 32, BF16)
    own = [a[:, cu[N // 2] : cu[N // 2 + 1]] for a in x]
    alone, alone_state = fidelta.gated_delta_rule(*own, return_state=True)
    for threads in (1, 2, 5):
        o, state = fidelta.gated_delta_rule(*x, cu_seqlens=cu, return_state=True, num_threads=threads)
        assert same(o[:, cu[N // 2] : cu[N // 2 + 1]], alone) and same(state[N // 2], alone_state[0])
    pool = RNG(1).standard_normal((N, 4, 32, 32)).astype(np.float32)
    kept = pool.copy()
    one = [np.ascontiguousarray(np.broadcast_to(a[:, :1], (N, 1, *a.shape[2:]))) for a in own]
    o = fidelta.gated_delta_rule_step(*one, pool)
    single = kept[N // 2 : N // 2 + 1].copy()
    assert same(fidelta.gated_delta_rule_step(*[a[:1] for a in one], single), o[N // 2 : N // 2 + 1])
    assert same(single[0], pool[N // 2])


# --------------------------------------------------------------------------------------- B. short causal convolution


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("L", range(1, 10))
def test_B32_strides_and_alignment(L, dtype):
    """'Strides must be multiples of 8', and the cure broke packed sequences. Any stride, both axis orders, any base."""
    D, W = 64, 4
    wide = RNG(L).standard_normal((2, D, L + 3)).astype(dtype)
    flat = np.empty(2 * D * (L + 3) + 1, dtype)
    flat[1:] = wide.ravel()
    odd = flat[1:].reshape(wide.shape)[:, :, :L]  # the base is one element off
    weight = RNG(1).standard_normal((D, W)).astype(dtype)
    dense = np.ascontiguousarray(odd)
    y = fidelta.causal_conv1d(dense, weight, activation="silu", layout="bdt")
    assert same(fidelta.causal_conv1d(odd, weight, activation="silu", layout="bdt"), y)
    assert same(fidelta.causal_conv1d(odd.swapaxes(1, 2), weight, activation="silu"), y.swapaxes(1, 2))
    cu = np.array([0, L // 2, L])
    packed = [
        fidelta.causal_conv1d(odd[:1], weight, layout="bdt", cu_seqlens=cu),
        fidelta.causal_conv1d(odd[:1].swapaxes(1, 2), weight, cu_seqlens=cu).swapaxes(1, 2),
    ]
    separate = [fidelta.causal_conv1d(dense[:1, :, s], weight, layout="bdt") for s in (slice(0, L // 2), slice(L // 2, L))]
    assert all(same(p, np.concatenate(separate, 2)) for p in packed)


@pytest.mark.parametrize("T", [0, 1, 2, 3, 4])
def test_B36_sequences_shorter_than_the_filter(T):
    """The new history was taken from the inputs alone."""
    history = np.array([[[10, 20, 30]]], np.float32)
    x = np.array([40, 50, 60, 70], np.float32)[:T].reshape(1, T, 1)
    weight = np.array([[1, 2, 3, 4]], np.float32)
    wanted = np.array([10, 20, 30, 40, 50, 60, 70][: 3 + T][-3:], np.float32).reshape(1, 1, 3)
    y, state = fidelta.causal_conv1d(x, weight, initial_state=history, return_state=True)
    assert same(state, wanted)
    assert np.array_equal(y[0], conv_loop(x[0], weight, history[0]))
    pool = history.copy()
    assert same(fidelta.causal_conv1d_step(x, weight, pool), y) and same(pool, wanted)


def test_B38_a_pool_smaller_than_the_batch():
    """An assertion compared the pool with the batch. What counts are the indices; a bad one is named with its place."""
    x, weight = RNG(0).standard_normal((8, 1, 16)).astype(np.float32), np.ones((16, 4), np.float32)
    pool = RNG(1).standard_normal((6, 16, 3)).astype(np.float32)
    before = pool.copy()
    slots = np.array([0, 1, 2, 3, 4, 5, -1, -1])
    y = fidelta.causal_conv1d_step(x, weight, pool, read_slots=slots)
    assert not y[6:].any()
    for n in range(6):
        assert np.allclose(y[n], conv_loop(x[n], weight, before[n]), atol=1e-5)
    state = np.zeros((6, 1, 8, 8), np.float32)
    tokens = inputs(8, 1, 1, 1, 8, 8)
    assert not fidelta.gated_delta_rule_step(*tokens, state, read_slots=slots)[6:].any()
    for bad, told in (([0, 1, 2, 3, 4, 6, -1, -1], "6"), ([0, 1, 2, 3, 4, 4, -1, -1], "4"), ([0, 1, 2, -2, 4, 5, -1, -1], "-2")):
        untouched = pool.copy(), state.copy()
        for call in (
            lambda s: fidelta.causal_conv1d_step(x, weight, pool, read_slots=s),
            lambda s: fidelta.gated_delta_rule_step(*tokens, state, read_slots=s),
        ):
            with pytest.raises(ValueError, match="slots") as caught:
                call(np.array(bad))
            assert told in str(caught.value)
        assert same(pool, untouched[0]) and same(state, untouched[1])


def test_B39_slices_of_one_buffer():
    """A backward took dense strides for granted. Here the forward: inputs and outputs as slices of [B,T,3D] buffers."""
    D = 32
    source, target = RNG(0).standard_normal((2, 9, 3 * D)).astype(np.float32), np.full((2, 9, 3 * D), np.nan, np.float32)
    weight = RNG(1).standard_normal((D, 4)).astype(np.float32)
    for part in range(3):
        span = slice(part * D, (part + 1) * D)
        fidelta.causal_conv1d(source[..., span], weight, activation="silu", out=target[..., span])
        dense = fidelta.causal_conv1d(np.ascontiguousarray(source[..., span]), weight, activation="silu")
        assert same(target[..., span], dense)
        assert np.isnan(target[..., (part + 1) * D :]).all()


def test_B40_conv_state_of_a_rank():
    """The channels are the blocks q, k, v, each cut by heads; 1/tp of the whole straddles them."""
    state = np.arange(16, dtype=np.float32)[None, :, None] * np.ones((2, 1, 3), np.float32)
    first, second = (fidelta.shard_conv_state(state, 4, 8, 2, rank) for rank in (0, 1))
    assert first[0, :, 0].tolist() == [0, 1, 4, 5, 8, 9, 10, 11]
    assert second[0, :, 0].tolist() == [2, 3, 6, 7, 12, 13, 14, 15]
    with pytest.raises(ValueError, match="q.*4.*tp = 3"):
        fidelta.shard_conv_state(state, 4, 8, 3, 0)
    with pytest.raises(ValueError, match="16.*expected 20"):
        fidelta.shard_conv_state(state, 4, 12, 2, 0)


def test_B40_a_sharded_conv_is_the_whole_one():
    x, weight = RNG(0).standard_normal((1, 9, 16)).astype(np.float32), RNG(1).standard_normal((16, 4)).astype(np.float32)
    history = RNG(2).standard_normal((1, 16, 3)).astype(np.float32)
    y, final = fidelta.causal_conv1d(x, weight, initial_state=history, return_state=True)
    for rank in (0, 1):
        mine = fidelta.shard_conv_state(np.arange(16)[None, :, None], 4, 8, 2, rank)[0, :, 0]
        part, state = fidelta.causal_conv1d(
            x[..., mine], fidelta.shard_conv_weight(weight, 4, 8, 2, rank),
            initial_state=fidelta.shard_conv_state(history, 4, 8, 2, rank), return_state=True,
        )  # fmt: skip
        assert same(part, y[..., mine]) and same(state, final[:, mine])


# ------------------------------------------------------------------------------------------ C. states and serving


@pytest.mark.parametrize("slots, pad", [([0, 3, -1, -1], -1), ([1, 3, 0, 0], 0), ([0, 3, 7, 7], 7)], ids=str)
def test_B41_padding_rows(slots, pad):
    """-1 marks padding in one place, 0 in another; slot 0 is a real slot in a third. The caller says which."""
    tokens = inputs(4, 1, 1, 2, 8, 8)
    real = [n for n, slot in enumerate(slots) if slot != pad]
    pool = RNG(0).standard_normal((5, 2, 8, 8)).astype(np.float32)
    before = pool.copy()
    o = fidelta.gated_delta_rule_step(*tokens, pool, read_slots=np.array(slots), pad_slot=pad)
    x, weight = RNG(1).standard_normal((4, 1, 8)).astype(np.float32), np.ones((8, 4), np.float32)
    histories = RNG(2).standard_normal((5, 8, 3)).astype(np.float32)
    old = histories.copy()
    y = fidelta.causal_conv1d_step(x, weight, histories, read_slots=np.array(slots), pad_slot=pad)
    for n, slot in enumerate(slots):
        if n not in real:
            assert not o[n].any() and not y[n].any()
            continue
        expected, final = loop(*[a[n : n + 1] for a in tokens], before[slot][None])
        assert error(o[n], expected[0]) < 5e-6 and error(pool[slot], final[0]) < 5e-6
        assert np.allclose(y[n], conv_loop(x[n], weight, old[slot]), atol=1e-5)
    for slot in set(range(5)) - {slots[n] for n in real}:
        assert same(pool[slot], before[slot]) and same(histories[slot], old[slot])


def test_B43_a_reset_overwrites():
    """One NaN in a state turned a server into a '!!!!' printer: 0 * NaN is NaN. And a health call that finds the slot."""
    x = inputs(2, 5, 1, 2, 8, 8)
    poison = np.full((2, 2, 8, 8), np.nan, np.float32)
    fresh = np.array([False, False])
    o, state = fidelta.gated_delta_rule(*x, initial_state=poison, has_initial_state=fresh, return_state=True)
    assert same(o, fidelta.gated_delta_rule(*x)) and np.isfinite(state).all()
    pool = poison.copy()
    step = fidelta.gated_delta_rule_step(*x, pool, has_initial_state=fresh)
    assert np.isfinite(step).all() and np.isfinite(pool).all() and error(pool, state) < 5e-6
    history = np.full((2, 8, 3), np.nan, np.float32)
    weight = np.ones((8, 4), np.float32)
    rows = np.ascontiguousarray(x[0][:, :, 0])
    y = fidelta.causal_conv1d(rows, weight, initial_state=history, has_initial_state=fresh)
    assert same(y, fidelta.causal_conv1d(rows, weight))
    assert same(y, fidelta.causal_conv1d_step(rows, weight, history, has_initial_state=fresh))
    assert np.isfinite(history).all()
    pool = np.zeros((7, 2, 8, 8), np.float32)
    pool[4, 1, 2, 3] = np.nan
    report = fidelta.check_state(pool)
    assert list(report) == [4] and report[4]["nan"] == 1


def test_B45_speculative_decoding_rolls_back():
    """Three drafts a row, 0 to 3 of them accepted, then five tokens more: as plain decode, for S and for the history."""
    B, K, D, W = 4, 16, 24, 4
    accepted = np.array([0, 1, 2, 3])
    old = RNG(0).standard_normal((B, 2, K, K)).astype(np.float32)
    tokens = inputs(B, 8, 1, 2, K, K)
    draft = [x[:, :3] for x in tokens]

    pool = np.full((B * 4, 2, K, K), np.nan, np.float32)
    columns = np.arange(B * 4).reshape(B, 4)  # a row's slots: the state before, and after each draft token
    pool[columns[:, 0]] = old
    fidelta.gated_delta_rule_step(*draft, pool, read_slots=columns[:, 0], write_slots=columns[:, 1:])
    assert same(pool[columns[:, 0]], old), "accepted = 0 has to find the state before, in every bit"

    later = [x[:, 3:] for x in tokens]
    o = fidelta.gated_delta_rule_step(
        *later, pool, read_slots=columns, accepted=accepted, write_slots=columns[:, 0].copy()
    )
    for n in range(B):
        plain = old[n : n + 1].copy()
        for t in range(accepted[n]):
            fidelta.gated_delta_rule_step(*[x[n : n + 1, t : t + 1] for x in draft], plain)
        outputs = [fidelta.gated_delta_rule_step(*[x[n : n + 1, t : t + 1] for x in later], plain) for t in range(5)]
        assert same(np.concatenate(outputs, 1), o[n : n + 1])
        assert same(plain[0], pool[columns[n, 0]])

    # The history keeps the window before the drafts and the drafts; `offsets` says where the next taps start.
    weight = RNG(1).standard_normal((D, W)).astype(np.float32)
    history = np.zeros((B, D, W - 1 + 5), np.float32)
    window = RNG(2).standard_normal((B, D, W - 1)).astype(np.float32)
    history[..., : W - 1] = window
    x = RNG(3).standard_normal((B, 8, D)).astype(np.float32)
    fidelta.causal_conv1d_step(x[:, :3], weight, history, history="draft", offsets=np.zeros(B, np.int64))
    assert same(history[..., : W - 1], window)
    y = fidelta.causal_conv1d_step(x[:, 3:], weight, history, history="draft", offsets=accepted)
    for n in range(B):
        plain = window[n : n + 1].copy()
        for t in range(accepted[n]):
            fidelta.causal_conv1d_step(x[n : n + 1, t : t + 1], weight, plain)
        assert same(fidelta.causal_conv1d_step(x[n : n + 1, 3:], weight, plain), y[n : n + 1])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch", [[3], [7], [3, 7]], ids=str)
def test_B47_padded_prompts(batch, side):
    """Padding ran through conv and recurrence. The pads hold NaN here, and the real tokens do not notice."""
    B, T, D = len(batch), 7, 16
    ranges = np.array([[T - n, T] if side == "left" else [0, n] for n in batch])
    padded = [np.full((B, *a.shape[1:]), np.nan, a.dtype) for a in inputs(1, T, 1, 2, 16, 16)]
    rows = np.full((B, T, D), np.nan, np.float32)
    weight = RNG(1).standard_normal((D, 4)).astype(np.float32)
    alone = []
    for b, (first, end) in enumerate(ranges):
        own = inputs(1, end - first, 1, 2, 16, 16, seed=b)
        own_x = RNG(b).standard_normal((1, end - first, D)).astype(np.float32)
        for target, a in zip(padded, own):
            target[b, first:end] = a[0]
        rows[b, first:end] = own_x[0]
        alone.append((fidelta.gated_delta_rule(*own, return_state=True), fidelta.causal_conv1d(own_x, weight, return_state=True)))
    o, state = fidelta.gated_delta_rule(*padded, token_range=ranges, return_state=True)
    y, history = fidelta.causal_conv1d(rows, weight, token_range=ranges, return_state=True)
    steps = np.zeros((B, 2, 16, 16), np.float32)
    step_o = fidelta.gated_delta_rule_step(*padded, steps, token_range=ranges)
    for b, ((first, end), ((own_o, own_state), (own_y, own_history))) in enumerate(zip(ranges, alone)):
        assert same(o[b, first:end], own_o[0]) and same(state[b], own_state[0])
        assert same(y[b, first:end], own_y[0]) and same(history[b], own_history[0])
        assert error(step_o[b, first:end], own_o[0]) < 5e-6 and error(steps[b], own_state[0]) < 5e-6
        for whole in (o, y, step_o):
            assert not np.delete(whole[b], np.s_[first:end], 0).any()


# ------------------------------------------------------------------------------------------------- F. checkpoints


def test_B70_the_norm_says_what_its_weight_is():
    """Norms store an offset from one, the gated norm does not; a converter added 1 twice. No op guesses."""
    x = RNG(0).standard_normal((3, 32)).astype(np.float32)
    weight = RNG(1).uniform(-0.1, 0.1, 32).astype(np.float32)
    root = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    assert error(fidelta.rms_norm(x, weight), x / root * weight) < 1e-6
    assert error(fidelta.rms_norm(x, weight, weight_kind="1+w"), x / root * (1 + weight.astype(np.float64))) < 1e-6
    z = RNG(2).standard_normal((3, 32)).astype(np.float32)
    assert error(fidelta.rms_norm_gated(x, z, weight), x / root * weight * z / (1 + np.exp(-z.astype(np.float64)))) < 1e-6
    with pytest.raises(ValueError, match="weight_kind"):
        fidelta.rms_norm(x, weight, weight_kind="offset")


@pytest.mark.parametrize("shape, told", [((8, 1, 4), r"weight\[:, 0, :\]"), ((4, 8), r"weight\.T")])
def test_B70_a_conv_weight_of_another_layout_is_named(shape, told):
    """[C,1,4] is the checkpoint's, [4,C] a converted one's; both are told apart from [C,4]."""
    with pytest.raises(fidelta.ShapeError, match=f"weight has shape.*{told}"):
        fidelta.causal_conv1d(np.zeros((1, 5, 8), np.float32), np.zeros(shape, np.float32))


TINY = "examples/tiny-qwen3_5"


def renamed(root, target, name):
    """A copy of the tiny checkpoint with its tensors under other names."""
    from safetensors.numpy import load_file, save_file

    target.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(root / TINY / file, target / file)
    save_file({name(key): value for key, value in load_file(root / TINY / "model.safetensors").items()}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "model.language_model.language_model."])
def test_B72_prefixes_of_names(request, tmp_path, prefix):
    """Wrappers repeat the language_model level, and loaders then loaded nothing. The same model under each name."""
    root = request.config.rootpath
    strip = lambda key: key.replace("model.language_model.", "model.").replace("model.", prefix, 1)
    path = renamed(root, tmp_path / "renamed", lambda key: strip(key) if key.startswith("model.") else key)
    tokens = [1, 2, 3, 4]
    expected = fidelta.model.load(root / TINY).logits(tokens)
    assert np.array_equal(fidelta.model.load(path).logits(tokens), expected)


def test_B72_nothing_loads_silently(request, tmp_path):
    """Names that fit nowhere are an error that names one, never an empty model."""
    path = renamed(request.config.rootpath, tmp_path / "strange", lambda key: "wrapper." + key.replace("layers", "blocks"))
    with pytest.raises((ValueError, KeyError), match="layers"):
        fidelta.model.load(path).logits([1, 2, 3])
    assert json.loads((path / "config.json").read_text())
