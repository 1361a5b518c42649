"""`make monitor`: what it shows of runs as they leave themselves on disk, in both dashboards. In a browser:
test_end_to_end.py."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.helpers import MAKE, outside_make
from tests.test_records import changed, evaluate, make_run, settings  # noqa: F401  (a fixture)
from tests.test_settings import error_of, load
from verl_tasks.launch import train
from verl_tasks.reports import monitor
from verl_tasks.settings import ROOT, SettingsError
from verl_tasks.training import tracking

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
METRICS = {step: {"critic/score/mean": step / 10, "actor/entropy": 0.3, "timing_s/step": 2.0} for step in (1, 2, 3)}


def rollout(step: int, score: float, text: str = "<answer>1+2</answer>", **more) -> dict:
    row = {"input": "Numbers: 1, 2. Target: 3.", "output": text, "gts": "3", "score": score, "step": step, "uid": "a"}
    return row | more


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


@pytest.fixture
def store(tmp_path, monkeypatch):
    """trackio's store in a folder of its own; trackio reads TRACKIO_DIR when it is imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage


def curve(store, run: str, metric: str) -> list[tuple[int, float]]:
    logs = store.get_logs("countdown", run)
    return sorted((row["step"], row[metric]) for row in logs if metric in row)


def samples(store, step: int) -> list[dict]:
    """The samples of a step, the lowest score first."""
    found = [trace for trace in store.get_traces("countdown", "mine") if trace["step"] == step]
    return sorted(found, key=lambda trace: trace["metadata"].get("score", -1))


def test_a_run_is_shown_with_curves_samples_findings_gpus_and_settings(run_dir, store):
    ill = METRICS[3] | {"actor/entropy": 0.001}
    write_lines(run_dir / "metrics/000.jsonl", [{"step": step, "data": ill} for step in (4, 5)], "a")
    write_lines(run_dir / "gpu.jsonl", [{"time": 1.7e9, "gpu/0/memory_gib": 60.5, "gpu/0/load_percent": 97.0}])
    follower = monitor.Follower(store)
    assert follower.update() == 1 and follower.update() == 0
    assert curve(store, "mine", "critic/score/mean") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.3), (5, 0.3)]
    assert curve(store, "mine", "eval/accuracy") == [(3, 0.75)]
    (alert,) = store.get_alerts("countdown")  # where the rule begins to fire
    assert (alert["title"], alert["step"], alert["level"]) == ("collapse", 4, "error") and "lower LR" in alert["text"]
    assert store.get_system_logs("countdown", "mine")[0]["gpu/0/memory_gib"] == 60.5
    config = store.get_run_config("countdown", "mine")
    assert config["LR"] == 3e-5 and config["start"] == "embedded"
    found = store.get_traces("countdown", "mine", search="onerror")
    assert [trace["messages"][1]["content"] for trace in found] == [HOSTILE]
    assert found[0]["metadata"] == {"kind": "rollouts", "ground_truth": "3", "score": 1.0, "status": "score 1"}
    assert len(store.get_traces("countdown", "mine", search="target: 3")) == 4
    told = [trace["metadata"] for trace in samples(store, 3)]
    assert told[1] == {"kind": "eval", "ground_truth": "3", "score": 1.0, "format": 1.0} | {"status": "score 1"}


def test_an_evaluation_has_what_the_training_began_with_as_its_step_0(run_dir, store):
    (file,) = (run_dir.parents[2] / "eval/countdown").glob("*/summary.json")
    change = {"difference": {"value": 0.5, "low": 0.4, "high": 0.6}, "p_value": 0.01, "test": "exact McNemar"}
    paired = {"to": "start", "metrics": dict.fromkeys(["accuracy", "pass@1", "lenient", "format_loss"], change)}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"paired": paired}))
    monitor.Follower(store).update()
    assert curve(store, "mine", "eval/accuracy") == [(0, 0.25), (3, 0.75)]
    (alert,) = store.get_alerts("countdown")
    assert (alert["title"], alert["step"]) == ("evaluation", 3)
    assert "pass@1 +0.500 [0.400, 0.600]" in alert["text"] and "a gain of skill and a loss of form" in alert["text"]


