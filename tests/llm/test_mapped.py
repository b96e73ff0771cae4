"""A mapped file that becomes shorter: an error for all that reads it, and the process lives."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pyggml.backends.cpu.repack import repack
from pyggml.errors import GGUFError
from pyggml.gguf_io.read import open_gguf
from pyggml.llm.model import default_model_path, load_model
from pyggml.native import ffi, lib

from ..child import in_child
from ..tiny_model import write_gguf

SHRUNK = "had .* bytes when it was opened and has .* now"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", kv={"llama.embedding_length": 256, "llama.feed_forward_length": 512})


@pytest.mark.parametrize("size", [0, 5000])
@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_every_use_raises(path: Path, backend: str, size: int) -> None:
    model = load_model(path, repack=False)
    ctx = model.new_context(n_ctx=32, n_threads=2, backend=backend)
    ctx.decode([5, 6])
    t = model.tensors["token_embd.weight"]
    array, before = t.numpy(), ctx.memory.cells
    os.truncate(path, size)
    for use in (lambda: ctx.decode([7]), t.numpy, t.tobytes, lambda: ctx.save_state(path)):
        with pytest.raises(GGUFError, match=SHRUNK):
            use()
    assert ctx.memory.cells == before
    assert array[-1].sum() == 0  # what was lost reads as zeros
    with pytest.raises(GGUFError, match=SHRUNK), model.new_context(n_ctx=32, n_threads=1) as other:
        other.decode([5])


def test_handlers_that_were_set_since(path: Path) -> None:
    """faulthandler and Ray set handlers of SIGBUS; faulthandler hands the signal on to the one that it found."""
    program = """if True:
        import faulthandler, mmap, os, sys
        from pyggml.llm.model import load_model
        model = load_model(sys.argv[1], repack=False)
        ctx = model.new_context(n_ctx=32, n_threads=2)
        faulthandler.enable()
        os.truncate(sys.argv[1], 5000)
        try:
            ctx.decode([7])
        except Exception as e:
            print(e, flush=True)
        with open(sys.argv[1], "r+b") as f:
            f.truncate(1)
            other = mmap.mmap(f.fileno(), 1)
        os.truncate(sys.argv[1], 0)
        other[0]
    """
    end = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=300)
    assert re.search(SHRUNK, end.stdout)
    assert end.returncode == -signal.SIGBUS and end.stderr.count("Bus error") == 1  # what is not ours ends, once


def test_repacking_raises(tmp_path: Path) -> None:
    path = Path(shutil.copy(default_model_path(), tmp_path / "q8.gguf"))
    weights = load_model(path, repack=False).weights.values()
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(GGUFError, match=SHRUNK):
        repack(weights)


def test_a_file_that_grows_again_is_lost(path: Path) -> None:
    model = load_model(path)
    array = model.tensors["token_embd.weight"].numpy()
    data = path.read_bytes()
    os.truncate(path, 100)
    assert array[5].sum() == 0
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=SHRUNK):
        model.tensors["output.weight"].numpy()
    assert np.isfinite(load_model(path).tensors["token_embd.weight"].numpy()).all()


def test_a_run_that_finds_it_lost_is_not_the_last_that_raises(path: Path) -> None:
    ctx = load_model(path, repack=False).new_context(n_ctx=32, n_threads=1)
    size = path.stat().st_size
    for n in (size - 1, size):  # no page is gone: only the size says it
        os.truncate(path, n)
        with pytest.raises(GGUFError, match=SHRUNK):
            ctx.decode([5])


def test_replaced_files_and_copies_are_whole(path: Path, tmp_path: Path) -> None:
    mapped, copied = load_model(path), load_model(path, use_mmap=False)
    want = mapped.tensors["output.weight"].tobytes()
    os.replace(write_gguf(tmp_path / "other.gguf"), path)
    os.truncate(path, 10)
    assert mapped.tensors["output.weight"].tobytes() == copied.tensors["output.weight"].tobytes() == want


def test_a_file_that_shrinks_while_it_is_used(path: Path) -> None:
    """At any moment: loading, repacking, decoding in threads."""
    data = path.read_bytes()
    for i in range(30):
        path.write_bytes(data)
        timer = threading.Timer(i * 4e-4, os.truncate, (path, 3000 * (i % 3)))
        timer.start()
        try:
            model = load_model(path, repack=i % 2 == 0)
            ctx = model.new_context(n_ctx=64, n_threads=2)
            for _ in range(20):
                ctx.decode([5, 6])
        except GGUFError:
            pass
        timer.join()


def test_other_faults_still_end_the_process(path: Path, tmp_path: Path) -> None:
    code = f"""
import mmap, os, pyggml as gg
m = gg.load_model({str(path)!r})
with open({str(tmp_path / "foreign")!r}, "w+b") as f:
    f.write(bytes(8192)); f.flush()
    foreign = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    f.truncate(0)
foreign[5000]
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -7


def test_mappings_come_and_go(path: Path) -> None:
    """Their places are used again, by the mapping that is there then."""
    for _ in range(20):
        files = [open_gguf(path) for _ in range(5)]
    del files[1::2]
    fresh = open_gguf(path)
    assert fresh.tensor_bytes("output.weight").any()
    os.truncate(path, 0)
    for f in (*files, fresh):
        assert not f.data[-4096:].any()
        with pytest.raises(GGUFError, match=SHRUNK):
            f.tensor_bytes("output.weight")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows forks none")
def test_forks_while_files_are_mapped(path: Path) -> None:
    """A fork catches another thread with the lock of the list of mapped files."""
    stop = threading.Event()

    def map_files() -> None:
        with open(path, "rb") as f:
            start = ffi.new("char[4096]")
            while not stop.is_set():
                lib.pg_unguard(lib.pg_guard(f.fileno(), start, 4096))

    def in_the_child() -> None:
        with open(path, "rb") as f:
            lib.pg_unguard(lib.pg_guard(f.fileno(), ffi.new("char[4096]"), 4096))

    threads = [threading.Thread(target=map_files) for _ in range(3)]
    for t in threads:
        t.start()
    try:
        for _ in range(20):
            in_child(in_the_child, 20)
    finally:
        stop.set()
        for t in threads:
            t.join()
