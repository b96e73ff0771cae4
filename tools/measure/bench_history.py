"""Keep benchmark rows over time: a JSON object a line, with the machine and the version that were measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyggml
from pyggml.backends.cpu import isa_name
from pyggml.llm.model import Model
from pyggml.llm.quantize.mixes import file_type_name


def commit() -> str | None:
    """`git describe` of the checkout that pyggml runs from; None when it does not run from a checkout."""
    root = Path(pyggml.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--tags"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_model() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def append_history(path: Path, model: Model, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append a line for each row to the file, which need not exist. Raises OSError when it cannot be written."""
    about = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_model(),
        "isa": isa_name(),
        "model": os.path.basename(model.path),
        "type": file_type_name(model.kv.get("general.file_type")),
    }
    with open(path, "a", encoding="utf-8") as f:
        f.writelines(json.dumps({**about, **row}) + "\n" for row in rows)
