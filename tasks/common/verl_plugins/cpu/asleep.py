"""vLLM's engine and its worker wait for each other asleep; forked.py imports this before their processes fork.

vLLM 0.30's readers spin for a second after each message (shm_broadcast.py:112), longer than a step of a small model
takes: while the worker computes, its engine keeps one of the cores busy that the worker's threads share.
"""

import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.worker import cpu_worker  # noqa: F401  (what both need)

from verl_tasks.verl_plugins.expect import expect

expect(SpinCondition.__init__, "busy_loop_s: float = 1,", "self.busy_loop_s = busy_loop_s", "setsockopt(zmq.SNDHWM, 1)")
expect(SpinCondition.wait, "if current_time <= self.last_read + self.busy_loop_s:", "self.poller.poll(")
SpinCondition.__init__.__defaults__ = (0,)
_notify = SpinCondition.notify


def notify(self) -> None:
    """vLLM's, for each message. Its socket holds one at a time and drops the next. For a millisecond after the last it
    does not look whether that one is gone, and a reader that sleeps would look by itself only after 5 s."""
    self.local_notify_socket.getsockopt(zmq.EVENTS)  # it looks
    _notify(self)


SpinCondition.notify = notify
