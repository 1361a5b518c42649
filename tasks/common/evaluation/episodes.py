"""Episodes of a multi-turn task: those that live ask for a turn, and the engine samples these turns together."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from verl_tasks import errors
from verl_tasks.ends import TOO_LONG
from verl_tasks.evaluation.engines import Request, Sampling, TurnRequest
from verl_tasks.evaluation.rollouts import GREEDY, Completion, Rollout
from verl_tasks.rewards.answers import JudgeError, RewardError
from verl_tasks.rewards.environment import Environment
from verl_tasks.rewards.episode import Episode, Limits, Sampled, Sequence, play
from verl_tasks.text import one_line

AT_ONCE = 1024  # episodes; vLLM samples some hundred at a time
GRACE = 0.1  # seconds that a batch waits for episodes whose environment is still at work


class Turns:
    """Turns that episodes ask for, for the engine. The episodes live in the event loop of another thread: their
    environments work while the engine samples, and a slow one holds no other episode."""

    def __init__(self):
        self.changed = threading.Condition()
        self.waiting: list[TurnRequest] = []
        self.futures: dict[tuple, asyncio.Future] = {}  # of those that wait or are sampled
        self.live, self.over, self.loop, self.playing = 0, False, None, None

    async def sampled(self, request: TurnRequest) -> Completion:
        """The turn that ``request`` asks for."""
        future = asyncio.get_running_loop().create_future()
        with self.changed:
            self.waiting.append(request)
            self.futures[_key(request)] = future
            self.changed.notify()
        return await future

    def began(self, episodes: int) -> None:
        """So many more ``episodes`` will ask for turns; fewer, where it is negative."""
        with self.changed:
            self.live += episodes
            self.changed.notify()

    def end(self) -> None:
        """No episode asks for more."""
        with self.changed:
            self.over = True
            self.changed.notify()

    def cancel(self) -> None:
        """End the episodes, from another thread."""
        if self.loop and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.playing.cancel)

    def batch(self) -> list[TurnRequest]:
        """The next turns to sample: of all live episodes, or of those that asked within GRACE. Empty at the end."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.over)
            self.changed.wait_for(lambda: len(self.waiting) >= self.live or self.over, GRACE)
        return self.more()

    def more(self) -> list[TurnRequest]:
        """Those that were asked for since: they join the ones that the engine samples."""
        with self.changed:
            found, self.waiting = self.waiting, []
            return found

    def answer(self, request: TurnRequest, completion: Completion) -> None:
        """Give the episode of ``request`` its turn, from another thread."""
        self.loop.call_soon_threadsafe(_settle, self.futures.pop(_key(request)), completion)


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
    have ended, in another thread. Raises JudgeError, and what the engine raises. The engine samples in this thread."""
    turns, failed = Turns(), []

    def episodes() -> None:
        try:
            asyncio.run(_all(stage, turns, rows, requests, write))
        except BaseException as error:
            failed.append(error)
        turns.end()

    thread = threading.Thread(target=episodes, daemon=True)
    thread.start()
    try:
        while asked := turns.batch():
            for request, (completion,) in stage.engine.generate(asked, stage.sampling, turns.more):
                if turns.over:  # one failed
                    break
                turns.answer(request, completion)
    except BaseException:
        turns.cancel()
        raise
    thread.join()
    if failed:
        raise failed[0]


def _settle(future: asyncio.Future, completion: Completion) -> None:
    if not future.done():  # else its episode was cancelled
        future.set_result(completion)


async def _all(stage: Stage, turns: Turns, rows: list[dict], requests: list[Request], write: Callable) -> None:
    """All episodes, at most AT_ONCE at a time."""
    turns.loop, turns.playing = asyncio.get_running_loop(), asyncio.current_task()
    at_once = min(AT_ONCE, getattr(stage.made, "at_once", AT_ONCE))
    slots = asyncio.Semaphore(max(1, at_once // stage.sampling.n))

    async def group(request: Request) -> None:
        size = 1 if request.mode == GREEDY else stage.sampling.n
        async with slots:
            turns.began(size)
            row, left = rows[request.index], size

            async def one(number: int) -> Rollout:
                nonlocal left
                try:
                    return await _one(stage, turns, row, request, number)
                finally:
                    left -= 1
                    turns.began(-1 if left else 0)

            try:
                write(await asyncio.gather(*map(one, range(size))))
            finally:
                turns.began(-1)  # the last of a group is live until all are written: the next batch may fail

    await asyncio.gather(*map(group, requests))


async def _one(stage: Stage, turns: Turns, row: dict, request: Request, number: int) -> Rollout:
    """One episode; what its environment raises becomes the rollout's error, as what a reward raises does."""
    found: list[Completion] = []

    async def sample(ids: list[int], most: int, stop: tuple[str, ...] = ()) -> Sampled:
        turn = TurnRequest(request.index, request.mode, [], None, tuple(ids), most, number, len(found), stop)
        found.append(await turns.sampled(turn))
        return Sampled(list(found[-1].ids), list(found[-1].log_probs) or None, found[-1].finish_reason == "stop")

    episode, error = Episode(Sequence([])), ""
    try:
        episode = await play(stage.made, row, stage.tokenizer, sample, stage.limits)
    except JudgeError:
        raise
    except RewardError as raised:
        errors.log(raised)
        error = one_line(str(raised), 500)
    tokens = sum(completion.tokens for completion in found)
    truth = row["reward_model"]["ground_truth"]
    unscored = error or episode.ended == TOO_LONG or truth in (None, "")  # of `make batch`
    return Rollout(
        index=request.index,
        mode=request.mode,
        sample=number,
        response="".join(stage.tokenizer.decode(each.response_ids) for each in episode.sequences),
        finish_reason=episode.ended,
        tokens=tokens,
        entropy=sum(c.entropy * c.tokens for c in found) / tokens if tokens else 0.0,
        prompt=row["prompt"],
        data_source=row["data_source"],
        ground_truth=truth,
        extra_info=row["extra_info"],
        reward=None if unscored else episode.scores,
        error=error,
        messages=episode.messages,
    )
