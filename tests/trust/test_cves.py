"""What has been found in other programs that read these files and requests: each is an exception here, by name.

A name says where it was found; a docstring what went wrong there. Each test makes the file, or the request, that the
report tells of.
"""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import GGMLError, GGUFError, ModelError
from pyggml.gguf_io.read import open_gguf
from pyggml.llm.generate.long_context import LongContext
from pyggml.llm.generate.templates import find_template
from pyggml.llm.vocab import Vocab

from ..null.test_gguf_io import ARR, STR, U32, build, info, kv, s
from ..tiny_model import write_gguf

MOST = 2**64 - 1
OTHERS = b"text of another conversation"


def refused(path: Path, raw: bytes, message: str) -> None:
    """`raw` is refused with `message`, in a small amount of memory, mapped and not."""
    path.write_bytes(raw)
    for use_mmap in (True, False):
        tracemalloc.start()
        try:
            with pytest.raises(GGUFError, match=message):
                open_gguf(path, use_mmap)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def vocab(model: str, tokens: list[str], types: list[int] | None = None, **more: Any) -> Vocab:
    keys = {"model": model, "tokens": tokens, "token_type": np.array(types or [1] * len(tokens), np.int32), **more}
    return Vocab.from_gguf({f"tokenizer.ggml.{k}": v for k, v in keys.items()})


@pytest.mark.parametrize("n", [MOST, MOST - 1, 2**63, 2**63 - 1, 2**32, 2**31])
def test_cve_2024_23496_length_of_a_string(tmp_path: Path, n: int) -> None:
    """`n + 1` bytes were allocated for a string of `n`, which overflows, and `n` were read."""
    for at_key in (True, False):
        text = struct.pack("<Q", n) + bytes(64)
        raw = build([text if at_key else kv("k", STR, text)])
        refused(tmp_path / "x.gguf", raw, f"key 0 has {n} bytes" if at_key else "runs past the end of the file")


@pytest.mark.parametrize("n_dims", [5, 6, 2**31, 2**32 - 1])
def test_cve_2024_21802_number_of_dims(tmp_path: Path, n_dims: int) -> None:
    """More than four dims were written behind the array that holds them."""
    record = s("t") + struct.pack("<I", n_dims) + struct.pack("<8Q", *[1] * 8) + struct.pack("<IQ", 0, 0)
    refused(tmp_path / "x.gguf", build([], [record], 64), f"tensor 't' has {n_dims} dims; at most 4 are allowed")


@pytest.mark.parametrize("item", [U32, STR, ARR])
@pytest.mark.parametrize("n", [MOST, 2**62, 2**61, 2**33])
def test_cve_2024_21825_length_of_an_array(tmp_path: Path, item: int, n: int) -> None:
    """The size of an array, `n` elements of some bytes, overflowed."""
    raw = build([kv("k", ARR, struct.pack("<IQ", item, n))], data=256)
    refused(tmp_path / "x.gguf", raw, "needs|cannot fit|array of arrays")


def test_cve_2024_21836_23605_counts_in_the_header(tmp_path: Path) -> None:
    """The numbers of tensors and of keys, times the size of their records, overflowed."""
    for n in (MOST, 2**61, 2**58, 2**32):
        refused(tmp_path / "x.gguf", build(n_tensors=n, data=96), f"{n} tensors cannot fit")
        refused(tmp_path / "x.gguf", build(n_kv=n, data=96), f"{n} keys cannot fit")


def test_cve_2024_32878_array_that_ends_too_early(tmp_path: Path) -> None:
    """Memory for the strings of an array was freed before all of it had been filled."""
    for n in (2, 3, 8):
        strings = s("one") + struct.pack("<Q", 2**40)
        raw = build([kv("k", ARR, struct.pack("<IQ", STR, n) + strings)], data=256)
        refused(tmp_path / "x.gguf", raw, f"string 1 of {n} runs past the end")


@pytest.mark.parametrize(
    "dims",
    [[2**62, 4], [2**63, 2], [2**32, 2**32], [2**31, 2**31, 4], [MOST, 1, 1, 1], [2**40, 2**24], [2**61 - 8, 8]],
)
def test_cve_2025_53630_2026_27940_33298_sizes_of_tensors(tmp_path: Path, dims: list[int]) -> None:
    """The size of a tensor, and the sum of the sizes of all, overflowed: little was allocated, and much written."""
    for dtype in (0, 1, 8, 12):
        raw = build([], [info("t", dims, dtype), info("u", dims, dtype, 64)], 4096)
        refused(tmp_path / "x.gguf", raw, "needs bytes .* of a file of|whole number")


def test_cve_2026_7482_offset_beyond_the_file(tmp_path: Path) -> None:
    """A tensor that lies outside of its file was given the memory behind it: other users' texts, keys of the API."""
    for offset in (128, 2**20, 2**63, MOST - 31):
        refused(tmp_path / "x.gguf", build([], [info("t", [32], 0, offset)], 128), "needs bytes .* of a file of")
    refused(tmp_path / "x.gguf", build([], [info("t", [1024])], 128) + OTHERS, "needs bytes .* of a file of")


def test_cve_2026_7482_a_file_that_shrinks(tmp_path: Path) -> None:
    """The same by a file that is cut after it was opened."""
    path = tmp_path / "x.gguf"
    path.write_bytes(build([], [info("t", [1 << 16])], 1 << 18))
    file = open_gguf(path)
    with open(path, "r+b") as f:
        f.truncate(4096)
    with pytest.raises(GGUFError, match="load it again"):
        file.tensor_bytes("t")


