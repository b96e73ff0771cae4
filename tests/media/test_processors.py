"""Processors: what the transformers library makes of the same pictures, to the bit; configs that make no sense."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml import MediaError
from pyggml.media import picture_processor
from pyggml.media.sizes import grids_of_lfm2

from ..pillow import of_pillow_13
from .library import FILE, cases, checksums, picture

pytest.importorskip("PIL")
OWN = ("features", "embedding", "ids", "logits")


def processor(kind: str, **fields: Any) -> Any:
    return picture_processor({"image_processor_type": f"{kind}ImageProcessor", **fields})


@of_pillow_13
def test_checkpoints(shared: Path) -> None:
    """The two pictures of mm.npz: names, shapes, types and all bits, for the 20 checkpoints that see."""
    folder, seen = shared / "golden" / "mm", 0
    with np.load(folder / "mm.npz") as golden:
        for file in sorted(folder.glob("*/preprocessor_config.json")):
            config = json.loads(file.read_text())
            if "image_processor_type" not in config:
                continue
            seen += 1
            process = picture_processor(config)
            for i, image in enumerate(("wide.png", "tall.png")):
                made = process(folder / "images" / image)
                prefix = f"{file.parent.name}/{i}/"
                for key in golden.files:
                    name = key.removeprefix(prefix)
                    if name != key and name not in OWN:
                        np.testing.assert_array_equal(made[name], golden[key], key, strict=True)
    assert seen == 20


@of_pillow_13
def test_library() -> None:
    """Pictures of odd sizes by many configs. What the library refuses is a MediaError."""
    for (kind, fields, size), want in zip(cases(), json.loads(FILE.read_text()), strict=True):
        process, image = processor(kind, **fields), picture(size)
        if want is None:
            with pytest.raises(MediaError, match=re.escape(f"array of uint8 [{size[0]}, {size[1]}, 3]")):
                process(image)
        else:
            made = process(image)
            assert made["pixel_values"].dtype == np.float32
            got = checksums(made)
            assert {name: got[name] for name in want} == want, (kind, fields, size)


@pytest.mark.parametrize(
    ("size", "grid"),
    [((1, 1), [1, 1]), ((480, 640), [2, 2]), ((900, 350), [3, 2]), ((1080, 1920), [3, 5]), ((1, 1000), [1, 3])],
)
def test_llama4(size: tuple[int, int], grid: list[int]) -> None:
    """The grid of the library (it needs torch for this kind), the picture top left, black beyond it; values are
    bfloat16."""
    made = processor("Llama4")(np.full((*size, 3), 255, np.uint8))
    assert made["aspect_ratios"].tolist() == [grid]
    n = grid[0] * grid[1]
    assert made["pixel_values"].shape == (n + (n > 1), 3, 336, 336)
    assert made["pixel_values"][0, 0, 0, 0] == 1 and made["pixel_values"][n - 1, 0, -1, -1] in (-1, 1)
    grey = processor("Llama4")(np.full((336, 336, 3), 100, np.uint8))["pixel_values"]
    assert not (grey.view(np.uint32) & 0xFFFF).any() and abs(grey[0, 0, 0, 0] - (200 / 255 - 1)) < 2e-3


def test_lfm2_vl() -> None:
    """A small picture is one tile, a large one tiles and a thumbnail; patches are padded and masked."""
    made = processor("Lfm2Vl", return_row_col_info=True)(picture((333, 217)))
    assert made["pixel_values"].shape == (1, 1024, 768) and made["image_sizes"].tolist() == [[320, 224]]
    assert made["spatial_shapes"].tolist() == [[20, 14]] and made["pixel_attention_mask"].sum() == 280
    assert not made["pixel_values"][0, 280:].any()
    made = processor("Lfm2Vl")(picture((1080, 1920)))
    assert made["image_rows"].tolist() == [2] and made["image_cols"].tolist() == [4]
    assert made["pixel_values"].shape == (9, 1024, 768)
    assert made["spatial_shapes"].tolist() == [[32, 32]] * 8 + [[24, 42]]
    with pytest.raises(MediaError, match=r"it is too narrow: .* more than 1024 patches"):
        processor("Lfm2Vl")(np.zeros((1, 20000, 3), np.uint8))
    whole = processor("Lfm2Vl", do_image_splitting=False, do_pad=False)(np.full((64, 64, 3), 255, np.uint8))
    np.testing.assert_allclose(whole["pixel_values"], 1, atol=1e-6)


def test_names() -> None:
    """Processors on torch, old feature extractors and nested configs are the same kinds."""
    want = processor("CLIP")(picture((3, 7)))["pixel_values"]
    for config in (
        {"image_processor_type": "CLIPImageProcessorFast"},
        {"feature_extractor_type": "CLIPFeatureExtractor", "size": None},
        {"image_processor": {"image_processor_type": "CLIPImageProcessorPil"}, "processor_class": "CLIPProcessor"},
    ):
        assert np.array_equal(picture_processor(config)(picture((3, 7)))["pixel_values"], want)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("Clip", {}, "image_processor_type must be one of CLIPImageProcessor.*not 'ClipImageProcessor'"),
        ("CLIP", {"size": {"shortest": 4}}, "a side of CLIPImageProcessor: size must be one of"),
        ("CLIP", {"size": {"shortest_edge": 0}}, "shortest_edge of CLIPImageProcessor: size must be a whole number"),
        ("CLIP", {"size": "large"}, "size must be a size, not 'large'"),
        ("CLIP", {"crop_size": {"shortest_edge": 4}}, "crop_size must be a size with height and width"),
        ("CLIP", {"image_std": [1, 0, 1]}, "image_std must be three numbers that are not 0"),
        ("CLIP", {"image_mean": [1, "0", 1]}, "image_mean must be three numbers"),
        ("CLIP", {"image_mean": [0.5]}, "image_mean must be three numbers"),
        ("CLIP", {"image_mean": float("nan")}, "image_mean must be three numbers"),
        ("CLIP", {"rescale_factor": "1"}, "rescale_factor must be a number above 0"),
        ("CLIP", {"resample": 6}, "resample must be a whole number from 0 to 5"),
        ("Qwen2VL", {"patch_size": 0}, "patch_size must be a whole number"),
        ("Qwen2VL", {"size": {"height": 4, "width": 4}}, "size must be a size with shortest_edge and longest_edge"),
        ("Idefics3", {"max_image_size": {"height": 4, "width": 4}}, "must be a size with longest_edge"),
        ("LlavaNext", {"image_grid_pinpoints": []}, "image_grid_pinpoints must be a list"),
        ("LlavaNext", {"image_grid_pinpoints": [[1, 2, 3]]}, "image_grid_pinpoints must be a list"),
        ("LlavaNext", {"image_grid_pinpoints": [[0, 2]]}, "a side of image_grid_pinpoints"),
        ("Llama4", {"size": {"height": 4, "width": 5}}, "size must be a square"),
        ("Llama4", {"do_resize": False}, "do_resize must be true"),
        ("Lfm2Vl", {"tile_size": 500}, "tile_size must be a multiple of encoder_patch_size"),
        ("GotOcr2", {"max_patches": 1 << 30}, "max_patches must be a whole number from 1 to 1024"),
        ("ViT", {"do_pad": True, "pad_size": 1 << 20}, "pad_size has 1048576 x 1048576 pixels, more than"),
        ("Lfm2Vl", {"min_tiles": 11}, "min_tiles must be at most max_tiles"),
    ],
)
def test_bad_configs(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MediaError, match=message):
        processor(kind, **fields)


def test_no_kind() -> None:
    with pytest.raises(MediaError, match="no image_processor_type"):
        picture_processor({"size": 224})


def test_pictures_that_do_not_fit() -> None:
    """What a config cannot treat is named with the picture, and nothing enormous is made of a thin one."""
    with pytest.raises(MediaError, match=r"picture in an array of uint8 \[1, 2000000, 3\]: its processor makes it"):
        processor("CLIP")(np.zeros((1, 2000000, 3), np.uint8))
    with pytest.raises(MediaError, match="its processor makes it 20000 x 20000 pixels, more than"):
        processor("Llava", do_pad=True)(np.zeros((1, 20000, 3), np.uint8))
    with pytest.raises(MediaError, match="multiples of 28, not 30 x 56"):
        processor("Qwen2VL", do_resize=False)(np.zeros((56, 30, 3), np.uint8))
    with pytest.raises(MediaError, match="more than pad_size has"):
        processor("ViT", do_pad=True, pad_size=[4, 4])(np.zeros((5, 5, 3), np.uint8))
    with pytest.raises(MediaError, match="tiles of several sizes"):
        processor("LlavaNext", do_resize=False, do_center_crop=False, image_grid_pinpoints=[[300, 300]])(
            np.zeros((5, 5, 3), np.uint8)
        )


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("CLIP", {"size": 1 << 30}, "it 1610612736 x 1073741824 pixels"),
        ("CLIP", {"crop_size": 1 << 30}, "it 1073741824 x 1073741824 pixels"),
        ("LlavaNext", {"image_grid_pinpoints": [[1 << 20, 1 << 20]]}, "pixels, more than"),
        ("LlavaNext", {"crop_size": 1}, "cuts it into .* tiles, more than pyggml.limits.PICTURE_TILES"),
        ("LlavaNext", {"size": 3000, "crop_size": 64, "do_center_crop": False}, "makes of it 3000 x .* pixels"),
        ("Idefics3", {"max_image_size": {"longest_edge": 1}}, "cuts it into .* tiles"),
        ("Llama4", {"size": 1 << 20}, "pixels, more than"),
        ("Qwen2VL", {"temporal_patch_size": 1 << 20}, "makes of it .* pixels, more than"),
        ("Lfm2Vl", {"max_image_tokens": 1 << 30}, "makes of it .* pixels, more than"),
        ("MiniCPMV4_6", {"scale_resolution": 1 << 20}, "pixels, more than"),
    ],
)
def test_configs_that_ask_for_too_much(kind: str, fields: dict[str, Any], message: str) -> None:
    """A config from a stranger takes no gigabytes: it is refused before anything so large is made."""
    with pytest.raises(MediaError, match=f"array of uint8 .*{message}"):
        processor(kind, **fields)(np.zeros((40, 60, 3), np.uint8))


def test_mistral3() -> None:
    """Sides are multiples of the patches that the tower merges, when processor_config.json says how many it merges."""
    image = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 98}, "patch_size": 16}
    for config in (
        {**image, "patch_size": 14, "spatial_merge_size": 2},
        {"image_processor": image, "patch_size": 14, "spatial_merge_size": 2},
    ):
        assert picture_processor(config)(picture((333, 217)))["image_sizes"].tolist() == [[112, 84]]


def test_grids_of_lfm2() -> None:
    """The library's own way to its list, with each grid added again and again."""
    for least, most in ((2, 10), (1, 1), (1, 6), (3, 17), (4, 9)):
        many = (
            (w, h)
            for n in range(least, most + 1)
            for w in range(1, n + 1)
            for h in range(1, n + 1)
            if least <= w * h <= most
        )
        want = sorted(set(many), key=lambda grid: grid[0] * grid[1])
        assert [(columns, rows) for rows, columns in grids_of_lfm2(least, most)] == want


