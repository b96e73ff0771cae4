"""Models by name: repositories of the Hugging Face Hub, URLs, and aliases of the user's configuration.

Files of the Hub are downloaded with the package huggingface_hub (`pip install pyggml[hub]`), into its cache, which
other programs share. Its environment variables count: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Files of other
sites are kept in `pyggml` in XDG_CACHE_HOME (`~/.cache`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from .config import read_config
from .errors import ModelError
from .system.files import lock_file

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

_REPO = re.compile(r"(?:hf:(?://)?)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_QUANTS = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q8_0")  # which file of a repository is taken first
_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)")
_FOLDER = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]  # what a folder's loader may read
_BLOCK = 1 << 20


def find_model(name: str | os.PathLike[str]) -> str:
    """The local path of a model, which is downloaded when it is not there yet.

    `name` is the path of a file or folder; an alias of the configuration; `USER/REPO`, a repository of the Hub, with
    `:Q4_K_M` or another part of a file's name when the repository has several GGUF files; or a URL. A name that is none
    of these is returned as it is. Raises ModelError for a repository or a file that is not there, and when
    huggingface_hub is missing; OSError when a site cannot be reached.
    """
    path = os.fspath(name)
    if not isinstance(path, str) or os.path.exists(path):  # pyright: ignore[reportUnnecessaryIsInstance]
        return path
    aliases = read_config().aliases
    if path in aliases:
        path = os.path.expanduser(aliases[path])
        if os.path.exists(path):
            return path
    if path.startswith(("http://", "https://")):
        return _of_url(path)
    found = _REPO.fullmatch(path)
    if found is None or (path.endswith(".gguf") and not path.startswith("hf:")):
        return path
    return download(found[1], None if found[2] is None else f"*{found[2]}*")


def download(
    repo_id: str,
    filename: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_dir: str | os.PathLike[str] | None = None,
    revision: str | None = None,
) -> str:
    """The path of a file of a repository, which is downloaded unless the cache has it.

    `filename`: a name, or a pattern (`*Q8_0.gguf`), in which letters are compared without case; of a model in several
    parts it is the first, and all parts are downloaded. None: the GGUF file that is Q4_K_M, or the next best; for a
    repository without GGUF files the folder with its weights. Files are checked against the Hub's SHA-256. Without a
    network, and with HF_HUB_OFFLINE, the cache alone is asked. Raises ModelError when no file matches, when several do,
    and for a file that came damaged.
    """
    _need_hub(f"{repo_id}: there is no such file or folder. If it is a repository of the Hugging Face Hub")
    files, digests = _listed(repo_id, revision, cache_dir)
    name = _chosen(repo_id, files, filename)
    options: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir, "local_dir": local_dir}
    if name is None:
        return _asked("snapshot_download", repo_id, allow_patterns=_FOLDER, **options)
    paths = [_one(repo_id, part, digests.get(part), options) for part in _parts(name, files)]
    return paths[0]


def cached() -> HFCacheInfo | None:
    """What the cache of the Hub has; None when there is no cache."""
    _need_hub("the cache is that of the package huggingface_hub, which is not installed")
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def remove(name: str) -> int:
    """Remove a repository from the cache, or with `USER/REPO:PART` its files with such a name. Returns how many bytes
    are free now. Raises ModelError when the cache does not have it."""
    found = _REPO.fullmatch(read_config().aliases.get(name, name))
    info = cached()
    repos = () if info is None else info.repos
    repo = next((r for r in repos if found is not None and r.repo_id == found[1]), None)
    if info is None or repo is None or found is None:
        known = ", ".join(sorted(r.repo_id for r in repos))
        raise ModelError(f"the cache does not have {name!r}; it has: {known or 'nothing'}")
    if found[2] is None:
        strategy = info.delete_revisions(*(r.commit_hash for r in repo.revisions))
        strategy.execute()
        return strategy.expected_freed_size
    files = [f for r in repo.revisions for f in r.files if _matches(f.file_name, f"*{found[2]}*")]
    if not files:
        raise ModelError(f"the cache has no file of {found[1]} that matches {found[2]!r}")
    others = {
        f.blob_path for r in repo.revisions for f in r.files if f not in files
    }  # files of equal content share one
    sizes = {f.blob_path: f.size_on_disk for f in files if f.blob_path not in others}
    for f in files:
        f.file_path.unlink(missing_ok=True)
    for blob in sizes:
        blob.unlink(missing_ok=True)
    return sum(sizes.values())


# -- the Hub ----------------------------------------------------------------------------------------------------------


def _need_hub(why: str) -> None:
    try:
        import huggingface_hub  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise ModelError(f"{why}: pip install pyggml[hub]") from None


@contextmanager
def _in_words(repo_id: str) -> Generator[None]:
    """Turn the errors of huggingface_hub into ModelErrors that say what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise ModelError(f"{repo_id}: is gated: ask for access on its page, then give a token (HF_TOKEN)") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{repo_id}: there is no such file or folder, and no such repository on the Hub (a private one needs a "
            "token: HF_TOKEN)"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise ModelError(f"{repo_id}: the cache does not have it, and the Hub cannot be reached") from None
    except (errors.HfHubHTTPError, errors.HFValidationError) as e:
        raise ModelError(f"{repo_id}: {e}") from None


def _asked(function: str, repo_id: str, *args: Any, **options: Any) -> Any:
    """Call a function of huggingface_hub."""
    import huggingface_hub

    with _in_words(repo_id):
        return getattr(huggingface_hub, function)(repo_id, *args, endpoint=os.environ.get("HF_ENDPOINT"), **options)


def _listed(
    repo_id: str, revision: str | None, cache_dir: str | os.PathLike[str] | None
) -> tuple[list[str], dict[str, str]]:
    """The files of a repository, and the SHA-256 of the large ones. Without a network: those that the cache has."""
    from huggingface_hub import HfApi, constants, errors

    why = "HF_HUB_OFFLINE is set"

    try:
        if constants.HF_HUB_OFFLINE:
            raise errors.OfflineModeIsEnabled
        found = HfApi(endpoint=os.environ.get("HF_ENDPOINT")).model_info(
            repo_id, revision=revision, files_metadata=True
        )
        siblings = found.siblings or []
        return [s.rfilename for s in siblings], {s.rfilename: s.lfs.sha256 for s in siblings if s.lfs is not None}
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.HFValidationError):
        with _in_words(repo_id):
            raise
    except errors.OfflineModeIsEnabled:
        pass
    except Exception as e:  # errors of requests, httpx or httpx2, as huggingface_hub likes; the cache may have the file
        why = f"the Hub cannot be reached: {e}"
    try:
        folder = Path(
            _asked("snapshot_download", repo_id, revision=revision, cache_dir=cache_dir, local_files_only=True)
        )
    except ModelError:
        raise ModelError(f"{repo_id}: there is no such file or folder, the cache does not have it, and {why}") from None
    return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()], {}


