"""Whose tensors come in: NumPy, ml_dtypes, torch, and anything with DLPack; and what they leave behind: no reference,
no leak, no lock."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import fidelta
from dlpack_shim import Shim
from fidelta import _core

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
EPS = 1e-6


def expected(x):
    x = np.asarray(x).astype(np.float64)
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + EPS)


def close(y, x, limit=1e-6):
    np.testing.assert_allclose(np.asarray(y).astype(np.float64), expected(x), atol=limit)


@pytest.fixture
def x():
    return np.random.default_rng(3).standard_normal((3, 5, 8)).astype("float32")


# NumPy ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-6), ("float16", 1e-3), (ml_dtypes.bfloat16, 8e-3)])
def test_numpy_dtypes(x, dtype, limit):
    x = x.astype(dtype)
    y = np.empty_like(x)
    _core.l2norm(x, y)
    close(y, x, limit)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, "float64", "uint16", "int8", "complex64",
                                   "S4", "datetime64[s]", "object", [("a", "f4")]])
def test_numpy_dtypes_refused(x, dtype):
    bad = np.zeros(x.shape, dtype)
    with pytest.raises(_core.DTypeError) as info:
        _core.l2norm(bad, np.empty_like(x))
    assert str(info.value) == f"l2norm: x has dtype {bad.dtype}; expected float32, float16 or bfloat16"


@pytest.mark.parametrize("dtype", [">f4", ">f2"])
def test_big_endian_is_refused(x, dtype):
    with pytest.raises(_core.DTypeError, match=f"x has dtype {dtype}; expected float32"):
        _core.l2norm(x.astype(dtype), np.empty_like(x))


@pytest.mark.parametrize("dtype", ["int32", "int64", "intc", "long", "longlong"])
def test_every_name_of_the_integers(dtype):
    x, y = np.ones((1, 4, 2), "f"), np.empty((1, 4, 2), "f")
    with pytest.raises(ValueError, match=r"cu_seqlens\[2\] is 5; expected T with T = 4 from x"):
        _core.causal_conv1d(x, np.ones((2, 2), "f"), cu_seqlens=np.array([0, 1, 5], dtype), y=y)


def test_strided_views(x):
    y = np.zeros_like(x)
    for view in (np.s_[::2], np.s_[:, 1:4], np.s_[:, :, 2:6], np.s_[1:2, ::3, 1:]):
        _core.l2norm(x[view], y[view])
        close(y[view], x[view])
    turned = x.transpose(1, 0, 2)
    _core.l2norm(turned, y.transpose(1, 0, 2))
    close(y, x)


def test_fortran_order(x):
    weight = np.asfortranarray(np.arange(12.0, dtype="float32").reshape(3, 4))
    a = np.asfortranarray(x[..., :4])
    with pytest.raises(_core.LayoutError, match="expected stride 1 in the last axis"):
        _core.rms_norm(a, weight[0], np.empty(a.shape, "f"))
    a, y = np.ascontiguousarray(a), np.empty(a.shape, "f")
    _core.rms_norm(a, weight[1], y)  # a row of it is strided, which weight may be
    want = np.empty_like(y)
    _core.rms_norm(a, np.ascontiguousarray(weight[1]), want)
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 0), (3, 0), (0,)])
def test_zero_size(shape):
    _core.l2norm(np.empty(shape, "f"), np.empty(shape, "f"))
    _core.l2norm(np.empty(shape, "f")[::-1], np.empty(shape, "f"))


def test_axes_of_one_have_no_stride():
    """Of an axis with one element the stride is anything, also negative or odd."""
    x = np.lib.stride_tricks.as_strided(np.ones(8, "f"), (1, 1, 8), (-400, 12, 4))
    y = np.lib.stride_tricks.as_strided(np.ones(8, "f"), (1, 1, 8), (0, 2, 4))
    _core.l2norm(x, y)
    close(y, x)


def test_stride_between_elements():
    """A field of a packed record: its rows do not stand a whole number of elements apart."""
    record = np.zeros(4, np.dtype([("a", "u1"), ("b", "f4", (8,)), ("c", "u1")]))
    with pytest.raises(_core.LayoutError, match="x has a stride of 34 bytes; expected a multiple of its element size 4"):
        _core.l2norm(record["b"], np.empty((4, 8), "f"))


def test_many_axes():
    shape = (1,) * 7 + (4,)
    _core.l2norm(np.ones(shape, "f"), np.ones(shape, "f"))
    with pytest.raises(_core.ShapeError, match=r"x has 9 axes; expected \(\* D\)"):
        _core.l2norm(np.ones((1, *shape), "f"), np.ones((1, *shape), "f"))


def test_masked_arrays_are_refused(x):
    masked, text = np.ma.masked_greater(x, 1), "{0} is a masked array, whose mask would be lost; expected a plain array: "
    for wrong in (masked, np.ma.array(x), type("Own", (np.ma.MaskedArray,), {})(x)):
        with pytest.raises(TypeError) as info:
            _core.l2norm(wrong, np.empty_like(x))
        assert str(info.value) == "l2norm: " + text.format("x") + "pass x.filled(value) or x.data"
    weight = np.ma.array(np.ones(8, "f"))
    with pytest.raises(TypeError, match="^rms_norm: " + text.format("weight")):
        fidelta.rms_norm(x, weight)
    fidelta.rms_norm(masked.filled(0), weight.data)


def test_subclass(x):
    y = np.empty_like(x)
    _core.l2norm(x.view(type("Array", (np.ndarray,), {})), y)
    close(y, x)


@pytest.mark.parametrize("value", [1, 1.0, "x", [1.0], None, object(), np.float32(1), {}, b"1234", memoryview(b"1234")])
def test_what_is_no_tensor(x, value):
    with pytest.raises(TypeError, match="l2norm: x is "):
        _core.l2norm(value, x)


DTYPES_OF_NOTHING = ["float31", "", "finfo", "__name__", "f4,,", 1, 1.5, object(), {"a": 1}, [], False]


@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=needs_torch)])
def test_result_dtypes_that_mean_nothing(x, library):
    make = np.asarray if library == "numpy" else torch.as_tensor
    foreign = [np.dtype("float32"), np.float32] if library == "torch" else [torch.float32] if torch else []
    x, w = make(x), make(np.ones((2, 8), "f"))
    q, g = x.reshape(1, 3, 5, 8), make(-np.ones((1, 3, 5), "f"))
    calls = {"linear: out_dtype": lambda d: fidelta.linear(x, w, out_dtype=d),
             "gated_delta_rule: out_dtype": lambda d: fidelta.gated_delta_rule(q, q, q, g, g, out_dtype=d),
             "gated_delta_rule: state_dtype": lambda d: fidelta.gated_delta_rule(q, q, q, g, g, return_state=True, state_dtype=d)}
    for wrong in DTYPES_OF_NOTHING + foreign:
        for said, run in calls.items():
            with pytest.raises(_core.DTypeError) as info:
                run(wrong)
            text = str(info.value)
            assert text.startswith(f"{said.split(':')[0]}: "), text
            if wrong not in ([], "finfo"):  # NumPy reads these as a dtype, which no op takes
                assert text.startswith(f"{said} is {wrong!r}; expected a name such as \"float32\", or a dtype of "), text
    for right in ("float32", None, x.dtype):
        for run in calls.values():
            run(right)


# DLPack ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("strides", [True, False])
@pytest.mark.parametrize("offset", [0, 8])
def test_shims(x, versioned, strides, offset):
    y = np.empty_like(x)
    a, b = (Shim(t, versioned, strides=strides, offset=offset) for t in (x, y))
    _core.l2norm(a, b)
    close(y, x)
    assert (a.released, b.released) == (1, 1)


@pytest.mark.parametrize("versioned", [True, False])
def test_shims_are_released_after_an_error(x, versioned):
    a, b = Shim(x, versioned), Shim(x[:2], versioned)
    with pytest.raises(_core.ShapeError):
        _core.l2norm(a, b)
    assert (a.released, b.released) == (1, 1)
    a = Shim(x.astype("f8"), versioned)
    with pytest.raises(_core.DTypeError, match="x has dtype float64"):
        _core.l2norm(a, x)
    assert a.released == 1


def test_bfloat16_shim(x):
    x = x.astype(ml_dtypes.bfloat16)
    y = np.empty_like(x)
    _core.l2norm(Shim(x), Shim(y, versioned=False))
    close(y, x, 8e-3)


def test_read_only_flag(x):
    y = np.empty_like(x)
    _core.l2norm(Shim(x, readonly=True), y)
    with pytest.raises(_core.LayoutError, match="l2norm: out is read-only; expected writable memory"):
        _core.l2norm(x, Shim(y, readonly=True))


def test_host_memory_of_gpu_libraries(x):
    """Pinned memory is host memory."""
    y = np.empty_like(x)
    _core.l2norm(Shim(x, device=(3, 0)), Shim(y, device=(11, 0)))
    close(y, x)


def test_foreign_versions_and_capsules(x):
    a = Shim(x, major=2)
    with pytest.raises(TypeError, match="x has DLPack version 2; expected 1"):
        _core.l2norm(a, x)
    assert a.released == 1
    with pytest.raises(TypeError, match="x has a __dlpack__ that returns a PyCapsule; expected a fresh DLPack capsule"):
        _core.l2norm(Shim(x, name=b"used_dltensor_versioned"), x)
    with pytest.raises(_core.DTypeError, match="DLPack code 2, 32 bits, 4 lanes"):
        _core.l2norm(Shim(x, lanes=4), x)

    class Wrong:
        def __dlpack__(self, **options):
            return 5

    with pytest.raises(TypeError, match="x has a __dlpack__ that returns a int; expected a fresh DLPack capsule"):
        _core.l2norm(Wrong(), x)


def test_producer_that_fails(x):
    class Fails:
        def __init__(self, error):
            self.error = error

        def __dlpack__(self, **options):
            raise self.error

    with pytest.raises(TypeError, match="^l2norm: x is a Fails that cannot be read through DLPack: no room$") as info:
        _core.l2norm(Fails(BufferError("no room\nbacktrace")), x)
    assert type(info.value.__cause__) is BufferError
    with pytest.raises(KeyboardInterrupt):
        _core.l2norm(Fails(KeyboardInterrupt()), x)


def test_exchange_table_of_another_kind(x):
    """A type attribute that is no capsule, or a table of a version to come, is passed over for __dlpack__."""
    y = np.empty_like(x)

    class Odd(Shim):
        __dlpack_c_exchange_api__ = 5

    _core.l2norm(Odd(x), y)
    close(y, x)
    table = (ctypes.c_uint64 * 8)(99)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

    class Newer(Shim):
        __dlpack_c_exchange_api__ = new(ctypes.addressof(table), b"dlpack_exchange_api", None)

    _core.l2norm(Newer(x), y)


# torch ----------------------------------------------------------------------------------------------------------------


@needs_torch
@pytest.mark.parametrize("dtype, limit", [("float32", 1e-6), ("float16", 1e-3), ("bfloat16", 8e-3)])
def test_torch(x, dtype, limit):
    a = torch.from_numpy(x).to(getattr(torch, dtype))
    y = torch.empty_like(a)
    _core.l2norm(a, y)
    close(y.float(), a.float(), limit)


class Older:
    """torch as a library that offers __dlpack__ alone."""

    def __init__(self, tensor, versioned):
        self.tensor, self.versioned = tensor, versioned

    def __dlpack__(self, **options):
        if options and not self.versioned:
            raise TypeError("unexpected keyword argument")
        return self.tensor.__dlpack__(**options)


@needs_torch
@pytest.mark.parametrize("versioned", [True, False])
def test_torch_without_the_exchange_table(x, versioned):
    a, y = torch.from_numpy(x), torch.empty(x.shape)
    _core.l2norm(Older(a, versioned), Older(y, versioned))
    close(y, x)
    with pytest.raises(TypeError, match="x is a Older that cannot be read through DLPack: .*gradient"):
        _core.l2norm(Older(a.clone().requires_grad_(), versioned), y)


@needs_torch
def test_torch_and_numpy_together(x):
    y = np.empty_like(x)
    _core.l2norm(torch.from_numpy(x), y)
    close(y, x)
    _core.l2norm(x, torch.from_numpy(y[:]))
    with pytest.raises(_core.LayoutError, match="out overlaps x"):
        _core.l2norm(torch.from_numpy(x[1:]), x[:2])


@needs_torch
def test_torch_views(x):
    a, y = torch.from_numpy(x), torch.zeros(3, 5, 16)
    _core.l2norm(a.transpose(0, 1), y.transpose(0, 1)[..., 4:12])
    close(y[..., 4:12], x)
    assert y[..., :4].abs().sum() == 0 and y[..., 12:].abs().sum() == 0
    _core.l2norm(a[:0], y[:0, :, :8])


@needs_torch
def test_torch_that_cannot_be_read(x):
    y = torch.empty(4)
    good = torch.ones(4)
    z = torch.randn(4, dtype=torch.cfloat)
    cases = [
        (good.clone().requires_grad_(), ValueError, r"x requires grad; expected a tensor .*: pass x.detach\(\)"),
        (torch.nn.Parameter(good), ValueError, "x requires grad"),
        (z.conj().imag, ValueError, r"x has its negative bit set; expected the values in memory: pass x.resolve_neg\(\)"),
        (z.conj(), _core.DTypeError, "x has dtype complex64"),
        (good.to_sparse(), TypeError, "x is a Tensor that cannot be read through DLPack: [^\n]*$"),
        (good.to("meta"), TypeError, "x is a Tensor that cannot be read through DLPack: [^\n]*$"),
        (good.to(torch.float8_e4m3fn), _core.DTypeError, "x has dtype float8_e4m3fn; expected float32"),
        (good.to(torch.uint16), _core.DTypeError, "x has dtype uint16; expected float32"),
        (good.double(), _core.DTypeError, "x has dtype float64; expected float32"),
    ]
    for tensor, exception, text in cases:
        with pytest.raises(exception, match=text) as info:
            _core.l2norm(tensor, y)
        assert type(info.value) is exception
        with pytest.raises(exception):
            _core.l2norm(good, tensor)
    with torch.no_grad(), pytest.raises(ValueError, match="requires grad"):
        _core.l2norm(torch.nn.Parameter(good), y)
    _core.l2norm(torch.nn.Parameter(good).detach(), y)
    _core.rms_norm(good[None], z.imag, y[None])  # strided, but without the bit


# What stays behind ----------------------------------------------------------------------------------------------------


def makers():
    yield pytest.param(lambda a: a.copy(), id="numpy")
    yield pytest.param(lambda a: Shim(a.copy()), id="versioned")
    yield pytest.param(lambda a: Shim(a.copy(), versioned=False), id="unversioned")
    if torch is not None:
        yield pytest.param(lambda a: torch.from_numpy(a.copy()), id="torch")


def calls(make, x):
    """Good and bad calls in every way."""
    a, y, short = make(x), make(x), make(x[:1])
    yield lambda: _core.l2norm(a, y)
    yield lambda: _core.l2norm(a, y, eps=1e-6, num_threads=1, variant="scalar")
    yield lambda: _core.l2norm(a, short)
    yield lambda: _core.l2norm(a, y, 1e-6, 2, "other")
    yield lambda: _core.l2norm(a, y, nothing=5)
    yield lambda: _core.l2norm(a, y, y=y)
    yield lambda: _core.l2norm(a, [1])
    yield lambda: _core.l2norm(a, 10**30)
    yield lambda: _core.l2norm(a)
    yield lambda: _core.l2norm(a, y, 10**400)
    yield lambda: _core.which_path("l2norm", a, y)
    yield lambda: _core.formats()
    yield lambda: _core.kernels()


@pytest.mark.parametrize("make", list(makers()))
def test_reference_counts(x, make):
    a, y = make(x), make(x)
    before = [sys.getrefcount(o) for o in (a, y, type(a), None, True, EPS)]
    for _ in range(1000):
        _core.l2norm(a, y, EPS)
        try:
            _core.l2norm(a, y, EPS, variant="other")
        except ValueError:
            pass
    after = [sys.getrefcount(o) for o in (a, y, type(a), None, True, EPS)]
    assert all(abs(n - m) < 100 for n, m in zip(before, after)), (before, after)
    assert before[:2] == after[:2]


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("make", list(makers()))
def test_no_leak(x, make):
    ways = list(calls(make, x))

    def turn(times):
        for _ in range(times):
            for way in ways:
                try:
                    way()
                except (TypeError, ValueError, OverflowError):
                    pass
        gc.collect()

    turn(300)
    before, objects = resident(), len(gc.get_objects())
    turn(1000)
    assert resident() - before < 2 << 20
    assert len(gc.get_objects()) - objects < 100


def test_memory_lives_while_the_kernel_runs(x):
    """The arrays are borrowed: the call itself holds them, whatever else lets go."""
    for _ in range(100):
        y = np.empty((200, 256), "f")
        _core.l2norm(np.ones((200, 256), "f"), y)
        assert abs(y[199, 255] - 1 / 16) < 1e-6


def test_threads_calling_at_once():
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal((50 + i, 64)).astype("f") for i in range(8)]
    wrong = []

    def work(i):
        y = np.empty_like(inputs[i])
        for n in range(200):
            y.fill(np.nan)
            _core.l2norm(inputs[i], y, num_threads=1 + n % 3)
            if not np.abs(y - expected(inputs[i])).max() < 1e-6:
                wrong.append(i)
            try:
                _core.l2norm(inputs[i], y[:1])
                wrong.append(-i)
            except _core.ShapeError as e:
                if str(inputs[i].shape[0]) not in str(e):
                    wrong.append(str(e))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_use_after_fork():
    x = np.random.default_rng(1).standard_normal((500, 64)).astype("f")
    y = np.empty_like(x)
    _core.l2norm(x, y, num_threads=2)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            z = np.empty_like(x)
            _core.l2norm(x, z, num_threads=2)
            os._exit(0 if np.array_equal(y, z) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    _core.l2norm(x, y, num_threads=2)
    close(y, x)


def test_the_lock_is_free_while_a_kernel_runs():
    """Another Python thread gets on while a long call computes."""
    x = np.ones((1500, 2048), "f")
    weight, y = np.ones((512, 2048), "f"), np.empty((1500, 512), "f")
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    _core.linear(x, weight, None, y, num_threads=1, variant="scalar")
    end = time.perf_counter()
    done.set()
    thread.join()
    inside = [t for t in ticks if start < t < end]
    assert end - start < 0.02 or len(inside) >= 3


INTERRUPTED = """
import signal, threading, time, os, numpy as np
from fidelta import _core
x, weight, y = np.ones((20000, 4096), "f"), np.ones((4096, 4096), "f"), np.empty((20000, 4096), "f")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
start = time.perf_counter()
try:
    _core.linear(x, weight, None, y, num_threads=THREADS, variant="scalar")
    print("finished")
