"""Texts of others at a terminal: shown, and never obeyed."""

from __future__ import annotations

import re
import sys

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def plain(text: str) -> str:
    """`text` with its control characters, but newlines and tabs, as \\xNN: names, values and messages of a file that
    move the cursor or rename the window are seen for what they are. So are bytes that are no UTF-8."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]) & 0xFF:02x}", text)


def for_terminal(text: str) -> str:
    """A text that a model made, as stdout may have it: `plain` at a terminal, and as it is in a file or a pipe."""
    return plain(text) if sys.stdout.isatty() else text


def for_rich(text: str) -> str:
    """A text of a file, as rich prints it: nothing in it is a command, neither of the terminal nor of rich."""
    from rich.markup import escape

    return escape(plain(text))
