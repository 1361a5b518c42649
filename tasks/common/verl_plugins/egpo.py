"""EGPO's trainer: GRPO whose advantages get a bonus for the entropy of the reasoning.

Hao et al. 2025, arXiv 2508.05118. It is a trainer because verl's advantage estimators do not get the entropy.
launch/plan.py has every verl process load it.
"""

from bisect import bisect_left, bisect_right

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import register_trainer
from verl.workers.utils.padding import response_to_nested

from verl_tasks.models.chat_template import opens_thinking
from verl_tasks.rewards.tool_calls import THINK, THINK_END
from verl_tasks.text import common_start
from verl_tasks.verl_plugins.trainer import TaskTrainer, fields_of


def reasoning_span(tokenizer, response: list[int], opened: bool) -> tuple[int, int] | None:
    """First token of the reasoning in ``response`` (token ids) and the one after its last; None without a block.

    The block is the first one, without its tags: from ``<think>``, or from the start where the prompt has ``opened`` it
    or no tag does, to ``</think>`` or the end of the response. Tokens need not end where tags do: a token counts when
    its text begins inside the block; a character that is split over tokens belongs to its first token.
    Costs about log2(tokens) decodings for each end, some 10 ms for 8,000 tokens.
    """
    text = _decode(tokenizer, response)
    blank = len(text) - len(text.lstrip())
    if opened:  # some models repeat the tag
        start = blank + len(THINK) if text.startswith(THINK, blank) else 0
    elif THINK in text.partition(THINK_END)[0]:
        start = text.index(THINK) + len(THINK)
    elif THINK_END in text:  # what opens it was left out
        start = 0
    else:
        return None
    end = text.find(THINK_END, start)

    def reached(count: int) -> int:
        """Characters of ``text`` that the first ``count`` tokens have written; grows with ``count``."""
        # A prefix that ends within a character decodes to another one there.
        return common_start([_decode(tokenizer, response[:count]), text])

    counts = range(len(response) + 1)
    first = bisect_left(counts, start, key=reached) if start else 0
    if end < 0:
        return first, len(response)
    last = bisect_right(counts, end, key=reached) - 1  # the token that writes the tag's first character
    return first, last + (reached(last) < end)


def reasoning_entropy(entropy: torch.Tensor, mask: torch.Tensor, spans: list[tuple[int, int] | None]) -> torch.Tensor:
    """H_i, shape (responses,), in nats: the mean of ``entropy`` over the reasoning tokens of each response.

    ``entropy``, ``mask``: shape (responses, tokens), nats and the response mask; ``spans``: of ``reasoning_span``, None
    means the whole response. 0 where no token counts: in an empty block, and in a row that verl added as padding.
    """
    inside = torch.zeros_like(mask, dtype=torch.bool)
    for row, span in zip(inside, spans, strict=True):
        row[slice(*(span or (0, None)))] = True
    inside &= mask.bool()
    return torch.where(inside, entropy.float(), 0.0).sum(1) / inside.sum(1).clamp(min=1)


def entropy_term(
    advantages: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor, weight: float, alpha: float
) -> torch.Tensor:
    """λ·clip(H_i, −|A_i|/α, |A_i|/α) of arXiv 2508.05118, shape (responses, tokens); 0 where ``mask`` is.

    ``advantages`` (A_i at each of its tokens) and ``mask``: shape (responses, tokens); ``entropy``: H_i in nats, shape
    (responses,); ``weight``: λ >= 0; ``alpha``: α > 0.
    """
    limit = advantages.abs() / alpha
    term = weight * torch.clamp(entropy[:, None], -limit, limit)
    return torch.where(mask.bool(), term, 0.0)


@register_trainer("egpo")
class EGPOTrainer(TaskTrainer):
    """Adds ``entropy_term`` to the advantages; λ and α are trainer.v1.egpo.egpo_lambda and egpo_alpha.

    The entropy is that of the policy before the step, at the temperature of the rollouts, without a gradient. Metrics,
    over the responses of a step: egpo/entropy_reasoning (mean of H_i, nats), egpo/term (mean of the term),
    egpo/no_reasoning_block (share of responses without a block).
    """

    reads_entropy = True
    _said_no_block = False

    def _compute_advantage(self, batch, metrics: dict):
        batch = super()._compute_advantage(batch, metrics)
        data = fields_of(batch, "advantages", "entropy", "response_mask", "responses", "prompts")
        spans = [
            reasoning_span(self.tokenizer, response.tolist(), opens_thinking(self.tokenizer, prompt[-8:].tolist()))
            for prompt, response in zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)
        ]
        padded = data.select("advantages", "entropy", "response_mask").to_padded_tensor()
        advantages, mask = padded["advantages"], padded["response_mask"]
        entropy = reasoning_entropy(padded["entropy"], mask, spans)
        settings = self.config.trainer.v1.egpo
        term = entropy_term(advantages, entropy, mask, settings.egpo_lambda, settings.egpo_alpha)

        # Only where the mask is: -0.0 + 0.0 is another zero, and λ = 0 must keep every bit.
        advantages = torch.where(mask.bool(), advantages + term, advantages)
        changed = {"advantages": response_to_nested(advantages, data["response_mask"])}
        fields = TensorDict(changed, batch_size=len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        self._report(metrics, entropy, term, mask, spans)
        return batch

    def _report(self, metrics: dict, entropy, term, mask, spans: list) -> None:
        real = mask.bool().any(1)  # verl's padding has none
        if not real.any():
            return
        missing = torch.tensor([span is None for span in spans])[real]
        metrics["egpo/entropy_reasoning"] = entropy[real].mean().item()
        metrics["egpo/term"] = (term.sum(1) / mask.sum(1).clamp(min=1))[real].mean().item()
        metrics["egpo/no_reasoning_block"] = missing.float().mean().item()
        if missing.any() and not self._said_no_block:
            self._said_no_block = True
            print(  # a logger's warning does not come out of Ray's actor
                f"warning: EGPO: {int(missing.sum())} of {len(missing)} responses have no {THINK} block; for them the "
                "entropy of the whole response counts (said once; each step's share: metric egpo/no_reasoning_block)"
            )


def _decode(tokenizer, ids: list[int]) -> str:
    # Tags may be special tokens; cleaning up would make prefixes differ from the whole.
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
