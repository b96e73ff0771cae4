"""Plain decoders: models that differ only in the arguments of their blocks. The arguments, and one builder for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, get_args

from pyggml import ops as gg
from pyggml.errors import ModelError, one_of
from pyggml.graph import Graph
from pyggml.signature import check_options
from pyggml.tensor import Tensor

from .architecture import Architecture, MemoryKind
from .blocks import (
    KV,
    Activation,
    Build,
    Glu,
    build_attn,
    build_attn_gate,
    build_ffn,
    build_inp_attn_scale,
    build_inp_embd,
    build_inp_kq_mask,
    build_inp_pos,
    build_lm_head,
    build_moe_ffn,
    build_norm,
    build_out_rows,
    build_pos_embd,
    build_qkv,
    build_result_embd,
    build_rope,
    build_rope_factors,
    build_shared_expert,
)
from .hparams import CHOICES, AttnTemperature, H, HParams, NormKind, RankHead, Router
from .metadata import Reader, read_hparams, read_own_pattern, read_own_window

EmbdNorm = Literal["none", "plain", "weighted"]
QKNorm = Literal["none", "head", "heads", "roped", "row"]
Biases = Literal["all", "qkv", "none"]
Sinks = Literal["none", "some", "all"]
AttnGate = Literal["none", "sigmoid", "softplus"]
_CHOICES = {
    "norm": get_args(NormKind),
    "embd_norm": get_args(EmbdNorm),
    "qk_norm": get_args(QKNorm),
    "biases": get_args(Biases),
    "sinks": get_args(Sinks),
    "attn_gate": get_args(AttnGate),
}

Value = float | str | bool | RankHead | Router | AttnTemperature | tuple[float, ...] | None  # of a hyperparameter


@dataclass(frozen=True, kw_only=True)
class PlainDecoder(Generic[H]):
    """How a plain decoder differs from the first Llama. Differences that are numbers, or that are needed outside of the
    graph, are hyperparameters instead: `rope_type`, `f_embedding_scale`, `f_attention_scale`, `n_swa` ...

    norm          the kind of all norms
    norm_weight   the norms before attention, network and output have weights
    embd_norm     plain: embeddings are normed; weighted: with weights
    pre_norm      the inputs of attention and network are normed
    post_norm     the outputs of attention and network are normed
    ffn_norm      the role of the norm before the network
    qk_norm       head: Q and K of each head are normed before they are roped; heads: the same, with weights for each
                  head; roped: as head, but after they are roped; row: all heads of a token together, before
    qk_norm_optional   Q and K are normed only when the model has weights for both norms
    rope_factors  rope uses frequency factors, when the model has them
    act           the activation of the feed-forward network's gate, unless the file says otherwise
    gated         whether there is a gate; without one the activation is that of `ffn_up`
    gate_in_up    `ffn_up` gives the gate too
    biases        qkv: only the biases of Q, K and V are added, even when a file has others (as in llama.cpp); none: no
                  biases are added
    sinks         some: attention has sinks in layers with weights for them; all: in all layers
    attn_gate     the output of attention is multiplied with a gate: this function of `attn_gate` times the input of
                  attention. The gate has an element for each element of the output, or one for each head
    shared_gate   the shared expert of a mixture has a gate of its own
    parallel      attention and network both read the input of the layer, and both are added to it. The network reads
                  what the norm before attention gives, unless it has one of its own; when there is `attn_norm_2`,
                  attention reads that
    output_norm   the role of the norm before the logits
    bare_norms    roles of norms whose weights are named without `.weight`
    position_embd embeddings of positions are added when the model has them (learned_positions: it must have them)
    first_norm    false: the input of the first attention is normed only when the model has a weight for that
    lm_head       false: the graph ends with embeddings (encoders)
    hidden_normed false: draft heads read the output of the last layer before the last norm

    Raises ModelError for a name that none of these is.
    """

    norm: NormKind = "rms"
    norm_weight: bool = True
    embd_norm: EmbdNorm = "none"
    pre_norm: bool = True
    post_norm: bool = False
    ffn_norm: str = "ffn_norm"
    qk_norm: QKNorm = "none"
    qk_norm_optional: bool = False
    rope_factors: bool = True
    act: Activation | Glu = "silu"
    gated: bool = True
    gate_in_up: bool = False
    biases: Biases = "all"
    sinks: Sinks = "none"
    attn_gate: AttnGate = "none"
    shared_gate: bool = False
    parallel: bool = False
    output_norm: str = "output_norm"
    bare_norms: tuple[str, ...] = ()
    position_embd: bool = False
    first_norm: bool = True
    lm_head: bool = True
    hidden_normed: bool = True

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            one_of(name, getattr(self, name), known, ModelError)
        if not callable(self.act):
            one_of("act", self.act, get_args(Activation), ModelError)

    def build(self, b: Build[H]) -> Graph:
        """The graph of one ubatch; its last node is `result_output`, ne [n_vocab, n_outputs], or `result_embd`, ne
        [n_embd, n_outputs]."""
        hp = b.hparams
        with b.ctx:
            inpL = build_inp_embd(b)
            if self.embd_norm != "none":
                role = "token_embd_norm" if self.embd_norm == "weighted" else ""
                inpL = build_norm(b, inpL, role, "inp_norm", kind=self.norm)
            if hp.learned_positions or self.position_embd:
                inpL = build_pos_embd(b, inpL, optional=not hp.learned_positions)
            inp_pos = build_inp_pos(b)
            factors = build_rope_factors(b) if self.rope_factors else None
            inpL = b.layers(lambda cur, il: self.layer(b, cur, inp_pos, factors, il), inpL)
            role = self.output_norm if self.norm_weight else ""
            cur = self._norm(b, inpL, role, "result_norm", -1)
            if not self.lm_head:
                return build_result_embd(b, cur)
            return build_lm_head(b, cur, bias=self.biases == "all", hidden=cur if self.hidden_normed else inpL)

    def layer(self, b: Build[H], inpL: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        """The output of layer `il`, which reads `inpL`, ne [n_embd, n_tokens]."""
        normed = self._pre_norm(b, inpL, "attn_norm", "attn_norm", il, optional=il == 0 and not self.first_norm)
        attn = self.attention(b, self._attn_input(b, inpL, normed, il), pos, factors, il)
        attn, inpL, normed = build_out_rows(b, il, attn, inpL, normed)
        attn = self.post(b, attn, "post_attention_norm", "attn_post_norm", il)
        ffn_inp = b.cb(gg.add(attn, inpL), "ffn_inp", il)
        cur = self.ffn(b, self._ffn_input(b, inpL, normed, ffn_inp, il), il)
        cur = self.post(b, cur, "post_ffw_norm", "ffn_post_norm", il)
        return b.cb(gg.add(cur, ffn_inp), "l_out", il)

    def _pre_norm(self, b: Build, cur: Tensor, role: str, name: str, il: int, *, optional: bool = False) -> Tensor:
        if optional and b.optional(role, cur.ne[:1], il) is None:
            return cur
        return self._norm(b, cur, role if self.norm_weight else "", name, il) if self.pre_norm else cur

    def _norm(self, b: Build, cur: Tensor, role: str, name: str, il: int) -> Tensor:
        return build_norm(b, cur, role, name, il, self.norm, suffix="" if role in self.bare_norms else "weight")

    def post(self, b: Build, cur: Tensor, role: str, name: str, il: int) -> Tensor:
        """The output `cur` of attention or network as it is added to the residual: normed and scaled, when the model
        asks for it."""
        cur = self._norm(b, cur, role, name, il) if self.post_norm else cur
        scale = b.hparams.f_residual_scale
        return b.cb(gg.scale(cur, scale), f"{name}_scaled", il) if scale else cur

    def _attn_input(self, b: Build, inpL: Tensor, normed: Tensor, il: int) -> Tensor:
        if not self.parallel or b.optional("attn_norm_2", inpL.ne[:1], il) is None:
            return normed
        return build_norm(b, inpL, "attn_norm_2", "attn_norm_2", il, self.norm)

    def _ffn_input(self, b: Build, inpL: Tensor, normed: Tensor, ffn_inp: Tensor, il: int) -> Tensor:
        if not self.parallel:
            return self._pre_norm(b, ffn_inp, self.ffn_norm, "ffn_norm", il)
        own = b.optional(self.ffn_norm, inpL.ne[:1], il)
        return normed if own is None else self._pre_norm(b, inpL, self.ffn_norm, "ffn_norm", il)

    def attention(self, b: Build[H], cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        """The output of attention in layer `il`, which reads `cur`."""
        attn = build_attn(b, self.kv(b, cur, pos, factors, il))
        if self.attn_gate != "none":
            attn = build_attn_gate(b, attn, cur, il, gg.sigmoid if self.attn_gate == "sigmoid" else gg.softplus)
        return b.linear("attn_output", attn, b.hparams.n_embd, "kqv_out", il, bias=self.biases == "all")

    def kv(self, b: Build[H], cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> KV:
        """The arguments of attention in layer `il`, which reads `cur`."""
        Qcur, Kcur, Vcur = build_qkv(b, cur, il, bias=self.biases != "none")
        if self.qk_norm not in ("none", "roped"):
            Qcur, Kcur = self._qk_norm(b, Qcur, Kcur, il)
        Qcur = build_rope(b, Qcur, pos, factors, "Qcur", il)
        Kcur = build_rope(b, Kcur, pos, factors, "Kcur", il)
        if self.qk_norm == "roped":
            Qcur, Kcur = self._qk_norm(b, Qcur, Kcur, il)
        if (temperature := b.hparams.attn_temperature) is not None:
            Qcur = b.cb(gg.mul(Qcur, build_inp_attn_scale(b, temperature)), "Qcur_attn_temp_scaled", il)
        sinks = None
        if self.sinks != "none":
            ask = b.weight if self.sinks == "all" else b.optional
            sinks = ask("attn_sinks", (b.hparams.layer(il).n_head,), il)
        return KV(Qcur, Kcur, Vcur, build_inp_kq_mask(b, il), il, sinks)

    def _qk_norm(self, b: Build, Qcur: Tensor, Kcur: Tensor, il: int) -> tuple[Tensor, Tensor]:
        """Q and K, ne [n_embd_head_k, their heads, n_tokens], normed."""
        weights: list[tuple[int, ...]] = []
        for cur in (Qcur, Kcur):
            head, n_head = cur.ne[:2]
            weights.append({"heads": (head, n_head), "row": (head * n_head,)}.get(self.qk_norm, (head,)))
        if self.qk_norm_optional:
            roles = list(zip(("attn_q_norm", "attn_k_norm"), weights, strict=True))
            there = [b.optional(role, ne, il) for role, ne in roles]
            if None in there:
                for role, ne in roles:
                    b.optional(role, ne, il, "bias")  # declared: not reported as unused
                return Qcur, Kcur
        return self._heads_norm(b, Qcur, "q", il), self._heads_norm(b, Kcur, "k", il)

    def _heads_norm(self, b: Build, cur: Tensor, part: str, il: int) -> Tensor:
        role, name = f"attn_{part}_norm", f"{part.upper()}cur_normed"
        if self.qk_norm != "row":
            return build_norm(b, cur, role, name, il, self.norm, per_head=self.qk_norm == "heads")
        head, n_head, n_tokens, _ = cur.ne
        row = gg.reshape_2d(gg.cont(cur) if cur.op == "view" else cur, head * n_head, n_tokens)
        return gg.reshape_3d(build_norm(b, row, role, name, il, self.norm), head, n_head, n_tokens)

    def ffn(self, b: Build[H], cur: Tensor, il: int) -> Tensor:
        """The feed-forward network, or the mixture of experts, of layer `il`."""
        if not b.hparams.is_moe(il):
            bias = self.biases == "all"
            return build_ffn(b, cur, il, self.act, self.gated, bias=bias, gate_in_up=self.gate_in_up)
        out = build_moe_ffn(b, cur, il, self.act)
        if not b.hparams.n_ff_shexp:
            return out
        return b.cb(gg.add(out, build_shared_expert(b, cur, il, self.act, gated=self.shared_gate)), "ffn_out", il)


def decoder(
    *names: str,
    build: PlainDecoder | None = None,
    memory: MemoryKind = "kv",
    nextn: bool = False,
    own_window: bool = False,
    **hparams: Value | Callable[[Reader], Value],
) -> Architecture:
    """The architecture of plain decoders. `hparams` are hyperparameters that the common keys do not give: values, or
    functions that read them. `nextn`: see `Architecture`. `own_window`: files may have a sliding window, see
    `read_own_window`. Raises ModelError for a name that a hyperparameter cannot be, OptionError for a hyperparameter
    that there is not."""
    build = build or PlainDecoder()
    check_options("decoder", hparams, HParams.__dataclass_fields__)
    for name, known in CHOICES.items():
        if isinstance(value := hparams.get(name), str):
            one_of(name, value, known, ModelError)

    def read(r: Reader) -> HParams:
        own = {name: value(r) if callable(value) else value for name, value in hparams.items()}
        if own_window:
            own |= {"n_swa": read_own_window(r), "swa_pattern": read_own_pattern(r)}
        return read_hparams(HParams, r, build.norm, k_norm_last=build.qk_norm == "roped", **own)

    return Architecture(names, build.build, read, memory, build.lm_head, nextn)
