"""Benchmarks: each figure a ratio beside the alternative, taken in one process."""
