"""LoRA adapters: llama.cpp's logits, those of merged weights, every architecture, and adapters that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyggml.models.blocks import Adapters, Build, LowRank

import pyggml as gg
from pyggml.dtypes import DType
from pyggml.errors import GGUFError, ModelError
from pyggml.gguf_io.split import open_model
from pyggml.llm.adapters.lora import OUTPUT, TOKEN_EMBD, Lora, Pair
from pyggml.llm.adapters.merge import merge_lora
from pyggml.llm.model import Model, load_model
from pyggml.tensor import Context, Tensor

from ...models.archs import SPECS, VARIANTS, Tiny
from ...random_model import random_weights, write_random
from ...tiny_model import write_gguf
from .make import IDS, Arrays, distance, fresh, halves, logits, write_lora

Q = "blk.0.attn_q.weight"
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {  # name -> architecture, keys, optional tensors
    "llama": ("llama", {}, (OUTPUT,)),
    "tied": ("llama", {}, ()),
    "experts": ("llama", {"expert_count": 4, "expert_used_count": 2}, (OUTPUT,)),
    "shared expert": (
        "qwen2moe",
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 16,
            "expert_shared_feed_forward_length": 24,
        },
        (OUTPUT,),
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    arch, kv, optional = MODELS[request.param]
    return load_model(write_random(tmp_path / "m.gguf", arch, kv, random_weights(arch, kv, optional)), repack=False)


@pytest.fixture
def plain(tmp_path: Path) -> Model:
    return load_model(write_gguf(tmp_path / "tiny.gguf"))


def matrices(model: Model) -> list[str]:
    return [name for name, t in model.weights.items() if t.rank > 1 or ("shexp" in name and "inp" in name)]


# -- against llama.cpp


GOLDEN: tuple[tuple[str, Sequence[tuple[str, float]]], ...] = (
    ("base", ()),
    ("lora-all x1", (("lora-all", 1.0),)),
    ("lora-qv x0.5", (("lora-qv", 0.5),)),
    ("lora-all x0.7 + lora-qv x1.3", (("lora-all", 0.7), ("lora-qv", 1.3))),
)


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_llamacpp_logits(shared: Path, backend: str, flash_attn: bool) -> None:
    """One context, whose adapters are changed between decodes."""
    folder = shared / "golden" / "adapters"
    model = load_model(shared / "golden" / "llama" / "llama2-F32.gguf")
    loras = {name: model.load_lora(folder / f"{name}.gguf") for name in ("lora-all", "lora-qv")}
    ctx = fresh(model, backend=backend, flash_attn=flash_attn)
    with np.load(folder / "results.npz") as golden:
        for name, scaled in (*GOLDEN, *GOLDEN[::-1]):
            ctx.set_loras([(loras[lora], scale) for lora, scale in scaled])
            assert distance(logits(ctx, golden["tokens"].tolist()), golden[name]) <= 1e-10


# -- against merged weights


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_logits_are_those_of_merged_weights(model: Model, tmp_path: Path, dtype: Any) -> None:
    """With an adapter for every matrix, embeddings and (tied) output among them."""
    made = {name: a.astype(dtype) for name, a in halves(model, matrices(model)).items()}
    if OUTPUT not in model.weights:
        n, m = model.weights[TOKEN_EMBD].ne[:2]
        rng = np.random.default_rng(2)
        made |= {f"{OUTPUT}.lora_a": rng.standard_normal((4, n)), f"{OUTPUT}.lora_b": rng.standard_normal((m, 4))}
        made = {name: a.astype(dtype) for name, a in made.items()}
    lora = model.load_lora(write_lora(tmp_path / "l.gguf", made, model.arch))
    merge_lora(open_model(model.path), lora, 0.7, tmp_path / "merged.gguf")
    want = logits(fresh(load_model(tmp_path / "merged.gguf", repack=False)))
    for options in ({}, {"n_ubatch": 3}, {"flash_attn": True}, {"backend": "ref"}):
        ctx = fresh(model, **options)
        base = logits(ctx)
        ctx.set_loras([(lora, 0.7)])
        assert distance(logits(ctx), want) <= 1e-11 < distance(base, want)
        ctx.set_loras([(lora, 0.0)])
        assert np.array_equal(logits(ctx), base)


def test_merging_quantised_weights(tmp_path: Path, shared: Path) -> None:
    """Those that change become F16; the rest is as it was."""
    path, folder = shared / "golden" / "llama" / "llama2-Q4_0.gguf", shared / "golden" / "adapters"
    model = load_model(path)
    lora = model.load_lora(folder / "lora-qv.gguf")
    merge_lora(open_model(path), lora, 1.0, tmp_path / "m.gguf")
    before, after = open_model(path), open_model(tmp_path / "m.gguf")
    assert after.kv["general.file_type"] == 1
    for name, t in after.tensors.items():
        same = np.array_equal(after.tensor_bytes(name), before.tensor_bytes(name))
        assert (t.dtype is DType.F16, same) == ((True, False) if name in lora.pairs else (t.dtype is DType.F16, True))
    got, want = logits(fresh(load_model(tmp_path / "m.gguf"))), fresh(model)
    want.set_loras([(lora, 1.0)])
    assert distance(got, logits(want)) <= 1e-5
    with pytest.raises(GGUFError, match="the output is the input"):
        merge_lora(open_model(path), lora, 1.0, path)
    with pytest.raises(GGUFError, match=r"a weight becomes .* too large for F16: the adapter counts 2e\+30 times"):
        merge_lora(open_model(path), lora, 1e30, tmp_path / "huge.gguf")
    for scale in (1e31, float("inf"), float("nan")):
        with pytest.raises(ModelError, match=r"must be a number from -1e\+30 to 1e\+30, not"):
            merge_lora(open_model(path), lora, scale, tmp_path / "huge.gguf")
    assert not (tmp_path / "huge.gguf").exists()


# -- every architecture


@pytest.mark.skipif(not SPECS, reason="no golden data")
@pytest.mark.parametrize("name", VARIANTS)
def test_every_product_of_a_weight_is_adapted(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What reads weights in the graph of an architecture reads their adapters too, and each layer its direction."""
    t = Tiny(name, tmp_path_factory)
    hp, memory = t.model.hparams, t.context().memory
    sizes = tuple(c.size for c in memory.caches)

    def graph(adapters: Adapters) -> gg.Graph:
        b = Build(hp, t.model.weights, memory, 4, 4, sizes, adapters=adapters)
        return t.model.architecture.build(b)

    none = Adapters({}, {})
    products = {
        n.src[0].name: n.src[0]
        for n in graph(none).nodes
        if n.op in ("mul_mat", "mul_mat_id") and n.src[0] is not None and n.src[0].name in t.model.weights
    }
    if TOKEN_EMBD in products:
        products[OUTPUT] = products.pop(TOKEN_EMBD)
    ctx = Context()

    def leaf(*ne: int) -> Tensor:
        return ctx.new_tensor(DType.F32, ne)

    low_rank = {n: [LowRank(leaf(w.ne[0], 2, w.ne[2]), leaf(2, *w.ne[1:3]), leaf(1))] for n, w in products.items()}
    low_rank[TOKEN_EMBD] = [LowRank(leaf(2, hp.n_vocab), leaf(2, hp.n_embd), leaf(1))]
    Lora("", t.model.arch, {n: Pair(one.a, one.b, 1.0) for n, (one,) in low_rank.items()}).check(t.model)
    layers = (il for il in range(1, hp.n_layer) if hp.n_expert or hp.layer(il).n_ff)  # deci has some that do nothing
    control = {il: leaf(hp.n_embd) for il in layers}
    nodes = graph(Adapters(low_rank, control)).nodes
    assert {n.name for n in nodes if n.name.endswith(" (up)")} == {f"{n} (up)" for n in low_rank}
    assert {n.src[1] for n in nodes if n.name.startswith("l_out-")} >= set(control.values())


