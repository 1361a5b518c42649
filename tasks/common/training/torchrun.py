"""PyTorch's rendezvous (TCPStore) on loopback, where it is for this machine alone: torch listens on all interfaces.

`python -m verl_tasks.training.torchrun ARGUMENTS`: torchrun of one machine, whose stores listen on it alone.
"""

import importlib
import socket
import sys

from torch.distributed import TCPStore

LOCAL = ("127.0.0.1", "localhost")


def listen_locally() -> None:
    """From now on the process groups of this process make their stores by ``store``."""
    importlib.import_module("torch.distributed.rendezvous").TCPStore = store  # `from` would import the function


def store(host_name: str, port: int, *args, is_master: bool = False, **kwargs) -> TCPStore:
    """A TCPStore; one whose address is LOCAL takes no connection from other machines."""
    if is_master and host_name in LOCAL and (listener := _listener(port)):
        port, kwargs["master_listen_fd"] = listener.getsockname()[1], listener.detach()
        kwargs["use_libuv"] = False  # with libuv some versions close a socket that they were given (pytorch #150215)
    return TCPStore(host_name, port, *args, is_master=is_master, **kwargs)


def _listener(port: int) -> socket.socket | None:
    """A socket at ``port`` (0: any); None where it is taken: by this process's own store, which torch finds itself."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except OSError:
        listener.close()
        return None
    return listener


def _shared_store(self, address: str, port: int):
    """As torch's: the store that the workers share with torchrun."""
    return store(address, port, is_master=True, multi_tenant=True)


if __name__ == "__main__":
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
    from torch.distributed.run import main

    c10d_rendezvous_backend.TCPStore = store
    DynamicRendezvousHandler._create_tcp_store_server = _shared_store
    main(["--standalone", "--local-addr=127.0.0.1", *sys.argv[1:]])
