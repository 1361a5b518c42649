"""Several machines: what is refused, what the workers get, and a training on two Ray nodes that loses one.

Of a single machine, the training's own Ray listens on the loopback interface alone and starts no idle worker.
"""

import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from omegaconf import OmegaConf

from tests.helpers import MAKE, ROOT, SMALL, exported, make, outside_make
from tests.test_settings import VALUES, error_of
from verl_tasks import alive, process
from verl_tasks.launch.plan import ONE_WORKER
from verl_tasks.launch.task import stack_environment
from verl_tasks.machine import cluster
from verl_tasks.machine.cluster import OWN_RAY, Node, Seen
from verl_tasks.settings import STACKS, SettingsError, load_settings
from verl_tasks.training import verl_config

RAYJOB = ROOT / "docs/examples/kubernetes/rayjob.yaml"
SBATCH = ROOT / "docs/examples/slurm/train.sbatch"


def settings(**changes):
    return load_settings(VALUES | {"MINI_BATCH_SIZE": "8"} | changes)


# ---- settings and overrides


def test_batches_are_divided_by_all_gpus_of_all_machines():
    assert settings(N_GPUS="4", NNODES="8").world_size == 32
    assert "N_GPUS=4 x NNODES=3: must divide MINI_BATCH_SIZE x ROLLOUT_N" in error_of(N_GPUS="4", NNODES="3")


@pytest.mark.parametrize("given", ["auto", "10.0.0.1:6379", "head.example.com:6379", "[fd00::1]:6379"])
def test_ray_addresses(given, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", given)
    assert cluster.address(2) == given


@pytest.mark.parametrize("given", ["ray://head:10001", "http://head:8265", "head", "local", "head:6379 --x"])
def test_an_address_that_ray_would_not_join_is_refused(given, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(SettingsError, match="must be auto or host:port"):
        cluster.address(1)


@pytest.mark.parametrize("given", ["", None])
def test_several_machines_need_a_cluster(given, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if given is not None:
        monkeypatch.setenv("RAY_ADDRESS", given)
    assert cluster.address(1) == ""
    with pytest.raises(SettingsError, match=r"NNODES=2: needs a Ray cluster; .*RAY_ADDRESS=auto"):
        verl_config.rl_overrides(settings(NNODES="2"), "some/model", Path("/r"))


@pytest.mark.parametrize("stack", ["cpu", "current"])
def test_joining_gives_ray_no_resources_and_sends_the_environment(stack, monkeypatch):
    environment = exported(ROOT / "tasks/countdown/train.sh", {"STACK": stack, "N_GPUS": "2", "NNODES": "2"})
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    environment |= {"PYTHONPATH": "/a b/c", "JUDGE_URL": "http://judge/v1?a='b'", "WANDB_API_KEY": "hidden"}
    environment |= {"JUDGE_API_KEY": "hidden", "HF_TOKEN": "hidden", "AWS_SECRET_ACCESS_KEY": "hidden", "HOME": "/me"}
    s = load_settings(environment)
    overrides = [*verl_config.sent_environment(environment), *verl_config.rl_overrides(s, "some/model", Path("/r"))]
    config = OmegaConf.to_container(verl_config.compose("ppo_trainer", overrides), resolve=True)
    assert (config["trainer"]["nnodes"], config["trainer"]["n_gpus_per_node"]) == (2, 2)
    joined = config["ray_kwargs"]["ray_init"]
    assert {name for name, value in joined.items() if value is not None} == {"runtime_env"}
    got = joined["runtime_env"]["env_vars"]
    assert all(type(value) is str and value == environment[name] for name, value in got.items())
    assert {"PYTHONPATH", "JUDGE_URL", "VERL_USE_EXTERNAL_MODULES", "N_GPUS", "MAX_NEW_TOKENS"} <= got.keys()
    assert "HOME" not in got and "hidden" not in " ".join(overrides)
    monkeypatch.delenv("RAY_ADDRESS")
    assert verl_config.sent_environment(environment) == []
    own = verl_config.compose("ppo_trainer", verl_config.rl_overrides(replace(s, NNODES=1), "m", Path("/r")))
    assert own.ray_kwargs.ray_init.include_dashboard is False
    assert own.ray_kwargs.ray_init.get("num_gpus") == (2 if stack == "cpu" else None)


# ---- nodes

NODES = [
    Node("a", "10.0.0.1", True, gpus=8, free_gpus=8),
    Node("b", "10.0.0.2", True, gpus=8, free_gpus=4),
    Node("c", "10.0.0.3", False),
    Node("d", "10.0.0.4", True, cpus=8, free_cpus=8),
]


@pytest.mark.parametrize(
    ("nnodes", "gpus", "said"),
    [
        (1, 8, ""),
        (2, 4, ""),
        (2, 8, "NNODES=2 x N_GPUS=8: 1 node has 8 free GPUs; end the jobs"),
        (3, 4, "NNODES=3 x N_GPUS=4: 2 nodes have 4 free GPUs; start more nodes"),
    ],
)
def test_which_nodes_are_enough(nnodes, gpus, said):
    found = cluster.enough(NODES, nnodes, gpus)
    assert found.startswith(said) and bool(found) == bool(said)


def test_a_cluster_has_the_cpus_that_a_training_holds():
    nodes = [replace(node, free_cpus=4) for node in NODES]
    free = sum(node.free_cpus for node in nodes if node.alive)
    assert cluster.enough(nodes, 1, 1, cpus=int(free)) == ""
    said = cluster.enough(nodes, 1, 1, cpus=int(free) + 1)
    assert f"holds {free + 1:g} of Ray's CPUs, {free:g} are free" in said and "--num-cpus" in said


HERE = Seen(python="3.12.1", verl="0.9.1", repository="digest", artifacts="/a", secrets=("JUDGE_API_KEY",))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"artifacts": ""}, "node 10.0.0.2: .* is another folder there, or cannot be written; set ARTIFACTS"),
        ({"repository": ""}, "node 10.0.0.2: .* is not there; put the repository"),
        ({"repository": "other"}, "node 10.0.0.2: .* is another version there"),
        ({"python": "3.11.9"}, "node 10.0.0.2: python 3.11.9, here 3.12.1"),
        ({"verl": ""}, "node 10.0.0.2: verl is not installed, here 0.9.1"),
        ({"secrets": ()}, "node 10.0.0.2: has no JUDGE_API_KEY; keys are not sent"),
    ],
)
def test_a_node_that_differs_is_named_in_one_line(change, said):
    found = cluster.difference("10.0.0.2", replace(HERE, **change), HERE)
    assert re.match(said, found) and bool(found) == bool(said) and "\n" not in found


