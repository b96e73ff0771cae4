"""Files: models, what lies beside them, and what pyggml itself has saved."""

# ruff: noqa: E501  (seeds are shown as they are)

from __future__ import annotations

import io
import json
import struct
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
from pyggml.models.memory.state_file import MAGIC, digest

import pyggml as gg
from pyggml.errors import GGUFError, KVCacheFull, ModelError, StateError
from pyggml.gguf_io.read import open_gguf
from pyggml.gguf_io.split import open_model, split_model
from pyggml.hf.config import Config
from pyggml.hf.folder import bind_folder, open_hf_folder
from pyggml.hf.safetensors import INDEX, SINGLE, header_of, open_file, open_folder
from pyggml.hf.sentencepiece import SentencePiece, build
from pyggml.hf.tokenizer import read_tokenizer
from pyggml.inspect.trace import Trace, load_trace, save_trace
from pyggml.llm.adapters.control import load_control_vector
from pyggml.llm.adapters.lora import load_lora_gguf
from pyggml.llm.adapters.peft import load_lora_peft
from pyggml.llm.evaluate.logits_file import LogitsFile
from pyggml.llm.ggml_whisper import read_whisper
from pyggml.llm.quantize.imatrix import load_imatrix
from pyggml.llm.state.save_load import load_seq_bytes, load_state_bytes, seq_bytes, state_bytes
from pyggml.llm.vocab import Vocab

from ..gguf_files import write_all
from ..llm.adapters.make import halves, write_lora
from .changes import (
    change_bytes,
    change_gguf,
    change_json,
    change_parts,
    change_protobuf,
    change_safetensors,
    change_zip,
)
from .harness import folder, harness, put_file, small_gguf, small_model

TEXT = "Once upon a time, <s> \N{SNOWMAN} \x00"
KEYS = "general.alignment general.architecture split.no split.count split.tensors.count tokenizer.ggml.model"


def _headers() -> Iterable[bytes]:
    """GGUF files of each type of value, and of a tensor of some types."""
    for kind in range(4):
        w = gguf_package.GGUFWriter(folder() / "header.gguf", "llama")
        w.add_uint8("a", 1)
        w.add_float64("b", 2.0)
        w.add_bool("c", True)
        w.add_array("d", [[1, 2, 3], ["x", "yy", ""], [0.5, 1.5], [True, False]][kind])
        w.add_custom_alignment(32 << kind)
        w.add_tensor("t", np.ones((2, 32), [np.float32, np.float16, np.int8, np.int32][kind]))
        write_all(w)
        yield (folder() / "header.gguf").read_bytes()


@harness(
    "pyggml.gguf_io.read",
    "pyggml.native.vocab.strings",
    seeds=_headers,
    allowed=GGUFError,
    words=KEYS,
    change=change_gguf,
)
def gguf(data: bytes) -> None:
    file = open_gguf(put_file("x.gguf", data), use_mmap=len(data) % 2 == 0)
    for name, t in file.tensors.items():
        assert len(file.tensor_bytes(name)) == t.nbytes <= len(data)


def _parts() -> Iterable[bytes]:
    path = folder() / "whole.gguf"
    path.write_bytes(small_gguf())
    parts = [Path(part).read_bytes() for part in split_model(path, str(folder() / "cut"), max_tensors=16)]
    yield struct.pack("<I", len(parts[0])) + b"".join(parts)


def _change_part(rng: np.random.Generator, data: bytes) -> bytes:
    n = int.from_bytes(data[:4], "little")
    first, second = data[4 : 4 + n], data[4 + n :]
    if rng.integers(2):
        first = change_gguf(rng, first)
    else:
        second = change_gguf(rng, second)
    return struct.pack("<I", len(first)) + first + second


@harness("pyggml.gguf_io.split", seeds=_parts, allowed=GGUFError, words=KEYS, change=_change_part)
def split(data: bytes) -> None:
    """The length of the first part, and both."""
    n = int.from_bytes(data[:4], "little")
    put_file("s-00002-of-00002.gguf", data[4 + n :])
    file = open_model(put_file("s-00001-of-00002.gguf", data[4 : 4 + n]))
    for name, t in file.tensors.items():
        assert len(file.tensor_bytes(name)) == t.nbytes <= len(data)


