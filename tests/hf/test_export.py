"""The way back: folder -> GGUF -> folder has the same tensors and the same tokenizer; what has none says why."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.codec import bf16_to_f32
from pyggml.errors import ModelError
from pyggml.hf.config import Config
from pyggml.hf.export import export_folder
from pyggml.hf.families import PAGES, find_family
from pyggml.hf.families.encoders import pooling_files
from pyggml.hf.safetensors import open_folder
from pyggml.hf.tokenizer import read_tokenizer
from pyggml.llm.model import load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized
from pyggml.llm.vocab import Vocab

from ..conftest import shared_dir
from .checkpoint import write_checkpoint

FOLDERS = shared_dir() / "golden" / "hf"
pytestmark = pytest.mark.skipif(not FOLDERS.is_dir(), reason=f"no golden data in {FOLDERS}")
OTHERS = ("xlm-roberta",)  # whose GGUF is BERT's


def _type(name: str) -> str:
    return Config.of_folder(FOLDERS / name).model_type


NAMES = [p.name for p in sorted(FOLDERS.glob("*/")) if p.name not in OTHERS]
NAMES = [n for n in NAMES if any(_type(n) in types for types in PAGES.values())]


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    write_quantized(plan_quantization(FOLDERS / name, None), tmp_path / "m.gguf")
    export_folder(tmp_path / "m.gguf", tmp_path / "back")
    want, got = open_folder(FOLDERS / name), open_folder(tmp_path / "back")
    skip = find_family(Config.of_folder(FOLDERS / name)).skip  # what no GGUF has
    want = {n: t for n, t in want.items() if not any(re.search(pattern, n) for pattern in skip)}
    assert set(want) == set(got)
    for t in want.values():
        assert (t.shape, t.dtype) == (got[t.name].shape, got[t.name].dtype)
        a, b = bf16_to_f32(t.stored()), bf16_to_f32(got[t.name].stored())
        # Norms are one more than what is stored, in F32: what lies below its last bit is gone.
        assert np.array_equal(a, b) or np.abs(a - b).max() <= 2.0**-24, t.name
    assert Config.of_folder(tmp_path / "back").model_type == _type(name)


def test_roberta_comes_back_as_bert(tmp_path: Path) -> None:
    """Positions are counted from 0 in the file, and in no other way do the two differ."""
    export_folder(_written("xlm-roberta", tmp_path), tmp_path / "back")
    embeddings: list[Any] = []
    for folder in (FOLDERS / "xlm-roberta", tmp_path / "back"):
        ctx = load_model(folder).new_context(n_ctx=64)
        ctx.decode(list(range(3, 30)))
        embeddings.append(np.array(ctx.embeddings))
    assert np.array_equal(*embeddings)


def test_one_token_type_comes_back(tmp_path: Path) -> None:
    """As RoBERTas have it, whose files do not tell a table of one row from a vector."""
    (tmp_path / "folder").mkdir()
    name, config = "embeddings.token_type_embeddings.weight", json.loads((FOLDERS / "bert" / "config.json").read_text())
    tensors = {n: t.stored() for n, t in open_folder(FOLDERS / "bert").items()}
    tensors[name] = tensors[name][:1]
    write_checkpoint(tmp_path / "folder", config | {"type_vocab_size": 1}, tensors)
    write_quantized(plan_quantization(tmp_path / "folder", None), tmp_path / "m.gguf")
    export_folder(tmp_path / "m.gguf", tmp_path / "back")
    assert open_folder(tmp_path / "back")[name].shape == tensors[name].shape == (1, config["hidden_size"])


def test_pooling_comes_back(tmp_path: Path) -> None:
    shutil.copytree(FOLDERS / "bert", tmp_path / "bert")
    for path, content in pooling_files(2).items():
        (tmp_path / "bert" / path).parent.mkdir(exist_ok=True)
        (tmp_path / "bert" / path).write_text(json.dumps(content))
    write_quantized(plan_quantization(tmp_path / "bert", None), tmp_path / "m.gguf")
    export_folder(tmp_path / "m.gguf", tmp_path / "back")
    assert load_model(tmp_path / "back").hparams.pooling == "cls"


@pytest.mark.parametrize("folder", ["llama", "qwen2", "llama31", "gpt2"])
def test_the_tokenizer_comes_back(folder: str, tmp_path: Path) -> None:
    write_quantized(plan_quantization(FOLDERS / folder, None), tmp_path / "m.gguf")
    export_folder(tmp_path / "m.gguf", tmp_path / "back")
    vocab = Vocab.from_gguf(read_tokenizer(tmp_path / "back", Config.of_folder(tmp_path / "back")))
    kinds: dict[str, Any] = json.loads((FOLDERS / "tokens.json").read_text())
    kind = next(k for k in kinds.values() if folder in k["folders"])
    for text, ids in kind["cases"]:
        assert vocab.tokenize(text, add_special=False, parse_special=True) == ids


def test_of_quantized_weights(tmp_path: Path) -> None:
    """They come back as BF16 of what they stand for."""
    write_quantized(plan_quantization(FOLDERS / "mixtral", "Q8_0"), tmp_path / "m.gguf")
    export_folder(tmp_path / "m.gguf", tmp_path / "back")
    quantized, back = (load_model(tmp_path / path, repack=False).tensors for path in ("m.gguf", "back"))
    for name in ("blk.1.attn_q.weight", "blk.0.ffn_down_exps.weight", "output.weight"):
        a, b = quantized[name].numpy(), back[name].numpy()
        assert np.abs(a - b).max() <= np.abs(a).max() * 2.0**-8


def test_no_way_back(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is there already"):
        export_folder(_written("qwen2", tmp_path), tmp_path)
    path = _written("qwen2", tmp_path)
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_norm.weight", b"blk.0.some_norm.weight"))
    with pytest.raises(ModelError, match=r"how qwen2 spells the tensor blk\.0\.some_norm\.weight is not known"):
        export_folder(path, tmp_path / "back")
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".gguf")] == []


def test_what_only_a_tensor_says_is_in_the_config(tmp_path: Path) -> None:
    """Classes take a default for a vocabulary whose size is not said, and refuse ids outside it."""
    export_folder(shared_dir() / "models" / "stories260K.gguf", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["vocab_size"], config["bos_token_id"], config["pad_token_id"]) == (512, 1, None)


def _changed(name: str, folder: Path, old: bytes, new: bytes) -> Path:
    """The file of a folder with other bytes in its place."""
    path = _written(name, folder)
    data = path.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))
    return path


def test_damaged_files_have_no_way_back(tmp_path: Path) -> None:
    path = _changed("gpt2", tmp_path, b"<|im_start|>' + m", b"<|im_\xfftart|>' + m")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json would hold text that is no UTF-8: .*im_"):
        export_folder(path, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def _written(name: str, folder: Path) -> Path:
    write_quantized(plan_quantization(FOLDERS / name, None), folder / f"{name}.gguf")
    return folder / f"{name}.gguf"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            b"llama.attention.head_count\x04\0\0\0\x04",
            b"llama.attention.head_count\x04\0\0\0\xff",
            "cannot become model.layers.0",
        ),
        (b"<s>", b"<\xa6>", "no UTF-8"),
    ],
)
def test_a_file_that_no_folder_can_say(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    data = _written("llama", tmp_path).read_bytes()
    assert old in data
    (tmp_path / "x.gguf").write_bytes(data.replace(old, new))
    with pytest.raises(ModelError, match=message):
        export_folder(tmp_path / "x.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
