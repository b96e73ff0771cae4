"""A chat: turns of messages in one context, of which only the new tokens are evaluated."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from pyggml.errors import ModelError

from ..samplers import SamplerChain
from .generation import Generation, Token
from .templates import ChatTemplate, Message

if TYPE_CHECKING:
    from ..context import LlamaContext


class ChatSession:
    """Messages, and a context whose sequence 0 holds them.

    messages    so far, the system message first
    generation  the last reply: its timings, finish_reason and ids
    """

    def __init__(
        self,
        ctx: LlamaContext,
        chain: SamplerChain,
        template: ChatTemplate,
        system: str = "",
        n_predict: int = -1,
        stop: tuple[str, ...] = (),
    ) -> None:
        if ctx.model.architecture.encode is not None:
            raise ModelError(f"{ctx.model.arch} is an encoder-decoder: it answers one text (`generate`), and has no chat")
        self.ctx, self.chain, self.template, self.n_predict = ctx, chain, template, n_predict
        self.stop = (*template.stop, *stop)
        self.messages: list[Message] = []
        self.generation: Generation | None = None
        self._ids: list[int] = []  # of all that was given to the context; it may hold fewer, where it was interrupted
        self._prompt = self._reply = ""  # the text they are of, up to the last reply, and that
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Forget all messages, and take another system message where one is given ("": none)."""
        if system is None:
            self.messages = self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else []
        else:
            self.messages = [{"role": "system", "content": system}] if system else []
        self.chain.reset()

    def say(self, content: str) -> Generator[Token, None, None]:
        """Take a message of the user; yields the tokens of the reply. It becomes a message when it ends, or as far as
        it came where the iterator is closed or interrupted.

        Raises KVCacheFull where the chat does not fit the context, ModelError where the template refuses it; then, as
        after an interruption before the first token, the message is forgotten.
        """
        self.messages.append({"role": "user", "content": content})
        reply: list[str] = []
        try:
            ids, new = self._prepare()
            self.chain.reset()
            self.chain.prime(ids)
            self.generation = g = Generation(self.ctx, new, self.chain, self.n_predict, self.stop)
            try:
                for token in g:
                    reply.append(token.text)
                    yield token
            finally:
                if g.finish_reason is None and g.ids:
                    reply.append(g.rest())
                self._ids += g.ids
                self._reply = self._spelled(g.ids)
        finally:
            if reply:
                self.messages.append({"role": "assistant", "content": "".join(reply)})
            else:
                self.messages.pop()

    def _prepare(self) -> tuple[list[int], list[int]]:
        """The ids of the chat up to the reply, and those that are to be evaluated; the context is cut back to the
        others."""
        vocab, memory = self.ctx.model.vocab, self.ctx.memory
        text = self.template.render(self.messages, vocab)
        behind = self._behind_reply(text)
        if behind is not None:
            ids = self._ids + vocab.tokenize(behind, False, True, continued=True)
        else:
            has_bos = vocab.bos is not None and text.startswith(vocab.text(vocab.bos))
            ids = vocab.tokenize(text, not has_bos, True)
        held = min(memory.seq_pos_max(0) + 1, len(self._ids), len(ids) - 1)
        n = next((i for i in range(held) if ids[i] != self._ids[i]), held)
        if not memory.seq_rm(0, n):  # a window or a state has moved on
            memory.seq_rm(0)
            n = 0
        self._ids, self._prompt, self._reply = ids, text, ""
        return ids, ids[n:]

    def _behind_reply(self, text: str) -> str | None:
        """What follows the last reply in `text`, if that is the chat so far: then the reply keeps the tokens it was
        made of, though others may spell the same. Templates change the spaces around it."""
        body, reply = text.removeprefix(self._prompt).lstrip(), self._reply.strip()
        if self._prompt and text.startswith(self._prompt) and body.startswith(reply):
            return body[len(reply) :]
        return None

    def _spelled(self, ids: list[int]) -> str:
        return b"".join(map(self.ctx.model.vocab.token_to_piece, ids)).decode("utf-8", "replace")
