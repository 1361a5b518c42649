"""verl 0.6.1 runs the Python code that comes with a tokenizer, whatever its config says: no longer.

experimental/agent_loop/agent_loop.py:281,282 and experimental/reward/reward_manager.py:40. tests/test_a100_stack.py
loads it.
"""

from verl.experimental.agent_loop import agent_loop
from verl.experimental.reward import reward_manager

from verl_tasks.verl_plugins.expect import expect

expect(
    agent_loop.AgentLoopWorkerBase.__init__,
    "hf_tokenizer(local_path, trust_remote_code=True)",
    "hf_processor(local_path, trust_remote_code=True)",
)
expect(
    reward_manager.RewardManagerWorker.__ray_metadata__.modified_class._init_reward_fn,
    "hf_tokenizer(input_tokenizer_local_path, trust_remote_code=True)",
)


def _without_code(load):
    return lambda path, **kwargs: load(path, **{**kwargs, "trust_remote_code": False})


agent_loop.hf_tokenizer = reward_manager.hf_tokenizer = _without_code(agent_loop.hf_tokenizer)
agent_loop.hf_processor = _without_code(agent_loop.hf_processor)
