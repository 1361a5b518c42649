"""The trainer of every RL method: verl's synchronous one (verl/trainer/ppo/v1/trainer_sync.py), with a checked reward.
async_trainer.py and separate_trainer.py have the asynchronous ones.

launch/plan.py has every verl process load it.
"""

import copy
import functools
import os
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer, trainer_base, utils
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.profiler import marked_timer
from verl.utils.torch_functional import masked_mean
from verl.utils.transferqueue_utils import kv_batch_meta2batch_meta
from verl.workers.engine.fsdp import transformer_impl

import verl_tasks.verl_plugins.patches  # noqa: F401
from verl_tasks.alive import failed, saves, waits_for
from verl_tasks.ends import CUT, cut_key, step_metrics
from verl_tasks.machine import hardware
from verl_tasks.machine.memory import GIB
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.episode import turn_texts
from verl_tasks.runs.checkpoint import FirstSave
from verl_tasks.runs.health import NO_SIGNAL, WITHOUT, Health, abort, aborted_by, no_signal
from verl_tasks.runs.run import Followed, ends_run, prune
from verl_tasks.settings import load_settings
from verl_tasks.text import one_line
from verl_tasks.verl_plugins import answers, on_policy, one_update, zero_advantage
from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.staleness import VERSIONS

# verl marks a prompt whose reward raised as failed, and trains on padding instead.
expect(AgentLoopWorkerTQ.__ray_actor_class__._run_prompt, 'status = "failure"', "self._run_agent_loop(")
# A disk that is full for the samples, which people only look at, ends a training.
expect(PPOTrainer._dump_generations, "self._write_generations,", "f.result()  # re-raises if the write failed")
expect(PPOTrainer._log_rollout_data, 'reward_extra_infos_dict = {"uid": [batch.keys[i] for i in sorted_indices]}')
expect(PPOTrainer._write_generations, 'filename = os.path.join(dump_path, f"{global_steps}.jsonl")')
expect(PPOTrainer._compute_metrics, "moe_lb_metrics_interval", "global_steps")
expect(PPOTrainer._setup, "partial(value_loss, config=critic_cfg)")
# verl keeps the newest checkpoints (max_actor_ckpt_to_keep), and ignores the validations.
expect(
    PPOTrainer.fit,
    "self.on_step_end()",
    "val_metrics: dict = self._validate()",
    "and self.global_steps <= self.total_training_steps:",
)
expect(ReplayBuffer.sample, "self._sync_metadata_from_transfer_queue()")
expect(ReplayBuffer._sync_metadata_from_transfer_queue, "self.failure_keys[partition_id].add(key)")

trainer_base.value_loss = on_policy.value_loss

# verl reads an episode's advantage at a token of its last sequence, where ROLLOUT_CORRECTION=sequence may leave none.
expect(
    utils.compute_advantage_for_multi_trajectories,
    "final_data = compute_advantage(\n        data.select_idxs(final_indices),",
    'first_nnz_indices = final_data.batch["response_mask"].argmax(dim=1)',
    'scores = scores.unsqueeze(-1) * data.batch["response_mask"]',
)
expect(transformer_impl.FSDPEngine.forward_backward_batch, 'batch_num_tokens = data["loss_mask"].sum()')
expect(trainer_base.apply_kl_penalty, "current_kl = masked_mean(kld, mask=response_mask, axis=-1)")
_compute_advantage, _apply_kl_penalty = utils.compute_advantage, trainer_base.apply_kl_penalty


def compute_advantage(data, adv_estimator, **how):
    """verl's. Of GRPO ``data`` are copies of the last sequences: each gets its advantage at every token."""
    if adv_estimator == core_algos.AdvantageEstimator.GRPO:
        data.batch["response_mask"] = torch.ones_like(data.batch["response_mask"])
    return _compute_advantage(data, adv_estimator, **how)


def apply_kl_penalty(data, kl_ctrl, kl_penalty="kl"):
    """verl's; its metric is nats a token, as kl_loss: without a token (TRUNCATED=masked) verl counts 0."""
    data, metrics = _apply_kl_penalty(data, kl_ctrl, kl_penalty)
    kl = core_algos.kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty)
    return data, metrics | {"actor/reward_kl_penalty": masked_mean(kl, data.batch["response_mask"]).item()}


utils.compute_advantage, trainer_base.apply_kl_penalty = compute_advantage, apply_kl_penalty

AgentLoopWorker = AgentLoopWorkerTQ.__ray_actor_class__
_run_agent_loop = AgentLoopWorker._run_agent_loop


def cause(error: BaseException) -> BaseException:
    """What was raised in another process of Ray, whose own error's text is a traceback."""
    return getattr(error, "cause", error)


