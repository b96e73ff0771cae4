"""CLIP and SigLIP read texts, and encoders of pictures classify: against the transformers library's numbers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyggml.tools.cli import main

import pyggml as gg
from pyggml.errors import BatchError, ModelError
from pyggml.llm.text_tower import ClipWords

from ..conftest import shared_dir
from ..pillow import of_pillow_13

MM = shared_dir() / "golden" / "mm"
pytestmark = pytest.mark.skipif(not MM.is_dir(), reason=f"no golden data in {MM}")
PICTURES = [str(MM / "images" / f"{name}.png") for name in ("wide", "tall")]
IDS = [[1, 7, 300, 2], [1, 44, 45, 2], [1, 120, 9, 2]]
# transformers 5.24 in float64: logits_per_image, and the first three elements of the first text's embedding
LIBRARY = {
    "clip": (
        [[-0.07568150670840997, -0.12299496731386135, -0.1502808562407759],
         [0.08921844960503199, -0.044039935553273644, -0.026565494893257498]],
        [-0.06007846550102491, 0.20396447238614257, 0.13815854771925898],
    ),
    "siglip": (
        [[-0.014788498672268308, 0.3686887898855248, -0.04448384525807747],
         [-0.32817642977058303, 0.22421220306602532, -0.17543087651121436]],
        [0.04624824739892371, -0.0709377551051571, -0.043661834142733925],
    ),
}  # fmt: skip


@of_pillow_13
@pytest.mark.parametrize("name", LIBRARY)
def test_texts_and_pictures(name: str) -> None:
    model = gg.load_model(MM / name)
    scores, embedding = LIBRARY[name]
    np.testing.assert_allclose(model.match(PICTURES, IDS), scores, rtol=0, atol=2e-6)
    rows = model.embed(IDS)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows[0, :3], embedding, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-6)
    assert model.embed([]).shape == (0, rows.shape[1])
    for ids, error, says in (
        (IDS[0] * 40, BatchError, r"has 160 tokens; the encoder reads 1 to"),
        ([512], BatchError, "the token 512; the encoder knows 0 to 511"),
        ([-1], BatchError, "the encoder knows"),
        ("a cat", ModelError, "no tokenizer that is known: give lists of token ids"),
    ):
        with pytest.raises(error, match=says):
            model.embed([ids])
    with pytest.raises(ModelError, match="texts must be a list"):
        model.embed("a cat")


def test_clip_ends_with_its_token(tmp_path: Path) -> None:
    """What follows the end does not matter, whichever token the config calls the end."""
    model = gg.load_model(MM / "clip")  # 2: the largest token is the end
    np.testing.assert_array_equal(model.embed([[1, 7, 300, 2, 0]]), model.embed([[1, 7, 300]]))
    folder = Path(shutil.copytree(MM / "clip", tmp_path / "clip"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 9
    (folder / "config.json").write_text(json.dumps(config))
    changed = gg.load_model(folder)
    np.testing.assert_array_equal(changed.embed([[1, 7, 9, 300]]), changed.embed([[1, 7, 9]]))
    assert (changed.embed([[1, 7, 9, 300]]) != model.embed([[1, 7, 9, 300]])).any()


def test_models_without_texts_or_classes() -> None:
    vit = gg.load_model(MM / "vit")
    with pytest.raises(ModelError, match="reads no texts"):
        vit.embed([[1]])
    with pytest.raises(ModelError, match="does not classify"):
        vit.classify_image(PICTURES)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_the_tower_that_sees_alone(name: str, tmp_path: Path) -> None:
    """A folder of `CLIPVisionModelWithProjection` or `SiglipVisionModel`: its config is the tower's."""
    folder = Path(shutil.copytree(MM / name, tmp_path / name))
    config = json.loads((folder / "config.json").read_text())
    alone = {**config["vision_config"], "projection_dim": config.get("projection_dim")}
    (folder / "config.json").write_text(json.dumps(alone))
    model, whole = gg.load_model(folder), gg.load_model(MM / name)
    np.testing.assert_array_equal(model.embed_image(PICTURES), whole.embed_image(PICTURES))
    with pytest.raises(ModelError, match="reads no texts"):
        model.embed([[1]])


