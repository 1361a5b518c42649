"""A run's folder that comes from elsewhere is data: its record is checked before anything is done with it."""

import json
import os
from dataclasses import replace

import pytest

from tests.helpers import make
from tests.test_monitor import store  # noqa: F401  (a fixture)
from tests.test_records import make_run, settings  # noqa: F401  (a fixture)
from verl_tasks.reports import overview, run_report
from verl_tasks.reports.monitor import Follower
from verl_tasks.runs import repeat
from verl_tasks.runs.folder import all_runs, lineage, named, settings_of
from verl_tasks.runs.run import Run, read_metrics
from verl_tasks.settings import SettingsError

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
def test_a_record_with_other_names_or_values_is_refused_in_one_line(settings, values, said):  # noqa: F811
    run_dir = changed(settings, values)
    with pytest.raises(SettingsError, match=rf"^RUN=shared: [^\n]*{said}[^\n]*$"):
        repeat.check(named(run_dir.name))


def test_an_evaluation_of_a_run_checks_its_values_too(settings):  # noqa: F811
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
def test_another_json_value_is_no_record_and_the_other_runs_are_listed(settings, record):  # noqa: F811
    mine, run_dir = make_run(settings, "mine"), make_run(settings, "shared")
    whole = json.loads((run_dir / "settings.json").read_text())
    whole = whole | record if isinstance(record, dict) and record else record
    (run_dir / "settings.json").write_text(json.dumps(whole))
    assert all_runs() == [mine]
    with pytest.raises(SettingsError, match=r"^RUN=shared: .*settings\.json is no record of a run: [^\n]+$"):
        named("shared")


def test_json_that_is_nested_too_deeply_is_no_record(settings):  # noqa: F811
    (make_run(settings, "shared") / "settings.json").write_text("[" * 100_000)
    assert all_runs() == []


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
def test_a_launch_is_data_too(settings, part):  # noqa: F811
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
def test_arguments_that_can_run_code_are_not_repeated(settings, argument):  # noqa: F811
    with pytest.raises(SettingsError, match=r"RUN=shared: has ARGS that can run code: .*make train ARGS="):
        repeat.check(changed(settings, arguments=[argument]))


def test_arguments_that_set_a_value_are_repeated(settings):  # noqa: F811
    plain = ["trainer.total_epochs=1", "+a.b='x y'", "++actor_rollout_ref.model.target_modules=[q_proj,v_proj]"]
    plain += ["algorithm.kl_ctrl.target_kl=0.1", "data.note='a path/to'"]
    assert repeat.check(changed(settings, arguments=plain))[0]["arguments"] == plain


def test_a_run_that_begins_with_itself_is_refused(settings):  # noqa: F811
    first, second = (settings.runs_dir / name for name in ("one", "two"))
    for run_dir, other in ((first, second), (second, first)):
        changed(settings, name=run_dir.name, start=str(other / "checkpoints/global_step_1"))
    with pytest.raises(SettingsError, match="began with a round after it"):
        lineage(Run.read(first))


def test_names_and_texts_reach_a_screen_without_control_characters(settings, capsys):  # noqa: F811
    changed(settings, {"MODEL": "\x1b]0;x\x07evil\nmodel"})
    make_run(settings, "x;touch X")
    make_run(settings, "$(touch X)")
    assert [run.name for run in all_runs()] == ["shared"]
    assert "\x1b" not in overview.table() and len(overview.table().splitlines()) == 2


def test_the_report_shows_hostile_texts_as_text(settings):  # noqa: F811
    run_dir = changed(settings, {"MODEL": "<script>alert(1)</script>", "<img src=x>": "<b>"}, arguments=["<i>=1"])
    text = run_report.write(run_dir).read_text()
    assert "&lt;script&gt;alert(1)" in text and "&lt;img src=x&gt;" in text
    assert not any(tag in text for tag in ("<script", "<img src=x", "<b>", "<i>"))


@pytest.mark.parametrize(
    "line", ['{"step": "one", "data": {}}', '{"step": 1, "data": {"x": 1%s}}' % ("0" * 400), "[" * 100_000]
)
def test_metrics_from_elsewhere_are_one_line_of_error(settings, line):  # noqa: F811
    run_dir = changed(settings)
    (run_dir / "metrics/000.jsonl").write_text(line + "\n")
    with pytest.raises(SettingsError, match=r"000\.jsonl: line 1 [^\n]*remove that line$"):
        read_metrics(run_dir)


def test_a_summary_of_another_form_is_one_line_of_error(settings):  # noqa: F811
    run_dir = changed(settings)
    folder = run_dir.parents[2] / "eval/countdown/x"
    folder.mkdir(parents=True)
    model = f"/x/runs/countdown/{run_dir.name}/checkpoints/global_step_1/actor"
    (folder / "summary.json").write_text(json.dumps({"model": model, "metrics": []}))
    with pytest.raises(SettingsError, match=r"^RUN=shared: cannot be read \("):
        run_report.write(run_dir)


def test_the_dashboard_goes_on_beside_a_hostile_run(settings, store, capsys):  # noqa: F811
    make_run(settings, "mine", metrics=METRICS)
    changed(settings, {"N_GPUS": [1]}, name="b")
    (changed(settings, name="c") / "gpu.jsonl").write_text('{"time": 1e300, "gpu/0/power": 1}\n')
    (changed(settings, name="d") / "gpu.jsonl").write_text("[" * 100_000 + "\n")
    Follower(store).update()
    assert store.get_runs("countdown") == ["mine"]
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].rpartition("/")[2] for line in said] == ["c", "d"]


@pytest.mark.medium
def test_make_says_it_in_one_line_and_runs_nothing(settings, tmp_path):  # noqa: F811
    mark = tmp_path / "ran"
    changed(settings, {"N_GPUS": f"a[$(touch {mark})]"}, name="one")
    changed(settings, {"STACK": f"$(touch {mark})"}, name="two")
    for name in ("one", "two"):
        result = make("repeat", TASK="countdown", RUN=name, STACK="cpu", ARTIFACTS=os.environ["ARTIFACTS"])
        (said,) = [line for line in result.stdout.splitlines() if line.startswith("error:")]
        assert result.returncode != 0 and f"RUN={name}" in said and "Traceback" not in result.stdout
        assert not mark.exists()
