"""A vLLM scheduler that returns a response once, as it ends, where its caller wants no more (``FINAL_ONLY``).

vLLM's own returns each token, and the engine's process sends it to the caller's: with log-probs three arrays a token.
To write and read these takes longer than a small model needs for the token (tests/benchmarks/whole_responses.py).
With ASYNC a response that is interrupted goes on later, so its tokens are returned PART at a time.
"""

import os
from collections.abc import Iterable

import numpy as np
import zmq
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from verl_tasks.alive import beat

PART = 16

# vLLM 0.24 (engine/core.py, process_output_sockets) takes a message for sent when its last part is, and writes the next
# one over the first part. Many responses that end at once make that part so long that zmq would not copy it: the reader
# then finds tokens of one message beside log-probs of another. The engine's sockets, made later, copy all parts.
zmq.COPY_THRESHOLD = 1 << 30


class Held:
    """The tokens of a response since it was last returned. Their arrays are kept as bytes: three arrays a token are
    millions of objects, and the garbage collector visits each."""

    def __init__(self, first: EngineCoreOutput):
        self.first = first  # has what no other has
        self.tokens: list[int] = []
        self.events: list = []
        self.arrays = bytearray(), bytearray(), bytearray()
        self.like: LogprobsLists | None = None  # the first log-probs: form and types of all

    def add(self, output: EngineCoreOutput) -> None:
        self.tokens += output.new_token_ids
        self.events += output.events or ()
        if (found := output.new_logprobs) is not None:
            self.like = self.like or found
            ids, logprobs, ranks = self.arrays
            ids += found.logprob_token_ids.tobytes()
            logprobs += found.logprobs.tobytes()
            ranks += found.sampled_token_ranks.tobytes()

    def into(self, last: EngineCoreOutput) -> None:
        """Give ``last`` the tokens, log-probs and events of all, and what only the first has."""
        last.new_token_ids, last.events = self.tokens, self.events or None
        if self.like is not None:
            ids, logprobs, ranks = (
                np.frombuffer(kept, form.dtype).reshape(-1, *form.shape[1:])
                for kept, form in zip(self.arrays, self.like[:3], strict=True)
            )
            last.new_logprobs = self.like._replace(logprob_token_ids=ids, logprobs=logprobs, sampled_token_ranks=ranks)
        last.new_prompt_logprobs_tensors = self.first.new_prompt_logprobs_tensors
        last.prefill_stats = self.first.prefill_stats


class WholeResponses(AsyncScheduler):
    """Named by ``engine_kwargs.vllm.scheduler_cls``. An aborted request loses the tokens that are not returned yet."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.parts = os.environ.get("ASYNC", "off") != "off"  # an update interrupts responses
        self.held: dict[str, Held] = {}  # by request: what is not returned yet

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
        self.held = {name: held for name, held in self.held.items() if name in self.requests}
        return ended

    def _returns(self, output: EngineCoreOutput) -> bool:
        """Whether the caller gets ``output``, now with all that was held: it ends a response, or a PART, or the caller
        wants each."""
        held = self.held.get(output.request_id)
        if held is None:
            params = self.requests[output.request_id].sampling_params if not output.finished else None
            if params is None or not (self.parts or params.output_kind == RequestOutputKind.FINAL_ONLY):
                return True
            held = self.held[output.request_id] = Held(output)
        held.add(output)
        if not output.finished and not (self.parts and len(held.tokens) >= PART):
            return False
        held.into(output)
        del self.held[output.request_id]
        return True