except KeyboardInterrupt:
    print("interrupted" if time.perf_counter() - start < 10 else "late")
_core.l2norm(x[:4], y[:4, :])
"""


@pytest.mark.parametrize("count", [1, 2])
def test_interrupt(count):
    code = INTERRUPTED.replace("THREADS", str(count))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "interrupted", done.stdout + done.stderr


def test_environment_of_the_thread_count():
    code = "from fidelta import _core; print(_core.get_num_threads())"

    def threads(**environment):
        clean = {k: v for k, v in os.environ.items() if k not in ("FIDELTA_NUM_THREADS", "OMP_NUM_THREADS")}
        run = subprocess.run([sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True)
        return int(run.stdout)

    assert threads(FIDELTA_NUM_THREADS="3", OMP_NUM_THREADS="5") == 3
    assert threads(OMP_NUM_THREADS="5") == threads(OMP_NUM_THREADS="5,2") == 5
    assert threads(OMP_NUM_THREADS="many") == threads(OMP_NUM_THREADS="-1") == threads(FIDELTA_NUM_THREADS="") == threads()
    if hasattr(os, "sched_getaffinity"):
        assert threads() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("value", ["many", "0", "-1", "257", "2.5", " 2", "3,2", "99999999999999999999"])
def test_thread_count_that_means_nothing_stops_the_import(value):
    environment = {**os.environ, "FIDELTA_NUM_THREADS": value}
    run = subprocess.run([sys.executable, "-c", "import fidelta._core"], env=environment, capture_output=True, text=True)
    message = f'ValueError: environment variable FIDELTA_NUM_THREADS is "{value}"; expected a whole number 1 .. 256'
    assert run.returncode != 0 and message in run.stderr


def test_import_twice_in_one_process():
    import importlib

    module = sys.modules.pop("fidelta._core")
    try:
        again = importlib.import_module("fidelta._core")
        assert again.ShapeError is module.ShapeError
        again.l2norm(np.ones((1, 4), "f"), np.ones((1, 4), "f"))
    finally:
        sys.modules["fidelta._core"] = module
