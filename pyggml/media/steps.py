"""What processors do to a picture, step by step.

Pictures are PIL images of mode RGB until `values` makes numbers of them: Pillow resizes as the transformers library
does, and crops and pads without a detour over arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import limits
from ..errors import MediaError
from .picture import check_pixels, pillow
from .sizes import Size

if TYPE_CHECKING:
    from PIL.Image import Image

Floats: TypeAlias = npt.NDArray[np.float32]
Step: TypeAlias = "Callable[[Image], Image]"


def resized(picture: Image, size: Size, resample: int) -> Image:
    """The picture at this (height, width), by Pillow's filter of this number (bicubic is 3). It is the same object
    when it has the size already. Raises MediaError when the new size is empty or over `limits.PICTURE_PIXELS`."""
    check_pixels(*size, "its processor makes it")
    return picture if size == extent(picture) else picture.resize((size[1], size[0]), pillow().Resampling(resample))


def extent(picture: Image) -> Size:
    """(height, width)."""
    return picture.height, picture.width


def cropped(picture: Image, top: int, left: int, size: Size) -> Image:
    """A part of the picture at this place; what lies beyond its edges is black."""
    check_pixels(*size, "its processor makes it")
    return picture.crop((left, top, left + size[1], top + size[0]))


def centred(picture: Image, size: Size) -> Image:
    """The middle of the picture at this size. An odd pixel is cut or added above and at the left."""
    return cropped(picture, (picture.height - size[0]) // 2, (picture.width - size[1]) // 2, size)


def on_canvas(picture: Image, size: Size) -> Image:
    """The picture in the middle of a black canvas that is larger. An odd pixel is added below and at the right."""
    return cropped(picture, -((size[0] - picture.height) // 2), -((size[1] - picture.width) // 2), size)


def squared(picture: Image, colour: Sequence[int]) -> Image:
    """The picture in the middle of a square of this colour, as large as its longer side."""
    side = max(extent(picture))
    check_pixels(side, side, "its processor makes it")
    square = pillow().new("RGB", (side, side), tuple(colour))
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square


def tiles(picture: Image, tile: Size) -> list[Image]:
    """The picture cut into tiles of this size, line by line. Those at the right and the bottom may be smaller. Raises
    MediaError for more than `limits.PICTURE_TILES`."""
    n = -(-picture.height // tile[0]) * -(-picture.width // tile[1])
    if n > limits.PICTURE_TILES:
        raise MediaError(
            f"its processor cuts it into {n} tiles, more than pyggml.limits.PICTURE_TILES ({limits.PICTURE_TILES})"
        )
    return [
        picture.crop((x, y, min(x + tile[1], picture.width), min(y + tile[0], picture.height)))
        for y in range(0, picture.height, tile[0])
        for x in range(0, picture.width, tile[1])
    ]


def unchanged(picture: Image) -> Image:
    """The step of a processor that leaves a picture as it is."""
    return picture


def values(parts: Sequence[Image], table: Floats, step: Step = unchanged) -> Floats:
    """Numbers of pictures that have one size after `step`: float32 [n, 3, height, width]. `table` [3, 256] has the
    number for each channel and pixel value."""
    first = step(parts[0])
    check_pixels(len(parts) * first.height, first.width, "its processor makes of it")
    made = np.empty((len(parts), 3, first.height, first.width), np.float32)
    for i, planes in enumerate(made):
        picture = step(parts[i]) if i else first
        if picture.size != first.size:
            raise MediaError("its processor cuts it into tiles of several sizes")
        pixels = np.asarray(picture)
        for channel in range(3):
            np.take(table[channel], pixels[:, :, channel], out=planes[channel], mode="clip")
    return made


def value_table(scale: float | None, mean: Iterable[float] | None, std: Iterable[float] | None) -> Floats:
    """The number for each of 256 pixel values, for `values`: scaled in float64, then (x - mean) / std in float32. What
    is None is left out. To the bit what the library computes for each pixel."""
    value = np.arange(256, dtype=np.float64)
    table = np.broadcast_to((value if scale is None else value * scale).astype(np.float32), (3, 256))
    if mean is not None and std is not None:
        table = (table - _column(mean)) / _column(std)
    return np.ascontiguousarray(table)


def fused_table(scale: float, mean: Iterable[float], std: Iterable[float]) -> Floats:
    """As `value_table`, in the order of the library's processors that need torch: mean and std are scaled instead."""
    unit = np.float32(1.0 / scale)
    return (np.arange(256, dtype=np.float32) - _column(mean) * unit) / (_column(std) * unit)


def bfloat16_table(scale: float, mean: Iterable[float], std: Iterable[float]) -> Floats:
    """As `value_table`, each result rounded to bfloat16, as LLaMA 4's processor has it."""
    scaled = _bfloat16(np.arange(256, dtype=np.float32) * np.float32(scale))
    return _bfloat16(_bfloat16(scaled - _bfloat16(_column(mean))) / _bfloat16(_column(std)))


def _column(numbers: Iterable[float]) -> Floats:
    return np.array([*numbers], np.float32)[:, None]


def _bfloat16(x: Floats) -> Floats:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def merged_patches(planes: Floats, patch: int, merge: int, frames: int) -> Floats:
    """Qwen2-VL: patches of planes [3, height, width], each `frames` times: [n, 3 * frames * patch * patch]. The patches
    that the tower merges (`merge` * `merge`) follow each other. Both sides must be multiples of patch * merge."""
    height, width = planes.shape[1:]
    rows, columns = height // (patch * merge), width // (patch * merge)
    cut = np.transpose(planes.reshape(3, rows, merge, patch, columns, merge, patch), (1, 4, 2, 5, 0, 3, 6))
    made = np.empty((rows, columns, merge, merge, 3, frames, patch, patch), np.float32)
    made[:] = cut[:, :, :, :, :, None]
    return made.reshape(-1, 3 * frames * patch * patch)


def flat_patches(planes: Floats, patch: int) -> Floats:
    """LFM2-VL: patches of planes [3, height, width], line by line; in a patch the channels are innermost:
    [n, patch * patch * 3]."""
    rows, columns = planes.shape[1] // patch, planes.shape[2] // patch
    cut = np.transpose(planes.reshape(3, rows, patch, columns, patch), (1, 3, 2, 4, 0))
    return cut.reshape(rows * columns, -1)


def side_by_side(planes: Floats, patch: int) -> Floats:
    """MiniCPM-V: patches of planes [3, height, width] in one line: [3, patch, n * patch]."""
    rows, columns = planes.shape[1] // patch, planes.shape[2] // patch
    cut = np.transpose(planes.reshape(3, rows, patch, columns, patch), (0, 2, 1, 3, 4))
    return cut.reshape(3, patch, -1)
