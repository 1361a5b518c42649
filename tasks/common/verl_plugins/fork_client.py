"""What the `python` of fork_server.py runs: it asks for a fork that runs its command line, and ends as the fork does.

It runs for each process, so it imports little.
"""

import array
import json
import os
import signal
import socket
import sys

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def open_files() -> list[int]:
    """The open files of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))  # fails for the one that listed them
        except OSError:
            continue
        found.append(int(name))
    return found


def ask(server: socket.socket, files: list[int]) -> int | None:
    """The exit status of the fork, below 0 for a signal; None: it wants a fresh Python."""
    mask = os.umask(0)
    os.umask(mask)
    ignored = [int(number) for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
    request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
    body = json.dumps({**request, "mask": mask, "group": os.getpgrp(), "ignored": ignored}).encode()
    server.sendmsg([len(body).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    server.sendall(body)
    answers = server.makefile()
    child = answers.readline().strip()
    if not child.isdigit():
        return None
    for number in SIGNALS:
        if number not in ignored:
            signal.signal(number, lambda number, _: os.kill(int(child), number))
    return int(answers.readline() or -signal.SIGKILL)  # a killed server takes its children with it


def main(python: str, path: str) -> None:
    """Run sys.argv[1:] by the server at ``path``; where that is not possible by ``python``."""
    files = open_files()
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
            status = ask(server, files)
        except OSError:
            status = None
    if status is None:
        os.execv(python, [python, *sys.argv[1:]])
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
