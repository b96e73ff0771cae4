"""Write `llama_server.txt`: what llama-server has, by the README and the sources of a folder `tools/server`.

    python -m tests.serve.llama_server_names llama.cpp/tools/server

Flags of its README; endpoints of server.cpp; and the members of requests that server-schema.cpp, other sources and the
README name.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

NAMES = Path(__file__).with_name("llama_server.txt")
_READS = r'json_value\((?:data|body|params?|inp_body|llama_params|json_body|body_parsed), *"([a-z_0-9]+)"'
_ASKS = r'(?:data|body)\.(?:at|contains|find)\("([a-z_0-9]+)"\)'
_VERBS = {"get": "GET", "post": "POST", "del": "DELETE"}


def main(folder: Path) -> None:
    readme = (folder / "README.md").read_text()
    cells = [line.split("` |")[0] for line in readme.splitlines() if line.startswith("| `-")]
    flags = [f for cell in cells for f in re.findall(r"(?<![\w<\[])--?[A-Za-z][\w.-]*", cell)]
    found = re.findall(r'ctx_http\.(get|post|del) *\("([^"]+)"', (folder / "server.cpp").read_text())
    endpoints = [f"{_VERBS[verb]} {path.replace(':id_slot', '{id}')}" for verb, path in found]
    members = set(re.findall(r'\("([a-z_0-9]+)"', (folder / "server-schema.cpp").read_text()))
    members.update(re.findall(r"^`([a-z_0-9]+)`:", readme, re.MULTILINE))
    for name in ("common", "chat", "context", "task"):
        text = (folder / f"server-{name}.cpp").read_text()
        members.update(re.findall(_READS, text) + re.findall(_ASKS, text))
    parts = _wrapped(dict.fromkeys(flags)), "\n".join(dict.fromkeys(endpoints)), _wrapped(sorted(members))
    NAMES.write_text("\n\n".join(parts) + "\n")


def _wrapped(names: dict[str, None] | list[str]) -> str:
    return "\n".join(textwrap.wrap(" ".join(names), 118, break_on_hyphens=False, break_long_words=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
