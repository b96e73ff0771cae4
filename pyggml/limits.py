"""What a file, a request or a text from a stranger may cost: every such limit of pyggml, in one table.

Small input must not be able to take hours or gigabytes. Each limit is far above what real models and requests need, and
whatever goes beyond one raises an exception that names it. Readers look a limit up when they need it, so a program may
raise one: `pyggml.limits.JSON_BYTES = 1 << 30`. `docs/limits.md` shows the table to users.
"""

from __future__ import annotations

# Files beside the weights
JSON_BYTES = 1 << 28  # of a JSON file: config.json, tokenizer.json, the index of shards (the largest known has 35 MB)

# Vocabularies
TOKEN_BYTES = 1 << 12  # of one special token, or of any that is looked for at each place (the longest known has 128)
CHARSMAP_BYTES = 1 << 8  # that a rule of a character map replaces or puts in (the longest known puts in 33)