async def run_agent_loop(self, *args, **kwargs):
    """verl's; the launcher shows the error that ends the training."""
    try:
        return await _run_agent_loop(self, *args, **kwargs)
    except Exception as error:
        failed(cause(error))
        raise


AgentLoopWorker._run_agent_loop = run_agent_loop

POLL_SECONDS = 0.2  # verl checks every 2 s whether the rollouts are complete
LOG_SECONDS = 2  # for Ray to bring the reason from another process to the log


class GroupFailed(RuntimeError):
    """A prompt has no samples or no rewards; ``run_agent_loop`` has told the reason."""


class CheckedTrainer(PPOTrainer):
    """It saves a checkpoint and ends when a reward fails.

    It learns nothing from such a step: the same command repeats it. A validated step is saved too; the best ones stay,
    and PATIENCE ends the run.
    """

    MODE = "sync"  # of verl's trainer
    reads_entropy = False  # needs the entropy before the update
    parameter_sync_step = 1  # mini-batches that are drawn one by one: verl's own, of its separate_async trainer
    _on_policy = False  # this step skips the pass for the old log-probs
    _complete = 0, None  # the last step that this process trained, and the state of its data then
    _saved = 0
    _first: tuple["Sample", ...] = ()  # the responses of the first steps, until there are NO_SIGNAL
    _broken = None  # what ABORT_ON says of the last step
    _told = None  # of each episode of this step, by verl's key: its scores, and what was said

    @property
    def run_dir(self) -> Path:
        return Path(self.config.trainer.default_local_dir).parent

    @functools.cached_property
    def _first_save(self) -> FirstSave:
        return FirstSave()

    @functools.cached_property
    def _limits(self) -> dict[str, float]:
        """GiB of RAM and of a GPU of this machine, for the health rule of memory."""
        limits = {"perf/cpu_memory_limit_gb": hardware.ram()[1] / GIB}
        if (found := hardware.nvidia()) and (totals := [gpu.total for gpu in found.gpus if gpu.total]):
            limits["perf/gpu_memory_limit_gb"] = min(totals) / GIB
        return limits

    @functools.cached_property
    def _followed(self) -> Followed:
        if not os.environ.get("ABORT_ON"):
            return Followed(self.run_dir)
        health = Health(load_settings())

        def look(step: int, row: dict) -> None:
            self._broken = aborted_by(health.findings(step, row), health.s)

        return Followed(self.run_dir, look)

    # verl/trainer/ppo/v1/trainer_base.py compares the mode with the literal "sync".
    @property
    def trainer_mode(self) -> str:
        return self.MODE

    @trainer_mode.setter
    def trainer_mode(self, name: str) -> None:
        pass

    def init(self):
        waits_for("verl's workers and vLLM's servers to start")
        super().init()

    def on_step_begin(self):
        waits_for(f"the samples and rewards of step {self.global_steps}")
        self.local_trigger_step = 0  # verl's own is still the last step's
        self._first_save.begin()
        self._abort_on_broken_rule()
        super().on_step_begin()

    def _abort_on_broken_rule(self) -> None:
        """End with a checkpoint when the last step broke a rule of ABORT_ON.

        verl skips an optimizer step with a gradient that is not finite (fsdp/transformer_impl.py, optimizer_step), so
        the saved weights are those before it.
        """
        self._followed.scores()
        found, self._broken = self._broken, None
        if found and self._complete[0]:  # after a resume: not at once again
            self._save_complete_step()
            abort(self.run_dir, f"ABORT_ON={found}")

    def on_step_end(self):
        self._complete = self.global_steps, copy.deepcopy(self.train_dataloader.state_dict())
        every = self.config.trainer.test_freq
        validates = every > 0 and self.global_steps % every == 0
        if (validates or self._first_save.due()) and self._saved != self.global_steps:
            with marked_timer("save_checkpoint", self.timing_raw, color="green"):
                self._save_checkpoint()  # here as where verl saves, the engine sleeps
        super().on_step_end()

    def _save_checkpoint(self):
        super()._save_checkpoint()
        prune(self.run_dir, int(os.environ["KEEP"]), self._followed.scores())
        self._saved, self._first_save.saved = self.global_steps, True

    def _validate(self):
        found = super()._validate()
        patience, scores = int(os.environ["PATIENCE"]), self._followed.scores()
        if ends_run(self.run_dir, self.global_steps, found, patience, scores):
            self.total_training_steps = self.global_steps  # verl's loop ends when this step is logged
        return found

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        try:
            metrics.update(self._answers(_samples(batch)))
        except Exception as error:  # the training needs none of them
            print(f"the answers of step {global_steps} are not told: {one_line(str(error), 300)}", flush=True)

    def _answers(self, samples: list["Sample"]) -> dict[str, float]:
        """What a step's responses were worth, and in a multi-turn task how its episodes went."""
        prompts, responses, rewards, _ = ([*column] for column in zip(*samples, strict=True))
        found = answers.figures(prompts, responses, rewards)
        return found | (step_metrics([*filter(None, rewards)]) if self.config.data.get("episode") else {})

    # With what was said in turn, which an episode's text does not tell: a model can write what stands between turns.
    def _log_rollout_data(self, batch, timing_raw, rollout_data_dir):
        if self.config.data.get("episode"):
            try:
                self._told = self._episodes(batch)
            except Exception as error:  # only people look at them
                print(f"the episodes of step {self.global_steps} are not told: {one_line(str(error), 300)}", flush=True)
        super()._log_rollout_data(batch, timing_raw, rollout_data_dir)

    def _episodes(self, batch) -> dict[str, dict]:
        data = fields_of(batch, "responses", "response_mask", "extra_fields")
        texts = data["responses"].unbind(), data["response_mask"].unbind()
        rows = zip(batch.keys, *texts, data["extra_fields"], strict=True)
        return {
            key: (more.get("reward_extra_info") or {})
            | {"turns": turn_texts(self.tokenizer, ids.tolist(), mask.tolist())}
            for key, ids, mask, more in rows
        }

    def _dump_generations(self, inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path):
        told, self._told = self._told, None
        rows = [told[uid] for uid in reward_extra_infos_dict["uid"]] if told else []
        more = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
        super()._dump_generations(inputs, outputs, gts, scores, {**reward_extra_infos_dict, **more}, dump_path)

    @staticmethod
    def _write_generations(inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path, global_steps):
        try:
            PPOTrainer._write_generations(
                inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path, global_steps
            )
        except (OSError, ValueError) as error:  # verl would end the training
            print(f"the samples of step {global_steps} were not written: {one_line(str(error), 300)}", flush=True)

    def _build_replay_buffer(self):
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = POLL_SECONDS
        look = buffer._sync_metadata_from_transfer_queue

        def look_for_failures():
            look()
            failed = sum(map(len, buffer.failure_keys.values()))
            if failed:
                self._save_complete_step()
                time.sleep(LOG_SECONDS)
                raise GroupFailed(f"step {self.global_steps}: {failed} prompts failed; the reason is further up")

        buffer._sync_metadata_from_transfer_queue = look_for_failures
        return buffer

    # _tensors: else the workers also fetch each row's chat and reward details as Python objects, about a quarter of
    # their time (1,024 rollouts of a small model).
    def _compute_old_log_prob(self, batch, metrics):
        alone = self.parameter_sync_step == 1 and not self.reads_entropy
        self._on_policy = alone and one_update.applies(self.config, len(batch))
        if self._on_policy:
            return batch
        # Only the metric actor/entropy reads the mode there: nats per token, whatever the loss's mode.
        policy = self.config.actor_rollout_ref
        with on_policy.set_to(policy.actor, "loss_agg_mode", "token-mean"):
            return super()._compute_old_log_prob(_tensors(batch), metrics)

    def _compute_advantage(self, batch, metrics):
        if os.environ.get("ANYWAY") == "0" and (self.global_steps == 1 or self._first):
            self._check_signal(batch)
        correction = self.config.algorithm.get("rollout_correction")
        # TRUNCATED=masked, all responses cut off
        none = not fields_of(batch, "response_mask")["response_mask"].values().any()
        # verl's option for "no old log-probs to compare the engine's with"
        skip = correction and (self._on_policy or none)
        with on_policy.set_to(correction, "bypass_mode", True) if skip else nullcontext():
            found = super()._compute_advantage(batch, metrics)
        if correction and correction.get("rollout_rs") and not skip:
            # verl takes rejected responses out of response_mask, and counts a mini-batch's tokens by the other.
            mask = fields_of(batch, "response_mask").rename_key_("response_mask", "loss_mask")
            tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=mask)
        return found

    def _check_signal(self, batch) -> None:
        """End, by NO_SIGNAL samples of the first steps, where the warm-up gives RL nothing to learn from."""
        limit = self.config.data.max_response_length
        self._first += tuple(each for each in _samples(batch) if {"acc", "score"} <= each.reward.keys())
        if len(self._first) < NO_SIGNAL:
            return
        groups, responses, scores, _ = zip(*self._first, strict=True)
        ends = [[reward[cut_key(end)] for end in CUT if cut_key(end) in reward] for reward in scores]
        cut = [any(of) if of else len(response) >= limit for of, response in zip(ends, responses, strict=True)]
        self._first = ()
        if reason := no_signal([*scores], [*groups], cut, load_settings()):
            abort(self.run_dir, f"{reason}; ANYWAY=1 trains all the same", WITHOUT)

    def _compute_values(self, batch, metrics):
        return super()._compute_values(_tensors(batch), metrics)

    # A batch is in the order of completion, the longest responses last. verl shuffles it into mini-batches
    # (actor.shuffle) with one seed for all steps.
    def _shuffled(self, part):
        return on_policy.set_to(part, "data_loader_seed", self.config.data.seed + self.global_steps)

    def _update_critic(self, batch, metrics):
        with self._shuffled(self.config.critic):
            return super()._update_critic(_tensors(batch), metrics)

    def _update_actor(self, batch, metrics):
        waits_for(f"the update of step {self.global_steps}")
        policy, update = self.config.actor_rollout_ref, {}
        batch.extra_info[one_update.ON_POLICY] = self._on_policy
        batch.extra_info[one_update.CAP] = one_update.cap(self.config)
        batch.extra_info[zero_advantage.ALLOWED] = zero_advantage.applies(self.config)
        entropy = self._on_policy or policy.actor.calculate_entropy
        with self._shuffled(policy.actor), on_policy.set_to(policy.actor, "calculate_entropy", entropy):
            batch = super()._update_actor(_tensors(batch), update)
        metrics.update(on_policy.taken_out(update) | self._limits)
        return batch

    def _compute_ref_log_prob(self, batch, metrics):
        batch = super()._compute_ref_log_prob(_tensors(batch), metrics)
        # trainer_base.py:1704 leaves it in the batch, for the critic, which has no adapter to leave out.
        batch.extra_info.pop("no_lora_adapter", None)
        return batch

    def _compute_reward_colocate(self, batch, metrics=None):
        try:
            batch = super()._compute_reward_colocate(batch, metrics)
            if not torch.isfinite(fields_of(batch, "rm_scores")["rm_scores"].values()).all():
                raise RewardError("a score is not a finite number")
        except Exception as error:
            self._save_complete_step()
            reason = f"{type(cause(error)).__name__}: {one_line(str(cause(error)), 300)}"
            model = self.config.reward.reward_model.model_path
            ends = RewardError(f"REWARD_MODEL={model} gave no reward: {reason}")
            failed(ends)
            raise ends from error
        return batch

    def _save_complete_step(self) -> None:
        """Save the last trained step, if its weights are still the current ones and it is not saved already."""
        step, data = self._complete
        if step <= self._saved or (step < self.global_steps and self.local_trigger_step):
            return
        print(f"saving step {step} before the end", flush=True)
        saves()
        try:
            self.checkpoint_manager.abort_replicas()  # other prompts may still be sampled
            self.checkpoint_manager.sleep_replicas()  # as when verl saves: the GPU has no room for both
        except Exception as error:
            print(f"the engine cannot sleep: {error}", flush=True)
        self._rewind(data)
        now, self.global_steps = self.global_steps, step
        self._save_checkpoint()
        self.global_steps = now

    def _rewind(self, data: dict) -> None:
        """The next step's prompts were already drawn; a resume must draw them again. ``data``: the state before it."""
        self.train_dataloader = SimpleNamespace(state_dict=lambda: data)


