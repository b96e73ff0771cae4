"""Figures of models and contexts: counters of what they did, and what is logged of them."""
