"""`make monitor`: what it shows of runs as they leave themselves on disk, in both dashboards. In a browser:
test_end_to_end.py."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from urllib.request import urlopen

import pytest

from tasks.common.machine import gpus
from tasks.common.reports import monitor
from tasks.common.reports.monitor import Follower, Sample, Seen, look
from tasks.common.settings import ROOT, SettingsError
from tasks.common.training import tracking
from tests.helpers import MAKE, make, outside_make
from tests.test_records import evaluate, make_run, settings  # noqa: F401  (a fixture)
from tests.test_settings import error_of, load

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
METRICS = {step: {"critic/score/mean": step / 10, "actor/entropy": 0.3, "timing_s/step": 2.0} for step in (1, 2, 3)}


def rollout(step: int, score: float, text: str = "<answer>1+2</answer>") -> dict:
    return {"input": "Numbers: 1, 2. Target: 3.", "output": text, "gts": "3", "score": score, "step": step, "uid": "a"}


def write_lines(file, rows, mode="w") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open(mode) as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def resume(run_dir, first: int, score: float) -> None:
    """A second launch that trains the steps from ``first`` to 4."""
    rows = [{"step": step, "data": METRICS[1] | {"critic/score/mean": score}} for step in range(first, 5)]
    write_lines(run_dir / "metrics/001.jsonl", rows)


@pytest.fixture
def run_dir(settings):  # noqa: F811
    """A run of three steps with samples of training and of an evaluation."""
    run = make_run(settings, "mine", metrics=METRICS, steps=(3,))
    write_lines(run / "rollouts/1.jsonl", [rollout(1, 0.0), rollout(1, 1.0, HOSTILE)])
    evaluate(run, 3, 0.75)
    (folder,) = (run.parents[2] / "eval/countdown").iterdir()
    chat = [{"role": "user", "content": "Numbers: 1, 2. Target: 3."}]
    evaluated = {"prompt": chat, "response": "1+2", "ground_truth": "3", "mode": "greedy"}
    rewards = [{"score": 1.0, "format": 1.0}, None]
    write_lines(folder / "rollouts.jsonl", [evaluated | {"reward": reward} for reward in rewards])
    return run


# ---- what is shown


def test_everything_that_a_run_has_is_seen(run_dir):
    seen = look(run_dir)
    assert seen.steps == METRICS
    assert seen.evaluations == {3: {"eval/accuracy": 0.75}}
    kinds = [(sample.kind, sample.step, sample.rewards.get("score")) for sample in seen.samples.values()]
    assert sorted(kinds, key=str) == [
        ("evaluation", 3, 1.0),
        ("evaluation", 3, None),
        ("training", 1, 0.0),
        ("training", 1, 1.0),
    ]
    assert seen.samples["eval-mine-step3-0-0"].rewards == {"score": 1.0, "format": 1.0, "sampled": 0.0}
    assert seen.findings == {} and seen.gpus == {}


def test_verls_validations_are_seen_with_the_parts_of_the_reward(run_dir):
    row = rollout(2, 0.3) | {"reward": 0.3, "acc": False, "format": 0.0, "note": "x"}
    del row["uid"]
    write_lines(run_dir / "validation/2.jsonl", [row])
    (sample,) = [sample for sample in look(run_dir).samples.values() if sample.kind == "validation"]
    assert (sample.step, sample.response) == (2, row["output"])
    assert sample.rewards == {"score": 0.3, "reward": 0.3, "acc": 0.0, "format": 0.0}


def test_the_dev_score_and_the_best_so_far_are_curves(settings):  # noqa: F811
    metrics = {step: {"val-core/t/acc/mean@1": acc, "x": 1.0} for step, acc in ((2, 0.25), (4, 0.5), (6, 0.375))}
    seen = look(make_run(settings, metrics=metrics | {5: {"x": 1.0}}))
    drawn = {step: (row["dev/score"], row["dev/best"]) for step, row in seen.steps.items() if "dev/best" in row}
    assert drawn == {2: (0.25, 0.25), 4: (0.5, 0.5), 6: (0.375, 0.5)}


def test_a_rule_that_keeps_firing_is_told_of_where_it_begins(settings):  # noqa: F811
    ill = {step: {"actor/entropy": 0.001 if step in (2, 3, 5) else 0.3} for step in range(1, 6)}
    assert sorted(look(make_run(settings, metrics=ill)).findings) == ["collapse-2", "collapse-5"]


def test_a_run_of_another_versions_settings_is_shown(run_dir):
    file = run_dir / "settings.json"
    made = json.loads(file.read_text())
    del made["settings"]["ABORT_ON"]
    file.write_text(json.dumps(made))
    assert look(run_dir).steps == METRICS


def test_long_texts_and_many_rows_are_cut(run_dir):
    rows = [rollout(2, 0.0, "x" * 100_000)] * 50
    write_lines(run_dir / "rollouts/2.jsonl", rows)
    (run_dir / "rollouts/2.jsonl").open("a").write('{"input": "half a li')
    found = [sample for sample in look(run_dir).samples.values() if sample.step == 2]
    assert len(found) == monitor.TRAINING_SAMPLES
    assert all(
        len(sample.response) < monitor.LONGEST + 50 and "100000 characters" in sample.response for sample in found
    )


def test_what_is_new_and_what_was_trained_again():
    sample = Sample("training", 1, "p", "r", "g", {"score": float("nan")})
    before = Seen(steps={1: {"a": 1.0}, 2: {"a": float("nan")}}, samples={"s": sample})
    assert not before.since(before) and before.since(before) is not None
    more = Seen(steps=before.steps | {3: {"a": 2.0}}, samples={"s": sample})
    assert more.since(before) == Seen(steps={3: {"a": 2.0}})
    assert Seen(steps={1: {"a": 1.0}, 2: {"a": 5.0}}, samples={"s": sample}).since(before) is None
    assert Seen(steps={1: {"a": 1.0}}, samples={"s": sample}).since(before) is None


# ---- the dashboards


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    """trackio's dashboard with a store of its own; trackio reads TRACKIO_DIR when it is imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("TRACKIO_DIR", "")
    from tasks.common.reports.monitor_trackio import Trackio

    return Trackio(tmp_path / "store")


