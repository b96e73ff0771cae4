"""Heads that ship in a file and draft (multi-token prediction): what each gives, against float64, and drafting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyggml.models import PAGES, get_architecture
from pyggml.tools.cli import main

from pyggml.dtypes import DType
from pyggml.errors import BatchError, ModelError
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.generate.drafters import HeadDrafter
from pyggml.llm.generate.generation import Generation
from pyggml.llm.generate.long_context import LongContext
from pyggml.llm.generate.speculative import with_draft
from pyggml.llm.model import Model, load_model
from pyggml.llm.samplers import SamplerChain, SamplingParams

from ...plain_llama import nmse
from ...random_model import Arrays, random_weights, write_random
from .plain_head import Family, PlainHead

MOE: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}
MOE |= {"expert_shared_count": 1, "expert_shared_feed_forward_length": 16, "leading_dense_block_count": 1}
MOE |= {"expert_weights_norm": True, "expert_weights_scale": 1.5, "expert_gating_func": 2}
SSM: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.inner_size": 32, "ssm.state_size": 8, "ssm.time_step_rank": 4}
SSM |= {"ssm.group_count": 2, "rope.dimension_count": 4}
MLA: dict[str, Any] = {"attention.q_lora_rank": 12, "attention.kv_lora_rank": 16, "attention.head_count_kv": 1}
MLA |= {"attention.key_length": 24, "attention.value_length": 16, "rope.dimension_count": 8}
MLA |= {"attention.key_length_mla": 12, "attention.value_length_mla": 8}
INDEXER = {f"attention.indexer.{k}": v for k, v in (("head_count", 2), ("key_length", 8), ("top_k", 512))}
SECTIONS = {"rope.dimension_sections": [1, 1, 0, 0]}
WINDOWS = {"attention.sliding_window": 8, "attention.sliding_window_pattern": [0, 1, 0, 1, 1, 1]}
QWEN = Family(gate=True, n_rot=4, ffn_norm="post_attention_norm", softmax=True)
LATENT = Family(latent=(16, 8), neox=False)
FAMILIES: dict[str, tuple[dict[str, Any], Family]] = {  # layers of the file; what a head is
    "glm4moe": (MOE | {"block_count": 3}, Family(ffn_norm="post_attention_norm")),
    "glm4": ({"block_count": 3}, Family(neox=False, post=True)),
    "deepseek2": (MOE | MLA | {"block_count": 3}, LATENT),
    "deepseek32": (MOE | MLA | INDEXER | {"block_count": 3}, LATENT),
    "glm-dsa": (MOE | MLA | INDEXER | {"block_count": 3}, LATENT),
    "bailingmoe2": (MOE | {"block_count": 3}, Family()),
    "hy_v3": (MOE | {"block_count": 4, "nextn_predict_layers": 2}, Family()),
    "mimo2": (
        {**MOE, **WINDOWS, "block_count": 6, "nextn_predict_layers": 3, "attention.value_scale": 0.5}
        | {"attention.head_count_kv": [2, 1, 2, 1, 1, 1]},
        Family(window=8, attn_scale=0.5, normed=False),
    ),
    "cohere2moe": (
        MOE | {"block_count": 6, "attention.sliding_window": 8, "logit_scale": 0.5},
        Family(neox=False, window=8, parallel=True, logit_scale=0.5),
    ),
    "bailingmoe3": (
        MOE
        | MLA
        | {"ssm.conv_kernel": 4, "kda.head_dim": 8, "kda.gate_lower_bound": -5.0, "block_count": 4}
        | {"attention.head_count_kv": [0, 1, 0, 1]},
        replace(LATENT, head_gate=True),
    ),
    "nemotron_h_moe": (
        MOE
        | SSM
        | {"attention.head_count_kv": [0, 2, 0, 2], "feed_forward_length": [0, 0, 16, 16]}
        | {"moe_latent_size": 24, "block_count": 4},
        Family(n_rot=0, relu_sqr=True, ffn_norm="post_attention_norm"),
    ),
    "qwen3next": ({**MOE, **SSM, "expert_gating_func": 1, "block_count": 5}, QWEN),
    "qwen35": (SSM | SECTIONS | {"block_count": 5}, QWEN),
    "qwen35moe": ({**MOE, **SSM, **SECTIONS, "expert_gating_func": 1, "block_count": 5}, QWEN),
}
IDS = np.random.default_rng(1).integers(0, 64, 40).tolist()
NONE: tuple[str, ...] = ()


def made(
    arch: str, own: tuple[str, ...] = NONE, more: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], Arrays]:
    """Metadata, with `more`, and weights; the heads have `own` weights beside those that they must have."""
    kv = {"nextn_predict_layers": 1, **FAMILIES[arch][0], **(more or {})}
    weights = random_weights(arch, kv)
    rng = np.random.default_rng(5)
    for name, w in weights.items():
        if name.endswith("ssm_a"):  # a decay
            weights[name] = -np.abs(w)
    for il in range(kv["block_count"] - kv["nextn_predict_layers"], kv["block_count"]):
        for name in own:
            shape = (32,) if "norm" in name else (64, 32)
            weights[f"blk.{il}.{name}.weight"] = (1 + rng.standard_normal(shape) / 4).astype(np.float32)
    return kv, weights


def loaded(path: Path, arch: str, kv: dict[str, Any], weights: Arrays) -> Model:
    return load_model(write_random(path / f"{arch}.gguf", arch, kv, weights))


def greedy(model: Model, n: int = 24, prompt: list[int] = IDS[:12], n_ctx: int = 128, **options: Any) -> Generation:
    chain = SamplerChain(SamplingParams(temp=0.0), model.vocab)
    return Generation(model.new_context(n_ctx, n_threads=1, **options), prompt, chain, n)


def ids_of(g: Generation) -> list[int]:
    list(g)
    return g.ids


def test_every_architecture_with_heads_is_tested() -> None:
    assert {name for name in PAGES if get_architecture(name).nextn} == FAMILIES.keys()


@pytest.mark.parametrize("own", [NONE, ("nextn.embed_tokens", "nextn.shared_head_head", "nextn.shared_head_norm")])
@pytest.mark.parametrize("arch", FAMILIES)
def test_heads_against_float64(tmp_path: Path, arch: str, own: tuple[str, ...]) -> None:
    """A batch of two parts, and a token more; hidden states are any."""
    kv, weights = made(arch, own)
    model = loaded(tmp_path, arch, kv, weights)
    assert len(model.heads) == kv["nextn_predict_layers"] and not model.unused
    hidden = np.random.default_rng(2).standard_normal((len(IDS), 32)).astype(np.float32)
    for i, head in enumerate(model.heads):
        logits, after = PlainHead(weights, model.hparams.n_layer + i, FAMILIES[arch][1])(np.array(IDS), hidden)
        ctx = LlamaContext(head, 64, n_ubatch=16, n_threads=1, type_k=DType.F32, type_v=DType.F32)
        ctx.keep_hidden()
        got, states = [], []
        for part in (slice(0, 39), slice(39, 40)):
            batch = Batch()
            for at in range(*part.indices(len(IDS))):
                batch.add_hidden(IDS[at], hidden[at], at, logits=True)
            ctx.decode(batch)
            got.append(ctx.logits)
            states.append(ctx.hidden)
        assert nmse(np.concatenate(got), logits) < 1e-9
        assert nmse(np.concatenate(states), after) < 1e-9


@pytest.mark.parametrize("arch", FAMILIES)
def test_hidden_states_are_what_logits_are_made_of(tmp_path: Path, arch: str) -> None:
    kv, weights = made(arch)
    model = loaded(tmp_path, arch, kv, weights)
    ctx, plain = (model.new_context(64, n_ubatch=16, n_threads=1) for _ in range(2))
    ctx.keep_hidden()
    for c in (plain, ctx):
        c.decode(IDS)
    assert ctx.hidden.shape == (40, 32) and np.array_equal(ctx.logits, plain.logits)
    hidden = ctx.hidden.astype(np.float64)
    if not FAMILIES[arch][1].normed:
        hidden = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-5) * weights["output_norm.weight"]
    logits = hidden @ weights["output.weight"].T * FAMILIES[arch][1].logit_scale
    assert nmse(ctx.logits[0], logits[-1]) < 1e-9
    plain.memory.clear()
    batch = Batch.prompt(IDS)
    batch.logits = [True] * 40
    plain.decode(batch)
    assert nmse(plain.logits, logits) < 1e-9


@pytest.mark.parametrize("arch", FAMILIES)
def test_greedy_ids_are_those_of_plain_decoding(tmp_path: Path, arch: str) -> None:
    """Random heads are seldom right: most drafts are taken back, states of recurrent layers, too."""
    model = loaded(tmp_path, arch, *made(arch))
    plain = ids_of(greedy(model))
    for n in (1, 5):
        g = with_draft(greedy(model), model.heads, n)
        assert ids_of(g) == plain
        most = n if len(model.heads) == 1 else min(n, len(model.heads))
        assert g.stats.n_drafts <= g.stats.n_drafted <= most * g.stats.n_drafts
        assert g.stats.acceptance < 0.5


def knowing(arch: str) -> tuple[dict[str, Any], Arrays]:
    """A model whose layers add nothing: a token follows from the one before. Its heads pass the embedding on."""
    kv, weights = made(arch)
    for name, w in weights.items():
        if any(end in name for end in ("attn_output.weight", "ssm_out", "ffn_down")):
            w[:] = 0
        if name.endswith("norm.weight"):
            w[:] = 1
        if name.endswith("eh_proj.weight"):
            w[:] = np.eye(32, 64)
    return kv, weights


@pytest.mark.parametrize("arch", FAMILIES)
def test_heads_that_know_are_always_right(tmp_path: Path, arch: str) -> None:
    model = loaded(tmp_path, arch, *knowing(arch))
    n = 4 if len(model.heads) == 1 else len(model.heads)
    g = with_draft(greedy(model, 2 + 5 * (n + 1)), model.heads, 4)
    assert ids_of(g) == ids_of(greedy(model, 2 + 5 * (n + 1)))
    # the first token follows from the prompt, and each batch gives one beside the guesses; the last is but a token
    assert (g.stats.n_drafts, g.stats.n_drafted, g.stats.n_accepted) == (5, 5 * n, 5 * n)
    assert str(g.stats).startswith("draft acceptance = 1.00000")


@pytest.mark.parametrize("arch", ["glm4moe", "mimo2", "qwen3next"])
@pytest.mark.parametrize(
    "options", [{"n_batch": 7}, {"n_batch": 16, "n_ubatch": 5}, {"flash_attn": True}, {"type_k": DType.BF16}]
)
def test_prompts_in_parts(tmp_path: Path, arch: str, options: dict[str, Any]) -> None:
    """The heads see all of the prompt, or what fits."""
    model = loaded(tmp_path, arch, *knowing(arch))
    g = with_draft(greedy(model, 20, IDS, **options), model.heads, 3)
    assert ids_of(g) == ids_of(greedy(model, 20, IDS, **options))
    assert g.stats.acceptance == 1


def test_a_head_sees_what_the_model_evaluated(tmp_path: Path) -> None:
    """In the end its cache holds what it would have of the text at once."""
    kv, weights = made("glm4moe")
    model = loaded(tmp_path, "glm4moe", kv, weights)
    g = with_draft(greedy(model, 30, IDS[:20], n_batch=8), model.heads, 3)
    text = IDS[:20] + ids_of(g)
    ctx = model.new_context(128, n_threads=1)
    ctx.keep_hidden()
    ctx.decode(text[:48])
    pairs = np.array(text[1:48]), ctx.hidden[:-1]
    assert isinstance(g.drafter, HeadDrafter)
    g.drafter.draft(text[:48], 1)  # the last tokens may have come in a pause
    seen = g.drafter._heads[0]
    seen.rewind(48)
    batch = Batch()
    batch.add_hidden(text[48], ctx.hidden[-1], seen.ctx.memory.seq_pos_max(0) + 1, logits=True)
    assert seen.end == 48 and seen.ctx.memory.seq_pos_max(0) == 46
    seen.ctx.decode(batch)
    logits, _ = PlainHead(weights, 2, FAMILIES["glm4moe"][1])(
        np.append(pairs[0], text[48]), np.concatenate((pairs[1], ctx.hidden[-1:]))
    )
    assert nmse(seen.ctx.logits[0], logits[-1]) < 1e-5  # K and V in F16


@pytest.mark.parametrize("arch", ["glm4moe", "mimo2"])
def test_context_shift(tmp_path: Path, arch: str) -> None:
    model = loaded(tmp_path, arch, *knowing(arch))

    def new() -> Generation:
        g = greedy(model, 150, n_ctx=64)
        g.long = LongContext(g.ctx, 2, context_shift=True)
        return g

    g = with_draft(new(), model.heads, 3)
    assert ids_of(g) == ids_of(new())
    assert len(g.ids) == 150 and g.stats.acceptance > 0.9


def test_guessing_stops(tmp_path: Path) -> None:
    model = loaded(tmp_path, "glm4moe", *made("glm4moe"))
    for p_min, n_min, n in ((1.0, 0, 0), (1.0, 2, 2), (0.0, 0, 3)):
        g = with_draft(greedy(model, 8), model.heads, 3, n_min, p_min)
        assert ids_of(g) == ids_of(greedy(model, 8))
        first = g.stats.n_drafted / max(g.stats.n_drafts, 1)
        assert first <= n and (first > 0) == (n > 0)


def test_sampled_drafts(tmp_path: Path) -> None:
    """Heads that know agree with what the samplers leave of the model's distribution."""
    model = loaded(tmp_path, "qwen35", *knowing("qwen35"))
    chain = SamplerChain(SamplingParams(temp=1.0, top_k=2, top_p=1.0, min_p=0.0, seed=4), model.vocab)
    g = with_draft(Generation(model.new_context(128, n_threads=1), IDS[:5], chain, 60), model.heads, 3)
    assert len(ids_of(g)) == 60 and g.stats.acceptance == 1