@register_trainer("task")
class TaskTrainer(CheckedTrainer, PPOTrainerSync):
    """verl's synchronous trainer: a step samples its own prompts, all of them."""


class Sample(NamedTuple):
    """A response of a step: its prompt's id, its tokens, what its reward returned, and by which versions of the policy
    it was sampled (staleness.py; none in a synchronous training)."""

    prompt: str
    response: tuple[int, ...]
    reward: dict
    versions: list[tuple[int, int]]


def _samples(batch: KVBatchMeta) -> list[Sample]:
    """The responses of a step, without verl's padding; of a program's sequences (keys uid_session_number) one."""
    data = fields_of(batch, "uid", "responses", "extra_fields")
    columns = list(data["uid"]), data["responses"].unbind(), list(data["extra_fields"]), batch.tags
    found = {
        key.rpartition("_")[0] or key: Sample(
            uid, tuple(ids.tolist()), extra.get("reward_extra_info") or {}, extra.get(VERSIONS) or []
        )
        for key, uid, ids, extra, tag in zip(batch.keys, *columns, strict=True)
        if not tag.get("is_padding", False)
    }
    return [*found.values()]


def fields_of(batch: KVBatchMeta, *names: str):
    """The fields ``names`` of a batch in TransferQueue, as a TensorDict."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*names])


def _tensors(batch: KVBatchMeta) -> KVBatchMeta:
    """``batch`` with only its tensor fields in TransferQueue."""
    schema = kv_batch_meta2batch_meta(batch).field_schema
    batch.fields = [name for name, field in schema.items() if not field["is_non_tensor"]]
    return batch
