"""A small Whisper with random weights and a tokenizer of bytes, and a sound, for tests of what golden data lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from .hf.checkpoint import write_checkpoint

N_TEXT, N_STAMPS, N_CTX, D, FF = 256, 1501, 64, 32, 64
SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>", "<|transcribe|>"),
    *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
IDS = {text: N_TEXT + i for i, text in enumerate(SPECIAL)}
FIRST_STAMP = N_TEXT + len(SPECIAL)
N_VOCAB = FIRST_STAMP + N_STAMPS
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2's alphabet shows as themselves
ALPHABET = {b: chr(b) for b in BYTES} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in BYTES)}
CONFIG: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "vocab_size": N_VOCAB,
    "num_mel_bins": 80,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": FF,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": FF,
    "d_model": D,
    "max_source_positions": 1500,
    "max_target_positions": N_CTX,
    "is_encoder_decoder": True,
    "activation_function": "gelu",
    "decoder_start_token_id": IDS["<|startoftranscript|>"],
    **{f"{role}_token_id": IDS["<|endoftext|>"] for role in ("eos", "bos", "pad")},
}
GENERATION: dict[str, Any] = {
    "decoder_start_token_id": IDS["<|startoftranscript|>"],
    **{f"{role}_token_id": IDS["<|endoftext|>"] for role in ("eos", "bos", "pad")},
    "is_multilingual": True,
    "lang_to_id": {text: IDS[text] for text in SPECIAL[2:5]},
    "task_to_id": {"translate": IDS["<|translate|>"], "transcribe": IDS["<|transcribe|>"]},
    "no_timestamps_token_id": IDS["<|notimestamps|>"],
    "prev_sot_token_id": IDS["<|startofprev|>"],
    "suppress_tokens": [3, 7, *(IDS[text] for text in SPECIAL[1:10])],
    "begin_suppress_tokens": [220, IDS["<|endoftext|>"]],
    "max_initial_timestamp_index": 50,
    "max_length": N_CTX,
    "return_timestamps": False,
}


def weights(seed: int) -> dict[str, np.ndarray]:
    """The tensors by their names in the checkpoint, float32."""
    rng, found = np.random.default_rng(seed), dict[str, np.ndarray]()

    def put(name: str, *shape: int, k: float) -> None:
        n = shape[-1] if len(shape) > 1 else 1
        found[name] = (rng.standard_normal(shape) * k / np.sqrt(n)).astype(np.float32)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = (1 + 0.1 * rng.standard_normal(D)).astype(np.float32)
        found[f"{name}.bias"] = (0.1 * rng.standard_normal(D)).astype(np.float32)

    def attention(name: str) -> None:
        for x in ("q_proj", "k_proj", "v_proj", "out_proj"):
            put(f"{name}.{x}.weight", D, D, k=2.0)
            if x != "k_proj":
                put(f"{name}.{x}.bias", D, k=0.1)

    put("model.encoder.conv1.weight", D, 80, 3, k=0.2)
    put("model.encoder.conv1.bias", D, k=0.1)
    put("model.encoder.conv2.weight", D, D, 3, k=0.5)
    put("model.encoder.conv2.bias", D, k=0.1)
    put("model.encoder.embed_positions.weight", 1500, D, k=3.0)
    for side in ("encoder", "decoder"):
        for i in range(2):
            p = f"model.{side}.layers.{i}."
            attention(f"{p}self_attn")
            norm(f"{p}self_attn_layer_norm")
            if side == "decoder":
                attention(f"{p}encoder_attn")
                norm(f"{p}encoder_attn_layer_norm")
            put(f"{p}fc1.weight", FF, D, k=1.0)
            put(f"{p}fc1.bias", FF, k=0.1)
            put(f"{p}fc2.weight", D, FF, k=1.0)
            put(f"{p}fc2.bias", D, k=0.1)
            norm(f"{p}final_layer_norm")
        norm(f"model.{side}.layer_norm")
    put("model.decoder.embed_tokens.weight", N_VOCAB, D, k=3.0)
    put("model.decoder.embed_positions.weight", N_CTX, D, k=3.0)
    return found


def write_whisper(folder: Path, seed: int = 0, **generation: Any) -> Path:
    """A folder; `generation` replaces keys of generation_config.json (None: takes them out)."""
    folder.mkdir(exist_ok=True)
    write_checkpoint(folder, CONFIG, weights(seed))
    said = {key: value for key, value in (GENERATION | generation).items() if value is not None}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": text, "special": True, **flags} for text, i in IDS.items()]
    added += [
        {"id": FIRST_STAMP + i, "content": f"<|{i * 0.02:.2f}|>", "special": False, **flags} for i in range(N_STAMPS)
    ]
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": by_bytes,
        "decoder": by_bytes,
        "model": {"type": "BPE", "vocab": {ALPHABET[b]: b for b in range(256)}, "merges": []},
    }
    processor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80}
    for name, content in (
        ("generation_config", said),
        ("preprocessor_config", processor),
        ("tokenizer", tokenizer),
        ("tokenizer_config", {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Three voices that whistle up and down, and some noise: float32 at 16 kHz."""
    t = np.arange(int(seconds * 16000)) / 16000
    x = sum(0.2 * np.sin(2 * np.pi * (f + 100 * np.sin(t * g)) * t) for f, g in ((200, 0.7), (700, 1.3), (1500, 0.31)))
    noise = np.random.default_rng(seed).standard_normal(len(t))
    return (x * (0.5 + 0.5 * np.sin(2 * np.pi * t / 3.1)) + 0.01 * noise).astype(np.float32)