@harness(
    "pyggml.llm.model", "pyggml.models.hparams", "pyggml.models.metadata", "pyggml.models.llama", "pyggml.gguf_io.bind",
    seeds=lambda: [small_gguf()], change=change_gguf, seconds=10.0,
)  # fmt: skip
def model(data: bytes) -> None:
    """A model that is loaded, and decodes."""
    m = gg.load_model(put_file("m.gguf", data), repack=len(data) % 2 == 0)
    with m:
        m.detokenize(m.tokenize(TEXT))
        with m.new_context(n_ctx=16, n_threads=1) as ctx:
            ctx.decode([1, 2, 5])
            assert ctx.logits.shape == (1, m.hparams.n_vocab)


# -- folders of Hugging Face ------------------------------------------------------------------------------------------


def _safetensors(n: int = 2) -> bytes:
    tensors = [("a", "F32", (2, 3)), ("b.weight", "BF16", (4,)), ("c", "I64", ()), ("d", "F8_E4M3", (1, 2, 1))][:n]
    return header_of(tensors) + bytes(24 + 8 * (n > 1) + 8 * (n > 2) + 2 * (n > 3))


@harness(
    "pyggml.hf.safetensors", seeds=lambda: map(_safetensors, range(5)), allowed=ModelError, change=change_safetensors,
    words='"dtype" "shape" "data_offsets" "__metadata__" "F64" "F16" "U8" "BOOL" 9223372036854775807',
)  # fmt: skip
def safetensors(data: bytes) -> None:
    for t in open_file(put_file("x.safetensors", data)).values():
        assert t.stored().nbytes == t.nbytes <= len(data)
        t.release()


def _indices() -> Iterable[bytes]:
    yield b'{"metadata": {}, "weight_map": {"a": "one.safetensors", "b.weight": "two.safetensors"}}'
    yield b'{"weight_map": {"a": "one.safetensors", "b.weight": "../up.safetensors", "c": "gone.safetensors"}}'


@harness(
    "pyggml.hf.safetensors",
    seeds=_indices,
    allowed=ModelError,
    words=".. / weight_map one.safetensors",
    change=change_json,
)
def index(data: bytes) -> None:
    """An index of shards, beside two of them."""
    at = folder() / "sharded"
    if not at.exists():
        put_file("sharded/one.safetensors", _safetensors(1))
        put_file("sharded/two.safetensors", _safetensors(2))
    put_file(f"sharded/{INDEX}", data)
    for t in open_folder(at).values():
        t.stored()


FEW_TOKENS = {"TOKENIZER_TOKENS": 1 << 12}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 9,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 64},
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
BPE: dict[str, Any] = {
    "added_tokens": [{"id": 8, "content": "<s>", "special": True, "lstrip": False, "normalized": False}],
    "normalizer": {"type": "Sequence", "normalizers": []},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {"<s>": {"id": "<s>", "ids": [8], "tokens": ["<s>"]}}},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "\u0120": 3, "c": 4, "\u0120a": 5, "d": 6, "e": 7}, "merges": ["a b", ["\u0120", "a"]], "unk_token": None},
}  # fmt: skip
UNIGRAM = {
    "added_tokens": [],
    "normalizer": {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}],
    },
    "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    "decoder": {"type": "Metaspace", "replacement": "\u2581"},
    "model": {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["<unk>", 0.0], ["\u2581", -1.0], ["a", -2.0], ["\u2581a", -1.5]],
    },
}
WORD_PIECE = {
    "added_tokens": [{"id": 0, "content": "[UNK]", "special": True}],
    "normalizer": {"type": "BertNormalizer", "lowercase": True, "strip_accents": None},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 1], "cls": ["[CLS]", 2]},
    "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    | {"vocab": {"[UNK]": 0, "[SEP]": 1, "[CLS]": 2, "a": 3, "##b": 4}},
}
TYPES = (
    "llama qwen2 qwen3_moe gemma2 gemma3 gemma3n phi3 mistral mixtral deepseek_v3 bert t5 mamba rwkv gpt2 falcon bloom mpt "
    "gpt_oss llama4 jamba granitemoehybrid nemotron_h olmo2 cohere2 exaone4 glm4 kimi_linear lfm2 whisper modernbert minimax"
)


