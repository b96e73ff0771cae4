"""Options that several verbs share."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional

import click

from pyggml.config import read_config
from pyggml.errors import BatchError, GGMLError, SamplerError
from pyggml.hub import find_model
from pyggml.native.numa import Numa, numa_init
from pyggml.stream.sizes import memory_size

from .command import Group, Option


def the_model(given: str | None) -> str | None:
    """The local path of the model that is asked for; None: the one that ships with pyggml."""
    name = given
    if name is None:
        name = os.environ.get("PYGGML_MODEL") or read_config().model
    return None if name is None else find_model(os.path.expanduser(name))


ModelPath = Annotated[
    Optional[str],
    Option(
        "-m",
        "--model",
        "-hf",
        "-hfr",
        "--hf-repo",
        help="GGUF file, folder, USER/REPO[:Q4_K_M] of the Hugging Face Hub, URL, or alias (default: PYGGML_MODEL, the "
        "configuration's, or the model that ships with pyggml).",
        metavar="MODEL",
        read=the_model,
    ),
]
Ram = Annotated[
    Optional[str],
    Option(
        "--ram",
        help="Memory for weights, as 2GiB: what does not fit is streamed from disk.",
        metavar="SIZE",
        check=memory_size,
    ),
]


def _placed(given: dict[str, Any]) -> int | None:
    """Place the threads, and return how many there are to be."""
    if given["numa"] is not None:
        numa_init(given["numa"])
    return given["threads"]


Threads = Annotated[
    Optional[int],
    Group(
        {
            "threads": Annotated[
                Optional[int], Option("-t", "--threads", help="Threads (default: one per core).", min=1)
            ],
            "numa": Annotated[
                Optional[Numa],
                Option(
                    "--numa",
                    help="On a machine with several memory nodes: spread threads and memory over all, stay on one, "
                    "or leave both to the program numactl.",
                ),
            ],
        },
        {"threads": None, "numa": None},
        _placed,
    ),
]
Config = Annotated[
    Optional[Path],
    Option("--config", help="YAML file with options by their long names (the command line counts more).", config=True),
]
Json = Annotated[bool, Option("--json", help="Print one JSON document for machines.")]
CtxSize = Annotated[
    Optional[int], Option("-c", "--ctx-size", help="Size of the context in tokens; 0: as trained.", min=0)
]
FlashAttn = Annotated[bool, Option("-fa", "--flash-attn", help="Use flash attention.")]
Escape = Annotated[
    bool,
    Option("--escape/--no-escape", "-e", help="Read \\n, \\t, \\xHH and the like in texts of the command line."),
]
Special = Annotated[bool, Option("-sp", "--special", help="Show control tokens, too.")]
TraceSampling = Annotated[bool, Option("--trace-sampling", help="Show what each sampler did, on stderr.")]
PromptCache = Annotated[
    Optional[Path], Option("--prompt-cache", help="File that keeps the prompt evaluated, for the next time.")
]
PromptCacheAll = Annotated[bool, Option("--prompt-cache-all", help="... and what was generated.")]
PromptCacheRo = Annotated[bool, Option("--prompt-cache-ro", help="... but do not write it.")]
Keep = Annotated[int, Option("--keep", help="Tokens of the prompt that a context shift keeps; -1: all.", min=-1)]
ContextShift = Annotated[
    bool,
    Option("--context-shift/--no-context-shift", help="Where the context is full, drop the oldest text and go on."),
]
GrpAttnN = Annotated[int, Option("-gan", "--grp-attn-n", help="Self-extend: tokens that share a position.")]
GrpAttnW = Annotated[int, Option("-gaw", "--grp-attn-w", help="Self-extend: the window, a multiple of -gan.")]
_DRAFT = "Speculative decoding (names and defaults as in llama.cpp)"
ModelDraft = Annotated[
    Optional[str],
    Option(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        help="A small model that guesses.",
        metavar="FILE",
        panel=_DRAFT,
    ),
]
Lookup = Annotated[
    Optional[bool],
    Option(
        "--lookup/--no-lookup",
        help="Guess that the text repeats itself, without a model (default: where that is faster).",
        panel=_DRAFT,
    ),
]
Mtp = Annotated[bool, Option("--mtp", help="Let the heads in the model's file guess (MTP layers).", panel=_DRAFT)]
DraftMax = Annotated[
    int,
    Option("--draft-max", "--spec-draft-n-max", help="Tokens guessed at a time, at most.", min=1, panel=_DRAFT),
]
DraftMin = Annotated[int, Option("--draft-min", "--spec-draft-n-min", help="... and at least.", min=0, panel=_DRAFT)]
DraftPMin = Annotated[
    float,
    Option(
        "--draft-p-min",
        "--spec-draft-p-min",
        help="A draft ends where no token is this likely.",
        panel=_DRAFT,
    ),
]


@contextmanager
def usage(*errors: type[GGMLError]) -> Generator[None]:
    """Turn SamplerError and BatchError within the block into an error of usage (exit code 2): the values that they
    refuse were given on the command line."""
    kinds = errors or (SamplerError, BatchError)
    try:
        yield
    except kinds as e:
        raise click.BadParameter(str(e)) from e
