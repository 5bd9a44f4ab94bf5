"""linear: every runnable variant against float64; a row of a batch is that row alone."""

import ctypes
import mmap

import numpy as np
import pytest
from conftest import BF16, F16, F32, REAL, contract, each_variant, f64, same_bits

from fidelta import _core

each = each_variant("linear")
IN_OUT = [(dtype, out) for dtype in REAL for out in REAL if out in (F32, dtype)]


def close(y, x, weight, bias=None):
    """|y - ref| <= 1e-5 sum |x||w|, and the contract's error of narrower outputs."""
    x, weight = f64(x), f64(weight)
    b = 0 if bias is None else f64(bias)
    want = x @ weight.T + b
    assert y.shape == want.shape
    if y.dtype == F32:
        room = 1e-5 * (np.abs(x) @ np.abs(weight).T) + 1e-6 * np.abs(b) + 1e-30
        assert (np.abs(f64(y) - want) <= room).all(), np.max(np.abs(f64(y) - want) / room)
    else:
        contract(y, want)


def run(x, weight, y, bias=None, **more):
    _core.linear(x, weight, bias, y, **more)
    return y


def inputs(rng, M, N, K, dtype=F32, weight_dtype=None):
    x = rng.standard_normal((M, K)).astype(dtype)
    return x, (rng.standard_normal((N, K)) / max(K, 1) ** 0.5).astype(weight_dtype or dtype)


@each
@pytest.mark.parametrize("K", (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 511, 512, 513, 1024, 1029))
@pytest.mark.parametrize("M", (1, 2, 9))
def test_inputs(M, K, variant, rng, guarded):
    x, weight = (guarded.copy(a) for a in inputs(rng, M, 7, K))
    close(run(x, weight, guarded.empty((M, 7), F32), variant=variant), x, weight)


@each
@pytest.mark.parametrize("N", (1, 2, 3, 4, 5, 15, 16, 17, 24, 48, 63, 64, 65, 96, 130))
@pytest.mark.parametrize("M", (1, 3, 10))
def test_outputs(M, N, variant, rng, guarded):
    x, weight = (guarded.copy(a) for a in inputs(rng, M, N, 40, F32, BF16))
    bias = guarded.copy(rng.standard_normal(N).astype(F32))
    close(run(x, weight, guarded.empty((M, N), F32), bias, variant=variant), x, weight, bias)


@each
@pytest.mark.parametrize("M", (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 47, 48, 49, 100))
def test_rows(M, variant, rng, guarded):
    """Each row of the batch has the bits of that row alone."""
    x, weight = (guarded.copy(a) for a in inputs(rng, M, 37, 700, BF16))
    y = run(x, weight, guarded.empty((M, 37), F32), variant=variant)
    close(y, x, weight)
    for i in range(M):
        same_bits(run(x[i], weight, guarded.empty((37,), F32), variant=variant), y[i])


@each
@pytest.mark.parametrize("weight_dtype", REAL, ids=str)
@pytest.mark.parametrize("dtype, out", IN_OUT, ids=str)
def test_dtypes(dtype, weight_dtype, out, variant, rng, guarded):
    x, weight = (guarded.copy(a) for a in inputs(rng, 20, 130, 300, dtype, weight_dtype))
    bias = guarded.copy(rng.standard_normal(130).astype(weight_dtype))
    close(run(x, weight, guarded.empty((20, 130), out), bias, variant=variant), x, weight, bias)


@each
@pytest.mark.parametrize("M, N, K", [(3, 2048, 5120), (1, 5120, 2048), (64, 96, 2048), (7, 48, 5120), (2, 24, 17408)])
def test_model_shapes(M, N, K, variant, rng, guarded):
    x, weight = (guarded.copy(a) for a in inputs(rng, M, N, K, BF16))
    close(run(x, weight, guarded.empty((M, N), F32), variant=variant), x, weight)
    contract(run(x, weight, guarded.empty((M, N), BF16), variant=variant), f64(x) @ f64(weight).T)


@each
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7])
def test_long_sums_of_one_sign(value, variant):
    """The worst case of a long running sum: every term alike, every rounding to the same side."""
    x, weight = np.full((2, 17408), value, F32), np.full((3, 17408), value, F32)
    close(run(x, weight, np.empty((2, 3), F32), variant=variant), x, weight)


