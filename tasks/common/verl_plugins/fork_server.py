"""A Python that has imported what its clients need, and forks for each: a client then starts in tenths of a second.

fork_client.py asks. The processes of a training are such forks (forked.py), and the commands of fast tests
(tests/warm_python.py). This file imports nothing of ours: a test's command takes the modules of its own checkout.
"""

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import shlex
import signal
import socket
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

MOST_FILES = 250  # that one message can hand over
SECONDS_TO_ASK = 20  # of a client that is there; the others wait for it


def write_python(folder: Path) -> Path:
    """``folder``/python, which asks the server of ``folder`` for a fork.

    A shell starts it: the path of a Python with a space, or a long one, works in no #! line.
    """
    python, path = folder / "python", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!a})"
    called = f"import fork_client; fork_client.main({sys.executable!a}, {str(folder / 'fork')!a})"
    words = shlex.join([sys.executable, "-IS", "-c", f"{path}; {called}"])
    python.write_bytes(os.fsencode(f'#!/bin/sh\nexec {words} "$@"\n'))
    python.chmod(0o755)
    return python


def listening(folder: Path) -> socket.socket:
    """The socket of the server, ``folder``/fork: who connects waits until it serves."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "fork"))
    listener.listen(128)
    return listener


def freeze() -> None:
    """Leave what was imported out of a fork's collections, and of its end, which would copy these pages."""
    gc.collect()
    gc.freeze()
    for each in weakref.finalize._registry:
        each.atexit = False


class Server:
    """Forks for each client of ``listener`` that it ``admits`` (its process id, its request) until the process
    ``owner`` ends; the others become a fresh Python."""

    def __init__(self, listener: socket.socket, owner: int, admits: Callable[[int, dict], bool]):
        self.listener, self.owned, self.admits = listener, os.pidfd_open(owner), admits
        self.children: dict[int, tuple[int, socket.socket]] = {}  # the fork and its client, by the fork's pidfd
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def serve(self) -> None:
        """Returns in no process."""
        while self.next():
            pass
        for child, _ in self.children.values():
            os.kill(child, signal.SIGKILL)
        os._exit(0)

    def next(self) -> bool:
        """Wait for clients and ends of forks, and see to them. False: the owner has ended."""
        clients = [client for _, client in self.children.values()]
        ready, _, _ = select.select([self.listener, self.owned, *self.children, *clients], [], [])
        if self.owned in ready:
            return False
        for each in ready:
            if each is self.listener:
                self._start(self.listener.accept()[0])
            elif each in self.children:
                child, client = self.children.pop(each)
                os.close(each)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                with contextlib.suppress(OSError), client:
                    client.sendall(b"%d\n" % code)
            else:  # a client was killed
                for child in [child for child, client in self.children.values() if client is each]:
                    os.kill(child, signal.SIGKILL)
        return True

    def _start(self, client: socket.socket) -> None:
        """Fork for a client, unless it is gone or not admitted."""
        request, files = None, []
        client.settimeout(SECONDS_TO_ASK)
        with contextlib.suppress(OSError, ValueError):  # it is gone, or silent
            size, files, _, _ = socket.recv_fds(client, 8, MOST_FILES)
            with client.makefile("rb") as stream:
                request = json.loads(stream.read(int.from_bytes(size, "little")))
        client.settimeout(None)
        peer = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), "little")
        if request is None or not self.admits(peer, request):
            with contextlib.suppress(OSError), client:
                client.sendall(b"fresh\n")
        elif child := os.fork():
            self.children[os.pidfd_open(child)] = child, client
            with contextlib.suppress(OSError):  # it is gone: ``next`` sees that, and kills the fork
                client.sendall(b"%d\n" % child)
        else:
            _become(request, files)
            _end(_status(request["arguments"]))
        for file in files:
            os.close(file)


def _become(request: dict, files: list[int]) -> None:
    """Give this fork what its client has: open files, environment, folder, group and signals."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the server
    gc.enable()
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, max(request["files"]) + 1) for file in files]
    for number, file in zip(request["files"], moved, strict=True):
        os.dup2(file, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in request["files"]:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))
    try:
        os.setpgid(0, request["group"])
    except OSError:  # the group is of another session
        os.setsid()
    os.umask(request["mask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", 1, errors=getattr(sys, name).errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if "numpy" in sys.modules:  # Python's own generator is seeded after each fork
        sys.modules["numpy"].random.seed()


def _status(arguments: list[str]) -> int:
    """Run ``arguments``; the exit status, below 0 for a signal."""
    try:
        _run(arguments)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run(arguments: list[str]) -> None:
    """What `python *arguments` does: a module (-m), code (-c, after Python's own flags), or a script."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    entries = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    sys.path[:] = [os.getcwd(), *entries, *sys.path[1:]]
    if arguments[0] == "-m":
        sys.argv[:] = ["-m", *arguments[2:]]
        warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning, "runpy")  # it is there: a fork
        runpy._run_module_as_main(arguments[1])
        return
    if arguments[0].startswith("-"):
        code, *rest = arguments[arguments.index("-c") + 1 :]
        sys.argv[:], sys.path[0], file = ["-c", *rest], "", "<string>"
    else:
        sys.argv[:], sys.path[0], file = arguments, os.path.dirname(os.path.realpath(arguments[0])), arguments[0]
        code, main.__file__ = Path(file).read_bytes(), file
    exec(compile(code, file, "exec"), main.__dict__)


def _end(status: int) -> None:
    """End as Python does, without taking the modules apart, which would copy their pages."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
