"""The scripts in tools/examples run, and show what they say they show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from pyggml import tools
from pyggml.llm.model import load_model

from ..media_model import MM, WIDE, write_folder

SCRIPTS = ["activation_patching", "attention_picture", "characters", "conv_net", "digits", "endless", "head_ablation"]
SCRIPTS += ["logit_attribution", "logit_lens", "parallel", "picture_attention", "pirate_tales", "sparse_autoencoder"]
SCRIPTS += ["steering", "unet"]
FOLDER = Path(tools.__file__).parent / "examples"


def run(name: str, *args: object) -> str:
    command = [sys.executable, FOLDER / f"{name}.py", *args]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_are_tested_and_short() -> None:
    scripts = sorted(FOLDER.glob("*.py"))
    assert [s.stem for s in scripts] == SCRIPTS
    assert all(len(s.read_text().splitlines()) <= 100 for s in scripts)


def test_parallel(tiny: Path) -> None:
    lines = run("parallel", tiny, "abc").splitlines()
    assert len(lines) == 4 == len(set(lines)) and all("abc" in line[:6] for line in lines)


def test_endless(tiny: Path) -> None:
    out = run("endless", tiny, "abc", 150)
    assert out.count("[63 cells in use: shift]") == 4  # at 63 tokens, and whenever 28 more came


def test_logit_lens(tiny: Path) -> None:
    lines = run("logit_lens", tiny, "abc").splitlines()
    assert [line.split()[0] for line in lines] == ["l_out-0", "l_out-1"]
    best = load_model(tiny).new_context()
    best.decode(load_model(tiny).tokenize("abc"))
    assert lines[-1].split()[1] == repr(load_model(tiny).detokenize([int(best.logits[-1].argmax())]))


def test_attention_picture(tiny: Path, tmp_path: Path) -> None:
    assert "4 heads, 7 tokens" in run("attention_picture", tiny, "abc", tmp_path / "a.svg")
    cells = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert len(cells) == 4 * 28 and sum(float(c.get("fill-opacity", 0)) for c in cells) == pytest.approx(28, abs=0.05)


@pytest.mark.skipif(not MM.is_dir(), reason=f"shared data folder not found: {MM}")
@pytest.mark.parametrize(("name", "pic"), [("qwen2-vl", ""), ("llava-clip", "<image>")])
def test_picture_attention(name: str, pic: str, tmp_path: Path) -> None:
    specials = {"specials": {500: "<image>"}} if pic else {}
    folder, out = write_folder(tmp_path / "m", name, pic=pic, **specials), tmp_path / "looks.png"
    lines = run("picture_attention", folder, WIDE, "hi?", out).splitlines()
    assert len(lines) == 2 and all(re.fullmatch(r"layer \d: \d+% on .* line [1-4], column [1-8]", x) for x in lines)
    drawn, shown = Image.open(out), Image.open(WIDE)
    assert drawn.height == 256 and drawn.width == 2 * round(shown.width * 256 / shown.height)
    assert 0 < np.asarray(drawn).mean() < np.asarray(shown.convert("RGB")).mean()


def test_activation_patching(tiny: Path) -> None:
    (row,) = run("activation_patching", tiny, "abcd", "abxd").splitlines()
    assert row.split()[2:4] == ["0.00"] * 2 or row.split()[2:4] == ["-0.00", "0.00"]  # what is the same changes nothing


def test_head_ablation(tiny: Path) -> None:
    first, *layers = run("head_ablation", tiny, "abcdefgh").splitlines()
    assert "nats" in first and [len(line.split()) for line in layers] == [6, 6]


def test_steering() -> None:
    texts = [line[4:] for line in run("steering").splitlines()]
    assert len(texts) == 3 == len(set(texts))


def test_logit_attribution(tiny: Path) -> None:
    first, *parts = run("logit_attribution", tiny, "abc").splitlines()
    logit, total = re.findall(r"-?\d+\.\d+", first)[-2:]
    assert float(logit) == pytest.approx(float(total), abs=0.002) and len(parts) == 5
    assert sum(float(line.split()[1]) for line in parts) == pytest.approx(float(logit), abs=0.01)


def test_conv_net() -> None:
    *digits, last = run("conv_net").splitlines()
    assert len(digits) == 8 and float(last.split(": ")[1]) < 1e-6  # of probabilities


def test_unet() -> None:
    out = run("unet")
    assert "54 nodes: (48, 64, 1, 2)" in out
    assert float(out.split("difference: ")[1].split()[0]) < 1e-5 and "up to 0.72" in out


def test_digits() -> None:
    *epochs, last = run("digits", 6000, 4).splitlines()
    assert len(epochs) == 4 and float(epochs[-1].split()[2].rstrip("%")) > 97
    digits, read = re.findall(r"\[.*?\]", last)
    assert sum(a == b for a, b in zip(digits, read, strict=True)) >= len(digits) - 1


def test_characters(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 20)
    *steps, written = run("characters", text, 200).splitlines()
    losses = [float(line.split()[2]) for line in steps]
    assert len(losses) == 5 and losses[0] > 0.3 > losses[-1]
    assert "jumps over the lazy dog" in written


def test_pirate_tales() -> None:
    first, last, before, after = run("pirate_tales", 16).splitlines()
    assert float(last.split()[2]) < 0.6 * float(first.split()[2])
    n_before, n_after = (int(line.split()[1]) for line in (before, after))
    assert n_after >= n_before + 3


def test_sparse_autoencoder() -> None:
    share, active, *features = run("sparse_autoencoder").splitlines()
    assert int(share.split()[5].rstrip("%")) >= 60
    assert int(active.split()[0]) < 100
    assert len(features) >= 4
