"""Options of every verb that runs a model: the file, its metadata, the context. Names and defaults as in llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Optional

import click

from pyggml.bars import bar
from pyggml.dtypes import CACHE_TYPES, DType
from pyggml.gguf_io.read import Override
from pyggml.llm.model import Model, load_model
from pyggml.llm.options import ContextOptions

from .command import Group, Option
from .logs import start_logging
from .media import TowerOptions
from .options import ModelPath, Ram, Threads
from .outputs import not_the_model

_CONTEXT, _FILE, _ROPE, _LOG = "Context", "Model file", "Rope", "Logging"
_CACHE_TYPES = [t.name for t in CACHE_TYPES]
_KINDS: dict[str, Callable[[str], Override]] = {"int": int, "float": float, "str": str}


@dataclass(frozen=True)
class RunOptions:
    """The values of these options. Scaling of the rope is done by replacing metadata."""

    model: ModelPath = None
    ram: Ram = None
    override_kv: Annotated[
        Optional[list[str]],
        Option(
            "--override-kv",
            panel=_FILE,
            help="Replace metadata; TYPE is int, float, bool or str (repeatable, or joined by commas).",
            metavar="KEY=TYPE:VALUE",
        ),
    ] = None
    mmap: Annotated[bool, Option("--mmap/--no-mmap", panel=_FILE, help="Map the file, or read it.")] = True
    mlock: Annotated[bool, Option("--mlock", panel=_FILE, help="Keep the weights in RAM.")] = False
    repack: Annotated[
        bool, Option("--repack/--no-repack", " /-nr", panel=_FILE, help="Copy weights to the layout that is fastest.")
    ] = True
    fast: Annotated[
        bool,
        Option("--fast", panel=_FILE, help="Round the columns of products: prompts are faster, logits less precise."),
    ] = False
    threads: Threads = None
    threads_batch: Annotated[
        Optional[int],
        Option("-tb", "--threads-batch", panel=_CONTEXT, help="... for prompts (default: as --threads).", min=1),
    ] = None
    batch_size: Annotated[
        Optional[int],
        Option(
            *("-b", "--batch-size"),
            panel=_CONTEXT,
            help="Tokens of a decode, at most (default: 2048; where all logits are looked at, 512).",
            min=1,
        ),
    ] = None
    ubatch_size: Annotated[
        int, Option("-ub", "--ubatch-size", panel=_CONTEXT, help="... that are computed together.", min=1)
    ] = 512
    flash_attn: Annotated[
        Literal["on", "off", "auto"],
        Option("-fa", "--flash-attn", panel=_CONTEXT, help="Flash attention; auto: for texts side by side.", bare="on"),
    ] = "auto"
    cache_type_k: Annotated[
        str, Option("-ctk", "--cache-type-k", panel=_CONTEXT, help=f"Type of K: {', '.join(_CACHE_TYPES)}.")
    ] = "f16"
    cache_type_v: Annotated[
        str, Option("-ctv", "--cache-type-v", panel=_CONTEXT, help="... and of V (quantised: with -fa).")
    ] = "f16"
    rope_scaling: Annotated[
        Optional[str], Option("--rope-scaling", panel=_ROPE, help="none, linear or yarn (default: the model's).")
    ] = None
    rope_scale: Annotated[
        Optional[float], Option("--rope-scale", panel=_ROPE, help="The context is longer by this factor.", above=0)
    ] = None
    rope_freq_base: Annotated[
        Optional[float], Option("--rope-freq-base", panel=_ROPE, help="Base frequency.", above=0)
    ] = None
    rope_freq_scale: Annotated[
        Optional[float], Option("--rope-freq-scale", panel=_ROPE, help="1 / --rope-scale.", above=0)
    ] = None
    yarn_orig_ctx: Annotated[
        Optional[int], Option("--yarn-orig-ctx", panel=_ROPE, help="YaRN: the context of the training.", min=0)
    ] = None
    yarn_ext_factor: Annotated[
        Optional[float], Option("--yarn-ext-factor", panel=_ROPE, help="... 0: interpolation, 1: extrapolation.")
    ] = None
    yarn_attn_factor: Annotated[
        Optional[float], Option("--yarn-attn-factor", panel=_ROPE, help="... scale of the attention.")
    ] = None
    yarn_beta_slow: Annotated[
        Optional[float], Option("--yarn-beta-slow", panel=_ROPE, help="... high correction dimension.", min=0)
    ] = None
    yarn_beta_fast: Annotated[
        Optional[float], Option("--yarn-beta-fast", panel=_ROPE, help="... low correction dimension.", min=0)
    ] = None
    verbose: Annotated[
        bool, Option("-v", "--verbose", panel=_LOG, help="Show what is loaded and computed, on stderr.")
    ] = False
    log_file: Annotated[
        Optional[Path], Option("--log-file", panel=_LOG, help="... to this file, too.", metavar="FILE")
    ] = None

    @property
    def precision(self) -> str:
        """The `precision` of `load_model`."""
        return "fast" if self.fast else "exact"

    def load(self, towers: TowerOptions | None = None) -> Model:
        """Load the model; when this takes long, a bar shows the progress."""
        towers = towers or TowerOptions()
        not_the_model(self.model, self.log_file)
        start_logging(self.verbose, self.log_file)
        overrides = self.kv_overrides()
        with bar("loading") as show:
            return load_model(
                self.model,
                ram=self.ram,
                use_mmap=self.mmap,
                use_mlock=self.mlock,
                repack=self.repack,
                precision=self.precision,
                kv_overrides=overrides,
                mmproj=towers.mmproj,
                image_tokens=towers.image_tokens,
                progress=lambda fraction: show(fraction, 1.0) is None,  # always True: it cannot be cancelled
            )

    def context(self) -> ContextOptions:
        """The arguments of a context, all but its length."""
        options: ContextOptions = {
            "n_ubatch": self.ubatch_size,
            "n_threads": self.threads,
            "n_threads_batch": self.threads_batch,
            "type_k": cache_type("--cache-type-k", self.cache_type_k),
            "type_v": cache_type("--cache-type-v", self.cache_type_v),
        }
        if self.flash_attn != "auto":
            options["flash_attn"] = self.flash_attn == "on"
        if self.batch_size is not None:
            options["n_batch"] = self.batch_size
        return options

    def kv_overrides(self) -> dict[str, Override]:
        """Metadata that is replaced."""
        return self._rope() | dict(map(_override, _split(self.override_kv or ())))

    def _rope(self) -> dict[str, Override]:
        scale = self.rope_scale
        if self.rope_freq_scale is not None:
            if scale is not None:
                raise click.BadParameter("--rope-freq-scale is given without --rope-scale")
            scale = 1 / self.rope_freq_scale
        if self.rope_scaling not in (None, "none", "linear", "yarn"):
            raise click.BadParameter(f"--rope-scaling is none, linear or yarn, not {self.rope_scaling!r}")
        found: dict[str, Override | None] = {
            "freq_base": self.rope_freq_base,
            "scaling.type": self.rope_scaling,
            "scaling.factor": scale,
            "scaling.original_context_length": self.yarn_orig_ctx,
            "scaling.yarn_ext_factor": self.yarn_ext_factor,
            "scaling.yarn_attn_factor": self.yarn_attn_factor,
            "scaling.yarn_beta_slow": self.yarn_beta_slow,
            "scaling.yarn_beta_fast": self.yarn_beta_fast,
        }
        return {f"{{arch}}.rope.{key}": value for key, value in found.items() if value is not None}


Run = Annotated[RunOptions, Group.of(RunOptions)]


def cache_type(option: str, name: str) -> DType:
    """The type `name` of a cache. An error of usage, naming the option, for a type that a cache cannot have."""
    if name.upper() not in _CACHE_TYPES:
        raise click.BadParameter(f"{option} is one of {', '.join(_CACHE_TYPES)}, not {name!r}")
    return DType[name.upper()]


def _split(texts: list[str] | tuple[str, ...]) -> list[str]:
    """KEY=TYPE:VALUE, separated by commas; `\\,` is a comma of a value."""
    return [part.replace("\0", ",") for text in texts for part in text.replace("\\,", "\0").split(",")]


def _override(text: str) -> tuple[str, Override]:
    key, equals, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    try:
        if key and equals and colon:
            if kind == "bool" and value in ("true", "false"):
                return key, value == "true"
            return key, _KINDS[kind](value)
    except (KeyError, ValueError):
        pass
    raise click.BadParameter(f"--override-kv is KEY=TYPE:VALUE, TYPE int, float, bool or str, not {text!r}")
