"""What README and docs/ show: shell commands, one per line, as `.ci/run` executes them, and Python snippets."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


if __name__ == "__main__":
    print("".join(blocks(README, "sh")), end="")
