"""One examination, from the files to the next token."""

import math
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .. import ops
from ..checkpoint import CheckpointError, name_map, open_checkpoint
from ..model import Model, ModelError, load
from ..model.settings import read_settings
from . import checks, forward, probes
from .findings import Finding
from .statistics import measure

PROBE_LIMIT = 1 << 34  # bytes of weights read by all runs together, up to which single layers are read in other ways
EXPLAINED = 0.25  # loss against a uniform guess's, to which readings must bring a lost model to be believed


class CannotRun(Exception):
    """The examination could not take place; the text is one line."""


@dataclass
class Examination:
    """Everything that one examination saw. as_dict() is the stable JSON form (docs/doctor.md)."""

    path: str
    model_type: str = ""
    nbytes: int = 0
    tensors: int = 0
    findings: list = field(default_factory=list)
    layers: list = field(default_factory=list)
    predictions: list = field(default_factory=list)
    loss: float | None = None
    loss_of_a_guess: float | None = None
    which_path: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def healthy(self):
        return not any(f.severity in ("error", "warning") for f in self.findings)

    @property
    def exit_code(self):
        return 0 if self.healthy else 1

    @property
    def verdict(self):
        if self.healthy:
            return "healthy"
        faults = sum(f.severity == "error" for f in self.findings)
        return f"{len(self.findings)} finding{'s' * (len(self.findings) != 1)}, {faults} of them errors"

    def as_dict(self):
        return {"format": 1, "path": self.path, "model_type": self.model_type, "bytes": self.nbytes, "tensors": self.tensors,
                "verdict": "healthy" if self.healthy else "findings", "exit_code": self.exit_code,
                "findings": [f.as_dict() for f in self.findings], "layers": self.layers, "predictions": self.predictions,
                "loss": self.loss, "loss_of_a_guess": self.loss_of_a_guess, "which_path": self.which_path,
                "seconds": self.seconds, "peak_bytes": self.peak_bytes}


class NoProgress:
    """Stands in for a progress bar: a stage has a name and a number of steps."""

    def stage(self, name, total):
        pass

    def step(self, n=1):
        pass


def examine(path, *, prompts=None, max_new_tokens=32, max_memory=None, progress=None, thorough=False):
    """Examines a checkpoint directory: files, names, values, orders of blocks, forward pass over the prompts.

    prompts         texts; five built-in ones when None
    max_new_tokens  length of the greedy continuation
    max_memory      bytes; CannotRun when the largest step needs more
    thorough        try every other reading: the rarer block orders too, also beside other errors and in a large model

    Returns an Examination. CannotRun, one line, when there is nothing to examine: no such directory, an unreadable
    config.json, an architecture that is not supported yet.
    """
    started = time.perf_counter()
    progress = progress or NoProgress()
    try:
        checkpoint = open_checkpoint(path)
        sizes, settings = _supported(checkpoint)
        names = name_map(checkpoint)
    except (CheckpointError, ModelError) as error:
        raise CannotRun(str(error)) from None
    if max_memory is not None:
        _fits(Model(checkpoint, names, sizes, settings), [*(prompts or ()), *forward.PROMPTS], max_memory)
    found = Examination(str(path), str(checkpoint.config.get("model_type", "")), checkpoint.nbytes, len(checkpoint.tensors))
    found.findings += checks.files(checkpoint)
    found.findings += checks.config(checkpoint.text_config, settings)
    found.findings += checks.names(names, checkpoint)
    statistics = _scan(checkpoint, progress)
    for check in (checks.scales, checks.norms, checks.gates):
        found.findings += check(names, statistics)
    found.findings += checks.values(statistics)
    found.findings += checks.emptiness(names, statistics, sizes)
    _run(found, checkpoint, sizes, statistics, prompts, max_new_tokens, progress, thorough)
    found.findings.sort(key=lambda f: {"error": 0, "warning": 1}.get(f.severity, 2))
    found.seconds = time.perf_counter() - started
    found.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return found


def _supported(checkpoint):
    for file in ("quantize_config.json", "hf_quant_config.json"):
        if (Path(checkpoint.path) / file).exists():
            raise CannotRun(f"{checkpoint.path}: quantised weights ({file}) are not supported yet")
    return read_settings(checkpoint)


