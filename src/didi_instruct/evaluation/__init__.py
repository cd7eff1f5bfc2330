"""Measures of likelihood and sample quality."""
