"""The scripts in tools/examples run, and show what they say they show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pyggml import tools

FOLDER = Path(tools.__file__).parent / "examples"


def run(name: str, *args: object) -> str:
    command = [sys.executable, FOLDER / f"{name}.py", *args]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_are_tested_and_short() -> None:
    scripts = sorted(FOLDER.glob("*.py"))
    assert [s.stem for s in scripts] == ["endless", "parallel", "tap"]
    assert all(len(s.read_text().splitlines()) <= 35 for s in scripts)


def test_parallel(tiny: Path) -> None:
    lines = run("parallel", tiny, "abc").splitlines()
    assert len(lines) == 4 == len(set(lines)) and all("abc" in line[:6] for line in lines)


def test_endless(tiny: Path) -> None:
    out = run("endless", tiny, "abc", 150)
    assert out.count("[63 cells in use: shift]") == 4  # at 63 tokens, and whenever 28 more came


def test_tap(tiny: Path) -> None:
    out = run("tap", tiny, "abc")
    assert "70 nodes" in out and "Kcur-0" in out
    shares = [float(line.split("%")[0]) for line in out.splitlines() if "%" in line]
    assert len(shares) == 7 and sum(shares) == pytest.approx(100, abs=0.5)
