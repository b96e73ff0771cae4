"""Notice a checkout whose C library was built from other sources: its numbers would be wrong."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from pyggml.errors import BackendError

from . import LIBRARY, ffi, lib

CHECKOUT = Path(__file__).resolve().parents[2]


def check_build(checkout: Path = CHECKOUT) -> None:
    """Raise BackendError when `checkout` has C sources (an editable install) that the library was not built from."""
    spec = spec_from_file_location("pyggml_digest", checkout / "csrc" / "digest.py")
    if spec is None or spec.loader is None or not Path(str(spec.origin)).is_file():
        return
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.is_stale(LIBRARY, ffi.string(lib.pg_sources).decode()):
        raise BackendError(
            f"the C library was built from other sources than those in {checkout / 'csrc'}: rebuild it with "
            f"`pip install --no-build-isolation -e {checkout}`"
        )
