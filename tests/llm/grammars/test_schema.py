"""JSON schemas: every keyword is enforced, or left out with a warning; none is refused."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pyggml.errors import SamplerError
from pyggml.llm.model import load_model
from pyggml.llm.samplers.grammar import Grammar
from pyggml.llm.vocab import Vocab

from .test_gbnf import takes

DRAGON = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
    "required": ["kind"],
}
CLOSED = {"additionalProperties": False}
A1 = {"properties": {"a": {"const": 1}}, "required": ["a"]}


@pytest.fixture(scope="module")
def vocab(tiny: Path) -> Vocab:
    return load_model(tiny, vocab_only=True).vocab


def accepts(vocab: Vocab, schema: Any, values: list[Any]) -> tuple[list[bool], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        g = Grammar(vocab, None, schema if isinstance(schema, Mapping) else json.dumps(schema))
    texts = [json.dumps(v) for v in values]
    return [takes(g, [b + 3 for b in t.encode()]) for t in texts], [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (True, [1, "a", {"b": [None]}], []),
        ({"properties": {"a": True, "b": False}}, [{"a": 1}, {}, 3], [{"b": 1}]),
        ({"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True},
         [[], ["x"], ["y", "x"]], [["x", "x"], ["z"]]),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2},
         [[True, False]], [[True], [True, True]]),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 7}},
         [[7], [1, 2, 7, 3], [7, 7]], [[], [1], ["a", 7]]),
        ({"type": "array", "contains": {"type": "null"}, "maxItems": 2},
         [[None], [1, None]], [[1, 2], [], [1, 2, None]]),
        ({"not": {"type": "string"}}, [1, None, {}, [1.5]], ["a"]),
        ({"type": ["string", "null", "number"], "not": {"type": "number"}}, ["a", None], [1, 1.5]),
        ({"enum": ["a", "b", 1, True], "not": {"enum": ["a", True]}}, ["b", 1], ["a", True]),
        ({"type": "integer", "not": {"enum": [3, 5]}}, [2, 4, 6, -1], [3, 5]),
        ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
        ({"type": "object", "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
         [{}, {"c": 1}], [{"a": 1}, {"b": 1}]),
        ({"not": {"not": {"type": "integer"}}}, [1], ["a", None]),
        ({"not": {"anyOf": [{"not": {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}}]}},
         [[], [2, 1]], [[1, 1], 1]),
        ({**DRAGON, **CLOSED, "if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["n"]}},
         [{"kind": "a", "n": 1}, {"kind": "b"}, {"kind": "b", "n": 1}], [{"kind": "a"}, {"n": 1}]),
        ({**DRAGON, "if": {"properties": {"kind": {"const": "a"}}}, "then": {"properties": {"n": {"minimum": 5}}},
          "else": {"properties": {"n": {"maximum": 1}}}},
         [{"kind": "a", "n": 6}, {"kind": "b", "n": 0}], [{"kind": "a", "n": 0}, {"kind": "b", "n": 6}]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
         [{}, {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, [{"b": 1}, {"b": 1, "a": 1}, 5], [{"a": 1}]),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
         [{}, {"b": 1}], [{"c": 1}, {"a": "x"}]),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"xy": 1}], [{"y": 1}]),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"xy": 1}], [{"xyz": 1}]),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
        ({"$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}, "not": {"type": "null"}}},
          "$ref": "#/$defs/x"},
         [[], [[], [[]]]], [1, [1]]),
        ({"type": "object", "properties": {"s": {"format": "date"}, "t": {"$ref": "#/properties/s"}},
          "not": {"required": ["z"]}},
         [{"s": "2020-01-02", "t": "2020-01-02"}], [{"t": "x"}, {"z": 1}]),
    ],
)  # fmt: skip
def test_enforced(vocab: Vocab, schema: Any, yes: list[Any], no: list[Any]) -> None:
    found, warned = accepts(vocab, schema, [*yes, *no])
    assert found == [True] * len(yes) + [False] * len(no) and not warned


@pytest.mark.parametrize(
    ("schema", "yes", "no", "warning"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
         [[1, 2], [1, 1]], [["a"]], "uniqueItems at /$"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}},
         [{"a": [1, 1]}], [{"a": 1}], "uniqueItems at /properties/a$"),
        ({"type": "array", "items": {"enum": [1, 2, 3, 4, 5, 6]}, "uniqueItems": True},
         [[1, 2], [1, 1]], [[1] * 7], "uniqueItems"),
        ({"type": "array", "contains": {"const": 1}, "minContains": 2}, [[1], [1, 1]], [[2]], "minContains"),
        ({"type": "string", "not": {"const": "a"}}, ["a", "b"], [1], "not at /"),
        ({"type": "number", "not": {"type": "integer"}}, [1.5, 1], ["a"], "not at /"),
        ({"type": "object", "if": {"minProperties": 2}, "then": {"required": ["a"]}, "else": {"required": ["b"]}},
         [{"a": 1, "c": 1}, {"b": 1}], [{}, {"c": 1}], "the 'not' of if at /"),
        ({"type": "string", "pattern": "^(?=a)b"}, ["c"], [1], r"pattern '\^\(\?=a\)b' at /"),
        ({"type": "string", "format": "no-such"}, ["c"], [1], "Unknown format: no-such"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, [1, 1.5], ["a"], "oneOf"),
        ({"allOf": [{"required": ["a"]}], "unevaluatedProperties": False}, [{"a": 1}], [{}], "unevaluatedProperties"),
        ({"type": "object", "propertyNames": {"format": "email"}}, [{"a": 1}], [1], "propertyNames"),
        ({"type": "array", "contains": {"const": 1}, "maxContains": 1}, [[1], [1, 1]], [[2]], "maxContains"),
    ],
)  # fmt: skip
def test_loosened(vocab: Vocab, schema: Any, yes: list[Any], no: list[Any], warning: str) -> None:
    found, warned = accepts(vocab, schema, [*yes, *no])
    assert found == [True] * len(yes) + [False] * len(no)
    assert len(warned) == 1 and warned[0].startswith("the JSON schema is loosened")
    assert re.search(warning, warned[0]), warned


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (False, "allows nothing"),
        ({"not": {}}, "allows nothing"),
        ({"properties": {"a": {"not": {"type": 3}}}}, "malformed"),
        ({"type": "array", "uniqueItems": True, "items": {"enum": 3}, "contains": 3}, "."),
        ({"allOf": [5]}, "allOf at / must be a list of schemas, not"),
        ({"properties": {"a": {"patternProperties": [5]}}}, "patternProperties at /properties/a must be an object"),
        ({"propertyNames": 5}, "propertyNames at / must be a schema, not 5"),
        ({"$defs": [5]}, r"\$defs at / must be an object"),
        ({"multipleOf": True}, "multipleOf"),
        (3, "a JSON schema is an object, true or false, not 3"),
        ("x", "a JSON schema is an object"),
        ({"type": "strange"}, "strange"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"enum": ["a"], "not": {"const": "a"}}, "cannot be read"),
    ],
)
def test_refused(vocab: Vocab, schema: Any, message: str) -> None:
    with pytest.raises(SamplerError, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Grammar(vocab, None, json.dumps(schema))
    with pytest.raises(SamplerError, match="the JSON schema is no JSON"):
        Grammar(vocab, None, "{")


def test_pydantic_sets(vocab: Vocab) -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("M", ids=(set[int], ...), flags=(dict[str, bool], {}))
    found, warned = accepts(vocab, model.model_json_schema(), [{"ids": [1, 2], "flags": {"a": True}}, {"ids": ["a"]}])
    assert found == [True, False] and "uniqueItems at /properties/ids" in warned[0]
