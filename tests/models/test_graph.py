"""Graphs as llama.cpp builds them: counts, order, names, shapes."""

from __future__ import annotations

import pytest
from pyggml.models import Build, get_architecture, graph_of_hparams
from pyggml.models.hparams import HParams
from pyggml.models.memory.kv_cache import KVCache
from pyggml.models.memory.memory import Memory
from pyggml.models.weights import ShapeOnlyWeights

from pyggml.dtypes import DType
from pyggml.errors import GraphError, ModelError
from pyggml.tensor import Size

LLAMA2_7B = HParams(n_vocab=32000, n_embd=4096, n_layer=32, n_head=32, n_ff=11008, n_ctx_train=4096)
SMALL = {"n_vocab": 100, "n_embd": 64, "n_head": 4, "n_head_kv": 2, "n_ff": 96, "n_ctx_train": 128}

LAYER = [  # of the first layer: (op, name)
    ("rms_norm", "norm-0"),
    ("mul", "attn_norm-0"),
    ("mul_mat", "Qcur-0"),
    ("reshape", "Qcur-0 (reshaped)"),
    ("rope", "Qcur-0"),
    ("mul_mat", "Kcur-0"),
    ("reshape", "Kcur-0 (reshaped)"),
    ("rope", "Kcur-0"),
    ("mul_mat", "Vcur-0"),
    ("view", "k_cache_view-0"),
    ("cpy", "k_cache_view-0 (copy of Kcur-0)"),
    ("transpose", "Vcur-0 (transposed)"),
    ("view", "v_cache_view-0"),
    ("cpy", "v_cache_view-0 (copy of Vcur-0 (transposed))"),
    ("view", "v-0"),
    ("view", "k-0"),
    ("permute", "q-0"),
    ("mul_mat", "kq-0"),
    ("soft_max", "kq_soft_max_ext-0"),
    ("mul_mat", "kqv-0"),
    ("permute", "kqv_merged-0"),
    ("cont", "kqv_merged_cont-0"),
    ("mul_mat", "kqv_out-0"),
    ("add", "ffn_inp-0"),
    ("rms_norm", "norm-0"),
    ("mul", "ffn_norm-0"),
    ("mul_mat", "ffn_gate-0"),
    ("silu", "ffn_silu-0"),
    ("mul_mat", "ffn_up-0"),
    ("mul", "ffn_gate_par-0"),
    ("mul_mat", "ffn_out-0"),
    ("add", "l_out-0"),
]


def test_llama2_7b_has_1030_nodes_and_359_leafs() -> None:
    g = graph_of_hparams(LLAMA2_7B, n_tokens=512, n_outputs=1, n_ctx=512)
    assert (g.n_nodes, g.n_leafs) == (1030, 359)
    leafs = {t.name for t in g.leafs}
    assert {"inp_tokens", "inp_pos", "KQ_mask", "inp_out_ids", "cache_k_l31", "cache_v_l0", "output.weight"} <= leafs
    assert [(t.op, t.name) for t in g.nodes[1:33]] == LAYER
    assert [t.name for t in g.nodes[-4:]] == ["l_out-31", "norm", "result_norm", "result_output"]
    assert g.nodes[0].name == "inp_embd"


def test_llama2_7b_shapes() -> None:
    g = graph_of_hparams(LLAMA2_7B, n_tokens=512, n_outputs=1, n_ctx=512)
    shapes = {t.name: t.ne for t in (*g.leafs, *g.nodes)}
    assert shapes["inp_embd"] == (4096, 512, 1, 1)
    assert shapes["Qcur-0"] == (128, 32, 512, 1)
    assert shapes["kq-0"] == shapes["kq_soft_max_ext-5"] == (512, 512, 32, 1)
    assert shapes["kqv_merged_cont-31"] == (4096, 512, 1, 1)
    assert shapes["cache_k_l0"] == shapes["cache_v_l0"] == (4096 * 512, 1, 1, 1)
    assert shapes["KQ_mask"] == (512, 512, 1, 1)
    assert shapes["l_out-30"] == (4096, 512, 1, 1)
    assert shapes["l_out-31"] == (4096, 1, 1, 1)
    assert shapes["result_output"] == (32000, 1, 1, 1)


@pytest.mark.parametrize("n_layer", [1, 2, 5])
def test_32_nodes_per_layer_and_6(n_layer: int) -> None:
    hp = HParams(n_layer=n_layer, **SMALL)
    g = graph_of_hparams(hp, n_tokens=7, n_outputs=3, n_ctx=64, n_kv=32)
    assert g.n_nodes == 32 * n_layer + 6
    assert g.n_leafs == 3 + 9 * n_layer + 2 * n_layer + 4


def test_mask_is_padded_to_32_rows_and_n_kv_columns() -> None:
    g = graph_of_hparams(HParams(n_layer=1, **SMALL), n_tokens=33, n_ctx=128, n_kv=96)
    mask = g.get_tensor("KQ_mask")
    assert mask is not None and mask.ne == (96, 64, 1, 1) and mask.dtype is DType.F32


