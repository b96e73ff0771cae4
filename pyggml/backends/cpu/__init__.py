"""The CPU backend: lowers a plan to a flat array of C op records and runs it in one call."""

from pyggml.native.mapped import guard

from .backend import CpuBackend, CpuProgram
from .isa import get_include, isa_levels, isa_name, register_kernel

__all__ = ["CpuBackend", "CpuProgram", "get_include", "guard", "isa_levels", "isa_name", "register_kernel"]
