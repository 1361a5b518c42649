"""torchrun of one machine, whose stores listen on it alone: `python -m verl_tasks.training.torchrun ARGUMENTS`."""

import sys

from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.run import main

from verl_tasks.machine.local_store import store


def _shared_store(self, address: str, port: int):
    """As torch's: the store that the workers share with torchrun."""
    return store(address, port, is_master=True, multi_tenant=True)


if __name__ == "__main__":
    c10d_rendezvous_backend.TCPStore = store
    DynamicRendezvousHandler._create_tcp_store_server = _shared_store
    main(["--standalone", "--local-addr=127.0.0.1", *sys.argv[1:]])
