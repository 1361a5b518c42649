"""A Python that has already imported what our commands import: a fork of it starts a command in tenths of a second.

The fast tests start hundreds of commands (`python -m tasks...`, `python tasks/<task>/evaluate.py`), which spend most of
their time on the import of pandas, SciPy and torch. ``install`` makes a folder with a `python` for `make PYTHON=`. It
hands its command line, environment, folder and standard streams to one server, which forks a child for each command.
Modules of tasks/ are never imported beforehand: a command takes those of its own checkout.

A command gets a fresh Python where the difference could matter (`eligible` in warm_client.py, ``suits`` below). One
difference remains: all forks hash strings as with PYTHONHASHSEED=0. Slow tests, except long ones, and
tests/test_warm_python.py use fresh ones.
"""

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import marshal
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import types
import weakref
from pathlib import Path

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
    """Make ``folder`` the `bin` of a warm Python, which has the modules ``imports``, and return its `python`.

    The server starts with the first command, and ends with this process.
    """
    folder.mkdir()
    for tool in Path(sys.executable).parent.iterdir():
        if tool.name != "python":
            (folder / tool.name).symlink_to(tool)
    (folder / "environment").write_bytes(marshal.dumps(os.environ | {"PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}))
    client, server = (
        Path(__file__).with_name("warm_client.py"),
        [sys.executable, __file__, str(folder), str(os.getpid()), *imports],
    )
    code = f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(client.parent)!r})\n"
    (folder / "python").write_text(f"{code}import {client.stem}\n{client.stem}.main({str(folder)!r}, {server!r})\n")
    (folder / "python").chmod(0o755)
    return folder / "python"


def suits(peer: int, environment: dict[str, str]) -> bool:
    """Whether a fork of this process does what a fresh Python with this ``environment`` would do for ``peer``."""
    # A test may kill its group, which a fork cannot join in another session. Where it leads one, so does the fork.
    if os.getsid(peer) not in (os.getsid(0), peer):
        return False
    if any(resource.prlimit(peer, limit) != resource.getrlimit(limit) for limit in LIMITS):
        return False
    changed = {name for name, _ in (UNSET | environment).items() ^ (UNSET | dict(os.environ)).items()}
    if any(name.startswith(EARLY) and name not in LATE for name in changed):
        return False
    return all(Path(entry, "tasks").is_dir() for entry in environment.get("PYTHONPATH", "").split(":") if entry)


def fork() -> int:
    """os.fork, whose child ends when this process does."""
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    return child


def in_huge_pages() -> None:
    """Move the memory of this process into pages of 2 MB, where Linux can: a fork then takes a third of the time."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, _, inode, *_ = line.split()
        if mode == "rw-p" and inode == "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            madvise(start, end - start, 25)  # MADV_COLLAPSE, of Linux 6.1; an error leaves the pages as they are


def serve(folder: str, owner: int, imports: list[str]) -> socket.socket:
    """Accept clients until the process ``owner`` ends. Returns the connection, in a child of this process for each."""
    listener, owned = socket.socket(socket.AF_UNIX), os.pidfd_open(owner)
    listener.bind(f"{folder}/socket.new")
    listener.listen(128)
    os.rename(f"{folder}/socket.new", f"{folder}/socket")
    for name in imports:  # the first clients wait meanwhile
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the children share these pages
    in_huge_pages()
    for each in weakref.finalize._registry:  # torch takes its operators apart; a child need not do so as it ends
        each.atexit = False
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    while owned not in select.select([listener, owned], [], [])[0]:
        client, _ = listener.accept()
        if fork() == 0:
            listener.close()
            os.close(owned)
            return client
        client.close()
    os._exit(0)


def hand_over(client: socket.socket) -> tuple:
    """Returns what ``client`` asks for in a child that has its standard streams. Tells it how the child ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as file:
        request = marshal.loads(file.read(int.from_bytes(size, "little")))
    peer = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), "little")
    if not suits(peer, request[1]):
        client.sendall(b"fresh\n")
        os._exit(0)
    parent = Path(f"/proc/{peer}/stat").read_text().rpartition(")")[2].split()[1]
    with contextlib.suppress(OSError):
        os.chdir(f"/proc/{parent}/cwd")  # where the parent of a fresh Python would be: a hook of the template asks
    child = fork()
    if child == 0:
        client.close()
        for place, stream in enumerate(streams):
            os.dup2(stream, place)
            os.close(stream)
        return request
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(BrokenPipeError):
        client.sendall(b"%d\n" % child)
        ended = os.pidfd_open(child)
        if ended not in select.select([client, ended], [], [])[0]:  # the client was killed
            os.kill(child, signal.SIGKILL)
        client.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


def become(environment: dict[str, str], folder: str, mask: int, group: int, ignored: list[int]) -> None:
    """Give this process what a command inherits from its parent."""
    try:
        os.setpgid(0, group)
    except PermissionError:  # the group is that of a client with a session of its own
        os.setsid()
    os.umask(mask)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    # Also with PYTHONDONTWRITEBYTECODE: to compile our modules took a fifth of a command's time.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(sys.argv[1]).with_name("pycache"))
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    for number, name in ((1, "stdout"), (2, "stderr")):
        bytes_, errors = io.FileIO(number, "w", closefd=False), getattr(sys, name).errors
        text = io.TextIOWrapper(
            bytes_ if unbuffered else io.BufferedWriter(bytes_),
            errors=errors,
            line_buffering=number == 2 or os.isatty(number),
            write_through=unbuffered,
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.modules["numpy"].random.seed()  # Python's own generator does so after each fork


def run(executable: str, arguments: list[str]) -> None:
    """What `executable *arguments` does."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.executable = executable
    entries = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    sys.path[:] = [os.getcwd(), *entries, *sys.path[1:]]
    match arguments:
        case ["-m", module, *rest]:
            sys.argv[:] = ["-m", *rest]
            runpy._run_module_as_main(module)
        case ["-c", code, *rest]:
            sys.argv[:], sys.path[0] = ["-c", *rest], ""
            exec(compile(code, "<string>", "exec"), main.__dict__)
        case [script, *rest]:
            sys.argv[:], sys.path[0] = [script, *rest], os.path.dirname(os.path.realpath(script))
            main.__file__ = script
            exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


def end(status: int) -> None:
    """End as Python does (below 0: by a signal), without taking the modules apart, which would copy their pages."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    arguments, *inherited = hand_over(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
    become(*inherited)
    try:
        run(f"{sys.argv[1]}/python", arguments)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
        end(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except (Exception, KeyboardInterrupt) as error:
        sys.excepthook(*sys.exc_info())
        end(-signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
    end(0)
