"""What make says and refuses, before anything long starts; `make clean` removes what it is told to alone."""

import fcntl
import io
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers import MAKE, PYTHON, ROOT, copy_of_checkout, make, outside_make, refused, with_embedded
from verl_tasks.launch.names import of_the_judge, refusal
from verl_tasks.rewards.judge import Judge
from verl_tasks.runs import clean
from verl_tasks.settings import Settings


@pytest.mark.parametrize(
    "arguments", [["train"], ["-n", "config"], ["train", "TASK=nosuch"], ["-n", "data", "TASK=nosuch"]]
)
def test_unknown_task_lists_the_known_ones(arguments):
    result = make(*arguments)
    assert result.returncode != 0 and "no such task; there are: " in result.stdout and "countdown" in result.stdout
    assert len(result.stdout.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("help", 0),
        ("help", 1),
        ("help", 30),
        *((f"{goal} TASK=countdown", 0) for goal in ("settings", "doctor", "runs")),
    ],
)
def test_what_shows_something_ends_quietly_where_its_reader_has_seen_enough(words, lines, tmp_path):
    command = f"{' '.join(MAKE)} {words} | head -n {lines}"
    environment = outside_make() | {"ARTIFACTS": str(tmp_path), "STACK": "cpu"}
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, env=environment, capture_output=True)
    said = [line for line in result.stderr.splitlines() if not line.startswith(b"from your environment")]
    assert said == [] and result.returncode == 0 and result.stdout.count(b"\n") == lines


def test_help_lists_every_variable_and_target():
    text = make("help").stdout
    for name in Settings.__dataclass_fields__:
        assert name in text
    for target in ("install", "new", "train", "data", "eval", "config", "test", "lint", "repeat", "runs", "diff"):
        assert f"  {target}" in text


@pytest.mark.parametrize("named", ["python-of-mine", "{}/bin/python-of-mine", "no-such-python"])
def test_a_python_can_be_named_as_the_shell_finds_it(named, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python-of-mine").symlink_to(PYTHON)
    environment = outside_make() | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "ARTIFACTS": str(tmp_path)}
    own, there = named.format(tmp_path), named != "no-such-python"
    for command in (["make", f"PYTHON={own}", "settings"], ["bash", "tasks/countdown/train.sh"]):
        own_variables = {"TASK": "countdown", "STACK": "cpu", "STAGE": "settings", "PYTHON": own}
        result = subprocess.run(command, cwd=ROOT, env=environment | own_variables, capture_output=True, text=True)
        assert (result.returncode == 0) == there and ("no such Python" in result.stderr) != there


