"""The trainers without a training: what they do when a reward fails, how a step's responses come into mini-batches,
which steps train what, and DAPO's bound. In trainings: test_reward_model.py, test_numerics.py; with verl 0.6.1:
test_a100_stack.py.
"""

import json
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.test_settings import VALUES
from tests.test_verl_config import settings_of
from tests.test_verl_on_policy import composed, nested
from verl_tasks.rewards.answers import RewardError
from verl_tasks.runs import checkpoint
from verl_tasks.runs.health import AbortedError
from verl_tasks.training import verl_config

MODEL = "the/classifier"


@pytest.fixture(scope="module")
def module():
    from verl_tasks.verl_plugins import trainer  # here: importing verl takes seconds

    return trainer


@pytest.fixture
def trainer(module, monkeypatch):
    """A trainer in step 4 that has trained 3 steps since its start; ``saved``: what it has written."""
    monkeypatch.setattr(module, "LOG_SECONDS", 0)
    trainer = object.__new__(module.TaskTrainer)
    reward = SimpleNamespace(reward_model=SimpleNamespace(model_path=MODEL))
    own = SimpleNamespace(test_freq=-1, default_local_dir="run/checkpoints")
    trainer.config = SimpleNamespace(reward=reward, trainer=own)
    trainer.checkpoint_manager, trainer.local_trigger_step = mock.Mock(), 0
    trainer.saved, trainer.timing_raw = [], {}

    def save(self):
        self.saved.append((self.global_steps, self.train_dataloader.state_dict()))

    monkeypatch.setattr(module.PPOTrainerSync, "_save_checkpoint", save)
    monkeypatch.setattr(module, "prune", lambda *_: None)
    monkeypatch.setenv("KEEP", "1")
    data = {"taken": 0}
    trainer.train_dataloader = SimpleNamespace(state_dict=lambda: data)
    for trainer.global_steps in (1, 2, 3):
        data["taken"] += 1
        trainer.on_step_end()
    trainer.global_steps = 4
    data["taken"] += 1  # verl takes a step's prompts at its start
    return trainer


def buffer_of(trainer, module, monkeypatch, **statuses: str):
    """The trainer's replay buffer where TransferQueue has prompts with ``statuses``."""
    built = module.ReplayBuffer("sync", None, None, "drop", {}, poll_interval=0.01)
    monkeypatch.setattr(module.PPOTrainerSync, "_build_replay_buffer", lambda self: built)
    items = {name: {"is_prompt": True, "status": status, "global_steps": 4} for name, status in statuses.items()}
    items |= {f"{name}_0_0": {"seq_len": 3} for name, status in statuses.items() if status == "finished"}
    tq = SimpleNamespace(kv_list=lambda: {"train": items}, kv_clear=mock.Mock())
    monkeypatch.setattr("verl.trainer.ppo.v1.replay_buffer.tq", tq)
    return trainer._build_replay_buffer()


def test_a_batch_without_failures_is_sampled(trainer, module, monkeypatch):
    buffer = buffer_of(trainer, module, monkeypatch, a="finished", b="finished")
    batch, _ = buffer.sample(global_steps=4, partition_id="train", batch_size=2)
    assert sorted(batch.keys) == ["a_0_0", "b_0_0"] and trainer.saved == []


@pytest.mark.parametrize("other", ["finished", "running", "failure"])
def test_one_failed_prompt_ends_the_run_after_the_last_step_is_saved(trainer, module, monkeypatch, other):
    buffer = buffer_of(trainer, module, monkeypatch, a="failure", b=other)
    with pytest.raises(module.GroupFailed, match=r"step 4: [12] prompts failed"):
        buffer.sample(global_steps=4, partition_id="train", batch_size=2)
    assert trainer.saved == [(3, {"taken": 3})]  # so step 4 takes its prompts again
    assert trainer.checkpoint_manager.sleep_replicas.called


