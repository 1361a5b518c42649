"""What a launch leaves on record, `make repeat` from it, and the tables of `make runs` and `make diff`.

A run's folder that comes from elsewhere is data: its record is checked before anything is done with it.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from tests.helpers import error_line, make
from tests.test_runs import write_checkpoints
from tests.test_settings import VALUES
from verl_tasks.digest import fingerprint
from verl_tasks.launch import train
from verl_tasks.launch.plan import rl_plan
from verl_tasks.process import StageFailed
from verl_tasks.reports import overview, run_report
from verl_tasks.runs import launches, repeat
from verl_tasks.runs.folder import all_runs, lineage, named, record, settings_of
from verl_tasks.runs.run import Run, read_metrics
from verl_tasks.runs.secrets import MASK, masked
from verl_tasks.settings import SettingsError, load_settings, unread

SECRETS = {"JUDGE_API_KEY": "sk-judge-12345", "WANDB_API_KEY": "wandb-12345", "HF_TOKEN": "hf_12345"}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return load_settings(VALUES)


def make_run(s, name="mine", metrics=None, arguments=(), steps=(10,), kind="rl", start="embedded", launched=True):
    """A run's folder as a training leaves it, with checkpoints at ``steps``."""
    run_dir = s.runs_dir / name
    write_checkpoints(run_dir, steps)
    record(run_dir, kind, fingerprint(s.rl_parts(list(arguments))), s, start, list(arguments))
    if launched:
        launches.begin(run_dir, s, ["python", "-m", "verl.trainer.main_ppo", *arguments], {"trainer": {"nnodes": 1}})
    (run_dir / "metrics").mkdir()
    lines = [json.dumps({"step": step, "data": data}) + "\n" for step, data in (metrics or {}).items()]
    (run_dir / "metrics/000.jsonl").write_text("".join(lines))
    return run_dir


def evaluate(run_dir, step, accuracy):
    """An evaluation's folder as `make eval` leaves it."""
    folder = run_dir.parents[2] / f"eval/{run_dir.parent.name}/{run_dir.name}-step{step}-0"
    folder.mkdir(parents=True)
    estimate = {"value": accuracy, "low": accuracy - 0.1, "high": accuracy + 0.1}
    model = f"/elsewhere/artifacts/runs/{run_dir.parent.name}/{run_dir.name}/checkpoints/global_step_{step}/actor/hf"
    summary = {"model": model, "prompts": 16, "samples": 4, "metrics": {"accuracy": estimate}}
    (folder / "summary.json").write_text(json.dumps(summary))


def everything(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.rglob("*") if path.is_file())


# ---- a launch's record


def test_a_record_has_what_a_repetition_needs_and_is_there_before_the_trainer(settings, capsys):
    """The trainer here is a program that looks for the record, logs a step that is ill, and saves."""
    run_dir = settings.runs_dir / "mine"
    trainer = """
import os, sys
from pathlib import Path
from tests.helpers import write_checkpoint
run = Path(sys.argv[1])
assert (run / "launches/000/config.yaml").is_file()
Path(os.environ["VERL_FILE_LOGGER_PATH"]).write_text('{"step": 1, "data": {"critic/score/mean": null}}\\n')
write_checkpoint(run / "checkpoints/global_step_1")
(run / "checkpoints/latest_checkpointed_iteration.txt").write_text("1")
"""
    plan = rl_plan(replace(settings, STEPS=1), Run.read(run_dir), "some/model")
    command = [sys.executable, "-c", trainer, str(run_dir), *plan.command]
    assert not run_dir.exists()  # a plan writes nothing
    train.execute(replace(plan, command=command))
    assert [path.name for path in (run_dir / "launches").iterdir()] == ["000"]
    assert "GRPO 1/1" in (screen := capsys.readouterr().out) and "reward nan, nan (step 1)" in screen

    found = launches.read(launch := run_dir / "launches/000")
    assert found["command"] == command and found["settings"]["LR"] == settings.LR and found["stack"] == "cpu"
    assert found["date"].endswith("+00:00")
    assert {"reward.py", "prepare_data.py", "train.sh"} <= found["task"].keys()
    assert f"pytest=={pytest.__version__}" in found["packages"] == sorted(found["packages"], key=str.lower)
    config = yaml.safe_load((launch / "config.yaml").read_text())
    assert config["actor_rollout_ref"]["actor"]["optim"]["lr"] == settings.LR
    # Resolved: the critic's model is the policy's.
    assert config["critic"]["ppo_mini_batch_size"] == config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"]
    assert config["actor_rollout_ref"]["rollout"]["prompt_length"] == settings.MAX_PROMPT_LENGTH
    assert config["data"]["prompt_key"] == "prompt" and MASK not in (launch / "config.yaml").read_text()


