"""Keys of configs that change what a model is: honoured as the transformers library does, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.hf.config import Config
from pyggml.hf.export import export_folder
from pyggml.hf.families import find_family
from pyggml.hf.folder import open_hf_folder
from pyggml.hf.metadata import read_metadata
from pyggml.llm.batch import Batch
from pyggml.llm.model import load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from . import keys
from .variants import TOKENS

CASES = keys.read()
CLASSES = json.loads((Path(open_hf_folder.__code__.co_filename).with_name("classes.json")).read_text())


def _rows(folder: Path) -> np.ndarray:
    model = load_model(folder, repack=False)
    assert not model.unused
    ctx = model.new_context(n_ctx=64, n_batch=64, type_k=DType.F32, type_v=DType.F32)
    batch = Batch()
    for pos, token in enumerate(TOKENS):
        batch.add(token, pos, [0], logits=pos >= len(TOKENS) - keys.N_ROWS)
    ctx.decode(batch)
    return np.array(ctx.logits)


def _equal(got: np.ndarray, want: list[list[float]]) -> None:
    assert ((got - np.asarray(want)) ** 2).sum() <= 1e-9 * np.square(want).sum()


@pytest.mark.parametrize("name", CASES)
def test_honoured(name: str, tmp_path: Path) -> None:
    """As it is, as a GGUF file, and as the folder that is made of that."""
    (tmp_path / "folder").mkdir()
    keys.write(CASES[name], tmp_path / "folder")
    _equal(_rows(tmp_path / "folder"), CASES[name]["rows"])
    write_quantized(plan_quantization(tmp_path / "folder", None), tmp_path / "m.gguf")
    _equal(_rows(tmp_path / "m.gguf"), CASES[name]["rows"])
    export_folder(tmp_path / "m.gguf", tmp_path / "back")
    _equal(_rows(tmp_path / "back"), CASES[name]["rows"])


@pytest.mark.parametrize(("name", "change", "text"), keys.REFUSED)
def test_refused(name: str, change: dict[str, Any], text: str, tmp_path: Path) -> None:
    keys.write({**CASES[name], "config": CASES[name]["config"] | change}, tmp_path)
    with pytest.raises(ModelError, match=text):
        load_model(tmp_path)


def test_what_a_config_need_not_say(tmp_path: Path) -> None:
    """Keys that it lacks are as the class has them, those that the class has not are nobody's."""
    case = CASES["llama-relu"]
    keys.write(case, tmp_path)
    plain = open_hf_folder(tmp_path).kv
    usual = CLASSES["llama"]
    keys.write({**case, "config": {**usual, **case["config"], "nobodys": 3, "alibi": True}}, tmp_path)
    said = open_hf_folder(tmp_path).kv
    assert plain.keys() == said.keys() and all(np.array_equal(plain[k], said[k]) for k in plain)
    assert plain["llama.rope.freq_base"] == usual["rope_parameters"]["rope_theta"]
    assert "output.weight" in open_hf_folder(tmp_path).tensors  # Llama's is not tied, where nothing is said


def test_a_tensor_that_nothing_asks_for(tmp_path: Path) -> None:
    """It is of another model than the one whose graph runs: Gemma 2 has no frequency factors, which Llama 3 has."""
    case = CASES["gemma2-gelu"]
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 64}
    keys.write({**case, "config": case["config"] | {"rope_parameters": rope}}, tmp_path)
    with pytest.raises(ModelError, match=r"nothing asks for the tensors rope_freqs\.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("said", "theta", "theta_swa", "kind"),
    [
        ({"model_type": "llama"}, 1e4, None, "default"),
        ({"model_type": "gpt_oss"}, 150000.0, None, "yarn"),
        ({"model_type": "gpt_neox", "rotary_emb_base": 500, "rotary_pct": 1.0}, 500, None, "default"),
        ({"model_type": "modernbert", "global_rope_theta": 70, "local_rope_theta": 7}, 70, 7, "default"),
        ({"model_type": "modernbert"}, 160000.0, 1e4, "default"),
        ({"model_type": "gemma3_text", "rope_local_base_freq": 7, "rope_theta": 70}, 70, 7, "default"),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8}}, 1e6, 1e4, "linear"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 8}, "rope_theta": 3}, 3, None, "linear"),
    ],
)
def test_ropes_of_before(said: dict[str, Any], theta: float, theta_swa: float | None, kind: str) -> None:
    """As configs had them, and where they say nothing."""
    c = Config("config.json", said)
    assert (c.rope["rope_theta"], c.rope_swa.get("rope_theta"), c.rope["rope_type"]) == (theta, theta_swa, kind)


