"""What a sequence leaves behind for its next token."""

import numpy as np


class State:
    """The state of one sequence after `length` tokens: one entry a layer, `layers[i]`.

    A linear attention layer has a DeltaState, a full attention layer a KeyValues. decode() updates them in place; copy()
    makes an independent one, to try several continuations.
    """

    def __init__(self, layers, length=0):
        self.layers, self.length = layers, length

    def copy(self):
        return State([layer.copy() for layer in self.layers], self.length)


class DeltaState:
    """float32: `delta` [1,HV,K,V], the state of the delta rule; `conv` [1,C,W-1], the last inputs of the convolution."""

    def __init__(self, delta, conv):
        self.delta, self.conv = delta, conv

    def copy(self):
        return DeltaState(self.delta.copy(), self.conv.copy())


class KeyValues:
    """Keys and values [length,kv_heads,head_dim] of the tokens so far; keys after norm and rotation."""

    def __init__(self, kv_heads, head_dim):
        self.length = 0
        self._k = np.empty((0, kv_heads, head_dim), np.float32)
        self._v = np.empty((0, kv_heads, head_dim), np.float32)

    @property
    def k(self):
        return self._k[:self.length]

    @property
    def v(self):
        return self._v[:self.length]

    def append(self, k, v):
        end = self.length + len(k)
        if end > len(self._k):
            self._k, self._v = self._grown(self._k, end), self._grown(self._v, end)
        self._k[self.length:end], self._v[self.length:end] = k, v
        self.length = end

    def copy(self):
        made = KeyValues(*self._k.shape[1:])
        made.append(self.k, self.v)
        return made

    def _grown(self, old, end):
        new = np.empty((max(end, 2 * len(old)), *old.shape[1:]), np.float32)  # doubling: one copy a token on average
        new[:self.length] = old[:self.length]
        return new
