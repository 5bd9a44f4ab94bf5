"""Checks of the files, the names and the values. Each takes what it needs and yields Findings."""

import math
import re

import numpy as np

from ..model.settings import ASSUMED, assumed
from .findings import Finding

SCALE_RATIO = 8.0  # a tensor's std against the median of its type in the other layers
ZERO_ROWS = 0.10  # share of zero rows in a block of rows
OFFSET_MEAN = 0.75  # mean of norm weights that are stored as an offset from one
PLAIN_MEAN = 0.30  # mean of the gated norm's weights, stored plain
EPS = (1e-8, 1e-3)  # of the norms
A_LOG = (-12.0, 6.0)
DT_BIAS = (-40.0, 40.0)

NORM = re.compile(r"(^norm|_?layernorm|_norm|linear_attn\.norm)\.weight$")


def files(checkpoint):
    for problem in checkpoint.problems:
        yield Finding(problem.code, str(problem.where), problem.text)


def config(text_config, settings):
    for field in assumed(text_config):
        yield Finding("config-assumed", field, f"config.json does not give it; {ASSUMED[field]:.15g} is assumed", "absent", ASSUMED[field])
    if not EPS[0] <= settings.eps <= EPS[1]:
        yield Finding("config-range", "rms_norm_eps", f"is {settings.eps:g}; trained models have {EPS[0]:g} .. {EPS[1]:g}",
                      settings.eps, str(EPS))


def names(name_map, checkpoint):
    """A name that may lie in a file that was not read is no finding beside the file's own."""
    for canonical in name_map.missing:
        stored = name_map.prefix + canonical if canonical != "lm_head.weight" else canonical
        nothing_known = checkpoint.unknown and not name_map.of  # not even the prefix
        if not nothing_known and not checkpoint.may_be_lost(stored):
            yield Finding("name-missing", stored, "the config asks for this tensor and no file has it", "absent", "present")
    for stored, got, expected in name_map.wrong_shape:
        yield Finding("shape-mismatch", stored, f"shape {tuple(got)}; the config gives {tuple(expected)}",
                      str(tuple(got)), str(tuple(expected)))
    for stored, got, expected in name_map.wrong_dtype:
        yield Finding("dtype-mismatch", stored, f"stored as {got}; a 16- or 32-bit float is expected", str(got), str(expected))
    if name_map.repeated_prefix:
        yield Finding("prefix-repeated", name_map.prefix, f"a prefix level stands {name_map.repeated_prefix} times",
                      name_map.repeated_prefix, 1)
    for stored in name_map.unexpected:
        yield Finding("name-unexpected", stored, "no part of the model reads this tensor")


def values(statistics):
    """NaN, Inf, zeros and constants of every tensor, whatever its part in the model."""
    for stored, s in statistics.items():
        if s.nan:
            yield Finding("value-nan", stored, f"{s.nan} NaN in {math.prod(s.shape)} values", s.nan, 0)
        if s.inf:
            yield Finding("value-inf", stored, f"{s.inf} infinite values in {math.prod(s.shape)}", s.inf, 0)


def blocks_of(canonical, sizes):
    """Names and row ranges of the blocks that a fused tensor is made of."""
    if canonical.endswith(("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight")):
        key, value = sizes.key_dim, sizes.value_dim
        return {"q": (0, key), "k": (key, 2 * key), "v": (2 * key, 2 * key + value)}
    return {"": (0, None)}


