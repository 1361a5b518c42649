"""make recipe: the recipes' commands, what they promise, and their rows in docs/RESULTS.md."""

import json
import os
import re
import signal
import subprocess
import threading
from types import SimpleNamespace

import psutil
import pytest

from tasks.common.settings import SettingsError
from tests.helpers import MAKE, PYTHON, ROOT, has_ended, make, outside_make, until
from tests.recipes import run as recipe


def estimate(value: float, low: float, high: float) -> dict:
    return {"value": value, "low": low, "high": high}


COMPARED = {
    "against": "warm-up",
    "metrics": {
        "pass@1": {
            "warm-up": estimate(0.3, 0.25, 0.35),
            "trained": estimate(0.5, 0.45, 0.55),
            "difference": estimate(0.2, 0.1, 0.3),
        }
    },
    "gained": [1],
    "lost": [],
}
HEAD = "# A result\n# hardware: any\n# stack: cpu\n# minutes: 1\n# reach: pass@1 gain above {}\n"
LEAVES = 'mkdir -p "$ARTIFACTS/compare/countdown/a--b" && cp {} "$ARTIFACTS/compare/countdown/a--b/compare.json"\n'


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write a recipe `own` and run it as make does; returns its status and the page."""
    for name in ("recipes", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "RESULTS.md").write_text(f"before\n{recipe.BEGIN}old\n{recipe.END}after\n")
    (tmp_path / "compared.json").write_text(json.dumps(COMPARED))
    monkeypatch.setattr(recipe, "FOLDER", tmp_path / "recipes")
    monkeypatch.setattr(recipe, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(recipe.write_table, "__defaults__", (tmp_path / "RESULTS.md",))
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.setenv("NAME", "own")
    monkeypatch.delenv("GIVEN", raising=False)
    monkeypatch.delenv("STACK", raising=False)

    def write(bound: str, command: str):
        (tmp_path / "recipes/own.sh").write_text(HEAD.format(bound) + command)
        status = 0
        try:
            recipe.main()
        except SystemExit as ended:
            status = ended.code
        return status, (tmp_path / "RESULTS.md").read_text()

    return write


def leaves(tmp_path) -> str:
    return LEAVES.format(tmp_path / "compared.json")


def test_a_result_has_its_row(written, tmp_path):
    status, page = written("0.05", leaves(tmp_path))
    assert (
        status == 0 and page.startswith(f"before\n{recipe.BEGIN}| recipe |") and page.endswith(f"{recipe.END}after\n")
    )
    row = next(line for line in page.splitlines() if "A result" in line)
    assert "| pass@1 | 0.300 [0.250, 0.350] | 0.500 [0.450, 0.550] | +0.200 [0.100, 0.300] |" in row
    result = json.loads((tmp_path / "results/recipe-own-cpu.json").read_text())
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert result["commit"] == head and "gained" not in result["compare"]
    assert result["versions"]["python"] and result["cpu"].startswith(f"{len(os.sched_getaffinity(0))} x ")


def test_a_missed_promise_is_said_in_the_row_and_by_the_exit_status(written, tmp_path):
    status, page = written("0.1", leaves(tmp_path))
    assert status == "error: own missed: pass@1 gain above 0.1"
    assert "+0.200 [0.100, 0.300]; missed: pass@1 gain above 0.1" in page


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("exit 3\n", "exit status 3; docs/RESULTS.md stays as it was"),
        ("exit 124\n", "exit status 124; docs/RESULTS.md stays as it was"),
        ("true\n", "it left 0 compare.json"),
    ],
)
def test_a_command_that_fails_leaves_the_page(command, said, written, tmp_path):
    status, page = written("0", command)
    assert said in status and status.count("\n") == 0 and page == f"before\n{recipe.BEGIN}old\n{recipe.END}after\n"
    assert not [*(tmp_path / "results").iterdir()]


@pytest.mark.medium
def test_ram_is_that_of_the_processes_below_the_command(monkeypatch):
    monkeypatch.setattr(recipe, "PAUSE", 0.5)
    holds = "import sys; held = bytearray(b'x') * 10**8; print('held', flush=True); sys.stdin.read()"
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([PYTHON, "-c", holds], **piped) as other,  # another program
        subprocess.Popen(["bash", "-c", '"$0" -c "$1"; true', PYTHON, holds], **piped) as command,
    ):
        assert other.stdout.readline() == command.stdout.readline() == "held\n"
        waits, looks = command.wait, []

        def wait(seconds: float | None = None) -> int:
            looks.append(seconds)
            if len(looks) == 3:  # it has been looked at twice
                command.stdin.close()
            return waits(seconds if len(looks) < 3 else None)

        monkeypatch.setattr(command, "wait", wait)
        assert 1e8 < recipe.peak_of(command) < 1.5e8


def test_a_setting_of_the_shell_reaches_no_command(written, tmp_path, monkeypatch):
    for name in ("LR", "STEPS", "SEEDS", "ARGS", "FILE", "HF_HOME"):
        monkeypatch.setenv(name, "7")
    shows = f'echo "${{LR-}} ${{STEPS-}} ${{SEEDS-}} ${{ARGS-}} ${{FILE-}} $HF_HOME" >{tmp_path}/seen\n'
    assert written("0", shows + leaves(tmp_path))[0] == 0 and (tmp_path / "seen").read_text() == "     7\n"
    written("0\n# takes: FILE", shows + leaves(tmp_path))
    assert (tmp_path / "seen").read_text() == "    7 7\n"


def test_a_result_says_what_data_it_is_of(written, tmp_path):
    manifest = {"source": "file", "origin": [{"file": "/home/me/a.jsonl", "sha256": "abc"}]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    copies = f'mkdir -p "$ARTIFACTS/data/own" && cp {tmp_path}/manifest.json "$ARTIFACTS/data/own"\n'
    written("0", copies + leaves(tmp_path))
    assert json.loads((tmp_path / "results/recipe-own-cpu.json").read_text())["data"] == {"file": ["abc"]}


@pytest.mark.parametrize("name", [".venv-own/bin/python", "my-env/bin/python"])
def test_the_command_has_the_python_of_make(name, written, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHON", str(ROOT / name))
    assert written("0", f'echo "${{PYTHON-}}" >{tmp_path}/seen\n' + leaves(tmp_path))[0] == 0
    assert (tmp_path / "seen").read_text() == f"{ROOT / name}\n"


@pytest.mark.parametrize(
    ("given", "takes", "said"),
    [
        ("NAME STACK PYTHON ARTIFACTS", "", 0),
        ("NAME FILE", "FILE", 0),
        ("NAME FILE", "", "error: FILE: own has its own settings; it takes no variable"),
        ("STEPS NAME LR FILE", "FILE", "error: LR: own has its own settings; it takes FILE"),
    ],
)
def test_a_variable_of_makes_command_line_that_a_recipe_does_not_take(
    given, takes, said, written, tmp_path, monkeypatch
):
    monkeypatch.setenv("GIVEN", given)
    status, _ = written(f"0\n# takes: {takes}" if takes else "0", f"touch {tmp_path}/ran\n" + leaves(tmp_path))
    assert status == said and (tmp_path / "ran").exists() is (said == 0)


@pytest.mark.parametrize(("before", "command", "changed"), [("", "", False), ("x", "rm", True), ("", "touch", True)])
def test_a_tree_that_is_edited_during_the_run_is_changed(before, command, changed, written, tmp_path, monkeypatch):
    """Before the command, after it, or at neither time."""
    edited = tmp_path / "edited"
    if before:
        edited.touch()
    monkeypatch.setattr(recipe, "edited", lambda *_: edited.exists())
    written("0", (f"{command} {edited}\n" if command else "") + leaves(tmp_path))
    assert json.loads((tmp_path / "results/recipe-own-cpu.json").read_text())["changed"] is changed


@pytest.mark.parametrize("given", ["", "STACK"])
def test_a_recipe_of_another_stack_is_refused(given, written, tmp_path, monkeypatch):
    monkeypatch.setenv("STACK", "current")
    monkeypatch.setenv("GIVEN", given)
    monkeypatch.setattr(recipe, "nvidia", lambda: None)
    status, _ = written("0", leaves(tmp_path))
    other = "error: NAME=own: is for STACK=cpu: make recipe NAME=own STACK=cpu"
    assert status == ("error: STACK=current: needs a GPU, and this machine has none" if given else other)


def test_on_a_gpu_of_another_stack_the_advice_is_its_own(written, monkeypatch):
    monkeypatch.setenv("STACK", "a100")
    monkeypatch.setattr(recipe, "nvidia", lambda: SimpleNamespace(gpus=(SimpleNamespace(name="A100"),)))
    status, _ = written("0\n# stack: current", "true\n")
    assert status == "error: NAME=own: is for STACK=current: make recipe NAME=own STACK=a100"


def test_a_second_run_of_a_recipe_is_refused_and_the_first_goes_on(written, tmp_path):
    folder = tmp_path / "artifacts/recipes/own-cpu"
    with recipe.alone_in(folder):
        folder.mkdir()
        status, page = written("0", leaves(tmp_path))
        assert status == f"error: {folder}: another run of this recipe is in it; wait for its end"
        assert folder.is_dir() and "A result" not in page
    assert written("0", leaves(tmp_path))[0] == 0


def test_others_stay_out_until_the_result_is_read(written, tmp_path, monkeypatch):
    def meanwhile(folder):
        with pytest.raises(SettingsError, match="another run of this recipe is in it"), recipe.alone_in(folder):
            pass
        return {"folder": folder.is_dir()}

    monkeypatch.setattr(recipe, "data_of", meanwhile)
    assert written("0", leaves(tmp_path))[0] == 0
    assert json.loads((tmp_path / "results/recipe-own-cpu.json").read_text())["data"] == {"folder": True}


def test_a_folder_that_cannot_be_emptied_is_refused(written, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path / "artifacts/recipes/own-cpu"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(elsewhere)
    assert written("0", leaves(tmp_path))[0] == f"error: {folder}: cannot be emptied; remove it"


@pytest.mark.parametrize(("changed", "said"), [(False, ""), (True, ", with uncommitted changes")])
def test_a_row_and_the_list_say_whether_the_code_was_edited_when_it_ran(changed, said, written, tmp_path, capsys):
    """A row is a dated fact with its commit: what changes later says nothing about it."""
    assert written("0.05", leaves(tmp_path))[0] == 0
    file = tmp_path / "results/recipe-own-cpu.json"
    long_ago = {"changed": changed, "commit": "0123456" * 5}  # no commit of this repository
    file.write_text(json.dumps(json.loads(file.read_text()) | long_ago))
    recipe.write_table()
    assert re.search(r"`0123456`([^|]*) \|", (tmp_path / "RESULTS.md").read_text())[1] == said
    capsys.readouterr()
    recipe.overview()
    assert capsys.readouterr().out.splitlines()[1].endswith(f" min{said}")


def test_a_row_shows_what_its_recipe_is_about_as_it_is_written(written, tmp_path):
    _, page = written("0\n# takes: FILE", leaves(tmp_path))
    assert "| `own`: A result |" in page
    head = HEAD.replace("# A result", "# A result: FILE=<a folder>")
    (tmp_path / "recipes/own.sh").write_text(head.format(0) + "true\n")
    recipe.write_table()
    assert "| `own`: A result: FILE=&lt;a folder> |" in (tmp_path / "RESULTS.md").read_text()


def test_a_row_names_the_gpus_that_the_recipe_used(monkeypatch):
    gpus = tuple(SimpleNamespace(name=name) for name in ("first", "second"))
    monkeypatch.setattr(recipe, "nvidia", lambda: SimpleNamespace(gpus=gpus))
    for hardware, names in (
        ("1 GPU of 80 GB", ["first"]),
        ("2 GPUs", ["first", "second"]),
        ("any", ["first", "second"]),
    ):
        assert recipe.machine("current", hardware)["gpus"] == names


def test_a_metric_that_is_missing_has_its_row(written, tmp_path):
    status, page = written("0\n# reach: pass@9 gain above 0", leaves(tmp_path))
    assert status == "error: own missed: pass@9 gain above 0" and "| pass@9 |  |  | missing |" in page


def test_the_result_of_a_recipe_that_has_gone_has_no_row(written, tmp_path):
    (tmp_path / "results/recipe-gone-cpu.json").write_text('{"recipe": "gone"}')
    status, page = written("0", leaves(tmp_path))
    assert status == 0 and "gone" not in page


@pytest.mark.parametrize(("above", "kept"), [(0.29, True), (0.31, False)])
def test_a_promise_may_be_of_the_start(above, kept):
    promise = recipe.Promise("pass@1", "start", above)
    assert promise.kept(COMPARED) is kept and str(promise) == f"pass@1 start above {above}"


def test_a_command_ends_at_its_limit(written):
    status, _ = written("0\n# minutes: 0.01", "sleep 60\n")
    assert "exit status 124: longer than its 0.01 minutes" in status


def test_a_command_that_outlives_the_signal_of_its_limit_has_its_reason(written, monkeypatch):
    monkeypatch.setattr(recipe, "GRACE", 1)
    status, _ = written("0\n# minutes: 0.1", "trap '' TERM\nsleep 60\n")  # 6 s for the trap
    assert "exit status -9: longer than its 0.1 minutes" in status


@pytest.mark.medium
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_recipe_that_is_ended_ends_its_command(number, written, tmp_path):
    pid = tmp_path / "pid"
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def end() -> None:
        until(lambda: pid.exists() and pid.read_text().endswith("\n"))
        until(lambda: signal.getsignal(number) != before[number])  # else the tests end
        os.kill(os.getpid(), number)

    threading.Thread(target=end).start()
    try:
        status, _ = written("0", f"echo $$ >{pid}\nsleep 60\n")
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert "own.sh: interrupted; docs/RESULTS.md" in status and not psutil.pid_exists(int(pid.read_text()))


def test_the_limit_ends_what_ignores_sigterm(written, tmp_path, monkeypatch):
    """timeout waits for the bash of the command alone, which ends."""
    monkeypatch.setattr(recipe, "GRACE", 2)
    ignores = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"
    )
    status, _ = written("0\n# minutes: 0.1", f"{PYTHON} -c '{ignores}' >{tmp_path}/pid\n")  # 6 s to begin
    assert "longer than its 0.1 minutes" in status
    until(lambda: has_ended(int((tmp_path / "pid").read_text())), seconds=10)


def test_the_list_has_each_recipes_own_results_judged_as_they_are_now(written, tmp_path, capsys):
    assert written("0.05", leaves(tmp_path))[0] == 0
    file = tmp_path / "results/recipe-own-cpu.json"
    file.write_text(file.read_text().replace('"own"', '"own-longer"'))
    file.rename(tmp_path / "results/recipe-own-longer-cpu.json")
    for name, bound in (("own", "0"), ("own-longer", "0.5")):
        (tmp_path / f"recipes/{name}.sh").write_text(HEAD.format(bound) + "true\n")
    capsys.readouterr()
    recipe.overview()
    longer, result, own, never = capsys.readouterr().out.splitlines()
    assert own.startswith("own: ") and never == "  never run" and longer.startswith("own-longer: ")
    assert "missed pass@1 gain above 0.5 in 0.0 min" in result
    recipe.write_table()
    assert "+0.200 [0.100, 0.300]; missed: pass@1 gain above 0.5" in (tmp_path / "RESULTS.md").read_text()


@pytest.mark.parametrize("name", recipe.recipes())
def test_a_result_depends_on_its_own_task_alone(name):
    known = recipe.recipes()[name]
    assert known.code == ("Makefile", "tasks/common", f"tasks/{name.split('-')[1]}", f"tests/recipes/{name}.sh")


def test_a_command_without_a_task_depends_on_all_of_them(tmp_path):
    (tmp_path / "x.sh").write_text(HEAD.format(0) + "make all\n")
    assert recipe.read(tmp_path / "x.sh").code == ("Makefile", "tasks", "tests/recipes/x.sh")


def test_code_that_is_not_committed_is_edited(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "ROOT", tmp_path)
    code = ("Makefile", "tasks/common", "tasks/own")
    git = ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x"]
    for name in ("Makefile", "tasks/own/reward.py", "tasks/own/README.md", "tasks/other/reward.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    head = recipe.git_state(tmp_path)[0]["commit"]
    for name in ("tasks/own/README.md", "tasks/other/reward.py"):
        (tmp_path / name).write_text("edited")
    (tmp_path / "tasks/own/test_reward.py").touch()
    assert not recipe.edited(head, code)
    (tmp_path / "tasks/own/new.py").touch()
    assert recipe.edited(head, code)
    (tmp_path / "tasks/own/new.py").unlink()
    (tmp_path / "Makefile").write_text("edited")
    assert recipe.edited(head, code)


@pytest.mark.parametrize("line", ["reach: pass@1 over 0", "reach: pass@1 gain above x", "reach: pass@1 above 0..9", ""])
def test_a_head_of_another_form_is_refused(line, tmp_path):
    (tmp_path / "x.sh").write_text(f"# x\n# hardware: y\n# stack: cpu\n# minutes: 1\n# {line}\n")
    with pytest.raises(SettingsError, match=r"x\.sh: its head needs lines"):
        recipe.read(tmp_path / "x.sh")


@pytest.mark.parametrize("limit", ["ten", "1..2", "-3"])
def test_a_limit_that_is_no_number_is_refused(limit, tmp_path):
    (tmp_path / "x.sh").write_text(HEAD.format(0).replace("minutes: 1", f"minutes: {limit}"))
    with pytest.raises(SettingsError, match=rf"x\.sh: minutes: {limit}: give a number"):
        recipe.read(tmp_path / "x.sh")


@pytest.mark.parametrize("name", recipe.recipes())
def test_the_command_of_a_recipe_is_one_that_make_takes(name, tmp_path):
    planned = {"MAKEFLAGS": "n", "PYTHON": MAKE[1].partition("=")[2], "ARTIFACTS": str(tmp_path)}
    environment = outside_make() | planned | {"STACK": recipe.recipes()[name].stack}
    command = ["bash", "-euo", "pipefail", f"tests/recipes/{name}.sh"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "STAGE=all bash tasks/" in result.stdout, result.stderr


def test_a_recipe_that_is_not_there():
    result = make("recipe", NAME="none")
    assert result.returncode != 0 and "NAME=none: no such recipe; there are: cpu-" in result.stdout


def test_the_table_is_that_of_the_files(tmp_path):
    published = (ROOT / "docs/RESULTS.md").read_text()
    (tmp_path / "RESULTS.md").write_text(published)
    recipe.write_table(tmp_path / "RESULTS.md")
    assert (tmp_path / "RESULTS.md").read_text() == published


@pytest.mark.parametrize("name", ["gpu-gsm8k", "gpu-gsm8k-0.5b", "gpu-countdown-search", "gpu-calculator"])
def test_a_recipe_of_real_weights_names_them_by_hub_id_and_takes_a_folder(name, tmp_path):
    known = recipe.recipes()[name]
    size = "0.5B" if name.endswith("0.5b") else "1.5B"
    own = f"Qwen/Qwen2.5-Coder-{size}-Instruct"
    (tmp_path / "make").write_text('#!/bin/sh\nfor each; do echo "$each"; done\n')
    (tmp_path / "make").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for given, model in (({}, own), ({"MODEL": "/my model"}, "/my model")):
        command = ["bash", "-euo", "pipefail", f"tests/recipes/{name}.sh"]
        result = subprocess.run(command, cwd=ROOT, env=path | given, capture_output=True, text=True)
        assert f"MODEL={model}" in result.stdout.splitlines()
    assert "MODEL" in known.takes and size in known.about
