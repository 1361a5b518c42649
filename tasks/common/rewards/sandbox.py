"""Call a function on adversarial input in a separate process without privileges: see docs/REASONING_GYM.md.

The worker has no credentials in its environment, a memory limit, and, once its modules are loaded, a seccomp filter: it
can compute, read files of the Python installation, and answer, nothing else. The next call replaces a worker that died
or took too long.
"""

import ctypes
import errno
import importlib
import json
import os
import platform
import resource
import secrets
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["CallFailed", "Sandbox"]  # for tasks

START_SECONDS = 120  # for a worker's imports while the machine trains
MAX_REQUEST_BYTES = 16 * 2**20
MAX_REPLY_BYTES = 2**16


class SandboxError(RuntimeError):
    """The worker cannot be started: nothing that the input could have caused."""


class CallFailed(Exception):
    """The function raised, took too long, or died on this input."""


class Sandbox:
    """A function in a worker process. One call at a time; safe for threads and after a fork.

    ``target`` is ``"module:factory"``; the worker calls ``factory(*setup)`` once and keeps the function that it
    returns. All arguments and results are JSON. ``seconds``: wall time of a call; ``memory``: bytes that the worker may
    add to what it has after its start. The worker ends with this process, even if this process is killed.
    """

    def __init__(self, target: str, *setup, seconds: float = 5.0, memory: int = 2**30):
        from verl_tasks.places import PYTHON_PATH  # not above: the worker finds it once it has its path

        path = [*PYTHON_PATH.split(":"), *sys.path]
        self._start_message = {"target": target, "setup": setup, "memory": memory, "path": path}
        self._seconds = seconds
        self.landlock = False  # whether the last worker has it; seccomp it always has
        self._forget()
        _SANDBOXES.add(self)

    def call(self, *arguments):
        """The function's result. Raises CallFailed when this input broke it, SandboxError when it cannot be started."""
        return self._thread.submit(self._call, arguments).result()

    def close(self) -> None:
        """End the worker; a later call starts a new one."""
        self._thread.submit(self._kill).result()

    def _forget(self) -> None:
        """Forget worker and thread; in a forked child they are the parent's."""
        if getattr(self, "_socket", None):
            self._socket.close()
        self._process, self._socket = None, None
        # The kernel ends a worker with the *thread* that started it (PR_SET_PDEATHSIG), and the threads of a reward
        # manager are short-lived. So one thread of its own handles the worker.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sandbox")

    def _call(self, arguments: tuple):
        nonce = secrets.token_hex(8)
        request = json.dumps([nonce, *arguments])
        if len(request) > MAX_REQUEST_BYTES:
            raise CallFailed(f"an input of {len(request)} bytes")
        # Data before a request is the end of a dead worker, or a forged reply; one that comes later has another nonce.
        if self._process and select.select([self._socket], [], [], 0)[0]:
            self._kill()
        if not self._process:
            self._start()
        try:
            reply = self._exchange(request, self._seconds)
            if not isinstance(reply, dict) or reply.get("nonce") != nonce:
                raise ValueError("the reply to another request")
        except (OSError, ValueError, RecursionError) as error:  # RecursionError: a forged reply
            self._kill()
            raise CallFailed("too slow" if isinstance(error, TimeoutError) else "the worker died") from error
        if "value" not in reply:
            raise CallFailed(str(reply.get("error"))[:200])
        return reply["value"]

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryDirectory(prefix="sandbox-") as home:  # gone once the worker has started
            environment = {"PATH": os.defpath, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
            # Threads that started before the filter would be outside Landlock.
            environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", __file__, str(theirs.fileno()), str(os.getpid())],
                env=environment,
                cwd=home,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            theirs.close()
            try:
                reply = self._exchange(json.dumps(self._start_message), START_SECONDS)
                self.landlock = reply["value"]
            except (OSError, ValueError, LookupError) as error:
                self._kill()
                why = reply["error"] if isinstance(error, LookupError) else type(error).__name__
                raise SandboxError(f"{self._start_message['target']}: the worker cannot start: {why}") from error

    def _exchange(self, message: str, seconds: float):
        """Send a line of JSON and read one. Raises OSError at the end of the time or the worker, ValueError when the
        reply is too long or not JSON."""
        deadline, reply = time.monotonic() + seconds, b""
        self._socket.settimeout(seconds)
        self._socket.sendall(message.encode() + b"\n")
        while not reply.endswith(b"\n"):
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self._socket.recv(MAX_REPLY_BYTES)
            reply += part
            if not part or len(reply) > MAX_REPLY_BYTES:
                raise ValueError("no reply, or one that is too long")
        return json.loads(reply)

    def _kill(self) -> None:
        if self._process:
            self._socket.close()
            self._process.kill()
            self._process.wait()
        self._process, self._socket = None, None


_SANDBOXES: "weakref.WeakSet[Sandbox]" = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [sandbox._forget() for sandbox in list(_SANDBOXES)])


# ---- the worker ----


