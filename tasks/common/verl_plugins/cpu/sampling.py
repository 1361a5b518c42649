"""vLLM's sampling on a CPU by one random number for each row, and without torch.compile.

vLLM 0.30 draws one for each token of the vocabulary, twice for a row with a seed, on one core: a fifth of the time of a
small model (v1/sample/ops/topk_topp_sampler.py:203, forward_cpu).
"""

import inspect

import torch
from vllm.v1.sample import sampler as vllm_sampler
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.reloading import Reloading

expect(TopKTopPSampler.forward_native, "random_sample(probs, generators, self.use_fp64_gumbel)")
expect(vllm_sampler.Sampler.gather_logprobs, "batched_count_greater_than(logprobs, token_logprobs)")


def sample(probs: torch.Tensor, generators: dict[int, torch.Generator], use_fp64_gumbel: bool = False) -> torch.Tensor:
    """A token (rows,) from each row of ``probs`` (rows, vocabulary), where its cumulative probability passes a uniform
    number: of the row's generator if it has one. A token with no probability is never taken."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(len(probs), 1, dtype=torch.float64)
    for row, generator in generators.items():
        uniform[row] = torch.rand(1, dtype=torch.float64, generator=generator)
    # The probabilities may add up to another sum than 1, and the product may round to that sum, which no token passes.
    total = cumulative[:, -1:]
    found = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, found, right=True).view(-1)


topk_topp_sampler.random_sample = sample  # of forward_native
TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_native
# Compiling this one line takes seconds at each start.
vllm_sampler.batched_count_greater_than = inspect.unwrap(vllm_sampler.batched_count_greater_than)


class Sampling(Reloading):
    """Named by ``worker_extension_cls``: vLLM imports this module in the process of its worker, before it makes one."""
