"""PEFT folders beside checkpoints: the logits of merged checkpoints, patterns, and what is refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyggml.tools.convert_lora import convert_lora

from pyggml import limits
from pyggml.errors import GGUFError, ModelError
from pyggml.gguf_io.split import split_model
from pyggml.hf.safetensors import open_folder
from pyggml.hf.tensors import as_f32
from pyggml.llm.model import Model, load_model

from .make import Arrays, distance, fresh, logits, write_peft, write_safetensors

FOLDERS = ("llama", "granite", "phi3", "gpt2", "gpt-neox", "falcon", "deepseek-v2", "qwen3-moe")
TRANSPOSED = ("gpt2",)  # checkpoints of [inputs, outputs]
_LINEAR = re.compile(r"^(?!.*(embed|wte|wpe|norm|gate\.weight)).*(layers|\.?h)\.\d+\..*\.weight$")


def adapted(arrays: Arrays, transposed: bool, scale: float) -> tuple[Arrays, Arrays]:
    """A and B for all linear modules of a checkpoint, and the checkpoint with them merged."""
    rng = np.random.default_rng(5)
    halves: Arrays = {}
    merged = dict(arrays)
    for name, w in arrays.items():
        if w.ndim == 2 and _LINEAR.match(name):
            m, n = w.shape[::-1] if transposed else w.shape
            a, b = (rng.standard_normal(s).astype(np.float32) / 8 for s in ((4, n), (m, 4)))
            module = name.removesuffix(".weight")
            halves |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            delta = np.float32(scale) * (b @ a)
            merged[name] = w + (delta.T if transposed else delta)
    return halves, merged


def checkpoint(folder: Path, source: Path, arrays: Arrays) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        if "safetensors" not in file.name:
            shutil.copyfile(file, folder / file.name)
    write_safetensors(folder / "model.safetensors", arrays)
    return folder


def read(folder: Path) -> Arrays:
    return {name: as_f32(t.stored()) for name, t in open_folder(folder).items()}


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_the_merged_checkpoint(shared: Path, tmp_path: Path, name: str) -> None:
    """Also through the GGUF that the adapter is converted to."""
    source = shared / "golden" / "hf" / name
    halves, merged = adapted(read(source), name in TRANSPOSED, 2.0)
    adapter = write_peft(tmp_path / "adapter", halves)
    model = load_model(source, repack=False)
    convert_lora(adapter, tmp_path / "l.gguf", source)
    want = logits(fresh(load_model(checkpoint(tmp_path / "merged", source, merged), repack=False)))
    ctx = fresh(model)
    for path in (adapter, tmp_path / "l.gguf"):
        ctx.set_loras([(model.load_lora(path), 1.0)])
        assert distance(logits(ctx), want) <= 1e-11


@pytest.fixture
def llama(shared: Path) -> Model:
    return load_model(shared / "golden" / "hf" / "llama", repack=False)


def ones(module: str, m: int, n: int, rank: int) -> Arrays:
    a, b = np.full((rank, n), 0.5, np.float32), np.ones((m, rank), np.float32)
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def test_ranks_and_scales_by_pattern(llama: Model, tmp_path: Path) -> None:
    """What a pair counts: alpha / rank, or alpha / sqrt(rank), each of the first pattern that fits its name."""
    n = llama.hparams.n_embd
    made = {
        **ones("model.layers.0.self_attn.o_proj", n, n, 4),
        **ones("model.layers.1.self_attn.o_proj", n, n, 2),
        **ones("model.layers.1.mlp.up_proj", llama.hparams.layer(1).n_ff, n, 16),
    }
    patterns = {
        "rank_pattern": {r"layers.1.self_attn.o_proj": 2, ".*up_proj": 16},
        "alpha_pattern": {"up_proj": 32, r"layers\.1\..*": 6},
    }
    for rslora, want in ((False, (2.0, 3.0, 2.0)), (True, (4.0, 6 / 2**0.5, 8.0))):
        folder = write_peft(tmp_path / "a", made, use_rslora=rslora, **patterns)
        lora = llama.load_lora(folder)
        names = ("blk.0.attn_output.weight", "blk.1.attn_output.weight", "blk.1.ffn_up.weight")
        assert tuple(lora.pairs[name].factor for name in names) == want
        convert_lora(folder, tmp_path / "l.gguf", Path(llama.path))
        direct, through = fresh(llama), fresh(llama)
        direct.set_loras([(lora, 0.1)])
        through.set_loras([(llama.load_lora(tmp_path / "l.gguf"), 0.1)])
        assert distance(logits(through), logits(direct)) <= 1e-12


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings(llama: Model, shared: Path, tmp_path: Path, tied: bool) -> None:
    """Of the input alone, or of the output too where the config ties them."""
    source = shared / "golden" / "hf" / "llama"
    arrays = read(source)
    rng = np.random.default_rng(1)
    n_vocab, n_embd = arrays["model.embed_tokens.weight"].shape
    a, b = rng.standard_normal((4, n_vocab)).astype(np.float32), rng.standard_normal((n_embd, 4)).astype(np.float32) / 9
    halves = {"model.embed_tokens.lora_embedding_A": a, "model.embed_tokens.lora_embedding_B": b}
    merged = dict(arrays)
    for name in ("model.embed_tokens.weight", "lm_head.weight")[: 1 + tied]:
        merged[name] = arrays[name] + 2 * (b @ a).T
    ctx = fresh(llama)
    ctx.set_loras([(llama.load_lora(write_peft(tmp_path / "a", halves, ensure_weight_tying=tied)), 1.0)])
    want = logits(fresh(load_model(checkpoint(tmp_path / "merged", source, merged), repack=False)))
    assert distance(logits(ctx), want) <= 1e-11


def test_experts_one_by_one(shared: Path, tmp_path: Path) -> None:
    """Those without an adapter have none; ranks may differ."""
    model = load_model(shared / "golden" / "hf" / "qwen3-moe", repack=False)
    w = model.weights["blk.0.ffn_up_exps.weight"]
    n, m, n_expert, _ = w.ne
    made = {
        **ones("model.layers.0.mlp.experts.1.up_proj", m, n, 4),
        **ones("model.layers.0.mlp.experts.2.up_proj", m, n, 2),
    }
    folder = write_peft(tmp_path / "a", made, rank_pattern={r"experts\.2\.up_proj": 2})
    pair = model.load_lora(folder).pairs["blk.0.ffn_up_exps.weight"]
    assert (pair.a.ne, pair.b.ne, pair.factor) == ((n, 4, n_expert, 1), (4, m, n_expert, 1), 1.0)
    delta = pair.b.numpy() @ pair.a.numpy()
    assert np.all(delta[1] == 2 * 4 * 0.5) and np.all(delta[2] == 4 * 2 * 0.5)
    assert not np.delete(delta, [1, 2], 0).any()


@pytest.mark.parametrize(
    ("config", "tensors", "text"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'"),
        ({"lora_bias": True, "bias": "all"}, {}, "lora_bias, bias: only adapters"),
        ({"use_dora": True}, {}, r"the adapter of model.layers.0.mlp.up_proj \(.*\) has no magnitudes"),
        ({}, {"model.layers.0.mlp.up_proj.lora_magnitude_vector": (9,)}, "is no A or B"),
        ({"use_dora": True}, {"model.layers.0.mlp.up_proj.lora_magnitude_vector": (9,)}, "has 9 magnitudes"),
        ({"use_dora": True}, {"model.layers.0.mlp.up_proj.lora_magnitude_vector": (2, 2)}, "is no vector"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"r": 0}, {}, "r must be a positive number"),
        ({"lora_alpha": "8"}, {}, "lora_alpha must be a positive number"),
        ({"rank_pattern": {"(": 3}}, {}, "is no regular expression"),
        ({"alpha_pattern": [1]}, {}, "alpha_pattern must be an object"),
        ({"r": 5}, {}, "is not of rank 5"),
        ({}, {"lm_head.weight": (4, 4)}, "lm_head.weight is no A or B"),
        ({}, {"model.layers.0.self_attn.q_proj.lora_A.weight": (4, 32)}, "q_proj.lora_A.weight has no other half"),
        ({}, {"x.lora_A.weight": (4, 8), "x.lora_B.weight": (8, 4)}, r"the adapter of x \(A \[4, 8\], B \[8, 4\]\)"),
        ({}, {"model.layers.0.mlp.up_proj.lora_A.weight": (4, 3)}, "does not fit the weight blk.0.ffn_up.weight"),
    ],
)
def test_what_is_refused(
    llama: Model, tmp_path: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]], text: str
) -> None:
    made = ones("model.layers.0.mlp.up_proj", llama.hparams.layer(0).n_ff, llama.hparams.n_embd, 4)
    made |= {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
    with pytest.raises(ModelError, match=text):
        llama.load_lora(write_peft(tmp_path / "a", made, **config))


def test_a_pattern_that_takes_for_ever(llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching is bounded in time, that of all patterns together."""
    monkeypatch.setattr(limits, "PATTERN_SECONDS", 0.1)
    made = ones("model.layers.0.mlp.up_proj", llama.hparams.layer(0).n_ff, llama.hparams.n_embd, 4)
    folder = write_peft(tmp_path / "a", made, rank_pattern={"(?:.|..|.{3}|.{4}|.{5})+[!?]": 3})
    with pytest.raises(ModelError, match=r"adapter_config\.json: rank_pattern: matching .* takes over 0\.1 seconds"):
        llama.load_lora(folder)


def test_folders_that_are_none(llama: Model, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a GGUF file nor a PEFT folder"):
        llama.load_lora(tmp_path)
    write_peft(tmp_path / "a", {})
    with pytest.raises(ModelError, match="holds no tensors"):
        llama.load_lora(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model.safetensors"):
        llama.load_lora(tmp_path / "a")
    with pytest.raises(ModelError, match="its base model None is not here"):
        convert_lora(tmp_path / "a", tmp_path / "l.gguf")


def test_no_part_of_the_base_is_replaced(shared: Path, tmp_path: Path) -> None:
    model = load_model(shared / "models" / "stories260K.gguf")
    n = model.hparams.n_embd
    adapter = write_peft(tmp_path / "adapter", ones("model.layers.0.self_attn.o_proj", n, n, 4))
    parts = split_model(model.path, str(tmp_path / "s"), max_tensors=20)
    before = Path(parts[1]).read_bytes()
    with pytest.raises(GGUFError, match="the output is the input"):
        convert_lora(adapter, Path(parts[1]), Path(parts[0]))
    assert Path(parts[1]).read_bytes() == before
