"""The ops that `pyggml op-bench` measures: how to record each one for a type and a shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import pyggml as gg
from pyggml.backends.quantize import quantize
from pyggml.buffers.buffer import Buffer
from pyggml.dtypes import DType
from pyggml.ops.matmul import WEIGHT_TYPES
from pyggml.tensor import Context, Tensor

Ne = tuple[int, ...]
Build = Callable[[Context, DType, Ne], Tensor]

FLOATS = (DType.F32, DType.F16)
CACHES = (DType.F16, DType.F32, DType.Q8_0)
PRODUCTS = (DType.Q4_0, DType.Q8_0, DType.Q4_K, DType.Q6_K, DType.F16, DType.BF16, DType.F32)
_TILE = 64  # rows of random weights, repeated


@dataclass(frozen=True)
class OpCase:
    """An op: the meaning of `--ne` for it, the shapes and types measured by default, and the types it takes."""

    dims: str
    shapes: tuple[Ne, ...]
    default_types: tuple[DType, ...]
    types: tuple[DType, ...]
    build: Build
    is_product: bool = False  # a product with weights: few columns are measured with more weights than caches hold


def place(t: Tensor, rng: np.random.Generator) -> Tensor:
    """Give a leaf memory and random values. Row numbers are set by the cases, which know their range."""
    t.buffer, t.offset = Buffer.allocate(t.nbytes), 0
    n = t.ne[0]
    rows = min(t.nbytes // t.dtype.row_size(n), _TILE)
    if t.dtype is not DType.I32:
        values = rng.standard_normal((rows, n), np.float32)
        t.raw()[...] = np.resize(quantize(values, t.dtype), t.nbytes)
    return t


def leaf(ctx: Context, dtype: DType, *ne: int) -> Tensor:
    """A random tensor."""
    return place(ctx.new_tensor(dtype, ne), np.random.default_rng(1))


def rows_of(ctx: Context, below: int, *ne: int) -> Tensor:
    """Random row numbers."""
    t = place(ctx.new_tensor(DType.I32, ne), np.random.default_rng(1))
    t.raw().view(np.int32)[...] = np.random.default_rng(1).permuted(np.arange(t.n_elements)) % below
    return t


def _mul_mat(ctx: Context, dtype: DType, ne: Ne) -> Tensor:
    k, m, n = ne
    return gg.mul_mat(leaf(ctx, dtype, k, m), leaf(ctx, DType.F32, k, n))


def _out_prod(ctx: Context, dtype: DType, ne: Ne) -> Tensor:
    m, k, n = ne
    return gg.out_prod(leaf(ctx, dtype, m, k), leaf(ctx, DType.F32, n, k))


def _out_prod_t(ctx: Context, dtype: DType, ne: Ne) -> Tensor:
    m, k, n = ne
    return gg.out_prod(leaf(ctx, dtype, m, k), gg.transpose(leaf(ctx, DType.F32, k, n)))


def _mul_mat_id(ctx: Context, dtype: DType, ne: Ne) -> Tensor:
    k, m, n_expert, n = ne
    return gg.mul_mat_id(leaf(ctx, dtype, k, m, n_expert), leaf(ctx, DType.F32, k, 1, n), rows_of(ctx, n_expert, 2, n))


def _get_rows(ctx: Context, dtype: DType, ne: Ne) -> Tensor:
    k, n_rows, n = ne
    return gg.get_rows(leaf(ctx, dtype, k, n_rows), rows_of(ctx, n_rows, n))


def _flash_attn_ext(ctx: Context, dtype: DType, ne: Ne) -> Tensor:
    d, n_tokens, n_head, n_kv, n_head_kv = ne
    q = leaf(ctx, DType.F32, d, n_tokens, n_head)
    k, v = (leaf(ctx, dtype, d, n_kv, n_head_kv) for _ in range(2))
    return gg.flash_attn_ext(q, k, v, None, d**-0.5)


def _rope_ext(ctx: Context, dtype: DType, ne: Ne) -> Tensor:
    positions = rows_of(ctx, ne[2], ne[2])
    return gg.rope_ext(leaf(ctx, dtype, *ne), positions, None, ne[0], 0, 4096, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)


def _unary(op: Callable[[Tensor], Tensor]) -> Build:
    return lambda ctx, dtype, ne: op(leaf(ctx, dtype, *ne))


def _binary(op: Callable[[Tensor, Tensor], Tensor]) -> Build:
    return lambda ctx, dtype, ne: op(leaf(ctx, dtype, *ne), leaf(ctx, dtype, *ne))


def _to_f32(ctx: Context, dtype: DType, ne: Ne) -> Tensor:
    return gg.cpy(leaf(ctx, dtype, *ne), leaf(ctx, DType.F32, *ne))


_F32 = (DType.F32,)
_ROWS = ((4096, 512),)

OP_CASES: dict[str, OpCase] = {
    "mul_mat": OpCase("k,m,n", ((4096, 4096, 1), (4096, 4096, 512)), PRODUCTS, WEIGHT_TYPES, _mul_mat, True),
    "mul_mat_id": OpCase(
        "k,m,n_expert,n", ((2048, 2048, 8, 1), (2048, 2048, 8, 128)), (DType.Q4_K,), WEIGHT_TYPES, _mul_mat_id, True
    ),
    "out_prod": OpCase(
        "m,k,n: as for the gradient of weights", ((4096, 512, 4096),), _F32, WEIGHT_TYPES, _out_prod, True
    ),
    "out_prod_t": OpCase(
        "m,k,n, b transposed: as for the gradient of columns",
        ((4096, 4096, 512),),
        (DType.F32, DType.Q4_K),
        WEIGHT_TYPES,
        _out_prod_t,
        True,
    ),
    "flash_attn_ext": OpCase(
        "head_dim,n_tokens,n_head,n_kv,n_head_kv",
        ((128, 1, 32, 4096, 8), (128, 256, 32, 512, 8)),
        (DType.F16,),
        CACHES,
        _flash_attn_ext,
    ),
    "get_rows": OpCase("k,n_rows,n", ((4096, 4096, 512),), (DType.Q4_0, DType.F16), WEIGHT_TYPES, _get_rows),
    "cpy": OpCase("ne of a tensor copied to F32", _ROWS, (DType.F16, DType.Q4_K), WEIGHT_TYPES, _to_f32),
    "rope_ext": OpCase("head_dim,n_head,n_tokens", ((128, 32, 512),), _F32, FLOATS, _rope_ext),
    "rms_norm": OpCase("ne", _ROWS, _F32, _F32, _unary(lambda a: gg.rms_norm(a, 1e-5))),
    "soft_max_ext": OpCase("ne", ((512, 512, 32),), _F32, _F32, _unary(lambda a: gg.soft_max_ext(a, None))),
    "silu": OpCase("ne", _ROWS, _F32, FLOATS, _unary(gg.silu)),
    "swiglu_split": OpCase("ne", _ROWS, _F32, FLOATS, _binary(gg.swiglu_split)),
    "add": OpCase("ne", _ROWS, _F32, FLOATS, _binary(gg.add)),
    "mul": OpCase("ne", _ROWS, _F32, FLOATS, _binary(gg.mul)),
}
