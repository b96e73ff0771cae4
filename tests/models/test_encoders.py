"""Encoders against the transformers library's hidden states (float64), or, where there are none, against a forward pass
in float64; rerankers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from pyggml.models import get_architecture
from pyggml.models.weights import ShapeOnlyWeights

from pyggml.errors import BatchError, ModelError
from pyggml.llm.batch import Batch
from pyggml.llm.model import Model, load_model

from ..conftest import shared_dir
from ..gguf_files import write_all
from ..hf.checkpoint import bfloat16_tensors

FOLDER = shared_dir() / "golden" / "hf"
Array = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
MAX_NMSE = 1e-11
ARCHS = {
    "bert": "bert",
    "xlm-roberta": "bert",
    "nomic-bert": "nomic-bert",
    "modernbert": "modern-bert",
    "eurobert": "eurobert",
    "gemma-embedding": "gemma-embedding",
}


def nmse(got: Array, want: Array | Doubles) -> float:
    return float(((got.astype(np.float64) - want) ** 2).sum() / (want.astype(np.float64) ** 2).sum())


def write(path: Path, arch: str, kv: dict[str, Any], tensors: dict[str, Array]) -> None:
    w = gguf.GGUFWriter(path, arch)
    for key, value in kv.items():
        kind = {bool: w.add_bool, float: w.add_float32, str: w.add_string, list: w.add_array}.get(type(value))
        (kind or w.add_uint32)(key if key.startswith("tokenizer.") else f"{arch}.{key}", value)
    for name, a in tensors.items():
        w.add_tensor(name, np.ascontiguousarray(a))
    w.add_tokenizer_model("none")
    write_all(w)


def convert_t5(name: str, path: Path) -> None:
    """The encoder of a T5."""
    c: dict[str, Any] = json.loads((FOLDER / name / "config.json").read_text())
    kv = {
        "vocab_size": c["vocab_size"],
        "context_length": 64,
        "embedding_length": c["d_model"],
        "block_count": c["num_layers"],
        "feed_forward_length": c["d_ff"],
        "attention.head_count": c["num_heads"],
        "attention.key_length": c["d_kv"],
        "attention.value_length": c["d_kv"],
        "attention.layer_norm_rms_epsilon": c["layer_norm_epsilon"],
        "attention.relative_buckets_count": c["relative_attention_num_buckets"],
        "attention.relative_buckets_max_distance": c["relative_attention_max_distance"],
    }
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, c["num_layers"])
    there = bfloat16_tensors(FOLDER / name / "model.safetensors")
    tensors = {names.get_name(n, (".weight",)): a for n, a in there.items() if not n.startswith("decoder")}
    write(path, "t5encoder", kv, {str(n): a for n, a in tensors.items()})


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no golden data in {FOLDER}")
@pytest.mark.parametrize("name", ["t5", "t5-relu-tied"])
def test_t5_encoder(tmp_path: Path, name: str) -> None:
    convert_t5(name, tmp_path / "m.gguf")
    model = load_model(tmp_path / "m.gguf", repack=False)
    assert not model.weights.unused
    with np.load(FOLDER / "logits.npz") as golden:
        ids, want = golden[f"{name}/tokens"].tolist(), golden[f"{name}/hidden"]
    for flash_attn in (False, True):
        ctx = model.new_context(n_ctx=64, flash_attn=flash_attn)
        ctx.decode(ids)
        assert nmse(ctx.embeddings, want) <= MAX_NMSE
    together = model.embed([ids[:5], ids], normalize=False)
    assert nmse(together[1], want.mean(axis=0)) <= MAX_NMSE
    assert nmse(together[:1], model.embed([ids[:5]], normalize=False)) <= MAX_NMSE


@pytest.fixture(scope="module")
def bert() -> Model:
    if not FOLDER.is_dir():
        pytest.skip(f"no golden data in {FOLDER}")
    return load_model(FOLDER / "bert")


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no golden data in {FOLDER}")
@pytest.mark.parametrize("name", sorted(ARCHS))
def test_hidden_states(name: str) -> None:
    model = load_model(FOLDER / name, repack=False)
    assert model.arch == ARCHS[name] and not model.weights.unused
    with np.load(FOLDER / "logits.npz") as golden:
        ids, want = golden[f"{name}/tokens"].tolist(), golden[f"{name}/hidden"]
    for flash_attn in (False, True):
        ctx = model.new_context(n_ctx=64, flash_attn=flash_attn)
        ctx.decode(ids)
        assert nmse(ctx.embeddings, want) <= MAX_NMSE
    assert nmse(model.embed([ids], "mean", normalize=False), want.mean(axis=0, keepdims=True)) <= MAX_NMSE
    together = model.embed([ids[:9], ids, ids[3:7]], "cls", normalize=False)
    assert nmse(together[1], want[0]) <= MAX_NMSE
    assert (
        nmse(together, np.concatenate([model.embed([t], "cls", False) for t in (ids[:9], ids, ids[3:7])])) <= MAX_NMSE
    )


def test_no_memory(bert: Model) -> None:
    ctx = bert.new_context(n_ctx=64, n_ubatch=16)
    assert ctx.memory.nbytes == 0 and ctx.pooling == "none"
    ctx.decode([5, 6, 7])
    first = ctx.embeddings.copy()
    assert ctx.memory.used == 0 and ctx.logits.shape == (0, bert.hparams.n_vocab)
    ctx.decode([5, 6, 7])
    np.testing.assert_array_equal(ctx.embeddings, first)
    with pytest.raises(BatchError, match="only n_ubatch = 16 run together"):
        ctx.decode(list(range(17)))
    with pytest.raises(ModelError, match="it is an encoder"):
        bert.new_context(n_ctx=64, embeddings=False)
    with pytest.raises(BatchError, match="the model takes 1 to 256"):
        bert.embed([[1] * 257])


def test_hidden_activation(tmp_path: Path, bert: Model) -> None:
    """Without the key, gelu is the one with a tanh, as in llama.cpp; one that is not known is an error."""
    with pytest.raises(ModelError, match="hidden_activation is 'mish'; known are gelu"):
        load_model(bert.path, kv_overrides={"bert.hidden_activation": "mish"})
    ids = [5, 6, 7, 8]
    tanh = load_model(bert.path, kv_overrides={"bert.hidden_activation": "gelu_new"})
    d = nmse(tanh.embed([ids]), bert.embed([ids]))
    assert 1e-12 < d < 1e-4


# -- where there is no checkpoint: a forward pass in float64 -----------------------------------------------------------

BASE = {
    "vocab_size": 64,
    "context_length": 64,
    "embedding_length": 32,
    "block_count": 4,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.token_type_count": 2,
}
N_HEAD, HEAD, N_LAYER = 4, 8, 4
_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output", "attn_output_norm", "layer_output_norm", "ffn_up", "ffn_down")
IDS = np.random.default_rng(3).integers(0, 64, 20).tolist()


def made(path: Path, arch: str, kv: dict[str, Any], optional: set[str]) -> dict[str, Doubles]:
    """Write a model with random weights: those it must have, and `optional` ones (of every layer `blk.N.`)."""
    rng = np.random.default_rng(7)
    there = {name.replace("blk.N", f"blk.{il}") for name in optional for il in range(N_LAYER)}
    shapes = ShapeOnlyWeights(there)
    full = {k if k.startswith("tokenizer.") else f"{arch}.{k}": v for k, v in kv.items()}
    architecture = get_architecture(arch)
    architecture.declare(architecture.hparams(arch, full), shapes)
    assert there <= set(shapes)
    tensors = {
        name: rng.standard_normal(t.shape) * (0.2 if len(t.shape) > 1 else 0.5) + ("norm.w" in name)
        for name, t in shapes.items()
    }
    write(path, arch, kv, {name: a.astype(np.float32) for name, a in tensors.items()})
    return {name: a.astype(np.float32).astype(np.float64) for name, a in tensors.items()}


def layer_norm(x: Doubles, w: dict[str, Doubles], role: str) -> Doubles:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * w[f"{role}.weight"] + w.get(f"{role}.bias", np.zeros(1))


def rms_norm(x: Doubles, w: Doubles) -> Doubles:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def linear(x: Doubles, w: dict[str, Doubles], role: str) -> Doubles:
    return x @ w[f"{role}.weight"].T + w.get(f"{role}.bias", np.zeros(1))


def gelu(x: Doubles) -> Doubles:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rope(x: Doubles, pairs: Callable[[int], tuple[int, int]]) -> Doubles:
    """x [n_tokens, n_head, HEAD]; pair i turns by position * 10000^(-2 i / HEAD)."""
    out = x.copy()
    for i in range(HEAD // 2):
        a, b = pairs(i)
        angle = np.arange(len(x))[:, None] * 10000.0 ** (-2 * i / HEAD)
        out[..., a] = x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle)
        out[..., b] = x[..., a] * np.sin(angle) + x[..., b] * np.cos(angle)
    return out


def attention(q: Doubles, k: Doubles, v: Doubles, alibi: bool = False) -> Doubles:
    n = len(q)
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(HEAD)
    if alibi:
        slopes = 2.0 ** (-8.0 * (np.arange(N_HEAD) + 1) / N_HEAD)
        scores -= slopes[:, None, None] * np.abs(np.arange(n)[:, None] - np.arange(n))
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)


def heads(x: Doubles) -> Doubles:
    return x.reshape(len(x), N_HEAD, HEAD)


def post_norm(w: dict[str, Doubles], roped: bool, alibi: bool, experts: bool) -> Doubles:
    """BERT's forward pass; `experts`: 2 of those of every other layer, weighted by the softmax of all."""
    x = layer_norm(w["token_embd.weight"][IDS] + w["token_types.weight"][0], w, "token_embd_norm")
    for il in range(N_LAYER):
        p = f"blk.{il}."
        q, k = linear(x, w, p + "attn_q"), linear(x, w, p + "attn_k")
        if p + "attn_q_norm.weight" in w:
            q, k = layer_norm(q, w, p + "attn_q_norm"), layer_norm(k, w, p + "attn_k_norm")
        q, k, v = heads(q), heads(k), heads(linear(x, w, p + "attn_v"))
        if roped:
            q, k = (rope(t, lambda i: (i, i + HEAD // 2)) for t in (q, k))
        y = layer_norm(linear(attention(q, k, v, alibi), w, p + "attn_output") + x, w, p + "attn_output_norm")
        if p + "attn_norm_2.weight" in w:
            y = layer_norm(y + x, w, p + "attn_norm_2")
        if experts and il % 2:
            gates = np.exp(linear(y, w, p + "ffn_gate_inp"))
            gates /= gates.sum(-1, keepdims=True)
            up, down = w[p + "ffn_up_exps.weight"], w[p + "ffn_down_exps.weight"]
            out = np.zeros_like(y)
            for t, row in enumerate(gates):
                for e in np.argsort(-row)[:2]:
                    out[t] += row[e] * (gelu(y[t] @ up[e].T) @ down[e].T)
        else:
            h = linear(y, w, p + "ffn_up")
            h = gelu(linear(y, w, p + "ffn_gate")) * h if p + "ffn_gate.weight" in w else gelu(h)
            out = linear(h, w, p + "ffn_down")
        x = layer_norm(out + y, w, p + "layer_output_norm")
    return x


def neo_bert(w: dict[str, Doubles]) -> Doubles:
    x = w["token_embd.weight"][IDS]
    for il in range(N_LAYER):
        p = f"blk.{il}."
        q, k, v = map(heads, np.split(linear(rms_norm(x, w[p + "attn_norm.weight"]), w, p + "attn_qkv"), 3, axis=1))
        q, k = (rope(t, lambda i: (2 * i, 2 * i + 1)) for t in (q, k))
        x = x + linear(attention(q, k, v), w, p + "attn_output")
        gate, up = np.split(linear(rms_norm(x, w[p + "ffn_norm.weight"]), w, p + "ffn_up"), 2, axis=1)
        x = x + linear(gate / (1 + np.exp(-gate)) * up, w, p + "ffn_down")
    return rms_norm(x, w["enc.output_norm.weight"])


_POST = {"token_types.weight", "token_embd_norm.bias", *(f"blk.N.{role}.bias" for role in _BIASES)}
_CODE = {f"blk.N.{role}.{end}" for role in ("attn_q_norm", "attn_k_norm", "attn_norm_2") for end in ("weight", "bias")}
_MOE = {"expert_count": 4, "expert_used_count": 2, "moe_every_n_layers": 2}


@pytest.mark.parametrize(
    ("arch", "kv", "optional", "forward"),
    [
        ("jina-bert-v2", {}, _POST | {"blk.N.ffn_gate.weight"}, lambda w: post_norm(w, False, True, False)),
        ("jina-bert-v2", {}, _POST | _CODE, lambda w: post_norm(w, False, True, False)),
        ("jina-bert-v3", {}, _POST, lambda w: post_norm(w, True, False, False)),
        ("nomic-bert-moe", _MOE, {"token_types.weight"}, lambda w: post_norm(w, True, False, True)),
        ("neo-bert", {}, {"blk.N.attn_qkv.weight"}, neo_bert),
    ],
    ids=["jina-bert-v2", "jina-bert-v2-code", "jina-bert-v3", "nomic-bert-moe", "neo-bert"],
)
def test_forward_pass(
    tmp_path: Path, arch: str, kv: dict[str, Any], optional: set[str], forward: Callable[[dict[str, Doubles]], Doubles]
) -> None:
    w = made(tmp_path / "m.gguf", arch, BASE | kv, optional)
    ctx = load_model(tmp_path / "m.gguf", repack=False).new_context(n_ctx=64)
    ctx.decode(IDS)
    assert nmse(ctx.embeddings, forward(w)) <= MAX_NMSE


@pytest.mark.parametrize("arch", ["bert", "modern-bert", "qwen3"])
def test_rank(tmp_path: Path, arch: str) -> None:
    """The head on top of the embeddings of the first token, of the mean, or of the last token."""
    head = {"bert": {"cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias"}}
    head["modern-bert"] = {"cls.weight", "cls.norm.weight", "cls.output.weight"}
    head["qwen3"] = {"cls.output.weight"}
    kv = BASE | {"classifier.output_labels": ["no", "yes", "perhaps"]}
    w = made(tmp_path / "m.gguf", arch, kv, head[arch])
    model = load_model(tmp_path / "m.gguf", repack=False)
    assert not model.weights.unused
    pooling = {"bert": "cls", "modern-bert": "mean", "qwen3": "last"}[arch]
    x = model.embed([IDS, IDS[:5]], pooling, False).astype(np.float64)
    if arch == "bert":
        x = np.tanh(linear(x, w, "cls"))
    elif arch == "modern-bert":
        x = layer_norm(gelu(linear(x, w, "cls")), w, "cls.norm")
    scores = linear(x, w, "cls.output")
    if arch == "qwen3":
        scores = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    ctx = model.new_context(n_ctx=64, n_seq_max=2, embeddings=True, pooling="rank")
    batch = Batch()
    for seq, ids in enumerate((IDS, IDS[:5])):
        for pos, token in enumerate(ids):
            batch.add(token, pos, seq)
    ctx.decode(batch)
    assert ctx.embeddings.shape == (2, 3)
    assert nmse(ctx.embeddings, scores) <= 1e-8  # K and V of qwen3 are kept in F16 here as in `embed`
    np.testing.assert_array_equal(ctx.embeddings_seq(1), ctx.embeddings[1])
