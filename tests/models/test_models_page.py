"""The table of docs/models.md: what each architecture was checked against. It is made here, from the registry, the
golden data, and what other tests compare.

    python -m tests.models.test_models_page    writes it into the page
"""

from __future__ import annotations

import json
import re
from importlib import import_module

import pytest
from pyggml.models import PAGES

from pyggml.hf.families import PAGES as FAMILY_PAGES
from pyggml.hf.family import Family

from ..conftest import shared_dir
from ..readme import ROOT
from .archs import SPECS

PAGE = ROOT / "docs" / "models.md"
FOLDERS = shared_dir() / "golden" / "hf"
TABLE = re.compile(r"(?<=<!-- architectures -->\n).*?(?=<!-- end -->)", re.S)
OTHERWISE = {  # architectures that neither golden data has, and what their tests compare them with
    "whisper": "transformers (features, logits, texts)",
    "t5encoder": "transformers (hidden states)",
    **dict.fromkeys(("rwkv7", "arwkv7", "rwkv6qwen2"), "a forward pass in float64, from the papers"),
    **dict.fromkeys(
        ("jina-bert-v2", "jina-bert-v3", "nomic-bert-moe", "neo-bert"), "a forward pass in float64, from their sources"
    ),
}


def families() -> list[Family]:
    return [f for page in FAMILY_PAGES for f in import_module(f"pyggml.hf.families.{page}").FAMILIES]


def table() -> str:
    """The lines of the table."""
    known = families()
    tried = {json.loads(path.read_text())["model_type"] for path in FOLDERS.glob("*/config.json")}
    by_llama = {spec["arch"] for spec in SPECS.values()}
    by_transformers = {f.arch for f in known if tried & set(f.types)} - OTHERWISE.keys()
    lines = ["| `general.architecture` | `model_type` of folders | checked against |", "|---|---|---|"]
    for arch in sorted(PAGES):
        types = sorted({name for f in known if f.arch == arch for name in f.types})
        against = [
            name for name, archs in (("llama.cpp", by_llama), ("transformers", by_transformers)) if arch in archs
        ]
        assert bool(against) != (arch in OTHERWISE), f"{arch}: nothing says what it was checked against"
        said = ", ".join(against) or OTHERWISE[arch]
        lines.append(f"| `{arch}` | {', '.join(f'`{name}`' for name in types)} | {said} |")
    return "\n".join(lines) + "\n"


@pytest.mark.skipif(not SPECS or not FOLDERS.is_dir(), reason="no golden data")
def test_the_page_has_the_table() -> None:
    assert TABLE.findall(PAGE.read_text()) == [table()], "python -m tests.models.test_models_page writes it"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
