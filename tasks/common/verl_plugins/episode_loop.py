"""verl's agent loop for multi-turn tasks: an episode in the task's environment, with its reward. For verl 0.9.1.

verl's own tool agent loop has tools for a whole run, and calls a reward function at the end.
"""

import asyncio
import functools
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.utils.profiler import simple_timer

from verl_tasks.ends import CUT, TOO_LONG
from verl_tasks.models.chat_template import ends_turn
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.environment import of_task
from verl_tasks.rewards.episode import Episode, Limits, Sampled, Sequence, play
from verl_tasks.rows import encoded
from verl_tasks.verl_plugins.staleness import VERSIONS

NO_LIMIT = 2**20


@functools.cache
def slots(at_once: int) -> asyncio.Semaphore:
    """So many episodes live in this process."""
    return asyncio.Semaphore(at_once)


COLUMNS = ("data_source", "ability", "reward_model", "extra_info")


class EpisodeOfRow(AgentLoopBase):
    """One episode. verl makes a loop per rollout, and calls no reward function where the output has a reward. Of
    several sequences all get it: their advantage is the episode's (verl/trainer/ppo/v1/agent_loop_tq.py)."""

    async def run(self, sampling_params, priority: int = 0, **kwargs) -> AgentLoopOutput | list[AgentLoopOutput]:
        from vllm.sampling_params import RequestOutputKind

        params = {**sampling_params, "output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}
        row = {name: kwargs[name] for name in COLUMNS} | {"prompt": encoded(list(kwargs["raw_prompt"]))}
        limits, made = self._limits(), of_task(self.data_config.episode.task)
        request, metrics, fields = uuid4().hex, {}, {}  # one id for all turns: they find the engine with their prefix

        async def sample(ids: list[int], most: int, stop: tuple[str, ...] = ()) -> Sampled:
            stops = {"stop": [*stop], "detokenize": True} if stop else {}
            with simple_timer("generate_sequences", metrics):
                found = await self.server_manager.generate(
                    request_id=request,
                    prompt_ids=ids,
                    sampling_params={**params, "max_tokens": most, **stops},
                    priority=int(priority),
                )
            metrics["num_preempted"] = metrics.get("num_preempted", 0) + (found.num_preempted or 0)
            versions = [*fields.get(VERSIONS, []), *found.extra_fields.get(VERSIONS, [])]
            newest = {name: value for name, value in found.extra_fields.items() if name != "min_global_steps"}
            fields.update(newest if fields else found.extra_fields)  # of the weights that sampled: first and last
            fields[VERSIONS] = versions
            ids = list(found.token_ids)
            stopped = ids and (len(ids) < most or ends_turn(self.tokenizer, ids))
            return Sampled(ids, found.log_probs or None, bool(stopped) and found.stop_reason != "aborted")

        async with slots(getattr(made, "at_once", NO_LIMIT)):
            episode = await play(made, row, self.tokenizer, sample, limits)
        if episode.ended == TOO_LONG:
            tokens = f"{len(episode.sequence.prompt_ids)} tokens, more than MAX_PROMPT_LENGTH={limits.prompt_length}"
            raise RewardError(f"the environment's reset gave a prompt of {tokens}: raise it")
        for sequence in episode.sequences:
            if not sequence.response_ids:  # its program asked for nothing; verl needs a token, which is in no loss
                sequence.add([self.tokenizer.eos_token_id], False)
        if not fields:
            fields = dict.fromkeys(("min_global_steps", "max_global_steps"), kwargs.get("global_steps", 0))
        more = {**fields, "reward_extra_info": episode.scores, "turn_scores": [], "tool_rewards": []}
        outputs = [
            AgentLoopOutput(
                prompt_ids=sequence.prompt_ids,
                response_ids=sequence.response_ids,
                response_mask=self.mask(episode, sequence),
                response_logprobs=sequence.log_probs,
                reward_score=episode.reward,
                num_turns=2 * episode.turns,  # as verl counts: the user's and tools' too
                metrics=metrics,
                extra_fields={**more},
            )
            for sequence in episode.sequences
        ]
        return outputs if len(outputs) > 1 else outputs[0]

    def mask(self, episode: Episode, sequence: Sequence) -> list[int]:
        """1 for each token of ``sequence`` that is in the loss."""
        return sequence.mask

    def _limits(self) -> Limits:
        of_data, rollout = self.data_config.episode, self.rollout_config
        return Limits(
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            turn_length=of_data.turn_length,
            turns=of_data.turns,
            step_seconds=of_data.step_seconds,
        )


class EpisodeUnlessTruncated(EpisodeOfRow):
    """TRUNCATED=masked: an episode that was cut off has no token in the loss."""

    def mask(self, episode: Episode, sequence: Sequence) -> list[int]:
        return [0] * len(sequence.mask) if episode.ended in CUT else sequence.mask
