"""What a start imports: each module takes a part of a millisecond, so they are counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyggml

RUN = """
import sys, numpy
before = set(sys.modules)
{}
print(*sorted(set(sys.modules) - before))
"""


def imported(code: str) -> set[str]:
    """The modules that `code` imports, beside those of NumPy."""
    done = subprocess.run([sys.executable, "-c", RUN.format(code)], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_import() -> None:
    """`import pyggml` records graphs; what runs them comes with the first run."""
    found = imported("import pyggml")
    late = ("backends", "sched", "run_graph", "llm", "models", "gguf_io", "learn", "hf", "serve")
    assert not {name for name in found if name.startswith(tuple(f"pyggml.{room}" for room in late))}
    assert len(found) <= 85, found


def test_first_token() -> None:
    """`pyggml generate` imports no room that it does not use."""
    command = "from pyggml.tools.cli import app; app.main(['generate', '-n', '1', '-p', 'a'], standalone_mode=False)"
    found = imported(command)
    late = ("hf", "learn", "media", "serve", "cluster", "llama_cpp", "llm.speech", "llm.ggml_whisper", "llm.grammars")
    assert not {name for name in found if name.startswith(tuple(f"pyggml.{room}" for room in late))}
    assert not {"rich", "jinja2", "gguf", "asyncio"} & found
    assert len(found) <= 325, found


def test_without_the_library() -> None:
    """Of a checkout; or of what PyInstaller froze, of a zip, of a wheel of another system."""
    code = "import sys; sys.modules['pyggml.native._pggml'] = None; import pyggml"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    is_checkout = (Path(pyggml.__file__).resolve().parents[1] / "csrc").is_dir()
    assert ("is a checkout of pyggml" if is_checkout else "lacks the C library of this system") in done.stderr
