"""Damaged vocabularies: each is refused by name, or turns any text into ids of its own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.errors import ModelError
from pyggml.gguf_io.read import open_gguf
from pyggml.llm.vocab import StreamDecoder, Vocab

from ..conftest import shared_dir
from .workers import attack

FILES = sorted((shared_dir() / "golden" / "vocab").glob("*.gguf"))
ODD = [
    "",
    "\0",
    "a\0b",
    "\udc80",
    "\udcff\udcfe",
    "▁",
    "▁▁",
    " ",
    "\n",
    "é" * 2000,
    "a" * 5000,
    "<0x41>",
    "<0xZZ>",
    "Ġ",
    "\\x41",
]
KINDS = ["llama", "gpt2", "bert", "t5", "rwkv", "plamo2", "gemma4", "whitespace", "hybriddna", "none"]
IDS = ["bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id", "seperator_token_id"]
FLAGS = ["add_space_prefix", "remove_extra_whitespaces", "normalizer.lowercase", "add_bos_token"]


def _pick(rng: np.random.Generator, items: Any) -> Any:
    return items[int(rng.integers(len(items)))]


@cache
def part_of(path: Path) -> dict[str, Any]:
    """A vocabulary of the first tokens of one, which is read in no time."""
    kv = {
        k.removeprefix("tokenizer.ggml."): v for k, v in open_gguf(path).kv.items() if k.startswith("tokenizer.ggml.")
    }
    first = {k: kv[k][:700] for k in ("tokens", "scores", "token_type", "merges") if k in kv}
    return kv | first


def _damage(rng: np.random.Generator, kv: dict[str, Any]) -> None:
    what = int(rng.integers(8))
    if what < 3:
        texts = kv["tokens"] = list(kv["tokens"])
        for _ in range(_pick(rng, [1, 5, 50]) if texts else 0):
            i = int(rng.integers(len(texts)))
            texts[i] = _pick(
                rng, [_pick(rng, ODD), texts[i] + _pick(rng, ODD), texts[i][:1], texts[i] + _pick(rng, texts)]
            )
        if rng.integers(4):
            unique = list(dict.fromkeys(texts))
            kv["tokens"] = unique + [f"~{i}" for i in range(len(texts) - len(unique))]
    elif what == 3:
        kv["tokens"] = kv["tokens"][: _pick(rng, [0, 1, 2, 300])]
    elif what == 4:
        kv["model"] = _pick(rng, KINDS)
    elif what == 5:
        kv[_pick(rng, IDS)] = _pick(rng, [0, 1, -1, 2**31, 2**32 - 1])
        kv[_pick(rng, FLAGS)] = bool(rng.integers(2))
    else:
        name, values = _pick(rng, [("scores", [np.inf, -np.inf, np.nan, 3e38, 1e305, 0]), ("token_type", range(-1, 8))])
        numbers = np.array(kv.get(name, np.ones(len(kv["tokens"]))), np.float64 if name == "scores" else np.int64)
        numbers[rng.integers(0, max(len(numbers), 1), min(len(numbers), 20))] = _pick(rng, values)
        kv[name] = numbers


def read_damaged(rng: np.random.Generator, folder: Path, path: Path) -> str:
    kv = dict(part_of(path))
    for _ in range(int(rng.integers(1, 5))):
        _damage(rng, kv)
    try:
        vocab = Vocab.from_gguf({f"tokenizer.ggml.{k}": v for k, v in kv.items()})
    except ModelError:
        return "refused"
    parts = [*ODD, *kv["tokens"], *map(chr, range(128)), "日", " the quick", "a" * 3000]
    text = "".join(_pick(rng, parts) for _ in range(_pick(rng, [0, 1, 5, 100]))).encode("utf-8", "surrogateescape")
    try:
        ids = vocab.tokenize(text + rng.bytes(_pick(rng, [0, 0, 20])), bool(rng.integers(2)), bool(rng.integers(2)))
    except ModelError:
        return "no ids for this text"
    assert all(0 <= i < vocab.n_tokens for i in ids)
    stream = StreamDecoder(vocab)
    pieces = b"".join(map(vocab.token_to_piece, ids)).decode("utf-8", "replace")
    assert "".join(map(stream.push, ids)) + stream.flush() == pieces
    return "ids"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_vocabularies(path: Path, tmp_path: Path) -> None:
    attack(read_damaged, tmp_path, path)
