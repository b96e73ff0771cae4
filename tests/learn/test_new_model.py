"""Models from scratch: the weights that they begin with, and `pyggml train --from-config`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from pyggml.tools.cli import app

import pyggml as gg
from pyggml.errors import ModelError
from pyggml.learn.new_model import write_new_model

from ..golden.train_score import GOLDEN
from .test_trainer import IDS

golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden data in {GOLDEN}")


def test_a_model_as_a_file(tiny: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_new_model(tiny, tmp_path / f"{name}.gguf", seed)
    a, b, c = (gg.load_model(tmp_path / f"{name}.gguf") for name in "abc")
    like = gg.load_model(tiny)
    assert a.weights.keys() == like.weights.keys()
    n_layer = a.hparams.n_layer
    for name, w in a.weights.items():
        assert w.dtype is gg.F32 and w.ne == like.weights[name].ne
        assert w.tobytes() == b.weights[name].tobytes()
        x = w.numpy()
        if "norm" in name:
            assert (x == 1).all()
            continue
        std = 0.02 / np.sqrt(2 * n_layer) if "ffn_down" in name or "attn_output" in name else 0.02
        assert x.std() == pytest.approx(std, rel=0.1) and abs(x.mean()) < std / 5
        assert w.tobytes() != c.weights[name].tobytes()
    assert a.tokenize("abc") == like.tokenize("abc")
    assert a.trainer(gg.SGD()).loss([IDS]) == pytest.approx(np.log(a.hparams.n_vocab), abs=0.1)


@golden
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma3", "llama31"])
def test_a_model_as_a_config_says(name: str, tmp_path: Path) -> None:
    """The tensors are those of the checkpoint, in shapes that follow from the config."""
    source, folder = GOLDEN / "hf" / name, tmp_path / "like"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    write_new_model(folder, tmp_path / "m.gguf")
    new, like = gg.load_model(tmp_path / "m.gguf"), gg.load_model(source)
    assert {n: w.ne for n, w in new.weights.items()} == {n: w.ne for n, w in like.weights.items()}
    if "rope_freqs.weight" in like.weights:
        assert new.weights["rope_freqs.weight"].tobytes() == like.weights["rope_freqs.weight"].tobytes()
    t = new.trainer(gg.AdamW(lr=0.01))
    losses = [t.step([IDS]) for _ in range(5)]
    assert losses[-1] < losses[0]


@golden
def test_weights_that_begin_in_another_way(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"how the weight blk\.0\.ssm_\w+.* begins in a new model is not known"):
        write_new_model(GOLDEN / "hf" / "mamba", tmp_path / "m.gguf")
    assert not [*tmp_path.iterdir()]


def test_the_command_line(tiny: Path, tmp_path: Path) -> None:
    data, out, state = tmp_path / "a.jsonl", tmp_path / "m.gguf", tmp_path / "s"
    data.write_text("".join(json.dumps({"text": "ab" * n}) + "\n" for n in range(2, 8)))

    def run(*more: object) -> str:
        args = ["train", data, "--from-config", tiny, "-b", 2, "--lr", 0.01, "-t", 1, "-o", out, "--seed", 3, *more]
        result = CliRunner().invoke(app, [*map(str, args)])
        return result.output + str(result.exception or "")

    common = ["--test", data, "--steps", 6, "--schedule", "constant"]
    text = run(*common)
    before, after = (float(line.split()[2].rstrip(",")) for line in text.splitlines() if line.startswith("test:"))
    assert after < before - 0.5
    whole = {n: w.tobytes() for n, w in gg.load_model(out).weights.items()}
    run("--steps", 3, "--schedule", "constant", "--state", state)
    run(*common, "--resume", state)
    assert {n: w.tobytes() for n, w in gg.load_model(out).weights.items()} == whole
    assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl", "m.gguf", "s"} | {
        p.name for p in [tiny] if p.parent == tmp_path
    }
    assert "without --model" in run("-m", tiny)
    assert "seed was 3 there, and is 4 here" in run(*common, "--seed", 4, "--resume", state)
