"""What moving routes costs: `python -m benchmarks.transport`."""
