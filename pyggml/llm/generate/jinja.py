"""Jinja as chat templates are written for it: what the transformers library's `apply_chat_template` offers them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyggml.errors import ModelError


class _Generation(Extension):
    """`{% generation %}` .. `{% endgeneration %}` stand around what an assistant says, for who trains; the text between
    them is shown as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # what is set inside is not known outside


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        extensions = ("jinja2.ext.loopcontrols", _Generation)
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters["tojson"] = _tojson
        names = cast("dict[str, Any]", self.globals)
        names["raise_exception"], names["strftime_now"] = _refuse, _now


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _Environment().from_string(source)


def render(name: str, source: str, values: Mapping[str, Any]) -> str:
    """The text that a template makes of `values`, which are plain (see `plain`). Raises ModelError where it cannot be
    read, fails, or refuses: whatever goes wrong inside is the template's."""
    try:
        return _compiled(source).render(values)
    except Exception as e:
        line = getattr(e, "lineno", None)
        where = f" (line {line} of the template)" if isinstance(line, int) else ""
        raise ModelError(f"the chat template {name}: {e or type(e).__name__}{where}") from None


def plain(what: str, value: Any) -> Any:
    """A copy of `value` that is made of dicts, lists, strings, numbers, bools and None alone: a template gets no object
    with methods of its own. Objects with `model_dump` (pydantic's) are dumped. Raises ModelError for others."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(cast(Any, value))
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {plain(f"a key of {what}", k): plain(f"{what}[{k!r:.40}]", v) for k, v in items}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [plain(f"{what}[{i}]", v) for i, v in enumerate(cast("Sequence[Any]", value))]
    other = cast(Any, value)
    if hasattr(other, "model_dump") and not isinstance(other, type):
        return plain(what, other.model_dump())
    raise ModelError(f"{what} must be made of what JSON has, not of {type(other).__name__}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is meant to be read by a model: nothing escaped for HTML, keys in their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
