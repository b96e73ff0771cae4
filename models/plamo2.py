"""PLaMo 2 (arXiv 2509.04897): Mamba layers with heads, some that attend, and norms before and after each."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_norm
from .blocks.ssm import build_scan
from .blocks.states import build_conv, parts_of_rows
from .decoder import PlainDecoder
from .mamba import MambaHParams, read_ssm
from .metadata import Reader, read_hparams


@dataclass(frozen=True, kw_only=True)
class PLaMo2(PlainDecoder[MambaHParams]):
    """A decoder in which layers without heads have a state-space layer instead of attention. It has the scan of
    Mamba-2, but makes B, C and dt as Mamba does."""

    def attention(self, b: Build[MambaHParams], cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        hp = b.hparams
        if hp.has_kv(il):
            return super().attention(b, cur, pos, factors, il)
        m, n_tokens = hp.ssm, b.n_tokens
        n_head, d_state, n_dt = m.dt_rank, m.d_state, max(64, hp.n_embd // 16)
        zx = b.linear("ssm_in", cur, 2 * m.d_inner, "mamba_in_proj", il)
        size, head = zx.nb[0], m.d_inner // n_head
        z, x = (
            gg.cont_2d(
                gg.view_3d(zx, head, n_head, n_tokens, 2 * head * size, zx.nb[1], i * head * size),
                m.d_inner,
                n_tokens,
            )
            for i in (0, 1)
        )
        x = b.cb(gg.silu(build_conv(b, x, "ssm_conv1d", m.d_conv, il)), "mamba_conv1d_silu", il)
        x_bcdt = b.linear("ssm_x", x, n_dt + 2 * d_state, "mamba_bcdt_proj", il)
        parts = (("b", 0, d_state), ("c", d_state, d_state), ("dt", 2 * d_state, n_dt))
        B, C, dt = (
            build_norm(b, parts_of_rows(x_bcdt, first, 1, n), f"ssm_{name}_norm", f"{name}_normed", il, suffix="")
            for name, first, n in parts
        )
        dt = b.linear("ssm_dt", gg.reshape_2d(dt, n_dt, n_tokens), n_head, "mamba_dt_proj", il)
        x = gg.reshape_3d(x, head, n_head, n_tokens)
        A, D = (gg.reshape_2d(b.weight(f"ssm_{name}", (n_head,), il, ""), 1, n_head) for name in "ad")
        y = build_scan(b, x, dt, A, B, C, il)
        y = gg.reshape_2d(b.cb(gg.add(y, gg.mul(x, D)), "mamba_y_add_d", il), m.d_inner, n_tokens)
        y = b.cb(gg.swiglu_split(z, y), "mamba_y_swiglu_z", il)
        return b.linear("ssm_out", y, hp.n_embd, "mamba_out_proj", il)


def _read(r: Reader) -> MambaHParams:
    return read_hparams(MambaHParams, r, ssm=read_ssm(r), rope_type="neox")


_BUILD = PLaMo2(
    qk_norm="heads",
    rope_factors=False,
    post_norm=True,
    gate_in_up=True,
    bare_norms=("post_attention_norm", "post_ffw_norm"),
)
ARCHITECTURES = (Architecture(("plamo2",), _BUILD.build, _read, "hybrid"),)