def test_a_step_that_is_saved_is_not_saved_again(trainer, module, monkeypatch):
    trainer.global_steps = 3
    trainer._save_checkpoint()
    trainer.global_steps, written = 4, list(trainer.saved)
    buffer = buffer_of(trainer, module, monkeypatch, a="failure")
    with pytest.raises(module.GroupFailed):
        buffer.sample(global_steps=4, partition_id="train", batch_size=1)
    assert trainer.saved == written


def test_a_warm_up_ends_by_the_loss_of_a_whole_demonstration_and_saves_every_five_minutes(monkeypatch):
    from verl.utils import tensordict_utils

    from verl_tasks.verl_plugins import sft_steps

    clock = iter(range(0, 10**6, 70))
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sft_steps.torch.distributed, "get_world_size", lambda: 1)
    losses = iter([0.3] * 4 + [0.2, 0.1, 0.05, 0.04])

    def train_batch(data):
        return tensordict_utils.get_tensordict({}, {"metrics": {"loss": next(losses)}})

    trainer = SimpleNamespace(training_client=SimpleNamespace(train_batch=train_batch), device_name="cpu")
    trainer.save_freq, trainer.total_training_steps, trainer.resume_global_step = -1, 30, 10
    sft_steps.watch(trainer, 0.3)
    masks = [torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1, 1, 1, 1])]  # three tokens of each are learned
    rows = {"loss_mask": torch.nested.as_nested_tensor(masks, layout=torch.jagged)}
    seen, told = [], []
    for _ in range(8):
        output = trainer.training_client.train_batch(rows)
        told.append(tensordict_utils.get(output, "metrics")["train/demonstration_loss"])
        seen.append((trainer.save_freq, trainer.total_training_steps))
    assert seen == [(-1, 30), (-1, 30), (1, 30), (-1, 30), (-1, 30), (1, 30), (-1, 30), (-1, 18)]
    assert told == pytest.approx([0.9] * 4 + [0.6, 0.3, 0.15, 0.12])


def test_nothing_is_saved_before_the_first_step(trainer, module, monkeypatch):
    trainer._complete = module.TaskTrainer._complete
    buffer = buffer_of(trainer, module, monkeypatch, a="failure")
    with pytest.raises(module.GroupFailed):
        buffer.sample(global_steps=1, partition_id="train", batch_size=1)
    assert trainer.saved == []


def test_a_step_that_is_half_trained_is_not_saved_as_the_one_before(trainer, module, monkeypatch):
    """ASYNC=separate draws each mini-batch by itself; the first has changed the weights."""
    trainer.local_trigger_step = 1
    buffer = buffer_of(trainer, module, monkeypatch, a="failure")
    with pytest.raises(module.GroupFailed):
        buffer.sample(global_steps=4, partition_id="train", batch_size=1)
    assert trainer.saved == []
    # Before the next step draws, and in a validation of the last, the weights are those of a whole step.
    monkeypatch.setattr(module.PPOTrainerSync, "on_step_begin", lambda self: None)
    trainer.on_step_begin()
    trainer._save_complete_step()
    assert trainer.saved == [(3, {"taken": 3})]
    trainer._saved, trainer.global_steps, trainer.local_trigger_step = 2, 3, 1
    trainer._save_complete_step()
    assert len(trainer.saved) == 2


def test_an_engine_that_is_gone_does_not_keep_from_saving(trainer, module, monkeypatch):
    trainer.checkpoint_manager.sleep_replicas.side_effect = RuntimeError("gone")
    buffer = buffer_of(trainer, module, monkeypatch, a="failure")
    with pytest.raises(module.GroupFailed):
        buffer.sample(global_steps=4, partition_id="train", batch_size=1)
    assert trainer.saved == [(3, {"taken": 3})]


def reward_of(trainer, module, monkeypatch, scores):
    """What the trainer does with the reward model's ``scores``, a list or an error."""

    def compute(self, batch, metrics):
        if isinstance(scores, Exception):
            raise scores
        return batch

    rm_scores = SimpleNamespace(values=lambda: torch.tensor(scores))
    monkeypatch.setattr(module.PPOTrainerSync, "_compute_reward_colocate", compute)
    monkeypatch.setattr(module.tq, "kv_batch_get", lambda **_: {"rm_scores": rm_scores}, raising=False)
    batch = SimpleNamespace(keys=["a"], partition_id="train")
    return trainer._compute_reward_colocate(batch, metrics={}) is batch


