"""Containers for the programs of episodes, of the image AGENT_IMAGE, by podman or docker: docs/MULTI_TURN.md.

A container has no network but its own loopback. Its first process (in_container.py) listens there and passes what it
hears to the socket of our endpoint, a file that is mounted.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.starter import FILE_BYTES
from verl_tasks.text import one_line

RUNTIMES = "podman", "docker"
INSIDE = Path(__file__).with_name("in_container.py")
PORT = 8000  # of a container's loopback
BASE_URL = f"http://127.0.0.1:{PORT}/v1"
MEMORY, PROCESSES = "8g", 512  # of a container; threads count
SECONDS = 60  # for podman or docker to look for an image
# What podman and docker read of our environment variables; the container gets none of them.
VARIABLES = ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "CONTAINER_HOST", "XDG_RUNTIME_DIR")
VARIABLES += ("DBUS_SESSION_BUS_ADDRESS", "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF", "XDG_CONFIG_HOME")
VARIABLES += ("XDG_DATA_HOME",)


def runtime_of(image: str) -> str:
    """podman, else docker: the path of the one that is on PATH. Raises RewardError where there is none, and where it
    does not have ``image``."""
    found = next(filter(None, map(shutil.which, RUNTIMES)), None)
    if not found:
        raise RewardError(f"AGENT_IMAGE={image}: neither podman nor docker is on PATH; install one, or leave it out")
    name = Path(found).name
    try:
        looked = subprocess.run([found, "image", "inspect", image], capture_output=True, timeout=SECONDS)
        said = looked.stderr.decode(errors="replace").strip().rpartition("\n")[2] if looked.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said:
        raise RewardError(f"AGENT_IMAGE={image}: {one_line(said, 200)}; `{name} image inspect {image}` must find it")
    return found


def command(
    runtime: str, image: str, folder: Path, socket: Path, read: Iterable[Path], program: tuple[str, ...]
) -> list[str]:
    """What runs ``program`` in a container named as the episode's ``folder``, its working folder. ``socket``: of the
    endpoint; ``read``: folders that it reads at their own places. The key is taken from our environment, so that no
    list of processes shows it."""
    ours = f"{os.getuid()}:{os.getgid()}"  # it owns the episode's folder
    rootless = ["--userns", "keep-id"] if Path(runtime).name == "podman" and os.getuid() else []
    mounts = [f"type=bind,src={folder},dst=/episode", f"type=bind,src={socket.parent},dst=/endpoint,readonly"]
    mounts += [f"type=bind,src={INSIDE},dst=/in_container.py,readonly"]
    mounts += [f"type=bind,src={each},dst={each},readonly" for each in read]
    return [
        *(runtime, "run", "--rm", "--pull", "never", "--name", folder.name),
        *("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--security-opt", "label=disable"),  # SELinux would refuse the socket, whatever the label of its file
        *("--memory", MEMORY, "--pids-limit", str(PROCESSES)),
        *("--read-only", "--tmpfs", "/tmp", "--log-driver", "none", "--user", ours, *rootless, "--workdir", "/episode"),
        *(word for mount in mounts for word in ("--mount", mount)),
        *("--env", "HOME=/episode", "--env", f"OPENAI_BASE_URL={BASE_URL}", "--env", "OPENAI_API_KEY"),
        *("--entrypoint", "python3", image, "-I", "/in_container.py"),
        # Its first process sets that limit: an --ulimit here would take the place of those in containers.conf.
        *(f"/endpoint/{socket.name}", str(PORT), str(FILE_BYTES)),
        *(("python3", *program) if len(program) == 1 and program[0].endswith(".py") else program),
    ]


def end(runtime: str, folder: Path) -> list[str]:
    """What ends the container of an episode."""
    return [runtime, "rm", "--force", folder.name]
