"""`make experiment`: which trainings it plans, and what it makes of models whose every answer is known."""

import json
import os
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from tests.test_evaluate import PROMPTS, answer, table, workplace  # noqa: F401  (a fixture)
from tests.test_runs import write_checkpoints
from verl_tasks.digest import fingerprint
from verl_tasks.launch import experiments, main, memory_checks
from verl_tasks.launch.task import exported
from verl_tasks.machine import hardware, memory
from verl_tasks.rows import chat, rl_row, rl_schema, write_parquet
from verl_tasks.runs.folder import rl_run
from verl_tasks.settings import Command, Settings, SettingsError, load_settings

N = 4


def counts(workplace, name: str, right: list[int]) -> str:  # noqa: F811
    """A model with that many right samples of each prompt."""
    return f"{name}={workplace.model(name, table(right, N, [False] * PROMPTS))}"


@pytest.fixture
def models(workplace) -> list[str]:  # noqa: F811
    """A start and two methods with two rates and two seeds each; label=folder."""
    right = {
        "start": [0, 1, 2, 0, 1, 0],
        "rloo@1e-06#1": [1, 1, 2, 0, 1, 1],
        "rloo@1e-06#2": [1, 2, 2, 0, 1, 0],
        "rloo@3e-06#1": [4, 3, 4, 1, 3, 2],
        "rloo@3e-06#2": [2, 3, 3, 1, 2, 1],
        "dapo@1e-06#1": [3, 2, 4, 0, 2, 1],
        "dapo@1e-06#2": [2, 2, 4, 1, 3, 0],
        "dapo@3e-06#1": [0, 0, 1, 0, 0, 0],
        "dapo@3e-06#2": [0, 1, 0, 0, 0, 0],
    }
    return [counts(workplace, name, values) for name, values in right.items()]


def found_by(workplace, models: list[str]) -> tuple[dict, str]:  # noqa: F811
    result = workplace.run("experiment", *models, N=str(N), GREEDY="0")
    assert result.returncode == 0, result.stdout
    return json.loads(workplace.only("experiments/countdown/*/experiment.json").read_text()), result.stdout


@pytest.mark.medium
def test_seeds_are_pooled_and_paired_by_prompt(workplace, models):  # noqa: F811
    found, said = found_by(workplace, models)
    assert found["rates"]["chosen"] == {"rloo": 3e-6, "dapo": 1e-6}
    assert found["rates"]["by"].startswith("the score on these very test prompts: an oracle")
    assert "an oracle" in said and "2 seeds" in said
    assert list(found["differences"]) == [
        "rloo LR 3e-06 - start",
        "dapo LR 1e-06 - start",
        "dapo LR 1e-06 - rloo LR 3e-06",
    ]
    start = np.array([0, 1, 2, 0, 1, 0]) / N
    rloo = np.array([[4, 3, 4, 1, 3, 2], [2, 3, 3, 1, 2, 1]]) / N
    dapo = np.array([[3, 2, 4, 0, 2, 1], [2, 2, 4, 1, 3, 0]]) / N
    for pair, values in {"rloo LR 3e-06 - start": rloo - start, "dapo LR 1e-06 - rloo LR 3e-06": dapo - rloo}.items():
        difference = found["differences"][pair]["pass@1"]
        assert difference["test"] == "t, 2 seeds x 6 prompts"
        # Written out: each factor's own standard error, and Welch's degrees of freedom of their sum.
        seeds, prompts = stats.sem(values.mean(1)) ** 2, stats.sem(values.mean(0)) ** 2
        degrees = (seeds + prompts) ** 2 / (seeds**2 / 1 + prompts**2 / 5)
        low, high = stats.t.interval(0.95, degrees, values.mean(), (seeds + prompts) ** 0.5)
        assert [difference[end] for end in ("value", "low", "high")] == pytest.approx([values.mean(), low, high])
    arm = found["arms"]["dapo LR 3e-06"]  # the weak ones are in it too
    assert arm["labels"] == ["dapo@3e-06#1", "dapo@3e-06#2"] and arm["metrics"]["pass@1"]["value"] == pytest.approx(
        1 / 24
    )
    assert set(found["summaries"]) == {name.partition("=")[0] for name in models}


