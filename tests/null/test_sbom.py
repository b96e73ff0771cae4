"""The list of what a wheel is made of (PEP 770) says what the package says."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.metadata import requires, version

from pyggml.llm.model import default_model_path

from ..readme import ROOT


def test_the_bill_of_materials_is_that_of_the_package() -> None:
    bom = json.loads((ROOT / "csrc" / "pyggml.cdx.json").read_text())
    about = bom["metadata"]["component"]
    assert (bom["bomFormat"], about["name"], about["version"]) == ("CycloneDX", "pyggml", version("pyggml"))
    needed = {re.match(r"[\w-]+", r).group() for r in requires("pyggml") or () if "extra ==" not in r}  # pyright: ignore
    parts = {part["name"]: part for part in bom["components"]}
    assert parts.keys() == {*needed, "tales-Q8_0.gguf"}
    with open(default_model_path(), "rb") as f:
        assert parts["tales-Q8_0.gguf"]["hashes"][0]["content"] == hashlib.sha256(f.read()).hexdigest()
    refs = [about["bom-ref"], *(part["bom-ref"] for part in parts.values())]
    assert len({*refs}) == len(refs)
    assert bom["dependencies"] == [{"ref": refs[0], "dependsOn": refs[1:]}]