@pytest.mark.parametrize(
    ("kind", "fields", "unit"),
    [
        ("Qwen2VLImageProcessor", {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}, 28),
        ("Qwen2VLImageProcessor", {"min_pixels": 3136, "max_pixels": 12845056}, 28),
        ("Glm4vImageProcessor", {}, 28),
        ("Lfm2VlImageProcessor", {"do_image_splitting": False}, 32),
    ],
)
def test_as_many_tokens_as_someone_wants(kind: str, fields: dict[str, Any], unit: int) -> None:
    picture = np.zeros((300, 500, 3), np.uint8)

    def tokens(*limits: int | None) -> int:
        made = picture_processor({"image_processor_type": kind, **fields}, (limits[0], limits[1]))(picture)
        h, w = made["image_grid_thw"][0, 1:] if "image_grid_thw" in made else made["spatial_shapes"][0]
        return int(h * w) // 4

    usual = tokens(None, None)
    assert usual == tokens(1, 4000)
    assert 8 <= tokens(None, 20) <= 20 < usual < 900 <= tokens(900, 1000) <= 1000
    with pytest.raises(MediaError, match="no picture has at least 30 and at most 20 tokens"):
        tokens(30, 20)


def test_tokens_of_families_without_limits() -> None:
    with pytest.raises(MediaError, match="CLIPImageProcessor: the number of a picture's tokens cannot be chosen"):
        picture_processor({"image_processor_type": "CLIPImageProcessor"}, (None, 20))
