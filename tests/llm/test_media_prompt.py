"""Prompts with pictures: the logits of the transformers library, given what its towers make of the pictures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import BatchError, ModelError
from pyggml.llm.batch import MediaRow
from pyggml.llm.media_prompt import media_key
from pyggml.media import Features

from ..conftest import shared_dir

MM = shared_dir() / "golden" / "mm"
FAMILIES = (
    *("llava-clip", "llava-siglip", "llava-next", "llava-onevision", "paligemma", "gemma3", "idefics3", "smolvlm"),
    *("qwen2-vl", "qwen2-5-vl", "glm4v", "pixtral", "mistral3", "internvl", "aya-vision"),
)
pytestmark = pytest.mark.skipif(not MM.is_dir(), reason=f"no golden data in {MM}")
F32: dict[str, Any] = {"type_k": gg.F32, "type_v": gg.F32}


@pytest.fixture(scope="module")
def golden() -> Any:
    return np.load(MM / "mm.npz")


def load(name: str) -> gg.Model:
    return gg.load_model(MM / name, repack=False)


def features(golden: Any, name: str, i: int) -> Features:
    """What the library's tower makes of a picture. Two by two patches become one row where there is a grid."""
    grid = golden.get(f"{name}/{i}/image_grid_thw")
    t, h, w = (0, 0, 0) if grid is None else (int(n) for n in grid[0])
    return Features(golden[f"{name}/{i}/features"], None if grid is None else (t, h // 2, w // 2))


def ids_of(golden: Any, name: str, i: int) -> list[int]:
    return golden[f"{name}/{i}/ids"].tolist()


def nmse(got: Any, want: Any) -> float:
    want = np.asarray(want, np.float64)
    return float(((got - want) ** 2).sum() / (want**2).sum())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_library(golden: Any, name: str) -> None:
    """Both pictures, each in a context of its own; also in small ubatches, where the family's rows do not see each
    other, with the same bits."""
    model = load(name)
    for i in range(2):
        prompt = gg.MediaPrompt(ids_of(golden, name, i), images=[features(golden, name, i)])
        with model.new_context(256, **F32) as ctx:
            ctx.decode(prompt, logits="all")
            whole = ctx.logits
        assert nmse(whole, golden[f"{name}/{i}/logits"]) < 1e-8
        if name != "paligemma":
            with model.new_context(256, n_ubatch=9, **F32) as ctx:
                ctx.decode(prompt, logits="all")
                assert (ctx.logits == whole).all()


@pytest.mark.parametrize("name", ["qwen2-vl", "glm4v", "gemma3", "pixtral"])
def test_a_prompt_goes_on_and_has_company(golden: Any, name: str) -> None:
    """Text behind a picture has the same bits in one decode, token by token, and beside another sequence; a picture
    that is taken back leaves nothing."""
    model = load(name)
    ids, f, more = ids_of(golden, name, 0), features(golden, name, 0), [7, 8, 9]
    with model.new_context(256, **F32) as ctx:
        ctx.decode(gg.MediaPrompt([*ids, *more], images=[f]))
        want = ctx.logits[-1]
        ctx.memory.clear()
        ctx.decode(more)
        plain = ctx.logits[-1]
        ctx.memory.clear()
        ctx.decode(gg.MediaPrompt(ids, images=[f]))
        for token in more:
            ctx.decode([token])
        assert (ctx.logits[-1] == want).all()
        ctx.memory.seq_rm(0)
        ctx.decode(more)
        assert (ctx.logits[-1] == plain).all()
    with model.new_context(512, n_seq_max=2, **F32) as ctx:
        batch, other = (gg.MediaPrompt([*ids, *more], images=[f]).batch(model, seq=s) for s in (0, 1))
        n = len(batch)
        batch.extend(other.tokens, other.pos, [1] * n)
        batch.media |= {n + i: row for i, row in other.media.items()}
        batch.logits = [i in (n - 1, 2 * n - 1) for i in range(2 * n)]
        ctx.decode(batch)
        assert (ctx.logits[0] == want).all() and (ctx.logits[1] == want).all()


@pytest.mark.parametrize("name", ["qwen2-vl", "gemma3", "llava-clip"])
def test_several_pictures_and_states(golden: Any, name: str, tmp_path: Path) -> None:
    """Two pictures in one prompt are the same as one prompt behind the other, also from a saved state."""
    model = load(name)
    ids, f = [ids_of(golden, name, i) for i in range(2)], [features(golden, name, i) for i in range(2)]
    with model.new_context(256, **F32) as ctx:
        ctx.decode(gg.MediaPrompt(ids[0] + ids[1], images=f))
        want = ctx.logits[-1]
        ctx.memory.clear()
        ctx.decode(gg.MediaPrompt(ids[0], images=f[:1]))
        ctx.save_state(tmp_path / "state")
        ctx.decode(gg.MediaPrompt(ids[1], images=f[1:]))
        assert (ctx.logits[-1] == want).all()
    with model.new_context(256, **F32) as ctx:
        ctx.load_state(tmp_path / "state")
        ctx.decode(gg.MediaPrompt(ids[1], images=f[1:]))
        assert (ctx.logits[-1] == want).all()


def test_deepstack_is_added_to_the_first_layers(golden: Any) -> None:
    """What the tower adds to a layer's output is added for the rows of pictures, and for no other token; as an edit of
    the layers' outputs does it. In the last layer of all only rows that go on count."""
    model, name, rng = load("qwen3-vl"), "qwen3-vl", np.random.default_rng(1)
    ids, f = ids_of(golden, name, 0), features(golden, name, 0)
    deep = rng.standard_normal((2, *f.rows.shape), np.float32)
    at = np.array(ids) == 500

    def add(level: int) -> Any:
        def change(x: Any) -> None:
            x[at] += deep[level]

        return change

    with model.new_context(256, **F32) as ctx:
        with model.edit("l_out-0", add(0)), model.edit("l_out-1", add(1)):
            ctx.decode(gg.MediaPrompt(ids, images=[f]), logits="all")
            want = ctx.logits
        ctx.memory.clear()
        ctx.decode(gg.MediaPrompt(ids, images=[Features(f.rows, f.grid, deep)]), logits="all")
        assert nmse(ctx.logits, want) < 1e-12
        ctx.memory.clear()
        ctx.decode(gg.MediaPrompt(ids, images=[Features(f.rows, f.grid, deep)]))
        assert nmse(ctx.logits, want[-1:]) < 1e-12
        with pytest.raises(BatchError, match=r"deepstack has the shape \[1, 15, 64\], where the model takes \[2, 15"):
            ctx.decode(gg.MediaPrompt(ids, images=[Features(f.rows, f.grid, deep[:1])]))


def test_paligemma_sees_its_whole_prompt(golden: Any) -> None:
    """With token types of 0 the first logits follow from the last token; without pictures a text is causal."""
    model, ids, f = load("paligemma"), ids_of(golden, "paligemma", 0), features(golden, "paligemma", 0)
    with model.new_context(256, **F32) as ctx:
        first: list[Any] = []
        for last in (3, 4):
            ctx.memory.clear()
            prompt = gg.MediaPrompt([*ids[:-1], last], images=[f], token_types=[0] * len(ids))
            ctx.decode(prompt, logits="all")
            first.append(ctx.logits[8])
        assert (first[0] != first[1]).any()
        with pytest.raises(BatchError, match="2 token types for 28 tokens"):
            ctx.decode(gg.MediaPrompt(ids, images=[f], token_types=[0, 0]))


def test_a_config_of_one_piece(golden: Any, tmp_path: Path) -> None:
    """Qwen2-VL's first configs have no part for the text model, and another name for its rope."""
    config = json.loads((MM / "qwen2-vl" / "config.json").read_bytes())
    config = {**config.pop("text_config"), **config}
    sections = config.pop("rope_parameters")["mrope_section"]
    config |= {"rope_scaling": {"type": "mrope", "mrope_section": sections}, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(MM / "qwen2-vl" / "model.safetensors")
    with gg.load_model(tmp_path, repack=False).new_context(256, **F32) as ctx:
        ctx.decode(
            gg.MediaPrompt(ids_of(golden, "qwen2-vl", 0), images=[features(golden, "qwen2-vl", 0)]), logits="all"
        )
        assert nmse(ctx.logits, golden["qwen2-vl/0/logits"]) < 1e-8


def test_bad_prompts(golden: Any) -> None:
    model, ids, f = load("gemma3"), ids_of(golden, "gemma3", 0), features(golden, "gemma3", 0)
    with model.new_context(256, n_ubatch=3) as ctx:
        for prompt, error in (
            (gg.MediaPrompt([*ids[:-1], 500], images=[f]), r"5 placeholders \(token 500\) for 4 rows of 1 pictures"),
            (gg.MediaPrompt([1, 2], images=[f]), r"0 placeholders \(token 500\) for 4 rows of 1 pictures"),
            (gg.MediaPrompt(ids), r"4 placeholders \(token 500\) for 0 rows of 0 pictures"),
            (gg.MediaPrompt(ids, images=[Features(f.rows[:, :32])]), r"shape \[4, 32\], but n_embd is 64"),
            (gg.MediaPrompt(ids, images=[Features(f.rows * np.float32(np.nan))]), "not finite"),
            (gg.MediaPrompt(ids, images=[f]), "4 tokens see each other, but only n_ubatch = 3"),
        ):
            with pytest.raises(BatchError, match=error):
                ctx.decode(prompt)
        with pytest.raises(BatchError, match="logits must be one of last, all, not 'some'"):
            ctx.decode([1], logits="some")  # pyright: ignore[reportArgumentType]
        half = gg.MediaPrompt(ids, images=[f]).batch(model)
        cut = next(i for i in half.media) + 1
        part = gg.Batch.prompt(ids[:cut])
        part.media = {i: row for i, row in half.media.items() if i < cut}
        with pytest.raises(BatchError, match="4 tokens see each other, but only 1 of them are in the batch"):
            ctx.decode(part)
        assert ctx.memory.used == 0
    with gg.load_model().new_context(64) as ctx, pytest.raises(ModelError, match="no placeholder for the rows of pict"):
        ctx.decode(gg.MediaPrompt([1, 2], images=[f]))


@pytest.mark.parametrize("arch", ["cogvlm", "gemma3", "qwen3vl"])
def test_rows_among_tokens(arch: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rows among tokens have the bits that they have in a batch of their own (CogVLM has other weights for them). Only
    the embeddings of tokens are scaled."""
    from ..models.archs import SPECS, Tiny

    t = Tiny(next(name for name, spec in SPECS.items() if spec["arch"] == arch), tmp_path_factory)
    hp, ids = t.model.hparams, t.ids[:12]
    rows = np.random.default_rng(0).standard_normal((5, hp.n_embd), np.float32)
    mixed = gg.Batch.prompt(ids)
    mixed.media = {4 + i: MediaRow(row) for i, row in enumerate(rows)}
    alone = gg.Batch()
    for i, row in enumerate(rows):
        alone.add_embd(row / np.float32(hp.f_embedding_scale or 1), 4 + i)
    with t.fresh() as ctx:
        ctx.decode(mixed)
        want = ctx.logits[-1]
    with t.fresh() as ctx:
        for batch in (gg.Batch.prompt(ids[:4]), alone, gg.Batch.prompt(ids[9:], 9)):
            ctx.decode(batch)
        assert nmse(ctx.logits[-1], want) < 1e-12


def test_keys_of_files(tmp_path: Path) -> None:
    """A pipe was waited for, for ever; a name that is no UTF-8, of no file, was a UnicodeEncodeError."""
    (path := tmp_path / "a.png").write_bytes(b"abc")
    assert media_key(path) == media_key(str(path)) == media_key(b"abc") != media_key(b"abd")
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "missing", "\udcff.png", "a\0b"):
        assert media_key(str(tmp_path / name)) != media_key(b"abc")
