"""Models in several GGUF files: written, read, merged, and parts that are missing or of another model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyggml.dtypes import DType
from pyggml.errors import GGUFError
from pyggml.gguf_io.read import open_gguf
from pyggml.gguf_io.split import (
    SplitOut,
    merge_model,
    open_model,
    part_path,
    prefix_of,
    refuse_source,
    split_model,
    split_tensors,
)
from pyggml.gguf_io.write import GGUFOut, kv_record
from pyggml.llm.model import load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ..tiny_model import write_gguf


@pytest.fixture
def parts(tiny: Path, tmp_path: Path) -> list[Path]:
    """The tiny model in files of eight tensors."""
    return [Path(p) for p in split_model(tiny, str(tmp_path / "m"), max_tensors=8)]


@pytest.mark.parametrize("sizes", [{"max_tensors": 1}, {"max_tensors": 5}, {"max_size": 9000}, {"max_tensors": 99}])
def test_there_and_back(tiny: Path, tmp_path: Path, sizes: dict[str, int]) -> None:
    """Parts have llama.cpp's keys, as the gguf package reads them; merged again they are the file that was split."""
    paths = split_model(tiny, str(tmp_path / "m"), **sizes)
    whole = open_gguf(tiny)
    assert paths == [part_path(str(tmp_path / "m"), i, len(paths)) for i in range(len(paths))]
    names: list[str] = []
    for i, path in enumerate(paths):
        reader = gguf.GGUFReader(path)
        fields = {key: (f.contents(), f.types[0].name) for key, f in reader.fields.items() if key.startswith("split.")}
        assert fields == {
            "split.no": (i, "UINT16"),
            "split.count": (len(paths), "UINT16"),
            "split.tensors.count": (len(whole.tensors), "INT32"),
        }
        names += [t.name for t in reader.tensors]
        assert ("general.architecture" in reader.fields) == (i == 0)
        if "max_size" in sizes:
            assert len(reader.tensors) == 1 or sum(int(t.n_bytes) for t in reader.tensors) <= sizes["max_size"]
    assert names == list(whole.tensors)
    merge_model(paths[0], tmp_path / "merged.gguf")
    assert (tmp_path / "merged.gguf").read_bytes() == tiny.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["merged.gguf", *(Path(p).name for p in paths)])


