"""Checkpoints of safetensors files: reading without trust, and the names a Qwen3.5 text model expects in them.

    checkpoint = fidelta.checkpoint.open_checkpoint("examples/tiny-qwen3_5")
    checkpoint.problems                                     # what is broken in the files
    names = fidelta.checkpoint.name_map(checkpoint)
    checkpoint.read(names.of["layers.0.linear_attn.in_proj_qkv.weight"])   # a read-only view of the mapped file
"""

from .files import Checkpoint, CheckpointError, Problem, TensorInfo, open_checkpoint
from .names import Expected, NameMap, expected_tensors, name_map
from .sizes import Sizes, read_sizes

__all__ = ["Checkpoint", "CheckpointError", "Expected", "NameMap", "Problem", "Sizes", "TensorInfo", "expected_tensors",
           "name_map", "open_checkpoint", "read_sizes"]
