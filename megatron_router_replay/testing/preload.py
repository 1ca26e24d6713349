"""Imports of the fork server of `run_ranks`, so that a rank starts in a moment instead of several seconds.

Only imports: no thread pool, process group or generator is touched before the fork.
"""

import gc
import logging
import warnings

from megatron_router_replay.testing.cpu import patches

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron warns on import about missing Apex, Transformer Engine, ...
    patches()

logging.getLogger("megatron.core").setLevel(logging.ERROR)
gc.collect()
gc.freeze()
