"""Plain decoders like GPT-2 and GPT-J, with layer norms: for each, its source and what is special in it."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph

from .architecture import Architecture
from .blocks import Build
from .decoder import PlainDecoder, decoder
from .hparams import HParams
from .metadata import Reader, read_hparams


def _clamp_kqv(r: Reader) -> float:
    return r.number(Keys.Attention.CLAMP_KQV, 0.0)


def _max_alibi_bias(r: Reader) -> float:
    return r.number(Keys.Attention.MAX_ALIBI_BIAS, 0.0)


def _one_over_head(r: Reader) -> float:
    """The factor of the scores: 1 / the size of a head. Other models have 1 / its root."""
    heads = r.integer(Keys.Attention.HEAD_COUNT)
    return 1.0 / (r.integer(Keys.Attention.KEY_LENGTH, 0) or r.integer(Keys.LLM.EMBEDDING_LENGTH) // heads)


@dataclass(frozen=True, kw_only=True)
class GPTNeoXHParams(HParams):
    """Whether attention and network are side by side."""

    use_par_res: bool


def _read_gptneox(r: Reader) -> GPTNeoXHParams:
    use_par_res = r.boolean(Keys.LLM.USE_PARALLEL_RESIDUAL)
    return read_hparams(GPTNeoXHParams, r, "layer", rope_type="neox", use_par_res=use_par_res)


def _build_gptneox(b: Build[GPTNeoXHParams]) -> Graph:
    return PlainDecoder(norm="layer", act="gelu", gated=False, parallel=b.hparams.use_par_res).build(b)


def _build_stablelm(b: Build) -> Graph:
    parallel = b.optional("ffn_norm", (b.hparams.n_embd,), 0) is None
    return PlainDecoder(norm="layer", qk_norm="heads", qk_norm_optional=True, parallel=parallel).build(b)


_GPT = PlainDecoder(norm="layer", act="gelu", gated=False)

ARCHITECTURES = (
    # GPT-2 (openai.com/index/better-language-models), StarCoder (arXiv:2305.06161): learned positions.
    decoder("gpt2", "starcoder", build=_GPT, learned_positions=True, rope_layers=0),
    # Pocket TTS (arXiv:2509.06926), its text model. A flow network makes sound of its output; nothing reads its logits.
    decoder("pockettts", build=_GPT),
    # StarCoder 2 (arXiv:2402.19173), CodeShell (arXiv:2403.15747)
    decoder("starcoder2", "codeshell", build=_GPT, rope_type="neox", own_window=True),
    # BLOOM (arXiv:2211.05100): ALiBi, and embeddings are normed.
    decoder(
        "bloom",
        build=PlainDecoder(norm="layer", act="gelu", gated=False, embd_norm="weighted"),
        rope_layers=0,
        f_max_alibi_bias=8.0,
    ),
    # MPT (huggingface.co/mosaicml/mpt-7b): ALiBi or learned positions; Q, K and V may be clamped, Q and K normed.
    decoder(
        "mpt",
        build=PlainDecoder(
            norm="layer", act="gelu", gated=False, qk_norm="row", qk_norm_optional=True, position_embd=True
        ),
        learned_positions=lambda r: not _max_alibi_bias(r),
        rope_layers=0,
        f_clamp_kqv=_clamp_kqv,
        f_max_alibi_bias=_max_alibi_bias,
    ),
    # Jais (arXiv:2308.16149): ALiBi, a gate, and scores divided by the size of a head.
    decoder(
        "jais",
        build=PlainDecoder(norm="layer"),
        rope_layers=0,
        f_attention_scale=_one_over_head,
        f_max_alibi_bias=_max_alibi_bias,
    ),
    # Nemotron-4 (arXiv:2402.16819), Jais 2 (huggingface.co/inceptionai/Jais-2-8B-Chat): relu squared, and no gate.
    decoder("nemotron", "jais2", build=PlainDecoder(norm="layer", act="relu_sqr", gated=False), rope_type="neox"),
    # Orion (arXiv:2401.12246): as Llama, but with layer norms.
    decoder("orion", build=PlainDecoder(norm="layer"), rope_type="neox"),
    # OLMo (arXiv:2402.00838): norms without weights; Q, K and V may be clamped.
    decoder("olmo", build=PlainDecoder(norm="layer", norm_weight=False), f_clamp_kqv=_clamp_kqv),
    # Phi-2 (huggingface.co/microsoft/phi-2): attention and network side by side; Q and K may be normed.
    decoder(
        "phi2",
        build=PlainDecoder(norm="layer", act="gelu", gated=False, parallel=True, qk_norm="head", qk_norm_optional=True),
        rope_type="neox",
    ),
    # Falcon (arXiv:2311.16867): attention and network side by side; in the larger models each has a norm of its own.
    decoder("falcon", build=PlainDecoder(norm="layer", act="gelu", gated=False, parallel=True), rope_type="neox"),
    # GPT-NeoX (arXiv:2204.06745), Pythia (arXiv:2304.01373): attention and network side by side or not, each with a
    # norm of its own.
    Architecture(("gptneox",), _build_gptneox, _read_gptneox),
    # GPT-J (huggingface.co/EleutherAI/gpt-j-6b): attention and network side by side, the rope turns neighbours, and all
    # products have biases except Q, K and V.
    decoder("gptj", build=PlainDecoder(norm="layer", act="gelu", gated=False, parallel=True)),
    # StableLM (arXiv:2402.17834): as Llama, but with layer norms; in the larger models attention and network are side
    # by side, and Q and K are normed.
    Architecture(("stablelm",), _build_stablelm, lambda r: read_hparams(HParams, r, "layer", rope_type="neox")),
    # Command R (huggingface.co/CohereLabs/c4ai-command-r-v01): attention and network side by side, and a gate; in the
    # larger model Q and K are normed.
    decoder(
        "command-r",
        build=PlainDecoder(norm="layer", qk_norm="heads", qk_norm_optional=True, parallel=True),
        f_logit_scale=lambda r: r.number(Keys.LLM.LOGIT_SCALE, 0.0),
    ),
)
