"""What the command line refuses, and how: exit codes, and errors that name what is wrong."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from pyggml.tools import embed, prompt_text
from pyggml.tools.cli import main
from pyggml.tools.logs import start_logging

from pyggml.errors import BatchError
from pyggml.gguf_io.read import open_gguf
from pyggml.gguf_io.split import metadata_records
from pyggml.gguf_io.write import GGUFOut
from pyggml.llm.model import load_model

from ..conftest import shared_dir
from ..tiny_model import write_gguf


def run(*args: object) -> int:
    """The exit code of a command, run in this process."""
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in args])
    assert isinstance(e.value.code, int)
    return e.value.code


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-l", "12345"), "TOKEN_ID+BIAS"),  # no sign: which digits are the token?
        (("-l", "+5"), "TOKEN_ID+BIAS"),
        (("-l", "12+x"), "TOKEN_ID+BIAS"),
        (("-l", "99999+1"), "token 99999"),
        (("--temp", -1), "temp must be 0 or more"),
        (("--top-p", 1.5), "top_p"),
        (("--samplers", "nonsense"), "nonsense"),
        (("--grammar", "root ::= ("), "grammar"),
        (("-gan", 3, "-gaw", 10), "multiple"),
        (("--lookup", "--draft-min", 9, "--draft-max", 2), "drafts of 9 to 2"),
    ],
)
def test_bad_values_are_errors_of_usage(
    tiny: Path, capsys: pytest.CaptureFixture[str], options: tuple[object, ...], says: str
) -> None:
    assert run("generate", "-m", tiny, "-p", "x", "-n", 1, "-t", 1, *options) == 2
    got = capsys.readouterr()
    assert got.out == "" and says in " ".join(got.err.split())


def test_biases(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for bias in ("123+100", "123+1e2"):
        assert run("generate", "-m", tiny, "-p", "H", "-n", 3, "-t", 1, "--temp", 0, "-l", bias) == 0
        assert capsys.readouterr().out == "Hxxx\n"


def test_n_probs_is_checked(tiny: Path) -> None:
    model = load_model(tiny)
    with pytest.raises(BatchError, match="n_probs must be a whole number from 0, not -1"):
        list(model.stream("x", 2, n_probs=-1))
    with pytest.raises(BatchError, match="n_probs must be a whole number from 0, not -1"):
        list(model.stream_batch(["x"], 2, n_probs=-1))


def test_generation_ends_where_the_context_is_full(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-n -1 of a model that never ends; the context is shifted where that is asked for."""
    args = ("generate", "-m", tiny, "-p", "Hello", "-c", 64, "-t", 1, "--temp", 0, "-l", "123+100", "--ignore-eos")
    assert run(*args, "-n", -1) == 0
    assert 50 < len(capsys.readouterr().out) < 70
    assert run(*args, "-n", 100, "--context-shift") == 0
    assert len(capsys.readouterr().out) == len("Hello\n") + 100


def test_a_prompt_that_is_too_long_is_not_shown(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "-m", tiny, "-p", "a" * 200, "-c", 64, "-t", 1) == 1
    got = capsys.readouterr()
    assert got.out == "" and "the prompt has 204 tokens; the context has room for 64" in got.err


def test_a_verb_imports_what_it_needs(tiny: Path) -> None:
    """Start-up: what other verbs, folders, templates, grammars and pictures need is not imported for a generation."""
    code = f"""
import sys
from pyggml.tools.cli import main
from pyggml.tools.logs import start_logging
try:
    main(["generate", "-m", {str(tiny)!r}, "-p", "x", "-n", "1", "-t", "1"])
except SystemExit as e:
    assert e.code == 0
print(*[m for m in sys.modules if m.startswith(("pyggml.", "graphviz", "jinja2", "llguidance", "rich."))], sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    loaded = set(done.stdout.splitlines())
    others = {"graphviz", "jinja2", "llguidance", "rich.console", "pyggml.hf.folder", "pyggml.inspect.dot"}
    others |= {"pyggml.tools.quantize", "pyggml.tools.chat", "pyggml.llm.samplers.grammar", "pyggml.llm.embed"}
    assert "pyggml.tools.generate" in loaded and not loaded & others


@pytest.mark.parametrize(
    "line",
    [
        ("trace", "-p", "hi", "-o"),
        ("inspect", "-p", "hi", "-o"),
        ("bench", "-p", "4", "-n", "0", "-r", "1", "--trace-json"),
        ("generate", "-p", "hi", "-n", "1", "--log-file"),
        ("dump-dot", "-o"),
    ],
)
def test_the_model_is_not_written_over(line: tuple[str, ...], tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tiny.read_bytes()
    verb, *rest = line
    assert run(verb, "-m", tiny, *rest, tiny) == 2
    assert "the output is the model" in " ".join(capsys.readouterr().err.split())
    assert tiny.read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [
        ("generate", "--ram", "0"),
        ("generate", "--rope-freq-base", "nan"),
        ("generate", "--rope-scale", "0"),
        ("generate", "--rope-freq-base", "0"),
        ("generate", "--yarn-beta-slow", "-7"),
        ("generate", "-c", "x"),
        ("generate", "-c", "99999999999"),
        ("perplexity", "-f", "x.txt", "-c", "1"),
        ("perplexity", "-f", "x.txt", "--chunks", "0"),
        ("imatrix", "-f", "x.txt", "--chunks", "0"),
        ("op-bench", "--isa", "zz"),
        ("bench", "-ctk", "Q9"),
        ("embed", "-ctv", "Q9", "a text"),
        ("embed", "--embd-normalize", "0.5", "a text"),
    ],
)
def test_bad_values_of_other_verbs(line: tuple[str, ...], tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = () if line[0] == "op-bench" else ("-m", tiny)
    assert run(line[0], *model, *line[1:]) == 2
    got = capsys.readouterr()
    assert got.out == "" and got.err.count("\n") == 1


def test_models_that_lack_what_a_verb_reads(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They ended in tracebacks: a vocabulary without weights, layers without outputs, a name in two lines."""
    vocabulary = tmp_path / "vocab.gguf"
    with GGUFOut(vocabulary, metadata_records(open_gguf(tiny)), [], 32):
        pass
    assert run("quantize", vocabulary, tmp_path / "q.gguf", "Q4_0") == 0
    assert run("diff", tiny, tmp_path / "a\nb", "-p", "x") == 1
    (text := tmp_path / "a.txt").write_text("a\nb\n")
    hf = shared_dir() / "golden" / "hf" / "bert"
    if hf.is_dir():
        assert run("cvector", "-m", hf, "--positive-file", text, "--negative-file", text) == 1
        assert "bert has no control vectors" in capsys.readouterr().err


