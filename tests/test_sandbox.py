"""rewards/sandbox.py: hostile code in the worker, which would run it, does no harm and stops nothing."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.helpers import until
from verl_tasks.rewards.sandbox import CallFailed, Sandbox, SandboxError

ROOT = Path(__file__).parents[1]
EVALUATOR = """
import os, socket, subprocess, threading

def evaluator():
    return eval
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a module lies whose function runs whatever it is given."""
    folder = tmp_path_factory.mktemp("evaluator")
    (folder / "evaluator_of_the_tests.py").write_text(EVALUATOR)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def sandbox(folder):
    """A worker that evaluates any Python: worse than every scorer."""
    os.environ["SECRET_API_KEY"] = "the secret"
    sandbox = Sandbox("evaluator_of_the_tests:evaluator", seconds=60, memory=2**28)
    yield sandbox
    del os.environ["SECRET_API_KEY"]
    sandbox.close()


def outcome(sandbox, code):
    """The result, or the reason why there is none."""
    try:
        return sandbox.call(code)
    except CallFailed as failure:
        return f"failed: {failure}"


def test_call_and_result(sandbox):
    assert sandbox.call("[1 + 1, 'ä\\ud800', {'a': None}]") == [2, "ä\ud800", {"a": None}]


# Python that the kernel refuses, with ``os`` and the parent's number.
REFUSED = [
    "open('{new}', 'w')",
    "open('{old}', 'a').write('b')",
    "open('{old}', 'r+').truncate(0)",
    "os.open('{new}', os.O_CREAT)",
    "os.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
    "os.truncate('{old}', 0)",
    "os.remove('{old}')",
    "os.rename('{old}', '{new}')",
    "os.link('{old}', '{new}')",
    "os.symlink('{old}', '{new}')",
    "os.mkdir('{new}')",
    "os.mkfifo('{new}')",
    "os.chmod('{old}', 0)",
    "os.utime('{old}', (0, 0))",
    "__import__('shutil').rmtree('{folder}')",
    "__import__('subprocess').run(['touch', '{new}'])",
    "os.posix_spawn('/usr/bin/touch', ['touch', '{new}'], {{}})",
    "os.execv('/usr/bin/touch', ['touch', '{new}'])",
    "os.fork()",
    "os.kill({parent}, 9)",
    "os.killpg({parent}, 9)",
    "os.kill(-1, 9)",
    "os.pidfd_open({parent})",
    "__import__('fcntl').fcntl(0, 8, {parent})",
    "os.setpriority(0, {parent}, 19)",
    "os.sched_setaffinity({parent}, [0])",
    "__import__('resource').prlimit({parent}, 7, (1, 1))",
    "__import__('socket').socket()",
    "__import__('socket').socketpair()",
    "os.setuid(1)",
    "os.chroot('/')",
    "os.memfd_create('a')",
    "open('/proc/self/mem', 'r+')",
]
CALLED = [
    "creat(b'{new}', 0o600)",
    "syscall(85, b'{new}', 0o600)",
    "unlink(b'{old}')",
    "ptrace(16, {parent}, 0, 0)",
    "prctl(1, 0, 0, 0, 0)",
    "setsid()",
    "unshare(0x10000000)",
    "mount(b'/', b'/', 0, 4096, 0)",
    "umount2(b'/', 2)",
    "syscall(425, 8, 0)",  # io_uring_setup
    "syscall(272, 0)",  # unshare
]


def test_the_kernel_refuses_the_rest(sandbox, tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("a")
    before = old.stat()
    names = {"new": new, "old": old, "folder": tmp_path, "parent": os.getpid()}
    for code in REFUSED:
        code = code.replace("os.", "__import__('os').").format(**names)
        assert outcome(sandbox, code) == "failed: PermissionError", code
    for call in CALLED:
        libc = "__import__('ctypes').CDLL(None, use_errno=True)"
        code = f"({libc}.{call.format(**names)}, __import__('ctypes').get_errno())"
        assert sandbox.call(code) == [-1, errno.EPERM], code
    assert outcome(sandbox, f"__import__('os').system('touch {new}')") != 0
    after = old.stat()
    assert os.listdir(tmp_path) == ["old"] and old.read_text() == "a"
    assert (after.st_mode, after.st_mtime, after.st_nlink) == (before.st_mode, before.st_mtime, before.st_nlink)


def test_a_fork_bomb_has_no_first_child(sandbox):
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: break"
    assert sandbox.call(f"exec({bomb!r})") is None
    assert outcome(sandbox, "__import__('threading').Thread(target=print).start()") == "failed: RuntimeError"
    pid = sandbox.call("__import__('os').getpid()")
    assert not psutil.Process(pid).children() and psutil.Process(pid).num_threads() == 1


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("__import__('sys').exit(0)", "SystemExit"),
        ("__import__('os')._exit(0)", "the worker died"),
        ("__import__('os').abort()", "the worker died"),
        ("__import__('ctypes').string_at(0)", "the worker died"),
        ("__import__('time').sleep(60)", "too slow"),
        ("9 ** 9 ** 9", "too slow"),
        ("[0] * 10 ** 9", "MemoryError"),
        ("exec('a = [0]\\nwhile True: a += a')", "MemoryError"),
        ("(lambda f: f(f))(lambda f: f(f))", "RecursionError"),
        ("'a' * 10 ** 6", "the worker died"),  # a reply above the limit: it is ended
        ("object()", "TypeError"),  # no JSON
        ("exec('raise KeyboardInterrupt')", "KeyboardInterrupt"),
    ],
)
def test_a_failure_is_a_reason_and_the_next_call_works(sandbox, code, reason, monkeypatch):
    with monkeypatch.context() as patched:
        if reason == "too slow":  # the others have the time that a busy machine needs
            patched.setattr(sandbox, "_seconds", 0.5)
        assert outcome(sandbox, code) == f"failed: {reason}"
    assert sandbox.call("1 + 1") == 2


def test_a_request_above_the_limit_is_refused(sandbox):
    assert outcome(sandbox, " " * 2**25).startswith("failed: an input of")
    assert sandbox.call("1 + 1") == 2


def test_secrets_are_out_of_reach(sandbox, tmp_path):
    (tmp_path / "netrc").write_text("password")
    assert "the secret" not in str(sandbox.call("dict(__import__('os').environ)"))
    if not sandbox.landlock:
        pytest.skip("this kernel has no Landlock: files can be read")
    for path in (f"/proc/{os.getpid()}/environ", tmp_path / "netrc", "/etc/passwd"):
        assert outcome(sandbox, f"open('{path}').read()") == "failed: PermissionError"
    assert outcome(sandbox, "__import__('os').listdir('/root')") == "failed: PermissionError"


FORGED = """
def forge(text):
    import os, stat
    for fd in range(3, 4096):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, text)
        except OSError:
            pass