def test_each_launch_has_its_own_record_and_a_torn_one_does_not_count(settings, tmp_path):
    (tmp_path / "launches/.000.4711.partial").mkdir(parents=True)
    (tmp_path / "launches/.000.4711.partial/launch.json").write_text("{")
    begun = [launches.begin(tmp_path, replace(settings, STEPS=steps), ["x"], {}) for steps in (4, 8)]
    assert launches.launches(tmp_path) == begun and [path.name for path in begun] == ["000", "001"]
    assert [launches.read(launch)["settings"]["STEPS"] for launch in begun] == [4, 8]
    assert len(list((tmp_path / "launches").iterdir())) == 2


def test_no_secret_and_no_machine_is_in_a_run(settings):
    import platform

    given = [
        "+ray_kwargs.x.api_key=sk-abcdef",
        "+x.hub_token='hf abc'",
        "+proxy=http://me:pass123@host/x",
        "+max_token=8",
    ]
    run_dir = make_run(settings, arguments=given)
    launch = launches.launches(run_dir)[-1]
    nested = {"judge": {"api_key": "sk-abcdef", "password": "", "eos_token": "</s>"}, "urls": ["ftp://a:pass123@b/c"]}
    launches.write_config(launch, nested)
    text = everything(run_dir)
    for secret in (*SECRETS.values(), "sk-abcdef", "hf abc", "pass123"):
        assert secret not in text, secret
    assert "ray_kwargs.x.api_key=***" in text and "http://***@host/x" in text
    assert yaml.safe_load((launch / "config.yaml").read_text()) == {
        "judge": {"api_key": "***", "password": "", "eos_token": "</s>"},
        "urls": ["ftp://***@b/c"],
    }
    if len(host := platform.node()) > 3:
        assert host not in text


SECRET = "q7Zk29XvB4tLw81P"
LEAKS = f"""
api_key: {SECRET}
+  "HF_TOKEN": "{SECRET}",
+JUDGE_API_KEY={SECRET} make train
HF_TOKEN := {SECRET}
passwd = \"\"\"{SECRET}\"\"\"
token=f"{SECRET}{{x}}"
HF_TOKEN: str = "{SECRET}"
{{token: '{SECRET}', x: 1}}
PGPASSWORD={SECRET} psql
DB_PASS={SECRET} make x
API_KEYS = ["{SECRET}", "b"]
load(passphrase="{SECRET}")
os.environ['X_KEY']='{SECRET}'
os.getenv("X_KEY", "{SECRET}") or x
os.getenv("HF_TOKEN") or "{SECRET}"
OpenAI(api_key=os.getenv("K", "{SECRET}"))
setattr(config, "api_key", "{SECRET}")
login("{SECRET}")
auth=("user", "{SECRET}")
HTTPBasicAuth("me", "{SECRET}")
keyring.set_password("host", "me", "{SECRET}")
{{"Authorization": "Bearer {SECRET}"}}
curl Bearer {SECRET}
curl -s -u me:{SECRET} https://host/x
docker login -u me -p {SECRET} host
wandb login {SECRET}
cli --token {SECRET} --name x
machine x login y password {SECRET}
+ENV HF_TOKEN {SECRET}
https://hooks.slack.com/services/T0/{SECRET}
pip install -i https://me:{SECRET}@host/simple
x = 'hf_{SECRET * 2}'
see sk-proj-{SECRET}
"""
KEPT = """
token = tokenizer.decode(ids)
max_tokens=64 tokenizer=x max_token_len_per_gpu=8
eos_token: <|im_end|> api_key: null prompt_key: prompt
https://host/path@1
os.environ["HF_HOME"] = "/data"
row.get("prompt_key", "prompt")
def f(token: str, api_key: str | None = None) -> None:
from sklearn.linear_model import x; sk-learn
login(name, password)
--tokenizer path --max-tokens 5
hf_to_mcore_config_qwen2_5_vl_and_more(config)
for one in self.token:
setattr(config, "lr", "1e-6")
forward_pass = model(x)
if OLD_PWD == x: PWD=$OLD_PWD
curl -u $NAME:$PASS host
docker run -u 1000:1000 image
"""


def test_no_secret_is_left_and_what_is_none_stays():
    for line in LEAKS.strip().splitlines():
        assert SECRET not in masked(line) and MASK in masked(line), line
    for text in (f'+hf_token = \\\n+    "{SECRET}"', f"+-----BEGIN RSA PRIVATE KEY-----\n+{SECRET}\n+-----END"):
        assert SECRET not in masked(text), text
    assert masked(KEPT) == KEPT
    assert masked("+a.api_key=x --lr=1 http://me:pw@host") == "+a.api_key=*** --lr=1 http://***@host"


