"""What a small grammar or schema may ask for: work that grows with its text, or a refusal that names a limit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyggml import limits
from pyggml.errors import SamplerError
from pyggml.llm.grammars.gbnf import parse_gbnf
from pyggml.llm.grammars.lark import lark
from pyggml.llm.grammars.members import Lists, Members
from pyggml.llm.grammars.schema import enforceable
from pyggml.llm.model import load_model
from pyggml.llm.samplers.grammar import Grammar
from pyggml.llm.vocab import Vocab

from ...linear import assert_linear
from .test_gbnf import takes
from .test_schema import accepts


@pytest.fixture(scope="module")
def vocab(tiny: Path) -> Vocab:
    return load_model(tiny, vocab_only=True).vocab


def ids(text: str) -> list[int]:
    return [b + 3 for b in text.encode()]


def nested(wrap: Callable[[Any], Any], depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def words(n: int) -> str:
    return "root ::= " + " | ".join(f'"w{i * 7919 % 100003}"' for i in range(n))


def test_words_cost_what_they_are_long(vocab: Vocab) -> None:
    assert_linear(lambda n: lark(parse_gbnf(words(n), lambda _: [], 0)), 200)
    g = Grammar(vocab, words(2000), None)
    assert [takes(g, ids(text)) for text in ("w0", "w7919", "w791", "w7919x")] == [True, True, False, False]


def test_rules_that_double(vocab: Vocab) -> None:
    rules = [f"a{i} ::= a{i - 1} a{i - 1}" for i in range(1, 41)]
    g = Grammar(vocab, "\n".join(["root ::= a40", 'a0 ::= "a" | "b"', *rules]), None)
    matcher = g._matcher  # pyright: ignore[reportPrivateUsage]
    assert matcher.try_consume_tokens(ids("ab" * 100)) == 200 and not matcher.is_accepting()


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= (" + " ".join(f"[a-{c}]?" for c in "bcdefghij" * 400) + ")*",  # each may follow each
        "root ::= " + " | ".join(f"r{i}" for i in range(3000)) + "".join(f'\nr{i} ::= "x" root?' for i in range(3000)),
        "root ::= " + "a11 " * 9 + "\na0 ::= [" + "".join(chr(0x400 + 2 * i) for i in range(9000)) + "]"
        + "".join(f"\na{i} ::= a{i - 1} a{i - 1}" for i in range(1, 12)),
        'root ::= "' + "a" * 9000 + '"',  # too long for a lexeme: each character is one
        "root ::= (" + " | ".join(f"<[{i % 259}]>" for i in range(5000)) + ")*",
    ],
    ids=["follow", "pairs", "text", "literal", "tokens"],
)  # fmt: skip
def test_too_much_work_is_refused(vocab: Vocab, grammar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GRAMMAR_STEPS", 100_000)
    with pytest.raises(SamplerError, match=r"the grammar is too large: .*GRAMMAR_STEPS"):
        Grammar(vocab, grammar, None)


@pytest.mark.parametrize("key", ["const", "properties"])
def test_objects_of_very_many_members(vocab: Vocab, key: str) -> None:
    """The engine's stack ended, and so did the process."""
    with pytest.raises(SamplerError, match=r"object of 50000 members; limits\.SCHEMA_OBJECT"):
        Grammar(vocab, None, {key: {str(i): {} for i in range(50000)}})


def test_nested_demands_are_said_once(vocab: Vocab) -> None:
    holds_one = nested(lambda s: {"type": "array", "contains": s}, 10, {"const": 1})
    depth_10 = nested(lambda x: [x], 10, 1)
    assert accepts(vocab, holds_one, [depth_10, [0, depth_10[0]], depth_10[0]])[0] == [True, True, False]
    names = {"enum": list("abcdefgh")}
    named = nested(lambda s: {"type": "object", "propertyNames": names, "additionalProperties": s}, 10, {"const": 1})
    objects = nested(lambda x: {"h": x}, 10, 1)
    assert accepts(vocab, named, [objects, {"i": objects["h"]}])[0] == [True, False]
    for wrap in (lambda s: {"contains": s}, lambda s: {"propertyNames": names, "additionalProperties": s}):
        few, many = (len(json.dumps(enforceable(nested(wrap, n, {"const": 1}), lambda _: True)[0])) for n in (4, 40))
        assert many < 12 * few


