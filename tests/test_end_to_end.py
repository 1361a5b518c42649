"""The real stack on a very small random model: real verl, real vLLM, real Ray, on the CPU."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers import MAKE, ROOT, make, outside_make

pytestmark = pytest.mark.slow

SMALL = {
    "TASK": "countdown",
    "STACK": "cpu",
    "TRAIN_SIZE": "16",
    "TEST_SIZE": "8",
    "SFT_SIZE": "8",
    "SFT_STEPS": "2",
    "SFT_BATCH_SIZE": "4",
    "TRAIN_BATCH_SIZE": "4",
    "MINI_BATCH_SIZE": "4",
    "ROLLOUT_N": "4",
    "MAX_PROMPT_LENGTH": "256",  # a byte is a token
    "MAX_RESPONSE_LENGTH": "48",
    "N": "2",
    "SAVE_FREQ": "1",
}


@pytest.fixture(scope="module")
def variables(small_model, tmp_path_factory) -> dict[str, str]:
    return {**SMALL, "MODEL": str(small_model), "ARTIFACTS": str(tmp_path_factory.mktemp("run") / "artifacts")}


def run_dir(variables) -> Path:
    return next((Path(variables["ARTIFACTS"]) / "runs/countdown").glob("grpo-*"))


def steps_logged(folder: Path) -> list[int]:
    return [json.loads(x)["step"] for f in sorted((folder / "metrics").glob("*")) for x in f.read_text().splitlines()]


def our_processes() -> str:
    return subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout


def test_a_killed_run_resumes_and_ends_with_the_table(variables):
    """SFT and two GRPO steps; the launcher is killed after the first; the same command does the second and the rest."""
    command = [*MAKE, "train", *(f"{k}={v}" for k, v in variables.items()), "STEPS=2"]
    with subprocess.Popen(
        command, cwd=ROOT, env=outside_make(), stdout=subprocess.DEVNULL, start_new_session=True
    ) as first:
        deadline = time.monotonic() + 400
        tracker = "runs/countdown/grpo-*/checkpoints/latest_checkpointed_iteration.txt"
        while not list(Path(variables["ARTIFACTS"]).glob(tracker)):
            assert first.poll() is None and time.monotonic() < deadline, "ended before its first checkpoint"
            time.sleep(0.2)
        os.killpg(first.pid, signal.SIGKILL)
    time.sleep(5)  # for the engines to notice that their parent is gone
    assert variables["MODEL"] not in our_processes()
    saved = int((run_dir(variables) / "checkpoints/latest_checkpointed_iteration.txt").read_text())

    shared_memory = set(os.listdir("/dev/shm"))
    second = make("train", STEPS="2", **variables)
    assert second.returncode == 0, second.stdout
    if saved < 2:
        assert f"resuming from step {saved}" in second.stdout
    assert sorted(set(steps_logged(run_dir(variables)))) == [1, 2]
    assert "pass@1" in second.stdout and "[6/6] eval" in second.stdout and "Next:" in second.stdout
    for label in ("base", "sft", "grpo"):
        summary = json.loads((run_dir(variables) / f"eval/{label}.json").read_text())
        assert summary["prompts"] == 8 and 0 <= summary["score"]["value"] <= 1
        completions = (run_dir(variables) / f"eval/{label}.jsonl").read_text().splitlines()
        assert len(completions) == 8 * (1 + int(SMALL["N"]))
    assert {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "verl_"))} <= shared_memory


def test_the_checkpoint_loads_in_transformers_and_differs_from_its_start(variables):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run_dir(variables) / "checkpoints/global_step_2/actor/huggingface"
    trained, start = (AutoModelForCausalLM.from_pretrained(f) for f in (folder, variables["MODEL"]))
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 1
    pairs = zip(trained.parameters(), start.parameters(), strict=True)
    assert any(not torch.equal(a.float(), b.float()) for a, b in pairs)
    assert all(torch.isfinite(p).all() for p in trained.parameters())


def test_a_second_run_reuses_everything(variables):
    before = {p: p.stat().st_mtime_ns for p in run_dir(variables).rglob("*") if p.is_file()}
    result = make("train", STEPS="2", **variables)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("up to date") >= 4
    assert {p: p.stat().st_mtime_ns for p in run_dir(variables).rglob("*") if p.is_file()} == before


def test_two_runs_of_one_task_do_not_mix(variables):
    runs = Path(variables["ARTIFACTS"]) / "runs/countdown"
    holder = subprocess.Popen(["flock", runs / ".lock", "sleep", "30"])
    try:
        time.sleep(0.5)
        result = make("train", STEPS="2", **variables)
        assert result.returncode != 0 and "TASK=countdown: is already running" in result.stdout
    finally:
        holder.terminate()
        holder.wait()


def change_reward(task: Path, body: str) -> None:
    """Let ``body`` score all but the ground truth of examples.jsonl, which is checked before the training."""
    reward = (task / "reward.py").read_text()
    marker = "    answer = last_answer(solution_str)\n"
    assert marker in reward
    (task / "reward.py").write_text(reward.replace(marker, f"    if ground_truth != '12':\n        {body}\n{marker}"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ZeroDivisionError('in reward')", "ZeroDivisionError: in reward"),
        ("return {'score': float('nan'), 'acc': 0}", "score is nan"),
    ],
)
def test_a_reward_that_breaks_during_training_is_named_in_one_line(variables, tmp_path, body, said):
    """The reward passes examples.jsonl and breaks on the rollouts: verl's own process reports it, and ends."""
    task = ROOT / "tasks/broken_reward"
    assert make("new", TASK="broken_reward").returncode == 0
    try:
        change_reward(task, body)
        changed = {**variables, "TASK": "broken_reward", "INIT": "base", "ARTIFACTS": str(tmp_path)}
        result = make("train", STEPS="1", **changed)
    finally:
        shutil.rmtree(task)
    assert result.returncode != 0
    errors = [line for line in result.stdout.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and said in errors[0] and "broken_reward" in errors[0], result.stdout
    assert str(tmp_path) not in our_processes()


def test_ctrl_c_ends_every_process_and_keeps_what_there_was(variables, tmp_path):
    changed = {**variables, "INIT": "base", "ARTIFACTS": str(tmp_path)}
    command = [*MAKE, "train", *(f"{k}={v}" for k, v in changed.items()), "STEPS=2"]
    with subprocess.Popen(
        command, cwd=ROOT, env=outside_make(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        for line in run.stdout:
            if "starting Ray" in line:
                break
        time.sleep(15)
        os.killpg(run.pid, signal.SIGINT)
        run.stdout.read()
        assert run.wait(timeout=60) != 0
    assert str(tmp_path) not in our_processes()
    assert (tmp_path / "data/countdown/manifest.json").is_file()


def test_a_new_lora_task_trains_on_the_rewards_of_its_own_function(variables, tmp_path):
    """A random model answers nothing, so the function under test counts digits: the dump must hold those counts."""
    import torch
    from transformers import AutoModelForCausalLM

    task = ROOT / "tasks/fresh_lora"
    assert make("new", TASK="fresh_lora", OPTIONS="lora=yes").returncode == 0
    try:
        change_reward(
            task, "return {'score': sum(c in '0123456789' for c in solution_str) / 10, 'acc': 0.0, 'format': 0.0}"
        )
        changed = {**variables, "TASK": "fresh_lora", "INIT": "base", "ARTIFACTS": str(tmp_path)}
        result = make("train", STEPS="1", **changed)
    finally:
        shutil.rmtree(task)
    assert result.returncode == 0, result.stdout
    dump = next(tmp_path.glob("runs/fresh_lora/*/rollouts/1.jsonl"))
    rows = [json.loads(line) for line in dump.read_text().splitlines()]
    scores = [row["score"] for row in rows]
    assert scores == pytest.approx([sum(c in "0123456789" for c in row["output"]) / 10 for row in rows])
    assert len(rows) == 16 and len(set(scores)) > 1
    merged = AutoModelForCausalLM.from_pretrained(next(tmp_path.glob("runs/fresh_lora/*/checkpoints/*/actor/merged")))
    start = AutoModelForCausalLM.from_pretrained(variables["MODEL"])
    changed = {n for n, p in merged.named_parameters() if not torch.equal(p.float(), start.get_parameter(n).float())}
    assert changed and all("_proj" in name for name in changed)
