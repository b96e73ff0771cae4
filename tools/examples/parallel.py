"""Four continuations of one prompt, decoded together: python tools/examples/parallel.py MODEL.gguf [PROMPT]"""

from __future__ import annotations

import sys

import pyggml as gg

N_SEQ, N_PREDICT = 4, 24


def main(path: str, prompt: str = "Once upon a time") -> None:
    """Let the model go on from the prompt with each of the likeliest first tokens."""
    model = gg.load_model(path)
    ids = model.tokenize(prompt)
    ctx = model.new_context(n_ctx=len(ids) + N_SEQ * N_PREDICT, n_seq_max=N_SEQ)
    ctx.decode(ids)  # into sequence 0
    for s in range(1, N_SEQ):
        ctx.memory.seq_cp(0, s)  # the same cells belong to sequence s too: no data is copied
    texts = [[int(token)] for token in ctx.logits[-1].argsort()[: -N_SEQ - 1 : -1]]  # each begins with another token
    for pos in range(len(ids), len(ids) + N_PREDICT - 1):
        batch = gg.Batch()
        for s, text in enumerate(texts):
            batch.add(text[-1], pos, s, logits=True)
        ctx.decode(batch)  # one token of each sequence
        for text, logits in zip(texts, ctx.logits, strict=True):
            text.append(int(logits.argmax()))
    for text in texts:
        print(repr(model.detokenize(ids + text)))


if __name__ == "__main__":
    main(*sys.argv[1:])