# -- contexts


def two(model: Model, tmp_path: Path) -> list[gg.llm.adapters.lora.Lora]:
    return [
        model.load_lora(write_lora(tmp_path / f"{i}.gguf", halves(model, matrices(model)[i::2], seed=i)))
        for i in range(2)
    ]


def test_scales_change_nothing_but_numbers(plain: Model, tmp_path: Path) -> None:
    """Other scales run the same graphs; adapters that come back find theirs."""
    a, b = two(plain, tmp_path)
    ctx = fresh(plain)
    first: dict[tuple[float, ...], Any] = {}
    for scales in ((1.0, 0.5), (0.0, 2.0), (1.0, 0.5), (-1.5, 0.25), (0.0, 2.0), (0.0, 0.0)):
        ctx.set_loras([(a, scales[0]), (b, scales[1])])
        assert ctx.loras == ((a, scales[0]), (b, scales[1]))
        got = logits(ctx)
        assert np.array_equal(first.setdefault(scales, got), got)
    n = ctx.n_graphs
    for scale in (3.0, 4.0, 5.0):
        ctx.set_loras([(a, scale), (b, 1.0)])
        logits(ctx)
    assert ctx.n_graphs == n


def test_states_and_sequences(plain: Model, tmp_path: Path) -> None:
    a, b = two(plain, tmp_path)
    ctx, other = fresh(plain, n_seq_max=3), fresh(plain)
    for c in (ctx, other):
        c.set_loras([(a, 1.0), (b, -0.5)])
    alone = logits(other)
    three = logits(ctx, seqs=(0, 1, 2))
    assert all(distance(rows, alone) <= 1e-11 for rows in np.split(three, 3))
    other.decode([5])
    want = other.logits.copy()
    other.memory.seq_rm(0, len(IDS))
    other.save_state(tmp_path / "state")
    again = fresh(plain)
    again.load_state(tmp_path / "state")
    again.set_loras([(a, 1.0), (b, -0.5)])
    again.decode([5])
    assert distance(again.logits, want) <= 1e-12
    for _ in range(6):  # graphs that serve a range of n_kv
        for c in (again, other):
            c.decode([7])
        assert np.isfinite(again.logits).all()


