"""Towers that see: features and embeddings against the transformers library's (float64), and bad input."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from pyggml.models.towers import PAGES, get_tower
from pyggml.models.towers.llava import best_size, unpadded
from pyggml.models.towers.shuffled import parts_of
from pyggml.models.towers.tower import TowerBuild, TowerSize
from pyggml.models.weights import ShapeOnlyWeights

import pyggml as gg
import pyggml.limits
from pyggml.backends.cpu import isa_name, products
from pyggml.errors import GGUFError, MediaError, ModelError, ShapeError
from pyggml.hf.towers import PAGES as FAMILIES
from pyggml.hf.towers import open_tower
from pyggml.hf.towers.mmproj import write_mmproj
from pyggml.llm.picture import processor_config
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized
from pyggml.llm.tower import LoadedTower, open_tower_of
from pyggml.sched import Scheduler

from ..conftest import shared_dir
from ..gguf_files import write_all
from ..pillow import of_pillow_13

MM = shared_dir() / "golden" / "mm"
pytestmark = pytest.mark.skipif(not MM.is_dir(), reason=f"no golden data in {MM}")
Array = np.ndarray[Any, np.dtype[Any]]
ENCODERS = ("clip", "siglip", "dinov2", "vit")
SEE = (
    *("llava-clip", "llava-siglip", "llava-next", "llava-onevision", "paligemma", "gemma3", "idefics3", "smolvlm"),
    *("qwen2-vl", "qwen2-5-vl", "qwen3-vl", "glm4v", *ENCODERS, "pixtral", "mistral3", "internvl", "aya-vision"),
)
MMPROJ = ("idefics3", "smolvlm", "qwen2-5-vl", "qwen3-vl", "glm4v")
PICTURES = ("wide", "tall")


@cache
def golden() -> dict[str, Array]:
    with np.load(MM / "mm.npz") as z:
        return {k: z[k] for k in z.files}


def arrays(name: str, i: int) -> dict[str, Array]:
    """What the processor gives of picture `i`, and what the library makes of it."""
    start = f"{name}/{i}/"
    return {k[len(start) :]: v for k, v in golden().items() if k.startswith(start)}


def nmse(a: Array, b: Array) -> float:
    assert a.shape == b.shape
    return float(((a.astype(float) - b) ** 2).sum() / (b.astype(float) ** 2).sum())


@cache
def tower(name: str) -> LoadedTower:
    found = open_tower_of(str(MM / name), None, "vision")
    assert found is not None
    return found


@pytest.mark.parametrize("name", SEE)
def test_features_of_folders(name: str) -> None:
    for i in (0, 1):
        given = arrays(name, i)
        features, embedding, _ = tower(name).encode(given)
        assert features.rows.dtype == np.float32
        assert nmse(features.rows, given["features"]) < 1e-11
        if "embedding" in given:
            assert embedding is not None and nmse(embedding, given["embedding"]) < 1e-11
        if "image_grid_thw" in given:
            t, h, w = given["image_grid_thw"][0].tolist()
            assert features.grid == (t, h // 2, w // 2)
        assert (features.deepstack is None) is (name != "qwen3-vl")
    assert tower(name).weights.unused == []


@of_pillow_13
@pytest.mark.parametrize("name", SEE)
def test_from_a_picture(name: str) -> None:
    pytest.importorskip("PIL")
    with gg.load_model(MM / name, repack=False) as model:
        path = MM / "images" / "wide.png"
        np.testing.assert_array_equal(
            model.process_image(path)["pixel_values"].reshape(-1), arrays(name, 0)["pixel_values"].reshape(-1)
        )
        assert nmse(model.encode_image(path), arrays(name, 0)["features"]) < 1e-11
        if name in ENCODERS:
            rows = model.embed_image([path, MM / "images" / "tall.png"])
            want = [arrays(name, i).get("embedding") for i in (0, 1)]
            assert rows.dtype == np.float32 and len(rows) == 2
            assert want[0] is None or nmse(rows, np.stack([w for w in want if w is not None])) < 1e-11
            assert np.allclose(np.linalg.norm(model.embed_image([path], normalize=True), axis=1), 1)
            assert model.embed_image([]).shape == (0, rows.shape[1])
        else:
            with pytest.raises(ModelError, match="makes no embedding"):
                model.embed_image([path])


@pytest.mark.parametrize("name", MMPROJ)
def test_features_of_mmproj(name: str) -> None:
    """The file alone, except that a file of Qwen2.5-VL does not say how large windows are: with the folder."""
    file = str(MM / "mmproj" / f"{name}.gguf")
    found = open_tower_of(str(MM / name) if name == "qwen2-5-vl" else file, file, "vision")
    assert found is not None and found.weights.unused == []
    for i in (0, 1):
        features, _, _ = found.encode(arrays(name, i))
        assert nmse(features.rows, arrays(name, i)["features"]) < 1e-11
        of_folder = tower(name).encode(arrays(name, i)).features
        if of_folder.deepstack is not None:
            assert features.deepstack is not None and nmse(features.deepstack, of_folder.deepstack) < 1e-11


def test_a_processor_from_the_keys_of_a_file() -> None:
    """What the file says of the picture is what the folder's config says, where the file says it."""
    from pyggml.media import picture_processor

    pytest.importorskip("PIL")
    for name in ("idefics3", "smolvlm"):
        file = str(MM / "mmproj" / f"{name}.gguf")
        found = open_tower_of(file, file, "vision")
        assert found is not None
        made = picture_processor(processor_config(found))(MM / "images" / "tall.png")
        np.testing.assert_array_equal(made["pixel_values"], arrays(name, 1)["pixel_values"])
    for name in ("qwen3-vl", "glm4v", "qwen2-5-vl"):
        file = str(MM / "mmproj" / f"{name}.gguf")
        found = open_tower_of(file, file, "vision")
        assert found is not None
        config = processor_config(found)
        folder = json.loads((MM / name / "preprocessor_config.json").read_text())
        for key in ("image_processor_type", "patch_size", "merge_size", "image_mean", "image_std"):
            assert config[key] == folder[key]
        picture_processor(config)(MM / "images" / "tall.png")
    for name in SEE:
        assert picture_processor(processor_config(tower(name))) is not None


