"""The KV cache: its cells and, per layer, the tensors with K and V. Layout: llama.cpp's (llama_kv_cache_init)."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from pyggml.buffers.buffer import check_memory
from pyggml.dtypes import CACHE_TYPES, DType
from pyggml.errors import KVCacheFull, ModelError, StateError
from pyggml.tensor import Context, Tensor, allocate_tensors
from pyggml.types import Ints

from ..hparams import HParams, SwaType
from .kv_cells import EMPTY, LAST_POS, KVCells, Slot, checked_seq
from .kv_rows import kv_rows
from .members import bytes_of
from .state_file import Array, StateReader, ascending, members_of

if TYPE_CHECKING:
    from ..ubatch import UBatch

PADDING, PADDING_FLASH_ATTN = 32, 256
_CELL = 8  # bytes of a cell's position and delta; which sequences it belongs to takes a bit for each

# Types that store K and V rotated, so that no element stands out in its block (QuaRot, arXiv 2404.00456).
ROTATED_TYPES = (DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.IQ4_NL)


class CacheOptions(TypedDict, total=False):
    """What a cache is made for, beside a model and its size. `held`: the layers that get memory, and `transient`, see
    `KVCache`."""

    n_seq_max: int
    type_k: DType
    type_v: DType
    flash_attn: bool
    held: Container[int] | None
    transient: bool


class KVCache(KVCells):
    """Cells, and the K and V of layers. Printed, it shows what every cell holds.

    layers      the layers that it keeps K and V of; by default all that have any
    k_l, v_l    K and V of these layers: n_embd_k_gqa and n_embd_v_gqa elements for each cell. Layers without V (of an
                indexer) come last. When V is in K (`hp.v_in_k`), `v_l` is empty
    index       which entry of `k_l` and `v_l` a layer reads, also when it shares those of another (`hp.kv_layer`)
    v_trans     V is stored transposed, all cells of one element side by side; it is not with `flash_attn`
    n_swa       above 0: tokens see a window only; `swa_type` says where the window starts
    n_rewind    see `WindowCache`
    transient   it has the cells of one batch and stores nothing: graphs read K and V where they were computed
                (`Build.kept`), and later tokens do not see them
    cross       it holds an encoded text: the encoder fills it, and the decoder's tokens see all cells of their
                sequences
    causal      tokens do not see later tokens, unless the model lets them
    held        the layers whose K and V get memory (None: all); other stages of the model have the others

    When their type is one of ROTATED_TYPES, K and V of each head are stored rotated, see `rotation_k`. Raises
    ModelError for types that the layout cannot store, AllocError when there is not enough memory.
    """

    def __init__(
        self,
        hp: HParams,
        size: int,
        n_seq_max: int = 1,
        type_k: DType = DType.F16,
        type_v: DType = DType.F16,
        flash_attn: bool = False,
        held: Container[int] | None = None,
        transient: bool = False,
        *,
        layers: Sequence[int] | None = None,
        n_swa: int = 0,
        cross: bool = False,
        causal: bool = True,
    ) -> None:
        self.transient, self.cross = transient, cross
        self.causal = causal and hp.causal_attn and not cross
        self.flash_attn, self.v_in_k, self.v_trans = flash_attn, hp.v_in_k, not (flash_attn or hp.v_in_k)
        self.type_k, self.type_v = type_k, type_k if hp.v_in_k else type_v
        self.n_swa, self.n_rewind = n_swa, 0
        self.swa_type: SwaType = hp.swa_type
        users = tuple(hp.cache_layers if layers is None else layers)
        self.layers = tuple(il for il in users if hp.has_kv(il))
        if transient:
            shapes = []
        else:
            _check_types(hp, self)
            shapes = [(n.n_embd_k_gqa, 0 if hp.v_in_k else n.n_embd_v_gqa) for n in map(hp.layer, self.layers)]
        self.holds = [held is None or il % hp.n_layer in held for il in self.layers]  # as `k_l`: are they stored?
        row = sum(type_k.row_size(k) + type_v.row_size(v) for k, v in compress(shapes, self.holds))
        check_memory((row + _CELL + bytes_of(n_seq_max)) * size, f"a cache of {size} cells for {n_seq_max} sequences")
        super().__init__(size, n_seq_max, PADDING_FLASH_ATTN if flash_attn else PADDING)
        self.fixed = hp.fixed_positions
        own = {il: i for i, il in enumerate(self.layers)}
        self.index = {il: own[hp.kv_layer(il)] for il in users if hp.kv_layer(il) in own}
        ctx = Context()
        self.k_l: list[Tensor] = []
        self.v_l: list[Tensor] = []
        for il, (k, v) in zip(self.layers, shapes, strict=not transient):
            self.k_l.append(ctx.new_tensor(type_k, (k * self.size,), f"cache_k_l{il}"))
            if v:
                self.v_l.append(ctx.new_tensor(type_v, (v * self.size,), f"cache_v_l{il}"))
        heads = {} if transient else {il: hp.layer(il) for il in self.layers}
        of_k = {il: _power_of_2(n.n_embd_head_k) for il, n in heads.items() if not (n.n_embd_head_v and hp.v_in_k)}
        of_v = {_power_of_2(n.n_embd_head_v) for n in heads.values() if n.n_embd_head_v and not hp.v_in_k}
        self._rotated_k = of_k if type_k in ROTATED_TYPES else {}
        sizes = {*self._rotated_k.values(), *(of_v if type_v in ROTATED_TYPES else ())}
        self._rotations = {n: ctx.new_tensor(DType.F32, (n, n), f"kv_rotation_{n}") for n in sorted(sizes)}

    def rotation_k(self, il: int) -> Tensor | None:
        """The matrix that rotates K of layer `il` before it is stored, ne [n, n]: a Hadamard matrix, which is symmetric
        and its own inverse. Each part of n elements of a head is multiplied with it. Q is rotated too, so that the
        products of Q and K do not change. None when K is stored as it is."""
        n = self._rotated_k.get(self.layers[self.index[il]])
        return None if n is None else self._rotations[n]

    def rotation_v(self, n_embd_head: int) -> Tensor | None:
        """The same for V. The result of attention is multiplied with it, which takes the rotation back."""
        return self._rotations.get(_power_of_2(n_embd_head)) if self.type_v in ROTATED_TYPES else None

    def seen_pos(self, pos: Ints) -> Ints:
        """int32 [n_kv]: the positions of the cells that attention of a ubatch at `pos` looks at (-1: an empty one); of
        a transient cache the tokens themselves."""
        return pos if self.transient else self.pos[: self.n_kv()]

    @property
    def v_limit(self) -> float:
        """The largest number that type_v stores (blocks have scales of F16). V is stored finite, because 0 times NaN is
        NaN: a weight of 0 would not hide it."""
        bits = {DType.F32: 0x7F7FFFFF, DType.BF16: 0x7F7F0000}.get(self.type_v, 0x477FE000)
        return float(np.uint32(bits).view(np.float32))

    def slot(self, u: UBatch, taken: Sequence[Slot]) -> Slot:
        """Where `take` may put a ubatch. Raises KVCacheFull."""
        return self.slot_of(u.n_tokens, u.seq, u.sets)

    def make_room(self, parts: Sequence[UBatch]) -> None:
        """Have holes closed before the next step when these ubatches do not fit one after the other as cells lie now,
        rather than when some of them have been computed."""
        if sum(u.n_tokens for u in parts) <= self.size - self.end:
            return
        trial = self.copied()
        try:
            for u in parts:
                trial.take(trial.slot(u, ()), u)
        except KVCacheFull:
            self.defrag()

    def take(self, slot: Slot, u: UBatch) -> None:
        """Put a ubatch into a slot, see `hold`."""
        self.hold(slot, u.pos, u.seq, u.sets, None if u.media is None else u.media.drift)

    def can_remove(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Whether `seq_rm` removes that: always."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of all layers: size * (row of K + row of V) per layer."""
        return self.nbytes_k + self.nbytes_v

    @property
    def nbytes_k(self) -> int:
        """Bytes of K: size * n_embd_k_gqa / block size * block bytes, per layer."""
        return sum(t.nbytes for t in compress(self.k_l, self.holds))

    @property
    def nbytes_v(self) -> int:
        """Bytes of V, as of K."""
        return sum(t.nbytes for t in compress(self.v_l, self.holds))

    def settle(self) -> None:
        """Drop what no later token can see: nothing, or all of a transient cache (after a batch was decoded)."""
        if self.transient:
            self.clear()

    # -- saved states ---------------------------------------------------------------------------------------------

    def save(self, header: dict[str, Any], seq: int | None) -> list[Array]:
        """See `Store.save`: the cells in use, and K and V of each."""
        if seq is None:
            index = np.flatnonzero(self.pos >= 0)
            members = self.members.of(index).view(np.uint8)
        else:
            index = np.flatnonzero(self.members.cells_of(checked_seq(seq, self.n_seq_max)))
            members = np.empty((0, len(index)), np.uint8)
        drift = [self.drift[index]] if self.drift[index].any() else []
        header["caches"].append(
            {"cells": len(index), "seqs": len(members), "head": self.head} | ({"drift": 1} if drift else {})
        )
        cells = [index.astype(np.int32), self.pos[index], self.delta[index], *drift, members]
        return [*cells, *(rows[index] for rows in kv_rows(self))]

    def load(self, r: StateReader, seq: int | None) -> Callable[[], None]:
        """See `Store.load`. When all cells are loaded, they go where they were, or to the first cells when the cache is
        smaller now. The cells of one sequence go to the first empty cells, which need not be side by side."""
        header = r.next("caches")
        n, n_seqs, head = (r.count(name, header) for name in ("cells", "seqs", "head"))
        index, pos, delta = (r.array(np.int32, n) for _ in range(3))
        drift = r.array(np.int32, n) if "drift" in header else 0
        saved = r.array(np.uint8, n_seqs, n).view(np.bool_)
        rows = [r.array(view.dtype, n, view.shape[1]) for view in kv_rows(self)]
        sound = (
            ascending(index)
            and bool(((pos >= 0) & (pos <= LAST_POS)).all())
            and saved.view(np.uint8).max(initial=0) <= 1
        )
        if not sound or (seq is None and not saved.any(axis=0).all()):
            raise StateError("the state is damaged: its cells make no sense")
        if seq is None:
            if n > self.size:
                raise KVCacheFull(f"the state has {n} cells, the KV cache {self.size}", n, self.size)
            members = members_of(saved, self.n_seq_max)
            fits = not n or index[-1] < self.size
            cells, head = (index, head if head < self.size else 0) if fits else (np.arange(n), 0)
        else:
            members = np.zeros((self.n_seq_max, n), np.bool_)
            members[seq] = True
            cells = np.flatnonzero((self.owner == EMPTY) | (self.owner == seq))[:n]
            if len(cells) < n:
                text = f"{n} cells are needed; {len(cells)} of the {self.size} cells of the KV cache are free"
                raise KVCacheFull(text, n, len(cells))

        def put() -> None:
            if seq is None:
                self.clear()
            else:
                self.seq_rm(seq)
            for to, row in zip(kv_rows(self), rows, strict=True):
                to[cells] = row
            self.put(cells.astype(np.int32), pos, delta, drift, members)
            if seq is None:
                self.head = head

        return put

    def report(self) -> str:
        """`KV size 256.00 MiB: 512 cells, 32 layers, K (F16) 128.00 MiB, V (F16) 128.00 MiB`."""
        total, k, v = (f"{n / (1 << 20):.2f} MiB" for n in (self.nbytes, self.nbytes_k, self.nbytes_v))
        kv = f"K ({self.type_k.name}) {k}, " + ("V in K" if self.v_in_k else f"V ({self.type_v.name}) {v}")
        kind = f", window of {self.n_swa}" if self.n_swa else ", of encoded text" if self.cross else ""
        return f"KV size {total}: {self.size} cells, {len(self.layers)} layers, {kv}{kind}"

    def allocate(self, buft: str) -> None:
        """Give K and V their memory, zeroed: cells that were never written must hold finite numbers."""
        held = (*compress(self.k_l, self.holds), *compress(self.v_l, self.holds))
        allocate_tensors((*held, *self._rotations.values()), buft)
        for n, t in self._rotations.items():
            t.numpy()[:] = _hadamard(n)

    def __str__(self) -> str:
        from . import kv_view

        return f"{self.report()}\n{kv_view.text(self)}"

    def _repr_html_(self) -> str:
        from . import kv_view

        return kv_view.html(self, self.report())