def test_a_part_of_a_rope_only_where_the_class_reads_it() -> None:
    for name, said in (("llama", False), ("gpt_neox", True)):
        c = Config("config.json", {"model_type": name, "rotary_pct": 0.5, "partial_rotary_factor": 0.5})
        assert ("partial_rotary_factor" in c.rope) is said


def test_a_rope_as_hunyuan_has_it() -> None:
    """`alpha` stretches the base of all its checkpoints."""
    scaling = {"alpha": 1000.0, "beta_fast": 32, "factor": 1.0, "mscale": 1.0, "type": "dynamic"}
    for model_type, arch in (("hunyuan_v1_dense", "hunyuan-dense"), ("hunyuan_v1_moe", "hunyuan-moe")):
        said = {"model_type": model_type, "head_dim": 128, "rope_theta": 10000.0, "num_experts_per_tok": 1}
        for rope, base in ((scaling, 10000.0 * 1000.0 ** (128 / 126)), (None, 10000.0)):
            c = Config("config.json", {**said, "rope_scaling": rope})
            kv = read_metadata(find_family(c), c)
            assert kv[f"{arch}.rope.freq_base"] == pytest.approx(base, rel=1e-6)  # pyright: ignore[reportUnknownMemberType]


def test_a_rope_as_phi_moe_has_it() -> None:
    """Its scale of queries and keys is said, and does not follow from the lengths of contexts."""
    scaling = {"long_factor": [1.0] * 64, "short_factor": [1.0] * 64, "type": "longrope"}
    said = {"model_type": "phimoe", "max_position_embeddings": 131072, "original_max_position_embeddings": 4096}

    def read(**more: float) -> Any:
        c = Config("config.json", {**said, "rope_scaling": {**scaling, **more}})
        return read_metadata(find_family(c), c)["phimoe.rope.scaling.attn_factor"]

    assert read(long_mscale=1.25, short_mscale=1.25) == 1.25
    assert read() == pytest.approx(1.19023, rel=1e-5)  # pyright: ignore[reportUnknownMemberType]
    with pytest.raises(ModelError, match="short_mscale and long_mscale of the rope differ"):
        read(long_mscale=1.5, short_mscale=1.25)


def test_deepseek_comes_back(tmp_path: Path) -> None:
    """With YaRN, whose scale has two names; and of 27 layers, as the small ones, which make Q in one step."""
    case = CASES["deepseek-v3-eps"]
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = {**case["config"], "rope_parameters": rope | {"original_max_position_embeddings": 64}}
    config |= {"num_hidden_layers": 27, "q_lora_rank": None}
    n_q = config["num_attention_heads"] * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    tensors: dict[str, list[int]] = {}
    for name, shape in case["tensors"].items():
        for layer in range(1, 27) if ".layers.1." in name else (0,):
            new = name.replace(".layers.1.", f".layers.{layer}.")
            if ".q_b_proj." in new:
                tensors[new.replace("q_b_proj", "q_proj")] = [n_q, config["hidden_size"]]
            elif ".q_a_" not in new:
                tensors[new] = shape
    (tmp_path / "folder").mkdir()
    keys.write({**case, "config": config, "tensors": tensors}, tmp_path / "folder")
    write_quantized(plan_quantization(tmp_path / "folder", None), tmp_path / "m.gguf")
    export_folder(tmp_path / "m.gguf", tmp_path / "back")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back["q_lora_rank"] is None  # the class has another default
    assert back["rope_parameters"]["mscale"] == back["rope_parameters"]["mscale_all_dim"] == 1.0
