"""REWARD_MODEL: what is refused before the start, and training on the scores of a small classifier on the CPU."""

import json
import math
import shutil
import statistics
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.helpers import ROOT, exported, make
from verl_tasks.models import reward_model
from verl_tasks.models.merge import merge
from verl_tasks.runs.run import Run, read_metrics
from verl_tasks.settings import SettingsError, load_settings
from verl_tasks.training import verl_config

SMALL = {
    "TASK": "countdown",
    "STACK": "cpu",
    "INIT": "base",
    "TRAIN_SIZE": "8",
    "TEST_SIZE": "2",
    "TRAIN_BATCH_SIZE": "4",
    "ROLLOUT_N": "2",
    "MAX_PROMPT_LENGTH": "256",  # a byte is a token
    "MAX_RESPONSE_LENGTH": "48",
    "N": "1",
    "GREEDY": "0",
    "SAVE_FREQ": "100",
    "STEPS": "2",
}
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


def settings(monkeypatch, **changes: str):
    environment = exported(ROOT / "tasks/countdown/train.sh", {**SMALL, **changes})
    return load_settings(environment)


def changed(classifier: Path, folder: Path, **values) -> Path:
    """A copy of the classifier with other ``values`` in its config."""
    shutil.copytree(classifier, folder)
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_classifier_is_accepted_and_mapped(classifier, monkeypatch):
    s = settings(monkeypatch, REWARD_MODEL=str(classifier))
    reward_model.check(s)
    config = verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, "m", Path("/r"))).reward
    assert config.reward_model.enable and config.reward_model.model_path == str(classifier)
    assert config.custom_reward_function.path is None
    rollout = config.reward_model.rollout
    assert (rollout.name, rollout.tensor_model_parallel_size) == ("vllm", 1)
    assert (rollout.prompt_length, rollout.response_length, rollout.max_model_len) == (256, 48, 1120)


def test_the_context_is_not_longer_than_the_classifiers(classifier, tmp_path, monkeypatch):
    short = changed(classifier, tmp_path / "short", max_position_embeddings=600)
    assert reward_model.context_length(settings(monkeypatch, REWARD_MODEL=str(short))) == 600


def refusal(s) -> str:
    with pytest.raises(SettingsError) as raised:
        reward_model.check(s)
    text = str(raised.value)
    assert text.startswith(f"REWARD_MODEL={s.REWARD_MODEL}: ") and "\n" not in text and len(text) < 600
    return text


def test_without_a_reward_model_nothing_is_checked(monkeypatch):
    reward_model.check(settings(monkeypatch))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"id2label": {"0": "bad", "1": "good"}}, "has 2 labels"),
        ({"architectures": ["LlamaForCausalLM"]}, "is no sequence classifier: .* LlamaForCausalLM"),
        ({"architectures": None}, "is no sequence classifier"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "its config"),
    ],
)
def test_what_gives_no_score_is_refused(classifier, tmp_path, monkeypatch, values, reason):
    import re

    folder = changed(classifier, tmp_path / "other", **values)
    assert re.search(reason, refusal(settings(monkeypatch, REWARD_MODEL=str(folder))))


def test_a_classifier_without_a_chat_template_is_refused(classifier, tmp_path, monkeypatch):
    folder = changed(classifier, tmp_path / "other")
    (folder / "chat_template.jinja").unlink()
    assert "has no chat template" in refusal(settings(monkeypatch, REWARD_MODEL=str(folder)))


def test_code_that_comes_with_the_classifier_is_not_run(classifier, tmp_path, monkeypatch):
    mark = tmp_path / "ran"
    folder = changed(classifier, tmp_path / "other", model_type="own", auto_map={"AutoConfig": "own.Config"})
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\n")
    refusal(settings(monkeypatch, REWARD_MODEL=str(folder)))
    assert not mark.exists()


@pytest.mark.parametrize("given", ["no/such/folder", "./nothing", "embedded-not"])
def test_a_folder_that_is_not_there_is_refused(given, monkeypatch):
    assert "no such folder" in refusal(settings(monkeypatch, REWARD_MODEL=given))


def test_an_adapter_is_refused(tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "x/y"}')
    assert "is a LoRA adapter" in refusal(settings(monkeypatch, REWARD_MODEL=str(tmp_path)))


def test_make_refuses_it_before_anything_starts(small_model, tmp_path):
    given = {**SMALL, "MODEL": str(small_model), "REWARD_MODEL": str(small_model), "ARTIFACTS": str(tmp_path)}
    result = make("train", **given)
    (error,) = [line for line in result.stdout.splitlines() if line.startswith("error: ")]
    assert result.returncode != 0 and "is no sequence classifier" in error
    assert not list(tmp_path.glob("runs/*/*/logs"))


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
