"""The processes of a training as forks of one Python, which has imported torch, verl and vLLM.

    python -m tasks.common.verl_plugins.forked [--trainer] MODULE verl.trainer.main_ppo ARGUMENTS

MODULE is what the stack's engine needs besides IMPORTS. With --trainer the trainer is a fork too, as soon as the first
of IMPORTS is there. On a GPU that import would start CUDA: there MODULE comes first, and the trainer imports by itself.

Ten processes make a training: Ray's workers, and vLLM's, which multiprocessing spawns. Each would import the same for
ten seconds of a core, most of them one after the other, and keep pages of its own. Here Ray starts its workers with a
`python` (runtime_env's py_executable) that asks a server for a fork, and so does multiprocessing in a fork. The server
imports while the trainer does, and ends with it.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.spawn
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from tasks.common.leftovers import LAUNCH
from tasks.common.process import die_with_parent
from tasks.common.verl_plugins import fork_client

IMPORTS = ("verl.trainer.main_ppo", "verl.workers.engine_workers", "verl.experimental.reward_loop", "transfer_queue")
IMPORTS += ("verl.workers.rollout.vllm_rollout.vllm_async_server", "ray._private.workers.default_worker")
# What these read as they are imported: what verl sets for Ray's workers (verl/trainer/constants_ppo.py), what Ray's
# default is, and the number of its first job.
EARLY = {"TRANSFER_QUEUE_ENABLE": "1", "VLLM_LOGGING_LEVEL": "WARN", "RAY_AUTH_MODE": "token", "RAY_JOB_ID": "01000000"}
# Without it torch starts CUDA to see whether there is a GPU.
EARLY["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
OF_RAY = ("RAY_AUTH_MODE", "RAY_JOB_ID")
MOST_FILES = 250  # that one message can hand over
NOT_STARTED = 3  # CUDA_ERROR_NOT_INITIALIZED
SECONDS_TO_ASK = 20  # of a client that is there; the others wait for it


def listening(folder: Path) -> socket.socket:
    """The socket of the server, ``folder``/fork: who connects waits until it serves."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "fork"))
    listener.listen(64)
    return listener


