"""Gemma: norms are stored as what is added to one."""

from __future__ import annotations

from ..family import Family
from ..metadata import window
from ..moves import PLUS_ONE
from .spelling import SANDWICH

_NORMS = {"*_norm.weight": PLUS_ONE}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}

FAMILIES = (
    Family(arch="gemma", types=("gemma",), cls="GemmaForCausalLM", moves=_NORMS),
    Family(
        arch="gemma2",
        types=("gemma2",),
        cls="Gemma2ForCausalLM",
        keys=_CAPS,
        moves=_NORMS,
        more=window,
        spelled=SANDWICH,
    ),
    Family(
        arch="gemma3",
        types=("gemma3_text", "gemma3"),
        cls="Gemma3ForCausalLM",
        keys=_CAPS,
        moves=_NORMS,
        more=window,
        spelled=SANDWICH,
    ),
)
