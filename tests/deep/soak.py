"""Mixed work for as long as one likes: memory, descriptors and threads must stay as they are.

    python -m tests.deep.soak --seconds 3600 --workers 3

Threads share a model and draw operations at random: contexts that come and go, states, adapters, streams that are left
in the middle, batches, weights that are read as needed, files that are written, trainings. Every result that the first
run of an operation gave must come again, bit for bit. Each line shows the seconds, operations, megabytes resident,
descriptors and threads; it ends with exit code 1 when one of them has grown, or a result was another one.

Under sanitizers (tests/sanitize.sh says how to build): LD_PRELOAD their libraries, as there. `--less` leaves out what
takes long there.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np

import pyggml as gg
from pyggml.hf.export import export_folder
from pyggml.llm.adapters.lora import Lora
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized
from tests.llm.adapters.make import halves, write_lora
from tests.tiny_model import write_gguf

PROMPTS = ["Once upon a time", "the quick brown fox", "a", "xyz" * 9]
IDS = [1, *range(70, 90)]
_GROWTH = 1.05  # of resident memory, between the second quarter of the time and the last


class Soak:
    """The operations; each returns what must be the same at every call with the same `i`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = write_gguf(folder / "tiny.gguf")
        self.model = gg.load_model(self.path)
        self.stories = gg.load_model()  # the model that ships with the package
        self.lora: Lora = self.model.load_lora(
            write_lora(folder / "lora.gguf", halves(self.model, ["blk.0.attn_q.weight", "blk.1.ffn_up.weight"]))
        )

    def decode(self, i: int) -> bytes:
        with self.model.new_context(n_ctx=96, n_threads=1 + i % 3, flash_attn=i % 2 == 0) as ctx:
            for start in range(0, 12, 4):
                ctx.decode(IDS[start : start + 4])
            ctx.memory.seq_rm(0, 5, -1)
            ctx.decode(IDS[5:9], logits="all")
            return ctx.logits.tobytes()

    def adapters(self, i: int) -> bytes:
        with self.model.new_context(n_ctx=64, n_threads=1 + i % 2) as ctx:
            ctx.set_loras([(self.lora, 1.0)])
            ctx.decode(IDS)
            with_it = ctx.logits.tobytes()
            ctx.set_loras([])
            ctx.memory.clear()
            ctx.decode(IDS)
            return with_it + ctx.logits.tobytes()

    def stream(self, i: int) -> bytes:
        return "".join(self.stories.generate(PROMPTS[i], 24, temp=0.0, n_threads=1 + i % 2)).encode()

    def leave_a_stream(self, i: int) -> bytes:
        pieces = iter(self.stories.generate(PROMPTS[i], 100, temp=0.0, n_threads=2))
        return "".join(next(pieces) for _ in range(3 + i)).encode()

    def batch(self, i: int) -> bytes:
        return repr(list(gg.batch(self.model, PROMPTS[: i + 1], 12, temp=0.0, n_parallel=1 + i, n_threads=2))).encode()

    def leave_a_batch(self, i: int) -> bytes:
        results = gg.batch(self.model, PROMPTS, 8, temp=0.0, n_parallel=2, n_threads=1)
        return repr([next(results) for _ in range(1 + i % 2)]).encode()

    def state(self, i: int) -> bytes:
        path = self.folder / f"{threading.get_ident()}.state"
        with self.model.new_context(n_ctx=64, n_threads=1) as a, self.model.new_context(n_ctx=64, n_threads=1) as b:
            a.decode(IDS[: 4 + i])
            a.save_state(path)
            b.load_state(path)
            b.decode([7])
            return b.logits.tobytes()

    def load(self, i: int) -> bytes:
        with gg.load_model(self.path, use_mmap=i % 2 == 0, repack=i < 2) as model, model.new_context(n_ctx=32) as ctx:
            ctx.decode(IDS[:8])
            return ctx.logits.tobytes()

    def read_as_needed(self, i: int) -> bytes:
        with gg.load_model(self.path, ram=self._least()) as model, model.new_context(n_ctx=32, n_threads=1) as ctx:
            ctx.decode(IDS[: 4 + i])
            return ctx.logits.tobytes()

    def _least(self) -> int:
        if not hasattr(self, "_ram"):
            try:
                gg.load_model(self.path, ram=1)
            except gg.ModelError as e:
                self._ram = int(str(e).split("the least for this model is ")[1].split()[0])
        return self._ram

    def quantize(self, i: int) -> bytes:
        out = self.folder / f"{threading.get_ident()}.gguf"
        write_quantized(plan_quantization(self.path, ("Q8_0", "Q4_0", "F16", "BF16")[i]), out, 1 + i % 2)
        return out.read_bytes()

    def to_folder_and_back(self, i: int) -> bytes:
        folder = self.folder / str(threading.get_ident()) / "tiny"  # the name of the model follows from the folder's
        export_folder(self.path, folder)
        out = folder / "back.gguf"
        write_quantized(plan_quantization(folder, None), out)
        digest = sha256(out.read_bytes()).digest()
        shutil.rmtree(folder)
        return digest

    def train(self, i: int) -> bytes:
        t = self.model.trainer(gg.AdamW(lr=0.02), gg.LoRA(r=2, alpha=4, targets=("attn_q",), seed=1), n_threads=1 + i)
        return np.array([t.step([IDS]) for _ in range(2)]).tobytes()

    def grammar(self, i: int) -> bytes:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        return "".join(self.model.generate("x", 16, temp=0.0, json_schema=schema, n_threads=1)).encode()

    def refused(self, i: int) -> bytes:
        """What fails leaves nothing behind, too."""
        with suppress(gg.GGMLError), self.model.new_context(n_ctx=16, n_threads=1) as ctx:
            ctx.decode(IDS)
        damaged = self.folder / f"{threading.get_ident()}.damaged"
        damaged.write_bytes(self.path.read_bytes()[: 5000 * (i + 1)])
        with suppress(gg.GGMLError):
            gg.load_model(damaged)
        return b""


