"""`pyggml inspect`: a run of a model as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pyggml.gguf_io.atomic_file import AtomicFile
from pyggml.inspect.page import page
from pyggml.inspect.record import record_model
from pyggml.llm.media_prompt import MediaPrompt
from pyggml.llm.model import load_model

from .command import Option
from .media import Media
from .options import FlashAttn, ModelPath, Threads
from .outputs import not_the_model


def inspect(
    out: Annotated[Path, Option("-o", "--output", help="The file to write.", metavar="FILE.html")],
    prompt: Annotated[str, Option("-p", "--prompt", help="The text to evaluate.")],
    media: Media,
    model: ModelPath = None,
    threads: Threads = None,
    flash_attn: FlashAttn = False,
) -> None:
    """Evaluate a text, with pictures too (--image), and write an HTML page that shows the graph, the time of each step
    on each thread, memory, and the values of every node. The page needs no network."""
    not_the_model(model, out)
    m = load_model(model, mmproj=media.towers.mmproj, image_tokens=media.towers.image_tokens)
    given: list[int] | MediaPrompt = m.tokenize(prompt)
    if media.things:
        from pyggml.llm.generate.media_chat import read_marked

        given = read_marked(m, prompt, media.image or (), media.audio or ())
    run = record_model(m, given, n_threads=threads, flash_attn=flash_attn)
    about = {"model": m.path, "architecture": m.arch, "prompt": repr(prompt), "tokens": str(len(run.tokens))}
    about |= {kind: ", ".join(path for k, path in media.things if k == kind) for kind in dict(media.things)}
    html = page(run, f"pyggml inspect · {Path(m.path).name}", about)
    with AtomicFile(out) as file:
        n_bytes = file.file.write(html.encode())
    print(f"{run.graph.n_nodes} nodes, {run.graph.n_leafs} leafs, {n_bytes / 1e3:.0f} kB -> {out}")
