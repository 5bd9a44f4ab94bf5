"""The numbers of a Qwen3.5 text model, from its config."""

from typing import NamedTuple

from .files import CheckpointError

LAYER_TYPES = ("linear_attention", "full_attention")
MOST = 2**31 - 1


class Sizes(NamedTuple):
    """Extents of the text model. H, HV, K, V, W as in docs/formats.md: key and value heads of the delta rule, their widths,
    taps of the convolution."""

    hidden: int
    layers: int
    layer_types: tuple
    vocab: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    H: int
    HV: int
    K: int
    V: int
    W: int
    tied: bool

    @property
    def key_dim(self):
        return self.H * self.K

    @property
    def value_dim(self):
        return self.HV * self.V

    @property
    def conv_dim(self):
        return 2 * self.key_dim + self.value_dim


FIELDS = {"hidden": "hidden_size", "layers": "num_hidden_layers", "vocab": "vocab_size", "intermediate": "intermediate_size",
          "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
          "H": "linear_num_key_heads", "HV": "linear_num_value_heads", "K": "linear_key_head_dim",
          "V": "linear_value_head_dim", "W": "linear_conv_kernel_dim"}


def read_sizes(checkpoint):
    """The Sizes of a checkpoint; CheckpointError naming the field of config.json that is missing or makes no sense."""
    config = checkpoint.text_config
    values = {name: _whole(config, field) for name, field in FIELDS.items()}
    for many, few in (("heads", "kv_heads"), ("HV", "H")):
        if values[many] % values[few]:
            raise CheckpointError(f"config.json: {FIELDS[many]} {values[many]} is no multiple of {FIELDS[few]} {values[few]}")
    tied = checkpoint.config.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return Sizes(**values, layer_types=_layer_types(config, values["layers"]), tied=bool(tied))


def _whole(config, field):
    value = config.get(field)
    if value is None:
        raise CheckpointError(f"config.json: {field} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise CheckpointError(f"config.json: {field} is {value!r}; expected a whole number above 0")
    return value


def _layer_types(config, layers):
    types = config.get("layer_types")
    if layers > 10_000:
        raise CheckpointError(f"config.json: num_hidden_layers is {layers}; expected at most 10000")
    if types is None:
        every = _whole({"full_attention_interval": 4, **config}, "full_attention_interval")
        return tuple(LAYER_TYPES[(layer + 1) % every == 0] for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(f"config.json: layer_types is no list of num_hidden_layers = {layers} names")
    for name in types:
        if name not in LAYER_TYPES:
            raise CheckpointError(f"config.json: layer_types has {name!r}; expected {' or '.join(LAYER_TYPES)}")
    return tuple(types)
