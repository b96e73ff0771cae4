"""Find the members that a JSON schema lists for an object. As in llama.cpp, an object has no others by default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import unquote

from pyggml import limits
from pyggml.errors import SamplerError

Schema = dict[str, Any]
_SAYS_OTHERWISE = (
    "additionalProperties", "unevaluatedProperties", "propertyNames", "const", "enum", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_INSIDE = ("items", "prefixItems", "contains", "additionalProperties")
_MERGED = ("if", "then", "else")
ALTERNATIVES = ("anyOf", "oneOf")


@dataclass
class Members:
    """What a schema, and the schemas that apply in its place (`allOf`, `$ref` ...), say about the members of an object.

    counts     for each member, or the elements of an array, the number of these schemas that describe it:
               `("properties", name) -> 2`
    names      all members that are listed or required, in order
    is_listed  whether members are listed at all, by name or by pattern
    is_open    whether a keyword such as `additionalProperties` allows or describes other members
    n_least    the least number of members
    has_refs   whether one of these schemas stands elsewhere (`$ref`)
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    names: dict[str, None] = field(default_factory=dict[str, None])
    is_listed: bool = False
    is_open: bool = False
    n_least: int = 0
    has_refs: bool = False

    def add(self, other: Members) -> None:
        """Add the members of another schema that applies too."""
        self.counts += other.counts
        self._take(other)

    def add_one_of(self, others: Sequence[Members]) -> None:
        """Add the members of several schemas, when one of these schemas applies."""
        most: Counter[tuple[str, str]] = Counter()
        for other in others:
            most |= other.counts
            self._take(other)
        self.counts += most

    def _take(self, other: Members) -> None:
        self.names |= other.names
        self.is_listed = self.is_listed or other.is_listed
        self.is_open = self.is_open or other.is_open
        self.n_least = max(self.n_least, other.n_least)
        self.has_refs = self.has_refs or other.has_refs

    def can_be_closed(self, inherited: Sequence[str]) -> bool:
        """Whether an object may have the listed and the `inherited` members and no others."""
        return (self.is_listed or bool(inherited)) and not self.is_open and len(self.names) >= self.n_least


class Lists:
    """Finds `Members` in the schemas of a document, once for each schema: those around it ask for them, too. Raises
    SamplerError when there are more than limits.SCHEMA_MEMBERS."""

    def __init__(self, document: Schema) -> None:
        self._document = document
        self._found: dict[int, tuple[Any, Members]] = {}  # with its schema, so that no other has this id
        self._n_found = self._n_open_refs = 0
        self._of_refs: dict[str, Members] = {}
        self._has_local_refs = not _has_ids(document)

    def target(self, ref: Any) -> Any:
        """The schema that a `$ref` names; None when it is not a path in this document."""
        if not self._has_local_refs or not _is_local(ref):
            return None
        at: Any = self._document
        for step in cast(str, ref)[2:].split("/") if ref != "#" else ():
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(at, Mapping):
                at = cast(Schema, at).get(step)
            elif isinstance(at, list) and step.isdecimal() and int(step) < len(cast("list[Any]", at)):
                at = cast("list[Any]", at)[int(step)]
            else:
                return None
        return at

    def members(self, s: Any) -> Members:
        """The members of an object according to the schema `s`."""
        if not isinstance(s, Mapping):
            return Members()
        known = self._found.get(id(cast(Schema, s)))
        if known is not None:
            return known[1]
        found = self._members(cast(Schema, s))
        self._n_found += 1 + len(found.names) + len(found.counts)
        if self._n_found > limits.SCHEMA_MEMBERS:
            most = f"limits.SCHEMA_MEMBERS is {limits.SCHEMA_MEMBERS}"
            raise SamplerError(f"the JSON schema lists too many members, one schema inside another; {most}")
        if not self._n_open_refs:  # inside, a schema that refers to itself has not been looked at whole
            self._found[id(cast(Schema, s))] = s, found
        return found

    def _members(self, s: Schema) -> Members:
        found = Members()
        found.is_open = any(key in s for key in _SAYS_OTHERWISE)
        found.is_listed = "properties" in s or "patternProperties" in s
        found.n_least = _at_least(s.get("minProperties"))
        if "$ref" in s:
            found.has_refs = True
            found.add(self._of_ref(s["$ref"]))
        for part in _list(s.get("allOf")):
            found.add(self.members(part))
        for key in ("properties", "patternProperties"):
            found.counts.update((key, name) for name in _map(s.get(key)))
        found.counts.update((key, "") for key in _INSIDE if key in s)
        found.names |= dict.fromkeys(_map(s.get("properties"))) | _names(s.get("required"))
        for name, demand in (_map(s.get("dependentRequired")) | _map(s.get("dependencies"))).items():
            found.names |= {name: None} | _names(demand)
            found.add(self.members(demand))
        for demand in _map(s.get("dependentSchemas")).values():
            found.add(self.members(demand))
        for key in _MERGED:
            found.add(self.members(s.get(key)))
        for key in ALTERNATIVES:
            found.add_one_of([self.members(part) for part in _list(s.get(key))])
        return found

    def _of_ref(self, ref: Any) -> Members:
        target = self.target(ref)
        if target is None:
            return Members(is_open=True)
        if ref not in self._of_refs:
            self._of_refs[ref] = Members()  # ends the recursion of a schema that refers to itself
            self._n_open_refs += 1
            self._of_refs[ref] = self.members(target)
            self._n_open_refs -= 1
        return self._of_refs[ref]


def rebased(schema: Any, path: str) -> Any:
    """A schema with its references changed so that it can stand at `path` of another document."""
    if isinstance(schema, Mapping):
        given = cast(Schema, schema)
        return {
            key: f"#{path}{value[1:]}" if key == "$ref" and _is_local(value) else rebased(value, path)
            for key, value in given.items()
        }
    return [rebased(value, path) for value in cast("list[Any]", schema)] if isinstance(schema, list) else schema


def _is_local(ref: Any) -> bool:
    """Whether a `$ref` is a path in its document."""
    return isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))


def _has_ids(document: Schema) -> bool:
    """Whether a schema inside has an `$id`, where paths would begin anew."""
    todo: list[Any] = list(document.values())
    while todo:
        at = todo.pop()
        if isinstance(at, Mapping):
            if isinstance(cast(Schema, at).get("$id"), str):
                return True
            todo += cast(Schema, at).values()
        elif isinstance(at, list):
            todo += cast("list[Any]", at)
    return False


def _names(value: Any) -> dict[str, None]:
    return {name: None for name in _list(value) if isinstance(name, str)}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _map(value: Any) -> Schema:
    return dict(cast(Schema, value)) if isinstance(value, Mapping) else {}


def _at_least(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) else 0
