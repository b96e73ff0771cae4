"""Jinja's sandbox with bounds: a template cannot take more steps, memory or time than `pyggml.limits` allows.

Jinja compiles a template to Python. Each body that may run often (of a loop, macro or block) begins with a call of
`step`; operators, filters, tests and calls whose result can be much larger than their operands are asked beforehand
how large it will be; and all texts and lists that a template makes are counted.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from time import monotonic
from types import BuiltinMethodType, MethodType
from typing import Any, cast

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.runtime import Context, new_context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.tests import test_divisibleby
from jinja2.utils import Namespace, missing
from markupsafe import Markup

from pyggml import limits

_ITEM = 64  # bytes that an item of a list counts for, with the object that it may hold
_SMALL = 64  # a text up to here is not counted by itself: it is among what a run of the body costs
_OFTEN = 1 << 16  # steps and bytes between two looks at the clock
_NOTHING: dict[str, Any] = {}
_CONTAINERS: tuple[type[Any], ...] = cast(
    Any, (list, tuple, dict, set, Namespace, type(_NOTHING.keys()), type(_NOTHING.values()), type(_NOTHING.items()))
)
_SIMPLE = frozenset((bool, int, float, type(None)))
_METHOD_TYPES = (BuiltinMethodType, MethodType, type)
_OF_DICTS = frozenset(dir(dict))
_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # where `splitlines` cuts


class TooMuch(Exception):
    """A template goes beyond a limit."""


class GivenDict(dict[str, Any]):
    """A dict of the caller's. It is a tree: no template can have put a thing into it twice."""

    __slots__ = ()


class GivenList(list[Any]):
    """A list of the caller's, likewise."""

    __slots__ = ()


_GIVEN = (GivenDict, GivenList)


