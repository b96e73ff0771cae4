"""Grammars for llguidance: GBNF and JSON schemas, rewritten in the notations that it reads."""
