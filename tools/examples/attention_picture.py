"""Who looks at whom? python tools/examples/attention_picture.py [MODEL.gguf [PROMPT [OUT.svg]]]"""

from __future__ import annotations

import sys
from pathlib import Path

import pyggml as gg


def main(path: str | None = None, prompt: str = "Once upon a time there was", out: str = "attention.svg") -> None:
    """Draw the attention weights of every head of the first layer: a row for each token, dark where it looks."""
    model = gg.load_model(path)
    ids = model.tokenize(prompt)
    with model.tap("kq_soft_max_ext-0") as t:
        model.new_context().decode(ids)
    heads = t["kq_soft_max_ext-0"][0][:, : len(ids), : len(ids)]  # (n_head, tokens, tokens)
    side, gap = 8, 8 * (len(ids) + 1)
    cells = [
        f'<rect x="{h * gap + 8 * x}" y="{8 * y}" width="{side}" height="{side}" fill-opacity="{weight:.3f}"/>'
        for h, rows in enumerate(heads)
        for y, row in enumerate(rows)
        for x, weight in enumerate(row[: y + 1])
    ]
    size = f'width="{gap * len(heads)}" height="{gap}"'
    Path(out).write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(cells)}</svg>')
    print(f"{len(heads)} heads, {len(ids)} tokens -> {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
