"""Texts of a stranger's file at a terminal: shown as they are, and never obeyed."""

from __future__ import annotations

import sys

import pytest
from pyggml.tools.cli import main
from pyggml.tools.plain import plain

from ..tiny_model import WriteModel

EVIL = "\x1b]0;title\x07\x1b[2J[bold]x[/bold][/nothing]\x9b31m\r\x08"


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
        assert not [c for c in shown if c < " " and c not in "\n\t"] and "\x9b" not in shown, args
        assert "\\x1b" in shown or args[0] == "quantize", args


def test_text_at_a_terminal_is_plain(
    write_model: WriteModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that says ESC: shown at a terminal, and as it is in a pipe."""
    args = ("generate", "-m", write_model(), "-p", "a", "-n", 2, "-t", 1, "--temp", 0, "-l", f"{3 + 0x1B}+100")
    assert said(capsys, *args).startswith("a\x1b\x1b")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert said(capsys, *args).startswith(r"a\x1b\x1b")
