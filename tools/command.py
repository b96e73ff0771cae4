"""Make click commands from the functions of the verbs: annotations of a function's parameters describe the options."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import click

from pyggml import limits
from pyggml.config import config_path, read_config
from pyggml.errors import GGMLError, nearest
from pyggml.small_file import read_text

T = TypeVar("T")
PANEL = "Options"
_NUMBER = re.compile(r"[-+]?[0-9.][0-9.e+-]*")


class Option:
    """A parameter as an option: `Annotated[int, Option("-n", "--number", help="How many.", min=0)]`. The annotation
    gives its type: str, int, float, bool (a flag), Path, Literal, a list of one of these (a repeatable option), a
    tuple, or Optional of one of these. A number must be finite, at least `min` (or greater than `above`), and at most
    `max`. A value for which `check` raises GGMLError is refused. `config`: the option names a YAML file with values of
    the verb's other options. `bare`: the value of an option of str that stands without one."""

    def __init__(
        self,
        *flags: str,
        help: str,
        metavar: str | None = None,
        min: float | None = None,
        above: float | None = None,
        max: float | None = None,
        check: Callable[[Any], object] | None = None,
        read: Callable[[Any], object] | None = None,
        panel: str = PANEL,
        config: bool = False,
        bare: str | None = None,
    ) -> None:
        self.bare = bare
        self.flags, self.help, self.metavar, self.panel = flags, help, metavar, panel
        self.min, self.above, self.max, self.check, self.read, self.config = min, above, max, check, read, config


@dataclass(frozen=True)
class Argument:
    """A parameter as an argument, known by its place."""

    help: str
    metavar: str | None = None


@dataclass(frozen=True)
class Group(Generic[T]):
    """A parameter that stands for several options: their types (with their `Option`) and defaults by name, and the
    function that makes the parameter from their values."""

    hints: Mapping[str, Any]
    defaults: Mapping[str, Any]
    taken: Callable[[dict[str, Any]], T] = field(repr=False)

    @staticmethod
    def of(record: type[T]) -> Group[T]:
        """The group of options for the fields of a dataclass."""
        names = [f.name for f in fields(record)]  # pyright: ignore[reportArgumentType]
        defaults = {f.name: f.default for f in fields(record)}  # pyright: ignore[reportArgumentType]
        hints = get_type_hints(record, include_extras=True)
        return Group({name: hints[name] for name in names}, defaults, lambda values: record(**values))


class WholeOptions(click.Command):
    """A click command that takes an option as one word: `-hf` is not `-h -f`. When it refuses an unknown option, it
    says what to do instead if the option is llama.cpp's, or which verbs have it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse unknown options, then parse as click does."""
        nargs = {
            flag: 0 if p.is_flag or isinstance(p.flag_value, str) else p.nargs
            for p in self.get_params(ctx)
            if isinstance(p, click.Option)
            for flag in (*p.opts, *p.secondary_opts)
        }
        words = iter(args)
        for word in words:
            if word == "--" or (word[:1] != "-" and isinstance(self, click.Group)):
                break
            if len(word) < 2 or word[0] != "-":
                continue
            name, equals, _ = word.partition("=")
            if name in nargs:
                for _ in range(nargs[name] - len(equals)):
                    next(words, None)
            elif not (nargs.get(word[:2]) == 1 and _NUMBER.fullmatch(word[2:])):  # -n5
                refuse_option(ctx, name, nargs)
        return super().parse_args(ctx, args)


def refuse_option(ctx: click.Context, option: str, known: Iterable[str]) -> NoReturn:
    """Raises UsageError for an option that is unknown: it says what to do instead, or which option is like it."""
    from .llama_options import INSTEAD

    if option in INSTEAD:
        raise click.UsageError(f"{option} is an option of llama.cpp. Here {INSTEAD[option]}", ctx)
    app = ctx.find_root().command
    verbs: list[str] = []
    if isinstance(app, click.Group):
        verbs = [name for name in app.list_commands(ctx) if option in _flags(ctx, app.get_command(ctx, name))]
    if verbs:
        raise click.UsageError(f"No such option {option!r}; it is one of: pyggml {', '.join(verbs)}", ctx)
    raise click.NoSuchOption(option, possibilities=nearest(option, known), ctx=ctx)


