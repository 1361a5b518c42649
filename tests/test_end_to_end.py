"""The real stack on a very small random model: real verl, real vLLM, real Ray, on the CPU.

At the end all stages of each task, as a user types them, without a network. A random model learns nothing in two steps,
so only the shape of results is told.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from tests import browser
from tests.helpers import (
    MAKE,
    ROOT,
    SMALL,
    checkout_with,
    error_line,
    kill_after_a_checkpoint,
    make,
    our_processes,
    outside_make,
    steps_logged,
    until,
)
from verl_tasks.rows import read_rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def variables(small_model, tmp_path_factory) -> dict[str, str]:
    # At this rate the weights' decay, all that changes a model without reward, is seen in bfloat16 after each step.
    tracked = {"WANDB": "1", "WANDB_MODE": "offline", "LR": "1e-3"}
    own = {"MODEL": str(small_model), "ARTIFACTS": str(tmp_path_factory.mktemp("run") / "artifacts")}
    return SMALL | tracked | own


def run_dir(variables) -> Path:
    return next((Path(variables["ARTIFACTS"]) / "runs/countdown").glob("grpo-*"))


def abandoned_shared_memory() -> set[str]:
    """Files of verl's and Python's shared memory that no process has open or mapped."""
    files = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(("psm_", "verl_"))}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            held = [m.path for m in process.memory_maps()] + [f.path for f in process.open_files()]
            files.difference_update(held)
    return files


@pytest.mark.fresh
def test_a_killed_run_and_one_that_was_ended_go_on_and_end_with_the_table(variables):
    """SFT and two GRPO steps: the launcher is killed after the first; ABORT_ON ends the next launch after the second,
    for a random model has no reward, so no group has variance; what remains is evaluation and the table."""
    saved = kill_after_a_checkpoint("train", "runs/countdown/grpo-*", **variables, STEPS="1000")

    before = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}  # with what the killed launcher left
    ended = make("train", **variables | {"STEPS": "1000", "SAVE_FREQ": "100", "ABORT_ON": "nan,zero_variance"})
    assert f"resuming from step {saved}" in ended.stdout
    error, last = error_line(ended), saved + 1
    assert f"ABORT_ON=zero_variance: step {last}: all advantages are 0" in error
    assert f"continues from the checkpoint of step {last}" in error  # none was due before step 100
    log = (run_dir(variables) / "logs/grpo-001.log").read_text()
    arrived = re.search(rf"vLLM has the trainer's weights after step {last}: \d+ tensors compared, (\d+) had", log)
    assert arrived and int(arrived[1]) > 0

    variables["STEPS"] = str(last)
    second = make("train", **variables)
    assert second.returncode == 0, second.stdout
    assert sorted(set(steps_logged(run_dir(variables)))) == list(range(1, last + 1))
    assert "pass@1" in second.stdout and "[5/5] eval" in second.stdout and "Next:" in second.stdout
    summaries = list(Path(variables["ARTIFACTS"]).glob("eval/countdown/*/summary.json"))
    assert len(summaries) == 3  # base, sft, grpo
    for file in summaries:
        summary = json.loads(file.read_text())
        assert summary["prompts"] == 8 and 0 <= summary["metrics"]["score"]["value"] <= 1
        rollouts = [json.loads(line) for line in (file.parent / "rollouts.jsonl").read_text().splitlines()]
        assert len(rollouts) == 8 * (1 + int(SMALL["N"]))
        assert all(0 < r["entropy"] < 5.6 and 0 < r["tokens"] <= 48 for r in rollouts)  # ln 258 = 5.55
    until(lambda: abandoned_shared_memory() <= before)  # other tests kill launchers, whose keepers take a moment
    records = [folder.name.rpartition("grpo-")[2] for folder in run_dir(variables).glob("wandb/offline-run-*")]
    assert len(records) == 2 and len(set(records)) == 1  # of both launches, under one id


def test_the_checkpoint_loads_in_transformers_and_differs_from_its_start(variables):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run_dir(variables) / f"checkpoints/global_step_{variables['STEPS']}/actor/huggingface"
    trained, start = (AutoModelForCausalLM.from_pretrained(f) for f in (folder, variables["MODEL"]))
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 1
    pairs = zip(trained.parameters(), start.parameters(), strict=True)
    assert any(not torch.equal(a.float(), b.float()) for a, b in pairs)
    assert all(torch.isfinite(p).all() for p in trained.parameters())


def test_a_second_run_reuses_everything(variables):
    def files() -> dict:
        found = [*run_dir(variables).rglob("*"), *Path(variables["ARTIFACTS"]).glob("eval/countdown/*/rollouts.jsonl")]
        return {p: p.stat().st_mtime_ns for p in found if p.is_file()}

    before = files()
    result = make("train", **variables)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("up to date") >= 4
    assert files() == before


def only(variables, pattern: str) -> Path:
    (path,) = Path(variables["ARTIFACTS"]).glob(pattern)
    return path


def test_compare_reuses_the_rollouts_of_the_training_and_writes_every_report(variables):
    result = make("compare", LIMIT="6", **variables)
    assert result.returncode == 0, result.stdout
    assert "sampling" not in result.stdout  # base and step 2 were sampled by the training's evaluation
    found = json.loads(only(variables, "compare/countdown/*/compare.json").read_text())
    assert found["base"]["prompts"] == found["trained"]["prompts"] == 6
    assert (
        found["base"]["model"] == variables["MODEL"]
        and f"global_step_{variables['STEPS']}" in found["trained"]["model"]
    )
    assert {"accuracy", "pass@1", "pass@2", "score", "entropy", "one_operator"} <= found["metrics"].keys()
    for kind in ("md", "png", "xlsx"):
        assert only(variables, f"compare/countdown/*/compare.{kind}").stat().st_size > 1000


@pytest.mark.long
def test_probe_eval_and_compare_run_on_the_embedded_model(tmp_path):
    """The real small model; compared with itself, it does not differ."""
    variables = {"TASK": "countdown", "STACK": "cpu", "ARTIFACTS": str(tmp_path), "LIMIT": "4", "N": "2"}
    result = make("probe", **variables)
    assert result.returncode == 0, result.stdout
    found = json.loads(only(variables, "probe/countdown/SmolLM2-135M-Instruct-*/probe.json").read_text())
    assert found["prompts"] == 4 and 0.3 < found["distributions"]["entropy"]["value"] < 6
    for command in ("eval", "compare"):
        result = make(command, MODEL="embedded", **variables)
        assert result.returncode == 0, result.stdout
    summary = json.loads(only(variables, "eval/countdown/*/summary.json").read_text())
    assert summary["prompts"] == 4 and 1 <= summary["metrics"]["tokens"]["value"] <= 64
    found = json.loads(only(variables, "compare/countdown/*/compare.json").read_text())
    assert all(m["difference"]["value"] == 0 and m["p_value"] == 1 for m in found["metrics"].values())
    assert found["gained"] == found["lost"] == []


@pytest.mark.long
def test_eval_takes_an_earlier_checkpoint(variables):
    earlier = str(int(variables["STEPS"]) - 1)
    result = make("eval", STEP=earlier, LIMIT="2", **variables)
    assert result.returncode == 0, result.stdout
    assert f"checkpoint of step {earlier}" in result.stdout and f"-step{earlier}-" in result.stdout


def test_merge_copies_nothing_where_the_weights_are_there(variables):
    result = make("merge", **variables)
    assert result.returncode == 0, result.stdout
    assert "nothing to do" in result.stdout and f"global_step_{variables['STEPS']}/actor/huggingface" in result.stdout


def test_merge_joins_the_shards_of_a_checkpoint_without_them(variables, tmp_path):
    """What verl leaves when hf_model is not among the contents that it saves."""
    from transformers import AutoModelForCausalLM

    actor = run_dir(variables) / f"checkpoints/global_step_{int(variables['STEPS']) - 1}/actor"
    weights = list((actor / "huggingface").glob("*.safetensors"))
    before = AutoModelForCausalLM.from_pretrained(actor / "huggingface").state_dict()
    for file in weights:
        file.rename(tmp_path / file.name)
    try:
        result = make("merge", STEP=str(int(variables["STEPS"]) - 1), **variables)
        assert result.returncode == 0, result.stdout
        after = AutoModelForCausalLM.from_pretrained(actor / "merged").state_dict()
        assert all((after[name].float() - before[name].float()).abs().max() < 1e-2 for name in before)
    finally:
        for file in weights:
            (tmp_path / file.name).rename(file)


@pytest.mark.fresh
def test_chat_answers_from_a_pipe(variables):
    command = [*MAKE, "chat", *(f"{k}={v}" for k, v in variables.items() if k != "MODEL")]
    result = subprocess.run(
        [*command, f"RUN={run_dir(variables).name}"],
        cwd=ROOT,
        env=outside_make(),
        input="hello\n/sample\n/reset\n/exit\n",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert f"loading {run_dir(variables).name}-step{variables['STEPS']}" in result.stdout
    assert "reward: score 0, acc 0" in result.stdout and "ground truth: {" in result.stdout
    assert "INFO" not in result.stdout


@pytest.mark.long  # its engine is that of the evaluation
def test_batch_answers_a_table(variables, tmp_path):
    import openpyxl

    (tmp_path / "in.csv").write_text(
        'prompt,ground_truth\nhi,\n"Numbers: 1, 2. Target: 3.","{""target"": 3, ""numbers"": [1, 2]}"\n'
    )
    chosen = {"INPUT": str(tmp_path / "in.csv"), "OUTPUT": str(tmp_path / "out.xlsx")}
    chosen |= {"TEMPERATURE": "0", "MAX_NEW_TOKENS": "5"}
    result = make("batch", **{**variables, **chosen, "N": "1"})
    assert result.returncode == 0, result.stdout
    rows = list(openpyxl.load_workbook(tmp_path / "out.xlsx").active.iter_rows(values_only=True))
    assert len(rows) == 3 and {"response", "tokens", "score", "format"} <= set(rows[0])
    named = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert [row["score"] for row in named] == [None, 0] and all(1 <= row["tokens"] <= 5 for row in named)


@pytest.mark.long  # test_serve.py has another server, test_engines.py another endpoint
def test_a_served_model_answers_and_is_evaluated_as_by_our_own_engine(variables):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {name: value for name, value in variables.items() if name != "MODEL"} | {"RUN": run_dir(variables).name}
    heard = ["env", "--default-signal=INT"]  # `make test-all &` ignores it
    command = [*heard, *MAKE, "serve", f"PORT={port}", *(f"{name}={value}" for name, value in given.items())]
    screen = Path(variables["ARTIFACTS"]).with_name("served.txt")
    with screen.open("w") as out:
        server = subprocess.Popen(
            command, cwd=ROOT, env=outside_make(), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until(lambda: "ready: " in screen.read_text() or server.poll() is not None, 120)
        url = f"http://127.0.0.1:{port}/v1"
        assert f"ready: {url}, models: countdown;" in screen.read_text(), screen.read_text()
        client = OpenAI(base_url=url, api_key="none")
        answer = client.chat.completions.create(model="countdown", messages=[{"role": "user", "content": "Hi"}])
        assert 0 < answer.usage.completion_tokens <= int(variables["MAX_RESPONSE_LENGTH"])
        result = make("eval", **given, BASE_URL=url, MODEL_NAME="countdown")
        assert result.returncode == 0 and f"countdown at {url}: 24 requests" in result.stdout, result.stdout
    finally:
        processes = psutil.Process(server.pid).children(recursive=True)
        launchers = [each for each in processes if "verl_tasks.launch.main" in " ".join(each.cmdline())]
        for each in launchers[:1]:
            each.send_signal(signal.SIGINT)
        server.wait(60)
    until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes))
    assert "stopped" in screen.read_text() and "Traceback" not in screen.read_text()
    summaries = [json.loads(file.read_text()) for file in (screen.parent / "artifacts/eval").rglob("summary.json")]
    (theirs,) = [each for each in summaries if each["model"] == "countdown"]
    last = f"global_step_{variables['STEPS']}/"  # an earlier checkpoint was evaluated too
    (ours,) = [each for each in summaries if "paired" in each and last in each["model"]]
    assert "entropy" not in theirs["metrics"] and theirs["metrics"].keys() <= ours["metrics"].keys()
    for name, value in theirs["metrics"].items():
        assert ours["metrics"][name]["low"] <= value["value"] <= ours["metrics"][name]["high"], name


def test_an_exported_model_loads_and_has_a_card(variables, tmp_path):
    from huggingface_hub import ModelCard
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {name: variables[name] for name in ("TASK", "STACK", "ARTIFACTS")} | {"RUN": run_dir(variables).name}
    result = make("export", **given, OUTPUT=str(tmp_path / "out"))
    assert result.returncode == 0, result.stdout
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    card = ModelCard.load(tmp_path / "out/README.md")
    assert "Base → trained" in card.text and "pass@1" in card.text and variables["ARTIFACTS"] not in card.content


def test_two_runs_of_one_task_do_not_mix(variables):
    runs = Path(variables["ARTIFACTS"]) / "runs/countdown"
    with (runs / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = make("train", **variables)
    assert result.returncode != 0 and "TASK=countdown: is already running" in result.stdout


@pytest.mark.long
def test_ctrl_c_ends_every_process_and_keeps_what_there_was(variables, tmp_path):
    changed = {**variables, "INIT": "base", "STEPS": "2", "ARTIFACTS": str(tmp_path)}
    heard = ["env", "--default-signal=INT"]  # `make test-all &` ignores it
    command = [*heard, *MAKE, "train", *(f"{k}={v}" for k, v in changed.items())]
    with subprocess.Popen(
        command, cwd=ROOT, env=outside_make(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        for line in run.stdout:
            if "waits for" in line:
                break
        time.sleep(15)
        os.killpg(run.pid, signal.SIGINT)
        run.stdout.read()
        assert run.wait(timeout=60) != 0
    assert str(tmp_path) not in our_processes()
    assert (tmp_path / "data/countdown/manifest.json").is_file()


def test_the_report_is_of_this_run(variables):
    result = make("report", TASK="countdown", ARTIFACTS=variables["ARTIFACTS"])
    assert result.returncode == 0, result.stdout
    page = only(variables, "reports/countdown/*/report.html").read_text()
    assert run_dir(variables).name in page and "data:image" in page and "<script" not in page


def test_the_dashboard_shows_curves_samples_and_both_runs_in_a_browser(variables, tmp_path):
    """The warm-up and the GRPO run of the tests above, in `make monitor`, as a reader finds them."""
    if not browser.path():
        pytest.skip("no Chromium; apt-get install chromium")
    with browser.monitor(Path(variables["ARTIFACTS"])) as (address, page):
        names = {run.name for run in (Path(variables["ARTIFACTS"]) / "runs/countdown").glob("[gs]*")}
        assert len(names) == 2
        page.goto(address)
        for name in names:
            page.get_by_text(name, exact=True).first.wait_for()
        curve = browser.curve(page, "critic/score/mean")
        steps = range(1, int(variables["STEPS"]) + 1)
        drawn = [(row["run"], int(row["step"]), float(row["critic/score/mean"])) for row in curve]
        assert drawn == [(run_dir(variables).name, step, 0) for step in steps]
        page.get_by_role("button", name="Traces", exact=True).click()
        with (run_dir(variables) / "rollouts/2.jsonl").open() as samples:
            sample = json.loads(next(samples))  # of the first, which are shown
        problem = re.search(r"Numbers: [\d, ]+\. Target: \d+\.", sample["input"])[0]
        page.get_by_placeholder("Search traces").fill(problem)
        page.get_by_text(problem).first.click()
        page.get_by_text("ground_truth").first.wait_for()
        assert sample["gts"] in page.inner_text("body")


VARIABLES = SMALL | {
    "MAX_RESPONSE_LENGTH": "224",  # a byte is a token
    "MAX_NEW_TOKENS": "32",
    "SAVE_FREQ": "2",
}
# What each task changes, and its own metrics.
TASKS = {
    "gsm8k": ({"MAX_PROMPT_LENGTH": "800"}, {"hashes", "format_loss", "marked", "boxed"}),
    "tool_calling": ({"MAX_PROMPT_LENGTH": "2000", "MAX_SAMPLES": "28"}, {"parsed", "names", "missing", "extra"}),
    "econ_agent": (
        {"MAX_PROMPT_LENGTH": "1000", "INIT": "base"},
        {"json", "minus_one", "work_std", "work", "consumption", "unemployment"},
    ),
    "gym_sums": ({"MAX_PROMPT_LENGTH": "800", "INIT": "base"}, {"failed"}),
}
GYM = {"SOURCE": "reasoning_gym", "ENV": "chain_sum", "CONFIG": '{"max_terms": 3}'}


@pytest.mark.long
@pytest.mark.parametrize("name", TASKS)
def test_every_stage(name, small_model, tmp_path):
    changes, keys = TASKS[name]
    artifacts = tmp_path / "artifacts"
    variables = VARIABLES | {"TASK": name, "MODEL": str(small_model), "ARTIFACTS": str(artifacts)} | changes
    checkout = checkout_with(name, tmp_path, **GYM) if name == "gym_sums" else ROOT

    def done(goal: str, **more: str) -> str:
        result = make(goal, cwd=checkout, **variables | more)
        assert result.returncode == 0, result.stdout
        return result.stdout

    def only(pattern: str) -> Path:
        (path,) = artifacts.glob(pattern)
        return path

    done("data")
    manifest = json.loads(only(f"data/{name}/manifest.json").read_text())
    assert (manifest["rows"]["train"], manifest["rows"]["test"]) == (16, 8)
    done("train", STEPS="2")
    rows = [json.loads(line) for line in (only(f"runs/{name}/grpo-*") / "rollouts/1.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and all(-1 <= row["score"] <= 1 for row in rows)
    done("eval", LIMIT="8")
    for file in artifacts.glob(f"eval/{name}/*/summary.json"):
        summary = json.loads(file.read_text())
        assert summary["prompts"] == 8 and summary["errors"] == 0
        assert keys | {"accuracy", "pass@2", "score", "format"} <= summary["metrics"].keys()
    if name == "econ_agent":
        done("simulate", MONTHS="2", AGENTS="3")
        simulation = json.loads(only("eval/econ_agent/simulation-*/simulation.json").read_text())
        assert simulation["indicators"].keys() == {"base", "grpo", "rule"}
        done("merge")
        assert (only("runs/econ_agent/grpo-*") / "checkpoints/global_step_2/actor/merged").is_dir()
    if name == "tool_calling":
        done("probe", LIMIT="8", N="4")
        assert json.loads(only("probe/tool_calling/*/probe.json").read_text())["prompts"] == 8
        assert "irrelevance" in done("bfcl", LIMIT="2", MAX_PROMPT_LENGTH="3000")


@pytest.mark.long
def test_every_stage_of_episodes(small_model, tmp_path):
    """The warm-up is long enough that the random model writes calls and ends its turns."""
    variables = SMALL | {"TASK": "calculator", "MODEL": str(small_model), "ARTIFACTS": str(tmp_path), "STEPS": "2"}
    variables |= {"MAX_PROMPT_LENGTH": "768", "MAX_RESPONSE_LENGTH": "384", "MAX_TURN_LENGTH": "110"}
    variables |= {"TRAIN_SIZE": "64", "SFT_SIZE": "64", "SFT_STEPS": "150", "SFT_BATCH_SIZE": "8", "SFT_LR": "5e-3"}
    result = make("train", **variables)
    assert result.returncode == 0, result.stdout
    assert "2 steps, " in result.stdout and "tool_errors" in result.stdout
    (run,) = tmp_path.glob("runs/calculator/grpo-*")
    lines = [json.loads(line)["data"] for line in (run / "metrics/000.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(step["num_turns/max"] > 2 for step in lines)
    # The trainer computes the probabilities of the tokens that the engine sampled, over all turns.
    assert all(step["training/rollout_actor_probs_pearson_corr"] > 0.99 for step in lines)
    episodes = [json.loads(line) for line in (run / "rollouts/1.jsonl").read_text().splitlines()]
    assert len(episodes) == 16 and any("<tool_response>" in episode["output"] for episode in episodes)
    for episode in episodes:  # the turns are those of this episode, and all of it
        assert all(text in episode["output"] for text in episode["turns"])
        assert ("<tool_response>" in episode["output"]) == any("<tool_response>" in t for t in episode["turns"][1::2])
    summaries = [json.loads(file.read_text()) for file in tmp_path.glob("eval/calculator/*/summary.json")]
    assert len(summaries) == 3 and all("turns" in summary["metrics"] for summary in summaries)
    assert max(summary["metrics"]["turns"]["value"] for summary in summaries) > 1


@pytest.mark.long
def test_validations_choose_the_checkpoint_and_end_the_training(small_model, tmp_path):
    """A random model has no reward: no validation is better than the first."""
    variables = SMALL | {"MODEL": str(small_model), "ARTIFACTS": str(tmp_path), "INIT": "base", "STEPS": "6"}
    variables |= {"SAVE_FREQ": "2", "TEST_FREQ": "1", "PATIENCE": "2", "LIMIT": "2", "N": "1"}
    result = make("train", **variables)
    assert result.returncode == 0, result.stdout
    assert "3 of 6 steps, ended by PATIENCE=2" in result.stdout
    assert "dev 0.000, best 0.000 (step 1)" in result.stdout
    (run_dir,) = (tmp_path / "runs/countdown").glob("grpo-*")
    kept = sorted(path.name for path in (run_dir / "checkpoints").glob("*global_step_*"))
    assert kept == ["global_step_1", "global_step_3"]
    assert f"{run_dir.name}-step1" in str(list((tmp_path / "eval/countdown").iterdir()))

    data = tmp_path / "data/countdown"
    asked = [json.loads(line)["input"] for line in (run_dir / "validation/2.jsonl").read_text().splitlines()]
    dev = [row["prompt"][-1]["content"] for row in read_rows(data / "dev.parquet")]
    assert len(asked) == len(dev) == 4 and all(any(prompt in text for text in asked) for prompt in dev)

    again = make("train", **variables)
    assert again.returncode == 0 and "up to date: 3 of 6 steps" in again.stdout, again.stdout
    merged = make("merge", **variables)
    assert "checkpoint of step 1, the best of its validations (STEP=latest: 3)" in merged.stdout
    assert Path(run_dir / "checkpoints/global_step_1/actor/huggingface/model.safetensors").is_file()
