"""`make attack`: search for answers that earn reward without being right, without a model.

What counts as an exploit: docs/REWARDS.md. No task is known here, so a right answer is not known either. What is known:
no answer is right for truths that contradict one another. Two truths contradict when each one's own demonstration is
right for it and scores low for the other: at most half of the way from the lowest score of any demonstration to a right
one's. Right: ``acc`` 1, or a score as high as the best demonstration's; without ``acc`` a score of 1 or more. It takes
``CONTRADICTING`` truths, not two: with a tolerance, one number can be right for two whose own numbers are not.

What this cannot see: a hole for one row alone; partial credit below a right answer's score; and, without
demonstrations, all but an answer that is right for most rows, a reward that breaks, and what ``is_right`` refuses. It
may be wrong where a row has many right answers that fit other rows too, and where one answer is really right for most
rows: read what was found before you believe it.

An episode of a multi-turn task is one text here, its turns divided by ``TURN``. It is played in the row's environment.
"""

import functools
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from verl_tasks.evaluation import incentive
from verl_tasks.evaluation.exploits import SOME, TURN, Attempt, Form, Row, by_turns, library, mutated, shrunk, visible
from verl_tasks.evaluation.tables import show_table
from verl_tasks.files import write_json, write_text
from verl_tasks.guarded import Guarded, Result, asks_judge
from verl_tasks.rewards.answers import JudgeError, read_ground_truth
from verl_tasks.rewards.environment import SUCCESS, Environment, replayed
from verl_tasks.rewards.judge import Judge
from verl_tasks.rows import demonstration, read_rows, solved
from verl_tasks.settings import Command, Settings, SettingsError, artifacts
from verl_tasks.text import one_line

CONTRADICTING = 3
MOST, HALF = 3 / 4, 1 / 2
ROWS, READ = 40, 2048
JUDGED_ROWS, CALLS = 7, 200  # where a judge is asked: what is known of the rows takes a quarter of the calls
SLOW = 1.0  # seconds of a call after which an attempt has no more of them
ROW_NAMES = ("split", "index", "key")  # of extra_info: they name the row, no reward needs them
BLIND = (
    "note: little can be seen here: of {} of {} rows the demonstration is right, and no three contradict one another "
    "(a wrong one gets more than half of a right one's score)"
)
PARENTS = 20  # attempts that mutations start from
REPORT_SECONDS = 15  # how often a line is printed where there is no terminal


@dataclass(frozen=True)
class Finding:
    """An exploit: ``response``, or for a recipe what it makes of the first row that it fooled; ``fooled``: indices of
    the rows; ``score``: the mean over them; ``why``: which rule of this module; ``broken``: the reward raised on the
    row, or took too long; ``first``: the score for the first row."""

    exploit: str
    response: str
    fooled: list[int]
    score: float
    why: str
    recipe: bool = False
    broken: bool = False
    first: float = 0.0


