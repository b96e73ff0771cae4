"""Check the files that verbs write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional

import click


def not_the_model(model: Optional[str], *outputs: Optional[Path]) -> None:
    """Raises click.BadParameter when an output would be written over the model."""
    for out in outputs:
        if model and out and out.exists() and os.path.exists(model) and os.path.samefile(model, out):
            raise click.BadParameter(f"{out}: the output is the model; name another file")
