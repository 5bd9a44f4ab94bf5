"""Layout probes: what is found, and that chance is not."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fidelta.cli import main
from fidelta.doctor import examine, forward, probes
from fidelta.model import Model, load

TINY = Path(__file__).parent.parent / "examples" / "tiny-qwen3_5"
GDN = "model.language_model.layers.{}.linear_attn.{}.weight"


def changed(path, change):
    """A copy of the tiny checkpoint at `path` whose tensors went through `change(tensors)`."""
    shutil.copytree(TINY, path, ignore=shutil.ignore_patterns("reference.npz"))
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    dense = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(dense, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("prompt", ["a", "x = ", "zebra", "hello wrld qq", "123 456"])
def test_a_short_prompt_raises_no_alarm(prompt):
    examination = examine(TINY, prompts=[prompt], max_new_tokens=1)
    assert not examination.findings and (examination.loss is None) == (len(prompt) == 1)


def test_a_lone_token_has_no_loss(capsys):
    assert main(["doctor", str(TINY), "--prompt", "a", "--max-new-tokens", "1", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["loss"] is None and told["predictions"][0]["perplexity"] is None
    assert main(["doctor", str(TINY), "--prompt", "a", "--max-new-tokens", "1"]) == 0


def test_filters_exchanged_alone(tmp_path):
    """Rows of conv1d in the order k, q, v while in_proj_qkv keeps q, k, v."""

    def change(tensors):
        w = tensors[GDN.format(2, "conv1d")]
        tensors[GDN.format(2, "conv1d")] = np.concatenate([w[256:512], w[:256], w[512:]])

    findings = examine(changed(tmp_path / "copy", change), max_new_tokens=0).findings
    assert {(f.code, f.where) for f in findings} == {("layout-order", GDN.format(2, "conv1d"))}


def exchange_gate_and_up(tensors):
    gate, up = (f"model.language_model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    return {("layout-exchanged", gate), ("layout-exchanged", up)}


def reverse_taps(tensors):
    name = GDN.format(1, "conv1d")
    tensors[name] = tensors[name][..., ::-1]
    return {("layout-taps", name)}


def part_queries_from_gates(tensors):
    name = "model.language_model.layers.3.self_attn.q_proj.weight"
    heads = json.loads((TINY / "config.json").read_text())["text_config"]["num_attention_heads"]
    w = tensors[name]
    tensors[name] = w.reshape(heads, 2, -1, w.shape[1]).swapaxes(0, 1).reshape(w.shape)
    return {("layout-gate", name)}


def shift_a_norm(tensors):
    name = "model.language_model.layers.0.input_layernorm.weight"
    tensors[name] = (tensors[name].astype(np.float32) + 1).astype(tensors[name].dtype)
    return {("norm-shifted", name)}


def silence_a_norm(tensors):
    name = "model.language_model.layers.3.self_attn.k_norm.weight"
    tensors[name] = np.full_like(tensors[name], -1)
    return {("value-zero", name)}


@pytest.mark.parametrize("fault", [exchange_gate_and_up, reverse_taps, part_queries_from_gates, shift_a_norm, silence_a_norm])
def test_other_readings(fault, tmp_path):
    expected = set()
    path = changed(tmp_path / "copy", lambda tensors: expected.update(fault(tensors)))
    assert {(f.code, f.where) for f in examine(path, max_new_tokens=0).findings} == expected


@pytest.mark.parametrize("change, code", [(lambda w: w * 10, "scale-outlier"), (lambda w: np.roll(w, 1, 0), "forward-weak")])
def test_a_model_that_is_broken_elsewhere_blames_no_layout(change, code, tmp_path):
    def scale(tensors):
        name = GDN.format(1, "out_proj")
        tensors[name] = change(tensors[name].astype(np.float32)).astype(tensors[name].dtype)

    codes = {f.code for f in examine(changed(tmp_path / "copy", scale), max_new_tokens=0).findings}
    assert code in codes and not any(found.startswith("layout") for found in codes)


@pytest.mark.parametrize("config", [{"num_experts": 4}, {"model_type": "qwen3_5_moe_text"}, {"hidden_act": "gelu"}])
def test_unsupported_models_cannot_run(config, tmp_path, capsys):
    path = changed(tmp_path / "copy", lambda tensors: None)
    told = json.loads((path / "config.json").read_text())
    told["text_config"].update(config)
    (path / "config.json").write_text(json.dumps(told))
    assert main(["doctor", str(path)]) == 2
    assert "not supported" in capsys.readouterr().err


def test_gain_must_be_beyond_chance():
    rng = np.random.default_rng(1)
    before = rng.exponential(size=400)
    assert not probes.gain_of(before, before + rng.normal(0, 1, 400))[1]
    assert probes.gain_of(before, before - 0.2 + rng.normal(0, 0.5, 400))[1]
    assert probes.gain_of(before, np.full(400, np.nan)) == (0.0, False)
    assert probes.gain_of(before[:1], before[:1] - 1) == (0.0, False)


def test_reordered():
    rows = np.array(["k0", "k1", "v0", "v1", "v2", "q0", "q1"])
    assert probes.reordered(rows, 2, 3, "kvq").tolist() == ["q0", "q1", "k0", "k1", "v0", "v1", "v2"]


def test_a_reading_runs_only_the_layers_from_its_own_on():
    model = load(TINY)
    probe = probes.Probe(model, [model.tokenizer.encode(text).ids for text in forward.PROMPTS])
    groups = [*probes.order_groups(model, model.sizes, ("kqv",)), *probes.other_groups(model, model.sizes)]
    readings = [reading for group in groups for reading in group]
    for so_far in ((), (readings[1],)):
        for reading in (*readings, probes._norm(["norm.weight"])):
            alone = probes.Probe(model, probe.sets["all"])  # has kept nothing
            assert np.array_equal(probe.losses(so_far, [reading], "few"), alone.losses((), [*so_far, reading], "few"))


def test_the_probes_cost_a_few_passes(monkeypatch):
    """Tokens through layers, in units of one pass over the five prompts, of a healthy checkpoint."""
    tokens = []
    plain = Model._layer
    monkeypatch.setattr(Model, "_layer", lambda self, x, *rest: tokens.append(len(x)) or plain(self, x, *rest))
    assert examine(TINY, max_new_tokens=0).healthy
    model = load(TINY)
    whole = model.num_layers * sum(len(model.tokenizer.encode(text).ids) for text in forward.PROMPTS)
    assert sum(tokens) < 8 * whole