def test_scores_of_a_reward_model_are_kept(trainer, module, monkeypatch):
    assert reward_of(trainer, module, monkeypatch, [0.0, -1.5]) and trainer.saved == []


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ([0.5, float("nan")], "a score is not a finite number"),
        ([float("inf")], "a score is not a finite number"),
        (ConnectionError("no\nanswer"), "ConnectionError: no answer"),
    ],
)
def test_a_reward_model_that_fails_ends_the_run_in_one_line(trainer, module, monkeypatch, scores, reason):
    with pytest.raises(RewardError) as raised:
        reward_of(trainer, module, monkeypatch, scores)
    text = str(raised.value)
    assert text.startswith(f"REWARD_MODEL={MODEL} gave no reward: ") and text.endswith(reason) and "\n" not in text
    assert trainer.saved == [(3, {"taken": 3})]


@pytest.mark.parametrize("stored", [True, False])
def test_the_samples_of_a_step_have_turns_and_scores_of_their_own_episode(trainer, module, monkeypatch, stored):
    """Through verl's own dump, which sorts the rows by prompt and sample."""
    texts, masks = {"b_0_0": [7, 8, 9, 7], "a_0_0": [5, 6]}, {"b_0_0": [1, 0, 0, 1], "a_0_0": [1, 1]}

    def nested(rows):
        return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    def get(keys, partition_id, select_fields):
        if "response_mask" in select_fields and not stored:
            raise KeyError("response_mask")
        found = {"responses": nested(texts[key] for key in keys), "prompts": nested([1] for _ in keys)}
        found |= {"response_mask": nested(masks[key] for key in keys), "uid": np.array(keys)}
        scores = {"b_0_0": {"reward_extra_info": {"turns": 2.0, "failed": 1.0, "model_s": 3.5}}, "a_0_0": {}}
        found["extra_fields"] = np.array([scores[key] for key in keys])
        found |= {"rm_scores": torch.zeros(2, 4), "reward_model": np.array([{"ground_truth": "x"}] * 2)}
        return {name: found[name] for name in select_fields}

    dumped = []
    monkeypatch.setattr(module.tq, "kv_batch_get", get, raising=False)
    monkeypatch.setattr(module.PPOTrainer, "_dump_generations", lambda self, *given: dumped.append(given))
    trainer.config.data = {"episode": {"task": "x"}}
    decode = mock.Mock(side_effect=lambda ids, skip_special_tokens: " ".join(str(int(token)) for token in ids))
    trainer.tokenizer = SimpleNamespace(decode=decode, pad_token_id=0)
    batch = SimpleNamespace(keys=[*texts], partition_id="train")
    trainer._log_rollout_data(batch, {}, "folder")
    ((_, outputs, _, _, more, folder),) = dumped
    assert outputs == ["5 6 0 0", "7 8 9 7"] and folder == "folder" and more["uid"] == ["a_0_0", "b_0_0"]
    assert more.get("turns") == ([["5 6"], ["7", "8 9", "7"]] if stored else None)
    told = more.get("failed"), more.get("model_s")
    assert told == (([None, 1.0], [None, 3.5]) if stored else (None, None))
    trainer._dump_generations([], [], [], [], {"x": []}, "validation")  # which has no uid
    assert dumped[1][4] == {"x": []}


CUT_OFF = [
    (correction, on_policy, False) for correction in ("none", "token", "sequence") for on_policy in (True, False)
]


