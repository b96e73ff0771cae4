"""docs/command_line.md names every verb, and every variable of the environment that is read."""

import re

from click.shell_completion import get_completion_class
from pyggml.tools.cli import VERBS, app

from ..readme import ROOT

PAGE = (ROOT / "docs" / "command_line.md").read_text()


def test_verbs() -> None:
    table = PAGE.split("| verb |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == sorted(VERBS)


def test_variables() -> None:
    read = re.compile(r"""environ(?:\.get\(|\[)"((?:PYGGML|HF|XDG)_\w+|TMPDIR)\"""")
    found = {
        name
        for room in ("pyggml", "tools", "models")
        for path in (ROOT / room).rglob("*.py")
        for name in read.findall(path.read_text())
    }
    assert "PYGGML_MODEL" in found
    assert not {name for name in found if f"`{name}`" not in PAGE}


def test_completion() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert f"_PYGGML_COMPLETE={shell}_source pyggml" in PAGE
        made = get_completion_class(shell)
        assert made is not None
        complete = made(app, {}, "pyggml", "_PYGGML_COMPLETE").get_completions
        assert [item.value for item in complete([], "gen")] == ["generate"]
        assert "--temp" in [item.value for item in complete(["generate"], "--te")]
