"""A chat: messages in one context, which evaluates the new tokens of each turn alone."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, cast

from pyggml.errors import ModelError

from ..samplers import SamplerChain
from .generation import Generation, Token
from .long_context import LongContext
from .lookup import with_lookup
from .prefixes import common_prefix, keep_prefix
from .templates import ChatTemplate, Message
from .text import chat_ids

if TYPE_CHECKING:
    from ..context import LlamaContext
    from ..media_prompt import PlacedMedia

_FRAME = 32  # tokens that a template puts around a message, at most


def _user(content: str, media: Sequence[tuple[str, Any]] = ()) -> Message:
    parts = [*({"type": kind, kind: thing} for kind, thing in media), {"type": "text", "text": content}]
    return cast("Message", {"role": "user", "content": parts if media else content})


class ChatSession:
    """Messages, and a context whose sequence 0 holds them.

    messages    so far, the system message first
    generation  the last reply: its timings, finish_reason and ids
    special     whether control tokens are shown in replies, too
    lookup      whether replies may be guessed from the chat, see `with_lookup`
    """

    def __init__(
        self,
        ctx: LlamaContext,
        chain: SamplerChain,
        template: ChatTemplate,
        system: str = "",
        n_predict: int = -1,
        stop: tuple[str, ...] = (),
        context_shift: bool = False,
        n_keep: int = -1,
    ) -> None:
        """`context_shift`: when the context is full, its oldest tokens are dropped, except the first `n_keep`
        (negative: the tokens of the system message)."""
        if ctx.model.architecture.encode is not None:
            raise ModelError(f"{ctx.model.arch} is an encoder-decoder: it answers a text (`generate`) and has no chat")
        self.ctx, self.chain, self.template, self.n_predict = ctx, chain, template, n_predict
        self.context_shift, self.n_keep, self.special, self.lookup = context_shift, n_keep, False, True
        self.stop = (*template.stop, *stop)
        self.messages: list[Message] = []
        self.generation: Generation | None = None
        self._ids: list[int] = []  # the tokens that the context was given; after an interruption it holds fewer
        self._prompt = self._reply = ""  # the text they are of, up to the last reply, and that
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Forget all messages except the system message. A `system` replaces that message too; with "" there is no
        system message afterwards."""
        if system is None:
            self.messages = self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else []
        else:
            self.messages = [{"role": "system", "content": system}] if system else []
        self.chain.reset()

    def undo(self) -> Message | None:
        """Forget the last message of the user and what follows it. Returns that message; None when there is none."""
        for i in range(len(self.messages) - 1, -1, -1):
            if self.messages[i]["role"] == "user":
                message = self.messages[i]
                del self.messages[i:]
                return message
        return None

    def again(self) -> Generator[Token, None, None]:
        """Another reply to the last message of the user, in the place of the last reply; see `say`. Raises ModelError
        when there is no message yet."""
        message = self.undo()
        if message is None:
            raise ModelError("there is no message yet that could be replied to")
        content: Any = message["content"]
        if isinstance(content, str):
            return self.say(content)
        *media, text = cast("list[dict[str, Any]]", content)
        return self.say(text["text"], [(part["type"], part[part["type"]]) for part in media])

    def load(self, messages: object) -> None:
        """Go on with other messages. Raises ModelError for anything that is not a list of messages with text."""
        known: list[Any] = cast("list[Any]", messages) if isinstance(messages, list) else [None]
        for i, m in enumerate(known):
            told: dict[str, Any] = cast("dict[str, Any]", m) if isinstance(m, dict) else {}
            roles = ("system", "user", "assistant") if i == 0 else ("user", "assistant")
            if told.get("role") not in roles or not isinstance(told.get("content"), str | list):
                raise ModelError(f"message {i} must have the role {' or '.join(roles)}, and content, not {m!r:.60}")
        self.messages = [{"role": m["role"], "content": m["content"]} for m in known]
        self.chain.reset()

    def say(self, content: str, media: Sequence[tuple[str, Any]] = ()) -> Generator[Token, None, None]:
        """Take a message of the user; yields the tokens of the reply. It becomes a message when it ends, or as far as
        it came when the iterator is closed or interrupted. `media`: pictures and sounds before the text, as
        ("image", PATH) and ("audio", PATH), with what `MediaPrompt` takes.

        Raises KVCacheFull when the chat does not fit the context, ModelError when the template refuses it, and
        MediaError, BatchError and ModelError for pictures and sounds that cannot be read. Then, and after an
        interruption before the first token, the message is forgotten.
        """
        self.messages.append(_user(content, media))
        reply: list[str] = []
        try:
            long = self._long() if self.context_shift else None
            ids, new, seen = self._prepare(long)
            self.chain.reset()
            self.chain.prime(ids)
            g = Generation(
                self.ctx, new, self.chain, self.n_predict, self.stop, long=long, media=seen, special=self.special
            )
            g = with_lookup(g, ids[: len(ids) - len(new)]) if self.lookup else g
            self.generation = g
            try:
                for token in g:
                    reply.append(token.text)
                    yield token
            finally:
                if g.finish_reason is None and g.ids:
                    reply.append(g.rest())
                self._ids += g.ids
                self._drop(long)
                self._reply = self._spelled(g.ids)
        finally:
            if reply:
                self.messages.append({"role": "assistant", "content": "".join(reply)})
            else:
                self.messages.pop()

    def _long(self) -> LongContext:
        """What drops the oldest tokens, as the chat begins now."""
        if self.n_keep >= 0:
            return LongContext(self.ctx, self.n_keep)
        system = self.messages[: int(self.messages[0]["role"] == "system")]
        vocab = self.ctx.model.vocab
        tried = [chat_ids(vocab, self.template.render([*system, _user(c)], vocab)) for c in "ab"]
        return LongContext(self.ctx, common_prefix(*tried))

    def _drop(self, long: LongContext | None) -> None:
        """Forget the ids of tokens that the context has dropped."""
        if long is not None:
            del self._ids[long.n_keep : long.n_keep + long.n_dropped]
            long.n_dropped = 0

    def _make_room(self, long: LongContext, n: int) -> None:
        """Drop what the context holds, so that `n` tokens fit, and one more."""
        missing = long.n_past + n + 1 - self.ctx.n_ctx
        if missing > 0:
            long.n_discard = max(missing, (long.n_past - long.n_keep) // 2)
            long.make_room(n)
            long.n_discard = 0
            self._drop(long)

    def _shortened(self, ids: list[int], long: LongContext) -> list[int]:
        """The tokens of a chat that is evaluated anew. When they do not fit, the oldest go; the last message stays."""
        room = self.ctx.n_ctx - 1 - long.n_keep
        n_last = len(self.ctx.model.vocab.tokenize(self.messages[-1]["content"])) + _FRAME
        if len(ids) < self.ctx.n_ctx or n_last > room:
            return ids
        return ids[: long.n_keep] + ids[-max(n_last, room // 2) :]

    def _prepare(self, long: LongContext | None) -> tuple[list[int], list[int], PlacedMedia | None]:
        """The ids of the chat up to the reply, and how they end: the ids that are still to be evaluated, and what these
        have of pictures and sounds. The context is cut back to the ids before them."""
        vocab, memory = self.ctx.model.vocab, self.ctx.memory
        if any(isinstance(m["content"], list) for m in self.messages):
            return self._place()
        text = self.template.render(self.messages, vocab)
        behind = self._behind_reply(text)
        if behind is not None:
            ids = self._ids + vocab.tokenize(behind, False, True, continued=True)
        else:
            ids = chat_ids(vocab, text)
            ids = ids if long is None else self._shortened(ids, long)
        n = keep_prefix(memory, 0, self._ids[: memory.seq_pos_max(0) + 1], ids)
        self._ids, self._prompt, self._reply = ids, text, ""
        new = ids[n:]
        if long is not None:
            self._make_room(long, len(new))
        return self._ids, new, None

    def _place(self) -> tuple[list[int], list[int], PlacedMedia | None]:
        """As `_prepare`, for a chat with pictures and sounds. They are compared by their bytes."""
        if self.context_shift:
            raise ModelError("the oldest text of a chat with pictures or sounds cannot be dropped (context_shift)")
        from .media_chat import read_messages

        ids, media, _ = read_messages(self.ctx.model, self.messages, self.template)
        keys = ids if media is None else list(media.keys)
        memory = self.ctx.memory
        n = keep_prefix(memory, 0, self._ids[: memory.seq_pos_max(0) + 1], keys, media)
        self._ids, self._prompt, self._reply = keys, "", ""
        return ids, ids[n:], None if media is None else media.behind(n)

    def _behind_reply(self, text: str) -> str | None:
        """What follows the last reply in `text`, when `text` begins with the chat so far. Then the reply keeps the
        tokens that it was made of; other tokens may spell the same. Templates change the spaces around a reply."""
        body, reply = text.removeprefix(self._prompt).lstrip(), self._reply.strip()
        if self._prompt and text.startswith(self._prompt) and body.startswith(reply):
            return body[len(reply) :]
        return None

    def _spelled(self, ids: list[int]) -> str:
        return b"".join(map(self.ctx.model.vocab.token_to_piece, ids)).decode("utf-8", "replace")
