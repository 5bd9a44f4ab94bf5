"""l2norm, rms_norm and rms_norm_gated: every runnable variant against float64, and what must agree bit for bit."""

import math

import numpy as np
import pytest
from conftest import BF16, F16, F32, REAL, Guarded, contract, each_variant, f64, same_bits, variants

from fidelta import _core

IN_OUT = [(dtype, out) for dtype in REAL for out in REAL if out in (F32, dtype)]
WIDTHS = (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 1000, 2048, 5120)
KINDS = ("l2norm", "w", "1+w", "silu", "sigmoid")
OPS = {"l2norm": "l2norm", "w": "rms_norm", "1+w": "rms_norm", "silu": "rms_norm_gated", "sigmoid": "rms_norm_gated"}
each_kind = pytest.mark.parametrize("kind", KINDS)


def each_variant_of_norms():
    return each_variant("rms_norm_gated")


def oracle(kind, x, weight, z, eps):
    x, weight, z = f64(x), f64(weight), f64(z)
    squares = (x * x).sum(-1, keepdims=True)
    if kind == "l2norm":
        return x / np.sqrt(squares + eps)
    y = x / np.sqrt(squares / x.shape[-1] + eps)
    if kind in ("w", "1+w"):
        return y * (weight + (kind == "1+w"))
    with np.errstate(over="ignore"):
        return y * weight / (1 + np.exp(-z)) * (z if kind == "silu" else 1)


def run(kind, x, weight, z, y, eps=1e-6, **more):
    if kind == "l2norm":
        _core.l2norm(x, y, eps=eps, **more)
    elif kind in ("w", "1+w"):
        _core.rms_norm(x, weight, y, eps=eps, weight_kind=kind, **more)
    else:
        _core.rms_norm_gated(x, z, weight, y, eps=eps, activation=kind, **more)
    return y


def inputs(rng, rows, D, dtype=F32, size=1.0):
    x = (size * rng.standard_normal((rows, D))).astype(dtype)
    return x, (1 + 0.2 * rng.standard_normal(D)).astype(dtype), (2 * rng.standard_normal((rows, D))).astype(dtype)


@each_variant_of_norms()
@each_kind
@pytest.mark.parametrize("D", WIDTHS)
def test_widths(kind, D, variant, rng, guarded):
    x, weight, z = (guarded.copy(a) for a in inputs(rng, 5, D))
    y = run(kind, x, weight, z, guarded.empty(x.shape, F32), variant=variant)
    contract(y, oracle(kind, x, weight, z, 1e-6))


@each_variant_of_norms()
@each_kind
@pytest.mark.parametrize("dtype, out", IN_OUT, ids=str)
def test_dtypes(kind, dtype, out, variant, rng, guarded):
    x, weight, z = (guarded.copy(a) for a in inputs(rng, 40, 128, dtype))
    y = run(kind, x, weight, z, guarded.empty(x.shape, out), variant=variant)
    contract(y, oracle(kind, x, weight, z, 1e-6))


@each_variant_of_norms()
@pytest.mark.parametrize("mix", [(BF16, F32, F32), (F32, BF16, F16), (F16, F32, BF16)], ids=str)
def test_weight_and_gate_of_other_dtypes(mix, variant, rng, guarded):
    x, weight, z = (guarded.copy(a.astype(to)) for a, to in zip(inputs(rng, 9, 65), mix))
    for kind in KINDS[1:]:
        y = run(kind, x, weight, z, guarded.empty(x.shape, F32), variant=variant)
        contract(y, oracle(kind, x, weight, z, 1e-6))


@each_variant_of_norms()
@each_kind
@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7), (7,), (1, 1, 1, 7), (2, 3, 4, 7)], ids=str)
def test_leading_axes(kind, shape, variant, rng, guarded):
    x, z = rng.standard_normal(shape).astype(F32), rng.standard_normal(shape).astype(F32)
    weight = rng.standard_normal(7).astype(F32)
    y = run(kind, x, weight, z, guarded.empty(shape, F32), variant=variant)
    contract(y, oracle(kind, x, weight, z, 1e-6))


@each_variant_of_norms()
@each_kind
def test_strides(kind, variant, rng, guarded):
    """Heads inside a fused row, time and heads swapped, one row for all, a weight with gaps, an output with gaps."""
    D = 33
    fused = guarded.copy(rng.standard_normal((2, 5, 3 * D + 4)).astype(BF16))
    x = fused[:, :, 2:2 + 3 * D].reshape(2, 5, 3, D)
    assert np.shares_memory(x, fused)
    z = np.broadcast_to(guarded.copy(rng.standard_normal(D).astype(BF16)), x.shape)
    weight = guarded.copy(rng.standard_normal(2 * D).astype(BF16))[::2]
    room = guarded.empty((2, 3, 5, D + 3), F32)
    guarded.zones.append((room[..., D:], room[..., D:].tobytes()))
    y = run(kind, x, weight, z, room[..., :D].swapaxes(1, 2), variant=variant)
    contract(y, oracle(kind, x, weight, z, 1e-6))


