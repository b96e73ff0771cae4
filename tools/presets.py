"""INI files of presets: a section for each model, with options as keys. The format is that of llama-server's router."""

from __future__ import annotations

from configparser import Error, ParsingError, RawConfigParser
from pathlib import Path

import click

from pyggml import limits
from pyggml.errors import ModelError
from pyggml.small_file import read_text

from .command import refuse_option
from .options import usage

MODEL_KEYS = ("m", "model", "hf", "hfr", "hf-repo")  # which name a section's model
_IGNORED = ("version", "stop-timeout", "dedup-cache-models")  # what llama-server has besides, without a meaning here
_TRUE, _FALSE = ("true", "on", "yes", "1", "enabled"), ("false", "off", "no", "0", "disabled")


def read_sections(path: Path) -> dict[str, dict[str, str]]:
    """The keys and values of each section by its name. A section has those of [*] that it has not itself, and [*] is
    one, too: for models without a section. An error of usage for a file that cannot be read."""
    with usage(ModelError):
        text = read_text(path, limits.TEXT_FILE_BYTES, ModelError)
    parser = _Parser()
    try:
        parser.read_string("[*]\n" + text)  # keys before the first section are for all
    except ParsingError as e:
        line, said = e.errors[0]
        raise click.UsageError(f"{path}: line {line - 1} is neither a section nor KEY = VALUE: {said:.60}") from None
    except Error as e:
        raise click.UsageError(f"{path}: is no INI file: {e}") from None
    sections = {name: {k: v for k, v in parser.items(name) if k not in _IGNORED} for name in parser.sections()}
    everyone = sections.get("*", {})  # first: of an option that is given under two names, the later one counts
    return {name: {**{k: v for k, v in everyone.items() if k not in own}, **own} for name, own in sections.items()}


class _Parser(RawConfigParser):
    """Keys in their case; of a key that is given twice, the last value; no section is for all others by itself."""

    def __init__(self) -> None:
        marks = (";", "#")
        super().__init__(
            delimiters=("=",),
            comment_prefixes=marks,
            inline_comment_prefixes=marks,
            default_section="\0",
            strict=False,
        )

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def is_true(text: str) -> bool:
    """Whether a value switches something on. An error of usage for anything but true and false."""
    if text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    raise click.UsageError(f"{text!r:.60} is neither true nor false")


def arguments(command: click.Command, keys: dict[str, str]) -> list[str]:
    """Keys and values as the words of a command line. An error of usage for a key that is no option of the command."""
    known: dict[str, tuple[click.Option, str]] = {}
    for p in command.params:
        if isinstance(p, click.Option):
            known |= {flag.lstrip("-"): (p, flag) for flag in (*p.opts, *p.secondary_opts)}
    words: list[str] = []
    for key, value in keys.items():
        if key not in known:
            flag = f"{'-' if len(key) < 4 else '--'}{key}"
            refuse_option(click.Context(command), flag, [f for _, f in known.values()])
        option, flag = known[key]
        if not option.is_flag:
            words += [flag, value]
        elif is_true(value):
            words.append(flag)
        elif option.secondary_opts:
            words.append(option.opts[0] if flag in option.secondary_opts else option.secondary_opts[0])
    return words
