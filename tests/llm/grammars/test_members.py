"""Objects have the members that their schema lists and no others, as in llama.cpp; for all who give a schema."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pyggml.llama_cpp import LlamaGrammar
from pyggml.llm.grammars.members import rebased
from pyggml.llm.model import load_model
from pyggml.llm.openai.formats import HERMES, MISTRAL, forced_calls
from pyggml.llm.samplers.grammar import Grammar, known_schema
from pyggml.llm.vocab import Vocab

from .test_gbnf import takes
from .test_schema import accepts

A, B = {"a": {"type": "integer"}}, {"b": {"type": "boolean"}}
IN_A, IN_B = {"type": "object", "properties": A}, {"type": "object", "properties": B}
PET = {"properties": {"kind": {"type": "string"}, **A}, "required": ["kind"]}
TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "children": {"items": {"$ref": "#/$defs/Tree"}}}}


@pytest.fixture(scope="module")
def vocab(tiny: Path) -> Vocab:
    return load_model(tiny, vocab_only=True).vocab


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (IN_A, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
        ({"type": "object"}, [{}, {"a": {"b": 1}}], []),
        ({**IN_A, "additionalProperties": True}, [{"b": 1}], [{"a": "x"}]),
        ({**IN_A, "additionalProperties": {"type": "null"}}, [{"b": None}], [{"b": 1}]),
        ({**IN_A, "required": ["c"]}, [{"a": 1, "c": []}, {"c": 1}], [{"a": 1}, {"b": 1, "c": 1}]),
        ({**IN_A, "minProperties": 1}, [{"a": 1}], [{}, {"x": 1}]),
        ({**IN_A, "required": ["a"], "minProperties": 2}, [{"a": 1, "x": 1}], [{"a": 1}]),
        ({**IN_A, "patternProperties": {"^x": {"type": "null"}}}, [{"a": 1, "x1": None}], [{"b": 1}, {"x": 1}]),
        ({"type": "array", "items": IN_A}, [[{"a": 1}]], [[{"b": 1}]]),
        ({"additionalProperties": IN_A}, [{"k": {"a": 1}}], [{"k": {"b": 1}}]),
        ({"anyOf": [IN_A, IN_B, {"type": "null"}]}, [{"a": 1}, {"b": True}, None], [{"a": 1, "b": True}, {"c": 1}]),
        ({**PET, "anyOf": [IN_B, {"required": ["a"]}]},
         [{"kind": "x", "b": True}, {"kind": "x", "a": 1}], [{"kind": "x", "c": 1}, {"b": True}]),
        ({"allOf": [IN_A, {**IN_B, "required": ["b"]}]}, [{"a": 1, "b": True}, {"b": True}],
         [{"a": 1}, {"b": True, "c": 1}]),
        ({"allOf": [{**IN_A, "additionalProperties": True}, IN_B]}, [{"a": 1, "c": 1}], [{"b": 1}]),
        ({"allOf": [{"properties": {"x": IN_A}}, {"properties": {"x": {**IN_B, "required": ["b"]}}}]},
         [{"x": {"a": 1, "b": True}}], [{"x": {"a": 1}}, {"y": 1}]),
        ({"$defs": {"A": IN_A}, "properties": {"x": {"$ref": "#/$defs/A"}, "y": {"$ref": "#/$defs/A", "title": "t"}}},
         [{"x": {"a": 1}, "y": {}}], [{"x": {"b": 1}}, {"y": {"b": 1}}, {"z": 1}]),
        ({"$defs": {"Pet": PET, "Cat": {"allOf": [{"$ref": "#/$defs/Pet"}, {**IN_B, "required": ["b"]}]}},
          "items": {"$ref": "#/$defs/Cat"}, "type": "array"},
         [[{"kind": "c", "b": True}, {"kind": "c", "a": 1, "b": True}]],
         [[{"kind": "c"}], [{"kind": "c", "b": True, "c": 1}]]),
        ({"$defs": {"Tree": TREE}, "$ref": "#/$defs/Tree"},
         [{"v": 1, "children": [{"v": 2, "children": []}]}], [{"children": [{"w": 1}]}, {"w": 1}]),
        ({"$defs": {"Tree": TREE, "Named": {"$ref": "#/$defs/Tree", "properties": B}}, "$ref": "#/$defs/Named"},
         [{"v": 1, "b": True}, {"children": [{"v": 1}]}], [{"children": [{"b": True}]}, {"c": 1}]),
        ({"properties": {"v": {"type": "integer"}, "next": {"allOf": [{"$ref": "#"}], "default": None}}},
         [{"v": 1, "next": {"v": 2, "next": {}}}], [{"next": {"w": 1}}, {"next": {"next": {"w": 1}}}]),
        ({"$defs": {"T": {**TREE, "properties": {"x": {"allOf": [{"$ref": "#/$defs/T"}, IN_B]}}}}, "$ref": "#/$defs/T"},
         [{"x": {"x": {}, "b": True}}], [{"b": True}, {"x": {"c": 1}}]),
        ({**PET, "if": {"properties": {"kind": {"const": "x"}}}, "then": {"required": ["n"]}, "else": IN_B},
         [{"kind": "x", "n": 1}], [{"kind": "x", "n": 1, "c": 1}]),
        ({**IN_A, "dependentRequired": {"a": ["n"]}}, [{}, {"a": 1, "n": 1}], [{"a": 1}, {"m": 1}]),
        ({"$id": "https://x.org/a", "$defs": {"A": IN_A}, "$ref": "#/$defs/A"}, [{"a": 1}], [{"b": 1}]),
        ({"properties": {"p": {"$id": "p", "$defs": {"A": IN_A}, "$ref": "#/$defs/A"}}}, [{"p": {"a": 1}}], [{"q": 1}]),
        ({**IN_A, "anyOf": [True, {"required": ["n"]}]}, [{"a": 1}, {"a": 1, "n": 0}], [{"b": 1}]),
        ({**IN_A, "additionalProperties": True, "anyOf": [IN_B]}, [{"a": 1, "c": 1}], [{"b": 1}]),
    ],
)  # fmt: skip
def test_members(vocab: Vocab, schema: Any, yes: list[Any], no: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not all of if is enforced
        found, _ = accepts(vocab, schema, [*yes, *no])
    assert found == [True] * len(yes) + [False] * len(no)


def _ids(value: Any) -> list[int]:
    return [b + 3 for b in json.dumps(value).encode()]


def test_all_who_give_a_schema(vocab: Vocab) -> None:
    schema = {"$defs": {"A": IN_A}, "properties": {"x": {"$ref": "#/$defs/A"}}, "required": ["x"]}
    text = json.dumps(schema)
    yes, no = {"x": {"a": 1}}, [{"x": {"b": 1}}, {"x": {}, "b": 1}]
    grammars = [
        Grammar(vocab, None, schema),
        Grammar(vocab, None, text),
        Grammar(vocab, LlamaGrammar.from_json_schema(text)._grammar, None),  # pyright: ignore[reportPrivateUsage]
    ]
    for g in grammars:
        assert takes(g, _ids(yes)) and not any(takes(g, _ids(value)) for value in no)
    for form, call in (
        (HERMES, lambda x: '<tool_call>\n{"name": "f", "arguments": ' + json.dumps(x) + "}\n</tool_call>"),
        (MISTRAL, lambda x: '[TOOL_CALLS][{"name": "f", "arguments": ' + json.dumps(x) + "}]"),
    ):
        g = Grammar(vocab, forced_calls(form, {"f": schema}, vocab, known_schema), None)
        ids = [[b + 3 for b in call(value).encode()] for value in (yes, *no)]
        assert [takes(g, i) for i in ids] == [True, False, False]


def test_references_of_a_schema_inside_another() -> None:
    inner: Mapping[str, Any] = {"$ref": "#/$defs/A", "items": [{"$ref": "#"}, {"$ref": "b.json#/x"}], "title": "#/"}
    assert rebased(inner, "/properties/p") == {
        "$ref": "#/properties/p/$defs/A",
        "items": [{"$ref": "#/properties/p"}, {"$ref": "b.json#/x"}],
        "title": "#/",
    }
