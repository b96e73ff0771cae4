"""Damaged GGUF files on their way into a folder: each is written, or refused with what is wrong with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import pyggml as gg
from pyggml.hf.export import export_folder
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ..conftest import shared_dir
from .mutate import layout_of, mutated
from .workers import attack

HF = shared_dir() / "golden" / "hf"


def export_damaged(rng: np.random.Generator, folder: Path, source: Path) -> str:
    data = source.read_bytes()
    path, out = folder / "damaged.gguf", folder / "out"
    path.write_bytes(mutated(rng, data, layout_of(data)))
    shutil.rmtree(out, ignore_errors=True)
    try:
        export_folder(path, out)
    except (gg.GGMLError, OSError) as e:
        assert not out.exists()
        return type(e).__name__
    return "written"


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt2", "deepseek-v3", "bert", "jamba"])
def test_exports(name: str, tmp_path: Path) -> None:
    source = tmp_path / "sound.gguf"
    write_quantized(plan_quantization(HF / name, None), source)
    attack(export_damaged, tmp_path, source)