@each
@pytest.mark.parametrize("shape", [(0, 9), (2, 0, 9), (9,), (1, 1, 9), (2, 3, 4, 9)], ids=str)
def test_leading_axes(shape, variant, rng, guarded):
    x, weight = rng.standard_normal(shape).astype(F32), rng.standard_normal((5, 9)).astype(F32)
    close(run(x, weight, guarded.empty((*shape[:-1], 5), F32), variant=variant), x, weight)


@each
def test_no_inputs_is_the_bias(variant, rng, guarded):
    bias = rng.standard_normal(5).astype(F32)
    y = run(np.empty((3, 0), F32), np.empty((5, 0), F32), guarded.empty((3, 5), F32), bias, variant=variant)
    same_bits(y, np.broadcast_to(bias, (3, 5)))


@each
def test_strides(variant, rng, guarded):
    """x and y inside fused rows with their batch axes swapped, weight rows apart, one bias for all, x repeated."""
    room_x = guarded.copy(rng.standard_normal((3, 4, 30)).astype(BF16))
    room_w = guarded.copy(rng.standard_normal((20, 40)).astype(F16))
    room_y = guarded.empty((4, 3, 25), F32)
    guarded.zones.append((room_y[..., :3], room_y[..., :3].tobytes()))
    guarded.zones.append((room_y[..., 23:], room_y[..., 23:].tobytes()))
    bias = np.broadcast_to(guarded.copy(np.array([0.5], F32)), (20,))
    x, weight, y = room_x[..., 5:28], room_w[:, 9:32], room_y[..., 3:23].swapaxes(0, 1)
    close(run(x, weight, y, bias, variant=variant), x, weight, bias)
    same = np.broadcast_to(x[0, 0], (50, 23))
    y = run(same, weight, guarded.empty((50, 20), F32), variant=variant)
    same_bits(y, np.broadcast_to(y[0], y.shape))


@each
def test_threads(variant, rng):
    x, weight = inputs(rng, 100, 300, 600, F32, BF16)
    y = run(x, weight, np.empty((100, 300), F32), num_threads=1, variant=variant)
    for threads in (2, 3, 16):
        same_bits(run(x, weight, np.empty((100, 300), F32), num_threads=threads, variant=variant), y)


@each
def test_large_and_not_finite(variant, rng, guarded):
    x, weight = inputs(rng, 4, 20, 50)
    y = run(x, weight, guarded.empty((4, 20), F32), variant=variant)
    x[1, 7], x[2, 49] = np.nan, np.inf
    weight[3] = 0
    z = run(x, weight, guarded.empty((4, 20), F32), variant=variant)
    assert np.isnan(z[1]).all() and np.isnan(z[2, 3]) and np.isinf(np.delete(z[2], 3)).all()
    other = np.delete(np.arange(20), 3)
    same_bits(z[0, other], y[0, other])
    same_bits(z[3, other], y[3, other])
    big = np.full((1, 4), 1e37, F32)
    assert run(big, np.full((1, 4), 8, F32), guarded.empty((1, 1), F32), variant=variant)[0, 0] == np.float32(3.2e38)


def fenced(x):
    """A copy that ends where a page ends, with a page behind it that nobody may read."""
    page = mmap.PAGESIZE
    room = (x.nbytes + page - 1) // page * page
    memory = mmap.mmap(-1, room + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + room), ctypes.c_size_t(page), 0) == 0
    made = np.frombuffer(memory, x.dtype, x.size, room - x.nbytes).reshape(x.shape)
    made[...] = x
    return made


@each
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_nothing_behind_the_end_is_read(dtype, variant, rng):
    for K in (1, 5, 17, 515):
        x, weight = (fenced(a) for a in inputs(rng, 3, 5, K, dtype))
        bias = fenced(rng.standard_normal(5).astype(dtype))
        y = run(x, weight, fenced(np.zeros((3, 5), dtype)), bias, variant=variant)
        close(y, x, weight, bias)
        _core.rms_norm(x, weight[0], fenced(np.zeros_like(x)), variant=variant)
        _core.rms_norm_gated(x, x, weight[0], fenced(np.zeros_like(x)), variant=variant)
        _core.gdn_gate(x, x, weight[0], weight[1], fenced(np.zeros(x.shape, F32)), fenced(np.zeros_like(x)), variant=variant)
