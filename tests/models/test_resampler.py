"""MiniCPM-V 2.6 and MiniCPM-o 2.6, whose classes are not in the transformers library: the tower against its definition
(modeling_minicpmv.py and resampler.py beside the checkpoints), written down here in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyggml.models.towers.minicpmv import sines_of_places
from pyggml.models.towers.shuffled import float_range

import pyggml as gg
from pyggml.errors import MediaError, ModelError
from pyggml.hf.towers.mmproj import write_mmproj
from pyggml.llm.generate.media_chat import read_messages
from pyggml.llm.tower import open_tower_of
from pyggml.media import picture_processor

from ..hf.checkpoint import write_checkpoint
from ..media_model import copy_mmproj, write_folder
from .other_towers import weights

Array = np.ndarray[Any, np.dtype[Any]]
N, FF, HEADS, PATCH, SIDE, OUT, QUERIES = 32, 48, 2, 4, 7, 256, 5
SIZES = np.array([[3, 5], [6, 2], [6, 2]], np.int32)
CONFIG: dict[str, Any] = {
    "model_type": "minicpmv",
    "architectures": ["MiniCPMV"],
    "hidden_size": OUT,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "query_num": QUERIES,
    "drop_vision_last_layer": False,
    "vision_config": {
        "model_type": "siglip",
        "hidden_size": N,
        "intermediate_size": FF,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "image_size": SIDE * PATCH,
        "patch_size": PATCH,
    },
}


def shapes() -> dict[str, list[int]]:
    found = {
        "vpm.embeddings.patch_embedding.weight": [N, 3, PATCH, PATCH],
        "vpm.embeddings.patch_embedding.bias": [N],
        "vpm.embeddings.position_embedding.weight": [SIDE**2, N],
        "resampler.query": [QUERIES, OUT],
        "resampler.proj": [OUT, OUT],
        "resampler.kv_proj.weight": [OUT, N],
        "resampler.attn.in_proj_weight": [3 * OUT, OUT],
        "resampler.attn.in_proj_bias": [3 * OUT],
        "resampler.attn.out_proj.weight": [OUT, OUT],
        "resampler.attn.out_proj.bias": [OUT],
        "llm.model.embed_tokens.weight": [512, OUT],
        "llm.lm_head.weight": [512, OUT],
        "llm.model.norm.weight": [OUT],
    }
    layer = "vpm.encoder.layers.{}."
    norms = ["vpm.post_layernorm", *(f"resampler.ln_{x}" for x in ("q", "kv", "post"))]
    for i in (0, 1):
        at = layer.format(i)
        norms += [f"{at}layer_norm1", f"{at}layer_norm2"]
        parts = {f"self_attn.{x}": (N, N) for x in ("q_proj", "k_proj", "v_proj", "out_proj")}
        for role, (n_out, n_in) in {**parts, "mlp.fc1": (FF, N), "mlp.fc2": (N, FF)}.items():
            found |= {f"{at}{role}.weight": [n_out, n_in], f"{at}{role}.bias": [n_out]}
    for role in norms:
        found |= {f"{role}.{end}": [N if role.startswith("vpm") else OUT] for end in ("weight", "bias")}
    text = "llm.model.layers.0."
    for role, (n_out, n_in) in {"q": (OUT, OUT), "k": (128, OUT), "v": (128, OUT), "o": (OUT, OUT)}.items():
        found[f"{text}self_attn.{role}_proj.weight"] = [n_out, n_in]
        found |= {} if role == "o" else {f"{text}self_attn.{role}_proj.bias": [n_out]}
    for role, shape in {"gate": [64, OUT], "up": [64, OUT], "down": [OUT, 64]}.items():
        found[f"{text}mlp.{role}_proj.weight"] = shape
    return found | {f"{text}{x}_layernorm.weight": [OUT] for x in ("input", "post_attention")}


def folder(path: Path, **changes: Any) -> dict[str, Array]:
    """Write a checkpoint; gives its tensors."""
    stored = weights(shapes())
    write_checkpoint(path, {**CONFIG, **changes}, stored)
    return {name: (a.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for name, a in stored.items()}


# -- the definition ---------------------------------------------------------------------------------------------------


def normed(x: Array, w: dict[str, Array], role: str) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[f"{role}.weight"] + w[f"{role}.bias"]


def attention(q: Array, k: Array, v: Array, n_head: int) -> Array:
    q, k, v = (t.reshape(len(t), n_head, -1).swapaxes(0, 1) for t in (q, k, v))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2])
    seen = np.exp(scores - scores.max(-1, keepdims=True))
    return (seen / seen.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(q.shape[1], -1)


def linear(x: Array, w: dict[str, Array], role: str) -> Array:
    return x @ w[f"{role}.weight"].T + w.get(f"{role}.bias", 0)


def places_of(h: int, w: int) -> Array:
    """The learned position of each patch, by torch.bucketize: between which edges its fraction lies."""
    line, column = (np.floor(np.arange(n) / n * SIDE + 1e-9).astype(int) for n in (h, w))
    return (line[:, None] * SIDE + column).reshape(-1)


def sines(h: int, w: int) -> Array:
    turns = 1 / 10000 ** (np.arange(OUT // 4) / (OUT / 4))
    line, column = (i.reshape(-1, 1) * turns for i in np.indices((h, w)))
    return np.concatenate([np.sin(column), np.cos(column), np.sin(line), np.cos(line)], axis=1)


def features(w: dict[str, Array], patches: Array, h: int, wide: int) -> Array:
    """Of one slice, whose patches are [h * wide, 3 * PATCH * PATCH]."""
    kernel = w["vpm.embeddings.patch_embedding.weight"].reshape(N, -1)
    x = patches @ kernel.T + w["vpm.embeddings.patch_embedding.bias"]
    x = x + w["vpm.embeddings.position_embedding.weight"][places_of(h, wide)]
    for i in (0, 1):
        at = f"vpm.encoder.layers.{i}."
        y = normed(x, w, f"{at}layer_norm1")
        q, k, v = (linear(y, w, f"{at}self_attn.{role}_proj") for role in "qkv")
        x = x + linear(attention(q, k, v, HEADS), w, f"{at}self_attn.out_proj")
        y = linear(normed(x, w, f"{at}layer_norm2"), w, f"{at}mlp.fc1")
        y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, w, f"{at}mlp.fc2")
    x = normed(x, w, "vpm.post_layernorm")
    x = normed(linear(x, w, "resampler.kv_proj"), w, "resampler.ln_kv")
    q = normed(w["resampler.query"], w, "resampler.ln_q")
    in_weight, in_bias = w["resampler.attn.in_proj_weight"], w["resampler.attn.in_proj_bias"]
    parts = zip((q, x + sines(h, wide), x), np.split(in_weight, 3), np.split(in_bias, 3), strict=True)
    y = attention(*(t @ a.T + b for t, a, b in parts), OUT // 128)
    return normed(linear(y, w, "resampler.attn.out_proj"), w, "resampler.ln_post") @ w["resampler.proj"]


def given() -> tuple[dict[str, Array], list[Array]]:
    """Noise as the processor gives it, and the patches of each slice."""
    noise = np.random.default_rng(5).standard_normal((3, PATCH, PATCH * int(SIZES.prod(1).sum())), np.float32)
    rows = noise.reshape(3, PATCH, -1, PATCH).transpose(2, 0, 1, 3).reshape(-1, 3 * PATCH**2)
    return {"pixel_values": noise[None], "target_sizes": SIZES}, np.split(rows, np.cumsum(SIZES.prod(1))[:-1])


# -- tests ------------------------------------------------------------------------------------------------------------


def nmse(a: Array, b: Array) -> float:
    assert a.shape == b.shape
    return float(((a - b) ** 2).sum() / (b**2).sum())


@pytest.mark.parametrize("kind", ["minicpmv", "minicpmo"])
def test_features(kind: str, tmp_path: Path) -> None:
    """Of the folder, and of the mmproj file made of it, which reads the number of features from its queries."""
    w = folder(tmp_path, model_type=kind)
    arrays, slices = given()
    want = np.concatenate([features(w, p, *size) for p, size in zip(slices, SIZES.tolist(), strict=True)])
    file = tmp_path / "mmproj.gguf"
    assert write_mmproj(tmp_path, file)[0] == "resampler"
    for path, mmproj in ((tmp_path, None), (file, str(file))):
        tower = open_tower_of(str(path), mmproj, "vision")
        assert tower is not None and not tower.weights.unused
        assert nmse(tower.encode(arrays).features.rows, want) < 1e-11
    with gg.load_model(tmp_path, repack=False) as model, model.new_context(32) as ctx:
        ctx.decode([1, 2, 3])
        assert np.isfinite(ctx.logits).all()


def test_files_of_llama_cpp(tmp_path: Path) -> None:
    """Its converter for these models exchanges the matrices of networks, and says 0 and 448 of sizes."""
    folder(tmp_path)
    write_mmproj(tmp_path, tmp_path / "ours.gguf")
    changes = {"clip.vision.projection_dim": 0, "clip.vision.image_size": 5 * PATCH}
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    more = {"resampler.pos_embed_k": np.zeros((70 * 70, OUT), np.float32)}
    copy_mmproj(tmp_path / "ours.gguf", tmp_path / "m.gguf", changes, names, more)
    found = []
    for file in ("ours.gguf", "m.gguf"):
        tower = open_tower_of(str(tmp_path / "t.gguf"), str(tmp_path / file), "vision")
        assert tower is not None and not tower.weights.unused and tower.hparams.n_embd_out == OUT
        found.append(tower.encode(given()[0]).features.rows)
    np.testing.assert_array_equal(*found)


def test_chat(tmp_path: Path) -> None:
    """The whole picture and its slices have as many placeholders each; the template knows nothing of pictures."""
    pytest.importorskip("PIL")
    special = dict(enumerate(("<unk>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"), 490))
    path = write_folder(tmp_path / "m", "qwen2-vl", special)
    about = json.loads((path / "tokenizer_config.json").read_text())
    about["chat_template"] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<reply>"
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    processor = {"image_processor_type": "MiniCPMVImageProcessor", "patch_size": PATCH, "scale_resolution": 40}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    folder(path)
    picture = np.zeros((30, 70, 3), np.uint8)
    with gg.load_model(path, repack=False) as model:
        n = len(model.encode_image(picture))
        n_slices = len(model.process_image(picture)["target_sizes"])
        assert n_slices > 1 and n == n_slices * QUERIES
        text = [{"type": "text", "text": "hi"}]
        content = [{"type": "image", "image": picture}, *text, {"type": "image", "image": picture}, *text]
        ids, _, _ = read_messages(model, [{"role": "user", "content": content}])
        written = model.detokenize(ids, unparse_special=True)
        one = "<unk>" * QUERIES
        slices = [f"<slice>{one}</slice>"] * (n_slices - 1)
        assert f"<image_id>1</image_id><image>{one}</image>{''.join(slices)}" in written.replace("\u010a", "")
        assert sum(1 for _ in model.generate([{"role": "user", "content": content}], 2, n_ctx=512)) <= 2


def test_places() -> None:
    """torch.arange counts eight numbers from a rounded one, so 45 / 47 is not the nearest float32 (torch 2.14)."""
    found = float_range(0, 1 - 1e-6, 1 / 47)
    assert len(found) == 47 and found[3] == np.float32(3 / 47)
    assert sum(found != np.arange(47, dtype=np.float32) / np.float32(47)) == 6
    np.testing.assert_allclose(sines_of_places(3, 70, OUT), sines(3, 70), atol=1e-5)


def test_processor() -> None:
    """Sides are whole patches; mean and deviation have names of their own."""
    config = {"image_processor_type": "MiniCPMVImageProcessor", "norm_mean": [0.1, 0.2, 0.3], "norm_std": [0.5] * 3}
    made = picture_processor(config)(np.zeros((300, 700, 3), np.uint8))
    assert made["target_sizes"].tolist() == [[21, 49], [30, 34], [30, 34]]
    assert made["pixel_values"].shape[:3] == (1, 3, 14)
    np.testing.assert_allclose(made["pixel_values"][0, :, 0, 0], [-0.2, -0.4, -0.6], rtol=1e-6)
    with pytest.raises(MediaError, match="max_slice_nums"):
        picture_processor({**config, "max_slice_nums": 0})


def test_what_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, hidden_size=OUT)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"v\.blk\.2"):
        open_tower_of(str(tmp_path), None, "vision")