@pytest.mark.parametrize(("correction", "on_policy", "rejected"), [*CUT_OFF, ("sequence", False, True)])
@pytest.mark.parametrize("method", ["grpo", "reinforce_pp", "ppo"])
def test_a_step_in_which_no_token_counts_has_advantages(module, monkeypatch, method, correction, on_policy, rejected):
    """All responses cut off (TRUNCATED=masked), or all rejected (ROLLOUT_CORRECTION=sequence, the engine is far off).

    verl's own correction, and its variance over tokens, raise there.
    """
    changes = {"METHOD": method, "ROLLOUT_CORRECTION": correction, "TRUNCATED": "masked", "ROLLOUT_N": "2"}
    trainer = object.__new__(module.TaskTrainer)
    trainer.config, trainer._on_policy = composed(**changes), on_policy
    lengths, put = (3, 2, 3, 3), {}

    def rows(value) -> torch.Tensor:
        return nested([torch.full((length,), value) for length in lengths])

    log_probs = {name: rows(-0.5) for name in ("old_log_probs", "rollout_log_probs", "values")}
    stored = log_probs | {"response_mask": rows(int(rejected)), "rm_scores": rows(1.0)}
    if rejected:
        stored["rollout_log_probs"] = rows(-9.0)

    def get(keys, partition_id, select_fields):
        found = TensorDict({n: stored[n] for n in select_fields if n in stored}, batch_size=len(lengths))
        if "uid" in select_fields:
            found["uid"] = NonTensorStack(*(NonTensorData(name) for name in "aabb"))
        return found

    def store(keys, partition_id, fields):
        put.update(fields.items())
        stored.update(fields.items())

    tq = SimpleNamespace(kv_batch_get=get, kv_batch_put=store)
    monkeypatch.setattr(module, "tq", tq)
    monkeypatch.setattr("verl.trainer.ppo.v1.trainer_base.tq", tq)
    batch = mock.MagicMock(keys=["a_0_0", "a_1_0", "b_0_0", "b_1_0"], partition_id="train")
    batch.__len__.return_value = len(lengths)
    trainer._compute_advantage(batch, {})
    assert torch.isfinite(put["advantages"].values()).all()
    assert ("rollout_is_weights" in put) == rejected
    assert not stored["response_mask"].values().any()
    # By it verl counts the tokens that a mini-batch's loss is the mean of.
    assert not rejected or not put["loss_mask"].values().any()
    assert not trainer.config.algorithm.rollout_correction.bypass_mode


@pytest.mark.parametrize(("masks", "wanted"), [(([1, 1, 1], [1, 0, 0], [0, 0, 0]), 0.35), (([0, 0, 0],) * 3, 0.0)])
def test_the_metric_of_the_kl_off_the_reward_is_of_a_token(module, masks, wanted):
    """Of 0.2 at three tokens and 0.8 at one; a response without a token (TRUNCATED=masked) does not count."""
    from verl import DataProto
    from verl.trainer.ppo.v1 import trainer_base

    kl, mask = torch.tensor([[0.2], [0.8], [0.5]]).expand(3, 3), torch.tensor(masks)
    batch = {"old_log_probs": kl - 1, "ref_log_prob": kl * 0 - 1, "token_level_scores": kl * 0}
    data = DataProto.from_dict(batch | {"response_mask": mask})
    controller = SimpleNamespace(value=0.5, update=lambda **_: None)
    data, metrics = trainer_base.apply_kl_penalty(data, kl_ctrl=controller, kl_penalty="kl")
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(wanted)
    assert torch.allclose(data.batch["token_level_rewards"], -0.5 * kl * mask)


def stack(values: list) -> NonTensorStack:
    return NonTensorStack(*map(NonTensorData, values))


def step_of(module, monkeypatch, **fields):
    """The trainer's metrics of a step whose TransferQueue has ``fields``; the last row is padding."""
    monkeypatch.setattr(module.PPOTrainerSync, "_compute_metrics", lambda self, batch, metrics, *_, **__: None)
    monkeypatch.setattr(module.tq, "kv_batch_get", lambda **_: TensorDict(fields, batch_size=len(fields["uid"])))
    batch = SimpleNamespace(keys=["a", "b", "c"], partition_id="train", tags=[{}, {}, {"is_padding": True}])
    trainer = object.__new__(module.TaskTrainer)
    trainer.config = SimpleNamespace(data={})
    trainer._compute_metrics(batch, metrics := {}, {}, global_steps=1, epoch=0)
    return metrics


