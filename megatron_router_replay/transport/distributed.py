"""Routes over torch.distributed: gloo between hosts' memories, NCCL between GPUs; one sender, every training rank a receiver.

Tested with gloo in processes of one machine. NCCL takes the same path but was not run yet: its test needs two GPUs.

store = open_store("10.0.0.7", 29400, is_server=False)              # rollout manager and training ranks meet here

sender = DistributedSender(store, layout)                           # in the rollout manager
sender.send(traces)                                                 # returns at once; the next send joins this one

receiver = DistributedReceiver(store, layout, layout.place_of(rank))   # in training rank `rank`
trace = receiver.receive()                                          # this place's rows and layers

**No authentication.** Neither the store nor gloo's and NCCL's connections ask who connects, and nothing is encrypted: whoever
reaches the store's port can read and write its keys, pose as a sender and so choose the experts that a model trains with.
Serve the store on an address of a network that only the job can reach (`open_store` listens on that address alone), and keep
gloo on it with GLOO_SOCKET_IFNAME.
"""

from megatron_router_replay.transport.receiver import DistributedReceiver
from megatron_router_replay.transport.sender import DistributedSender
from megatron_router_replay.transport.store_server import open_store

__all__ = ["DistributedReceiver", "DistributedSender", "open_store"]
