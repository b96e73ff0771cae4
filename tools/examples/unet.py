"""A small U-Net, forward, and the same in NumPy: python tools/examples/unet.py"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

import pyggml as gg

Array = np.ndarray[Any, np.dtype[np.float32]]
KERNELS = {
    "in": (16, 3, 3, 3),
    "down1": (32, 16, 3, 3),
    "down2": (64, 32, 3, 3),
    "grow2": (64, 32, 2, 2),
    "up2": (32, 64, 3, 3),
    "grow1": (32, 16, 2, 2),
    "up1": (16, 32, 3, 3),
    "out": (1, 16, 1, 1),
}


def unet(f: Any, x: Any, w: dict[str, Any]) -> Any:
    """Two steps down and two steps up. Each step up also sees the result that the way down had at its size."""
    full = f.conv(w["in"], x)
    half = f.conv(w["down1"], f.pool(full))
    quarter = f.conv(w["down2"], f.pool(half))
    half = f.conv(w["up2"], f.join(f.grow(w["grow2"], quarter), half))
    full = f.conv(w["up1"], f.join(f.grow(w["grow1"], half), full))
    return f.conv(w["out"], full)


class InNumpy:
    """The steps for NumPy arrays [n, channels, height, width]."""

    @staticmethod
    def conv(a: Array, x: Array) -> Array:
        """Convolve with kernels [out, channels, k, k], with half their size as padding; then replace negative values by
        0."""
        p = a.shape[2] // 2
        seen = sliding_window_view(np.pad(x, [(0, 0), (0, 0), (p, p), (p, p)]), a.shape[2:], (2, 3))
        return np.maximum(np.einsum("nchwij,ocij->nohw", seen, a), 0)

    @staticmethod
    def pool(x: Array) -> Array:
        """The largest value of each 2 * 2 pixels."""
        n, c, h, w = x.shape
        return x.reshape(n, c, h // 2, 2, w // 2, 2).max(axis=(3, 5))

    @staticmethod
    def grow(a: Array, x: Array) -> Array:
        """Each pixel becomes 2 * 2: kernels [channels, out, 2, 2]."""
        n, _, h, w = x.shape
        return np.einsum("nchw,coij->nohiwj", x, a).reshape(n, a.shape[1], 2 * h, 2 * w)

    @staticmethod
    def join(a: Array, b: Array) -> Array:
        """The channels of both."""
        return np.concatenate([a, b], axis=1)


class InPyggml:
    """The steps for tensors, ne [width, height, channels, n]."""

    @staticmethod
    def conv(a: gg.Tensor, x: gg.Tensor) -> gg.Tensor:
        """A matrix product."""
        return gg.relu(gg.conv_2d_s1_ph(a, x))

    @staticmethod
    def pool(x: gg.Tensor) -> gg.Tensor:
        """One op."""
        return gg.pool_2d(x, "max", 2, 2, 2, 2, 0, 0)

    @staticmethod
    def grow(a: gg.Tensor, x: gg.Tensor) -> gg.Tensor:
        """A transposed convolution."""
        return gg.conv_transpose_2d_p0(a, x, 2)

    @staticmethod
    def join(a: gg.Tensor, b: gg.Tensor) -> gg.Tensor:
        """Dimension 2 holds the channels."""
        return gg.concat(a, b, 2)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, prod(s[1:]) ** -0.5, s).astype(np.float32) for name, s in KERNELS.items()}
    images = rng.standard_normal((2, 3, 64, 48), np.float32)
    with gg.Context() as ctx:
        y = unet(InPyggml, ctx.from_numpy(images), {name: ctx.from_numpy(a) for name, a in weights.items()})
    graph = gg.Graph().build_forward_expand(y)
    gg.compute(graph)
    want = unet(InNumpy, images, weights)
    print(f"{graph.n_nodes} nodes: {y.ne} from {images.shape[::-1]}")
    print(f"largest difference: {np.abs(y.numpy() - want).max():.1e} of values up to {want.max():.2f}")
