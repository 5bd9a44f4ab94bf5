"""A checkpoint directory: config.json, safetensors files, perhaps their index."""

import json
import mmap
import os
import re

import numpy as np

from .header import DTYPES, Problem, TensorInfo, read_header  # noqa: F401 (TensorInfo is exported from here)

INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A directory that is no checkpoint, or a tensor that cannot be read; one line."""


def open_checkpoint(path):
    """Open a checkpoint directory: read config.json and the header of every safetensors file; no tensor is read.

    What is broken in the tensor files is collected in `.problems`. CheckpointError only when there is no directory, no
    config.json with a JSON object, or no tensor file.
    """
    path = os.fspath(path)
    if not os.path.isdir(path):
        raise CheckpointError(f"{path}: {'not a directory' if os.path.exists(path) else 'no such directory'}")
    return Checkpoint(path, _read_config(path))


class Checkpoint:
    """An opened checkpoint.

    path, config, text_config   the directory, config.json, and its text_config (or config.json itself)
    files                       names of the tensor files that were read
    tensors                     name -> TensorInfo of every tensor that can be read
    unreadable                  name -> TensorInfo of those that are cut off, of a wrong size or of an unknown dtype
    unknown                     names of the files that are missing, or whose header tells nothing
    problems                    list of Problem
    nbytes                      bytes of all readable tensors
    """

    def __init__(self, path, config):
        text = config.get("text_config")
        self.path, self.config, self.text_config = path, config, text if isinstance(text, dict) else config
        self.problems, self.tensors, self.unreadable, self.unknown, self._maps = [], {}, {}, [], {}
        self.files, self._index = self._find_files()
        index = self._index
        for file in self.files:
            self._add_file(file, index)
        if index is not None:
            self._check_index(index)
        self.nbytes = sum(info.end - info.begin for info in self.tensors.values())

    def __repr__(self):
        return f"<Checkpoint {self.path}: {len(self.tensors)} tensors, {len(self.problems)} problems>"

    def read(self, name):
        """The tensor as a read-only NumPy view of the mapped file; nothing is copied. bfloat16 and 8-bit floats are those
        of ml_dtypes; 4- and 6-bit types come as their bytes. CheckpointError for a tensor that is not in `.tensors`."""
        info = self.tensors.get(name)
        if info is None:
            state = "cannot be read, see problems" if name in self.unreadable else "is not in the checkpoint"
            raise CheckpointError(f"{self.path}: {name} {state}")
        bits, dtype = DTYPES[info.dtype]
        values = self._bytes(info.file)[info.begin:info.end]
        return values if dtype is None else values.view(dtype).reshape(info.shape)

    def may_be_lost(self, name):
        """Whether a tensor could lie in one of the files `unknown`: where the index says, anywhere without one."""
        return bool(self.unknown) if self._index is None else self._index.get(name) in self.unknown

    def _bytes(self, file):
        if file not in self._maps:
            try:
                with open(os.path.join(self.path, file), "rb") as stream:
                    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{self.path}: {file} cannot be mapped: {error}") from None
            self._maps[file] = np.frombuffer(mapped, np.uint8)
        return self._maps[file]

    def _find_files(self):
        """(files to read, weight_map of the index or None)."""
        present = sorted(file for file in os.listdir(self.path) if file.endswith(".safetensors"))
        index = self._read_index()
        if index is None:
            if not present:
                raise CheckpointError(f"{self.path}: no safetensors file")
            self._check_shard_names(present)
            return present, None
        named = sorted(set(index.values()))
        for file in named:
            if file not in present:
                self.unknown.append(file)
                self._problem("shard-missing", file, f"{INDEX} names it, the directory does not hold it")
        for file in present:
            if file not in named:
                self._problem("index-mismatch", file, f"{INDEX} does not name it; it is not read")
        return [file for file in named if file in present], index

    def _read_index(self):
        """The weight_map of the index without entries that make no sense; None when there is no usable index."""
        path = os.path.join(self.path, INDEX)
        if not os.path.exists(path):
            return None
        try:
            index = _read_json(path)["weight_map"]
            index.items()
        except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
            self._problem("index-mismatch", INDEX, "no JSON object with a weight_map; every safetensors file is read")
            return None
        usable = {}
        for name, file in index.items():
            if isinstance(file, str) and file.endswith(".safetensors") and not re.search(r"[/\\\0]", file):
                usable[name] = file
            else:
                self._problem("index-mismatch", name, f"{INDEX} puts it in {file!r}, which is no file of this directory")
        return usable

    def _check_shard_names(self, present):
        """Without an index: holes in names such as model-00001-of-00003.safetensors."""
        parts = [match for file in present if (match := re.fullmatch(r"(.*-)(\d{5})(-of-(\d{5})\.safetensors)", file))]
        if parts and int(parts[0][4]) > 1:
            self._problem("index-mismatch", INDEX, f"missing beside {len(parts)} shards; every safetensors file is read")
        for head, tail, count in sorted({(match[1], match[3], int(match[4])) for match in parts}):
            holes = [file for n in range(count) if (file := f"{head}{n + 1:05}{tail}") not in present]
            self.unknown += holes
            for file in holes:
                self._problem("shard-missing", file, f"one of {count} shards by its name, {len(holes)} are missing")

    def _add_file(self, file, index):
        header = read_header(os.path.join(self.path, file))
        self.problems += header.problems
        if not header.known:
            self.unknown.append(file)
        for table, infos in ((self.tensors, header.tensors), (self.unreadable, header.unreadable)):
            for info in infos:
                other = self.tensors.get(info.name) or self.unreadable.get(info.name)
                if other is None:
                    table[info.name] = info
                    continue
                self._problem("tensor-duplicate", info.name, f"in {other.file} and in {file}")
                if index is not None and index.get(info.name) == file:
                    self.tensors.pop(info.name, None)
                    self.unreadable.pop(info.name, None)
                    table[info.name] = info

    def _check_index(self, index):
        """Each tensor lies where the index says."""
        found = {**self.unreadable, **self.tensors}
        for name, file in index.items():
            if name in found and found[name].file != file:
                self._problem("index-mismatch", name, f"{INDEX} puts it in {file}; it is in {found[name].file}")
            elif name not in found and file in self.files and file not in self.unknown:
                self._problem("index-mismatch", name, f"{INDEX} puts it in {file}, which does not hold it")
        for name, info in found.items():
            if name not in index:
                self._problem("index-mismatch", name, f"in {info.file}; {INDEX} does not name it")

    def _problem(self, code, where, text):
        self.problems.append(Problem(code, where, text))


def _read_json(path):
    with open(path, encoding="utf-8") as stream:
        return json.load(stream)


def _read_config(path):
    try:
        config = _read_json(os.path.join(path, "config.json"))
    except OSError as error:
        raise CheckpointError(f"{path}: config.json cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: config.json is not JSON") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: config.json is not a JSON object")
    return config