def test_new_contexts_begin_with_what_the_model_was_adapted_to(plain: Model, tmp_path: Path) -> None:
    a, _ = two(plain, tmp_path)
    base = "".join(plain.generate([5, 6], 12, temp=0))
    ctx = fresh(plain)
    ctx.set_loras([(a, 2.0)])
    plain.adapt([(a, 2.0)])
    assert np.array_equal(logits(fresh(plain)), logits(ctx))
    assert "".join(plain.generate([5, 6], 12, temp=0)) != base
    plain.adapt()
    assert "".join(plain.generate([5, 6], 12, temp=0)) == base


def test_an_adapter_serves_every_model_that_it_fits(plain: Model, tmp_path: Path) -> None:
    a, _ = two(plain, tmp_path)
    twin = load_model(plain.path)
    for model in (plain, twin):
        ctx = fresh(model)
        ctx.set_loras([(a, 1.0)])
        logits(ctx)
        model.close()
        with pytest.raises(ModelError, match="was closed"):
            ctx.set_loras([])
    other = load_model(write_gguf(tmp_path / "o.gguf", {"llama.embedding_length": 64}))
    with pytest.raises(ModelError, match=r"does not fit the weight .* ne \[64, .*lora_a"):
        fresh(other).set_loras([(a, 1.0)])


# -- what does not fit


def damaged(made: Arrays, drop: str = "", **new: Any) -> Arrays:
    rest = {n: a for n, a in made.items() if n != drop}
    return rest | {n.replace("__", "."): np.zeros(shape, np.float32) for n, shape in new.items()}


