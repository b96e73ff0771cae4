"""T5: the encoder against the transformers library's hidden states, the decoder against its logits (float64); encoded
text of several sequences, saved, shared, replaced and missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pyggml.dtypes import DType
from pyggml.errors import BatchError, GGMLError, KVCacheFull, ModelError, StateError
from pyggml.hf.export import export_folder
from pyggml.hf.safetensors import open_folder
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.generate.chat import ChatSession
from pyggml.llm.generate.generation import new_generation
from pyggml.llm.generate.prompt_cache import open_session
from pyggml.llm.generate.speculative import with_draft
from pyggml.llm.generate.templates import find_template
from pyggml.llm.model import Model, load_model
from pyggml.llm.openai.request import usage
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized
from pyggml.llm.run_batch import batch
from pyggml.llm.samplers import SamplerChain, SamplingParams

from ..conftest import shared_dir
from ..hf.checkpoint import bfloat16_tensors, write_checkpoint, write_safetensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pyggml.llm.options import ContextOptions

FOLDER = shared_dir() / "golden" / "hf"
Array = np.ndarray[Any, np.dtype[Any]]
MAX_NMSE = 1e-9
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no golden data in {FOLDER}")


class Golden:
    """A model, what goes into encoder and decoder, and what comes out."""

    def __init__(self, name: str) -> None:
        self.model = load_model(FOLDER / name, repack=False)
        with np.load(FOLDER / "logits.npz") as z:
            self.text: list[int] = z[f"{name}/tokens"].tolist()
            self.ids: list[int] = z[f"{name}/decoder_tokens"].tolist()
            self.hidden, self.logits = z[f"{name}/hidden"], z[f"{name}/logits"]

    def context(self, model: Model | None = None, **options: Unpack[ContextOptions]) -> LlamaContext:
        given: ContextOptions = {"type_k": DType.F32, "type_v": DType.F32, **options}
        return (model or self.model).new_context(64, **given)

    def right(self, model: Model) -> None:
        """What `model` gives is what it should be."""
        ctx = self.context(model)
        ctx.encode(self.text)
        equal(ctx.embeddings, self.hidden)
        ctx.decode(batch_of({0: self.ids}))
        equal(ctx.logits, self.logits)


@pytest.fixture(scope="module", params=["t5", "t5-relu-tied"])
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@pytest.fixture(scope="module")
def t5() -> Golden:
    return Golden("t5")


def batch_of(texts: dict[int, Sequence[int]], first: int = 0) -> Batch:
    """Of the tokens of each sequence, with all logits."""
    batch = Batch()
    for seq, ids in texts.items():
        for pos, token in enumerate(ids, first):
            batch.add(token, pos, seq, True)
    return batch


def equal(got: Array, want: Array, limit: float = MAX_NMSE) -> None:
    assert got.shape == want.shape
    x, y = got.astype(np.float64), want.astype(np.float64)
    assert ((x - y) ** 2).sum() <= limit * (y**2).sum()


def alone(t: Golden, text: Sequence[int], ids: Sequence[int]) -> Array:
    """The logits of a text and an answer in a context of their own."""
    ctx = t.context()
    ctx.encode(text)
    ctx.decode(batch_of({0: ids}))
    return ctx.logits.copy()


def test_both_sides(golden: Golden) -> None:
    """In one batch, and token by token over as many cells as make the graph that serves several n_kv."""
    golden.right(golden.model)
    for flash_attn in (False, True):
        ctx = golden.context(flash_attn=flash_attn)
        ctx.encode(golden.text)
        assert ctx.logits.shape == (0, 512) and ctx.memory.used == 0
        rows: list[Array] = []
        for token in golden.ids:
            ctx.decode([token])
            rows.append(ctx.logits[-1].copy())
        equal(np.stack(rows), golden.logits)


def test_one_graph_serves_all_lengths(t5: Golden) -> None:
    ids = np.random.default_rng(1).integers(0, 512, 100).tolist()
    ctx = t5.model.new_context(128, type_k=DType.F32, type_v=DType.F32)
    ctx.encode(t5.text)
    rows: list[Array] = []
    for token in ids:
        ctx.decode([token])
        rows.append(ctx.logits[-1].copy())
    ctx.encode(t5.text)
    ctx.decode(batch_of({0: ids}))
    equal(np.stack(rows), ctx.logits)


def test_reference_backend(t5: Golden) -> None:
    ctx = t5.context(backend="ref")
    ctx.encode(t5.text[:5])
    ctx.decode(t5.ids[:2])
    equal(ctx.logits, alone(t5, t5.text[:5], t5.ids[:2])[-1:])


def test_file_and_folder(golden: Golden, tmp_path: Path) -> None:
    write_quantized(plan_quantization(golden.model.path, None), tmp_path / "m.gguf")
    model = load_model(tmp_path / "m.gguf")
    assert not model.weights.unused and model.decoder_start == 0
    golden.right(model)
    export_folder(tmp_path / "m.gguf", tmp_path / "back")
    golden.right(load_model(tmp_path / "back"))
    write_quantized(plan_quantization(tmp_path / "m.gguf", "Q4_0"), tmp_path / "q.gguf")
    kinds = {name: t.dtype for name, t in load_model(tmp_path / "q.gguf").tensors.items()}
    assert kinds["dec.blk.0.attn_rel_b.weight"] is DType.BF16 and kinds["dec.blk.2.cross_attn_q.weight"] is DType.Q4_0


def changed(name: str, folder: Path, config: dict[str, Any], tensors: dict[str, Array] | None = None) -> Path:
    """The golden checkpoint with another config (None: without that key) and other tensors."""
    folder.mkdir()
    there = json.loads((FOLDER / name / "config.json").read_text()) | config
    there = {key: value for key, value in there.items() if key not in config or value is not None}
    weights = bfloat16_tensors(FOLDER / name / "model.safetensors") | (tensors or {})
    write_checkpoint(folder, there, {n: np.ascontiguousarray(a) for n, a in weights.items() if a.size})
    return folder


def test_checkpoints_of_older_libraries(t5: Golden, tmp_path: Path) -> None:
    """Copies of the embeddings for each side; output weights of their own; what scales them by what says so."""
    rng = np.random.default_rng(5)
    shared = bfloat16_tensors(FOLDER / "t5" / "model.safetensors")["shared.weight"]
    head = rng.standard_normal(shared.shape).astype(np.float32)
    sides = {f"{side}coder.embed_tokens.weight": shared for side in ("en", "de")}
    cross = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": rng.standard_normal((8, 4))}
    cross = {name: a.astype(np.float32) for name, a in cross.items()}
    config = {"scale_decoder_outputs": None, "tie_word_embeddings": False}
    untied = changed("t5", tmp_path / "a", config, {**sides, **cross, "lm_head.weight": head})
    model = load_model(untied)
    assert not model.weights.unused and "t5.logit_scale" not in model.kv
    ctx = t5.context(model)
    ctx.encode(t5.text)
    equal(ctx.embeddings, t5.hidden)
    ctx.decode(t5.ids)
    hidden = t5.context(embeddings=True)
    hidden.encode(t5.text)
    hidden.decode(t5.ids)
    equal(ctx.logits[0], head @ hidden.embeddings[-1])
    tied = changed("t5", tmp_path / "b", {"scale_decoder_outputs": None}, {**sides, "shared.weight": shared[:0]})
    ctx = t5.context(load_model(tied))
    ctx.encode(t5.text)
    ctx.decode(batch_of({0: t5.ids}))
    equal(ctx.logits, t5.logits / 8)  # 1 / sqrt(64)
    with pytest.raises(ModelError, match="the network 'gated-silu' is not known; known are relu"):
        load_model(changed("t5", tmp_path / "c", {"feed_forward_proj": "gated-silu"}))


def test_encoder_alone_and_umt5(t5: Golden, tmp_path: Path) -> None:
    """A folder of the encoder; UMT5, whose layers have a bias each, comes back as UMT5."""
    model = load_model(changed("t5", tmp_path / "enc", {"architectures": ["T5EncoderModel"]}))
    assert model.arch == "t5encoder" and not model.weights.unused
    ctx = model.new_context(64)
    ctx.encode(t5.text)  # the same as `decode`
    equal(ctx.embeddings, t5.hidden)
    bias = "block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    first = bfloat16_tensors(FOLDER / "t5" / "model.safetensors")
    of_layers = {
        f"{side}.{bias.format(il)}": first[f"{side}.{bias.format(0)}"]
        for side, n in (("encoder", 2), ("decoder", 3))
        for il in range(1, n)
    }
    umt5 = changed("t5", tmp_path / "u", {"model_type": "umt5", "architectures": ["x"]}, of_layers)
    model = load_model(umt5)
    assert "dec.blk.2.attn_rel_b.weight" in model.weights
    t5.right(model)
    write_quantized(plan_quantization(umt5, None), tmp_path / "u.gguf")
    export_folder(tmp_path / "u.gguf", tmp_path / "back")
    assert set(open_folder(tmp_path / "back")) == set(open_folder(umt5))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "umt5"
    t5.right(load_model(tmp_path / "back"))


def test_quantised_cache(t5: Golden, tmp_path: Path) -> None:
    """K and V of the text are stored as those of the answer are, rotated where these are."""
    there = bfloat16_tensors(FOLDER / "t5" / "model.safetensors")
    biases = {name: a[:, :2] for name, a in there.items() if "relative_attention_bias" in name}
    model = load_model(changed("t5", tmp_path / "wide", {"num_heads": 2, "d_kv": 32}, biases), repack=False)
    found: dict[DType, Array] = {}
    for dtype in (DType.F32, DType.Q8_0):
        ctx = model.new_context(64, type_k=dtype, type_v=dtype, flash_attn=True)
        ctx.encode(t5.text)
        ctx.decode(batch_of({0: t5.ids}))
        found[dtype] = ctx.logits.copy()
    equal(found[DType.Q8_0], found[DType.F32], 2.0**-6)  # scores are not scaled: what K loses counts 6 times over


def test_sequences(t5: Golden) -> None:
    """Each sees its own text, however the texts were encoded, and in caches with holes."""
    rng = np.random.default_rng(2)
    texts = [t5.text, *(rng.integers(0, 512, n).tolist() for n in (9, 20))]
    want = [alone(t5, text, t5.ids) for text in texts]
    ctx = t5.context(n_seq_max=3)
    ctx.encode(batch_of({0: texts[1], 1: texts[0], 2: texts[2]}))
    for seq, text in ((0, texts[0]), (1, texts[1])):  # others than before; cells behind each other no more
        ctx.encode(Batch.prompt(text, 0, seq))
        equal(ctx.embeddings[: len(text)], ctx.embeddings)
    ctx.decode(batch_of({0: t5.ids, 1: t5.ids, 2: t5.ids}))
    equal(ctx.logits, np.concatenate(want))
    ctx.memory.seq_rm(1)
    ctx.memory.defrag()
    ctx.memory.seq_cp(2, 1)
    ctx.decode(Batch.prompt([7], 16, [1, 2]))  # of both: they see one text
    equal(ctx.logits, alone(t5, texts[2], [*t5.ids, 7])[-1:])
    ctx.memory.seq_rm(1, 16, -1)
    with pytest.raises(BatchError, match="a token is of sequences 0 and 1, whose encoded texts differ"):
        ctx.decode(Batch.prompt([7], 16, [0, 1]))
    with pytest.raises(BatchError, match="sequence 0 has tokens that have seen another encoded text"):
        ctx.memory.seq_cp(1, 0)
    ctx.memory.seq_rm(0, 16, -1)
    ctx.memory.seq_keep(0)
    ctx.decode([7])
    equal(ctx.logits, alone(t5, t5.text, [*t5.ids, 7])[-1:])
    with pytest.raises(BatchError, match="sequence 2 has no encoded text to answer: `encode` comes before `decode`"):
        ctx.decode(batch_of({0: [1], 2: [1]}, 17))
    assert "of encoded text" in str(ctx.memory) and "seq 0: 17 cells" in str(ctx.memory)


def test_holes_between_texts_are_closed(t5: Golden) -> None:
    """Texts that fit, but not side by side."""
    ctx = t5.context(n_seq_max=3)
    ctx.encode(batch_of({0: [1] * 20, 1: t5.text, 2: [1] * 20}))
    ctx.memory.seq_rm(0)
    ctx.encode(Batch.prompt([2] * 26, 0, 0))
    ctx.decode(batch_of({1: t5.ids}))
    equal(ctx.logits, t5.logits)
    with pytest.raises(KVCacheFull, match="23 cells are needed; 22 of the 64 cells for encoded text are free"):
        ctx.encode(Batch.prompt([2] * 23, 0, 2))
    ctx.decode(Batch.prompt([0], 0, 2))  # nothing has changed


def test_one_lock_is_of_all_stores(t5: Golden) -> None:
    memory = t5.context().memory
    assert memory.encoding is not None
    parts = (*memory.stores, memory.encoding, *memory.encoding.stores)
    assert all(part.lock is memory.lock for part in parts)


def test_removed_shifted_and_forgotten(t5: Golden) -> None:
    """Distances alone count: an answer can begin anew, and lose its beginning."""
    ctx, other = t5.context(), t5.context()
    for c in (ctx, other):
        c.encode(t5.text)
        c.decode(t5.ids)
        c.memory.seq_rm(0, 0, 4)
    ctx.memory.seq_add(0, 4, -1, -4)
    for c in (ctx, other):
        c.decode([3])
    assert ctx.memory.seq_pos_max(0) == 12
    equal(ctx.logits, other.logits)
    ctx.memory.seq_rm(0, 0, 99)  # the answer alone
    ctx.decode(batch_of({0: t5.ids}))
    equal(ctx.logits, t5.logits)
    ctx.memory.seq_rm(0)
    with pytest.raises(BatchError, match="sequence 0 has no encoded text"):
        ctx.decode([0])
    ctx.encode(t5.text)
    ctx.memory.clear()
    with pytest.raises(BatchError, match="sequence 0 has no encoded text"):
        ctx.decode([0])


def test_states(t5: Golden, tmp_path: Path) -> None:
    ctx = t5.context(n_seq_max=2)
    ctx.encode(batch_of({0: [5, 6, 7], 1: t5.text}))
    ctx.decode(batch_of({1: t5.ids[:8]}))
    ctx.save_state(tmp_path / "all")
    ctx.save_seq(tmp_path / "one", 1)
    other = t5.model.new_context(96, n_seq_max=2, type_k=DType.F32, type_v=DType.F32, flash_attn=True)
    other.load_state(tmp_path / "all")
    other.decode(batch_of({1: t5.ids[8:]}, 8))
    equal(other.logits, t5.logits[8:])
    two = t5.context(n_seq_max=2)
    two.encode([1, 2, 3])  # what has an encoded text is not free
    assert two.load_seq(tmp_path / "one") == 1
    two.decode(batch_of({1: t5.ids[8:]}, 8))
    equal(two.logits, t5.logits[8:])
    with pytest.raises(StateError, match="of another model"):
        Golden("t5-relu-tied").context().load_state(tmp_path / "all")


def test_generation(t5: Golden) -> None:
    """The prompt is encoded; what is decoded begins with the start token."""
    ctx = t5.model.new_context(64)

    def greedy(text: Sequence[int], n: int) -> list[int]:
        ctx.encode(text)
        ids = [0]
        for _ in range(n):
            ctx.decode(ids[-1:])
            ids.append(int(ctx.logits[-1].argmax()))
        return ids[1:]

    texts = [t5.text, t5.text[:5], t5.text[7:]]
    want = [greedy(text, 6) for text in texts]
    assert [t.id for t in t5.model.stream(t5.text, 6, temp=0)] == want[0]
    found: dict[int, list[int]] = {}
    for i, token in t5.model.stream_batch(texts, 6, n_parallel=2, temp=0):
        found.setdefault(i, []).append(token.id)
    assert [found[i] for i in range(3)] == want
    requests = [{"prompt": text, "temp": 0.0, "n_predict": 6} for text in (t5.text, t5.text[:5] * 110)]
    first, second = batch(t5.model, requests, n_parallel=1)
    assert (first["n_prompt"], first["n_predicted"]) == (16, 6) and "the model was trained for 512" in second["error"]
    g = new_generation(t5.model, t5.text, 6, temp=0)
    assert [t.id for t in g] == want[0]
    assert usage(g) == {"prompt_tokens": 16, "completion_tokens": 6, "total_tokens": 22}  # as of the batch
    (refused,) = batch(t5.model, [{"messages": []}])
    assert "an encoder-decoder, which has no chat" in refused["error"]
    drafted = with_draft(new_generation(t5.model, t5.text, 6, temp=0), None, 4, 0, 0.5)
    assert [t.id for t in drafted] == want[0]
    guided = t5.model.stream(t5.text, 2, temp=0, cfg_scale=1.5, negative_prompt=t5.text[:5])
    assert len([t.id for t in guided]) == 2
    assert len(list(t5.model.stream(t5.text * 40, 2, temp=0))) == 2  # longer than n_ubatch is by default
    with pytest.raises(BatchError, match="the prompt is empty"):
        t5.model.generate([], 2)


def test_adapter(t5: Golden, tmp_path: Path) -> None:
    """Of both sides, and of a decoder's layer that the encoder has not: as of merged weights."""
    rng = np.random.default_rng(4)
    weights = bfloat16_tensors(FOLDER / "t5" / "model.safetensors")
    pairs: dict[str, Array] = {}
    merged: dict[str, Array] = {}
    for module in (
        "encoder.block.1.layer.0.SelfAttention.q",
        "decoder.block.2.layer.1.EncDecAttention.k",
        "decoder.block.0.layer.2.DenseReluDense.wi_0",
    ):
        w = weights[f"{module}.weight"]
        a, b = (rng.standard_normal(shape).astype(np.float32) / 10 for shape in ((4, w.shape[1]), (len(w), 4)))
        pairs |= {f"base_model.model.{module}.lora_{x}.weight": m for x, m in (("A", a), ("B", b))}
        merged[f"{module}.weight"] = (w + 2 * b @ a).astype(np.float32)
    (tmp_path / "peft").mkdir()
    write_safetensors(tmp_path / "peft" / "adapter_model.safetensors", pairs)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config))
    ctx = t5.context()
    ctx.set_loras([(t5.model.load_lora(tmp_path / "peft"), 1.0)])
    other = t5.context(load_model(changed("t5", tmp_path / "merged", {}, merged), repack=False))
    for c in (ctx, other):
        c.encode(t5.text)
        c.decode(batch_of({0: t5.ids}))
    equal(ctx.logits, other.logits)
    equal(ctx.embeddings, other.embeddings)


