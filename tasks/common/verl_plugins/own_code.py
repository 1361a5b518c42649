"""verl 0.9.1's reward workers run the Python code that comes with a tokenizer, whatever its config says: no longer.

experimental/reward_loop/reward_loop.py:125,129. Test: tests/test_shared_runs.py.
"""

from unittest import mock

from verl.experimental.reward_loop import reward_loop

from verl_tasks.verl_plugins.expect import expect

expect(
    reward_loop.RewardLoopWorker._init_reward_fn,
    "hf_tokenizer(input_tokenizer_local_path, trust_remote_code=True)",
    "hf_tokenizer(reward_model_tokenizer_local_path, trust_remote_code=True)",
)
_init_reward_fn, _hf_tokenizer = reward_loop.RewardLoopWorker._init_reward_fn, reward_loop.hf_tokenizer


def init_reward_fn(self) -> None:
    """As verl's, but only the policy's tokenizer may bring code, and only where the policy's config allows it."""
    policy = self.config.actor_rollout_ref
    trusted = policy.model.get("trust_remote_code", False)
    rewarding = self.config.reward.reward_model.model_path

    def tokenizer(path, trust_remote_code):
        return _hf_tokenizer(path, trust_remote_code=trusted and path != rewarding)

    with mock.patch.object(reward_loop, "hf_tokenizer", tokenizer):
        _init_reward_fn(self)


reward_loop.RewardLoopWorker._init_reward_fn = init_reward_fn
