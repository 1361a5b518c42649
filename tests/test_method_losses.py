"""Each method's advantages and loss by verl's own functions under its composed config, against NumPy, on made numbers.

Ratios lie on both sides of every clip range. On batches of real trainings: test_numerics.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.test_verl_config import settings_of
from verl_tasks.training import verl_config

GROUPS, N, TOKENS, LIMIT = 3, 4, 6, 20


@pytest.fixture(scope="module")
def made() -> dict[str, np.ndarray]:
    """Scores, log-probs before and now, and the mask of 12 responses of 1 to 6 tokens; one has none that counts."""
    rng = np.random.default_rng(0)
    rows = GROUPS * N
    lengths = rng.integers(1, TOKENS + 1, rows)
    mask = np.arange(TOKENS) < lengths[:, None]
    mask[5] = False  # TRUNCATED=masked
    old = -rng.random((rows, TOKENS)) - 3
    return {
        "scores": rng.random(rows),
        "old": old,
        "new": old + rng.normal(0, 1.2, old.shape),
        "mask": mask,
        "uid": np.repeat([f"p{i}" for i in range(GROUPS)], N),
    }


def of_verl(method: str, made: dict, monkeypatch) -> tuple[np.ndarray, float]:
    """Advantages and loss as verl computes them under the config of ``method``."""
    from verl import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
    from verl.utils.config import omega_conf_to_dataclass

    s = settings_of("countdown", monkeypatch, METHOD=method, MAX_RESPONSE_LENGTH=str(LIMIT))
    config = verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, "some/model", Path("/r")))
    mask = torch.tensor(made["mask"], dtype=torch.float64)
    rewards = torch.zeros_like(mask)
    rewards[:, -1] = torch.tensor(made["scores"])  # verl sums over the tokens
    data = DataProto.from_dict(
        {"token_level_rewards": rewards, "response_mask": mask}, non_tensors={"uid": made["uid"].astype(object)}
    )
    found = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=[f"{uid}_{row}_0" for row, uid in enumerate(made["uid"])],
        adv_estimator=config.algorithm.adv_estimator,
        norm_adv_by_std_in_grpo=config.algorithm.norm_adv_by_std_in_grpo,
        config=config.algorithm,
    )
    advantages = found.batch["advantages"]
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    tokens, rows = int(mask.sum()), len(mask)
    actor.global_batch_info.update(
        dp_size=1, batch_num_tokens=tokens, global_batch_size=rows, loss_scale_factor=actor.loss_scale_factor
    )
    loss, _ = core_algos.get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=torch.tensor(made["old"]),
        log_prob=torch.tensor(made["new"]),
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
    )
    return advantages.numpy(), float(loss)


def by_group(made: dict, advantage) -> np.ndarray:
    groups = made["scores"].reshape(GROUPS, N)
    return np.concatenate([advantage(group) for group in groups])[:, None] * made["mask"]


def clipped(made: dict, a: np.ndarray, low: float = 0.2, high: float = 0.2) -> np.ndarray:
    """Minus PPO's objective of each token, with the dual clip."""
    ratio = np.exp(made["new"] - made["old"])
    objective = np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)
    return -np.where(a < 0, np.maximum(objective, 3 * a), objective) * made["mask"]


def normed(scores: np.ndarray) -> np.ndarray:
    return (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)


def centred(scores: np.ndarray) -> np.ndarray:
    return scores - scores.mean()


def whitened(made: dict) -> np.ndarray:
    """Minus the group's mean, then by mean and standard deviation of the batch's tokens."""
    values, mask = by_group(made, centred), made["mask"]
    return (values - values[mask].mean()) / np.sqrt(values[mask].var(ddof=1) + 1e-8) * mask


def references(method: str, made: dict) -> tuple[np.ndarray, float]:
    """The same by the formulas of the papers."""
    mask, rows = made["mask"], len(made["mask"])
    tokens = mask.sum()
    a = {
        "dr_grpo": lambda: by_group(made, centred),
        "rloo": lambda: by_group(made, lambda r: r - (r.sum() - r) / (N - 1)),
        "reinforce_pp": lambda: whitened(made),
    }.get(method, lambda: by_group(made, normed))()
    if method == "dapo":
        return a, clipped(made, a, 0.2, 0.28).sum() / tokens
    if method == "dr_grpo":
        return a, clipped(made, a).sum() / LIMIT / rows
    if method == "cispo":
        return a, -(np.clip(np.exp(made["new"] - made["old"]), 0, 5) * a * made["new"] * mask).sum() / tokens
    return a, clipped(made, a).sum() / tokens


@pytest.mark.parametrize("method", ["grpo", "dapo", "dr_grpo", "cispo", "rloo", "reinforce_pp"])
def test_advantages_and_loss_are_those_of_the_papers(method, made, monkeypatch):
    ratio = np.exp(made["new"] - made["old"])[made["mask"]]
    assert (ratio < 0.8).any() and ((ratio > 1.2) & (ratio < 1.28)).any() and (ratio > 5).any()
    advantages, loss = of_verl(method, made, monkeypatch)
    wanted, wanted_loss = references(method, made)
    assert np.abs(advantages - wanted).max() < 1e-5 and np.abs(wanted).max() > 0.1
    assert loss == pytest.approx(wanted_loss, rel=1e-4) and abs(loss) > 1e-3


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("n", [7, 8])
def test_equal_rewards_teach_nothing(method, n, monkeypatch):
    """Also where the mean of their float32 is another number than each; a group of others keeps its advantages."""
    from verl.trainer.ppo import core_algos

    import verl_tasks.verl_plugins.patches  # noqa: F401

    name = {"dr_grpo": "grpo"}.get(method, method)
    options = {"norm_adv_by_std_in_grpo": False} if method == "dr_grpo" else {}
    estimate = core_algos.get_adv_estimator_fn(name)
    verls_own, rounded = estimate.__wrapped__, 0
    assert core_algos.compute_grpo_outcome_advantage is core_algos.get_adv_estimator_fn("grpo")  # verl calls both
    for reward in torch.arange(1, 10) / 10:
        rewards, mask = torch.zeros(2 * n + 1, 3), torch.ones(2 * n + 1, 3)
        rewards[:n, 1], rewards[n : 2 * n, 2] = reward, torch.arange(n) / 10
        rewards[-1, 0] = 0.3  # a group of one
        prompts = np.array(["equal"] * n + ["other"] * n + ["alone"], dtype=object)
        before, _ = verls_own(rewards, mask, index=prompts, **options)
        after, _ = estimate(rewards, mask, index=prompts, **options)
        assert not after[:n].any() and torch.equal(after[n:], before[n:]) and after[n:].abs().max() > 0.2
        rounded += bool(before[:n].any())
    assert rounded
