"""Which attention heads matter? python tools/examples/head_ablation.py [MODEL.gguf [TEXT]]"""

from __future__ import annotations

import sys

import numpy as np

import pyggml as gg

TEXT = "Once upon a time there was a king who had a beautiful daughter, and the king loved her."


def main(path: str | None = None, text: str = TEXT) -> None:
    """Silence one head after the other, and print by how many nats the loss of a token of the text grows."""
    model = gg.load_model(path)
    ids = model.tokenize(text)
    plain = loss(model, ids)
    print(f"{plain:.3f} nats a token")
    for il in range(model.hparams.n_layer):
        costs: list[str] = []
        for head in range(model.hparams.layer(il).n_head):

            def silence(x: np.ndarray, head: int = head) -> None:
                x[:, head] = 0  # kqv_merged: (n_tokens, n_head, n_embd_head_v)

            with model.edit(f"kqv_merged-{il}", silence):
                costs.append(f"{loss(model, ids) - plain:+.3f}")
        print(f"layer {il}: {' '.join(costs)}")


def loss(model: gg.Model, ids: list[int]) -> float:
    """The mean loss in nats of the text's tokens, without the first."""
    batch, ctx = gg.Batch(), model.new_context(n_ctx=len(ids))
    for pos, token in enumerate(ids):
        batch.add(token, pos, logits=True)
    ctx.decode(batch)
    x = ctx.logits[:-1].astype(np.float64)
    of_next = x[np.arange(len(x)), ids[1:]]
    return float((np.logaddexp.reduce(x, axis=1) - of_next).mean())


if __name__ == "__main__":
    main(*sys.argv[1:])
