"""The driver of all harnesses: see the package."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import json
import os
import pkgutil
import resource
import shutil
import sys
import time
import traceback
import types
import zipfile
import zlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from .harness import Harness

CORPUS = Path(__file__).with_name("corpus")  # a .zip for each harness: what explore has found, made small
MODULES = ("files", "texts", "numbers", "media", "drawings", "server")
KEPT, SMALL = 24, 1200  # inputs of a harness that `keep` takes, and their size
LONG = 32  # one change in so many makes a long input of a short one (not in `explore`: all later inputs would be long)
MEMORY = 1 << 29  # bytes that one input may add to what the process takes


def corpus_of(name: str) -> list[bytes]:
    """The inputs in the repository."""
    path = CORPUS / f"{name}.zip"
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as z:
        return [z.read(entry) for entry in z.namelist()]


def found_by(work: Path, name: str) -> list[Path]:
    """The inputs that `explore` has found, without its seeds."""
    return sorted(path for path in (work / "corpus" / name).glob("*") if not path.name.startswith("seed-"))


class Watch:
    """Runs inputs of a harness, and writes down in a folder what goes wrong: once for each place in the code."""

    def __init__(self, harness: Harness, findings: Path) -> None:
        self.harness, self.findings = harness, findings / harness.name
        self.n = self.n_taken = 0  # inputs; those that were no error
        self.places: set[str] = set()
        self.begun, self.stats = time.monotonic(), findings / f"{harness.name}.json"
        self._next = 0.0

    def __call__(self, data: bytes) -> None:
        """One input. MemoryError and RecursionError are faults, too, unless the harness allows them."""
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            self.harness.run(data)
            self.n_taken += 1
        except self.harness.allowed:
            pass
        except Exception as e:
            frames = [f"{Path(f.filename).name}:{f.name}:{f.lineno}" for f in traceback.extract_tb(e.__traceback__)]
            self.note(f"{type(e).__name__} {' '.join(frames[-2:])}", data, traceback.format_exc())
        seconds = time.process_time() - begun
        if seconds > self.harness.seconds and self.n:  # what is built once is built in the first
            self.note("slow", data, f"{seconds:.1f} s")
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        if more > MEMORY:
            self.note("memory", data, f"{more >> 20} MB")
        self.n += 1
        if time.monotonic() > self._next:
            self.save()

    def note(self, place: str, data: bytes, why: str) -> None:
        """Keep an input that something is wrong with."""
        if place in self.places:
            return
        self.places.add(place)
        self.findings.mkdir(parents=True, exist_ok=True)
        name = f"{zlib.crc32(place.encode()):08x}"
        (self.findings / name).write_bytes(data)
        (self.findings / f"{name}.txt").write_text(f"{place}\n{why}\n", errors="replace")
        print(f"FOUND {self.harness.name} {place}\n{why}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """How many inputs were run, and for how long."""
        self._next = time.monotonic() + 5
        self.findings.mkdir(parents=True, exist_ok=True)
        self.stats.parent.mkdir(parents=True, exist_ok=True)
        self.stats.write_text(json.dumps({"runs": self.n, "seconds": round(time.monotonic() - self.begun, 1)}))


def limited(h: Harness) -> AbstractContextManager[object]:
    """The limits of a harness are those of pyggml until the context ends."""
    return patch.multiple("pyggml.limits", **h.limits) if h.limits else nullcontext()


def load(names: list[str]) -> list[Harness]:
    """The harnesses of these names; all when there are none."""
    from .harness import HARNESSES, folder

    atexit.register(shutil.rmtree, folder(), True)
    for module in MODULES:
        importlib.import_module(f"{__package__}.{module}")
    unknown = set(names) - set(HARNESSES)
    if unknown:
        sys.exit(f"no harness {', '.join(unknown)}; there are: {', '.join(HARNESSES)}")
    return [HARNESSES[name] for name in names or HARNESSES]


def replay(args: argparse.Namespace) -> None:
    """The corpus and the seeds, and `--changes` changes of them for each harness (or as many as `--seconds` allow)."""
    failed = 0
    for h in load(args.names):
        failed += _replayed(h, args)
    if failed:
        sys.exit(f"{failed} faults: see {args.work}")


def _replayed(h: Harness, args: argparse.Namespace) -> int:
    """The number of faults of a harness."""
    import numpy as np

    from .changes import change_bytes, repeat_part

    with limited(h):
        watch, rng = Watch(h, args.work), np.random.default_rng(args.seed)
        sound = [*h.seeds(), *corpus_of(h.name), *(path.read_bytes() for path in found_by(args.work, h.name))]
        for data in sound:
            watch(data)
        if not watch.n_taken:
            watch.note("every seed is refused: nothing is tested", b"", "")
        begun = time.monotonic()
        for _ in range(args.changes):
            if time.monotonic() - begun > args.seconds:
                break
            data = sound[int(rng.integers(len(sound)))]
            if not rng.integers(LONG):
                watch(repeat_part(rng, data))
            else:
                watch(h.change(rng, data) if h.change and rng.integers(3) else change_bytes(rng, data, h.words))
        inputs = f"{watch.n:7} inputs, {watch.n_taken} taken"
        print(f"{h.name:14} {inputs}, {time.monotonic() - begun:.1f} s, {len(watch.places)} faults", flush=True)
    return len(watch.places)


def explore(args: argparse.Namespace) -> None:
    """Look for inputs of one harness by coverage, until `--seconds` are over."""
    import atheris

    (name,) = args.names
    (h,) = load([name])
    for module in h.covers:  # some are imported when they are first needed
        _import_all(module)
    for f in _functions_of((*h.covers, "jinja2")):  # counters in all of pyggml take 15 seconds, and slow all of it down
        atheris.instrument_func(f)
    import numpy as np

    from .changes import change_bytes

    watch = Watch(h, args.work)
    corpus = args.work / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for data in (*h.seeds(), *corpus_of(name)):
        (corpus / f"seed-{zlib.crc32(data):08x}").write_bytes(data)
    words = args.work / f"{name}.dict"
    words.write_text("".join('"' + "".join(f"\\x{b:02x}" for b in word) + '"\n' for word in h.words))

    def change(data: bytes, most: int, seed: int) -> bytes:
        rng = np.random.default_rng(seed)
        if h.change and rng.integers(3):
            return h.change(rng, data)[:most]
        return atheris.Mutate(data, most) if rng.integers(4) else change_bytes(rng, data, h.words)[:most]

    options = [f"-max_total_time={args.seconds}", "-rss_limit_mb=4096", "-timeout=300", "-print_final_stats=1"]
    options += [f"-artifact_prefix={args.work}/{name}-", f"-max_len={args.max_len}", "-detect_leaks=0"]
    options += ["-report_slow_units=300"]  # by the clock of a busy machine; Watch asks for CPU time
    options += [f"-dict={words}"] if h.words else []
    atheris.Setup([sys.argv[0], *(args.rest or [*options, str(corpus)])], watch, custom_mutator=change)
    with limited(h):
        atheris.Fuzz()


def keep(args: argparse.Namespace) -> None:
    """Put some of what `explore` has found into the repository: small inputs, from the first to the last found."""
    CORPUS.mkdir(exist_ok=True)
    for h in load(args.names):
        small = [data for path in found_by(args.work, h.name) if len(data := path.read_bytes()) <= SMALL]
        chosen = {*corpus_of(h.name), *small[:: -(-len(small) // KEPT) or 1]}
        if not chosen:
            continue
        with zipfile.ZipFile(CORPUS / f"{h.name}.zip", "w", zipfile.ZIP_DEFLATED) as z:
            for data in sorted(chosen):
                z.writestr(zipfile.ZipInfo(f"{zlib.crc32(data):08x}"), data, zipfile.ZIP_DEFLATED)


def _import_all(name: str) -> None:
    module = importlib.import_module(name)
    for inside in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
        _import_all(inside.name)


def _functions_of(modules: tuple[str, ...]) -> list[types.FunctionType]:
    """All functions of these modules and packages."""
    inside = tuple(f"{name}." for name in modules)
    return [f for f in gc.get_objects() if isinstance(f, types.FunctionType) and f"{f.__module__}.".startswith(inside)]


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", choices=("replay", "explore", "keep"))
    parser.add_argument("names", nargs="*", help="harnesses (replay: all when there are none)")
    parser.add_argument("--seconds", type=float, default=60, help="for each harness")
    parser.add_argument("--changes", type=int, default=500, help="of replay, for each harness")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-len", type=int, default=1 << 16)
    parser.add_argument("--work", type=Path, default=Path("fuzz-work"), help="folder for findings and new inputs")
    parser.add_argument(
        "--rest", nargs=argparse.REMAINDER, default=[], help="of explore: options of libFuzzer in the place of ours"
    )
    args = parser.parse_args()
    args.seconds = int(args.seconds) if args.what == "explore" else args.seconds
    {"replay": replay, "explore": explore, "keep": keep}[args.what](args)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    main()