@pytest.mark.medium
def test_dev_prompts_choose_the_rate_where_there_are_any(workplace, models):  # noqa: F811
    """A right answer on the test prompts is a wrong number there, so the other rate of each method wins."""
    rows = [rl_row("countdown", chat(f"dev {i}"), "words", "dev", i) for i in range(PROMPTS)]
    write_parquet(rows, workplace.artifacts / "data/countdown/dev.parquet", rl_schema())
    found, said = found_by(workplace, models)
    assert found["rates"] == {"chosen": {"rloo": 1e-6, "dapo": 3e-6}, "by": "the score on dev.parquet"}
    assert "chosen by the score on dev.parquet" in said


@pytest.mark.medium
def test_one_seed_and_rate_are_compared_as_two_models_are(workplace):  # noqa: F811
    right = {"start": [0, 1, 2, 0, 1, 0], "rloo@1e-06#1": [4, 3, 4, 1, 3, 2], "dapo@1e-06#1": [3, 2, 4, 0, 2, 1]}
    found, said = found_by(workplace, [counts(workplace, name, values) for name, values in right.items()])
    assert list(found["differences"]) == ["rloo - start", "dapo - start", "dapo - rloo"]
    difference = found["differences"]["dapo - rloo"]
    assert difference["pass@1"]["test"] == "paired bootstrap" and "different" in difference  # the task's own metric
    assert found["rates"]["by"] == "" and "chosen by" not in said


@pytest.mark.medium
def test_the_warm_up_is_the_start_and_no_training_of_the_experiment(workplace):  # noqa: F811
    """Its metrics have no reward and no time."""
    runs = workplace.artifacts / "runs/countdown"
    step = {"sft": {"train/loss": 0.5}, "rl": {"critic/score/mean": 0.25, "actor/entropy": 0.5, "timing_s/step": 6.0}}
    models = []
    for label, kind in (("start", "sft"), ("rloo@1e-06#1", "rl"), ("dapo@1e-06#1", "rl")):
        run_dir = runs / label.partition("@")[0]
        (run_dir / "metrics").mkdir(parents=True)
        (run_dir / "metrics/000.jsonl").write_text(json.dumps({"step": 1, "data": step[kind]}) + "\n")
        made = {"MODEL": "m", "METHOD": "grpo", "INIT": "base", "STACK": "cpu", "STEPS": 1, "SFT_STEPS": 1, "N_GPUS": 1}
        made |= {"MINI_BATCH_SIZE": 16, "CLIP_HIGH": 0.28 if "dapo" in label else 0.2}
        texts = {"kind": kind, "fingerprint": "0", "start": "", "base": "", "arguments": []}
        (run_dir / "settings.json").write_text(json.dumps({**texts, "settings": made}))
        model = workplace.model(label, table([1, 2, 0, 1, 1, 0], N, [False] * PROMPTS))
        models.append(f"{label}={model.rename(run_dir / 'model')}")
    found, said = found_by(workplace, models)
    figures = {"steps": 1, "seconds": 6.0, "seconds_per_step": 6.0, "entropy_last": 0.5}
    figures |= {"reward_first": 0.25, "reward_last": 0.25}
    assert found["training"] == dict.fromkeys(("rloo@1e-06#1", "dapo@1e-06#1"), figures)
    assert "reward, first quarter" in said
    assert found["settings"]["MINI_BATCH_SIZE"] == 16 and "CLIP_HIGH" not in found["settings"]
    assert found["settings_of_arms"] == {"rloo": {"CLIP_HIGH": 0.2}, "dapo": {"CLIP_HIGH": 0.28}}


# ---- which trainings


def planned(monkeypatch, **changes: str) -> dict:
    for name in Settings.__dataclass_fields__:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TASK": "countdown", "STACK": "cpu", **changes}.items():
        monkeypatch.setenv(name, value)
    return experiments.planned(load_settings(), load_settings(cls=Command))


