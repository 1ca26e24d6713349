"""Sparse attention, held at a hook of its own beside the routers'."""