def test_some_of_the_prompt_is_known(tmp_path: Path) -> None:
    """What the model evaluated before is nothing that a head has seen."""
    model = loaded(tmp_path, "deepseek2", *knowing("deepseek2"))
    g = greedy(model, 20)
    g.ctx.decode(IDS[:9])
    g.n_past = 9
    drafted = with_draft(g, model.heads, 3)
    assert ids_of(drafted) == ids_of(greedy(model, 20)) and drafted.stats.acceptance == 1


# -- errors -----------------------------------------------------------------------------------------------------------


def test_files_without_heads(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(ModelError, match="has no heads that draft"):
        _ = load_model(tiny).heads
    kv, weights = made("glm4moe")
    without = {k: w for k, w in weights.items() if not k.startswith("blk.2.")}  # as some converters leave it
    model = loaded(tmp_path, "glm4moe", kv, without)
    with pytest.raises(ModelError, match="has no heads that draft"):
        _ = model.heads
    assert len(ids_of(greedy(model, 4))) == 4
    with pytest.raises(ModelError, match="no heads"):
        with_draft(greedy(model, 4), ())
    kv = {**kv, "nextn_predict_layers": 2, "block_count": 2}
    with pytest.raises(ModelError, match="n_layer"):
        loaded(tmp_path, "glm4moe", kv, weights)


def test_heads_that_cannot_be_used(tmp_path: Path) -> None:
    kv, weights = made("glm4moe")
    lacking = {k: w for k, w in weights.items() if k != "blk.2.nextn.hnorm.weight"}
    model = loaded(tmp_path, "glm4moe", kv, lacking)
    with pytest.raises(ModelError, match=r"no tensor blk\.2\.nextn\.hnorm\.weight \(expected ne \[32\]\)"):
        _ = model.heads
    path = write_random(tmp_path / "m.gguf", "glm4moe", kv, weights)
    with pytest.raises(ModelError, match="ram="):
        _ = load_model(path, ram="1GiB").heads
    extra = {"blk.2.nextn.eh_proj.weight": np.zeros((32, 64), np.float32)}
    kv = {"block_count": 2, "attention.head_count_kv": 2}
    other = random_weights("qwen3", kv) | extra
    model = loaded(tmp_path, "qwen3", {**kv, "block_count": 3, "nextn_predict_layers": 1}, other)
    with pytest.raises(ModelError, match="heads of qwen3 that draft are not supported"):
        _ = model.heads
    assert model.unused == list(extra)


def test_batches_of_heads(tmp_path: Path) -> None:
    model = loaded(tmp_path, "glm4moe", *made("glm4moe"))
    ctx, head = model.new_context(32, n_threads=1), LlamaContext(model.heads[0], 32, n_threads=1)
    row = np.zeros(32, np.float32)
    both = Batch()
    both.add_hidden(3, row, 0, logits=True)
    with pytest.raises(BatchError, match="reads tokens or embeddings, not both"):
        ctx.decode(both)
    tokens, embd = Batch.prompt([1, 2]), Batch()
    embd.add_embd(row, 0)
    for batch in (tokens, embd, [1, 2]):
        with pytest.raises(BatchError, match="reads hidden states beside its tokens"):
            head.decode(batch)
    for batch in (tokens, embd):
        with pytest.raises(BatchError, match="cannot have both of one"):
            batch.add_hidden(3, row, 2)
    for wrong in (lambda: both.add(1, 1), lambda: both.add_embd(row, 1)):
        with pytest.raises(BatchError, match="cannot be added"):
            wrong()
    for bad in (row[None], np.full(32, np.nan, np.float32), row[:5]):
        with pytest.raises(BatchError, match="embedding"):
            both.add_hidden(1, bad, 1)
    assert len(both) == 1
    head.decode(both)
    with pytest.raises(ModelError, match="no hidden states"):
        model.new_context(32, embeddings=True).keep_hidden()
    model.close()
    with pytest.raises(ModelError, match="closed"):
        head.decode(both)


def test_command_line(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: object, code: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as e:
            main(["generate", *map(str, args)])
        assert e.value.code == code
        return capsys.readouterr()

    kv, weights = knowing("qwen3next")
    tokens = ["<unk>", "<s>", "</s>", *(chr(0x4E00 + i) for i in range(61))]
    m = write_random(tmp_path / "m.gguf", "qwen3next", kv, weights, tokens)
    args = ("-m", m, "-p", chr(0x4E05), "-n", 22, "--temp", 0, "--ignore-eos", "-t", 1, "--json")
    plain, drafted = (json.loads(run(*args, *more)[0]) for more in ((), ("--mtp", "--draft-max", 4)))
    assert drafted["ids"] == plain["ids"]
    assert drafted["timings"]["draft_n"] == drafted["timings"]["draft_n_accepted"] > 0
    assert "has no heads that draft" in run("-m", tiny, "-p", "a", "--mtp", code=1)[1]
    assert "only one of" in run("-m", tiny, "-p", "a", "--mtp", "--lookup", code=2)[1]