@pytest.mark.parametrize("size", [2**16, 2**20])
def test_cve_2025_49847_long_token(size: int) -> None:
    """The length of a token was cut to 32 bits when its text was copied to a buffer that it did not fit in."""
    try:
        v = vocab("gpt2", ["a", "b" * size], merges=["a b"], pre="gpt-2")
    except ModelError:
        return
    assert v.detokenize([1]) == "b" * size


@pytest.mark.parametrize("text", ["", "a" * (1 << 20), "ab" * (1 << 19)])
def test_cve_2025_52566_more_tokens_than_room(text: str) -> None:
    """More tokens than fitted were written to a buffer: a signed number was compared with an unsigned one."""
    model = gg.load_model()
    ids = model.tokenize(text)
    assert model.detokenize(ids).removeprefix(" ") == text
    ctx = model.new_context(16)
    if len(ids) > 16:
        with pytest.raises(GGMLError, match="tokens in one batch"):
            ctx.decode(ids)


@pytest.mark.parametrize("text", ["<0x-1>", "<0x-F>", "<0xZZ>", "<0x+1>", "<0x 1>", "<0x>", "<0x100>"])
@pytest.mark.parametrize("model", ["plamo2", "llama", "t5"])
def test_plamo2_byte_tokens(model: str, text: str) -> None:
    """The hexadecimal number of a byte's token was an index, of which -1 lies before the array (llama.cpp #25969)."""
    tokens = ["<unk>", "<s>", "</s>", "<pad>", *(f"<0x{b:02X}>" for b in range(255)), text]
    types = [2, 3, 3, 3] + [6] * 256
    with pytest.raises(ModelError, match=r"no token for byte 0xFF|is typed as a byte and does not spell one"):
        vocab(model, tokens, types, scores=np.zeros(len(tokens))).token_to_piece(len(tokens) - 1)


@pytest.mark.parametrize("token", [3, 1 << 20, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("key", ["bos", "eos", "unknown", "padding", "seperator"])
def test_vocabulary_that_is_too_small(key: str, token: int) -> None:
    """Special tokens were looked up behind the end of a vocabulary (llama.cpp #14145)."""
    keys = {f"{key}_token_id": token}
    try:
        v = vocab("gpt2", ["a", "b", "c"], merges=["a b"], pre="gpt-2", **keys)
    except ModelError as e:
        assert str(token) in str(e)
        return
    assert all(0 <= i < 3 for i in v.tokenize("abc", add_special=True))


@pytest.mark.parametrize("charsmap", [b"", b"\x00", b"\x01\x02\x03", b"\xff" * 4, b"\xff" * 64, bytes(64)])
def test_charsmap_that_is_cut(charsmap: bytes) -> None:
    """The size in front of a character map was read from fewer bytes than it has (llama.cpp #25258)."""
    keys = {"precompiled_charsmap": np.frombuffer(charsmap, np.uint8)}
    tokens = ["<pad>", "</s>", "<unk>", "▁a", "a"]
    try:
        v = vocab("t5", tokens, [3, 3, 2, 1, 1], scores=np.zeros(5), unknown_token_id=2, **keys)
        assert v.tokenize("a a")
    except ModelError as e:
        assert "charsmap cannot be read" in str(e)


@pytest.mark.parametrize("n", [513, 1 << 20, 2**32 - 1])
def test_more_layers_than_a_table_has(tmp_path: Path, n: int) -> None:
    """Layers were counted through tables of 512 (llama.cpp #25821)."""
    with pytest.raises(GGMLError, match=r"512 layers supported|from 0 to 2147483647"):
        gg.load_model(write_gguf(tmp_path / "m.gguf", {"llama.block_count": n}))


@pytest.mark.parametrize("n_discard", [-1, -32, -(2**31), -(2**63)])
def test_cve_2026_21869_negative_n_discard(n_discard: int) -> None:
    """A context shift by fewer than no tokens wrote in front of an array."""
    ctx = gg.load_model().new_context(16)
    with pytest.raises(GGMLError, match="must not be negative"):
        LongContext(ctx, n_discard=n_discard)
    with pytest.raises(GGMLError, match="must not be negative"):
        LongContext(ctx, n_keep=n_discard)


ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr": "{{ (''|attr('__class__')).__base__.__subclasses__() }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "map": "{{ messages|map(attribute='__class__')|list }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "lipsum": "{{ lipsum.__globals__['os'].system('id') }}",
    "self": "{{ self.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
    "namespace": "{% set ns = namespace() %}{{ ns.__init__.__globals__ }}",
    "macro": "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "import": "{% import '/etc/passwd' as p %}{{ p }}",
    "include": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("way", ESCAPES)
def test_cve_2024_34359_template_that_leaves_its_sandbox(way: str) -> None:
    """Chat templates ran unsandboxed: a model's file could run any program."""
    template = find_template(None, {"tokenizer.chat_template": ESCAPES[way]})
    try:
        text = template.render([{"role": "user", "content": "x"}], gg.load_model().vocab)
    except ModelError as e:
        assert "the chat template of the model" in str(e)
    else:
        assert text in ("", "[Undefined]")
