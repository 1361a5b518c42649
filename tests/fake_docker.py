"""What a test has in place of docker: it takes our command lines and no other, and runs the program in namespaces of
its own: it has no network, and its processes end with the first. It isolates no files: mounts are read as places.

The folder FAKE_DOCKER has the arguments of each call, and of each container its process.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]
LOOPBACK = "import fcntl, os, socket, struct, sys; "  # it is up in a container
LOOPBACK += (
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh14x', b'lo', 65)); os.execvp(sys.argv[1], sys.argv[1:])"
)


def options() -> argparse.ArgumentParser:
    """Those of `docker run` that it knows."""
    found = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--rm", "--read-only"):
        found.add_argument(name, action="store_true", required=True)
    for name in ("--cap-drop", "--security-opt", "--mount", "--env", "--tmpfs"):
        found.add_argument(name, action="append", required=True)
    for name in ("--pull", "--name", "--network", "--memory", "--pids-limit", "--log-driver", "--user", "--workdir"):
        found.add_argument(name, required=True)
    found.add_argument("--entrypoint", required=True)
    found.add_argument("image")
    found.add_argument("command", nargs=argparse.REMAINDER)
    return found


def places(mounts: list[str]) -> dict[str, tuple[str, bool]]:
    """By the place in the container what is mounted there, and whether it can only be read."""
    found = {}
    for mount in mounts:
        values = dict(word.partition("=")[::2] for word in mount.split(","))
        assert values.pop("type") == "bind" and values.keys() <= {"src", "dst", "readonly"}, mount
        found[values["dst"]] = values["src"], "readonly" in values
    return found


def run(arguments: list[str], folder: Path) -> int:
    given = options().parse_args(arguments)
    mounted = places(given.mount)
    assert all(os.path.exists(source) for source, _ in mounted.values()), mounted

    def here(word: str) -> str:
        place = max((place for place in mounted if f"{word}/".startswith(f"{place}/")), key=len, default=word)
        return mounted.get(place, (place,))[0] + word[len(place) :]

    environment = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}", "HTTP_PROXY": "http://127.0.0.1:1"}
    for variable in given.env:
        name, equals, value = variable.partition("=")
        environment[name] = value if equals else os.environ[name]
    command = [*NAMESPACES, sys.executable, "-c", LOOPBACK, given.entrypoint, *map(here, given.command)]
    # It is no child of the client, whose end it outlives.
    inside = subprocess.Popen(command, env=environment, cwd=here(given.workdir), start_new_session=True)
    (folder / given.name).write_text(str(inside.pid))
    return inside.wait()


def main(command: str, *arguments: str) -> int:
    folder = Path(os.environ["FAKE_DOCKER"])
    with (folder / "calls").open("a") as calls:
        print(json.dumps([command, *arguments]), file=calls)
    if command == "run":
        return run([*arguments], folder)
    if [command, *arguments] == ["image", "inspect", "agents:1"]:
        return 0
    if (command, arguments[0]) == ("rm", "--force") and (folder / arguments[1]).exists():
        os.kill(int((folder / arguments[1]).read_text()), signal.SIGKILL)
        return 0
    print("Error response from daemon:\nNo such image", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
