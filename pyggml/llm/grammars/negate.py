"""Negate JSON schemas: a schema of the values that another schema does not allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

Schema = dict[str, Any]
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
ABOUT = {"title", "description", "default", "examples", "$comment"}  # these keywords allow every value


def types_of(s: Mapping[str, Any]) -> list[str]:
    """The types that a schema's `type` allows (all when it has none). "number" also gives "integer"."""
    kind = s.get("type")
    kinds: Sequence[str] = TYPES if kind is None else [kind] if isinstance(kind, str) else kind
    return [t for t in TYPES if t in kinds or (t == "integer" and "number" in kinds)]


def of_types(kinds: Sequence[str]) -> Any:
    """A schema that allows these types; False for no type."""
    if not kinds:
        return False
    return {"type": [t for t in kinds if not (t == "integer" and "number" in kinds)]}


def negated(s: Any, within: Mapping[str, Any]) -> Any:
    """A schema (or a bool) that allows the values which `within` allows and `s` does not, when it is used together with
    `within`. None when the keywords that llguidance knows cannot say it."""
    if isinstance(s, bool):
        return not s
    if not isinstance(s, Mapping):
        return None
    s = cast(Schema, s)
    keys = set(s) - ABOUT
    if not keys:
        return False
    if keys == {"type"}:
        return _other_types(types_of(s), types_of(within))
    if keys == {"not"}:
        return s["not"]
    if keys == {"anyOf"}:
        parts = [negated(p, within) for p in s["anyOf"]]
        return None if None in parts else _all(parts)
    if keys == {"allOf"}:
        parts = [negated(p, within) for p in s["allOf"]]
        return None if None in parts else _any(parts)
    if keys in ({"const"}, {"enum"}):
        return _other_values(s.get("enum", [s.get("const")]), within)
    if keys <= {"properties", "required", "type"} and types_of(within) == ["object"]:
        return _other_properties(s, within)
    return None


def _other_types(wrong: Sequence[str], mine: Sequence[str]) -> Any:
    if "integer" in wrong and "number" not in wrong and "number" in mine:
        return None  # numbers that are not integers
    return of_types([t for t in mine if t not in wrong])


def _other_values(wrong: Sequence[Any], within: Mapping[str, Any]) -> Any:
    """The listed values without the `wrong` ones; for integers, the ranges between the wrong ones."""
    listed = within.get("enum", [within["const"]] if "const" in within else None)
    if listed is not None:
        left = [v for v in listed if not any(v == w and isinstance(v, bool) == isinstance(w, bool) for w in wrong)]
        return {"enum": left} if left else False
    mine = types_of(within)
    if mine == ["boolean"]:
        left = [v for v in (True, False) if not any(v is w for w in wrong)]
        return {"enum": left} if left else False
    if mine == ["integer"]:
        edges = sorted({w for w in wrong if isinstance(w, int) and not isinstance(w, bool)})
        if not edges:
            return True
        inner = [(a + 1, b - 1) for a, b in pairwise(edges) if a + 1 <= b - 1]
        below, above = {"type": "integer", "maximum": edges[0] - 1}, {"type": "integer", "minimum": edges[-1] + 1}
        return _any([below, *({"type": "integer", "minimum": a, "maximum": b} for a, b in inner), above])
    return True if mine == ["null"] and None not in wrong else None


def _other_properties(s: Schema, within: Mapping[str, Any]) -> Any:
    """The objects that lack a required property, or have a property that its schema does not allow."""
    if "object" not in types_of(s):
        return True
    known: Mapping[str, Any] = within.get("properties", {})
    choices: list[Any] = [{"properties": {name: False}} for name in s.get("required", ())]
    for name, value in s.get("properties", {}).items():
        mine = known.get(name, {})
        other = negated(value, cast("Mapping[str, Any]", mine) if isinstance(mine, Mapping) else {})
        if other is None:
            return None
        if other is not False:
            choices.append({"properties": {name: other}, "required": [name]})
    return _any(choices)


def _any(parts: Sequence[Any]) -> Any:
    parts = [p for p in parts if p is not False]
    if True in [p for p in parts if isinstance(p, bool)]:
        return True
    return {"anyOf": parts} if len(parts) > 1 else parts[0] if parts else False


def _all(parts: Sequence[Any]) -> Any:
    if False in [p for p in parts if isinstance(p, bool)]:
        return False
    parts = [p for p in parts if p is not True]
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True
