"""Rewards by a model: REWARD_MODEL, what is refused and a training on the scores of a small classifier; a training on
those of a judge that fails and comes back."""

import hashlib
import json
import math
import re
import runpy
import shutil
import statistics
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.helpers import SMALL as SMALL_MODEL
from tests.helpers import checkout_with, error_line, make, outside_make, task_settings
from tests.test_judge import KEY, Server, completion
from verl_tasks.models import reward_model
from verl_tasks.models.merge import merge
from verl_tasks.rewards.judge import messages
from verl_tasks.runs.run import Run, read_metrics
from verl_tasks.settings import SettingsError
from verl_tasks.training import verl_config

SMALL = SMALL_MODEL | {"INIT": "base", "TRAIN_SIZE": "8", "TEST_SIZE": "2", "ROLLOUT_N": "2", "STEPS": "2"}
SMALL |= {"N": "1", "GREEDY": "0", "SAVE_FREQ": "100"}
# Not the policy's: the classifier must be shown the chat in its own template.
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def classifier(small_model, tmp_path_factory) -> Path:
    """A random Llama with one label, whose scores lie about 3 apart: of the small model's tokenizer and size."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("classifier")
    config = LlamaConfig.from_pretrained(small_model, num_labels=1, tie_word_embeddings=False)
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def settings(**changes: str):
    return task_settings("countdown", SMALL | changes)


def changed(classifier: Path, folder: Path, **values) -> Path:
    """A copy of the classifier with other ``values`` in its config."""
    shutil.copytree(classifier, folder)
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_classifier_is_accepted_and_mapped(classifier):
    s = settings(REWARD_MODEL=str(classifier))
    reward_model.check(s)
    config = verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, "m", Path("/r"))).reward
    assert config.reward_model.enable and config.reward_model.model_path == str(classifier)
    assert config.custom_reward_function.path is None
    rollout = config.reward_model.rollout
    assert (rollout.name, rollout.tensor_model_parallel_size) == ("vllm", 1)
    assert (rollout.prompt_length, rollout.response_length, rollout.max_model_len) == (256, 48, 1120)


def test_the_context_is_not_longer_than_the_classifiers(classifier, tmp_path):
    short = changed(classifier, tmp_path / "short", max_position_embeddings=600)
    assert reward_model.context_length(settings(REWARD_MODEL=str(short))) == 600


def refusal(s) -> str:
    with pytest.raises(SettingsError) as raised:
        reward_model.check(s)
    text = str(raised.value)
    assert text.startswith(f"REWARD_MODEL={s.REWARD_MODEL}: ") and "\n" not in text and len(text) < 600
    return text


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"id2label": {"0": "bad", "1": "good"}}, "has 2 labels"),
        ({"architectures": ["LlamaForCausalLM"]}, "is no sequence classifier: .* LlamaForCausalLM"),
        ({"architectures": None}, "is no sequence classifier"),
    ],
)
def test_what_gives_no_score_is_refused(classifier, tmp_path, values, reason):
    folder = changed(classifier, tmp_path / "other", **values)
    assert re.search(reason, refusal(settings(REWARD_MODEL=str(folder))))


def test_a_classifier_without_a_chat_template_is_refused(classifier, tmp_path):
    folder = changed(classifier, tmp_path / "other")
    (folder / "chat_template.jinja").unlink()
    assert "has no chat template" in refusal(settings(REWARD_MODEL=str(folder)))


def test_code_that_comes_with_the_classifier_is_not_run(classifier, tmp_path):
    mark = tmp_path / "ran"
    folder = changed(classifier, tmp_path / "other", model_type="own", auto_map={"AutoConfig": "own.Config"})
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\n")
    assert "its config" in refusal(settings(REWARD_MODEL=str(folder))) and not mark.exists()


@pytest.mark.parametrize("given", ["no/such/folder", "./nothing", "embedded-not"])
def test_a_folder_that_is_not_there_is_refused(given):
    assert "no such folder" in refusal(settings(REWARD_MODEL=given))


def test_an_adapter_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "x/y"}')
    assert "is a LoRA adapter" in refusal(settings(REWARD_MODEL=str(tmp_path)))


def test_make_refuses_it_before_anything_starts(small_model, tmp_path):
    given = {**SMALL, "MODEL": str(small_model), "REWARD_MODEL": str(small_model), "ARTIFACTS": str(tmp_path)}
    result = make("train", **given)
    assert "is no sequence classifier" in error_line(result) and not list(tmp_path.glob("runs/*/*/logs"))


@pytest.mark.long
def test_ppo_with_lora_trains_on_the_classifiers_own_scores(small_model, classifier, tmp_path):
    """The dumped scores are those of transformers for the same chats; evaluation keeps the task's reward.

    The reward comes in the same way to all methods."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification

    method = "ppo"
    given = {
        **SMALL,
        "METHOD": method,
        "LORA_RANK": "8",
        "KL_COEF": "0.01",
        "CRITIC_WARMUP": "0",
        "MODEL": str(small_model),
        "REWARD_MODEL": str(classifier),
    }
    result = make("train", ARTIFACTS=str(tmp_path), **given)
    assert result.returncode == 0, result.stdout

    model = LlamaForSequenceClassification.from_pretrained(classifier).eval()
    own, policys = (AutoTokenizer.from_pretrained(folder) for folder in (classifier, small_model))
    chats = {
        row["reward_model"]["ground_truth"]: row["prompt"]
        for row in pq.read_table(tmp_path / "data/countdown/train.parquet").to_pylist()
    }
    rows = [
        json.loads(line)
        for dump in sorted(tmp_path.glob(f"runs/countdown/{method}-*/rollouts/*.jsonl"))
        for line in dump.read_text().splitlines()
    ]

    def differences(tokenizer) -> list[float]:
        found = []
        for row in rows:
            chat = [*chats[row["gts"]], {"role": "assistant", "content": row["output"]}]
            ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), return_tensors="pt")
            with torch.no_grad():
                found.append(abs(row["score"] - model(**ids).logits.item()))
        return found

    scores = [row["score"] for row in rows]
    mean, with_another_template = (statistics.mean(differences(tokenizer)) for tokenizer in (own, policys))
    print(f"{method}: scores {min(scores):.3f} to {max(scores):.3f}, mean difference {mean:.4f}", end="; ")
    print(f"with the policy's template {with_another_template:.4f}")
    assert len(scores) == 16 and max(scores) - min(scores) > 0.5
    assert mean < 0.1 < with_another_template / 2  # vLLM computes in bf16; the largest of 16 is over 0.1 now and then

    (run,) = tmp_path.glob(f"runs/countdown/{method}-*")
    trained = AutoModelForCausalLM.from_pretrained(merge((trained_run := Run.read(run)).checkpoint(), trained_run.base))
    assert all(torch.isfinite(p).all() for p in trained.parameters())
    start = AutoModelForCausalLM.from_pretrained(small_model)
    changed = {
        name for name, p in trained.named_parameters() if not torch.equal(p.float(), start.get_parameter(name).float())
    }
    assert changed and all("_proj" in name for name in changed)
    steps = read_metrics(run)
    assert sorted(steps) == [1, 2]
    assert all(math.isfinite(row[name]) for row in steps.values() for name in ("actor/pg_loss", "critic/vf_loss"))
    assert steps[2]["actor/reward_kl_penalty"] != 0 and "critic/values/mean" in steps[2]  # KL_COEF acts, and the critic

    (evaluated,) = {
        json.loads(f.read_text())["metrics"]["score"]["value"] for f in tmp_path.glob("eval/**/summary.json")
    }
    assert evaluated == 0  # of a random model, by the task's reward


