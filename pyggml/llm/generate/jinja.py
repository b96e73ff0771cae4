"""Renders chat templates. They are written for the Jinja of the transformers library's `apply_chat_template`, so the
filters, functions and tags of that are here."""

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

from pyggml.errors import ModelError

from .bounded_jinja import BoundedEnvironment, GivenDict, GivenList


class _Generation(Extension):
    """The tag `{% generation %}` .. `{% endgeneration %}`. Training needs it to know what the assistant said; here the
    text between the two is simply shown."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # variables that are set inside are not known outside


class _Environment(BoundedEnvironment):
    def __init__(self) -> None:
        super().__init__({"tojson": self._tojson}, ("jinja2.ext.loopcontrols", _Generation))
        names = cast("dict[str, Any]", self.globals)
        names["raise_exception"], names["strftime_now"] = self._refuse, self._now

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON for a model to read: nothing is escaped for HTML, and keys keep their order."""
        if indent is None and separators is None:
            return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
        run, parts = self.running, list[str]()
        run.fits(_DEEPEST * (indent if isinstance(indent, int) else len(indent or "")))
        options: Any = {"indent": indent, "separators": separators}
        for part in json.JSONEncoder(ensure_ascii=ensure_ascii, sort_keys=sort_keys, **options).iterencode(value):
            run.step(1, len(part))
            parts.append(part)
        return "".join(parts)

    def _refuse(self, message: Any) -> NoReturn:
        raise jinja2.TemplateError(str(self.running.weighed(message)))

    def _now(self, form: str) -> str:
        self.running.fits(256 * len(form))  # a letter of it may become that many bytes
        return datetime.now().astimezone().strftime(form)


_DEEPEST = 1000  # how deep JSON may be nested, by Python's limit of recursion
_ENVIRONMENT = _Environment()


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)


def render(name: str, source: str, values: dict[str, Any]) -> str:
    """Render a template with the variables `values`, which are plain (see `plain`). Raises ModelError when the template
    cannot be read, fails, refuses the messages, or goes beyond a limit."""
    try:
        return _ENVIRONMENT.render_bounded(source, values, _compiled)
    except Exception as e:
        line = getattr(e, "lineno", None)
        where = f" (line {line} of the template)" if isinstance(line, int) else ""
        nothing_said = "not enough memory" if isinstance(e, MemoryError) else type(e).__name__
        why = str(e)[:1000] or nothing_said
        raise ModelError(f"the chat template {name:.100}: {why}{where}") from None


def plain(what: str, value: Any) -> Any:
    """A copy of `value` that holds only dicts, lists, strings, numbers, bools and None, so that a template gets no
    object with methods of its own. Objects with `model_dump` (pydantic's) are dumped. Raises ModelError for other
    objects; `what` is the name of `value` in it."""
    try:
        return _plain(value, what)
    except RecursionError:
        raise ModelError(f"{what}: is nested too deeply") from None


def _plain(value: Any, *where: Any) -> Any:
    """See `plain`. `where`: the name of the whole, and the keys and indices that lead to `value`."""
    kind = cast("type[Any]", type(value))
    if kind in _PLAIN:
        return value
    if isinstance(value, dict if kind is dict else Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return GivenDict(
            {
                k if type(k) is str else _plain(k, *where, k): v if type(v) in _PLAIN else _plain(v, *where, k)
                for k, v in items
            }
        )
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return GivenList([_plain(v, *where, i) for i, v in enumerate(cast("Sequence[Any]", value))])
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(cast(Any, value))
    other = cast(Any, value)
    if hasattr(other, "model_dump") and not isinstance(other, type):
        return _plain(other.model_dump(), *where)
    name = where[0] + "".join(f"[{k!r:.40}]" for k in where[1:])
    raise ModelError(f"{name} must be made of what JSON has, not of {type(other).__name__}")


_PLAIN = frozenset((str, bool, int, float, type(None)))
