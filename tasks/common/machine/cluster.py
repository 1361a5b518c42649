"""The Ray cluster at RAY_ADDRESS: its nodes, and whether they see what this machine sees.

As a program it prints `make cluster-status`. A separate process asks Ray: Ray ends the process that asks when the
cluster goes away.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from verl_tasks.machine import hardware
from verl_tasks.places import PACKAGE, PYTHON_PATH, installed
from verl_tasks.process import StageFailed, die_with_parent, errors_in_one_line, node_lost
from verl_tasks.settings import (
    ROOT,
    Settings,
    SettingsError,
    artifacts,
    load_settings,
    method,
    positive,
    stack,
    variable,
)

HELP = "docs/MULTI_NODE.md"
CONNECT_SECONDS = 5  # to the head's port; Ray itself waits for a minute
ASK_SECONDS = 120  # each node starts a process that looks at the folders
LOST_SECONDS = 30  # Ray's head declares a node dead after 5 checks without an answer, one every 3 seconds

# Variables that workers get in addition to the environment of `ray start`. Each node keeps its own NCCL and gloo ones.
SENT = re.compile(
    r"(VERL|VLLM|JUDGE|HF|WANDB|RAY_TASK|OMP|GLIBC)_\w+|PYTHON(PATH|UNBUFFERED|HASHSEED)|SETTINGS_COMPLETE|ARTIFACTS"
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")

# Without a cluster all servers listen on the loopback interface (docs/MULTI_NODE.md, "Ports"). The first is Ray's
# switch for systems where it makes no cluster: its address is 127.0.0.1 then, which verl's servers and TransferQueue
# take from it. The second: no worker before one is asked for, else one for each core, each with dozens of threads
# (docs/GPU.md).
OWN_RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_prestart_worker_first_driver": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}

# Errors on the other nodes when one is lost.
BROKEN = re.compile(r"(?i)connection|socket|gloo|nccl|died|unavailable|raylet|GCS|timed out|exit code -|lost")


@dataclass(frozen=True)
class Node:
    """A machine of the cluster; ``free_*``: not taken by any job."""

    id: str
    address: str
    alive: bool
    gpus: float = 0
    free_gpus: float = 0
    cpus: float = 0
    free_cpus: float = 0
    here: bool = False


@dataclass(frozen=True)
class Seen:
    """The folders and versions that a process on a node sees; all nodes must see the same."""

    python: str
    verl: str
    repository: str
    artifacts: str
    secrets: tuple[str, ...]


def address(nnodes: int) -> str:
    """RAY_ADDRESS; empty: no cluster. Raises SettingsError if ``nnodes`` needs one, or if Ray could not join it."""
    given = os.environ.get("RAY_ADDRESS", "")
    if not given and nnodes > 1:
        raise SettingsError(
            f"NNODES={nnodes}: needs a Ray cluster; start it with `ray start` and set RAY_ADDRESS=auto ({HELP})"
        )
    if given and given != "auto" and not re.fullmatch(r"\[?[\w.:-]+\]?:\d{1,5}", given):
        raise SettingsError(
            f"RAY_ADDRESS={given}: must be auto or host:port; run make on a node of the cluster, "
            f"e.g. as the command of `ray job submit` ({HELP})"
        )
    return given


def sent(environment: dict[str, str]) -> dict[str, str]:
    """The part of ``environment`` that is sent to the workers. Never a secret: Ray shows it in logs and dashboard."""
    ours = {f.name for f in fields(Settings)}
    names = [name for name in environment if SENT.fullmatch(name) and not SECRET.search(name)]
    return {name: environment[name] for name in sorted({*names, *(ours & environment.keys())})}


def secrets(environment: dict[str, str]) -> list[str]:
    """Names of the keys in ``environment`` that a training may need; a node must have them from its `ray start`."""
    names = [name for name in environment if SENT.fullmatch(name) and SECRET.search(name) and environment[name]]
    return sorted(name for name in names if not name.endswith(("_PATH", "_FILE")))


def held_cpus(s: Settings) -> int:
    """The CPUs of Ray that a training holds; with fewer, verl 0.9.1 waits for ever.

    Three for each GPU at most (verl/single_controller/ray/base.py, ResourcePoolManager), one for each of
    TransferQueue's storage units and its controller. verl 0.6.1 has no TransferQueue.
    """
    units = getattr(stack(s.STACK), "STORAGE_UNITS", 0)
    return 3 * (s.all_gpus + method(s.METHOD).GPUS) + (units + 1 if units else 0)


def enough(nodes: list[Node], nnodes: int, gpus: int, cpus: int = 0) -> str:
    """Why the cluster does not have ``nnodes`` nodes with ``gpus`` free GPUs each, and ``cpus`` free CPUs in all, with
    the remedy; empty if it has."""
    having = [node for node in nodes if node.alive and node.free_gpus >= gpus]
    if len(having) >= nnodes:
        free = sum(node.free_cpus for node in nodes if node.alive)
        fix = f"end other jobs, or give `ray start` --num-cpus ({HELP})"
        return f"a training holds {cpus} of Ray's CPUs, {free:g} are free; {fix}" if free < cpus else ""
    large = [node for node in nodes if node.alive and node.gpus >= gpus]
    fix = "end the jobs that hold them" if len(large) >= nnodes else f"start more nodes ({HELP})"
    found = "1 node has" if len(having) == 1 else f"{len(having)} nodes have"
    return f"NNODES={nnodes} x N_GPUS={gpus}: {found} {gpus} free GPU{'s' if gpus > 1 else ''}; {fix}"


def join(s: Settings) -> list[Node]:
    """The nodes of the cluster; empty without RAY_ADDRESS. Raises SettingsError when there is no cluster, when it is
    too small, or when a node does not see this repository, this Python and ARTIFACTS."""
    if not address(s.NNODES):
        return []
    artifacts().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".cluster-", dir=artifacts()) as mark:
        answer = _ask("check", mark)
        nodes = [Node(**node) for node in answer["nodes"]]
        here = see(str(ROOT), mark, secrets(dict(os.environ)))
        for node in nodes:
            seen = Seen(**answer["seen"][node.id])
            if not Path(mark, node.id).exists():  # it wrote into another folder of that name
                seen = replace(seen, artifacts="")
            if problem := difference(node.address, seen, here):
                raise SettingsError(problem)
    if problem := enough(nodes, s.NNODES, s.N_GPUS, held_cpus(s)):
        raise SettingsError(problem)
    return nodes


def difference(name: str, node: Seen, here: Seen) -> str:
    """One line: how node ``name`` differs from this machine, and the remedy; empty if it does not."""
    if node.artifacts != here.artifacts:
        what = f"{artifacts()} is another folder there, or cannot be written"
        return f"node {name}: {what}; set ARTIFACTS to a shared folder"
    if node.repository != here.repository:
        what = f"{ROOT} is another version there" if node.repository else f"{ROOT} is not there"
        return f"node {name}: {what}; put the repository into a folder that all nodes share ({HELP})"
    for package in ("python", "verl"):
        there, wanted = getattr(node, package), getattr(here, package)
        if there != wanted:
            return (
                f"node {name}: {package} {there or 'is not installed'}, here {wanted}; run `ray start` there with the "
                f"same environment ({HELP})"
            )
    if missing := sorted(set(here.secrets) - set(node.secrets)):
        return f"node {name}: has no {missing[0]}; keys are not sent: set it where `ray start` is run there ({HELP})"
    return ""


def see(root: str, mark: str, names: list[str], write_as: str = "") -> Seen:
    """What a process sees here. ``mark``: a folder under ARTIFACTS; a node leaves a file ``write_as`` in it."""
    digest = hashlib.sha256()
    for file in sorted({*Path(root, "tasks").rglob("*"), *PACKAGE.rglob("*")}):
        if file.suffix in (".py", ".sh", ".yaml") and file.is_file():
            digest.update(str(file).encode() + file.read_bytes())
    folder = mark if os.path.isdir(mark) and os.access(mark, os.W_OK) else ""
    if folder and write_as:
        Path(folder, write_as).touch()
    return Seen(
        python=platform.python_version(),
        verl=installed("verl"),
        repository=digest.hexdigest() if os.path.isdir(root) else "",
        artifacts=folder,
        secrets=tuple(name for name in names if os.environ.get(name)),
    )


def explained(error: StageFailed, nodes: list[Node]) -> StageFailed:
    """``error`` of a training on ``nodes``; it starts with the lost node where that is the cause.

    The other nodes may fail, and end the training, before Ray reports the loss.
    """
    said = str(error)
    if not nodes or "of the Ray cluster was lost" in said or not BROKEN.search(said):
        return error
    try:  # waits until Ray would report it
        gone = _ask("lost", *(node.id for node in nodes), seconds=LOST_SECONDS + 30)["lost"]
    except SettingsError:
        gone = "of the head"
    return StageFailed(f"{node_lost(gone)}\n  | {said}") if gone else error


# ---- in a separate process -----------------------------------------------------------------------------------------


def _ask(question: str, *arguments: str, seconds: float = ASK_SECONDS) -> dict:
    """The answer of this module, run as a separate process. Raises SettingsError, one line."""
    given = os.environ["RAY_ADDRESS"]
    if given != "auto" and not hardware.listens(given, CONNECT_SECONDS):
        raise SettingsError(f"RAY_ADDRESS={given}: no Ray cluster answers there; run `ray start --head` ({HELP})")
    command = [sys.executable, "-m", "verl_tasks.machine.cluster", question, *arguments]
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH, "PYTHONUNBUFFERED": "1"}
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=seconds, preexec_fn=die_with_parent
        )
    except subprocess.TimeoutExpired:
        raise SettingsError(
            f"RAY_ADDRESS={given}: the cluster did not answer in {seconds:.0f} s; see `ray status`"
        ) from None
    if child.returncode:
        lines = [line.strip() for line in child.stderr.splitlines() if re.match(r"\S*(Error|Exception)\b", line)]
        raise SettingsError(
            f"RAY_ADDRESS={given}: {_advice((lines or child.stderr.splitlines() or ['no answer'])[-1])}"
        )
    return json.loads(child.stdout.splitlines()[-1])


def _advice(error: str) -> str:
    """The remedy for an ``error`` of ray.init."""
    if "Could not find any running Ray" in error:
        return f"no Ray cluster runs on this machine; start it with `ray start --head`, or join one ({HELP})"
    if "AuthenticationError" in error or "InvalidAuthToken" in error:
        return f"the cluster wants a token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH ({HELP})"
    if "No node info" in error or "Can't find" in error:
        return f"this machine is no node of the cluster; run `ray start --address=...` on it first ({HELP})"
    return f"{error[:300]} ({HELP})"


def _nodes() -> list[Node]:
    import ray

    free = ray._private.state.available_resources_per_node()  # as verl does, single_controller/ray/base.py
    here = ray.get_runtime_context().get_node_id()

    def node(found: dict) -> Node:
        total, left = found["Resources"], free.get(found["NodeID"], {})
        return Node(
            id=found["NodeID"],
            address=found["NodeManagerAddress"],
            alive=found["Alive"],
            gpus=total.get("GPU", 0),
            free_gpus=left.get("GPU", 0),
            cpus=total.get("CPU", 0),
            free_cpus=left.get("CPU", 0),
            here=found["NodeID"] == here,
        )

    return sorted(map(node, ray.nodes()), key=lambda found: (found.address, found.id))


def _check(mark: str) -> dict:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def seen(*arguments) -> dict:
        return asdict(see(*arguments))

    nodes = [node for node in _nodes() if node.alive]
    asked = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(seen)
        asked[node.id] = task.remote(str(ROOT), mark, secrets(dict(os.environ)), node.id)
    return {"nodes": [asdict(node) for node in nodes], "seen": {name: ray.get(ref) for name, ref in asked.items()}}


def _lost(*before: str) -> dict:
    deadline = time.monotonic() + LOST_SECONDS
    while True:
        nodes = {node.id: node for node in _nodes()}
        gone = [name for name in before if name not in nodes or not nodes[name].alive]
        if gone or time.monotonic() > deadline:
            return {"lost": nodes[gone[0]].address if gone and gone[0] in nodes else "".join(gone[:1])}
        time.sleep(1)


def main(question: str, *arguments: str) -> None:
    """Print the answer to one question of ``_ask``."""
    import ray
    from ray._private import services

    # RAY_ADDRESS, else a Ray that runs here, else the last one that ran: ray.init would wait minutes for that one.
    found = services.canonicalize_bootstrap_address("auto")
    if not hardware.listens(found, CONNECT_SECONDS):
        raise ConnectionError(f"Could not find any running Ray instance: nothing answers at {found}")
    ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
    answers = {"check": _check, "lost": _lost, "status": lambda: {"nodes": [asdict(node) for node in _nodes()]}}
    print(json.dumps(answers[question](*arguments)), flush=True)
    ray.shutdown()


@dataclass(frozen=True)
class Wanted:
    """Variables of `make cluster-status`."""

    NNODES: int = variable("1", "nodes", positive)
    N_GPUS: int = variable("1", "free GPUs of each node", positive)


def status() -> None:
    """`make cluster-status`. Raises SettingsError when there is no cluster, or it is too small."""
    os.environ.setdefault("RAY_ADDRESS", "auto")
    wanted = load_settings(cls=Wanted)
    address(wanted.NNODES)
    nodes = [Node(**node) for node in _ask("status")["nodes"]]
    print(f"{'node':<18}{'GPUs free':>12}{'CPUs free':>12}")
    for node in nodes:
        if not node.alive:
            print(f"{node.address:<18}{'lost':>12}")
            continue
        free = f"{f'{node.free_gpus:g} of {node.gpus:g}':>12}{f'{node.free_cpus:g} of {node.cpus:g}':>12}"
        print(f"{node.address:<18}{free}{'  this machine' if node.here else ''}")
    if problem := enough(nodes, wanted.NNODES, wanted.N_GPUS):
        raise SettingsError(problem)
    print(f"enough for NNODES={wanted.NNODES} x N_GPUS={wanted.N_GPUS}")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(*sys.argv[1:])
    else:
        with errors_in_one_line(SettingsError):
            status()
