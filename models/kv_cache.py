"""The KV cache: its cells and, per layer, the tensors with K and V. Layout: llama.cpp's (llama_kv_cache_init)."""

from __future__ import annotations

from collections.abc import Sequence

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.tensor import Context, Tensor, allocate_tensors

from . import kv_view
from .hparams import HParams
from .kv_cells import KVCells

PADDING, PADDING_FLASH_ATTN = 32, 256
CACHE_TYPES = (
    DType.F32,
    DType.F16,
    DType.BF16,
    DType.Q8_0,
    DType.Q4_0,
    DType.Q4_1,
    DType.Q5_0,
    DType.Q5_1,
    DType.IQ4_NL,
)


class KVCache(KVCells):
    """Cells, and K and V of `layers` (default: all). Printed, it shows what every cell holds.

    `k_l[i]` holds n_embd_k_gqa elements of layer `layers[i]` for each cell, `v_l[i]` n_embd_v_gqa. V is stored
    transposed (`v_trans`: all cells of one element side by side) unless `flash_attn`. `n_swa` > 0: tokens are looked at
    by the n_swa - 1 that follow, and themselves. Raises ModelError for types that the layout cannot store.
    """

    def __init__(
        self,
        hp: HParams,
        size: int,
        n_seq_max: int = 1,
        type_k: DType = DType.F16,
        type_v: DType = DType.F16,
        flash_attn: bool = False,
        *,
        layers: Sequence[int] | None = None,
        n_swa: int = 0,
    ) -> None:
        super().__init__(size, n_seq_max, PADDING_FLASH_ATTN if flash_attn else PADDING)
        self.flash_attn, self.v_trans = flash_attn, not flash_attn
        self.type_k, self.type_v, self.n_swa = type_k, type_v, n_swa
        if type_v.is_quantized and self.v_trans:
            raise ModelError(f"type_v = {type_v.name}: V is transposed without flash_attn=True and cannot be quantised")
        for name, dtype, n in (("type_k", type_k, hp.n_embd_head_k), ("type_v", type_v, hp.n_embd_head_v)):
            if dtype not in CACHE_TYPES:
                known = ", ".join(t.name for t in CACHE_TYPES)
                raise ModelError(f"{name} = {dtype.name}: a KV cache stores {known}")
            if n % dtype.block_size:
                raise ModelError(f"{name} = {dtype.name}: heads of {n} are not whole blocks of {dtype.block_size}")
        self.layers = tuple(range(hp.n_layer) if layers is None else layers)
        self.index = {il: i for i, il in enumerate(self.layers)}
        ctx = Context()
        self.k_l: list[Tensor] = []
        self.v_l: list[Tensor] = []
        for il in self.layers:
            n = hp.layer(il)
            self.k_l.append(ctx.new_tensor(type_k, (n.n_embd_k_gqa * self.size,), f"cache_k_l{il}"))
            self.v_l.append(ctx.new_tensor(type_v, (n.n_embd_v_gqa * self.size,), f"cache_v_l{il}"))

    @property
    def caches(self) -> tuple[KVCache, ...]:
        """The caches with tensors that this memory consists of: itself (an interleaved one has two)."""
        return (self,)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of all layers: size * (row of K + row of V) per layer."""
        return self.nbytes_k + self.nbytes_v

    @property
    def nbytes_k(self) -> int:
        """Bytes of K: size * n_embd_k_gqa / block size * block bytes, per layer."""
        return sum(t.nbytes for t in self.k_l)

    @property
    def nbytes_v(self) -> int:
        """Bytes of V, as of K."""
        return sum(t.nbytes for t in self.v_l)

    def report(self) -> str:
        """`KV size 256.00 MiB: 512 cells, 32 layers, K (F16) 128.00 MiB, V (F16) 128.00 MiB`."""
        total, k, v = (f"{n / (1 << 20):.2f} MiB" for n in (self.nbytes, self.nbytes_k, self.nbytes_v))
        kv = f"K ({self.type_k.name}) {k}, V ({self.type_v.name}) {v}"
        window = f", window of {self.n_swa}" if self.n_swa else ""
        return f"KV size {total}: {self.size} cells, {len(self.layers)} layers, {kv}{window}"

    def allocate(self, buft: str) -> None:
        """Give K and V their memory, zeroed: cells that were never written must hold finite numbers."""
        allocate_tensors((*self.k_l, *self.v_l), buft)

    def __str__(self) -> str:
        return f"{self.report()}\n{kv_view.text(self)}"

    def _repr_html_(self) -> str:
        return kv_view.html(self, self.report())