def test_flash_attention_keeps_v_as_it_is_and_casts_the_mask_once() -> None:
    g = graph_of_hparams(HParams(n_layer=2, **SMALL), n_tokens=4, n_ctx=64, flash_attn=True)
    ops = [t.op for t in g.nodes]
    assert "transpose" not in ops and "soft_max" not in ops
    assert ops.count("flash_attn_ext") == 2
    masks = [t for t in g.nodes if t.name == "KQ_mask (copy)"]
    assert [m.dtype for m in masks] == [DType.F16]
    v = g.get_tensor("v-0")
    assert v is not None and v.ne == (16, 256, 2, 1)


def test_experts() -> None:
    hp = HParams(n_layer=1, n_expert=8, n_expert_used=2, **SMALL)
    g = graph_of_hparams(hp, n_tokens=5, n_outputs=5, n_ctx=64)
    names = [t.name for t in g.nodes]
    assert names.index("ffn_moe_topk-0") < names.index("ffn_moe_weights-0") < names.index("ffn_moe_out-0")
    shapes = {t.name: t.ne for t in g.nodes}
    assert shapes["ffn_moe_up-0"] == (96, 2, 5, 1)
    assert shapes["ffn_moe_topk-0"] == (2, 5, 1, 1)


def _build(hp: HParams, *optional: str) -> Build:
    """The graph of a model that has, of the tensors that it may lack, the `optional` ones."""
    b = Build(hp, ShapeOnlyWeights(optional), Memory(KVCache(hp, 64)), 3, 1, (32,))
    get_architecture("llama").build(b)
    return b


def test_tied_output() -> None:
    b = _build(HParams(n_layer=1, **SMALL))
    assert b.graph.nodes[-1].src[0] is b.weights["token_embd.weight"]


def test_biases_and_frequency_factors() -> None:
    plain = _build(HParams(n_layer=1, **SMALL)).graph
    b = _build(HParams(n_layer=1, **SMALL), "blk.0.attn_q.bias", "blk.0.attn_output.bias", "rope_freqs.weight")
    assert b.graph.n_nodes == plain.n_nodes + 2
    ropes = [t for t in b.graph.nodes if t.op == "rope"]
    assert all(t.src[2] is b.weights["rope_freqs.weight"] for t in ropes)


def test_long_and_short_rope_factors() -> None:
    both = ("rope_factors_long.weight", "rope_factors_short.weight")
    for n_orig, chosen in ((32, both[0]), (64, both[1])):
        hp = HParams(n_layer=1, rope_scaling_type="longrope", n_ctx_orig_yarn=n_orig, **SMALL)
        b = _build(hp, *both)
        assert all(t.src[2] is b.weights[chosen] for t in b.graph.nodes if t.op == "rope")


def test_layers_of_different_sizes() -> None:
    hp = HParams(**{**SMALL, "n_layer": 2, "n_head_kv": (2, 1), "n_ff": (96, 64)})
    g = graph_of_hparams(hp, n_tokens=2, n_ctx=32)
    shapes = {t.name: t.ne for t in (*g.leafs, *g.nodes)}
    assert shapes["cache_k_l0"][0] == 2 * shapes["cache_k_l1"][0]
    assert shapes["ffn_up-1"][0] == 64


def test_the_slot_is_bound_when_the_graph_runs() -> None:
    b = _build(HParams(n_layer=2, **SMALL))
    views = [t for t in b.graph.nodes if t.name.startswith(("k_cache_view", "v_cache_view")) and t.op == "view"]
    assert len(views) == 4
    for t in views:
        assert isinstance(t.view_offs, Size) and t.view_offs.vars == (b.uses[0].head,)
    assert b.uses[0].head.hi == 64 - 3


def test_same_call_same_graph() -> None:
    hp = HParams(n_layer=2, **SMALL)
    assert str(graph_of_hparams(hp, 4)) == str(graph_of_hparams(hp, 4))


def test_errors() -> None:
    hp = HParams(n_layer=1, **SMALL)
    with pytest.raises(GraphError, match="n_tokens must be 1 to 64"):
        graph_of_hparams(hp, 65, n_ctx=64)
    with pytest.raises(GraphError, match="n_outputs must be 1 to 4"):
        graph_of_hparams(hp, 4, n_outputs=5)
    with pytest.raises(ModelError, match=r"'llamas' is not supported; of the \d+ that are, like it: llama"):
        graph_of_hparams(hp, 4, arch="llamas")
    with pytest.raises(ModelError, match="Q8_0: V is transposed"):
        KVCache(hp, 64, type_v=DType.Q8_0)
    with pytest.raises(ModelError, match="heads of 16 are not whole blocks of 32"):
        KVCache(hp, 64, type_k=DType.Q8_0)


def test_cache_size() -> None:
    assert KVCache(LLAMA2_7B, 512).nbytes == 256 << 20
    assert KVCache(LLAMA2_7B, 500).size == 512
    assert KVCache(LLAMA2_7B, 257, flash_attn=True).size == 512
