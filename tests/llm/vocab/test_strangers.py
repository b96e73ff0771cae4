"""Vocabularies and texts made to be slow, large or wrong: what they cost, and what is said of them."""

from __future__ import annotations

import os
import random
import signal
import struct
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml import limits
from pyggml.errors import ModelError
from pyggml.gguf_io.read import open_gguf
from pyggml.llm.vocab import Vocab
from pyggml.llm.vocab.kinds.charsmap import check_charsmap
from pyggml.llm.vocab.special import SpecialTokens
from pyggml.native.vocab import calls, merges, texts, trie

from ...linear import assert_linear

BYTES = [f"<0x{b:02X}>" for b in range(256)]
LONGEST = limits.TOKEN_BYTES
EVERY_LENGTH = ["a" * n for n in range(1, LONGEST)]
ONE_LONG = ["a", "a" * (LONGEST - 1) + "b"]


def make(model: str, tokens: list[str], types: list[int] | None = None, **more: Any) -> Vocab:
    keys = {"model": model, "tokens": tokens, "token_type": np.array(types or [1] * len(tokens), np.int32), **more}
    return Vocab.from_gguf({f"tokenizer.ggml.{k}": v for k, v in keys.items()})


def plamo2(tokens: list[str], scores: list[float] | None = None) -> Vocab:
    first = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>", *BYTES]
    numbers = np.array([0.0] * len(first) + (scores or [-1.0] * len(tokens)))
    return make("plamo2", first + tokens, [2, 3, 3, 3] + [6] * 256 + [1] * len(tokens), scores=numbers)


def t5(tokens: list[str], **more: Any) -> Vocab:
    return make("t5", ["<pad>", "</s>", "<unk>", *tokens], [3, 3, 2] + [1] * len(tokens), **more)


def bert(tokens: list[str]) -> Vocab:
    keys = {"unknown_token_id": 0, "bos_token_id": 1, "seperator_token_id": 2}
    return make("bert", ["[UNK]", "[CLS]", "[SEP]", *tokens], **keys)


def llama(user_defined: list[str]) -> Vocab:
    return make(
        "llama", ["<unk>", "<s>", "</s>", *BYTES, *user_defined], [2, 3, 3] + [6] * 256 + [4] * len(user_defined)
    )


ALIKE = ["<" + "x" * 30 + f"{i:05d}" * (1 + i % 500) for i in range(8000)]
SLOW: dict[str, tuple[Callable[[], Vocab], str]] = {
    "plamo2": (lambda: plamo2(EVERY_LENGTH), "a"),
    "t5": (lambda: t5(EVERY_LENGTH), "a"),
    "t5, one long token": (lambda: t5(ONE_LONG), "a"),
    "bert": (lambda: bert(["▁a", *ONE_LONG]), "a"),
    "rwkv": (lambda: make("rwkv", ONE_LONG), "a"),
    "user-defined": (lambda: llama(ALIKE), "".join(text[:36] for text in ALIKE)),
    "user-defined, nested": (lambda: llama(EVERY_LENGTH), "a"),
    "llama": (lambda: make("llama", ["<unk>", "<s>", "</s>", *EVERY_LENGTH[:1000]]), "a"),
    "hybriddna": (
        lambda: make("hybriddna", ["<dna>", "</dna>", "<oov>"], [3, 3, 3], merges=[], pre="qwen2"),
        "<dna></dna>",
    ),
}


