"""The shell commands of the README, one per line, as `.ci/run` executes them."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), flags=re.M | re.S)


if __name__ == "__main__":
    print("".join(blocks("sh")), end="")
