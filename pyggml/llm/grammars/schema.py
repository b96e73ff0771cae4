"""JSON schemas as llguidance takes them: keywords that it does not know are said with others, or left out and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any, cast

from pyggml.errors import SamplerError

from .negate import Schema, negated, of_types, types_of

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalItems", "additionalProperties", "contains", "then", "else")
_OTHERS = ("propertyNames", "unevaluatedProperties", "unevaluatedItems")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "not", "dependentSchemas")
_WITHIN_FIRST = 8  # `contains` looks for its element among so many
_ORDERS = 5  # of up to so many distinct values all orders are listed


def enforceable(schema: Any, has_pattern: Callable[[str], bool]) -> tuple[Schema, list[str]]:
    """The schema in keywords that llguidance knows, and what it no longer demands: `uniqueItems at /tags`.

    `has_pattern` says whether the engine can match a regular expression. Raises SamplerError for what is no schema, or
    allows nothing.
    """
    try:
        schema = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
    except (TypeError, ValueError) as e:
        raise SamplerError(f"the JSON schema is no JSON: {e}") from None
    if schema is True:
        return {}, []
    if schema is False:
        raise SamplerError("the JSON schema is false: it allows nothing")
    if not isinstance(schema, Mapping):
        raise SamplerError(f"a JSON schema is an object, true or false, not {schema!r:.60}")
    rewriter = _Rewriter(has_pattern)
    try:
        out = rewriter.schema(cast(Schema, schema), "")
    except RecursionError:
        raise SamplerError("the JSON schema is nested too deep") from None
    except (TypeError, AttributeError, KeyError) as e:  # of a keyword's value
        raise SamplerError(f"the JSON schema is malformed: {e}") from None
    if out is False:
        raise SamplerError("the JSON schema allows nothing")
    return ({} if out is True else out), rewriter.left_out


class _Rewriter:
    def __init__(self, has_pattern: Callable[[str], bool]) -> None:
        self.left_out: list[str] = []
        self._has_pattern = has_pattern

    def schema(self, s: Any, at: str) -> Any:
        """What is left of a schema (or of what stands in its place) once keywords that are not known are said in
        others; those in it first, but not what is denied: there, to demand less would allow less."""
        if not isinstance(s, Mapping):
            return s
        out = dict(cast(Schema, s))
        for key in _MAPS:
            if isinstance(out.get(key), Mapping):
                out[key] = {k: self.schema(v, f"{at}/{key}/{k}") for k, v in out[key].items()}
        for key in (*_LISTS, "items"):
            if isinstance(out.get(key), list):
                out[key] = [self.schema(v, f"{at}/{key}/{i}") for i, v in enumerate(out[key])]
        for key in (*_ONE, *_OTHERS):
            if isinstance(out.get(key), Mapping):
                out[key] = self.schema(out[key], f"{at}/{key}")
        more: list[Any] = []  # what must hold besides
        self._unevaluated(out, at)
        self._names(out, at)
        self._dependent(out, more)
        self._contains(out, more, at)
        self._unique(out, more, at)
        self._pattern(out, at)
        self._condition(out, more, at)
        self._negation(out, more, at)
        if any(m is False for m in more):
            return False
        more = [m for m in more if m is not True and m != {}]
        if more:
            out["allOf"] = [*out.get("allOf", ()), *more]
        return out

    def _loosen(self, keyword: str, at: str) -> None:
        self.left_out.append(f"{keyword} at {at or '/'}")

    def _negation(self, out: Schema, more: list[Any], at: str) -> None:
        if "not" not in out:
            return
        wrong = out.pop("not")
        allowed = _without_values(out, wrong)
        if allowed is not None:
            out.pop("const", None)
            out["enum"] = allowed
            return
        right = negated(wrong, out)
        if right is None:
            self._loosen("not", at)
        else:
            more.append(self.schema(right, at))

    def _condition(self, out: Schema, more: list[Any], at: str) -> None:
        """`if a then b else c`: a and b, or c and not a."""
        condition, then, other = (out.pop(key, True) for key in ("if", "then", "else"))
        if condition is True or (then is True and other is True):
            more.append(then if condition is True and then is not True else True)
            return
        not_so = negated(condition, out)
        if not_so is None:
            self._loosen("the 'not' of if", at)
            not_so = True
        choices = [_both(self.schema(condition, f"{at}/if"), then), _both(self.schema(not_so, at), other)]
        choices = [c for c in choices if c is not False]
        more.append({"anyOf": choices} if choices else False)

    def _dependent(self, out: Schema, more: list[Any]) -> None:
        """Where there is one property there must be others, or a schema holds."""
        wanted = {**out.pop("dependencies", {}), **out.pop("dependentSchemas", {}), **out.pop("dependentRequired", {})}
        for name, demand in wanted.items():
            then = cast(Any, {"required": demand} if isinstance(demand, list) else demand)
            others = [t for t in types_of(out) if t != "object"]
            choices: list[Any] = [{"type": "object", "properties": {name: False}}, _both({"type": "object"}, then)]
            more.append({"anyOf": [*choices, *([of_types(others)] if others else [])]})

    def _names(self, out: Schema, at: str) -> None:
        """`propertyNames`: as `patternProperties`, or as a list of them."""
        if "propertyNames" not in out:
            return
        names: Any = out.pop("propertyNames")
        rest: Any = out.get("additionalProperties", True)
        values = cast("list[Any] | None", None if isinstance(names, bool) else names.get("enum"))
        if names is True or names == {}:
            return
        if names is False:
            out["additionalProperties"] = False
        elif values is not None and not out.get("patternProperties"):
            known = out.get("properties", {})
            out["properties"] = {name: known.get(name, rest) for name in values if isinstance(name, str)}
            out["additionalProperties"] = False
        elif not out.get("properties") and not out.get("patternProperties") and (pattern := _pattern_of(names)):
            if self._has_pattern(pattern):
                out["patternProperties"], out["additionalProperties"] = {pattern: rest}, False
            else:
                self._loosen("propertyNames", at)
        else:
            self._loosen("propertyNames", at)

    def _unevaluated(self, out: Schema, at: str) -> None:
        for key, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if key not in out:
                continue
            value = out.pop(key)
            if value is True or value == {} or plain in out:
                continue
            if any(k in out for k in _IN_PLACE):
                self._loosen(key, at)
            else:
                out[plain] = value

    def _contains(self, out: Schema, more: list[Any], at: str) -> None:
        """The element that an array must contain is one of the first few."""
        wanted, low, high = (out.pop(k, None) for k in ("contains", "minContains", "maxContains"))
        if wanted is None or low == 0:
            if wanted is not None and high is not None:
                self._loosen("maxContains", at)
            return
        if low not in (None, 1):
            self._loosen("minContains", at)
        if high is not None:
            self._loosen("maxContains", at)
        n = min(_WITHIN_FIRST, _whole(out.get("maxItems"), _WITHIN_FIRST))
        arrays = [{"type": "array", "prefixItems": [*[True] * i, wanted], "minItems": i + 1} for i in range(n)]
        others = [t for t in types_of(out) if t != "array"]
        more.append({"anyOf": [*arrays, *([of_types(others)] if others else [])]})

    def _unique(self, out: Schema, more: list[Any], at: str) -> None:
        """Distinct elements: all orders of a few values are listed."""
        if out.pop("uniqueItems", False) is not True:
            return
        items = out.get("items")
        values = _values(items) if isinstance(items, Mapping) and "prefixItems" not in out else None
        low, high = _whole(out.get("minItems"), 0), _whole(out.get("maxItems"), 1 << 30)
        if high <= 1:
            return
        if values is None or types_of(out) != ["array"]:
            self._loosen("uniqueItems", at)
        elif len(values) > _ORDERS:
            out["maxItems"] = min(high, len(values))
            self._loosen("uniqueItems", at)
        else:
            lists = [list(p) for n in range(low, min(high, len(values)) + 1) for p in permutations(values, n)]
            more.append({"enum": lists} if lists else False)
            for key in ("items", "minItems", "maxItems"):
                out.pop(key, None)

    def _pattern(self, out: Schema, at: str) -> None:
        pattern = out.get("pattern")
        if isinstance(pattern, str) and not self._has_pattern(pattern):
            del out["pattern"]
            self._loosen(f"pattern {pattern!r:.60}", at)
        for pattern in [p for p in out.get("patternProperties", ()) if not self._has_pattern(p)]:
            del out["patternProperties"][pattern]
            if out.get("additionalProperties") is not None:  # it would hold for these properties, too
                out["additionalProperties"] = True
            self._loosen(f"patternProperties {pattern!r:.60}", at)


def _both(a: Any, b: Any) -> Any:
    if a is False or b is False:
        return False
    parts = [x for x in (a, b) if x is not True and x != {}]
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def _values(s: Any) -> Sequence[Any] | None:
    """All values of a schema that lists them; None for others."""
    if set(s) - {"enum", "const", "type", "title", "description", "default"}:
        return None
    if "const" in s:
        found: list[Any] = [s["const"]]
    elif isinstance(s.get("enum"), list):
        found = s["enum"]
    elif s.get("type") in ("boolean", "null"):
        return [True, False] if s["type"] == "boolean" else [None]
    else:
        return None
    texts = {json.dumps(v, sort_keys=True): v for v in found}
    return [v for v in texts.values() if _type_of(v) in types_of(s)]


def _without_values(out: Schema, wrong: Any) -> list[Any] | None:
    """The values of `out` but those of `wrong`, where both list theirs."""
    if not isinstance(wrong, Mapping) or not ("enum" in out or "const" in out):
        return None
    mine, theirs = _values({k: out[k] for k in ("enum", "const", "type") if k in out}), _values(wrong)
    if mine is None or theirs is None:
        return None
    texts = {json.dumps(v, sort_keys=True) for v in theirs}
    return [v for v in mine if json.dumps(v, sort_keys=True) not in texts]


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "number"
    kinds = ((str, "string"), (int, "integer"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _whole(value: Any, default: int) -> int:
    return int(value) if isinstance(value, (int, float)) else default


def _pattern_of(names: Schema) -> str | None:
    """A regular expression for names by pattern or length."""
    if set(names) - {"pattern", "minLength", "maxLength", "type", "title"}:
        return None
    sizes = {k for k in ("minLength", "maxLength") if k in names}
    if "pattern" in names:
        return None if sizes else names["pattern"]
    return f"^.{{{_whole(names.get('minLength'), 0)},{names.get('maxLength', '')}}}$" if sizes else None
