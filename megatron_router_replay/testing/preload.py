"""What GlooWorkers' fork server imports once, so that a worker starts in a moment instead of several seconds.

Only imports: no thread pool, process group or generator is touched before the fork.
"""

import gc
import logging
import warnings

# Megatron says on import which of Apex, Transformer Engine, ... it does without.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron_router_replay.testing import attention, megatron_state, qwen3_moe, schedule, tiny_gpt  # noqa: F401
    from megatron_router_replay.testing.cpu import patches

    patches()
    megatron_state.reset_megatron_state()

logging.getLogger("megatron.core").setLevel(logging.ERROR)
gc.collect()
gc.freeze()
