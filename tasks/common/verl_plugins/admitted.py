"""An update interrupts any number of requests at once (ASYNC); async_trainer.py loads this in every verl process.

It closes verl's gate (vllm_async_server.py, abort_all_requests): no request may reach vLLM after its pause. verl counts
a request as on its way until its first output. One that queues behind max_num_seqs others has none until these end, and
the update waits, a minute at most. vLLM reads its requests and its pause from one socket, in order.

Interrupted requests wait at the gate as calls of the server's actor. If these are as many as it runs at once, the call
that opens the gate never begins.
"""

from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from verl_tasks.verl_plugins.expect import expect

expect(vLLMHttpServer.abort_all_requests, "while self._admitting > 0:")
expect(vLLMHttpServer.generate, "self._admitting -= 1", "final_res = output")
expect(AsyncLLM.generate, "q = await self.add_request(", "out = q.get_nowait() or await q.get()")
expect(AsyncLLM._add_request, "await self.engine_core.add_request_async(request)")
expect(RolloutReplica, "max(1000, self.config.max_num_seqs + CONTROL_METHOD_CONCURRENCY)")

CALLS = 100_000  # of a server at once: more than a training has

_add_request = AsyncLLM.add_request


async def add_request(self, request_id, prompt, params, *args, **kwargs):
    """vLLM's; once its engine has the request, a first output without tokens says so."""
    queue = await _add_request(self, request_id, prompt, params, *args, **kwargs)
    if isinstance(params, SamplingParams) and queue.output is None:
        queue.put(RequestOutput(request_id, None, None, None, outputs=[], finished=False))
    return queue


AsyncLLM.add_request = add_request
RolloutReplica.max_concurrency = CALLS