def test_masking_is_fast_on_repetition():
    repeated = ("a_", "A_", "--", "token: ", "token", "token'", "token(\n", "sk-", "bearer ", "curl ", "machine ")
    begun = time.thread_time()
    for text in repeated:
        masked(text * 20_000)
    assert time.thread_time() - begun < 5


def test_git_says_commit_and_changes_or_why_not(tmp_path, monkeypatch):
    def git(*arguments):
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    state, diff = launches.git_state(tmp_path)
    assert "not a git repository" in state["missing"]
    git("init")
    (tmp_path / "a.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    clean, nothing = launches.git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["uncommitted"] == [] and diff == nothing == ""
    (tmp_path / "a.py").write_text("x = 2\n")
    (tmp_path / "ä.py").touch()
    state, diff = launches.git_state(tmp_path)
    assert state == clean | {"uncommitted": ["a.py", "ä.py (new)"]} and "\n+x = 2\n" in diff
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launches.git_state(tmp_path) == ({"missing": "git is not installed"}, "")


def test_a_record_has_the_code_of_the_task_and_the_diff_without_secrets(settings, tmp_path, monkeypatch):
    task = tmp_path / "mine"
    (task / "profiles").mkdir(parents=True)
    for name, text in {"reward.py": 'API_KEY = "abc"\nrate = 0.125\n', "profiles/p.sh": "default LR 1\n"}.items():
        (task / name).write_text(text)
    (task / "rows.jsonl").write_text("{}")
    monkeypatch.setattr(type(settings), "task_dir", task)
    monkeypatch.setattr(launches, "git_state", lambda root: ({"commit": "c0ffee"}, '+HF_TOKEN = "abc"\n+x = 2\n'))
    launch = launches.begin(tmp_path / "run", settings, ["x"])
    assert (launch / "task/reward.py").read_text() == "API_KEY = ***\nrate = 0.125\n"
    code = {str(path.relative_to(launch / "task")) for path in (launch / "task").rglob("*.*")}
    assert code == {"reward.py", "profiles/p.sh"}
    assert launches.read(launch)["changes"] == "+HF_TOKEN = ***\n+x = 2\n"


def test_the_digest_of_data_is_of_what_it_holds(tmp_path):
    manifest = {"fingerprint": "1", "note": "no hub: error 17", "rows": {"train": 2}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "train.parquet").write_bytes(b"a")
    before = launches.data_digests(tmp_path)
    assert before.keys() == {"manifest.json", "train.parquet"}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"fingerprint": "2", "note": ""}))
    assert launches.data_digests(tmp_path) == before
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"rows": {"train": 3}}))
    (tmp_path / "test.parquet").touch()
    (tmp_path / "own.jsonl").touch()
    now = launches.data_digests(tmp_path, str(tmp_path / "own.jsonl"), "")
    assert repeat.changed(before, now) == f"manifest.json, test.parquet, {tmp_path}/own.jsonl"


def test_the_arguments_of_trl_are_a_config_without_a_path_to_the_machine(settings, tmp_path):
    from verl_tasks.training.trl_dpo import arguments

    launch = launches.begin(tmp_path, settings, ["x"])
    assert not (launch / "config.yaml").exists()
    launches.write_config(launch, arguments(replace(settings, METHOD="dpo"), tmp_path, 0).to_dict())
    config = yaml.safe_load((launch / "config.yaml").read_text())
    assert (config["beta"], config["max_steps"], config["learning_rate"]) == (settings.DPO_BETA, 10, settings.LR)
    assert config["model_init_kwargs"] == {"device_map": None}


# ---- make repeat


def test_a_repetition_gets_every_recorded_setting_under_another_name(settings):
    s = replace(settings, TASK="gsm8k", LR=3e-7, TEST_SIZE=0.25, LOGGER="wandb", N_GPUS=2, REWARD="")
    run_dir = make_run(s, arguments=["a.b='x y'", "trainer.total_epochs=1"])
    made, launch = repeat.check(run_dir)
    given = {"PATH": os.environ["PATH"], "GIVEN": "RUN"}
    environ = repeat.variables(made, launch["judge"], given)
    assert load_settings(environ) == replace(s, RUN="")  # no default of today in place of an empty one
    assert made["arguments"] == ["a.b='x y'", "trainer.total_epochs=1"]


