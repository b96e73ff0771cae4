"""`pyggml pull`, `list`, `rm`: models of the Hugging Face Hub on this machine."""

from __future__ import annotations

import sys
from typing import Annotated

from pyggml.config import read_config
from pyggml.hub import cached, find_model, remove

from .command import Argument, Option
from .options import Json
from .outputs import print_json


def pull(
    models: Annotated[list[str], Argument("USER/REPO, USER/REPO:Q4_K_M, a URL, or an alias.", "MODEL")],
    as_json: Json = False,
) -> None:
    """Download models, and print where they are. What is there already is not downloaded again; what was broken off
    goes on. The other verbs download their model themselves (-m USER/REPO)."""
    for name in models:
        path = find_model(name)
        print_json({"model": name, "path": path}) if as_json else print(path, flush=True)


def list_models(
    everything: Annotated[bool, Option("-a", "--all", help="Repositories without models, too.")] = False,
    as_json: Json = False,
) -> None:
    """List the models in the cache of the Hub: name, size, GGUF files; and the aliases of the configuration."""
    rows: list[dict[str, object]] = []
    info = cached()
    for repo in sorted(() if info is None else info.repos, key=lambda r: r.repo_id):
        names = sorted({f.file_name for revision in repo.revisions for f in revision.files})
        files = [n for n in names if n.endswith(".gguf")]
        if repo.repo_type == "model" and (everything or files or any(n.endswith(".safetensors") for n in names)):
            rows.append({"model": repo.repo_id, "bytes": repo.size_on_disk, "files": files})
    aliases = dict(read_config().aliases)
    if as_json:
        print_json({"models": rows, "aliases": aliases})
        return
    for row in rows:
        print(f"{row['model']}  {_size(int(str(row['bytes'])))}")
        for name in row["files"] if isinstance(row["files"], list) else ():  # pyright: ignore[reportUnknownVariableType]
            print(f"    {name}")
    for name, target in aliases.items():
        print(f"{name} -> {target}")


def rm(
    models: Annotated[list[str], Argument("USER/REPO, or USER/REPO:Q4_K_M for some of its files.", "MODEL")],
    as_json: Json = False,
) -> None:
    """Remove models from the cache of the Hub."""
    for name in models:
        freed = remove(name)
        if as_json:
            print_json({"model": name, "bytes": freed})
        else:
            print(f"{name}: {_size(freed)} are free", file=sys.stderr)


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"
