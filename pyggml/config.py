"""The user's configuration: a TOML file with names of models and defaults of the command line.

    model = "qwen"                     # what -m is when nothing is given; PYGGML_MODEL counts more

    [aliases]
    qwen = "Qwen/Qwen3-0.6B-GGUF:Q8_0" # a path, a repository of the Hub, or a URL

    [options]                          # of every verb that has them, by their long names
    threads = 4

    [chat]                             # of one verb
    temp = 0.6

It is `PYGGML_CONFIG`, or `pyggml/config.toml` in `XDG_CONFIG_HOME` (`~/.config`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from . import limits
from .errors import ModelError
from .small_file import read_text

_NO_VERBS = {"model", "aliases", "options"}


@dataclass(frozen=True)
class Config:
    """What the file says. `verbs`: the options of single verbs."""

    model: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    verbs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


def config_path() -> Path:
    """Where the file is, whether it exists or not."""
    given = os.environ.get("PYGGML_CONFIG")
    if given:
        return Path(given)
    # A user without a name has no home (a container's, by number): Path.home() raises then.
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "pyggml" / "config.toml"


def read_config() -> Config:
    """The configuration; an empty one when there is no file, or only in a folder that this user may not enter (HOME is
    another's, as after `sudo -u`). Raises ModelError for a file that cannot be read or says anything else."""
    path = config_path()
    if not os.path.exists(path):  # Path.exists raises PermissionError before Python 3.14
        return Config()
    found = _toml(path)
    model, aliases = found.get("model"), found.get("aliases", {})
    if model is not None and not isinstance(model, str):
        raise ModelError(f"{path}: model must be a text, not {model!r:.60}")
    if not isinstance(aliases, dict) or not all(isinstance(v, str) for v in cast("dict[str, Any]", aliases).values()):
        raise ModelError(f"{path}: aliases must be a table of texts, not {aliases!r:.60}")
    for name, table in found.items():
        if name not in ("model", "aliases") and not isinstance(table, dict):
            raise ModelError(f"{path}: {name} is no table; options stand in [options], or in the table of a verb")
    verbs = {name: table for name, table in found.items() if name not in _NO_VERBS}
    return Config(model, cast("dict[str, str]", aliases), found.get("options", {}), verbs)


def _toml(path: Path) -> dict[str, Any]:
    try:
        toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise ModelError(f"{path}: Python 3.10 reads TOML with tomli: pip install tomli") from None
    try:
        return toml.loads(read_text(path, limits.TEXT_FILE_BYTES, ModelError))
    except toml.TOMLDecodeError as e:
        raise ModelError(f"{path}: is no TOML: {e}") from None
    except RecursionError:
        raise ModelError(f"{path}: nested too deep") from None
