"""Operations of which one call of the system fails. What must hold afterwards is checked here, for the n-th call of
each kind. `test_faults.py` tries some n of each, `tests/deep/deep_faults.py` all.

The process has `faults.c` preloaded:

    LD_PRELOAD=faults.so FAULTS=faults.so python -c "...; from tests.trust.faults import main; main(...)"
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import json
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pyggml as gg
from pyggml.hf.export import export_folder
from pyggml.llm.generate.request_file import RequestFile
from pyggml.llm.quantize.imatrix import ImatrixSums, save_dat, save_sums
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized
from tests.tiny_model import write_gguf

KINDS = ("alloc", "map", "open", "read", "write", "space", "sync", "name", "thread")  # in the order of faults.c
SHORT = -1
NUMPY = "/_multiarray_umath."  # it raises SystemError, or crashes, when a small allocation of its own fails ...
SPARED = 4096  # ... so those of fewer bytes do not
ERRORS = {
    "alloc": (errno.ENOMEM,),
    "map": (errno.ENOMEM,),
    "open": (errno.EMFILE,),
    "read": (errno.EIO, SHORT),
    "write": (errno.ENOSPC, errno.EIO, SHORT),
    "space": (errno.ENOSPC,),
    "sync": (errno.EIO,),
    "name": (errno.EACCES,),
    "thread": (errno.EAGAIN,),
}
NAMED = (MemoryError, OSError, gg.GGMLError)
INTERPRETERS = ("can't allocate", "digital envelope routines")  # what Python says in the place of MemoryError
SAID = ("there is not enough memory", "RuntimeError: can't allocate")  # of a request in the results of a batch
IDS = [1, *range(70, 80)]
PROMPTS = ("Once upon a time", "a", "the quick brown fox")


class Operation(NamedTuple):
    """`run` does the work and gives what must be the same each time; `state` is that of the object it works on, which a
    failure may not change. What it writes lies in the folder `out`, which `prepare` sets up."""

    run: Callable[[], bytes]
    state: Callable[[], object] = lambda: None
    prepare: Callable[[], object] = lambda: None


def operations(folder: Path, out: Path) -> dict[str, Operation]:
    """All that is tried. Files that are read lie in `folder`."""
    path = write_gguf(folder / "tiny.gguf")
    big = write_gguf(folder / "big.gguf", kv={"llama.embedding_length": 256, "llama.feed_forward_length": 256})
    export_folder(path, folder / "checkpoint")
    model = gg.load_model(path)
    ctx = model.new_context(n_ctx=64, n_threads=2)
    ctx.decode(IDS)
    state = folder / "a.state"
    ctx.save_state(state)
    (folder / "requests").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    sums = ImatrixSums(chunk_size=512)
    sums.add("blk.0.attn_q.weight", np.ones((1, 32)), np.ones(1))
    try:
        gg.load_model(path, ram=1)
    except gg.ModelError as e:
        ram = int(str(e).split("the least for this model is ")[1].split()[0])
    streamed = gg.load_model(path, ram=ram)
    far = streamed.new_context(n_ctx=32, n_threads=1)
    lora = gg.LoRA(r=2, alpha=4, targets=("attn_q",), seed=1)

    def old() -> None:
        (out / "x").write_bytes(b"old")

    def load(**options: Any) -> Callable[[], bytes]:
        def run() -> bytes:
            with gg.load_model(path, **options) as m, m.new_context(n_ctx=32, n_threads=1) as c:
                c.decode(IDS)
                return c.logits.tobytes()

        return run

    def decode() -> bytes:
        ctx.memory.seq_rm(0, len(IDS), -1)
        ctx.decode([7, 8])
        return ctx.logits.tobytes()

    def cells() -> object:
        return [(c.pos, sorted(c.seq_id)) for c in ctx.memory.cells if c.pos >= 0 and c.pos < len(IDS)]

    def decode_streamed() -> bytes:
        far.memory.clear()
        far.decode(IDS)
        return far.logits.tobytes()

    def quantize(source: Path, name: str | None, **options: Any) -> Callable[[], bytes]:
        def run() -> bytes:
            write_quantized(plan_quantization(source, name, **options), out / "x", 2)
            return b""

        return run

    def export() -> bytes:
        export_folder(path, out / "folder")
        return b""

    def save_state() -> bytes:
        ctx.save_state(out / "x")
        return b""

    def load_state() -> bytes:
        ctx.load_state(state)
        return ctx.logits.tobytes()

    def batch() -> bytes:
        with RequestFile(folder / "requests", out / "x") as file:
            for _ in file.run(lambda todo: gg.batch(model, todo, 4, temp=0.0, n_parallel=2, n_threads=1)):
                pass
        return b""

    def finetune() -> bytes:
        t = model.trainer(gg.AdamW(lr=0.02), lora, n_threads=1)
        loss = t.step([IDS])
        t.save_state(out / "x")
        return np.float64(loss).tobytes()

    trainer = model.trainer(gg.AdamW(lr=0.02), lora, n_threads=1)
    trainer.step([IDS])

    def checkpoint(name: str) -> Callable[[], bytes]:
        def run() -> bytes:
            trainer.save(out / name)
            return b""

        return run

    def imatrix() -> bytes:
        save_sums(out / "x", sums)
        return b""

    def save_slot() -> bytes:
        ctx.save_seq(out / "x", 0)
        return b""

    def imatrix_dat() -> bytes:
        save_dat(out / "x", sums)
        return b""

    return {
        "load": Operation(load()),
        "load copied": Operation(load(use_mmap=False)),
        "decode": Operation(decode, cells),
        "decode streamed": Operation(decode_streamed),
        "quantize": Operation(quantize(path, "Q8_0"), prepare=old),
        "layout r16": Operation(quantize(big, "Q4_0", layout="r16"), prepare=old),
        "convert": Operation(quantize(folder / "checkpoint", None), prepare=old),
        "export": Operation(export),
        "save_state": Operation(save_state, cells, old),
        "save_seq": Operation(save_slot, cells, old),
        "load_state": Operation(load_state, cells),
        "batch": Operation(batch),
        "finetune": Operation(finetune, prepare=old),
        "save adapter": Operation(checkpoint("x.gguf")),
        "save PEFT": Operation(checkpoint("folder")),
        "imatrix": Operation(imatrix, prepare=old),
        "imatrix .dat": Operation(imatrix_dat, prepare=old),
    }


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder, and what is in them."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def emptied(folder: Path) -> None:
    for p in folder.iterdir():
        shutil.rmtree(p) if p.is_dir() else p.unlink()


def counts() -> tuple[int, int]:
    """Descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class Faults:
    """The library, and what came of the calls that failed."""

    def __init__(self) -> None:
        self.c = ctypes.CDLL(os.environ["FAULTS"])
        self.c.fault_calls.restype = ctypes.c_long
        parts = [x.split()[0].split("-") for x in Path("/proc/self/maps").read_text().splitlines() if NUMPY in x]
        first, *_, end = sorted(int(x, 16) for part in parts for x in part)
        self.c.fault_spare(*map(ctypes.c_size_t, (first, end, SPARED)))
        self._learn()
        self.outcomes = Counter[str]()
        self.unraisable = Counter[str]()
        sys.unraisablehook = lambda u: self.unraisable.update([f"{type(u.exc_value).__name__} in {u.object!r:.60}"])

    def _learn(self) -> None:
        """Spare the buffers in which NumPy converts values, too. When it gets none, it crashes: `a <= b` here, run
        once more, is a SIGSEGV in NumPy 2.4.6 when its second allocation fails."""
        a, b = np.arange(64, dtype=np.int32), np.arange(8)[:, None]
        flags, out = np.ones((8, 64), bool), np.empty((8, 64), np.uint32)
        for learns in (0, 1):  # what is made once is made before
            self.arm(0, 0, 0, 0)
            self.c.fault_learn(learns)
            _ = a <= b
            np.multiply(flags, np.uint32(3), out=out)
            self.c.fault_learn(0)
            self.c.fault_disarm()

    def arm(self, kind: int, n: int, last: int, error: int) -> None:
        self.c.fault_arm(kind, ctypes.c_long(n), ctypes.c_long(last), error)

    def n_calls(self, run: Callable[[], object], kind: int) -> int:
        self.arm(kind, 0, 0, 0)
        try:
            run()
        finally:
            self.c.fault_disarm()
        return int(self.c.fault_calls(kind))

    def attempt(self, op: Operation, kind: int, n: int, last: int, error: int) -> tuple[bytes | None, str]:
        """What the operation gave when these calls failed, or None and the name of what it raised. A hang ends the
        process, with all tracebacks."""
        faulthandler.dump_traceback_later(15, exit=True)
        self.arm(kind, n, last, error)
        try:
            got = op.run()
        except NAMED as e:
            self.c.fault_disarm()
            return None, type(e).__name__
        except (RuntimeError, ValueError) as e:
            self.c.fault_disarm()
            if kind or not any(text in str(e) for text in INTERPRETERS):
                raise
            return None, "Python's own"
        finally:
            self.c.fault_disarm()
            faulthandler.cancel_dump_traceback_later()
        return got, "went on"


