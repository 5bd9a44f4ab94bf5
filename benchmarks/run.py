"""Times our ops, each beside a baseline in the same run: ours and theirs by turns, median and spread of warm runs.

    python benchmarks/run.py                 all cases, and a dated file under benchmarks/results
    python benchmarks/run.py gdn             the cases whose name contains "gdn"
    python benchmarks/run.py --no-file --rounds 3

Before a case is timed its two results are held against each other: a wrong kernel has no time.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

import fidelta
from fidelta import _core
from shapes import LAYERS, gdn_bytes, gdn_flops

HERE = Path(__file__).resolve().parent
BF16 = torch.bfloat16
SAMPLE = 0.03  # seconds that one sample should last at least


def plain(function):
    """The torch code itself, in case an installed package has taken its place."""
    return getattr(function, "__wrapped__", function)


class Case:
    """ours() and theirs() do the same work; goal is the ratio asked for, or for an overhead the microseconds."""

    def __init__(self, name, ours, theirs, baseline, *, flops=None, bytes=None, goal=None, tolerance=0.02):
        self.name, self.ours, self.theirs, self.baseline = name, ours, theirs, baseline
        self.flops, self.bytes, self.goal, self.tolerance = flops, bytes, goal, tolerance

    def check(self):
        if self.tolerance is None:
            return
        got, expected = (torch.as_tensor(f()).double() for f in (self.ours, self.theirs))
        error = float((got - expected).norm() / expected.norm())
        if not error < self.tolerance:
            sys.exit(f"{self.name}: the two results differ by {error:.3g} (relative L2); not timed")


# --------------------------------------------------------------------------------------------------------- the cases


def gdn_inputs(B, T, layer, dtype=BF16):
    """q, k, v as views of one packed projection, as a layer has them; a quarter of the gates does not decay."""
    packed = torch.randn(B, T, layer.channels, dtype=dtype)
    q, k, v = packed.split([layer.H * layer.K, layer.H * layer.K, layer.HV * layer.V], -1)
    q, k, v = q.unflatten(-1, (layer.H, -1)), k.unflatten(-1, (layer.H, -1)), v.unflatten(-1, (layer.HV, -1))
    g = -torch.rand(B, T, layer.HV) * (torch.rand(B, T, layer.HV) > 0.25)
    return q, k, v, g, torch.rand(B, T, layer.HV).to(dtype)


def gdn_prefill(name, layer, T, goal=None):
    x = gdn_inputs(1, T, layer)
    out, state = torch.empty(1, T, layer.HV, layer.V, dtype=BF16), torch.empty(1, layer.HV, layer.K, layer.V)
    theirs = plain(hf.torch_chunk_gated_delta_rule)
    return Case(
        name,
        lambda: fidelta.gated_delta_rule(*x, qk_l2norm=True, final_state=state, out=out)[0],
        lambda: theirs(*x, output_final_state=True, use_qk_l2norm_in_kernel=True)[0],
        "transformers' torch_chunk_gated_delta_rule",
        flops=gdn_flops(T, layer),
        bytes=gdn_bytes(T, layer, states=1),
        goal=goal,
    )


def gdn_decode(name, layer, B, goal=None):
    x = gdn_inputs(B, 1, layer)
    out, state = torch.empty(B, 1, layer.HV, layer.V, dtype=BF16), torch.zeros(B, layer.HV, layer.K, layer.V)
    theirs = plain(hf.torch_recurrent_gated_delta_rule)
    kept = {"state": state.clone()}

    def recurrent():
        o, kept["state"] = theirs(
            *x, initial_state=kept["state"], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return o

    return Case(
        name,
        lambda: fidelta.gated_delta_rule_step(*x, state, qk_l2norm=True, out=out),
        recurrent,
        "transformers' torch_recurrent_gated_delta_rule",
        flops=7 * B * layer.HV * layer.K * layer.V,
        bytes=gdn_bytes(B, layer, states=2 * B),
        goal=goal,
    )


def conv_prefill(name, layer, T, layout, goal=None):
    D, W = layer.channels, layer.W
    x = torch.randn(1, T, D, dtype=BF16) if layout == "btd" else torch.randn(1, D, T, dtype=BF16)
    weight = torch.randn(D, W, dtype=BF16)
    first = x.transpose(1, 2) if layout == "btd" else x  # torch's conv wants [B,D,T]
    out = torch.empty_like(x)

    def theirs():
        y = F.silu(F.conv1d(first, weight[:, None], padding=W - 1, groups=D)[..., :T])
        return y.transpose(1, 2) if layout == "btd" else y

    return Case(
        name,
        lambda: fidelta.causal_conv1d(x, weight, activation="silu", layout=layout, out=out),
        theirs,
        "torch's F.conv1d and F.silu",
        flops=(2 * W + 4) * T * D,
        bytes=2 * 2 * T * D,
        goal=goal,
    )


def conv_decode(name, layer, B):
    D, W = layer.channels, layer.W
    x, weight = torch.randn(B, D, 1, dtype=BF16), torch.randn(D, W, dtype=BF16)
    state, other, out = torch.zeros(B, D, W, dtype=BF16), torch.zeros(B, D, W, dtype=BF16), torch.empty(B, D, 1, dtype=BF16)
    theirs = plain(hf.causal_conv1d_update)
    return Case(
        name,
        lambda: fidelta.causal_conv1d_step(x, weight, state, activation="silu", layout="bdt", out=out),
        lambda: theirs(x, other, weight, None, "silu"),
        "transformers' causal_conv1d_update",
        flops=(2 * W + 4) * B * D,
        bytes=2 * B * D * (2 + 2 * W),
    )


def linear(name, M, N, K):
    x, weight, out = torch.randn(M, K, dtype=BF16), torch.randn(N, K, dtype=BF16) / K**0.5, torch.empty(M, N, dtype=BF16)
    return Case(
        name,
        lambda: fidelta.linear(x, weight, out=out),
        lambda: F.linear(x, weight),
        "torch's F.linear",
        flops=2 * M * N * K,
        bytes=2 * (M * K + N * K + M * N),
    )


def rms_norm(name, M, D):
    x, weight, out = torch.randn(M, D, dtype=BF16), torch.randn(D, dtype=BF16), torch.empty(M, D, dtype=BF16)
    return Case(
        name,
        lambda: fidelta.rms_norm(x, weight, out=out),
        lambda: F.rms_norm(x, (D,), weight, 1e-6),
        "torch's F.rms_norm",
        flops=4 * M * D,
        bytes=4 * M * D,
    )


def overhead(name, library):
    """The whole public call, checks included, with `out` given, on tensors of real shapes without a sequence: no work."""
    new = (lambda *shape: np.zeros(shape, np.float32)) if library == "numpy" else (lambda *shape: torch.zeros(*shape))
    add = np.add if library == "numpy" else torch.add
    x, y, out = new(1, 8), new(1, 8), new(1, 8)
    rows, rows_out = new(0, 2048), new(0, 2048)
    token, history, weight, target = new(0, 1, 8192), new(0, 8192, 3), new(8192, 4), new(0, 1, 8192)
    q, v, o = new(0, 1, 16, 128), new(0, 1, 32, 128), new(0, 1, 32, 128)
    gate, state = new(0, 1, 32), new(0, 32, 128, 128)
    calls = {
        "l2norm": lambda: fidelta.l2norm(rows, out=rows_out),
        "causal_conv1d_step": lambda: fidelta.causal_conv1d_step(token, weight, history, out=target),
        "gated_delta_rule": lambda: fidelta.gated_delta_rule(q, q, v, gate, gate, initial_state=state, out=o),
        "gated_delta_rule_step": lambda: fidelta.gated_delta_rule_step(q, q, v, gate, gate, state, out=o),
    }
    for op, call in calls.items():
        yield Case(
            f"{name} {op} {library}", call, lambda: add(x, y, out=out), f"{library}.add with out", goal="<= 2 us", tolerance=None
        )


def cases():
    small, middle = LAYERS["Qwen3.6-35B-A3B"], LAYERS["Qwen3.6-27B"]
    return [
        *overhead("call", "numpy"),
        *overhead("call", "torch"),
        gdn_prefill("gdn prefill T=2048 H=16 HV=32", small, 2048, goal=6),
        gdn_prefill("gdn prefill T=512 H=16 HV=32", small, 512),
        gdn_prefill("gdn prefill T=2048 H=16 HV=48", middle, 2048),
        gdn_decode("gdn decode B=1 HV=32", small, 1, goal=4),
        gdn_decode("gdn decode B=8 HV=32", small, 8, goal=4),
        gdn_decode("gdn decode B=32 HV=32", small, 32, goal=4),
        conv_prefill("conv prefill T=2048 D=8192 btd", small, 2048, "btd", goal=15),
        conv_prefill("conv prefill T=2048 D=8192 bdt", small, 2048, "bdt"),
        conv_decode("conv decode B=8 D=8192", small, 8),
        linear("linear M=1 N=8192 K=2048", 1, 8192, 2048),
        linear("linear M=8 N=8192 K=2048", 8, 8192, 2048),
        linear("linear M=256 N=8192 K=2048", 256, 8192, 2048),
        rms_norm("rms_norm M=2048 D=2048", 2048, 2048),
    ]


# ----------------------------------------------------------------------------------------------------------- timing


def sample(function, count):
    start = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - start) / count


def count_for(function):
    """Calls that fill one sample; also warms up."""
    function()
    once = min(sample(function, 1) for _ in range(2))
    return max(1, min(200_000, int(SAMPLE / max(once, 1e-7))))


def summary(times, case):
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    row = {"median_s": median, "spread": (high - low) / median, "best_s": min(times), "samples": len(times)}
    if case.flops:
        row["GFLOP/s"] = case.flops / median / 1e9
    if case.bytes:
        row["GB/s"] = case.bytes / median / 1e9
    return row


def measure(case, rounds):
    with torch.inference_mode():
        case.check()
        pair = (case.ours, case.theirs)
        counts = [count_for(f) for f in pair]
        times = [[], []]
        for _ in range(rounds):
            for place in (0, 1):
                times[place].append(sample(pair[place], counts[place]))
    ours, theirs = (summary(t, case) for t in times)
    ratios = [b / a for a, b in zip(*times)]
    return {
        "name": case.name, "baseline": case.baseline, "ours": ours, "theirs": theirs,
        "ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios), "goal": case.goal,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- report


def machine(threads):
    cpu, flags = platform.processor() or platform.machine(), []
    if os.path.exists("/proc/cpuinfo"):
        lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
        lines = {key.strip(): value.strip() for key, value in lines.items()}
        cpu = lines.get("model name", cpu)
        flags = [f for f in lines.get("flags", lines.get("Features", "")).split() if f.startswith(("avx", "amx", "fma", "f16c", "asimd", "sve"))]
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "features": flags,
        "kernels": {op: [variant for variant, runs in rows if runs] for op, rows in _core.kernels().items()},
        "threads": threads,
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fidelta": fidelta.__version__,
        "commit": commit,
    }


def seconds(s):
    return f"{s * 1e6:.2f} us" if s < 1e-3 else f"{s * 1e3:.2f} ms"


def line(row):
    ours, theirs = row["ours"], row["theirs"]
    rate = "  ".join(f"{ours[unit]:.1f} {unit}" for unit in ("GFLOP/s", "GB/s") if unit in ours)
    goal = "" if row["goal"] is None else f"  (goal {row['goal']})"
    return (
        f"{row['name']:38} {seconds(ours['median_s']):>11} +-{ours['spread']:4.0%}  {rate:32}"
        f" {seconds(theirs['median_s']):>11}  x {row['ratio']:.2f}{goal}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-file", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    fidelta.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    about, rows = machine(arguments.threads), []
    print(f"{about['cpu']}, {arguments.threads} threads; ours, its rates, the baseline, how many times faster\n")
    for case in cases():
        if not arguments.name or any(word in case.name for word in arguments.name):
            rows.append(measure(case, arguments.rounds))
            print(line(rows[-1]), flush=True)
    if not arguments.no_file:
        today = datetime.date.today().isoformat()
        file = HERE / "results" / f"{today}-{about['cpu'].replace('(R)', '').replace(' ', '-').lower()}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"date": today, "machine": about, "rows": rows}, indent=1) + "\n")
        print(f"\nwritten to {os.path.relpath(file)}")


if __name__ == "__main__":
    main()
