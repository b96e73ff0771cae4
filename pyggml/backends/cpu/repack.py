"""Makes weights ready for the CPU's products: sets their forms (`pyggml.form`), and makes repacked copies.

A tensor itself does not change when it has a copy: other backends, `get_rows`, views and the inspector read it where it
is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, zip_longest

from pyggml.native.numa import go_home, home_of_rows, n_homes
from pyggml.native.packing import GROUP, copy_size, matrix_size, pack_groups
from pyggml.native.thread_pool import ThreadPool
from pyggml.native.threads import thread_count

from ...buffers.buffer import Buffer
from ...dtypes import DType
from ...form import BUFT, IN_PASSING, ROUNDED, Repacking, repacked
from ...lock import Lock, locked
from ...ops.matmul import weights_of
from ...tensor import Tensor
from .isa import find_kernel, isa_name, kernel_of
from .products import is_float_matrix

_CHUNK = 1 << 20  # bytes that are worth a thread's while
_FEW = 16  # tokens: a decode of so many takes little longer than one of a single token
_SHARE, _SHARE_OF_FEW = 1 / 16, 1 / 128  # of all copies: how many of them are made before a decode


def can_repack(isa: str, t: Tensor, node: Tensor | None = None) -> bool:
    """Whether there are kernels at this level that read a repacked copy of `t`: for products of usual columns, or for
    `node`.

    `t` must be a leaf of a block type, dense: a matrix or, for mul_mat_id, a stack of matrices.
    """
    if not _has_layout(t):
        return False
    if node is not None:
        return weights_of(node) is t and kernel_of(isa, node, "_r16") is not None
    return find_kernel(isa, "mul_mat_r16", DType.F32.gguf_id, t.dtype.gguf_id, DType.F32.gguf_id) is not None


def _is_dense_leaf(t: Tensor) -> bool:
    return t.op == "none" and t.view_src is None and t.is_contiguous


def _has_layout(t: Tensor) -> bool:
    return _is_dense_leaf(t) and t.ne[3] == 1 and matrix_size(t.dtype, t.ne) > 0


def repack(
    tensors: Iterable[Tensor],
    progress: Callable[[float], None] | None = None,
    n_threads: int | None = None,
    isa: str | None = None,
) -> int:
    """Make repacked copies of those `tensors` whose types the layout has, allow products to round the others
    (`allow_rounding`), and return how many copies were made.

    A copy is as large as the tensor, within 4 %, except for types with a grid or trits: docs/products.md has their
    sizes. The memory of all copies lives as long as any tensor of this call. A copy does not follow when values are
    written to the tensor later. Pages of a mapped file that a copy replaces are given back to the system; whoever reads
    the tensor itself has them read again. `progress` is called with the fraction done before each tensor. An
    exception that it raises ends the work, and leaves the copies made so far.

    Raises AllocError when there is no memory, BackendError for a bad `isa` or `n_threads`, GGUFError when a mapped file
    has become shorter.
    """
    repacking = CpuRepacking(tensors, n_threads, isa)
    repacking.finish(progress)
    return repacking.n_copies


class CpuRepacking(Repacking):
    """Makes the repacked copies of a model's weights: at once (`finish`), or in parts (`put_off`, then `go_on` before
    each decode), because a large model takes longer to repack than to compute its first token.

    Until its copy is there, products repack the blocks of a weight in passing: the results are the same. Graphs that
    were compiled earlier go on reading the stored weights.
    """

    def __init__(self, tensors: Iterable[Tensor], n_threads: int | None = None, isa: str | None = None) -> None:
        """Reserve the memory of the copies. Arguments and errors: see `repack`."""
        self._workers = thread_count(n_threads)
        isa = isa_name(isa)
        tensors = list(tensors)
        allow_rounding(tensors)
        self._todo = [t for t in tensors if t.form.copy is None and can_repack(isa, t)]
        sizes = [copy_size(t.dtype, t.ne) for t in self._todo]
        self.n_copies, self.size = len(sizes), sum(sizes)
        self._arena = Buffer.allocate(self.size, BUFT).memory  # one allocation, so that the system can use large pages
        self._copies = [
            Buffer(self._arena[end - n : end], BUFT) for n, end in zip(sizes, accumulate(sizes), strict=True)
        ]
        self._made = 0  # how many copies there are
        self._read = False  # graphs have read the stored weights
        self.lock = Lock()
        self.done = False

    def put_off(self) -> None:
        """Let products read the weights in passing, until `go_on` has made the copies."""
        repack_in_passing(self._todo)

    def go_on(self, n_tokens: int) -> None:
        """Make some copies, before a decode of `n_tokens` tokens; before the first decode, none. Fewer are made before
        a short decode, so that it does not take much longer. Does nothing while another thread makes copies."""
        if self.done or not self.lock.acquire(blocking=False):
            return
        try:
            if not self._read:
                self._read = True
                return
            more = self.size * (_SHARE if n_tokens > _FEW else _SHARE_OF_FEW)
            end = self._made
            while end < self.n_copies and more > 0:
                more -= self._copies[end].size
                end += 1
            self._make(end)
        finally:
            self.lock.release()

    @locked
    def finish(self, progress: Callable[[float], None] | None = None) -> None:
        """Make the copies that are left. `progress`: see `repack`."""
        self._make(self.n_copies, progress)

    def _make(self, end: int, progress: Callable[[float], None] | None = None) -> None:
        """Make the copies up to number `end`."""
        with ThreadPool(self._workers) as pool:
            for i in range(self._made, end):
                t, copy = self._todo[i], self._copies[i]
                if progress is not None:
                    progress((copy.base - self._copies[0].base) / self.size)
                _pack(t, copy, pool)
                t.raw()  # refuses what a mapped file has lost meanwhile
                t.form = repacked(copy)._replace(fast=t.form.fast)
                if t.buffer is not None:
                    t.buffer.give_back(t.offset, t.nbytes)
                self._made = i + 1
        if self._made == self.n_copies and not self.done:
            self.done = True
            if self._read:  # the pages are in memory again
                for t in self._todo:
                    if t.buffer is not None:
                        t.buffer.give_back(t.offset, t.nbytes)


def allow_rounding(tensors: Iterable[Tensor]) -> None:
    """Let gradients (out_prod) of many columns round the matrices of F16 and BF16 among these, and the columns, to
    16-bit fixed point. docs/products.md has errors."""
    for t in tensors:
        if _is_dense_leaf(t) and is_float_matrix(t):
            t.form = ROUNDED


def repack_in_passing(tensors: Iterable[Tensor]) -> None:
    """Let products repack the blocks of these tensors each time they read them, when the layout has their types.

    These products give the bits that products of copies give. Otherwise they have the precision of F32, and are slower.
    """
    for t in tensors:
        if _has_layout(t):
            t.form = IN_PASSING


def be_fast(tensors: Iterable[Tensor]) -> None:
    """Let products round their columns when they meet those of these tensors, whose forms have been set, that are in
    blocks, and round both when the tensors are matrices of F16 or BF16.

    Many columns are faster then, and results less precise: docs/products.md has figures.
    """
    for t in tensors:
        if t.dtype.is_quantized or t.dtype in (DType.F16, DType.BF16):
            t.form = t.form._replace(fast=True)


def _pack(t: Tensor, copy: Buffer, pool: ThreadPool) -> None:
    _, m, n_mat, _ = t.ne
    size = matrix_size(t.dtype, t.ne)
    n_groups = -(-m // GROUP)
    step = max(1, _CHUNK * n_groups // size)

    def run(matrix: int, first: int) -> None:
        go_home(home_of_rows(first, n_groups))  # the system takes pages from where they are touched first
        last = min(first + step, n_groups)
        pack_groups(t.dtype, t.ne, t.data + matrix * t.nb[2], copy.base + matrix * size, first, last)

    chunks: list[list[tuple[int, int]]] = [[] for _ in range(n_homes())]
    for i in range(n_mat):
        for first in range(0, n_groups, step):
            chunks[home_of_rows(first, n_groups)].append((i, first))
    in_turn = [chunk for row in zip_longest(*chunks) for chunk in row if chunk is not None]  # all nodes at once
    list(pool.map(run, *zip(*in_turn, strict=True)))
