"""Texts of a stranger's file at a terminal: shown as they are, and never obeyed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from pyggml.tools.cli import main
from pyggml.tools.plain import plain

from pyggml.dtypes import DType
from pyggml.gguf_io.split import metadata_records, open_model
from pyggml.gguf_io.write import GGUFOut
from pyggml.tensor import rank_of

from ..tiny_model import WriteModel

EVIL = "\x1b]0;title\x07\x1b[2J[bold]x[/bold][/nothing]\x9b31m\r\x08\u202e\u2066\u2028"


def said(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> str:
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in args])
    got = capsys.readouterr()
    assert e.value.code == code, got.err
    return got.out + got.err


def test_control_characters_are_shown() -> None:
    assert plain("a\n\tb\x1b[1m\x7f\x9b\udcc3é日") == "a\n\tb\\x1b[1m\\x7f\\x9b\\xc3é日"


def test_a_file_does_not_command_the_terminal(
    write_model: WriteModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, values, templates, tensors that nothing asks for, and errors."""
    monkeypatch.setenv("COLUMNS", "300")
    kv = {"general.name": EVIL, f"x.{EVIL}": EVIL, "tokenizer.chat_template": EVIL, "x.list": [EVIL, EVIL]}
    path = write_model(kv=kv, extra=(f"t.{EVIL}",))
    bad = path.rename(path.with_name("evil.gguf"))
    for args, code in (
        (("info", "-m", bad), 0),
        (("info", "-m", write_model(arch=EVIL)), 0),
        (("generate", "-m", bad, "-p", "a", "-n", 1, "-t", 1, "-l", "123+100", "-v"), 0),
        (("generate", "-m", bad, "--override-kv", f"x.{EVIL}=int:5", "-p", "a"), 1),
        (("generate", "-m", f"none{EVIL}", "-p", "a"), 1),
        (("quantize", bad, bad.with_name("q.gguf"), "Q8_0", "--dry-run"), 0),
    ):
        shown = said(capsys, *args, code=code)
        assert not [c for c in shown if c < " " and c not in "\n\t"] and not {*"\x9b\u202e\u2066\u2028"} & {*shown}, (
            args
        )
        assert "\\x1b" in shown or args[0] == "quantize", args


def test_text_at_a_terminal_is_plain(
    write_model: WriteModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that says ESC: shown at a terminal, and as it is in a pipe."""
    args = ("generate", "-m", write_model(), "-p", "a", "-n", 2, "-t", 1, "--temp", 0, "-l", f"{3 + 0x1B}+100")
    assert said(capsys, *args).startswith("a\x1b\x1b")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert said(capsys, *args).startswith(r"a\x1b\x1b")


def test_marks_that_change_the_order_are_shown() -> None:
    assert plain("m\u202effug.txt \u2066a\u2069\u2029") == "m\\u202effug.txt \\u2066a\\u2069\\u2029"
    assert plain("\u05d0\u200f \u200d") == "\u05d0\u200f \u200d"  # letters, and what joins them


def test_a_tensor_that_wants_an_importance_matrix(
    write_model: WriteModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name is shown in a warning, and is no markup."""
    file = open_model(write_model())
    tensors = [(t.name, t.dtype, t.ne[: rank_of(t.ne)]) for t in file.tensors.values()]
    path = tmp_path / "odd.gguf"
    with GGUFOut(path, metadata_records(file), [*tensors, ("\x1b[2J[/b].weight", DType.F32, (256, 4))], 32) as out:
        for name in file.tensors:
            out.write_tensor([file.tensor_bytes(name)])
        out.write_tensor([np.ones((4, 256), np.float32)])
    shown = said(capsys, "quantize", path, tmp_path / "q.gguf", "IQ2_XXS", "--dry-run")
    assert "\x1b" not in shown and r"the first is \x1b[2J[/b].weight" in shown


def test_names_of_folders_are_no_markup(
    write_model: WriteModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    folder = tmp_path / "x["
    folder.mkdir()
    path = write_model().rename(folder / "b].gguf")
    for args in (
        ("quantize", path, folder / "c].gguf", "Q8_0"),
        ("bench", "-m", path, "-p", 4, "-n", 1, "-r", 1, "-t", 1),
    ):
        assert "x[/b].gguf" in said(capsys, *args)
