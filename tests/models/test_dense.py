"""What dense decoders have that Llama has not: layers without heads or network, layers that run again, and positions
that tokens keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pyggml.models import Build, get_architecture
from pyggml.models.hparams import HParams
from pyggml.models.memory.kv_cache import KVCache
from pyggml.models.metadata import Reader
from pyggml.models.nanbeige import NanbeigeHParams
from pyggml.models.weights import ShapeOnlyWeights

from pyggml.errors import GGMLError, ModelError

SIZES = {"n_vocab": 100, "n_embd": 64, "n_head": 4, "n_head_kv": 2, "n_ff": 96, "n_ctx_train": 128}


def _build(arch: str, hp: HParams) -> Build:
    memory = get_architecture(arch).new_memory(hp, 64)
    b = Build(hp, ShapeOnlyWeights(), memory, 3, 2, tuple(c.size for c in memory.caches))
    get_architecture(arch).build(b)
    return b


def test_layers_without_heads_or_network() -> None:
    """Layers of deci: whole; with a product for attention; without attention; without both; without a network."""
    sizes = {**SIZES, "n_head": (4, 4, 0, 0, 4), "n_head_kv": (2, 0, 0, 0, 1), "n_ff": (96, 96, 32, 0, 0)}
    b = _build("deci", HParams(n_layer=5, **sizes))
    names = {t.name for t in b.graph.nodes}
    assert [f"ffn_inp-{il}" in names for il in range(5)] == [True, True, False, False, True]
    assert [f"l_out-{il}" in names for il in range(5)] == [True, True, True, False, False]
    assert {"kqv_out-0", "attn_out-1", "kqv_out-4"} <= names and not {"kqv_out-1", "attn_norm-2"} & names
    assert b.kv.caches[0].layers == (0, 4)
    asked = {name for name in b.weights.asked if name.startswith(("blk.2", "blk.3")) and name.endswith("weight")}
    assert asked == {f"blk.2.ffn_{x}.weight" for x in ("norm", "gate", "up", "down")}
    with pytest.raises(ModelError, match="n_head_kv: layer 2 has no heads, as those of this architecture must"):
        _build("qwen2", HParams(n_layer=3, **{**SIZES, "n_head": (4, 4, 0), "n_head_kv": (2, 2, 0)}))


def test_layers_that_run_again() -> None:
    hp = NanbeigeHParams(n_layer=6, n_loops=3, skip_loop_final_norm=False, **{**SIZES, "n_ff": (96, 64)})
    b = _build("nanbeige", hp)
    assert hp.n_ff == (96, 64) * 3 and b.kv.caches[0].layers == tuple(range(6))
    nodes = {t.name: t for t in b.graph.nodes}
    assert nodes["ffn_up-5"].src[0] is nodes["ffn_up-1"].src[0] and "loop_norm-2" in nodes and "loop_norm-4" in nodes
    assert not any(name.startswith("blk.2") for name in b.weights.asked)
    without = _build("nanbeige", replace(hp, skip_loop_final_norm=True))
    assert not any(t.name.startswith("loop_norm") for t in without.graph.nodes)
    with pytest.raises(ModelError, match="n_loops = 4: it must be positive, and the 6 layers a multiple of it"):
        replace(hp, n_loops=4, n_ff=96)
    with pytest.raises(ModelError, match=r"nanbeige\.num_loops must be 1 to 512, not 0"):
        get_architecture("nanbeige").read(Reader("nanbeige", {"nanbeige.num_loops": 0}))


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"learned_positions": True, "rope_layers": 0}, "their embeddings are in K and V"),
        ({"rope_type": "mrope", "rope_sections": (2, 3, 3, 0)}, "each has four of them"),
        ({"k_norm_last": True}, "K was normed after it was roped"),
    ],
)
def test_positions_that_tokens_keep(own: dict[str, Any], why: str) -> None:
    kv = KVCache(HParams(n_layer=1, **SIZES, **own), 64)
    one, pos = kv.pos[:2] * 0, kv.pos[:2] * 0
    slot = kv.slot_of(2, one)
    pos[1] = 1
    kv.hold(slot, pos, one, None)
    for move in (lambda: kv.seq_add(0, 0, -1, 3), lambda: kv.seq_div(0, 0, -1, 2)):
        with pytest.raises(GGMLError, match=f"cannot be given other positions: {why}"):
            move()
    assert kv.pos[:2].tolist() == [0, 1] and not kv.has_shift
    kv.seq_add(0, 5, -1, 3)  # of nothing


def test_sections_of_a_rope() -> None:
    with pytest.raises(ModelError, match=r"rope_sections = .*: it must be four whole numbers"):
        HParams(n_layer=1, **SIZES, rope_type="imrope", rope_sections=(0, 0, 0, 8))


def test_a_batch_alone() -> None:
    memory = get_architecture("dream").new_memory(HParams(n_layer=1, **SIZES, causal_attn=False), 64)
    assert memory.caches[0].transient
    cache = memory.caches[0]
    zeros = cache.pos[:2] * 0
    cache.hold(cache.slot_of(2, zeros), zeros, zeros, None)
    assert memory.used == 2
    memory.settle()
    assert memory.used == 0
