"""Trusted kernels of the gated delta rule and its neighbours, one contract, references and checks.

    import fidelta
    o, state = fidelta.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True, return_state=True)

Every op: docs/formats.md (shapes and types) and docs/algorithms (formulas). The same functions in float64 NumPy:
fidelta.reference. Comparing implementations: fidelta.compare. Models and checkpoints: fidelta.model, fidelta.doctor.
"""

from importlib import import_module as _import_module

from . import reference
from ._core import DeviceError, DTypeError, LayoutError, ShapeError
from .compare import Report, compare
from .ops import (CHUNK, causal_conv1d, causal_conv1d_step, gated_delta_rule, gated_delta_rule_step, gdn_gate,
                  get_num_threads, l2norm, linear, rms_norm, rms_norm_gated, set_num_threads, which_path)
from .state import check_state, detect_state_layout, diagnose_l2norm, shard_conv_state, shard_conv_weight, shard_in_proj

__all__ = [
    "CHUNK", "DTypeError", "DeviceError", "LayoutError", "Report", "ShapeError", "causal_conv1d", "causal_conv1d_step",
    "check_state", "compare", "detect_state_layout", "diagnose_l2norm", "gated_delta_rule", "gated_delta_rule_step",
    "gdn_gate", "get_num_threads", "l2norm", "linear", "reference", "rms_norm", "rms_norm_gated", "set_num_threads",
    "shard_conv_state", "shard_conv_weight", "shard_in_proj", "which_path",
]

_LAZY = ("checkpoint", "doctor", "model")  # not needed by the ops; loaded when first named


def __getattr__(name):
    if name in _LAZY:
        return _import_module(f"{__name__}.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("fidelta")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_LAZY])
