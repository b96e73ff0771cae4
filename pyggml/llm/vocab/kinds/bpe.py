"""`tokenizer.ggml.model = gpt2`, `gemma4`, `whitespace`, `hybriddna`: byte-pair merging by the rank of the pair.

Words are split by `regex`; each word is merged once, in C (csrc/vocab/bpe.c). tiktoken gives other ids: it ranks a pair
by the token it becomes, and so merges pairs that are not in the list of merges. HF tokenizers gives the same ids, but
brings eleven more packages; the copy inside llguidance takes over a second to build for 150 k tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from pyggml.errors import ModelError
from pyggml.gguf_io.read import says

from ..tokens import KEY, SPACE, Tokens, strings, utf8
from .merger import Merger, symbols_of_chars
from .pre import Pre
from .split import Splitter
from .words import WordCache, by_word

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [b for b in range(256) if b not in set(_PRINTABLE)]
# GPT-2's spelling of bytes: printable characters of Latin-1 stand for themselves, other bytes for U+0100 and up.
SPELLING = dict(zip([*_PRINTABLE, *_OTHERS], [*map(chr, _PRINTABLE), *map(chr, range(256, 512))], strict=False))
_DNA = re.compile("<dna>(?P<bases>.*?)(?P<end></dna>|\\Z)", re.DOTALL)
_LONGEST = 128  # characters of a token that llama.cpp's text for what spells no byte is made of
_BYTES = {char: bytes([b]) for b, char in SPELLING.items()}


class BPE:
    """Ids of texts by merges."""

    def __init__(self, tokens: Tokens, pre: Pre, kv: Mapping[str, object]) -> None:
        """Raises ModelError when the merges are missing."""
        self._tokens, self._pre = tokens, pre
        merges = strings(kv, "merges")
        if merges is None and not says(kv, f"{KEY}pre", "kimi-k2"):
            raise ModelError(f"{KEY}merges is missing or not an array of strings")
        self._merges = merges or []
        self._splitter = Splitter(pre.rules)
        self._cache = WordCache(self._encode_words)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Bytes that no token spells are left out, as llama.cpp does."""
        words = self._splitter.words(text.replace(" ", SPACE) if self._pre.escape else text)
        return self._cache.ids(words)

    def piece(self, token: int) -> bytes:
        """The bytes of a normal token."""
        text = self._tokens.texts[token]
        if self._pre.escape:
            return utf8(text.replace(SPACE, " "))
        try:
            return b"".join([_BYTES[c] for c in text])
        except KeyError:
            if len(text) > _LONGEST:  # each character would bring all of them
                return utf8(text)
            return b"".join([_BYTES.get(c) or utf8(f"[UNK_BYTE_0x{utf8(c).hex()}{text}]") for c in text])

    @cached_property
    def _merger(self) -> Merger:
        from pyggml.native.vocab.merges import Merges
        from pyggml.native.vocab.texts import Texts

        ids, n = self._tokens.ids, len(self._tokens.texts)
        extra: dict[str, int] = {}  # symbols of texts that are not tokens; their numbers follow those of the tokens

        def symbol(text: str) -> int:
            found = ids.get(text)
            return extra.setdefault(text, n + len(extra)) if found is None else found

        pairs = Texts(self._tokens.texts).pairs_of_merges(self._merges)
        for i in np.flatnonzero(np.minimum.reduce(pairs) < 0):
            merge = self._merges[int(i)]
            cut = merge.find(" ", 1) % (len(merge) + 1)
            left, right = merge[:cut], merge[cut + 1 :]
            for array, text in zip(pairs, (left, right, left + right), strict=True):
                array[i] = symbol(text)
        if self._pre.byte_level:
            units = np.array([symbol(SPELLING[b]) for b in range(256)], np.int32)
        else:
            units = symbols_of_chars(ids | extra)
        ascii_ids = [ids.get(chr(b)) if b < 128 else None for b in range(256)]
        byte_ids = ascii_ids if self._pre.byte_level else self._tokens.byte_ids()
        return Merger(Merges(*pairs), units, n, list(extra), byte_ids)

    def _encode_words(self, words: list[str]) -> list[bytes]:
        ids, ends = self._merger.encode(words)
        known = ids >= 0
        encoded = by_word(ids[known], np.append(0, np.cumsum(known))[ends])
        if self._pre.ignore_merges or self._pre.newlines:
            for i, word in enumerate(words):
                if self._pre.ignore_merges or word[0] == "\n":
                    token = self._tokens.ids.get(self._spelled(word))
                    if token is not None:
                        encoded[i] = np.int32(token).tobytes()
        return encoded

    def _spelled(self, word: str) -> str:
        """A word in the vocabulary's spelling."""
        return utf8(word).decode("latin-1").translate(SPELLING) if self._pre.byte_level else word


class Whitespace(BPE):
    """Cuts text at white space, which is dropped; words may be turned into lower case."""

    def __init__(self, tokens: Tokens, pre: Pre, kv: Mapping[str, object], lowercase: bool) -> None:
        super().__init__(tokens, pre, kv)
        self._lowercase = lowercase

    def encode(self, text: str) -> list[int]:
        words = [word for word in self._splitter.words(text) if not word.isspace()]
        if self._lowercase:
            words = ["".join([c.lower()[0] for c in word]) for word in words]
        return [token for word in words for token in super(Whitespace, self).encode(word)]


class HybridDNA(BPE):
    """Text with DNA between `<dna>` and `</dna>`, which becomes tokens of six bases; the last one is filled up with A.
    The file ends the texts of such tokens with U+E000, which is not shown."""

    def encode(self, text: str) -> list[int]:
        ids = self._tokens.ids
        tags = [ids.get("<dna>"), ids.get("</dna>"), ids.get("<oov>")]
        if None in tags:
            return super().encode(text)
        first, last, unknown = (tag for tag in tags if tag is not None)
        out: list[int] = []
        end = 0
        for dna in _DNA.finditer(text):
            out += super().encode(text[end : dna.start()])
            end = dna.end()
            bases = "".join([c.upper() if c.isascii() else c for c in dna["bases"]])
            sixes = [bases[i : i + 6].ljust(6, "A") for i in range(0, len(bases), 6)]
            out += [first, *(ids.get(six + "\ue000", unknown) for six in sixes), *([last] if dna["end"] else [])]
        return out + super().encode(text[end:])

    def piece(self, token: int) -> bytes:
        text = self._tokens.texts[token]
        return utf8(text[:-1]) if text.endswith("\ue000") else super().piece(token)
