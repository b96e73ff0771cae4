"""A convolutional network for digits (LeNet's shape), and the same in NumPy: python tools/examples/conv_net.py"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

import pyggml as gg

LAYERS = {"conv1": (6, 1, 5, 5), "conv2": (16, 6, 5, 5), "fc1": (84, 400), "fc2": (10, 84)}
Array = np.ndarray[Any, np.dtype[np.float32]]


def in_pyggml(images: Array, weights: dict[str, Array]) -> Array:
    """Probabilities of the ten digits for each image [n, 1, 28, 28]."""
    with gg.Context() as ctx:
        w = {name: ctx.from_numpy(a) for name, a in weights.items()}
        x = ctx.from_numpy(images)  # ne [28, 28, 1, n]
        for name, p in (("conv1", 2), ("conv2", 0)):
            x = gg.relu(gg.conv_2d(w[name], x, 1, 1, p, p, 1, 1))
            x = gg.pool_2d(x, "max", 2, 2, 2, 2, 0, 0)
        x = gg.relu(gg.mul_mat(w["fc1"], gg.reshape_2d(x, 400, len(images))))
        x = gg.soft_max(gg.mul_mat(w["fc2"], x))
    gg.compute(gg.Graph().build_forward_expand(x))
    return x.numpy()


def in_numpy(x: Array, w: dict[str, Array]) -> Array:
    """The same, computed by NumPy."""
    for name, p in (("conv1", 2), ("conv2", 0)):
        seen = sliding_window_view(np.pad(x, [(0, 0), (0, 0), (p, p), (p, p)]), (5, 5), (2, 3))
        x = np.maximum(np.einsum("nchwij,ocij->nohw", seen, w[name]), 0)
        n, c, h, width = x.shape
        x = x.reshape(n, c, h // 2, 2, width // 2, 2).max(axis=(3, 5))
    x = np.maximum(np.einsum("ni,oi->no", x.reshape(len(x), 400), w["fc1"]), 0)
    x = np.exp(np.einsum("ni,oi->no", x, w["fc2"]))
    return x / x.sum(axis=1, keepdims=True)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(0, prod(s[1:]) ** -0.5, s).astype(np.float32) for name, s in LAYERS.items()}
    digits = rng.standard_normal((8, 1, 28, 28), np.float32)
    ours, theirs = in_pyggml(digits, drawn), in_numpy(digits, drawn)
    for a, b in zip(ours, theirs, strict=True):
        print(f"digit {a.argmax()} at {a.max():.4f}; in NumPy {b.argmax()} at {b.max():.4f}")
    print(f"largest difference: {np.abs(ours - theirs).max():.1e}")
