"""Learn to read digits, from drawings made here: python tools/examples/digits.py [HOW MANY [EPOCHS]]"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import pyggml as gg

Array = np.ndarray[Any, np.dtype[Any]]
# Each row of a digit is five dots, and this is the number that they are in binary.
FONT = {
    "0": (14, 17, 19, 21, 25, 17, 14),
    "1": (4, 12, 4, 4, 4, 4, 14),
    "2": (14, 17, 1, 2, 4, 8, 31),
    "3": (31, 2, 4, 2, 1, 17, 14),
    "4": (2, 6, 10, 18, 31, 2, 2),
    "5": (31, 16, 30, 1, 1, 17, 14),
    "6": (6, 8, 16, 30, 17, 17, 14),
    "7": (31, 1, 2, 4, 8, 8, 8),
    "8": (14, 17, 17, 14, 17, 17, 14),
    "9": (14, 17, 17, 15, 1, 2, 12),
}
SIZE = 20


def drawings(n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """`n` pictures of digits, float32 [n, 1, 20, 20], and which digits they are, int32 [n]. A digit is twice as large
    as in the font, shifted by up to two dots, slanted, bright or faint, and in strong noise."""
    glyphs = np.array([[[row >> x & 1 for x in range(4, -1, -1)] for row in rows] for rows in FONT.values()])
    glyphs = glyphs.repeat(2, axis=1).repeat(2, axis=2)  # 14 rows of 10
    which = rng.integers(10, size=n).astype(np.int32)
    pictures = rng.normal(0, 0.3, (n, 1, SIZE, SIZE)).astype(np.float32)
    for picture, digit in zip(pictures[:, 0], which, strict=True):
        dy, dx = rng.integers(-2, 3, 2)
        slant, ink = rng.uniform(-0.2, 0.2), rng.uniform(0.6, 1.2)
        for y, row in enumerate(glyphs[digit]):
            x = 5 + dx + round(slant * (7 - y))
            picture[3 + dy + y, x : x + 10] += ink * row
    return pictures, which


class Net:
    """Two convolutions, each followed by a maximum over 2 x 2, and one matrix."""

    def __init__(self, rng: np.random.Generator) -> None:
        ctx = gg.Context()
        shapes = {"conv1": (8, 1, 5, 5), "conv2": (16, 8, 3, 3), "out": (10, 16 * 9)}
        self.params: dict[str, gg.Tensor] = {}
        for name, shape in shapes.items():
            values = rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
            self.params[name] = ctx.from_numpy(values.astype(np.float32), name=name).set_param()

    def logits(self, pictures: gg.Tensor) -> gg.Tensor:
        """Ne [10, n] of pictures of ne [20, 20, 1, n]."""
        x = pictures
        for name in ("conv1", "conv2"):  # 20 -> 16 -> 8 -> 6 -> 3
            x = gg.relu(gg.conv_2d(self.params[name], x, 1, 1, 0, 0, 1, 1))
            x = gg.pool_2d(x, "max", 2, 2, 2, 2, 0, 0)
        return gg.mul_mat(self.params["out"], gg.reshape_2d(x, 16 * 9, pictures.ne[3]))

    def loss(self, pictures: gg.Tensor, digits: gg.Tensor) -> tuple[gg.Tensor, dict[str, gg.Tensor]]:
        """The cross-entropy of a batch, and which of its pictures are read as they should be."""
        logits = self.logits(pictures)
        return gg.cross_entropy_ids(logits, digits), {"right": gg.equal(gg.argmax(logits), digits)}


def main(n: str = "8000", epochs: str = "6") -> None:
    """Train on nine tenths of the drawings, and print after each epoch how many of the others are read right."""
    rng = np.random.default_rng(0)
    net = Net(rng)
    data = gg.Dataset(*drawings(int(n), rng))
    opt = gg.AdamW(lr=lambda step: 3e-3 * 0.99 ** max(0, step - 400))
    for epoch in gg.fit(net.loss, data, opt, int(epochs), val_split=0.1):
        right = epoch.val["right"]
        print(f"epoch {epoch.number}: {right.mean:.1%} ± {right.uncertainty:.1%} of the others are read right")
    pictures, digits = drawings(10, rng)
    ctx = gg.Context()
    read = gg.eval(gg.argmax(net.logits(ctx.from_numpy(pictures))))
    print(f"new drawings of {digits.tolist()} are read as {np.asarray(read).astype(int).tolist()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