def test_texts_that_are_no_utf8_or_too_large(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (text := tmp_path / "a.txt").write_bytes(b"\xff\xfe\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run("chat", "-m", tiny, "-sysf", text) == 0
    (zero := tmp_path / "zero").symlink_to("/dev/zero")
    monkeypatch.setattr(prompt_text, "_LONGEST", 1 << 20)
    assert run("cvector", "-m", tiny, "--positive-file", zero, "--negative-file", zero) == 2
    assert run("chat", "-m", tiny, "-sysf", zero) == 2
    assert "texts have up to 1 MiB" in capsys.readouterr().err


def test_memory_that_is_full_is_one_line(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(prompt_text, "read_bytes", full)
    assert run("tokenize", "-m", tiny, "-f", "a") == 1
    assert capsys.readouterr().err == "pyggml: memory is full\n"


def test_only_so_many_texts_are_compared(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pairs of a million lines would be four terabytes."""
    monkeypatch.setattr(embed, "_COMPARED", 3)
    (text := tmp_path / "a.txt").write_text("a\n" * 5)
    assert run("embed", "-m", tiny, "-f", text, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert np.shape(said["cosines"]) == (3, 3) and len(said["embeddings"]) == 5


def test_texts_have_an_end(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyggml.tools.prompt_text._LONGEST", 1 << 20)
    assert run("generate", "-m", tiny, "-f", "/dev/zero", "-n", 1) == 2
    assert "texts have up to 1 MiB" in capsys.readouterr().err


def test_a_log_that_cannot_be_written_is_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Full:
        def write(self, _: str) -> None:
            raise OSError("no space left")

        def flush(self) -> None:
            raise OSError("no space left")

        close = flush

    log = logging.getLogger("pyggml")
    start_logging(False, tmp_path / "log")
    try:
        handler = next(h for h in log.handlers if isinstance(h, logging.FileHandler))
        handler.stream.close()
        handler.stream = Full()  # pyright: ignore[reportAttributeAccessIssue]
        log.debug("one")
        log.debug("two")
    finally:
        start_logging(False, None)
    got = capsys.readouterr().err
    assert got.count("\n") == 1 and "nothing more is logged" in got and "no space left" in got


def test_verbs_take_the_options_of_the_context(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("-m", tiny, "-t", 1, "-ctk", "bf16", "-b", 8, "--no-mmap")
    assert run("bench", "-p", 16, "-n", 2, "-r", 1, "--json", *more) == 0
    assert [row["test"] for row in json.loads(capsys.readouterr().out)] == ["pp16", "tg2"]
    assert run("embed", "a", *more) == 0
    (tmp_path / "in").write_text('{"prompt": "a"}\n')
    assert run("batch", "-i", tmp_path / "in", "-o", tmp_path / "out", "-n", 2, *more) == 0
    assert json.loads((tmp_path / "out").read_text())["n_predicted"] == 2
    assert run("batch", "-i", tmp_path / "in", "-o", tmp_path / "out", "-n", 2, "--fast", *more) == 1
    assert "precision" in capsys.readouterr().err  # its results are others


@pytest.mark.parametrize("option", ["quantize=BOGUS", "type_k=Q9", "isa=zz", "backend=zz", "repack=2"])
def test_bad_options_of_a_side(option: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", tiny, f"{tiny}:{option}", "-p", "a") == 2
    got = capsys.readouterr()
    assert got.out == "" and got.err.count("\n") == 1 and option.partition("=")[2] in got.err


def test_json_has_null_for_numbers_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "nan.gguf")
    (norm,) = (t for t in gguf.GGUFReader(path, "r+").tensors if t.name == "output_norm.weight")
    norm.data[5] = np.nan
    assert run("embed", "-m", path, "--embd-normalize", -1, "--json", "a", "b") == 0
    text = capsys.readouterr().out
    assert "NaN" not in text and [row[5] for row in json.loads(text)["embeddings"]] == [None, None]