def _flags(ctx: click.Context, command: click.Command | None) -> set[str]:
    params = [] if command is None else command.get_params(ctx)
    return {flag for p in params for flag in (*p.opts, *p.secondary_opts)}


class Verb(WholeOptions):
    """The command of a verb. Its help explains the arguments, then the options, which it groups in panels."""

    arguments: Sequence[tuple[str, str]]  # what the usage line calls an argument, and its help
    panels: Mapping[str, str]  # option's name -> the panel that shows it

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(self.arguments)
        found: dict[str, list[tuple[str, str]]] = {PANEL: []}
        for p in self.get_params(ctx):
            record = p.get_help_record(ctx)
            if record is not None and not isinstance(p, click.Argument):  # of which click 8.5 shows the name alone
                found.setdefault(self.panels.get(p.name or "", PANEL), []).append(record)
        for panel, records in found.items():
            with formatter.section(panel):
                formatter.write_dl(records)


def verb(name: str, function: Callable[..., None]) -> Verb:
    """Make a command that calls `function`."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Group[Any]] = {}
    params: list[click.Parameter] = []
    arguments: list[tuple[str, str]] = []
    panels: dict[str, str] = {}

    def add(name: str, hint: Any, default: Any) -> None:
        if get_origin(hint) is Union:  # Python 3.10 puts Optional around the hint when the default is None
            hint = get_args(hint)[0]
        kind, marker = get_args(hint)[:2]
        if isinstance(marker, Group):
            groups[name] = marker
            for each, inner in marker.hints.items():
                add(each, inner, marker.defaults[each])
            return
        params.append(_parameter(name, kind, marker, default))
        if isinstance(marker, Option):
            panels[name] = marker.panel
        else:
            arguments.append((marker.metavar or name.upper(), marker.help))

    for p in inspect.signature(function).parameters.values():
        add(p.name, hints[p.name], p.default)

    def run(**values: Any) -> None:
        for name, group in reversed(groups.items()):  # a group's own groups come after it
            values[name] = group.taken({each: values.pop(each) for each in group.hints})
        function(**values)

    made = Verb(name, params=params, callback=run, help=function.__doc__)
    made.arguments, made.panels = arguments, panels
    return made


class _Number(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]  # generic from click 8.4 on
    """An int or a float, finite, and within bounds."""

    def __init__(self, kind: type[int] | type[float], marker: Option) -> None:
        self.kind, self.least, self.above, self.most = kind, marker.min, marker.above, marker.max
        self.name = "integer" if kind is int else "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        what = "a whole number" if self.kind is int else "a number"
        try:
            number = self.kind(value)
        except (ValueError, OverflowError):
            return self.fail(f"{value!r} is not {what}", param, ctx)
        if not isfinite(number) or (self.kind is int and abs(number) >= _HUGE):
            return self.fail(f"{value!r} is out of range", param, ctx)
        if self.least is not None and number < self.least:
            return self.fail(f"{value} is below {self.least:g}", param, ctx)
        if self.above is not None and number <= self.above:
            return self.fail(f"{value} is not above {self.above:g}", param, ctx)
        if self.most is not None and number > self.most:
            return self.fail(f"{value} is above {self.most:g}", param, ctx)
        return number


class _Choice(click.Choice):  # pyright: ignore[reportMissingTypeArgument]  # generic from click 8.2 on
    """One of some words. A truth value, which is what YAML takes on and off for, is one of these two."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        word: Any = ("off", "on")[value] if isinstance(value, bool) else value
        return cast("str", super().convert(word, param, ctx))


_HUGE = 1 << 32  # llama.cpp's widest whole number, a seed, is below
_KINDS: dict[Any, Any] = {str: click.STRING, Path: click.Path(path_type=Path)}


def _checked(check: Callable[[Any], object], ctx: click.Context, param: click.Option, value: Any) -> Any:
    try:
        for each in value if param.multiple else () if value is None else (value,):
            check(each)
    except GGMLError as e:
        raise click.BadParameter(str(e), ctx, param) from None
    return value


def _read(read: Callable[[Any], object], ctx: click.Context, param: click.Option, value: Any) -> object:
    return value if ctx.resilient_parsing else read(value)


