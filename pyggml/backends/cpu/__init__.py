"""The CPU backend: lowers a plan to a flat array of C op records and runs it in one call."""

from .backend import CpuBackend, CpuProgram
from .isa import isa_levels, isa_name

__all__ = ["CpuBackend", "CpuProgram", "isa_levels", "isa_name"]
