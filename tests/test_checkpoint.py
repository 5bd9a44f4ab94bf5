"""Reading checkpoints: every byte that is whole comes through, everything broken becomes a problem and no traceback."""

import json
import struct

import numpy as np
import pytest
from checkpoints import TINY, copy_tiny, tiny_config, tiny_tensors, write_checkpoint
from safetensors import safe_open

from fidelta.checkpoint import CheckpointError, expected_tensors, name_map, open_checkpoint
from fidelta.checkpoint.header import DTYPES, HEADER_LIMIT

CONFIG = {"model_type": "x"}


def directory(path, **files):
    """A directory with config.json and these files, `__` in a name standing for a dot."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content)
    return path


def tensor_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def problems(path, file):
    """[(code, where)] of a checkpoint of one file; every tensor that is listed can be read."""
    checkpoint = open_checkpoint(directory(path, model__safetensors=file))
    for name in checkpoint.tensors:
        checkpoint.read(name)
    for problem in checkpoint.problems:
        assert "\n" not in problem.text
    return [(problem.code, problem.where) for problem in checkpoint.problems]


# Whole files ---------------------------------------------------------------------------------------------------------


def test_tiny_as_the_library_reads_it():
    checkpoint = open_checkpoint(TINY)
    assert checkpoint.problems == [] and checkpoint.files == ["model.safetensors"]
    assert checkpoint.text_config is checkpoint.config["text_config"]
    assert checkpoint.nbytes == sum(checkpoint.read(name).nbytes for name in checkpoint.tensors)
    with safe_open(TINY / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(checkpoint.tensors)
        for name in file.keys():
            want, got = file.get_tensor(name), checkpoint.read(name)
            assert got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


def test_views_are_read_only_and_not_copied():
    checkpoint = open_checkpoint(TINY)
    name = "model.language_model.norm.weight"
    view = checkpoint.read(name)
    assert not view.flags.writeable and not view.flags.owndata
    assert np.shares_memory(view, checkpoint.read(name))
    with pytest.raises(ValueError):
        view[0] = 1


def test_every_dtype(tmp_path):
    header, position = {}, 0
    for dtype, (bits, _) in DTYPES.items():
        header[dtype] = entry(dtype, [2, 4], position, position + bits)
        position += bits
    checkpoint = open_checkpoint(directory(tmp_path, model__safetensors=tensor_file(header, bytes(position))))
    assert checkpoint.problems == []
    for dtype, (bits, numpy_dtype) in DTYPES.items():
        assert checkpoint.read(dtype).shape == ((bits,) if numpy_dtype is None else (2, 4))


def test_empty_and_scalar_tensors(tmp_path):
    header = {"none": entry("F32", [0, 3], 0, 0), "one": entry("F32", [], 0, 4), "end": entry("BF16", [0], 4, 4)}
    checkpoint = open_checkpoint(directory(tmp_path, model__safetensors=tensor_file(header, struct.pack("<f", 2.5))))
    assert checkpoint.problems == []
    assert checkpoint.read("one") == 2.5 and checkpoint.read("none").shape == (0, 3) and checkpoint.read("end").shape == (0,)


def test_shards_with_index(tmp_path):
    tensors = tiny_tensors()
    names = sorted(tensors)
    shards = [{name: tensors[name] for name in names[part::3]} for part in range(3)]
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, shards))
    assert checkpoint.problems == [] and len(checkpoint.files) == 3 and set(checkpoint.tensors) == set(names)
    for name in names:
        assert checkpoint.read(name).tobytes() == tensors[name].tobytes()


# What is no checkpoint -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make, text", [
    (lambda path: None, "no such directory"),
    (lambda path: path.write_text(""), "not a directory"),
    (lambda path: path.mkdir(), "config.json cannot be read: No such file or directory"),
    (lambda path: (path.mkdir(), (path / "config.json").write_text("{")), "config.json is not JSON"),
    (lambda path: (path.mkdir(), (path / "config.json").write_bytes(b"\xff\xfe{")), "config.json is not JSON"),
    (lambda path: (path.mkdir(), (path / "config.json").write_text("[" * 100_000)), "config.json is not JSON"),
    (lambda path: (path.mkdir(), (path / "config.json").write_text("[]")), "config.json is not a JSON object"),
    (lambda path: directory(path), "no safetensors file"),
], ids=["nothing", "file", "no config", "half config", "bytes", "deep", "list", "no tensors"])
def test_no_checkpoint(tmp_path, make, text):
    path = tmp_path / "model"
    make(path)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    assert str(error.value) == f"{path}: {text}"


def test_read_says_why():
    with pytest.raises(CheckpointError, match="nonsense is not in the checkpoint"):
        open_checkpoint(TINY).read("nonsense")


# Broken files --------------------------------------------------------------------------------------------------------

A = {"a": entry("F32", [2], 0, 8)}
BROKEN = {
    "empty file": (b"", [("file-truncated", "model.safetensors")]),
    "7 bytes": (b"\0" * 7, [("file-truncated", "model.safetensors")]),
    "header cut off": (tensor_file(A)[:20], [("file-truncated", "model.safetensors")]),
    "huge header length": (tensor_file(A, bytes(8), length=2**63), [("file-header", "model.safetensors")]),
    "header over the limit": (tensor_file(A, bytes(8), length=HEADER_LIMIT + 1), [("file-header", "model.safetensors")]),
    "header length of the limit": (tensor_file(A, bytes(8), length=HEADER_LIMIT), [("file-truncated", "model.safetensors")]),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n", [("file-pointer", "model.safetensors")]),
    "empty header": (tensor_file(b""), [("file-header", "model.safetensors")]),
    "garbage": (tensor_file(b"\x80garbage"), [("file-header", "model.safetensors")]),
    "deep": (tensor_file(b"[" * 200_000), [("file-header", "model.safetensors")]),
    "long number": (tensor_file(b'{"a": ' + b"9" * 5000 + b"}"), [("file-header", "model.safetensors")]),
    "list": (tensor_file(b"[1]"), [("file-header", "model.safetensors")]),
    "entry is no object": (tensor_file({"a": 3}), [("file-header", "a")]),
    "no dtype": (tensor_file({"a": {"shape": [], "data_offsets": [0, 0]}}), [("file-header", "a")]),
    "negative shape": (tensor_file({"a": entry("F32", [-1], 0, 0)}), [("file-header", "a")]),
    "shape of floats": (tensor_file({"a": entry("F32", [1.0], 0, 4)}, bytes(4)),
                        [("file-header", "a"), ("file-offsets", "model.safetensors")]),
    "three offsets": (tensor_file({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0, 0]}}), [("file-header", "a")]),
    "unknown dtype": (tensor_file({"a": entry("F7", [8], 0, 7)}, bytes(7)), [("dtype-unknown", "a")]),
    "data cut off": (tensor_file(A, bytes(7)), [("file-truncated", "model.safetensors")]),
    "bytes left over": (tensor_file(A, bytes(9)), [("file-offsets", "model.safetensors")]),
    "wrong size": (tensor_file({"a": entry("F32", [3], 0, 8)}, bytes(8)), [("file-offsets", "a")]),
    "huge shape": (tensor_file({"a": entry("F32", [2**62, 2**62, 4], 0, 8)}, bytes(8)), [("file-offsets", "a")]),
    "end before begin": (tensor_file({"a": entry("F32", [2], 8, 0)}, bytes(8)),
                         [("file-offsets", "a"), ("file-offsets", "a"), ("file-offsets", "model.safetensors")]),
    "overlap": (tensor_file({**A, "b": entry("F32", [2], 4, 12)}, bytes(12)), [("file-offsets", "b")]),
    "gap": (tensor_file({**A, "b": entry("F32", [1], 12, 16)}, bytes(16)), [("file-offsets", "b")]),
    "gap at the front": (tensor_file({"a": entry("F32", [1], 4, 8)}, bytes(8)), [("file-offsets", "a")]),
    "offsets beyond everything": (tensor_file({"a": entry("F32", [2], 2**63, 2**63 + 8)}, bytes(8)),
                                  [("file-offsets", "a"), ("file-truncated", "model.safetensors")]),
    "name twice": (tensor_file(b'{"a":%s,"a":%s}' % ((json.dumps(A["a"]).encode(),) * 2), bytes(8)),
                   [("tensor-duplicate", "a")]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file(tmp_path, case):
    file, want = BROKEN[case]
    assert problems(tmp_path, file) == want


def test_a_cut_file_keeps_its_whole_tensors(tmp_path):
    path = copy_tiny(tmp_path / "cut")
    file = path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:len(whole) // 2])
    checkpoint = open_checkpoint(path)
    assert [problem.code for problem in checkpoint.problems] == ["file-truncated"]
    assert checkpoint.tensors and checkpoint.unreadable
    for name in checkpoint.tensors:
        checkpoint.read(name)
    with pytest.raises(CheckpointError, match="cannot be read, see problems"):
        checkpoint.read(next(iter(checkpoint.unreadable)))
    assert name_map(checkpoint).missing == []  # they are there, but cut off


@pytest.mark.parametrize("cut", range(0, 400, 13))
def test_any_cut(tmp_path, cut):
    file = tensor_file({**A, "b": entry("BF16", [3, 4], 8, 32)}, bytes(32))
    if cut < len(file):
        assert problems(tmp_path, file[:cut])


def test_flipped_bytes_never_raise(tmp_path, rng):
    file = tensor_file({**A, "b": entry("BF16", [3, 4], 8, 32), "c": entry("U8", [], 32, 33)}, bytes(33))
    for _ in range(150):
        broken = bytearray(file)
        for at in rng.integers(0, len(file) - 33, 2):
            broken[at] = rng.integers(256)
        problems(tmp_path, bytes(broken))


# Several files -------------------------------------------------------------------------------------------------------


def two_shards(tmp_path, **options):
    shards = [{"a": np.zeros(2, np.float32)}, {"b": np.ones(3, np.float32)}]
    return write_checkpoint(tmp_path, shards, CONFIG, **options), *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))


def found(path):
    return [(problem.code, problem.where) for problem in open_checkpoint(path).problems]


def test_missing_shard(tmp_path):
    path, _, second = two_shards(tmp_path)
    (path / second).unlink()
    assert found(path) == [("shard-missing", second)]


def test_missing_shard_without_index(tmp_path):
    path, _, second = two_shards(tmp_path, index=False)
    assert found(path) == [("index-mismatch", "model.safetensors.index.json")]
    (path / second).unlink()
    assert ("shard-missing", second) in found(path)


def test_index_against_files(tmp_path):
    path, first, second = two_shards(tmp_path)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": second, "c": first, "d": "../x.safetensors", "e": 3}}))
    assert found(path) == [("index-mismatch", name) for name in ("d", "e", "a", "c", "b")]
    index.write_text(json.dumps({"weight_map": {"a": first}}))
    assert found(path) == [("index-mismatch", second)]
    for text in ("{", "[]", "{}", '{"weight_map": 3}'):
        index.write_text(text)
        assert ("index-mismatch", "model.safetensors.index.json") in found(path)
        assert set(open_checkpoint(path).tensors) == {"a", "b"}


def test_a_tensor_in_two_files(tmp_path):
    shards = [{"a": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}, {"a": np.ones(2, np.float32)}]
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, shards, CONFIG))
    assert [(problem.code, problem.where) for problem in checkpoint.problems] == [("tensor-duplicate", "a")]
    assert checkpoint.read("a")[0] == 1  # the index names the second file


# Names ---------------------------------------------------------------------------------------------------------------


def test_names_of_tiny():
    checkpoint = open_checkpoint(TINY)
    names = name_map(checkpoint)
    assert names.prefix == "model.language_model." and names.repeated_prefix == 0
    assert set(names.of) == set(expected_tensors(checkpoint)) and "lm_head.weight" not in names.of
    assert (names.missing, names.unexpected, names.wrong_shape, names.wrong_dtype) == ([], [], [], [])
    assert set(names.ignored) == {name for name in checkpoint.tensors if ".visual." in name}


@pytest.mark.parametrize("prefix, repeats", [("", 0), ("model.", 0), ("language_model.model.", 0),
                                             ("model.language_model.language_model.", 2),
                                             ("model.language_model.language_model.language_model.", 3)])
def test_any_prefix(tmp_path, prefix, repeats):
    tensors = {name.replace("model.language_model.", prefix, 1): value for name, value in tiny_tensors().items()}
    names = name_map(open_checkpoint(write_checkpoint(tmp_path, [tensors])))
    assert (names.prefix, names.repeated_prefix, names.missing, names.unexpected) == (prefix, repeats, [], [])


def test_wrong_names_shapes_and_dtypes(tmp_path):
    tensors = tiny_tensors()
    layer = "model.language_model.layers.1."
    tensors[layer + "linear_attn.in_proj_qkvz.weight"] = tensors.pop(layer + "linear_attn.in_proj_qkv.weight")
    tensors["model.language_model.layers.9.linear_attn.norm.weight"] = np.zeros(128, np.float32)
    tensors["mtp.layers.0.input_layernorm.weight"] = np.zeros(256, np.float32)
    tensors["lm_head.weight"] = np.zeros((256, 256), np.float32)
    tensors[layer + "linear_attn.conv1d.weight"] = np.zeros((1024, 4), np.float32)
    tensors[layer + "mlp.up_proj.weight"] = np.zeros((512, 256), np.int8)
    names = name_map(open_checkpoint(write_checkpoint(tmp_path, [tensors])))
    assert names.missing == ["layers.1.linear_attn.in_proj_qkv.weight"]
    assert names.unexpected == [layer + "linear_attn.in_proj_qkvz.weight",
                                "model.language_model.layers.9.linear_attn.norm.weight"]
    assert {"lm_head.weight", "mtp.layers.0.input_layernorm.weight"} <= set(names.ignored)
    assert names.wrong_shape == [(layer + "linear_attn.conv1d.weight", (1024, 4), (1024, 1, 4))]
    assert names.wrong_dtype == [(layer + "mlp.up_proj.weight", "I8", ("BF16", "F16", "F32"))]


@pytest.mark.parametrize("changes, text", [
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "256"}, "hidden_size is '256'; expected a whole number above 0"),
    ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000; expected at most 10000"),
    ({"num_hidden_layers": 5}, "layer_types is no list of num_hidden_layers = 5 names"),
    ({"layer_types": ["linear_attention"] * 3 + ["mamba"]},
     "layer_types has 'mamba'; expected linear_attention or full_attention"),
    ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is no multiple of linear_num_key_heads 2"),
])
def test_config_fields(tmp_path, changes, text):
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, [{"a": np.zeros(1, np.float32)}], tiny_config(**changes)))
    for function in (expected_tensors, name_map):
        with pytest.raises(CheckpointError) as error:
            function(checkpoint)
        assert str(error.value) == f"config.json: {text}"
