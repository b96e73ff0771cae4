"""Nanbeige 4 (huggingface.co/Nanbeige): Llama that may run through its layers several times, each time with K and V of
its own, and the last norm in between unless the file says otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_norm
from .decoder import PlainDecoder
from .hparams import MAX_LAYERS, HParams, PerLayer, refuse
from .metadata import Reader, read_hparams

_NUM_LOOPS, _SKIP_LOOP_FINAL_NORM = "{arch}.num_loops", "{arch}.skip_loop_final_norm"  # not in the gguf package


@dataclass(frozen=True, kw_only=True)
class NanbeigeHParams(HParams):
    """n_loops               how often the layers of the file run; `n_layer` counts the layers of all runs
    skip_loop_final_norm  between two runs, nothing is normed
    """

    n_loops: int
    skip_loop_final_norm: bool

    def __post_init__(self) -> None:
        if self.n_loops < 1 or self.n_layer % self.n_loops:
            refuse("n_loops", self.n_loops, f"it must be positive, and the {self.n_layer} layers a multiple of it")
        for name in ("n_head", "n_head_kv", "n_ff"):  # a file has a value for each layer of one run
            value: PerLayer = getattr(self, name)
            if isinstance(value, tuple) and len(value) == self.n_layer // self.n_loops:
                object.__setattr__(self, name, value * self.n_loops)
        super().__post_init__()

    def block(self, il: int) -> int:
        return il % (self.n_layer // self.n_loops)


def _read(r: Reader) -> NanbeigeHParams:
    n_loops = r.integer(_NUM_LOOPS, 1)
    if not 0 < n_loops <= MAX_LAYERS:
        r.fail(_NUM_LOOPS, f"must be 1 to {MAX_LAYERS}, not {n_loops}")
    skip = r.boolean(_SKIP_LOOP_FINAL_NORM, False)
    n_layer = r.integer(Keys.LLM.BLOCK_COUNT) * n_loops
    return read_hparams(NanbeigeHParams, r, n_layer=n_layer, n_loops=n_loops, skip_loop_final_norm=skip)


class Nanbeige(PlainDecoder[NanbeigeHParams]):
    """Llama, with the last norm between two runs."""

    def layer(self, b: Build[NanbeigeHParams], inpL: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        hp = b.hparams
        if il and hp.block(il) == 0 and not hp.skip_loop_final_norm:
            inpL = build_norm(b, inpL, "output_norm", f"loop_norm-{il}")
        return super().layer(b, inpL, pos, factors, il)


ARCHITECTURES = (Architecture(("nanbeige",), Nanbeige().build, _read),)
