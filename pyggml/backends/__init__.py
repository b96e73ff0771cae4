"""The backends: `ref` interprets a graph with the NumPy references, `cpu` runs the C kernels."""

from . import cpu as cpu
from . import ref as ref
from .protocol import register_backend

register_backend("cpu", cpu.CpuBackend)
register_backend("ref", lambda n_threads: ref.RefBackend())