def test_make_keeps_the_shells_pythonpath(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('found in PYTHONPATH')")
    environment = outside_make() | {"PYTHONPATH": str(tmp_path), "ARTIFACTS": str(tmp_path), "STACK": "cpu"}
    result = subprocess.run([*MAKE, "runs"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "found in PYTHONPATH" in result.stdout, result.stderr


@pytest.mark.medium
def test_files_and_screen_are_utf8_in_any_locale(tmp_path):
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    sizes = {"TRAIN_SIZE": "16", "TEST_SIZE": "8", "SFT_SIZE": "32", "TRAIN_BATCH_SIZE": "8"}
    variables = {"STACK": "cpu", "ARTIFACTS": str(tmp_path / "ä"), "RUN": "x", "MODEL": "/no/é", **sizes}
    result = subprocess.run(
        [*MAKE, "probe", "TASK=countdown", *(f"{name}={value}" for name, value in variables.items())],
        cwd=ROOT,
        env={name: value for name, value in outside_make().items() if name != "LANG"} | locale,
        capture_output=True,
        encoding="utf-8",
    )
    assert "16 train, 16 sft from generate" in result.stdout
    assert "Traceback" not in result.stderr, result.stderr
    errors = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert errors == ["error: MODEL=/no/é: no such folder, and not a hub id (owner/name)"]


A100, H200 = "8.0, NVIDIA A100-SXM4-80GB", "9.0, NVIDIA H200"


@pytest.mark.parametrize(
    ("gpus", "visible", "said"),
    [
        ([A100, A100], "", "STACK=a100: NVIDIA A100-SXM4-80GB, compute capability 8.0"),
        ([H200], "", "STACK=current: NVIDIA H200, compute capability 9.0"),
        (["8.9, NVIDIA L40S"], "", "STACK=a100: NVIDIA L40S, compute capability 8.9"),
        (["12.0, NVIDIA RTX PRO 6000"], "", "STACK=current: NVIDIA RTX PRO 6000, compute capability 12.0"),
        ([H200, A100], "", "STACK=a100: NVIDIA A100-SXM4-80GB, compute capability 8.0"),
        ([H200, A100], "0", "STACK=current: NVIDIA H200, compute capability 9.0"),
        (["[Not Supported]"], "", "STACK=a100: an NVIDIA GPU, whose driver does not tell its compute capability"),
        ([], "", "STACK=cpu: no NVIDIA GPU"),
        ([H200], "-1", "STACK=cpu: CUDA_VISIBLE_DEVICES=-1 hides all GPUs"),
        ([H200, A100], "GPU-1c4f", "STACK=a100: NVIDIA A100-SXM4-80GB, compute capability 8.0"),
        *(([H200], seen, "STACK=current: NVIDIA H200, compute capability 9.0") for seen in ("0 1", " +0")),
        *(([H200], seen, f"STACK=cpu: CUDA_VISIBLE_DEVICES={seen} hides all GPUs") for seen in ("x0", "+")),
    ],
)
def test_the_stack_follows_from_the_gpu(gpus, visible, said, tmp_path):
    command = ["bash", "tasks/common/install/choose_stack.sh"]
    environment = with_gpus(gpus, tmp_path) | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert f"STACK={result.stdout}" == f"{said}\n"


def with_gpus(gpus: list[str], folder: Path) -> dict[str, str]:
    """An environment whose nvidia-smi has ``gpus``."""
    smi = folder / "nvidia-smi"
    rows = "".join(f"[ -z $2 ] || [ $2 = {i} ] && echo '{gpu}'\n" for i, gpu in enumerate(gpus))
    none = f"[ {len(gpus)} = 0 ] && exit 9\n"
    smi.write_text(f"#!/bin/bash\n{none}[ $1 = -L ] && exit 0\n[ $1 = -i ] || set -- x ''\n{rows}exit 0\n")
    smi.chmod(0o755)
    environment = {k: v for k, v in outside_make().items() if k != "CUDA_VISIBLE_DEVICES"}
    return environment | {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_the_stack_of_the_machine_is_printed_once_and_is_that_of_train_sh(tmp_path):
    environment = with_gpus([H200], tmp_path)

    def screen(*arguments: str) -> list[str]:
        command = [*MAKE, "-n", *arguments, "TASK=countdown"]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        return [line for line in result.stdout.splitlines() if line.startswith("STACK=")]

    assert screen("train") == screen("install") == ["STACK=current: NVIDIA H200, compute capability 9.0"]
    assert screen("config") == screen("train", "STACK=cpu") == []  # printed for a program; or chosen by the user
    (tmp_path / "python").write_text("#!/bin/sh\n[ $2 = verl_tasks.launch.names ] || exec env -0\n")
    (tmp_path / "python").chmod(0o755)
    train_sh = ["bash", str(ROOT / "tasks/countdown/train.sh")]
    environment |= {"PYTHON": str(tmp_path / "python")}
    seen = subprocess.run(train_sh, env=environment, capture_output=True, text=True, check=True).stdout.split("\0")
    assert "STACK=current" in seen


@pytest.mark.parametrize(
    ("goal", "variables", "said"),
    [
        ("all", {"FROM": "start"}, "FROM=start: must be one of data, model, sft"),
        ("all", {"FROM": "train"}, "is not there; run `make data TASK=countdown`"),
        ("experiment", {"METHODS": "grpo"}, "METHODS=grpo: name two or more"),
        ("config", {"METHOD": "dpo"}, "METHOD=dpo: has no config of verl"),
        *((goal, {"METHOD": "distill"}, "TEACHER is empty: METHOD=distill learns") for goal in ("config", "train")),
    ],
)
def test_other_goals_refuse_in_one_line(goal, variables, said, tmp_path):
    assert said in refused(goal, TASK="countdown", ARTIFACTS=str(tmp_path), **variables)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"STACK": "tpu"}, "STACK=tpu: no such stack"),
        ({"LR": "fast"}, "LR=fast: must be a number"),
        ({"ARGS": "trainer.no_such_key=1"}, "trainer.no_such_key"),
    ],
)
def test_make_says_an_error_in_one_line(variables, said, tmp_path):
    result = make("train", TASK="countdown", ARTIFACTS=str(tmp_path / "artifacts"), **variables)
    errors = [line for line in result.stdout.splitlines() if line.startswith("error:") or "*** STACK" in line]
    assert result.returncode != 0 and "Traceback" not in result.stdout
    assert len(errors) == 1 and said in errors[0], result.stdout