def sweep(name: str, op: Operation, out: Path, faults: Faults, most: int, kinds: tuple[str, ...]) -> Iterator[str]:
    """Try `most` of the calls of each kind, evenly spread, failing once and from then on. Gives what is wrong."""
    emptied(out)
    op.prepare()
    before = tree(out)
    wanted = op.run()
    after, state = tree(out), op.state()
    for kind, kind_name in enumerate(KINDS):
        if kind_name not in kinds:
            continue
        emptied(out)
        op.prepare()
        n_calls = faults.n_calls(op.run, kind)
        chosen = sorted({1 + i * (n_calls - 1) // max(min(most, n_calls) - 1, 1) for i in range(min(most, n_calls))})
        for error in ERRORS[kind_name]:
            for n in chosen:
                for last in (n, sys.maxsize):
                    if last != n and (error == SHORT or kind_name in ("alloc", "map")):
                        continue  # short for ever is half as fast, and without any memory nothing can be told
                    ever = "" if last == n else " and all after it"
                    where = f"{name}: {kind_name} {n}{ever}, {errno.errorcode.get(error, 'short')}"
                    emptied(out)
                    op.prepare()
                    print(where, file=sys.stderr)
                    had = counts()
                    try:
                        got, outcome = faults.attempt(op, kind, n, last, error)
                    except BaseException:
                        yield f"{where}: {traceback.format_exc()}"
                        continue
                    faults.outcomes[f"{kind_name}: {outcome}"] += 1
                    has = counts()
                    if has[0] > had[0] or has[1] > had[1]:
                        gc.collect()
                        has = counts()
                    if has[0] > had[0] or has[1] > had[1]:
                        yield f"{where}: descriptors and threads were {had}, are {has} ({outcome})"
                    files = tree(out)
                    said = files.get("x", b"").decode("utf-8", "replace") if name == "batch" else ""
                    says_so = any(f'"error": "{text}' in said for text in SAID)
                    if got is not None and not says_so and (got != wanted or files != after):
                        yield f"{where}: another result without an error"
                    if ever and kind_name == "open":  # no folder can be looked into, to remove it
                        files = {p: data for p, data in files.items() if not p.startswith(".")}
                    if name == "batch" and got is None:  # the first lines stay
                        text = files.get("x", b"")
                        if not after["x"].startswith(text) or (text and not text.endswith(b"\n")):
                            yield f"{where}: half a line stays: {text[-40:]!r} ({outcome})"
                    elif files not in (before, after) and not says_so:
                        yield f"{where}: {sorted(files)} of other contents ({outcome})"
                    emptied_state = name == "load_state" and got is None and op.state() == []  # as it says it may be
                    if op.state() != state and not emptied_state:
                        yield f"{where}: the object has changed ({outcome})"
                    emptied(out)
                    op.prepare()
                    if op.run() != wanted or tree(out) != after:
                        yield f"{where}: afterwards it gives another result ({outcome})"


def resident() -> float:
    """Megabytes."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def main(most: int, names: tuple[str, ...] = (), kinds: tuple[str, ...] = KINDS) -> None:
    """Try all operations, print what came of them and what is wrong; the exit code is 1 when something is."""
    warnings.simplefilter("ignore")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as parent:
        folder, out = Path(parent, "in"), Path(parent, "out")
        folder.mkdir()
        out.mkdir()
        all_operations = operations(folder, out)
        faults = Faults()
        for name in names or all_operations:
            op = all_operations[name]
            for _ in range(3):
                emptied(out)
                op.prepare()
                op.run()
            begin = resident()
            found = list(sweep(name, op, out, faults, most, kinds))
            print(f"{name}: {len(found)} wrong, {resident() - begin:+.1f} MB", flush=True)
            wrong += found
    n = sum(faults.outcomes.values())
    print(f"{n} faults: " + ", ".join(f"{n} {what}" for what, n in sorted(faults.outcomes.items())))
    print(f"not raisable: {dict(faults.unraisable)}" if faults.unraisable else "none in a place that cannot raise")
    print("\n".join(wrong[:200]))
    sys.exit(1 if wrong else 0)
