"""Graphs that learn: gradients."""
