"""What the library logs, on stderr and in a file: silent unless asked for."""

from __future__ import annotations

import logging
from pathlib import Path


def start_logging(verbose: bool, file: Path | None) -> None:
    """Warnings go to stderr, with `verbose` all that is said; to `file` all. Raises OSError where it cannot be
    written."""
    log = logging.getLogger("pyggml")
    for handler in [h for h in log.handlers if h.get_name() == __name__]:  # of an earlier command in this process
        log.removeHandler(handler)
        handler.close()
    everything = logging.DEBUG if verbose else logging.WARNING
    handlers: list[tuple[logging.Handler, int]] = [(logging.StreamHandler(), everything)]
    if file is not None:
        handlers.append((logging.FileHandler(file, encoding="utf-8"), logging.DEBUG))
    for handler, level in handlers:
        handler.set_name(__name__)
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    log.setLevel(min(level for _, level in handlers))
