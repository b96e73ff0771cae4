"""The backends: `ref` interprets a graph with the NumPy references, `cpu` runs the C kernels."""

from pathlib import Path

try:
    from . import cpu as cpu
except ModuleNotFoundError as e:
    if not (e.name or "").startswith(__name__):
        raise
    raise ImportError(
        f"{Path(__file__).parents[1]} is a checkout of pyggml whose C library is not built: install it with "
        f"`pip install -e {Path(__file__).parents[2]}`, or start Python in another folder to use the installed one"
    ) from None
from . import ref as ref
from .protocol import register_backend

register_backend("cpu", cpu.CpuBackend)
register_backend("ref", lambda n_threads: ref.RefBackend())
