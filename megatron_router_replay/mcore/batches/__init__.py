"""Micro-batches: the rows of a forward, found by its tokens or given by hand."""
