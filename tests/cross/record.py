"""Record runs of lowered plans, for tests/cross/replay.c: a prompt and single tokens of small random models, for each
instruction set level that this CPU has. `python -m tests.cross.record FILE`

The file, whose numbers are little-endian and of 64 bits: a count of plans. Each plan: the name of its level (16 bytes),
the number of operations, the number of blocks of memory, the bytes of scratch memory. Then the operations, each as
pg_op of pg.h with the name of its kernel (64 bytes) behind it. Then the blocks, each with its address, its size,
whether the run changes it, its bytes before the run, and when it changes those after the run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np

import pyggml as gg
from pyggml.backends.cpu import backend, isa_levels
from pyggml.backends.cpu.isa import table_of
from pyggml.backends.cpu.lower import _DST, _OP_SIZE, _PARAM, _TENSOR  # pyright: ignore[reportPrivateUsage]
from pyggml.buffers.buffer import Buffer
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized
from pyggml.native import ffi, lib
from tests.random_model import write_random


class _Recording:
    """Stands in for the C library: notes every plan that it runs."""

    def __init__(self) -> None:
        self.plans: list[bytes] = []
        self.level = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def pg_plan_run(self, p: Any, values: Any, n_threads: int, watch: bool) -> int:
        work = int(ffi.cast("intptr_t", p.ops[0].task.work))
        ops = np.frombuffer(ffi.buffer(p.ops, p.n_ops * _OP_SIZE), np.uint8).reshape(-1, _OP_SIZE)
        used = np.unique(ops.view(np.int64)[:, _DST // 8 : _PARAM // 8 : _TENSOR.size // 8])
        places = [(at, n) for at, n in _blocks() if at != work and np.any((used >= at) & (used < at + n))]
        blocks = [(at, np.frombuffer(ffi.buffer(ffi.cast("char *", at), n), np.uint8)) for at, n in places]
        before = [memory.copy() for _, memory in blocks]
        status = lib.pg_plan_run(p, values, n_threads, watch)
        if status:
            return status
        names = {k.address: k.symbol for level in isa_levels() for rows in table_of(level).values() for _, k in rows}
        records = [op.tobytes() + names[int(op[:8].view(np.int64)[0])].encode().ljust(64, b"\0") for op in ops]
        memories: list[bytes] = []
        for (at, after), was in zip(blocks, before, strict=True):
            changed = not np.array_equal(was, after)
            memories += [pack("<QQQ", at, after.size, changed), was.tobytes(), after.tobytes() if changed else b""]
        head = self.level.encode().ljust(16, b"\0") + pack("<QQQ", p.n_ops, len(blocks), p.work_size)
        self.plans.append(b"".join([head, *records, *memories]))
        return status


_buffers: list[Buffer] = []


def _blocks() -> Iterator[tuple[int, int]]:
    """The blocks of memory that tensors lie in, without those within others."""
    end = 0
    for base, size in sorted({(b.base, b.size) for b in _buffers if b.is_host and b.size}, key=lambda b: (b[0], -b[1])):
        if base + size > end:
            assert base >= end, "two blocks overlap"
            yield base, size
            end = base + size


def _models(folder: Path) -> Iterator[Path]:
    """Models with all ways to compute a product: in F32, in F16, by 32 and by 256 elements."""
    shape = {"embedding_length": 256, "feed_forward_length": 512, "block_count": 2, "attention.head_count_kv": 2}
    yield write_random(folder / "F32.gguf", "llama", shape)
    for kind in ("F16", "Q8_0", "Q4_K_M", "IQ4_XS"):
        write_quantized(plan_quantization(folder / "F32.gguf", kind), folder / f"{kind}.gguf")
        yield folder / f"{kind}.gguf"


def main(out: str) -> None:
    """Write the file `out`."""
    original = Buffer.__init__

    def remember(self: Buffer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _buffers.append(self)

    Buffer.__init__ = remember
    backend.lib = recording = _Recording()
    with tempfile.TemporaryDirectory() as folder:
        for path in _models(Path(folder)):
            for recording.level in isa_levels():
                os.environ["PYGGML_ISA"] = recording.level
                with gg.load_model(path) as model:
                    ctx = gg.LlamaContext(model, n_ctx=64, n_ubatch=40)
                    ctx.decode(list(range(40)))
                    ctx.decode([3])
    Path(out).write_bytes(pack("<Q", len(recording.plans)) + b"".join(recording.plans))
    print(len(recording.plans), "plans")


if __name__ == "__main__":
    main(sys.argv[1])