def test_what_a_process_sees(tmp_path, monkeypatch):
    (tmp_path / "root/tasks").mkdir(parents=True)
    (tmp_path / "mark").mkdir()
    monkeypatch.setenv("JUDGE_API_KEY", "hidden")
    arguments = str(tmp_path / "root"), str(tmp_path / "mark"), ["JUDGE_API_KEY", "HF_TOKEN"]
    before = cluster.see(*arguments, "node-1")
    assert before.secrets == ("JUDGE_API_KEY",) and (tmp_path / "mark/node-1").exists()
    (tmp_path / "root/tasks/reward.py").write_text("x = 1\n")
    assert cluster.see(*arguments).repository != before.repository
    assert cluster.see("/nowhere", "/nowhere", []).repository == cluster.see("/nowhere", "/nowhere", []).artifacts == ""


def test_a_bad_number_is_one_line():
    result = make("cluster-status", NNODES="two", RAY_ADDRESS="auto")
    assert result.returncode != 0 and result.stdout.startswith("error: NNODES=two: must be a whole number")


def test_no_cluster_is_one_line():
    with socket.socket() as unused:  # bound, but nothing listens
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        result = make("cluster-status", RAY_ADDRESS=address)
    lines = [line for line in result.stdout.splitlines() if not line.startswith("make:")]
    assert result.returncode != 0 and len(lines) == 1, result.stdout
    assert lines[0].startswith(f"error: RAY_ADDRESS={address}: no Ray cluster answers there")


