"""The towers of LLaMA 4, LFM2-VL, MiniCPM-V and Ultravox: features against the transformers library's (float64)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.errors import ModelError, ShapeError
from pyggml.hf.towers.mmproj import write_mmproj
from pyggml.llm.picture import processor_config
from pyggml.llm.tower import LoadedTower, open_tower_of
from pyggml.media import picture_processor

from .other_towers import CONFIGS, inputs, written

Array = np.ndarray[Any, np.dtype[Any]]
SIZES = {"lfm2_vl": "spatial_shapes", "minicpmv4_6": "target_sizes"}


def nmse(a: Array, b: Array) -> float:
    assert a.shape == b.shape
    return float(((a - b) ** 2).sum() / (b**2).sum())


def opened(path: Path, name: str) -> LoadedTower:
    side = "audio" if name.startswith("ultravox") else "vision"
    found = open_tower_of(str(path), str(path) if path.is_file() else None, side)
    assert found is not None and found.weights.unused == []
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_features(name: str, tmp_path: Path) -> None:
    """Of the folder, and of the mmproj file made of it."""
    want = written(tmp_path, name)
    assert nmse(opened(tmp_path, name).encode(inputs(name)).features.rows, want) < 1e-11
    file = tmp_path / "mmproj.gguf"
    _, known = write_mmproj(tmp_path, file)
    tower = opened(file, name)
    assert known and nmse(tower.encode(inputs(name)).features.rows, want) < 1e-11
    if not name.startswith("ultravox"):
        made = picture_processor(processor_config(tower))(np.zeros((60, 50, 3), np.uint8))
        assert made["pixel_values"].size


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_do_not_fit(name: str, tmp_path: Path) -> None:
    written(tmp_path, name)
    tower, given, key = opened(tmp_path, name), inputs(name), SIZES[name]
    sizes = given[key]
    for wrong, error in (
        (sizes + 1, "tiles must be of squares"),
        (sizes * 0, "tiles must be of squares"),
        (sizes * 2, "where pixel_values has"),
        (None, f"reads {key}"),
    ):
        arrays = {k: v for k, v in {**given, key: wrong}.items() if v is not None}
        with pytest.raises(ShapeError, match=error):
            tower.encode(arrays)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("minicpmv4_6", {"insert_layer_id": 3}, "wa_layer_indexes is 3: there are 3 layers"),
        ("minicpmv4_6", {"merger_times": 2}, "merger_times"),
        ("minicpmv4_6", {"merge_kernel_size": [4, 4]}, "only squares of 2 x 2"),
        ("lfm2_vl", {"vision_feature_layer": -2}, "vision_feature_layer"),
        ("ultravox", {"projector_act": "gelu"}, "only swiglu is supported"),
        ("ultravox", {"stack_factor": 21}, "20 states make no such groups"),
    ],
)
def test_configs_of_other_towers(
    name: str, change: dict[str, Any], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, name, {**CONFIGS[name], **change})
    written(tmp_path, name)
    with pytest.raises(ModelError, match=error):
        opened(tmp_path, name)
