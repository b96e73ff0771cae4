"""Towers of folders as mmproj files: keys and tensors against llama.cpp's files, features against the folder's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from pyggml.tools.cli import main

import pyggml as gg
from pyggml.dtypes import DType
from pyggml.errors import DTypeError, GGUFError, ModelError
from pyggml.gguf_io.read import open_gguf
from pyggml.hf.towers.mmproj import write_mmproj
from pyggml.llm.picture import sight_of
from pyggml.llm.tower import open_tower_of

from ..conftest import shared_dir
from ..media_model import copy_mmproj

MM = shared_dir() / "golden" / "mm"
pytestmark = pytest.mark.skipif(not MM.is_dir(), reason=f"no golden data in {MM}")
GOLDEN = ("glm4v", "idefics3", "qwen2-5-vl", "qwen3-vl", "smolvlm")
ENCODERS = ("clip", "siglip", "dinov2", "vit")
UNKNOWN = ("aya-vision", "paligemma", *ENCODERS)  # llama.cpp has no projector for them
KNOWN = (
    *("gemma3", "internvl", "llava-clip", "llava-next", "llava-onevision", "llava-siglip", "mistral3", "pixtral"),
    *("qwen2-vl", "qwen2-audio", "voxtral", *GOLDEN),
)
PICTURE = MM / "images" / "tall.png"


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in args])
    return int(e.value.code or 0)


def features(name: str, mmproj: Path | None) -> Any:
    """Of a picture, or a sound."""
    if name in ENCODERS:
        tower = open_tower_of(
            str(MM / name if mmproj is None else mmproj), None if mmproj is None else str(mmproj), "vision"
        )
        assert tower is not None

        class Encoder:
            image_tokens = None, None
            path, watches = tower.path, tower.watches

        return sight_of(Encoder(), tower).encode(PICTURE)  # pyright: ignore[reportArgumentType]
    with gg.load_model(MM / name, repack=False, mmproj=mmproj) as model:
        if name in ("qwen2-audio", "voxtral"):
            return model.sound_features(np.sin(np.arange(40000, dtype=np.float32) / 7))
        return model.picture_features(PICTURE)


@pytest.mark.parametrize("name", GOLDEN)
def test_as_llama_cpp_writes_it(name: str, tmp_path: Path) -> None:
    """All tensors and keys of llama.cpp's file, but for the name that it makes of the folder's, and a label of the
    size. Further keys say what llama.cpp takes for granted."""
    out = tmp_path / "m.gguf"
    assert write_mmproj(MM / name, out, DType.F32)[1] is True
    ours, theirs = gguf.GGUFReader(out), gguf.GGUFReader(MM / "mmproj" / f"{name}.gguf")
    got, want = ({t.name: t for t in f.tensors} for f in (ours, theirs))
    assert got.keys() == want.keys()
    for key, t in want.items():
        assert got[key].tensor_type is t.tensor_type and list(got[key].shape) == list(t.shape)
        np.testing.assert_array_equal(got[key].data, t.data)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.name", "general.size_label"):
            assert ours.fields[key].contents() == field.contents(), key
            assert ours.fields[key].types == field.types, key
    more = {key for key in ours.fields if key not in theirs.fields}
    assert all(key.startswith(("clip.vision.", "pyggml.media.")) for key in more)


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_the_same_features(name: str, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    pytest.importorskip("PIL")
    want = features(name, None)
    for dtype in (None, DType.F16):
        _, known = write_mmproj(MM / name, out, dtype)
        assert known is (name in KNOWN)
        got = features(name, out)
        if name in ENCODERS:
            assert (got.embedding is None) is (want.embedding is None)
        a, b = (f.features if name in ENCODERS else f for f in (got, want))
        assert a.grid == b.grid and (a.deepstack is None) is (b.deepstack is None)
        np.testing.assert_allclose(a.rows, b.rows, rtol=1e-4 if dtype else 0, atol=1e-5 if dtype else 0)


def test_the_processor_of_the_folder(tmp_path: Path) -> None:
    """A file without the folder treats pictures as the folder says, not as is usual in the family."""
    pytest.importorskip("PIL")
    folder, out = tmp_path / "m", tmp_path / "m.gguf"
    shutil.copytree(MM / "gemma3", folder)
    config = json.loads((folder / "preprocessor_config.json").read_text())
    config |= {"image_mean": [0.1, 0.2, 0.3], "resample": 0}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    write_mmproj(folder, out)
    tower = open_tower_of(str(out), str(out), "vision")
    assert tower is not None

    class File:
        image_tokens = None, None
        path, watches = str(out), tower.watches

    got = sight_of(File(), tower).processor(PICTURE)["pixel_values"]  # pyright: ignore[reportArgumentType]
    with gg.load_model(folder, repack=False) as model:
        np.testing.assert_array_equal(got, model.process_image(PICTURE)["pixel_values"])
    for bad in ("{", "[]", 7):
        tower.kv = {**tower.kv, "pyggml.media.processor": bad}
        with pytest.raises(ModelError, match=r"pyggml\.media\.processor"):
            sight_of(File(), tower)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["glm4v", "qwen2-5-vl", "qwen3-vl"])
def test_files_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """Its converter says nothing of how large pictures are, nor of windows. In the folder that it was made of, a file
    has what the folder says; elsewhere a picture has 8 to 4,096 features, as llama-mtmd-cli gives it."""
    pytest.importorskip("PIL")
    made = tmp_path / "mmproj.gguf"
    shutil.copy(MM / "mmproj" / f"{name}.gguf", made)

    def sight() -> Any:
        tower = open_tower_of(str(tmp_path / "m.gguf"), str(made), "vision")
        assert tower is not None

        class Text:
            path, watches, image_tokens = str(tmp_path / "m.gguf"), tower.watches, (None, None)

        return sight_of(Text(), tower)  # pyright: ignore[reportArgumentType]

    patch = sight().tower.hparams.patch_size
    small, large = np.zeros((20, 33, 3), np.uint8), np.zeros((2000, 3000, 3), np.uint8)
    assert sight().processor(small)["image_grid_thw"].tolist() == [[1, 6, 8]]
    t, h, w = sight().processor(large)["image_grid_thw"][0].tolist()
    assert (t, patch) == (1, 16) and 4000 < h * w // 4 <= 4096
    for file in ("config.json", "preprocessor_config.json"):
        shutil.copy(MM / name / file, tmp_path / file)
    got, want = sight().encode(PICTURE).features, features(name, None)
    np.testing.assert_array_equal(got.rows, want.rows)
    config = json.loads((tmp_path / "config.json").read_text())
    for other in ({"model_type": "unknown"}, {"vision_config": {**config["vision_config"], "depth": 3}}, {}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **other}) if other else "[")
        assert sight().processor(small)["image_grid_thw"].tolist() == [[1, 6, 8]]


def test_qwen2_vl_of_llama_cpp(tmp_path: Path) -> None:
    """Its converter says of the networks that they are as wide as the text model."""
    pytest.importorskip("PIL")
    write_mmproj(MM / "qwen2-vl", tmp_path / "ours.gguf")
    copy_mmproj(tmp_path / "ours.gguf", tmp_path / "m.gguf", {"clip.vision.feed_forward_length": 64}, {}, {})
    got, want = features("qwen2-vl", tmp_path / "m.gguf"), features("qwen2-vl", None)
    np.testing.assert_array_equal(got.rows, want.rows)


def test_types(tmp_path: Path) -> None:
    """Matrices get the type; vectors, kernels and positions stay F32."""
    for name, number in (("f32", 0), ("f16", 1), ("bf16", 32)):
        out = tmp_path / f"{name}.gguf"
        assert run("convert", MM / "qwen2-5-vl", "--mmproj", out, "--type", name) == 0
        r = gguf.GGUFReader(out)
        types = {t.name: t.tensor_type.name for t in r.tensors}
        assert types["v.blk.0.attn_q.weight"] == types["mm.0.weight"] == name.upper()
        assert types["v.blk.0.attn_q.bias"] == types["v.patch_embd.weight"] == "F32"
        assert r.fields["general.file_type"].contents() == number


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    with pytest.raises(ModelError, match="Whisper's encoder is part of the model"):
        write_mmproj(MM / "whisper", out)
    with pytest.raises(ModelError, match="has no tower that sees or hears"):
        write_mmproj(MM.parent / "hf" / "qwen3", out)
    with pytest.raises(DTypeError, match="F32, F16, BF16, not Q8_0"):
        write_mmproj(MM / "clip", out, DType.Q8_0)
    with pytest.raises(GGUFError, match="cannot be written"):
        write_mmproj(MM / "clip", tmp_path / "none" / "m.gguf")
    for args in (["m.gguf", "--mmproj", out], ["--mmproj", out, "--type", "Q8_0"], ["--mmproj", out, "--hf"], []):
        assert run("convert", MM / "clip", *args) == 2
    assert "Missing argument" in capsys.readouterr().err
    assert not out.exists()
    assert run("convert", MM / "clip", "--mmproj", out, "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["tower"], about["llama_cpp"], about["bytes"]) == ("clip", False, out.stat().st_size)


def test_colours_that_the_config_leaves_out(tmp_path: Path) -> None:
    """llama.cpp reads no file without them: they are those of the kind of processor."""
    folder = tmp_path / "m"
    shutil.copytree(MM / "qwen2-vl", folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    write_mmproj(folder, tmp_path / "m.gguf")
    found = open_gguf(tmp_path / "m.gguf").kv
    assert np.allclose(found["clip.vision.image_mean"], [0.48145466, 0.4578275, 0.40821073])
    assert np.allclose(found["clip.vision.image_std"], [0.26862954, 0.26130258, 0.27577711])
