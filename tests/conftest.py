"""What the tests share: inputs, memory with guard zones, the kernels to try, and the one measure of error."""

import math

import ml_dtypes
import numpy as np
import pytest

from fidelta import _core

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
REAL = (F32, BF16, F16)

GUARD = 64  # elements before and after every guarded array


def variants(op):
    """Names of the kernels of an op that this machine can run, best first."""
    return [variant for variant, runnable in _core.kernels()[op] if runnable]


def each_variant(op):
    return pytest.mark.parametrize("variant", variants(op))


@pytest.fixture
def rng():
    return np.random.default_rng(42)


# Error ---------------------------------------------------------------------------------------------------------------


def f64(x):
    if hasattr(x, "detach"):
        return x.detach().double().cpu().numpy()
    return np.asarray(x).astype(np.float64)


def error(got, want):
    """Relative root mean square error against a float64 reference; inf when got has NaN or Inf that want lacks."""
    got, want = f64(got), f64(want)
    assert got.shape == want.shape, f"shapes {got.shape} and {want.shape}"
    if got.size == 0:
        return 0.0
    if not np.isfinite(got).all():
        return math.inf
    size = math.sqrt(np.mean(want * want))
    miss = math.sqrt(np.mean((got - want) ** 2))
    return miss / max(size, 1e-30)  # what float32 cannot hold is zero


def contract(got, want, float32=5e-6, rounded=1.05):
    """The numerical contract: float32 within 5e-6, narrower types within 1.05 times the error of the correctly rounded
    reference."""
    dtype = np.dtype(got.dtype)
    limit = float32 if dtype == F32 else rounded * error(np.asarray(want).astype(dtype), want) + 1e-12
    found = error(got, want)
    assert found <= limit, f"relative RMS {found:.3g} beyond {limit:.3g} ({dtype})"


def same_bits(a, b):
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape
    assert a.tobytes() == b.tobytes(), f"{np.sum(a != b)} of {a.size} elements differ"


# Memory --------------------------------------------------------------------------------------------------------------


class Guarded:
    """Makes arrays that stand between guard zones. check() finds whoever wrote there; who reads there reads NaN, or an
    integer far out of range."""

    def __init__(self):
        self.zones = []

    def empty(self, shape, dtype):
        """A fresh array, all NaN (or far out of range)."""
        dtype = np.dtype(dtype)
        count = math.prod(shape)
        memory = np.empty(count + 2 * GUARD, dtype)
        memory[:] = True if dtype.kind == "b" else -(2**30) if dtype.kind in "iu" else np.nan
        for zone in (memory[:GUARD], memory[GUARD + count:]):
            self.zones.append((zone, zone.tobytes()))
        return memory[GUARD:GUARD + count].reshape(shape)

    def copy(self, x):
        made = self.empty(x.shape, x.dtype)
        made[...] = x
        return made

    def __call__(self, arguments):
        """The same arguments with every array in guarded memory."""
        return {name: self.copy(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}

    def check(self):
        for number, (zone, before) in enumerate(self.zones):
            assert zone.tobytes() == before, f"guard zone {number % 2} of array {number // 2} was written"


@pytest.fixture
def guarded():
    memory = Guarded()
    yield memory
    memory.check()


# Inputs --------------------------------------------------------------------------------------------------------------


def delta_inputs(rng, B=1, T=16, H=1, HV=1, K=16, V=16, dtype=F32, gate="log", beta_kind="value", gate_dtype=F32,
                 unit_keys=False):
    """Arguments of gated_delta_rule of a realistic size: widths scaled so that keys have norm about 1."""
    q = rng.standard_normal((B, T, H, K)) / math.sqrt(K)
    k = rng.standard_normal((B, T, H, K)) / math.sqrt(K)
    if unit_keys:
        k /= np.linalg.norm(k, axis=-1, keepdims=True) + 1e-30
        k *= 0.999  # so that rounding cannot lift the norm above 1
    v = rng.standard_normal((B, T, HV, V))
    a, b = rng.standard_normal((B, T, HV)), rng.standard_normal((B, T, HV))
    A_log = np.log(rng.uniform(0.01, 16, HV))
    dt_bias = rng.uniform(-4, 1, HV)
    made = {"q": q.astype(dtype), "k": k.astype(dtype), "v": v.astype(dtype), "gate": gate, "beta_kind": beta_kind}
    log = np.minimum(-np.exp(A_log) * np.log1p(np.exp(a + dt_bias)), 0)
    made["g"] = {"log": log, "factor": np.exp(log), "raw": a}[gate].astype(gate_dtype)
    made["beta"] = {"value": 1 / (1 + np.exp(-b)), "logit": b}[beta_kind].astype(gate_dtype)
    if gate == "raw":
        made.update(A_log=A_log.astype(F32), dt_bias=dt_bias.astype(dtype))
    return made


def states(rng, count, HV, K, V, dtype=F32, state_layout="kv"):
    shape = (count, HV, V, K) if state_layout == "vk" else (count, HV, K, V)
    return rng.standard_normal(shape).astype(dtype)


# Rows ----------------------------------------------------------------------------------------------------------------


def arrays_from_rows(op, extents, rng):
    """Every argument of an op made from its rows in _core.formats(): {name: array}, IN and OPT filled with small values,
    outputs with NaN. `extents` gives the dims; the first dtype of each row is taken."""
    made = {}
    for row in (row for row in _core.formats()[op]["rows"] if row["kind"] == "ARG"):
        shape = []
        for extent in row["shape"].split():
            shape += extents["*"] if extent == "*" else [evaluate(extent.rstrip("?"), extents)]
        dtype = row["dtypes"].split()[0]
        dtype = made[dtype[1:]].dtype if dtype.startswith("=") else np.dtype(getattr(ml_dtypes, dtype, dtype))
        if row["role"].startswith("OUT"):
            made[row["name"]] = np.full(shape, np.nan, dtype)
        elif dtype.kind in "iub":
            made[row["name"]] = np.zeros(shape, dtype)
        else:
            made[row["name"]] = (-np.abs(rng.standard_normal(shape)) / 4).astype(dtype)
    return made


def evaluate(extent, extents):
    """An extent of formats.h: a number or a name with steps /n *n +n -n, from left to right."""
    import re

    head, *steps = re.findall(r"[A-Za-z]\w*|\d+|[-+*/]\d+", extent)
    value = int(head) if head.isdigit() else extents[head]
    for step in steps:
        number = int(step[1:])
        value = {"+": value + number, "-": value - number, "*": value * number, "/": value // number}[step[0]]
    return value