@of_pillow_13
def test_a_model_with_an_mmproj() -> None:
    pytest.importorskip("PIL")
    file = MM / "mmproj" / "qwen3-vl.gguf"
    with gg.load_model(MM / "qwen3-vl", repack=False, mmproj=file) as model:
        rows = model.encode_image(MM / "images" / "wide.png")
        assert nmse(rows, arrays("qwen3-vl", 0)["features"]) < 1e-11
    with pytest.raises(ModelError, match="its features have 64 elements, the embeddings of"):
        gg.load_model(repack=False, mmproj=file)
    with gg.load_model(repack=False) as model, pytest.raises(ModelError, match="no tower that sees"):
        model.encode_image(MM / "images" / "wide.png")


def test_an_encoder_has_no_decoder() -> None:
    with gg.load_model(MM / "clip") as model:
        assert model.unused == [] and model.kv["clip.projector_type"] == "clip"
        for use in (lambda: model.new_context(8), lambda: model.detokenize([1]), lambda: list(model.generate("a", 1))):
            with pytest.raises(ModelError, match="no decoder"):
                use()
    with pytest.raises(ModelError, match="was closed"):
        model.encode_image(MM / "images" / "wide.png")


def test_tiles_in_one_graph_are_as_alone() -> None:
    """A batch of tiles has the features of each tile alone."""
    t = tower("llava-next")
    pixels = arrays("llava-next", 0)["pixel_values"][0]
    together = t(TowerSize(5, 4, 4), pixel_values=pixels)["features"]
    alone = [t(TowerSize(1, 4, 4), pixel_values=p[None])["features"][0] for p in pixels]
    assert nmse(together, np.stack(alone)) < 1e-12


def test_the_attention_of_patches() -> None:
    """A tap sees what flash attention never stores: each patch looks at all patches of its picture."""
    pytest.importorskip("PIL")
    with gg.load_model(MM / "siglip") as model:
        plain = model.encode_image(MM / "images" / "wide.png")
        with model.tap("kq_soft_max_ext-1", "l_out-*") as tap:
            seen = model.encode_image(MM / "images" / "wide.png")
        (weights,) = tap["kq_soft_max_ext-1"]
        assert weights.reshape(-1, 16, 16).shape[0] == 4 and np.allclose(weights.sum(-1), 1, atol=1e-6)
        assert len(tap["l_out-0"]) == len(tap["l_out-1"]) == 1
        assert nmse(seen, plain) < 1e-11


