"""Micro-batches: what a trainer gives for one forward, and which forward it belongs to."""
