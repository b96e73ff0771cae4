"""Read whisper.cpp's model files (`ggml-base.bin`): a magic number, sizes, mel filters, tokens, then the tensors.

The file has Whisper's encoder and decoder under OpenAI's names. It becomes what a folder becomes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pyggml import limits
from pyggml.buffers.buffer import Buffer, Bytes
from pyggml.dtypes import DType
from pyggml.errors import GGUFError, ModelError
from pyggml.gguf_io.bind import bound
from pyggml.gguf_io.split import refuse_source
from pyggml.gguf_io.write import GGUFOut, TensorInfo, kv_record
from pyggml.models.hparams import MAX_LAYERS
from pyggml.tensor import Ne, Tensor, full_ne, rank_of

from .speech import LANGUAGES

_SIZES = (
    *("vocab", "audio_ctx", "audio_state", "audio_head", "audio_layer"),
    *("text_ctx", "text_state", "text_head", "text_layer", "mels", "ftype"),
)
_N_STAMPS = 1501  # steps of 20 milliseconds, the last tokens of the vocabulary
_BETWEEN = ("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
_ONE_LANGUAGE = 51864  # tokens of models that know English alone
_EPS = float(np.float32(1e-5))
_ROLES = {
    "attn_ln": "{norm}",
    "attn.query": "attn_q",
    "attn.key": "attn_k",
    "attn.value": "attn_v",
    "attn.out": "{out}",
    "cross_attn_ln": "cross_attn_norm",
    "cross_attn.query": "cross_attn_q",
    "cross_attn.key": "cross_attn_k",
    "cross_attn.value": "cross_attn_v",
    "cross_attn.out": "cross_attn_o",
    "mlp_ln": "{ffn_norm}",
    "mlp.0": "ffn_up",
    "mlp.2": "ffn_down",
}
_SIDES = {
    "encoder": ("a", {"norm": "ln1", "out": "attn_out", "ffn_norm": "ln2"}),
    "decoder": ("dec", {"norm": "attn_norm", "out": "attn_o", "ffn_norm": "ffn_norm"}),
}
_WHOLE = {
    "encoder.conv1.weight": "a.conv1d.1.weight",
    "encoder.conv1.bias": "a.conv1d.1.bias",
    "encoder.conv2.weight": "a.conv1d.2.weight",
    "encoder.conv2.bias": "a.conv1d.2.bias",
    "encoder.positional_embedding": "a.position_embd.weight",
    "encoder.ln_post.weight": "a.post_ln.weight",
    "encoder.ln_post.bias": "a.post_ln.bias",
    "decoder.positional_embedding": "position_embd.weight",
    "decoder.token_embedding.weight": "token_embd.weight",
    "decoder.ln.weight": "dec.output_norm.weight",
    "decoder.ln.bias": "dec.output_norm.bias",
}

_ALIGNMENT = 32
_TOKEN_BYTES = 256  # of a token (the longest known has 128): finding its merges takes time by the square of its length


class WhisperFile(NamedTuple):
    """A file that was read: metadata, and the tensors of decoder and encoder."""

    kv: dict[str, Any]
    tensors: dict[str, Tensor]


class _Bytes:
    """The contents of a file, read one after the other. Raises GGUFError where they end too early."""

    def __init__(self, path: str) -> None:
        self.path, self.data, self.at = path, np.fromfile(path, np.uint8), 0
        self.data.flags.writeable = False

    def fail(self, text: str) -> GGUFError:
        return GGUFError(f"{self.path}: {text} (at byte {self.at})")

    def take(self, n: int, what: str) -> Bytes:
        if not 0 <= n <= self.data.size - self.at:
            raise self.fail(f"the file ends within {what}")
        self.at += n
        return self.data[self.at - n : self.at]

    def ints(self, n: int, what: str) -> tuple[int, ...]:
        return struct.unpack(f"<{n}i", self.take(4 * n, what).tobytes())

    @property
    def rest(self) -> int:
        return self.data.size - self.at


def read_whisper(path: str | os.PathLike[str], vocab_only: bool = False) -> WhisperFile:
    """Read a file of whisper.cpp. Raises GGUFError for a damaged one, ModelError for sizes that make no model."""
    f = _Bytes(os.fspath(path))
    f.take(4, "the magic")
    n: dict[str, int] = dict(zip(_SIZES, f.ints(len(_SIZES), "the sizes"), strict=True))
    for name, size in n.items():
        if name != "ftype" and not 0 < size <= (MAX_LAYERS if name.endswith("layer") else limits.TOKENIZER_TOKENS):
            raise f.fail(f"n_{name} = {size} makes no model")
    n_mel, n_freq = f.ints(2, "the mel filters")
    if n_mel != n["mels"] or not 0 < n_freq <= 1 << 16:
        raise f.fail(f"there are {n_mel} mel filters of {n_freq} frequencies, for {n['mels']} mels")
    f.take(4 * n_mel * n_freq, "the mel filters")  # those that `media.sound` computes
    kv = {**_decoder_keys(n), **_tokens(f, n)}
    if vocab_only:
        return WhisperFile(kv, {})
    return WhisperFile(kv, _tensors(f))


def write_gguf(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Write a file of whisper.cpp as a GGUF, with its tensors as they are. Raises as `read_whisper`, and GGUFError when
    `out` cannot be written."""
    refuse_source(path, out)
    file = read_whisper(path)
    infos: list[TensorInfo] = [(t.name, t.dtype, t.ne[: rank_of(t.ne)]) for t in file.tensors.values()]
    records = [kv_record(key, np.float32(v) if isinstance(v, float) else v) for key, v in file.kv.items()]
    try:
        with GGUFOut(out, records, infos, _ALIGNMENT) as written:
            for t in file.tensors.values():
                written.write_tensor([t.raw()])
    except OSError as e:
        raise GGUFError(f"{os.fspath(out)}: cannot be written: {e.strerror}") from e


