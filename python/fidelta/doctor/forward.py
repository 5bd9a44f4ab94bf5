"""Evidence from running the model: what each layer does to five prompts, and what it predicts."""

import itertools
import math

import numpy as np

from .checks import NORM
from .findings import Finding

PROMPTS = (
    'def load(path):\n    """Read a file and return its lines."""\n    with open(path) as file:\n        return file.read().splitlines()\n',
    "import os\nimport sys\n\n\ndef main(argv=None):\n    if argv is None:\n        argv = sys.argv[1:]\n    for name in argv:\n        print(os.path.abspath(name))\n    return 0\n",
    "class Counter:\n    def __init__(self):\n        self.value = 0\n\n    def add(self, n):\n        self.value += n\n        return self.value\n",
    "The function returns a list of all the files in the given directory. If the directory does not exist, an error is raised.",
    "This module is part of the standard library. It is used to read and write text files, and to work with the path of a file.",
)

SILENT = 1 / 50  # a mixer's output std against the median of the others of its kind
EXPLOSION = 1000.0  # growth of the residual's std in one layer
GIBBERISH = 0.70  # mean loss against log(vocabulary), a uniform guess
LOSS_FALLS = 0.05  # nats a token by which another order of blocks must do better
PROBE_LIMIT = 1 << 30  # bytes of weights up to which orders are tried by running the model


def numbers(array):
    """Mean, std and absmax in float64; NaN when the array has any."""
    x = np.asarray(array, np.float64)
    if x.size == 0:
        return {"mean": 0.0, "std": 0.0, "absmax": 0.0}
    with np.errstate(all="ignore"):
        return {"mean": float(x.mean()), "std": float(x.std()), "absmax": float(np.abs(x).max())}


class Observer:
    """Keeps a few numbers of each layer while the model runs, and the first thing that is not finite."""

    def __init__(self, kinds, tick=lambda: None):
        self.layers = [{"layer": i, "kind": kind} for i, kind in enumerate(kinds)]
        self.first_bad = None
        self.tick = tick

    def __call__(self, layer, stage, array):
        array = np.asarray(array)
        if self.first_bad is None and array.dtype.kind == "f" and not np.isfinite(array).all():
            self.first_bad = (layer, stage, int((~np.isfinite(array)).sum()), array.size)
        if not 0 <= layer < len(self.layers):
            return
        row = self.layers[layer]
        if stage in ("mixer", "residual"):
            row[stage] = numbers(array)
        elif stage == "state":
            row["state_norm"] = float(np.sqrt(np.square(array, dtype=np.float64).sum((-1, -2)).mean()))
        elif stage == "g" and row["kind"] == "linear_attention":
            decay = np.exp(np.asarray(array, np.float64))
            row["decay"] = {"mean": float(decay.mean()), "forget_at_once": float((decay < 0.01).mean()),
                            "never_forget": float((decay > 0.9999).mean())}
        if stage == "residual":
            self.tick()


def log_softmax(logits):
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def loss(logits, sequences):
    """Mean negative log likelihood a token, over all prompts' tokens but the first."""
    total, count = 0.0, 0
    for rows, ids in zip(logits, sequences):
        if len(ids) > 1:
            total -= log_softmax(rows[:-1])[np.arange(len(ids) - 1), np.asarray(ids[1:])].sum()
            count += len(ids) - 1
    return float(total / count) if count else math.nan


def predictions(model, logits, sequences, texts, max_new_tokens):
    """A row a prompt: perplexity, entropy ratio, the five likeliest next tokens, a greedy continuation."""
    rows = []
    for text, ids, table in zip(texts, sequences, logits):
        logs = log_softmax(table)
        p = np.exp(logs)
        entropy = float(-(p * np.maximum(logs, -1e300)).sum(-1).mean()) / math.log(table.shape[-1])
        nll = loss([table], [ids])
        top = np.argsort(-logs[-1], kind="stable")[:5]
        row = {"prompt": text, "tokens": len(ids), "perplexity": math.exp(min(nll, 700)) if nll == nll else nll,
               "entropy_ratio": entropy, "top5": [{"id": int(i), "text": _text(model, [int(i)]), "p": float(p[-1, i])} for i in top]}
        finite = bool(np.isfinite(table).all())
        new = model.generate(ids, max_new_tokens) if finite and max_new_tokens else []
        row["continuation"] = _text(model, [int(i) for i in new])
        row["continuation_ids"] = [int(i) for i in new]
        rows.append(row)
    return rows


def _text(model, ids):
    return model.tokenizer.decode(ids, skip_special_tokens=False) if model.tokenizer is not None else str(ids)


def judge(observer, mean_loss, vocabulary, logits):
    """Findings of one run."""
    if observer.first_bad is not None:
        layer, stage, bad, size = observer.first_bad
        where = f"layer {layer}" if 0 <= layer < len(observer.layers) else "embedding" if layer < 0 else "head"
        yield Finding("forward-nan", f"{where}, {stage}", f"{bad} of {size} values are NaN or infinite, nothing before it was", bad, 0)
        return
    yield from _layers(observer.layers)
    ratio = mean_loss / math.log(vocabulary)
    if not ratio <= GIBBERISH:
        yield Finding("forward-gibberish", "next tokens",
                      f"loss {mean_loss:.3f} a token is {ratio:.2f} of a uniform guess's {math.log(vocabulary):.3f}", ratio, GIBBERISH)
    winners = np.concatenate([np.argmax(rows, -1) for rows in logits])
    if len(winners) > 20 and (winners == winners[0]).mean() > 0.95:
        yield Finding("forward-collapse", "next tokens", f"token {int(winners[0])} wins at {np.mean(winners == winners[0]):.0%} of all positions",
                      float(np.mean(winners == winners[0])), 0.95)


