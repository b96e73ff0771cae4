"""A chat template with a form of replies of its own."""

from __future__ import annotations

from dataclasses import dataclass

from ..generate.templates import ChatTemplate
from .formats import PLAIN, Format


@dataclass(frozen=True)
class Dialect(ChatTemplate):
    """A chat template, and `form`, in which its replies are read: the source does not tell."""

    form: Format = PLAIN