def test_remainders(vocab: Vocab) -> None:
    assert accepts(vocab, {"type": "integer", "multipleOf": 86400}, [172800, 172801])[0] == [True, False]
    assert accepts(vocab, {"type": "integer", "multipleOf": 7 * 10**5}, [14 * 10**5])[0] == [True]
    together = {"type": "integer", "allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]}
    apart = {"properties": {f"p{i}": {"multipleOf": 100003 + i} for i in range(9)}}
    for schema in ({"type": "integer", "multipleOf": 1000003}, together, apart):
        with pytest.raises(SamplerError, match="SCHEMA_REMAINDERS"):
            Grammar(vocab, None, schema)


def test_patterns(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SamplerError, match=r"pattern '\^\(a\{1000\}\)\{1000\}\$' cannot be matched: lexer error"):
        Grammar(vocab, None, {"type": "string", "pattern": "^(a{1000}){1000}$"})
    monkeypatch.setattr(limits, "SCHEMA_SECONDS", -1)
    with pytest.raises(SamplerError, match="SCHEMA_SECONDS"):
        Grammar(vocab, None, {"type": "string", "pattern": "^a$"})


def test_many_members(vocab: Vocab) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(800)}}
    assert accepts(vocab, schema, [{"p1": 1, "p799": 2}, {"q": 1}])[0] == [True, False]


def test_parts(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SCHEMA_PARTS", 5)
    with pytest.raises(SamplerError, match="SCHEMA_PARTS"):
        Grammar(vocab, None, {"anyOf": [{"const": i} for i in range(5)]})


def test_members_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep a schema lies in others, which need to know what it lists."""
    looked = Counter[int]()
    look = Lists._members  # pyright: ignore[reportPrivateUsage]

    def counted(self: Lists, s: Any) -> Members:
        looked[depth] += 1
        return look(self, s)

    monkeypatch.setattr(Lists, "_members", counted)
    for depth in (8, 16, 32, 64):
        inside: Any = {"anyOf": [{"required": [f"a{i}"]} for i in range(20)]}
        for _ in range(depth):
            inside = {"anyOf": [{"contains": {"const": 1}, **inside}, True]}
        enforceable(inside, lambda _: True)
    assert looked[64] - looked[32] == 2 * (looked[32] - looked[16]) == 4 * (looked[16] - looked[8])
    monkeypatch.setattr(limits, "SCHEMA_MEMBERS", 500)
    with pytest.raises(SamplerError, match="SCHEMA_MEMBERS"):
        enforceable(inside, lambda _: True)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"items":' * 100_000 + "{}" + "}" * 100_000, "the JSON schema is nested too deep"),
        ('{"items":' * 400 + "{}" + "}" * 400, "nested too deep|recursion limit"),
        ('{"minimum": NaN}', "is no JSON: NaN is no number"),
        ('{"const": -Infinity}', "is no JSON: -Infinity is no number"),
        ('{"maximum": 1e999}', "is no JSON: 1e999 is no number of JSON, or too large"),
        ('{"minLength": 1' + "0" * 400 + "}", "is no JSON: 1000.* or too large"),
        ({"const": float("inf")}, "is no JSON: Infinity is no number"),
        ({"const": object()}, "is no JSON"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "cannot"),
        ({"allOf": [{"$ref": "#"}], "properties": {}}, "cannot"),
    ],
)
def test_what_is_no_schema_is_named(vocab: Vocab, schema: Any, message: str) -> None:
    with pytest.raises(SamplerError, match=message):
        Grammar(vocab, None, schema)
