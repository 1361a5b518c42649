"""A training's own Ray listens on the loopback interface alone and starts no idle worker; a cluster's is left alone."""

import ipaddress
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.test_settings import VALUES
from verl_tasks.launch.plan import ONE_WORKER
from verl_tasks.launch.task import stack_environment
from verl_tasks.machine.cluster import OWN_RAY
from verl_tasks.settings import ROOT, STACKS, load_settings


@pytest.mark.parametrize("name", STACKS)
def test_every_stack_has_the_addresses_of_this_machine_unless_it_trains_on_a_cluster(name):
    s = replace(load_settings(VALUES), STACK=name)
    assert stack_environment(s, {}).items() >= OWN_RAY.items()
    assert not stack_environment(s, {"RAY_ADDRESS": "auto"}).keys() & OWN_RAY.keys()
    assert stack_environment(s, {"NCCL_SOCKET_IFNAME": "eth1"})["NCCL_SOCKET_IFNAME"] == "eth1"


STORES = """
import json, os, socket, sys, psutil, torch.distributed as dist
from verl_tasks.machine.local_store import listen_locally
listen_locally()
with socket.socket() as free:
    free.bind(("", 0))
    port = free.getsockname()[1]
if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
again = sys.modules["torch.distributed.rendezvous"].TCPStore("127.0.0.1", port, 1, is_master=True, multi_tenant=True)
dist.barrier()
found = [each for pid in (os.getpid(), os.getppid()) for each in psutil.Process(pid).net_connections("inet")]
print(json.dumps([each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN]), flush=True)
"""


@pytest.mark.medium
@pytest.mark.parametrize("how", ["address", "alone", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_the_rendezvous_of_pytorch_listens_on_loopback(how, tmp_path):
    (tmp_path / "stores.py").write_text(STORES)
    torchrun = ["-m", "verl_tasks.training.torchrun", "--nproc_per_node=1"]
    command = [sys.executable, *(torchrun if how == "torchrun" else []), str(tmp_path / "stores.py")]
    environment = os.environ | OWN_RAY | {"PYTHONPATH": str(ROOT)} | (ONE_WORKER if how == "alone" else {})
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    addresses = [ipaddress.ip_address(address) for address in json.loads(result.stdout.splitlines()[-1])]
    assert len(addresses) >= 2  # a store and gloo
    assert all((getattr(ip, "ipv4_mapped", None) or ip).is_loopback for ip in addresses), addresses


# verl/workers/rollout/utils.py serves HTTP at Ray's address.
SERVERS = """
import asyncio, json, os, psutil, ray, time
from fastapi import FastAPI
ray.init(include_dashboard=False, num_cpus=4, log_to_driver=False)
time.sleep(5)
workers = [each.name() for each in psutil.Process().children(recursive=True) if "IDLE" in "".join(each.cmdline())]

@ray.remote
class Server:
    async def start(self):
        from verl.workers.rollout.utils import run_uvicorn
        address = ray.util.get_node_ip_address().strip("[]")
        self.port, self.task = await run_uvicorn(FastAPI(), None, address)

server = Server.remote()
ray.get(server.start.remote())
import transfer_queue as tq
tq.init()
time.sleep(5)  # Ray's agents
found = []
for process in psutil.Process().children(recursive=True):
    for each in process.net_connections("inet"):
        if each.status == psutil.CONN_LISTEN:
            found.append([each.laddr.ip, " ".join(process.cmdline())])
print(json.dumps([workers, found]), flush=True)
"""


@pytest.mark.long
def test_ray_starts_no_worker_unasked_and_all_servers_listen_on_loopback(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= OWN_RAY | {"RAY_TMPDIR": "/tmp", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", SERVERS], env=environment, capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr[-3000:]
    workers, found = json.loads(result.stdout.splitlines()[-1])
    assert not workers  # two on a machine with two cores else
    for part in ("gcs_server", "raylet", "ray::Server", "ray::TransferQueueController", "ray::SimpleStorageUnit"):
        assert any(part in command for _, command in found), (part, found)
    for address, command in found:
        ip = ipaddress.ip_address(address)
        assert (getattr(ip, "ipv4_mapped", None) or ip).is_loopback, (address, command)
