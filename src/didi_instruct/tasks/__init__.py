"""Downstream tasks: prompts with answers, and the benchmarks that are made of them."""
