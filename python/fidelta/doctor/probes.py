"""Layout probes: would the model predict better if a tensor were read in another way?

q and k blocks have one shape and one distribution, and a norm weight stored as an offset looks like one stored plain, so
the only evidence is what the model predicts. A Reading is another way to read some tensors; it counts when the loss of
the prompts falls by LOSS_FALLS and by SURE standard errors of the paired difference over the tokens. A healthy model
loses by every other reading, so a threshold on the gain needs no reference model.
"""

from typing import NamedTuple

import numpy as np

from .findings import Finding
from .forward import token_losses

LOSS_FALLS = 0.02  # nats a token
SURE = 3.0  # standard errors of the mean difference
ORDERS = ("kqv", "qvk", "vqk", "kvq", "vkq")
SUSPICIOUS_MEAN = 0.45  # mean of an offset norm weight from which reading it as shifted is tried
MOST_NORMS = 8  # single norm weights that are tried
SHORT = 48  # tokens of a prompt that tell whether a reading is hopeless
MOST_HOPEFUL = 8  # readings that are tried on all prompts in one round
KEPT = 64 << 20  # bytes of activations that may be kept of one set of prompts


class Reading(NamedTuple):
    """Tensors of one layer (None: of the whole model): change(name, get) gives what to read for one of them, get(name)
    what is stored; `says` ends the sentence "read ..."."""

    code: str
    layer: int | None
    names: tuple
    change: object
    says: str


class Probe:
    """Runs a model with readings and compares the losses token by token.

    Most readings are hopeless, and a few tokens show it: `short` is the beginning of two of the five prompts, `few` the
    whole of them, `all` all five. What enters a layer is kept, so a reading runs only the layers from its own on.
    """

    def __init__(self, model, sequences, tick=lambda: None):
        self.model, self.tick, self._kept = model, tick, {}
        self.sets = {"short": [ids[:SHORT] for ids in sequences[::3]], "few": sequences[::3], "all": sequences}

    def losses(self, so_far=(), part=(), which="all"):
        """Negative log likelihood of every token but each prompt's first, with the readings `so_far` and then `part`."""
        weights, sequences = {}, self.sets[which]
        for reading in (*so_far, *part):
            stored = dict(weights)
            for name in reading.names:
                weights[name] = reading.change(name, lambda other: self.model.weight(other, stored))
        first = min((self._first_layer(reading) for reading in part), default=self.model.num_layers)
        inputs = self._inputs(so_far, which)
        start = min(first, len(inputs) - 1)

        def keep(layer, stage, array):
            if stage in ("input", "residual") and len(inputs) == layer + 1 <= first and self._small(array):
                inputs.append(array)

        with np.errstate(all="ignore"):
            logits = self.model.forward(sequences, weights=weights, observe=keep,
                                        resume=(start, inputs[start]) if start >= 0 else None)
            losses = token_losses(logits, sequences)
        self.tick()
        return losses

    def hopeful(self, so_far, parts):
        """[(group, part)] that do not raise the loss of a few prompts, in two lists: the likeliest, to be tried on all prompts,
        and the others."""
        before = self.losses(so_far, which="short")
        parts = [entry for entry in parts if _may_gain(before, self.losses(so_far, entry[1], "short"))]
        before = self.losses(so_far, which="few") if parts else None
        gains = [gain_of(before, self.losses(so_far, part, "few"))[0] for _, part in parts]
        least = sorted(gains, reverse=True)[:MOST_HOPEFUL][-1] if gains else 0.0
        return ([entry for entry, gain in zip(parts, gains) if gain > 0 and gain >= least],
                [entry for entry, gain in zip(parts, gains) if 0 < gain < least])

    def _inputs(self, so_far, which):
        """What enters the layers with the readings so_far: as many layers from the first on as have been kept."""
        key = [id(reading) for reading in so_far]
        if self._kept.get(which, (None,))[0] != key:
            self._kept[which] = (key, [])
        return self._kept[which][1]

    def _small(self, array):
        return array.nbytes * self.model.num_layers <= KEPT

    def _first_layer(self, reading):
        """The first layer that computes otherwise: the number of layers for the head, -1 for the embedding."""
        layers = [int(name.split(".")[1]) if name.startswith("layers.") else
                  -1 if name == "embed_tokens.weight" else self.model.num_layers for name in reading.names]
        return min(layers)


def _may_gain(before, after):
    """Whether the loss of a few tokens falls, or rises by no more than its standard error."""
    fall = before - after
    return len(fall) < 2 or not np.isfinite(fall).all() or fall.mean() > -fall.std(ddof=1) / len(fall) ** 0.5


def gain_of(before, after):
    """(mean fall of the loss, whether it is beyond chance)."""
    fall = before - after
    if len(fall) < 2 or not np.isfinite(fall).all():
        return 0.0, False
    mean = float(fall.mean())
    return mean, mean > LOSS_FALLS and mean > SURE * float(fall.std(ddof=1)) / len(fall) ** 0.5


def reordered(rows, key, value, order):
    """A tensor whose row blocks stand in `order` (say "kqv"), with its blocks back in the order q, k, v."""
    sizes = {"q": key, "k": key, "v": value}
    starts, at = {}, 0
    for block in order:
        starts[block], at = at, at + sizes[block]
    return np.concatenate([rows[starts[block]:starts[block] + sizes[block]] for block in "qkv"])