def test_every_tower_has_a_page() -> None:
    for name in PAGES:
        assert name in get_tower(name).names
    assert {m for names in FAMILIES.values() for m in names} >= {"clip", "qwen3_vl", "gemma3"}
    with pytest.raises(ModelError, match=r"the tower 'qwen3vl_merge' .* like it: qwen3vl_merger"):
        get_tower("qwen3vl_merge")


def test_the_builder_declares() -> None:
    """A tower's tensors are known without a file."""
    t = tower("clip")
    weights = ShapeOnlyWeights()
    t.tower.declare(t.hparams, weights)
    assert weights.asked["v.blk.1.attn_q.weight"].ne == (64, 64)
    assert {n for n, s in weights.asked.items() if not s.optional} <= set(t.weights)


def test_sizes_of_tiles() -> None:
    assert best_size(30, 100, ((64, 128), (128, 64), (128, 128))) == (64, 128)
    assert best_size(100, 100, ((64, 128), (128, 64), (128, 128))) == (128, 128)
    assert best_size(3, 700, ((64, 128), (128, 64))) == (64, 128)  # no whole line of pixels is left in any of them
    assert unpadded(np.zeros((4, 8, 1)), 50, 200).shape == (2, 8, 1)
    assert unpadded(np.zeros((4, 8, 1)), 100, 100).shape == (4, 4, 1)


def test_positions_on_edges() -> None:
    """Idefics3's patches fall on the edges of its learned positions: rounded as torch 2.13 does."""
    assert parts_of(6, 6).tolist() == [*range(6)]
    assert parts_of(19, 19).tolist() == [*range(12), 11, *range(13, 19)]
    found = [0, 1, 2, 3, 4, 4, 6, 7, 8, 8, 9, 10, 11, 12, 14, 14, 16, 17, 17, 19, 19, 21, 22, 22, 24]
    assert parts_of(25, 25).tolist() == found
    assert parts_of(3, 1).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("kind", "limit"), [("F16", 1e-6), ("Q8_0", 1e-3), ("Q4_0", 0.1)])
def test_towers_are_quantised(kind: str, limit: float, tmp_path: Path) -> None:
    """The matrices become smaller; patches and positions stay as they are."""
    out = str(tmp_path / "out.gguf")
    write_quantized(plan_quantization(MM / "mmproj" / "idefics3.gguf", kind), out)
    found = open_tower_of(str(MM / "idefics3"), out, "vision")
    assert found is not None
    types = {n: found.weights[n].dtype.name for n in found.weights}
    assert types["v.blk.0.attn_q.weight"] == types["mm.model.fc.weight"] == kind
    assert types["v.patch_embd.weight"] == types["v.position_embd.weight"] == "F32"
    want = arrays("idefics3", 0)
    assert nmse(found.encode(want).features.rows, want["features"]) < limit


