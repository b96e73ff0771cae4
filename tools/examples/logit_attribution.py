"""What wrote the next token? python tools/examples/logit_attribution.py [MODEL.gguf [PROMPT]]"""

from __future__ import annotations

import sys

import numpy as np

import pyggml as gg


def main(path: str | None = None, prompt: str = "Once upon a") -> None:
    """Print the part of the likeliest token's logit that each attention and each feed-forward block adds. The parts add
    up to the logit: the last norm divides them all by the same number."""
    model = gg.load_model(path)
    ctx = model.new_context()
    with model.tap("inp_embd", "kqv_out-*", "ffn_out-*", f"l_out-{model.hparams.n_layer - 1}") as t:
        ctx.decode(model.tokenize(prompt))
    best = int(ctx.logits[-1].argmax())
    head = model.weights.get("output.weight", model.weights["token_embd.weight"]).numpy()[best]
    final = t[f"l_out-{model.hparams.n_layer - 1}"][0][-1]
    size = np.sqrt((final * final).mean() + model.hparams.f_norm_rms_eps)
    direction = head * model.weights["output_norm.weight"].numpy() / size
    parts = {name: float(x[-1] @ direction) for name, (x,) in t.items() if not name.startswith("l_out")}
    logit, total = ctx.logits[-1][best], sum(parts.values())
    print(f"{model.detokenize([best])!r} has a logit of {logit:.3f}; the parts add up to {total:.3f}")
    for name, part in sorted(parts.items(), key=lambda item: -abs(item[1])):
        print(f"{name:12} {part:+7.3f} {'#' * round(4 * abs(part))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
