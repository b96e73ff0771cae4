"""Which size a processor gives a picture, and into which tiles it cuts it: arithmetic alone, in the order of operations
of the transformers library, because another order rounds otherwise.

A size is (height, width) in pixels; a grid is (rows, columns) of tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from ..errors import MediaError

Size: TypeAlias = tuple[int, int]


def sized(size: Size, wanted: Mapping[str, int]) -> Size:
    """The size that the `size` of a config asks for: by `shortest_edge` (and `longest_edge`), by `max_height` and
    `max_width`, or by `height` and `width`."""
    height, width = size
    if "shortest_edge" in wanted:
        return _by_shortest_edge(height, width, wanted["shortest_edge"], wanted.get("longest_edge"))
    if "max_height" in wanted and "max_width" in wanted:
        scale = min(wanted["max_height"] / height, wanted["max_width"] / width)
        return int(height * scale), int(width * scale)
    if "height" in wanted and "width" in wanted:
        return wanted["height"], wanted["width"]
    raise MediaError(f"this processor cannot resize by a size of {', '.join(wanted)}")


def _by_shortest_edge(height: int, width: int, edge: int, longest: int | None) -> Size:
    if longest is None:
        other = int(edge * max(height, width) / min(height, width))
        return (other, edge) if width <= height else (edge, other)
    exact: float = edge
    low, high = float(min(height, width)), float(max(height, width))
    if high / low * edge > longest:
        exact = longest * low / high
        edge = round(exact)
    if min(height, width) == edge:
        return height, width
    return (int(exact * height / width), edge) if width < height else (edge, int(exact * width / height))


def patch_multiple(size: Size, longest: Size, patch: Size) -> Size:
    """Pixtral: within `longest`, the shape kept, each side rounded up to whole patches."""
    height, width = size
    ratio = max(height / longest[0], width / longest[1])
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return ((height - 1) // patch[0] + 1) * patch[0], ((width - 1) // patch[1] + 1) * patch[1]


def smart(size: Size, factor: int, least: int, most: int, frames: int = 1) -> Size:
    """Qwen2-VL (frames = 1), GLM-4V: both sides are multiples of `factor`, `frames` times the pixels lie within
    [least, most], the shape is kept as well as that allows. Raises MediaError when one side is over 200 times the
    other."""
    height, width = size
    if frames > 1 and (height < factor or width < factor):
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > 200:
        raise MediaError(f"one side is more than 200 times the other: {width} x {height}")
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if frames * high * wide > most:
        return _shrunk(height, width, factor, math.sqrt((frames * height * width) / most))
    if frames * high * wide < least:
        return _grown(height, width, factor, math.sqrt(least / (frames * height * width)))
    return high, wide


def _shrunk(height: int, width: int, factor: int, beta: float) -> Size:
    return (
        max(factor, math.floor(height / beta / factor) * factor),
        max(factor, math.floor(width / beta / factor) * factor),
    )


def _grown(height: int, width: int, factor: int, beta: float) -> Size:
    return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor


def smart_tokens(size: Size, factor: int, least: int, most: int) -> Size:
    """LFM2-VL: as `smart`, of any shape; a side has at least one `factor`."""
    height, width = size
    high, wide = (max(factor, round(side / factor) * factor) for side in size)
    if high * wide > most:
        return _shrunk(height, width, factor, math.sqrt((height * width) / most))
    if high * wide < least:
        return _grown(height, width, factor, math.sqrt(least / (height * width)))
    return high, wide


def best_canvas(size: Size, canvases: Iterable[Size]) -> Size:
    """LLaVA-NeXT: the canvas on which the picture keeps most pixels, and of those the one with the least left over."""
    height, width = size
    best, most, least_waste = (0, 0), -1, math.inf
    for high, wide in canvases:
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        waste = high * wide - kept
        if kept > most or (kept == most and waste < least_waste):
            best, most, least_waste = (high, wide), kept, waste
    return best


def within(size: Size, canvas: Size) -> Size:
    """LLaVA-NeXT: the largest size of the picture's shape on the canvas; the shorter side is rounded up."""
    height, width = size
    by_width, by_height = canvas[1] / width, canvas[0] / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * by_height), canvas[1])


def nearest_grid(size: Size, tile: Size, grids: Iterable[Size]) -> Size:
    """GotOcr2 and LFM2-VL: the grid whose shape is nearest to the picture's. Of grids that are equally near, a later
    one is taken when the picture has more than half its pixels."""
    height, width = size
    best, nearest = (1, 1), math.inf
    for rows, columns in grids:
        far = abs(width / height - columns / rows)
        larger = far == nearest and width * height > 0.5 * tile[0] * tile[1] * columns * rows
        if far < nearest or larger:
            best, nearest = (rows, columns), far
    return best


def grids(least: int, most: int) -> list[Size]:
    """All grids of `least` to `most` tiles, by number of tiles, then by columns."""
    return sorted(_grids(least, most), key=lambda grid: grid[0] * grid[1])


def grids_of_lfm2(least: int, most: int) -> list[Size]:
    """As `grids`; those with one number of tiles are in the order in which Python keeps a set of (columns, rows). It is
    the library's, and of grids that are equally near to the picture's shape the order decides."""
    added = [(columns, rows) for rows, columns in _grids(least, most)]
    added.sort(key=lambda grid: (max(least, *grid), grid))
    return [(rows, columns) for columns, rows in sorted(set(added), key=lambda grid: grid[0] * grid[1])]