def test_a_step_tells_its_answers_and_goes_on_without_them(module, monkeypatch, capsys):
    responses = nested([torch.tensor(ids) for ids in ([1, 2], [1, 2], [3])])
    infos = [{"reward_extra_info": {"acc": acc, "format": 1.0}} for acc in (0.0, 0.0, 1.0)]
    told = step_of(module, monkeypatch, uid=stack(["p", "p", "p"]), responses=responses, extra_fields=stack(infos))
    assert told == {"answers/right": 0.0, "answers/readable": 1.0, "answers/alike": 1.0}
    assert step_of(module, monkeypatch, uid=stack(["p"])) == {}
    assert "the answers of step 1 are not told: " in capsys.readouterr().out


# ---- the first rollouts after a warm-up, and the episodes of a step


@pytest.fixture
def sampled(module, monkeypatch, tmp_path):
    """A function: a trainer in step 1 that has 16 prompts of four samples with these scores."""

    def made(scores: list[dict], anyway: str = "0", length: int = 3):
        own = {"ARTIFACTS": str(tmp_path), "ANYWAY": anyway, "MAX_RESPONSE_LENGTH": "9"}
        for name, value in (VALUES | own).items():
            monkeypatch.setenv(name, value)
        extra = [{"reward_extra_info": each} for each in scores]
        data = TensorDict(
            {
                "uid": NonTensorStack(*(f"prompt {place // 4}" for place in range(len(scores)))),
                "extra_fields": NonTensorStack(*extra),
                "responses": torch.nested.as_nested_tensor([torch.ones(length)] * len(scores), layout=torch.jagged),
            },
            batch_size=[len(scores)],
        )
        monkeypatch.setattr(module.tq, "kv_batch_get", lambda select_fields, **_: data.select(*select_fields))
        trainer = object.__new__(module.TaskTrainer)
        (tmp_path / "run/checkpoints").mkdir(parents=True)
        own = SimpleNamespace(default_local_dir=str(tmp_path / "run/checkpoints"))
        of_data = {"max_response_length": 9, "episode": {"task": "t"}}
        trainer.config = SimpleNamespace(trainer=own, data=OmegaConf.create(of_data), algorithm={})
        trainer.global_steps = 1
        return trainer, SimpleNamespace(
            keys=[f"u_{number}_0" for number in range(len(scores))], partition_id="train", tags=[{}] * len(scores)
        )

    return made


WRONG = {"score": 0.0, "acc": 0.0}


def test_a_warm_up_without_a_right_answer_ends_before_the_first_update(sampled, tmp_path):
    trainer, batch = sampled([WRONG] * 64, length=9)
    with pytest.raises(
        AbortedError, match=r"none of 64 samples is right \(64 cut off\).*; ANYWAY=1 trains all the same"
    ):
        trainer._compute_advantage(batch, {})
    assert json.loads((tmp_path / "run/outcome.json").read_text())["outcome"] == "no signal"


def test_small_steps_are_looked_at_together(sampled, module, monkeypatch):
    trainer, batch = sampled([WRONG] * 32)
    monkeypatch.setattr(module.PPOTrainerSync, "_compute_advantage", lambda *_: batch)
    monkeypatch.setattr(module.tq, "kv_batch_get", _with_masks(module.tq.kv_batch_get))
    trainer._compute_advantage(batch, {})
    trainer.global_steps = 2
    with pytest.raises(AbortedError, match="none of 64 samples is right"):
        trainer._compute_advantage(batch, {})
    trainer._compute_advantage(batch, {})  # once


@pytest.mark.parametrize(("right", "anyway"), [(1, "0"), (0, "1")])
def test_a_right_answer_or_anyway_trains(sampled, module, monkeypatch, right, anyway):
    trainer, batch = sampled([WRONG] * (64 - right) + [{"score": 1.0, "acc": 1.0}] * right, anyway)
    went_on = mock.Mock(side_effect=StopIteration)
    monkeypatch.setattr(module.PPOTrainerSync, "_compute_advantage", went_on)
    monkeypatch.setattr(module.tq, "kv_batch_get", _with_masks(module.tq.kv_batch_get))
    with pytest.raises((StopIteration, RuntimeError)):
        trainer._compute_advantage(batch, {})
    assert went_on.called