def test_each_method_rate_and_seed_is_trained_on_the_same_data(monkeypatch):
    runs = planned(monkeypatch, METHODS="grpo,dapo", LRS="1e-6,3e-6", SEEDS="2", TRAIN_SEED="5")
    assert list(runs) == [f"{m}@{lr}#{seed}" for seed in (5, 6) for m in ("grpo", "dapo") for lr in ("1e-06", "3e-06")]
    assert {(run.METHOD, run.LR, run.TRAIN_SEED) for run in runs.values()} == {
        (m, lr, seed) for m in ("grpo", "dapo") for lr in (1e-6, 3e-6) for seed in (5, 6)
    }
    assert len({run.data_fingerprint() for run in runs.values()}) == 1
    assert len({run.sft_fingerprint() for run in runs.values()}) == 1
    assert len({fingerprint(run.rl_parts([])) for run in runs.values()}) == 8
    assert len({run.MINI_BATCH_SIZE for run in runs.values()}) == 1
    assert {run.TRUNCATED for run in runs.values()} == {"counted", "shaped"}  # each method's default


def test_without_rates_each_method_has_its_own(monkeypatch):
    runs = planned(monkeypatch, METHODS="grpo,gspo", LR="2e-6", RUN="mine")
    assert {run.LR for run in runs.values()} == {2e-6}
    assert [run.RUN for run in runs.values()] == ["mine-grpo-2e-06-42", "mine-gspo-2e-06-42"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"METHODS": "grpo"}, "METHODS=grpo: name two or more, separated by commas, or several LRS"),
        ({"METHODS": "grpo,magic"}, "METHOD=magic: must be one of"),
        ({"METHODS": "grpo,gspo", "LRS": "1e-6,fast"}, "LR=fast: must be a number"),
        ({"METHODS": "grpo", "LRS": "1e-6,0.000001"}, "METHODS=grpo: name two or more"),
        ({"METHODS": "grpo,gspo", "LRS": "1e-6,0.000001"}, "LRS=1e-6,0.000001: two of them are the same rate"),
    ],
)
def test_an_impossible_plan_is_refused(changes, said, monkeypatch):
    with pytest.raises(SettingsError, match=said):
        planned(monkeypatch, **changes)


def test_dpo_has_no_mini_batches_for_the_others_to_share(monkeypatch):
    runs = planned(monkeypatch, STACK="current", N_GPUS="1", METHODS="grpo,dpo,rloo").values()
    sizes = {run.METHOD: (run.MINI_BATCH_SIZE, run.TRAIN_BATCH_SIZE) for run in runs}
    assert sizes == {"grpo": (128, 128), "dpo": (32, 32), "rloo": (128, 128)}


def test_a_run_with_more_steps_already_is_not_compared(monkeypatch, tmp_path):
    runs = planned(monkeypatch, METHODS="grpo,gspo", STEPS="4", ARTIFACTS=str(tmp_path))
    longer = list(runs.values())[1]
    write_checkpoints(rl_run(longer, []).folder, (4, 8))
    monkeypatch.setattr(main, "check_training", lambda *_: None)
    job = main.Job("experiment", load_settings(), load_settings(cls=Command), [])
    with pytest.raises(
        SettingsError, match=r"^STEPS=4: gspo-\w+ has 8 steps already, .*; take STEPS=8, or another RUN$"
    ):
        main.experiment(job, runs)