def test_a_ray_that_was_killed_is_not_waited_for(tmp_path, monkeypatch):
    """Ray leaves the address of the last cluster in a file."""
    from ray._private import services

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        (tmp_path / "ray").mkdir()
        for file in (tmp_path / "ray_current_cluster", tmp_path / "ray/ray_current_cluster"):
            file.write_text(f"127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(services, "find_gcs_addresses", set)
        with pytest.raises(ConnectionError, match="Could not find any running Ray instance") as error:
            cluster.main("status")
    assert "no Ray cluster runs on this machine; start it" in cluster._advice(str(error.value))


# ---- what the log tells

LOST = (
    "(raylet, ip=10.0.0.1) The node with node id: 17f9 and address: 10.0.0.3 and node name: 10.0.0.3 has been marked "
    "dead because the detector has missed too many heartbeats from it."
)
FROM_THERE = "\x1b[36m(WorkerDict pid=7, ip=10.0.0.3)\x1b[0m loading\n"
RAISED = (
    "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running low on memory. Memory on the "
    "node (IP: 10.0.0.3, ID: 653c) was 22.36GB used / 23.54GB limit (0.95), which ..."
)
COUNTED = "(raylet) 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other"


@pytest.mark.parametrize(
    ("log", "address", "said"),
    [
        (FROM_THERE + LOST, "10.0.0.1:6379", "node 10.0.0.3 of the Ray cluster was lost; run `ray start` there again"),
        (LOST, "10.0.0.1:6379", ""),  # another job's
        (FROM_THERE + "RuntimeError: peer\n" + LOST, "auto", "node 10.0.0.3 of the Ray cluster was lost"),
        (RAISED, "", "out of memory (node 10.0.0.3: 22.36GB of 23.54GB used): Ray ended a worker; lower MICRO_BATCH"),
        (RAISED, "auto", "out of memory (node 10.0.0.3"),
        (COUNTED, "", "out of memory: Ray ended a worker"),
        (COUNTED, "auto", ""),  # it may be another job's
        (COUNTED.replace("2 Workers", "0 Workers"), "", ""),
        ("all is well", "", ""),
    ],
)
def test_a_lost_node_and_a_killed_worker_end_the_run_with_their_fix(log, address, said, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    (tmp_path / "x.log").write_text(log)
    first = process.report(tmp_path / "x.log", "the status").splitlines()[0]
    assert first.startswith(said) if said else "was lost" not in first and "out of memory" not in first
    monkeypatch.setattr(process.time, "monotonic", lambda: 1000.0)
    due, ours, life = {}, set(), alive.Watch(tmp_path, tmp_path, tmp_path / "x.log", 0)
    deadline = [process._deadline(line, life, due, ours) for line in log.splitlines()][-1]
    assert deadline == (1000 + process.GRACE_SECONDS if said else float("inf"))


def test_other_failures_on_a_cluster_are_not_blamed_on_a_node():
    """`_ask` would ask a cluster that is not there, and raise."""
    error = process.StageFailed("verl_tasks.rewards.answers.RewardError: broken\n  | x\n  log: y")
    assert cluster.explained(error, NODES) is error
    assert cluster.explained(process.StageFailed("Connection closed by peer"), []).args == (
        "Connection closed by peer",
    )


# ---- the examples


def variables_of(command: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", command))


def test_the_rayjob_has_the_machines_that_its_command_wants():
    job = yaml.safe_load(RAYJOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    # Keys that the schema of a RayJob has: kuberay v1.7.0, helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml.
    assert spec.keys() <= {"entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"}
    cluster_spec = spec["rayClusterSpec"]
    assert cluster_spec.keys() == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    groups = [cluster_spec["headGroupSpec"], *cluster_spec["workerGroupSpecs"]]
    variables = variables_of(spec["entrypoint"])
    assert 1 + sum(group["replicas"] for group in groups[1:]) == int(variables["NNODES"])
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == variables["N_GPUS"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in groups[1:])
    make_, where, folder, *rest = shlex.split(spec["entrypoint"])
    assert (make_, where) == ("make", "-C") and folder.startswith("/shared/")
    dry = subprocess.run(["make", "-n", *rest], cwd=ROOT, env=outside_make(), capture_output=True, text=True)
    assert dry.returncode == 0 and "verl_tasks.launch.main train" in dry.stdout, dry.stderr


@pytest.mark.parametrize("tokens", [True, False], ids=["ray with tokens", "ray 2.51.1"])
def test_the_sbatch_script_starts_ray_on_each_node_and_trains_on_the_first(tmp_path, tokens):
    """Run with Slurm's commands replaced by ones that write down how they were called."""
    calls = tmp_path / "calls"
    ray = "" if tokens else "; [ $1 = get-auth-token ] && exit 2 || echo ray, version 2.51.1"
    for name, said in {"srun": "10.0.0.1", "make": "", "ray": ray, "scontrol": "'node1\nnode2'"}.items():
        shown = f" mode=$RAY_AUTH_MODE >> {calls}" if name == "make" else f" >> {calls}"
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"{shown}\necho {said}\n')
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "64", **slurm}
    environment |= {"PYTHON": str(tmp_path / "python")}
    result = subprocess.run(["bash", SBATCH], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    called = calls.read_text().splitlines()
    started = [line for line in called if "ray start" in line]
    assert len(started) == 2
    assert any("--nodelist=node1" in line and "--head" in line and "--port=6379" in line for line in started)
    assert any("--nodelist=node2" in line and "--address=10.0.0.1:6379" in line for line in started)
    lines = [line for line in called if line.startswith("make ")]
    assert lines[0].startswith("make cluster-status") and lines[-1].startswith("make train TASK=countdown NNODES=2")
    assert all(line.endswith(" mode=token" if tokens else " mode=") for line in lines)
    assert ("2.51.1 has no tokens" in result.stderr) != tokens
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", SBATCH.read_text(), re.MULTILINE))
    assert (options["nodes"], options["gpus-per-node"]) == ("2", variables_of(lines[-1])["N_GPUS"])
    assert f"--num-gpus={options['gpus-per-node']}" in started[0] and options["ntasks-per-node"] == "1"


# ---- two nodes on this machine

HEAD, WORKER = "127.0.0.2", "127.0.0.3"
KEY = "a-key-that-no-log-may-show"
# Another job of the cluster, on the node that stays: it answers until its input is closed.
OTHER_JOB = f"""
import sys, ray
ray.init(log_to_driver=False, logging_level="ERROR")
@ray.remote(num_cpus=1, resources={{"node:{HEAD}": 0.01}})
class Other:
    def ping(self):
        return "alive"
other = Other.remote()
print(ray.get(other.ping.remote()), flush=True)
for line in sys.stdin:
    print(ray.get(other.ping.remote()), flush=True)
"""


class TwoNodes:
    """A Ray cluster of two nodes of this machine with addresses, ports, token and folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        with socket.socket() as free:
            free.bind((HEAD, 0))
            self.port = free.getsockname()[1]
        (folder / "token").write_text("0123456789abcdef" * 4)
        self.environment = outside_make() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
        self.environment["JUDGE_API_KEY"] = KEY
        self.environment.pop("RAY_ADDRESS", None)
        self.address = f"{HEAD}:{self.port}"
        self._start(HEAD, "--head", f"--port={self.port}", f"--temp-dir={folder}", "--include-dashboard=false")
        self.start_worker()
        self.environment["RAY_ADDRESS"] = self.address

    def start_worker(self) -> None:
        self._start(WORKER, f"--address={self.address}")

    def _start(self, node: str, *options: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={node}", *options]
        # Worker ports of the system's choice: those that Ray reserves may meet another cluster's.
        command += ["--num-cpus=16", "--num-gpus=1", "--min-worker-port=0", "--max-worker-port=0"]
        command += ["--object-store-memory=300000000", "--disable-usage-stats"]
        environment = {k: v for k, v in self.environment.items() if k != "RAY_ADDRESS"}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)

    def processes(self, *parts: str) -> list[psutil.Process]:
        found = []
        for one in psutil.process_iter(["cmdline"]):
            line = " ".join(one.info["cmdline"] or ())
            if str(self.folder) in line and all(part in line for part in parts):
                found.append(one)
        return found

    def raylet(self, node: str) -> list[psutil.Process]:
        return self.processes("raylet/raylet ", f"--node_ip_address={node}")

    def kill(self, processes: list[psutil.Process]) -> None:
        for one in [*processes, *(child for parent in processes for child in parent.children(recursive=True))]:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue


@pytest.fixture
def nodes():
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: Ray's socket paths must fit in 107 bytes
    started = TwoNodes(folder)
    yield started
    started.kill(started.processes())
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.long
def test_a_lost_node_ends_the_training_with_one_line_and_it_resumes(nodes, small_model, tmp_path):
    variables = {**SMALL, "MODEL": str(small_model), "ARTIFACTS": str(tmp_path), "INIT": "base"}
    variables |= {"NNODES": "2", "N_GPUS": "1"}

    def checkpoint() -> int:
        found = list(tmp_path.glob("runs/countdown/*/checkpoints/latest_checkpointed_iteration.txt"))
        return int(found[0].read_text() or 0) if found else 0

    def start(steps: int) -> subprocess.Popen:
        return subprocess.Popen(
            [*MAKE, "train", *(f"{k}={v}" for k, v in variables.items()), f"STEPS={steps}"],
            cwd=ROOT,
            env=nodes.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def status(nnodes: int) -> subprocess.CompletedProcess:
        asked = [*MAKE, "cluster-status", f"NNODES={nnodes}", "N_GPUS=1"]
        return subprocess.run(asked, cwd=ROOT, env=nodes.environment, capture_output=True, text=True)

    said = status(2)
    assert said.returncode == 0 and len(re.findall(r"\b1 of 1\b", said.stdout)) == 2
    assert "enough for NNODES=2" in said.stdout
    said = status(3)
    assert said.returncode != 0 and "error: NNODES=3 x N_GPUS=1: 2 nodes have 1 free GPU" in said.stderr

    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_JOB],
        env=nodes.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    first = start(steps=100)
    try:
        assert other.stdout.readline() == "alive\n"
        deadline, taken, asked = time.monotonic() + 600, 0, time.monotonic()
        while not checkpoint():
            assert first.poll() is None and time.monotonic() < deadline, first.stdout.read()
            if time.monotonic() > asked + 15 and taken < 2:
                taken, asked = len(re.findall(r"\b0 of 1\b", status(1).stdout)), time.monotonic()
            time.sleep(0.1)
        assert taken == 2  # a GPU of each node
        nodes.kill(nodes.raylet(WORKER))
        lost_at = time.monotonic()
        output, _ = first.communicate(timeout=150)
        assert time.monotonic() - lost_at < 120
        errors = [line for line in output.splitlines() if line.startswith("error:")]
        assert first.returncode != 0 and len(errors) == 1, output
        assert f"node {WORKER} of the Ray cluster was lost; run `ray start` there again" in errors[0]
        saved = checkpoint()
        assert 1 <= saved < 100

        # The head and the other job on it are as they were, and what the run had is free.
        other.stdin.write("\n")
        other.stdin.flush()
        assert "alive\n" in iter(other.stdout.readline, "")  # after what Ray tells every driver of the lost node
        assert nodes.raylet(HEAD) and not nodes.raylet(WORKER)
        deadline = time.monotonic() + 30
        while not re.search(r"\b1 of 1\b", (said := status(1)).stdout) and time.monotonic() < deadline:
            time.sleep(1)
        assert re.search(rf"{HEAD} +1 of 1 +15 of 16", said.stdout) and re.search(rf"{WORKER} +lost", said.stdout)

        nodes.start_worker()
        second = start(steps=saved + 1)
        output = ""
        for line in second.stdout:
            output += line
            if line.startswith("[5/5] eval"):  # on this machine alone: not what this test is about
                os.killpg(second.pid, signal.SIGTERM)
                break
        second.communicate(timeout=60)
    finally:
        for left in (first, other):
            left.kill()
            left.communicate()
    assert f"resuming from step {saved}" in output and f"{saved + 1} steps in" in output, output
    assert checkpoint() == saved + 1
    (run,) = tmp_path.glob("runs/countdown/grpo-*")
    for step in (saved, saved + 1):
        shards = run.glob(f"checkpoints/global_step_{step}/actor/model_world_size_2_rank_*.pt")
        assert len(list(shards)) == 2
    steps = [json.loads(x)["step"] for f in sorted(run.glob("metrics/*")) for x in f.read_text().splitlines()]
    assert saved + 1 in steps
    for log in run.glob("logs/*.log"):
        text = log.read_text(errors="replace")
        assert "ray init kwargs" in text and KEY not in text
    assert not list(tmp_path.glob(".cluster-*"))


@pytest.mark.parametrize("name", STACKS)
def test_every_stack_has_the_addresses_of_this_machine_unless_it_trains_on_a_cluster(name):
    s = replace(load_settings(VALUES), STACK=name)
    assert stack_environment(s, {}).items() >= OWN_RAY.items()
    assert not stack_environment(s, {"RAY_ADDRESS": "auto"}).keys() & OWN_RAY.keys()
    assert stack_environment(s, {"NCCL_SOCKET_IFNAME": "eth1"})["NCCL_SOCKET_IFNAME"] == "eth1"


STORES = """
import json, os, socket, sys, psutil, torch.distributed as dist
from verl_tasks.training.torchrun import listen_locally
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
