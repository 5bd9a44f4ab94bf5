"""causal_conv1d: every kernel against the float64 reference, its histories, and what is promised bit for bit."""

import numpy as np
import pytest

import fidelta
from conftest import BF16, F16, F32, REAL, contract, each_variant, f64, same_bits

OP = "causal_conv1d"


def inputs(rng, B=1, T=9, D=17, W=4, dtype=F32, bias=True, weight_dtype=F32):
    made = {"x": rng.standard_normal((B, T, D)).astype(dtype), "weight": rng.standard_normal((D, W)).astype(weight_dtype)}
    if bias:
        made["bias"] = rng.standard_normal(D).astype(weight_dtype)
    return made


def both(arguments, variant, **options):
    got = fidelta.causal_conv1d(**arguments, variant=variant, **options)
    want = fidelta.reference.causal_conv1d(**arguments, **options)
    return got, want


@each_variant(OP)
@pytest.mark.parametrize("T", [0, 1, 2, 3, 4, 5, 31, 32, 33, 64, 65, 130])
@pytest.mark.parametrize("D", [1, 3, 8, 15, 16, 17, 127, 128, 129, 200])
def test_sizes(variant, T, D, rng, guarded):
    arguments = guarded(inputs(rng, B=2, T=T, D=D))
    out = guarded.empty((2, T, D), F32)
    got, want = both(arguments, variant, activation="silu", return_state=True) if T else (None, None)
    fidelta.causal_conv1d(**arguments, activation="silu", out=out, variant=variant)
    if T:
        contract(got[0], want[0])
        contract(got[1], want[1])
        same_bits(out, got[0])