def test_a_group_of_gpus_has_one_for_the_teacher(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    changes = {"STACK": "current", "N_GPUS": "2", "METHOD": "distill", "TEACHER": "some/model"}
    runs = planned(monkeypatch, **changes, METHODS="grpo,distill")
    assert [run.TEACHER for run in runs.values()] == ["", "some/model"]
    assert experiments.gpu_groups([*runs.values()], 8) == [["0", "1", "2"], ["3", "4", "5"]]


@pytest.mark.parametrize(("methods", "refused"), [("grpo,distill", False), ("grpo,gspo", True)])
def test_a_teacher_needs_one_of_an_experiments_methods(methods, refused, monkeypatch):
    """Without METHOD, the task's own one has no teacher."""
    given = {"TASK": "countdown", "STACK": "current", "N_GPUS": "1", "TEACHER": "some/model", "METHODS": methods}
    for name, value in (given | {"STAGE": "experiment"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("METHOD", raising=False)
    monkeypatch.setattr(main.os, "environ", dict(os.environ))  # main adds what the stack's programs read
    monkeypatch.setattr(main, "about", lambda job: job)
    monkeypatch.setattr(main.verl_versions, "check_installed", lambda s: None)
    monkeypatch.setattr(main.doctor, "before_training", lambda *_: None)
    monkeypatch.setattr(main, "_locked", lambda s: nullcontext())
    found = {}
    monkeypatch.setattr(main, "experiment", lambda job, runs: found.update(runs))
    if refused:
        with pytest.raises(SettingsError, match="TEACHER=some/model: is for METHOD=distill; METHOD=grpo has none"):
            main.main("experiment", [])
    else:
        main.main("experiment", [])
        assert {run.METHOD: run.TEACHER for run in found.values()} == {"grpo": "", "distill": "some/model"}


def test_the_comparison_takes_the_gpus_of_all_trainings_whatever_the_batch_is(monkeypatch):
    """Three engines, where a training with three GPUs would be refused; and the cores are said before it starts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    monkeypatch.setenv("STAGE", "experiment")
    monkeypatch.setattr(experiments.os, "sched_getaffinity", lambda pid: range(12))
    runs = planned(monkeypatch, STACK="current", N_GPUS="1", METHODS="grpo,gspo", SEEDS="3", JOBS="3")
    job = main.Job("experiment", load_settings(), load_settings(cls=Command), [])
    said, evaluated = [], []
    monkeypatch.setattr("builtins.print", lambda text, **_: said.append(text))
    monkeypatch.setattr(main, "check_training", lambda *_: None)
    monkeypatch.setattr(main, "start_model", lambda s: "start")
    monkeypatch.setattr(main, "export", lambda run: run.folder)
    monkeypatch.setattr(main, "script", lambda s, *_: evaluated.append(load_settings(exported(s)).N_GPUS))
    monkeypatch.setattr(main, "run_stages", lambda stages: stages["compare"]())
    main.experiment(job, runs)
    assert evaluated == [3]
    assert said == [
        "warning: JOBS=3 on 12 cores: fewer than 5 for each training, which wait for one another; "
        "JOBS=2 does more steps in all"
    ]
    assert not experiments.few_cores(runs, 2) and not experiments.few_cores(runs, 1)
    on_cpu = {label: replace(each, STACK="cpu") for label, each in runs.items()}
    assert experiments.few_cores(runs, 6) and not experiments.few_cores(on_cpu, 6)


def test_the_checks_before_an_experiment_are_of_all_its_trainings(monkeypatch, tmp_path):
    planned(monkeypatch, METHODS="grpo,ppo", SEEDS="2", JOBS="3", ARTIFACTS=str(tmp_path))
    checked = []
    monkeypatch.setattr(main.doctor, "before_training", lambda s, arguments, stage, *of: checked.append(of))
    monkeypatch.setattr(main, "stack_environment", lambda *_: {})
    monkeypatch.setattr(main, "experiment", lambda job, runs: None)
    main.main("experiment", [])
    ((runs, jobs),) = checked
    assert ([run.METHOD for run in runs], jobs) == (["grpo", "ppo", "grpo", "ppo"], 3)


@pytest.mark.parametrize(("n_gpus", "there"), [(1, 2), (2, 5), (2, 3), (1, 1)])
def test_the_estimate_of_memory_counts_the_trainings_that_share_a_gpu(n_gpus, there, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(there))))
    given = {"STACK": "current", "N_GPUS": str(n_gpus), "MODEL": "embedded", "ARTIFACTS": str(tmp_path)}
    runs = planned(monkeypatch, **given, METHODS="grpo,gspo", SEEDS="2")
    monkeypatch.setattr(experiments, "POLL_SECONDS", 0)
    started = []

    def start(s, arguments, log, gpus, sharing):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("done\n")
        started.append((sharing, s.GPU_MEMORY_UTILIZATION / sharing))
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(experiments, "_started", start)
    plan, gpu = memory_checks.plan(run := next(iter(runs.values())), []), hardware.GPU("", 80, 80)
    for jobs in range(1, len(runs) + 1):
        started.clear()
        experiments.train_at_once(runs, [], jobs)
        sharing = experiments.sharing(jobs, len(experiments.gpu_groups([*runs.values()], jobs)))
        shapes = memory.shapes_of("embedded")
        assert set(started) == {(sharing, memory_checks.beside(run, shapes, plan, gpu, sharing)[0].share)}
    alone = replace(plan, share=0.123)  # ARGS reach each training as they are
    assert memory_checks.beside(run, shapes, alone, gpu, 2)[0] == alone


@pytest.mark.medium
def test_several_trainings_at_a_time_share_the_gpus_memory_and_say_which_failed(monkeypatch, tmp_path, capsys):
    """Each is a launcher of its own; here one that notes its settings, and fails for one seed."""
    runs = planned(monkeypatch, METHODS="grpo,gspo", SEEDS="2", ARTIFACTS=str(tmp_path), GPU_MEMORY_UTILIZATION="0.6")
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nset -e\ntouch "$ARTIFACTS/$METHOD-$TRAIN_SEED"\nsleep 0.5\n'
        'echo "$# $3 $GPU_MEMORY_UTILIZATION $(ls $ARTIFACTS | grep -c pso) there"\n'
        '[ "$TRAIN_SEED-$METHOD" != 43-gspo ] || { printf "error: no threads\\n  log: x.log\\n"; exit 1; }\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(experiments, "POLL_SECONDS", 0.05)
    with pytest.raises(experiments.StageFailed, match=r"^1 of 4 trainings failed: gspo@\S+#43; the same command"):
        experiments.train_at_once(runs, ["a=1"], 2)
    logs = [log.read_text() for log in sorted(tmp_path.glob("runs/countdown/*/job.log"))]
    assert len(logs) == 4 and all(text.startswith("3 a=1 ") and " 0.3 " in text for text in logs)
    assert re.findall(r"#43: (error.*) \(\d+ s\)", capsys.readouterr().out) == ["error: no threads"]
    assert (tmp_path / "gspo-43").exists()


@pytest.mark.medium
def test_the_trainings_are_spread_over_the_gpus_that_are_there(monkeypatch, tmp_path):
    """Three at a time with two GPUs each on five: two groups, of which one has two trainings and so half its memory."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3,4,6,7")
    changes = {"STACK": "current", "N_GPUS": "2", "ARTIFACTS": str(tmp_path), "GPU_MEMORY_UTILIZATION": "0.6"}
    runs = planned(monkeypatch, METHODS="grpo,gspo", SEEDS="3", **changes)
    larger = {label: replace(each, N_GPUS=4) for label, each in runs.items()}
    assert experiments.gpu_groups([*runs.values()], 8) == [["1", "3"], ["4", "6"]]
    assert experiments.gpu_groups([*runs.values()], 1) == experiments.gpu_groups([*larger.values()], 8) == [[]]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nsleep 0.3\necho "$CUDA_VISIBLE_DEVICES $GPU_MEMORY_UTILIZATION $SHARED_GPU"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(experiments, "POLL_SECONDS", 0.05)
    experiments.train_at_once(runs, [], 3)
    said = sorted(log.read_text() for log in tmp_path.glob("runs/countdown/*/job.log"))
    assert set(said) == {"1,3 0.3 2\n", "4,6 0.3 2\n"} and len(said) == 6
    assert experiments.train_at_once(runs, [], 2) == "6 trainings, 2 at a time"
    said = {log.read_text() for log in tmp_path.glob("runs/countdown/*/job.log")}
    assert said == {"1,3 0.6 \n", "4,6 0.6 \n"}