@pytest.mark.parametrize("kind", ["F16", "F32"])
def test_a_fast_tower(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in F16 and their columns are rounded to fixed point, at levels that have it; those of F32 never."""
    monkeypatch.setattr(products, "FAST_BEYOND", dict.fromkeys(products.FAST_BEYOND, 16))  # the tower is small
    monkeypatch.setattr(products, "LEAST_FAST", 32)
    write_quantized(plan_quantization(MM / "mmproj" / "idefics3.gguf", kind), str(tmp_path / "out.gguf"))
    rows: list[Array] = []
    for fast in (False, True):
        found = open_tower_of(str(MM / "idefics3"), str(tmp_path / "out.gguf"), "vision", fast=fast)
        assert found is not None
        rows.append(found.encode(arrays("idefics3", 0)).features.rows)
    assert nmse(rows[1], rows[0]) < 1e-7
    assert np.array_equal(*rows) == (kind == "F32" or isa_name() not in products.FAST_BEYOND)


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_matrices_that_are_read_in_another_layout(name: str, tmp_path: Path) -> None:
    """They stay as they are. Ten products follow each other, each of which Q8_0 changes by an NMSE of some 3e-5."""
    write_mmproj(MM / name, tmp_path / "f.gguf")
    write_quantized(plan_quantization(tmp_path / "f.gguf", "Q8_0"), tmp_path / "q.gguf")
    found = open_tower_of(str(MM / name), str(tmp_path / "q.gguf"), "vision")
    assert found is not None and found.weights["v.blk.0.attn_q.weight"].dtype.name == "Q8_0"
    want = arrays(name, 0)
    assert nmse(found.encode(want).features.rows, want["features"]) < 4e-4


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("clip", {"pixel_values": np.zeros((1, 3, 64, 32))}, r"pixel_values has the shape \[1, 3, 64, 32\]"),
        ("clip", {"pixel_values": None}, "the tower reads pixel_values, which the processor did not give"),
        ("clip", {"pixel_values": np.zeros((2, 3, 64, 64))}, "the tower reads"),
        ("dinov2", {"pixel_values": np.zeros((1, 3, 8, 64))}, "less than a patch"),
        ("llava-clip", {"pixel_values": np.zeros((2, 3, 64, 64))}, "2 pictures"),
        ("llava-next", {"pixel_values": np.zeros((1, 2, 3, 64, 64))}, "2 tiles"),
        ("llava-next", {"image_sizes": None}, "image_sizes"),
        ("llava-next", {"image_sizes": np.array([[0, 5]])}, "no picture"),
        ("idefics3", {"pixel_values": np.zeros((1, 1, 3, 64, 64))}, "tiles must be"),
        ("idefics3", {"pixel_attention_mask": np.zeros((1, 5, 64, 64))}, "padded"),
        ("qwen2-vl", {"image_grid_thw": np.array([[1, 3, 10]])}, "squares of 2 x 2"),
        ("qwen2-vl", {"image_grid_thw": np.array([[2, 6, 10]])}, "one frame"),
        ("qwen2-5-vl", {"pixel_values": np.zeros((59, 1536))}, r"pixel_values has the shape \[59, 1536\]"),
        ("pixtral", {"image_sizes": np.array([[128, 96]])}, "image_sizes 128 x 96"),
        ("pixtral", {"image_sizes": np.array([1])}, "image_sizes"),
        ("siglip", {"pixel_values": np.array([["a"]])}, "pixel_values"),
    ],
)
def test_arrays_that_do_not_fit(name: str, change: dict[str, Any], error: str) -> None:
    given = {k: v for k, v in {**arrays(name, 0), **change}.items() if v is not None}
    with pytest.raises(ShapeError, match=error):
        tower(name).encode(given)


def changed(path: Path, to: Path, kv: dict[str, Any] | None = None, drop: str = "", cut: str = "") -> Path:
    """A copy of an mmproj file with other keys (None: without the key), without a tensor, or with one of another
    shape."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(to, "clip")
    keys = {f.name: f.contents() for f in reader.fields.values() if f.name.startswith("clip.")} | (kv or {})
    for key, value in keys.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for t in reader.tensors:
        if t.name != drop:
            writer.add_tensor(t.name, t.data[:1].copy() if t.name == cut else t.data)
    write_all(writer)
    return to


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"drop": "v.blk.1.ln2.weight"}, "no tensor v.blk.1.ln2.weight"),
        ({"cut": "mm.model.fc.weight"}, "mm.model.fc.weight has ne"),
        ({"kv": {"clip.projector_type": "idefic"}}, "the tower 'idefic' .* like it: idefics3"),
        ({"kv": {"clip.projector_type": None}}, "clip.projector_type"),
        ({"kv": {"clip.vision.block_count": 3}}, "no tensor v.blk.2"),
        ({"kv": {"clip.vision.block_count": 10**6}}, "layers are supported"),
        ({"kv": {"clip.vision.embedding_length": None}}, "clip.vision.embedding_length is missing"),
        ({"kv": {"clip.vision.attention.head_count": 0}}, "head_count"),
        ({"kv": {"clip.vision.attention.head_count": 7}}, "head_count"),
        ({"kv": {"clip.vision.patch_size": 0}}, "patch_size"),
        ({"kv": {"clip.vision.projector.scale_factor": 3}}, "scale_factor"),
        ({"kv": {"clip.vision.image_size": "x"}}, "clip.vision.image_size"),
        ({"kv": {"clip.has_vision_encoder": [1, 2]}}, "clip.has_vision_encoder must be one value"),
        ({"kv": {"clip.projector_type": [1, 2]}}, "clip.projector_type must be one value"),
        ({"kv": {"clip.vision.embedding_length": [1, 2]}}, "clip.vision.embedding_length must be one value"),
        ({"kv": {"clip.vision.attention.layer_norm_epsilon": -1.0}}, "layer_norm_epsilon"),
    ],
)
def test_files_that_are_no_tower(tmp_path: Path, change: dict[str, Any], error: str) -> None:
    file = changed(MM / "mmproj" / "idefics3.gguf", tmp_path / "bad.gguf", **change)
    with pytest.raises(ModelError, match=error):
        open_tower_of(str(file), str(file), "vision")