def _power_of_2(n: int) -> int:
    """The largest that divides n."""
    return n & -n


def _hadamard(n: int) -> npt.NDArray[np.float32]:
    """Sylvester's matrix of a power of 2, each row of length 1."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return (h / np.sqrt(n)).astype(np.float32)


def _check_types(hp: HParams, kv: KVCache) -> None:
    """Raises ModelError for types that hold no heads of these layers."""
    if kv.type_v.is_quantized and kv.v_trans:
        name = kv.type_v.name
        raise ModelError(f"type_v = {name}: V is transposed without flash_attn=True and cannot be quantised")
    shapes = [hp.layer(il) for il in kv.layers]
    parts = (
        ("type_k", kv.type_k, "heads", {n.n_embd_head_k for n in shapes}),
        ("type_k", kv.type_k, "parts of heads", {r.first for r in map(hp.rope, kv.layers) if r}),
        ("type_v", kv.type_v, "heads", {n.n_embd_head_v for n in shapes}),
    )
    for name, dtype, what, sizes in parts:
        if dtype not in CACHE_TYPES:
            known = ", ".join(t.name for t in CACHE_TYPES)
            raise ModelError(f"{name} = {dtype.name}: a KV cache stores {known}")
        for n in sizes:
            if n % dtype.block_size:
                raise ModelError(f"{name} = {dtype.name}: {what} of {n} are not whole blocks of {dtype.block_size}")