def curve(trackio, run: str, metric: str) -> list[tuple[int, float]]:
    logs = trackio.store.get_logs("countdown", run)
    return [(row["step"], row[metric]) for row in logs if metric in row]


def test_trackio_has_curves_samples_findings_and_settings(run_dir, trackio):
    with (run_dir / "metrics/000.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "data": METRICS[3] | {"actor/entropy": 0.001}}) + "\n")
    write_lines(run_dir / "gpu.jsonl", [{"time": 1.7e9, "gpu/0/memory_gib": 60.5, "gpu/0/load_percent": 97.0}])
    follower = Follower(trackio)
    assert follower.update() == 1 and follower.update() == 0
    assert curve(trackio, "mine", "critic/score/mean") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.3)]
    assert curve(trackio, "mine", "eval/accuracy") == [(3, 0.75)]
    (alert,) = trackio.store.get_alerts("countdown")
    assert (alert["title"], alert["step"], alert["level"]) == ("collapse", 4, "error") and "lower LR" in alert["text"]
    assert trackio.store.get_system_logs("countdown", "mine")[0]["gpu/0/memory_gib"] == 60.5
    config = trackio.store.get_run_config("countdown", "mine")
    assert config["LR"] == 3e-5 and config["stack"] == "cpu"
    found = trackio.store.get_traces("countdown", "mine", search="onerror")
    assert [trace["messages"][1]["content"] for trace in found] == [HOSTILE]
    assert found[0]["metadata"] == {"kind": "training", "ground_truth": "3", "score": 1.0, "status": "score 1"}
    assert len(trackio.store.get_traces("countdown", "mine", search="target: 3")) == 4


def test_an_episode_is_a_conversation(run_dir, trackio):
    turns = ["call", HOSTILE, "answer"]
    write_lines(run_dir / "rollouts/2.jsonl", [rollout(2, 1.0) | {"turns": turns}, rollout(2, 0.0) | {"turns": "x"}])
    Follower(trackio).update()
    found = [trace for trace in trackio.store.get_traces("countdown", "mine") if trace["step"] == 2]
    said = sorted([(m["role"], m["content"]) for m in trace["messages"]][1:] for trace in found)
    assert said[0] == [("assistant", "<answer>1+2</answer>")]
    assert said[1] == [("assistant", "call"), ("user", HOSTILE), ("assistant", "answer")]


