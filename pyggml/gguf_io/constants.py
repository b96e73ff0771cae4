"""The names that GGUF files use. They are `gguf.constants`, imported without the rest of the gguf package, which takes
long to import (YAML, writers, vocabularies)."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING


def _constants() -> ModuleType:
    package = find_spec("gguf")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("pyggml needs the package gguf: pip install gguf", name="gguf")
    # A module of our own: as gguf.constants it would be there without its package being so.
    spec = spec_from_file_location(f"{__name__}.gguf", Path(package.origin).with_name("constants.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from gguf.constants import TENSOR_NAMES as TENSOR_NAMES
    from gguf.constants import Keys as Keys
else:
    _found = _constants()
    Keys, TENSOR_NAMES = _found.Keys, _found.TENSOR_NAMES
