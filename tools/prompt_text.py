"""Texts that are given on the command line, in files, or piped in."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_ESCAPE = re.compile(rb"""\\([nrt'"\\]|x[0-9a-fA-F]{2})""")


def unescape(text: str) -> str:
    """A text with what its backslashes stand for: \\n, \\r, \\t, quotes, \\xHH (a byte of UTF-8); others stay."""

    def one(found: re.Match[bytes]) -> bytes:
        code = found[1].decode()
        return bytes.fromhex(code[1:]) if len(code) > 1 else _ESCAPES[code].encode()

    return _ESCAPE.sub(one, text.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from -p, else from a file, else from stdin where that is piped. Raises BadParameter for both."""
    if prompt is not None and file is not None:
        raise click.BadParameter("-p and -f cannot both be given")
    if prompt is not None:
        return prompt
    if file is not None and str(file) != "-":
        return file.read_text(encoding="utf-8", errors="replace")
    if file is not None or (sys.stdin is not None and not sys.stdin.isatty()):  # pyright: ignore[reportUnnecessaryComparison]
        return sys.stdin.buffer.read().decode("utf-8", "replace")
    return ""
