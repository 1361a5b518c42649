"""A Python that has already imported what our commands import (verl_plugins/fork_server.py), for `make PYTHON=`.

The fast tests start hundreds of commands (`python -m tasks...`, `python tasks/<task>/evaluate.py`), which spend most of
their time on the import of pandas, SciPy and torch. ``install`` makes a folder with a `python`, whose server imports
with the first command. Modules of tasks/ are never imported beforehand: a command takes those of its own checkout.

A command gets a fresh Python where the difference could matter (``suits``). What differs: all forks hash strings as
with PYTHONHASHSEED=0, and flush each line. Tests marked `fresh`, tests/faults and test_forked.py have fresh
ones.
"""

import functools
import gc
import importlib
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

PLUGINS = Path(__file__).resolve().parents[1] / "tasks/common/verl_plugins"
# Not what reads the environment again later.
IMPORTS = ["pandas", "pyarrow.parquet", "scipy.stats", "matplotlib.pyplot", "openpyxl", "omegaconf", "hydra", "jinja2"]
IMPORTS += ["diskcache", "packaging.requirements"]
IMPORTS += ["torch", "sympy", "reasoning_gym", "math_verify", "httpx", "requests", "rich.console", "jsonschema"]
IMPORTS += ["transformers.models.auto.tokenization_auto", "transformers.models.auto.modeling_auto"]
# Variables that these, the C libraries or Python itself read when they start.
EARLY = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "NUMEXPR_", "MALLOC_")
EARLY += ("TORCH", "PYTORCH", "CUDA_", "NVIDIA_", "MPL", "ARROW_", "HF_", "HUGGING", "TRANSFORMERS_", "ACCELERATE_")
# The launcher's own, what a fork does, what torch._inductor sets where it is imported and reads when it compiles, and
# what huggingface_hub reads for each request.
# The server is in UTF-8 mode as all commands are; where the locale is another, LC_ or LANG differs too.
LATE = ("PYTHON", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONUTF8", "TORCHINDUCTOR_CACHE_DIR", "HF_TOKEN")
# What OpenMP takes when it is not told; conftest.py's, which changes nothing but time; and the hashes that a task's
# scripts are told to have (tasks/common/launch/task.py).
UNSET = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "GOMP_SPINCOUNT": "1000", "PYTHONHASHSEED": "0"}
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)


def install(folder: Path, imports: list[str] = IMPORTS) -> Path:
    """Make ``folder`` the `bin` of a warm Python, which has the modules ``imports``, and return its `python`. Its
    server ends with this process."""
    from verl_tasks.verl_plugins import fork_server

    folder.mkdir()
    for tool in Path(sys.executable).parent.iterdir():
        if tool.name != "python":
            (folder / tool.name).symlink_to(tool)
    environment = os.environ | {"PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
    environment.pop("PYTHONPATH", None)
    with fork_server.listening(folder) as listener, (folder / "log").open("w") as log:
        server = [sys.executable, __file__, str(listener.fileno()), str(folder), str(os.getpid()), *imports]
        files = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": log}
        # A group of its own, which Ctrl-C in a terminal leaves.
        subprocess.Popen(server, env=environment, pass_fds=[listener.fileno()], process_group=0, **files)
    return fork_server.write_python(folder)


def suits(peer: int, request: dict) -> bool:
    """Whether a fork of this process does what a fresh Python would do for the ``request`` of the process ``peer``."""
    match request["arguments"]:
        case ["-m", module, *_]:
            ours = module.startswith(("tasks.", "verl_tasks.", "cookiecutter"))
        case ["-c", code, *_]:
            ours = "cookiecutter" in code
        case [script, *_]:  # a hook of the template looks at its parent's folder
            ours = script.endswith(".py") and "tasks" in Path(request["folder"], script).parts
        case _:
            ours = False
    environment = request["environment"]
    # A stage's keeper ends its descendants and removes their shared memory (tasks/common/leftovers.py); a fork is ours.
    if not ours or not environment.keys().isdisjoint(("FRESH_PYTHON", "VERL_TASK_LAUNCH")):
        return False
    # A test may kill its group, which a fork cannot join in another session. Where it leads one, so does the fork.
    if os.getsid(peer) not in (os.getsid(0), peer):
        return False
    if any(resource.prlimit(peer, limit) != resource.getrlimit(limit) for limit in LIMITS):
        return False
    changed = {name for name, _ in (UNSET | environment).items() ^ (UNSET | dict(os.environ)).items()}
    if any(name.startswith(EARLY) and name not in LATE for name in changed):
        return False
    # A checkout or a project, and the folder where a project has the library.
    entries = [Path(request["folder"], entry) for entry in environment.get("PYTHONPATH", "").split(":") if entry]
    return all((entry / "tasks").is_dir() or (entry / "verl_tasks").is_dir() for entry in entries)


def keep_compiled(folder: str) -> None:
    """Keep our compiled modules in ``folder``, also with PYTHONDONTWRITEBYTECODE: to compile them took a fifth of a
    command's time. Those of packages are where they were installed: to compile them takes 15 seconds."""
    importing = importlib._bootstrap_external
    place_of = importing.cache_from_source

    def place(path: str, *how, **more) -> str:
        sys.pycache_prefix = None if path.startswith((sys.prefix, sys.base_prefix)) else folder
        return place_of(path, *how, **more)

    sys.dont_write_bytecode, importing.cache_from_source = False, place


def main(listener: str, folder: str, owner: str, *imports: str) -> None:
    """Serve the `python` of ``folder``."""
    sys.path[0] = str(PLUGINS)
    import fork_server

    sys.path[0], sys.executable = "", f"{folder}/python"
    keep_compiled(f"{folder}/pycache")

    @functools.cache
    def prepare() -> None:
        gc.disable()
        for name in imports:
            importlib.import_module(name)
        fork_server.freeze()

    def admits(peer: int, request: dict) -> bool:
        if suited := suits(peer, request):
            prepare()
        return suited

    fork_server.Server(socket.socket(fileno=int(listener)), int(owner), admits).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
