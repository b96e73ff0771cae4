"""Find where a model keeps the difference between two prompts: python tools/examples/activation_patching.py
[MODEL.gguf]"""

from __future__ import annotations

import sys

import numpy as np

import pyggml as gg


def main(path: str | None = None, clean: str = "The king took his", other: str = "The mother took her") -> None:
    """Put the residual stream of the clean prompt, layer by layer and token by token, into the run of the other one,
    and print how much of the clean prompt's prediction comes back (1: all of it)."""
    model = gg.load_model(path)
    a, b = model.tokenize(clean), model.tokenize(other)
    n = min(len(a), len(b))
    with model.tap("l_out-*") as t:
        want = logits(model, a[:n])
    base = logits(model, b[:n])
    token, against = int(np.argmax(want - base)), int(np.argmax(base - want))
    gap = (want - base)[token] - (want - base)[against]
    for il in range(model.hparams.n_layer - 1):  # the last layer has only the last token's row
        row: list[str] = []
        for pos in range(n):

            def patch(x: np.ndarray, pos: int = pos, il: int = il) -> None:
                x[pos] = t[f"l_out-{il}"][0][pos]

            with model.edit(f"l_out-{il}", patch):
                got = logits(model, b[:n]) - base
            row.append(f"{(got[token] - got[against]) / gap:6.2f}")
        print(f"layer {il}: {' '.join(row)}")


def logits(model: gg.Model, ids: list[int]) -> np.ndarray:
    """The logits of the next token."""
    ctx = model.new_context(n_ctx=64)
    ctx.decode(ids)
    return ctx.logits[-1].copy()


if __name__ == "__main__":
    main(*sys.argv[1:])