def test_windows_without_patches(tmp_path: Path) -> None:
    file = changed(MM / "mmproj" / "qwen2-5-vl.gguf", tmp_path / "bad.gguf", {"clip.vision.patch_size": 0})
    with pytest.raises(ModelError, match="patch_size is 0"):
        open_tower_of(str(file), str(file), "vision")


def test_no_mmproj_file(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"noise" * 20)
    with pytest.raises(GGUFError):
        gg.load_model(MM / "idefics3", repack=False, mmproj=tmp_path / "noise")
    text = changed(MM / "mmproj" / "idefics3.gguf", tmp_path / "deaf.gguf", {"clip.has_vision_encoder": False})
    with pytest.raises(ModelError, match="has no tower"):
        gg.load_model(MM / "idefics3", repack=False, mmproj=text)
    from pyggml.llm.model import default_model_path

    with pytest.raises(ModelError, match=r"no mmproj file: its general\.architecture is not clip"):
        gg.load_model(MM / "idefics3", repack=False, mmproj=default_model_path())


def test_damaged_folders(tmp_path: Path) -> None:
    def folder(base: str, **change: Any) -> Path:
        to = tmp_path / f"{base}{len(list(tmp_path.iterdir()))}"
        to.mkdir()
        for file in (MM / base).iterdir():
            shutil.copyfile(file, to / file.name)
        raw = json.loads((to / "config.json").read_text())
        for key, value in change.items():
            of = raw["vision_config"] if key.startswith("v_") else raw
            of[key.removeprefix("v_")] = value
        (to / "config.json").write_text(json.dumps(raw))
        return to

    for base, change, error in (
        ("clip", {"v_hidden_size": 128}, "has ne"),
        ("clip", {"v_hidden_act": "mish"}, "mish"),
        ("clip", {"v_image_size": [64, 32]}, "no square"),
        ("clip", {"v_num_attention_heads": 3}, "head_count"),
        ("llava-clip", {"vision_feature_layer": 7}, "vision_feature_layer"),
        ("llava-clip", {"v_model_type": "eva"}, "a tower of model_type 'eva' is not known"),
        ("llava-clip", {"v_model_type": ["eva"]}, r"a tower of model_type \['eva'\] is not known"),
        ("qwen3-vl", {"deepstack_visual_indexes": 3, "v_deepstack_visual_indexes": 3}, "cannot have"),
        ("qwen2-vl", {"v_temporal_patch_size": 3}, "temporal_patch_size"),
        ("gemma3", {"mm_tokens_per_image": 0}, "cannot have"),
        ("vit", {"hidden_size": "a"}, "hidden_size"),
    ):
        with pytest.raises(ModelError, match=error):
            open_tower_of(str(folder(base, **change)), None, "vision")
    text = folder("llava-clip")
    assert open_tower(text) is not None
    (text / "preprocessor_config.json").write_text('{"image_processor_type": "Nobody"}')
    with gg.load_model(text, repack=False) as model, pytest.raises(MediaError, match="Nobody"):
        model.encode_image(MM / "images" / "wide.png")


def test_two_configs_of_a_processor(tmp_path: Path) -> None:
    """A processor that merges patches may say so in processor_config.json alone, as Mistral 3's."""
    folder = tmp_path / "m"
    shutil.copytree(MM / "pixtral", folder)
    plain = gg.load_model(folder).process_image(np.zeros((20, 75, 3), np.uint8))["image_sizes"]
    (folder / "processor_config.json").write_text(json.dumps({"patch_size": 16, "spatial_merge_size": 2}))
    merged = gg.load_model(folder).process_image(np.zeros((20, 75, 3), np.uint8))["image_sizes"]
    assert plain.tolist() != merged.tolist() and (merged % 32 == 0).all()