def _configs() -> Iterable[bytes]:
    yield json.dumps(CONFIG).encode()
    for kind in TYPES.split():
        yield json.dumps({**CONFIG, "model_type": kind}).encode()


@harness(
    "pyggml.hf.config", "pyggml.hf.metadata", "pyggml.hf.folder", "pyggml.hf.families", seeds=_configs, allowed=ModelError,
    words=TYPES, change=change_json, limits=FEW_TOKENS,
)  # fmt: skip
def config(data: bytes) -> None:
    """A config.json with a tokenizer and without weights."""
    at = folder() / "configured"
    if not at.exists():
        put_file("configured/tokenizer.json", json.dumps(BPE).encode())
    put_file("configured/config.json", data)
    Vocab.from_gguf(open_hf_folder(at, vocab_only=True).kv)


@cache
def _checkpoint() -> Path:
    """The weights that `CONFIG` describes."""
    shapes = {"embed_tokens": (9, 8), "norm": (8,)}
    inner = {
        "input_layernorm": (8,),
        "post_attention_layernorm": (8,),
        "self_attn.q_proj": (8, 8),
        "self_attn.k_proj": (4, 8),
    }
    inner |= {"self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8), "mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8)}
    shapes |= {f"layers.0.{name}": shape for name, shape in inner.items()} | {"layers.0.mlp.down_proj": (8, 16)}
    head = header_of((f"model.{name}.weight", "F32", shape) for name, shape in shapes.items())
    put_file("checkpoint/tokenizer.json", json.dumps(BPE).encode())
    n = sum(4 * int(np.prod(shape)) for shape in shapes.values())
    return put_file(f"checkpoint/{SINGLE}", head + bytes(n)).parent


@harness(
    "pyggml.hf.folder", "pyggml.hf.tensors", "pyggml.hf.family", seeds=lambda: [json.dumps({k: v for k, v in CONFIG.items() if k != "quantization_config"}).encode()],
    allowed=ModelError, words=TYPES, change=change_json, limits=FEW_TOKENS,
)  # fmt: skip
def checkpoint(data: bytes) -> None:
    """A config.json beside weights: every tensor is made."""
    at = _checkpoint()
    put_file("checkpoint/config.json", data)
    for t in bind_folder(open_hf_folder(at)).values():
        t.tobytes()


def _read_tokenizer(name: str) -> None:
    at = folder() / name
    if not (at / "config.json").exists():
        put_file(f"{name}/config.json", json.dumps(CONFIG).encode())
    vocab = Vocab.from_gguf(read_tokenizer(at, Config.of_folder(at)))
    ids = vocab.tokenize(TEXT, parse_special=True)
    assert all(0 <= i < vocab.n_tokens for i in ids)
    vocab.detokenize(ids)


@harness(
    "pyggml.hf.tokenizer", "pyggml.hf.pretokenizers", "pyggml.hf.parts", allowed=ModelError, change=change_json, limits=FEW_TOKENS,
    seeds=lambda: [json.dumps(x).encode() for x in (BPE, UNIGRAM, WORD_PIECE)],
    words="BPE Unigram WordPiece ByteLevel Metaspace Sequence Digits Punctuation Split NFKC ByteFallback byte_fallback",
)  # fmt: skip
def tokenizer(data: bytes) -> None:
    """A tokenizer.json."""
    put_file("tokenizer/tokenizer.json", data)
    _read_tokenizer("tokenizer")


def _pieces() -> Iterable[bytes]:
    pieces = [
        ("<unk>", 0.0, 2),
        ("<s>", 0.0, 3),
        ("\u2581", -1.0, 1),
        ("a", -2.0, 1),
        ("\u2581a", -1.5, 1),
        ("b", -3.0, 4),
    ]
    for kind, charsmap in ((1, b""), (2, b"")):
        yield build(SentencePiece(pieces, kind, charsmap, roles={"unk": 0, "bos": 1}))


