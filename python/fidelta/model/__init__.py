"""The Qwen3.5 text model on the ops of fidelta: weights streamed from the mapped checkpoint, activations float32.

    model = fidelta.model.load("examples/tiny-qwen3_5")
    logits = model.logits(model.tokenizer.encode("Once").ids)
"""

from .model import Model, load
from .settings import ModelError
from .state import State

__all__ = ["Model", "ModelError", "State", "load"]
