"""What of config.json steers the computation, and what cannot be computed here."""

from typing import NamedTuple

from ..checkpoint import CheckpointError, read_sizes


class ModelError(ValueError):
    """A checkpoint that cannot be run, or input that the model cannot take; one line."""


ROPE_TYPES = ("default", "mrope")
ASSUMED = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6}  # as transformers does


class Settings(NamedTuple):
    """Numbers beside the extents: `rotary` is how many dims of a head are rotated."""

    eps: float
    rope_theta: float
    rotary: int


def read_settings(checkpoint):
    """(Sizes, Settings) of a Qwen3.5 text model; ModelError for any other model, naming what is not supported."""
    config = checkpoint.text_config
    for refuse in (_refuse_architecture, _refuse_quantised, _refuse_options):
        reason = refuse(checkpoint, config)
        if reason:
            raise ModelError(f"{checkpoint.path}: {reason}")
    try:
        sizes = read_sizes(checkpoint)
        told = {**ASSUMED, **config, **(config.get("rope_parameters") or {})}
        factor = _number(told, "partial_rotary_factor")
        settings = Settings(_number(told, "rms_norm_eps"), _number(told, "rope_theta"), int(sizes.head_dim * factor))
    except CheckpointError as error:
        raise ModelError(f"{checkpoint.path}: {error}") from None
    rotary, width = settings.rotary, sizes.head_dim
    if rotary % 2 or rotary > width:
        raise ModelError(f"{checkpoint.path}: config.json: partial_rotary_factor {factor} of head_dim {width} rotates {rotary} "
                         "dims; expected an even number, at most head_dim")
    for field, value, least, most in (("linear_key_head_dim", sizes.K, 1, 256), ("linear_value_head_dim", sizes.V, 1, 256),
                                      ("linear_conv_kernel_dim", sizes.W, 2, 6)):  # docs/formats.md
        if not least <= value <= most:
            raise ModelError(f"{checkpoint.path}: config.json: {field} is {value}; the ops take {least} .. {most}")
    return sizes, settings


def assumed(config):
    """The fields of ASSUMED that a text config does not give."""
    return [field for field in ASSUMED if field not in {**config, **(config.get("rope_parameters") or {})}]


def _refuse_architecture(checkpoint, config):
    kind = str(config.get("model_type"))
    if "qwen3_next" in kind or any("in_proj_qkvz" in name for name in checkpoint.tensors):
        return "Qwen3-Next (q, k, v and z interleaved in in_proj_qkvz) is not supported"
    if "moe" in kind or config.get("num_experts"):
        return f"mixture of experts (model_type {kind}) is not supported"
    if kind not in ("qwen3_5_text", "qwen3_5"):
        return f"model_type {kind} is not supported; expected qwen3_5_text"
    return None


def _refuse_quantised(checkpoint, config):
    for field in ("quantization_config", "compression_config"):
        quantised = checkpoint.config.get(field) or config.get(field)
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            return f"quantised weights ({field}, method {method}) are not supported"
    return None


def _refuse_options(checkpoint, config):
    given = dict(config)
    for field in ("rope_scaling", "rope_parameters"):
        rope = {} if config.get(field) is None else config[field]
        if not isinstance(rope, dict):
            return f"config.json: {field} is {rope!r}; expected an object"
        if given.get("rope_type") in (None, *ROPE_TYPES):
            given["rope_type"] = rope.get("rope_type", rope.get("type"))
    for field, accepted in (("rope_type", ROPE_TYPES), ("hidden_act", ("silu", "swish")),
                            ("attention_bias", (False,)), ("attn_output_gate", (True,)),
                            ("output_gate_type", ("silu", "swish"))):
        value = given.get(field)
        if value is not None and value not in accepted:
            return f"config.json: {field} {value!r} is not supported; expected {accepted[0]!r}"
    return None


def _number(config, field):
    value = config[field]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise CheckpointError(f"config.json: {field} is {value!r}; expected a number above 0")
    return float(value)
