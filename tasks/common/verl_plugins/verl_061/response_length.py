"""A rollout of verl 0.6.1 ends at MAX_RESPONSE_LENGTH, not where prompt and response fill the window.

workers/rollout/vllm_rollout/vllm_async_server.py:385 drops what is beyond it only afterwards: of 256 + 256 tokens up to
450 were sampled, and all rollouts of a step wait for one another. Test: tests/test_a100_stack.py.
"""

import wrapt

from verl_tasks.verl_plugins.expect import expect


@wrapt.when_imported("verl.workers.rollout.vllm_rollout.vllm_async_server")
def end_at_response_length(server) -> None:
    """Let ``sampling_params["response_length"]``, in tokens, end a response (verl_plugins/dataset.py sends it)."""
    expect(
        server.vLLMHttpServerBase.generate,
        "max_tokens = self.config.max_model_len - len(prompt_ids)",
        "SamplingParams(max_tokens=max_tokens, **sampling_params)",
    )
    verls_own = server.SamplingParams

    def sampling_params(*, max_tokens: int, response_length: int | None = None, **others):
        return verls_own(max_tokens=min(max_tokens, response_length or max_tokens), **others)

    server.SamplingParams = sampling_params
