"""Quantisation: rewrite a model with its weights in other types. Mixes, importance matrices."""
