"""Texts to train on, read from files: JSON lines, or plain text."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from pyggml.errors import ModelError
from pyggml.llm.generate.templates import ChatTemplate, find_template
from pyggml.llm.generate.text import chat_ids
from pyggml.small_file import open_regular, parse_json
from pyggml.types import Ints

if TYPE_CHECKING:
    from pyggml.llm.loaded import LoadedModel


Texts = Sequence[Sequence[int] | Ints]  # token ids of each text
Masks = Sequence[Sequence[Any] | npt.NDArray[np.bool_]]  # of each text, for each token whether its prediction counts

_SORTED = 16  # so many batches are sorted by length


class Example(NamedTuple):
    """The token ids of a text, and for each of them whether its prediction counts. `encoded`: of encoder-decoders, the
    token ids that are encoded for it."""

    ids: Sequence[int] | Ints
    mask: Sequence[Any] | npt.NDArray[np.bool_]
    encoded: Sequence[int] | Ints | None = None

    @property
    def n_counted(self) -> int:
        """How many predictions count. The first token is not predicted."""
        return int(np.count_nonzero(np.asarray(self.mask)[1:]))


def columns(examples: Sequence[Example]) -> tuple[Texts, Masks, Texts | None]:
    """The texts, their masks, and what is encoded for them, as `Trainer.step` takes them."""
    encoded = [e.encoded for e in examples if e.encoded is not None]
    return [e.ids for e in examples], [e.mask for e in examples], encoded or None


def read_examples(
    path: str | os.PathLike[str], model: LoadedModel, n_ctx: int, *, mask_prompt: bool = False, pack: bool = False
) -> list[Example]:
    """The texts of a file, as tokens of `model`, each of at most `n_ctx` tokens.

    A file that ends with .jsonl has an object in each line: {"text": ...}; {"prompt": ..., "completion": ...}; or
    {"messages": [...]}, which the model's own chat template makes a text of. The end-of-text token is added to texts
    and completions. Longer ones are cut. It is read line by line; what stays in memory are 5 bytes for each token. Any
    other file is one plain text, which is cut into pieces of n_ctx tokens.

    mask_prompt  only completions, and the messages of the assistant, count
    pack         join short texts, one after the other, as long as they fit into n_ctx tokens. (The first token of each
                 does not count then.)

    An encoder-decoder encodes the prompt, and its decoder learns the completion: each line must have both, and nothing
    is packed.

    Lines without a token to predict are left out, with a warning that tells their numbers. Raises ModelError for a file
    that cannot be read or has no text, and for a line that is no such object (with its number).
    """
    where = os.fspath(path)
    skipped: list[int] = []
    if model.architecture.encode is not None and (pack or not where.endswith(".jsonl")):
        text = "is an encoder-decoder: it learns from lines of `prompt` and `completion` (.jsonl), which are not packed"
        raise ModelError(f"{where}: {model.arch} {text}")
    try:
        with open_regular(where, ModelError) as file:
            if where.endswith(".jsonl"):
                found = list(_usable(_of_lines(where, file, model, n_ctx, mask_prompt), n_ctx, skipped))
            else:
                ids = model.tokenize(file.read().decode())
                found = [_example(ids[i : i + n_ctx], 1) for i in range(0, len(ids) - 1, n_ctx)]
    except OSError as e:
        raise ModelError(f"{where}: cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ModelError(f"{where}: is no UTF-8 text: {e.reason} at byte {e.start}") from None
    found = [e for e in found if len(e.ids) > 1]
    if not found:
        raise ModelError(f"{where}: holds no text with a token to predict")
    if skipped:
        lines = ", ".join(map(str, skipped[:5])) + (", ..." if len(skipped) > 5 else "")
        text = f"{len(skipped)} texts have no token to predict and are left out: lines {lines}"
        warnings.warn(f"{where}: {text}", stacklevel=2)
    return list(_packed(found, n_ctx)) if pack else found


def _example(ids: Sequence[int], mask: Sequence[int] | int) -> Example:
    """As arrays, which take less memory than lists."""
    return Example(np.array(ids, np.int32), np.array(np.broadcast_to(mask, len(ids)), np.bool_))


def _usable(lines: Iterator[tuple[int, Example]], n_ctx: int, skipped: list[int]) -> Iterator[Example]:
    """The texts, cut, that have a token to predict. The numbers of other lines are added to `skipped`."""
    for number, e in lines:
        cut = _example(cast("Sequence[int]", e.ids[:n_ctx]), cast("Sequence[int]", e.mask[:n_ctx]))
        if e.encoded is not None:
            cut = cut._replace(encoded=np.array(e.encoded[:n_ctx], np.int32))
        if cut.n_counted:
            yield cut
        else:
            skipped.append(number)


def _of_lines(
    where: str, file: IO[bytes], model: LoadedModel, n_ctx: int, mask_prompt: bool
) -> Iterator[tuple[int, Example]]:
    """The texts of a file of JSON lines, with the numbers of their lines. A chat ends when it has `n_ctx` tokens."""
    template: ChatTemplate | None = None
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        at = f"{where}, line {number}"
        entry = parse_json(at, line, ModelError)
        if not isinstance(entry, dict):
            raise ModelError(f"{at}: is no JSON object")
        values = cast("dict[str, Any]", entry)
        if model.decoder_start is not None:
            yield number, _of_pair(at, values, model, model.decoder_start)
        elif "messages" in values:
            template = template or find_template(None, model.kv)
            yield number, _of_messages(at, values["messages"], model, template, n_ctx, mask_prompt)
        elif "prompt" in values and "completion" in values:
            prompt = model.tokenize(_text(at, values, "prompt"), parse_special=True)
            answer = [*model.tokenize(_text(at, values, "completion"), add_special=False), *_end(model)]
            yield number, Example(prompt + answer, [int(not mask_prompt)] * len(prompt) + [1] * len(answer))
        elif "text" in values:
            text = _text(at, values, "text")
            ids = [*model.tokenize(text), *_end(model)] if text else []
            yield number, Example(ids, [1] * len(ids))
        else:
            raise ModelError(f"{at}: has neither `text`, nor `prompt` and `completion`, nor `messages`")


def _of_pair(at: str, values: Mapping[str, Any], model: LoadedModel, start: int) -> Example:
    """What an encoder-decoder encodes, and what its decoder is to say."""
    if "prompt" not in values or "completion" not in values:
        raise ModelError(f"{at}: {model.arch} is an encoder-decoder: a line must have `prompt` and `completion`")
    encoded = model.tokenize(_text(at, values, "prompt"), parse_special=True)
    answer = model.tokenize(_text(at, values, "completion"), add_special=False)
    if not encoded:
        raise ModelError(f"{at}: `prompt` is empty: there is nothing to encode")
    ids = [start, *answer, *_end(model)]
    return Example(ids, [1] * len(ids), encoded)


def _text(at: str, values: Mapping[str, Any], key: str) -> str:
    if not isinstance(values[key], str):
        raise ModelError(f"{at}: `{key}` must be a string, not {values[key]!r:.40}")
    return values[key]


def _end(model: LoadedModel) -> list[int]:
    """The token that ends a text, when the model has one."""
    return [] if model.vocab.eos is None else [model.vocab.eos]


def _of_messages(
    at: str, messages: Any, model: LoadedModel, template: ChatTemplate, n_ctx: int, mask_prompt: bool
) -> Example:
    """A chat. Its answers are what the template adds behind the text that asks for them. Each takes as long as all that
    came before it, so those behind `n_ctx` tokens are not looked at."""

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
    ids: list[int] = []
    mask: list[int] = []
    done = ""

    def add(text: str, counts: bool) -> None:
        nonlocal done
        done += text
        if text:
            more = model.vocab.tokenize(text, False, True, continued=True) if ids else chat_ids(model.vocab, text)
            ids.extend(more)
            mask.extend([int(counts)] * len(more))

    for i, message in enumerate(cast("list[Any]", messages)):
        if len(ids) >= n_ctx:
            break
        if cast("dict[str, Any]", message).get("role") != "assistant":
            continue
        for text, counts in ((rendered(i, True), not mask_prompt), (rendered(i + 1, False), True)):
            if not text.startswith(done):
                raise ModelError(f"{at}: the chat template changes what came before an answer: its text cannot be cut")
            add(text[len(done) :], counts)
    else:
        add(rendered(len(cast("list[Any]", messages)), False).removeprefix(done), not mask_prompt)
    return Example(ids, mask)


def _packed(examples: Sequence[Example], n_ctx: int) -> Iterator[Example]:
    """Texts that are joined as long as they fit; the first token of each does not count."""
    together: list[Example] = []
    n = 0
    for e in [*examples, None]:
        if together and (e is None or n + len(e.ids) > n_ctx):
            masks = [np.concatenate([[False], each.mask[1:]]) for each in together]
            yield Example(np.concatenate([each.ids for each in together]), np.concatenate(masks))
            together, n = [], 0
        if e is not None:
            together, n = [*together, e], n + len(e.ids)


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
