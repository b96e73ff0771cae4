"""GBNF, llama.cpp's notation of grammars, read as llama.cpp reads it (llama-grammar.cpp, grammars/README.md)."""

from __future__ import annotations

import re
from collections.abc import Callable
from string import hexdigits
from typing import NoReturn

from pyggml.errors import SamplerError

from .nodes import LAST_CHAR, SURROGATES, Chars, Node, Ref, Rules, TokenLeaf, alt, children, literal, ranges, rep, seq

TokensOf = Callable[[str], list[int]]  # the ids that spell a text, special tokens among them
MAX_REPETITIONS = 2000  # llama.cpp's
_SPACE, _SPACE_OR_NEWLINE = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME, _NUMBER, _NEWLINE = re.compile(r"[A-Za-z0-9_-]+"), re.compile(r"[0-9]{1,9}"), re.compile(r"\r\n|\r|\n")
_TOKEN_ID = re.compile(r"<\[([0-9]{1,9})\]>")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{c: c for c in '\\"[]-'}}
_REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse_gbnf(text: str, tokens_of: TokensOf, n_tokens: int) -> Rules:
    """The rules of a grammar by name; `root` is the start. When two rules have one name, the last counts.

    A dot is any character, newlines too. `<[300]>` and `<think>` are tokens of a vocabulary of `n_tokens`, and `!`
    before one means any other token. Raises SamplerError with the line and column of an error.
    """
    return _Parser(text, tokens_of, n_tokens).rules()


