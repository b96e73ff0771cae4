"""docs/from_ggml.md has every function of ggml's public headers once, and the names of pyggml beside them exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import pyggml as gg

HERE = Path(__file__).resolve().parent
FUNCTIONS = [name for name in (HERE / "ggml_functions.txt").read_text().splitlines() if not name.startswith("#")]
PAGE = (HERE.parents[1] / "docs" / "from_ggml.md").read_text()
ROWS = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and "`" in line]
SAME = PAGE[PAGE.index("## Ops of the same name") : PAGE.index("## Ops that are called otherwise")]
HAVE = sorted({name for row in ROWS for name in re.findall(r"`((?:gg|pyggml)\.[\w.]+)`", row[-1])})


def named(text: str) -> list[str]:
    return re.findall(r"`((?:ggml|gguf)_\w+)`", text)


def test_every_function_is_there_once() -> None:
    assert len(FUNCTIONS) > 500
    assert sorted(named(PAGE)) == sorted(FUNCTIONS)


def test_ops_of_the_same_name() -> None:
    assert not [name for name in named(SAME) if not hasattr(gg, name.removeprefix("ggml_"))]


def found(name: str) -> Any:
    """What a name of the page stands for; attributes that instances get in `__init__` are those of an instance."""
    made = {gg.Context: gg.Context(), gg.Graph: gg.Graph(), gg.Scheduler: gg.Scheduler(["ref"]), gg.DType: gg.F32}
    made[gg.TensorFile] = gg.TensorFile({})
    value: Any = gg
    at = "pyggml"
    for part in name.split(".")[1:]:
        at += f".{part}"
        value = made.get(value, value) if isinstance(value, type) else value
        value = getattr(value, part) if hasattr(value, part) else import_module(at)
    return value


@pytest.mark.parametrize("name", HAVE)
def test_names_exist(name: str) -> None:
    assert found(name) is not None


def test_what_is_absent_is_absent() -> None:
    for left, right in (row for row in ROWS if row[-1].lstrip().startswith("absent")):
        assert not [name for name in named(left) if name.removeprefix("ggml_") in gg.__all__], right
