"""Functions as verbs of the command line: what their parameters become, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner
from pyggml.tools.cli import VERBS, app, main
from pyggml.tools.command import Argument, Group, Option, Verb, verb


@dataclass
class Size:
    width: Annotated[int, Option("-w", help="Wide.", min=1, max=9, panel="Size")] = 3
    height: Annotated[float | None, Option("--height", help="High.", panel="Size")] = None


def called(*args: object, code: int = 0) -> Any:
    """What the verb is called with; or what it says."""
    got: dict[str, Any] = {}

    def sample(
        name: Annotated[str, Argument(metavar="NAME", help="A name.")],
        size: Annotated[Size, Group.of(Size)],
        kind: Annotated[Literal["a", "b"], Option("--kind", help="A or b.")] = "a",
        many: Annotated[list[str] | None, Option("-x", help="Many.")] = None,
        pair: Annotated[tuple[int, int] | None, Option("--pair", help="Two.")] = None,
        path: Annotated[Path, Option("-o", help="A file.")] = Path("out"),
        on: Annotated[bool, Option("--on/--off", " /-nx", help="On.")] = True,
    ) -> None:
        """Says what it got."""
        got.update(name=name, size=size, kind=kind, many=many, pair=pair, path=path, on=on)

    hints = sample.__annotations__
    hints["size"] = Annotated[Size, Group.of(Size)]
    for name in ("name", "kind", "many", "pair", "path", "on"):
        hints[name] = eval(hints[name])
    done = CliRunner().invoke(verb("sample", sample), [str(a) for a in args])
    assert done.exit_code == code, done.output
    return got if code == 0 and got else done.output


def test_parameters_are_options() -> None:
    plain = called("me")
    assert plain["name"] == "me" and plain["size"] == Size() and plain["kind"] == "a" and plain["on"] is True
    assert plain["path"] == Path("out") and not plain["many"] and plain["pair"] is None
    given = called(
        "me", "-w", 9, "--height", 1.5, "--kind", "b", "-x", "1", "-x", "-2", "--pair", 1, -2, "-nx", "-o", "p"
    )
    assert given["size"] == Size(9, 1.5) and given["kind"] == "b" and list(given["many"]) == ["1", "-2"]
    assert given["pair"] == (1, -2) and given["on"] is False and given["path"] == Path("p")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("-w", 0), "0 is below 1"),
        (("-w", 10), "10 is above 9"),
        (("-w", "x"), "'x' is not a whole number"),
        (("-w", "1.5"), "'1.5' is not a whole number"),
        (("-w", ""), "'' is not a whole number"),
        (("-w", 10**30), "is out of range"),
        (("--height", "nan"), "'nan' is out of range"),
        (("--height", "inf"), "'inf' is out of range"),
        (("--height", "tall"), "'tall' is not a number"),
        (("--kind", "c"), "'c' is not one of"),
        (("--pair", 1), "requires 2 arguments"),
    ],
)
def test_what_is_refused(args: tuple[object, ...], says: str) -> None:
    assert says in called("me", *args, code=2)


def test_help_explains_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    text = called("--help")
    assert text.index("Arguments:") < text.index("NAME  A name.") < text.index("Options:") and text.count("NAME") == 2
    for verb_name, says in (
        ("diff", "m.gguf:quantize=Q4_K_M"),
        ("quantize", "IQ4_XS"),
        ("tokenize", "TEXT The text."),
        ("merge", "OUT GGUF file to write"),
    ):
        with pytest.raises(SystemExit):
            main([verb_name, "--help"])
        assert says in " ".join(capsys.readouterr().out.split())


def test_a_verb_that_is_misspelt(capsys: pytest.CaptureFixture[str]) -> None:
    for word, says in (("quantise", "Did you mean 'quantize'?"), ("zzz", "No such command 'zzz'.")):
        with pytest.raises(SystemExit) as e:
            main([word])
        assert e.value.code == 2 and says in capsys.readouterr().err


def test_every_argument_has_help() -> None:
    for name in VERBS:
        command = app.get_command(None, name)
        assert isinstance(command, Verb)
        n = sum(isinstance(p, click.Argument) for p in command.params)
        assert n == len(command.arguments) and all(text for _, text in command.arguments)


def test_help_shows_panels_and_defaults() -> None:
    text = called("--help")
    assert "Says what it got." in text and text.index("Options:") < text.index("Size:") < text.index("-w INTEGER")
    assert "[default: 3]" in text and "None" not in text


def test_every_verb_has_help() -> None:
    run = CliRunner()
    listed = run.invoke(app, ["-h"]).output
    for name in VERBS:
        shown = run.invoke(app, [name, "-h"])
        assert shown.exit_code == 0 and f"Usage: pyggml {name}" in shown.output.replace("cli ", "pyggml "), name
        assert name in listed


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for args, says in (
        (["generate", "--toop-k", "1"], "pyggml generate: No such option"),
        (["generat"], "pyggml: No such command 'generat'"),
        (["quantize", "a"], "pyggml quantize: Missing argument 'OUT'"),
        (["generate", "-n", "x"], "'x' is not a whole number"),
    ):
        with pytest.raises(SystemExit) as e:
            main(args)
        got = capsys.readouterr()
        assert e.value.code == 2 and got.err.count("\n") == 1 and says in got.err, got.err
    with pytest.raises(SystemExit) as e:
        main([])
    assert e.value.code == 0 and "Commands:" in capsys.readouterr().out


def test_letters_that_stdout_lacks() -> None:
    """That of LC_ALL=C has ASCII, a file of Windows the letters of its country."""
    command = [sys.executable, "-m", "pyggml", "generate", "-p", "\u017d\u00fc", "-n", "1"]
    for encoding, text in (("ascii", b"\\u017d\\xfc"), ("latin-1", b"\\u017d\xfc"), ("utf-8", "\u017d\u00fc".encode())):
        environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        assert done.stdout.startswith(text), done


def test_a_model_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """As an unset variable of the shell gives it: not the model that ships."""
    with pytest.raises(SystemExit) as e:
        main(["generate", "-m", "", "-p", "a", "-n", "1"])
    assert e.value.code == 1 and "a path cannot be ''" in capsys.readouterr().err
