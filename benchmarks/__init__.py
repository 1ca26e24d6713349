"""Benchmarks: each figure is a ratio to an alternative that ran in turns in the same process."""
