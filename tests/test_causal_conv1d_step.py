"""causal_conv1d_step: every kernel against the float64 reference, with each form of history."""

import numpy as np
import pytest

import fidelta
from conftest import F32, REAL, contract, each_variant, same_bits

OP = "causal_conv1d_step"


def inputs(rng, B=2, T=1, D=20, W=4, L=3, dtype=F32):
    return {"x": rng.standard_normal((B, T, D)).astype(dtype), "weight": rng.standard_normal((D, W)).astype(F32),
            "state": rng.standard_normal((B, D, L)).astype(dtype), "bias": rng.standard_normal(D).astype(F32)}


def both(arguments, variant, **options):
    mine, theirs = arguments["state"].copy(), arguments["state"].copy()
    got = fidelta.causal_conv1d_step(**dict(arguments, state=mine), **options, variant=variant)
    want = fidelta.reference.causal_conv1d_step(**dict(arguments, state=theirs), **options)
    contract(got, want)
    same_bits(mine, theirs)
    return got, mine


@each_variant(OP)
@pytest.mark.parametrize("T", [0, 1, 2, 3, 5, 16])
@pytest.mark.parametrize("D", [1, 15, 16, 17, 128, 129])
@pytest.mark.parametrize("W", [2, 4, 6])
@pytest.mark.parametrize("extra", [0, 3])
def test_linear(variant, T, D, W, extra, rng):
    both(inputs(rng, T=T, D=D, W=W, L=W - 1 + extra), variant, activation="silu")


@each_variant(OP)
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("layout", ["btd", "bdt"])
def test_dtypes_and_y_over_x(variant, dtype, layout, rng):
    arguments = inputs(rng, T=6, D=50, L=7, dtype=dtype)
    if layout == "bdt":
        arguments["x"] = arguments["x"].swapaxes(1, 2).copy()
    y, state = both(arguments, variant, layout=layout)
    over = arguments["x"].copy()
    fidelta.causal_conv1d_step(**dict(arguments, x=over, state=arguments["state"].copy()), out=over, layout=layout,
                               variant=variant)
    same_bits(over, y)


@each_variant(OP)
@pytest.mark.parametrize("L", [3, 4, 10])
@pytest.mark.parametrize("T", [1, 2, 4, 12])
def test_circular(variant, L, T, rng):
    both(inputs(rng, B=3, T=T, L=L), variant, history="circular", positions=np.array([0, 2, 2**40 + 5]))
    both(inputs(rng, B=3, T=T, L=L), variant, history="circular", positions=np.array([2**63 - 1, 2**63 - 2, 2**62]))


@each_variant(OP)
def test_circular_equals_linear(variant, rng):
    arguments = inputs(rng, B=1, D=8, L=5)
    ring, line = np.zeros((1, 8, 5), F32), np.zeros((1, 8, 5), F32)
    for t in range(13):
        x = rng.standard_normal((1, 1, 8)).astype(F32)
        same_bits(fidelta.causal_conv1d_step(x, arguments["weight"], ring, history="circular", positions=np.array([t]),
                                             variant=variant),
                  fidelta.causal_conv1d_step(x, arguments["weight"], line, variant=variant))


@each_variant(OP)
@pytest.mark.parametrize("L", [3 + 4, 2 + 4, 12])
def test_draft(variant, L, rng):
    both(inputs(rng, B=4, T=4, L=L), variant, history="draft", offsets=np.array([0, 1, 2, 3]))