def _with_masks(get):
    """``response_mask`` too, which is not what this is about."""
    mask = {"response_mask": SimpleNamespace(values=lambda: torch.ones(1))}
    return lambda select_fields, **more: mask if select_fields == ["response_mask"] else get(select_fields, **more)


def test_the_turns_and_cuts_of_a_steps_episodes_are_metrics(sampled, module, monkeypatch):
    cuts = dict.fromkeys(("cut_length", "cut_turn_length", "cut_observation", "cut_turns", "timeout"), 0.0)
    own = {"turns": 3.0, "tool_errors": 0.0, "failed": 0.0, **cuts}
    trainer, batch = sampled([WRONG | own, WRONG | own | {"turns": 5.0, "cut_turns": 1.0}])
    monkeypatch.setattr(module.PPOTrainerSync, "_compute_metrics", lambda *_, **__: None)
    trainer._compute_metrics(batch, metrics := {}, {}, 1, 0)
    assert (metrics["episode/turns"], metrics["episode/cut_turns"], metrics["episode/cut_length"]) == (4.0, 0.5, 0.0)


# ---- mini-batches: between trainer and workers only the queue and the model are left out


LENGTHS = torch.randint(10, 500, (128,), generator=torch.Generator().manual_seed(0)).sort().values.tolist()
GROUP = 8  # responses a prompt; 16 prompts, in 4 mini-batches


@pytest.fixture
def updating(module, monkeypatch):
    """A trainer in step 1 with a critic, that asks the workers for nothing but updates."""
    small = {"METHOD": "ppo", "TRAIN_BATCH_SIZE": "16", "MINI_BATCH_SIZE": "4", "ROLLOUT_N": str(GROUP), "SEED": "7"}
    s = settings_of("countdown", **small, CRITIC_WARMUP="2")
    made = object.__new__(module.TaskTrainer)
    made.config = verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, "m", Path("/r")))
    made.global_steps, made.use_critic, made.use_reference_policy = 1, True, False
    made.distillation_config = None
    made.tokenizer = SimpleNamespace(eos_token_id=0)
    monkeypatch.setattr(module, "_tensors", lambda batch: batch)  # no fields in a queue
    return made


def taken(extra_info: dict, order: list[int], gpus: int, rank: int, made: list[list[float]]) -> dict:
    """What the worker of GPU ``rank`` does with its part of a batch in that ``order``; its mini-batches' lengths."""
    from verl.utils import tensordict_utils
    from verl.workers.engine_workers import TrainingWorker

    rows = [LENGTHS[row] for row in order]
    part = rows[rank * len(rows) // gpus : (rank + 1) * len(rows) // gpus]
    data = TensorDict({"lengths": torch.tensor(part)}, batch_size=len(part))
    tensordict_utils.assign_non_tensor(data, **extra_info)
    worker = object.__new__(TrainingWorker)
    worker.profiler = mock.Mock()
    worker.engine = SimpleNamespace(
        get_data_parallel_size=lambda: gpus,
        get_data_parallel_rank=lambda: rank,
        train_mode=lambda **_: nullcontext(),
        is_mp_src_rank_with_outputs=lambda: False,
    )
    worker.train_batch = lambda mini: made.append(mini["lengths"].tolist())
    worker.train_mini_batch(data)
    return made


def mean_lengths(updating, part: str, gpus: int) -> list[float]:
    """Of the mini-batches of the actor or the critic; the batch comes as TransferQueue keeps it, short ones first."""
    from transfer_queue import KVBatchMeta
    from verl.utils import tensordict_utils

    tags = [{"seq_len": length} for length in LENGTHS]
    batch = KVBatchMeta(partition_id="train", keys=[str(row) for row in range(len(LENGTHS))], tags=tags)
    updating.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(gpus))})
    batch = updating._balance_batch(batch, {})
    each = [[] for _ in range(gpus)]

    def update(meta):
        for rank in range(gpus):
            taken(meta.extra_info, [int(key) for key in meta.keys], gpus, rank, each[rank])
        metrics = TensorDict({}, batch_size=[])
        tensordict_utils.assign_non_tensor(metrics, metrics={"mfu": [0.0]})
        return SimpleNamespace(get=lambda: metrics) if part == "critic" else metrics

    if part == "critic":
        updating.critic_wg = SimpleNamespace(train_mini_batch=update)
        updating._update_critic(batch, {})
    else:
        updating.actor_rollout_wg.update_actor = update
        updating._update_actor(batch, {})
    assert sorted(length for mine in each for mini in mine for length in mini) == LENGTHS
    return [float(torch.tensor([*chain(*minis)]).float().mean()) for minis in zip(*each, strict=True)]