@pytest.mark.parametrize("name", SLOW)
def test_time_is_linear_in_the_text(name: str) -> None:
    vocab, unit = SLOW[name][0](), SLOW[name][1]
    vocab.tokenize(unit)
    # PLaMo-2's was cubic, the others quadratic: minutes
    assert_linear(lambda n: vocab.tokenize((unit * (n // len(unit) + 1))[:n]), 5_000)


def test_what_seeds_change() -> None:
    """Where tables have their entries, and nothing else: what collides under one seed does not under another."""
    vocabulary = [f"{i:x}" for i in range(3000)]
    left = np.arange(3000, dtype=np.int32)
    tables: list[list[list[int]]] = []
    results: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            seed = calls._new_seed()
            for module in (texts, trie, merges):
                patch.setattr(module, "SEED", seed)
            a, b, c = texts.Texts(vocabulary), trie.Trie(vocabulary), merges.Merges(left, left[::-1].copy(), left)
            pairs = [x.tolist() for x in a.pairs()]
            cut = b.longest_cut(b"fffff1234567zz").tolist()
            merged = c.merge(np.array([1, 2998, 5], np.int32), [3])[0].tolist()
            results.append([pairs, cut, merged, [x.tolist() for x in a.pairs_of_merges(["a b", "1 1", "q a"])]])
            tables.append([a._arrays[2].tolist(), b._arrays[0].tolist(), c._arrays["slots"].tolist()])
    assert results[0] == results[1] and results[0][2] == [1, 5]
    assert len(results[0][0][0]) > 3000 and results[0][1][-2:] == [3000, 3000]
    assert all(one != other for one, other in zip(*tables, strict=True))


def test_ctrl_c_within_a_long_text() -> None:
    vocab, text = t5(EVERY_LENGTH), "a" * 2_000_000
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    start = perf_counter()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        vocab.tokenize(text)
    assert perf_counter() - start < 5  # else it takes much longer, or the interrupt comes behind it
    assert vocab.tokenize("aaa", False) == [5]


def test_a_handler_that_goes_on() -> None:
    vocab, text, came = t5(EVERY_LENGTH), "a" * 60_000, list[int]()
    expected = vocab.tokenize(text)
    vocab = t5(EVERY_LENGTH)
    old = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        assert vocab.tokenize(text) == expected
        timer.join()
    finally:
        signal.signal(signal.SIGINT, old)
    assert came == [signal.SIGINT]


@given(
    st.lists(st.text("ab \n", min_size=1, max_size=4) | st.just("é"), unique=True, max_size=8),
    st.text("ab \né", max_size=30),
    st.randoms(use_true_random=False),
)
def test_special_tokens_by_definition(tokens: list[str], text: str, rng: random.Random) -> None:
    """Token by token, the longest first, in what is left of the text, of which white space may go along."""
    n_always = rng.randint(0, len(tokens))
    strips = [set(rng.sample(range(len(tokens)), rng.randint(0, len(tokens)) // 2)) for _ in range(2)]
    numbered = list(zip(tokens, range(len(tokens)), strict=True))
    special = SpecialTokens(numbered[:n_always], numbered[n_always:], *strips)
    for parse in (False, True):
        parts: list[str | int] = [text]
        for token, i in sorted(numbered if parse else numbered[:n_always], key=lambda t: -len(t[0].encode())):
            cut: list[str | int] = []
            for part in parts:
                pieces = [part] if isinstance(part, int) else part.split(token)
                for k, piece in enumerate(pieces):
                    cut += [i] * (k > 0)
                    if isinstance(piece, str):
                        piece = piece.lstrip(" \n") if k and i in strips[1] else piece
                        piece = piece.rstrip(" \n") if k + 1 < len(pieces) and i in strips[0] else piece
                    cut.append(piece)
            parts = cut
        assert special.split(text, parse) == [part for part in parts if part != ""]


@given(
    st.dictionaries(st.text("abé", min_size=1, max_size=4), st.sampled_from([-1.0, -1.5, -2.0, 0.5, -1500.0, -2500.0])),
    st.text("abéz", max_size=20),
)
def test_plamo2_by_definition(words: dict[str, float], text: str) -> None:
    """The least cost from each place to the end; of equal ones the longest token, then none."""
    vocab = plamo2(list(words), list(words.values()))
    costs = {word: round(score * -10_000) for word, score in words.items() if score > -2000}
    best: dict[int, tuple[int, list[str]]] = {len(text): (0, [])}
    for at in reversed(range(len(text))):
        cuts = [(costs[text[at:end]] + best[end][0], at - end) for end in best if text[at:end] in costs]
        unknown = 10_000_000 + best[at + 1][0]
        cost, minus_length = min([*cuts, (unknown, 0)])
        end = at - minus_length if minus_length else at + 1
        first = [text[at:end]] if minus_length else [f"<0x{b:02X}>" for b in text[at].encode()]
        best[at] = cost, first + best[end][1]
    assert [vocab.text(i) for i in vocab.tokenize(text)] == best[0][1]


@pytest.mark.parametrize("tokens", [[], ["a"], ["ab"], ["a", "b"], ["é"], ["日"]])
def test_vocabularies_of_a_few_bytes(tokens: list[str]) -> None:
    """What tables have room for is not less than they are asked for (tests/sanitize.sh sees it)."""
    kinds = [make("bert", tokens), make("t5", tokens, scores=np.zeros(len(tokens))), make("rwkv", tokens)]
    kinds += [make("llama", tokens), make("gpt2", tokens, merges=[]), make("gemma4", tokens, merges=["a b"])]
    kinds += [make("llama", tokens, [4] * len(tokens)), plamo2(tokens), t5(tokens), bert(tokens)]
    for vocab in kinds:
        for text in ("", "a", "ab é日\0", b"\xff\x80ab"):
            try:
                assert all(0 <= i < vocab.n_tokens for i in vocab.tokenize(text))
            except ModelError as e:
                assert "no token for" in str(e)


def test_bytes_that_are_not_utf8() -> None:
    vocab = t5(["a", "\ufffd"], scores=np.array([0, 0, 0, -1, -1], np.float32))
    assert vocab.tokenize(b"a\xff", False) == [3, 4] == vocab.tokenize(b"a\x80", False)
    assert t5(["a", "aa"]).tokenize("aaa", False) == [3, 4]  # no scores
    token = make("gpt2", ["a", "\udcff"], merges=[])
    assert token.token_to_piece(1) == b"[UNK_BYTE_0xff\xff]" and token.tokenize("a", False) == [0]


def test_a_long_token_that_spells_no_bytes() -> None:
    """Its text stood once for each of its characters: 60,000 spaces became 3.6 GB."""
    for n in (129, 60_000):
        assert make("gpt2", [" " * n], merges=[]).token_to_piece(0) == b" " * n
    assert make("gpt2", [" " * 3], merges=[]).token_to_piece(0) == b"[UNK_BYTE_0x20   ]" * 3


def test_scores_beyond_f32() -> None:
    for vocab in (lambda: plamo2(["a"], [1e305]), lambda: t5(["a"], scores=np.array([0, 0, 0, -1e305]))):
        with pytest.raises(ModelError, match="scores has a number beyond the range of F32"):
            vocab()
    assert plamo2(["a", "b"], [3e38, -3e38]).tokenize("ab") == [260, 4 + ord("b")]


def test_a_model_without_a_vocabulary_takes_no_memory_for_it() -> None:
    tracemalloc.start()
    vocab = Vocab.from_gguf({"tokenizer.ggml.model": "none", "general.architecture": "x", "x.vocab_size": 2**32 - 1})
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert vocab.n_tokens == 2**32 - 1 and vocab.token_to_piece(2**32 - 2) == b"" and vocab.text(7) == ""
    assert not any(ask(5) for ask in (vocab.is_control, vocab.is_byte, vocab.is_eog))
    for ask in (vocab.token_to_piece, vocab.text, vocab.is_control, vocab.is_byte, vocab.is_eog):
        with pytest.raises(ModelError, match="not in the vocabulary"):
            ask(2**32 - 1)


def test_tokens_without_end() -> None:
    long = "a" * (LONGEST + 1)
    for vocab in (t5([long]), bert([long]), make("rwkv", [long]), llama([long]), plamo2([long])):
        with pytest.raises(ModelError, match=rf"a token has {LONGEST + 1} bytes, more than limits.TOKEN_BYTES"):
            vocab.tokenize("a")
    assert make("llama", ["<unk>", "<s>", "</s>", "a", long]).tokenize("a", False)[-1] == 3


def charsmap(units: dict[int, tuple[int, int]], replacements: bytes = b"b\0") -> bytes:
    """A double array of these units (label and offset; the others are values), and texts."""
    array = [1 << 31] * 256
    for place, (label, offset) in units.items():
        array[place] = offset << 10 | label
    return struct.pack("<257I", 4 * len(array), *array) + replacements


def test_character_maps_that_would_not_end() -> None:
    chain = {0: (0, 128), 128 ^ ord("a"): (ord("a"), 64)}
    check_charsmap(charsmap(chain))
    circle = charsmap({**chain, 128 ^ ord("a"): (ord("a"), ord("a"))})  # behind an `a` is what was before it
    for bad in (circle, charsmap(chain, b"b" * 257 + b"\0")):
        with pytest.raises(ModelError, match=r"a rule is longer than limits\.CHARSMAP_BYTES = 256"):
            check_charsmap(bad)
        with pytest.raises(ModelError, match=r"limits\.CHARSMAP_BYTES"):
            t5(["a"], precompiled_charsmap=np.frombuffer(bad, np.uint8)).tokenize("a")
    for no_map in (b"", b"\1", b"\xff" * 9, struct.pack("<I", 6) + bytes(20)):
        check_charsmap(no_map)


def test_a_real_character_map(shared: Path) -> None:
    vocab = Vocab.from_gguf(open_gguf(shared / "golden/vocab/ggml-vocab-nomic-bert-moe.gguf").kv)
    assert vocab.tokenize(b"a\xffb \xe2\x96") == vocab.tokenize("a\ufffdb \ufffd\ufffd")