def test_a_repetition_has_the_first_name_without_a_complete_run(settings):
    run_dir = make_run(settings)
    assert repeat.next_name(run_dir, settings) == "mine-repeat-1"
    first = make_run(settings, "mine-repeat-1", steps=(5,))
    assert repeat.next_name(run_dir, settings) == "mine-repeat-1"  # it was interrupted, and goes on
    assert repeat.next_name(first, settings) == "mine-repeat-2"
    write_checkpoints(first, (10,))
    assert repeat.next_name(run_dir, settings) == repeat.next_name(first, settings) == "mine-repeat-2"
    assert len(repeat.next_name(settings.runs_dir / ("x" * 64), settings)) == 64
    dev = {step: {"val-core/t/acc/mean@1": acc} for step, acc in ((2, 0.3), (4, 0.2))}
    early = replace(settings, PATIENCE=1)
    make_run(early, "early-repeat-1", metrics=dev)  # complete, by PATIENCE
    assert repeat.next_name(settings.runs_dir / "early", early) == "early-repeat-2"
    rounds, two = replace(settings, SELF_PLAY_ROUNDS=2), settings.runs_dir / "two"
    make_run(rounds, "two-repeat-1")
    assert repeat.next_name(two, rounds) == "two-repeat-1"
    make_run(rounds, "two-repeat-1-round2")
    assert repeat.next_name(two, rounds) == "two-repeat-2"


def test_what_cannot_be_repeated_says_why(settings):
    first = make_run(settings, "one")
    runs = {
        "has no record in": make_run(settings, "old", launched=False),
        "is a warm-up": make_run(settings, "sft-1", kind="sft"),
        "is a round of RUN=one; repeat that": make_run(
            settings, "one-round2", start=str(first / "checkpoints/global_step_10/actor/huggingface")
        ),
        "had a secret among its ARGS": make_run(settings, "secret", arguments=["+a.api_key=1"]),
    }
    for reason, run_dir in runs.items():
        with pytest.raises(SettingsError, match=rf"^RUN={run_dir.name}: [^\n]*{reason}[^\n]*$"):
            repeat.check(run_dir)
    assert repeat.check(first)[0]["kind"] == "rl"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"LR": "0.5"}, "LR=0.5: the run had LR=3e-05; leave it out"),
        ({"STACK": "a100"}, "STACK=a100: the run had STACK=cpu; make repeat STACK=cpu does"),
        ({"ARGS": "a=1"}, "ARGS=a=1: the run has its own"),
        ({"JUDGE_MODEL": "other"}, r"JUDGE_MODEL=other: the run had JUDGE_MODEL=judge"),
    ],
)
def test_other_values_are_no_repetition(settings, given, said):
    made = {"settings": asdict(load_settings(VALUES))}
    with pytest.raises(SettingsError, match=said):
        repeat.variables(made, {"JUDGE_MODEL": "judge"}, given)
    same = {"LR": "0.00003", "STACK": "cpu", "RUN": "mine", "PROFILE": "p"}
    environ = repeat.variables(made, {"JUDGE_MODEL": "judge"}, same)
    assert [environ.get(name) for name in ("RUN", "JUDGE_MODEL", "LR", "PROFILE")] == ["", "judge", "3e-05", None]


def test_the_warning_names_what_is_not_as_it_was():
    then = {"git": {"commit": "a" * 40}, "changes": "", "task": {"reward.py": "1"}, "python": "3.11.1"}
    then["packages"] = ["a==1", "torch==2.8.0"]
    now = {"git": {"missing": "no git"}, "changes": "diff", "task": {"reward.py": "2"}, "python": "3.12.1"}
    now["packages"] = ["torch==2.9.0", "zip==1"]
    code = [launches.code_of(record) for record in (then, now)]
    assert repeat.changed(code[0], code[0]) == ""
    assert repeat.changed(*code) == "commit, changes.diff, python, task: reward.py, a, torch, zip"
    assert [each["commit"] for each in code] == ["a" * 12, "none (no git)"]


def errors(result) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.startswith("error:") or "*** TASK" in line]


@pytest.mark.medium
def test_make_repeat_prepares_the_data_checks_it_and_trains_by_the_ordinary_path(settings):
    """The model is gone: the training refuses to start, in its own words."""
    s = replace(settings, MODEL="/no/such/model", INIT="base")
    where = {"ARTIFACTS": os.environ["ARTIFACTS"]}
    typed = {name: str(value) for name, value in asdict(s).items() if name not in unread(s)}
    assert make("data", **typed, **where).returncode == 0
    run_dir = make_run(s)
    shutil.rmtree(s.data_dir)

    result = make("repeat", RUN="mine", STACK="cpu", **where)
    assert "RUN=mine again, as RUN=mine-repeat-1" in result.stdout and "warning: changed" not in result.stdout
    assert "16 test, 8 dev, 64 train, 32 sft from generate" in result.stdout
    assert len(errors(result)) == 1 and "MODEL=/no/such/model: no such folder" in errors(result)[0], result.stdout

    file = launches.launches(run_dir)[-1] / "launch.json"
    noted = json.loads(file.read_text())
    file.write_text(json.dumps(noted | {"data": noted["data"] | {"manifest.json": "0"}}))  # of another reward
    assert "MODEL=/no/such/model" in errors(make("repeat", RUN="mine", STACK="cpu", **where))[0]

    file.write_text(json.dumps(noted | {"data": noted["data"] | {"train.parquet": "0"}, "git": {"commit": "0" * 40}}))
    result = make("repeat", RUN="mine", STACK="cpu", **where)
    assert "warning: changed since that run: commit" in result.stdout
    assert errors(result) == ["error: RUN=mine: was trained on different data (train.parquet differ)"]
    assert result.returncode != 0 and not (s.runs_dir / "mine-repeat-1").exists()


