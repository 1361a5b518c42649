"""By how many versions the policy that sampled a token is older than the one that trains on it."""

from collections.abc import Iterable

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from verl_tasks.verl_plugins.expect import expect

VERSIONS = "versions"  # in a response's extra fields: of each part, the step whose weights sampled it, and its tokens
MEAN, MOST, OLDER = "staleness/mean", "staleness/max", "staleness/older_tokens"

expect(FullyAsyncLLMServerClient.generate, "output = await super().generate(", "prompt_ids + final_output.token_ids")


class _Part(LLMServerClient):
    """What FullyAsyncLLMServerClient asks for each part of a response."""

    async def generate(self, *args, parts: list, **kwargs):
        output = await super().generate(*args, **kwargs)
        parts.append((output.extra_fields["global_steps"], len(output.token_ids)))
        return output


class VersionedClient(FullyAsyncLLMServerClient, _Part):
    """verl's, which goes on with a response that an update interrupted; it tells the version of each part."""

    async def generate(self, request_id, **kwargs):
        parts: list[tuple[int, int]] = []
        output = await super().generate(request_id, parts=parts, **kwargs)
        output.extra_fields[VERSIONS] = parts
        return output


def in_time(complete: Iterable[int], under_way: Iterable[int], size: int) -> bool:
    """Whether all prompts are trained in time if the ``size`` oldest of the ``complete`` are now.

    Both have, of each prompt, how many others can be trained after these before it is too old.
    """
    left = sorted([*sorted(complete)[size:], *under_way])
    return all(before < room for before, room in enumerate(left))


def figures(responses: Iterable[list[tuple[int, int]]], policy: int) -> dict[str, float]:
    """Metrics of a step that trains ``policy``, the weights after that step: the mean and largest age of a token in
    steps, and the share of tokens that are not the policy's own. Empty without tokens.

    ``responses``: of each its parts as (version, tokens).
    """
    parts = [(policy - version, tokens) for parts in responses for version, tokens in parts if tokens]
    if not (total := sum(tokens for _, tokens in parts)):
        return {}
    return {
        MEAN: sum(age * tokens for age, tokens in parts) / total,
        MOST: float(max(age for age, _ in parts)),
        OLDER: sum(tokens for age, tokens in parts if age) / total,
    }