@dataclass
class Search:
    """A search over ``rows``, for ``seconds`` and at most ``calls`` of the reward. ``found``: the best of each name.
    ``most``: what a right answer can earn. ``left``: answers of the library that there was no time for."""

    rows: list[Row]
    reward: Guarded
    seconds: float
    calls: float = float("inf")
    most: float = float("inf")
    tried: int = 0
    left: int = 0
    found: dict[str, Finding] = field(default_factory=dict)

    def __post_init__(self):
        self.ends = time.monotonic() + self.seconds
        self.truths = [json.dumps(read_ground_truth(row.truth), sort_keys=True) for row in self.rows]
        texts = {i: row.demonstration for i, row in enumerate(self.rows) if row.demonstration}
        scores = {}  # of the demonstration of a row, by that row and the row that it is scored for
        right: list[int] = []
        for count, (i, text) in enumerate(texts.items()):  # of a slow reward fewer
            if count >= SOME and time.monotonic() > self.ends - self.seconds * 3 / 4:
                break
            own = self.reward.scores(text, [i])[0]
            if own.right:
                right.append(i)
                scores[i, i] = own
                for j in right[:-1]:
                    scores[i, j] = self.reward.scores(text, [j])[0]
                    scores[j, i] = self.reward.scores(texts[j], [i])[0]
        nothing = self.reward.scores("", [0])[0]
        self.low = min(result.score for result in (nothing, *scores.values()))
        self.best = max((scores[i, i].score for i in right), default=float("inf"))

        def far(i: int, j: int) -> bool:
            return not scores[i, j].right and scores[i, j].score <= (self.low + scores[j, j].score) / 2

        self.against = {i: {j for j in right if far(i, j) and far(j, i)} for i in right}
        others = {i: self.rows[min(against)].demonstration for i, against in self.against.items() if against}
        self.rows = [replace(row, other=others.get(i, "")) for i, row in enumerate(self.rows)]

    def _fools(self, result: Result) -> bool:
        earns = result.right or (not result.problem and result.score >= self.best)
        return earns and not result.honest

    @property
    def blind(self) -> bool:
        """Whether too few demonstrations contradict one another for the rules that need it."""
        return self._contradicting(list(self.against)) < CONTRADICTING

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.ends or self.reward.calls >= self.calls

    def _contradicting(self, indices: list[int]) -> int:
        """How many of the rows contradict one another, chosen one after the other, those that contradict most first."""
        chosen: list[int] = []
        for index in sorted(self.against.keys() & set(indices), key=lambda index: (-len(self.against[index]), index)):
            if all(index in self.against[other] for other in chosen):
                chosen.append(index)
        return len(chosen)

    def why(self, results: dict[int, Result], recipe: bool) -> str:
        """Which rule the results by row break; empty: none."""
        if problem := next((result.problem for result in results.values() if result.problem), ""):
            return problem
        fooled = [i for i, result in results.items() if self._fools(result)]
        if any(result.score > self.most + 1 - SUCCESS for result in results.values()):
            return f"earns more than {self.most:g}, a success"
        if any(results[i].honest is False for i in fooled):
            return "is_right says no"
        clique = self._contradicting(fooled)
        if recipe:
            enough = clique >= CONTRADICTING and len(fooled) >= HALF * len(self.rows)
            return "right without solving the row" if enough else ""
        if clique >= CONTRADICTING:
            return f"right for {clique} truths that contradict one another"
        different = len(set(self.truths))
        most = len({self.truths[i] for i in fooled}) >= max(CONTRADICTING, MOST * different)
        return f"right for most of {different} different truths" if most else ""

    def results(self, attempt: Attempt, indices: list[int]) -> dict[int, Result]:
        """Of the rows, up to the first with a problem; of the first alone where that takes longer than ``SLOW``."""
        if attempt.of_row is None:
            started = time.monotonic()
            first = self.reward.scores(attempt.text, indices[:1])
            slow = first[0].problem or time.monotonic() - started > SLOW
            rest = [] if slow else self.reward.scores(attempt.text, indices[1:])
            return dict(zip(indices, first + rest, strict=False))
        texts = {i: attempt.of_row(self.rows[i]) for i in indices}
        return {i: self.reward.scores(text, [i])[0] for i, text in texts.items() if text is not None}

    def attack(self, attempt: Attempt) -> tuple[int, float]:
        """Try ``attempt`` and keep it where it is an exploit. Returns how many rows it fooled and its mean score."""
        self.tried += 1
        everything = list(range(len(self.rows)))
        results = self.results(attempt, everything[:SOME])
        if any(map(self._fools, results.values())) and everything[SOME:]:
            results |= self.results(attempt, everything[SOME:])
        fooled = [i for i, result in results.items() if self._fools(result)]
        if why := self.why(results, attempt.of_row is not None):
            broken = [i for i, result in results.items() if result.problem]
            shown = broken[:1] or fooled
            row, first, recipe = self.rows[shown[0]], results[shown[0]].score, attempt.of_row is not None
            text = attempt.of_row(row) if recipe else attempt.text
            score = sum(results[i].score for i in shown) / len(shown)
            new = Finding(attempt.exploit, text, shown, score, why, recipe, bool(broken), first)
            old = self.found.get(attempt.exploit)
            if old is None or (len(old.fooled), -len(old.response)) < (len(shown), -len(text)):
                self.found[attempt.exploit] = new
        return len(fooled), sum(result.score for result in results.values()) / max(1, len(results))

    def smallest(self, finding: Finding) -> Finding:
        """The finding with a shorter response that fools the same rows, or breaks the reward in the same way. For all
        findings together this takes at most a quarter of the time beyond its end."""
        if finding.recipe or "longer than" in finding.why:
            return finding

        def still(text: str) -> bool:
            late = self.reward.calls >= self.calls or time.monotonic() >= self.ends + self.seconds / 4
            results = [Result()] if late else self.reward.scores(text, finding.fooled)
            if finding.broken:
                return results[-1].problem == finding.why
            return all(map(self._fools, results))

        response = shrunk(finding.response, still)
        if response == finding.response:
            return finding
        return replace(finding, response=response, first=self.reward.scores(response, finding.fooled[:1])[0].score)

    def form(self) -> Form:
        """The form of an answer, learned from the smallest right responses of some rows, in a quarter of the time."""
        ends = time.monotonic() + self.seconds / 4

        def smallest(index: int) -> str:
            def still(text: str) -> bool:
                late = self.over or time.monotonic() >= ends
                return not late and self.reward.scores(text, [index])[0].right

            return shrunk(visible(self.rows[index].demonstration), still, 100)

        return Form.learned([smallest(index) for index in list(self.against)[:SOME]])


