"""Rewrite JSON schemas for llguidance: keywords that it lacks are expressed by others, or left out and reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import count, permutations
from math import isfinite, lcm
from typing import Any, cast

from pyggml import limits
from pyggml.errors import SamplerError

from .members import ALTERNATIVES, Lists, Members, Schema
from .negate import ABOUT, negated, of_types, types_of

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalItems", "additionalProperties", "contains")
_OTHERS = ("propertyNames", "unevaluatedProperties", "unevaluatedItems")
_MERGED = ("then", "else")
_DEPENDENT = ("dependentSchemas", "dependencies")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "not", "dependentSchemas")
_SILENT = ABOUT | {"$defs", "definitions", "discriminator", "deprecated", "readOnly", "writeOnly"}
_WITHIN_FIRST = 8  # `contains` looks for its element among this many
_ORDERS = 5  # up to this many distinct values, all their orders are listed


def enforceable(schema: Any, has_pattern: Callable[[str], bool]) -> tuple[Schema, list[str]]:
    """The schema in keywords that llguidance knows, and a list of the demands that it no longer makes, such as
    `uniqueItems at /tags`.

    An object has the members that its schema lists, and no others unless `additionalProperties` (or a keyword like it)
    says so, as in llama.cpp. `has_pattern(p)` says whether the engine can match the regular expression p. Raises
    SamplerError for something that is not a schema, for a schema that allows nothing, and for one that asks for too
    much.
    """
    try:
        schema = _read(schema)
        if schema is True:
            return {}, []
        if schema is False:
            raise SamplerError("the JSON schema is false: it allows nothing")
        if not isinstance(schema, Mapping):
            raise SamplerError(f"a JSON schema is an object, true or false, not {schema!r:.60}")
        _check_cost(schema)
        rewriter = _Rewriter(cast(Schema, schema), has_pattern)
        out = rewriter.document()
    except RecursionError:
        raise SamplerError("the JSON schema is nested too deep") from None
    except (TypeError, AttributeError, LookupError) as e:  # from the value of a keyword
        raise SamplerError(f"the JSON schema is malformed: {e}") from None
    if out is False:
        raise SamplerError("the JSON schema allows nothing")
    return ({} if out is True else out), rewriter.left_out


def _read(schema: Any) -> Any:
    """The JSON value of a text, or of Python objects."""

    def finite(text: str) -> float:
        if not isfinite(value := float(text)):
            raise ValueError(f"{text:.20} is no number of JSON, or too large")
        return value

    def whole(text: str) -> int:
        finite(text)
        return int(text)

    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return json.loads(text, parse_float=finite, parse_int=whole, parse_constant=finite)
    except (TypeError, ValueError) as e:
        raise SamplerError(f"the JSON schema is no JSON: {e}") from None


def _check_cost(schema: Any) -> None:
    """Refuse what the engine pays for before its own limits count. It builds a state for each remainder of a divisor,
    and goes one level deeper on its stack for each member of an object."""
    found: set[int] = set()
    may_meet, todo = False, [schema]
    while todo:
        s = todo.pop()
        if isinstance(s, Mapping):
            s = cast(Schema, s)
            if len(s) > limits.SCHEMA_OBJECT:  # the engine's stack would end, and the process with it
                raise SamplerError(
                    f"the JSON schema has an object of {len(s)} members; limits.SCHEMA_OBJECT is {limits.SCHEMA_OBJECT}"
                )
            with_others = any(key in s for key in _IN_PLACE) and len(s.keys() - _SILENT) > 1
            may_meet = may_meet or with_others or "allOf" in s
            divisor = s.get("multipleOf")
            if isinstance(divisor, (int, float)) and not isinstance(divisor, bool):
                digits = Decimal(repr(divisor)).normalize().as_tuple().digits  # zeros at the end cost nothing
                found.add(int("".join(map(str, digits))) or 1)
            todo += s.values()
        elif isinstance(s, list):
            todo += cast("list[Any]", s)
    n = lcm(*found) if may_meet else sum(found)
    if n > limits.SCHEMA_REMAINDERS:
        raise SamplerError(
            f"the JSON schema's multipleOf needs {float(min(n, 10**30)):.6g} remainders; limits.SCHEMA_REMAINDERS is"
            f" {limits.SCHEMA_REMAINDERS}"
        )


def _check_types(s: Schema, at: str) -> None:
    """Refuse keywords whose value must be a schema, a list of schemas or an object, and is not."""
    for key in (*_MAPS, *_DEPENDENT, "dependentRequired"):
        if key in s and not isinstance(s[key], Mapping):
            raise SamplerError(f"the JSON schema's {key} at {at or '/'} must be an object, not {s[key]!r:.60}")
    for key in _LISTS:
        if key in s and not (isinstance(s[key], list) and all(isinstance(v, (Mapping, bool)) for v in s[key])):
            raise SamplerError(f"the JSON schema's {key} at {at or '/'} must be a list of schemas, not {s[key]!r:.60}")
    for key in (*_ONE, *_OTHERS, *_MERGED, "if", "not"):
        if key in s and not isinstance(s[key], (Mapping, bool) if key != "items" else (Mapping, bool, list)):
            raise SamplerError(f"the JSON schema's {key} at {at or '/'} must be a schema, not {s[key]!r:.60}")


@dataclass(frozen=True)
class _Place:
    """Where a schema stands.

    inherited  members that the schema around it lists, when this schema is one of its alternatives
    shared     members that several of the schemas in this place describe, see `Members.counts`
    closes     whether objects are closed here; of merged schemas, the one around them closes
    is_deep    whether objects inside stay open too, because they are merged with others
    """

    inherited: tuple[str, ...] = ()
    shared: frozenset[tuple[str, str]] = frozenset()
    closes: bool = True
    is_deep: bool = False


_OWN = _Place()
_OPEN = _Place(closes=False, is_deep=True)


def _is_reference(s: Schema, place: _Place) -> bool:
    """Whether a schema is only a reference to a definition, which closes its objects itself."""
    return place.closes and not place.inherited and s.keys() - _SILENT == {"$ref"}


class _Rewriter:
    def __init__(self, document: Schema, has_pattern: Callable[[str], bool]) -> None:
        self.left_out: list[str] = []
        self._document, self._has_pattern = document, has_pattern
        self._lists = Lists(document)
        self._parts: Schema = {}  # our own schemas that stand in several places
        self._copies: dict[tuple[str, _Place], str] = {}  # names of definitions as rewritten for a place
        self._merged: dict[tuple[int, _Place], tuple[str, Any]] = {}
        _check_types(document, "")
        known, prefix = document.get("$defs", {}), "part"
        while any(name.startswith(prefix) for name in known):
            prefix += "_"
        self._new_names = (f"{prefix}{i}" for i in count())
        self._n = 0  # schemas so far

    def document(self) -> Any:
        """The whole document, rewritten."""
        out = self.schema(self._document, "")
        if not self._parts or out is False:
            return out
        return {**out, "$defs": {**out.get("$defs", {}), **self._parts}}

    def schema(self, s: Any, at: str, place: _Place = _OWN) -> Any:
        """A schema (or a bool) with unknown keywords expressed by others. Schemas inside it are rewritten first, except
        those under `not`: a `not` of a schema that demands less would allow less."""
        if not isinstance(s, Mapping):
            return self._schema({}, at, place) if s is True and place.closes and place.inherited else s
        s = cast(Schema, s)
        _check_types(s, at)
        if s.keys() - ABOUT == {"allOf"} and len(s["allOf"]) == 1:
            return self.schema(s["allOf"][0], f"{at}/allOf/0", place)
        if not place.closes or s is self._document or not self._is_merged(s, place):
            return self._schema(s, at, place)
        if (id(s), place) not in self._merged:  # kept as a part, which references inside may name
            name = next(self._new_names)
            self._merged[id(s), place] = name, s
            self._parts[name] = self._schema(s, at, place)
        return {"$ref": f"#/$defs/{self._merged[id(s), place][0]}"}

    def _schema(self, s: Schema, at: str, place: _Place) -> Any:
        self._n += 1
        if self._n > limits.SCHEMA_PARTS:
            raise SamplerError(f"the JSON schema has more parts than limits.SCHEMA_PARTS ({limits.SCHEMA_PARTS})")
        out = dict(s)
        members = self._lists.members(s) if place.closes else Members()
        shared = place.shared | {what for what, n in members.counts.items() if n > 1}
        merged = _OPEN if place.is_deep else _Place(shared=shared, closes=False)
        around = self._around(s) if place.closes else None
        closes = around is None and place.closes and members.can_be_closed(place.inherited)
        if _is_reference(s, place):
            closes = False  # the definition closes
        elif "$ref" in s:
            out["$ref"] = self._copy(s["$ref"], merged)
        alternative = (
            merged if around is None else replace(merged, inherited=(*place.inherited, *around.names), closes=True)
        )

        def inside(key: str, name: str = "") -> _Place:
            return _OPEN if place.is_deep or (key, name) in shared else _OWN

        for key in _MAPS:
            if isinstance(out.get(key), Mapping):
                out[key] = {k: self.schema(v, f"{at}/{key}/{k}", inside(key, k)) for k, v in out[key].items()}
        for key in (*_LISTS, "items"):
            if isinstance(out.get(key), list):
                where = merged if key == "allOf" else alternative if key in ALTERNATIVES else inside(key)
                out[key] = [self.schema(v, f"{at}/{key}/{i}", where) for i, v in enumerate(out[key])]
        for key in (*_ONE, *_OTHERS):
            if isinstance(out.get(key), Mapping):
                out[key] = self.schema(out[key], f"{at}/{key}", inside(key))
        for key in _MERGED:
            if isinstance(out.get(key), Mapping):
                out[key] = self.schema(out[key], f"{at}/{key}", merged)
        for key in _DEPENDENT:
            if isinstance(out.get(key), Mapping):
                out[key] = {k: self.schema(v, f"{at}/{key}/{k}", merged) for k, v in out[key].items()}
        more: list[Any] = []  # further schemas that must hold
        self._unevaluated(out, at)
        self._names(out, at)
        self._dependent(out, more)
        self._contains(out, more, at)
        self._unique(out, more, at)
        closes = self._pattern(out, at) and closes
        self._condition(out, more, at, merged)
        self._negation(out, more, at, merged)
        if any(m is False for m in more):
            return False
        more = [m for m in more if m is not True and m != {}]
        if more:
            out["allOf"] = [*out.get("allOf", ()), *more]
        if closes:
            names = (*place.inherited, *members.names)
            out["properties"] = dict.fromkeys(names, True) | out.get("properties", {})
            out["additionalProperties"] = False
        return out

    def _around(self, s: Schema) -> Members | None:
        """The members listed beside a schema's alternatives, when each alternative must close its objects itself."""
        given = [key for key in ALTERNATIVES if isinstance(s.get(key), list)]
        if len(given) != 1:
            return None
        around = self._lists.members({key: value for key, value in s.items() if key not in ALTERNATIVES})
        return None if around.is_open else around

    def _is_merged(self, s: Schema, place: _Place) -> bool:
        """Whether definitions are merged with other schemas here."""
        members = self._around(s) or self._lists.members(s)
        return not _is_reference(s, place) and members.has_refs and not members.is_open

    def _copy(self, ref: Any, place: _Place) -> Any:
        """A reference to a copy of a definition, which is rewritten for the place where it is used."""
        target = self._lists.target(ref)
        if not isinstance(target, Mapping):
            return ref
        if (ref, place) not in self._copies:
            name = self._copies[ref, place] = next(self._new_names)
            self._parts[name] = self.schema(target, ref[1:], place)
        return f"#/$defs/{self._copies[ref, place]}"

    def _part(self, s: Any) -> Any:
        """A reference to a schema of our own that is used in several places."""
        if not isinstance(s, Mapping) or not any(isinstance(v, (Mapping, list)) for v in cast(Schema, s).values()):
            return cast(Any, s)
        name = next(self._new_names)
        self._parts[name] = s
        return {"$ref": f"#/$defs/{name}"}

    def _loosen(self, keyword: str, at: str) -> None:
        self.left_out.append(f"{keyword} at {at or '/'}")

    def _negation(self, out: Schema, more: list[Any], at: str, place: _Place) -> None:
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
            more.append(self.schema(right, at, place))

    def _condition(self, out: Schema, more: list[Any], at: str, place: _Place) -> None:
        """Express `if a then b else c` as: a and b, or c and not a."""
        condition, then, other = (out.pop(key, True) for key in ("if", "then", "else"))
        if condition is True or (then is True and other is True):
            more.append(then if condition is True and then is not True else True)
            return
        not_so = negated(condition, out)
        if not_so is None:
            self._loosen("the 'not' of if", at)
            not_so = True
        so = self.schema(condition, f"{at}/if", place)
        choices = [_both(so, then), _both(self.schema(not_so, at, place), other)]
        choices = [c for c in choices if c is not False]
        more.append({"anyOf": choices} if choices else False)

    def _dependent(self, out: Schema, more: list[Any]) -> None:
        """Express `dependentRequired` and `dependentSchemas`: one property demands others, or a schema."""
        wanted = {**out.pop("dependencies", {}), **out.pop("dependentSchemas", {}), **out.pop("dependentRequired", {})}
        for name, demand in wanted.items():
            then = cast(Any, {"required": demand} if isinstance(demand, list) else demand)
            others = [t for t in types_of(out) if t != "object"]
            choices: list[Any] = [{"type": "object", "properties": {name: False}}, _both({"type": "object"}, then)]
            more.append({"anyOf": [*choices, *([of_types(others)] if others else [])]})

    def _names(self, out: Schema, at: str) -> None:
        """Express `propertyNames` by `patternProperties`, or by a list of properties."""
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
            known, rest = out.get("properties", {}), self._part(rest)
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
        """Express `contains`: one of an array's first few elements is the one it asks for."""
        wanted, low, high = (out.pop(k, None) for k in ("contains", "minContains", "maxContains"))
        if wanted is None or low == 0:
            if wanted is not None and high is not None:
                self._loosen("maxContains", at)
            return
        if low not in (None, 1):
            self._loosen("minContains", at)
        if high is not None:
            self._loosen("maxContains", at)
        wanted = self._part(wanted)
        n = min(_WITHIN_FIRST, _whole(out.get("maxItems"), _WITHIN_FIRST))
        arrays = [{"type": "array", "prefixItems": [*[True] * i, wanted], "minItems": i + 1} for i in range(n)]
        others = [t for t in types_of(out) if t != "array"]
        more.append({"anyOf": [*arrays, *([of_types(others)] if others else [])]})

    def _unique(self, out: Schema, more: list[Any], at: str) -> None:
        """Express `uniqueItems` of few values by listing all their orders."""
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

    def _pattern(self, out: Schema, at: str) -> bool:
        """Leave out patterns that the engine cannot match; False when such a pattern tells the names of members."""
        pattern = out.get("pattern")
        if isinstance(pattern, str) and not self._has_pattern(pattern):
            del out["pattern"]
            self._loosen(f"pattern {pattern!r:.60}", at)
        unknown = [p for p in out.get("patternProperties", ()) if not self._has_pattern(p)]
        for pattern in unknown:
            del out["patternProperties"][pattern]
            if out.get("additionalProperties") is not None:  # it would apply to these properties too
                out["additionalProperties"] = True
            self._loosen(f"patternProperties {pattern!r:.60}", at)
        return not unknown


def _both(a: Any, b: Any) -> Any:
    if a is False or b is False:
        return False
    parts = [x for x in (a, b) if x is not True and x != {}]
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def _values(s: Any) -> Sequence[Any] | None:
    """All values that a schema allows, when it lists them; None when it does not."""
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
    """The values that `out` lists and `wrong` does not; None when one of them has no list."""
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
