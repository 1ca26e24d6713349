"""Hooks in routers and dispatchers, tapes of checkpoints, and one call of a router."""