def test_wrong_names_are_refused_in_one_line(settings):
    make_run(settings, "grpo-lr2")
    for names, words in (("grpo-lr2,gpro-lr2", "RUN=gpro-lr2: no such run.*is it grpo-lr2"), ("grpo-lr2", "name two")):
        with pytest.raises(SettingsError, match=words):
            overview.comparison(names)
    for target, given in (("repeat", ""), ("diff", "grpo-lr2")):
        result = make(target, RUN=given, ARTIFACTS=os.environ["ARTIFACTS"], STACK="cpu")
        (said,) = errors(result)
        assert result.returncode != 0 and ("RUN is empty" if not given else "name two runs") in said


# ---- make runs, make diff


def test_without_runs_one_line_says_what_to_run(settings):
    assert overview.table() == f"no runs in {os.environ['ARTIFACTS']}/runs yet: run `make train TASK=name`"
    assert "TASK=gsm8k" in overview.table("gsm8k") and "\n" not in overview.table("gsm8k")


def test_the_table_has_a_line_for_each_run_the_newest_first(settings):
    step = {"critic/score/mean": 0.25, "timing_s/step": 300.5}
    mine = make_run(settings, metrics={1: step, 2: step | {"critic/score/mean": 0.5}})
    for number, accuracy in ((5, 0.9), (10, 0.75)):
        evaluate(mine, number, accuracy)
    old = make_run(replace(settings, MODEL="/models/small"), "sft-1", kind="sft", launched=False)
    os.utime(old / "settings.json", (1e9, 1e9))
    make_run(replace(settings, TASK="gsm8k", METHOD="gspo", MODEL="Qwen/Qwen3-4B"), "other", metrics={1: {}})
    (settings.runs_dir / "not-a-run").mkdir()
    header, *lines = [line.split() for line in overview.table().splitlines()]
    assert header == overview.HEADER
    rows = {line[0]: line[1:] for line in lines}
    assert rows["mine"][:6] == ["countdown", "grpo", "embedded", "2/10", "0.500", "0.750"]
    assert rows["mine"][-4:] == ["10", "min", "01", "s"]
    assert rows["sft-1"][:6] == ["countdown", "sft", "small", "0/16", "-", "-"] and "2001-09-09" in rows["sft-1"]
    assert rows["other"][:6] == ["gsm8k", "gspo", "Qwen/Qwen3-4B", "1/10", "-", "-"]
    assert lines[-1][0] == "sft-1" and len(lines) == 3
    assert [line.split()[0] for line in overview.table("gsm8k").splitlines()[1:]] == ["other"]
    starts = {line.index("countdown") for line in overview.table("countdown").splitlines()[1:]}
    assert len(starts) == 1


def test_the_table_reads_each_summary_once(settings, monkeypatch):
    """500 runs had taken 10 s: each had read the summaries of all."""
    for name in ("a", "b", "c"):
        evaluate(make_run(settings, name, metrics={1: {}}), 10, 0.5)
    read, read_json = [], overview.read_json
    monkeypatch.setattr(overview, "read_json", lambda file: read.append(file) or read_json(file))
    assert overview.table().count(" 0.500 ") == 3 == len(read) == len(set(read))


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("settings.json", '{"settings": 3, "kind": "rl"}', "is no record of a run: needs the texts"),
        ("metrics/000.jsonl", "nonsense\n", "line 1 is not JSON; remove that line"),
        ("launches/000/launch.json", "{", "is no record of a launch ("),
    ],
)
def test_a_broken_run_hides_no_other(file, text, why, settings):
    make_run(settings)
    broken = make_run(settings, "broken", metrics={1: {}})
    (broken / file).write_text(text)
    header, mine, last = overview.table().splitlines()
    assert header.split() == overview.HEADER and mine.startswith("mine ")
    assert last.startswith(f"error: {broken}") and why in last


