"""gdn_gate: every runnable variant against float64."""

import numpy as np
import pytest
from conftest import BF16, F16, F32, REAL, contract, each_variant, f64, same_bits

from fidelta import _core

HEADS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 32, 48, 64, 96)


def oracle(a, b, A_log, dt_bias):
    """g and beta."""
    with np.errstate(over="ignore"):
        return -np.exp(f64(A_log)) * np.logaddexp(0, f64(a) + f64(dt_bias)), 1 / (1 + np.exp(-f64(b)))


def inputs(rng, rows, HV, dtype=F32):
    a, b = rng.standard_normal((rows, HV)), 2 * rng.standard_normal((rows, HV))
    A_log, dt_bias = np.log(rng.uniform(0.01, 16, HV)), rng.uniform(-4, 1, HV)
    return [x.astype(dtype) for x in (a, b, A_log, dt_bias)]


def run(memory, a, b, A_log, dt_bias, beta_dtype=F32, **more):
    g, beta = memory.empty(a.shape, F32), memory.empty(a.shape, beta_dtype)
    _core.gdn_gate(a, b, A_log, dt_bias, g, beta, **more)
    return g, beta


@each_variant("gdn_gate")
@pytest.mark.parametrize("HV", HEADS)
def test_heads(HV, variant, rng, guarded):
    arguments = [guarded.copy(x) for x in inputs(rng, 5, HV)]
    for got, want in zip(run(guarded, *arguments, variant=variant), oracle(*arguments)):
        contract(got, want)


@each_variant("gdn_gate")
@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6), (6,), (2, 3, 4, 6)], ids=str)
def test_shapes_and_dtypes(shape, dtype, variant, rng, guarded):
    a, b = rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape).astype(dtype)
    A_log, dt_bias = rng.standard_normal(6).astype(F32), rng.standard_normal(6).astype(dtype)
    for beta_dtype in {F32, dtype}:
        g, beta = run(guarded, a, b, A_log, dt_bias, beta_dtype, variant=variant)
        want_g, want_beta = oracle(a, b, A_log, dt_bias)
        contract(g, want_g)
        contract(beta, want_beta)


@each_variant("gdn_gate")
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_rounding_of_transformers(dtype, variant, rng, guarded):
    """beta rounded to b's dtype, then widened."""
    arguments = inputs(rng, 50, 48, dtype)
    _, exact = run(guarded, *arguments, variant=variant)
    _, rounded = run(guarded, *arguments, rounding="hf", variant=variant)
    same_bits(rounded, exact.astype(dtype).astype(F32))


@each_variant("gdn_gate")
def test_strides(variant, rng, guarded):
    """a and b side by side in one projection, in pairs, or head first; outputs head first; one rate for all heads."""
    fused = guarded.copy(rng.standard_normal((3, 7, 2 * 10 + 1)).astype(BF16))
    A_log = np.broadcast_to(guarded.copy(np.array([0.5], F32)), (10,))
    dt_bias = guarded.copy(rng.standard_normal(30).astype(BF16))[::3]
    layouts = [(fused[..., 1:11], fused[..., 11:]), (fused[..., 0:20:2], fused[..., 1:20:2])]
    first = guarded.copy(rng.standard_normal((3, 10, 7)).astype(F32)).swapaxes(1, 2)
    layouts.append((first, first))
    for a, b in layouts:
        g, beta = guarded.empty((3, 10, 7), F32).swapaxes(1, 2), guarded.empty((10, 3, 7), F32).transpose(1, 2, 0)
        _core.gdn_gate(a, b, A_log, dt_bias, g, beta, variant=variant)
        want_g, want_beta = oracle(a, b, A_log, dt_bias)
        contract(g, want_g)
        contract(beta, want_beta)


@each_variant("gdn_gate")
def test_far_ends(variant, guarded):
    """softplus is x far to the right and exp x far to the left; nothing overflows on the way."""
    a = np.array([[-1e30, -200, -103, -80, -30, -5, -1e-3, 0, 1e-3, 5, 19.9, 20.1, 30, 100, 1e30, 60]], F32)
    zeros = np.zeros(16, F32)
    g, beta = run(guarded, a, a, zeros, zeros, variant=variant)
    want_g, want_beta = oracle(a, a, zeros, zeros)
    np.testing.assert_allclose(g, want_g, rtol=1e-6, atol=1e-36)
    np.testing.assert_allclose(beta, want_beta, rtol=1e-6, atol=1e-36)
    assert (g <= 0).all() and (beta >= 0).all() and (beta <= 1).all()


@each_variant("gdn_gate")
def test_every_size_of_softplus_and_sigmoid(variant, guarded):
    a = np.linspace(-87, 87, 100_000, dtype=F32).reshape(-1, 10)
    zeros = np.zeros(10, F32)
    g, beta = run(guarded, a, a, zeros, zeros, variant=variant)
    want_g, want_beta = oracle(a, a, zeros, zeros)
    np.testing.assert_allclose(g, want_g, rtol=5e-7)
    np.testing.assert_allclose(beta, want_beta, rtol=5e-7)


@each_variant("gdn_gate")
def test_not_a_number_stays(variant, rng, guarded):
    a, b, A_log, dt_bias = inputs(rng, 3, 17)
    a[1, 3], b[2, 16] = np.nan, np.nan
    g, beta = run(guarded, a, b, A_log, dt_bias, variant=variant)
    assert (np.isnan(g) == np.isnan(a)).all() and (np.isnan(beta) == np.isnan(b)).all()


@each_variant("gdn_gate")
def test_rows_alone_and_threads(variant, rng, guarded):
    a, b, A_log, dt_bias = inputs(rng, 500, 48, BF16)
    g, beta = run(guarded, a, b, A_log, dt_bias, num_threads=1, variant=variant)
    for threads in (2, 5):
        for one, other in zip(run(guarded, a, b, A_log, dt_bias, num_threads=threads, variant=variant), (g, beta)):
            same_bits(one, other)
    for i in (0, 86, 499):
        alone = run(guarded, a[i], b[i], A_log, dt_bias, variant=variant)
        same_bits(alone[0], g[i])
        same_bits(alone[1], beta[i])
