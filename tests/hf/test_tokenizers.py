"""Ids of texts by folders' tokenizers, against the tokenizers library, and through converted files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from pyggml.errors import ModelError
from pyggml.hf.config import Config
from pyggml.hf.parts import Part
from pyggml.hf.pretokenizers import name_of
from pyggml.hf.sentencepiece import parse
from pyggml.hf.tokenizer import read_tokenizer
from pyggml.llm.model import load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized
from pyggml.llm.vocab import Vocab

from ..conftest import shared_dir

FOLDERS = shared_dir() / "golden" / "hf"
KINDS: dict[str, Any] = json.loads((FOLDERS / "tokens.json").read_text()) if FOLDERS.is_dir() else {}


def _vocab(folder: Path) -> Vocab:
    return Vocab.from_gguf(read_tokenizer(folder, Config.of_folder(folder)))


@pytest.mark.parametrize("kind", KINDS)
def test_ids(kind: str) -> None:
    for folder in KINDS[kind]["folders"]:
        vocab = _vocab(FOLDERS / folder)
        for text, ids in KINDS[kind]["cases"]:
            assert vocab.tokenize(text, add_special=False, parse_special=True) == ids, (folder, text)


@pytest.mark.parametrize("folder", ["llama", "qwen2", "llama31", "gpt2"])
def test_ids_through_a_file(folder: str, tmp_path: Path) -> None:
    if not FOLDERS.is_dir():
        pytest.skip(f"no golden data in {FOLDERS}")
    write_quantized(plan_quantization(FOLDERS / folder, None, vocab_only=True), tmp_path / "v.gguf")
    model = load_model(tmp_path / "v.gguf", vocab_only=True)
    kind = next(k for k in KINDS.values() if folder in k["folders"])
    for text, ids in kind["cases"]:
        assert model.tokenize(text, add_special=False, parse_special=True) == ids
    assert "<|im_start|>" in str(model.kv["tokenizer.chat_template"])


def test_unigram_that_cuts_at_spaces(tmp_path: Path) -> None:
    """T5's: spaces are where texts are cut, however many."""
    if not FOLDERS.is_dir():
        pytest.skip(f"no golden data in {FOLDERS}")
    tokenizer = json.loads((FOLDERS / "xlm-roberta" / "tokenizer.json").read_text())
    cuts = [{"type": "WhitespaceSplit"}, tokenizer["pre_tokenizer"]]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cuts}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_text((FOLDERS / "t5" / "config.json").read_text())
    vocab = _vocab(tmp_path)
    assert vocab.tokenize("  two  spaces ") == vocab.tokenize("two spaces")
    assert vocab.tokenize("   ", add_special=False) == []


def _piece(text: str, score: float, kind: int) -> bytes:

    body = (
        b"\x0a" + bytes([len(text.encode())]) + text.encode() + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind])
    )
    return b"\x0a" + bytes([len(body)]) + body


def test_a_sentencepiece_model(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{b:02X}>", 0.0, 6) for b in range(256)]
    pieces += [("▁a", -1.0, 1), ("b", -2.0, 1), ("▁", -3.0, 1), ("a", -4.0, 1)]
    data = b"".join(_piece(*p) for p in pieces) + b"\x12\x02\x18\x02" + b"\x1a\x04\x18\x01\x20\x00"
    model = parse(data, "m")
    assert (model.model_type, model.add_dummy_prefix, model.remove_extra_whitespaces) == (2, True, False)
    (tmp_path / "tokenizer.model").write_bytes(data)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 270, "bos_token_id": 1}))
    keys = read_tokenizer(tmp_path, Config.of_folder(tmp_path))
    assert keys["tokenizer.ggml.tokens"][259:264] == ["▁a", "b", "▁", "a", "[PAD263]"]
    vocab = Vocab.from_gguf(keys)
    assert vocab.tokenize("ab", add_special=False) == [259, 260]
    assert vocab.bos == 1
    with pytest.raises(ModelError, match="SentencePiece"):
        parse(data[:-1] + b"\xff", "m")


def test_spellings_of_a_pre_tokenizer() -> None:
    def name(pattern: str, ignore_merges: bool = False) -> str | None:
        steps = [{"type": "Split", "pattern": {"Regex": pattern}}, {"type": "ByteLevel", "use_regex": False}]
        pre = {"type": "Sequence", "pretokenizers": steps}
        return name_of(Part({"pre_tokenizer": pre, "model": {"ignore_merges": ignore_merges}}, ""))

    tail = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    qwen = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{tail}"
    assert name(qwen) == "qwen2"
    assert name(qwen.replace(r"\r\n", "\r\n").replace(r"]?\p{L}+", r"]?+\p{L}++")) == "qwen2"
    llama = qwen.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    assert (name(llama), name(llama, ignore_merges=True)) == ("smaug-bpe", "llama-bpe")
    assert name("a|b") is None