def _one(repo_id: str, name: str, digest: str | None, options: dict[str, Any]) -> str:
    """Download one file. What came new is compared with its digest."""
    from huggingface_hub import try_to_load_from_cache

    had = options["local_dir"] is None and isinstance(
        try_to_load_from_cache(repo_id, name, cache_dir=options["cache_dir"], revision=options["revision"]), str
    )
    path = str(_asked("hf_hub_download", repo_id, name, **options))
    if digest is not None and not had:
        with open(path, "rb") as f:
            h = sha256()
            while block := f.read(_BLOCK):
                h.update(block)
        if h.hexdigest() != digest:
            os.unlink(os.path.realpath(path))
            raise ModelError(f"{repo_id}/{name}: came damaged (its SHA-256 is not the Hub's): try again")
    return path


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name.lower(), pattern.lower()) or fnmatch(PurePosixPath(name).name.lower(), pattern.lower())


def _first_parts(names: Sequence[str]) -> list[str]:
    """The names without the further parts of models in several files."""
    return [n for n in names if (part := _PART.search(n)) is None or int(part[1]) == 1]


def _chosen(repo_id: str, files: Sequence[str], pattern: str | None) -> str | None:
    """The file that is meant; None: the whole folder."""
    models = _first_parts([f for f in files if f.endswith(".gguf") and "mmproj" not in f.lower()])
    if pattern is not None:
        found = _first_parts([f for f in files if _matches(f, pattern)])
        exact = [f for f in found if f.endswith(".gguf") and "mmproj" not in f.lower()] or found
        if len(exact) == 1:
            return exact[0]
        close = [f for f in exact if _matches(f, f"*[-._]{pattern.strip('*')}*")]  # Q4_0, not IQ4_0
        if len(close) == 1:
            return close[0]
        what = "no file matches" if not exact else "several files match"
        raise ModelError(f"{repo_id}: {what} {pattern!r}: {', '.join(sorted(exact or models or files)):.500}")
    if not models:
        if "config.json" in files:
            return None
        raise ModelError(f"{repo_id}: has no GGUF file and no config.json: {', '.join(sorted(files)):.300}")
    best = (f for quant in _QUANTS for f in models if quant.lower() in f.lower())
    return next(best, models[0])