def _fits(model, texts, limit):
    """What is held at once: one tensor in float32 blocks, the layer that is read, activations and logits of the prompts."""
    layer, largest, sizes = {}, 0, model.sizes
    for name, info in model.checkpoint.tensors.items():
        size = info.end - info.begin
        largest = max(largest, size)
        parts = name.split(".layers.")
        if len(parts) == 2:
            index = parts[1].split(".")[0]
            layer[index] = layer.get(index, 0) + size
    tokens = [_count_tokens(model, text) for text in texts]
    needed = (256 << 20) + max([largest, *layer.values()]) + 4 * sum(tokens) * (
        sizes.vocab + 8 * max(sizes.intermediate, sizes.hidden)) + 32 * max(tokens, default=0) * sizes.vocab
    if needed > limit:
        raise CannotRun(f"{model.checkpoint.path}: needs about {needed / 2**20:.0f} MiB; --max-memory allows {limit / 2**20:.0f}")


def _count_tokens(model, text):
    try:
        return len(_encode(model, text)) if model.tokenizer else 0
    except ModelError:  # without a tokenizer no text is tried
        return 0


def _scan(checkpoint, progress):
    statistics = {}
    progress.stage("weights", sum(info.end - info.begin for info in checkpoint.tensors.values()))
    for name, info in checkpoint.tensors.items():
        statistics[name] = measure(name, checkpoint.read(name))
        progress.step(info.end - info.begin)
    return statistics


def _run(found, checkpoint, sizes, statistics, prompts, max_new_tokens, progress, thorough):
    try:
        model = load(checkpoint)
        texts = list(forward.PROMPTS if prompts is None else prompts)
        if model.tokenizer is None:
            raise ModelError(f"{checkpoint.path}: no tokenizer.json, so no text can be tried")
        sequences = [_encode(model, text) for text in texts]
        if any(not ids for ids in sequences):
            raise CannotRun("a prompt is empty")
    except (CheckpointError, ModelError) as error:
        if found.healthy:
            found.findings.append(Finding("forward-failed", str(checkpoint.path), str(error)))
        return
    own = prompts is None
    observer = forward.Observer(model.layer_types, progress.step)
    progress.stage("forward", model.num_layers)
    with np.errstate(all="ignore"):
        logits = model.forward(sequences, observe=observer)
        known = sequences if own else [_encode(model, text) for text in forward.PROMPTS]
        told = logits if own else model.forward(known)
        before = forward.token_losses(told, known)
        found.layers = observer.layers
        found.loss = forward.mean(forward.token_losses(logits, sequences))
        found.loss_of_a_guess = math.log(sizes.vocab)
        found.findings += forward.judge(observer, forward.mean(before), sizes.vocab, told)
        found.predictions = forward.predictions(model, logits, sequences, texts, max_new_tokens)
    width = np.zeros((1, 1), np.float32)
    found.which_path = ops.which_path("linear", width, width)
    if observer.first_bad is None:
        _probe(found, model, known, before, statistics, thorough, progress)


def _encode(model, text):
    return model.tokenizer.encode(text, add_special_tokens=False).ids


def _probe(found, model, sequences, before, statistics, thorough, progress):
    """Other readings of the tensors, each tried by running the model; not when a fault that was found already would blur
    what they say, nor (but the whole groups) with weights so large that each run costs minutes."""
    if any(f.severity == "error" and not f.code.startswith(("forward", "norm")) for f in found.findings) and not thorough:
        return
    lost = before.mean() > forward.WEAK * found.loss_of_a_guess
    orders = probes.ORDERS if lost or thorough else probes.ORDERS[:1]
    groups = [*probes.norm_groups(model, statistics), *probes.order_groups(model, model.sizes, orders),
              *probes.other_groups(model, model.sizes)]
    large = model.checkpoint.nbytes * sum(map(len, groups)) > PROBE_LIMIT and not thorough
    if large and not lost:
        return
    progress.stage("layout", 0)
    probe = probes.Probe(model, sequences, progress.step)
    known = {(f.code, f.where) for f in found.findings}
    healthy = EXPLAINED * found.loss_of_a_guess if lost else math.inf  # else the gain itself is what is found
    found.findings += probes.examine_layout(probe, before, groups, healthy, known, whole_only=large)