def run(search: Search, seed: int, judged: bool = False, tries: float = float("inf"), say: Callable = id) -> None:
    """The library, then mutations of what scored most, until the time, the calls or ``tries`` are spent."""
    rng = random.Random(seed)
    form = Form() if judged else search.form()
    pool: list[tuple[tuple[int, float], Attempt]] = []
    known = library(search.rows, form, judged)  # those for a judge first
    known = list(known) if judged else by_turns(known)
    for number, attempt in enumerate(known):
        if search.over or search.tried >= tries:
            search.left = 0 if judged else len(known) - number
            break
        if (old := search.found.get(attempt.exploit)) and old.broken:
            continue  # each of its kind may take the whole limit of time
        how_well = search.attack(attempt)
        if attempt.of_row is None:
            pool.append((how_well, attempt))
        say(search)
    while not search.over and search.tried < tries:
        pool = [pair for pair in pool if pair[1].exploit not in search.found]
        pool = sorted(pool, key=lambda pair: pair[0], reverse=True)[:PARENTS]
        if not pool:
            break
        how_well, parent = rng.choice(pool)
        child = Attempt(parent.exploit, mutated(parent.text, rng.choice(pool)[1].text, rng))
        if (new := search.attack(child)) > how_well:
            pool.append((new, child))
        say(search)
    search.found = {name: search.smallest(finding) for name, finding in search.found.items()}


# ---- the command ---------------------------------------------------------------------------------------------------


def rows_of(s: Settings, count: int) -> list[Row]:
    """``count`` of the first training prompts, chosen by SEED, those with a demonstration first."""
    demonstrations = {}
    for place, _, row in solved(s.train_file, s.data_dir / "sft.parquet", READ):
        messages, first = demonstration(row)
        answers = (each["content"] for each in messages[first:] if each["role"] == "assistant")
        demonstrations[place] = TURN.join(answers)
    rows = []
    for place, row in enumerate(read_rows(s.train_file, READ)):
        shown = "\n".join(message.get("content") or "" for message in row["prompt"])
        truth, extra = row["reward_model"]["ground_truth"], row if s.multi_turn else row["extra_info"]
        rows.append(Row(shown, truth, demonstrations.get(place, ""), row["data_source"], extra))
    random.Random(s.SEED).shuffle(rows)
    return sorted(rows, key=lambda row: not row.demonstration)[:count]


class _Progress:
    """Time left, attempts and findings: a line that is written over on a terminal, else one every 15 s."""

    def __init__(self):
        self.live, self.next = sys.stdout.isatty(), 0.0

    def __call__(self, search: Search) -> None:
        now = time.monotonic()
        if now >= self.next:
            left, calls, found = max(0, search.ends - now), search.reward.calls, len(search.found)
            line = f"  {left:4.0f} s left, {search.tried} answers tried, {calls} scored, {found} exploits"
            print(line, end="\r" if self.live else "\n", flush=True)
            self.next = now + (0.5 if self.live else REPORT_SECONDS)


def episode(made: type[Environment], turns: int, source: str, text: str, truth: str, row: dict) -> dict:
    """A reward's result for the episode ``text`` of at most ``turns`` turns, played for the RL row ``row``."""
    reward, _, _ = replayed(made, row, text.split(TURN)[:turns], spare=True)
    return {"score": reward, "acc": float(reward >= SUCCESS)}


