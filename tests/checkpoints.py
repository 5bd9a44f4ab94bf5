"""Checkpoints for tests: the tiny one of examples/, and altered copies of it."""

import json
import shutil
from pathlib import Path

from safetensors.numpy import save_file

from fidelta.checkpoint import open_checkpoint

TINY = Path(__file__).parent.parent / "examples" / "tiny-qwen3_5"


def tiny_tensors():
    """name -> array of the tiny checkpoint, read by fidelta."""
    checkpoint = open_checkpoint(TINY)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def write_checkpoint(path, shards, config=None, index=True):
    """A checkpoint directory at `path`: `shards` is a list of {name: array}, one file each, written by the safetensors
    library, with an index when they are several. config.json is the tiny one's unless given."""
    path.mkdir(exist_ok=True)
    count, weight_map = len(shards), {}
    for number, tensors in enumerate(shards):
        file = "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    if count > 1 and index:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config or tiny_config()))
    return path


def tiny_config(**changes):
    """config.json of the tiny checkpoint; `changes` go to the text config, and to the top where they stand there too."""
    config = json.loads((TINY / "config.json").read_text())
    config["text_config"].update(changes)
    config.update((name, value) for name, value in changes.items() if name in config)
    return config


def copy_tiny(path):
    """A whole copy of the tiny checkpoint."""
    return Path(shutil.copytree(TINY, path))