def test_embeddings(t5: Golden) -> None:
    """The embeddings of texts are the encoder's, pooled."""
    rows = t5.model.embed([t5.text, t5.text[:5]], normalize=False)
    equal(rows[0], t5.hidden.mean(axis=0))
    equal(t5.model.embed([t5.text[:5]], "mean", False)[0], rows[1])
    with pytest.raises(ModelError, match="layer = -2: an encoder-decoder gives what its last layer gives"):
        t5.model.new_context(embeddings=True, layer=-2)


def test_what_cannot_be(t5: Golden, tmp_path: Path, shared: Path) -> None:
    ctx = t5.context(n_seq_max=2)
    with pytest.raises(BatchError, match="sequence 0 has no encoded text to answer: `encode` comes before `decode`"):
        ctx.decode([0])
    ctx.warmup()  # needs none
    ctx.encode(t5.text)
    for wrong, message in (
        ([], "the batch is empty"),
        ([512], "token 512 is outside the vocabulary of 512"),
        ([1] * 65, "65 tokens that all see each other, but only n_ubatch = 64 run together"),
        (Batch.prompt([1], 0, 2), "sequence 2 is outside 0..1"),
    ):
        with pytest.raises(BatchError, match=message):
            ctx.encode(wrong)
    ctx.decode(batch_of({0: t5.ids}))  # after which the text is there as before
    equal(ctx.logits, t5.logits)
    with pytest.raises(ModelError, match="llama has no encoder: `decode` takes all of the text"):
        load_model(shared / "models" / "stories260K.gguf").new_context(32).encode([1])
    with pytest.raises(ModelError, match="t5 is an encoder-decoder: it encodes its prompt"):
        open_session(ctx, tmp_path / "session", [0])
    chain = SamplerChain(SamplingParams(), t5.model.vocab)
    with pytest.raises(ModelError, match="t5 is an encoder-decoder: it answers a text"):
        ChatSession(ctx, chain, find_template("chatml", {}))
    draft = new_generation(t5.model, t5.text, 6, temp=0)
    with pytest.raises(GGMLError, match="t5 is an encoder-decoder, which cannot draft"):
        with_draft(draft, t5.model, 4, 0, 0.5)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.relative_buckets_count", 3, "must be at least 4"),
        ("attention.relative_buckets_max_distance", 4, "must be larger than 4"),
        ("block_count", 0, "block_count must be 1 to 512, not 0"),
        ("block_count", 3, "no tensor enc.blk.2.attn_norm.weight"),
        ("decoder_block_count", 0, "n_layer"),
        ("decoder_block_count", 9, "no tensor dec.blk.3.cross_attn_k.weight"),
        ("logit_scale", float("inf"), "must be a finite number"),
    ],
)
def test_bad_metadata(key: str, value: float, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(FOLDER / "t5", kv_overrides={f"t5.{key}": value})


def test_start_token() -> None:
    model = load_model(FOLDER / "t5", kv_overrides={"t5.decoder_start_token_id": 700})
    with pytest.raises(ModelError, match=r"the key t5\.decoder_start_token_id says .*: 700 is none"):
        model.generate([1], 2)
