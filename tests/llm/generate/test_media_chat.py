"""Generation from prompts and messages with pictures, with a small vocabulary made here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import BatchError, ModelError
from pyggml.llm.generate.engine import Engine
from pyggml.llm.generate.generation import TextRequest, read_prompt
from pyggml.llm.generate.media_chat import read_messages
from pyggml.llm.media_prompt import features_of
from pyggml.llm.samplers import text_params
from pyggml.media import Features

from ...conftest import shared_dir

MM = shared_dir() / "golden" / "mm"
pytestmark = pytest.mark.skipif(not MM.is_dir(), reason=f"no golden data in {MM}")
PARTS = (  # a template that knows parts; PIC stands for what it writes for a picture
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'image' %}PIC"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}<reply>"
)
TEXTS = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"  # one that does not
GREEDY: dict[str, Any] = {"temp": 0.0}


@pytest.fixture(scope="module")
def golden() -> Any:
    return np.load(MM / "mm.npz")


def bytes_as_texts() -> list[str]:
    """The characters by which GPT-2's vocabularies spell bytes."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    more = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(more)) for b in range(256)]


def load(name: str, specials: Mapping[int, str], template: str = "") -> gg.Model:
    """A golden folder with a vocabulary of bytes and special tokens."""
    model = gg.load_model(MM / name, repack=False)
    texts = [*bytes_as_texts(), *(f"<unused{i}>" for i in range(256, 512))]
    for token, text in specials.items():
        texts[token] = text
    vocab = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": texts,
        "token_type": np.array([1] * 256 + [3] * 256, np.int32),
        "merges": list[str](),
        "bos_token_id": 510,
        "eos_token_id": 511,
    }
    model.kv = {**model.kv, **{f"tokenizer.ggml.{key}": value for key, value in vocab.items()}}
    if template:
        model.kv = {**model.kv, "tokenizer.chat_template": template}
    return model


def user(*parts: Any) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return [{"role": "user", "content": content}]


def qwen(template: str = "") -> gg.Model:
    specials = {500: "<|image_pad|>", 499: "<|vision_start|>", 498: "<|vision_end|>"}
    return load("qwen2-vl", specials, template or PARTS.replace("PIC", "<|vision_start|><|image_pad|><|vision_end|>"))


def gemma() -> gg.Model:
    specials = {500: "<image_soft_token>", 499: "<start_of_image>", 498: "<end_of_image>"}
    return load("gemma3", specials, PARTS.replace("PIC", "<start_of_image>"))


