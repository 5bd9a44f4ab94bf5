"""Evidence from running the model: what each layer does to five prompts, and what it predicts."""

import math

import numpy as np

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
WEAK = 0.40  # the same, above which a model is hardly healthy and the rarer readings are tried
GIBBERISH = 0.70  # mean loss against log(vocabulary), a uniform guess


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


def token_losses(logits, sequences):
    """Negative log likelihood of every token but each sequence's first, as one array."""
    rows = [-log_softmax(table[:-1])[np.arange(len(ids) - 1), np.asarray(ids[1:], np.int64)]
            for table, ids in zip(logits, sequences)]
    return np.concatenate([np.empty(0), *rows])


def mean(losses):
    """Their mean; None of none."""
    return float(losses.mean()) if len(losses) else None


def predictions(model, logits, sequences, texts, max_new_tokens):
    """A row a prompt: perplexity, entropy ratio, the five likeliest next tokens, a greedy continuation."""
    rows = []
    for text, ids, table in zip(texts, sequences, logits):
        logs = log_softmax(table)
        p = np.exp(logs)
        entropy = float(-(p * np.maximum(logs, -1e300)).sum(-1).mean()) / math.log(table.shape[-1])
        nll = mean(token_losses([table], [ids]))
        top = np.argsort(-logs[-1], kind="stable")[:5]
        row = {"prompt": text, "tokens": len(ids), "perplexity": None if nll is None else math.exp(min(nll, 700)) if nll == nll else nll,
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
    elif ratio > WEAK:
        yield Finding("forward-weak", "next tokens",
                      f"loss {mean_loss:.3f} a token is {ratio:.2f} of a uniform guess's {math.log(vocabulary):.3f}", ratio, WEAK)
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
