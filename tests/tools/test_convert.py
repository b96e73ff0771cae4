"""`pyggml convert` from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from pyggml.tools.cli import main

from pyggml.gguf_io.read import open_gguf
from pyggml.hf.safetensors import open_folder
from pyggml.llm.model import load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ..hf.checkpoint import write_checkpoint


def _run(*args: object) -> int:
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in args])
    return int(e.value.code or 0)


def test_there_and_back(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = shared / "golden" / "hf" / "qwen3", tmp_path / "m.gguf"
    assert _run("convert", source, out, "--type", "q4_k_m", "--report", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["file_type"] == "Q4_K_M"
    row = next(t for t in report["tensors"] if t["name"] == "blk.0.ffn_up.weight")
    assert row["to"] == open_gguf(out).tensors["blk.0.ffn_up.weight"].dtype.name
    assert 0 < row["nmse"] < 0.01
    assert _run("convert", out, tmp_path / "back", "--hf") == 0
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    assert _run("convert", tmp_path / "back", tmp_path / "v.gguf", "--vocab-only") == 0
    assert not open_gguf(tmp_path / "v.gguf").tensors


def test_in_parts(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = shared / "golden" / "hf" / "qwen3"
    assert _run("convert", source, tmp_path / "m.gguf", "--split-size", "1M", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["parts"], report["out"]) == (1, str(tmp_path / "m-00001-of-00001.gguf"))
    parts = write_quantized(plan_quantization(source, "Q8_0"), tmp_path / "q.gguf", split_size=20_000)
    assert len(parts) > 2 and not (tmp_path / "q.gguf").exists()
    write_quantized(plan_quantization(source, "Q8_0"), tmp_path / "whole.gguf")
    model, whole = load_model(parts[0]), load_model(tmp_path / "whole.gguf")
    assert list(model.tensors) == list(whole.tensors)
    assert all(model.tensors[n].tobytes() == t.tobytes() for n, t in whole.tensors.items())
    assert _run("convert", source, tmp_path / "m.gguf", "--split-size", "1") == 2


def test_a_folder_without_its_tensors(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing or misshapen is said by name, all of it, and nothing is written."""
    source, folder, out = shared / "golden" / "hf" / "qwen3", tmp_path / "m", tmp_path / "m.gguf"
    tensors = {name: np.array(t.stored()) for name, t in open_folder(source).items()}
    layer = "model.layers.1"
    del tensors[f"{layer}.mlp.up_proj.weight"], tensors[f"{layer}.input_layernorm.weight"]
    tensors[f"{layer}.mlp.down_proj.weight"] = tensors[f"{layer}.mlp.down_proj.weight"][:, :-8]
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    write_checkpoint(folder, json.loads((source / "config.json").read_text()), tensors)
    for more in ((), ("--type", "q4_0"), ("--split-size", "1M")):
        assert _run("convert", folder, out, *more) == 1
        error = capsys.readouterr().err
        assert "no tensor blk.1.ffn_up.weight" in error and "no tensor blk.1.attn_norm.weight" in error
        assert "blk.1.ffn_down.weight has ne" in error
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert _run("convert", folder, out, "--vocab-only") == 0


def test_errors(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = shared / "golden" / "hf" / "qwen3"
    assert _run("convert", source, tmp_path / "m.gguf", "--type", "Q9") == 2
    assert _run("convert", source, tmp_path / "m", "--hf", "--type", "F16") == 2
    assert _run("convert", tmp_path, tmp_path / "m.gguf") == 1
    assert "has no config.json" in capsys.readouterr().err
    assert _run("convert", tmp_path / "m.gguf", tmp_path / "x.gguf") == 1
    assert "is no folder" in capsys.readouterr().err