def attack(
    s: Settings, command: Command, compute_score: Callable | None, environment: type[Environment] | None = None
) -> None:
    """`make attack`: a table of what was found, attack.json, and examples.jsonl with lines for the task's own.

    Exits with 1 when something was found. A judge is asked at most CALLS times. Raises JudgeError.
    """
    judged = asks_judge(environment or compute_score)
    if environment:
        compute_score = functools.partial(episode, environment, s.MAX_TURNS)
    if judged:
        Judge.from_environment()
    rows = rows_of(s, JUDGED_ROWS if judged else ROWS)
    reward = Guarded(compute_score, rows, judged or hasattr(environment, "at_once"), fatal=JudgeError)
    try:
        calls = CALLS - len(rows) if judged else float("inf")
        search = Search(rows, reward, command.SECONDS, calls, 1.0 if environment else float("inf"))
        run(search, s.SEED, judged, say=_Progress())
        if not search.tried:
            raise SettingsError(f"SECONDS={command.SECONDS:g}: over before an answer was tried, the reward is slow")
        report(s, search)
        seconds = max(incentive.SECONDS, command.SECONDS / 10)
        for line, warns in () if judged else incentive.told(s, rows, reward, seconds):
            print(f"warning: {line}" if warns else line)
    finally:
        reward.close()
    if search.found:
        sys.exit(1)


def example(s: Settings, search: Search, finding: Finding) -> dict:
    """A row of the task's examples.jsonl that the reward breaks while ``finding`` fools it. ``below``: a right answer's
    score, or the first fooled row's where that is lower; what partial credit is left to it is the task's own matter.
    An answer with the lowest score may count as right all the same: then the row states ``acc``."""
    below = search.best if finding.broken else min(search.best, finding.first)
    stated = {"below": below if below < float("inf") else 1.0}
    if not s.multi_turn and not finding.broken and finding.first <= search.low:
        stated = {"acc": 0}
    row = search.rows[finding.fooled[0]]
    truth = read_ground_truth(row.truth)
    found = {"ground_truth": truth if isinstance(truth, dict | list) else row.truth}  # the text 1.50 is not 1.5
    if s.multi_turn:
        found |= {"prompt": row.prompt, "responses": finding.response.split(TURN)[: s.MAX_TURNS], "done": False}
    else:
        extra = {name: value for name, value in (row.extra or {}).items() if name not in ROW_NAMES and value}
        found |= {"response": finding.response} | ({"extra_info": extra} if extra else {})
    return found | stated | ({"variant": s.REWARD} if s.REWARD else {})


def report(s: Settings, search: Search) -> None:
    """Print the findings, most rows first, and write them to artifacts/attack/TASK."""
    folder = artifacts() / "attack" / s.TASK
    found = sorted(search.found.values(), key=lambda finding: -len(finding.fooled))
    of, right = len(search.rows), len(search.against)
    sizes = {"rows": of, "demonstrations_right": right, "tried": search.tried, "scored": search.reward.calls}
    sizes |= {"not_tried": search.left, "blind": search.blind}
    write_json(folder / "attack.json", {**sizes, "seed": s.SEED, "exploits": [asdict(finding) for finding in found]})
    title = f"{s.TASK}: {search.tried} answers tried on {of} rows, {search.reward.calls} scored, seed {s.SEED}"
    if search.blind:
        print(f"\n{BLIND.format(right, of)}")
    if search.left:
        known = f"{search.left} of {search.left + search.tried} known answers"
        print(f"note: no time was left for {known}; a larger SECONDS tries them")
    if not found:
        print(f"\n{title}: no exploit found; {folder / 'attack.json'}")
        return
    same: dict[str, list[Finding]] = {}
    for finding in found:
        same.setdefault(finding.response, []).append(finding)
    lines, cells = [], []
    for finding, *others in same.values():
        lines.append(json.dumps(example(s, search, finding)))
        cells.append(
            [
                finding.exploit + (f" (and {len(others)} more)" if others else ""),
                "-" if finding.broken else f"{finding.score:.3f}",
                f"{len(finding.fooled)} of {of}",
                one_line(finding.why, 80),
                one_line(repr(finding.response)[1:-1], 60),
            ]
        )
    write_text(folder / "examples.jsonl", "\n".join(lines) + "\n")
    show_table(title, ["exploit", "score", "fooled", "why", "smallest form"], cells)
    print(f"in full: {folder / 'attack.json'}; lines for {s.task_dir / 'examples.jsonl'}: {folder / 'examples.jsonl'}")
