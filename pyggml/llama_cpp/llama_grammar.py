"""Grammars for `Llama`."""

from __future__ import annotations

import os
from typing import Any

from .. import limits
from ..errors import SamplerError
from ..llm.samplers.grammar import lark_of_schema
from ..small_file import read_text


class LlamaGrammar:
    """A grammar in GBNF."""

    def __init__(self, *args: Any, _grammar: str, **kwargs: Any) -> None:
        self._grammar = _grammar

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """From its text."""
        return cls(_grammar=grammar)

    @classmethod
    def from_file(cls, file: str | os.PathLike[str], verbose: bool = True) -> LlamaGrammar:
        """From a file."""
        return cls(_grammar=read_text(os.fspath(file), limits.TEXT_FILE_BYTES, SamplerError))

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> LlamaGrammar:
        """Of what a JSON schema allows."""
        return cls(_grammar=lark_of_schema(json_schema))