@each_variant(OP)
@pytest.mark.parametrize("drop", [0, 1])
def test_accept_and_roll_back(variant, drop, rng):
    """B45: three drafts, of which 0 .. 3 are accepted in one batch; then five tokens, as if never drafted. With W-1+T
    columns the offset is the number accepted, with W-2+T (one accepted at least) it is one less."""
    D, W, T = 12, 4, 3
    weight = rng.standard_normal((D, W)).astype(F32)
    past, drafts = rng.standard_normal((4, W - 1, D)).astype(F32), rng.standard_normal((4, T, D)).astype(F32)
    later = rng.standard_normal((4, 5, D)).astype(F32)
    accepted = np.array([1, 1, 2, 3] if drop else [0, 1, 2, 3])
    pool = np.full((4, D, W - 1 + T - drop), np.nan, F32)
    pool[:, :, :W - 1] = past.swapaxes(1, 2)
    fidelta.causal_conv1d_step(drafts, weight, pool, history="draft", offsets=np.zeros(4, np.int64), variant=variant)
    offsets = accepted - drop
    plain = np.stack([np.concatenate([past[n], drafts[n]])[accepted[n]:accepted[n] + W - 1].T for n in range(4)])
    plain = np.ascontiguousarray(plain)
    for t in range(5):
        x = later[:, t:t + 1]
        got = fidelta.causal_conv1d_step(x, weight, pool, history="draft", offsets=offsets, variant=variant)
        same_bits(got, fidelta.causal_conv1d_step(x, weight, plain, variant=variant))
        offsets = np.full(4, 1)  # one token fits behind the W-1 earlier inputs, so none was dropped


@each_variant(OP)
@pytest.mark.parametrize("history", ["linear", "circular", "draft"])
def test_slots(variant, history, rng):
    """B38, B41: a pool smaller than the batch, pads, slots read and written apart, a fresh sequence over NaN."""
    arguments = inputs(rng, B=6, T=2, L=8)
    arguments["state"] = rng.standard_normal((5, 20, 8)).astype(F32)
    arguments["state"][4] = np.nan
    options = {"history": history, "read_slots": np.array([0, 3, -1, 4, 1, -1], np.int32),
               "write_slots": np.array([0, 2, -1, 4, -1, -1], np.int32),
               "has_initial_state": np.array([True, True, True, False, True, True])}
    if history == "circular":
        options["positions"] = np.arange(6)
    if history == "draft":
        options["offsets"] = np.array([0, 1, 2, 3, 4, 5])
    y, state = both(arguments, variant, **options)
    assert not y[2].any() and not y[5].any() and np.isfinite(y).all()
    same_bits(state[1], arguments["state"][1])
    same_bits(state[3], arguments["state"][3])
    if history != "draft":
        assert np.isfinite(state[4]).all()


@each_variant(OP)
def test_pad_slot_is_an_argument(variant, rng):
    arguments = inputs(rng, B=3)
    before = arguments["state"].copy()
    y, state = both(arguments, variant, read_slots=np.array([0, 2, 0]), pad_slot=0)
    assert not y[0].any() and not y[2].any() and y[1].any()
    same_bits(state[:2], before[:2])


def test_bad_slots_are_refused(rng):
    arguments = inputs(rng, B=3)
    for slots, words in (([0, 1, 3], "3"), ([0, 1, 1], "1"), ([0, -2, 1], "-2")):
        with pytest.raises(ValueError, match=f"read_slots|write_slots.*{words}"):
            fidelta.causal_conv1d_step(**arguments, read_slots=np.array(slots))
    with pytest.raises(ValueError, match="positions"):
        fidelta.causal_conv1d_step(**arguments, history="circular", positions=np.array([0, -1, 2]))


@each_variant(OP)
@pytest.mark.parametrize("D", [64, 2048, 4096])
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("circular", [False, True])
def test_causal_conv1d_package_grid(variant, D, T, circular, rng):
    torch = pytest.importorskip("torch")
    W, L = 4, 9
    x, weight = torch.randn(8, D, T).bfloat16(), torch.randn(D, W)
    seen = torch.randint(W - 1, 1024, (8,))
    state = torch.randn(8, D, L).bfloat16()
    line = state.clone()
    if circular:
        at = (seen[:, None] + torch.arange(L)) % L
        line = torch.gather(state, 2, at[:, None].expand(-1, D, -1))
    full = torch.cat([line, x], 2)
    want = torch.nn.functional.silu(torch.nn.functional.conv1d(full.float(), weight[:, None], groups=D)[..., -T:])
    options = {"history": "circular", "positions": seen} if circular else {}
    y = fidelta.causal_conv1d_step(x, weight, state, layout="bdt", activation="silu", variant=variant, **options)
    torch.testing.assert_close(y, want.bfloat16(), rtol=1e-2, atol=5e-2)
    after = full[..., -L:]
    if circular:
        at = (seen[:, None] + T + torch.arange(L)) % L
        state = torch.gather(state, 2, at[:, None].expand(-1, D, -1))
    assert torch.equal(state, after)