def test_validations_have_the_parts_of_the_reward_and_episodes_their_turns(run_dir, store):
    row = rollout(2, 0.3, reward=0.3, acc=False, format=0.0, note="x")
    write_lines(run_dir / "validation/2.jsonl", [row])
    turns = ["call", HOSTILE, "answer"]
    write_lines(run_dir / "rollouts/3.jsonl", [rollout(3, 2.0, turns=turns), rollout(3, 3.0, turns="x")])
    (file,) = (run_dir.parents[2] / "eval/countdown").glob("*/rollouts.jsonl")
    evaluated = json.loads(file.read_text().splitlines()[0])
    said = [("assistant", "call"), ("tool", "1"), ("tool", HOSTILE), ("assistant", "2")]
    write_lines(file, [evaluated | {"messages": [{"role": role, "content": text} for role, text in said]}])
    monitor.Follower(store).update()
    (validated,) = samples(store, 2)
    told = {name: validated["metadata"].get(name) for name in ("kind", "score", "acc", "format", "note")}
    assert told == {"kind": "validation", "score": 0.3, "acc": 0.0, "format": 0.0, "note": None}
    said = [[(m["role"], m["content"]) for m in trace["messages"]][1:] for trace in samples(store, 3)]
    assert said == [
        [("assistant", "call"), ("user", f"1\n{HOSTILE}"), ("assistant", "2")],
        [("assistant", "call"), ("user", HOSTILE), ("assistant", "answer")],
        [("assistant", "<answer>1+2</answer>")],
    ]


def test_long_texts_and_many_rows_are_cut(run_dir, store):
    write_lines(run_dir / "rollouts/2.jsonl", [rollout(2, 0.0, "x" * 100_000)] * 50)
    (run_dir / "gpu.jsonl").write_text('{"time": 1, "half a li')
    monitor.Follower(store).update()
    texts = [trace["messages"][1]["content"] for trace in samples(store, 2)]
    assert len(texts) == monitor.SAMPLES["rollouts"]
    assert all(len(text) < monitor.LONGEST + 50 and "92000 characters left out" in text for text in texts)


def test_what_no_screen_should_get_is_left_out_of_a_sample(run_dir, store):
    """Half a surrogate pair had kept the whole run from the dashboard."""
    text = f"\x1b[31m\u202e\u061c{HOSTILE}\ud800"
    write_lines(run_dir / "rollouts/2.jsonl", [rollout(2, 0.0, text, input=text, gts={"a": text})])
    monitor.Follower(store).update()
    (trace,) = samples(store, 2)
    assert [message["content"] for message in trace["messages"]] == [f"[31m{HOSTILE}?"] * 2


def test_the_dashboard_goes_on_beside_a_hostile_run(settings, store, capsys):  # noqa: F811
    make_run(settings, "mine", metrics=METRICS)
    changed(settings, {"N_GPUS": [1]}, name="b")
    (changed(settings, name="c") / "gpu.jsonl").write_text('{"time": 1e300, "gpu/0/power": 1}\n')
    (changed(settings, name="d") / "gpu.jsonl").write_text("[" * 100_000 + "\n")
    monitor.Follower(store).update()
    assert store.get_runs("countdown") == ["mine"]
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].rpartition("/")[2] for line in said] == ["c", "d"]


def test_a_resumed_run_is_one_curve_with_what_was_trained_last(run_dir, store):
    write_lines(run_dir / "metrics/000.jsonl", [{"step": 3, "data": METRICS[3] | {"nan": None}}], "a")
    follower = monitor.Follower(store)
    follower.update()
    write_lines(run_dir / "metrics/000.jsonl", [{"step": 4, "data": {"x": 1.0}}], "a")
    follower.update()  # a value that is not a number differs from itself
    assert curve(store, "mine", "x") == [(4, 1.0)] and len(curve(store, "mine", "critic/score/mean")) == 3
    resume(run_dir, first=3, score=0.9)
    follower.update()
    assert curve(store, "mine", "critic/score/mean") == [(1, 0.1), (2, 0.2), (3, 0.9), (4, 0.9)]
    assert len(store.get_traces("countdown", "mine")) == 4
    assert store.get_runs("countdown") == ["mine"]


