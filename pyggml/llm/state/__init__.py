"""Saved states of a context."""
