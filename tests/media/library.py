"""What the transformers library makes of pictures of odd sizes, as checksums: `python -m tests.media.library` writes
library.json (transformers and Pillow must be there). test_processors.py compares."""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("library.json")
SIZES = [(1, 1), (1, 1000), (1000, 1), (3, 7), (480, 640), (333, 217), (1000, 37)]
LARGE = (1080, 1920)  # with the defaults alone

HW = {"height": 64, "width": 96}
MODULES = {
    "CLIP": "clip",
    "Bit": "bit",
    "Siglip": "siglip",
    "ViT": "vit",
    "Llava": "llava",
    "LlavaNext": "llava_next",
    "LlavaOnevision": "llava_onevision",
    "GotOcr2": "got_ocr2",
    "Gemma3": "gemma3",
    "Pixtral": "pixtral",
    "Idefics3": "idefics3",
    "SmolVLM": "smolvlm",
    "Qwen2VL": "qwen2_vl",
    "Glm4v": "glm4v",
    "Glm46V": "glm46v",
    "MiniCPMV4_6": "minicpmv4_6",
}
_SCAN = {"do_pan_and_scan": True, "pan_and_scan_min_ratio_to_activate": 1.1}
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "CLIP": [
        {"size": 64, "crop_size": 96},
        {"size": {"shortest_edge": 64, "longest_edge": 100}},
        {"size": {"max_height": 50, "max_width": 70}, "do_center_crop": False},
        {"do_resize": False, "do_rescale": False},
        {"do_normalize": False, "resample": 1},
        {"image_mean": 0.4, "image_std": 0.3, "rescale_factor": 1 / 127.5, "size": [33, 57], "crop_size": [31, 65]},
        {"do_center_crop": False, "size": HW, "do_pad": True, "pad_size": {"height": 70, "width": 99}, "resample": 0},
    ],
    "Siglip": [{"size": 64}],
    "ViT": [{"size": 64}, {"size": HW, "resample": 5}],
    "Llava": [{"do_pad": True}, {"do_pad": True, "size": HW, "do_center_crop": False}],
    "LlavaNext": [
        {"size": {"shortest_edge": 70}, "crop_size": HW, "image_grid_pinpoints": [[64, 128], [128, 64], [192, 64]]},
        {"size": {"height": 64, "width": 64}, "crop_size": [64, 64], "image_grid_pinpoints": [[64, 128], [128, 128]]},
    ],
    "LlavaOnevision": [{"size": {"height": 64, "width": 64}, "image_grid_pinpoints": [[64, 128], [320, 320]]}],
    "GotOcr2": [
        {"crop_to_patches": True, "size": 128},
        {"crop_to_patches": True, "min_patches": 3, "max_patches": 7, "size": HW},
        {"crop_to_patches": True, "max_patches": 1},
    ],
    "Gemma3": [
        {**_SCAN, "pan_and_scan_min_crop_size": 256, "pan_and_scan_max_num_crops": 4, "size": 32},
        {**_SCAN, "pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 9, "size": HW},
    ],
    "Pixtral": [
        {"size": {"longest_edge": 96}, "patch_size": 14},
        {"size": HW, "patch_size": {"height": 8, "width": 16}, "do_center_crop": True, "crop_size": HW},
    ],
    "Idefics3": [
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}},
        {"do_image_splitting": False, "size": {"longest_edge": 300}, "max_image_size": {"longest_edge": 40}},
        {"size": HW, "max_image_size": {"longest_edge": 40}, "do_pad": False},
    ],
    "Qwen2VL": [
        {"min_pixels": 4096, "max_pixels": 16384},
        {"patch_size": 16, "merge_size": 3, "temporal_patch_size": 1},
        {"do_normalize": False, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
    ],
    "Glm4v": [{"size": {"shortest_edge": 8192, "longest_edge": 32768}, "patch_size": 16}],
    "MiniCPMV4_6": [
        {"downsample_mode": "4x", "max_slice_nums": 4, "scale_resolution": 100},
        {"slice_mode": False, "scale_resolution": 100},
    ],
}


def cases() -> list[tuple[str, dict[str, Any], tuple[int, int]]]:
    """(kind, fields of its config, size of the picture)."""
    found = [(kind, {}, size) for kind in MODULES for size in (SIZES[0], SIZES[3], LARGE)]
    return found + [(kind, config, size) for kind in CONFIGS for config in CONFIGS[kind] for size in SIZES]


def picture(size: tuple[int, int]) -> np.ndarray:
    """Random pixels: uint8 [height, width, 3]."""
    return np.random.default_rng(size).integers(0, 256, (*size, 3), dtype=np.uint8)


def checksums(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Shape and checksum of each array; integers as int32."""
    found: dict[str, Any] = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        array = np.ascontiguousarray(array, np.float32 if name == "pixel_values" else np.int32)
        found[name] = [list(array.shape), zlib.crc32(array.tobytes())]
    return found


def main() -> None:
    """Write library.json: for each case the checksums, or null when the library refuses the picture."""
    made: list[dict[str, Any] | None] = []
    for kind, config, size in cases():
        module = importlib.import_module(f"transformers.models.{MODULES[kind]}.image_processing_pil_{MODULES[kind]}")
        more = {"return_row_col_info": True} if kind in ("Idefics3", "SmolVLM") else {}
        try:
            processor = getattr(module, f"{kind}ImageProcessorPil")(**config)
            made.append(
                checksums(processor(picture(size), input_data_format="channels_last", return_tensors="np", **more))
            )
        except ValueError:
            made.append(None)
    FILE.write_text("[\n" + ",\n".join(json.dumps(one) for one in made) + "\n]\n")


if __name__ == "__main__":
    main()