def _decoder_keys(n: Mapping[str, int]) -> dict[str, Any]:
    return {
        "general.architecture": "whisper",
        "general.type": "model",
        "whisper.vocab_size": n["vocab"],
        "whisper.context_length": n["text_ctx"],
        "whisper.encoder_context_length": n["audio_ctx"],
        "whisper.embedding_length": n["text_state"],
        "whisper.block_count": n["text_layer"],
        "whisper.feed_forward_length": 4 * n["text_state"],
        "whisper.attention.head_count": n["text_head"],
        "whisper.attention.layer_norm_epsilon": _EPS,
        "whisper.encoder.block_count": n["audio_layer"],
        "whisper.encoder.feed_forward_length": 4 * n["audio_state"],
        "whisper.encoder.attention.head_count": n["audio_head"],
        "whisper.encoder.num_mel_bins": n["mels"],
        "whisper.max_initial_timestamp_index": 50,
    }


# -- tokens -----------------------------------------------------------------------------------------------------------


def _alphabet() -> list[str]:
    """The characters that stand for bytes in GPT-2's tokens."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]


def _tokens(f: _Bytes, n: Mapping[str, int]) -> dict[str, Any]:
    """The keys of the tokenizer. The file has the tokens of text. Those that follow have places that the number of all
    tokens tells: the end and the start of a text, languages, tasks, and timestamps."""
    (n_file,) = f.ints(1, "the number of tokens")
    if not 0 < n_file <= n["vocab"]:
        raise f.fail(f"there are {n_file} tokens of text among {n['vocab']}")
    plain: list[bytes] = []
    for i in range(n_file):
        (size,) = f.ints(1, f"token {i}")
        if size > _TOKEN_BYTES:
            raise f.fail(f"token {i} has {size} bytes; up to {_TOKEN_BYTES} are read")
        plain.append(f.take(size, f"token {i}").tobytes())
    end = n_file if n["vocab"] < _ONE_LANGUAGE else 50256 + (n["vocab"] > _ONE_LANGUAGE)
    first_stamp = n["vocab"] - _N_STAMPS
    n_languages = first_stamp - len(_BETWEEN) - end - 2
    if end > n_file or not 0 <= n_languages <= len(LANGUAGES):
        raise f.fail(f"{n['vocab']} tokens, {n_file} of them of text, leave no places for the special ones")
    codes = list(LANGUAGES)[:n_languages]
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in codes), *_BETWEEN]
    stamps = [f"<|{i * 0.02:.2f}|>" for i in range(_N_STAMPS)]
    alphabet = _alphabet()
    texts = ["".join(alphabet[b] for b in token) for token in plain[:end]]
    types = [1] * end + [3] * (len(special) + len(stamps))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*texts, *special, *stamps],
        "tokenizer.ggml.token_type": np.asarray(types, np.int32),
        "tokenizer.ggml.merges": _merges(plain[:end], texts),
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
        "whisper.decoder_start_token_id": end + 1,
        "whisper.is_multilingual": n["vocab"] != _ONE_LANGUAGE,
    }


def _merges(plain: list[bytes], texts: list[str]) -> list[str]:
    """The merges that make the tokens. Tokens are numbered in the order in which merging made them, so a token is made
    of the two parts that earlier merges leave of it."""
    ranks = {token: i for i, token in enumerate(plain)}
    none = len(plain)
    found: list[str] = []
    for rank, token in enumerate(plain):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, none) for a, b in pairwise(parts)]
            least = min(pairs)
            if least >= rank:
                break
            i = pairs.index(least)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2 and all(p in ranks for p in parts):
            found.append(f"{texts[ranks[parts[0]]]} {texts[ranks[parts[1]]]}")
    return found


# -- tensors ----------------------------------------------------------------------------------------------------------


def _tensors(f: _Bytes) -> dict[str, Tensor]:
    made: dict[str, tuple[str, DType, Ne, Buffer, int]] = {}
    while f.rest:
        n_dims, size, kind = f.ints(3, "a tensor's header")
        if not 0 < n_dims <= 4 or not 0 < size <= 256:
            raise f.fail(f"a tensor of {n_dims} dimensions, with a name of {size} bytes")
        shape = f.ints(n_dims, "a tensor's shape")
        theirs = f.take(size, "a tensor's name").tobytes().decode("utf-8", "replace")
        dtype = next((t for t in DType if t.gguf_id == kind), None)
        if dtype is None or min(shape) < 1 or shape[0] % dtype.block_size:
            raise f.fail(f"the tensor {theirs!r:.80} has the type {kind} and the shape {list(shape)}")
        ne = full_ne(shape)
        data = f.take(dtype.row_size(ne[0]) * ne[1] * ne[2] * ne[3], f"the tensor {theirs}")
        name = _name_of(theirs)
        if name is None or name in made:
            raise ModelError(f"{f.path}: the tensor {theirs!r:.80} is {'not known' if name is None else 'there twice'}")
        buffer = Buffer.allocate(data.size)
        buffer.memory[:] = data
        buffer.memory.flags.writeable = False
        made[name] = name, dtype, ne, buffer, 0
    return bound(made.values())


def _name_of(theirs: str) -> str | None:
    """The name in a GGUF of a tensor of the file."""
    if theirs in _WHOLE:
        return _WHOLE[theirs]
    side, blocks, no, part = (*theirs.split(".", 3), "", "", "")[:4]
    if side not in _SIDES or blocks != "blocks" or not (no.isascii() and no.isdecimal()):
        return None
    role, _, suffix = part.rpartition(".")
    begin, names = _SIDES[side]
    if role not in _ROLES or suffix not in ("weight", "bias"):
        return None
    return f"{begin}.blk.{int(no)}.{_ROLES[role].format(**names)}.{suffix}"