@pytest.mark.parametrize(
    ("changes", "kv", "text"),
    [
        ({}, {"arch": "qwen2"}, "an adapter for 'qwen2'.*architecture 'llama'"),
        ({}, {"general_type": "model"}, "general.type is 'model'"),
        ({}, {"general_type": None}, "general.type is None"),
        ({}, {"adapter_type": "ia3"}, "adapter.type is 'ia3'"),
        ({}, {"adapter_lora_alpha": "8"}, "adapter.lora.alpha a number"),
        ({}, {"adapter_lora_alpha": float("nan")}, "adapter.lora.alpha is nan, not from"),
        ({}, {"adapter_lora_alpha": float("-inf")}, "adapter.lora.alpha is -inf, not from"),
        ({"drop": f"{Q}.lora_b"}, {}, r"blk.0.attn_q.weight.lora_a.*no other half.*attn_q.weight.lora_b"),
        ({"blk__9__attn_q__weight__lora_a": (4, 32), "blk__9__attn_q__weight__lora_b": (32, 4)}, {}, "blk.9.attn_q"),
        ({"blk__0__attn_q__weight__lora_a": (4, 31)}, {}, r"attn_q.weight: F32 ne \[32.*lora_a: F32 ne \[31, 4"),
        ({"blk__0__attn_q__weight__lora_b": (4, 32)}, {}, r"lora_b: F32 ne \[32, 4"),
        ({"blk__0__attn_q__weight__lora_a": (2, 4, 32)}, {}, r"lora_a: F32 ne \[32, 4, 2"),
        ({"blk__0__attn_q__bias": (32,)}, {}, "blk.0.attn_q.bias is neither"),
    ],
)
def test_adapters_that_do_not_fit(
    plain: Model, tmp_path: Path, changes: dict[str, Any], kv: dict[str, Any], text: str
) -> None:
    made = damaged(halves(plain, [Q, "blk.1.ffn_up.weight"]), **changes)
    with pytest.raises(ModelError, match=text):
        plain.load_lora(write_lora(tmp_path / "l.gguf", made, kv.pop("arch", "llama"), **kv))


@pytest.mark.parametrize("bad", [5, [5], [("a.gguf", 1.0)], "x", [(None, 1.0)]])
def test_what_is_no_adapter(plain: Model, bad: Any) -> None:
    with pytest.raises((ModelError, TypeError)):
        fresh(plain).set_loras(bad)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "1", None, 1j])
def test_what_is_no_scale(plain: Model, tmp_path: Path, scale: Any) -> None:
    """Then all is as it was."""
    a, b = two(plain, tmp_path)
    ctx = fresh(plain)
    ctx.set_loras([(a, 1.0)])
    want = logits(ctx)
    with pytest.raises(ModelError, match="scale of the adapter"):
        ctx.set_loras([(b, 1.0), (a, scale)])
    with pytest.raises(ModelError, match="given twice"):
        ctx.set_loras([(b, 1.0), (b, 2.0)])
    assert ctx.loras == ((a, 1.0),) and np.array_equal(logits(ctx), want)


def test_files_that_are_no_adapters(plain: Model, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for path in ("x.gguf", "none.gguf"):
        with pytest.raises(GGUFError, match=path):
            plain.load_lora(tmp_path / path)
    with pytest.raises(ModelError, match="vocab_only=True"):
        load_model(plain.path, vocab_only=True).load_lora(tmp_path / "x.gguf")
    for bad in (5, None, b"\0"):
        with pytest.raises(ModelError):
            plain.load_lora(bad)  # type: ignore[arg-type]


def test_numbers_that_are_not_finite(plain: Model, tmp_path: Path) -> None:
    for half, bad in (("lora_a", np.nan), ("lora_b", -np.inf)):
        made = halves(plain, [Q])
        made[f"{Q}.{half}"][1, 2] = bad
        with pytest.raises(ModelError, match=rf"attn_q.weight.{half}.*not finite"):
            plain.load_lora(write_lora(tmp_path / "l.gguf", made))


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "output_norm.weight"])
def test_weights_that_no_product_has(plain: Model, tmp_path: Path, name: str) -> None:
    """An adapter of a norm would change nothing, and a merged model would be another than the one that is adapted."""
    with pytest.raises(ModelError, match=f"an adapter of {name} changes nothing"):
        plain.load_lora(write_lora(tmp_path / "l.gguf", halves(plain, [name])))


@pytest.mark.skipif(not SPECS, reason="no golden data")
@pytest.mark.parametrize(
    ("variant", "role"),
    [
        ("rwkv6-dense", "blk.0.time_mix_lerp_x"),
        ("rwkv6-dense", "blk.0.time_mix_first"),
        ("deepseek4-moe", "blk.2.attn_compressor_ape"),
        ("qwen4exp-moe", "per_layer_token_embd"),  # Gemma's, in which rows are looked up
    ],
)
def test_other_weights_that_no_product_has(
    variant: str, role: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, name = Tiny(variant, tmp_path_factory).model, f"{role}.weight"
    with pytest.raises(ModelError, match=f"an adapter of {name} changes nothing"):
        model.load_lora(write_lora(tmp_path / "l.gguf", halves(model, [name]), arch=model.arch))