def _grids(least: int, most: int) -> list[Size]:
    return [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if columns * rows >= least
    ]


def longest_edge(size: Size, edge: int, limit: int = 4096) -> Size:
    """Idefics3: the longest side gets `edge` pixels (at most `limit`), the other an even number."""
    height, width = size
    shape = width / height
    if width >= height:
        width = edge
        height = int(width / shape)
        height += height % 2
    else:
        height = edge
        width = int(height * shape)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    shape = width / height
    if width >= height and width > limit:
        width, height = limit, int(limit / shape)
    elif height > width and height > limit:
        height, width = limit, int(limit * shape)
    return max(height, 1), max(width, 1)


def tile_multiple(size: Size, tile: int) -> Size:
    """Idefics3: the longest side is rounded up to whole tiles, the other follows it, then is rounded up, too."""
    height, width = size
    shape = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / shape) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * shape) / tile) * tile
    return height, width


def pan_and_scan(size: Size, least_crop: int, most_crops: int, least_ratio: float) -> Size:
    """Gemma 3: the grid of crops along the longer side of a picture; (0, 0) when it needs none."""
    height, width = size
    long, short = max(size), min(size)
    if long / short < least_ratio:
        return 0, 0
    n = min(math.floor(long / least_crop), math.floor(long / short + 0.5))
    n = min(most_crops, max(2, n))
    rows, columns = (1, n) if width >= height else (n, 1)
    if min(math.ceil(width / columns), math.ceil(height / rows)) < least_crop:
        return 0, 0
    return rows, columns


def llama4_canvas(size: Size, tile: int, most: int, enlarge: bool) -> Size:
    """LLaMA 4: of all canvases of up to `most` tiles the one that the picture fills with the least enlarging (with
    `enlarge` the most), else the least shrinking; then the smallest. In float32, as torch divides its integers."""
    by_shape: dict[float, list[Size]] = {}
    for n in range(most, 0, -1):
        for rows in range(1, n + 1):
            if n % rows == 0:
                by_shape.setdefault(rows / (n // rows), []).append((rows * tile, n // rows * tile))
    canvases = np.array([canvas for same in by_shape.values() for canvas in same], np.float32)
    scales = (canvases / np.array(size, np.float32)).min(1)
    larger = scales[scales >= 1]
    chosen = (larger.max() if enlarge else larger.min()) if larger.size else scales.max()
    fitting = canvases[scales == chosen]
    high, wide = fitting[fitting.prod(1).argmin()].tolist()
    return int(high), int(wide)


def llama4_size(size: Size, canvas: Size, tile: int, enlarge: bool) -> Size:
    """LLaMA 4: the size on its canvas, the shape kept; beyond a tile's side it is enlarged only with `enlarge`. What
    comes from the canvas is a float32 in the library, what comes from the picture a float64."""
    room = canvas if enlarge else tuple(min(max(size[i], tile), canvas[i]) for i in (0, 1))
    kinds: list[Any] = [np.float32 if enlarge or canvas[i] < max(size[i], tile) else float for i in (0, 1)]
    scales: list[Any] = [kinds[i](room[i]) / kinds[i](size[i]) for i in (0, 1)]
    compared = np.float32 if np.float32 in kinds else float
    full = 1 if compared(scales[1]) < compared(scales[0]) else 0  # the side that fills its room
    other = max(min(math.floor(kinds[full](size[1 - full]) * scales[full]), room[1 - full]), 1)
    return (other, room[1]) if full else (room[0], other)


def minicpm_grid(size: Size, most: int, edge: int) -> Size:
    """MiniCPM-V: the grid of slices; (0, 0) when one picture is enough."""
    height, width = size
    shape = math.log(width / height)
    n = min(math.ceil(width * height / (edge * edge)), most)
    if n <= 1:
        return 0, 0
    best, nearest = (1, 1), math.inf
    for count in (n - 1, n, n + 1):
        if count == 1 or count > most:
            continue
        for rows in range(1, count + 1):
            if count % rows == 0:
                far = abs(shape - math.log((count // rows) / rows))
                if far < nearest or (far == nearest and rows > best[0]):
                    best, nearest = (rows, count // rows), far
    return best


def minicpm_size(size: tuple[float, float], edge: int, unit: int, enlarge: bool) -> Size:
    """MiniCPM-V: about `edge` * `edge` pixels, the shape kept, each side a multiple of `unit`; a smaller picture keeps
    its size unless `enlarge`."""
    height, width = size
    if height * width > edge * edge or enlarge:
        shape = width / height
        height = int(edge / math.sqrt(shape))
        width = int(height * shape)
    return nearest_multiple(height, unit), nearest_multiple(width, unit)


def minicpm_slices(size: Size, grid: Size, edge: int, unit: int) -> Size:
    """MiniCPM-V: the size of a picture that is cut into the slices of `grid`."""
    parts = [nearest_multiple(size[i], grid[i]) / grid[i] for i in (0, 1)]
    height, width = minicpm_size((parts[0], parts[1]), edge, unit, enlarge=True)
    return height * grid[0], width * grid[1]


def nearest_multiple(length: float, unit: int) -> int:
    """The multiple of `unit` that is nearest to `length`, at least one."""
    return max(round(length / unit) * unit, unit)
