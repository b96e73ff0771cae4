"""Files whose hyperparameters no model can have: a ModelError that names them, whatever the page does with them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from pyggml.models import get_architecture

from pyggml.errors import ModelError
from pyggml.gguf_io.bind import bind
from pyggml.gguf_io.split import open_model
from pyggml.llm.model import Model

from .archs import SPECS, golden_file

NANS, TWO, NONE = np.full(4, math.nan, np.float32), np.array([1, 2], np.int32), np.zeros(4, np.uint32)
MISUSED: list[tuple[str, str, Any, str]] = [
    ("qwen2vl-dense", "rope.dimension_sections", NANS, "dimension_sections must hold whole numbers"),
    ("cohere2moe-moe", "attention.sliding_window_pattern", np.ones(1, np.int32), "must hold 2 numbers, one for each"),
    ("cohere2moe-moe", "attention.sliding_window_pattern", np.ones(3, np.int32), "must hold 2 numbers, one for each"),
    ("deepseek2-moe", "attention.head_count_kv", NONE[:2], "layer 0 attends, and has no heads of K and V"),
    ("minicpm3-dense", "attention.head_count_kv", NONE[:2], "layer 0 attends, and has no heads of K and V"),
    ("granite-dense", "attention.head_count_kv", NONE[:1], "n_head_kv = "),
    ("granite-dense", "attention.head_count_kv", NONE[:3], "n_head_kv = "),
    ("hrm_text-dense", "nextn_predict_layers", 3, "where there are"),
    ("dots3note-moe", "attention.key_length_mla_swa", 0, "key_length_mla_swa must be positive"),
    ("dots3note-moe", "attention.value_length_mla_swa", 0, "value_length_mla_swa must be positive"),
    ("mamba2-dense", "ssm.time_step_min", -1.0, "time_step_min is -1.0, not from 0 to"),
    ("falcon-h1-dense", "ssm.time_step_min", 1e300, "time_step_min is 1e.300, not from 0 to"),
    ("rwkv6-dense", "embedding_length", 0, "wkv.head_size is"),
    ("glm5-next-moe", "rope.dimension_count", TWO, "rope.dimension_count is array"),
    ("glm5-next-moe", "attention.indexer.kpool_select_tail", TWO, "kpool_select_tail is array"),
    ("qwen4exp-moe", "expert_feed_forward_length", NANS, "expert_feed_forward_length must hold whole numbers"),
]


@pytest.mark.skipif(not SPECS, reason="no golden data")
@pytest.mark.parametrize(("name", "key", "value", "says"), MISUSED)
def test_values_that_builders_cannot_use(
    name: str, key: str, value: Any, says: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = open_model(golden_file(name, tmp_path_factory))
    arch = str(file.kv["general.architecture"])
    with pytest.raises(ModelError, match=says):
        Model(file.path, arch, {**file.kv, f"{arch}.{key}": value}, bind(file))


@pytest.mark.parametrize("n_heads", [4, 7])
def test_values_for_other_layers(n_heads: int) -> None:
    """All blocks are draft heads, or more than all."""
    kv = {"block_count": 4, "nextn_predict_layers": n_heads, "expert_shared_count": 1, "context_length": 8}
    kv |= {"embedding_length": 8, "vocab_size": 8, "feed_forward_length": 8, "attention.head_count": 1}
    kv |= {"attention.layer_norm_rms_epsilon": 1e-5}
    keys: dict[str, object] = {f"llama.{key}": value for key, value in kv.items()}
    with pytest.raises(ModelError, match="expert_feed_forward_length has 2 values, and none for the layers"):
        get_architecture("llama").hparams("llama", {**keys, "llama.expert_feed_forward_length": TWO})


def test_a_factor_that_is_no_divisor() -> None:
    kv: dict[str, object] = {"block_count": 4, "context_length": 8, "embedding_length": 8, "vocab_size": 8}
    kv |= {"feed_forward_length": 8, "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5}
    kv |= {"rope.scaling.type": "yarn", "rope.scaling.factor": math.e, "rope.scaling.yarn_log_multiplier": -1.0}
    kv |= {"attention.kv_lora_rank": 8, "attention.q_lora_rank": 8, "rope.dimension_count": 4}
    with pytest.raises(ModelError, match=r"yarn_log_multiplier is -1\.0: it must not be negative"):
        get_architecture("mistral4").hparams("mistral4", {f"mistral4.{key}": value for key, value in kv.items()})
