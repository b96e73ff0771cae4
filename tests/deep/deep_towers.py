"""Compute the features of the towers in `tests/models/other_towers.py` by the transformers library in float64, and
write them beside it. Ultravox's class is not in that library: its projector is written down here.

    python -m tests.deep.deep_towers        # needs torch and transformers
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForImageTextToText, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from ..models.other_towers import CONFIGS, FEATURES, inputs, weights

_OF_TOWERS = ("vision_tower.", "vision_model.", "multi_modal_projector.", "merger.")


def _double(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    bits = {name: a.astype(np.uint32) << 16 for name, a in weights(shapes).items()}
    return {name: torch.from_numpy(a.view(np.float32)).double() for name, a in bits.items()}


def _sees(name: str) -> tuple[dict[str, list[int]], torch.Tensor]:
    config = {k: v for k, v in CONFIGS[name].items() if k != "model_type"}
    model: Any = AutoModelForImageTextToText.from_config(AutoConfig.for_model(CONFIGS[name]["model_type"], **config))
    model = model.double().eval()
    whole = {n: list(t.shape) for n, t in model.state_dict().items()}
    shapes = {n: s for n, s in whole.items() if n.removeprefix("model.").startswith(_OF_TOWERS)}
    model.load_state_dict(_double(shapes), strict=False)
    given = {k: torch.from_numpy(a) for k, a in inputs(name).items()}
    pixels = given.pop("pixel_values").double()
    if name == "llama4":
        return shapes, model.multi_modal_projector(model.vision_model(pixels).last_hidden_state).flatten(0, 1)
    return shapes, torch.cat(model.model.get_image_features(pixel_values=pixels, **given).pooler_output)


def _hears(name: str) -> tuple[dict[str, list[int]], torch.Tensor]:
    config = CONFIGS[name]
    audio = config["audio_config"]
    n, n_stack, n_hidden = audio["d_model"], config["stack_factor"], config["hidden_size"]
    encoder: Any = WhisperEncoder(WhisperConfig(**audio)).double()
    p, last = "multi_modal_projector.", "ln_mid" if config["projector_ln_mid"] else "ln_post"
    shapes = {f"audio_tower.{k}": list(t.shape) for k, t in encoder.state_dict().items()}
    shapes |= {f"{p}ln_pre.weight": [n * n_stack], f"{p}linear_1.weight": [n_hidden, n * n_stack]}
    shapes |= {
        f"{p}{last}.weight": [n_hidden // 2 if last == "ln_mid" else 32],
        f"{p}linear_2.weight": [32, n_hidden // 2],
    }
    w = _double(shapes)
    encoder.load_state_dict({k.removeprefix("audio_tower."): t for k, t in w.items() if k.startswith("audio_tower.")})

    def rms(x: torch.Tensor, role: str) -> torch.Tensor:
        found = w.get(f"{p}{role}.weight")
        return x if found is None else x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-6) * found

    rows: list[torch.Tensor] = []
    for part in torch.split(
        torch.from_numpy(inputs(name)["input_features"]).double(), 2 * audio["max_source_positions"], -1
    ):
        x = F.gelu(encoder.conv2(F.gelu(encoder.conv1(part)))).permute(0, 2, 1)
        x = x + encoder.embed_positions.weight[: x.shape[1]]
        for layer in encoder.layers:
            x = layer(x, None)
        x = encoder.layer_norm(x)[0]
        x = F.pad(x, (0, 0, 0, -len(x) % n_stack)).reshape(-1, n * n_stack)
        up, gate = (rms(x, "ln_pre") @ w[f"{p}linear_1.weight"].T).chunk(2, -1)
        rows.append(rms(rms(F.silu(gate) * up, "ln_mid") @ w[f"{p}linear_2.weight"].T, "ln_post"))
    return shapes, torch.cat(rows)


def main() -> None:
    """Write the file."""
    found: dict[str, Any] = {}
    for name in CONFIGS:
        with torch.no_grad():
            shapes, features = _hears(name) if name.startswith("ultravox") else _sees(name)
        found |= {f"{name}/shapes": json.dumps(shapes), f"{name}/features": features.numpy()}
        print(name, tuple(features.shape))
    np.savez_compressed(FEATURES, **found)


if __name__ == "__main__":
    main()
