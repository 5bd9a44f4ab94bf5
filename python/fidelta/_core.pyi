"""Made from csrc/formats.h by `python -m fidelta.formats --write`. Arguments: docs/formats.md."""

from typing import Any, Literal

Tensor = Any

class ShapeError(ValueError): ...
class LayoutError(ValueError): ...
class DTypeError(ValueError): ...
class DeviceError(ValueError): ...

def which_path(op: str, /, *args: Any, **kwargs: Any) -> str: ...
def set_num_threads(n: int, /) -> None: ...
def get_num_threads() -> int: ...
def formats() -> dict[str, dict[str, Any]]: ...
def kernels() -> dict[str, list[tuple[str, bool]]]: ...
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    token_range: Tensor | None = None,
    initial_state: Tensor | None = None,
    read_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    write_slots: Tensor | None = None,
    final_state: Tensor | None = None,
    snapshot_at: Tensor | None = None,
    snapshots: Tensor | None = None,
    o: Tensor = ...,
    scale: float | None = None,
    l2norm_eps: float | None = None,
    pad_slot: int | None = None,
    qk_l2norm: bool | None = None,
    check_values: bool | None = None,
    gate: Literal["log", "factor", "raw"] | None = None,
    beta_kind: Literal["value", "logit"] | None = None,
    head_map: Literal["grouped", "tiled"] | None = None,
    state_layout: Literal["kv", "vk"] | None = None,
    rounding: Literal["float32", "hf"] | None = None,
    num_threads: int | None = None,
    variant: str | None = None,
) -> None: ...
def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    token_range: Tensor | None = None,
    state: Tensor = ...,
    read_slots: Tensor | None = None,
    accepted: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    write_slots: Tensor | None = None,
    token_states: Tensor | None = None,
    o: Tensor = ...,
    scale: float | None = None,
    l2norm_eps: float | None = None,
    pad_slot: int | None = None,
    qk_l2norm: bool | None = None,
    check_values: bool | None = None,
    gate: Literal["log", "factor", "raw"] | None = None,
    beta_kind: Literal["value", "logit"] | None = None,
    head_map: Literal["grouped", "tiled"] | None = None,
    state_layout: Literal["kv", "vk"] | None = None,
    rounding: Literal["float32", "hf"] | None = None,
    num_threads: int | None = None,
    variant: str | None = None,
) -> None: ...
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    token_range: Tensor | None = None,
    initial_state: Tensor | None = None,
    read_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    write_slots: Tensor | None = None,
    final_state: Tensor | None = None,
    y: Tensor = ...,
    pad_slot: int | None = None,
    check_values: bool | None = None,
    activation: Literal["none", "silu"] | None = None,
    layout: Literal["btd", "bdt"] | None = None,
    rounding: Literal["float32", "hf"] | None = None,
    num_threads: int | None = None,
    variant: str | None = None,
) -> None: ...
def causal_conv1d_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    token_range: Tensor | None = None,
    state: Tensor = ...,
    read_slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    positions: Tensor | None = None,
    offsets: Tensor | None = None,
    y: Tensor = ...,
    pad_slot: int | None = None,
    check_values: bool | None = None,
    activation: Literal["none", "silu"] | None = None,
    layout: Literal["btd", "bdt"] | None = None,
    history: Literal["linear", "circular", "draft"] | None = None,
    rounding: Literal["float32", "hf"] | None = None,
    num_threads: int | None = None,
    variant: str | None = None,
) -> None: ...
def gdn_gate(
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    g: Tensor = ...,
    beta: Tensor = ...,
    rounding: Literal["float32", "hf"] | None = None,
    num_threads: int | None = None,
    variant: str | None = None,
) -> None: ...
def l2norm(
    x: Tensor,
    y: Tensor = ...,
    eps: float | None = None,
    num_threads: int | None = None,
    variant: str | None = None,
) -> None: ...
def rms_norm(
    x: Tensor,
    weight: Tensor,
    y: Tensor = ...,
    eps: float | None = None,
    weight_kind: Literal["w", "1+w"] | None = None,
    num_threads: int | None = None,
    variant: str | None = None,
) -> None: ...
def rms_norm_gated(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    y: Tensor = ...,
    eps: float | None = None,
    activation: Literal["silu", "sigmoid"] | None = None,
    num_threads: int | None = None,
    variant: str | None = None,
) -> None: ...
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    y: Tensor = ...,
    num_threads: int | None = None,
    variant: str | None = None,
) -> None: ...
