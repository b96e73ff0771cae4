"""Tiny checkpoints whose config says something else than is usual: `keys.json.gz` has the config of each, the shapes of
its tensors, and the last rows of what the transformers library gives in float64. Sizes that are often equal differ.

    python -m tests.hf.keys        # with transformers installed: makes the file anew
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

from pyggml.hf.safetensors import open_folder

from .checkpoint import write_checkpoint
from .variants import TOKENS, weights

FILE = Path(__file__).with_name("keys.json.gz")
N_ROWS = 6

_BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 128, "vocab_size": 96, "pad_token_id": 0}
_MAMBA = {k: _BASE[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size", "pad_token_id")}
_MAMBA |= {"state_size": 8, "time_step_rank": 5}
_LATENT = {"q_lora_rank": 20, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
_LATENT |= {"num_key_value_heads": 6}
_YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_THREE = {**_BASE, "num_hidden_layers": 3}

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # class, config
    "llama-relu": ("LlamaForCausalLM", {**_BASE, "hidden_act": "relu"}),
    "llama-quick-gelu": ("LlamaForCausalLM", {**_BASE, "hidden_act": "quick_gelu", "head_dim": 10}),
    "llama-mscale": ("LlamaForCausalLM", {**_BASE, "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9}}),
    "mixtral-gelu": ("MixtralForCausalLM", {**_BASE, "hidden_act": "gelu", "num_local_experts": 5, "head_dim": 8}),
    "qwen2-window": ("Qwen2ForCausalLM", {**_BASE, **_WINDOW}),
    "qwen3-window": ("Qwen3ForCausalLM", {**_BASE, **_WINDOW, "head_dim": 10, "hidden_act": "gelu_pytorch_tanh"}),
    "qwen2-moe-window": (
        "Qwen2MoeForCausalLM",
        {**_BASE, **_MOE, **_WINDOW, "num_experts": 5, "shared_expert_intermediate_size": 32, "hidden_act": "relu"},
    ),
    "qwen3-moe-window": ("Qwen3MoeForCausalLM", {**_BASE, **_MOE, **_WINDOW, "num_experts": 5, "head_dim": 10}),
    "phi3-window": ("Phi3ForCausalLM", {**_BASE, "sliding_window": 8, "hidden_act": "relu2"}),
    "starcoder2-window": ("Starcoder2ForCausalLM", {**_BASE, "sliding_window": 8, "hidden_act": "relu"}),
    "phimoe-window": (
        "PhimoeForCausalLM",
        {**_BASE, "sliding_window": 8, "num_local_experts": 5, "hidden_act": "gelu"},
    ),
    "dots1-window": (
        "Dots1ForCausalLM",
        {**_BASE, **_MOE, "sliding_window": 8, "max_window_layers": 1, "n_routed_experts": 5, "n_shared_experts": 2}
        | {"first_k_dense_replace": 1},
    ),
    "smollm3": ("SmolLM3ForCausalLM", {**_THREE, "no_rope_layers": [0, 1, 0], **_WINDOW}),
    "phi-normed": ("PhiForCausalLM", {**_BASE, "qk_layernorm": True, "hidden_act": "relu"}),
    "stablelm-normed": ("StableLmForCausalLM", {**_BASE, "qk_layernorm": True, "use_parallel_residual": True}),
    "gpt2-gelu": ("GPT2LMHeadModel", {**_GPT2, "n_inner": 40, "activation_function": "gelu"}),
    "gptj-silu": ("GPTJForCausalLM", {**_GPT2, "rotary_dim": 4, "activation_function": "silu"}),
    "gpt-bigcode-relu": ("GPTBigCodeForCausalLM", {**_GPT2, "activation_function": "relu"}),
    "gpt-neox": ("GPTNeoXForCausalLM", {**_BASE, "hidden_act": "relu", "use_parallel_residual": False}),
    "falcon-relu": ("FalconForCausalLM", {**_BASE, "activation": "relu", "ffn_hidden_size": 40}),
    "gemma2-gelu": (
        "Gemma2ForCausalLM",
        {**_BASE, "hidden_activation": "gelu", "head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 8},
    ),
    "gemma3-pattern": (
        "Gemma3ForCausalLM",
        {**_THREE, "sliding_window_pattern": 2, "sliding_window": 8, "head_dim": 10, "query_pre_attn_scalar": 7},
    ),
    "exaone4-pattern": ("Exaone4ForCausalLM", {**_THREE, "sliding_window": 8, "sliding_window_pattern": 3}),
    "exaone4-without": ("Exaone4ForCausalLM", {**_BASE, "sliding_window": 8, "layer_types": ["full_attention"] * 2}),
    "gemma2-uncapped": (
        "Gemma2ForCausalLM",
        {**_BASE, "head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 8},
    ),
    "gpt-oss-unrounded": (
        "GptOssForCausalLM",
        {**_BASE, "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 24, "sliding_window": 8}
        | {"rope_parameters": {**_YARN, "original_max_position_embeddings": 64, "beta_fast": 4.0, "truncate": False}},
    ),
    "llama-unrounded": (
        "LlamaForCausalLM",
        {**_BASE, "head_dim": 24, "rope_parameters": {**_YARN, "beta_fast": 3.0, "truncate": False}},
    ),
    "afmoe-layers": (
        "AfmoeForCausalLM",
        {**_THREE, **_MOE, "num_experts": 5, "num_shared_experts": 2, "num_dense_layers": 1, "sliding_window": 8}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "head_dim": 8},
    ),
    "qwen3-next-eps": (
        "Qwen3NextForCausalLM",
        {**_BASE, **_MOE, "rms_norm_eps": 0.1, "num_experts": 5, "shared_expert_intermediate_size": 32, "head_dim": 8}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "nemotron-silu": ("NemotronForCausalLM", {**_BASE, "hidden_act": "silu", "head_dim": 8}),
    "olmo-clip": ("OlmoForCausalLM", {**_BASE, "clip_qkv": 0.5, "hidden_act": "tanh"}),
    "mamba": ("MambaForCausalLM", {**_MAMBA, "intermediate_size": 80}),
    "falcon-mamba": ("FalconMambaForCausalLM", {**_MAMBA, "intermediate_size": 80, "mixer_rms_eps": 0.25}),
    "deepseek-v3-eps": (
        "DeepseekV3ForCausalLM",
        {**_BASE, **_MOE, **_LATENT, "rms_norm_eps": 0.1, "n_routed_experts": 6, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1, "hidden_act": "gelu"},
    ),
    "kimi-linear-heads": (
        "KimiLinearForCausalLM",
        {**_BASE, **_LATENT, "q_lora_rank": None, "linear_num_heads": 4, "linear_head_dim": 10, "num_experts": 5}
        | {"num_experts_per_token": 2, "moe_intermediate_size": 24, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-3}
        | {"layer_types": ["linear_attention", "full_attention"], "model_max_length": 128},
    ),
}
# Keys that nothing here could honour: (a case, what its config says besides, the key that the error names).
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("llama-relu", {"hidden_act": "nope"}, "nope"),
    ("llama-relu", {"rope_parameters": {"rope_type": "nope"}}, "nope"),
    ("falcon-relu", {"alibi": True}, "alibi"),
    ("falcon-relu", {"parallel_attn": False}, "parallel_attn"),
    ("gpt2-gelu", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2-gelu", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("gpt-bigcode-relu", {"multi_query": False}, "multi_query"),
    ("stablelm-normed", {"use_parallel_residual": False}, "use_parallel_residual"),
    ("stablelm-normed", {"qk_layernorm": False}, "qk_layernorm"),
    ("phi-normed", {"qk_layernorm": False}, "qk_layernorm"),
    ("qwen3-moe-window", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("qwen3-moe-window", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("llama-relu", {"head_dim": 7}, "head_dim"),
    ("mamba", {"hidden_act": "relu"}, "hidden_act"),
    ("deepseek-v3-eps", {"topk_group": 0}, "topk_group"),
    ("kimi-linear-heads", {"hidden_act": "relu"}, "hidden_act"),
    ("deepseek-v3-eps", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek-v3-eps", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
)


def read() -> dict[str, Any]:
    """NAME -> config, tensors {name: shape}, rows [N_ROWS, n_vocab]."""
    found: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return found


def write(case: dict[str, Any], folder: Path) -> None:
    """The folder of a case."""
    tensors = {name: weights(name, shape) for name, shape in case["tensors"].items()}
    write_checkpoint(folder, case["config"], tensors)


def _made(cls: str, config: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    torch.Tensor.float = torch.Tensor.double  # norms and routers go through float32
    kind = getattr(transformers, cls)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        model = kind(kind.config_class(**config, dtype="bfloat16")).to(torch.bfloat16)
        model.save_pretrained(folder)
        said = {**config, "model_type": model.config.model_type, "architectures": [cls], "dtype": "bfloat16"}
        case = {"config": said, "tensors": {n: list(t.shape) for n, t in open_folder(folder).items()}}
        write(case, folder)
        model = kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
        model.config._experts_implementation = "eager"
        f32, torch.float32 = torch.float32, torch.float64
        with torch.no_grad():
            logits = model(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
        torch.float32 = f32
    return {**case, "rows": [[float(f"{x:.8g}") for x in row] for row in logits[-N_ROWS:].tolist()]}


if __name__ == "__main__":
    FILE.write_bytes(gzip.compress(json.dumps({name: _made(*of) for name, of in CASES.items()}).encode(), mtime=0))
