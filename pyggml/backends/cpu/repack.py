"""Weights in a layout of the CPU backend's own (csrc/products/r16): a copy beside the tensor, which its products read.

The tensor itself does not change: other backends, `get_rows`, views and the inspector read it where it is.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from pyggml.native import ffi, lib
from pyggml.native.threads import thread_count

from ...buffers.buffer import ALIGNMENT, Buffer, Bytes
from ...dtypes import DType
from ...tensor import Ne, Tensor
from .isa import Kernel, find_kernel, isa_levels, isa_name, kernel_of

BUFT = "CPU_REPACK"

PRODUCTS = ("mul_mat", "mul_mat_id")  # the ops that read copies
GROUP = 16  # rows that are packed together
_CHUNK = 1 << 20  # bytes that are worth a thread's while
# Columns from which three parts of each float pay. A Xeon with AMX, 2048 x 5632, ms by columns, as they are
# stored and in parts: F16 24: 5.3 and 6.5, 32: 6.9 and 6.7, 64: 12.4 and 9.3; BF16 12: 2.3 and 2.1, 32: 7.1 and 3.0.
_MANY_EXACT = {DType.F16: 31, DType.BF16: 11}
_copies: WeakKeyDictionary[Tensor, Buffer] = WeakKeyDictionary()
_floats: WeakSet[Tensor] = WeakSet()  # weights in F16 or BF16 that products of many columns may convert
_stored: WeakSet[Tensor] = WeakSet()  # weights in blocks that products may repack in passing


def copy_of(t: Tensor) -> Buffer | None:
    """The repacked copy of `t`, or None."""
    return _copies.get(t)


def repacked(node: Tensor) -> Buffer | None:
    """The repacked copy of the weights that a matrix product (of one matrix, or by expert) reads, or None."""
    a = _weights_of(node)
    return None if a is None else copy_of(a)


def _weights_of(node: Tensor) -> Tensor | None:
    """What a matrix product reads, where it is one matrix, or one by expert."""
    a = node.src[0] if node.op in PRODUCTS else None
    return None if a is None or (node.op == "mul_mat" and a.ne[2] > 1) else a


def _in_passing(node: Tensor) -> bool:
    a = _weights_of(node)
    return a is not None and a in _stored


def can_repack(t: Tensor, isa: str) -> bool:
    """Whether products of `t` have kernels for a repacked copy on this instruction set.

    That takes a leaf of a block type, dense: a matrix or, for mul_mat_id, a stack of them.
    """
    return _has_form(t) and (
        find_kernel(isa, "mul_mat_r16", DType.F32.gguf_id, t.dtype.gguf_id, DType.F32.gguf_id) is not None
    )


def _has_form(t: Tensor) -> bool:
    dense = t.op == "none" and t.view_src is None and t.ne[3] == 1 and t.is_contiguous
    return dense and lib.pg_r16_bytes(t.dtype.gguf_id, t.ne[0], t.ne[1]) > 0


def converts_floats(isa: str, node: Tensor) -> bool:
    """Whether a product reads floats that were given to `repack`, and has enough columns (csrc/products/gemm)."""
    a = node.src[0] if node.op == "mul_mat" else None
    return a is not None and a in _floats and _n_columns(node) > lib.pg_isa_floats(isa_levels()[isa])


def _n_columns(node: Tensor) -> int:
    return node.ne[1] * node.ne[2] * node.ne[3]


def product_kernel(isa: str, node: Tensor) -> tuple[Kernel, Buffer | None] | None:
    """The kernel of a product that reads weights in a form of the CPU's own, and their copy (None: as they are stored).

    None for all other nodes.
    """
    copy = repacked(node)
    if copy is not None and (kernel := kernel_of(isa, node, "_r16")) is not None:
        return kernel, copy
    if copy is None and _in_passing(node) and (kernel := kernel_of(isa, node, "_stored")) is not None:
        return kernel, None
    if copy is None and converts_floats(isa, node) and (kernel := kernel_of(isa, node, "_half")) is not None:
        return kernel, None
    if copy is None and _suits_tiles(node) and (kernel := kernel_of(isa, node, "_exact")) is not None:
        return kernel, None
    return None


def _is_float_matrix(t: Tensor) -> bool:
    """Whether csrc/products/gemm reads t as it is stored: its rows are whole units."""
    return t.dtype in (DType.F16, DType.BF16) and t.ne[0] % 32 == 0 and t.ne[2] == t.ne[3] == 1


def _suits_tiles(node: Tensor) -> bool:
    """Whether a product reads floats, with so many columns that tiles pay for three parts of each."""
    a = node.src[0] if node.op == "mul_mat" else None
    return a is not None and _is_float_matrix(a) and _n_columns(node) > _MANY_EXACT[a.dtype]


def repack(
    tensors: Iterable[Tensor],
    progress: Callable[[float], None] | None = None,
    n_threads: int | None = None,
    isa: str | None = None,
) -> int:
    """Make repacked copies of those of `tensors` that have such a form, and return how many.

    A copy is as large as the tensor, within 4 %, but for the types that have a grid or trits: IQ3 takes 1.3 or 1.4
    times as much, IQ2 1.4 to 1.6, IQ1 twice, TQ1_0 1.2. Their memory lives as long as any tensor of this call. A copy
    does not follow when values are written to the tensor later. Pages of a mapped file that a copy replaces are given
    back to the system; who reads the tensor itself has them read again. Matrices of F16 and BF16 are not copied, but
    products of many columns will round their values, and the columns, to 16-bit fixed point (NMSE 1.5e-8), or split
    them into two bf16 where there are tiles (2e-11). `progress` is told the fraction done before each tensor; what it
    raises ends the work, and leaves the copies made so far.

    Raises AllocError where there is no memory, BackendError for a bad `isa` or `n_threads`, GGUFError where a mapped
    file has become shorter.
    """
    workers = thread_count(n_threads)
    isa = isa_name(isa)
    tensors = list(tensors)
    allow_conversion(tensors)
    todo = [t for t in tensors if t not in _copies and can_repack(t, isa)]
    sizes = [copy_size(t) for t in todo]
    arena = Buffer.allocate(sum(sizes), BUFT).memory  # one allocation: in large pages where the system has them
    done = 0
    with ThreadPoolExecutor(workers) as pool:
        for t, size in zip(todo, sizes, strict=True):
            if progress is not None:
                progress(done / arena.size)
            copy = Buffer(arena[done : done + size], BUFT)
            _pack(t, copy, pool)
            t.raw()  # refuses what a mapped file has lost meanwhile
            _copies[t] = copy
            _give_back(t)
            done += size
    return len(todo)


def allow_conversion(tensors: Iterable[Tensor]) -> None:
    """Let products of many columns convert what of these are matrices of F16 or BF16, see `repack`."""
    leaves = (t for t in tensors if t.op == "none" and t.view_src is None and t.is_contiguous)
    _floats.update(t for t in leaves if _is_float_matrix(t))


def repack_in_passing(tensors: Iterable[Tensor]) -> None:
    """Let products of those of `tensors` that could be repacked do that row by row, each time they read them.

    They give the bits that products of copies would give. Without that they have the precision of F32, and take two to
    six times as long.
    """
    _stored.update(t for t in tensors if _has_form(t))


def adopt_copy(t: Tensor, copy: Buffer) -> None:
    """Let products read `copy`, of `copy_size(t)` bytes, instead of `t`: whoever gives it sees to what it holds."""
    _copies[t] = copy


def pack_groups(dtype: DType, ne: Ne, rows: int, copy: int, first: int, last: int) -> None:
    """Pack the groups of 16 rows `first` to `last` of a matrix of ne[:2], stored densely at address `rows`, for a copy
    of it at address `copy` (both those of its first row)."""
    src, dst = ffi.cast("void *", rows), ffi.cast("void *", copy)
    lib.pg_r16_pack(dtype.gguf_id, src, dtype.row_size(ne[0]), ne[0], ne[1], dst, first, last)


def can_unpack(dtype: DType, n: int) -> bool:
    """Whether rows of `n` elements can be repacked, and come back as they were."""
    known = lib.pg_r16_unpack(dtype.gguf_id, ffi.NULL, 0, 0, ffi.NULL, 0, 0, 0) == lib.PG_OK
    return known and n % dtype.block_size == 0


def unpacked(dtype: DType, ne: Ne, start: int, n: int, read: Callable[[int, int], Bytes]) -> Bytes:
    """Bytes `start` to `start + n` of a dense tensor as it is stored, uint8; `read(first, n)`: bytes of its copy."""
    row_size, size, m = dtype.row_size(ne[0]), matrix_size(dtype, ne), ne[1]
    group_size = size // -(-m // GROUP)
    row, end = start // row_size, -(-(start + n) // row_size)
    skipped = start - row * row_size
    pieces: list[Bytes] = []
    while row < end:
        matrix, at = divmod(row, m)
        to = min(end - matrix * m, m)
        first, last = at // GROUP, -(-to // GROUP)
        packed = read(matrix * size + first * group_size, (last - first) * group_size)
        rows = np.empty((min(last * GROUP, m) - first * GROUP) * row_size, np.uint8)
        src, dst = ffi.cast("void *", packed.ctypes.data), ffi.cast("void *", rows.ctypes.data)
        n_rows = m - first * GROUP
        lib.pg_r16_unpack(dtype.gguf_id, src, ne[0], n_rows, dst, row_size, 0, last - first)
        pieces.append(rows[(at - first * GROUP) * row_size : (to - first * GROUP) * row_size])
        row = matrix * m + to
    return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces))[skipped : skipped + n]


def matrix_size(dtype: DType, ne: Ne) -> int:
    """Bytes of one matrix of ne[:2] in a copy."""
    return int(lib.pg_r16_bytes(dtype.gguf_id, ne[0], ne[1]))


def copy_size(t: Tensor) -> int:
    """Bytes of a copy: whole cache lines."""
    size = matrix_size(t.dtype, t.ne) * t.ne[2]
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pack(t: Tensor, copy: Buffer, pool: ThreadPoolExecutor) -> None:
    _, m, n_mat, _ = t.ne
    size = matrix_size(t.dtype, t.ne)
    n_groups = -(-m // GROUP)
    step = max(1, _CHUNK * n_groups // size)

    def run(matrix: int, first: int) -> None:
        last = min(first + step, n_groups)
        pack_groups(t.dtype, t.ne, t.data + matrix * t.nb[2], copy.base + matrix * size, first, last)

    chunks = [(i, first) for i in range(n_mat) for first in range(0, n_groups, step)]
    list(pool.map(run, *zip(*chunks, strict=True)))


def _give_back(t: Tensor) -> None:
    """Let the system forget the pages of a mapped file that only `t` lies in; they are read again where it is."""
    buffer = t.buffer
    owner: Any = None if buffer is None or buffer.buft != "CPU_MMAP" else buffer.memory  # its type is too narrow a hint
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.obj if isinstance(owner, memoryview) else owner.base
    if not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = np.frombuffer(owner, np.uint8).__array_interface__["data"][0]
    first = -(-(t.data - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (t.data + t.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        owner.madvise(mmap.MADV_DONTNEED, first, last - first)
