"""How matrix products may read a weight: `Tensor.form`.

The form of its weights, its number of columns and the instruction set decide how a product is computed, and so how
precise it is; nothing else does (`pyggml.backends.cpu.products.choose`). A form belongs to one tensor: views of it, and
copies on other backends, do not have it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from .buffers.buffer import Buffer
from .lock import Lock

BUFT = "CPU_REPACK"  # the buffer type of repacked copies


class Form(NamedTuple):
    """One of STORED, IN_PASSING and ROUNDED, or `repacked(copy)`; or one of these made fast.

    `fast`: products with a weight in blocks round their columns, so that many columns take less time and results are
    less precise (csrc/products/r16/round.h), or, with tiles, columns and weights (csrc/products/gemm/bf16.h). Products
    with matrices of F16 and BF16 round both (csrc/products/gemm/halves.c). Products with other weights do not change.
    """

    name: str
    copy: Buffer | None = None
    fast: bool = False


STORED = Form("stored")  # products read the tensor as it is, with the precision of F32
IN_PASSING = Form("in passing")  # products repack blocks each time they read them
ROUNDED = Form("rounded")  # gradients may round F16 and BF16


def repacked(copy: Buffer) -> Form:
    """Products read `copy` instead of the tensor, in the layout of csrc/products/r16/r16.h: see `native.packing`."""
    return Form("repacked", copy)


class Repacking(Protocol):
    """The repacking of a model's weights, which may go on while graphs already read them (`CpuRepacking` of
    `pyggml.backends.cpu.repack` says how).

    size      bytes of all copies
    n_copies  their number
    done      all copies are there: graphs that were compiled before are built again, and then read them
    lock      held while forms change, and while a graph is compiled meanwhile
    """

    size: int
    n_copies: int
    done: bool
    lock: Lock

    def go_on(self, n_tokens: int) -> None:
        """Make some copies, before a decode of `n_tokens` tokens."""
        ...

    def finish(self) -> None:
        """Make the copies that are left."""
        ...
