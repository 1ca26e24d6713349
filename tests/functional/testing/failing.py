"""Functions for worker processes that end badly on rank 1."""

import os
import time

import torch.distributed as dist


def on_rank_1(how):
    if dist.get_rank() == 1:
        how()
    dist.barrier()


def raise_error():
    raise ValueError("rank one is unhappy")


def die():
    os._exit(3)


def wait_for_ever():
    time.sleep(600)