def serve(listener: socket.socket, folder: Path, owner: int, module: str, trainer: bool = False) -> None:
    """Fork for each client of ``listener`` until the process ``owner`` ends. Returns in no process. ``trainer``: the
    first client is the trainer.

    CUDA works in no fork of a process that started it. Where an import does, each client starts a Python of its own.
    """
    owned, python = os.pidfd_open(owner), str(folder / "python")
    gc.disable()  # a quarter of the imports' time
    multiprocessing.spawn.set_executable(python)
    # Ray too reads its variables as it is imported. A worker ends when the process RAYLET_PID does.
    os.environ.update(EARLY | {name: os.environ[name] for name in OF_RAY if name in os.environ})
    os.environ["RAY_RAYLET_PID"] = str(owner)
    # Ray gives its workers a thread for each core they ask for, before they import torch (ray/_private/utils.py). In a
    # fork that is too late, and threads for all cores in each of ten processes wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    children: dict[int, tuple[int, socket.socket]] = {}  # the fork and its client, by the fork's pidfd
    if trainer:
        with own_ids():
            importlib.import_module(IMPORTS[0])
        gc.freeze()
        if listener in _ready([listener, owned]):
            _start(listener.accept()[0], children, forks=True)
    with own_ids():
        for name in (module, *IMPORTS):  # the other clients wait meanwhile
            importlib.import_module(name)
    if vllm := sys.modules.get("vllm.model_executor.models.registry"):
        vllm._SUBPROCESS_COMMAND[0] = python  # it looks at a model's class in a process of its own, once for each HOME
    gc.collect()
    gc.freeze()  # else each fork's collections copy these pages, and take half a second
    if not (forks := not cuda_started()):
        print("warning: an import started CUDA: each process of the training imports by itself", file=sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while owned not in (ready := _ready([listener, owned, *children, *(each for _, each in children.values())])):
        for each in ready:
            if each is listener:
                connection, _ = listener.accept()
                _start(connection, children, forks)
            elif each in children:
                child, connection = children.pop(each)
                os.close(each)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                with contextlib.suppress(OSError), connection:
                    connection.sendall(b"%d\n" % code)
            else:  # a client was killed
                for child in [child for child, connection in children.values() if connection is each]:
                    os.kill(child, signal.SIGKILL)
    for child, _ in children.values():
        os.kill(child, signal.SIGKILL)
    os._exit(0)


def _ready(files: list) -> list:
    return select.select(files, [], [])[0]


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


def cuda_started() -> bool:
    """Whether this process has started the CUDA driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_STARTED


def _start(connection: socket.socket, children: dict[int, tuple[int, socket.socket]], forks: bool) -> None:
    """Fork for a client, unless it is gone or belongs to another Ray than the first of this training."""
    request, files = None, []
    connection.settimeout(SECONDS_TO_ASK)
    with contextlib.suppress(OSError, ValueError):  # it is gone, or silent
        size, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
        with connection.makefile("rb") as stream:
            request = json.loads(stream.read(int.from_bytes(size, "little")))
    connection.settimeout(None)
    if (
        request is None
        or not forks
        or any(request["environment"].get(name, os.environ[name]) != os.environ[name] for name in OF_RAY)
    ):
        with contextlib.suppress(OSError), connection:
            connection.sendall(b"fresh\n")
    elif child := os.fork():
        children[os.pidfd_open(child)] = child, connection
        with contextlib.suppress(OSError):  # it is gone: serve sees that, and kills the fork
            connection.sendall(b"%d\n" % child)
    else:
        _become(request, files)
    for file in files:
        os.close(file)


def _become(request: dict, files: list[int]) -> None:
    """Run what a client asks for, with its open files and environment, and end."""
    die_with_parent()
    gc.enable()
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, max(request["files"]) + 1) for file in files]
    for number, file in zip(request["files"], moved, strict=True):
        os.dup2(file, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in request["files"]:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, 1, closefd=False) for n, mode in enumerate("rww"))
    sys.modules["numpy"].random.seed()  # Python's own generator does so after each fork
    status = 0
    try:
        _run(request["arguments"])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _run(arguments: list[str]) -> None:
    """What `python *arguments` does for Ray's worker (a script), vLLM's look at a model (-m), and multiprocessing (-c),
    after Python's own flags."""
    if "-c" in arguments:
        code = arguments[arguments.index("-c") + 1]
        sys.argv[:] = ["-c", *arguments[arguments.index("-c") + 2 :]]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning, "runpy")  # it is there: a fork
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def write_python(folder: Path) -> Path:
    """``folder``/python, which asks the server of ``folder`` for a fork.

    A shell starts it: the path of a Python with a space, or a long one, works in no #! line.
    """
    client, python = Path(fork_client.__file__), folder / "python"
    called = f"{client.stem}.main({sys.executable!a}, {str(folder / 'fork')!a})"
    code = f"import sys; sys.path.insert(0, {str(client.parent)!a}); import {client.stem}; {called}"
    words = shlex.join([sys.executable, "-IS", "-c", code])
    python.write_bytes(os.fsencode(f'#!/bin/sh\nexec {words} "$@"\n'))
    python.chmod(0o755)
    return python


def main(arguments: list[str]) -> None:
    """Start the server, then become the trainer, or its client. In a Ray cluster, which others started, there is no
    server."""
    trainer, executable = arguments[0] == "--trainer", sys.executable
    first, arguments = arguments[: 1 + trainer], arguments[1 + trainer :]
    if not os.environ.get("RAY_ADDRESS"):
        folder = Path(os.environ[LAUNCH])
        python = write_python(folder)
        listener = listening(folder)
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