def spread(lengths: list[float]) -> float:
    assert len(lengths) == 4
    return max(lengths) - min(lengths)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("part", ["actor", "critic"])
def test_mini_batches_are_of_mixed_lengths(updating, part, gpus):
    lengths = mean_lengths(updating, part, gpus)
    assert spread(lengths) < 100
    assert mean_lengths(updating, part, gpus) == lengths
    updating.global_steps = 2
    assert mean_lengths(updating, part, gpus) != lengths
    updating.global_steps, updating.config.data.seed = 1, 8
    assert mean_lengths(updating, part, gpus) != lengths


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_without_shuffling_the_longest_are_trained_last(updating, part):
    """What the shuffling is for."""
    updating.config.actor_rollout_ref.actor.shuffle = updating.config.critic.shuffle = False
    lengths = mean_lengths(updating, part, 1)
    assert spread(lengths) > 300 and lengths == sorted(lengths)


def test_the_policy_is_trained_after_the_critics_warm_up(updating, module):
    trained = {"_update_critic": [], "_update_actor": []}
    steps = ["_balance_batch", "_compute_old_log_prob", "_compute_values", "_compute_advantage"]
    for name in steps:
        setattr(updating, name, lambda batch, metrics: batch)
    for name, seen in trained.items():
        setattr(updating, name, lambda batch, metrics, seen=seen: seen.append(updating.global_steps) or batch)
    batch = SimpleNamespace(extra_info={})
    updating.replay_buffer = SimpleNamespace(sample=lambda **_: (batch, {}))
    updating.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    updating.on_sample_begin = updating.on_sample_end = lambda: None
    for updating.global_steps in range(1, 6):
        updating._step_once({}, {}, 16)
    assert trained == {"_update_critic": [1, 2, 3, 4, 5], "_update_actor": [3, 4, 5]}


# ---- DAPO's bound on verl's own ReplayBuffer, with a store in place of TransferQueue


BATCH = 4


@pytest.fixture(scope="module")
def dapo():
    from verl_tasks.verl_plugins import dynamic_sampling  # here: importing verl takes seconds

    return dynamic_sampling


class Store:
    """What the buffer asks of TransferQueue. ``signal(n)``: whether the n-th prompt's two samples differ."""

    def __init__(self, signal):
        self.signal, self.prompts, self.groups = signal, 0, {}

    def add(self, prompts: int) -> int:
        for _ in range(prompts):
            self.groups[f"p{self.prompts}"] = self.signal(self.prompts)
            self.prompts += 1
        return prompts

    def kv_list(self) -> dict:
        items = {}
        for name in self.groups:
            items[name] = {"is_prompt": True, "status": "finished", "global_steps": 1}
            items |= {f"{name}_{sample}_0": {"seq_len": 3} for sample in range(2)}
        return {"train": items}

    def kv_batch_get(self, keys, partition_id, select_fields) -> dict:
        scores = [float(self.groups[key.split("_")[0]] and key.split("_")[1] == "1") for key in keys]
        return {"extra_fields": [{"reward_extra_info": {"score": score}} for score in scores]}

    def kv_clear(self, partition_id, keys) -> None:
        for key in keys:
            self.groups.pop(key, None)