def test_an_evaluated_episode_has_its_turns(run_dir):
    (file,) = (run_dir.parents[2] / "eval/countdown").glob("*/rollouts.jsonl")
    row = json.loads(file.read_text().splitlines()[0])
    said = [("assistant", "call"), ("tool", "1"), ("tool", HOSTILE), ("assistant", "2")]
    write_lines(file, [row | {"messages": [{"role": role, "content": text} for role, text in said]}])
    (sample,) = [each for each in look(run_dir).samples.values() if each.kind == "evaluation"]
    assert sample.turns == ("call", f"1\n{HOSTILE}", "2")


def test_a_resumed_run_is_one_curve_with_what_was_trained_last(run_dir, trackio):
    follower = Follower(trackio)
    follower.update()
    resume(run_dir, first=3, score=0.9)
    follower.update()
    assert curve(trackio, "mine", "critic/score/mean") == [(1, 0.1), (2, 0.2), (3, 0.9), (4, 0.9)]
    assert len(trackio.store.get_traces("countdown", "mine")) == 4
    assert trackio.store.get_runs("countdown") == ["mine"]


def test_runs_of_several_tasks_are_projects(run_dir, settings, trackio):  # noqa: F811
    from dataclasses import replace

    make_run(settings, "other", metrics={1: METRICS[1]})
    make_run(replace(settings, TASK="gsm8k"), "far", metrics={1: METRICS[1]})
    assert Follower(trackio).update() == 3
    assert sorted(trackio.store.get_projects()) == ["countdown", "gsm8k"]
    assert sorted(trackio.store.get_runs("countdown")) == ["mine", "other"]


def test_an_unreadable_run_is_reported_once_and_the_others_are_shown(run_dir, settings, trackio, capsys):  # noqa: F811
    broken = make_run(settings, "broken", metrics=METRICS)
    file = broken / "metrics/000.jsonl"
    whole = file.read_text()
    file.write_text(whole + "\0" * 10 + "\n")  # as a file system may leave it after a power cut
    follower = Follower(trackio)
    assert follower.update() == 1 and follower.update() == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(
        f"warning: {broken}: cannot be read (SettingsError: {file}: line 4 is "
    )
    listed = make("runs", ARTIFACTS=os.environ["ARTIFACTS"])
    assert listed.returncode != 0 and f"\nerror: {file}: line 4 is not JSON; remove that line" in f"\n{listed.stdout}"
    file.write_text(whole)
    assert follower.update() == 1
    assert sorted(trackio.store.get_runs("countdown")) == ["broken", "mine"]


