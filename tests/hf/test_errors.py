"""What is wrong with a folder is said by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.errors import ModelError
from pyggml.hf.safetensors import open_folder
from pyggml.llm.model import load_model

from ..conftest import shared_dir
from .checkpoint import write_checkpoint

GOLDEN = shared_dir() / "golden" / "hf"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden data in {GOLDEN}")


def _parts(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    return config, {n: np.array(t.stored()) for n, t in open_folder(GOLDEN / name).items()}


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is no JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(ModelError, match=r"model_type 'lama' is not known; .* like it: llama"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bailing_moe_v2", "num_attention_heads": 4, "head_dim": 8}')
    with pytest.raises(ModelError, match="has no num_hidden_layers or n_layer"):
        load_model(tmp_path)


def test_tensors(tmp_path: Path) -> None:
    config, tensors = _parts("mixtral")
    name = "model.layers.1.self_attn.q_proj.weight"
    cases: list[tuple[dict[str, np.ndarray | None], str]] = [
        ({name: None}, r"no tensor blk\.1\.attn_q\.weight"),
        ({name: tensors[name][:-1]}, "q_proj.weight of shape .* is not as the config says"),
        ({name: tensors[name][:0]}, r"q_proj.weight of shape \[0, .* it holds nothing"),
        ({"model.layers.1.self_attn.x_proj.weight": tensors[name]}, "x_proj.weight is not known to mixtral"),
        ({"model.layers.0.block_sparse_moe.experts.1.w1.weight": None}, "that of expert 1 is not"),
        (
            {"model.layers.0.block_sparse_moe.experts.1.w1.weight": tensors[name]},
            r"experts\.1\.w1\.weight of shape .* is not as",
        ),
        ({"model.norm.weight": tensors["model.norm.weight"][:-1]}, r"output_norm\.weight has ne \[63"),
    ]
    for changes, text in cases:
        changed = {n: a for n, a in {**tensors, **changes}.items() if a is not None}
        write_checkpoint(tmp_path, config, changed)
        with pytest.raises(ModelError, match=text):
            load_model(tmp_path)


def test_falcon_h1(tmp_path: Path) -> None:
    """What its graph does not say is refused."""
    config, tensors = _parts("falcon-h1")
    for changes, text in (
        ({"attention_bias": True}, "attention_bias: Falcon-H1's attention has no biases"),
        ({"mamba_rms_norm": True}, "mamba_norm_before_gate: Falcon-H1's norm comes behind the gate"),
        ({"ssm_multipliers": [0.5] * 4}, r"ssm_multipliers cannot be \[0.5, 0.5, 0.5, 0.5\]"),
    ):
        write_checkpoint(tmp_path, config | changes, tensors)
        with pytest.raises(ModelError, match=text):
            load_model(tmp_path)


def test_an_unknown_pre_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "qwen2", tmp_path / "m")
    path = tmp_path / "m" / "tokenizer.json"
    path.write_text(path.read_text().replace("{L}+", "{L}*"))
    with pytest.raises(ModelError, match="no pre-tokenizer is known that cuts text with"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**7}, "10000000 layers: 1 to 512"),
        ({"vocab_size": 2**70}, "vocab_size is an integer of 71 bits"),
        ({"head_dim": 2**31}, "head_dim = 2147483648: up to 65536 are supported"),
        ({"rope_theta": 10**400}, "rope_theta is an integer of 1329 bits"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": [2], "attention_factor": 1}}, "factor of the rope must be a"),
        ({"rope_scaling": [1]}, "rope_scaling cannot be"),
        ({"architectures": -1}, "architectures cannot be -1"),
    ],
)
def test_numbers_that_no_model_has(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config, tensors = _parts("llama")
    write_checkpoint(tmp_path, config | change, tensors)
    shutil.copy(GOLDEN / "llama" / "tokenizer.json", tmp_path)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("t5", {"num_decoder_layers": 2**31 - 1}, "2147483647 layers: 0 to 512"),
        ("gemma3n", {"vocab_size": 2**20}, "vocab_size = 1048576: the embeddings have 512 rows"),
        ("deepseek-v32", {"v_head_dim": 2**31 - 1}, r"kv_b_proj\.weight of shape .* is not as the config says"),
    ],
)
def test_sizes_that_the_tensors_do_not_have(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    """They are refused before anything is made of them."""
    config, tensors = _parts(name)
    write_checkpoint(tmp_path, config | change, tensors)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)
