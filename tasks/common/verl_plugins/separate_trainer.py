"""ASYNC=separate: verl's trainer whose GPUs train while others sample (verl/trainer/ppo/v1/trainer_separate_async.py).

launch/plan.py has every verl process load it.
"""

import logging
import time

import ray
from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync, register_trainer, trainer_separate_async
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from verl_tasks.verl_plugins.async_trainer import OlderSamples
from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.staleness import VersionedClient

SAMPLER, TRAINER = "idle/sampler", "idle/trainer"

# Where level INFO is on, its message that no engine is on the trainers' GPUs raises TypeError: `flush` is print's.
expect(PPOTrainerSeparateAsync._setup, "logger.info(", "flush=True,", "LLMServerManager = LLMServerManager.create(")
trainer_separate_async.logger.setLevel(logging.WARNING)


class IdleClock(GlobalRequestLoadBalancer):
    """verl's, which also counts the seconds in which a server has no request."""

    def __init__(self, servers, *args, **kwargs):
        super().__init__(servers, *args, **kwargs)
        self._idle, self._since = 0.0, dict.fromkeys(servers, time.monotonic())

    def acquire_server(self, *args, **kwargs):
        server, handle = super().acquire_server(*args, **kwargs)
        now = time.monotonic()
        self._idle += now - self._since.pop(server, now)
        return server, handle

    def release_server(self, server_id, *args, **kwargs):
        super().release_server(server_id, *args, **kwargs)
        if not self._inflight_requests.get(server_id):
            self._since.setdefault(server_id, time.monotonic())

    def idle_seconds(self) -> float:
        """Since the start, the mean of the servers."""
        now = time.monotonic()
        return (self._idle + sum(now - since for since in self._since.values())) / max(1, len(self._servers))


class Servers(LLMServerManager):
    """verl's, with an IdleClock."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, load_balancer_cls=IdleClock, **kwargs)


trainer_separate_async.LLMServerManager = Servers


@register_trainer("task_separate")
class SeparateTrainer(OlderSamples, PPOTrainerSeparateAsync):
    """Metrics beside ``OlderSamples``: the seconds of a step in which the trainer waited for samples, and in which a
    server had no request, the mean of the servers."""

    MODE = "separate_async"

    def get_llm_client(self):
        return self.standalone_server_manager.get_client(client_cls=VersionedClient)

    def _idle(self) -> float:
        return ray.get(self.standalone_server_manager.global_load_balancer.idle_seconds.remote())

    def on_step_begin(self):
        self._idle_before = self._idle()
        super().on_step_begin()

    def on_step_end(self):
        super().on_step_end()
        self._idled = self._idle() - self._idle_before  # a validation, which comes next, is none of the step

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        metrics.update({SAMPLER: self._idled, TRAINER: timing_raw["gen"]})
