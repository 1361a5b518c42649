"""A vLLM scheduler that returns a response once, as it ends, where its caller wants no more (``FINAL_ONLY``).

vLLM's own returns each token, and the engine's process sends it to the caller's: with log-probs three arrays a token.
To write and read these takes longer than a small model needs for the token (tests/benchmarks/whole_responses.py).
With ASYNC a response that is interrupted goes on later, so its tokens are returned PART at a time.
"""

import os
from collections.abc import Iterable

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from verl_tasks.alive import beat

PART = 16


class WholeResponses(AsyncScheduler):
    """Named by ``engine_kwargs.vllm.scheduler_cls``. An aborted request loses the tokens that are not returned yet."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.parts = os.environ.get("ASYNC", "off") != "off"  # an update interrupts responses
        self.held: dict[str, list[EngineCoreOutput]] = {}  # by request: what is not returned yet

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        found = super().update_from_output(scheduler_output, model_runner_output)
        beat()
        for outputs in found.values():
            outputs.outputs = [output for output in outputs.outputs if self._returns(output)]
        return found

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[tuple[str, int]]:
        ended = super().finish_requests(request_ids, finished_status)
        self.held = {name: outputs for name, outputs in self.held.items() if name in self.requests}
        return ended

    def _returns(self, output: EngineCoreOutput) -> bool:
        """Whether the caller gets ``output``, now with all that was held: it ends a response, or a PART, or the caller
        wants each."""
        if output.finished:
            _join([*self.held.pop(output.request_id, []), output])
            return True
        params = self.requests[output.request_id].sampling_params
        if params is None or not (self.parts or params.output_kind == RequestOutputKind.FINAL_ONLY):
            return True
        held = self.held.setdefault(output.request_id, [])
        held.append(output)
        if not self.parts or sum(len(each.new_token_ids) for each in held) < PART:
            return False
        _join(self.held.pop(output.request_id))
        return True


def _join(parts: list[EngineCoreOutput]) -> None:
    """Give the last of ``parts`` the tokens, log-probs and events of all, and what only the first has."""
    first, last = parts[0], parts[-1]
    last.new_token_ids = [token for part in parts for token in part.new_token_ids]
    last.events = [event for part in parts for event in part.events or ()] or None
    if found := [part.new_logprobs for part in parts if part.new_logprobs is not None]:
        ids, logprobs, ranks = map(np.concatenate, zip(*(each[:3] for each in found), strict=True))
        last.new_logprobs = found[0]._replace(logprob_token_ids=ids, logprobs=logprobs, sampled_token_ranks=ranks)
    last.new_prompt_logprobs_tensors, last.prefill_stats = first.new_prompt_logprobs_tensors, first.prefill_stats
