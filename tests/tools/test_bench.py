"""`pyggml bench --against PROGRAM`: a program in turns with ours, and what it may answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyggml.tools.cli import app, main

RIVAL = """#!{python}
import json, sys
with open({log!r}, "a") as f:
    f.write(json.dumps(sys.argv[1:]) + "\\n")
print("a warning of a fork", file=sys.stderr)
{answer}
"""


def rival(folder: Path, answer: str) -> Path:
    """A program that notes its arguments in `folder/log` and answers by running `answer`."""
    program = folder / "llama-bench"
    program.write_text(RIVAL.format(python=sys.executable, log=str(folder / "log"), answer=answer))
    program.chmod(0o755)
    return program


def test_turns_and_ratios(tiny: Path, tmp_path: Path) -> None:
    program = rival(tmp_path, """print('[{"avg_ts": %d}]' % (20 if "7" in sys.argv else 10))""")
    line = ["bench", "-m", str(tiny), "-p", "7", "-n", "2", "-r", "2", "-t", "1", "-d", "3", "-fa", "on"]
    out = CliRunner().invoke(app, [*line, "--against", str(program), "--json"])
    pp, tg = json.loads(out.stdout)
    assert pp["against_samples_ts"] == [20, 20] and tg["against_samples_ts"] == [10, 10]
    assert pp["against_ratio"] == pytest.approx(sum(pp["samples_ts"]) / 40)  # the median of two is their mean
    calls = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert calls[0] == calls[1] != calls[2] == calls[3]
    options = {
        name: dict(zip(call[::2], call[1::2], strict=True)) for name, call in (("pp", calls[0]), ("tg", calls[2]))
    }
    assert options["pp"]["-p"] == "7" and options["pp"]["-n"] == "0"
    assert options["tg"]["-p"] == "0" and options["tg"]["-n"] == "2"
    shared = {"-m": str(tiny), "-t": "1", "-d": "3", "-fa": "1", "-ctk": "f16", "-ctv": "f16", "-r": "1", "-o": "json"}
    assert shared.items() <= options["pp"].items() and shared.items() <= options["tg"].items()
    assert "ratio" in CliRunner().invoke(app, [*line[:-4], "-r", "1", "--against", str(program)]).output


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("sys.exit('error: unknown option -d')", "failed (1): error: unknown option -d"),
        ("print('[]')", "is no llama-bench: it prints '[]'"),
        ("print('| model |')", "is no llama-bench: it prints '| model |'"),
        (None, "does not start: No such file or directory"),
    ],
)
def test_what_is_no_rival(
    answer: str | None, says: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "none" if answer is None else rival(tmp_path, answer)
    with pytest.raises(SystemExit) as e:
        main(["bench", "-m", str(tiny), "-p", "4", "-n", "0", "-r", "1", "--against", str(program)])
    got = capsys.readouterr().err
    assert e.value.code == 1 and says in got and got.count("\n") == 1