def configured(name: str, command: click.Command, verbs: Iterable[str]) -> dict[str, Any]:
    """The defaults of a verb's options in the user's configuration. Those of [options] are for every verb that has
    them. Raises UsageError for a table that is no verb's, and for an option that the verb does not have."""
    config = read_config()
    known = {
        flag.lstrip("-"): str(p.name) for p in command.params if isinstance(p, click.Option) for flag in p.opts
    } | {str(p.name): str(p.name) for p in command.params if isinstance(p, click.Option)}
    for table in config.verbs:
        if table not in verbs:
            raise click.UsageError(f"{config_path()}: [{table}] is no verb")
    own = config.verbs.get(name, {})
    for option in own:
        if option not in known:
            like = nearest(option, known, 1) or ["none of them"]
            raise click.UsageError(f"{config_path()}: {name} has no option {option!r}; is it {like[0]}?")
    return {known[k]: v for k, v in {**config.options, **own}.items() if k in known}


def _configured(ctx: click.Context, param: click.Option, value: Path | None) -> Path | None:
    """Take the values in a YAML file as defaults of the verb's options. Its keys are their long names."""
    if value is None:
        return None
    import yaml  # only this option needs it

    try:
        text = read_text(value, limits.TEXT_FILE_BYTES, GGMLError)
        events = cast("Iterable[object]", yaml.parse(text))  # pyright: ignore[reportUnknownMemberType]
        if any(isinstance(event, yaml.AliasEvent) for event in events):
            raise click.BadParameter(f"{value}: an alias (*) could stand for a billion values", ctx, param)
        found: Any = yaml.safe_load(text)
    except (OSError, GGMLError) as e:
        raise click.BadParameter(f"{value}: cannot be read: {getattr(e, 'strerror', e)}", ctx, param) from None
    except (ValueError, LookupError, AttributeError, RecursionError, yaml.YAMLError) as e:  # PyYAML lets some through
        raise click.BadParameter(f"{value}: is no YAML: {e}", ctx, param) from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{value}: must hold lines `option: value`", ctx, param)
    known: dict[str, str] = {}
    for p in ctx.command.get_params(ctx):
        name = str(p.name)
        if p is not param and name != "help":
            flags = [o.removeprefix("--") for o in p.opts if o.startswith("--")]
            known.update(dict.fromkeys(flags or [name], name))
    defaults: dict[str, Any] = {}
    for key, given in cast("dict[Any, Any]", found).items():
        if key == "help":
            raise click.BadParameter(f"{value}: help is for the command line alone", ctx, param)
        if key not in known:
            like = nearest(str(key), known, 1) or [", ".join(known)]
            raise click.BadParameter(f"{value}: there is no option {key!r}; is it {like[0]}?", ctx, param)
        if isinstance(given, dict | list):
            raise click.BadParameter(f"{value}: {key} must be one value, not {given!r:.40}", ctx, param)
        defaults[known[key]] = given
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return value


def _parameter(name: str, kind: Any, marker: Option | Argument, default: Any) -> click.Parameter:
    if get_origin(kind) in (Union, types.UnionType):  # Optional
        kind = next(k for k in get_args(kind) if k is not type(None))
    many = get_origin(kind) is list
    several = get_args(kind) if get_origin(kind) is tuple else ()
    one = get_args(kind)[0] if many or several else kind
    required = default is inspect.Parameter.empty
    if isinstance(marker, Argument):
        nargs = -1 if many else 1
        return click.Argument([name], type=_KINDS[one], required=required, nargs=nargs, metavar=marker.metavar)
    given: dict[str, Any] = {"help": marker.help, "metavar": marker.metavar}
    if kind is bool:
        given = {"help": marker.help, "is_flag": True}
    elif get_origin(one) is Literal:
        given["type"] = _Choice(get_args(one))
    else:
        given["type"] = _Number(one, marker) if one in (int, float) else _KINDS[one]
    if required:
        given["required"] = True
    else:
        given["default"] = default
    if marker.bare is not None:
        given |= {"is_flag": False, "flag_value": marker.bare}
    if marker.config:
        given |= {"is_eager": True, "callback": _configured}
    elif marker.check is not None:
        given["callback"] = partial(_checked, marker.check)
    elif (read := marker.read) is not None:
        given["callback"] = partial(_read, read)
    shown = not (required or default is None or default is False or default == "")
    return click.Option([name, *marker.flags], multiple=many, nargs=len(several) or 1, show_default=shown, **given)