@harness("pyggml.hf.sentencepiece", seeds=_pieces, allowed=ModelError, change=change_protobuf)
def sentencepiece(data: bytes) -> None:
    """A tokenizer.model."""
    put_file("pieces/tokenizer.model", data)
    _read_tokenizer("pieces")


# -- adapters, measurements, states -----------------------------------------------------------------------------------


def _adapter() -> Iterable[bytes]:
    for names in (["blk.0.attn_q.weight"], ["blk.0.ffn_up.weight", "token_embd.weight"]):
        yield write_lora(folder() / "adapter.gguf", halves(small_model(), names, 2)).read_bytes()


@harness(
    "pyggml.llm.adapters.lora",
    "pyggml.llm.adapters.active",
    seeds=_adapter,
    change=change_gguf,
    words="lora_a lora_b adapter.lora.alpha",
)
def lora(data: bytes) -> None:
    """A LoRA in a GGUF file, which is put on a model."""
    found = load_lora_gguf(put_file("lora.gguf", data))
    with small_model().new_context(n_ctx=8, n_threads=1) as ctx:
        ctx.set_loras([(found, 0.5)])
        ctx.decode([3])


def _directions() -> Iterable[bytes]:
    w = gguf_package.GGUFWriter(folder() / "control.gguf", "controlvector")
    w.add_string("controlvector.model_hint", "llama")
    w.add_tensor("direction.1", np.ones(8, np.float32))
    write_all(w)
    yield (folder() / "control.gguf").read_bytes()


@harness("pyggml.llm.adapters.control", seeds=_directions, change=change_gguf, words="direction. controlvector")
def control(data: bytes) -> None:
    """A control vector."""
    vector = load_control_vector(put_file("c.gguf", data))
    with small_model().new_context(n_ctx=8, n_threads=1) as ctx:
        ctx.set_control_vector(vector)
        ctx.decode([3])


def _peft() -> Iterable[bytes]:
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    head = header_of([(f"{module}.lora_A.weight", "F32", (2, 8)), (f"{module}.lora_B.weight", "F32", (8, 2))])
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"^a.*$": 8}}
    yield json.dumps(about).encode() + b"\n\n" + head + bytes(128)
    module = module.replace("self_attn.q_proj", "mlp.down_proj")
    head = header_of([(f"{module}.lora_A.weight", "F32", (2, 8)), (f"{module}.lora_B.weight", "F32", (8, 2))])
    yield json.dumps({**about, "use_rslora": True, "use_dora": True}).encode() + b"\n\n" + head + bytes(128)


@harness(
    "pyggml.llm.adapters.peft", seeds=_peft, allowed=ModelError, change=change_parts(b"\n\n", change_json, change_safetensors),
    words="lora_A lora_B lora_embedding_A lora_magnitude_vector rank_pattern alpha_pattern self_attn mlp lm_head use_dora (a*)*b",
)  # fmt: skip
def peft(data: bytes) -> None:
    """The config and the weights of a PEFT folder, with an empty line between them."""
    about, _, weights = data.partition(b"\n\n")
    put_file("peft/adapter_model.safetensors", weights)
    at = put_file("peft/adapter_config.json", about).parent
    load_lora_peft(at, small_model()).check(small_model())


def _matrices() -> Iterable[bytes]:
    names = ["blk.0.attn_q.weight", "x"]
    entries = b"".join(struct.pack(f"<i{len(n)}sii8f", len(n), n.encode(), 3, 8, *np.arange(8.0)) for n in names)
    yield struct.pack("<i", 2) + entries
    w = gguf_package.GGUFWriter(folder() / "i.gguf", "imatrix")
    for name in names:
        w.add_tensor(f"{name}.in_sum2", np.ones((2, 8), np.float32))
        w.add_tensor(f"{name}.counts", np.ones((2, 1), np.float32))
    write_all(w)
    yield (folder() / "i.gguf").read_bytes()


