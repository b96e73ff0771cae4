"""SPM vocabulary: llama.cpp's ids for the golden prompts, and properties against a slow merge written here."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml.errors import ModelError
from pyggml.gguf_io.read import open_gguf
from pyggml.llm.vocab import StreamDecoder, TokenType, Vocab

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = (int(TokenType(i)) for i in range(1, 7))
FIRST = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
BYTES = [(f"<0x{b:02X}>", 0.0, BYTE) for b in range(256)]
WORDS = [
    *[(c, -50.0 - i, NORMAL) for i, c in enumerate("▁abcéß<>s日")],
    *[("ab", -1.0, NORMAL), ("bc", -1.0, NORMAL), ("▁a", -2.0, NORMAL), ("abc", -0.0, NORMAL), ("▁ab", -3.0, NORMAL)],
    *[("<s", -4.0, NORMAL), ("s>", -4.0, NORMAL), ("cab", 0.0, NORMAL), ("aa", 2.5, NORMAL), ("▁▁", -6.0, NORMAL)],
    *[("日日", -7.0, NORMAL), ("ca", -8.0, UNUSED), ("xyz", -1.0, NORMAL), ("<us", -9.0, NORMAL)],
]
SPECIAL = [("<user>", 0.0, USER), ("b c", 0.0, USER), ("<|im_end|>", 0.0, NORMAL), ("<mark>", 0.0, CONTROL)]


def make(words: list[tuple[str, float, int]], **more: Any) -> Vocab:
    tokens = FIRST + BYTES + words
    kv: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [t for t, _, _ in tokens],
        "tokenizer.ggml.scores": np.array([s for _, s, _ in tokens], np.float32),
        "tokenizer.ggml.token_type": np.array([k for _, _, k in tokens], np.int32),
    }
    kv.update({f"tokenizer.ggml.{key}": value for key, value in more.items()})
    return Vocab.from_gguf({k: v for k, v in kv.items() if v is not None})


PLAIN = make(WORDS)
RICH = make(WORDS + SPECIAL)
# Without unused tokens and without the way to merge into "<s>": both are shown as nothing, in llama.cpp too.
LOSSLESS = make([w for w in WORDS if w[2] == NORMAL and w[0] not in ("<s", "s>")])


def ids(vocab: Vocab, *texts: str) -> list[int]:
    table = {vocab.text(i): i for i in range(vocab.n_tokens)}
    return [table[t] for t in texts]


def slow_merge(vocab: Vocab, scores: dict[str, float], text: str) -> list[int]:
    """The definition: merge the best adjacent pair, the leftmost of equals, until no pair is a token."""
    parts = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    out: list[str] = []
    for part in parts:
        out += [part] if part in scores else [f"<0x{b:02X}>" for b in part.encode()]
    return ids(vocab, *out)


def test_golden_prompts(shared: Path) -> None:
    golden = json.loads((shared / "golden/llama/greedy.json").read_text())
    assert len(golden) == 4
    for model, cases in golden.items():
        vocab = Vocab.from_gguf(open_gguf(shared / "models" / f"{model}.gguf").kv)
        assert (vocab.bos, vocab.eos, vocab.unk, vocab.nl, vocab.n_tokens) == (1, 2, 0, 13, 512)
        for case in cases:
            assert vocab.tokenize(case["prompt"]) == case["prompt_ids"]
            assert vocab.detokenize(vocab.tokenize(case["prompt"], add_special=False)) == case["prompt"]
            stream = StreamDecoder(vocab)
            assert "".join(map(stream.push, case["greedy_ids"])) + stream.flush() == case["text"]


ALPHABET = st.text(st.sampled_from("aabbcc  é日<>s/x🙂\n\x00"), max_size=40)


@settings(max_examples=300, deadline=None)
@given(ALPHABET)
def test_merges_as_defined(text: str) -> None:
    scores = {PLAIN.text(i): (FIRST + BYTES + WORDS)[i][1] for i in range(PLAIN.n_tokens)}
    prefixed = (" " + text).replace(" ", "▁") if text else ""
    assert PLAIN.tokenize(text, add_special=False) == slow_merge(PLAIN, scores, prefixed)


@settings(max_examples=100, deadline=None)
@given(
    words=st.dictionaries(
        st.text("ab▁<", min_size=1, max_size=5),
        st.sampled_from([0.0, -0.0, 1.0, -1.0, -2.0, 1e-40, -1e-40, float("inf"), float("-inf")]),
        max_size=40,
    ),
    texts=st.lists(st.text("ab <", max_size=30), max_size=8),
)
def test_merges_of_any_vocabulary(words: dict[str, float], texts: list[str]) -> None:
    vocab = make([(t, s, NORMAL) for t, s in words.items()], add_space_prefix=False)
    scores = {vocab.text(i): words.get(vocab.text(i), 0.0) for i in range(vocab.n_tokens)}
    for text in texts:
        assert vocab.tokenize(text, add_special=False) == slow_merge(vocab, scores, text.replace(" ", "▁"))


@settings(max_examples=300, deadline=None)
@given(st.text() | ALPHABET, st.booleans())
def test_round_trip(text: str, special: bool) -> None:
    text = text.replace("▁", "")
    tokens = LOSSLESS.tokenize(text, add_special=special)
    back = LOSSLESS.detokenize(tokens, remove_special=special)
    assert back == (" " + text if special and text else text)  # llama.cpp keeps the prefix behind a removed bos
    shown = "<s>" + (" " if text else "") if special else ""
    assert LOSSLESS.detokenize(tokens, unparse_special=True) == shown + text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, RICH.n_tokens - 1), max_size=40))
def test_streaming_any_ids(tokens: list[int]) -> None:
    stream = StreamDecoder(RICH)
    parts = [stream.push(t) for t in tokens]
    raw = b"".join(RICH.token_to_piece(t) for t in tokens)
    assert "".join(parts) + stream.flush() == raw.decode("utf-8", "replace")
    assert stream.flush() == ""


@given(st.text())
def test_streaming_text_is_never_cut(text: str) -> None:
    stream = StreamDecoder(LOSSLESS)
    want = text.replace("▁", " ")
    parts = [stream.push(t) for t in LOSSLESS.tokenize(text, add_special=False)]
    assert "".join(parts) == (" " + want if text else "") and stream.flush() == ""
    assert "\ufffd" in text or not any("\ufffd" in p for p in parts)


def test_streaming_holds_back_half_a_character() -> None:
    stream = StreamDecoder(PLAIN)
    tokens = ids(PLAIN, "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "<0xF0>", "<0x9F>", "a", "<0xF0>")
    assert [stream.push(t) for t in tokens] == ["", "", "", "🙂", "", "", "\ufffda", ""]
    assert stream.flush() == "\ufffd" and stream.push(ids(PLAIN, "a")[0]) == "a"


def test_special_tokens() -> None:
    v = RICH
    assert v.tokenize("") == [1] and v.tokenize("", add_special=False) == []
    # With parse_special=False the text of a control token is text; it may still merge into that token.
    assert v.tokenize("a<s>", add_special=False) == ids(v, "▁a", "<s>")
    assert v.tokenize("</s>", add_special=False) == ids(v, "▁", "<", "<0x2F>", "s>")
    assert v.tokenize("</s>", add_special=False, parse_special=True) == [2]
    assert v.tokenize("<unk>a", parse_special=True) == [1, 0, *ids(v, "▁a")]
    # A user-defined token is cut out always, before spaces are escaped; the space prefix follows every special token.
    assert v.tokenize("b c<user>a<mark>") == [
        1,
        *ids(v, "b c", "<user>", "▁a", "<", *_bytes("m"), "a", *_bytes("rk"), ">"),
    ]
    assert v.tokenize("a<mark>a", parse_special=True) == [1, *ids(v, "▁a", "<mark>", "▁a")]
    # The longest first, wherever it stands.
    w = make([*WORDS, ("ab", 0.0, USER), ("bbb", 0.0, USER)][-2:])
    assert w.tokenize("abbb", add_special=False)[-1:] == ids(w, "bbb")


def _bytes(text: str) -> list[str]:
    return [f"<0x{b:02X}>" for b in text.encode()]


def test_a_run_of_unknowns_is_not_the_token_it_spells() -> None:
    assert "xyz" in [PLAIN.text(i) for i in range(PLAIN.n_tokens)]
    assert PLAIN.tokenize("axyz", add_special=False) == ids(PLAIN, "▁a", *_bytes("xyz"))


def test_pieces() -> None:
    v = RICH
    assert v.token_to_piece(1) == b"" and v.token_to_piece(1, special=True) == b"<s>"
    assert v.token_to_piece(0) == b"" and v.token_to_piece(0, special=True) == b"<unk>"
    mark, user, unused, space, byte = ids(v, "b c", "<user>", "ca", "▁ab", "<0xFE>")
    assert [v.token_to_piece(i) for i in (mark, user, unused, space, byte)] == [b"b c", b"<user>", b"", b" ab", b"\xfe"]
    assert v.is_byte(byte) and not v.is_byte(space) and v.is_control(1) and not v.is_control(user)
    assert v.text(space) == "▁ab"
    assert v.detokenize([1, space, 2], unparse_special=True) == "<s> ab</s>"
    assert v.detokenize([space, byte]) == "ab\ufffd"


def test_ends_known_by_name_and_by_key() -> None:
    end, user = ids(RICH, "<|im_end|>", "<user>")
    assert RICH.eot == end and RICH.is_eog(end) and RICH.is_control(end) and RICH.is_eog(2) and not RICH.is_eog(1)
    v = make(WORDS + SPECIAL, eot_token_id=user, eos_token_id=1)
    assert v.eot == user and v.eos == 1 and [i for i in range(v.n_tokens) if v.is_eog(i)] == sorted([1, 2, end, user])
    assert PLAIN.eot is None


def test_settings() -> None:
    v = make(WORDS, add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    assert v.tokenize("ab") == [*ids(v, "ab"), 2] and v.detokenize([*ids(v, "▁ab"), 2], remove_special=True) == " ab"
    assert make(WORDS, bos_token_id=2**32 - 1).bos == 1  # "none": the default holds
    assert PLAIN.nl == ids(PLAIN, "<0x0A>")[0] and PLAIN.add_bos and not PLAIN.add_eos and PLAIN.add_space_prefix
    assert make([("", 0.0, NORMAL)]).text(259) == "[EMPTY_259]"
    assert [make([("ab\0c", 0.0, NORMAL), ("\0", 0.0, NORMAL)]).text(259 + i) for i in (0, 1)] == ["ab", "[EMPTY_260]"]
    assert make(WORDS, scores=None, token_type=None).n_tokens == PLAIN.n_tokens


def test_without_byte_tokens() -> None:
    def tiny(unk: int) -> Vocab:
        texts = ["a", "b", "▁", "\udcff\udcfe"]
        keys = {"tokens": texts, "model": "llama", "unknown_token_id": unk, "bos_token_id": 9, "padding_token_id": 2}
        return Vocab.from_gguf({f"tokenizer.ggml.{k}": v for k, v in keys.items()})

    v = tiny(1)
    assert v.tokenize("aé", add_special=False) == [2, 0, 1, 1] and v.nl == 2
    assert v.token_to_piece(3) == b"\xff\xfe" and v.detokenize([0, 3]) == "a\ufffd\ufffd"


def test_lone_surrogates_are_replaced() -> None:
    assert PLAIN.tokenize("a\ud800b\udcff") == PLAIN.tokenize("a\ufffdb\ufffd")
    assert PLAIN.tokenize("\ud83d\ude42") == PLAIN.tokenize("🙂")


@pytest.mark.parametrize("token", [-1, PLAIN.n_tokens, 2**40])
def test_ids_outside_the_vocabulary(token: int) -> None:
    for call in (
        PLAIN.token_to_piece,
        PLAIN.text,
        PLAIN.is_eog,
        PLAIN.is_byte,
        PLAIN.is_control,
        StreamDecoder(PLAIN).push,
    ):
        with pytest.raises(ModelError, match=f"token {token} is not in the vocabulary of {PLAIN.n_tokens}"):
            call(token)
    with pytest.raises(ModelError):
        PLAIN.detokenize([1, token], unparse_special=True)
    with pytest.raises(ModelError):
        PLAIN.token_to_piece(token, special=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gpt2"}, "merges is missing"),
        ({"model": "bart"}, "unknown tokenizer 'bart'"),
        ({"model": None}, "no vocabulary"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": "a"}, "tokens is missing or not an array of strings"),
        ({"tokens": np.arange(300)}, "not an array of strings"),
        ({"tokens": ["a", "b", "a"]}, "the token 'a' occurs twice"),
        ({"scores": np.zeros(3, np.float32)}, "scores is not an array"),
        ({"scores": ["x"] * 400}, "scores is not an array"),
        ({"scores": np.full(400, np.nan, np.float32)}, "scores has a NaN"),
        ({"token_type": np.full(3, 1)}, "token_type is not an array"),
        ({"token_type": np.full(400, BYTE)}, "'<unk>' is typed as a byte"),
        ({"bos_token_id": "1"}, "bos_token_id is not an integer"),
        ({"add_bos_token": 1}, "add_bos_token is not a bool"),
        ({"suppress_tokens": "x"}, "suppress_tokens is not an array of INT32"),
        ({"suppress_tokens": np.zeros(2, np.int64)}, "suppress_tokens is not an array of INT32"),
    ],
)
def test_bad_metadata(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(WORDS, **change)


def test_the_tokenizer_library_is_imported_when_needed() -> None:
    code = "import sys, pyggml.llm.vocab; sys.exit('sentencepiece' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
