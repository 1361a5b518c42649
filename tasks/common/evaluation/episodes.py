"""Episodes of a multi-turn task: all that live ask for a turn, the engine samples these turns as one batch."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tasks.common.evaluation.engines import Request, Sampling, TurnRequest
from tasks.common.evaluation.rollouts import GREEDY, Completion, Rollout
from tasks.common.rewards.answers import JudgeError, RewardError
from tasks.common.rewards.environment import Environment
from tasks.common.rewards.episode import TOO_LONG, Episode, Limits, Sampled, play
from tasks.common.text import one_line

AT_ONCE = 1024  # episodes; vLLM samples some hundred at a time


class Turns:
    """Collects the requests of the ``live`` episodes and samples them once each has asked or ended."""

    def __init__(self, engine, sampling: Sampling, live: int):
        self.engine, self.sampling, self.live = engine, sampling, live
        self.waiting: dict[tuple, tuple[TurnRequest, asyncio.Future]] = {}

    async def sampled(self, request: TurnRequest) -> Completion:
        """The turn that ``request`` asks for."""
        future = asyncio.get_running_loop().create_future()
        self.waiting[_key(request)] = request, future
        self._sample_if_all_ask()
        return await future

    def ended(self) -> None:
        """An episode asks for no more turns."""
        self.live -= 1
        self._sample_if_all_ask()

    def _sample_if_all_ask(self) -> None:
        if not self.waiting or len(self.waiting) < self.live:
            return
        asked, self.waiting = self.waiting, {}
        requests = [request for request, _ in asked.values()]
        for request, (completion,) in self.engine.generate(requests, self.sampling):
            asked[_key(request)][1].set_result(completion)


def _key(request: TurnRequest) -> tuple[int, str, int]:
    return request.index, request.mode, request.sample


@dataclass(frozen=True)
class Stage:
    """What all episodes of an evaluation share."""

    engine: object  # of engines.py, or a pool of these
    tokenizer: object
    sampling: Sampling
    limits: Limits
    made: type[Environment]


def play_all(stage: Stage, rows: list[dict], requests: list[Request], write: Callable[[list[Rollout]], None]) -> None:
    """Play what ``requests`` ask for of the RL ``rows``; ``write`` gets the episodes of each request once all of them
    have ended. Raises JudgeError, and what the engine raises."""
    count = max(1, AT_ONCE // stage.sampling.n)
    for start in range(0, len(requests), count):
        asyncio.run(_at_once(stage, rows, requests[start : start + count], write))


async def _at_once(stage: Stage, rows: list[dict], requests: list[Request], write: Callable) -> None:
    sizes = [1 if request.mode == GREEDY else stage.sampling.n for request in requests]
    turns = Turns(stage.engine, stage.sampling, sum(sizes))

    async def group(request: Request, size: int) -> None:
        row = rows[request.index]
        write(await asyncio.gather(*(_one(stage, turns, row, request, number) for number in range(size))))

    await asyncio.gather(*(group(request, size) for request, size in zip(requests, sizes, strict=True)))


async def _one(stage: Stage, turns: Turns, row: dict, request: Request, number: int) -> Rollout:
    """One episode; what its environment raises becomes the rollout's error, as what a reward raises does."""
    found: list[Completion] = []

    async def sample(ids: list[int], most: int) -> Sampled:
        turn = TurnRequest(request.index, request.mode, [], None, tuple(ids), most, number, len(found))
        found.append(await turns.sampled(turn))
        return Sampled(list(found[-1].ids), None, found[-1].finish_reason == "stop")

    episode, error = Episode([]), ""
    try:
        episode = await play(stage.made, row, stage.tokenizer, sample, stage.limits)
    except JudgeError:
        raise
    except RewardError as raised:
        error = one_line(str(raised), 500)
    finally:
        turns.ended()
    tokens = sum(completion.tokens for completion in found)
    scores = None if error or episode.ended == TOO_LONG else episode.scores
    return Rollout(
        index=request.index,
        mode=request.mode,
        sample=number,
        response=stage.tokenizer.decode(episode.response_ids),
        finish_reason=episode.ended,
        tokens=tokens,
        entropy=sum(c.entropy * c.tokens for c in found) / tokens if tokens else 0.0,
        prompt=row["prompt"],
        data_source=row["data_source"],
        ground_truth=row["reward_model"]["ground_truth"],
        extra_info=row["extra_info"],
        reward=scores,
        error=error,
    )
