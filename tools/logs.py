"""Show the library's log on stderr or write it to a file, when the user asks for it."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path

from .plain import plain


class _Plain(logging.Formatter):
    """Without control characters that metadata may have."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


class _File(logging.FileHandler):
    """A log file. When it cannot be written any more (a full disk), a line on stderr says so and logging to it ends."""

    def handleError(self, record: logging.LogRecord) -> None:
        print(f"pyggml: nothing more is logged: {self.baseFilename}: {sys.exc_info()[1]}", file=sys.stderr)
        self.setLevel(logging.CRITICAL + 1)

    def close(self) -> None:
        with suppress(OSError):  # it has been said
            super().close()


def start_logging(verbose: bool, file: Path | None) -> None:
    """Send warnings to stderr (with `verbose`, everything), and everything to `file`. Raises OSError when the file
    cannot be written."""
    log = logging.getLogger("pyggml")
    for handler in [h for h in log.handlers if h.get_name() == __name__]:  # left by an earlier command in this process
        log.removeHandler(handler)
        handler.close()
    everything = logging.DEBUG if verbose else logging.WARNING
    handlers: list[tuple[logging.Handler, int]] = [(logging.StreamHandler(), everything)]
    if file is not None:
        handlers.append((_File(file, encoding="utf-8"), logging.DEBUG))
    for handler, level in handlers:
        handler.set_name(__name__)
        handler.setLevel(level)
        handler.setFormatter(_Plain("%(message)s"))
        log.addHandler(handler)
    log.setLevel(min(level for _, level in handlers))