def test_a_look_reads_what_is_new_alone(run_dir, store, monkeypatch):
    """A dashboard of a run of 20,000 steps had worked 7 seconds every 3."""
    follower, read, loads = monitor.Follower(store), [], json.loads
    follower.update()
    gpu = {"time": 1.7e9, "gpu/0/memory_gib": 60.5}
    write_lines(run_dir / "gpu.jsonl", [gpu])
    write_lines(run_dir / "metrics/000.jsonl", [{"step": 4, "data": {"x": 1.0}}], "a")
    monkeypatch.setattr(json, "loads", lambda text, **how: read.append(text) or loads(text, **how))
    assert follower.update() == 1
    lines = [loads(text) for text in read if '"x"' in text or "gpu/0" in text]
    assert lines == [{"step": 4, "data": {"x": 1.0}}, gpu] and not any("critic/score" in text for text in read)
    write_lines(run_dir / "validation/4.jsonl", [rollout(4, 0.3)])  # verl's thread had not written it
    assert follower.update() == 1 and len(samples(store, 4)) == 1 and follower.update() == 0


def test_runs_of_several_tasks_are_projects_and_an_unreadable_one_hides_no_other(
    run_dir,
    settings,  # noqa: F811
    store,
    capsys,
):
    make_run(replace(settings, TASK="gsm8k"), "far", metrics={1: METRICS[1]})
    broken = make_run(settings, "broken", metrics=METRICS)
    noted = json.loads((run_dir / "settings.json").read_text())  # of another version, whose rules had no such variable
    del noted["settings"]["ABORT_ON"]
    noted["arguments"] = ["+a.api_key=sk-12345"]
    (run_dir / "settings.json").write_text(json.dumps(noted))
    file = broken / "metrics/000.jsonl"
    whole = file.read_text()
    file.write_text(whole + "\0" * 10 + "\n")  # as a file system may leave it after a power cut
    follower = monitor.Follower(store)
    assert follower.update() == 2 and follower.update() == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"warning: {file}: line 4 is ")
    file.write_text(whole)
    assert follower.update() == 1
    assert sorted(store.get_projects()) == ["countdown", "gsm8k"]
    assert store.get_run_config("countdown", "mine")["ARGS"] == "+a.api_key=***"
    assert sorted(store.get_runs("countdown")) == ["broken", "mine"]


# ---- the command


def unused_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.medium
@pytest.mark.parametrize("name", ["trackio", pytest.param("tensorboard", marks=pytest.mark.slow)])
def test_make_monitor_serves_until_it_is_interrupted_and_leaves_nothing(run_dir, name, tmp_path, monkeypatch):
    port = unused_port()
    if name == "tensorboard":  # a Python that does not find trackio, and a run of verl's logger
        hidden = "import importlib.util as u\nfind = u.find_spec\n"
        hidden += "u.find_spec = lambda name, *a: None if name == 'trackio' else find(name, *a)\n"
        (tmp_path / "sitecustomize.py").write_text(hidden)
        from verl.utils.tracking import Tracking

        for variable, value in tracking.writes_to(load(LOGGER=name), run_dir).items():
            monkeypatch.setenv(variable, value)
        logger = Tracking("countdown", "mine", [name])
        logger.log({"critic/score/mean": 0.5}, 1)
        logger.finish()
    monkeypatch.setenv("PORT", port)
    environment = outside_make() | {"PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([*MAKE, "monitor"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        ended = threading.Timer(120, process.kill)
        ended.start()
        try:
            first = process.stdout.readline()
            assert first.startswith(f"{name}: http://127.0.0.1:{port} ") and "1 run)" in first
            if name == "tensorboard":
                runs = ""
                while "countdown/mine/tensorboard" not in runs:  # it starts, and reads the files in a thread
                    with contextlib.suppress(URLError):
                        runs = urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=30).read().decode()
            assert name in urlopen(f"http://127.0.0.1:{port}/", timeout=30).read().decode().lower()
            with pytest.raises(SettingsError, match=f"^PORT={port}: another program listens there; "):
                monitor.free_port()
        finally:
            ended.cancel()
            process.terminate()
            process.wait(timeout=30)
    assert not list((run_dir.parents[2] / "monitor").glob("*"))