def picture(golden: Any, name: str, i: int = 0) -> Features:
    grid = golden.get(f"{name}/{i}/image_grid_thw")
    lines = None if grid is None else (1, int(grid[0][1]) // 2, int(grid[0][2]) // 2)
    return Features(golden[f"{name}/{i}/features"], lines)


def greedy(model: gg.Model, prompt: gg.MediaPrompt, n: int) -> list[int]:
    """The likeliest tokens one after the other, without the engine."""
    ids: list[int] = []
    with model.new_context(256) as ctx:
        ctx.decode(prompt)
        for _ in range(n):
            ids.append(int(ctx.logits[-1].argmax()))
            ctx.decode(ids[-1:])
    return ids


@pytest.mark.parametrize("name", ["qwen2-vl", "gemma3"])
def test_text_from_pictures(golden: Any, name: str) -> None:
    """One at a time, several at a time and in small batches the same tokens, which are those of plain decodes."""
    model = qwen() if name == "qwen2-vl" else gemma()
    chats = [user("Look: ", picture(golden, name, i), "What is it?") for i in (0, 1)]
    chats += [user(picture(golden, name), " and ", picture(golden, name, 1)), user("Nothing to see")]
    prompts = [read_prompt(model, chat) for chat in chats]
    want: list[list[int]] = []
    for (ids, media, _), chat in zip(prompts, chats, strict=True):
        seen = [p["image"] for p in chat[0]["content"] if "image" in p]
        assert (media is not None) is bool(seen)
        want.append(greedy(model, gg.MediaPrompt(ids, images=seen), 6))
    assert [[t.id for t in model.stream(chat, 6, **GREEDY)] for chat in chats] == want
    for context in ({}, {"n_batch": 7, "n_ubatch": 7}):
        got: list[list[int]] = [[] for _ in chats]
        for i, token in model.stream_batch(chats, 6, n_parallel=3, context=context, **GREEDY):
            got[i].append(token.id)
        assert got == want
    answers = list(gg.batch(model, [{"messages": chat} for chat in chats], 6, **GREEDY))
    assert [a["text"] for a in answers] == model.generate_batch(chats, 6, **GREEDY)


def test_a_prefix_is_shared_when_its_pictures_are_equal(golden: Any) -> None:
    """By the bytes of the pictures, not by their placeholders; and never only a part of tokens that see each other."""
    model = qwen()
    a, b = picture(golden, "qwen2-vl"), picture(golden, "qwen2-vl", 1)
    done: list[int] = []

    def shared(first: Any, second: Any) -> int:
        with model.new_context(256, n_seq_max=2) as ctx:
            engine = Engine(ctx)
            for chat in (first, second):
                ids, media, _ = read_prompt(model, chat)
                g = TextRequest(ids, text_params(1, GREEDY), media=media).start(ctx, 128)
                engine.submit(g)
                while engine.busy:
                    list(engine.step())
                done.append(g.n_past)
        return done[-1]

    before = len("<user>Look: ") + 1
    assert shared(user("Look: ", a, "What?"), user("Look: ", a, "Why?")) == before + len(a.rows) + 1 + len("Wh")
    assert shared(user("Look: ", a, "What?"), user("Look: ", b, "Why?")) == before
    assert shared(user("Look: ", a, "What?"), user("Look: ", Features(a.rows.copy(), a.grid), "Why?")) > before
    model, a = load("paligemma", {500: "<image>"}), picture(golden, "paligemma")
    assert shared(user(a, "What?"), user(a, "Why?")) == 0


@pytest.mark.parametrize(
    ("name", "arrays", "n", "want"),
    [
        ("gemma3", {"num_crops": [0]}, 4, "\n\n<start_of_image>PPPP<end_of_image>\n\n"),
        (
            "gemma3",
            {"num_crops": [2]},
            3,
            "Here is the original image \n\n<start_of_image>P<end_of_image>\n\n and here are some crops to help you "
            "see better \n\n<start_of_image>P<end_of_image>\n\n \n\n<start_of_image>P<end_of_image>\n\n",
        ),
        (
            "idefics3",
            {"rows": [[1]], "cols": [[2]]},
            6,
            "<fake_token_around_image><row_1_col_1>PP<fake_token_around_image><row_1_col_2>PP\n"
            "\n<fake_token_around_image><global-img>PP<fake_token_around_image>",
        ),
        (
            "smolvlm",
            {"rows": [[0]], "cols": [[0]]},
            2,
            "<fake_token_around_image><global-img>PP<fake_token_around_image>",
        ),
        ("mistral3", {"image_sizes": [[28, 42]]}, 6, "PPP[IMG_BREAK]PPP[IMG_END]"),
        ("internvl", {}, 3, "<img>PPP</img>"),
        ("aya-vision", {"num_patches": [3]}, 6, "<|START_OF_IMG|>TILE_1PPTILE_2PPTILE_GLOBALPP<|END_OF_IMG|>"),
        ("qwen2-vl", {}, 3, "PPP"),
        ("llava-next", {}, 3, "PPP"),
        ("llama4", {"aspect_ratios": [1, 1]}, 2, "<|image_start|><|image|>PP<|image_end|>"),
        (
            "llama4",
            {"aspect_ratios": [1, 2]},
            3,
            "<|image_start|>P<|tile_x_separator|>P<|tile_y_separator|><|image|>P<|image_end|>",
        ),
        ("lfm2_vl", {"spatial_shapes": [[4, 2]]}, 2, "<|image_start|>PP<|image_end|>"),
        (
            "lfm2_vl",
            {"spatial_shapes": [[4, 4], [4, 4], [2, 4]], "image_rows": [2], "image_cols": [1]},
            10,
            "<|image_start|><|img_row_1_col_1|>PPPP<|img_row_2_col_1|>PPPP<|img_thumbnail|>PP<|image_end|>",
        ),
        ("minicpmv4_6", {"target_sizes": [[4, 8]]}, 2, "<image_id>0</image_id><image>PP</image>"),
        (
            "minicpmv4_6",
            {"target_sizes": [[4, 4], [4, 8], [4, 8]], "grids": [2, 1]},
            5,
            "<image_id>0</image_id><image>P</image><slice>PP</slice>\n<slice>PP</slice>",
        ),
    ],
)
def test_what_stands_around_a_picture(name: str, arrays: Any, n: int, want: str) -> None:
    """As each family's processor writes it, by what the processor says of the picture."""
    mark = {"gemma3": "<start_of_image>", "aya-vision": "<image>", "llama4": "<|image|>"}.get(name, "<P>")
    there = (MM / name).is_dir()
    model = load(name if there else "internvl", {500: "<P>"}, PARTS.replace("PIC", mark))
    if not there:
        model.kv = {**model.kv, "pyggml.media.family": name}
    made: list[Any] = []

    class Seeing(gg.Model):
        def process_image(self, image: Any) -> Any:
            return {key: np.array(value) for key, value in arrays.items()}

        def picture_features(self, image: Any) -> Features:
            made.append(image)
            return Features(np.ones((n, 64), np.float32), (1, 1, n))

    model.__class__ = Seeing
    chat = user("a", b"the bytes of a file", "b")
    ids, media, _ = read_messages(model, chat)
    text = "".join("P" if t == 500 else model.vocab.text(t) for t in ids)
    spelled = dict(zip(bytes_as_texts(), range(256), strict=True))
    text = bytes(spelled[c] for c in text).decode()
    assert text.replace("<bos>", "") == f"<user>a{want}b<reply>"
    assert media is not None and sum(row is not None and row.row is not None for row in media.rows) == n
    read_messages(model, chat)
    assert made == [b"the bytes of a file"]  # kept for the next turn


def test_templates_without_parts_and_paligemma(golden: Any) -> None:
    """A template of texts gets the mark in the text. PaliGemma has no template: pictures, bos, text, end of line."""
    f = picture(golden, "qwen2-vl")
    model = qwen(TEXTS)
    ids, _, _ = read_messages(model, user(f, "What?"))
    assert ids == [*model.tokenize("user:"), *[500] * len(f.rows), *model.tokenize("\nWhat?")]
    assert read_messages(model, user("What", "?"))[0] == model.tokenize("user:What?")
    model, f = load("paligemma", {500: "<image>"}), picture(golden, "paligemma")
    ids, media, _ = read_messages(model, user(f, "caption en"))
    assert ids == [*[500] * 16, 510, *model.tokenize("caption en\n")]
    assert media is not None and {row.n_group for row in media.rows if row} == {len(ids)}


def test_bad_messages(golden: Any) -> None:
    model, f = qwen(), picture(golden, "qwen2-vl")
    for parts, error in (
        ([{"type": "image"}], "a part of type 'image' has no 'image'"),
        ([{"type": "video", "video": 1}], "video is not supported; its frames can be parts of type 'image'"),
        ([{"type": "smell", "smell": 1}], "a part of a message is a text, an image or an audio"),
        (["What?"], "a part of a message is a text"),
    ):
        with pytest.raises(BatchError, match=error):
            read_messages(model, [{"role": "user", "content": parts}])
    with pytest.raises(ModelError, match=r"see"):  # it has no tower
        features_of(gg.load_model(), "image", b"...")
    with pytest.raises(gg.GGMLError, match=r"no-such\.png"):
        features_of(model, "image", "/no-such.png")
    with pytest.raises(ModelError, match=r"puts \{'image': 2\} marks .* for \{'image': 1\}"):
        read_messages(model, user(f, "<|image_pad|>"))
    with pytest.raises(BatchError, match="4 tokens see each other, but a batch has at most n_batch = 3"):
        list(gemma().generate(user(picture(golden, "gemma3")), 1, context={"n_batch": 3}))
    with pytest.raises(ModelError, match="no placeholder for image: the model takes none"):
        read_messages(gg.load_model(), user(f))
