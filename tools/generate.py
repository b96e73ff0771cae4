"""`pyggml generate`: continue a prompt, streaming the text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Optional

import click

from pyggml.bars import bar
from pyggml.errors import GGMLError
from pyggml.llm.generate.generation import Generation, Token, new_generation
from pyggml.llm.generate.long_context import LongContext, tokens_to_keep
from pyggml.llm.model import load_model
from pyggml.llm.samplers import N_PREDICT, StepTrace

from . import summary
from .adapters import Adapters
from .command import Option
from .exits import INTERRUPTED
from .media import Media
from .options import (
    ContextShift,
    CtxSize,
    DraftMax,
    DraftMin,
    DraftPMin,
    Escape,
    GrpAttnN,
    GrpAttnW,
    Json,
    Keep,
    Lookup,
    ModelDraft,
    Mtp,
    PromptCache,
    PromptCacheAll,
    PromptCacheRo,
    Special,
    TraceSampling,
    usage,
)
from .outputs import print_json
from .plain import for_terminal
from .prompt_text import read_prompt, unescape
from .running import Run
from .sampling import Sampling, Stop, declared


def generate(
    sampling: Sampling,
    adapters: Adapters,
    run: Run,
    media: Media,
    prompt: Annotated[Optional[str], Option("-p", "--prompt", help="The text to continue.")] = None,
    file: Annotated[Optional[Path], Option("-f", "--file", help="... from a file; -: from stdin.")] = None,
    suffix: Annotated[Optional[str], Option("--suffix", help="Fill in what stands before this text.")] = None,
    n_predict: Annotated[int, declared("n_predict", "Tokens; -1: no limit, -2: one context.")] = N_PREDICT,
    stop: Stop = None,
    cfg_scale: Annotated[float, Option("--cfg-scale", help="Classifier-free guidance; 1: off.")] = 1.0,
    negative_prompt: Annotated[str, Option("--negative-prompt", help="... away from this prompt.")] = "",
    ctx_size: CtxSize = None,
    keep: Keep = 0,
    context_shift: ContextShift = False,
    grp_attn_n: GrpAttnN = 1,
    grp_attn_w: GrpAttnW = 512,
    model_draft: ModelDraft = None,
    lookup: Lookup = None,
    mtp: Mtp = False,
    draft_max: DraftMax = 3,
    draft_min: DraftMin = 0,
    draft_p_min: DraftPMin = 0.0,
    prompt_cache: PromptCache = None,
    prompt_cache_all: PromptCacheAll = False,
    prompt_cache_ro: PromptCacheRo = False,
    escape: Escape = True,
    display_prompt: Annotated[
        bool, Option("--display-prompt/--no-display-prompt", help="Show the prompt before its continuation.")
    ] = True,
    special: Special = False,
    n_probs: Annotated[int, Option("--n-probs", help="Show the N likeliest tokens of each step.", min=0)] = 0,
    trace_sampling: TraceSampling = False,
    as_json: Json = False,
) -> None:
    """Continue a prompt: from -p, from a file, or from what is piped in. In a prompt with pictures (--image) each
    <__media__> stands for one; without these marks pictures come first, then sounds. The text goes to stdout as it
    comes, with a summary of the time taken on stderr; or one JSON object at the end with --json. Ctrl-C ends it and
    keeps the text.
    """
    start = perf_counter()
    if bool(model_draft) + (lookup is True) + mtp > 1:
        raise click.BadParameter("only one of --model-draft, --lookup and --mtp can be given")
    if prompt_cache and (adapters.loras or adapters.vectors):  # the cache does not record adapters
        raise click.BadParameter("--prompt-cache cannot be given with adapters")
    if media.things and (suffix is not None or prompt_cache or model_draft or lookup or mtp):
        raise click.BadParameter("--image and --audio take no --suffix, no --prompt-cache, and no drafts")
    if escape:
        prompt, suffix = (None if text is None else unescape(text) for text in (prompt, suffix))
        negative_prompt, stop = unescape(negative_prompt), [unescape(text) for text in stop or ()]
    text = read_prompt(prompt, file)
    context = run.context()
    m = run.load(media.towers)
    adapters.apply(m)
    to_continue = text if suffix is None else m.vocab.infill_ids(text, suffix)
    if media.things:
        from pyggml.llm.generate.media_chat import read_marked

        to_continue = read_marked(m, text, media.image or (), media.audio or ())
    with usage():
        g = new_generation(
            m,
            to_continue,
            n_predict,
            n_probs or None,
            stop=stop or (),
            n_ctx=m.hparams.n_ctx_train if ctx_size == 0 or (ctx_size is None and prompt_cache) else ctx_size,
            context=context,
            special=special,
            cfg_scale=cfg_scale,
            negative_prompt=negative_prompt,
            lookup=lookup is not False,
            **sampling,
        )
    if model_draft or lookup or mtp:
        from pyggml.llm.generate.speculative import with_draft

        by = load_model(model_draft) if model_draft else m.heads if mtp else None
        with usage():
            g = with_draft(g, by, draft_max, draft_min, draft_p_min)
    session = _SessionFile(g, prompt_cache, prompt_cache_all, prompt_cache_ro)
    session.open(bool(text) or suffix is not None)
    if g.guidance is None:
        n_keep = tokens_to_keep(keep, len(g.prompt), m.vocab.add_bos)
        shift = context_shift and n_predict != -2
        with usage(GGMLError):
            g.long = LongContext(g.ctx, n_keep, context_shift=shift, grp_attn_n=grp_attn_n, grp_attn_w=grp_attn_w)
    g.check_room()
    load = perf_counter() - start
    traces: list[StepTrace] = []
    g.chain.traces = traces if trace_sampling else None
    made: list[str] = []
    probs: list[dict[str, Any]] = []

    def emit(piece: str) -> None:
        made.append(piece)
        if not as_json:
            sys.stdout.write(for_terminal(piece))
            sys.stdout.flush()

    reason = "interrupted"
    try:
        if display_prompt and not as_json and not g.source:  # an encoder-decoder's answer is shown alone
            sys.stdout.write(text)
            sys.stdout.flush()
        for token in _with_bar(g, not (display_prompt and sys.stdout.isatty())):
            session.save_prompt()
            emit(token.text)
            if n_probs:
                probs.append(summary.probs_json(token, m.vocab))
                if not as_json:
                    print(summary.probs_line(token, m.vocab), file=sys.stderr)
            if token.trace and not as_json:
                print(summary.trace_lines(token.trace, m.vocab), file=sys.stderr)
        reason = g.finish_reason
        if suffix is not None and not as_json:
            sys.stdout.write(suffix)
    except KeyboardInterrupt:
        emit(g.rest())
    session.end()
    total = perf_counter() - start
    if as_json:
        out: dict[str, Any] = {"prompt_ids": list(g.source or g.prompt), "ids": g.ids, "text": "".join(made)}
        out["finish_reason"] = reason
        if n_probs:
            out["probs"] = probs
        out["timings"] = summary.timings(g, load, total)
        if trace_sampling:
            out["trace"] = [summary.trace_json(step) for step in traces]
        print_json(out)
    else:
        print(flush=True)
        print(summary.table(g, load, total), file=sys.stderr)
    if reason == "interrupted":
        raise click.exceptions.Exit(INTERRUPTED)


def _with_bar(g: Generation, shown: bool) -> Iterator[Token]:
    """The tokens of a generation. While a long prompt is evaluated, a bar shows how far it is (unless a text stands on
    the same line)."""
    with bar("prompt") as show:
        g.progress = show if shown else None
        tokens = iter(g)
        first = next(tokens, None)
    if first is not None:
        yield first
        yield from tokens


@dataclass
class _SessionFile:
    """The prompt cache of a run. Without a `path` there is no cache, and nothing is done."""

    g: Generation
    path: Path | None
    everything: bool
    read_only: bool
    due: bool = False  # whether the prompt is still to be saved

    def open(self, given: bool) -> None:
        """Load the part of the prompt that the file has. Without a prompt, continue the text in the file."""
        g = self.g
        if self.path is None:
            return
        if g.guidance is not None:
            raise click.BadParameter("--prompt-cache and --cfg-scale cannot both be given")
        from pyggml.llm.generate.prompt_cache import open_session

        session = open_session(g.ctx, self.path, g.prompt if given else ())
        print(session.report, file=sys.stderr)
        if session.prompt and not given:
            g.prompt = session.prompt
            g.chain.reset()
            g.chain.prime(g.prompt)
        g.n_past = session.n_past
        self.due = session.n_matched < len(g.prompt)

    def save_prompt(self) -> None:
        """Save the prompt, at the moment when all of it is evaluated and nothing more."""
        if self.due:
            self._save(self.g.prompt)

    def end(self) -> None:
        """Save all that was evaluated, or only the prompt when nothing was generated."""
        if self.everything:
            self._save([*self.g.prompt, *self.g.ids])
        self.save_prompt()

    def _save(self, tokens: Sequence[int]) -> None:
        self.due = False
        shifted = self.g.long is not None and self.g.long.moved  # tokens have moved in the cache
        if self.path is not None and not self.read_only and not shifted:
            from pyggml.llm.generate.prompt_cache import save_session

            save_session(self.g.ctx, self.path, tokens)
