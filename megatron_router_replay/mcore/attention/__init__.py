"""Sparse attention, held at a seam of its own beside the routers'."""
