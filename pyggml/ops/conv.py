"""Convolutions as matrix products. They record the nodes that ggml records: im2col, reshapes, mul_mat.

Kernels and images are F32, F16 or BF16. The columns are F16 when the kernel is, as in ggml, else F32. (For F32 kernels
ggml rounds the columns to F16, and its `mul_mat` then rounds the kernel as well: an NMSE of about 1e-7.)
All raise ShapeError and DTypeError, in the name of the node at fault.
"""

from __future__ import annotations

from ..dtypes import DType
from ..tensor import Tensor
from ._common import F16, F32, ne_of
from .copy import cont
from .im2col import im2col, im2col_3d
from .matmul import mul_mat
from .view import permute, reshape_2d, reshape_3d, reshape_4d

__all__ = [
    "conv_1d",
    "conv_1d_dw",
    "conv_1d_dw_ph",
    "conv_1d_ph",
    "conv_2d",
    "conv_2d_dw",
    "conv_2d_s1_ph",
    "conv_2d_sk_p0",
    "conv_3d",
]


def _column_type(a: Tensor) -> DType:
    return F16 if getattr(a, "dtype", None) is F16 else F32


def conv_1d(a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> Tensor:
    """Convolution of signals by a matrix product (ggml_conv_1d): stride s0, p0 zeros at each end, dilation d0.

    a: kernel ne [K, IC, OC], dense; b: ne [L, IC, N]. Result: F32, ne [OL, OC, N],
    OL = (L + 2 p0 - d0 (K - 1) - 1) // s0 + 1. When N > 1 the product is permuted, as in `conv_2d` (ggml mixes
    the signals).
    """
    columns = im2col(a, b, s0, 0, p0, 0, d0, 0, False, _column_type(a))
    k, n, batch, _ = columns.ne
    y = mul_mat(reshape_2d(columns, k, n * batch), reshape_2d(a, a.ne[0] * a.ne[1], a.ne[2]))
    if batch > 1:
        return cont(permute(reshape_3d(y, n, batch, a.ne[2]), 0, 2, 1, 3))
    return reshape_3d(y, n, a.ne[2], 1)


def conv_1d_ph(a: Tensor, b: Tensor, s: int, d: int) -> Tensor:
    """`conv_1d` with K // 2 zeros at each end (ggml_conv_1d_ph)."""
    return conv_1d(a, b, s, ne_of(a)[0] // 2, d)


def conv_1d_dw(a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> Tensor:
    """Convolution of each channel with a kernel of its own, by matrix products (ggml_conv_1d_dw).

    a: kernel ne [K, 1, C]; b: ne [L, C], dense. Result: F32, ne [OL, C]. Parameters as `conv_1d`.
    """
    n, channels, batch, _ = ne_of(b)
    columns = im2col(a, reshape_4d(b, n, 1, channels, batch), s0, 0, p0, 0, d0, 0, False, _column_type(a))
    y = mul_mat(columns, a)
    return reshape_3d(y, y.ne[0], y.ne[2], 1)


def conv_1d_dw_ph(a: Tensor, b: Tensor, s0: int, d0: int) -> Tensor:
    """`conv_1d_dw` with K // 2 zeros at each end (ggml_conv_1d_dw_ph)."""
    return conv_1d_dw(a, b, s0, ne_of(a)[0] // 2, d0)


def conv_2d(a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int) -> Tensor:
    """Convolution of images by a matrix product (ggml_conv_2d; in PyTorch's terms, conv2d without bias).

    a: kernel ne [KW, KH, IC, OC], dense; b: ne [W, H, IC, N]; strides s0, s1, zeros around p0, p1, dilations d0, d1
    along width and height. Result: F32, ne [OW, OH, OC, N], OW = (W + 2 p0 - d0 (KW - 1) - 1) // s0 + 1.
    """
    columns = im2col(a, b, s0, s1, p0, p1, d0, d1, True, _column_type(a))
    k, w, h, batch = columns.ne
    y = mul_mat(reshape_2d(columns, k, w * h * batch), reshape_2d(a, k, a.ne[3]))
    return cont(permute(reshape_4d(y, w, h, batch, a.ne[3]), 0, 1, 3, 2))


def conv_2d_sk_p0(a: Tensor, b: Tensor) -> Tensor:
    """`conv_2d` with strides of the kernel's size, nothing around: an image in patches (ggml_conv_2d_sk_p0)."""
    w, h = ne_of(a)[:2]
    return conv_2d(a, b, w, h, 0, 0, 1, 1)


def conv_2d_s1_ph(a: Tensor, b: Tensor) -> Tensor:
    """`conv_2d` with stride 1 and half the kernel's size around (ggml_conv_2d_s1_ph)."""
    w, h = ne_of(a)[:2]
    return conv_2d(a, b, 1, 1, w // 2, h // 2, 1, 1)


def conv_2d_dw(a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int) -> Tensor:
    """Convolution of each channel with a kernel of its own, by matrix products (ggml_conv_2d_dw).

    a: kernel ne [KW, KH, 1, C], dense; b: ne [W, H, C, N], dense. Result: F32, ne [OW, OH, C, N]. Parameters as
    `conv_2d`. `conv_2d_dw_direct` does the same in one node, faster.
    """
    kw, kh, a2, a3 = ne_of(a)
    w, h, channels, batch = ne_of(b)
    a = reshape_4d(a, kw, kh, 1, a2 * a3)
    planes = reshape_4d(b, w, h, 1, channels * batch)
    columns = im2col(a, planes, s0, s1, p0, p1, d0, d1, True, _column_type(a))
    k, w, h, _ = columns.ne
    y = mul_mat(reshape_4d(a, kw * kh, 1, a2 * a3, 1), reshape_4d(columns, k, w * h, channels, batch))
    return reshape_4d(y, w, h, channels, batch)


def conv_3d(
    a: Tensor,
    b: Tensor,
    IC: int,
    s0: int,
    s1: int,
    s2: int,
    p0: int,
    p1: int,
    p2: int,
    d0: int,
    d1: int,
    d2: int,
) -> Tensor:
    """Convolution of volumes of IC channels by a matrix product (ggml_conv_3d).

    a: kernel ne [KW, KH, KD, IC * OC], dense; b: ne [W, H, D, IC * N]. Result: F32, ne [OW, OH, OD, OC * N]. Strides
    s0 .. s2, zeros around p0 .. p2, dilations d0 .. d2 along width, height, depth; sizes as `conv_2d`.
    """
    columns = im2col_3d(a, b, IC, s0, s1, s2, p0, p1, p2, d0, d1, d2, _column_type(a))
    k, w, h, depths = columns.ne
    out, batch = a.ne[3] // IC, b.ne[3] // IC
    y = mul_mat(reshape_2d(columns, k, w * h * depths), reshape_2d(a, k, out))
    y = cont(permute(reshape_4d(y, w * h, depths // batch, batch, out), 0, 1, 3, 2))
    return reshape_4d(y, w, h, depths // batch, out * batch)
