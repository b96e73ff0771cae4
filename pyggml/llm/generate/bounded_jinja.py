"""Jinja's sandbox with bounds: a template cannot use more steps, memory or time than `pyggml.limits` allows.

The sandbox keeps a template away from objects that are not meant for it, but lets it run forever and fill the memory.
Three things are added here:

- Jinja compiles a template to Python. In that Python each body that may run often (of a loop, macro or block) begins
  with a call of `step`, which counts steps and looks at the clock.
- All texts and lists that a template makes are counted (`made` and `shown`).
- The result of some operators, filters, tests and methods can be much larger than their operands. Before they run, a
  check computes how large the result may be (`_METHODS`, `_FILTERS` and `_TESTS` name the checks).
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
from jinja2.utils import Namespace, missing
from markupsafe import Markup

from pyggml import limits

_ITEM = 64  # bytes that an item of a list counts for, together with the object that it may hold
_SMALL = 64  # a text of up to this length is not counted by itself: `step` has counted it with the body that makes it
_OFTEN = 1 << 16  # steps or bytes after which the clock is looked at again
_WIDE = 1 << 512  # from here on, integers are counted as texts are
_NOTHING: dict[str, Any] = {}
_CONTAINERS: tuple[type[Any], ...] = cast(
    Any,
    (list, tuple, dict, set, range, Namespace, type(_NOTHING.keys()), type(_NOTHING.values()), type(_NOTHING.items())),
)
_SIMPLE = frozenset((bool, int, float, type(None)))
_METHOD_TYPES = (BuiltinMethodType, MethodType, type)
_OF_DICTS = frozenset(dir(dict))


class TooMuch(Exception):
    """A template goes beyond a limit."""


class GivenDict(dict[str, Any]):
    """A dict that the caller gave to the template. What it holds is a tree: nothing is in it twice, as it may be in the
    lists that a template makes. So its weight is computed once and kept."""

    __slots__ = ()


class GivenList(list[Any]):
    """A list that the caller gave to the template; see `GivenDict`."""

    __slots__ = ()


_GIVEN = (GivenDict, GivenList)


def _items(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        return iter([x for pair in cast("dict[Any, Any]", container).items() for x in pair])
    if isinstance(container, Namespace):
        return iter(list(cast(Any, container)._Namespace__attrs.values()))
    return iter(container)


def _len(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1


class _Code(CodeGenerator):
    """Writes the Python of a template, with calls that count."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        """A whole template."""
        _count_bodies(node)
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b`. The operands are counted before they are joined."""
        self._call("joined", node.nodes, frame, "context, ")

    def visit_Add(self, node: nodes.Add, frame: Frame) -> None:
        """`a + b`. It does not go through `call_binop`, because templates use it most."""
        self._call("added", (node.left, node.right), frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """`a[b]`. A slice is a copy; anything else is hashed, and written when an error names it."""
        if isinstance(node.arg, nodes.Slice):
            self.write("environment.made(")
            super().visit_Getitem(node, frame)
        else:
            self._call("getitem", (node.node,), frame, end="")
            self._operand("weighed", node.arg, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """`{a: b}`. Keys are hashed, which takes long when they are nested tuples."""
        self.write("{")
        for pair in node.items:
            self._operand("weighed", pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """`a < b == c`, `a in b`. Operands are weighed when everything in them may be looked at."""
        self.write("(")
        alone = len(node.ops) == 1
        constant = alone and any(isinstance(x, _SCALARS) for x in (node.expr, node.ops[0].expr))
        word = "" if constant else "weighed"
        self._operand(word, node.expr, frame)
        for op in node.ops:
            self.write(f" {operators[op.op]} ")
            self._operand("searched" if op.op in ("in", "notin") else word, op.expr, frame)
        self.write(")")

    def _call(self, word: str, args: Sequence[nodes.Expr], frame: Frame, begin: str = "", end: str = ")") -> None:
        self.write(f"environment.{word}({begin}")
        for arg in args:
            self.visit(arg, frame)
            self.write(", ")
        self.write(end)

    def _operand(self, word: str, node: nodes.Expr, frame: Frame) -> None:
        literal = (*_SCALARS, nodes.List, nodes.Tuple) if word == "searched" else _SCALARS
        if not word or isinstance(node, literal):
            self.visit(node, frame)
        else:
            self._call(word, (node,), frame)


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


class _Formatter(SandboxedFormatter):
    """Formats the fields of `str.format`, and counts them."""

    _env: Any

    def format_field(self, value: Any, format_spec: str) -> Any:
        """A field; its width is a number in its format."""
        self._env.fits(_widths(format_spec))
        return self._env.made(super().format_field(self._env.weighed(value), format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """`!r`, `!s`, `!a`."""
        return self._env.made(super().convert_field(self._env.weighed(value), conversion))


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter): ...


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates are rendered by `render_bounded`. Each rendering has a copy of it, which counts.

    steps, bytes  what the rendering may still use
    """

    code_generator_class = _Code
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    intercepted_unops = frozenset("-")

    def __init__(self, filters: Mapping[str, Callable[..., Any]], extensions: Sequence[Any]) -> None:
        """`filters` are added to Jinja's."""
        options: Any = {"extensions": extensions, "optimized": False}
        super().__init__(trim_blocks=True, lstrip_blocks=True, **options)
        self._thread = threading.local()
        self.finalize = self._shown  # for constants, when a template is compiled
        del cast("dict[str, Any]", self.globals)["lipsum"]
        filters = {**self.filters, **filters}
        self.filters = {name: self._bounded(f, _FILTERS.get(name), name in _SHALLOW) for name, f in filters.items()}
        self.tests.update({name: self._bounded(self.tests[name], check) for name, check in _TESTS.items()})

    @property
    def running(self) -> BoundedEnvironment:
        """The copy for the rendering that is under way in this thread."""
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
        self._sizes: dict[int, tuple[int, int]] = {}  # weights of the caller's containers, by id
        self.steps, self.bytes = limits.TEMPLATE_STEPS, limits.TEMPLATE_BYTES
        self._end = monotonic() + limits.TEMPLATE_SECONDS
        self._next_steps, self._next_bytes = self.steps - _OFTEN, self.bytes - _OFTEN

    def _look(self) -> None:
        """Raise TooMuch when steps, bytes or seconds are used up."""
        if min(self.steps, self.bytes) < 0 and self._values is not None:  # the variables allow more, once
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
        """Count steps, and bytes that they make. Returns True, so that it can stand in the test of a loop."""
        self.steps -= n_steps
        self.bytes -= n_bytes
        if self.steps < self._next_steps or self.bytes < self._next_bytes:
            self._look()
        return True

    def fits(self, n: int) -> None:
        """Raise TooMuch when `n` more bytes would be too many. They are not counted."""
        if n > _OFTEN:
            self.step(0, n)
            self.bytes += n

    def made(self, value: Any) -> Any:
        """Count a value that was made. An iterator is counted while it is read."""
        if type(value) in _SIMPLE:
            if type(value) is int and not -_WIDE < value < _WIDE:
                self.step(value.bit_length() >> 9, value.__sizeof__())
            return value
        if isinstance(value, (str, bytes)):
            if len(value) > _SMALL:
                self.step(0, value.__sizeof__())
        elif isinstance(value, _CONTAINERS):
            if not isinstance(value, (Namespace, range, *_GIVEN)):
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
        """Count the steps of looking at everything in a value: when it is written, compared or hashed."""
        if isinstance(value, (str, bytes)):
            if len(value) > 256:
                self.step(len(value) >> 6)
        elif type(value) is int and not -_WIDE < value < _WIDE:
            self.step(value.bit_length() >> 9)
        elif isinstance(value, _CONTAINERS) and type(value) not in _GIVEN:
            self._weight(value)
        return value

    def searched(self, value: Any) -> Any:
        """Count the steps of looking for something in a value."""
        return cast(Any, value) if isinstance(value, dict) else self.weighed(value)

    def joined(self, context: Context, *parts: Any) -> str:
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
        return self.made(left + right)

    def call_unop(self, context: Context, operator: str, arg: Any) -> Any:
        """`-arg`."""
        return self.made(self.unop_table[operator](arg))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The other operators between two values."""
        if isinstance(left, int) and isinstance(right, int):
            self._count_bits(operator, left, right)
            return self.made(self.binop_table[operator](left, right))
        if operator == "*":
            for one, n in cast("tuple[tuple[Any, Any], ...]", ((left, right), (right, left))):
                if isinstance(n, int) and hasattr(one, "__len__"):
                    self.fits((4 if isinstance(one, (str, bytes)) else _ITEM) * len(one) * max(n, 0))
        elif operator == "%":
            self._check_percent(left, right)
        return self.made(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method. Methods of texts, lists and numbers are checked beforehand."""
        self = __self
        if len(args) + len(kwargs) > _SMALL:  # f(*range(99999))
            self.step(len(args) + len(kwargs))
        if isinstance(__obj, _METHOD_TYPES):
            args = tuple([a if type(a) in _SIMPLE or type(a) is str else self._whole(a) for a in args])
            named = {k: v for k, v in kwargs.items() if k[0] != "_"} if kwargs else kwargs  # others are Jinja's own
            check, owner = _METHODS.get(getattr(__obj, "__name__", "")), getattr(__obj, "__self__", None)
            if isinstance(owner, (str, bytes)):
                self.weighed(owner)
            if check is not None:
                getattr(self, check)(owner, *args, **named)
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
        """`str.format` and `str.format_map`, with fields that count. None when `value` is another attribute."""
        text = getattr(value, "__self__", None)
        if not isinstance(text, str) or value.__name__ not in ("format", "format_map"):
            return None
        kind = _EscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)

        def formatted(*args: Any, **kwargs: Any) -> Any:
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            return type(text)(kind.vformat(text, args, kwargs))

        return formatted

    # -- how they count ---------------------------------------------------------------------------------------------

    def _weight(self, value: Any, counting: bool = True) -> tuple[int, int]:
        """How many values are in `value`, and how many characters their texts have. A value that is in it twice counts
        twice, because it is also written and compared twice."""
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
                    if kind is range:
                        n_nodes += len(cast("range", item))
                        continue
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
        """Weigh an argument that will be read to its end. An iterator becomes a list."""
        if type(value) in _SIMPLE:
            return value
        return self.weighed(list(value) if hasattr(value, "__next__") and hasattr(value, "__iter__") else value)

    def _bounded(self, f: Callable[..., Any], check: str | None, shallow: bool = False) -> Callable[..., Any]:
        """The filter or test `f`, with arguments that are weighed (unless it is `shallow`) and checked."""
        n_first = int(hasattr(f, "jinja_pass_arg"))  # the context or its kin stands before the value
        thread = self._thread

        @wraps(f)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            run = cast(BoundedEnvironment, thread.running)
            if len(args) > _SMALL:
                run.step(len(args))
            if not shallow:
                args = (*args[:n_first], *map(run._whole, args[n_first:]))
                if kwargs:
                    kwargs = {k: run._whole(v) for k, v in kwargs.items()}
            if check is not None:
                getattr(run, check)(*args[n_first:], **kwargs)
            return run.made(f(*args, **kwargs))

        return bounded

    def _count_bits(self, operator: str, left: int, right: int) -> None:
        if operator == "**" and right > 0:
            self.step((left.bit_length() * right) ** 2 >> 12)
        elif operator in ("*", "//", "%"):
            self.step(left.bit_length() * right.bit_length() >> 12)

    # -- checks, called with the arguments of a method, filter or test ----------------------------------------------

    def _check_product(self, value: Any, *others: Any, **named: Any) -> None:
        """The result may repeat `value` as often as a number among the arguments says, or put another text in the place
        of each of its characters. No default is above 80."""
        most = max(
            (abs(x) if isinstance(x, int) else sum(self._weight(x)) for x in (*others, *named.values())), default=80
        )
        self.fits(4 * (1 + _len(value)) * (1 + most))

    def _check_slow(self, value: Any, *others: Any, **named: Any) -> None:
        """Time may grow as the square of the size."""
        self.step(sum(self._weight(value)) ** 2 >> 8)
        self._check_product(value, *others, **named)

    def _check_search(self, value: Any, *_: Any, **__: Any) -> None:
        self.weighed(value)

    def _check_each(self, value: Any, *_: Any, **__: Any) -> None:
        """Items may be looked at and left out. Those of an iterator are counted while it is read."""
        self.step(_len(value))

    def _check_codec(self, text: Any, encoding: Any = "utf-8", errors: Any = "strict", *_: Any, **__: Any) -> None:
        """An error may be written as the name of its character. Python's punycode looks at all of a text for each."""
        self.fits(_len(text) * (4 if errors in ("strict", "ignore", "replace") else 100))
        if isinstance(encoding, str) and re.sub("[^a-z]", "", encoding.lower()) in ("punycode", "idna"):
            self.step(_len(text) ** 2)

    def _check_backwards(self, text: Any, part: Any = "", *_: Any, **__: Any) -> None:
        """Python compares `part` with the text at each place when it searches from the end."""
        self.step(_len(text) * _len(part) >> 8)

    def _check_rsplit(self, text: Any, sep: Any = "", *_: Any, **__: Any) -> None:
        self._check_backwards(text, sep)
        self._check_parts(text)

    def _check_parts(self, value: Any, *_: Any, **__: Any) -> None:
        self.fits(_ITEM * _len(value))

    def _check_escape(self, value: Any, *_: Any, **__: Any) -> None:
        n_nodes, n_chars = self._weight(value)
        self.fits(12 * (n_chars + 8 * n_nodes))

    def _check_join(self, one: Any, other: Any = "", *_: Any, **__: Any) -> None:
        """One is the separator; the other holds the items, which are characters when it is a text."""
        if isinstance(one, str) and isinstance(other, str):
            self._check_parts(max(one, other, key=len))
        n_nodes, n_chars = self._weight((one, other))
        self.fits(4 * (n_chars + 8 * n_nodes + _len(one) * _len(other)))

    def _check_replace(self, text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
        text, old = (x if isinstance(x, (str, bytes)) else str(x) for x in (text, old))
        n = text.count(cast(Any, old)) if type(text) is type(old) or isinstance(old, str) else 0
        self.fits(4 * (len(text) + n * _len(new)))

    def _check_percent(self, form: Any, given: Any = (), **_: Any) -> None:
        """`form % given`, when `form` is a text."""
        if not isinstance(form, (str, bytes)):
            return
        text = form.decode("latin-1") if isinstance(form, bytes) else form
        n_nodes, n_chars = self._weight(given)
        n = 4 * (n_nodes + n_chars) * (text.count("%") if isinstance(given, dict) else 1)
        several = cast("tuple[Any, ...]", given if isinstance(given, tuple) else (given,))
        stars = text.count("*") * max((abs(x) for x in several if isinstance(x, int)), default=0)
        self.fits(4 * (len(text) + _widths(text) + stars + n))

    def _check_format(self, form: Any, *args: Any, **kwargs: Any) -> None:
        self._check_percent(str(form), kwargs or args)

    def _check_round(self, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
        n = abs(precision) if isinstance(precision, int) else 0
        self._count_bits("**", 10, n)
        if isinstance(value, int):
            self.step(value.bit_length() * 4 * n >> 12)

    def _check_modulo(self, value: Any, num: Any, *_: Any, **__: Any) -> None:
        if isinstance(value, int) and isinstance(num, int):
            self._count_bits("%", value, num)
        else:
            self._check_percent(value, num)

    def _check_batch(self, _: Any, linecount: Any = 1, fill_with: Any = None) -> None:
        self.fits(_ITEM * linecount if isinstance(linecount, int) and fill_with is not None else 0)

    def _check_sum(self, items: Any, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(x, _CONTAINERS) for x in (*args, *kwargs.values())):
            self.step(self._weight(items)[0] * _len(items) >> 4)


def _widths(form: str) -> int:
    """The sum of all numbers in a format, among which are its widths."""
    return sum(int(digits) if len(digits) < 18 else 1 << 60 for digits in re.findall("[0-9]+", form))


def _table(**names: str) -> dict[str, str]:
    return {name: f"_check_{check}" for check, several in names.items() for name in several.split()}


# The results of methods, filters and tests without a check are at most a few times as large as their operands.
_METHODS = _table(
    product="center expandtabs ljust rjust to_bytes translate zfill",
    backwards="rfind rindex rpartition",
    codec="decode encode",
    rsplit="rsplit",
    parts="split splitlines",
    search="count index",
    slow="striptags",
    join="join",
    replace="replace",
)
_FILTERS = _table(
    product="center indent",
    parts="groupby list slice sort title wordcount",
    escape="e escape forceescape urlencode xmlattr",
    slow="pprint striptags urlize wordwrap",
    batch="batch",
    each="reject rejectattr select selectattr",
    format="format",
    join="join",
    replace="replace",
    round="round",
    sum="sum",
)
# Tests that look into their operands.
_LOOKING = (
    "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">=", "in",
    "lower", "upper",
)  # fmt: skip
_TESTS = {**dict.fromkeys(_LOOKING), "divisibleby": "_check_modulo"}  # divisibleby computes value % number
# Filters that do not look into the values of a list, or look only as far as their result is read.
_SHALLOW = frozenset(
    ("attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject",
     "rejectattr", "reverse", "select", "selectattr", "slice")
)  # fmt: skip
