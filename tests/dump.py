"""Records what the real trainer computes, for tests/test_numerics.py; loaded by VERL_USE_EXTERNAL_MODULES=tests.dump.

Writes .npz files into the folder DUMP_FOLDER: update-*.npz, the batch that the actor is trained on, and loss-*.npz,
every call of a policy loss. Arrays are padded to the right; what is padding, response_mask tells.
"""

import functools
import itertools
import os
from pathlib import Path

import numpy as np
import torch
import transfer_queue as tq
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

FOLDER = Path(os.environ["DUMP_FOLDER"])
FIELDS = ["prompts", "responses", "response_mask", "rm_scores", "old_log_probs", "entropy", "advantages"]
FIELDS += ["rollout_log_probs"]
_number = itertools.count()


def array(value) -> np.ndarray:
    if not isinstance(value, torch.Tensor):
        return np.array(value)
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def save(kind: str, **values) -> None:
    """Write ``values`` (tensors, texts, numbers) as one file, without those that are None."""
    arrays = {name: array(value) for name, value in values.items() if value is not None}
    arrays |= {f"{name}_dtype": str(value.dtype) for name, value in values.items() if isinstance(value, torch.Tensor)}
    FOLDER.mkdir(parents=True, exist_ok=True)
    np.savez(FOLDER / f"{kind}-{os.getpid()}-{next(_number):03}.npz", **arrays)


def padded(batch, *names: str) -> dict[str, torch.Tensor]:
    """The fields ``names`` of ``batch`` in the TransferQueue, each of shape (responses, longest)."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))
    lengths = {f"{name}_length": data[name].offsets().diff() for name in ("prompts", "responses") if name in names}
    return {name: data[name].to_padded_tensor(0) for name in names} | lengths


_update_actor = PPOTrainer._update_actor


@functools.wraps(_update_actor)
def update_actor(self, batch, metrics):
    verls = {}
    if batch.extra_info["on_policy"]:  # verl's own pass, beside what the update measures
        PPOTrainer._compute_old_log_prob(self, batch, verls)
    uid = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["uid"])["uid"]
    before = padded(batch, *FIELDS, *(["teacher_logprobs"] if self.use_teacher_policy else []))
    if batch.extra_info["on_policy"]:  # and its correction, beside what the update computes
        data = DataProto.from_dict({n: before[n] for n in ("response_mask", "old_log_probs", "rollout_log_probs")})
        verls |= compute_rollout_correction_and_add_to_batch(data, self.config.algorithm.rollout_correction)[1]
    again = {}
    if settings := self.config.trainer.v1.get("egpo"):
        # The same batch by GRPO, by EGPO with λ = 0, and last as it is trained on.
        PPOTrainer._compute_advantage(self, batch, {})
        again["grpo"] = padded(batch, "advantages")["advantages"]
        weight, settings.egpo_lambda = settings.egpo_lambda, 0.0
        self._compute_advantage(batch, {})
        again["lambda_0"] = padded(batch, "advantages")["advantages"]
        settings.egpo_lambda = weight
        self._compute_advantage(batch, {})
        again["repeated"] = padded(batch, "advantages")["advantages"]
    verls = {name.replace("/", "_"): np.array(value) for name, value in verls.items()}
    save("update", uid=np.array([str(name) for name in uid]), **before, **again, **verls)
    return _update_actor(self, batch, metrics)


PPOTrainer._update_actor = update_actor


def recorded(name: str, loss_function):
    """``loss_function``, which writes down each of its calls."""

    @functools.wraps(loss_function)
    def wrapper(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        loss, metrics = loss_function(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
        )
        clip = {key: config.get(key) for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
        counts = {key: value for key, value in config.global_batch_info.items() if value is not None}
        tensors = {
            "old_log_prob": old_log_prob,
            "log_prob": log_prob,
            "advantages": advantages,
            "response_mask": response_mask,
            "rollout_is_weights": rollout_is_weights,
        }
        save("loss", loss_mode=name, loss_agg_mode=loss_agg_mode, loss=loss, **clip, **counts, **tensors)
        return loss, metrics

    return wrapper


for _name, _function in list(core_algos.POLICY_LOSS_REGISTRY.items()):
    core_algos.POLICY_LOSS_REGISTRY[_name] = recorded(_name, _function)
