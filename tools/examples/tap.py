"""Look at the graph of a model and at a tensor in the middle of it: python tools/examples/tap.py MODEL.gguf [PROMPT]"""

from __future__ import annotations

import sys

import numpy as np

import pyggml as gg


def main(path: str, prompt: str = "Once upon a time") -> None:
    """Print the first nodes, and what the last token of the prompt attends to."""
    model = gg.load_model(path)
    ids = model.tokenize(prompt)
    graph = model.new_context(n_ctx=64).build_graph(len(ids))  # what decode would run
    print(f"{graph.n_nodes} nodes, {graph.n_leafs} leafs; the first nodes:")
    for node in graph.nodes[:8]:
        print(f"  {node.op:<10} {node.describe()}")
    t = {tensor.name: tensor for tensor in (*graph.leafs, *graph.nodes)}
    n, n_kv = len(ids), t["KQ_mask"].ne[0]
    mask = np.full(t["KQ_mask"].shape, -np.inf, np.float32)
    mask[:n] = np.where(np.arange(n_kv) <= np.arange(n)[:, None], 0, -np.inf)
    inputs = {"inp_tokens": ids, "inp_pos": np.arange(n), "KQ_mask": mask, "inp_out_ids": [n - 1]}
    weights = t["kq_soft_max_ext-0"].set_output()  # keep its memory: attention of the first layer
    gg.compute(graph, {t[name]: value for name, value in inputs.items()})
    print(f"\nwhat {model.detokenize(ids[-1:])!r} looks at in layer 0, averaged over {weights.ne[2]} heads:")
    for token, share in zip(ids, weights.numpy()[:, n - 1].mean(axis=0), strict=False):
        print(f"  {share:5.1%} {'#' * round(40 * float(share)):<40} {model.detokenize([token])!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