@each_variant_of_norms()
@each_kind
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_in_place(kind, dtype, variant, rng, guarded):
    x, weight, z = inputs(rng, 6, 100, dtype)
    apart = run(kind, x, weight, z, guarded.empty(x.shape, dtype), variant=variant)
    same_bits(run(kind, x, weight, z, x, variant=variant), apart)


@each_variant_of_norms()
@each_kind
def test_rows_alone_and_threads(kind, variant, rng):
    """A row of a batch is the same bits as that row alone, on any number of threads."""
    x, weight, z = inputs(rng, 700, 128)
    y = run(kind, x, weight, z, np.empty_like(x), variant=variant, num_threads=1)
    for threads in (2, 3, 8):
        same_bits(run(kind, x, weight, z, np.empty_like(x), variant=variant, num_threads=threads), y)
    for i in (0, 1, 128, 129, 699):
        alone = run(kind, x[i:i + 1], weight, z[i:i + 1], np.empty((1, 128), F32), variant=variant)
        same_bits(alone[0], y[i])


@each_variant_of_norms()
@each_kind
@pytest.mark.parametrize("eps", [1e-6, 1e-12, 0.5])
def test_zero_vectors(kind, eps, variant, guarded):
    x = guarded.copy(np.zeros((3, 37), F32))
    y = run(kind, x, np.ones(37, F32), np.ones((3, 37), F32), guarded.empty(x.shape, F32), eps, variant=variant)
    assert not y.any()


@each_variant_of_norms()
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-20, 1e-12, 1e12, 1e19, 1e30, 3e37])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_sizes(size, eps, variant, rng, guarded):
    """Squares leave float32's range long before the norm does."""
    x, weight, z = inputs(rng, 4, 200, F32, size)
    for kind in KINDS:
        y = run(kind, x, weight, z, guarded.empty(x.shape, F32), eps, variant=variant)
        contract(y, oracle(kind, x, weight, z, eps), 1e-5 if size < 1e-37 else 5e-6)


@each_variant_of_norms()
def test_float16_extremes(variant, guarded):
    x = guarded.copy(np.full((2, 128), 65504, F16))
    y = run("w", x, np.ones(128, F16), None, guarded.empty(x.shape, F16), variant=variant)
    assert (y == 1).all()


@each_variant_of_norms()
def test_not_a_number_stays_in_its_row(variant, rng, guarded):
    x, weight, z = inputs(rng, 5, 37)
    clean = {kind: run(kind, x, weight, z, guarded.empty(x.shape, F32), variant=variant) for kind in KINDS}
    x[1, 36], x[3, 0] = np.nan, np.inf
    for kind in KINDS:
        y = run(kind, x, weight, z, guarded.empty(x.shape, F32), variant=variant)
        assert np.isnan(y[1]).all() and np.isnan(y[3, 0])
        for row in (0, 2, 4):
            same_bits(y[row], clean[kind][row])


@each_variant_of_norms()
def test_gate_of_any_size(variant, guarded):
    """silu and sigmoid of large gates neither overflow nor lose their sign."""
    z = np.array([[-1e30, -200, -104, -90, -88, -20, -1e-30, 0, 1e-30, 20, 88, 90, 104, 200, 1e30, 3]], F32)
    x = np.ones_like(z)
    for kind in ("silu", "sigmoid"):
        y = run(kind, x, np.ones(16, F32), z, guarded.empty(x.shape, F32), variant=variant)
        np.testing.assert_allclose(y, oracle(kind, x, np.ones(16), z, 1e-6), rtol=3e-6, atol=1e-36)


def test_variants_agree(rng):
    x, weight, z = inputs(rng, 50, 128)
    for kind in KINDS:
        results = [run(kind, x, weight, z, np.empty_like(x), variant=v) for v in variants(OPS[kind])]
        for other in results[1:]:
            np.testing.assert_allclose(other, results[0], rtol=2e-6, atol=1e-6 * math.sqrt(128))


def test_guard_zone_is_seen():
    memory = Guarded()
    made = memory.empty((4,), F32)
    np.lib.stride_tricks.as_strided(made, (5,))[4] = 0
    with pytest.raises(AssertionError):
        memory.check()
