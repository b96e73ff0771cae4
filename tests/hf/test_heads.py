"""Layers that draft (multi-token prediction): folders written by hand with the names of the published checkpoints load
with them, and keep them on both ways."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.hf.export import export_folder
from pyggml.hf.safetensors import open_folder
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.generate.speculative import with_draft
from pyggml.llm.model import Model, load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ..conftest import shared_dir
from ..models.heads.plain_head import PlainHead
from ..models.heads.test_heads import FAMILIES, IDS, greedy, ids_of, made
from ..plain_llama import nmse
from ..random_model import Arrays, write_random
from .checkpoint import bfloat16_tensors, write_checkpoint

CONFIG: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
CONFIG |= {"vocab_size": 64, "max_position_embeddings": 256, "intermediate_size": 48, "rms_norm_eps": 1e-5}
CONFIG |= {"rope_theta": 10000.0, "tie_word_embeddings": False, "dtype": "float32"}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED |= {"n_shared_experts": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "first_k_dense_replace": 1}
ROUTED |= {"n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"head_dim": 8}
DELTA: dict[str, Any] = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2}
DELTA |= {"linear_num_value_heads": 4, "linear_value_head_dim": 8, "partial_rotary_factor": 0.5}
DELTA |= {"layer_types": ["full_attention"] * 2}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
QWEN_MOE |= {"shared_expert_intermediate_size": 16}

ALL = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
ALL |= {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
ALL |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
ALL |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate"}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
SHARED = {role.replace("_exps", "_shexp"): f"mlp.shared_experts.{name}" for role, name in EXPERTS.items()}
MLA = {"attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj"}
MLA |= {"attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm"}
INDEXER = {
    "indexer.attn_q_b": "wq_b",
    "indexer.attn_k": "wk",
    "indexer.k_norm": "k_norm",
    "indexer.proj": "weights_proj",
}
INDEXER = {role: f"self_attn.indexer.{name}" for role, name in INDEXER.items()}
BEHIND = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
}
BEHIND |= {"nextn.shared_head_norm": "shared_head.norm", "nextn.shared_head_head": "shared_head.head"}
LING = {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"}
LING |= {"attn_q_norm": "attention.query_layernorm", "attn_k_norm": "attention.key_layernorm"}
LING |= {"layer_output_norm": "final_layernorm"}
POST = {"post_attention_norm": "post_attention_layernorm"}
QWEN = {role: name.replace("shared_experts", "shared_expert") for role, name in SHARED.items()}
QWEN |= {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", **POST}
MTP = {"nextn.eh_proj": "mtp.fc", "nextn.enorm": "mtp.pre_fc_norm_embedding", "nextn.hnorm": "mtp.pre_fc_norm_hidden"}
MTP |= {"nextn.shared_head_norm": "mtp.norm"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """arch: of the GGUF; kv: what its random model has besides; own: the tensors of a head that a file may lack;
    names: role -> name in a layer; outside: of a head, outside of layers; layer: how the names of a head begin"""

    arch: str
    config: dict[str, Any]
    names: dict[str, str]
    kv: dict[str, Any] = field(default_factory=dict[str, Any])
    own: tuple[str, ...] = ()
    outside: dict[str, str] = field(default_factory=dict[str, str])
    layer: str = "model.layers.2"  # {}: of several the number


OWN = ("nextn.embed_tokens", "nextn.shared_head_head", "nextn.shared_head_norm")
WHOLE = {"partial_rotary_factor": 1.0}  # of heads; the classes have 0.5
NEXTN = {"num_nextn_predict_layers": 1}
ATTENDS = {"block_count": 3, "attention.recurrent_layers": [0, 0, 0]}
CASES = {
    "deepseek_v3": Case(arch="deepseek2", config=ROUTED | LATENT | NEXTN, names=MLA | SHARED | BEHIND, own=OWN),
    "deepseek_v32": Case(
        arch="deepseek32",
        config=ROUTED | LATENT | NEXTN | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 512},
        names=MLA | SHARED | BEHIND | INDEXER,
        own=OWN,
    ),
    "glm_moe_dsa": Case(
        arch="glm-dsa",
        config=ROUTED
        | LATENT
        | NEXTN
        | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 512, "indexer_types": ["full", "full", "shared"]},
        names=MLA | SHARED | BEHIND | INDEXER,
        own=OWN,
    ),
    "bailing_moe_v2": Case(
        arch="bailingmoe2",
        config=ROUTED | NEXTN | {"num_experts": 4, "num_shared_experts": 1, "partial_rotary_factor": 1.0},
        names=LING | SHARED | BEHIND,
        own=("layer_output_norm",),
    ),
    "mimo_v2_flash": Case(
        arch="mimo2",
        config=ROUTED
        | {"num_key_value_heads": 2, "swa_num_key_value_heads": 1, "v_head_dim": 8, "sliding_window": 8}
        | {"hybrid_layer_pattern": [0, 1, 0], "attention_value_scale": 0.5, "layernorm_epsilon": 1e-5}
        | {"routed_scaling_factor": 1.0, "partial_rotary_factor": 1.0},
        names=BEHIND
        | {"layer_output_norm": "final_layernorm", "attn_sinks": "self_attn.attention_sink_bias"}
        | {"pre_mlp_norm": "pre_mlp_layernorm"},
        kv={"expert_weights_scale": 1.0},
        own=("layer_output_norm",),
        layer="model.mtp.layers.{}",
    ),
    "glm4_moe": Case(arch="glm4moe", config=ROUTED | NEXTN | WHOLE, names=SHARED | BEHIND | POST, own=OWN),
    "glm4": Case(
        arch="glm4",
        config=NEXTN | WHOLE,
        names=BEHIND
        | {"ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm"}
        | {"post_ffw_norm": "post_mlp_layernorm"},
        own=OWN,
    ),
    "qwen3_next": Case(
        arch="qwen3next",
        config=DELTA | QWEN_MOE,
        names=QWEN,
        kv=ATTENDS | {"leading_dense_block_count": 0, "expert_weights_scale": 1.0},
        own=OWN[2:],
        outside=MTP,
        layer="mtp.layers.0",
    ),
    "qwen3_5": Case(
        arch="qwen35",
        config=DELTA | {"mtp_num_hidden_layers": 1, "rope_parameters": {"mrope_section": [1, 1, 0]}},
        names=QWEN,
        kv=ATTENDS,
        own=OWN[2:],
        outside=MTP,
        layer="mtp.layers.0",
    ),
    "qwen3_5_moe": Case(
        arch="qwen35moe",
        config=DELTA | QWEN_MOE | {"rope_parameters": {"mrope_section": [1, 1, 0]}},
        names=QWEN,
        kv=ATTENDS | {"leading_dense_block_count": 0, "expert_weights_scale": 1.0},
        own=OWN[2:],
        outside=MTP,
        layer="mtp.layers.0",
    ),
}


def layer_tensors(case: Case, il: int, n_layer: int, w: Arrays) -> Arrays:
    """The tensors of a layer, as a checkpoint has them."""
    begin = f"model.layers.{il}" if il < n_layer else case.layer.format(il - n_layer)
    if case.arch == "mimo2" and il >= n_layer:
        w = {{"ffn_norm.weight": "pre_mlp_norm.weight"}.get(role, role): a for role, a in w.items()}
    out: Arrays = {}
    if "attn_qkv" in case.names:
        w = {**w, "attn_qkv.weight": np.concatenate([w[f"attn_{x}.weight"] for x in "qkv"])}
        w = {role: a for role, a in w.items() if role not in ("attn_q.weight", "attn_k.weight", "attn_v.weight")}
    for role, a in w.items():
        stem, _, suffix = role.rpartition(".")
        if case.arch.startswith("qwen") and a.ndim == 1 and suffix == "weight" and "ssm" not in stem:
            a = a if "shexp" in stem else a - 1  # norms are one and what is stored
        if stem in EXPERTS:
            out |= {f"{begin}.mlp.experts.{e}.{EXPERTS[stem]}.weight": x for e, x in enumerate(a)}
        elif role == "exp_probs_b.bias":
            bias = "expert_bias" if case.arch == "bailingmoe2" else "e_score_correction_bias"
            out[f"{begin}.mlp.gate.{bias}"] = a
        elif stem == "attn_v_b":
            of_heads = [np.concatenate((k.T, v)) for k, v in zip(w["attn_k_b.weight"], a, strict=True)]
            out[f"{begin}.self_attn.kv_b_proj.weight"] = np.concatenate(of_heads)
        elif stem == "attn_sinks":
            out[f"{begin}.{case.names[stem]}"] = a
        elif stem in case.outside:
            out[f"{case.outside[stem]}.{suffix}"] = a
        elif stem != "attn_k_b":
            out[f"{begin}.{ {**ALL, **case.names}[stem] }.{suffix}"] = a.reshape(1, -1) if "inp_shexp" in stem else a
    return out


def write_folder(folder: Path, model_type: str) -> tuple[Arrays, dict[str, Any], Arrays]:
    """A folder with heads behind its layers; the tensors in it, and the model as a GGUF has it: keys and tensors."""
    case = CASES[model_type]
    kv, weights = made(case.arch, case.own, case.kv)
    embed = "model.word_embeddings" if case.arch == "bailingmoe2" else "model.embed_tokens"
    tensors: Arrays = {f"{embed}.weight": weights["token_embd.weight"]}
    norm = weights["output_norm.weight"]
    tensors |= {"model.norm.weight": norm - case.arch.startswith("qwen"), "lm_head.weight": weights["output.weight"]}
    n_layer = kv["block_count"] - kv["nextn_predict_layers"]
    if case.arch == "mimo2":
        weights["blk.1.attn_sinks.weight"] = np.array([1, -1, 0.5, 2], np.float32)
    for il in range(kv["block_count"]):
        of = {n.removeprefix(f"blk.{il}."): w for n, w in weights.items() if n.startswith(f"blk.{il}.")}
        tensors |= layer_tensors(case, il, n_layer, of)
    tensors = {n: np.ascontiguousarray(a, np.float32) for n, a in tensors.items()}
    folder.mkdir()
    write_checkpoint(folder, {**CONFIG, "num_hidden_layers": n_layer, "model_type": model_type, **case.config}, tensors)
    return tensors, kv, weights


def head_logits(model: Model) -> np.ndarray:
    ctx = LlamaContext(model.heads[-1], 64, n_threads=1, type_k=DType.F32, type_v=DType.F32)
    batch = Batch()
    for at, row in enumerate(HIDDEN):
        batch.add_hidden(IDS[at], row, at, logits=True)
    ctx.decode(batch)
    return np.array(ctx.logits)


HIDDEN = np.random.default_rng(2).standard_normal((len(IDS), 32)).astype(np.float32)


@pytest.mark.parametrize("model_type", CASES)
def test_a_folder_with_heads(tmp_path: Path, model_type: str) -> None:
    """As it is, as a GGUF file of it, and as a folder of that: what the head gives, against float64, and drafts."""
    arch = CASES[model_type].arch
    tensors, kv, weights = write_folder(tmp_path / "folder", model_type)
    write_quantized(plan_quantization(tmp_path / "folder", None), tmp_path / "m.gguf")
    export_folder(tmp_path / "m.gguf", tmp_path / "back")
    back = open_folder(tmp_path / "back")
    assert back.keys() == tensors.keys()
    for name, a in tensors.items():
        assert back[name].shape == a.shape and np.abs(back[name].stored() - a).max() <= 2.0**-23, name
    family = replace(FAMILIES[arch][1], expert_scale=kv.get("expert_weights_scale", 1.0))
    want, _ = PlainHead(weights, kv["block_count"] - 1, family)(np.array(IDS), HIDDEN)
    stated = load_model(write_random(tmp_path / "stated.gguf", arch, kv, weights))
    plain, drafted = ids_of(greedy(stated)), with_draft(greedy(stated), stated.heads, 4)
    assert ids_of(drafted) == plain
    for path in ("folder", "m.gguf", "back"):
        model = load_model(tmp_path / path)
        assert len(model.heads) == kv["nextn_predict_layers"] and not model.unused
        assert model.hparams.n_layer == kv["block_count"] - len(model.heads)
        assert nmse(head_logits(model), want) < 1e-9
        g = with_draft(greedy(model), model.heads, 4)
        assert ids_of(g) == plain and g.stats == drafted.stats


def test_other_prefixes(tmp_path: Path) -> None:
    """Of models that see, and of some that are written anew."""
    tensors, _, _ = write_folder(tmp_path / "folder", "qwen3_5")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    want = head_logits(load_model(tmp_path / "folder"))
    for i, (begin, mtp) in enumerate((("model.language_model.", "mtp."), ("model.", "model.mtp."))):
        renamed = {n.replace("model.", begin).replace("mtp.", mtp): a for n, a in tensors.items()}
        (tmp_path / str(i)).mkdir()
        write_checkpoint(tmp_path / str(i), config, renamed)
        assert np.array_equal(head_logits(load_model(tmp_path / str(i))), want)


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_5"])
def test_what_is_said_of_heads(tmp_path: Path, model_type: str) -> None:
    tensors, _, _ = write_folder(tmp_path / "folder", model_type)
    folder, layer = tmp_path / "folder", CASES[model_type].layer
    config = json.loads((folder / "config.json").read_text())
    head = {n for n in tensors if n.startswith(("mtp.", layer))}
    # a copy without them, whose config still says that they were trained
    write_checkpoint(folder, config, {n: a for n, a in tensors.items() if n not in head})
    model = load_model(folder)
    assert "nextn_predict_layers" not in " ".join(model.kv)
    with pytest.raises(ModelError, match="has no heads that draft"):
        _ = model.heads
    # a config that says nothing
    write_checkpoint(folder, {k: v for k, v in config.items() if "n_predict" not in k and "mtp" not in k}, tensors)
    assert len(load_model(folder).heads) == 1
    # a part of one
    of = {role: f"{layer}.{name}" for role, name in BEHIND.items()} | CASES[model_type].outside
    joins, norm = (f"{of[role]}.weight" for role in ("nextn.eh_proj", "nextn.hnorm"))
    write_checkpoint(folder, config, {n: a for n, a in tensors.items() if n != norm})
    with pytest.raises(ModelError, match=r"no tensor blk\.2\.nextn\.hnorm\.weight"):
        _ = load_model(folder).heads
    write_checkpoint(folder, config, {n: a for n, a in tensors.items() if n != joins})
    with pytest.raises(ModelError, match=rf"the tensor ({layer}|mtp)\.\S+ is not known to {model_type}"):
        load_model(folder)
    write_checkpoint(folder, {**config, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, tensors)
    with pytest.raises(ModelError, match=rf"the tensor {layer}\.\S+ is not known|no tensor blk\.2\.attn_norm"):
        load_model(folder)
    write_checkpoint(folder, config, tensors | {joins: tensors[joins][:, 1:]})
    with pytest.raises(ModelError, match=r"eh_proj\.weight has ne \[63, 32, 1, 1\]"):
        _ = load_model(folder).heads


def test_heads_that_are_not_supported(tmp_path: Path) -> None:
    """K-EXAONE's, of which no source says how they attend: the model runs, and its files keep them."""
    golden = shared_dir() / "golden" / "hf" / "exaone-moe"
    if not golden.is_dir():
        pytest.skip(f"no golden data in {golden}")
    tensors = bfloat16_tensors(golden / "model.safetensors")
    layer = {n: a for n, a in tensors.items() if n.startswith("model.layers.0.")}  # dense, as heads are
    tensors |= {n.replace("model.layers.0.", "mtp.layers.0."): a for n, a in layer.items()}
    norms = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    tensors |= {f"{n}.weight": tensors["model.norm.weight"] for n in norms}
    tensors["mtp.fc.weight"] = np.ones((64, 128), np.float32)
    (tmp_path / "folder").mkdir()
    write_checkpoint(tmp_path / "folder", json.loads((golden / "config.json").read_text()), tensors)
    write_quantized(plan_quantization(tmp_path / "folder", None), tmp_path / "m.gguf")
    export_folder(tmp_path / "m.gguf", tmp_path / "back")
    assert open_folder(tmp_path / "back").keys() == tensors.keys()
    plain = ids_of(greedy(load_model(golden)))
    for path in ("folder", "m.gguf", "back"):
        model = load_model(tmp_path / path)
        assert ids_of(greedy(model)) == plain and model.n_heads == 1
        with pytest.raises(ModelError, match="the heads of exaone-moe that draft are not supported"):
            _ = model.heads
