"""The graph that moves cached K to other positions (llama.cpp's build_k_shift): it ropes K by the change in
position."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.graph import Graph
from pyggml.tensor import Context, Tensor

from ..blocks import rope, rope_factors, rotate
from ..hparams import HParams
from .kv_cache import KVCache


def build_k_shift(hp: HParams, weights: Mapping[str, Tensor], kv: KVCache) -> tuple[Graph, Tensor]:
    """The graph, and its input `K_shift`: I32 ne [size], added to the position of each cell. The graph is empty when
    no layer of the cache is roped.

    Other types than F32 are roped in F32 and stored again.
    """
    graph = Graph()
    with Context() as ctx:
        delta = ctx.new_tensor(DType.I32, (kv.size,), "K_shift").set_input()
        factors = rope_factors(hp, weights, kv.size)
        row = kv.type_k.row_size
        for il, k_l in zip(kv.layers, kv.k_l, strict=True):
            n, r = hp.layer(il), hp.rope(il)
            if r is None or k_l.buffer is None:  # not roped, or in another stage
                continue
            # YaRN scales K where it ropes it; roping it again must not scale it again
            attn_factor = 1.0 / (1.0 - 0.1 * math.log(r.freq_scale)) if r.ext_factor else 1.0
            head = n.n_embd_head_k - r.first
            by = kv.rotation_k(il)
            if by is not None:
                k = gg.view_3d(k_l, n.n_embd_head_k, n.n_head_kv, kv.size, row(n.n_embd_head_k), row(n.n_embd_k_gqa), 0)
                whole = rotate(gg.cast(k, DType.F32), by)
                part = gg.view_3d(whole, head, *whole.ne[1:3], *whole.nb[1:3], whole.nb[0] * r.first)
                roped = rope(hp, r, gg.cont(part) if r.first else part, delta, factors, attn_factor)
                if r.first:
                    kept = gg.view_3d(whole, r.first, *whole.ne[1:3], *whole.nb[1:3], 0)
                    roped = gg.concat(gg.cont(kept), roped, 0)
                graph.build_forward_expand(gg.cpy(rotate(roped, by), k).set_name(f"K_shifted-{il}"))
                continue
            k = gg.view_3d(k_l, head, n.n_head_kv, kv.size, row(n.n_embd_head_k), row(n.n_embd_k_gqa), row(r.first))
            roped = rope(hp, r, k if kv.type_k is DType.F32 else gg.cast(k, DType.F32), delta, factors, attn_factor)
            graph.build_forward_expand(gg.cpy(roped, k).set_name(f"K_shifted-{il}"))
    return graph, delta
