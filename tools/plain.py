"""Show texts of strangers at a terminal without obeying control characters in them."""

from __future__ import annotations

import re
import sys

_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"
_CONTROLS = re.compile(f"[{_CONTROL}]")
# ... and characters that put what follows into another order or line (CVE-2021-42574)
_MISLEADING = re.compile(rf"[{_CONTROL}\u2028-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """`text` with control characters (except newlines and tabs) written as \\xNN, so that a file's names and values
    cannot move the cursor or rename the window; and with marks that change the order of what is shown as \\uNNNN. Bytes
    that are not UTF-8 are written as \\xNN, too."""
    return _MISLEADING.sub(_escaped, text)


def for_terminal(text: str) -> str:
    """A text of a model for stdout: without control characters at a terminal, unchanged in a file or a pipe. (Texts may
    well be in two directions.)"""
    return _CONTROLS.sub(_escaped, text) if sys.stdout.isatty() else text


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\u{code:04x}" if 0xFF < code < 0xD800 else f"\\x{code & 0xFF:02x}"


def for_rich(text: str) -> str:
    """A text for rich to print, with nothing in it that the terminal or rich would take for a command."""
    from rich.markup import escape

    return escape(plain(text))
