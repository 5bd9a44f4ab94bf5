"""What the doctor can find: one row a code, one Finding an instance."""

from dataclasses import asdict, dataclass

# code: (severity, likely cause, mend, how to verify)
CODES = {
    "file-truncated": ("error", "the download or copy ended early", "fetch this file again", "compare its size and checksum with the source's"),
    "file-header": ("error", "the file is not a safetensors file, or its header is damaged", "fetch this file again", "open it with the safetensors library"),
    "file-pointer": ("error", "the repository was cloned without git-lfs, so only pointers to the large files came", "run git lfs pull in the folder, or fetch this file again", "the file's size: a pointer has about 130 bytes"),
    "file-offsets": ("error", "the header's offsets and the data disagree: a faulty writer, or damage", "write or fetch this file again", "open it with the safetensors library"),
    "shard-missing": ("error", "the index names a shard that is not there", "fetch the missing shard", "list the folder against the index"),
    "index-mismatch": ("error", "the index and the shards come from different versions", "fetch index and shards together", "compare the index's weight_map with the headers"),
    "tensor-duplicate": ("error", "two shards hold the same tensor, so the one loaded depends on the reader", "remove the stale shard", "list the folder against the index"),
    "dtype-unknown": ("error", "the file uses an element type that is not known here", "update fidelta, or store the tensor in a common type", "read the file's header"),
    "config-assumed": ("info", "the config was written by an older tool, or by hand", "give the field the value that the model was trained with", "compare with the original's config.json"),
    "config-range": ("warning", "a slip in the config, or the value of another field", "give the field the value that the model was trained with", "compare with the original's config.json"),
    "name-missing": ("error", "the writer dropped or renamed the tensor; a reader leaves it uninitialised", "get the tensor from the original checkpoint", "compare the tensor lists of both"),
    "name-unexpected": ("warning", "a tensor that no part of the model reads: renamed, left over, or of another architecture", "rename or remove it", "compare with the original's tensor list"),
    "prefix-repeated": ("warning", "training, merging and serving tools each added the wrapper's prefix", "rename the tensors to one prefix", "list the tensor names"),
    "shape-mismatch": ("error", "config and tensors come from different models, or an axis was moved", "use the config of this checkpoint, or restore the tensor", "compare with the original's header"),
    "dtype-mismatch": ("error", "a tensor was quantised or cast without the config saying so", "restore the tensor, or declare the quantisation", "compare with the original's header"),
    "value-nan": ("error", "an overflow or a damaged file at writing", "restore the tensor from the source; if the source has it too, the source is broken", "count NaN in the source's tensor"),
    "value-inf": ("error", "a value overflowed the stored type (float16 ends at 65504)", "convert again from the source in bfloat16 or float32", "look at the source's largest value"),
    "value-zero": ("error", "the tensor was never filled, or was zeroed", "restore the tensor from the original", "compare with the original's tensor"),
    "value-zero-rows": ("error", "small weights rounded to zero by a quantiser, or a block that was never filled", "restore the tensor from the original; keep it in 16 bit when quantising", "count zero rows in the original"),
    "value-constant": ("warning", "the tensor was never trained or was reset", "restore the tensor from the original", "compare with the original's tensor"),
    "scale-outlier": ("warning", "a scale that is wrong by a power of two or more, a double or missing dequantisation, or an exchanged layer", "compare with the original and restore the tensor", "compare the tensor's std with the original's"),
    "norm-shifted": ("error", "a converter added one to weights that are stored as an offset from one", "subtract one from these tensors", "their mean should be near 0"),
    "norm-unshifted": ("error", "a converter took the gated norm's plain weight for an offset from one", "add one to these tensors", "their mean should be near 1"),
    "gate-range": ("error", "A_log or dt_bias is outside what a trained gate uses, or overflowed float16", "restore the tensor from the original in float32 or bfloat16", "A_log lies near log(0.01) .. log(16) at the start of training"),
    "layout-order": ("error", "the q, k and v blocks were written in another order than the reader's q, k, v", "put the blocks back in the order q, k, v", "the prompts' loss falls by the number given"),
    "layout-exchanged": ("error", "a converter exchanged two tensors of one shape", "exchange them back", "the prompts' loss falls by the number given"),
    "layout-taps": ("error", "the filter's taps were written last first, as a convolution instead of a correlation", "reverse the last axis", "the prompts' loss falls by the number given"),
    "layout-gate": ("error", "queries and gates were written as two blocks instead of head by head", "put each head's query and gate together", "the prompts' loss falls by the number given"),
    "forward-nan": ("error", "the first operation that gives NaN or Inf is named here; its weights or input scale are at fault", "look at this layer's findings above", "run the original checkpoint"),
    "forward-silent": ("warning", "the layer adds next to nothing: a zeroed or wrongly scaled output projection or gate", "compare this layer's tensors with the original", "its output's std beside the other layers'"),
    "forward-explosion": ("warning", "the residual stream grows beyond what a trained model shows: a scale or norm is wrong from this layer on", "compare this layer's tensors with the original", "the residual's std layer by layer"),
    "forward-gibberish": ("error", "the model does not predict plain text: the weights are broken or belong to another config", "if nothing above names a tensor, the source itself is broken: get the original", "run the original on the same prompts"),
    "forward-weak": ("warning", "the model predicts plain text worse than a trained model does: a tensor is wrong, or it was hardly trained", "look at the findings above; compare the tensors with the original", "run the original on the same prompts"),
    "forward-collapse": ("error", "the same token wins everywhere: logits are NaN, or a norm or head is broken", "look at the final norm and lm_head", "run the original on the same prompts"),
    "forward-failed": ("error", "the checkpoint's tensors do not make a model that can run", "mend the findings above first", "run the doctor again"),
}


@dataclass
class Finding:
    """One thing found. `number` is what was measured in `where` (a tensor, layer or file), `threshold` what it was held
    against."""

    code: str
    where: str
    text: str
    number: float | str | None = None
    threshold: float | str | None = None

    @property
    def severity(self):
        return CODES[self.code][0]

    def as_dict(self):
        _, cause, mend, verify = CODES[self.code]
        return {**asdict(self), "severity": self.severity, "cause": cause, "mend": mend, "verify": verify}
