# pyright: basic, reportMissingImports=false
"""The llama architecture in PyTorch, small enough to train on a CPU, and its way into a GGUF file.

Only `train_tales.py` uses it: nothing of pyggml needs PyTorch to run a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import sentencepiece as spm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the adjacent pairs (x[2i], x[2i+1]) of x [B, H, T, D]; cos and sin are [T, D/2]."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)


@dataclass(frozen=True)
class Dropout:
    """Sets about a share p of x to zero. It has its own generator, so that threads draw the same numbers in any
    order."""

    p: float
    rng: torch.Generator

    def __call__(self, x: Tensor) -> Tensor:
        bits = torch.empty(x.numel() // 8, dtype=torch.int64).random_(-(2**63), None, generator=self.rng)
        least = round(self.p * 256)  # one random byte an element: p in steps of 1/256
        return x * (bits.view(torch.uint8).view(x.shape) >= least) * (256 / (256 - least))


class Block(nn.Module):
    """One layer: attention and SwiGLU, both with an RMS norm before and a residual around."""

    def __init__(self, hp: HParams) -> None:
        super().__init__()
        self.hp = hp
        n_kv = hp.n_head_kv * hp.head_dim
        self.attn_norm = nn.RMSNorm(hp.n_embd, eps=hp.rms_eps)
        self.attn_q = nn.Linear(hp.n_embd, hp.n_embd, bias=False)
        self.attn_k = nn.Linear(hp.n_embd, n_kv, bias=False)
        self.attn_v = nn.Linear(hp.n_embd, n_kv, bias=False)
        self.attn_output = nn.Linear(hp.n_embd, hp.n_embd, bias=False)
        self.ffn_norm = nn.RMSNorm(hp.n_embd, eps=hp.rms_eps)
        self.ffn_gate = nn.Linear(hp.n_embd, hp.n_ff, bias=False)
        self.ffn_up = nn.Linear(hp.n_embd, hp.n_ff, bias=False)
        self.ffn_down = nn.Linear(hp.n_ff, hp.n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, drop: Callable[[Tensor], Tensor]) -> Tensor:
        hp = self.hp
        b, t, _ = x.shape
        h = self.attn_norm(x)
        q = self.attn_q(h).view(b, t, hp.n_head, hp.head_dim).transpose(1, 2)  # [B, n_head, T, head_dim]
        k = self.attn_k(h).view(b, t, hp.n_head_kv, hp.head_dim).transpose(1, 2)
        v = self.attn_v(h).view(b, t, hp.n_head_kv, hp.head_dim).transpose(1, 2)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = self.attn_output(h.transpose(1, 2).reshape(b, t, hp.n_embd))
        x = x + drop(h)
        h = self.ffn_norm(x)
        h = self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))
        return x + drop(h)


class Llama(nn.Module):
    """The whole model; its output matrix is the embedding (tied). Parameters bear their GGUF names."""

    def __init__(self, hp: HParams) -> None:
        super().__init__()
        self.hp = hp
        self.token_embd = nn.Embedding(hp.n_vocab, hp.n_embd)
        self.blk = nn.ModuleList(Block(hp) for _ in range(hp.n_layer))
        self.output_norm = nn.RMSNorm(hp.n_embd, eps=hp.rms_eps)
        freq = hp.rope_base ** (-torch.arange(0, hp.head_dim, 2, dtype=torch.float64) / hp.head_dim)
        angle = torch.arange(hp.n_ctx, dtype=torch.float64)[:, None] * freq
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        for name, w in self.named_parameters():
            if w.ndim == 2:  # the deeper the model, the smaller the first additions to the residual stream
                into_residual = "attn_output" in name or "ffn_down" in name
                nn.init.normal_(w, std=0.02 * (2 * hp.n_layer) ** -0.5 if into_residual else 0.02)

    def forward(self, tokens: Tensor, drop: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """Logits [B, T, n_vocab] of tokens [B, T], T <= n_ctx."""
        x = drop(self.token_embd(tokens))
        t = tokens.shape[1]
        for block in self.blk:
            x = block(x, self.cos[:t], self.sin[:t], drop)
        return F.linear(self.output_norm(x), self.token_embd.weight)


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal (Jordan et al., 2024), scaled so that its steps are as large as AdamW's.

    `torch.optim.Muon` computes in bfloat16, which takes ten times as long on a CPU that has no such instructions.
    """

    def __init__(self, params: Sequence[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                step = _orthogonal(p.grad.lerp(mean, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(step, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def _orthogonal(g: Tensor) -> Tensor:
    """About the nearest matrix to g whose singular values are 1: five steps of a quintic Newton-Schulz iteration."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        xx = x @ x.T
        x = 3.4445 * x + (-4.7750 * xx + 2.0315 * xx @ xx) @ x
    return x.T if g.shape[0] > g.shape[1] else x


@torch.inference_mode()
def sample(model: Llama, prompt: Sequence[int], n: int, temperature: float, rng: torch.Generator) -> Iterator[int]:
    """Yield up to n tokens after the prompt, until EOS or the end of the context."""
    tokens = list(prompt)
    for _ in range(min(n, model.hp.n_ctx - len(tokens))):
        logits = model(torch.tensor([tokens]))[0, -1] / temperature
        token = int(torch.multinomial(logits.float().softmax(-1), 1, generator=rng))
        if token == EOS:
            return
        tokens.append(token)
        yield token


def to_gguf(
    model: Llama, sp: spm.SentencePieceProcessor, path: Path, file_type: gguf.LlamaFileType, about: dict[str, str]
) -> None:
    """Write model and vocabulary as a GGUF file of arch `llama`; `about` holds general.* strings.

    Norms stay F32 in every file type. Adjacent-pair rope is what GGUF's `llama` means, so Q and K go in unpermuted.
    """
    hp = model.hp
    qtype = {
        gguf.LlamaFileType.ALL_F32: gguf.GGMLQuantizationType.F32,
        gguf.LlamaFileType.MOSTLY_F16: gguf.GGMLQuantizationType.F16,
        gguf.LlamaFileType.MOSTLY_Q8_0: gguf.GGMLQuantizationType.Q8_0,
    }[file_type]
    w = gguf.GGUFWriter(path, "llama")
    for key, value in about.items():
        w.add_string(f"general.{key}", value)
    w.add_type(gguf.GGUFType.MODEL)
    w.add_file_type(file_type)
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
    for name, weight in model.state_dict().items():
        a = weight.float().numpy()
        kind = qtype if a.ndim == 2 else gguf.GGMLQuantizationType.F32
        w.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(a), kind), raw_dtype=kind)
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