@pytest.mark.parametrize("name", ["siglip", "clip", "llava-siglip", "gemma3"])
def test_a_size_that_is_no_whole_number_of_patches(name: str, tmp_path: Path) -> None:
    """SigLIP so400m/14-384 sees 378 of the 384 pixels."""
    folder = tmp_path / "m"
    shutil.copytree(MM / name, folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["image_size"] = 70
    (folder / "config.json").write_text(json.dumps(config))
    pixels = np.random.default_rng(0).standard_normal((1, 3, 70, 70)).astype(np.float32)
    larger, plain = (open_tower_of(str(x), None, "vision") for x in (folder, MM / name))
    assert larger is not None and plain is not None
    want = plain.encode({"pixel_values": pixels[:, :, :64, :64]}).features.rows
    np.testing.assert_array_equal(larger.encode({"pixel_values": pixels}).features.rows, want)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_tower_beside_streamed_weights(kind: str, tmp_path: Path) -> None:
    """With a budget the tower's weights are mapped and given back; its features are the same bits."""
    pytest.importorskip("PIL")
    out = tmp_path / "out.gguf"
    write_quantized(plan_quantization(MM / "mmproj" / "idefics3.gguf", kind), str(out))
    path = MM / "images" / "wide.png"
    with (
        gg.load_model(MM / "idefics3", mmproj=out) as plain,
        gg.load_model(MM / "idefics3", mmproj=out, ram="8MiB") as m,
    ):
        for _ in range(2):
            np.testing.assert_array_equal(m.encode_image(path), plain.encode_image(path))
        assert not m.senses["vision"].tower.keeps and plain.senses["vision"].tower.keeps


# -- large pictures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2-5-vl", "qwen3-vl", "pixtral", "dinov2", "llava-next"])
def test_pieces_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens, of windows, and of tiles. What a tap sees is whole."""
    with gg.load_model(MM / name, repack=False) as model:
        given = model.process_image(MM / "images" / "wide.png")
    want = tower(name).encode(given).features
    for module in ("models.blocks.vision", "llm.tower"):
        monkeypatch.setattr(f"pyggml.{module}.PIECE", 7)
    cut = open_tower_of(str(MM / name), None, "vision")
    assert cut is not None
    got = cut.encode(given).features
    np.testing.assert_array_equal(got.rows, want.rows)
    assert got.grid == want.grid
    if want.deepstack is not None:
        np.testing.assert_array_equal(got.deepstack, want.deepstack)
    with gg.load_model(MM / name, repack=False) as model, model.tap("l_out-*") as seen:
        np.testing.assert_array_equal(model.encode_image(MM / "images" / "wide.png"), want.rows)
    assert np.asarray(seen["l_out-0"]).shape[-2] > 7


def test_memory_of_a_large_picture() -> None:
    """4096 x 4096 pixels: of all 65,536 patches four rows are in memory at a time (the states, Q, K and V), beside
    the pixels and what a piece needs. Nothing grows with the square of their number."""
    t = tower("qwen2-5-vl")
    planned = {}
    for side in (128, 256):
        b = TowerBuild(t.hparams, t.weights, "v", TowerSize(1, side, side))
        with b.ctx:
            t.tower.build(b)
        scheduler = Scheduler(("cpu",), 1)
        scheduler.alloc(b.graph)
        planned[side] = scheduler.buffer_size("cpu")
    row = t.hparams.n_embd * 4
    assert planned[256] < 65536 * row * 5.5
    assert planned[256] - planned[128] < 49152 * row * 5.5


def test_patches_that_are_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that says so could make hours of work of a small picture (found by fuzzing)."""
    t, size = tower("qwen2-5-vl"), TowerSize(1, 257, 256)
    with pytest.raises(MediaError, match=r"1 tiles of 257 x 256 patches, .*pyggml.limits.PICTURE_PAIRS \(4294967296\)"):
        t(size)
    monkeypatch.setattr(pyggml.limits, "PICTURE_PAIRS", 20**2 * 3 - 1)
    with pytest.raises(MediaError, match="3 tiles of 4 x 5 patches"):
        t(TowerSize(3, 4, 5))