@pytest.mark.parametrize("metrics", [None, [], {"accuracy": {"value": 0.5}}, {"accuracy": None}])
def test_a_broken_summary_of_an_evaluation_is_named(metrics, settings):
    broken = make_run(settings, metrics={1: {}})
    make_run(settings, "other", metrics={1: {}})
    evaluate(broken, 10, 0.5)
    (file,) = settings.runs_dir.parents[1].glob("eval/*/*/summary.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"metrics": metrics}))
    said = f"{file}: is no summary of an evaluation"
    assert said in overview.table().splitlines()[-1] and "other" in overview.table()
    for told in (lambda: overview.comparison("mine,other"), lambda: run_report.page(broken)):
        with pytest.raises(SettingsError, match=re.escape(said)):
            told()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (557, "9 min 17 s"), (3600, "1 h 00 min"), (7530, "2 h 05 min")],
)
def test_durations(seconds, text):
    assert overview.duration(seconds) == text


def test_the_comparison_has_what_differs_and_the_results_side_by_side(settings):
    left = make_run(settings, "a", metrics={9: {"critic/score/mean": 0.25}}, arguments=["trainer.x=1"])
    right = make_run(replace(settings, LR=1e-3, RUN="b"), "b", metrics={10: {"critic/score/mean": 0.5}})
    evaluate(right, 10, 0.75)
    launch = launches.launches(right)[-1]
    packages = (launch / "packages.txt").read_text()
    (launch / "packages.txt").write_text(packages.replace(f"pytest=={pytest.__version__}", "pytest==0.0"))
    noted = json.loads((launch / "launch.json").read_text())
    noted["git"] = {"commit": "f" * 40, "uncommitted": ["tasks/x.py", "own.py (new)"]}
    (launch / "launch.json").write_text(json.dumps(noted))
    sections = [part.splitlines() for part in overview.comparison("a,b").split("\n\n")]
    found = {line.split("  ")[0]: line.split("  ", 1)[1].split() for part in sections for line in part}
    assert found["settings"] == ["a", "b"] and found["LR"] == ["3e-05", "0.001"]
    assert found["ARGS"] == ["trainer.x=1", "(empty)"] and "SEED" not in found and "RUN" not in found
    assert found["commit"][-1] == "f" * 12 and found["pytest"] == [pytest.__version__, "0.0"]
    assert found["uncommitted changes"][-3:] == ["tasks/x.py,", "own.py", "(new)"]
    assert found["step"] == ["9", "10"] and found["critic/score/mean"] == ["0.25", "0.5"]
    assert found["eval: accuracy"] == ["-", "0.750", "[0.650,", "0.850]"]
    assert overview.comparison("a,a").startswith("settings: the same\n\ncode, data and packages: the same\n\nresults ")
    shutil.rmtree(left / "launches")  # killed before its first launch, by a version that lacked a variable
    noted = json.loads((left / "settings.json").read_text())
    del noted["settings"]["NNODES"]
    (left / "settings.json").write_text(json.dumps(noted))
    lines = [line.split() for line in overview.comparison("a,b").splitlines()]
    assert ["NNODES", "-", "1"] in lines and ["commit", "-", "f" * 12] in lines and "\na  " in overview.table()


def test_nan_in_the_metrics_breaks_nothing(settings):
    run_dir = make_run(settings, metrics={10: {"critic/score/mean": None}}, steps=(10,))
    assert str(read_metrics(run_dir)[10]["critic/score/mean"]) == "nan" and "nan" in overview.table()
    assert Run.read(run_dir).step("best") == 10
    plan = rl_plan(settings, Run.read(run_dir), "some/model")
    with pytest.raises(StageFailed):
        train.execute(replace(plan, command=["false"], steps=11, shown=("a", "b")))


METRICS = {1: {"critic/score/mean": 0.5, "timing_s/step": 1.0}}


def changed(s, values=None, name="shared", file="settings.json", **parts):
    """A run with ``parts`` of a record, and ``values`` of its settings, put in place of its own."""
    run_dir = make_run(s, name, metrics=METRICS)
    record = json.loads((run_dir / file).read_text()) | parts
    if values:
        record["settings"] |= values
    (run_dir / file).write_text(json.dumps(record))
    return run_dir


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"N_GPUS": "a[$(touch X)]"}, "N_GPUS=a.*has a wrong type"),
        ({"STACK": "../../x"}, r"STACK=\.\./\.\./x: must be one of"),
        ({"TASK": "../../x"}, "TASK=.*must be a plain name"),
        ({"TASK": "gsm8k"}, "is of TASK=gsm8k, its folder is countdown"),
        ({"BASH_ENV": "/tmp/evil.sh"}, "'BASH_ENV': no such variable"),
        ({"ARTIFACTS": "/elsewhere"}, "'ARTIFACTS': no such variable"),
        ({"LR": [1]}, "LR.*has a wrong type"),
        ({"METHOD": {"a": {"b": 1}}}, "METHOD.*has a wrong type"),
        ({"MODEL": None}, "MODEL=None: has a wrong type"),
        ({"STEPS": True}, "STEPS=True: has a wrong type"),
        ({"STEPS": 10**400}, "STEPS=1000.*must be a whole number"),
        ({"LR": float("nan")}, "LR=nan: must be a number"),
        ({"MODEL": "a\0b"}, "MODEL=.*one line of text"),
        ({"MODEL": "a\nLD_PRELOAD=/x.so"}, "MODEL=.*one line of text"),
    ],
)
def test_a_record_with_other_names_or_values_is_refused_in_one_line(settings, values, said):
    run_dir = changed(settings, values)
    with pytest.raises(SettingsError, match=rf"^RUN=shared: [^\n]*{said}[^\n]*$"):
        repeat.check(named(run_dir.name))


