"""The pool: concurrent callers, a forked child, Ctrl-C, and the environment's cap on the processor."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import F32, same_bits

from fidelta import _core


def work(rng, M=64, N=512, K=512):
    return rng.standard_normal((M, K)).astype(F32), rng.standard_normal((N, K)).astype(F32)


def product(x, weight, threads):
    y = np.empty((len(x), len(weight)), F32)
    _core.linear(x, weight, None, y, num_threads=threads)
    return y


def test_many_callers_at_once(rng):
    """One caller has the pool, the others work alone: all get the same bits."""
    x, weight = work(rng)
    want, wrong = product(x, weight, 1), []

    def caller():
        for _ in range(50):
            if product(x, weight, 4).tobytes() != want.tobytes():
                wrong.append(1)

    callers = [threading.Thread(target=caller) for _ in range(6)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert not wrong


def test_more_threads_than_cores_and_than_items(rng):
    x, weight = work(rng)
    want = product(x, weight, 1)
    for threads in (2, 7, 64, 256):
        for _ in range(5):
            same_bits(product(x, weight, threads), want)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_child(rng):
    """The parent's threads do not exist in the child; it makes its own."""
    x, weight = work(rng)
    want = product(x, weight, 4).tobytes()
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os._exit(0 if product(x, weight, 4).tobytes() == want else 1)
        deadline = time.monotonic() + 30
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                pytest.fail("the child hangs")
            time.sleep(0.005)
        assert done[1] == 0
        assert product(x, weight, 4).tobytes() == want


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_while_another_thread_computes(rng):
    x, weight = work(rng, 256)
    want, stop = product(x, weight, 2).tobytes(), threading.Event()

    def busy():
        while not stop.is_set():
            product(x, weight, 2)

    other = threading.Thread(target=busy)
    other.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                os._exit(0 if product(x, weight, 2).tobytes() == want else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        other.join()


SLOW = """
import os, signal, threading, time
import numpy as np
from fidelta import _core
row = np.ones(8192, np.float32)
x = w = np.broadcast_to(row, (8192, 8192))  # 1.1 TFLOP: many seconds
y = np.empty((8192, 8192), np.float32)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
start = time.monotonic()
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    _core.linear(x, w, None, y, num_threads=THREADS)
except KeyboardInterrupt:
    print(time.monotonic() - start)
_core.linear(x[:2], w[:3], None, y[:2, :3], num_threads=THREADS)
assert (y[:2, :3] == 8192).all()
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_interrupted(threads):
    """Ctrl-C stops a call long before it is done, and the next call works."""
    code = SLOW.replace("THREADS", str(threads))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2


def in_child(code, cap):
    environment = {**os.environ, "FIDELTA_CPU": cap}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


def test_cap_that_nobody_knows_is_refused():
    done = in_child("import fidelta._core", "avx3")
    assert done.returncode != 0
    assert 'ValueError: environment variable FIDELTA_CPU is "avx3"; expected one of scalar, ' in done.stderr


@pytest.mark.skipif("FIDELTA_CPU" in os.environ, reason="already capped")
@pytest.mark.parametrize("cap", ["scalar", "avx2", "avx512", "neon", ""])
def test_cap(cap):
    """The cap takes away what is better, and never adds anything."""
    order = [variant for variant, _ in _core.kernels()["linear"]]
    here = [variant for variant, runs in _core.kernels()["linear"] if runs]
    if cap and cap not in order:
        pytest.skip("another architecture")
    done = in_child("from fidelta import _core; print(*[v for v, runs in _core.kernels()['linear'] if runs])", cap)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [v for v in here if not cap or order.index(v) >= order.index(cap)]


def test_cap_is_read_at_import():
    code = '''
import os
from fidelta import _core
os.environ["FIDELTA_CPU"] = "avx2"
print(*[variant for variant, runs in _core.kernels()["linear"] if runs])
'''
    done = in_child(code, "scalar")
    assert done.stdout.split() == ["scalar"], done.stderr
