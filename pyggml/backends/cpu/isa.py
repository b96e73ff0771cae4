"""Which kernels run: the instruction set levels of this binary and CPU, and their dispatch tables."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any, NamedTuple

from pyggml.native import LIBRARY, ffi, lib

from ...codec import check_rows
from ...dtypes import DType
from ...errors import BackendError, whole
from ...opdef import OPS, OpDef
from ...tensor import Tensor

NONE, ANY = -1, -2  # as in pg.h
_outside: dict[str, list[tuple[tuple[int, int, int], Kernel]]] = {}  # kernels of other packages, as in `table_of`


class Kernel(NamedTuple):
    """One row of a dispatch table: its C symbol, its address, the row for its work function, and what must stay alive
    beside it."""

    symbol: str
    address: int
    row: Any
    keep: object = None


@cache
def isa_levels() -> dict[str, int]:
    """The levels this CPU can run, lowest first: name -> number. Raises BackendError when the library is stale."""
    from pyggml.native.stale import check_build  # imports pathlib, which takes a while: not for `import pyggml`

    check_build()
    names = [(ffi.string(lib.pg_isa_name(i)).decode(), i) for i in range(lib.pg_isa_count())]
    levels = {name: i for name, i in names if lib.pg_isa_supported(i)}
    if [*levels] == ["generic"]:
        from ...logger import LOG  # `import pyggml` does without

        LOG.info("this CPU lacks the instructions that kernels are written for (AVX2): generic ones are far slower")
    return levels


def isa_name(forced: str | None = None) -> str:
    """The level in use: `forced` when it is given, otherwise PYGGML_ISA, otherwise the highest. Raises BackendError for
    a level that this CPU cannot run."""
    name = forced or os.environ.get("PYGGML_ISA") or list(isa_levels())[-1]
    if name not in isa_levels():
        asked = f"the level {forced!r:.40}" if forced else f"PYGGML_ISA={name}"
        raise BackendError(f"{asked}: this CPU and build run {', '.join(isa_levels())}")
    return name


@cache
def table_of(isa: str) -> dict[str, list[tuple[tuple[int, int, int], Kernel]]]:
    """The dispatch table of one level alone: stem -> rows of ((dst, src0, src1) types, kernel)."""
    n = ffi.new("int64_t *")
    rows = lib.pg_isa_table(isa_levels()[isa], n)
    table: dict[str, list[tuple[tuple[int, int, int], Kernel]]] = {}
    for i in range(n[0]):
        r = rows[i]
        kernel = Kernel(ffi.string(r.symbol).decode(), int(ffi.cast("intptr_t", r.fn)), ffi.addressof(r))
        table.setdefault(ffi.string(r.op).decode(), []).append(((r.dst, r.src0, r.src1), kernel))
    return table


@cache
def find_kernel(isa: str, stem: str, dst: int, src0: int, src1: int) -> Kernel | None:
    """The first kernel of `stem` for these GGUF type ids (NONE for an absent source), or None.

    A level has only the kernels that it does better: a kernel that `isa` lacks comes from the nearest level below.
    """
    levels = list(isa_levels())
    for level in reversed(levels[: levels.index(isa) + 1]):
        for (d, s0, s1), kernel in table_of(level).get(stem, ()):
            if d in (dst, ANY) and s0 in (src0, ANY) and s1 in (src1, ANY):
                return kernel
    ids = (dst, src0, src1)
    return next((k for types, k in _outside.get(stem, ()) if types == ids), None)


_FUNCTION_TYPE = type(ctypes.CFUNCTYPE(None))  # the class of all types of ctypes functions
Function = Any  # a C function of another package: a ctypes function, a cffi function pointer, or its address


def _address(what: str, function: Function) -> int:
    """The address of a C function. Raises BackendError for anything else, and for NULL."""
    if isinstance(type(function), _FUNCTION_TYPE):
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    if isinstance(function, ffi.CData):
        return int(ffi.cast("intptr_t", function))
    return whole(what, function, 0, error=BackendError)


def own_kernel(op: OpDef, function: Function, work: Function = 0) -> Kernel:
    """A C function of another package as a kernel of `op`; see `register_kernel`."""
    at = _address(f"register_kernel: the address for {op.name}", function)
    at_work = _address(f"register_kernel: the work function for {op.name}", work)
    if not at or op.kernel is None:
        raise BackendError(f"register_kernel: {op.name} has no kernel, or its address is NULL")
    row = ffi.new("pg_row *")
    row.fn, row.work = ffi.cast("pg_kernel", at), ffi.cast("pg_work", at_work)
    return Kernel(f"{op.kernel} at {at:#x}", at, row, (function, work))


def register_kernel(op: OpDef, function: Function, dst: DType, *srcs: DType | None, work: Function = 0) -> None:
    """Let a C function (`pg_kernel` in pg.h; `get_include`) compute `op` on the cpu backend, at every instruction set,
    when the result has type `dst` and the first two sources have the types `srcs` (None: absent).

    `function` is a ctypes function (`ctypes.CDLL(path).name`), a cffi pointer (`ffi.addressof(lib, "name")`) or an
    address; its library must stay loaded. `work` is given in the same way: a `pg_work`, which says how much scratch
    memory the function needs on `nth` threads or fewer. Parameters come as doubles in the order of `op.params`. The
    function takes any strides, computes the share of thread `ith` of `nth`, and returns a status. It cannot call the
    functions that pg.h declares "for kernels". A function that is registered later for the same types replaces the
    earlier one. `pyggml.testing` checks such functions. Raises BackendError for anything but a C function and an OpDef,
    DTypeError for anything but a DType.
    """
    if not isinstance(op, OpDef):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BackendError(f"register_kernel takes the definition of an op (OpDef), not {op!r:.60}")
    for t in (dst, *filter(None, srcs)):
        check_rows(t, 0)
    kernel = own_kernel(op, function, work)
    src0, src1 = [NONE if t is None else t.gguf_id for t in (*srcs, None, None)][:2]
    _outside.setdefault(op.kernel or "", []).insert(0, ((dst.gguf_id, src0, src1), kernel))
    find_kernel.cache_clear()


def get_include() -> str:
    """The folder of pg.h, for C compilers."""
    return os.path.dirname(LIBRARY)


def kernel_of(isa: str, t: Tensor, suffix: str = "") -> Kernel | None:
    """The kernel that computes node `t` on this instruction set, or None. `suffix`: a variant of the op's kernels."""
    stem = OPS[t.op].kernel
    if stem is None:
        return None
    src0, src1, *_ = *t.src, None, None
    return find_kernel(
        isa,
        stem + suffix,
        t.dtype.gguf_id,
        NONE if src0 is None else src0.dtype.gguf_id,
        NONE if src1 is None else src1.dtype.gguf_id,
    )
