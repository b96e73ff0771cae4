"""What a file, a request or a text from a stranger may cost: every such limit of pyggml, in one table.

Small input must not be able to take hours or gigabytes. Each limit is far above what real models and requests need, and
whatever goes beyond one raises an exception that names it. Readers look a limit up when they need it, so a program may
raise one: `pyggml.limits.JSON_BYTES = 1 << 30`. `docs/limits.md` shows the table to users.
"""

from __future__ import annotations

# Files beside the weights
JSON_BYTES = 1 << 28  # of a JSON file: config.json, tokenizer.json, the index of shards (the largest known has 35 MB)

# Grammars and JSON schemas
GRAMMAR_STEPS = 4_000_000  # of the analysis of a GBNF grammar, most of them pairs of characters that are compared
GRAMMAR_ITEMS = 200_000  # states of the parser in one step of a text; 5,000 members that may all be missing need 20,000
SCHEMA_PARTS = 200_000  # schemas inside one, with the copies that are made of definitions which are merged with others
SCHEMA_REMAINDERS = 1 << 18  # of all its `multipleOf` (without zeros at the end): the engine has a state for each
SCHEMA_SECONDS = 5  # that the engine may look at the patterns of one schema
