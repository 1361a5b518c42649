"""Training on the scores of a judge: real runs on the CPU, against a local HTTP server that fails and comes back."""

import hashlib
import json
import runpy
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.helpers import checkout_with, make, outside_make
from verl_tasks.rewards.judge import messages
from verl_tasks.runs.run import read_metrics

pytestmark = pytest.mark.long

KEY = "sk-secret-4711"
PROMPTS, SAMPLES = 4, 4
SMALL = {
    "TASK": "judged",
    "STACK": "cpu",
    "INIT": "base",
    "TRAIN_SIZE": str(2 * PROMPTS),  # an epoch has two steps
    "TEST_SIZE": "2",
    "TRAIN_BATCH_SIZE": str(PROMPTS),
    "ROLLOUT_N": str(SAMPLES),
    "MAX_PROMPT_LENGTH": "256",  # a byte is a token
    "MAX_RESPONSE_LENGTH": "48",
    "N": "1",
    "GREEDY": "0",
    "SAVE_FREQ": "100",
    "STEPS": "2",
}


def verdict(text: str) -> int:
    return hashlib.sha256(text.encode()).digest()[0] % 11


class Judge(ThreadingHTTPServer):
    """Grades by a digest of what it is asked; answers ``healthy`` requests, then fails until that is None."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, healthy: int):
        super().__init__(("127.0.0.1", 0), Handler)
        self.healthy, self.answered, self.keys, self.lock = healthy, 0, set(), threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        judge = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with judge.lock:
            judge.keys.add(self.headers["Authorization"])
            good = judge.healthy is None or judge.answered < judge.healthy
            judge.answered += good
        content = json.dumps({"score": verdict(body["messages"][1]["content"])})
        reply = {"choices": [{"message": {"role": "assistant", "content": content}}]}
        data = json.dumps(reply if good else {"error": {"message": f"out of memory, {KEY}"}}).encode()
        self.send_response(200 if good else 500)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


def rollouts(run_dir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run_dir / f"rollouts/{step}.jsonl").read_text().splitlines()]


def test_a_judge_that_fails_stops_the_run_after_a_checkpoint_from_which_it_goes_on(small_model, tmp_path, monkeypatch):
    # Step 1 is graded; of step 2 some answers are, the others are not.
    server = Judge(healthy=PROMPTS * SAMPLES + 6)
    given = {"JUDGE_URL": server.url, "JUDGE_MODEL": "model-x", "JUDGE_API_KEY": KEY}
    for name, value in {**given, "JUDGE_RETRIES": "1", "JUDGE_TIMEOUT": "10"}.items():
        monkeypatch.setenv(name, value)
    assert outside_make()["JUDGE_API_KEY"] == KEY
    checkout = checkout_with("judged", tmp_path, OPTIONS="reward=judge")
    artifacts = tmp_path / "artifacts"
    variables = {**SMALL, "MODEL": str(small_model), "ARTIFACTS": str(artifacts)}
    try:
        rubric = runpy.run_path(str(checkout / "tasks/judged/reward.py"))["RUBRIC"]
        failed = make("train", cwd=checkout, **variables)
        (run_dir,) = artifacts.glob("runs/judged/grpo-*")
        left = {path.name for path in run_dir.glob("checkpoints/global_step_*")}
        dumped = {path.name for path in run_dir.glob("rollouts/*")}
        server.healthy = None
        resumed = make("train", cwd=checkout, **variables)
    finally:
        server.shutdown()
        server.server_close()

    assert failed.returncode != 0
    (error,) = [line for line in failed.stdout.splitlines() if line.startswith("error: ")]
    assert f"JudgeError: judge model-x at {server.url}: HTTP 500" in error
    assert left == {"global_step_1"} and dumped == {"1.jsonl"}, failed.stdout

    assert resumed.returncode == 0, resumed.stdout
    assert "resuming from step 1" in resumed.stdout
    assert (run_dir / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"
    assert sorted(read_metrics(run_dir)) == [1, 2]

    prompts = []
    for step in (1, 2):
        rows = rollouts(run_dir, step)
        assert len(rows) == PROMPTS * SAMPLES
        prompts.append({row["gts"] for row in rows})
        for row in rows:
            truth = json.loads(row["gts"])
            answer = row["output"].rpartition("</think>")[2]
            asked = messages(truth["question"], answer, truth["reference"], rubric)[1]["content"]
            assert row["score"] == pytest.approx(verdict(asked) / 10), row
    # The prompts that failed are those of step 2, each of the epoch once.
    assert len(prompts[0] | prompts[1]) == 2 * PROMPTS

    assert server.keys == {f"Bearer {KEY}"}
    files = [path for path in artifacts.rglob("*") if path.is_file()]
    assert len(files) > 20 and not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in failed.stdout + resumed.stdout