def _serve(channel: int, parent: int) -> None:
    with open(channel, "rb") as requests, open(channel, "w", closefd=False) as replies:
        try:
            function, landlock = _set_up(json.loads(requests.readline()), parent)
        except Exception as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            print(json.dumps({"error": problem}), file=replies, flush=True)
            return
        print(json.dumps({"value": landlock}), file=replies, flush=True)
        while request := requests.readline():
            nonce, *arguments = json.loads(request)
            try:
                reply = json.dumps({"nonce": nonce, "value": function(*arguments)})
            except BaseException as error:  # SystemExit too: the input may have raised it
                reply = json.dumps({"nonce": nonce, "error": type(error).__name__})
            print(reply, file=replies, flush=True)


def _set_up(message: dict, parent: int) -> tuple[Callable, bool]:
    """The function, and whether Landlock limits what it can read."""
    sys.path[:] = [path for path in message["path"] if os.path.isabs(path)]
    from verl_tasks.places import PACKAGE, ROOT
    from verl_tasks.process import die_with_parent

    die_with_parent()
    if os.getppid() != parent:
        os._exit(0)  # it ended before
    module, _, factory = message["target"].partition(":")
    function = getattr(importlib.import_module(module), factory)(*message["setup"])
    os.chdir("/")
    _limit_resources(message["memory"])
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which both filters need
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    system = [sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/dev/null", "/dev/urandom"]
    landlock = _landlock([*system, *packages, str(ROOT / "tasks"), str(PACKAGE)])
    _seccomp()
    return function, landlock


def _limit_resources(memory: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {resource.RLIMIT_AS: pages * resource.getpagesize() + memory, resource.RLIMIT_NOFILE: 64}
    # The kernel does not apply NPROC to root; seccomp does.
    limits |= {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0, resource.RLIMIT_NPROC: 0}
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def _system_call(number: int, *arguments) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _landlock(readable: list[str]) -> bool:
    """Allow reading under ``readable`` alone; what else Landlock knows, seccomp refuses. False without Landlock, before
    Linux 5.13. linux/landlock.h, landlock(7)."""
    create, add_rule, restrict_self = 444, 445, 446  # the same on all architectures
    attribute = struct.pack("=Q", (1 << 13) - 1)  # a bit for each right on files of its first version
    try:
        ruleset = _system_call(create, attribute, ctypes.c_size_t(len(attribute)), ctypes.c_uint(0))
    except OSError:
        return False
    read_file, read_folder = 1 << 2, 1 << 3
    for path in filter(os.path.exists, readable):
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", read_file | (read_folder if os.path.isdir(path) else 0), folder)
        _system_call(add_rule, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0))
        os.close(folder)
    _system_call(restrict_self, ctypes.c_int(ruleset), ctypes.c_uint(0))
    os.close(ruleset)
    return True


# System calls of x86_64 that the worker may make; anything else gives EPERM. ``write`` only reaches the parent: the
# worker can open no file for writing.
# fmt: off
_ALLOWED = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "mmap": 9, "mprotect": 10,
    "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "access": 21,
    "sched_yield": 24, "mremap": 25, "madvise": 28, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79,
    "readlink": 89, "gettimeofday": 96, "getrusage": 98, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108,
    "getppid": 110, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204,
    "getdents64": 217, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "getrandom": 318, "statx": 332,
    "faccessat2": 439,
}
# fmt: on
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (os.O_TMPFILE & ~os.O_DIRECTORY)


def _seccomp() -> None:
    """Allow ``_ALLOWED`` and opening files to read; nothing else, for all threads. Raises OSError without seccomp
    filters. seccomp(2); offsets and codes from linux/seccomp.h, linux/filter.h."""
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, f"no table of system calls for {platform.machine()}")
    architecture = 0xC000003E
    load, equal, any_bit, end = 0x20, 0x15, 0x45, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000

    argument = (16, 24, 32)  # offset of the low word of each

    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, kill), (load, 0, 0, 0)]
    for number in _ALLOWED.values():
        program += [(equal, 0, 1, number), (end, 0, 0, allow)]
    for number, flags in ((2, 1), (257, 2)):  # open, openat, and which argument holds the flags
        program += [(equal, 0, 4, number), (load, 0, 0, argument[flags])]
        program += [(any_bit, 1, 0, _WRITING), (end, 0, 0, allow), (end, 0, 0, refuse)]
    # fcntl: only to read flags (F_GETFD, F_GETFL), not to request signals about a file (F_SETOWN).
    program += [(equal, 0, 5, 72), (load, 0, 0, argument[1])]
    program += [(equal, 1, 0, 1), (equal, 0, 1, 3), (end, 0, 0, allow), (end, 0, 0, refuse)]
    program += [(equal, 0, 1, 435), (end, 0, 0, 0x00050000 | errno.ENOSYS)]  # clone3: glibc then tries clone
    program += [(end, 0, 0, refuse)]

    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    filter_program = struct.pack("@HP", len(program), ctypes.addressof(code))
    _system_call(317, ctypes.c_uint(1), ctypes.c_uint(1), filter_program)  # seccomp: set a filter, for all threads


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