@each_variant(OP)
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("W", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("narrow_weight", [False, True])
def test_dtypes_and_widths(variant, dtype, W, activation, narrow_weight, rng):
    arguments = inputs(rng, T=67, D=70, W=W, dtype=dtype, bias=W % 2 == 0, weight_dtype=dtype if narrow_weight else F32)
    for layout in ("btd", "bdt"):
        case = dict(arguments, x=arguments["x"] if layout == "btd" else arguments["x"].swapaxes(1, 2).copy())
        got, want = both(case, variant, activation=activation, layout=layout)
        contract(got, want)


@each_variant(OP)
@pytest.mark.parametrize("T", [0, 1, 2, 3, 4, 7, 40])
@pytest.mark.parametrize("extra", [0, 1, 6])
def test_histories(variant, T, extra, rng, guarded):
    D, W = 33, 4
    arguments = guarded(inputs(rng, B=3, T=T, D=D, W=W))
    arguments["initial_state"] = guarded.copy(rng.standard_normal((3, D, W - 1 + extra)).astype(F32))
    (y, state), (y_want, state_want) = both(arguments, variant, return_state=True)
    contract(y, y_want)
    same_bits(state, state_want.astype(F32))  # inputs are only moved
    in_place = arguments["initial_state"].copy()
    fidelta.causal_conv1d(**dict(arguments, initial_state=in_place), final_state=in_place, variant=variant)
    same_bits(in_place, state)


@each_variant(OP)
def test_only_the_last_columns_count(variant, rng):
    arguments = inputs(rng, T=5, D=20)
    history = rng.standard_normal((1, 20, 3)).astype(F32)
    long = np.concatenate([np.full((1, 20, 4), np.nan, F32), history], 2)
    same_bits(fidelta.causal_conv1d(**arguments, initial_state=history, variant=variant),
              fidelta.causal_conv1d(**arguments, initial_state=long, variant=variant))


@each_variant(OP)
def test_slots(variant, rng):
    D, L = 40, 5
    arguments = inputs(rng, T=20, D=D)
    pool = rng.standard_normal((7, D, L)).astype(F32)
    pool[6] = np.nan  # a slot that a padded batch or a fresh sequence may meet, never read
    options = {"cu_seqlens": np.array([0, 2, 2, 11, 15, 20], np.int32), "read_slots": np.array([4, 2, -1, 6, 0]),
               "write_slots": np.array([4, 5, 3, 6, -1]), "has_initial_state": np.array([True, True, True, False, True])}
    mine, theirs = pool.copy(), pool.copy()
    y, state = fidelta.causal_conv1d(**arguments, **options, initial_state=mine, final_state=mine, variant=variant)
    want = fidelta.reference.causal_conv1d(**arguments, **options, initial_state=theirs, final_state=theirs)
    contract(y, want[0])
    assert state is mine
    same_bits(mine, theirs)
    for untouched in (0, 1, 2, 3):
        same_bits(mine[untouched], pool[untouched])
    assert not y[0, 2:11].any() and np.isfinite(y).all()


@each_variant(OP)
@pytest.mark.parametrize("dtype", REAL)
def test_strides(variant, dtype, rng):
    D = 30
    wide = rng.standard_normal((2, 12, 3 * D + 3)).astype(dtype)
    weight = rng.standard_normal((4, D)).astype(F32).T
    dense = fidelta.causal_conv1d(wide[..., D + 1:2 * D + 1].copy(), weight.copy(), variant=variant)
    same_bits(dense, fidelta.causal_conv1d(wide[..., D + 1:2 * D + 1], weight, variant=variant))
    every_second = fidelta.causal_conv1d(wide[:, ::2, :2 * D:2], weight, variant=variant)
    same_bits(every_second, fidelta.causal_conv1d(wide[:, ::2, :2 * D:2].copy(), weight, variant=variant))
    repeated = np.broadcast_to(wide[:1, :, :D], (2, 12, D))
    same_bits(fidelta.causal_conv1d(repeated, weight, variant=variant)[0],
              fidelta.causal_conv1d(repeated.copy(), weight, variant=variant)[1])
    out = np.full((2, 12, 2 * D), np.nan, dtype)
    fidelta.causal_conv1d(wide[..., D + 1:2 * D + 1], weight, out=out[..., ::2], variant=variant)
    same_bits(dense, out[..., ::2])
    assert np.isnan(f64(out[..., 1::2])).all()


@each_variant(OP)
@pytest.mark.parametrize("dtype", REAL)
def test_bit_for_bit(variant, dtype, rng):
    arguments = inputs(rng, B=3, T=150, D=150, dtype=dtype)
    history = rng.standard_normal((3, 150, 3)).astype(dtype)
    options = {"activation": "silu", "variant": variant}
    y, state = fidelta.causal_conv1d(**arguments, **options, initial_state=history, return_state=True)
    turned = dict(arguments, x=arguments["x"].swapaxes(1, 2).copy())
    bdt, _ = fidelta.causal_conv1d(**turned, **options, layout="bdt", initial_state=history, return_state=True)
    same_bits(bdt.swapaxes(1, 2), y)
    one = fidelta.causal_conv1d(**dict(arguments, x=arguments["x"][1:2]), **options, initial_state=history[1:2])
    same_bits(one[0], y[1])
    packed = fidelta.causal_conv1d(**dict(arguments, x=arguments["x"].reshape(1, 450, 150)), **options,
                                   cu_seqlens=np.array([0, 150, 300, 450]), initial_state=history)
    same_bits(packed.reshape(y.shape), y)
    same_bits(fidelta.causal_conv1d(**arguments, **options, initial_state=history, num_threads=1), y)
    for cut in (1, 2, 31, 100):
        first, carried = fidelta.causal_conv1d(**dict(arguments, x=arguments["x"][:, :cut]), **options,
                                               initial_state=history, return_state=True)
        second, last = fidelta.causal_conv1d(**dict(arguments, x=arguments["x"][:, cut:]), **options,
                                             initial_state=carried, return_state=True)
        same_bits(np.concatenate([first, second], 1), y)
        same_bits(last, state)


@each_variant(OP)
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("T", [7, 8, 31, 32, 33, 1023, 1024, 1025, 2100])
def test_time_side_by_side(variant, dtype, T, rng, guarded):
    """Lanes over time: the bits of lanes over channels, and nothing beyond the last token."""
    arguments = guarded(inputs(rng, B=2, T=T, D=5, W=2 + T % 5, dtype=dtype))
    turned = dict(arguments, x=guarded.copy(arguments["x"].swapaxes(1, 2)))
    history = rng.standard_normal((2, 5, 1 + T % 5)).astype(dtype)
    options = {"activation": "silu", "initial_state": history, "variant": variant}
    y = fidelta.causal_conv1d(**arguments, **options)
    out = guarded.empty((2, 5, T), dtype)
    fidelta.causal_conv1d(**turned, **options, layout="bdt", out=out)
    same_bits(out.swapaxes(1, 2), y)


@each_variant(OP)
def test_padded_batch(variant, rng):
    """B47: pads left and right of the tokens change nothing."""
    arguments = inputs(rng, B=2, T=7, D=9)
    spans = np.array([[4, 7], [0, 3]])
    x = arguments["x"].copy()
    x[0, :4], x[1, 3:] = np.nan, np.nan
    y, state = fidelta.causal_conv1d(**dict(arguments, x=x), token_range=spans, return_state=True, variant=variant)
    for b, (first, end) in enumerate(spans):
        alone, last = fidelta.causal_conv1d(**dict(arguments, x=x[b:b + 1, first:end]), return_state=True, variant=variant)
        same_bits(y[b, first:end], alone[0])
        same_bits(state[b], last[0])
    assert not y[0, :4].any() and not y[1, 3:].any()


@each_variant(OP)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_rounding_before_the_activation(variant, dtype, rng):
    torch = pytest.importorskip("torch")
    x, weight = rng.standard_normal((1, 50, 24)).astype(dtype), rng.standard_normal((24, 4)).astype(dtype)
    got = fidelta.causal_conv1d(x, weight, activation="silu", rounding="hf", variant=variant)
    sums = fidelta.causal_conv1d(x, weight, variant=variant)  # rounded to the dtype of x
    want = torch.nn.functional.silu(torch.from_numpy(sums.astype(np.float32)))
    same_bits(got, want.numpy().astype(dtype))


# The peers' grids (shortened) with their tolerances, torch as the oracle ---------------------------------------------

DAO = {"float32": (3e-4, 1e-3), "float16": (3e-3, 5e-3), "bfloat16": (1e-2, 5e-2)}


@pytest.mark.parametrize("name", list(DAO))
@pytest.mark.parametrize("D", [64, 4128])
@pytest.mark.parametrize("T", [1, 2, 8, 151, 372])
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("channel_last", [True, False])
def test_causal_conv1d_package_grid(name, D, T, W, channel_last):
    torch = pytest.importorskip("torch")
    torch.manual_seed(W)
    dtype, silu = getattr(torch, name), T % 2 == 0
    x = torch.randn(2, T, D + 64).to(dtype)[..., 32:32 + D]
    weight, bias = torch.randn(D, W), torch.randn(D)
    history = torch.randn(2, D, W - 1).to(dtype)
    full = torch.cat([history, x.transpose(1, 2)], 2).float()
    want = torch.nn.functional.conv1d(full, weight[:, None], bias, groups=D)
    want = (torch.nn.functional.silu(want) if silu else want).to(dtype)
    layout = "btd" if channel_last else "bdt"
    y, state = fidelta.causal_conv1d(x if channel_last else x.transpose(1, 2).contiguous(), weight, bias=bias,
                                     activation="silu" if silu else "none", layout=layout, initial_state=history,
                                     return_state=True)
    rtol, atol = DAO[name]
    torch.testing.assert_close(y.transpose(1, 2) if channel_last else y, want, rtol=rtol, atol=atol)
    assert torch.equal(state, full[..., T:].to(dtype))


@pytest.mark.parametrize("N,T,D,W,act", [(4, 500, 128, 3, True), (4, 1024, 200, 4, True), (4, 500, 128, 3, False)])
def test_fla_packed_grid(N, T, D, W, act, rng):
    torch = pytest.importorskip("torch")
    cuts = np.concatenate([[0], np.sort(rng.choice(np.arange(16, T), N - 1, replace=False)), [T]])
    x, weight = torch.randn(1, T, D), torch.randn(D, W)
    y = fidelta.causal_conv1d(x, weight, activation="silu" if act else "none", cu_seqlens=torch.from_numpy(cuts))
    for first, end in zip(cuts[:-1], cuts[1:]):
        part = torch.nn.functional.pad(x[0, first:end].T[None], (W - 1, 0))
        want = torch.nn.functional.conv1d(part, weight[:, None], groups=D)
        want = (torch.nn.functional.silu(want) if act else want)[0].T
        got = y[0, first:end]
        assert ((got - want).pow(2).mean().sqrt() / (want.pow(2).mean().sqrt() + 1e-8)) < 1e-3


def test_a_state_that_is_no_tensor_is_named():
    x = np.zeros((1, 3, 2), np.float32)
    with pytest.raises(TypeError, match="causal_conv1d: initial_state is list"):
        fidelta.causal_conv1d(x, np.zeros((2, 4), np.float32), initial_state=[1], return_state=True)