def _items(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        return iter([x for pair in cast("dict[Any, Any]", container).items() for x in pair])
    if isinstance(container, Namespace):
        return iter(list(cast(Any, container)._Namespace__attrs.values()))
    return iter(container)


class _Code(CodeGenerator):
    """Writes the Python of a template with calls that count."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        """Let each body that may run often say what it costs."""
        _count_bodies(node)
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b`: the operands are counted before they are joined."""
        self.write("environment.joined((")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write("), context)")

    def visit_Add(self, node: nodes.Add, frame: Frame) -> None:
        """The operator that templates use most has a call of its own."""
        self.write("environment.added(")
        self.visit(node.left, frame)
        self.write(", ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """A slice is a copy; anything else is hashed, and put into the message of an error."""
        if isinstance(node.arg, nodes.Slice):
            self.write("environment.made(")
            super().visit_Getitem(node, frame)
        else:
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(", ")
            self._operand("weighed", node.arg, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """A key is hashed, which takes long when tuples are nested."""
        self.write("{")
        for pair in node.items:
            self._operand("weighed", pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """Operands are weighed when a comparison may have to look at all that is in them."""
        self.write("(")
        alone = len(node.ops) == 1
        constant = alone and any(isinstance(x, _SCALARS) for x in (node.expr, node.ops[0].expr))
        word = "" if constant else "weighed"
        self._operand(word, node.expr, frame)
        for op in node.ops:
            self.write(f" {operators[op.op]} ")
            self._operand("searched" if op.op in ("in", "notin") else word, op.expr, frame)
        self.write(")")

    def _operand(self, word: str, node: nodes.Expr, frame: Frame) -> None:
        literal = (*_SCALARS, nodes.List, nodes.Tuple) if word == "searched" else _SCALARS
        if not word or isinstance(node, literal):
            self.visit(node, frame)
        else:
            self.write(f"environment.{word}(")
            self.visit(node, frame)
            self.write(")")


_SCALARS = (nodes.Const, nodes.TemplateData, nodes.Compare, nodes.Not, nodes.Test)


def _count_bodies(node: nodes.Node) -> tuple[int, int]:
    """Put a call of `step` at the beginning of each body below `node`. Returns how many nodes and how many characters
    of plain text the template has there."""
    n_nodes, n_chars = 1, len(node.data) if isinstance(node, nodes.TemplateData) else 0
    if isinstance(node, nodes.Output):
        n_chars += _SMALL * len(node.nodes)
    for child in node.iter_child_nodes():
        more = _count_bodies(child)
        n_nodes, n_chars = n_nodes + more[0], n_chars + more[1]
    if isinstance(node, (nodes.Template, nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
        call = nodes.EnvironmentAttribute(f"step({n_nodes}, {n_chars})", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(call, node.test, lineno=node.lineno)
    return n_nodes, n_chars


class _Bounds:
    """What `_Formatter` and `_EscapeFormatter` ask of each field of `str.format`."""

    _env: Any

    def format_field(self, value: Any, format_spec: str) -> Any:
        """A field, whose width is a number of its format."""
        self._env.fits(_widths(format_spec))
        return self._env.made(cast(Any, super()).format_field(self._env.weighed(value), format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """`!r`, `!s`, `!a`."""
        return self._env.made(cast(Any, super()).convert_field(self._env.weighed(value), conversion))


class _Formatter(_Bounds, SandboxedFormatter): ...


class _EscapeFormatter(_Bounds, SandboxedEscapeFormatter): ...


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates are rendered by `render_bounded`. Each rendering has a copy of it, which counts.

    steps, bytes  what the rendering may still use
    """

    code_generator_class = _Code
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, filters: Mapping[str, Callable[..., Any]], extensions: Sequence[Any]) -> None:
        """`filters`: of one's own, besides Jinja's."""
        options: Any = {"extensions": extensions, "optimized": False}
        super().__init__(trim_blocks=True, lstrip_blocks=True, **options)
        self._thread = threading.local()
        self.finalize = self._shown  # of constants, as a template is compiled
        del cast("dict[str, Any]", self.globals)["lipsum"]
        self.filters = {name: self._bounded(name, f) for name, f in {**self.filters, **filters}.items()}
        self.tests.update({name: self._weighing(self.tests[name]) for name in _COMPARING})

    @property
    def running(self) -> BoundedEnvironment:
        """The copy of the rendering that is under way in this thread."""
        return self._thread.running

    def render_bounded(self, source: str, values: dict[str, Any], compiled: Callable[[str], Template]) -> str:
        """The text of a template with the variables `values`, whose containers are GivenDict and GivenList. `compiled`
        makes a template of its source, perhaps from a cache. Raises TooMuch."""
        if len(source) > limits.TEMPLATE_SOURCE:
            raise TooMuch(f"it has more than {limits.TEMPLATE_SOURCE} characters (limits.TEMPLATE_SOURCE)")
        run = object.__new__(type(self))
        run.__dict__.update(self.__dict__)
        run._begin(values)
        self._thread.running = run
        try:
            template = compiled(source)
            context = new_context(run, template.name, template.blocks, values, False, template.globals)
            for block in context.blocks.values():
                block[:] = [partial(cast(Any, f), environment=run) for f in block]
            return "".join(cast(Any, template.root_render_func)(context, missing, run))
        finally:
            del self._thread.running

    def _begin(self, values: Mapping[str, Any]) -> None:
        self.finalize = self.shown
        self._values: Mapping[str, Any] | None = values
        self._sizes: dict[int, tuple[int, int]] = {}  # of containers of the caller's
        self.steps, self.bytes = limits.TEMPLATE_STEPS, limits.TEMPLATE_BYTES
        self._end = monotonic() + limits.TEMPLATE_SECONDS
        self._next_steps, self._next_bytes = self.steps - _OFTEN, self.bytes - _OFTEN

    def _look(self) -> None:
        """Raise TooMuch when something is used up."""
        if min(self.steps, self.bytes) < 0 and self._values is not None:
            values, self._values = self._values, None
            more = limits.TEMPLATE_PER_BYTE * sum(sum(self._weight(v, False)) for v in values.values())
            self.steps, self.bytes = self.steps + more, self.bytes + more
        if self.steps < 0:
            raise TooMuch(f"it takes more than {limits.TEMPLATE_STEPS} steps (limits.TEMPLATE_STEPS)")
        if self.bytes < 0:
            raise TooMuch(f"it makes texts of more than {limits.TEMPLATE_BYTES} bytes (limits.TEMPLATE_BYTES)")
        if monotonic() > self._end:
            raise TooMuch(f"it takes longer than {limits.TEMPLATE_SECONDS} seconds (limits.TEMPLATE_SECONDS)")
        self._next_steps, self._next_bytes = self.steps - _OFTEN, self.bytes - _OFTEN

    def _shown(self, value: Any) -> Any:
        return self.running.shown(value)

    # -- what templates call ----------------------------------------------------------------------------------------

    def step(self, n_steps: int, n_bytes: int = 0) -> bool:
        """Count steps, and bytes that they make. True, for tests of loops."""
        self.steps -= n_steps
        self.bytes -= n_bytes
        if self.steps < self._next_steps or self.bytes < self._next_bytes:
            self._look()
        return True

    def fits(self, n: int) -> None:
        """Raise TooMuch when `n` bytes more are too many."""
        if n > _OFTEN:
            self.step(0, n)
            self.bytes += n

    def made(self, value: Any) -> Any:
        """Count what was made, and what an iterator will give."""
        if type(value) in _SIMPLE:
            return value
        if isinstance(value, (str, bytes)):
            if len(value) > _SMALL:
                self.step(0, value.__sizeof__())
        elif isinstance(value, _CONTAINERS):
            if not isinstance(value, (Namespace, *_GIVEN)):
                self.step(0, _ITEM * len(value))
        elif hasattr(value, "__next__") and hasattr(value, "__iter__"):
            return self._counted(value)
        return value

    def shown(self, value: Any) -> Any:
        """The text of a value that a template puts out."""
        if type(value) is str:
            text = value
        elif isinstance(value, (str, *_GIVEN)):
            text = value if isinstance(value, str) else str(value)
        else:
            text = str(self.weighed(value))
        if len(text) > _SMALL:
            self.step(0, text.__sizeof__())
        return text

    def weighed(self, value: Any) -> Any:
        """Count what has to be looked at when a value is written, compared or hashed."""
        if isinstance(value, (str, bytes)):
            if len(value) > 256:
                self.step(len(value) >> 6)
        elif isinstance(value, _CONTAINERS) and type(value) not in _GIVEN:
            self._weight(value)
        return value

    def searched(self, value: Any) -> Any:
        """Count what has to be looked at when something is sought in a value."""
        return cast(Any, value) if isinstance(value, dict) else self.weighed(value)

    def joined(self, parts: Sequence[Any], context: Context) -> str:
        """`a ~ b ~ c`."""
        texts = [p if isinstance(p, str) else str(self.weighed(p)) for p in parts]
        self.fits(4 * sum(map(len, texts)))
        return self.made(Markup("").join(texts) if context.eval_ctx.autoescape else "".join(texts))

    def added(self, left: Any, right: Any) -> Any:
        """`left + right`."""
        if type(left) is str and type(right) is str:
            if len(left) + len(right) > _SMALL:
                self.fits(4 * (len(left) + len(right)))
                return self.made(left + right)
        elif hasattr(left, "__len__") and hasattr(right, "__len__"):
            self.fits(_ITEM * (len(left) + len(right)))
            return self.made(left + right)
        return left + right

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Count the result of an operator, before it is made when it may be large."""
        if operator == "+":
            return self.added(left, right)
        if isinstance(left, int) and isinstance(right, int):
            self._count_bits(operator, left, right)
            return self.binop_table[operator](left, right)
        if operator == "*":
            for one, n in cast("tuple[tuple[Any, Any], ...]", ((left, right), (right, left))):
                if isinstance(n, int) and hasattr(one, "__len__"):
                    self.fits((4 if isinstance(one, (str, bytes)) else _ITEM) * len(one) * max(n, 0))
        elif operator == "%" and isinstance(left, (str, bytes)):
            self._check_percent(left, right)
        return self.made(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Count what a call gives; methods of strings, lists and numbers are asked beforehand."""
        self = __self
        if isinstance(__obj, _METHOD_TYPES):
            args = tuple([a if type(a) in _SIMPLE or type(a) is str else self._whole(a) for a in args])
            named = {k: v for k, v in kwargs.items() if k[0] != "_"} if kwargs else kwargs  # others are Jinja's own
            check = _METHODS.get(getattr(__obj, "__name__", ""))
            if check is not None:
                getattr(self, check)(getattr(__obj, "__self__", None), *args, **named)
            if type(__obj) is BuiltinMethodType:
                return self.made(__obj(*args, **named))
        return self.made(super().call(__context, __obj, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`, which is mostly a member of a message."""
        if type(obj) is GivenDict and attribute not in _OF_DICTS:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Any:
        """`str.format` with fields that count."""
        if not isinstance(value, (BuiltinMethodType, MethodType)) or value.__name__ not in ("format", "format_map"):
            return None
        text, is_map = cast(Any, value).__self__, value.__name__ == "format_map"
        if not isinstance(text, str):
            return None
        kind = _EscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)

        def formatted(*args: Any, **kwargs: Any) -> Any:
            if is_map:
                (mapping,) = args
                return type(text)(kind.vformat(text, (), mapping))
            return type(text)(kind.vformat(text, args, kwargs))

        return formatted

    # -- how they count ---------------------------------------------------------------------------------------------

    def _weight(self, value: Any, counting: bool = True) -> tuple[int, int]:
        """How many values are in `value`, and how many characters their texts have. A value that is in it twice counts
        twice, as it does when `value` is written or compared."""
        if type(value) in _GIVEN and id(value) in self._sizes:
            n_nodes, n_chars = self._sizes[id(value)]
            self.step((n_nodes + n_chars) >> 8)
            return n_nodes, n_chars
        n_nodes = n_chars = 0
        walks: list[Iterator[Any]] = [iter((value,))]
        while walks:
            for item in walks[-1]:
                n_nodes += 1
                kind = cast("type[Any]", type(item))
                if kind is str or (kind not in _SIMPLE and isinstance(item, (str, bytes))):
                    n_chars += len(item)
                elif kind not in _SIMPLE and isinstance(item, _CONTAINERS):
                    known = self._sizes.get(id(item)) if kind in _GIVEN else None
                    if known is not None:
                        n_nodes, n_chars = n_nodes + known[0], n_chars + known[1]
                        continue
                    if counting:
                        self.step(32 + (0 if isinstance(item, Namespace) else len(item)))
                    walks.append(_items(item))
                    break
            else:
                walks.pop()
        if counting:
            self.step(n_chars >> 6)
        if type(value) in _GIVEN:
            self._sizes[id(value)] = n_nodes, n_chars
        return n_nodes, n_chars

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.step(1, _ITEM)
            yield self.made(item)

    def _whole(self, value: Any) -> Any:
        """Weigh an argument that is read to its end: an iterator becomes a list."""
        if type(value) in _SIMPLE:
            return value
        return self.weighed(list(value) if hasattr(value, "__next__") and hasattr(value, "__iter__") else value)

    def _bounded(self, name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        n_first = int(hasattr(f, "jinja_pass_arg"))  # the context or its kin comes before the value
        check, shallow, thread = _FILTERS.get(name), name in _SHALLOW, self._thread

        @wraps(f)
        def filtered(*args: Any, **kwargs: Any) -> Any:
            run = cast(BoundedEnvironment, thread.running)
            if not shallow:
                args = (*args[:n_first], *map(run._whole, args[n_first:]))
                if kwargs:
                    kwargs = {k: run._whole(v) for k, v in kwargs.items()}
            if check is not None:
                getattr(run, check)(*args[n_first:], **kwargs)
            return run.made(f(*args, **kwargs))

        return filtered

    def _weighing(self, f: Callable[..., Any]) -> Callable[..., Any]:
        thread = self._thread

        @wraps(f)
        def tested(value: Any, *others: Any) -> Any:
            if f is not test_divisibleby and all(type(x) is str and len(x) <= 256 for x in (value, *others)):
                return f(value, *others)
            run = cast(BoundedEnvironment, thread.running)
            value, others = run._whole(value), tuple(map(run._whole, others))
            if isinstance(value, (str, bytes)) and f is test_divisibleby:  # by `value % other`
                run._check_percent(value, others[0] if others else ())
            return f(value, *others)

        return tested

    def _count_bits(self, operator: str, left: int, right: int) -> None:
        if operator == "**" and right > 0:
            self.step((left.bit_length() * right) ** 2 >> 12)
        elif operator in ("*", "//", "%"):
            self.step(left.bit_length() * right.bit_length() >> 12)

    def _check_percent(self, form: str | bytes, given: Any) -> None:
        """Raise TooMuch when `form % given` would be too large."""
        text = form.decode("latin-1") if isinstance(form, bytes) else form
        n_nodes, n_chars = self._weight(given)
        n = 4 * (n_nodes + n_chars) * (text.count("%") if isinstance(given, dict) else 1)
        several = cast("tuple[Any, ...]", given if isinstance(given, tuple) else (given,))
        numbers = [x for x in several if isinstance(x, int)]
        stars = text.count("*") * max(map(abs, numbers), default=0)
        self.fits(4 * (len(text) + _widths(text) + stars + n))

    # -- checks of filters and methods, with the arguments of these -------------------------------------------------

    def _check_width(self, text: Any, width: Any = 80, *_: Any, **__: Any) -> None:
        self.fits(4 * (_len(text) + (abs(width) if isinstance(width, int) else 0)))

    def _check_tabs(self, text: Any, tabsize: Any = 8) -> None:
        self.fits(4 * (_len(text) + _len(text) * (abs(tabsize) if isinstance(tabsize, int) else 0)))

    def _check_indent(self, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
        self.fits(4 * (_len(text) + _n_lines(text) * (abs(width) if isinstance(width, int) else _len(width))))

    def _check_replace(self, text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
        text, old = (x if isinstance(x, (str, bytes)) else str(x) for x in (text, old))
        n = text.count(cast(Any, old)) if type(text) is type(old) or isinstance(old, str) else 0
        self.fits(4 * (len(text) + n * _len(new)))

    def _check_join(self, separator: Any, items: Any = (), *_: Any, **__: Any) -> None:
        n_nodes, n_chars = self._weight(items)
        self.fits(4 * (n_chars + 8 * n_nodes + (len(items) if hasattr(items, "__len__") else 0) * _len(separator)))

    def _check_joined(self, items: Any, d: Any = "", *_: Any, **__: Any) -> None:
        self._check_join(d, items)

    def _check_translate(self, text: Any, table: Any = (), *_: Any) -> None:
        values = list(cast("dict[Any, Any]", table).values()) if isinstance(table, dict) else []
        self.fits(4 * _len(text) * max(map(_len, values), default=1))

    def _check_split(self, text: Any, sep: Any = None, *_: Any, **__: Any) -> None:
        n = text.count(sep) + 1 if isinstance(sep, type(text)) and sep else _len(text) // 2
        self.fits(_ITEM * n)

    def _check_lines(self, text: Any, *_: Any, **__: Any) -> None:
        self.fits(_ITEM * _n_lines(text))

    def _check_length(self, _: Any, length: Any = 1, *__: Any, **___: Any) -> None:
        self.fits(length if isinstance(length, int) else 0)

    def _check_round(self, _: Any, precision: Any = 0, *__: Any, **___: Any) -> None:
        self._count_bits("**", 10, abs(precision) if isinstance(precision, int) else 0)

    def _check_batch(self, _: Any, linecount: Any = 1, fill_with: Any = None) -> None:
        self.fits(_ITEM * linecount if isinstance(linecount, int) and fill_with is not None else 0)

    def _check_list(self, items: Any, *_: Any) -> None:
        self.fits(_ITEM * (len(items) if hasattr(items, "__len__") else 0))

    def _check_sum(self, items: Any, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(x, _CONTAINERS) for x in (*args, *kwargs.values())):
            n_nodes, _ = self._weight(items)
            self.step(n_nodes * _len(items) >> 4)

    def _check_escape(self, value: Any, *_: Any, **__: Any) -> None:
        n_nodes, n_chars = self._weight(value)
        self.fits(12 * (n_chars + 8 * n_nodes))

    def _check_format(self, form: Any, *args: Any, **kwargs: Any) -> None:
        self._check_percent(str(form), kwargs or args)

    def _check_wordwrap(self, text: Any, *args: Any, **kwargs: Any) -> None:
        self._check_slow(text)
        self.fits(4 * _len(text) * (1 + sum(_len(x) for x in (*args, *kwargs.values()))))

    def _check_slow(self, value: Any, *_: Any, **__: Any) -> None:
        """Of what takes time as the square of the size."""
        n_nodes, n_chars = self._weight(value)
        self.step((n_chars + n_nodes) ** 2 >> 8)


def _len(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, *_CONTAINERS)) and not isinstance(value, Namespace) else 1


def _n_lines(text: Any) -> int:
    text = text.decode("latin-1") if isinstance(text, bytes) else str(text)
    return 1 + sum(map(text.count, _BREAKS))


def _widths(form: str) -> int:
    """The sum of the numbers in a format: its widths are among them."""
    return sum(int(digits) if len(digits) < 18 else 1 << 60 for digits in re.findall("[0-9]+", form))


# By names of methods. Those of others make no more than their operands.
_METHODS: dict[str, str] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), "_check_width"),
    "expandtabs": "_check_tabs",
    "replace": "_check_replace",
    "join": "_check_join",
    "translate": "_check_translate",
    **dict.fromkeys(("split", "rsplit"), "_check_split"),
    "splitlines": "_check_lines",
    "to_bytes": "_check_length",
    **dict.fromkeys(("count", "index"), "weighed"),
    "striptags": "_check_slow",
}
# By names of filters. All others make no more than a few times their operands.
_FILTERS: dict[str, str] = {
    "batch": "_check_batch",
    "center": "_check_width",
    **dict.fromkeys(("e", "escape", "forceescape", "urlencode", "xmlattr"), "_check_escape"),
    "format": "_check_format",
    "indent": "_check_indent",
    "join": "_check_joined",
    "list": "_check_list",
    **dict.fromkeys(("pprint", "striptags", "urlize"), "_check_slow"),
    "replace": "_check_replace",
    "round": "_check_round",
    "sum": "_check_sum",
    "wordwrap": "_check_wordwrap",
}
# Filters that do not look into the values of a list, or only as far as they are asked to.
_SHALLOW = frozenset(
    ("attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject",
     "rejectattr", "reverse", "select", "selectattr", "slice")
)  # fmt: skip
# Tests that look into their operands.
_COMPARING = frozenset(
    ("eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">=", "in",
     "divisibleby", "lower", "upper")
)  # fmt: skip