@harness(
    "pyggml.llm.quantize.imatrix",
    seeds=_matrices,
    allowed=GGUFError,
    words="GGUF .in_sum2 .counts imatrix.datasets",
    change=change_gguf,
)
def imatrix(data: bytes) -> None:
    for values in load_imatrix(put_file("i.dat", data)).values():
        assert np.isfinite(values).all() and values.nbytes <= 8 * len(data)


@cache
def _context() -> gg.LlamaContext:
    return small_model().new_context(n_ctx=16, n_threads=1, n_seq_max=2)


def _states() -> Iterable[bytes]:
    ctx = _context()
    ctx.decode([1, 4, 7])
    for data in (state_bytes(ctx, [1, 4, 7]), seq_bytes(ctx, 0)):
        n = int.from_bytes(data[12:16], "little")
        yield data
        yield data[24 : 24 + n] + b"\n" + data[24 + n : -32]


@harness(
    "pyggml.llm.state.save_load", "pyggml.models.memory.state_file", "pyggml.models.memory.kv_cache", seeds=_states,
    allowed=(StateError, KVCacheFull), change=change_parts(b"\n", change_json, change_bytes), words="context sequence cells seqs head drift outputs tokens caches states",
)  # fmt: skip
def state(data: bytes) -> None:
    """A saved context, or a saved sequence: the file, or its header, a new line, and the rest, from which a file with
    right lengths and checksum is made. The context can be used whatever came of it."""
    ctx = _context()
    if not data.startswith(MAGIC):
        head, _, body = data.partition(b"\n")
        data = MAGIC + struct.pack("<IIQ", 1, len(head), 24 + len(head) + len(body) + 32) + head + body
        data += digest([data])
    try:
        if b'"sequence"' in data[:2000]:
            load_seq_bytes(ctx, data, 1)
        else:
            load_state_bytes(ctx, data)
    finally:
        assert len(ctx.logits) == len(ctx.outputs)
        ctx.memory.clear()
        ctx.decode([3])


def _traces() -> Iterable[bytes]:
    path = folder() / "t.npz"
    save_trace(Trace({"a-0": np.ones((2, 3), np.float32), "b": np.arange(3)}, {"tokens": [1, 2]}), path)
    yield path.read_bytes()
    out = io.BytesIO()
    np.savez_compressed(out, a=np.ones(5, np.float16), b=np.float64(2))
    yield out.getvalue()


@harness(
    "pyggml.inspect.trace",
    seeds=_traces,
    allowed=GGUFError,
    change=change_zip,
    words="PK descr fortran_order manifest.json .npy <f4 |O",
)
def trace(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # zipfile's, of names that are there twice
        load_trace(put_file("t.npz", data))


@harness(
    "pyggml.llm.evaluate.logits_file", allowed=GGUFError,
    seeds=lambda: [b"_logits_" + struct.pack("<III", 4, 3, 1) + bytes(16) + struct.pack("<ff4H", 1, -2, 1, 2, 3, 0)],
)  # fmt: skip
def logits(data: bytes) -> None:
    """A file of log-probabilities."""
    file = LogitsFile(put_file("l.dat", data))
    assert file.tokens.size <= len(data)
    for chunk in range(file.n_chunks):
        for row in file.log_probs(chunk):
            assert row.size <= len(data)


def _whisper() -> Iterable[bytes]:
    sizes = [3 + 1608, 4, 8, 2, 1, 4, 8, 2, 1, 80, 1]
    data = struct.pack("<I11i", 0x67676D6C, *sizes) + struct.pack("<2i", 80, 3) + bytes(4 * 240) + struct.pack("<i", 3)
    data += b"".join(struct.pack("<i", 1) + x for x in (b"a", b"b", b" "))
    name = b"decoder.positional_embedding"
    yield data + struct.pack("<3i2i", 2, len(name), 0, 8, 4) + name + bytes(4 * 32)


@harness(
    "pyggml.llm.ggml_whisper",
    seeds=_whisper,
    allowed=(GGUFError, ModelError),
    words="encoder. decoder. blocks. attn.query.weight .bias",
)
def whisper(data: bytes) -> None:
    """A file of whisper.cpp."""
    read_whisper(put_file("w.bin", data), vocab_only=len(data) % 4 == 0)