SLOW = ("to_folder_and_back", "train", "grammar")


def measures() -> tuple[float, int, int]:
    """Megabytes resident, descriptors, threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--less", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return soak(Soak(Path(folder)), args.seconds, args.workers, args.seed, SLOW if args.less else ())


def soak(work: Soak, seconds: float, n_workers: int, seed: int, without: tuple[str, ...]) -> int:
    names = [n for n, f in vars(Soak).items() if callable(f) and not n.startswith("_") and n not in without]
    cases: list[tuple[str, int]] = [(name, i) for name in names for i in range(4)]
    operations: dict[str, Callable[[int], bytes]] = {name: getattr(work, name) for name in names}
    wanted = {(name, i): operations[name](i) for name, i in cases}
    counts, faults, end = Counter[str](), list[str](), time.monotonic() + seconds
    lock = threading.Lock()

    def worker(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        while time.monotonic() < end and not faults:
            name, i = rng.choice(cases)
            try:
                if operations[name](i) != wanted[name, i]:
                    faults.append(f"{name}({i}): another result")
            except BaseException:
                faults.append(f"{name}({i}): {traceback.format_exc()}")
            with lock:
                counts[name] += 1

    threads = [threading.Thread(target=worker, args=(n,)) for n in range(n_workers)]
    begin = time.monotonic()
    for t in threads:
        t.start()
    rows: list[tuple[float, float]] = []
    print("seconds  operations  MB  descriptors  threads", flush=True)
    while any(t.is_alive() for t in threads):
        time.sleep(min(10.0, max(seconds / 20, 0.1)))
        mb, fds, n_threads = measures()
        rows.append((time.monotonic() - begin, mb))
        print(f"{rows[-1][0]:7.0f}  {sum(counts.values()):10d}  {mb:.1f}  {fds}  {n_threads}", flush=True)
    for t in threads:
        t.join()
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    mb, fds, n_threads = measures()
    print(f"at the end: {mb:.1f} MB, {fds} descriptors, {n_threads} threads")
    print(", ".join(f"{n} {name}" for name, n in counts.most_common()))
    quarters = [[m for s, m in rows if seconds * q / 4 <= s < seconds * (q + 1) / 4] for q in (1, 3)]
    if all(quarters):
        second, last = (float(np.mean(q)) for q in quarters)
        print(f"resident, on average: {second:.1f} MB in the second quarter, {last:.1f} MB in the last")
        if last > second * _GROWTH:
            faults.append("resident memory grows")
    print("\n".join(faults) or "no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
