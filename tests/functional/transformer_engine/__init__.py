"""Transformer Engine's own layers and checkpoints, in a process of their own: TE_DIR names the folder of its unpacked wheel.

`make test-te` sets it; without it, these files are left out. Here, because Transformer Engine comes before all modules that
import Megatron-Core.
"""

import os

if "TE_DIR" in os.environ:
    from tests.support import soft_te

    soft_te.load(os.environ["TE_DIR"])
