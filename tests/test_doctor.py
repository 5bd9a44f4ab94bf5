"""fidelta doctor on the tiny checkpoint and on broken copies of it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_checkpoint
from safetensors.numpy import load_file, save_file

from fidelta.checkpoint import open_checkpoint
from fidelta.cli import main
from fidelta.doctor import CannotRun, checks, examine
from fidelta.model.settings import read_settings

TINY = Path(__file__).parent.parent / "examples" / "tiny-qwen3_5"
PREFIX = "model.language_model."
QKV = PREFIX + "layers.{}.linear_attn.in_proj_qkv.weight"


@pytest.fixture
def broken(tmp_path):
    """Makes a copy of the tiny checkpoint whose tensors went through `change(tensors)`."""

    def make(change=None, config=None):
        shutil.copytree(TINY, tmp_path / "copy", ignore=shutil.ignore_patterns("reference.npz"))
        path = tmp_path / "copy" / "model.safetensors"
        if change:
            tensors = load_file(path)
            tensors = change(tensors) or tensors
            save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, path, metadata={"format": "pt"})
        if config:
            file = tmp_path / "copy" / "config.json"
            told = json.loads(file.read_text())
            config(told)
            file.write_text(json.dumps(told))
        return tmp_path / "copy"

    return make


def found(path, **options):
    examination = examine(path, max_new_tokens=2, **options)
    return examination, {(f.code, f.where) for f in examination.findings}


def set_to(name, value):
    def change(tensors):
        tensors[name] = np.full_like(tensors[name], value)

    return change


def test_the_healthy_checkpoint_has_no_findings():
    examination, findings = found(TINY, thorough=True)
    assert not findings and examination.exit_code == 0 and examination.verdict == "healthy"
    assert examination.loss < 1.0
    assert [row["kind"] for row in examination.layers] == ["linear_attention"] * 3 + ["full_attention"]
    assert len(examination.predictions) == 5 and all(0 < row["entropy_ratio"] < 0.3 for row in examination.predictions)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_zeroed_out_proj(layer, broken):
    name = f"{PREFIX}layers.{layer}.linear_attn.out_proj.weight"
    examination, findings = found(broken(set_to(name, 0)))
    assert ("value-zero", name) in findings and examination.exit_code == 1
    assert any(code == "forward-silent" and f"layer {layer} " in where for code, where in findings)


@pytest.mark.parametrize("name", ["layers.1.linear_attn.in_proj_z.weight", "layers.3.self_attn.o_proj.weight",
                                  "layers.2.mlp.up_proj.weight", "embed_tokens.weight", "layers.0.linear_attn.A_log"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_bad_value(name, value, broken):
    def change(tensors):
        tensors[PREFIX + name].reshape(-1)[-1] = value

    examination, findings = found(broken(change))
    assert ("value-nan" if np.isnan(value) else "value-inf", PREFIX + name) in findings and examination.exit_code == 1


def test_nan_in_the_vision_tower_is_seen(broken):
    names = []

    def change(tensors):
        names.append(next(name for name in tensors if "visual" in name))
        tensors[names[0]].reshape(-1)[0] = np.nan

    _, findings = found(broken(change))
    assert findings == {("value-nan", names[0])}


@pytest.mark.parametrize("name", ["layers.0.linear_attn.conv1d.weight", "layers.3.self_attn.q_norm.weight", "norm.weight"])
def test_missing_tensor(name, broken):
    examination, findings = found(broken(lambda tensors: tensors.pop(PREFIX + name) is None))
    assert ("name-missing", PREFIX + name) in findings and examination.exit_code == 1


def test_truncated_file(broken, capsys):
    path = broken()
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100_000)
    examination, findings = found(path)
    assert examination.exit_code == 1
    assert any(code == "file-truncated" for code, _ in findings)
    assert main(["doctor", str(path)]) == 1
    assert "model.safetensors" in capsys.readouterr().out


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 7533576\n"


@pytest.mark.parametrize("content, code", [(b"", "file-truncated"), (b"\x80garbage" * 99, "file-header"), (POINTER, "file-pointer")])
def test_a_file_that_tells_nothing_is_one_finding(content, code, broken, capsys):
    path = broken()
    (path / "model.safetensors").write_bytes(content)
    assert found(path)[1] == {(code, "model.safetensors")}
    assert main(["doctor", str(path)]) == 1
    assert ("git-lfs pointer" in capsys.readouterr().out) == (code == "file-pointer")


@pytest.mark.parametrize("code", ["file-pointer", "shard-missing"])
def test_names_that_may_lie_in_an_unread_shard(code, tmp_path):
    tensors = load_file(TINY / "model.safetensors")
    gone = PREFIX + "norm.weight"
    del tensors[gone]
    names = sorted(tensors)
    path = write_checkpoint(tmp_path / "shards", [{name: tensors[name] for name in names[part::2]} for part in range(2)])
    shard = path / "model-00002-of-00002.safetensors"
    if code == "file-pointer":
        shard.write_bytes(POINTER)
    else:
        shard.unlink()
    assert found(path)[1] == {(code, shard.name), ("name-missing", gone)}  # no shard is said to hold that one
    (path / "model.safetensors.index.json").unlink()
    assert found(path)[1] == {(code, shard.name), ("index-mismatch", "model.safetensors.index.json")}


def swap_q_and_k(layers, names):
    def change(tensors):
        for layer in layers:
            for name in names:
                w = tensors[PREFIX + f"layers.{layer}.linear_attn.{name}.weight"]
                tensors[PREFIX + f"layers.{layer}.linear_attn.{name}.weight"] = np.concatenate([w[256:512], w[:256], w[512:]])

    return change


@pytest.mark.parametrize("layers", [(0,), (1,), (2,), (0, 1, 2), (0, 2)])
def test_swapped_q_and_k(layers, broken):
    examination, findings = found(broken(swap_q_and_k(layers, ["in_proj_qkv"])))
    assert examination.exit_code == 1
    assert {where for code, where in findings if code == "layout-order"} == {QKV.format(layer) for layer in layers}


@pytest.mark.parametrize("layers", [(2,), (0, 2)])
def test_swapped_q_and_k_with_their_filters(layers, broken):
    """With its conv1d a swapped layer only exchanges the parts of q and k: layer 0 of this model computes as well either
    way, so only layer 2 can be told."""
    _, findings = found(broken(swap_q_and_k(layers, ["in_proj_qkv", "conv1d"])))
    named = {where for code, where in findings if code == "layout-order"}
    assert named == {QKV.format(2), PREFIX + "layers.2.linear_attn.conv1d.weight"}


@pytest.mark.parametrize("order", ["vqk", "vkq"])
def test_v_first(order, broken):
    def change(tensors):
        for layer in range(3):
            w = tensors[QKV.format(layer)]
            blocks = {"q": w[:256], "k": w[256:512], "v": w[512:]}
            tensors[QKV.format(layer)] = np.concatenate([blocks[b] for b in order])

    examination, findings = found(broken(change), thorough=True)
    assert {where for code, where in findings if code == "layout-order"} == {QKV.format(i) for i in range(3)}
    assert order[0] in "".join(f.text for f in examination.findings)


def test_readings_beside_another_error_are_tried_with_all(broken):
    def change(tensors):
        swap_q_and_k((2,), ["in_proj_qkv"])(tensors)
        names = [name for name in tensors if "visual" in name and tensors[name].size]
        tensors[names[0]].reshape(-1)[0] = np.nan

    path = broken(change)
    assert {code for code, _ in found(path)[1]} & {"value-nan", "layout-order"} == {"value-nan"}
    assert ("layout-order", QKV.format(2)) in found(path, thorough=True)[1]


def test_doubled_prefix(broken):
    def change(tensors):
        return {name.replace(PREFIX, PREFIX + "language_model."): x for name, x in tensors.items()}

    examination, findings = found(broken(change))
    assert {code for code, _ in findings} == {"prefix-repeated"}
    assert examination.predictions  # it runs all the same


def test_names_without_the_language_model_level(broken):
    path = broken(lambda tensors: {name.replace(PREFIX, "model."): x for name, x in tensors.items()})
    assert found(path)[0].healthy


def test_norms_shifted_twice(broken):
    names = []

    def change(tensors):
        for name, x in tensors.items():
            if name.startswith(PREFIX) and "layernorm" in name:
                tensors[name] = (x.astype(np.float32) + 1).astype(x.dtype)
                names.append(name)

    _, findings = found(broken(change))
    assert {where for code, where in findings if code == "norm-shifted"} == set(names)


def test_one_norm_shifted(broken):
    name = PREFIX + "layers.2.input_layernorm.weight"

    def change(tensors):
        tensors[name] = (tensors[name].astype(np.float32) + 1).astype(tensors[name].dtype)

    _, findings = found(broken(change))
    assert ("norm-shifted", name) in findings


def test_gated_norm_taken_for_an_offset(broken):
    name = PREFIX + "layers.0.linear_attn.norm.weight"

    def change(tensors):
        tensors[name] = (tensors[name].astype(np.float32) - 1).astype(tensors[name].dtype)

    _, findings = found(broken(change))
    assert ("norm-unshifted", name) in findings


def test_wrong_shape(broken):
    name = PREFIX + "layers.0.linear_attn.conv1d.weight"

    def change(tensors):
        tensors[name] = np.swapaxes(tensors[name], 1, 2)

    examination, findings = found(broken(change))
    assert ("shape-mismatch", name) in findings and examination.exit_code == 1


def test_scaled_tensor(broken):
    name = PREFIX + "layers.1.mlp.down_proj.weight"

    def change(tensors):
        tensors[name] = (tensors[name].astype(np.float32) * 64).astype(tensors[name].dtype)

    _, findings = found(broken(change))
    assert ("scale-outlier", name) in findings


def test_zero_key_rows(broken):
    """B60: the key rows of one layer are zero."""

    def change(tensors):
        tensors[QKV.format(0)][256:512] = 0

    examination, findings = found(broken(change))
    assert ("value-zero-rows", QKV.format(0)) in findings
    assert "k block: 256 of 256" in next(f.text for f in examination.findings if f.code == "value-zero-rows")


def test_zeroed_gate(broken):
    name = PREFIX + "layers.1.linear_attn.A_log"
    assert ("value-constant", name) in found(broken(set_to(name, 0)))[1]


def test_random_weights_are_gibberish(broken):
    def change(tensors):
        rng = np.random.default_rng(1)
        for name, x in tensors.items():
            if x.ndim == 2 and name.startswith(PREFIX):
                tensors[name] = (rng.standard_normal(x.shape) * 0.02).astype(ml_dtypes.bfloat16)

    assert ("forward-gibberish", "next tokens") in found(broken(change))[1]


def test_forward_names_the_first_nan(broken):
    def change(tensors):
        tensors[QKV.format(2)][700, 0] = np.nan

    findings = found(broken(change))[1]
    assert ("forward-nan", "layer 2, qkv") in findings


# What cannot run -----------------------------------------------------------------------------------------------------


def test_what_cannot_run(broken, tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["doctor", str(tmp_path / "empty")]) == 2
    path = broken(config=lambda told: told.update(quantization_config={"quant_method": "gptq"}))
    assert main(["doctor", str(path)]) == 2
    (path / "config.json").write_text("{")
    assert main(["doctor", str(path)]) == 2
    for line in capsys.readouterr().err.splitlines():
        assert line.startswith("fidelta doctor: ")


def test_max_memory():
    with pytest.raises(CannotRun, match="needs about .* MiB; --max-memory allows 64"):
        examine(TINY, max_memory=64 << 20)
    assert examine(TINY, max_memory=2 << 30, max_new_tokens=0).healthy


def test_max_memory_counts_the_tokens_of_the_prompts():
    with pytest.raises(CannotRun, match="needs about .* MiB; --max-memory allows 512"):
        examine(TINY, prompts=["import os\n" * 20_000], max_memory=512 << 20)
    assert examine(TINY, prompts=["import os\n"], max_memory=512 << 20, max_new_tokens=0).loss


def test_wrong_arguments():
    for words in (["doctor"], ["doctor", str(TINY), "--max-memory", "lots"], ["doctor", str(TINY), "--what"], ["heal"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2


# The config ----------------------------------------------------------------------------------------------------------


def test_an_assumed_theta_is_told(broken, capsys):
    path = broken(config=lambda told: told["text_config"]["rope_parameters"].pop("rope_theta"))
    examination, findings = found(path)
    assert ("config-assumed", "rope_theta") in findings
    assert next(f for f in examination.findings if f.code == "config-assumed").severity == "info"
    assert examination.healthy == (len(findings) == 1)
    assert main(["doctor", str(path), "--max-new-tokens", "0"]) == examination.exit_code
    assert "10000000 is assumed" in capsys.readouterr().out


def test_an_info_hides_no_failure(broken):
    path = broken(config=lambda told: told["text_config"]["rope_parameters"].pop("rope_theta"))
    (path / "tokenizer.json").unlink()
    examination, findings = found(path)
    assert {code for code, _ in findings} == {"config-assumed", "forward-failed"} and examination.exit_code == 1


@pytest.mark.parametrize("eps, warned", [(1e-9, True), (1e-8, False), (1e-3, False), (0.1, True)])
def test_a_strange_eps_is_a_warning(eps, warned, broken):
    path = broken(config=lambda told: told["text_config"].update(rms_norm_eps=eps))
    checkpoint = open_checkpoint(path)
    findings = list(checks.config(checkpoint.text_config, read_settings(checkpoint)[1]))
    assert [(f.code, f.where, f.severity) for f in findings] == [("config-range", "rms_norm_eps", "warning")] * warned


@pytest.mark.parametrize("config, text", [
    ({"rope_parameters": []}, "rope_parameters is []; expected an object"),
    ({"rope_parameters": 0}, "rope_parameters is 0; expected an object"),
    ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; expected an object"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported; expected 'default'"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn' is not supported; expected 'default'"),
    ({"rope_parameters": {"rope_theta": None}}, "rope_theta is None; expected a number above 0"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; expected 'silu'"),
])
def test_options_that_cannot_run(config, text, broken, capsys):
    path = broken(config=lambda told: told["text_config"].update(config))
    assert main(["doctor", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.err == f"fidelta doctor: {path}: config.json: {text}\n" and not shown.out


# The command ---------------------------------------------------------------------------------------------------------


def run(*words, **options):
    return subprocess.run([sys.executable, "-m", "fidelta.cli", *map(str, words)], capture_output=True, text=True, timeout=120, **options)


def test_command_and_json(tmp_path):
    done = run("doctor", TINY, "--prompt", "import os\n", "--max-new-tokens", 5, "--json", tmp_path / "out.json", "--threads", 1)
    assert done.returncode == 0 and "verdict: healthy" in done.stdout and not done.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["format"] == 1 and told["verdict"] == "healthy" and told["findings"] == []
    assert len(told["layers"]) == 4 and set(told["layers"][0]) >= {"kind", "mixer", "residual", "state_norm", "decay"}
    assert len(told["predictions"]) == 1 and len(told["predictions"][0]["continuation_ids"]) == 5


def test_json_on_stdout(broken):
    name = PREFIX + "layers.0.linear_attn.out_proj.weight"
    done = run("doctor", broken(set_to(name, 0)), "--json", "-")
    told = json.loads(done.stdout)
    assert done.returncode == 1 and told["exit_code"] == 1
    finding = next(f for f in told["findings"] if f["code"] == "value-zero")
    assert finding["where"] == name and finding["severity"] == "error"
    assert all(finding[key] for key in ("text", "cause", "mend", "verify"))


def test_the_json_file_is_opened_before_the_work(tmp_path, monkeypatch, capsys):
    def work(*_, **__):
        raise AssertionError("the work has started")

    monkeypatch.setattr(sys.modules["fidelta.doctor"], "examine", work)
    for file in (tmp_path, tmp_path / "nowhere" / "out.json", ""):
        assert main(["doctor", str(TINY), "--json", str(file)]) == 2
        assert capsys.readouterr().err.startswith("fidelta doctor: [Errno ")


def test_help_and_version():
    assert "exit code" in run("doctor", "--help").stdout
    assert run("--version").stdout.startswith("fidelta ")


def test_interrupt():
    code = ("import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job ignores it
            "from fidelta.cli import main; import fidelta.doctor; print('ready', flush=True)\n"
            f"sys.exit(main(['doctor', {str(TINY)!r}, '--max-new-tokens', '100000']))")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        time.sleep(2)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130 and "Traceback" not in err and "interrupted" in err