def test_an_evaluation_of_a_run_checks_its_values_too(settings):
    with pytest.raises(SettingsError, match=r"^RUN=shared: its settings\.json has STACK=\.\./x: must be one of"):
        settings_of(Run.read(changed(settings, {"STACK": "../x"})), settings)
    other = Run.read(changed(settings, {"TASK": "gsm8k", "SEED": 7}, name="b"))
    assert settings_of(other, settings) == replace(settings, SEED=7)


@pytest.mark.parametrize(
    "record",
    [
        [],
        "settings",
        7,
        {},
        {"settings": []},
        {"settings": {}},
        {"kind": {}},
        {"kind": "rl", "start": 5},
        {"arguments": "a"},
    ],
)
def test_another_json_value_is_no_record_and_the_other_runs_are_listed(settings, record):
    mine, run_dir = make_run(settings, "mine"), make_run(settings, "shared")
    whole = json.loads((run_dir / "settings.json").read_text())
    whole = whole | record if isinstance(record, dict) and record else record
    (run_dir / "settings.json").write_text(json.dumps(whole))
    assert all_runs() == [mine]
    with pytest.raises(SettingsError, match=r"^RUN=shared: .*settings\.json is no record of a run: [^\n]+$"):
        named("shared")


@pytest.mark.parametrize(
    "part",
    [
        {"judge": {"BASH_ENV": "/tmp/evil.sh"}},
        {"judge": {"JUDGE_MODEL": 5}},
        {"date": 5},
        {"date": "tomorrow"},
        {"stack": None},
        {"git": []},
        {"git": {"commit": 5}},
        {"git": {"commit": "c0ffee", "uncommitted": [1]}},
        {"data": "x"},
    ],
)
def test_a_launch_is_data_too(settings, part):
    run_dir = changed(settings, file="launches/000/launch.json", **part)
    for reads in (repeat.check, run_report.write):
        with pytest.raises(SettingsError, match=r"launch\.json is no record of a launch \([^\n]+\)$"):
            reads(run_dir)


@pytest.mark.parametrize(
    "argument",
    [
        "--config-dir=/tmp/evil",
        "--multirun",
        "hydra.run.dir=/tmp",
        "hydra/launcher=evil",
        "reward.custom_reward_function.path=/tmp/evil.py",
        "+actor_rollout_ref.model.external_lib=evil",
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=evil",
        "actor_rollout_ref.actor.optim.optimizer_impl=evil",
        "actor_rollout_ref.rollout.prometheus.file=/home/me/.bashrc",
        "reward.sandbox_fusion.url=http://elsewhere",
        "+x={_target_: os.system}",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_cls=evil.Worker",
        "actor_rollout_ref.model.trust_remote_code=True",
        "+ray_kwargs.ray_init.address=evil:6379",
        "trainer.experiment_name=${oc.env:HF_TOKEN}",
    ],
)
def test_arguments_that_can_run_code_are_not_repeated(settings, argument):
    with pytest.raises(SettingsError, match=r"RUN=shared: has ARGS that can run code: .*make train ARGS="):
        repeat.check(changed(settings, arguments=[argument]))


def test_arguments_that_set_a_value_are_repeated(settings):
    plain = ["trainer.total_epochs=1", "+a.b='x y'", "++actor_rollout_ref.model.target_modules=[q_proj,v_proj]"]
    plain += ["algorithm.kl_ctrl.target_kl=0.1", "data.note='a path/to'"]
    assert repeat.check(changed(settings, arguments=plain))[0]["arguments"] == plain


def test_a_run_that_begins_with_itself_is_refused(settings):
    first, second = (settings.runs_dir / name for name in ("one", "two"))
    for run_dir, other in ((first, second), (second, first)):
        changed(settings, name=run_dir.name, start=str(other / "checkpoints/global_step_1"))
    with pytest.raises(SettingsError, match="began with a round after it"):
        lineage(Run.read(first))


