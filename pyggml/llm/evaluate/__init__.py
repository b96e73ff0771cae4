"""Measure a model on texts: perplexity, divergence from another model, multiple choice, importance matrices."""
