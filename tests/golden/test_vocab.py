"""Every vocabulary against llama.cpp: ids of texts, texts of ids, and each name of a pre-tokenizer."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pyggml.errors import ModelError
from pyggml.gguf_io.read import open_gguf
from pyggml.llm.vocab import StreamDecoder, Vocab
from pyggml.llm.vocab.kinds.bpe import BPE
from pyggml.llm.vocab.kinds.pre import PRE
from pyggml.llm.vocab.tokens import Tokens

NAMES = (
    *("aquila", "baichuan", "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2"),
    *("gpt-neox", "llama-bpe", "llama-spm", "mpt", "nomic-bert-moe", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
# These have a token for each byte, and give back every text.
BYTE_LEVEL = ("deepseek-coder", "deepseek-llm", "gpt-2", "llama-bpe", "qwen2", "starcoder")


@cache
def golden(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def metadata(shared: Path, name: str) -> dict[str, Any]:
    return dict(open_gguf(shared / f"golden/vocab/ggml-vocab-{name}.gguf").kv)


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_texts(shared: Path, name: str) -> None:
    vocab = Vocab.from_gguf(metadata(shared, name))
    data = golden(shared / "golden/vocab/ids.json.gz")
    cases, backs = data["tokenize"][name], data["detokenize"][name]
    assert len(cases) == 336 and len(backs) >= 90
    wrong = [text for text, add, parse, ids in cases if vocab.tokenize(text, add, parse) != ids]
    assert not wrong
    texts = [(ids, bytes.fromhex(text).decode("utf-8", "replace")) for ids, text in backs]
    assert not [ids for ids, text in texts if vocab.detokenize(ids, unparse_special=True) != text]
    for text, _, _, ids in cases[:40]:
        stream = StreamDecoder(vocab)
        pieces = b"".join(map(vocab.token_to_piece, ids))
        assert "".join(map(stream.push, ids)) + stream.flush() == pieces.decode("utf-8", "replace")
        if name in BYTE_LEVEL:
            assert b"".join(vocab.token_to_piece(i) for i in vocab.tokenize(text, False)) == text.encode()


def test_pre_tokenizers(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = metadata(shared, "qwen2")
    cases = golden(shared / "golden/vocab/pre.json.gz")
    assert len(cases) == 90
    merges: dict[bool, Any] = {}  # built once, as are the tokens: they are the same for all names
    tokens = Tokens.from_gguf(kv)
    monkeypatch.setattr(Tokens, "from_gguf", lambda _: replace(tokens, types=[*tokens.types]))
    for name, texts in cases.items():
        vocab = Vocab.from_gguf(kv | {"tokenizer.ggml.pre": name})
        bpe = vocab._tokenizer
        assert isinstance(bpe, BPE)
        kind = PRE[name].byte_level
        bpe.__dict__["_merger"] = merges[kind] = merges.get(kind) or bpe._merger
        wrong = [text for text, ids in texts if vocab.tokenize(text) != ids]
        assert not wrong, name


def test_roles(shared: Path) -> None:
    qwen = Vocab.from_gguf(metadata(shared, "qwen2"))
    assert [qwen.text(i) for i in (qwen.bos, qwen.eot) if i is not None] == ["<|endoftext|>", "<|im_end|>"]
    assert not qwen.add_bos and not qwen.clean_spaces and qwen.nl == qwen.tokenize("\n")[0]
    star = Vocab.from_gguf(metadata(shared, "starcoder"))
    assert [star.text(i or 0) for i in (star.fim_pre, star.fim_suf, star.fim_mid, star.fim_pad)] == [
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>")
    ]
    a, b = star.tokenize("def f(", False), star.tokenize("): pass", False)
    assert star.infill_ids("def f(", "): pass") == [star.fim_pre, *a, star.fim_suf, *b, star.fim_mid]
    assert star.fim_pad is not None and star.is_eog(star.fim_pad)
    with pytest.raises(ModelError, match="no token for fim_pre, fim_suf, fim_mid"):
        Vocab.from_gguf(metadata(shared, "llama-spm")).infill_ids("a", "b")
    bert = Vocab.from_gguf(metadata(shared, "bert-bge"))
    assert (bert.cls, bert.sep, bert.unk, bert.pad, bert.mask) == (101, 102, 100, 0, 103)


def test_special_tokens_in_a_row(shared: Path) -> None:
    for name in ("llama-bpe", "qwen2", "phi-3", "bert-bge", "nomic-bert-moe"):
        vocab = Vocab.from_gguf(metadata(shared, name))
        special = [i for i in range(vocab.n_tokens) if vocab.is_control(i)][:40]
        text = "".join(map(vocab.text, special))
        assert vocab.tokenize(text, False, True) == special, name
        assert vocab.detokenize(special, unparse_special=True).strip() == text.strip(), name
