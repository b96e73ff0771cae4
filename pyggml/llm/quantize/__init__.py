"""Rewriting a model in other types: mixes, the importance matrix."""
