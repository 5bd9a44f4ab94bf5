"""Sizes of real layers, by model. Tensor extents have the letters of docs/formats.md."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A gated delta rule layer: key heads, value heads, their widths, filter taps, width of the residual stream."""

    model: str
    H: int
    HV: int
    hidden: int
    K: int = 128
    V: int = 128
    W: int = 4

    @property
    def channels(self):
        return 2 * self.H * self.K + self.HV * self.V


LAYERS = {
    layer.model: layer
    for layer in (
        Layer("tiny-qwen3_5", 2, 4, 256),
        Layer("Qwen3.6-35B-A3B", 16, 32, 2048),
        Layer("Qwen3.6-27B", 16, 48, 5120),
        Layer("Qwen3.5-397B", 16, 64, 4096),
    )
}


def gdn_flops(T, layer, chunk=32):
    """What the chunked form has to compute: products with the state, and the triangles as triangles, with the ones of
    keys and queries shared by the value heads of a key head (docs/algorithms/gated_delta_rule.md)."""
    C, K, V, r = chunk, layer.K, layer.V, layer.HV // layer.H
    a_chunk = 6 * C * K * V + 2 * C * C * V + 2 * C * C * K / r
    return a_chunk * T / C * layer.HV


def gdn_bytes(T, layer, size=2, states=0):
    """Inputs and output once, the gates in float32, and `states` float32 states."""
    tokens = T * (size * (2 * layer.H * layer.K + 2 * layer.HV * layer.V) + 8 * layer.HV)
    return tokens + 4 * states * layer.HV * layer.K * layer.V
