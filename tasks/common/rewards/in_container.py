"""The first process of a program's container: it starts the program, and passes what that sends to a port of the
loopback on to the endpoint's socket. The container ends with the program, and with the endpoint.

It runs alone, with the standard library: its Python is the image's, 3.8 or later. Arguments: socket, port,
most bytes of a file that is written, command.
"""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading


def connected(path):
    """A connection to the endpoint."""
    found = socket.socket(socket.AF_UNIX)
    found.connect(path)
    return found


def copy(source, sink, end):
    """Pass on all that ``source`` says, and its ``end``."""
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(end)


def serve(client, path):
    """Pass on one connection, both ways."""
    with client, connected(path) as endpoint:
        asks = threading.Thread(target=copy, args=(client, endpoint, socket.SHUT_WR), daemon=True)
        asks.start()
        copy(endpoint, client, socket.SHUT_RDWR)
        asks.join()


def accept(listener, path):
    while True:
        client, _ = listener.accept()
        threading.Thread(target=serve, args=(client, path), daemon=True).start()


def end_with(endpoint):
    """End the container once the endpoint is gone: it says nothing on a connection that asks nothing."""
    endpoint.recv(1)
    os._exit(1)


def main(path, port, most, *command):
    """Run ``command``; the process ends with its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # the first process of a container has no default of it
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=128)
    threading.Thread(target=end_with, args=(connected(path),), daemon=True).start()
    threading.Thread(target=accept, args=(listener, path), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(most), int(most)))
    # docker may give a container the proxies of its client's configuration.
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    code = subprocess.Popen(command, env=environment).wait()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(*sys.argv[1:])