def test_names_and_texts_reach_a_screen_without_control_characters(settings, capsys):
    changed(settings, {"MODEL": "\x1b]0;x\x07evil\nmodel"})
    make_run(settings, "x;touch X")
    make_run(settings, "$(touch X)")
    assert [run.name for run in all_runs()] == ["shared"]
    assert "\x1b" not in overview.table() and len(overview.table().splitlines()) == 2


def test_half_a_character_in_one_run_leaves_the_tables_of_all(settings):
    run_dir = changed(settings, {"MODEL": "\ud800\u061cx"})
    make_run(settings, "other", metrics=METRICS)
    assert " ?x " in (text := overview.table()) and len(text.encode().splitlines()) == 3
    assert "MODEL     ?x" in overview.comparison(f"{run_dir.name},other").encode().decode()


TRACKER = "checkpoints/latest_checkpointed_iteration.txt"


@pytest.mark.parametrize("name", ["settings.json", "metrics/000.jsonl", TRACKER])
def test_a_pipe_in_one_run_leaves_the_tables_of_all(settings, name):
    """To read one that nobody writes to never ends."""
    (pipe := make_run(settings, "piped", metrics=METRICS) / name).parent.mkdir(exist_ok=True)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    make_run(settings, "other", metrics=METRICS)
    table = overview.table()
    assert "other" in table and ("piped" in table or name == "settings.json")


@pytest.mark.parametrize("start", ["/" + "a" * 300, "/x\0/runs/y"])
def test_a_start_that_no_file_system_can_hold_leaves_the_tables_of_all(settings, start):
    changed(settings, start=start)
    make_run(settings, "other", metrics=METRICS)
    assert len(overview.table().splitlines()) == 3 and "error" not in overview.table()


def test_texts_of_a_record_have_an_end(settings):
    changed(settings, start="/" + "runs/" * 20_000)
    assert overview.table().endswith("settings.json is no record of a run: a text is longer than 4096 characters")


def test_a_time_that_is_no_number_leaves_the_run_in_the_table(settings):
    for name, seconds in (("nan", math.nan), ("inf", math.inf), ("back", -500.0)):
        run_dir = make_run(settings, name, metrics={1: {"critic/score/mean": 0.25, "timing_s/step": seconds}})
        assert overview.row(run_dir)[4:6] == ["1/10", "0.250"] and overview.row(run_dir)[-1] == "-"


def test_steps_of_a_launch_that_was_lost_count_no_more(settings):
    """Killed at step 7 with a checkpoint of step 4; the next launch is at step 5."""
    run_dir = make_run(settings, metrics={step: {"critic/score/mean": step / 10} for step in range(1, 8)}, steps=(4,))
    (run_dir / "metrics/001.jsonl").touch()
    assert [*read_metrics(run_dir)] == [1, 2, 3, 4, 5, 6, 7]  # it has not come to its first step
    (run_dir / "metrics/001.jsonl").write_text(json.dumps({"step": 5, "data": {"critic/score/mean": 0.9}}) + "\n")
    assert [*read_metrics(run_dir)] == [1, 2, 3, 4, 5]
    assert overview.row(run_dir)[4:6] == ["5/10", "0.900"] and overview.results_of(run_dir)["step"] == 5


def test_the_report_shows_hostile_texts_as_text(settings):
    run_dir = changed(settings, {"MODEL": "<script>alert(1)</script>", "<img src=x>": "<b>"}, arguments=["<i>=1"])
    text = run_report.write(run_dir).read_text()
    assert "&lt;script&gt;alert(1)" in text and "&lt;img src=x&gt;" in text
    assert not any(tag in text for tag in ("<script", "<img src=x", "<b>", "<i>"))


@pytest.mark.parametrize(
    "line", ['{"step": "one", "data": {}}', '{"step": 1, "data": {"x": 1%s}}' % ("0" * 400), "[" * 100_000]
)
def test_metrics_from_elsewhere_are_one_line_of_error(settings, line):
    run_dir = changed(settings)
    (run_dir / "metrics/000.jsonl").write_text(line + "\n")
    with pytest.raises(SettingsError, match=r"000\.jsonl: line 1 [^\n]*remove that line$"):
        read_metrics(run_dir)


@pytest.mark.medium
def test_make_says_it_in_one_line_and_runs_nothing(settings, tmp_path):
    mark = tmp_path / "ran"
    changed(settings, {"N_GPUS": f"a[$(touch {mark})]"}, name="one")
    changed(settings, {"STACK": f"$(touch {mark})"}, name="two")
    for name in ("one", "two"):
        result = make("repeat", TASK="countdown", RUN=name, STACK="cpu", ARTIFACTS=os.environ["ARTIFACTS"])
        assert f"RUN={name}" in error_line(result) and not mark.exists()
