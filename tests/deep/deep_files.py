"""Damaged GGUF files and importance matrices: each loads, or raises the error that says what is wrong with it."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

import pyggml as gg
from pyggml.llm.quantize.imatrix import load_imatrix

from ..conftest import shared_dir
from ..gguf_files import write_all
from ..tiny_model import write_gguf
from .mutate import layout_of, mutated
from .workers import attack

GOLDEN = ["llama/llama2-Q2_K", "llama/llama2-TQ1_0", "llama/llama2-Q4_K_M", "llama/llama3-F16", "llama/mixtral-Q4_K_M"]


def load_damaged(rng: np.random.Generator, folder: Path, source: Path) -> str:
    data = source.read_bytes()
    path = folder / "damaged.gguf"
    path.write_bytes(mutated(rng, data, layout_of(data)))
    options = {"use_mmap": bool(rng.integers(2)), "repack": bool(rng.integers(2)), "vocab_only": rng.integers(8) == 0}
    try:
        model = gg.load_model(path, **options)
    except (gg.GGUFError, gg.ModelError) as e:
        return type(e).__name__
    try:
        model.detokenize(model.tokenize("Once upon a time, <s> \N{SNOWMAN} \x00"))
    except gg.ModelError:
        return "no vocabulary"
    if model.vocab_only:
        return "vocabulary"
    try:
        ctx = model.new_context(n_ctx=32, n_threads=1, flash_attn=bool(rng.integers(2)))
        ctx.decode([1, 2, 5])
        ctx.decode([7])
    except gg.GGMLError as e:
        return f"refused later: {str(e)[:300]}"
    assert ctx.logits.shape == (1, model.hparams.n_vocab)
    return "decoded"


@pytest.mark.parametrize("name", ["tiny", *GOLDEN])
def test_models(name: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf") if name == "tiny" else shared_dir() / "golden" / f"{name}.gguf"
    attack(load_damaged, tmp_path, source)


def load_damaged_imatrix(rng: np.random.Generator, folder: Path, source: Path) -> str:
    data = bytearray(source.read_bytes())
    path = folder / "damaged.imatrix"
    if source.suffix == ".gguf":
        path.write_bytes(mutated(rng, bytes(data), layout_of(bytes(data))))
    else:
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(len(data)))
            data[at : at + 4] = struct.pack("<i", int(rng.choice([-(2**31), -5, -1, 0, 1, 3, 70, 2**31 - 1])))
        path.write_bytes(data[: len(data) if rng.integers(4) else int(rng.integers(len(data)))])
    try:
        found = load_imatrix(path)
    except gg.GGUFError:
        return "GGUFError"
    assert all(np.isfinite(v).all() for v in found.values())
    return "loaded"


@pytest.mark.parametrize("kind", ["gguf", "dat"])
def test_imatrices(kind: str, tmp_path: Path) -> None:
    source = tmp_path / f"sound.{kind}"
    names = ["blk.0.attn_q.weight", "blk.1.ffn_up.weight"]
    if kind == "gguf":
        w = gguf.GGUFWriter(source, "imatrix")
        for name in names:
            w.add_tensor(f"{name}.in_sum2", np.ones((2, 8), np.float32))
            w.add_tensor(f"{name}.counts", np.ones((2, 1), np.float32))
        write_all(w)
    else:
        entries = b"".join(struct.pack(f"<i{len(n)}sii8f", len(n), n.encode(), 3, 8, *np.arange(8.0)) for n in names)
        source.write_bytes(struct.pack("<i", len(names)) + entries)
    attack(load_damaged_imatrix, tmp_path, source)