class _Parser:
    def __init__(self, text: str, tokens_of: TokensOf, n_tokens: int) -> None:
        self._text, self._tokens_of, self._n_tokens = text, tokens_of, n_tokens
        self._at: int = 0
        self._depth = 0  # of parentheses

    def rules(self) -> Rules:
        found: Rules = {}
        self._space(True)
        while self._at < len(self._text):
            name = self._match(_NAME)
            if name is None:
                self._fail("a rule's name should stand here")
            self._space(False)
            if not self._text.startswith("::=", self._at):
                self._fail(f"'::=' should follow the name {name.group()}")
            self._at += 3
            self._space(True)
            found[name.group()] = self._alternatives(False)
            if self._match(_NEWLINE) is None and self._at < len(self._text):
                self._fail("this belongs to no rule: an item, '|' or a new line should stand here")
            self._space(True)
        self._check(found)
        return found

    def _check(self, found: Rules) -> None:
        if "root" not in found:
            self._at = 0
            self._fail("there is no rule root")
        todo = list(found.values())
        while todo:
            node = todo.pop()
            if isinstance(node, Ref) and node.name not in found:
                self._at = node.at
                self._fail(f"there is no rule {node.name}")
            todo.extend(children(node))

    def _alternatives(self, nested: bool) -> Node:
        items = [self._sequence(nested)]
        while self._peek() == "|":
            self._at += 1
            self._space(True)
            items.append(self._sequence(nested))
        return alt(items)

    def _sequence(self, nested: bool) -> Node:
        items: list[Node] = []
        while True:
            start = self._at
            c = self._peek()
            if c and c in "*+?{":
                if not items:
                    self._fail(f"nothing stands before {c!r} that could be repeated")
                low, high = self._repetition(c, nested)
                items[-1] = rep(items[-1], low, high)
            elif (item := self._item(c)) is not None:
                items.append(item)
            else:
                self._at = start
                return seq(items)
            self._space(nested)

    def _item(self, c: str) -> Node | None:
        """The item that begins with `c`; None when no item does."""
        if c == '"':
            self._at += 1
            return literal(self._until('"'))
        if c == "[":
            return self._set()
        if c and c in "<!":
            return self._token(c == "!")
        if c == ".":
            self._at += 1
            return Chars(ranges((), negated=True))
        if c == "(":
            return self._group()
        at, name = self._at, self._match(_NAME)
        return None if name is None else Ref(name.group(), at)

    def _group(self) -> Node:
        start = self._at
        self._at += 1
        self._depth += 1
        if self._depth > 100:
            self._fail("too many parentheses inside each other")
        self._space(True)
        inner = self._alternatives(True)
        if self._peek() != ")":
            line, column = self._place(start)
            self._fail(f"')' should stand here, for the '(' of line {line}, column {column}")
        self._at += 1
        self._depth -= 1
        return inner

    def _set(self) -> Node:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        parts: list[tuple[int, int]] = []
        while self._peek() != "]":
            low = high = self._char("]")
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._char("]")
            parts.append((low, high))
        self._at += 1
        return Chars(ranges(parts, negated)) if parts else seq(())  # llama.cpp leaves an empty set out

    def _until(self, end: str) -> list[int]:
        codes: list[int] = []
        while self._peek() != end:
            codes.append(self._char(end))
        self._at += 1
        return codes

    def _char(self, end: str) -> int:
        """A character or an escape."""
        start, c = self._at, self._peek()
        if not c:
            self._fail(f"the grammar ends where {end!r} is missing")
        self._at += 1
        if c != "\\":
            code = ord(c)
        else:
            kind = self._peek()
            self._at += 1
            if kind and kind in _ESCAPES:
                return ord(_ESCAPES[kind])
            if not kind or kind not in _HEX:
                self._at = start
                self._fail(f"unknown escape \\{kind}")
            digits = self._text[self._at : self._at + _HEX[kind]]
            if len(digits) < _HEX[kind] or not set(digits) <= set(hexdigits):
                self._fail(f"\\{kind} takes {_HEX[kind]} hexadecimal digits")
            self._at += _HEX[kind]
            code = int(digits, 16)
        if code > LAST_CHAR or (SURROGATES[0] <= code <= SURROGATES[1] and end == '"'):
            self._at = start
            self._fail(f"U+{code:04X} is no character")
        return code

    def _token(self, negated: bool) -> Node:
        self._at += negated
        start = self._at
        number = self._match(_TOKEN_ID)
        if number is not None:
            token = int(number.group(1))
        else:
            end = self._text.find(">", start)
            if self._peek() != "<" or end < 0:
                self._fail("a token should stand here: <[number]> or <text>")
            self._at = end + 1
            ids = self._tokens_of(self._text[start : self._at])
            if len(ids) != 1:
                text, self._at = self._text[start : self._at], start
                self._fail(f"{text} is no token of the vocabulary")
            token = ids[0]
        if token >= self._n_tokens:
            self._at = start
            self._fail(f"token {token} is not in the vocabulary of {self._n_tokens}")
        return TokenLeaf(token, negated)

    def _repetition(self, c: str, nested: bool) -> tuple[int, int | None]:
        start = self._at
        self._at += 1
        if c != "{":
            return _REPEATS[c]
        self._space(nested)
        low = self._number()
        high: int | None = low
        self._space(nested)
        if self._peek() == ",":
            self._at += 1
            self._space(nested)
            high = self._number() if self._peek().isdecimal() else None
            self._space(nested)
        if self._peek() != "}":
            self._fail("',' or '}' should stand here")
        self._at += 1
        if max(low, high or 0) > MAX_REPETITIONS or (high is not None and high < low):
            self._at = start
            self._fail(f"repetitions must ascend, and be {MAX_REPETITIONS} at most")
        return low, high

    def _number(self) -> int:
        number = self._match(_NUMBER)
        if number is None:
            self._fail("a number should stand here")
        return int(number.group())

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _space(self, newlines: bool) -> None:
        self._match(_SPACE_OR_NEWLINE if newlines else _SPACE)

    def _place(self, at: int) -> tuple[int, int]:
        before = self._text[:at]
        return before.count("\n") + 1, at - before.rfind("\n")

    def _fail(self, what: str) -> NoReturn:
        line, column = self._place(self._at)
        near = self._text[self._at :].partition("\n")[0].rstrip("\r")[:20]
        raise SamplerError(
            f"the grammar cannot be read: line {line}, column {column}: {what}" + (f" (at {near!r})" if near else "")
        )