def search(probe, before, groups, whole_only=False):
    """Chosen readings, in order of their gain: [(reading, gain)].

    groups: lists of Readings of one kind over several layers. A round tries every whole group and every single reading on
    top of what was chosen; of a whole group only the layers that gain by it are kept. Of readings that do equally well the
    first is taken. The next round tries what did well or was not tried to the end, and the rest of the chosen group.
    """
    chosen, parts = [], []
    for group in groups:
        singles = [] if whole_only and len(group) > 1 else [[reading] for reading in group]
        parts += [(group, part) for part in singles + ([group] if len(group) > 1 else [])]
    while parts:
        so_far = [reading for reading, _ in chosen]
        likely, others = probe.hopeful(so_far, parts)
        tried = [(group, part, probe.losses(so_far, part)) for group, part in likely]
        better = [(group, part, after, gain) for group, part, after in tried
                  for gain, sure in [gain_of(before, after)] if sure]
        if not better:
            break
        most = max(gain for *_, gain in better)
        home, part, after, gain = next(entry for entry in better if entry[3] > most - LOSS_FALLS / 2)
        if not whole_only:
            part, after = _needed(probe, so_far, part, after)
        chosen += [(reading, gain) for reading in part]
        before = after
        used = {name for reading, _ in chosen for name in reading.names}
        parts = [(group, part) for group, part in parts if not used & {name for r in part for name in r.names}
                 and (group is home or any(part is entry[1] for entry in (*better, *others)))]
    return chosen


def _needed(probe, so_far, part, after):
    """(the readings of a part without which the loss is higher, the losses with them)."""
    for reading in list(part) if len(part) > 1 else []:
        rest = [r for r in part if r is not reading]
        without = probe.losses(so_far, rest)
        if rest and gain_of(without, after)[0] < LOSS_FALLS / 4:
            part, after = rest, without
    return part, after


def order_groups(model, sizes, orders):
    """Other orders of the q, k, v blocks: in in_proj_qkv, in conv1d, or in both alike; one group each."""
    layers = [i for i, kind in enumerate(model.layer_types) if kind == "linear_attention"]
    for order in orders:
        def change(name, get, order=order):
            return reordered(get(name), sizes.key_dim, sizes.value_dim, order)

        for tensors in (("in_proj_qkv",), ("conv1d",), ("in_proj_qkv", "conv1d")):
            yield [Reading("layout-order", i, tuple(f"layers.{i}.linear_attn.{t}.weight" for t in tensors), change,
                           f"as {', '.join(order)} instead of q, k, v") for i in layers]


def other_groups(model, sizes):
    """Two tensors of one shape exchanged; taps of the filters in reverse; queries and gates not head by head."""
    for kind, one, two in (("linear_attention", "linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"),
                           (None, "mlp.gate_proj.weight", "mlp.up_proj.weight")):
        yield [_exchanged(i, f"layers.{i}.{one}", f"layers.{i}.{two}")
               for i, have in enumerate(model.layer_types) if kind in (have, None)]
    yield [Reading("layout-taps", i, (f"layers.{i}.linear_attn.conv1d.weight",), lambda name, get: get(name)[..., ::-1],
                   "with its taps in reverse") for i, kind in enumerate(model.layer_types) if kind == "linear_attention"]
    yield [Reading("layout-gate", i, (f"layers.{i}.self_attn.q_proj.weight",),
                   lambda name, get: _head_by_head(get(name), sizes.heads), "as all queries, then all gates")
           for i, kind in enumerate(model.layer_types) if kind == "full_attention" and sizes.heads > 1]


def _exchanged(layer, one, two):
    other = {one: two, two: one}
    return Reading("layout-exchanged", layer, (one, two), lambda name, get: get(other[name]),
                   "in each other's place")


def _head_by_head(rows, heads):
    halves = rows.reshape(2, heads, -1, rows.shape[-1])
    return halves.swapaxes(0, 1).reshape(rows.shape)


def _minus_one(name, get):
    return np.asarray(get(name), np.float32) - 1


def _plus_one(name, get):
    return np.asarray(get(name), np.float32) + 1


def norm_groups(model, statistics):
    """Norm weights that were shifted: all layer norms, all of them, the single suspicious ones; the gated norms."""
    offset = [name for name in model.names.of if name.endswith("norm.weight") and "linear_attn" not in name]
    gated = [name for name in model.names.of if name.endswith("linear_attn.norm.weight")]
    mean = {name: statistics[model.names.of[name]].mean for name in offset + gated}
    suspicious = sorted((n for n in offset if mean[n] > SUSPICIOUS_MEAN), key=lambda n: -mean[n])[:MOST_NORMS]
    if np.median([mean[n] for n in offset]) > SUSPICIOUS_MEAN / 2:
        yield [_norm(offset)]
        yield [_norm([n for n in offset if "layernorm" in n])]
    yield from ([_norm([n])] for n in suspicious)
    unshifted = [n for n in gated if mean[n] < SUSPICIOUS_MEAN]
    if unshifted:
        yield [Reading("norm-unshifted", None, tuple(unshifted), _plus_one, "with one added")]


def _norm(names):
    return Reading("norm-shifted", None, tuple(names), _minus_one, "with one subtracted")


def examine_layout(probe, before, groups, healthy_loss, known=frozenset(), whole_only=False):
    """Findings of a search; none when the loss stays above healthy_loss, since a model that is broken elsewhere may gain by
    any reading. `known`: (code, stored name) that are found already."""
    names = probe.model.names.of
    chosen = search(probe, before, [group for group in groups if group], whole_only)
    if not chosen or not probe.losses([reading for reading, _ in chosen]).mean() <= healthy_loss:
        return
    for reading, gain in chosen:
        for name in reading.names:
            if (reading.code, names[name]) not in known:
                text = f"read {reading.says} the prompts' loss falls by {gain:.3f} nats a token"
                yield Finding(reading.code, names[name], text, gain, LOSS_FALLS)
