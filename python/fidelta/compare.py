"""Holding implementations of an op against the float64 reference: how far off, from where on, how fast.

    report = fidelta.compare("gated_delta_rule", {"mine": my_function, "fidelta": "fidelta"}, dict(q=q, k=k, ...))
    print(report)          # a table; in Jupyter, naming the report draws it with a token x head error map
    report["mine"].first   # where it leaves the reference: sequence, token, head, chunk
"""

import base64
import html
import statistics
import struct
import time
import zlib
from dataclasses import asdict, dataclass, field

import numpy as np

from . import ops, reference
from .reference import _f64, _ints, _spans

# An output diverges where its error is beyond this part of the reference's size: some ulps of its type.
TOLERANCE = {"float64": 5e-5, "float32": 5e-5, "float16": 2e-3, "bfloat16": 1.6e-2}

MAP_TOKENS, MAP_HEADS = 512, 128  # an error map shows at most that many cells, each the worst of what it stands for


@dataclass
class Difference:
    """One output (or stage) against the reference."""

    rms: float      # root mean square of the difference over that of the reference
    max: float      # largest absolute difference
    cosine: float   # of the angle between the two, over all elements; NaN when the result is not finite
    nan: int
    inf: int
    tolerance: float

    @property
    def ok(self):
        return self.rms <= self.tolerance and not self.nan


@dataclass
class Result:
    """One implementation."""

    outputs: dict = field(default_factory=dict)  # name -> Difference
    stages: dict = field(default_factory=dict)   # name -> Difference, in the order they are computed
    first: dict = None                           # of the first output: row, sequence, token (in it), head, chunk; or index; None: nowhere
    first_stage: str = None
    seconds: float = None                        # median
    failure: str = None                          # the exception, when it could not run
    map: np.ndarray = field(default=None, repr=False)  # [tokens, heads] relative error

    @property
    def ok(self):
        return not self.failure and self.first is None and not self.first_stage and all(d.ok for d in self.outputs.values())


