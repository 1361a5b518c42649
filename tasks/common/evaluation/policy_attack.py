"""`make attack POLICY=1`: reinforcement learning against the reward, with the truths of other rows.

No answer to a prompt says what the truth of another row is. So what a policy learns to earn there, it earns by a hole,
or because one answer is right for many rows.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.common.data.rows import DataError
from tasks.common.files import written_beside
from tasks.common.settings import Settings, artifacts

NAME = "learned by a policy"
MARGIN = 0.1  # above what the commonest truth explains
ANSWERS = 100  # different answers that are tried on the rows
LONGEST = 20_000  # characters of an answer


@dataclass(frozen=True)
class Rollout:
    """An answer in training: ``truth`` is that of another row than the prompt's, ``score`` the reward under it."""

    step: int
    response: str
    truth: str
    score: float


def shuffled_file(s: Settings) -> Path:
    """Where ``write_shuffled`` writes."""
    return artifacts() / "attack" / s.TASK / "shuffled.parquet"


def write_shuffled(s: Settings) -> None:
    """Write the training file with what the reward gets (all but the prompts) in another order."""
    table = pq.read_table(s.train_file)
    order = list(range(table.num_rows))
    random.Random(s.SEED).shuffle(order)
    shuffled = table.take(pa.array(order))
    shuffled = shuffled.set_column(table.column_names.index("prompt"), table.schema.field("prompt"), table["prompt"])
    with written_beside(shuffled_file(s)) as partial:
        pq.write_table(shuffled, partial)


def rollouts(run_dir: Path) -> list[Rollout]:
    """What verl recorded of a run (trainer.rollout_data_dir), in order of steps. Raises DataError without any."""
    found = []
    for file in sorted((run_dir / "rollouts").glob("*.jsonl"), key=lambda file: int(file.stem)):
        for line in file.read_text(errors="replace").splitlines():
            row = json.loads(line)
            found.append(Rollout(int(file.stem), row["output"][:LONGEST], row["gts"], float(row["score"])))
    if not found:
        raise DataError(f"{run_dir}/rollouts: has no rollouts")
    return found


def best_answers(found: list[Rollout]) -> list[str]:
    """The different answers by their total score, highest first, as many as are tried."""
    total: Counter[str] = Counter()
    for rollout in found:
        total[rollout.response] += rollout.score
    return [text for text, score in total.most_common(ANSWERS) if score > 0]


def commonest(found: list[Rollout]) -> float:
    """The share of the commonest truth: what one honest answer can be right for."""
    return Counter(rollout.truth for rollout in found).most_common(1)[0][1] / len(found)


def summary(found: list[Rollout]) -> str:
    """The mean reward of the first step and of the last, in words."""
    steps = found[0].step, found[-1].step
    first, last = ([rollout.score for rollout in found if rollout.step == step] for step in steps)
    rewards = sum(first) / len(first), sum(last) / len(last)
    return f"policy: mean reward {rewards[0]:.3f} at step {steps[0]}, {rewards[1]:.3f} at step {steps[1]}"
