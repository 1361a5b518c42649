"""vLLM's engine and its worker wait for each other asleep; forked.py imports this before their processes fork.

vLLM 0.30's readers spin for a second after each message (shm_broadcast.py:112), longer than a step of a small model
takes: while the worker computes, its engine keeps one of the cores busy that the worker's threads share.
"""

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.worker import cpu_worker  # noqa: F401  (what both need)

from verl_tasks.verl_plugins.expect import expect

expect(SpinCondition.__init__, "busy_loop_s: float = 1,", "self.busy_loop_s = busy_loop_s")
expect(SpinCondition.wait, "if current_time <= self.last_read + self.busy_loop_s:", "self.poller.poll(")
SpinCondition.__init__.__defaults__ = (0,)
