"""Benchmarks: cases timed in turns, and the rivals that ours are compared with."""
