"""A process that has `faults.c` preloaded, which the C compiler builds first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def faulty(folder: Path, most: int, timeout: float = 300, **options: object) -> subprocess.CompletedProcess[str]:
    """Run `faults.main(most, **options)`. Skips where there is no C compiler, and under sanitizers, whose allocators
    this one would replace."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    if "LD_PRELOAD" in os.environ:
        pytest.skip("another library is preloaded")
    library = folder / "faults.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "faults.c", "-ldl"], check=True)
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    found = f"import sys; sys.path.append({str(HERE.parents[1])!r})"  # last: the installed package comes first
    code = f"{found}; from tests.trust.faults import main; main({most}{given})"
    env = {**os.environ, "LD_PRELOAD": str(library), "FAULTS": str(library)}
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        env=env,
        check=False,
    )
