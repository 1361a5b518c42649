"""Whether updates interrupt responses (ASYNC), and what vLLM then returns of them.

verl closes its gate only once each request has had a first output (vllm_async_server.py, abort_all_requests). With
FINAL_ONLY that is its last: verl would wait for all responses, a minute at most, and interrupt none.
"""

import os


def interrupts() -> bool:
    """Whether an update of this training interrupts responses."""
    return os.environ.get("ASYNC", "off") != "off"


def output_kind():
    """vLLM's RequestOutputKind for a response of a training."""
    from vllm.sampling_params import RequestOutputKind  # SFT loads the data set too, without vLLM

    return RequestOutputKind.CUMULATIVE if interrupts() else RequestOutputKind.FINAL_ONLY
