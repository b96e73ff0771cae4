"""What vocabularies need of C, against the same in Python, on vocabularies that are all overlaps."""

from __future__ import annotations

import random
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from pyggml.llm.vocab.kinds import split
from pyggml.llm.vocab.kinds.pre import PRE
from pyggml.llm.vocab.kinds.words import WordCache, words_of
from pyggml.native.vocab.merges import Merges
from pyggml.native.vocab.strings import read_strings, walk_strings
from pyggml.native.vocab.texts import Texts
from pyggml.native.vocab.trie import Trie

CHARS = "abé日🙂"
texts = st.lists(st.text(CHARS, min_size=1, max_size=5), unique=True, max_size=30)
words = st.lists(st.text(CHARS, max_size=12), min_size=1, max_size=6)


def by_word(ids: np.ndarray, ends: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids, ends)[: len(ends)]]


@given(st.lists(st.text(max_size=8) | st.just("\udcff")))
def test_strings(values: list[str]) -> None:
    encoded = [v.encode("utf-8", "surrogateescape") for v in values if v.isascii() or v == "\udcff"]
    data = np.frombuffer(b"xyz" + b"".join(len(e).to_bytes(8, "little") + e for e in encoded), np.uint8)
    n = len(encoded)
    assert walk_strings(data, 3, n) == (n, len(data))
    assert read_strings(data, 3, len(data), n) == [e.decode("utf-8", "surrogateescape") for e in encoded]
    assert walk_strings(data, 3, n + 1) == (n, len(data))
    if n:
        assert walk_strings(data[:-1], 3, n) == (n - 1, len(data) - 8 - len(encoded[-1]))


@given(texts)
def test_pairs(vocabulary: list[str]) -> None:
    ids = {text: i for i, text in enumerate(vocabulary)}

    def symbol(text: str) -> int | None:
        return ids.get(text, -1 - ord(text) if len(text) == 1 else None)

    pairs = [(symbol(t[:i]), symbol(t[i:]), ids[t]) for t in vocabulary for i in range(1, len(t))]
    found = zip(*(a.tolist() for a in Texts(vocabulary).pairs()), strict=True)
    assert list(found) == [p for p in pairs if None not in p]


@given(texts, st.lists(st.text("ab é\0", max_size=5), max_size=20))
def test_pairs_of_merges(vocabulary: list[str], merges: list[str]) -> None:
    ids = {text: i for i, text in enumerate(vocabulary)}
    expected: list[tuple[int, int, int]] = []
    for merge in merges:
        cut = merge.find(" ", 1)
        left, right = (merge[:cut], merge[cut + 1 :]) if cut > 0 else ("\n", "\n")
        expected.append((ids.get(left, -1), ids.get(right, -1), ids.get(left + right, -1)))
    found = Texts(vocabulary).pairs_of_merges(merges)
    assert list(zip(*(a.tolist() for a in found), strict=True)) == expected


@given(texts, words)
def test_longest_match(vocabulary: list[str], to_read: list[str]) -> None:
    """A and B are parts of their own, what is nothing is left out, and `a` stands before each part."""
    vocabulary = [*vocabulary, *(t for t in ("aab", "aA", "a") if t not in vocabulary)]
    table = {"b": -ord("A"), "é": 0}
    ids = {text: i for i, text in enumerate(vocabulary)}
    expected: list[list[int]] = []
    for word in to_read:
        out: list[int] = []
        for part in regex.split("(b)", word.replace("é", "")):
            text, at, found = "a" + part.replace("b", "A"), 0, []
            while at < len(text):
                end = next((e for e in range(len(text), at, -1) if text[at:e] in ids), None)
                if end is None:
                    found = [99]
                    break
                found.append(ids[text[at:end]])
                at = end
            out += found if part else []
        expected.append(out)
    codes = np.array([table.get(c, ord(c)) for word in to_read for c in word + "\n"], np.int32)
    longest = Trie(vocabulary).longest_match(codes, len(to_read), b"a", 99)
    assert by_word(*longest) == expected


@given(texts, words, st.randoms(use_true_random=False))
def test_best_cut(vocabulary: list[str], to_read: list[str], rng: random.Random) -> None:
    """The sums are the best: of all cuts tried one by one."""
    scores = np.array([float(rng.randint(-9, 0)) for _ in vocabulary])
    known = dict(zip(vocabulary, scores.tolist(), strict=True))

    def best(word: str) -> float:
        sums = [0.0]
        for end in range(1, len(word) + 1):
            starts = range(max(0, end - 5), end)
            of = [sums[i] + known[word[i:end]] for i in starts if word[i:end] in known]
            sums.append(max([*of, *([] if word[end - 1] in known else [sums[end - 1] - 20])]))
        return sums[-1]

    encoded = [word.encode() for word in to_read]
    cut = Trie(vocabulary).best_cut(encoded, scores, -20.0)
    for word, ids in zip(to_read, by_word(*cut), strict=True):
        assert sum([*scores, -20.0][i] for i in ids) == best(word)
        pattern = "".join([*map(regex.escape, vocabulary), "."][i] for i in ids)
        assert regex.fullmatch(pattern, word)


def test_equal_ranks_merge_from_the_left() -> None:
    a, b, c, ab, bc = range(5)
    pairs = (np.array(x, np.int32) for x in ([a, b], [b, c], [ab, bc]))
    left, right, merged = pairs
    for ranks, expected in (([0, 0], [ab, c]), ([1, 0], [a, bc])):
        ids, ends = Merges(left, right, merged, np.array(ranks, np.int32)).merge(np.array([a, b, c], np.int32), [3])
        assert ids.tolist() == expected and ends.tolist() == [2]


@pytest.mark.parametrize("rule", sorted({r for p in PRE.values() for r in p.rules if isinstance(r, str)}))
def test_rules_in_ascii(rule: str) -> None:
    """What `re` finds is what `regex` finds."""
    rng = random.Random(rule)
    alphabet = [*map(chr, range(128)), *"aA1 '.\n" * 12, "<sentinel:", "IMGIMG", "'re", "    ", "\r\n"]
    ours, theirs = split._ascii(rule).findall, regex.compile(rule, regex.VERSION1).findall
    for text in ("".join(rng.choices(alphabet, k=rng.randint(1, 30))) for _ in range(100)):
        assert ours(text) == theirs(text), text
    for a, b in product("a1 \n.", repeat=2):
        assert ours(a * 5000 + b) == theirs(a * 5000 + b)


def test_words_of_long_texts() -> None:
    """They are found and looked up some at a time, so that other threads have turns."""
    rng = random.Random(3)
    text = "".join(rng.choices(["a", " b", "\n", "\u00e9 ", "12", "  ", "'s"], k=60_000))
    for rule in sorted({r for p in PRE.values() for r in p.rules if isinstance(r, str)}):
        pattern: Any = regex.compile(rule, regex.VERSION1)
        assert not pattern.groups and words_of(pattern, text) == pattern.findall(text), rule
    words: list[str] = [*text.split()]
    known = {word: len(word).to_bytes(4, sys.byteorder) * (len(word) % 3) for word in words}
    cache = WordCache(lambda words: [known[word] for word in words])
    assert cache.ids(words) == [len(word) for word in words for _ in range(len(word) % 3)]
    assert cache.ids([]) == []
