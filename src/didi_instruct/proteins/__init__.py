"""Proteins: folding, and measures of their sequences."""