def _layers(layers):
    for kind in {row["kind"] for row in layers}:
        rows = [row for row in layers if row["kind"] == kind and "mixer" in row]
        for row in rows:
            others = [other["mixer"]["std"] for other in (rows if len(rows) > 1 else layers) if other is not row and "mixer" in other]
            usual = float(np.median(others)) if others else 0.0
            if usual > 0 and row["mixer"]["std"] < SILENT * usual:
                yield Finding("forward-silent", f"layer {row['layer']} ({kind})",
                              f"mixer output std {row['mixer']['std']:.3g} beside {usual:.3g} in the others", row["mixer"]["std"] / usual, SILENT)
    before = None
    for row in layers:
        std = row.get("residual", {}).get("std")
        if before and std and std > EXPLOSION * before:
            yield Finding("forward-explosion", f"layer {row['layer']}", f"residual std grows from {before:.3g} to {std:.3g}", std / before, EXPLOSION)
        before = std


# Layout probes -------------------------------------------------------------------------------------------------------


def reordered(rows, key, value, order):
    """A tensor whose row blocks stand in `order` (say "kqv"), with its blocks back in the order q, k, v."""
    sizes = {"q": key, "k": key, "v": value}
    starts, at = {}, 0
    for block in order:
        starts[block], at = at, at + sizes[block]
    return np.concatenate([rows[starts[block]:starts[block] + sizes[block]] for block in "qkv"])


def probe_orders(model, sequences, stored_loss, sizes, thorough, tick=lambda: None):
    """Runs the model with the q, k, v blocks of in_proj_qkv (and of conv1d with it) taken to be in another order, in
    every layer and in each: where the loss falls clearly, that is the order in which they were written."""
    layers = [i for i, kind in enumerate(model.layer_types) if kind == "linear_attention"]
    orders = ["kqv"] + (["qvk", "vqk", "kvq", "vkq"] if thorough else [])

    def loss_with(order, tensors, chosen):
        weights = {}
        for i, tensor in itertools.product(chosen, tensors):
            name = f"layers.{i}.linear_attn.{tensor}.weight"
            stored = model.checkpoint.read(model.names.of[name])
            weights[name] = reordered(stored, sizes.key_dim, sizes.value_dim, order)
        with np.errstate(all="ignore"):
            found = loss(model.forward(sequences, weights=weights), sequences)
        tick()
        return float(found) if np.isfinite(found) else math.inf

    best, chosen, how = stored_loss - LOSS_FALLS, (), None
    for order, tensors in itertools.product(orders, (("in_proj_qkv",), ("in_proj_qkv", "conv1d"))):
        found, layers_changed = _choose_layers(layers, lambda some: loss_with(order, tensors, some))
        if found < best:
            best, chosen, how = found, layers_changed, (order, tensors)
    for i, tensor in itertools.product(chosen, how[1] if how else ()):
        yield Finding("layout-order", model.names.of[f"layers.{i}.linear_attn.{tensor}.weight"],
                      f"read as {', '.join(how[0])} instead of q, k, v the loss falls from {stored_loss:.3f} to {best:.3f}",
                      stored_loss - best, LOSS_FALLS)


def probe_norms(model, sequences, stored_loss, tick=lambda: None):
    """Runs the model with one taken off the norm weights that are offsets from one: where the loss falls clearly, a
    converter had added it already."""
    offsets = [name for name in model.names.of if NORM.search(name) and not name.endswith("linear_attn.norm.weight")]
    groups = [offsets, [name for name in offsets if "layernorm" in name]]
    best, chosen = stored_loss - LOSS_FALLS, ()
    for group in groups:
        weights = {name: model.checkpoint.read(model.names.of[name]).astype(np.float32) - 1 for name in group}
        with np.errstate(all="ignore"):
            found = loss(model.forward(sequences, weights=weights), sequences)
        tick()
        if found < best:
            best, chosen = found, group
    for name in chosen:
        mean = float(model.checkpoint.read(model.names.of[name]).astype(np.float32).mean())
        yield Finding("norm-shifted", model.names.of[name],
                      f"mean {mean:.3f}; with one taken off all of them the loss falls from {stored_loss:.3f} to {best:.3f}",
                      stored_loss - best, LOSS_FALLS)


def _choose_layers(layers, loss_with):
    """(loss, layers) of the best set found: from all layers or the best single one, a layer enters or leaves while that
    lowers the loss; one whose order hardly matters stays out."""
    losses = {some: loss_with(some) for some in [tuple(layers)] + [(i,) for i in layers]}
    now = min(losses, key=losses.get)
    for _ in range(2):
        for i in layers:
            other = tuple(sorted(set(now) ^ {i}))
            if not other:
                continue
            if other not in losses:
                losses[other] = loss_with(other)
            margin = LOSS_FALLS / 5 if len(other) > len(now) else -LOSS_FALLS / 5
            if losses[other] < losses[now] - margin:
                now = other
        if len(now) == 1:
            break
    return losses[now], now
