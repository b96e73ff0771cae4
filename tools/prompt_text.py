"""Read texts from the command line, from files, or from a pipe."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path

import click

_LONGEST = 512 << 20
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_ESCAPE = re.compile(rb"""\\([nrt'"\\]|x[0-9a-fA-F]{2})""")


def unescape(text: str) -> str:
    """Replace backslash escapes in a text: \\n, \\r, \\t, quotes, \\xHH (a byte of UTF-8). Other backslashes stay."""

    def one(found: re.Match[bytes]) -> bytes:
        code = found[1].decode()
        return bytes.fromhex(code[1:]) if len(code) > 1 else _ESCAPES[code].encode()

    return _ESCAPE.sub(one, text.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")


def read_bytes(file: Path) -> bytes:
    """The contents of a file (-: of stdin). Raises BadParameter when it is longer than a text can be, or endless."""
    with nullcontext(sys.stdin.buffer) if str(file) == "-" else open(file, "rb") as f:
        data = f.read(_LONGEST + 1)
    if len(data) > _LONGEST:
        raise click.BadParameter(f"{file}: texts have up to {_LONGEST >> 20} MiB")
    return data


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from -p, else from a file, else from piped stdin. Raises BadParameter for -p together with a file."""
    if prompt is not None and file is not None:
        raise click.BadParameter("-p and -f cannot both be given")
    if prompt is not None:
        return prompt
    if file is not None and str(file) != "-":
        return read_bytes(file).decode("utf-8", "replace")
    if file is not None or (sys.stdin is not None and not sys.stdin.isatty()):  # pyright: ignore[reportUnnecessaryComparison]
        return read_bytes(Path("-")).decode("utf-8", "replace")
    return ""
