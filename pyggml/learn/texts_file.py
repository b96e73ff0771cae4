"""Texts to train on, read from files: JSON lines, or plain text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from pyggml.errors import ModelError
from pyggml.llm.generate.templates import ChatTemplate, find_template
from pyggml.llm.generate.text import chat_ids
from pyggml.small_file import parse_json

if TYPE_CHECKING:
    from pyggml.llm.loaded import LoadedModel


_SORTED = 16  # so many batches are sorted by length


class Example(NamedTuple):
    """The token ids of a text, and for each of them 1 when its prediction counts, else 0."""

    ids: Sequence[int]
    mask: Sequence[Any]


def read_examples(
    path: str | os.PathLike[str], model: LoadedModel, n_ctx: int, *, mask_prompt: bool = False, pack: bool = False
) -> list[Example]:
    """The texts of a file, as tokens of `model`, each of at most `n_ctx` tokens.

    A file that ends with .jsonl has an object in each line: {"text": ...}; {"prompt": ..., "completion": ...}; or
    {"messages": [...]}, which the model's own chat template makes a text of. The end-of-text token is added to texts
    and completions. Longer ones are cut. Any other file is one plain text, which is cut into pieces of n_ctx tokens.

    mask_prompt  only completions, and the messages of the assistant, count
    pack         join short texts, one after the other, as long as they fit into n_ctx tokens. (The first token of each
                 does not count then.)

    Raises ModelError for a file that cannot be read or has no text, and for a line that is no such object (with its
    number).
    """
    where = os.fspath(path)
    try:
        data = Path(where).read_text(encoding="utf-8")
    except OSError as e:
        raise ModelError(f"{where}: cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ModelError(f"{where}: is no UTF-8 text: {e.reason} at byte {e.start}") from None
    if where.endswith(".jsonl"):
        found = [_cut(e, n_ctx) for e in _of_lines(where, data, model, mask_prompt)]
    else:
        ids = model.tokenize(data)
        found = [Example(part, [1] * len(part)) for i in range(0, len(ids), n_ctx) if (part := ids[i : i + n_ctx])]
    found = [e for e in found if len(e.ids) > 1 and any(e.mask[1:])]
    if not found:
        raise ModelError(f"{where}: holds no text with a token to predict")
    return list(_packed(found, n_ctx)) if pack else found


def _cut(e: Example, n: int) -> Example:
    return Example(e.ids[:n], e.mask[:n])


def _of_lines(where: str, data: str, model: LoadedModel, mask_prompt: bool) -> Iterator[Example]:
    template: ChatTemplate | None = None
    for number, line in enumerate(data.split("\n"), 1):
        if not line.strip():
            continue
        at = f"{where}, line {number}"
        entry = parse_json(at, line.encode(), ModelError)
        if not isinstance(entry, dict):
            raise ModelError(f"{at}: is no JSON object")
        values = cast("dict[str, Any]", entry)
        if "messages" in values:
            template = template or find_template(None, model.kv)
            yield _of_messages(at, values["messages"], model, template, mask_prompt)
        elif "prompt" in values and "completion" in values:
            prompt = model.tokenize(_text(at, values, "prompt"), parse_special=True)
            answer = [*model.tokenize(_text(at, values, "completion"), add_special=False), *_end(model)]
            yield Example(prompt + answer, [int(not mask_prompt)] * len(prompt) + [1] * len(answer))
        elif "text" in values:
            ids = [*model.tokenize(_text(at, values, "text")), *_end(model)]
            yield Example(ids, [1] * len(ids))
        else:
            raise ModelError(f"{at}: has neither `text`, nor `prompt` and `completion`, nor `messages`")


def _text(at: str, values: Mapping[str, Any], key: str) -> str:
    if not isinstance(values[key], str):
        raise ModelError(f"{at}: `{key}` must be a string, not {values[key]!r:.40}")
    return values[key]


def _end(model: LoadedModel) -> list[int]:
    """The token that ends a text, when the model has one."""
    return [] if model.vocab.eos is None else [model.vocab.eos]


def _of_messages(at: str, messages: Any, model: LoadedModel, template: ChatTemplate, mask_prompt: bool) -> Example:
    """A chat. Its answers are what the template adds behind the text that asks for them."""

    def rendered(n: int, asks: bool) -> str:
        try:
            return template.render(cast("Sequence[Mapping[str, Any]]", messages)[:n], model.vocab, asks)
        except ModelError as e:
            raise ModelError(f"{at}: {e}") from None

    if not isinstance(messages, list) or not messages:
        raise ModelError(f"{at}: `messages` must be a list of messages, not {messages!r:.40}")
    for message in cast("list[Any]", messages):
        values = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
        if not isinstance(values.get("role"), str) or not isinstance(values.get("content"), str | list):
            raise ModelError(f"{at}: a message must have a `role` and a `content`, not {message!r:.40}")
    parts: list[tuple[str, int]] = []
    done = ""
    for i, message in enumerate(cast("list[Any]", messages)):
        if not isinstance(message, dict) or cast("dict[str, Any]", message).get("role") != "assistant":
            continue
        for text, counts in ((rendered(i, True), not mask_prompt), (rendered(i + 1, False), True)):
            if not text.startswith(done):
                raise ModelError(f"{at}: the chat template changes what came before an answer: its text cannot be cut")
            parts.append((text[len(done) :], int(counts)))
            done = text
    whole = rendered(len(cast("list[Any]", messages)), False)
    parts.append((whole.removeprefix(done), int(not mask_prompt)))
    ids: list[int] = []
    mask: list[int] = []
    for text, counts in parts:
        if not text:
            continue
        more = model.vocab.tokenize(text, False, True, continued=True) if ids else chat_ids(model.vocab, text)
        ids += more
        mask += [counts] * len(more)
    return Example(ids, mask)


def _packed(examples: Sequence[Example], n_ctx: int) -> Iterator[Example]:
    ids, mask = list[int](), list[int]()
    for e in examples:
        if ids and len(ids) + len(e.ids) > n_ctx:
            yield Example(ids, mask)
            ids, mask = [], []
        ids, mask = [*ids, *e.ids], [*mask, 0, *e.mask[1:]]
    yield Example(ids, mask)


class Batches:
    """The batches of all steps, in an order that follows from a seed: step i has the same batch in every run.

    Each epoch has all examples once, in an order of its own; the last batch of an epoch may be smaller. Texts of a
    batch are of similar lengths, so that little is filled up.
    """

    def __init__(self, examples: Sequence[Example], n_batch: int, seed: int = 0) -> None:
        self._examples, self._n_batch, self._seed = examples, n_batch, seed
        self.n_epoch = -(-len(examples) // n_batch)  # steps of an epoch
        self._epoch, self._order = -1, list[list[int]]()

    def __getitem__(self, step: int) -> list[Example]:
        epoch, at = divmod(step, self.n_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        return [self._examples[i] for i in self._order[at]]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        rng, n = np.random.default_rng((self._seed, epoch)), self._n_batch
        order: list[int] = rng.permutation(len(self._examples)).tolist()
        for i in range(0, len(order), _SORTED * n):
            order[i : i + _SORTED * n] = sorted(order[i : i + _SORTED * n], key=lambda j: len(self._examples[j].ids))
        batches = [order[i : i + n] for i in range(0, len(order), n)]
        return [batches[i] for i in rng.permutation(len(batches))]
