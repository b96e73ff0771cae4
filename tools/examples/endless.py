"""Text without end in a small context: python tools/examples/endless.py MODEL.gguf [PROMPT]"""

from __future__ import annotations

import sys

import pyggml as gg
from pyggml.llm.generate.long_context import LongContext
from pyggml.llm.vocab import StreamDecoder


def main(path: str, prompt: str = "Once upon a time", n_predict: str = "300") -> None:
    """Print `n_predict` tokens that follow the prompt."""
    model = gg.load_model(path)
    ids = model.tokenize(prompt)
    ctx = model.new_context(n_ctx=64)
    long = LongContext(ctx, n_keep=len(ids))  # the prompt stays; of the rest, the older half is dropped each time
    decoder = StreamDecoder(model.vocab)
    ctx.decode(ids)
    for _ in range(int(n_predict)):
        token = int(ctx.logits[-1].argmax())
        print(decoder.push(token), end="", flush=True)
        if ctx.memory.used == ctx.n_ctx - 1:
            print(f"[{ctx.memory.used} cells in use: shift]", end="")
        long.make_room()
        ctx.decode([token])
    print(decoder.flush())


if __name__ == "__main__":
    main(*sys.argv[1:])
