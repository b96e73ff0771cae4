"""What would the model say if it stopped after each layer? python tools/examples/logit_lens.py [MODEL.gguf [PROMPT]]"""

from __future__ import annotations

import sys

import numpy as np

import pyggml as gg


def main(path: str | None = None, prompt: str = "Once upon a time there was a") -> None:
    """Print the likeliest next tokens by the residual stream after each layer: its norm, times the output's weights."""
    model = gg.load_model(path)
    with model.tap("l_out-*") as t:
        model.new_context().decode(model.tokenize(prompt))
    head = model.weights.get("output.weight", model.weights["token_embd.weight"]).numpy()
    norm, eps = model.weights["output_norm.weight"].numpy(), model.hparams.f_norm_rms_eps
    for name, (hidden, *_) in t.items():
        x = hidden[-1]
        logits = head @ (x / np.sqrt((x * x).mean() + eps) * norm)
        best = np.argsort(logits)[:-6:-1].tolist()
        print(f"{name:8} {' '.join(repr(model.detokenize([i])) for i in best)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
