"""What verbs write: JSON, and files, which are checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Optional

import click

from pyggml.json_text import json_text


def print_json(value: Any) -> None:
    """Print a value as one line of JSON, at once: another program may wait for it."""
    print(json_text(value), flush=True)


def not_the_model(model: Optional[str], *outputs: Optional[Path]) -> None:
    """Raises click.BadParameter when an output would be written over the model."""
    for out in outputs:
        if model and out and out.exists() and os.path.exists(model) and os.path.samefile(model, out):
            raise click.BadParameter(f"{out}: the output is the model; name another file")
