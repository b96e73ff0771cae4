"""Show texts of strangers at a terminal without obeying control characters in them."""

from __future__ import annotations

import re
import sys

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def plain(text: str) -> str:
    """`text` with control characters (except newlines and tabs) written as \\xNN, so that a file's names and values
    cannot move the cursor or rename the window. Bytes that are not UTF-8 are written so too."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]) & 0xFF:02x}", text)


def for_terminal(text: str) -> str:
    """A text of a model for stdout: `plain` at a terminal, unchanged in a file or a pipe."""
    return plain(text) if sys.stdout.isatty() else text


def for_rich(text: str) -> str:
    """A text for rich to print, with nothing in it that the terminal or rich would take for a command."""
    from rich.markup import escape

    return escape(plain(text))