def test_a_bad_port_is_one_line(monkeypatch):
    for port in ("http", "0", "70000", "-1", "7860;id"):
        monkeypatch.setenv("PORT", port)
        with pytest.raises(SettingsError, match=f"^PORT={port}: must be a (whole )?number"):
            monitor.free_port()


# ---- GPUs and trackers


def test_the_state_of_the_visible_gpus_is_what_nvidia_smi_says(tmp_path, monkeypatch):
    fake, file = tmp_path / "nvidia-smi", tmp_path / "gpu.jsonl"
    fake.write_text('#!/bin/sh\necho "$@" >>$(dirname $0)/asked\necho 0, 61952, 97, 612.40\necho 1, 1024, 0, [N/A]\n')
    monkeypatch.setenv("PATH", str(tmp_path))
    (none := train.GPUSampler(file)).sample()  # a machine without GPUs
    assert none.missing and not file.exists()
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sampler, before = train.GPUSampler(file), time.time()
    sampler.sample()
    sampler.sample()  # too early
    (row,) = map(json.loads, file.read_text().splitlines())
    assert before <= row.pop("time") <= time.time()
    first = {"gpu/0/memory_gib": 60.5, "gpu/0/load_percent": 97.0, "gpu/0/power_w": 612.4}
    assert row == first | {"gpu/1/memory_gib": 1.0, "gpu/1/load_percent": 0.0}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    train.GPUSampler(file).sample()
    asked = " ".join(train.GPU_QUERY[1:])
    assert (tmp_path / "asked").read_text().splitlines() == [asked, f"{asked} --id=2,3"]


def test_trackers_write_to_the_run_and_go_on_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    s = load(WANDB="1", LOGGER="tensorboard,wandb")
    assert tracking.loggers(s) == ["tensorboard", "wandb"] and tracking.loggers(load()) == []
    run = s.runs_dir / "mine"
    found = tracking.writes_to(s, run)
    assert found == tracking.writes_to(s, run)
    assert found["WANDB_RESUME"] == "allow" and found["WANDB_RUN_ID"].startswith("mine-")
    assert found["WANDB_RUN_ID"] != tracking.writes_to(s, s.runs_dir.parent / "elsewhere/mine")["WANDB_RUN_ID"]
    assert found["WANDB_DIR"] == str(run) and found["TENSORBOARD_DIR"] == str(run / "tensorboard")
    assert tracking.writes_to(load(), run) == {}
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    assert tracking.project(s) == "ours" and tracking.writes_to(s, run)["WANDB_PROJECT"] == "ours"


def test_wandb_without_a_key_is_named_before_the_training(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(SettingsError, match=r"WANDB=1: no key; run `wandb login`.*WANDB_MODE=offline"):
        tracking.check_loggers(load(WANDB="1"))
    tracking.check_loggers(load())
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracking.check_loggers(load(WANDB="1"))
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123456789\n")
    (tmp_path / "netrc").chmod(0o600)
    tracking.check_loggers(load(LOGGER="wandb"))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    with pytest.raises(SettingsError, match="no key"):
        tracking.check_loggers(load(WANDB="1"))


def test_loggers_that_are_not_there_are_named():
    with pytest.raises(SettingsError, match="LOGGER=nothing: verl has no logger nothing; it has wandb, tensorboard"):
        tracking.check_loggers(load(LOGGER="nothing"))
    with pytest.raises(SettingsError, match="LOGGER=swanlab: swanlab is not installed; `pip install swanlab`"):
        tracking.check_loggers(load(LOGGER="swanlab"))


def test_abort_on_knows_the_rules():
    assert load(ABORT_ON="nan,collapse").ABORT_ON == "nan,collapse"
    assert "ABORT_ON=nan,entropy: entropy: must be some of nan, collapse, kl" in error_of(ABORT_ON="nan,entropy")