@pytest.mark.parametrize(
    ("goal", "given", "said"),
    [
        ("train", ["MODLE=x"], "MODLE: no such variable; did you mean MODEL?"),
        ("train", ["LEARNING_RATE=1"], "LEARNING_RATE: no such variable; did you mean LR?"),
        ("train", ["lr=1e-5"], "lr: no such variable; did you mean LR?"),
        ("data", ["qqqqqq=1"], "qqqqqq: no such variable, see `make help`"),
        ("train", ["ARGS=trainer.x=1", "trainer.save_freq=2"], "trainer.save_freq: put all of ARGS in quotes"),
        ("simulate", ["MONTH=3"], "MONTH: no such variable; did you mean MONTHS?"),
        ("train", ["JUDGE_MODLE=x"], "JUDGE_MODLE: no such variable; did you mean JUDGE_MODEL?"),
        ("new", ["REWARD=json"], 'REWARD: make new takes it as OPTIONS="reward=..."'),
        ("new", ["LR=1"], "LR: make new has no such variable"),
    ],
)
def test_a_variable_that_nothing_knows_is_refused(goal, given, said):
    result = make(goal, *given, TASK="not_there" if goal == "new" else "countdown")
    assert result.returncode != 0 and len(result.stdout.strip().splitlines()) == 1
    assert said in result.stdout and not (ROOT / "tasks/not_there").exists()


def test_every_variable_of_the_judge_is_known_and_no_other_of_its_prefix():
    known = {*Judge.__dataclass_fields__, "JUDGE_API_KEY"}
    assert of_the_judge() == known and refusal(["train"], sorted(known)) == ""
    assert refusal(["eval"], ["JUDGE_URI"]) == "JUDGE_URI: no such variable; did you mean JUDGE_URL?"


def test_what_the_shell_exported_is_named_and_what_make_got_is_not(tmp_path):
    address = "http://user:secret@host/v1"
    environment = outside_make() | {"LR": "0.5", "N": "3", "MODEL": "", "BASE_URL": address}
    command = [*MAKE, "settings", "TASK=countdown", "STACK=cpu", "STEPS=7"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert result.stderr.splitlines() == ["from your environment: BASE_URL=http://***@host/v1, LR=0.5, N=3"]
    rows = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert rows.keys() == Settings.__dataclass_fields__.keys()
    for name, value, source in (
        ("LR", "0.5", "environment"),
        ("STEPS", "7", "command line"),
        ("TRAIN_SIZE", "512", "train.sh, cpu"),
        ("SOURCE", "generate", "train.sh "),
        ("ROLLOUT_N", "8", "stack cpu"),
        ("DPO_BETA", "0.1", "default"),
    ):
        assert rows[name].split()[1] == value and f" {source}" in rows[name], rows[name]


@pytest.mark.medium
def test_config_shows_the_plan_above_the_resolved_config_and_writes_nothing(tmp_path):
    given = {"STACK": "cpu", "LR": "0.125", "INIT": "base", "MODEL": "some/model", "STEPS": "7", "TRAIN_SEED": "5"}
    given |= {"ARTIFACTS": str(tmp_path / "artifacts"), "RUN": "mine", "ARGS": "trainer.total_epochs=7"}
    result = make("config", TASK="countdown", **given)
    assert result.returncode == 0, result.stdout
    config = yaml.safe_load(result.stdout)
    assert (config["actor_rollout_ref"]["actor"]["optim"]["lr"], config["trainer"]["total_epochs"]) == (0.125, 7)
    assert config["data"]["seed"] == 5  # as the training has it
    *plan, command = result.stdout.splitlines()[:5]
    run_dir = tmp_path / "artifacts/runs/countdown/mine"
    assert plan == ["# start: some/model", f"# run folder: {run_dir}", "# resumes from step: 0", "# steps: 7"]
    words = shlex.split(command.removeprefix("# command: "))
    program = "-m verl_tasks.verl_plugins.forked --trainer verl_tasks.verl_plugins.cpu.asleep verl.trainer.main_ppo"
    assert words[1:6] == program.split()
    assert words[-1] == "trainer.total_epochs=7"
    assert not (ROOT / "outputs").exists() and not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"OPTIONS": "reward=nosuch"}, "reward=nosuch: must be one of math, exact, "),
        ({"OPTIONS": "reward=exact reward=nosuch"}, "reward=nosuch: must be one of math, exact, "),
        ({"OPTIONS": "lora=maybe"}, "lora=maybe: must be one of no, yes"),
        ({"SOURCE": "nosuch"}, "source=nosuch: must be one of generate, hub, "),
        ({"OPTIONS": "rewrd=json"}, "OPTIONS=rewrd=json: no such option; did you mean reward?"),
        ({"OPTIONS": "reward"}, "OPTIONS=reward: has no answer; write OPTIONS=reward=answer"),
        ({"TASK": "countdown"}, "tasks/countdown: exists already; take another name"),
    ],
)
def test_new_refuses_in_one_line_what_cookiecutter_would_not(given, said):
    result = make("new", **{"TASK": "not_there"} | given)
    line, *others = result.stdout.splitlines()
    assert result.returncode != 0 and line.startswith(f"error: {said}")
    assert [other for other in others if not other.startswith("make: ***")] == []
    assert not (ROOT / "tasks/not_there").exists()


