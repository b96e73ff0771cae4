"""Adapters, splits and control vectors from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyggml.tools.cli import main

from ..llm.adapters.make import halves, write_lora
from ..tiny_model import write_gguf


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(a) for a in args])
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out, out.err

    return call


def test_verbs(run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter changes what every verb computes; merged into the file, it does the same."""
    from pyggml.llm.model import load_model

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    path = write_gguf(tmp_path / "m.gguf")
    with load_model(path) as model:
        write_lora(tmp_path / "l.gguf", halves(model, [n for n, t in model.weights.items() if t.rank > 1]))
    assert run("split", path, "s.gguf", "--max-tensors", 8)[1].split()[0] == "s-00001-of-00003.gguf"
    assert run("merge", "s-00001-of-00003.gguf", "one.gguf")[:2] == (0, "one.gguf: 3 parts, 21 tensors\n")
    assert run("merge-lora", "s-00001-of-00003.gguf", "l.gguf", "merged.gguf", "--scale", 0.5)[0] == 0

    def ids(file: str, *options: object) -> object:
        common = ("-p", "ab", "-n", 6, "--temp", 0, "--ignore-eos", "--json")
        return json.loads(run("generate", "-m", file, *common, *options)[1])["ids"]

    assert ids("merged.gguf") == ids("s-00001-of-00003.gguf", "--lora-scaled", "l.gguf:0.5") != ids("one.gguf")
    (tmp_path / "p.txt").write_text("good\n")
    (tmp_path / "n.txt").write_text("evil\n")
    made = run("cvector", "-m", path, "--positive-file", "p.txt", "--negative-file", "n.txt", "--method", "mean")
    assert made[:2] == (0, "control_vector.gguf: 1 directions from 1 pairs (mean)\n")
    strong = ("--control-vector-scaled", "control_vector.gguf:50")
    assert ids("one.gguf", *strong) != ids("one.gguf")
    assert ids("one.gguf", *strong, "--control-vector-layer-range", 2, 9) == ids("one.gguf")
    (tmp_path / "t.txt").write_text("the text " * 30)
    common = ("-m", path, "-f", "t.txt", "-c", 32, "--chunks", 1)
    ppl = [run("perplexity", *common, *o)[1] for o in ((), ("--lora", "l.gguf"))]
    assert ppl[0] != ppl[1] and all("PPL" in p for p in ppl)


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--lora", "none.gguf"), 1, "none.gguf: cannot be read"),
        (("--lora-scaled", "x.gguf:y"), 2, "FILE:SCALE"),
        (("--control-vector", "m.gguf"), 1, "is no control vector"),
        (("--lora", "m.gguf"), 1, "is no LoRA adapter"),
        (("--lora", "l.gguf", "--prompt-cache", "c"), 2, "--prompt-cache cannot be given with adapters"),
    ],
)
def test_errors(
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_gguf(tmp_path / "m.gguf")
    found = run("generate", "-m", "m.gguf", "-p", "ab", "-n", 2, *options)
    assert found[0] == code and text in found[2]
