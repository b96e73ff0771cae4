"""The architecture, enforced: who may import whom."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Left never imports right; entries of one group do not import each other (except inside one package).
LAYERS: list[tuple[str, ...]] = [
    ("errors", "operators", "limits", "logger", "system"),
    ("json_text", "small_file", "foreign", "signature", "scope", "breaker"),
    ("config",),
    ("hub",),
    ("var",),
    ("dtypes", "lock"),
    ("buffers.buffer", "types"),
    ("native", "form"),
    ("codec",),
    ("tensor",),
    ("buffers.overlap",),
    ("hazards",),
    ("opdef",),
    ("ops", "inspect.watch"),
    ("graph",),
    ("learn.gradients",),
    ("buffers.alloc", "turn"),
    ("backends.protocol", "backends.repeats"),
    ("backends.ref", "backends.cpu", "backends.quantize"),
    ("sched", "gguf_io", "inspect.taps", "inspect.layers"),
    ("run_graph", "missing", "bars"),
    ("media",),
    ("testing",),
    ("models",),
    ("llm.vocab",),
    ("hf",),
    ("stream",),
    ("llm.quantize", "llm.closeable", "llm.elsewhere", "llm.adapters", "llm.grammars"),
    ("llm.samplers", "llm.batch", "llm.interrupt", "llm.figures.perf", "llm.loaded", "llm.tower"),
    ("llm.ubatch", "llm.options", "llm.figures", "llm.decoder", "llm.media_prompt"),
    ("llm.outputs",),
    ("llm.graphs",),
    ("llm.state",),
    ("llm.context",),
    ("llm.sense",),
    ("llm.embed", "llm.sound", "llm.speech"),
    ("llm.picture", "llm.ggml_whisper"),
    ("llm.text_tower",),
    ("llm.generate", "llm.evaluate", "llm.transcribe"),
    ("llm.openai",),
    ("learn.checkpoint", "learn.optimisers", "learn.texts", "learn.texts_file", "learn.dataset", "learn.state_file"),
    (
        "learn.lora",
        "learn.loop",
        "learn.muon",
        "learn.adafactor",
        "learn.clipping",
        "learn.recompute",
        "learn.dropout",
        "learn.head",
    ),
    ("learn.step_graph", "learn.saved"),
    ("learn.fit", "learn.fit_texts", "learn.new_model"),
    ("learn.trainer",),
    ("llm.model",),
    ("llm.run_batch",),
    ("llama_cpp", "cluster", "serve"),
    ("inspect",),
    ("tools",),
]
FREE = {"", "__main__", "backends", "buffers", "learn", "llm"}  # the package's own front doors


def sources() -> list[tuple[str, Path]]:
    """(module name below pyggml, file) of every Python file of the package."""
    found: list[tuple[str, Path]] = []
    for base, prefix in ((ROOT / "pyggml", ""), (ROOT / "models", "models"), (ROOT / "tools", "tools")):
        for path in sorted(base.rglob("*.py")):
            parts = [p for p in (prefix, *path.relative_to(base).with_suffix("").parts) if p and p != "__init__"]
            found.append((".".join(parts), path))
    return found


def layer(module: str) -> tuple[int, str] | None:
    for i, group in enumerate(LAYERS):
        for name in group:
            if module == name or module.startswith(name + "."):
                return i, name
    return None


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(module: str, path: Path) -> set[str]:
    """Modules below pyggml that this file imports, anywhere in it."""
    names: set[str] = set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    if module == "":
        package = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names.update(a.name.removeprefix("pyggml.") for a in node.names if a.name.startswith("pyggml."))
            assert not any(a.name.split(".")[0] in ("models", "tools") for a in node.names), f"{path}: bare import"
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                full = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            elif (node.module or "").split(".")[0] == "pyggml":
                full = (node.module or "").removeprefix("pyggml").strip(".")
            else:
                assert (node.module or "").split(".")[0] not in ("models", "tools"), f"{path}: bare import"
                continue
            names.update(f"{full}.{a.name}".strip(".") for a in node.names)
    return names


@pytest.mark.parametrize(("module", "path"), sources(), ids=lambda x: x if isinstance(x, str) else "")
def test_left_never_imports_right(module: str, path: Path) -> None:
    if module in FREE:
        return
    here = layer(module)
    assert here is not None, f"{path} belongs to no layer"
    for name in imports(module, path):
        there = layer(name)
        if there is None:
            continue
        assert there[0] <= here[0], f"{module} imports {name}, which is further right"
        if there[0] == here[0] and there[1] != here[1]:
            shared_group = {here[1], there[1]} <= {"backends.cpu", "backends.quantize"}
            assert shared_group, f"{module} imports its sibling {name}"


def test_one_door_to_the_extension() -> None:
    """`native` alone imports it, and what it exports of it is for the cpu backend."""
    for module, path in sources():
        text = path.read_text()
        if "_pggml" in text:
            assert module.startswith("native"), path
        if {"native.ffi", "native.lib"} & imports(module, path):
            assert module.startswith(("native", "backends.cpu", "backends.quantize")), path


def test_who_names_the_cpu_backend() -> None:
    """Whoever runs graphs or shows their runs. Rooms that read and keep weights say what they are by `Tensor.form`."""
    for module, path in sources():
        if any(name.startswith("backends.cpu") for name in imports(module, path)):
            allowed = ("backends", "testing", "llm.model", "llm.context", "llm.tower", "inspect", "tools")
            assert module == "" or module.startswith(allowed), path


def test_a_c_file_is_known_by_its_name() -> None:
    """A header and its source are one thing; else no two files share a stem."""
    seen: dict[str, str] = {}
    for path in sorted((ROOT / "csrc").rglob("*.[ch]")):
        name = str(path.relative_to(ROOT).with_suffix(""))
        assert seen.setdefault(path.stem, name) == name, f"{name} and {seen[path.stem]}"


def test_public_functions_are_documented() -> None:
    """Every public function and class below pyggml, models and tools says what it does. Files of `testing.strategies`
    export STRATEGIES alone."""
    missing: list[str] = []
    for module, path in sources():
        if module.startswith("testing.strategies."):
            continue
        for node in parsed(path).body:
            named = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if named and ast.get_docstring(node) is None:
                missing.append(f"{module}.{node.name}")
    assert not missing


def test_the_glossary_names_files_that_exist() -> None:
    """The words of CONTRIBUTING.md are where it says that they are."""
    rows = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| ")][1:]
    files = [name for row in rows for name in re.findall(r"`([\w/]+\.(?:py|h))`", row)]
    assert len(rows) > 20 and not [name for name in files if not (ROOT / name).is_file()]