def _parts(name: str, files: Sequence[str]) -> list[str]:
    """All parts of a model, the given one first."""
    part = _PART.search(name)
    if part is None:
        return [name]
    begin = name[: part.start()]
    return [name, *sorted(f for f in files if f != name and f.startswith(begin) and _PART.search(f))]


# -- other sites ------------------------------------------------------------------------------------------------------


def _of_url(url: str) -> str:
    """The file at a URL, which is downloaded unless it is there. One of the Hub comes through the Hub."""
    try:
        parts = urlsplit(url)
    except ValueError as e:
        raise ModelError(f"{url}: is no URL: {e}") from None
    ours = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if parts.netloc in (ours.netloc, "hf.co"):
        steps = unquote(parts.path).strip("/").split("/")
        if len(steps) > 4 and steps[2] in ("resolve", "blob"):
            return download("/".join(steps[:2]), "/".join(steps[4:]), revision=steps[3])
        if len(steps) == 2:
            return download("/".join(steps))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyggml"
    name = PurePosixPath(unquote(parts.path)).name
    name = "model.gguf" if name in ("", "..") else name.replace("\0", "")
    path = folder / sha256(url.encode()).hexdigest()[:16] / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _fetch(url, path)
    return str(path)


def _fetch(url: str, path: Path) -> None:
    """Download a file. What was broken off goes on, unless the file has changed since. Raises ModelError when the site
    refuses, when less came than it said, or another part than was asked for, when it does not speak HTTP, and while
    another process downloads the file."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen  # which load OpenSSL

    part, mark = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.etag")
    try:
        with open(part, "ab") as f:
            lock_file(f.fileno())
            if path.exists():  # another process has had it until now
                return
            begun = os.fstat(f.fileno()).st_size if mark.exists() else 0
            headers = {"Range": f"bytes={begun}-", "If-Range": mark.read_text()} if begun else {}
            with urlopen(Request(url, headers=headers), timeout=60) as answer:
                goes_on = answer.status == 206
                sent = _RANGE.fullmatch(answer.headers.get("Content-Range") or "") if goes_on else None
                if goes_on and (sent is None or int(sent[1]) != begun):
                    mark.unlink(missing_ok=True)
                    raise ModelError(f"{url}: another part came than was asked for: try again, it begins anew")
                etag = cast("str | None", answer.headers.get("ETag"))
                said = answer.headers.get("Content-Length")
                wanted = None if said is None else int(said) + (begun if goes_on else 0)
                if sent is not None and sent[2] != "*":
                    wanted = int(sent[2])
                mark.write_text(etag) if etag is not None else mark.unlink(missing_ok=True)
                f.truncate(begun if goes_on else 0)
                while block := answer.read(_BLOCK):
                    f.write(block)
            f.flush()
            size = os.fstat(f.fileno()).st_size
    except BlockingIOError:
        raise ModelError(f"{url}: another process is downloading it just now") from None
    except HTTPError as e:
        raise ModelError(f"{url}: {e.code} {e.reason}") from None
    except URLError as e:
        raise ModelError(f"{url}: cannot be reached: {e.reason}") from None
    except (HTTPException, ValueError) as e:  # ValueError: a place to go on at that is no URL, or a length that is none
        raise ModelError(f"{url}: is no file that can be had: {type(e).__name__}: {e}") from None
    if wanted is not None and size != wanted:
        raise ModelError(f"{url}: {size} of {wanted} bytes came: try again, it goes on from there")
    part.replace(path)
    mark.unlink(missing_ok=True)
