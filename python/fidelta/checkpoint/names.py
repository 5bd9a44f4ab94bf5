"""The tensors a Qwen3.5 text model needs, and which stored tensor is which.

Canonical names have no prefix: embed_tokens.weight, layers.0.linear_attn.conv1d.weight, norm.weight, lm_head.weight.
"""

from collections import Counter
from itertools import groupby
from typing import NamedTuple

from .sizes import read_sizes

REAL = ("BF16", "F16", "F32")
KNOWN_PARTS = ("visual", "mtp")  # the vision tower and the multi-token head: not of the text model, never unexpected


class Expected(NamedTuple):
    """What a tensor should be. `kind`: embedding, norm (weight of 1 + w), gated_norm (of w), linear, conv, gate, head."""

    shape: tuple
    dtypes: tuple
    kind: str


class NameMap(NamedTuple):
    """Which stored tensor is which.

    of               canonical -> stored name
    prefix           what comes before the canonical names, such as "model.language_model."
    repeated_prefix  how often one level of the prefix comes in a row ("model.language_model.language_model." is 2);
                     0 when none is repeated
    missing          canonical names without a stored tensor
    unexpected       stored names that belong to nothing
    ignored          stored names of the vision tower, the multi-token head, and of a head although it is tied
    wrong_shape      [(stored name, its shape, expected shape)]
    wrong_dtype      [(stored name, its dtype, expected dtypes)]
    """

    of: dict
    prefix: str
    repeated_prefix: int
    missing: list
    unexpected: list
    ignored: list
    wrong_shape: list
    wrong_dtype: list


def expected_tensors(checkpoint):
    """Canonical name -> Expected, for the text model that config.json describes; lm_head.weight only if it is not tied.

    CheckpointError when config.json lacks a field.
    """
    sizes = read_sizes(checkpoint)
    tensors = {"embed_tokens.weight": ((sizes.vocab, sizes.hidden), "embedding")}
    for layer, kind in enumerate(sizes.layer_types):
        mixer = _linear_attention(sizes) if kind == "linear_attention" else _full_attention(sizes)
        for name, what in {**mixer, **_mlp(sizes)}.items():
            tensors[f"layers.{layer}.{name}"] = what
    tensors["norm.weight"] = ((sizes.hidden,), "norm")
    if not sizes.tied:
        tensors["lm_head.weight"] = ((sizes.vocab, sizes.hidden), "head")
    return {name: Expected(shape, REAL, kind) for name, (shape, kind) in tensors.items()}


def _linear_attention(s):
    return {
        "linear_attn.in_proj_qkv.weight": ((s.conv_dim, s.hidden), "linear"),
        "linear_attn.in_proj_z.weight": ((s.value_dim, s.hidden), "linear"),
        "linear_attn.in_proj_b.weight": ((s.HV, s.hidden), "linear"),
        "linear_attn.in_proj_a.weight": ((s.HV, s.hidden), "linear"),
        "linear_attn.conv1d.weight": ((s.conv_dim, 1, s.W), "conv"),
        "linear_attn.A_log": ((s.HV,), "gate"),
        "linear_attn.dt_bias": ((s.HV,), "gate"),
        "linear_attn.norm.weight": ((s.V,), "gated_norm"),
        "linear_attn.out_proj.weight": ((s.hidden, s.value_dim), "linear"),
    }


def _full_attention(s):
    return {
        "self_attn.q_proj.weight": ((2 * s.heads * s.head_dim, s.hidden), "linear"),
        "self_attn.k_proj.weight": ((s.kv_heads * s.head_dim, s.hidden), "linear"),
        "self_attn.v_proj.weight": ((s.kv_heads * s.head_dim, s.hidden), "linear"),
        "self_attn.o_proj.weight": ((s.hidden, s.heads * s.head_dim), "linear"),
        "self_attn.q_norm.weight": ((s.head_dim,), "norm"),
        "self_attn.k_norm.weight": ((s.head_dim,), "norm"),
    }


def _mlp(s):
    return {
        "input_layernorm.weight": ((s.hidden,), "norm"),
        "post_attention_layernorm.weight": ((s.hidden,), "norm"),
        "mlp.gate_proj.weight": ((s.intermediate, s.hidden), "linear"),
        "mlp.up_proj.weight": ((s.intermediate, s.hidden), "linear"),
        "mlp.down_proj.weight": ((s.hidden, s.intermediate), "linear"),
    }


def name_map(checkpoint):
    """The NameMap of a checkpoint, whatever its prefix. CheckpointError when config.json lacks a field.

    The prefix is the one under which most tensors are found; a tensor elsewhere is unexpected, but for lm_head.weight,
    which may have any.
    """
    expected = expected_tensors(checkpoint)
    stored = {**checkpoint.unreadable, **checkpoint.tensors}
    ignored = [name for name in stored if any(part in KNOWN_PARTS for part in name.split("."))]
    split = {name: _split(name, expected) for name in stored if name not in set(ignored)}
    counts = Counter(prefix for prefix, canonical in split.values() if canonical and canonical != "lm_head.weight")
    prefix = min(counts, key=lambda prefix: (-counts[prefix], len(prefix)), default="")
    of, unexpected = {}, []
    for name in sorted(split, key=len):
        where, canonical = split[name]
        if name.endswith("lm_head.weight") and "lm_head.weight" not in expected:
            ignored.append(name)
        elif canonical and (where == prefix or canonical == "lm_head.weight") and canonical not in of:
            of[canonical] = name
        else:
            unexpected.append(name)
    of = {canonical: of[canonical] for canonical in expected if canonical in of}
    present = [(name, stored[name], expected[canonical]) for canonical, name in of.items()]
    return NameMap(
        of=of, prefix=prefix, repeated_prefix=_repeats(prefix),
        missing=[canonical for canonical in expected if canonical not in of],
        unexpected=sorted(unexpected), ignored=sorted(ignored),
        wrong_shape=[(name, info.shape, want.shape) for name, info, want in present if info.shape != want.shape],
        wrong_dtype=[(name, info.dtype, want.dtypes) for name, info, want in present if info.dtype not in want.dtypes])


def _split(name, expected):
    """(prefix, canonical) with the longest canonical name that `name` ends in; canonical is None when there is none."""
    start = 0
    while name[start:] not in expected:
        start = name.find(".", start) + 1
        if not start:
            return "", None
    return name[:start], name[start:]


def _repeats(prefix):
    most = max((len(list(run)) for _, run in groupby(prefix.split("."))), default=0)
    return most if most > 1 else 0