"""


@pytest.mark.parametrize("reply", [b"[" * 60_000 + b"]" * 60_000, b"[9]", b'{"value": 9, "nonce": "0"}'])
def test_a_forged_reply_fails_the_call_and_the_worker_is_replaced(sandbox, reply):
    pid = sandbox.call("__import__('os').getpid()")
    code = f"exec({FORGED + f'forge({reply!r} + bytes([10]))'!r})"
    assert outcome(sandbox, code) == "failed: the worker died"
    assert sandbox.call("1 + 1") == 2
    assert sandbox.call("__import__('os').getpid()") != pid


def test_a_forged_reply_that_comes_late_is_not_the_next_answers(sandbox, monkeypatch):
    """It lies in the socket after the look for one that is there already."""
    monkeypatch.setattr("verl_tasks.rewards.sandbox.select.select", lambda *arguments: ([], [], []))
    sandbox.call("1 + 1")
    ours, theirs = socket.socketpair()
    theirs.sendall(b'{"value": 9}\n')
    sandbox._socket.close()
    sandbox._socket = ours
    with theirs:
        assert outcome(sandbox, "1 + 1") == "failed: the worker died"
    assert sandbox.call("1 + 1") == 2


def test_many_threads_share_it(sandbox):
    results = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: sandbox.call(f"{n} * 2")}), daemon=True)
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: 2 * n for n in range(20)}


def test_a_fork_gets_a_worker_of_its_own(sandbox):
    own = sandbox.call("__import__('os').getpid()")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, str(sandbox.call("__import__('os').getpid()")).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reader, 20)) not in (own, 0)
    assert sandbox.call("__import__('os').getpid()") == own


@pytest.mark.parametrize("busy", [False, True])
def test_the_worker_ends_with_its_parent(folder, busy):
    program = (
        "import sys, threading, time\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(folder)!r}]\n"
        "from verl_tasks.rewards.sandbox import Sandbox\n"
        "sandbox = Sandbox('evaluator_of_the_tests:evaluator', seconds=60)\n"
        "print(sandbox.call(\"__import__('os').getpid()\"), flush=True)\n"
        + ("threading.Thread(target=sandbox.call, args=['9 ** 9 ** 9'], daemon=True).start()\n" if busy else "")
        + "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(parent.stdout.readline()))
    if busy:
        until(lambda: worker.cpu_times().user >= 0.5, 20)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert not psutil.wait_procs([worker], timeout=10)[1]


def test_a_thread_that_ends_does_not_end_the_worker(sandbox):
    sandbox.close()
    pids = []
    for _ in range(2):  # the first starts the worker
        thread = threading.Thread(target=lambda: pids.append(sandbox.call("__import__('os').getpid()")))
        thread.start()
        thread.join()
    assert pids[0] == pids[1]


@pytest.mark.parametrize(
    ("target", "problem"),
    [("no_such_module:f", "ModuleNotFoundError"), ("math:no_such", "AttributeError"), ("math:sqrt", "TypeError")],
)
def test_a_worker_that_cannot_start_gives_an_error(target, problem):
    with pytest.raises(SandboxError, match=f"{target}.*{problem}"):
        Sandbox(target).call(1)
