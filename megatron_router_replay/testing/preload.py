"""What the fork server of `run_ranks` imports once, so that a rank starts in a moment instead of several seconds.

Only imports: no thread pool, process group or generator is touched before the fork.
"""

import gc
import logging
import warnings

from megatron_router_replay.testing.cpu import patches

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says on import which of Apex, Transformer Engine, ... it does without
    patches()

logging.getLogger("megatron.core").setLevel(logging.ERROR)
gc.collect()
gc.freeze()