@pytest.mark.parametrize("name", ["vit", "dinov2", "clip", "siglip"])
def test_classification(name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MM / name, tmp_path / name))
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {str(i): f"class {i}" for i in range(11)}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    n = 128 if name == "dinov2" else 64
    w, bias = rng.standard_normal((11, n), np.float32), rng.standard_normal(11, np.float32)
    add_tensors(folder / "model.safetensors", {"classifier.weight": w, "classifier.bias": bias})
    model = gg.load_model(folder)
    states = np.asarray(model.encode_image(PICTURES[0]), np.float64)
    reads = {
        "vit": states[0],
        "clip": states[1:].mean(0),
        "siglip": states.mean(0),
        "dinov2": np.concatenate([states[0], states[1:].mean(0)]),
    }[name]
    scores = model.classify_image(PICTURES)
    assert scores.shape == (2, 11) and scores.dtype == np.float32
    np.testing.assert_allclose(scores[0], w @ reads + bias, rtol=1e-5, atol=1e-5)
    labels: Any = model.kv["clip.vision.classifier.output_labels"]
    assert labels == [f"class {i}" for i in range(11)]


def add_tensors(path: Path, tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]]) -> None:
    """Write F32 tensors into a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    for name, a in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(a.shape), "data_offsets": [len(body), len(body) + a.nbytes]}
        body += a.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


# -- CLIP's tokenizer: ids by transformers 5.24 -----------------------------------------------------------------------

MERGES = ["a b", "ab a</w>", "t h", "th e</w>", "c a", "ca t</w>", "a a", "aa a</w>"]
TEXTS = {
    "The cat": [515, 517],
    "aaaa aaa aa": [518, 64, 320, 519, 64, 320],
    "It's  a CAT!! 123 ½x": [72, 339, 6, 338, 320, 517, 0, 256, 272, 273, 274, 126, 377, 343],
    "Ünï—code 猫 \n tab": [127, 120, 77, 127, 363, 158, 222, 498, 66, 78, 67, 324, 163, 234, 360, 83, 64, 321],
    "they'll can't''s": [514, 68, 344, 6, 75, 331, 516, 333, 6, 339, 6, 262, 338],
    "": [],
    "e\u0301a \ufb01 ABA": [127, 102, 320, 171, 105, 479, 513],
    "don’t…": [67, 78, 333, 158, 222, 503, 339, 158, 222, 355],
}


def write_tokenizer(folder: Path, in_one: bool) -> None:
    signs = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = [chr(b) for b in signs] + [chr(256 + i) for i in range(256 - len(signs))]
    names = [*chars, *(c + "</w>" for c in chars), *(m.replace(" ", "") for m in MERGES)]
    vocab = {t: i for i, t in enumerate([*names, "<|startoftext|>", "<|endoftext|>"])}
    if in_one:
        pairs = [m.split(" ") for m in MERGES]
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab, "merges": pairs}}))
    else:
        (folder / "vocab.json").write_text(json.dumps(vocab))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")


@pytest.mark.parametrize("in_one", [True, False])
def test_words_of_clip(in_one: bool, tmp_path: Path) -> None:
    assert ClipWords.of_folder(tmp_path) is None
    write_tokenizer(tmp_path, in_one)
    words = ClipWords.of_folder(tmp_path)
    assert words is not None and {text: words.ids(text, 75) for text in TEXTS} == TEXTS
    assert words.ids("ab" * 200_000, 5) == words.ids("ab" * 300, 5)  # the end of a long word is not looked at
    (tmp_path / ("tokenizer.json" if in_one else "vocab.json")).write_text('{"model": {"vocab": {}, "merges": []}}')
    with pytest.raises(ModelError, match=r"no token '<.startoftext.>'"):
        ClipWords.of_folder(tmp_path)


def test_merges_that_are_no_file(tmp_path: Path) -> None:
    """A pipe was waited for, for ever."""
    write_tokenizer(tmp_path, False)
    (tmp_path / "merges.txt").unlink()
    os.mkfifo(tmp_path / "merges.txt")
    with pytest.raises(ModelError, match="is no regular file"):
        ClipWords.of_folder(tmp_path)


def test_the_command_line_shows_vectors_of_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(MM / "clip", tmp_path / "clip"))
    write_tokenizer(folder, True)
    about = json.loads((folder / "tokenizer.json").read_text())
    about["model"]["vocab"] = {text: min(i, 511) for text, i in about["model"]["vocab"].items()}  # the encoder has 512
    (folder / "tokenizer.json").write_text(json.dumps(about))
    with pytest.raises(SystemExit) as e:
        main(["embed", "-m", str(folder), "the cat", "a cat", "--json"])
    assert e.value.code == 0 and len(json.loads(capsys.readouterr().out)["embeddings"]) == 2


def test_a_text_that_is_too_long_is_cut(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MM / "clip", tmp_path / "clip"))
    write_tokenizer(folder, True)
    model = gg.load_model(folder)
    assert model.tokenize("The cat") == [520, 515, 517, 521]
    assert len(model.tokenize("cat " * 100)) == 77
    assert model.tokenize("cat", add_special=False) == [517]