def emptiness(name_map, statistics, sizes):
    for canonical, stored in name_map.of.items():
        s = statistics.get(stored)
        if s is None or s.zero_rows is None:
            continue
        if NORM.search(canonical):
            nothing = 0 if canonical.endswith("linear_attn.norm.weight") else -1
            if s.constant and s.low == nothing and not s.nan:
                yield Finding("value-zero", stored, f"all {s.shape[0]} weights are {nothing}, so the norm gives zero", s.low, "varied")
            continue
        if len(s.shape) == 1:
            if s.constant and s.shape[0] > 2 and not s.nan and not canonical.endswith(".bias"):
                yield Finding("value-constant", stored, f"all {s.shape[0]} values are {s.low:g}", s.low, "varied")
            continue
        if s.zero_rows.all():
            yield Finding("value-zero", stored, f"all {s.shape[0]} rows are zero", s.shape[0], 0)
        elif s.constant and not s.nan:
            yield Finding("value-constant", stored, f"every value is {s.low:g}", s.low, "varied")
        elif canonical not in ("embed_tokens.weight", "lm_head.weight"):
            for block, (first, end) in blocks_of(canonical, sizes).items():
                rows = s.zero_rows[first:end]
                if len(rows) and rows.mean() > ZERO_ROWS:
                    what = f"{block} block: " if block else ""
                    yield Finding("value-zero-rows", stored, f"{what}{int(rows.sum())} of {len(rows)} rows are zero",
                                  float(rows.mean()), ZERO_ROWS)


def scales(name_map, statistics):
    """Every matrix beside the same matrix of the other layers."""
    groups = {}
    for canonical, stored in name_map.of.items():
        match = re.match(r"layers\.(\d+)\.(.+)", canonical)
        s = statistics.get(stored)
        if match and s is not None and len(s.shape) > 1 and s.std > 0 and not s.constant:
            groups.setdefault(match[2], []).append((stored, s.std))
    for members in groups.values():
        if len(members) < 3:
            continue
        for stored, std in members:
            others = float(np.median([other for name, other in members if name != stored]))
            ratio = std / others
            if not 1 / SCALE_RATIO <= ratio <= SCALE_RATIO:
                yield Finding("scale-outlier", stored, f"std {std:.3g} is {ratio:.3g} times that of the other layers ({others:.3g})",
                              ratio, SCALE_RATIO)


def norms(name_map, statistics):
    """Norm weights that are stored as an offset from one must have a mean near 0, the gated norm's near 1."""
    offset = [(stored, statistics[stored]) for canonical, stored in name_map.of.items()
              if NORM.search(canonical) and not canonical.endswith("linear_attn.norm.weight") and stored in statistics]
    plain = [(stored, statistics[stored]) for canonical, stored in name_map.of.items()
             if canonical.endswith("linear_attn.norm.weight") and stored in statistics]
    layers = [(stored, s) for stored, s in offset if "layernorm" in stored]
    if layers and np.median([s.mean for _, s in layers]) > OFFSET_MEAN:
        for stored, s in layers:
            if s.mean > OFFSET_MEAN:
                yield Finding("norm-shifted", stored, f"mean {s.mean:.3f}: one was added already, and the model adds it again",
                              s.mean, OFFSET_MEAN)
    else:
        usual = float(np.median([s.mean for _, s in layers])) if layers else 0.0
        for stored, s in layers:
            if s.mean > usual + OFFSET_MEAN and abs(s.mean - usual - 1) < 0.35 and s.low > 0:
                yield Finding("norm-shifted", stored, f"mean {s.mean:.3f} beside {usual:.3f} in the other layers: one was added",
                              s.mean, usual + OFFSET_MEAN)
    for stored, s in plain:
        if abs(s.mean) < PLAIN_MEAN and s.low < 0:
            yield Finding("norm-unshifted", stored, f"mean {s.mean:.3f}; a plain norm weight has a mean near 1", s.mean, PLAIN_MEAN)


def gates(name_map, statistics):
    for canonical, stored in name_map.of.items():
        s = statistics.get(stored)
        limits = A_LOG if canonical.endswith(".A_log") else DT_BIAS if canonical.endswith(".dt_bias") else None
        if s is not None and limits and (s.low < limits[0] or s.high > limits[1]):
            yield Finding("gate-range", stored, f"values from {s.low:.3g} to {s.high:.3g}; expected {limits[0]:g} .. {limits[1]:g}",
                          max(s.high, -s.low), str(limits))
