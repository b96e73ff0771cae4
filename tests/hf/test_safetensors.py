"""Reading safetensors, sound and damaged, and 8-bit floats with their scales."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pyggml.codec import bf16_to_f32
from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.hf.float8 import f8_to_f32
from pyggml.hf.safetensors import open_folder
from pyggml.llm.model import load_model

from ..conftest import shared_dir
from .checkpoint import F8, write_checkpoint, write_safetensors


def test_shards(tmp_path: Path) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.float16)
    write_safetensors(tmp_path / "x-1.safetensors", {"a": a})
    write_safetensors(tmp_path / "x-2.safetensors", {"b": b})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}))
    found = open_folder(tmp_path)
    assert np.array_equal(found["a"].stored(), a)
    assert np.array_equal(found["b"].stored(), b)
    assert (found["a"].dtype, found["b"].dtype) == ("F32", "F16")
    index.write_text(json.dumps({"weight_map": {"a": "x-1.safetensors", "c": "x-2.safetensors"}}))
    with pytest.raises(ModelError, match=r"tensor c is not in x-2\.safetensors"):
        open_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "x-3.safetensors"}}))
    with pytest.raises(ModelError, match=r"x-3\.safetensors: cannot be read"):
        open_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../x-1.safetensors"}}))
    with pytest.raises(ModelError, match="not in the folder"):
        open_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "\ud800"}}))  # what the JSON of a stranger may say
    with pytest.raises(ModelError, match="no file can be called so"):
        open_folder(tmp_path)


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": np.zeros((2, 3), np.float32)})
    good = path.read_bytes()
    for data, text in (
        (good[:-1], "not where the header says"),
        (good[:4], "longer than itself"),
        (good[:20], "longer than itself"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "begins with b'vers', as a pointer of Git LFS does"),
        (good.replace(b'"F32"', b'"F99"'), "dtype F99"),
        (good.replace(b"[2,3]", b"[2,4]"), "not where the header says"),
        (good.replace(b"[2,3]", b"[[],"), "no JSON"),
        (good.replace(b'"shape"', b'"shapE"'), "entry of a is damaged"),
        (_with_shape(b"[1e999,1]"), "entry of a is damaged"),
        (_with_shape(b"[2.0,3]"), "entry of a is damaged"),
        (_with_shape(b"[true,3]"), "entry of a is damaged"),
        (_with_shape(b"[-2,3]"), "entry of a is damaged"),
        (_with_shape(b"[" + b",".join([b"1" + b"0" * 4000] * 1000) + b"]"), "entry of a is damaged"),
        (_with_shape(b"[" + b"1," * 40 + b"6]"), "entry of a is damaged"),
        (_with_shape(b"[" * 10**5), "header: its JSON is nested too deeply"),
    ):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=text):
            open_folder(tmp_path)
    path.unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file$"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"safetensors alone, not from pytorch_model\.bin"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ({"a": (0, 8), "b": (4, 12)}, "b begins at byte .*, the one before it ends"),
        ({"a": (0, 8), "b": (0, 8), "c": (8, 12)}, "b begins at byte"),
        ({"a": (4, 12)}, "a begins at byte"),
        ({"a": (0, 8)}, "tensors end at byte .* of"),
    ],
)
def test_tensors_lie_side_by_side(tmp_path: Path, places: dict[str, tuple[int, int]], text: str) -> None:
    """A thousand tensors in the same bytes would be a model of a thousand times the file's size."""
    about = {n: {"dtype": "F32", "shape": [(b - a) // 4], "data_offsets": [a, b]} for n, (a, b) in places.items()}
    header = json.dumps(about).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(ModelError, match=text):
        open_folder(tmp_path)


def _with_shape(shape: bytes) -> bytes:
    """A file of one tensor of 24 bytes, of that shape."""
    header = b'{"a":{"dtype":"F32","shape":' + shape + b',"data_offsets":[0,24]}}'
    return len(header).to_bytes(8, "little") + header + bytes(24)


@pytest.mark.parametrize("weight_map", [None, [], 3, {"a": None}, {"a": ["x"]}, {"a": "x\0"}, {"a": ".."}])
def test_an_index_that_is_none(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"weight_map|not in the folder|Is a directory"):
        open_folder(tmp_path)


def test_e4m3_and_e5m2() -> None:
    bits = np.array([0x00, 0x01, 0x08, 0x38, 0x7E, 0xB8, 0x7F], np.uint8)
    assert f8_to_f32(bits, "F8_E4M3", None, "w")[:-1].tolist() == [0, 2**-9, 2**-6, 1, 448, -1]
    assert np.isnan(f8_to_f32(bits, "F8_E4M3", None, "w")[-1])
    assert f8_to_f32(np.array([0x3C, 0x7B, 0xFC], np.uint8), "F8_E5M2", None, "w").tolist() == [1, 57344, -np.inf]


@pytest.mark.parametrize("shape", [(), (1,), (300,), (300, 1), (3, 2)])
def test_scales(shape: tuple[int, ...]) -> None:
    bits = np.full((300, 200), 0x38, np.uint8)  # ones
    scale = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)
    got = f8_to_f32(bits, "F8_E4M3", scale, "w")
    rows, cols = np.arange(300)[:, None], np.arange(200)[None]
    want = {(300,): rows + 1, (300, 1): rows + 1, (3, 2): 2 * (rows // 128) + cols // 128 + 1}.get(shape, 1)
    assert np.array_equal(got, np.broadcast_to(want, got.shape))
    with pytest.raises(ModelError, match="does not fit"):
        f8_to_f32(bits, "F8_E4M3", np.ones((301, 2), np.float32), "w")


@pytest.mark.skipif(not shared_dir().is_dir(), reason="no golden data")
def test_a_model_in_float8(tmp_path: Path) -> None:
    """Weights of 8 bits with scales of blocks and of tensors load as what they stand for, in BF16."""
    source = shared_dir() / "golden" / "hf" / "qwen3"
    tensors = {name: bf16_to_f32(t.stored()) for name, t in open_folder(source).items()}
    name = "model.layers.0.mlp.down_proj.weight"
    bits = np.random.default_rng(1).integers(0x20, 0x50, tensors[name].shape, np.uint8)
    tensors[name] = bits.view(F8)
    tensors[name + "_scale_inv"] = np.array([[0.25]], np.float32)
    write_checkpoint(tmp_path, json.loads((source / "config.json").read_text()), tensors)
    model = load_model(tmp_path, repack=False)
    want = f8_to_f32(bits, "F8_E4M3", None, "w") / 4
    assert np.array_equal(model.tensors["blk.0.ffn_down.weight"].numpy(), want)  # 3 bits of mantissa are exact


@pytest.mark.skipif(not shared_dir().is_dir(), reason="no golden data")
def test_mxfp4(tmp_path: Path) -> None:
    """Experts of gpt-oss as they are published: nibbles and exponents, gate and up in alternating rows."""
    source = shared_dir() / "golden" / "hf" / "gpt-oss"
    tensors = {name: np.array(t.stored()) for name, t in open_folder(source).items()}
    rng = np.random.default_rng(2)
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    want: dict[str, np.ndarray] = {}
    for name, (n_expert, rows, columns) in {"gate_up_proj": (4, 256, 64), "down_proj": (4, 64, 128)}.items():
        del tensors[f"model.layers.0.mlp.experts.{name}"]
        blocks = rng.integers(0, 256, (n_expert, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(120, 130, (n_expert, rows, columns // 32), np.uint8)
        tensors[f"model.layers.0.mlp.experts.{name}_blocks"] = blocks
        tensors[f"model.layers.0.mlp.experts.{name}_scales"] = scales
        nibbles = np.stack((blocks & 15, blocks >> 4), -1).reshape(n_expert, rows, columns // 32, 32)
        values = np.where(nibbles & 8, -1, 1) * e2m1[nibbles & 7] * 2.0 ** (scales[..., None] - 127.0)
        want[name] = values.reshape(n_expert, rows, columns)
    write_checkpoint(tmp_path, json.loads((source / "config.json").read_text()), tensors)
    found = load_model(tmp_path, repack=False).tensors
    assert found["blk.0.ffn_down_exps.weight"].dtype is DType.MXFP4
    assert np.array_equal(found["blk.0.ffn_down_exps.weight"].numpy(), want["down_proj"])
    assert np.array_equal(found["blk.0.ffn_gate_exps.weight"].numpy(), want["gate_up_proj"][:, 0::2])
    assert np.array_equal(found["blk.0.ffn_up_exps.weight"].numpy(), want["gate_up_proj"][:, 1::2])


def test_a_tensor_in_two_shards_is_that_of_the_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "1.safetensors", {"a": np.ones(3, np.float32)})
    write_safetensors(tmp_path / "2.safetensors", {"a": np.zeros(3, np.float32), "b": np.zeros(1, np.float32)})
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert open_folder(tmp_path)["a"].stored().tolist() == [1, 1, 1]
