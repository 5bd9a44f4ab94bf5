"""The model against its stored reference, against transformers, against itself run in other ways."""

import json

import numpy as np
import pytest
from checkpoints import TINY, copy_tiny, tiny_config, tiny_tensors, write_checkpoint

from fidelta.checkpoint import CheckpointError, open_checkpoint
from fidelta.model import ModelError, layers, load

LIMIT = 2e-4  # of logits up to 19; float32 in another order differs by about 2e-5
SAME = 5e-5


@pytest.fixture(scope="module")
def model():
    return load(TINY)


@pytest.fixture(scope="module")
def stored():
    return dict(np.load(TINY / "reference.npz"))


def far(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype == np.float32
    return float(np.abs(a - b).max(initial=0))


# Against others ------------------------------------------------------------------------------------------------------


def test_logits(model, stored):
    assert far(model.logits(stored["input_ids"]), stored["logits"]) < LIMIT


def test_hidden_states(model, stored):
    states = model.hidden_states(stored["input_ids"])
    assert len(states) == model.num_layers + 1
    for number, state in enumerate(states):
        assert far(state, stored[f"hidden_{number}"]) < LIMIT, f"hidden_{number}"


def transformers_logits(path, ids):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if not hasattr(transformers, "Qwen3_5ForConditionalGeneration"):
        pytest.skip(f"transformers {transformers.__version__} has no Qwen3.5")
    theirs = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return theirs(input_ids=torch.tensor(np.asarray(ids))[None]).logits[0].numpy()


def test_transformers(model, stored):
    ids = stored["input_ids"][::-1][:133].copy()
    assert far(model.logits(ids), transformers_logits(TINY, ids)) < LIMIT


def untied(tmp_path, rng):
    tensors = tiny_tensors()
    tensors["lm_head.weight"] = rng.standard_normal((256, 256)).astype(np.float32)
    return write_checkpoint(tmp_path, [tensors], tiny_config(tie_word_embeddings=False))


def test_untied_head(tmp_path, rng, stored):
    path, ids = untied(tmp_path, rng), stored["input_ids"][:40]
    got = load(path).logits(ids)
    assert far(got, transformers_logits(path, ids)) < LIMIT * np.abs(got).max() / 19


# Against itself ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [1, 63, 64, 65, 190])
def test_prefill_and_decode(model, stored, split):
    ids = stored["input_ids"]
    logits, state = model.prefill(ids[:split])
    assert state.length == split and far(logits, stored["logits"][split - 1]) < LIMIT
    for at in range(split, min(split + 10, 200)):
        logits = model.decode(ids[at], state)
        assert far(logits, stored["logits"][at]) < LIMIT
    assert state.length == split + 10


def test_states_are_independent(model, stored):
    ids = stored["input_ids"]
    _, state = model.prefill(ids[:50])
    branch = state.copy()
    model.decode((ids[50] + 1) % 256, branch)
    assert far(model.decode(ids[50], state), stored["logits"][50]) < LIMIT
    assert (state.length, branch.length) == (51, 51)


def test_generate_is_the_likeliest_of_one_pass(model, stored):
    prompt = stored["input_ids"][:20].tolist()
    new = model.generate(prompt, 12)
    logits = model.logits(prompt + new)
    assert new == logits[19:-1].argmax(axis=-1).tolist()
    assert model.generate(prompt, 0) == []


def test_packed_is_single(model, stored):
    ids = stored["input_ids"]
    sequences = [ids[:50], [], ids[50:51], ids, ids[7:136].tolist()]
    together = model.forward(sequences)
    assert [len(logits) for logits in together] == [50, 0, 1, 200, 129]
    for sequence, logits in zip(sequences, together):
        assert far(logits, model.logits(sequence)) < SAME


def test_nothing_to_do(model):
    assert model.forward([]) == []
    assert model.logits([]).shape == (0, 256)
    assert [state.shape for state in model.hidden_states([])] == [(0, 256)] * 5


def test_attention_in_blocks(monkeypatch, rng):
    q, k, v = (rng.standard_normal((n, h, 8)).astype(np.float32) for n, h in ((30, 6), (37, 2), (37, 2)))
    whole, blocks = np.empty_like(q), np.empty_like(q)
    layers.attend(q, k, v, whole)
    monkeypatch.setattr(layers, "SCORES", 6 * 37 * 4)
    layers.attend(q, k, v, blocks)
    assert far(whole, blocks) < 1e-6
    for t, h in ((0, 0), (13, 5), (29, 3)):
        scores = k[:t + 8, h // 3].astype(np.float64) @ q[t, h] / np.sqrt(8)
        p = np.exp(scores - scores.max())
        assert np.abs(whole[t, h] - p @ v[:t + 8, h // 3] / p.sum()).max() < 1e-6


def test_safe_forms():
    with np.errstate(over="raise", invalid="raise"):
        got = layers.sigmoid(np.float32([-1000, -1, 0, 1, 1000]))
        assert got.tolist() == pytest.approx([0, 0.26894142, 0.5, 0.7310586, 1])
        q = np.full((3, 1, 4), 1e4, np.float32)
        out = np.empty_like(q)
        layers.attend(q, q, q, out)
    assert (out == 1e4).all()


# Watching and replacing ----------------------------------------------------------------------------------------------


def test_observe(model, stored):
    seen = []
    model.forward([stored["input_ids"][:9], stored["input_ids"][:4]],
                  observe=lambda layer, stage, array: seen.append((layer, stage, array.shape)))
    T, N = 13, 2
    x = (T, 256)
    delta = [("normed", x), ("qkv", (T, 1024)), ("conv", (T, 1024)), ("g", (T, 4)), ("beta", (T, 4)), ("o", (T, 4, 128)),
             ("state", (N, 4, 128, 128))]
    attention = [("normed", x), ("q", (T, 4, 64)), ("k", (T, 2, 64)), ("v", (T, 2, 64)), ("o", (T, 4, 64))]
    rest = [("mixer", x), ("residual_mid", x), ("mlp", x), ("residual", x)]
    want = [(-1, "input", x)]
    for layer, kind in enumerate(model.layer_types):
        want += [(layer, *what) for what in (delta if kind == "linear_attention" else attention) + rest]
    assert seen == [*want, (4, "final_norm", x), (4, "logits", (T, 256))]


def test_observed_arrays_stay(model, stored):
    kept = []
    model.forward([stored["input_ids"]], observe=lambda layer, stage, array: kept.append((stage, array, array.copy())))
    for stage, array, copy in kept:
        assert np.array_equal(array, copy), stage


def test_replaced_weights(model, stored):
    ids, name = stored["input_ids"][:30], "layers.0.linear_attn.in_proj_qkv.weight"
    qkv = model.weight(name)
    q, k, v = np.split(qkv, (256, 512))
    swapped = model.forward([ids], weights={name: np.concatenate([k, q, v])})[0]
    assert far(swapped, stored["logits"][:30]) > 0.01
    same = model.forward([ids], weights={name: np.asfortranarray(qkv)})[0]
    assert far(same, stored["logits"][:30]) < LIMIT


# Checkpoints that load -----------------------------------------------------------------------------------------------


def test_without_the_language_model_level(tmp_path, stored):
    tensors = {name.replace("model.language_model.", "model."): value for name, value in tiny_tensors().items()
               if ".visual." not in name}
    text_only = {**tiny_config()["text_config"], "architectures": ["Qwen3_5ForCausalLM"]}
    for number, config in enumerate((text_only, tiny_config())):
        path = write_checkpoint(tmp_path / str(number), [tensors], config)
        assert far(load(path).logits(stored["input_ids"]), stored["logits"]) < LIMIT


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_other_dtypes(tmp_path, stored, dtype):
    tensors = {name: value.astype(dtype) for name, value in tiny_tensors().items()}
    got = load(write_checkpoint(tmp_path, [tensors])).logits(stored["input_ids"])
    assert far(got, stored["logits"]) < (0.05 if dtype == np.float16 else LIMIT)


def test_unaligned_tensors(tmp_path, stored):
    path = copy_tiny(tmp_path / "odd")
    file = path / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + whole[8:8 + length] + b" " + whole[8 + length:])
    assert open_checkpoint(path).problems == []
    assert far(load(path).logits(stored["input_ids"]), stored["logits"]) < LIMIT


def test_tokenizer(tmp_path, model):
    assert model.tokenizer.decode(model.tokenizer.encode("let x = 1").ids) == "let x = 1"
    path = copy_tiny(tmp_path / "copy")
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer.json"):
        load(path).tokenizer
    (path / "tokenizer.json").unlink()
    assert load(path).tokenizer is None


# Checkpoints that do not ---------------------------------------------------------------------------------------------


def config_says(**changes):
    def make(path):
        (copy_tiny(path) / "config.json").write_text(json.dumps(tiny_config(**changes)))

    return make


def quantised(path):
    config = {**tiny_config(), "quantization_config": {"quant_method": "fp8"}}
    (copy_tiny(path) / "config.json").write_text(json.dumps(config))


def renamed(old, new):
    return lambda path: write_checkpoint(path, [{name.replace(old, new): value for name, value in tiny_tensors().items()}])


def replaced(name, change):
    def make(path):
        tensors = tiny_tensors()
        tensors[name] = change(tensors[name])
        write_checkpoint(path, [tensors])

    return make


def cut(path):
    file = copy_tiny(path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:6_960_000])


NORM = "model.language_model.norm.weight"


@pytest.mark.parametrize("make, text", [
    (config_says(model_type="qwen3_next"), "Qwen3-Next (q, k, v and z interleaved in in_proj_qkvz) is not supported"),
    (renamed("in_proj_qkv.", "in_proj_qkvz."), "Qwen3-Next (q, k, v and z interleaved in in_proj_qkvz) is not supported"),
    (config_says(model_type="qwen3_5_moe_text"), "mixture of experts (model_type qwen3_5_moe_text) is not supported"),
    (config_says(model_type="llama"), "model_type llama is not supported; expected qwen3_5_text"),
    (quantised, "quantised weights (quantization_config, method fp8) are not supported"),
    (config_says(hidden_act="gelu"), "config.json: hidden_act 'gelu' is not supported; expected 'silu'"),
    (config_says(attention_bias=True), "config.json: attention_bias True is not supported; expected False"),
    (config_says(rope_parameters={"rope_type": "yarn"}),
     "config.json: rope_type 'yarn' is not supported; expected 'default'"),
    (config_says(rms_norm_eps="small"), "config.json: rms_norm_eps is 'small'; expected a number above 0"),
    (config_says(hidden_size=None), "config.json: hidden_size is missing"),
    (renamed("layers.2.mlp.up_proj", "x"), "model.language_model.layers.2.mlp.up_proj.weight is missing"),
    (replaced(NORM, lambda w: w[:-1].copy()), f"{NORM} has shape [255]; expected [256]"),
    (replaced(NORM, lambda w: w.astype(np.float64)), f"{NORM} has dtype F64; expected BF16, F16, F32"),
    (config_says(linear_conv_kernel_dim=7), "config.json: linear_conv_kernel_dim is 7; the ops take 2 .. 6"),
    (cut, "model.language_model.layers.3.self_attn.v_proj.weight cannot be read, see the problems of the files "
          "(and 1 more fault)"),
])
def test_refused(tmp_path, make, text):
    path = tmp_path / "model"
    make(path)
    with pytest.raises(ModelError) as error:
        load(path)
    assert str(error.value) == f"{path}: {text}"


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError):
        load(tmp_path)


@pytest.mark.parametrize("ids, text", [
    ([256], "token ids are 256 .. 256; expected 0 .. 255"),
    ([0, -1], "token ids are -1 .. 0; expected 0 .. 255"),
    ([0.5], "token ids have shape (1,) and dtype float64; expected a list of whole numbers"),
    ([[1]], "token ids have shape (1, 1) and dtype int64; expected a list of whole numbers"),
])
def test_bad_ids(model, ids, text):
    with pytest.raises(ModelError) as error:
        model.logits(ids)
    assert str(error.value) == text


def test_prefill_needs_a_token(model):
    with pytest.raises(ModelError, match="expected at least one"):
        model.prefill([])
