"""The llama that `train_tales.py` trains: its sizes, and a GGUF file of it with random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import sentencepiece as spm

BOS, EOS = 1, 2


@dataclass(frozen=True)
class HParams:
    """Sizes of the model, under llama.cpp's names."""

    n_vocab: int = 2048
    n_ctx: int = 512
    n_embd: int = 256  # a multiple of 256, as n_ff: every block type fits
    n_layer: int = 6
    n_head: int = 8
    n_head_kv: int = 4
    n_ff: int = 512
    rms_eps: float = 1e-5
    rope_base: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


def random_weights(hp: HParams, rng: np.random.Generator) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The weights of a model that has learned nothing, by GGUF name. Its output matrix is the embedding (tied). The
    deeper the model, the smaller the first additions to the residual stream."""
    n_kv, std = hp.n_head_kv * hp.head_dim, 0.02
    added = std * (2 * hp.n_layer) ** -0.5
    ones = np.ones(hp.n_embd, np.float32)

    def normal(n_out: int, n_in: int, std: float = std) -> npt.NDArray[np.float32]:
        return rng.standard_normal((n_out, n_in), np.float32) * np.float32(std)

    yield "token_embd.weight", normal(hp.n_vocab, hp.n_embd)
    for il in range(hp.n_layer):
        yield f"blk.{il}.attn_norm.weight", ones
        yield f"blk.{il}.attn_q.weight", normal(hp.n_embd, hp.n_embd)
        yield f"blk.{il}.attn_k.weight", normal(n_kv, hp.n_embd)
        yield f"blk.{il}.attn_v.weight", normal(n_kv, hp.n_embd)
        yield f"blk.{il}.attn_output.weight", normal(hp.n_embd, hp.n_embd, added)
        yield f"blk.{il}.ffn_norm.weight", ones
        yield f"blk.{il}.ffn_gate.weight", normal(hp.n_ff, hp.n_embd)
        yield f"blk.{il}.ffn_up.weight", normal(hp.n_ff, hp.n_embd)
        yield f"blk.{il}.ffn_down.weight", normal(hp.n_embd, hp.n_ff, added)
    yield "output_norm.weight", ones


def write_random(
    path: Path, hp: HParams, sp: spm.SentencePieceProcessor, about: Mapping[str, str], rng: np.random.Generator
) -> None:
    """Write a GGUF file of arch `llama`, F32, with random weights and the vocabulary; `about` holds general.*
    strings."""
    w = gguf.GGUFWriter(path, "llama")
    for key, value in about.items():
        w.add_string(f"general.{key}", value)
    w.add_type(gguf.GGUFType.MODEL)
    w.add_file_type(gguf.LlamaFileType.ALL_F32)
    w.add_languages(["en"])
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_vocab_size(hp.n_vocab)
    w.add_context_length(hp.n_ctx)
    w.add_embedding_length(hp.n_embd)
    w.add_block_count(hp.n_layer)
    w.add_feed_forward_length(hp.n_ff)
    w.add_head_count(hp.n_head)
    w.add_head_count_kv(hp.n_head_kv)
    w.add_layer_norm_rms_eps(hp.rms_eps)
    w.add_rope_dimension_count(hp.head_dim)
    w.add_rope_freq_base(hp.rope_base)
    _add_vocab(w, sp)
    for name, weight in random_weights(hp, rng):
        w.add_tensor(name, weight)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _add_vocab(w: gguf.GGUFWriter, sp: spm.SentencePieceProcessor) -> None:
    types: list[gguf.TokenType] = []
    for i in range(sp.GetPieceSize()):
        if sp.IsUnknown(i):
            types.append(gguf.TokenType.UNKNOWN)
        elif sp.IsControl(i):
            types.append(gguf.TokenType.CONTROL)
        elif sp.IsByte(i):
            types.append(gguf.TokenType.BYTE)
        else:
            types.append(gguf.TokenType.NORMAL)
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list([sp.IdToPiece(i) for i in range(len(types))])
    w.add_token_scores([sp.GetScore(i) for i in range(len(types))])
    w.add_token_types(types)
    w.add_bos_token_id(BOS)
    w.add_eos_token_id(EOS)
    w.add_unk_token_id(0)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    w.add_add_space_prefix(True)
