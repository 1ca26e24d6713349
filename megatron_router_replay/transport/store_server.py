"""The store where the two sides of a transport meet."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.meeting import Store

_TIMEOUT = timedelta(minutes=2)


def open_store(host: str, port: int = 0, *, is_server: bool, timeout: timedelta = _TIMEOUT) -> Store:
    """Return the store where sender and receivers meet.

    It has no authentication: whoever reaches the port can read and write all of it, and so pose as one of the sides. The
    server listens on the address of `host` alone; give one of a network that only the job can reach.

    Args:
        host, port: of the server; port 0 takes a free one, `store.port`. Where the server itself resolves its name to a
            loopback address, as some distributions do, give the address; "0.0.0.0" listens on every interface.
        is_server: True in the one process that serves it; it must outlive the transport.
        timeout: for the server to appear.

    Raises:
        TransportError: the server cannot listen there.
    """
    listening = None
    if is_server:
        # torch's own server listens on all interfaces, whatever the host; it takes a socket that listens already.
        listening = _listen(host, port)
        port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=is_server,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=None if listening is None else listening.detach(),
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)  # an IPv6 address has two more entries
    except OSError as error:
        raise TransportError(
            f"cannot serve a store on {host}:{port}: {error}. Give an address of this machine that the others reach, and a "
            "port that is free."
        ) from error
