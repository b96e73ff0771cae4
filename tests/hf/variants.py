"""Tiny checkpoints of kinds of models that the golden data have no folder of: `variants.json.gz` has the config of
each, the shapes of its tensors, and the logits that the transformers library gives in float64. Weights follow from
their names by a rule.

    python -m tests.hf.variants        # with transformers installed: makes the file anew
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import write_checkpoint

FILE = Path(__file__).with_name("variants.json.gz")
TOKENS = [int(t) for t in (np.arange(40) * 37 + 11) % 96]
_VECTORS = ("norm", "scale", "scalar", "_log", "dt_bias", ".D", "layernorm")  # about 1, the rest about 0

_GEMMA4: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "max_position_embeddings": 128,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {  # class, config
    # As the 26B: experts, K for V in layers without the window, which have fewer and larger heads.
    "gemma4-moe": (
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": 30.0,
        },
    ),
    # As E2B: embeddings for each layer, shared K and V, wider networks where they are.
    "gemma4-small": (
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "layer_types": [*["sliding_attention", "full_attention"] * 3],
        },
    ),
    # Fewer embeddings for each layer than tokens, another active stream, and other shares of sparse gates.
    "gemma3n": (
        "Gemma3nForCausalLM",
        {
            **_GEMMA4,
            "vocab_size_per_layer_input": 80,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
            "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2],
            "intermediate_size": [96, 96, 96, 96, 64, 64],
            "activation_sparsity_pattern": [0.95, 0.8, 0.5, 0.3, 0.0, 0.0],
            "laurel_rank": 8,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
        },
    ),
}

_FALCON_H1: dict[str, Any] = {
    **{name: _GEMMA4[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")},
    **{name: _GEMMA4[name] for name in ("num_key_value_heads", "vocab_size", "max_position_embeddings")},
    "num_hidden_layers": 2,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 5.656854249492381,
    "lm_head_multiplier": 0.0390625,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9375,
    "key_multiplier": 0.39,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.23570226,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3, 0.5, 0.7],
}
# Factors of everything; with biases and a norm, and with the embeddings as output.
CONFIGS["falcon-h1"] = (
    "FalconH1ForCausalLM",
    {
        **_FALCON_H1,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        **dict.fromkeys(("projectors_bias", "mamba_proj_bias", "mlp_bias"), True),
        "tie_word_embeddings": False,
    },
)
CONFIGS["falcon-h1-tied"] = ("FalconH1ForCausalLM", {**_FALCON_H1, "tie_word_embeddings": True})


def weights(name: str, shape: list[int]) -> np.ndarray:
    """The tensor of that name: BF16 bits, uint16."""
    n = math.prod(shape)
    z = np.arange(n, dtype=np.uint64) + (np.uint64(zlib.crc32(name.encode())) << np.uint64(20))
    for factor, shift in ((0x9E3779B97F4A7C15, 30), (0xBF58476D1CE4E5B9, 27), (0x94D049BB133111EB, 31)):
        z = z * np.uint64(factor)
        z ^= z >> np.uint64(shift)
    u = (z >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0
    if any(part in name.rpartition(".weight")[0] or name.endswith(part) for part in _VECTORS) and len(shape) < 2:
        u = 1.0 + 0.2 * u
    else:
        u *= math.sqrt(3.0 / (shape[-1] if len(shape) > 1 else 32))
    bits = u.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).reshape(shape)


def read() -> dict[str, Any]:
    """NAME -> config, tensors {name: shape}, logits float32 [40, n_vocab]."""
    found: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return found


def write(variant: dict[str, Any], folder: Path) -> None:
    """The folder of a variant."""
    tensors = {name: weights(name, shape) for name, shape in variant["tensors"].items()}
    write_checkpoint(folder, variant["config"], tensors)


def _made(cls: str, config: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    torch.Tensor.float = torch.Tensor.double  # norms and routers go through float32
    kind = getattr(transformers, cls)
    said = kind.config_class(**config, dtype="bfloat16")
    said._experts_implementation = said._attn_implementation = "eager"
    model = kind(said).to(torch.float64).eval()
    state = model.state_dict()
    tied = model.config.tie_word_embeddings
    names = [name for name in state if not (tied and name == "lm_head.weight")]
    with torch.no_grad():
        for name in names:
            bits = weights(name, list(state[name].shape)).astype(np.uint32) << 16
            state[name].copy_(torch.from_numpy(bits.view(np.float32).astype(np.float64)))
        logits = model(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    said = json.loads(model.config.to_json_string(use_diff=False))
    said = {key: value for key, value in said.items() if not key.startswith("_") and value is not None}
    return {
        "config": {**said, "architectures": [cls]},
        "tensors": {name: list(state[name].shape) for name in names},
        "logits": [[float(f"{x:.8g}") for x in row] for row in logits.tolist()],
    }


if __name__ == "__main__":
    text = json.dumps({name: _made(*of) for name, of in CONFIGS.items()})
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))