@pytest.mark.parametrize("use_mmap", [True, False])
def test_a_model_in_parts_runs(tiny: Path, parts: list[Path], tmp_path: Path, use_mmap: bool) -> None:
    want = "".join(load_model(tiny).generate("ab", 8, temp=0))
    model = load_model(parts[0], use_mmap=use_mmap)
    assert "".join(model.generate("ab", 8, temp=0)) == want
    for path in (tiny, parts[0]):
        write_quantized(plan_quantization(path, "Q8_0"), tmp_path / f"{path.stem}.q8.gguf")
    assert (tmp_path / f"{tiny.stem}.q8.gguf").read_bytes() == (tmp_path / f"{parts[0].stem}.q8.gguf").read_bytes()
    again = split_model(parts[0], str(tmp_path / "again"), max_tensors=12)
    merge_model(again[0], tmp_path / "one.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == tiny.read_bytes()


def test_what_becomes_a_part() -> None:
    infos = [(str(i), DType.F32, (n,)) for i, n in enumerate((100, 1, 1, 1, 50, 50, 200, 1))]

    def of(**sizes: int) -> list[str]:
        return ["".join(name for name, *_ in part) for part in split_tensors(infos, 32, **sizes)]

    assert of(max_tensors=3) == ["012", "345", "67"]
    assert of(max_size=96) == ["0", "123", "4", "5", "6", "7"]  # a larger tensor has a part of its own
    assert of(max_size=448) == ["01", "234", "5", "6", "7"]
    assert of(max_size=10**6) == ["01234567"]
    assert split_tensors([], 32, max_tensors=3) == [[]]
    with pytest.raises(GGUFError, match="65536 parts"):
        split_tensors([("x", DType.F32, (1,))] * 65536, 32, max_tensors=1)
    assert prefix_of("a/m-00001-of-00003.gguf") == prefix_of("a/m.gguf") == prefix_of("a/m") == "a/m"


Change = Callable[[Sequence[Path], Path], Any]
FAULTS: dict[str, tuple[Change, str]] = {
    "missing": (lambda p, other: p[1].unlink(), r"1 of its 3 parts are missing, the first is .*-00002-of-00003.gguf"),
    "all missing": (lambda p, other: [x.unlink() for x in p[1:]], r"2 of its 3 parts are missing"),
    "twice": (lambda p, other: shutil.copyfile(p[1], p[2]), r"00003-of-00003.gguf: holds part 2, where its name"),
    "the first again": (lambda p, other: shutil.copyfile(p[0], p[1]), r"holds part 1, where its name says part 2"),
    "no part": (lambda p, other: shutil.copyfile(other, p[1]), r"00002-of-00003.gguf: split.no is missing"),
    "truncated": (lambda p, other: p[1].write_bytes(p[1].read_bytes()[:-99]), r"00002-of-00003.gguf"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_do_not_belong(tiny: Path, parts: list[Path], fault: str) -> None:
    change, text = FAULTS[fault]
    change(parts, tiny)
    with pytest.raises(GGUFError, match=text):
        load_model(parts[0])


def test_parts_of_other_models(parts: list[Path], tmp_path: Path) -> None:
    larger = write_gguf(tmp_path / "l.gguf", {"llama.block_count": 3})
    others = split_model(larger, str(tmp_path / "o"), max_tensors=10)
    assert len(others) == len(parts)
    shutil.copyfile(others[1], parts[1])
    with pytest.raises(GGUFError, match=r"is no part of .*: split.tensors.count is 30, there 21"):
        load_model(parts[0])


def test_the_first_part_by_its_name(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"is part 2 of 3; open the first, .*m-00001-of-00003.gguf"):
        load_model(parts[1])
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(GGUFError, match=r"is part 1 of 3, and must be named so: .*renamed-00001-of-00003.gguf"):
        load_model(tmp_path / "renamed.gguf")


def test_all_appear_or_none(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="cannot be written"):
        split_model(tiny, str(tmp_path / "nowhere" / "m"), max_tensors=8)
    infos = [("a", DType.F32, (4,)), ("b", DType.F32, (4,))]
    records = [kv_record("general.architecture", "x")]

    def write(second: int) -> None:
        with SplitOut(str(tmp_path / "s"), records, split_tensors(infos, 32, max_tensors=1), 32) as out:
            out.write_tensor([np.zeros(4, np.float32)])
            out.write_tensor([np.zeros(second, np.float32)])

    with pytest.raises(GGUFError, match="12 bytes were written instead of 16"):
        write(3)
    assert not list(tmp_path.iterdir())
    write(4)
    assert len(open_model(tmp_path / "s-00001-of-00002.gguf").tensors) == 2


def test_no_part_is_written_over(parts: list[Path], tmp_path: Path) -> None:
    before = [p.read_bytes() for p in parts]
    for write in (
        lambda: merge_model(parts[0], parts[1]),
        lambda: split_model(parts[0], str(tmp_path / "m"), max_tensors=8),
        lambda: write_quantized(plan_quantization(parts[0], "Q8_0"), parts[2]),
    ):
        with pytest.raises(GGUFError, match="the output is the input"):
            write()
    assert [p.read_bytes() for p in parts] == before


@pytest.mark.parametrize("prefix", ["", "folder/"])
def test_parts_have_a_name(prefix: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(GGUFError, match="names no file"):
        split_model(tiny, prefix)
    assert not [*tmp_path.rglob("*.gguf")]


@pytest.mark.parametrize("n", [65536, (1 << 31) - 1])
def test_more_parts_than_there_can_be(tmp_path: Path, n: int) -> None:
    """A file of 160 bytes: no list of so many names is made."""
    kv = {"general.architecture": "llama", "split.no": np.uint16(0), "split.tensors.count": np.int32(0)}
    path = part_path(str(tmp_path / "m"), 0, n)
    with GGUFOut(path, [kv_record(k, v) for k, v in {**kv, "split.count": np.uint32(n)}.items()], [], 32):
        pass
    with pytest.raises(GGUFError, match=f"split.count is {n}: a model has at most 65535 parts"):
        open_model(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no such files")
def test_parts_that_become_something_else(parts: list[Path], tmp_path: Path) -> None:
    """Between opening and writing: a FIFO does not block, and bytes of another file are not taken for those tensors."""
    plan, out = plan_quantization(parts[0], "Q8_0"), tmp_path / "q.gguf"
    shutil.copyfile(parts[0], parts[2])
    with pytest.raises(GGUFError, match=r"00003-of-00003.gguf: had \d+ bytes when it was opened"):
        write_quantized(plan, out)
    parts[2].unlink()
    os.mkfifo(parts[2])
    with pytest.raises(GGUFError, match=r"00003-of-00003.gguf: is no regular file"):
        write_quantized(plan, out)
    assert not out.exists()


def test_what_is_converted_is_not_replaced(tmp_path: Path) -> None:
    """By any of its names; a GGUF file in the folder may be."""
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "old.gguf"):
        (folder / name).write_bytes(b"x")
    (tmp_path / "link.gguf").symlink_to(folder / "model.safetensors")
    for out in (folder / "config.json", folder / ".." / "hf" / "model.safetensors", tmp_path / "link.gguf"):
        with pytest.raises(GGUFError, match="is read, too"):
            refuse_source(folder, out)
    with pytest.raises(GGUFError, match="is read, too"):
        refuse_source(folder / "config.json", folder / "config.json")
    refuse_source(folder, folder / "old.gguf")
    refuse_source(folder, folder / "new.gguf")
