"""The processes of a training as forks of one Python, which has imported torch, verl and vLLM.

    python -m verl_tasks.verl_plugins.forked [--trainer] MODULE verl.trainer.main_ppo ARGUMENTS

MODULE is what the stack's engine needs besides IMPORTS. With --trainer the trainer is a fork too, as soon as the first
of IMPORTS is there. On a GPU that import would start CUDA: there the trainer imports by itself.

Ten processes make a training: Ray's workers, and vLLM's, which multiprocessing spawns. Each would import the same for
ten seconds of a core, most of them one after the other, and keep pages of its own. Here Ray starts its workers with a
`python` (runtime_env's py_executable) that asks a server for a fork, and so does multiprocessing in a fork. The server
imports while the trainer does, and ends with it (fork_server.py).
"""

import contextlib
import ctypes
import gc
import importlib
import multiprocessing.spawn
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from verl_tasks.leftovers import LAUNCH
from verl_tasks.verl_plugins import fork_server

IMPORTS = ("verl.trainer.main_ppo", "verl.workers.engine_workers", "verl.experimental.reward_loop", "transfer_queue")
IMPORTS += ("verl.workers.rollout.vllm_rollout.vllm_async_server", "ray._private.workers.default_worker")
# What these read as they are imported: what verl sets for Ray's workers (verl/trainer/constants_ppo.py), what Ray's
# default is, and the number of its first job.
EARLY = {"TRANSFER_QUEUE_ENABLE": "1", "VLLM_LOGGING_LEVEL": "WARN", "RAY_AUTH_MODE": "token", "RAY_JOB_ID": "01000000"}
# Without it torch starts CUDA to see whether there is a GPU.
EARLY["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
OF_RAY = ("RAY_AUTH_MODE", "RAY_JOB_ID")
NOT_STARTED = 3  # CUDA_ERROR_NOT_INITIALIZED
# vLLM's kernels of gated delta nets ask triton's driver. verl lists two models that need them (utils/vllm/patch.py),
# where vLLM has them: gpu_worker.py repeats that list.
KERNELS = "vllm.model_executor.layers.fla.ops"


def serve(listener: socket.socket, folder: Path, owner: int, module: str, trainer: bool = False) -> None:
    """Fork for each client of ``listener`` until the process ``owner`` ends. Returns in no process. ``trainer``: the
    first client is the trainer.

    CUDA works in no fork of a process that started it. Where an import does, each client starts a Python of its own.
    """
    python, forks = str(folder / "python"), True

    def admits(_, request: dict) -> bool:
        """Not a client of another Ray than the first of this training."""
        given = request["environment"]
        return forks and all(given.get(name, os.environ[name]) == os.environ[name] for name in OF_RAY)

    server = fork_server.Server(listener, owner, admits)
    gc.disable()  # a quarter of the imports' time
    multiprocessing.spawn.set_executable(python)
    # Ray too reads its variables as it is imported. A worker ends when the process RAYLET_PID does.
    os.environ.update(EARLY | {name: os.environ[name] for name in OF_RAY if name in os.environ})
    os.environ["RAY_RAYLET_PID"] = str(owner)
    # Ray gives its workers a thread for each core they ask for, before they import torch (ray/_private/utils.py). In a
    # fork that is too late, and threads for all cores in each of ten processes wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if trainer:
        with own_ids():
            importlib.import_module(IMPORTS[0])
        fork_server.freeze()
        server.next()
    with own_ids(), contextlib.nullcontext() if trainer else without_cuda():
        for name in (module, *IMPORTS):  # the other clients wait meanwhile
            importlib.import_module(name)
    if vllm := sys.modules.get("vllm.model_executor.models.registry"):
        vllm._SUBPROCESS_COMMAND[0] = python  # it looks at a model's class in a process of its own, once for each HOME
    fork_server.freeze()
    if not (forks := not cuda_started()):
        print("warning: an import started CUDA: each process of the training imports by itself", file=sys.stderr)
    server.serve()


@contextlib.contextmanager
def own_ids() -> Iterator[None]:
    """Name actor classes without Ray's random numbers (ray/actor.py, ActorClassID.from_random).

    Its generator is seeded at the first use. Forks of a process that has used it draw the same IDs for their tasks and
    objects, and Ray ends a worker that gets one twice.
    """
    import ray.actor

    of_ray = ray.actor.ActorClassID
    ray.actor.ActorClassID = SimpleNamespace(from_random=lambda: of_ray(os.urandom(of_ray.size())))
    yield
    ray.actor.ActorClassID = of_ray


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Import what a GPU training needs without starting CUDA: a fork of what started it has no GPU."""
    import torch
    from vllm.platforms import current_platform

    # verl asks for the GPU's generation (trainer/constants_ppo.py), and torch starts CUDA to answer: here NVML does.
    by_cuda = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: tuple(current_platform.get_device_capability(device or 0))
    sys.modules[KERNELS] = None  # an ImportError
    yield
    del sys.modules[KERNELS]
    torch.cuda.get_device_capability = by_cuda
    # A fork closes its files, NVML's among them: it starts NVML anew.
    if current_platform.is_cuda():
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        while nvml.nvmlShutdown() == 0:
            pass


def cuda_started() -> bool:
    """Whether this process has started the CUDA driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_STARTED


def main(arguments: list[str]) -> None:
    """Start the server, then become the trainer, or its client. In a Ray cluster, which others started, there is no
    server."""
    trainer, executable = arguments[0] == "--trainer", sys.executable
    first, arguments = arguments[: 1 + trainer], arguments[1 + trainer :]
    if not os.environ.get("RAY_ADDRESS"):
        folder = Path(os.environ[LAUNCH])
        python = fork_server.write_python(folder)
        listener = fork_server.listening(folder)
        server = [sys.executable, "-m", __spec__.name, "--serve", str(listener.fileno()), str(folder), str(os.getpid())]
        subprocess.Popen([*server, *first], stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()])
        arguments = [*arguments, f"+ray_kwargs.ray_init.runtime_env.py_executable={python}"]
        executable = str(python) if trainer else executable
    os.execv(executable, [executable, "-m", *arguments])


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        listener, folder, owner, *first = sys.argv[2:]
        serve(socket.socket(fileno=int(listener)), Path(folder), int(owner), first[-1], "--trainer" in first)
    main(sys.argv[1:])