PROMPTS, SAMPLES = 4, 4
JUDGED = SMALL | {"TASK": "judged", "TRAIN_SIZE": str(2 * PROMPTS), "ROLLOUT_N": str(SAMPLES)}  # an epoch has two steps


def verdict(text: str) -> int:
    return hashlib.sha256(text.encode()).digest()[0] % 11


class Judge(Server):
    """Grades ``healthy`` requests by a digest of what it is asked, then fails until that is None."""

    def __init__(self, healthy: int):
        super().__init__(self.grade)
        self.healthy, self.answered = healthy, 0

    def grade(self, handler) -> None:
        with self.lock:
            good = self.healthy is None or self.answered < self.healthy
            self.answered += good
        graded = completion(json.dumps({"score": verdict(handler.body["messages"][1]["content"])}))
        refused = json.dumps({"error": {"message": f"out of memory, {KEY}"}})
        handler.reply(200 if good else 500, {}, graded if good else refused)


def rollouts(run_dir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run_dir / f"rollouts/{step}.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_judge_that_fails_stops_the_run_after_a_checkpoint_from_which_it_goes_on(small_model, tmp_path, monkeypatch):
    # Step 1 is graded; of step 2 some answers are, the others are not.
    server = Judge(healthy=PROMPTS * SAMPLES + 6)
    given = {"JUDGE_URL": server.url, "JUDGE_MODEL": "model-x", "JUDGE_API_KEY": KEY}
    for name, value in {**given, "JUDGE_RETRIES": "1", "JUDGE_TIMEOUT": "10"}.items():
        monkeypatch.setenv(name, value)
    assert outside_make()["JUDGE_API_KEY"] == KEY
    checkout = checkout_with("judged", tmp_path, OPTIONS="reward=judge")
    artifacts = tmp_path / "artifacts"
    variables = {**JUDGED, "MODEL": str(small_model), "ARTIFACTS": str(artifacts)}
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

    assert f"JudgeError: judge model-x at {server.url}: HTTP 500" in error_line(failed)
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

    assert {request["headers"]["Authorization"] for request in server.requests} == {f"Bearer {KEY}"}
    files = [path for path in artifacts.rglob("*") if path.is_file()]
    assert len(files) > 20 and not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in failed.stdout + resumed.stdout