@dataclass
class Report:
    """What compare() found: report[name] is the Result of an implementation, report.ok whether all agree."""

    op: str
    results: dict
    shapes: str
    chunk: int = ops.CHUNK

    def __getitem__(self, name):
        return self.results[name]

    @property
    def ok(self):
        return all(result.ok for result in self.results.values())

    def as_dict(self):
        """Everything but the maps, for JSON."""
        results = {name: {key: value for key, value in asdict(result).items() if key != "map"} | {"ok": result.ok}
                   for name, result in self.results.items()}
        return {"op": self.op, "inputs": self.shapes, "ok": self.ok, "results": results}

    def _table(self):
        head = ["implementation", "output", "rel. RMS", "max", "cosine", "NaN", "Inf", "first divergence", "time"]
        rows = []
        for name, result in self.results.items():
            if result.failure:
                rows.append([name, "-", "-", "-", "-", "-", "-", result.failure, "-"])
            for number, (output, d) in enumerate(result.outputs.items()):
                first = (_place(result) if number == 0 else "none" if d.ok else "yes")
                rows.append([name if number == 0 else "", output, f"{d.rms:.2e}", f"{d.max:.2e}", f"{d.cosine:.9f}",
                             str(d.nan), str(d.inf), first, _duration(result.seconds) if number == 0 else ""])
        return head, rows

    def __str__(self):
        head, rows = self._table()
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
                 for row in (head, ["-" * width for width in widths], *rows)]
        return f"{self.op} against the float64 reference: {self.shapes}\n" + "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self):
        head, rows = self._table()

        def cells(row, tag):
            return "".join(f"<{tag} style='text-align:left'>{html.escape(cell)}</{tag}>" for cell in row)

        table = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
        maps = "".join(f"<figure style='margin:1em 0'><figcaption>{html.escape(name)}: relative error, token by head"
                       f"</figcaption>{_svg(result, self.chunk)}</figure>"
                       for name, result in self.results.items() if result.map is not None and result.map.size)
        return (f"<div><p><b>{self.op}</b> against the float64 reference: {html.escape(self.shapes)}</p>"
                f"<table><tr>{cells(head, 'th')}</tr>{table}</table>{maps}</div>")

    def save_html(self, path):
        """Writes the table and the maps as a page."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"<!doctype html><meta charset=utf-8><title>fidelta: {self.op}</title>"
                       f"<body style='font-family:sans-serif;max-width:70em;margin:2em auto'>{self._repr_html_()}")


def _place(result):
    parts = []
    if result.first_stage:
        parts.append(f"stage {result.first_stage}")
    if result.first is not None and "index" in result.first:
        parts.append(f"index {result.first['index']}")
    elif result.first is not None:
        parts.append("sequence {sequence}, token {token}, head {head} (chunk {chunk})".format(**result.first))
    return "; ".join(parts) or "none"


def _duration(seconds):
    for unit, size in (("s", 1), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


# Pictures --------------------------------------------------------------------------------------------------------------


def _coarse(error, rows, columns):
    """The worst of each cell, so that at most rows x columns are left."""
    for axis, most in ((0, rows), (1, columns)):
        extent = error.shape[axis]
        if extent > most:
            error = np.maximum.reduceat(error, np.arange(0, extent, -(-extent // most)), axis)
    return error


def _png(pixels):
    """An RGB image [rows, columns, 3] of bytes as PNG."""
    height, width = pixels.shape[:2]
    raw = b"".join(b"\0" + row.tobytes() for row in pixels)

    def part(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return (b"\x89PNG\r\n\x1a\n" + part(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
            + part(b"IDAT", zlib.compress(raw, 9)) + part(b"IEND", b""))


_STOPS = ((-8, (247, 251, 255)), (-6, (158, 202, 225)), (-4, (49, 130, 189)), (-2, (253, 174, 97)), (0, (165, 0, 38)))


def _colours(error):
    """Pale blue at 1e-8, blue at 1e-4, orange at 1e-2, dark red at 1 and beyond, magenta where it is not finite."""
    log = np.log10(np.clip(np.nan_to_num(error, nan=1.0, posinf=1.0), 1e-8, 1.0))
    at = [stop for stop, _ in _STOPS]
    pixels = np.stack([np.interp(log, at, [colour[c] for _, colour in _STOPS]) for c in range(3)], -1)
    pixels[~np.isfinite(error)] = (255, 0, 255)
    return pixels.round().astype(np.uint8)


def _svg(result, chunk):
    """The error map with its axes: tokens from left to right, heads from top to bottom, a tick a chunk."""
    tokens, heads = result.map.shape
    cells = _coarse(np.nan_to_num(result.map, nan=np.inf), MAP_TOKENS, MAP_HEADS)
    image = base64.b64encode(_png(_colours(cells.T))).decode()
    width, height = 640, min(max(16 * heads, 40), 320)
    step = chunk * max(1, -(-tokens // chunk // 10))
    ticks = "".join(f"<text x='{50 + width * t / tokens:.1f}' y='{height + 34}' font-size='11' fill='currentColor'>{t}</text>"
                    for t in range(0, tokens, step))
    legend = "".join(f"<rect x='{50 + 75 * i}' y='{height + 44}' width='12' height='12' fill='rgb{colour}'/>"
                     f"<text x='{66 + 75 * i}' y='{height + 54}' font-size='11' fill='currentColor'>1e{stop}</text>"
                     for i, (stop, colour) in enumerate((*_STOPS,)))
    legend += (f"<rect x='{50 + 75 * len(_STOPS)}' y='{height + 44}' width='12' height='12' fill='magenta'/>"
               f"<text x='{66 + 75 * len(_STOPS)}' y='{height + 54}' font-size='11' fill='currentColor'>NaN or Inf</text>")
    mark = ""
    if result.first is not None:
        x = 50 + width * (result.first["column"] + 0.5) / tokens
        mark = f"<path d='M{x:.1f} 18 l-5 -10 h10 z' fill='currentColor'><title>{_place(result)}</title></path>"
    return (f"<svg xmlns='http://www.w3.org/2000/svg' width='{width + 70}' height='{height + 62}'>"
            f"<image x='50' y='20' width='{width}' height='{height}' preserveAspectRatio='none' "
            f"style='image-rendering:pixelated' href='data:image/png;base64,{image}'/>"
            f"<text x='0' y='32' font-size='11' fill='currentColor'>head 0</text>"
            f"<text x='0' y='{height + 18}' font-size='11' fill='currentColor'>{heads - 1}</text>"
            f"{ticks}{legend}{mark}</svg>")


# Differences -----------------------------------------------------------------------------------------------------------


def _dtype_name(x):
    return str(getattr(x, "dtype", "float64")).removeprefix("torch.")


def _difference(got, want, tolerance):
    """The Difference of two float64 arrays of one shape. Elements that are not finite in both alike count as equal."""
    nan, inf = int(np.isnan(got).sum()), int(np.isinf(got).sum())
    alike = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        delta = np.where(alike, 0, got - want)
    finite = np.isfinite(got) & np.isfinite(want)
    a, b = got[finite], want[finite]
    size = np.sqrt(np.mean(b * b)) if b.size else 0.0
    rms = np.sqrt(np.mean(delta * delta)) if delta.size else 0.0
    scale = np.linalg.norm(a) * np.linalg.norm(b)
    return Difference(rms=float(np.nan_to_num(rms / max(size, 1e-30), nan=np.inf)),
                      max=float(np.nan_to_num(np.abs(delta).max(initial=0), nan=np.inf)),
                      cosine=float(a @ b / scale if scale else 1.0) if np.isfinite(got).all() else float("nan"), nan=nan, inf=inf, tolerance=tolerance)


def _by_token(got, want, op, inputs):
    """Relative error [row, token, head] of the first output; None for an op without time. A head of a convolution is a channel."""
    if not op.startswith(("gated", "causal")):
        return None
    with np.errstate(invalid="ignore"):
        delta, size = np.abs(got - want), np.abs(want)
    if op.startswith("causal"):
        swap = inputs.get("layout") == "bdt"
        delta, size = (x.swapaxes(1, 2) if swap else x for x in (delta, size))
    else:
        delta, size = (np.sqrt((x * x).sum(-1)) for x in (delta, size))
    usual = np.sqrt(np.mean(size[np.isfinite(size)] ** 2)) if size.size else 0.0
    error = delta / np.maximum(np.maximum(size, usual), 1e-30)
    return np.where(np.isnan(error), np.inf, error)


def _first_index(got, want, tolerance):
    """Where an output without time first leaves the reference: its first element in C order that is wrong or NaN."""
    size = np.abs(want)
    finite = size[np.isfinite(size)]
    usual = np.sqrt(np.mean(finite * finite)) if finite.size else 0.0
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want) <= tolerance * np.maximum(np.maximum(size, usual), 1e-30)
    beyond = np.argwhere(~np.where(np.isfinite(got) & np.isfinite(want), near, got == want))
    return {"index": beyond[0].tolist()} if len(beyond) else None


def _first(error, tolerance, inputs):
    """Where the relative error first passes the tolerance: earliest token of its sequence, then sequence, then head."""
    rows, tokens = error.shape[:2]
    beyond = error > tolerance
    best = None
    for sequence, (row, first, end) in enumerate(_spans(rows, tokens, inputs.get("cu_seqlens"), inputs.get("token_range"))):
        hits = np.argwhere(beyond[row, first:end])
        if len(hits) and (best is None or hits[0][0] < best["token"]):
            token, head = map(int, hits[0])
            best = {"row": row, "sequence": sequence, "token": token, "head": head, "chunk": token // ops.CHUNK,
                    "column": first + token}
    if best is None and beyond.any():  # in a token that belongs to no sequence
        row, token, head = map(int, np.argwhere(beyond)[0])
        best = {"row": row, "sequence": None, "token": token, "head": head, "chunk": None, "column": token}
    return best


# Implementations -------------------------------------------------------------------------------------------------------


def _output_names(op, inputs):
    if op == "gdn_gate":
        return ["g", "beta"]
    if op == "gated_delta_rule_step":
        return ["o", "token_states"]
    names = ["o" if op == "gated_delta_rule" else "y"]
    if inputs.get("return_state") or inputs.get("final_state") is not None:
        names.append("state")
    if inputs.get("snapshot_every") is not None or inputs.get("snapshot_positions") is not None:
        names.append("snapshots")
    return names


def _copies(inputs):
    """Inputs of a run of their own: in-place ops write them."""
    return {name: x.clone() if hasattr(x, "clone") else x.copy() if hasattr(x, "copy") else x for name, x in inputs.items()}


def _run(function, op, inputs):
    """(outputs by name, stages by name, seconds) of one run."""
    given = _copies(inputs)
    start = time.perf_counter()
    answer = function(**given)
    seconds = time.perf_counter() - start
    names, stages = _output_names(op, inputs), {}
    if isinstance(answer, dict):
        stages = answer
        outputs = {name: answer[key] for name in names
                   for key in (name, {"state": "final_state"}.get(name, name)) if key in answer}
        stages = {name: value for name, value in answer.items() if name not in outputs and name != "final_state"}
    else:
        outputs = dict(zip(names, answer if isinstance(answer, (tuple, list)) else (answer,)))
    if op.endswith("_step"):
        outputs["state"] = given["state"]
    return {name: value for name, value in outputs.items() if value is not None}, stages, seconds


def _named(op, name):
    """The implementation a name stands for."""
    if callable(name):
        return name
    kind, _, detail = name.partition("/")
    if kind == "reference":
        return getattr(reference, op)
    if kind == "fidelta":
        function = getattr(ops, op)
        return (lambda **inputs: function(**inputs, variant=detail)) if detail else function
    if kind == "torch":
        from ._oracles import torch_oracle

        return torch_oracle(op, detail)
    raise ValueError(f"compare: implementation {name!r} is unknown; expected a function, \"reference\", \"fidelta\", "
                     f"\"fidelta/VARIANT\", \"torch\" or \"torch/recurrent\"")


def _stage_differences(stages, op, inputs, tolerance):
    if not stages or op != "gated_delta_rule":
        return {}
    outputs = ("out", "final_state", "snapshots", "snapshot_every", "snapshot_positions", "write_slots", "return_state",
               "out_dtype", "state_dtype", "check_values", "num_threads", "variant")
    own = {name: x for name, x in inputs.items() if name not in outputs}
    width = next((x.shape[-1] for name, x in stages.items() if name in ("A", "T")), ops.CHUNK)
    want = reference.gated_delta_rule_stages(**own, chunk_size=width)
    found = {}
    for name in (name for name in want if name in stages):
        got = _f64(stages[name])
        if got.shape != want[name].shape:
            raise ValueError(f"compare: stage {name} has shape {got.shape}; expected {want[name].shape}")
        found[name] = _difference(got, want[name], tolerance or TOLERANCE.get(_dtype_name(stages[name]), 5e-5))
    return found


def compare(op, implementations, inputs, *, stages=None, tolerance=None, repeat=3):
    """Runs implementations of an op on the same inputs and holds each against the float64 reference.

    op               a name such as "gated_delta_rule", or the function
    implementations  {label: function or name}, or a list of names. A function takes the op's keyword arguments and
                     returns the op's result, or a dict of it and stages (the names of
                     reference.gated_delta_rule_stages). Names: "fidelta", "fidelta/avx2" and other variants,
                     "reference", "torch" (torch's or transformers' own code), "torch/recurrent"
    inputs           {argument: value} of the op; copied for each run, so that nothing is changed
    stages           {label: {stage: tensor}}: stages of an implementation that does not return them
    tolerance        relative error beyond which an output diverges; left out: by its dtype (TOLERANCE)
    repeat           timed runs; the median is reported

    Returns a Report. An implementation that raises is reported, not raised.
    """
    op = getattr(op, "__name__", op)
    if op not in ops.OPS:
        raise ValueError(f"compare: op is {op!r}; expected one of {', '.join(ops.OPS)}")
    if not isinstance(implementations, dict):
        implementations = {name: name for name in implementations}
    functions = {label: _named(op, name) for label, name in implementations.items()}
    wanted = _run(getattr(reference, op), op, {name: _f64(x) if name == "state" else x for name, x in inputs.items()})[0]
    results = {label: _judge(label, function, op, inputs, wanted, (stages or {}).get(label, {}), tolerance, max(repeat, 1))
               for label, function in functions.items()}
    shapes = ", ".join(f"{name} {list(x.shape)} {_dtype_name(x)}" for name, x in inputs.items()
                       if hasattr(x, "shape") and name in ("q", "v", "x", "a", "weight"))
    return Report(op, results, shapes)


def _judge(label, function, op, inputs, wanted, stages, tolerance, repeat):
    result = Result()
    try:
        outputs, own_stages, seconds = _run(function, op, inputs)
        times = [seconds] + [_run(function, op, inputs)[2] for _ in range(repeat - 1)]
        result.seconds = statistics.median(times)
        for number, (name, want) in enumerate(wanted.items()):
            if name not in outputs:
                continue
            got, want = _f64(outputs[name]), _f64(want)
            if got.shape != want.shape:
                raise ValueError(f"{name} has shape {got.shape}; expected {want.shape}")
            limit = tolerance or TOLERANCE.get(_dtype_name(outputs[name]), 5e-5)
            result.outputs[name] = _difference(got, want, limit)
            error = _by_token(got, want, op, inputs) if number == 0 else None
            if error is not None:
                result.first = _first(error, limit, inputs)
                result.map = error.max(0, initial=0)
            elif number == 0:
                result.first = _first_index(got, want, limit)
        result.stages = _stage_differences({**own_stages, **stages}, op, inputs, tolerance)
        result.first_stage = next((name for name, d in result.stages.items() if not d.ok), None)
    except Exception as problem:  # a foreign function may fail in any way; that is a finding
        result.failure = f"{type(problem).__name__}: {problem}"
    return result
