"""Vocabularies of every kind made here: what golden files have none of, and properties."""

from __future__ import annotations

import logging
from time import process_time
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pyggml.errors import ModelError
from pyggml.llm.vocab import StreamDecoder, Vocab
from pyggml.llm.vocab.kinds.bpe import SPELLING
from pyggml.llm.vocab.kinds.pre import PRE

BYTES = [f"<0x{b:02X}>" for b in range(256)]
MERGES = ["a b", "b c", "ab c", "Ġ a", "c c", "cc cc"]


def make(model: str, texts: list[str], **more: Any) -> Vocab:
    return Vocab.from_gguf({f"tokenizer.ggml.{k}": v for k, v in {"model": model, "tokens": texts, **more}.items()})


def bpe(**more: Any) -> Vocab:
    spelled = [SPELLING[b] for b in range(256)]
    merged = ["ab", "bc", "abc", "Ġa", "cc", "cccc", "<tool>"]
    types = np.array([1] * (256 + 6) + [4], np.int32)
    return make("gpt2", spelled + merged, **{"merges": MERGES, "pre": "qwen2", "token_type": types, **more})


_LONG = ("ab", "abc", "\\xe2\\x96")


def rwkv() -> Vocab:
    texts = [
        *(chr(b) if 0x20 < b < 0x7F and b != 0x5C else f"\\x{b:02x}" for b in range(256)),
        "ab",
        "abc",
        "\\xe2\\x96",
    ]
    return make("rwkv", ["<s>", *texts], token_type=np.array([3] + [1] * len(texts), np.int32))


def plamo2() -> Vocab:
    words = {"a": -1.0, "b": -1.0, "ab": -1.5, "bc": -0.25, "日本": -2.0}
    return make(
        "plamo2",
        ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>", *BYTES, *words],
        scores=np.array([0.0] * 260 + list(words.values()), np.float32),
        token_type=np.array([2, 3, 3, 3] + [6] * 256 + [1] * len(words), np.int32),
    )


COMPLETE = {"gpt2": bpe(), "rwkv": rwkv(), "plamo2": plamo2()}


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40) | st.text("abc <>tol\n\u0300日", max_size=40), kind=st.sampled_from(sorted(COMPLETE)))
def test_any_text_comes_back(text: str, kind: str) -> None:
    assume(kind != "rwkv" or "<s>" not in text)  # it matches the texts of all tokens; a control token has no bytes
    vocab, text = COMPLETE[kind], text.removeprefix("\ufeff")
    ids = vocab.tokenize(text, add_special=False)
    assert b"".join(map(vocab.token_to_piece, ids)) == text.encode()
    stream = StreamDecoder(vocab)
    assert "".join(map(stream.push, ids)) + stream.flush() == text


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=30), kind=st.sampled_from(sorted(COMPLETE)))
def test_any_bytes_come_back(data: bytes, kind: str) -> None:
    assume(kind != "rwkv" or b"<s>" not in data)
    vocab = COMPLETE[kind]
    ids = vocab.tokenize(data.removeprefix(b"\xef\xbb\xbf"), add_special=False)
    assert b"".join(map(vocab.token_to_piece, ids)) == data.removeprefix(b"\xef\xbb\xbf")


def test_merges_by_rank() -> None:
    v = bpe()
    spell = [v.text(i) for i in v.tokenize(" abc<tool>ccccc bca", add_special=False)]
    assert spell == ["Ġ", "abc", "<tool>", "cccc", "c", "Ġ", "bc", "a"]
    assert [v.text(i) for i in bpe(pre="llama3").tokenize("bcab", add_special=False)] == ["bc", "ab"]


def test_names_of_pre_tokenizers(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match=r"unknown pre-tokenizer 'qwen-2'.*near ones: .*qwen2.*kv_overrides"):
        bpe(pre="qwen-2")
    with caplog.at_level(logging.WARNING, "pyggml"):
        bpe(pre=None)
    assert "tokenizer.ggml.pre is missing" in caplog.text
    with pytest.raises(ModelError, match="merges is missing"):
        bpe(merges=None)
    with pytest.raises(ModelError, match="unknown tokenizer 'what'"):
        make("what", [])


@pytest.mark.parametrize("char", "a A1.\n日\u0300'")
def test_long_runs_take_linear_time(char: str) -> None:
    for name in ("qwen2", "tekken", "gpt-4o", "deepseek-llm", "superbpe", "afmoe", "exaone-moe", "jais-2", "kimi-k2"):
        v = bpe(pre=name)
        for text in (char * 100_000, char * 100_000 + "日a"):
            start = process_time()
            v.tokenize(text)
            assert process_time() - start < 5, name  # quadratic: minutes


def test_every_name_covers_its_text() -> None:
    text = " Hello,  WORLD's 1234567 naïve\n\n\t日本語 IMGIMGABZ ٣٤٥ e\u0301 … \u0558 a.b?!"
    for name, pre in PRE.items():
        v = bpe(pre=name)
        if pre.byte_level:
            assert b"".join(map(v.token_to_piece, v.tokenize(text, False))) == text.encode(), name


def test_rwkv_takes_the_longest() -> None:
    v = rwkv()
    assert [v.token_to_piece(i) for i in v.tokenize("abcabd▁")] == [b"abc", b"ab", b"d", b"\xe2\x96", b"\x81"]
    assert v.tokenize("") == [] and v.token_to_piece(0) == b"" and v.token_to_piece(0, True) == b"<s>"
    with pytest.raises(ModelError, match="no token for byte 0x62"):
        make("rwkv", ["a", "\\n"]).tokenize("b")


def test_plamo2_takes_the_best_sum() -> None:
    v = plamo2()
    assert [v.text(i) for i in v.tokenize("abc日本é")] == ["a", "bc", "日本", "<0xC3>", "<0xA9>"]
    assert v.tokenize("\ufeffa") == v.tokenize("a")
    with pytest.raises(ModelError, match="no token for byte 0x00"):
        make("plamo2", ["a"])


def test_wpm() -> None:
    texts = ["[UNK]", "[CLS]", "[SEP]", "▁un", "able", "▁!", "▁über", "▁uber", "▁日"]
    keys = {"unknown_token_id": 0, "bos_token_id": 1, "seperator_token_id": 2}
    v = make("bert", texts, **keys)
    assert [v.text(i) for i in v.tokenize("UNable! Über\u200b日 what")] == [
        *("[CLS]", "▁un", "able", "▁!", "▁uber", "▁日", "[UNK]", "[SEP]")
    ]


def test_ugm() -> None:
    texts = ["<pad>", "</s>", "<unk>", "▁a", "▁ab", "b", "c", "▁"]
    scores = np.array([0, 0, 0, -2.0, -2.5, -1.0, -3.0, -4.0], np.float32)
    types = np.array([3, 3, 2, 1, 1, 1, 1, 1], np.int32)
    v = make("t5", texts, scores=scores, token_type=types, add_space_prefix=True, remove_extra_whitespaces=True)
    assert [v.text(i) for i in v.tokenize("ab  axyb")] == ["▁ab", "▁a", "<unk>", "b", "</s>"]
    assert v.tokenize("") == [1]


def test_none() -> None:
    v = Vocab.from_gguf({"tokenizer.ggml.model": "none", "general.architecture": "x", "x.vocab_size": 5})
    assert v.n_tokens == 5 and not v.is_eog(4) and v.token_to_piece(4) == b"" and v.bos is None and v.nl is None
    for call in (lambda: v.tokenize("a"), lambda: v.detokenize([1])):
        with pytest.raises(ModelError, match="no vocabulary"):
            call()