def step(dapo, monkeypatch, signal, batches: int, steps: int = 1) -> tuple[list[set[str]], list[dict], Store]:
    """The prompts that ``steps`` steps train on, and their metrics."""
    store = Store(signal)
    buffer = dapo.ReplayBuffer(
        "sync",
        {},
        None,
        "drop",
        {},
        poll_interval=0.001,
        refill_fn=store.add,
        filter_groups_metric="score",
        train_batch_size=BATCH,
        gen_batch_size=1,
    )
    dapo.bounded(buffer, batches)
    names = ("kv_list", "kv_batch_get", "kv_clear")
    monkeypatch.setattr(
        "verl.trainer.ppo.v1.replay_buffer.tq", SimpleNamespace(**{name: getattr(store, name) for name in names})
    )
    chosen, metrics = [], []
    for _ in range(steps):
        store.add(BATCH)  # the trainer, at the start of its step
        batch, found = buffer.sample(global_steps=1, partition_id="train", batch_size=BATCH)
        chosen.append({key.split("_")[0] for key in batch.keys})
        metrics.append({name: value for name, value in found.items() if name.startswith("dapo/")})
    return chosen, metrics, store


@pytest.mark.medium
def test_a_batch_has_signal_and_the_metrics_count_what_was_sampled_for_it(dapo, monkeypatch):
    (chosen,), (metrics,), store = step(dapo, monkeypatch, lambda n: n % 2 == 0, batches=10)
    assert len(chosen) == BATCH and all(int(name[1:]) % 2 == 0 for name in chosen)
    assert metrics["dapo/sampled"] == store.prompts > BATCH and metrics["dapo/bound_hit"] == 0
    assert metrics["dapo/sampled"] == metrics["dapo/dropped"] + metrics["dapo/surplus"] + BATCH


def test_without_any_signal_the_bound_fills_the_batch(dapo, monkeypatch):
    """verl's own would sample for ever."""
    (first, second), metrics, store = step(dapo, monkeypatch, lambda n: False, batches=3, steps=2)
    assert len(first) == len(second) == BATCH and not first & second
    assert [each["dapo/bound_hit"] for each in metrics] == [1, 1]  # each step begins with the filter on
    assert all(3 * BATCH <= each["dapo/sampled"] <= 4 * BATCH for each in metrics)
    assert store.prompts == sum(each["dapo/sampled"] for each in metrics)


@pytest.mark.medium
@pytest.mark.parametrize("batches", [0, -1])
def test_a_bound_that_is_not_positive_is_none_as_in_verl(dapo, monkeypatch, batches):
    (chosen,), (metrics,), _ = step(dapo, monkeypatch, lambda n: n % 8 == 0, batches)
    assert len(chosen) == BATCH and all(int(name[1:]) % 8 == 0 for name in chosen)
    assert metrics["dapo/bound_hit"] == 0 and metrics["dapo/sampled"] > 3 * BATCH


def test_all_with_signal_samples_one_batch(dapo, monkeypatch):
    _, (metrics,), store = step(dapo, monkeypatch, lambda n: True, batches=10)
    assert store.prompts == BATCH
    assert metrics == {"dapo/sampled": BATCH, "dapo/dropped": 0, "dapo/surplus": 0, "dapo/bound_hit": 0}


def test_a_group_of_one_reward_is_dropped_though_its_mean_rounds(dapo, monkeypatch):
    """Of 3 x 0.1 NumPy finds a mean above 0.1, and so a standard deviation that is not 0."""
    import numpy as np

    assert np.std([0.1] * 3) > 0
    buffer = dapo.ReplayBuffer("sync", {}, None, "drop", {}, refill_fn=int, filter_groups_metric="score")
    scores = {"equal": [0.1] * 3, "other": [0.1, 0.1, 0.2]}
    groups = {f"{name}_{sample}_0": score for name, each in scores.items() for sample, score in enumerate(each)}
    buffer.partitions["train"], buffer.finished_keys["train"] = dict.fromkeys(groups), set(scores)
    asked = lambda keys, **_: {"extra_fields": [{"reward_extra_info": {"score": groups[key]}} for key in keys]}  # noqa: E731
    monkeypatch.setattr("verl.trainer.ppo.v1.replay_buffer.tq", SimpleNamespace(kv_batch_get=asked))
    assert buffer._dapo_filtered_keys("train")[0] == {"equal"}
