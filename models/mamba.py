"""Mamba, Falcon-Mamba and Mamba-2: models of state-space layers alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_inp_embd, build_lm_head, build_norm, build_out_rows
from .blocks.ssm import SSM, build_mamba, build_mamba2
from .hparams import HParams, StateShape
from .metadata import Reader, read_hparams

_TIME_STEP_MIN = "{arch}.ssm.time_step_min"  # only pyggml has this key: llama.cpp knows no shortest step
_LONGEST_STEP = 100.0  # of the shortest one; checkpoints have 0.001


@dataclass(frozen=True, kw_only=True)
class MambaHParams(HParams):
    """Hyperparameters of models with state-space layers.

    ssm           the sizes of these layers
    dt_b_c_norm   dt, B and C are normed (Falcon-Mamba)
    f_dt_b_c_eps  the epsilon of these norms; 0: as in the other norms
    """

    ssm: SSM
    dt_b_c_norm: bool = False
    f_dt_b_c_eps: float = 0.0

    def state(self, il: int) -> StateShape:
        """What layer `il` remembers. Layers without a KV cache are state-space layers."""
        return StateShape() if self.has_kv(il) else self.ssm.state


def read_ssm(r: Reader) -> SSM:
    """The sizes of state-space layers, Mamba-2's when there are groups.

    Raises ModelError when they do not divide each other.
    """
    keys = Keys.SSM
    m = SSM(
        r.integer(keys.CONV_KERNEL),
        r.integer(keys.INNER_SIZE),
        r.integer(keys.STATE_SIZE),
        r.integer(keys.TIME_STEP_RANK),
        r.integer(keys.GROUP_COUNT, 0),
        r.number(_TIME_STEP_MIN, 0.0),
    )
    if not 0 <= m.dt_min <= _LONGEST_STEP:
        r.fail(_TIME_STEP_MIN, f"is {m.dt_min}, not from 0 to {_LONGEST_STEP}")
    for key, value in ((keys.CONV_KERNEL, m.d_conv - 1), (keys.INNER_SIZE, m.d_inner), (keys.STATE_SIZE, m.d_state)):
        if value < 1:
            r.fail(key, "must be larger")
    if m.dt_rank < 1 or (m.n_group and (m.d_inner % m.dt_rank or m.dt_rank % m.n_group)):
        r.fail(keys.TIME_STEP_RANK, f"is {m.dt_rank}, which does not go with {m.n_group} groups in {m.d_inner}")
    return m


def _read(r: Reader) -> MambaHParams:
    none: dict[str, Any] = {"n_head": 1, "n_head_kv": (0,) * r.integer(Keys.LLM.BLOCK_COUNT), "n_ff": 1}
    none |= {"dt_b_c_norm": r.boolean(Keys.SSM.DT_B_C_RMS, False)}
    none |= {"f_dt_b_c_eps": r.number("{arch}.ssm.dt_b_c_rms_epsilon", 0.0)}  # a key of pyggml
    return read_hparams(MambaHParams, r, ssm=read_ssm(r), **none)


def build_model(b: Build[MambaHParams]) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        inpL = build_inp_embd(b)

        def layer(inpL: Tensor, il: int) -> Tensor:
            cur = build_norm(b, inpL, "attn_norm", "attn_norm", il)
            if hp.ssm.n_group:
                cur = build_mamba2(b, cur, hp.ssm, il)
            else:
                kind = "plain" if hp.dt_b_c_norm else "none"
                cur = build_mamba(b, cur, hp.ssm, il, dt_b_c_norm=kind, eps=hp.f_dt_b_c_eps)
            cur, inpL = build_out_rows(b, il, cur, inpL)
            return b.cb(gg.add(cur, inpL), "l_out", il)

        inpL = b.layers(layer, inpL)
        return build_lm_head(b, build_norm(b, inpL, "output_norm", "result_norm"))


ARCHITECTURES = (Architecture(("mamba", "mamba2"), build_model, _read, "recurrent"),)
