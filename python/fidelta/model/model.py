"""The Qwen3.5 text model: embedding, layers read one at a time from the mapped checkpoint, head."""

import os
from functools import cached_property, partial

import numpy as np

from .. import ops
from ..checkpoint import Checkpoint, CheckpointError, name_map, open_checkpoint
from . import layers
from .settings import ModelError, read_settings
from .state import DeltaState, KeyValues, State

MIXERS = {"linear_attention": layers.linear_attention, "full_attention": layers.full_attention}


def load(checkpoint):
    """The model of a checkpoint, given as a directory or as an opened Checkpoint. No tensor is read yet.

    ModelError, one line, for what is not supported (Qwen3-Next, experts, quantised weights, other options) and for a tensor
    that is missing, broken, or of a wrong shape or dtype. CheckpointError when the directory is no checkpoint.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    sizes, settings = read_settings(checkpoint)
    names = name_map(checkpoint)
    _check_tensors(checkpoint, names)
    return Model(checkpoint, names, sizes, settings)


def _check_tensors(checkpoint, names):
    unreadable = [f"{stored} cannot be read, see the problems of the files" for stored in names.of.values()
                  if stored in checkpoint.unreadable]
    faults = [f"{names.prefix}{name} is missing" for name in names.missing] + unreadable
    faults += [f"{name} has shape {list(got)}; expected {list(want)}" for name, got, want in names.wrong_shape]
    faults += [f"{name} has dtype {got}; expected {', '.join(want)}" for name, got, want in names.wrong_dtype]
    if faults:
        more = {1: "", 2: " (and 1 more fault)"}.get(len(faults), f" (and {len(faults) - 1} more faults)")
        raise ModelError(f"{checkpoint.path}: {faults[0]}{more}")


class Model:
    """A text model. Token ids are sequences of ints; activations and results are float32.

    config       the text part of config.json
    checkpoint   the Checkpoint; names: its NameMap
    num_layers, layer_types, sizes, settings
    """

    def __init__(self, checkpoint, names, sizes, settings):
        self.checkpoint, self.names, self.sizes, self.settings = checkpoint, names, sizes, settings
        self.config, self.num_layers, self.layer_types = checkpoint.text_config, sizes.layers, sizes.layer_types

    def __repr__(self):
        return f"<Model {self.checkpoint.path}: {self.num_layers} layers, hidden {self.sizes.hidden}>"

    @cached_property
    def tokenizer(self):
        """The tokenizers.Tokenizer of tokenizer.json; None when there is none."""
        path = os.path.join(self.checkpoint.path, "tokenizer.json")
        if not os.path.exists(path):
            return None
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(path)
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path}: {str(error).splitlines()[0]}") from None

    def logits(self, token_ids):
        """Logits [T,vocab] of one sequence."""
        return self.forward([token_ids])[0]

    def hidden_states(self, token_ids):
        """The L + 1 hidden states [T,hidden] that transformers gives: the embedding, the residual after each layer but the
        last, and the final norm."""
        found = []

        def keep(layer, stage, array):
            if stage in ("input", "final_norm") or (stage == "residual" and layer < self.num_layers - 1):
                found.append(array)

        self._trunk(*self._pack([token_ids]), observe=keep)
        return found

    def forward(self, sequences, *, observe=None, weights=None, resume=None):
        """Logits [T,vocab] of each of several sequences, packed into one pass: each layer is read once.

        observe(layer, stage, array) is called with every intermediate result, tokens packed in order:
            layer -1    "input"
            each layer  "normed"; linear attention "qkv", "conv", "g", "beta", "o", "state" [N,HV,K,V]; full attention "q",
                        "k" (both after norm and rotation), "v", "o" (before the gate); "mixer", "residual_mid", "mlp",
                        "residual"
            layer L     "final_norm", "logits"
        It must not write to the array.
        weights: canonical name -> array that stands in for the stored tensor.
        resume: (layer, what enters it) of the same sequences; the layers before it are not run.
        """
        tokens, cu = self._pack(sequences)
        x = self._trunk(tokens, cu, observe=observe, weights=weights, resume=resume)
        logits = self._head(x, weights)
        if observe is not None:
            observe(self.num_layers, "logits", logits)
        return [logits[begin:end] for begin, end in zip(cu, cu[1:])]

    def prefill(self, token_ids):
        """(logits [vocab] after the last token, State) of a sequence of at least one token."""
        tokens, cu = self._pack([token_ids])
        if not len(tokens):
            raise ModelError("prefill: no tokens; expected at least one")
        state = self._empty_state()
        return self._advance(tokens, cu, state), state

    def decode(self, token_id, state):
        """Logits [vocab] after one more token; `state` is updated in place."""
        tokens, cu = self._pack([[token_id]])
        return self._advance(tokens, cu, state)

    def generate(self, token_ids, max_new_tokens):
        """The next max_new_tokens ids, each the likeliest; one pass over the prompt, then token by token."""
        new = []
        if max_new_tokens > 0:
            logits, state = self.prefill(token_ids)
            new.append(int(logits.argmax()))
            while len(new) < max_new_tokens:
                new.append(int(self.decode(new[-1], state).argmax()))
        return new

    def weight(self, name, weights=None):
        """A tensor by its canonical name, or what stands in for it in `weights`; DENSE and aligned, as the ops need it."""
        if weights is not None and name in weights:
            return np.require(weights[name], requirements="CA")
        try:
            return np.require(self.checkpoint.read(self.names.of[name]), requirements="CA")
        except CheckpointError as error:
            raise ModelError(str(error)) from None

    def _advance(self, tokens, cu, state):
        x = self._trunk(tokens, cu, state=state)
        state.length += len(tokens)
        return self._head(x[-1:], None)[0]

    def _trunk(self, tokens, cu, *, observe=None, weights=None, state=None, resume=None):
        """The final norm [T,hidden] of packed sequences."""
        eps = self.settings.eps
        see = _look_away if observe is None else observe
        if resume is None:
            first, x = 0, self.weight("embed_tokens.weight", weights)[tokens].astype(np.float32)
            see(-1, "input", x)
        else:
            first, x = resume
        for layer, kind in list(enumerate(self.layer_types))[first:]:
            w = self._layer_weights(layer, weights)
            x = self._layer(x, MIXERS[kind], w, partial(see, layer), cu, None if state is None else state.layers[layer])
        x = layers.norm(x, self.weight("norm.weight", weights), eps)
        see(self.num_layers, "final_norm", x)
        return x

    def _layer_weights(self, layer, weights):
        return lambda name: self.weight(f"layers.{layer}.{name}", weights)

    def _layer(self, x, mixer, w, see, cu, state):
        eps = self.settings.eps
        normed = layers.norm(x, w("input_layernorm.weight"), eps)
        see("normed", normed)
        mixed = mixer(normed, w, see, cu, self.sizes, self.settings, state)
        see("mixer", mixed)
        x = x + mixed
        see("residual_mid", x)
        y = layers.mlp(layers.norm(x, w("post_attention_layernorm.weight"), eps), w)
        see("mlp", y)
        x = x + y
        see("residual", x)
        return x

    def _head(self, x, weights):
        return ops.linear(x, self.weight("embed_tokens.weight" if self.sizes.tied else "lm_head.weight", weights))

    def _pack(self, sequences):
        """(token ids [T], first token of each sequence and the end [N+1]); ids are checked."""
        rows = [np.asarray(sequence) if len(sequence) else np.empty(0, np.int64) for sequence in sequences]
        for row in rows:
            if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
                raise ModelError(f"token ids have shape {row.shape} and dtype {row.dtype}; expected a list of whole numbers")
            if row.size and not 0 <= row.min() <= row.max() < self.sizes.vocab:
                raise ModelError(f"token ids are {row.min()} .. {row.max()}; expected 0 .. {self.sizes.vocab - 1}")
        cu = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64), cu

    def _empty_state(self):
        s, made = self.sizes, []
        for kind in self.layer_types:
            if kind == "linear_attention":
                made.append(DeltaState(np.zeros((1, s.HV, s.K, s.V), np.float32),
                                       np.zeros((1, s.conv_dim, s.W - 1), np.float32)))
            else:
                made.append(KeyValues(s.kv_heads, s.head_dim))
        return State(made)


def _look_away(layer, stage, array):
    pass
