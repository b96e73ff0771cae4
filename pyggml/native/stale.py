"""Notice a checkout whose C library was built from other sources: its numbers would be wrong."""

from __future__ import annotations

from pathlib import Path

from pyggml.errors import BackendError

from . import LIBRARY, ffi, lib

CHECKOUT = Path(__file__).resolve().parents[2]


def check_build(checkout: Path = CHECKOUT) -> None:
    """Raise BackendError when `checkout` has C sources (an editable install) that the library was not built from."""
    digest = checkout / "csrc" / "digest.py"
    if not digest.is_file():
        return
    from importlib.util import module_from_spec, spec_from_file_location  # an installed package does without

    spec = spec_from_file_location("pyggml_digest", digest)
    assert spec is not None and spec.loader is not None, digest
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.is_stale(LIBRARY, ffi.string(lib.pg_sources).decode()):
        raise BackendError(
            f"the C library was built from other sources than those in {checkout / 'csrc'}: rebuild it with "
            f"`pip install --no-build-isolation -e {checkout}`"
        )