def test_tensorboard_has_the_same(run_dir, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from tasks.common.reports.monitor_tensorboard import Tensorboard

    follower = Follower(Tensorboard(tmp_path / "events"))
    follower.update()
    resume(run_dir, first=3, score=0.9)
    follower.update()
    events = EventAccumulator(str(tmp_path / "events/countdown/mine"))
    events.Reload()
    scores = [(event.step, round(event.value, 3)) for event in events.Scalars("critic/score/mean")]
    assert scores == [(1, 0.1), (2, 0.2), (3, 0.9), (4, 0.9)]
    assert [event.value for event in events.Scalars("eval/accuracy")] == [0.75]
    texts = {tag for tag in events.Tags()["tensors"]}
    assert {"settings/text_summary", "training/1/text_summary", "evaluation/0/text_summary"} <= texts
    (shown,) = events.Tensors("training/1/text_summary")
    assert f"\t{HOSTILE}".encode() in shown.tensor_proto.string_val[0]  # indented: shown as it is


# ---- the command


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.medium
@pytest.mark.parametrize(
    "missing", [(), pytest.param(("trackio",), marks=pytest.mark.slow)], ids=["trackio", "tensorboard"]
)
def test_make_monitor_serves_until_it_is_interrupted_and_leaves_nothing(run_dir, missing, tmp_path, monkeypatch):
    port = free_port()
    if missing:  # a Python that does not find it
        hidden = "import importlib.util as u\nfind = u.find_spec\n"
        hidden += "u.find_spec = lambda name, *a: None if name == 'trackio' else find(name, *a)\n"
        (tmp_path / "sitecustomize.py").write_text(hidden)
    command = [sys.executable, "-m", "tasks.common.reports.monitor"]
    environment = outside_make() | {"PORT": str(port), "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        ended = threading.Timer(120, process.kill)
        ended.start()
        try:
            first = process.stdout.readline()
            name = "tensorboard" if missing else "trackio"
            assert first.startswith(f"{name}: http://127.0.0.1:{port} ") and "1 run)" in first
            page = urlopen(f"http://127.0.0.1:{port}/", timeout=30).read().decode()
            assert name in page.lower()
            taken = make("monitor", PORT=str(port))
            assert taken.returncode != 0 and f"error: PORT={port}: something listens there already" in taken.stdout
        finally:
            ended.cancel()
            process.terminate()
            process.wait(timeout=30)
    assert list((run_dir.parents[2] / "monitor").iterdir()) == []


@pytest.mark.parametrize("port", ["http", "0", "70000", "-1", "7860;id"])
def test_a_bad_port_is_one_line(port):
    result = subprocess.run(
        [*MAKE, "monitor"], cwd=ROOT, env=outside_make() | {"PORT": port}, capture_output=True, text=True
    )
    assert result.returncode != 0 and result.stderr.startswith(f"error: PORT={port}: must be a number from 1 to 65535")


# ---- GPUs and trackers


def test_the_state_of_the_gpus_is_what_nvidia_smi_says(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nprintf '0, 61952, 97, 612.40\\n1, 1024, 0, [N/A]\\n'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sampler = gpus.Sampler(tmp_path / "gpu.jsonl")
    before = time.time()
    sampler.sample()
    sampler.sample()  # too early
    (row,) = map(json.loads, (tmp_path / "gpu.jsonl").read_text().splitlines())
    assert before <= row.pop("time") <= time.time()
    assert row == {
        "gpu/0/memory_gib": 60.5,
        "gpu/0/load_percent": 97.0,
        "gpu/0/power_w": 612.4,
        "gpu/1/memory_gib": 1.0,
        "gpu/1/load_percent": 0.0,
    }


def test_only_the_gpus_that_the_run_sees_are_asked(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" >>$(dirname $0)/asked\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus.Sampler(tmp_path / "gpu.jsonl").sample()
    assert (tmp_path / "asked").read_text().split() == gpus.QUERY[1:]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    gpus.Sampler(tmp_path / "gpu.jsonl").sample()
    assert (tmp_path / "asked").read_text().split()[len(gpus.QUERY) - 1 :] == [*gpus.QUERY[1:], "--id=2,3"]


def test_without_a_gpu_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    sampler = gpus.Sampler(tmp_path / "gpu.jsonl")
    sampler.sample()
    assert sampler.missing and not (tmp_path / "gpu.jsonl").exists()


def test_trackers_write_to_the_run_and_go_on_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    s = load(WANDB="1", LOGGER="tensorboard,wandb")
    assert tracking.loggers(s) == ["tensorboard", "wandb"] and tracking.loggers(load()) == []
    run = s.runs_dir / "mine"
    found = tracking.environment(s, run)
    assert found == tracking.environment(s, run)
    assert found["WANDB_RESUME"] == "allow" and found["WANDB_RUN_ID"].startswith("mine-")
    assert found["WANDB_RUN_ID"] != tracking.environment(s, s.runs_dir.parent / "elsewhere/mine")["WANDB_RUN_ID"]
    assert found["WANDB_DIR"] == str(run) and found["TENSORBOARD_DIR"] == str(run / "tensorboard")
    assert tracking.environment(load(), run) == {}
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    assert tracking.project(s) == "ours" and tracking.environment(s, run)["WANDB_PROJECT"] == "ours"


def test_wandb_without_a_key_is_named_before_the_training(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(SettingsError, match=r"WANDB=1: no key; run `wandb login`.*WANDB_MODE=offline"):
        tracking.check(load(WANDB="1"))
    tracking.check(load())
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracking.check(load(WANDB="1"))
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123456789\n")
    (tmp_path / "netrc").chmod(0o600)
    tracking.check(load(LOGGER="wandb"))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    with pytest.raises(SettingsError, match="no key"):
        tracking.check(load(WANDB="1"))


def test_loggers_that_are_not_there_are_named(monkeypatch):
    with pytest.raises(SettingsError, match="LOGGER=nothing: verl has no logger nothing; it has wandb, tensorboard"):
        tracking.check(load(LOGGER="nothing"))
    with pytest.raises(SettingsError, match="LOGGER=swanlab: swanlab is not installed; `pip install swanlab`"):
        tracking.check(load(LOGGER="swanlab"))


def test_abort_on_knows_the_rules():
    assert load(ABORT_ON="nan,collapse").ABORT_ON == "nan,collapse"
    assert "ABORT_ON=nan,entropy: entropy: must be some of nan, collapse, kl" in error_of(ABORT_ON="nan,entropy")