COUNTDOWN = {"TASK": "countdown", "STACK": "cpu"}
ODD = "a b'c%d \"$e,{f}"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("goal", "variables"),
    [
        ("data", {"TASK": "countdown || touch X; #"}),
        ("data", {"TASK": "countdown\ntouch X"}),
        ("data", {"TASK": "countdown gsm8k"}),
        ("data", {"TASK": "$(shell touch X)"}),
        ("settings", COUNTDOWN | {"STACK": "cpu; touch X"}),
        ("settings", COUNTDOWN | {"LR": "$(shell touch X)"}),
        ("settings", COUNTDOWN | {"ARGS": "'a; touch X"}),
        ("settings", COUNTDOWN | {"PYTHON": "no'; touch X; '"}),
        ("test", {"TASK": "x'; touch X; '"}),
        ("json_to_parquet", {"FILE": "x'; touch X; '", "OUTPUT": "y"}),
        ("new", {"TASK": "{{ cycler.__init__.__globals__.os.system('touch X') }}"}),
        ("new", {"TASK": "x'; touch X; '"}),
        ("new", {"TASK": "x", "OPTIONS": "reward=exact; touch X"}),
        ("new", {"TASK": "x", "OPTIONS": "'reward=exact"}),
        ("new", {"TASK": "x", "OPTIONS": '"description={{ 7*7 }}"'}),
        ("new", {"TASK": "x", "SOURCE": "reasoning_gym", "ENV": "$(touch X)"}),
        ("new", {"TASK": "x", "SOURCE": "reasoning_gym", "ENV": "chain_sum", "CONFIG": "{{ 7*7 }}"}),
    ],
)
def test_a_value_runs_no_code_and_is_refused_in_one_line(goal, variables):
    before = set(os.listdir(ROOT)) | set(os.listdir(ROOT / "tasks"))
    result = make(goal, **variables)
    said = [line for line in result.stdout.splitlines() if line and not line.startswith("make: ***")]
    assert result.returncode != 0 and len(said) == 1, result.stdout
    assert set(os.listdir(ROOT)) | set(os.listdir(ROOT / "tasks")) == before


def test_make_runs_no_code_of_the_environment(tmp_path):
    run = f"$(shell touch {tmp_path}/X)"
    environment = outside_make() | dict.fromkeys(("CHOSEN", "FILE", "SLOW", "UPGRADE"), run)
    environment["PYTHON"] = f"python3'; touch {tmp_path}/X; '"
    for goal in ("help", "doctor", "lock", "test", "json_to_parquet"):
        subprocess.run(["make", "-n", goal, "TASK=countdown", "STACK=cpu"], cwd=ROOT, env=environment, check=True)
    assert not (tmp_path / "X").exists()


