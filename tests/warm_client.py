"""What the `python` of warm_python.py runs: it asks the server for a fork, or becomes a fresh Python.

It runs for each command, so it imports little.
"""

import array
import fcntl
import marshal
import os
import signal
import socket
import sys
import time

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def eligible(arguments: list[str]) -> bool:
    """Whether this is a command of ours, with nothing but its standard streams to hand over."""
    match arguments:
        case ["-m", module, *_]:
            ours = module.startswith(("tasks.", "cookiecutter"))
        case ["-c", code, *_]:
            ours = "cookiecutter" in code
        case [script, *_]:
            ours = script.endswith(".py") and "site-packages" not in script
        case _:
            ours = False
    return ours and {int(name) for name in os.listdir("/proc/self/fd")} == {0, 1, 2, 3}  # 3: this listing


def connected(folder: str, command: list[str]) -> socket.socket:
    """A connection to the server, which ``command`` starts if there is none. Raises OSError."""
    with open(f"{folder}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for attempt in range(200):
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(f"{folder}/socket")
                return server
            except (ConnectionRefusedError, FileNotFoundError):
                server.close()
                if attempt == 0:
                    start(folder, command)
                time.sleep(0.05)
    raise TimeoutError(folder)


def start(folder: str, command: list[str]) -> None:
    """Start the server in the environment of the tests, in a group of its own, which Ctrl-C in a terminal leaves."""
    with open(f"{folder}/environment", "rb") as file:
        environment = marshal.load(file)
    environment.pop("PYTHONPATH", None)
    files = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
    files.append((os.POSIX_SPAWN_OPEN, 2, f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    os.posix_spawn(command[0], command, environment, file_actions=files, setpgroup=0, setsigdef=SIGNALS)


def ask(server: socket.socket, arguments: list[str]) -> int | None:
    """The exit status of the command in a fork of the server, below 0 for a signal; None: it wants a fresh Python."""
    mask = os.umask(0)
    os.umask(mask)
    ignored = [int(number) for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
    body = marshal.dumps((arguments, dict(os.environ), os.getcwd(), mask, os.getpgrp(), ignored))
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (0, 1, 2)))]
    server.sendmsg([len(body).to_bytes(8, "little")], streams)
    server.sendall(body)
    answers = server.makefile()
    child = answers.readline().strip()
    if not child.isdigit():  # `fresh`, or nothing from a server that was killed
        return None
    for number in SIGNALS:
        if number not in ignored:
            signal.signal(number, lambda number, _: os.kill(int(child), number))
    return int(answers.readline() or -signal.SIGKILL)  # a killed server takes its children with it


def main(folder: str, command: list[str]) -> None:
    """Run sys.argv[1:] by the server that ``command`` starts; its first word is the fresh Python."""
    arguments, status = sys.argv[1:], None
    if "FRESH_PYTHON" not in os.environ and eligible(arguments):
        try:
            with connected(folder, command) as server:
                status = ask(server, arguments)
        except OSError:
            status = None
    if status is None:
        os.execv(command[0], [command[0], *arguments])
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
