"""What a checkpoint's processor makes of a picture: a short function for each kind of `preprocessor_config.json`.

A family's function reads what it needs of the config when a model is loaded, and returns what is done to each picture.
Arrays have the names, shapes and values that the transformers library gives for one picture: of its processors on
Pillow all bits; for the two kinds that it has on torch alone (LLaMA 4, LFM2-VL) a pixel may differ by one of 255 where
a picture is resized, because torch rounds its weights for that to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from .. import limits
from ..errors import MediaError, one_of, whole
from . import sizes
from .picture import check_pixels, open_rgb, picture_name
from .sizes import Size
from .steps import (
    Floats,
    Step,
    bfloat16_table,
    centred,
    cropped,
    extent,
    flat_patches,
    fused_table,
    merged_patches,
    on_canvas,
    resized,
    side_by_side,
    squared,
    tiles,
    unchanged,
    value_table,
    values,
)

if TYPE_CHECKING:
    from PIL.Image import Image

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Process: TypeAlias = "Callable[[Image], Arrays]"
BILINEAR, BICUBIC, LANCZOS = 2, 3, 1  # Pillow's numbers
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_SIZE_KEYS = ("height", "width", "shortest_edge", "longest_edge", "max_height", "max_width", "min_pixels", "max_pixels")


def picture_processor(
    config: Mapping[str, Any], tokens: tuple[int | None, int | None] = (None, None)
) -> Callable[[Any], Arrays]:
    """A checkpoint's own treatment of pictures.

    `config` is the content of `preprocessor_config.json` (or of `processor_config.json`, whose `image_processor` is
    taken; Pixtral's `patch_size` and `spatial_merge_size` beside it count). Fields that it lacks have the library's
    defaults. Returns a function of one picture (all that `open_picture` takes) that gives arrays by name:
    `pixel_values` (float32; NumPy shape [n, 3, height, width] or patches) and whatever else tells how it was cut
    (`image_sizes`, `image_grid_thw`, `rows`, `num_patches` ...; int32). Pictures become RGB whatever `do_convert_rgb`
    says. `tokens`: how many tokens of the text a picture has at least and at most (None: as the config says), for
    families that resize a picture within such limits.

    Raises MediaError when the kind of processor is unknown or a field has an impossible value; the function raises it,
    with the picture's name, when it cannot be opened or be treated so.
    """
    settings = _settings(config, tokens)
    process = FAMILIES[settings.kind][0](settings)
    if tokens != (None, None) and not settings.limited:
        text = "the number of a picture's tokens cannot be chosen: no limits are part of its config"
        raise MediaError(f"{settings.kind}: {text}")
    return partial(_processed, process)


def colours_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields `image_mean` and `image_std` of a processor's config, or the defaults of its kind. Raises as
    `picture_processor`."""
    fields = _settings(config, (None, None)).fields
    return {name: fields.get(name) for name in ("image_mean", "image_std")}


def _settings(config: Mapping[str, Any], tokens: tuple[int | None, int | None]) -> Settings:
    nested = config.get("image_processor")
    fields = cast("Mapping[str, Any]", nested) if isinstance(nested, Mapping) else config
    named = fields.get("image_processor_type") or fields.get("feature_extractor_type")
    if not isinstance(named, str):
        raise MediaError("the processor's config has no image_processor_type")
    kind = named.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast").removesuffix("Pil")
    one_of("image_processor_type", kind, FAMILIES, MediaError)
    if kind == "PixtralImageProcessor" and config.get("spatial_merge_size"):  # the library asks its Processor first
        fields = {**fields, **{name: config.get(name) for name in ("patch_size", "spatial_merge_size")}}
    if kind == "MiniCPMVImageProcessor":
        fields = {**fields, **{f"image_{x}": fields[f"norm_{x}"] for x in ("mean", "std") if f"norm_{x}" in fields}}
    return Settings(kind, fields, FAMILIES[kind][1], tokens)


def _processed(process: Process, image: Any) -> Arrays:
    picture = open_rgb(image)
    try:
        return process(picture)
    except MediaError as e:
        raise MediaError(f"{picture_name(image)}: {e}") from e


def listed(value: Any) -> list[Any]:
    """A list of JSON; empty for anything else."""
    return [*cast("list[Any]", value)] if isinstance(value, (list, tuple)) else []


class Settings:
    """The fields of a processor's config, checked as they are read. A field that is missing or null has the family's
    default. All readers raise MediaError."""

    def __init__(
        self,
        kind: str,
        fields: Mapping[str, Any],
        defaults: Mapping[str, Any],
        tokens: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self.kind, self.tokens, self.limited = kind, tokens, False
        self.fields: dict[str, Any] = {**_COMMON, **defaults}
        self.fields.update({name: value for name, value in fields.items() if value is not None})
        self.resample = self.number("resample", 0, 5)  # the number of a filter in Pillow

    def wrong(self, name: str, rule: str) -> MediaError:
        """The error of a field that breaks its rule."""
        return MediaError(f"{self.kind}: {name} must be {rule}, not {self.fields.get(name)!r:.60}")

    def flag(self, name: str) -> bool:
        """A field that is true or false (or missing)."""
        return bool(self.fields.get(name))

    def number(self, name: str, least: int = 1, most: int = 1 << 40) -> int:
        """A whole number."""
        return whole(f"{self.kind}: {name}", self.fields.get(name), least, most, MediaError)

    def within(self, least: int, most: int, unit: int) -> tuple[int, int]:
        """The least and the most pixels of a picture: those of the config, or `unit` of them for each token that the
        user wants (`tokens`). What the config says gives way to what the user wants."""
        self.limited = True
        low, high = self.tokens
        if low is not None and high is not None and low > high:
            raise MediaError(f"{self.kind}: no picture has at least {low} and at most {high} tokens")
        if low is not None:
            least, most = low * unit, max(most, low * unit)
        if high is not None:
            least, most = min(least, high * unit), high * unit
        return least, most

    def tiles(self, name: str) -> int:
        """A number of tiles, at most `limits.PICTURE_TILES`."""
        return self.number(name, 1, limits.PICTURE_TILES)

    def real(self, name: str) -> float:
        """A number above 0."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
            raise self.wrong(name, "a number above 0")
        return float(value)

    def colours(self, name: str) -> tuple[float, ...]:
        """A number for each of the three channels; the config may have one for all."""
        value = self.fields.get(name)
        given = listed(value) or [value] * 3
        if len(given) != 3 or not all(type(x) in (int, float) and -1e9 < x < 1e9 for x in given):
            raise self.wrong(name, "three numbers")
        return tuple(float(x) for x in given)

    def size(self, name: str) -> dict[str, int]:
        """A size by the names of its sides. A pair is (height, width); one number is both, or the shortest edge where
        the family has `default_to_square` false."""
        value = self.fields.get(name)
        sides: Mapping[str, Any] = {}
        if isinstance(value, Mapping):
            sides = cast("Mapping[str, Any]", value)
        elif len(pair := listed(value)) == 2:
            sides = dict(zip(("height", "width"), pair, strict=True))
        elif type(value) is int:
            edge_alone = name == "size" and not self.flag("default_to_square")
            sides = {"shortest_edge": value} if edge_alone else {"height": value, "width": value}
        if not sides:
            raise self.wrong(name, "a size")
        for side in sides:
            one_of(f"a side of {self.kind}: {name}", side, _SIZE_KEYS, MediaError)
        return {side: whole(f"{side} of {self.kind}: {name}", n, 1, 1 << 40, MediaError) for side, n in sides.items()}

    def box(self, name: str) -> Size:
        """A size that must have `height` and `width`."""
        size = self.size(name)
        if not {"height", "width"} <= size.keys():
            raise self.wrong(name, "a size with height and width")
        return size["height"], size["width"]

    def edge(self, name: str) -> int:
        """The `longest_edge` of a size."""
        size = self.size(name)
        if "longest_edge" not in size:
            raise self.wrong(name, "a size with longest_edge")
        return size["longest_edge"]

    def table(self) -> Floats:
        """The number for each channel and pixel value, by `do_rescale` and `do_normalize`."""
        scale = self.real("rescale_factor") if self.flag("do_rescale") else None
        return value_table(scale, *self._mean_std()) if self.flag("do_normalize") else value_table(scale, None, None)

    def torch_table(self, make: Callable[[float, Iterable[float], Iterable[float]], Floats]) -> Floats:
        """As `table`, by `make` when the picture is both scaled and normalised."""
        if not (self.flag("do_rescale") and self.flag("do_normalize")):
            return self.table()
        return make(self.real("rescale_factor"), *self._mean_std())

    def _mean_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        mean, std = self.colours("image_mean"), self.colours("image_std")
        if 0 in std:
            raise self.wrong("image_std", "three numbers that are not 0")
        return mean, std

    def to_size(self) -> Step:
        """Resize by `size`, when `do_resize` says so."""
        if not self.flag("do_resize"):
            return unchanged
        size, resample = self.size("size"), self.resample
        return lambda picture: resized(picture, sizes.sized(extent(picture), size), resample)

    def to_crop(self) -> Step:
        """Keep the middle, when `do_center_crop` says so."""
        if not self.flag("do_center_crop"):
            return unchanged
        crop = self.box("crop_size")
        return lambda picture: centred(picture, crop)


_COMMON: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "default_to_square": True,
    "resample": BICUBIC,
    "image_mean": _CLIP[0],
    "image_std": _CLIP[1],
}


def _ints(*numbers: Any) -> npt.NDArray[np.int32]:
    return np.array(numbers, np.int32)


def plain(s: Settings) -> Process:
    """CLIP, SigLIP, ViT, DINOv2: resize, keep the middle."""
    to_size, to_crop, table = s.to_size(), s.to_crop(), s.table()
    pad = s.box("pad_size") if s.flag("do_pad") and s.fields.get("pad_size") else None

    if pad is not None:
        check_pixels(*pad, "pad_size has")

    def process(picture: Image) -> Arrays:
        made = values([to_crop(to_size(picture))], table)
        if pad is not None:
            below, right = pad[0] - made.shape[2], pad[1] - made.shape[3]
            if below < 0 or right < 0:
                raise MediaError(f"{made.shape[3]} x {made.shape[2]} pixels are more than pad_size has")
            made = np.pad(made, ((0, 0), (0, 0), (0, below), (0, right)))
        return {"pixel_values": made}

    return process


def llava(s: Settings) -> Process:
    """LLaVA: as CLIP, with `do_pad` in a square of the mean colour first."""
    to_size, to_crop, table = s.to_size(), s.to_crop(), s.table()
    colour = [int(x * 255) for x in s.colours("image_mean")] if s.flag("do_pad") else None

    def process(picture: Image) -> Arrays:
        whole_picture = picture if colour is None else squared(picture, colour)
        return {"pixel_values": values([to_crop(to_size(whole_picture))], table)}

    return process


def any_resolution(s: Settings) -> Process:
    """LLaVA-NeXT and OneVision: the picture small and whole, then in tiles, on the canvas of `image_grid_pinpoints`
    that suits it best. `image_sizes` is the picture's own size."""
    to_size, to_crop, table, resample = s.to_size(), s.to_crop(), s.table(), s.resample
    size = s.size("size")
    side = size.get("shortest_edge", 0)
    small = (size["height"], size["width"]) if {"height", "width"} <= size.keys() else (side, side)
    tile = s.box("crop_size")[0] if s.fields.get("crop_size") else small[0]
    if not tile:
        raise s.wrong("size", "a size with height and width, or shortest_edge")
    canvases = _pinpoints(s)
    more = {"batch_num_images": _ints(1)} if s.kind.startswith("LlavaOnevision") else {}

    def process(picture: Image) -> Arrays:
        canvas = sizes.best_canvas(extent(picture), canvases)
        large = on_canvas(resized(picture, sizes.within(extent(picture), canvas), resample), canvas)
        parts = [resized(picture, small, resample), *tiles(large, (tile, tile))]
        made = values(parts, table, lambda part: to_crop(to_size(part)))
        return {"pixel_values": made[None], "image_sizes": _ints(extent(picture)), **more}

    return process


def _pinpoints(s: Settings) -> list[Size]:
    pairs = [listed(pair) for pair in listed(s.fields.get("image_grid_pinpoints"))]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise s.wrong("image_grid_pinpoints", "a list of [height, width]")
    return [(_side(height), _side(width)) for height, width in pairs]


def _side(value: Any) -> int:
    return whole("a side of image_grid_pinpoints", value, 1, 1 << 20, MediaError)


def got_ocr2(s: Settings) -> Process:
    """GotOcr2, InternVL, Aya Vision: with `crop_to_patches` tiles of `size` in the grid of the picture's shape, then
    the whole picture at that size (unless there is one tile). `num_patches` counts both."""
    table, resample, most = s.table(), s.resample, s.tiles("max_patches")
    if not s.flag("crop_to_patches") or most == 1:
        to_size = s.to_size()
        one = {"num_patches": _ints(1), "rows": _ints(1), "cols": _ints(1)}
        return lambda picture: {"pixel_values": values([to_size(picture)], table), **one}
    tile = s.box("size")
    arrangements = sizes.grids(s.tiles("min_patches"), most)

    def process(picture: Image) -> Arrays:
        rows, columns = sizes.nearest_grid(extent(picture), tile, arrangements)
        parts = tiles(resized(picture, (tile[0] * rows, tile[1] * columns), resample), tile)
        if len(parts) > 1:
            parts.append(resized(picture, tile, resample))
        return {
            "pixel_values": values(parts, table),
            "num_patches": _ints(len(parts)),
            "rows": _ints(rows),
            "cols": _ints(columns),
        }

    return process


def gemma3(s: Settings) -> Process:
    """Gemma 3: the picture at one size; with `do_pan_and_scan` parts of a long one follow. `num_crops` counts them."""
    to_size, table = s.to_size(), s.table()
    scan = s.flag("do_pan_and_scan")
    least, most = s.number("pan_and_scan_min_crop_size"), s.tiles("pan_and_scan_max_num_crops")
    ratio = s.real("pan_and_scan_min_ratio_to_activate")

    def process(picture: Image) -> Arrays:
        height, width = extent(picture)
        rows, columns = sizes.pan_and_scan((height, width), least, most, ratio) if scan else (0, 0)
        crops = tiles(picture, (-(-height // rows), -(-width // columns))) if rows else []
        made = values([picture, *crops], table, to_size)
        return {"pixel_values": made, "num_crops": _ints(len(crops)), "rows": _ints(rows), "cols": _ints(columns)}

    return process


def pixtral(s: Settings) -> Process:
    """Pixtral, Mistral 3: within the longest edge, in whole patches (as the tower merges them: `patch_size` times
    `spatial_merge_size`). `image_sizes` is the size that results."""
    to_crop, table, resample, merge = s.to_crop(), s.table(), s.resample, s.number("spatial_merge_size")
    patch = (s.box("patch_size")[0] * merge, s.box("patch_size")[1] * merge)
    size = s.size("size")
    edge = size.get("longest_edge")
    longest = (edge, edge) if edge else s.box("size")
    resize = s.flag("do_resize")

    def process(picture: Image) -> Arrays:
        if resize:
            picture = resized(picture, sizes.patch_multiple(extent(picture), longest, patch), resample)
        picture = to_crop(picture)
        return {"pixel_values": values([picture], table), "image_sizes": _ints(extent(picture))}

    return process


def idefics3(s: Settings) -> Process:
    """Idefics3, SmolVLM: split into square tiles when it is larger than one, the whole picture at a tile's size last.
    `rows` and `cols` are the grid, 0 when it is one tile."""
    table, resample, tile = s.table(), s.resample, s.edge("max_image_size")
    size = s.size("size") if s.flag("do_resize") else {}
    edge, box = size.get("longest_edge"), s.box("size") if size and "longest_edge" not in size else None
    split, pad = s.flag("do_image_splitting"), s.flag("do_pad")

    def process(picture: Image) -> Arrays:
        if edge is not None or box is not None:
            wanted = box if edge is None else sizes.longest_edge(extent(picture), edge)
            assert wanted is not None
            picture = resized(picture, wanted, resample)
        rows = columns = 0
        if not split:
            parts = [resized(picture, (tile, tile), resample)]
        else:
            picture = resized(picture, sizes.tile_multiple(extent(picture), tile), resample)
            parts = tiles(picture, (tile, tile))
            if len(parts) > 1:
                rows, columns = picture.height // tile, picture.width // tile
                parts.append(resized(picture, (tile, tile), resample))
        made: Arrays = {"pixel_values": values(parts, table)[None]}
        if pad:
            made["pixel_attention_mask"] = np.ones((1, len(parts), tile, tile), np.int32)
        return {**made, "rows": _ints([rows]), "cols": _ints([columns])}

    return process


def qwen2_vl(s: Settings) -> Process:
    """Qwen2-VL to Qwen3-VL, GLM-4V: smart resize, then patches. `image_grid_thw` is frames, lines and columns of
    patches."""
    table, resample, resize = s.table(), s.resample, s.flag("do_resize")
    patch, merge, frames = s.number("patch_size"), s.number("merge_size"), s.number("temporal_patch_size")
    size = s.size("size")
    least = s.number("min_pixels") if s.fields.get("min_pixels") else size.get("shortest_edge", size.get("min_pixels"))
    most = s.number("max_pixels") if s.fields.get("max_pixels") else size.get("longest_edge", size.get("max_pixels"))
    if least is None or most is None:
        raise s.wrong("size", "a size with shortest_edge and longest_edge")
    counted = frames if s.kind.startswith("Glm") else 1
    unit = patch * merge
    least, most = s.within(least, most, unit**2 * counted)

    def process(picture: Image) -> Arrays:
        if resize:
            picture = resized(picture, sizes.smart(extent(picture), unit, least, most, counted), resample)
        _check_multiple(picture, unit)
        check_pixels(picture.height * frames, picture.width, "its processor makes of it")
        made = merged_patches(values([picture], table)[0], patch, merge, frames)
        return {
            "pixel_values": made,
            "image_grid_thw": _ints([1, picture.height // patch, picture.width // patch]),
        }

    return process


def _check_multiple(picture: Image, unit: int) -> None:
    if picture.height % unit or picture.width % unit:
        raise MediaError(
            f"without do_resize its sides must be multiples of {unit}, not {picture.width} x {picture.height}"
        )


def llama4(s: Settings) -> Process:
    """LLaMA 4: square tiles on the canvas that suits the picture, which lies at its top left; then the whole picture as
    a tile (unless there is one). `aspect_ratios` is the grid: rows, columns."""
    table, resample, box, most = s.torch_table(bfloat16_table), s.resample, s.box("size"), s.tiles("max_patches")
    enlarge = s.flag("resize_to_max_canvas")
    if box[0] != box[1]:
        raise s.wrong("size", "a square")
    if not s.flag("do_resize"):
        raise s.wrong("do_resize", "true")

    def process(picture: Image) -> Arrays:
        canvas = sizes.llama4_canvas(extent(picture), box[0], most, enlarge)
        size = sizes.llama4_size(extent(picture), canvas, box[0], enlarge)
        parts = tiles(cropped(resized(picture, size, resample), 0, 0, canvas), box)
        if len(parts) > 1:
            parts.append(resized(picture, box, resample))
        grid = [canvas[0] // box[0], canvas[1] // box[1]]
        return {"pixel_values": values(parts, table), "aspect_ratios": _ints(grid)}

    return process


def lfm2_vl(s: Settings) -> Process:
    """LFM2-VL: smart resize, or tiles and a thumbnail when the picture is large; patches, padded with 0 to one number.
    `spatial_shapes` has the lines and columns of patches of each tile, `image_sizes` the size of the thumbnail."""
    table, resample = s.torch_table(fused_table), s.resample
    patch, unit = s.number("encoder_patch_size"), s.number("encoder_patch_size") * s.number("downsample_factor")
    least, most = (s.number(name) * unit**2 for name in ("min_image_tokens", "max_image_tokens"))
    least, most = s.within(least, most, unit**2)
    split, tile = s.flag("do_image_splitting"), s.number("tile_size")
    fewest, largest = s.tiles("min_tiles"), s.tiles("max_tiles")
    if split and fewest > largest:
        raise s.wrong("min_tiles", "at most max_tiles")
    if tile % patch:
        raise s.wrong("tile_size", "a multiple of encoder_patch_size")
    arrangements = sizes.grids_of_lfm2(fewest, largest)
    split = split and (fewest, largest) != (1, 1)
    tolerance, thumbnail, pad = s.real("max_pixels_tolerance"), s.flag("use_thumbnail"), s.flag("do_pad")
    length = max(most // patch**2, (tile // patch) ** 2 if s.flag("do_image_splitting") else 0)

    def process(picture: Image) -> Arrays:
        small = sizes.smart_tokens(extent(picture), unit, least, most)
        high, wide = (max(patch, round(side / unit) * unit) for side in extent(picture))
        rows = columns = 1
        if split and high * wide > most * tolerance:
            rows, columns = sizes.nearest_grid(extent(picture), (tile, tile), arrangements)
            parts = tiles(resized(picture, (tile * rows, tile * columns), resample), (tile, tile))
            if thumbnail and len(parts) > 1:
                parts.append(resized(picture, small, resample))
        else:
            parts = [resized(picture, small, resample)]
        made = [flat_patches(values([part], table)[0], patch) for part in parts]
        found: Arrays = {}
        if pad:
            missing = [length - len(patches) for patches in made]
            if min(missing) < 0:
                raise MediaError(f"it is too narrow: {small[1]} x {small[0]} pixels are more than {length} patches")
            check_pixels(len(parts) * length * patch, patch, "its processor makes of it")
            found["pixel_attention_mask"] = _ints(*[[1] * (length - n) + [0] * n for n in missing])
            found["spatial_shapes"] = _ints(*[[part.height // patch, part.width // patch] for part in parts])
            made = [np.pad(patches, ((0, n), (0, 0))) for patches, n in zip(made, missing, strict=True)]
        grid = {"image_rows": _ints(rows), "image_cols": _ints(columns), "image_sizes": _ints(small)}
        return {"pixel_values": np.stack(made), **found, **grid}

    return process


def minicpm_v(s: Settings) -> Process:
    """MiniCPM-V: the whole picture, then slices of it when it is large; their patches in one line. `grids` is rows and
    columns of slices (0, 0 when there are none), `target_sizes` the lines and columns of patches of each. The tower of
    4.6 makes features of squares of patches, so sides are multiples of those; in 2.6 they are whole patches."""
    table, resample, resize = s.table(), s.resample, s.flag("do_resize")
    most, edge, patch = s.tiles("max_slice_nums"), s.number("scale_resolution"), s.number("patch_size")
    merge = 2 if s.fields.get("downsample_mode") == "4x" else 4
    unit = patch * (merge if s.kind == "MiniCPMV4_6ImageProcessor" else 1)
    cut = s.flag("slice_mode")

    def process(picture: Image) -> Arrays:
        size = extent(picture)
        grid = sizes.minicpm_grid(size, most, edge) if cut else (0, 0)
        parts = [picture]
        if resize:
            parts = [resized(picture, sizes.minicpm_size(size, edge, unit, enlarge=grid == (0, 0)), resample)]
        if grid != (0, 0):
            large = resized(picture, sizes.minicpm_slices(size, grid, edge, unit), resample) if resize else picture
            parts += tiles(large, (large.height // grid[0], large.width // grid[1]))
        for part in parts:
            _check_multiple(part, patch)
        made = [side_by_side(values([part], table)[0], patch) for part in parts]
        return {
            "pixel_values": np.concatenate(made, axis=-1)[None],
            "target_sizes": _ints(*[[part.height // patch, part.width // patch] for part in parts]),
            "grids": _ints(grid),
            "num_patches_per_image": _ints(len(parts)),
        }

    return process


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


_HALVES = {"image_mean": _HALF[0], "image_std": _HALF[1]}
_CROPPED = {
    "size": {"shortest_edge": 224},
    "default_to_square": False,
    "do_center_crop": True,
    "crop_size": _square(224),
}
_ANY_NEXT = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_ANY_ONEVISION = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
_SPLIT = {
    **_HALVES,
    "size": {"longest_edge": 1456},
    "max_image_size": {"longest_edge": 364},
    "resample": LANCZOS,
    "do_image_splitting": True,
    "do_pad": True,
}
_PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "default_to_square": False}
_GLM4V = {**_PATCHES, "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}}

# Kind of processor: its family, and the defaults of fields that a config may lack
FAMILIES: dict[str, tuple[Callable[[Settings], Process], dict[str, Any]]] = {
    "CLIPImageProcessor": (plain, _CROPPED),
    "BitImageProcessor": (plain, _CROPPED),
    "SiglipImageProcessor": (plain, {**_HALVES, "size": _square(224), "default_to_square": False}),
    "ViTImageProcessor": (plain, {**_HALVES, "size": _square(224), "resample": BILINEAR}),
    "LlavaImageProcessor": (llava, _CROPPED),
    "LlavaNextImageProcessor": (any_resolution, {**_CROPPED, "image_grid_pinpoints": _ANY_NEXT}),
    "LlavaOnevisionImageProcessor": (
        any_resolution,
        {"size": _square(384), "default_to_square": False, "image_grid_pinpoints": _ANY_ONEVISION},
    ),
    "GotOcr2ImageProcessor": (got_ocr2, {"size": _square(384), "min_patches": 1, "max_patches": 12}),
    "Gemma3ImageProcessor": (
        gemma3,
        {
            **_HALVES,
            "size": _square(224),
            "resample": BILINEAR,
            "pan_and_scan_min_crop_size": 256,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
    ),
    "PixtralImageProcessor": (
        pixtral,
        {"size": {"longest_edge": 1024}, "patch_size": _square(16), "spatial_merge_size": 1},
    ),
    "Idefics3ImageProcessor": (idefics3, _SPLIT),
    "SmolVLMImageProcessor": (idefics3, _SPLIT),
    "Qwen2VLImageProcessor": (
        qwen2_vl,
        {**_PATCHES, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
    ),
    "Glm4vImageProcessor": (qwen2_vl, _GLM4V),
    "Glm46VImageProcessor": (qwen2_vl, _GLM4V),
    "Llama4ImageProcessor": (llama4, {**_HALVES, "size": _square(336), "resample": BILINEAR, "max_patches": 16}),
    "Lfm2VlImageProcessor": (
        lfm2_vl,
        {
            **_HALVES,
            "resample": BILINEAR,
            "downsample_factor": 2,
            "do_image_splitting": True,
            "min_tiles": 2,
            "max_tiles": 10,
            "use_thumbnail": True,
            "min_image_tokens": 64,
            "max_image_tokens": 256,
            "encoder_patch_size": 16,
            "tile_size": 512,
            "max_pixels_tolerance": 2.0,
            "do_pad": True,
        },
    ),
    "MiniCPMVImageProcessor": (
        minicpm_v,
        {**_HALVES, "max_slice_nums": 9, "scale_resolution": 448, "patch_size": 14, "slice_mode": True},
    ),
    "MiniCPMV4_6ImageProcessor": (
        minicpm_v,
        {
            **_HALVES,
            "max_slice_nums": 9,
            "scale_resolution": 448,
            "patch_size": 14,
            "slice_mode": True,
            "downsample_mode": "16x",
        },
    ),
}