def test_clean_takes_a_python_of_any_path(tmp_path):
    (tmp_path / ODD).mkdir()
    (tmp_path / ODD / "python").write_text('#!/bin/sh\necho mine >&2; exec python3 "$@"\n')
    (tmp_path / ODD / "python").chmod(0o755)
    command = ["make", "clean", "TASK=countdown", f"ARTIFACTS={tmp_path}/none", f"PYTHON={tmp_path / ODD}/python"]
    result = subprocess.run(command, cwd=ROOT, env=outside_make(), capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == (f"nothing of TASK=countdown in {tmp_path}/none\n", "mine\n")


@pytest.mark.parametrize("way", ["command line", "environment"])
def test_a_value_reaches_a_stage_as_it_is(way):
    given = COUNTDOWN | {"MODEL": f"/{ODD} `touch X` $(touch X) $(shell touch X) #"}
    arguments = [f"{name}={value}" for name, value in given.items()] if way == "command line" else []
    environment = outside_make() | ({} if arguments else given)
    command = [*MAKE, "settings", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    (row,) = (line for line in result.stdout.splitlines() if line.startswith("MODEL "))
    assert given["MODEL"] in row and not (ROOT / "X").exists()


@pytest.mark.medium
def test_words_of_ARGS_are_the_shells_without_its_commands():
    arguments = "trainer.experiment_name='a b' +data.note=\"'$HOME; touch X * $(touch X)'\""
    result = make("config", **COUNTDOWN, INIT="base", MODEL="some/model", ARGS=arguments)
    assert result.returncode == 0, result.stdout
    assert "experiment_name: a b\n" in result.stdout and "note: $HOME; touch X * $(touch X)\n" in result.stdout
    assert not (ROOT / "X").exists()


@pytest.fixture(scope="module")
def odd_checkout(tmp_path_factory):
    folder = copy_of_checkout(tmp_path_factory.mktemp("checkout") / ODD)
    with_embedded(folder / "artifacts")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    return folder


@pytest.mark.medium
@pytest.mark.parametrize("goal", ["help", "settings", "data", "config", "lint", "runs", "json_to_parquet"])
def test_a_goal_works_in_a_checkout_of_any_path(goal, odd_checkout, tmp_path):
    environment = odd_checkout / ".venv/bin"  # what make finds by itself, not PYTHON=
    environment.mkdir(parents=True, exist_ok=True)
    for name in ("python", "ruff", "shellcheck"):
        (environment / name).write_text(f'#!/bin/sh\nexec "{Path(PYTHON).parent / name}" "$@"\n')
        (environment / name).chmod(0o755)
    (odd_checkout / ".venv/.installed-cpu").touch()
    given = {} if goal in ("help", "lint", "runs", "json_to_parquet") else {"TASK": "countdown", "TRAIN_SIZE": "128"}
    if goal == "json_to_parquet":
        rows = [{"question": f"{number}?", "answer": str(number)} for number in range(40)]
        (tmp_path / f"{ODD}.json").write_text(json.dumps(rows))
        given = {"FILE": str(tmp_path / f"{ODD}.json"), "OUTPUT": str(tmp_path / f"{ODD} out"), "ARGS": "--test-size 4"}
    command = ["make", goal, "STACK=cpu", *(f"{name}={value}" for name, value in given.items())]
    result = subprocess.run(command, cwd=odd_checkout, env=outside_make(), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    if goal == "data":
        assert (odd_checkout / "artifacts/data/countdown/train.parquet").is_file()
    if goal == "json_to_parquet":
        assert (tmp_path / f"{ODD} out/train.parquet").is_file()


@pytest.mark.medium
def test_a_new_task_works_in_a_checkout_of_any_path(odd_checkout):
    assert make("new", TASK="fresh", cwd=odd_checkout).returncode == 0
    result = make("test", TASK="fresh", cwd=odd_checkout)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout


OTHERS = ("thesis.txt", "other/countdown/x")  # not of this repository


@pytest.fixture
def artifacts(tmp_path) -> Path:
    """A folder with something of two tasks, of what they share, and of somebody else."""
    folder = tmp_path / "a place"
    written = [f"{name}/{task}/x" for name in clean.OF_A_TASK for task in ("countdown", "gsm8k")]
    for name in (*written, "models/m/config.json", "judge/cache", "install.log", *OTHERS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_of_one_task_its_own_folders_are_removed_and_named(artifacts, monkeypatch, capsys):
    (artifacts / "trackio").mkdir()
    for name in ("countdown.db", "countdown.lock", "countdown_2.db"):
        (artifacts / "trackio" / name).touch()
    before = files(artifacts)
    result = make("clean", TASK="countdown", ARTIFACTS=str(artifacts))
    own = [*(f"{name}/countdown" for name in clean.OF_A_TASK), "trackio/countdown.db", "trackio/countdown.lock"]
    assert result.returncode == 0 and result.stdout.splitlines() == [f"removed {artifacts / name}" for name in own]
    assert files(artifacts) == {name for name in before if not name.startswith(tuple(own))}
    monkeypatch.setenv("ARTIFACTS", str(artifacts))
    clean.clean("countdown")
    assert capsys.readouterr().out == f"nothing of TASK=countdown in {artifacts}\n"


@pytest.mark.parametrize("yes", ["", "0", "yes"])
def test_without_a_task_or_a_yes_nothing_is_removed(artifacts, yes, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(artifacts))
    monkeypatch.setenv("YES", yes)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # no terminal
    before = files(artifacts)
    with pytest.raises(clean.SettingsError, match=r"^make clean removes reports, runs, .* or YES=1$"):
        clean.clean("")
    assert files(artifacts) == before


def test_with_a_yes_all_that_this_repository_wrote_is_removed(artifacts):
    command = [sys.executable, "-S", "-m", "verl_tasks.runs.clean"]  # -S: it needs no package
    own = outside_make() | {"ARTIFACTS": str(artifacts), "PYTHONPATH": str(ROOT), "YES": "1"}
    assert subprocess.run(command, cwd=ROOT, env=own).returncode == 0
    assert files(artifacts) == set(OTHERS)


@pytest.mark.parametrize(("answer", "removed"), [("y\n", True), ("\n", False), ("no\n", False)])
def test_on_a_terminal_it_asks(artifacts, answer, removed, monkeypatch, capsys):
    monkeypatch.setenv("ARTIFACTS", str(artifacts))
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    with os.fdopen(ours), os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        clean.clean("")
    said = capsys.readouterr().out
    assert str(artifacts / "runs") in said and ("nothing removed" in said) != removed
    assert (files(artifacts) == set(OTHERS)) == removed


@pytest.mark.parametrize("task", ["..", "../countdown", "/etc", "a b", "*"])
def test_a_task_is_a_name(artifacts, task, monkeypatch, capsys):
    monkeypatch.setenv("ARTIFACTS", str(artifacts))
    before = files(artifacts)
    with pytest.raises(clean.SettingsError, match="must be a plain name"):
        clean.clean(task)
    assert files(artifacts) == before


def test_of_a_link_the_link_is_removed_and_what_it_names_stays(artifacts, tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(artifacts))
    (artifacts / "runs").rename(tmp_path / "large disk")
    (artifacts / "runs").symlink_to(tmp_path / "large disk")
    monkeypatch.setenv("YES", "1")
    clean.clean("")
    assert files(artifacts) == set(OTHERS) and files(tmp_path / "large disk") == {"countdown/x", "gsm8k/x"}


@pytest.mark.parametrize("folder", ["runs/countdown", "rehearse/countdown/runs/countdown"])
@pytest.mark.parametrize("task", ["countdown", ""])
def test_a_task_that_runs_or_is_rehearsed_is_left_alone(artifacts, task, folder, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(artifacts))
    monkeypatch.setenv("YES", "1")
    (artifacts / folder).mkdir(parents=True, exist_ok=True)
    with (artifacts / folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = files(artifacts)
        with pytest.raises(clean.SettingsError, match=r"^TASK=countdown: is running .*end it before make clean$"):
            clean.clean(task)
        assert files(artifacts) == before
        clean.clean("gsm8k")
        assert not (artifacts / "runs/gsm8k").exists()


def test_every_folder_that_the_code_writes_is_known():
    texts = [path.read_text() for path in ROOT.glob("tasks/**/*.py") if not path.name.startswith("test_")]
    written = {name for text in texts for name in re.findall(r'artifacts\(\)(?:\.resolve\(\))? / f?"([a-z.]+)', text)}
    assert written > {"data", "runs", "models", "judge"} and written <= {*clean.OF_A_TASK, *clean.SHARED}
