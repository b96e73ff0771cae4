"""Text that follows a grammar: GBNF or a JSON schema, through llguidance."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, proxy

import numpy as np

from pyggml import limits
from pyggml.errors import SamplerError
from pyggml.llm.grammars.gbnf import parse_gbnf
from pyggml.llm.grammars.lark import lark
from pyggml.llm.grammars.schema import enforceable
from pyggml.llm.vocab import Vocab

from .base import Sampler
from .candidates import Candidates

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_JSON_SPACE = r"( |\n{1,2}[ \t]{0,20})?"  # as in llama.cpp: without a limit, models go on with spaces for ever
_LARK, _GBNF = (
    re.compile(r"^(%llguidance\b|\s*start\s*:(?!:))", re.MULTILINE),
    re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE),
)
_OPTIONS = re.compile(r"^%llguidance\b", re.MULTILINE)
_NO_FORCING = '%llguidance {"no_forcing": true}\n'  # otherwise it looks for all text that can only go on in one way
_tokenizers: WeakKeyDictionary[Vocab, LLTokenizer] = WeakKeyDictionary()


class Grammar(Sampler):
    """Leaves out every token that the grammar does not allow next. When the text is complete, only tokens that end the
    generation remain.

    Raises SamplerError for a grammar that cannot be read, or without the package llguidance.
    """

    name = "grammar"

    def __init__(self, vocab: Vocab, grammar: str | None, json_schema: str | Mapping[str, Any] | None) -> None:
        try:
            from llguidance import LLMatcher, LLParserLimits
            from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
        except ImportError:
            raise SamplerError("a grammar needs the package llguidance: pip install llguidance") from None
        self._ends = np.array(sorted(vocab.eog), np.int64)
        if not len(self._ends):
            raise SamplerError("the vocabulary has no token that ends generation, which a grammar needs")
        what = "the grammar" if json_schema is None else "the JSON schema"
        try:
            text = _lark(grammar or "", vocab) if json_schema is None else lark_of_schema(json_schema)
            source = LLMatcher.grammar_from_lark(text if _OPTIONS.search(text) else _NO_FORCING + text)
        except ValueError as e:
            raise SamplerError(f"{what} cannot be read: {e}") from None
        items = limits.GRAMMAR_ITEMS
        bounds = LLParserLimits(max_items_in_row=items // 4, step_max_items=items)
        self._matcher: LLMatcher = LLMatcher(_tokenizer(vocab, self._ends.tolist()), source, log_level=0, limits=bounds)
        self._check(f"{what} cannot be read")
        warned = self._matcher.get_grammar_warnings()
        if warned:
            _warn(warned)
        self._mask = allocate_token_bitmask(1, vocab.n_tokens)
        self._fill = partial(fill_next_token_bitmask, self._matcher, self._mask)
        self._vocab = vocab
        trial = self._matcher.deep_copy()  # some grammars show only at their first mask that they match nothing
        fill_next_token_bitmask(trial, self._mask)
        _check(trial, f"{what} cannot begin")

    def apply(self, c: Candidates) -> None:
        if self._matcher.is_stopped():
            c.ids = self._ends
            c.replace(np.zeros(len(self._ends), np.float32), False)
            return
        self._fill()
        self._check("the grammar failed")
        allowed = np.unpackbits(self._mask.view(np.uint8)[0], count=self._vocab.n_tokens, bitorder="little")
        c.keep((allowed if c.ids is None else allowed[c.ids]).nonzero()[0])

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check(f"the grammar does not allow token {token}")

    def reset(self) -> None:
        self._matcher.reset()

    def _check(self, what: str) -> None:
        _check(self._matcher, what)


def _check(matcher: LLMatcher, what: str) -> None:
    if matcher.is_error():
        said = matcher.get_error().partition(chr(10))[0]
        raise SamplerError(f"{what}: {'no text follows it' if said == 'NoExtensionBias' else said}")


def _lark(grammar: str, vocab: Vocab) -> str:
    """The grammar as llguidance reads it: its own Lark unchanged, GBNF converted."""
    if _LARK.search(grammar) and not _GBNF.search(grammar):
        return grammar
    return lark(parse_gbnf(grammar, lambda text: vocab.tokenize(text, False, True, continued=True), vocab.n_tokens))


def lark_of_schema(schema: Any) -> str:
    """A grammar, in llguidance's Lark, that matches the texts which a JSON schema allows. See `known_schema`."""
    return f"start: json\njson: %json {known_schema(schema)}\n"


def known_schema(schema: Any) -> str:
    """A JSON schema as a text with the keywords that llguidance knows, and options for reading it. Warns of demands
    that are left out. Raises SamplerError for a text that is not a schema, and for a schema that asks for too much."""
    from llguidance import LLMatcher

    begun = time.thread_time()

    @cache
    def has_pattern(pattern: str) -> bool:
        if time.thread_time() - begun > limits.SCHEMA_SECONDS:
            raise SamplerError(
                f"the JSON schema's patterns take longer than limits.SCHEMA_SECONDS ({limits.SCHEMA_SECONDS} s)"
            )
        source = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
        matcher = LLMatcher(_single_bytes(), source, log_level=0)
        if matcher.is_error():
            return False
        matcher.consume_token(ord('"'))
        for _ in range(2):  # a grammar that is too large fails at the second character
            following = int.from_bytes(matcher.compute_bitmask(), "little")
            matcher.consume_token((following & -following).bit_length() - 1)
            _check(matcher, f"the JSON schema's pattern {pattern!r:.60} cannot be matched")
        return True

    known, left_out = enforceable(schema, has_pattern)
    if left_out:
        _warn(left_out)
    try:
        return json.dumps({**known, "x-guidance": {"whitespace_pattern": _JSON_SPACE, "lenient": True}})
    except RecursionError:
        raise SamplerError("the JSON schema is nested too deep") from None


@cache
def _single_bytes() -> LLTokenizer:
    """A vocabulary of the 256 bytes. (Building it takes five milliseconds.)"""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _warn(left_out: Sequence[str]) -> None:
    what = "; ".join(left_out)
    warnings.warn(f"the JSON schema is loosened, texts may break what it says: {what}", UserWarning, stacklevel=2)


def _tokenizer(vocab: Vocab, ends: list[int]) -> LLTokenizer:
    """llguidance's view of the vocabulary. It is kept, because building it takes long for a large vocabulary."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if vocab not in _tokenizers:
        source = _Source(vocab, ends)
        _tokenizers[vocab] = source.greedy = LLTokenizer(TokenizerWrapper(source), eos_token=ends)
    return _tokenizers[vocab]


class _Source:
    """A vocabulary as llguidance reads it."""

    greedy: LLTokenizer

    def __init__(self, vocab: Vocab, ends: list[int]) -> None:
        self.eos_token_id, self.bos_token_id = ends[0], vocab.bos
        self.special_token_ids = [i for i in range(vocab.n_tokens) if vocab.is_control(i)]
        self.tokens = [vocab.token_to_piece(i, special=True) for i in range(vocab.n_tokens)]
        self._vocab = proxy(vocab)  # the values of _tokenizers must not keep their keys alive

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._vocab.tokenize(text, add_special=False, continued=True)
        if b"".join(self.tokens[i] for i in ids) != text.encode():  # no token for spaces, or for a character
            return self.greedy.greedy_tokenize(text)
        return ids
