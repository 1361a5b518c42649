"""`make attack POLICY=1`: reinforcement learning against the reward, with the truths of other rows.

No answer to a prompt says what the truth of another row is. So what a policy learns to earn there, it earns by a hole,
or because one answer is right for many rows.
"""

import random
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.common.evaluation.rollouts import dumped
from tasks.common.files import written_beside
from tasks.common.rows import DataError
from tasks.common.settings import Settings, artifacts

NAME = "learned by a policy"
MARGIN = 0.1  # above what the commonest truth explains
ANSWERS = 100  # different answers that are tried on the rows
LONGEST = 20_000  # characters of an answer


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


def rollouts(run_dir: Path) -> pd.DataFrame:
    """What verl recorded of a run (trainer.rollout_data_dir), in order of steps: ``step``, ``response``, ``truth`` (of
    another row than the prompt's) and ``score``, the reward under it. Raises DataError without any."""
    found = []
    for file in sorted((run_dir / "rollouts").glob("*.jsonl"), key=lambda file: int(file.stem)):
        rows = filter(None, dumped(file))
        found += [[int(file.stem), row["output"][:LONGEST], row["gts"], row["score"]] for row in rows]
    if not found:
        raise DataError(f"{run_dir}/rollouts: has no rollouts")
    return pd.DataFrame(found, columns=["step", "response", "truth", "score"])


def best_answers(found: pd.DataFrame) -> list[str]:
    """The different answers by their total score, highest first, as many as are tried."""
    total = found.groupby("response", sort=False)["score"].sum()
    return total[total > 0].nlargest(ANSWERS).index.tolist()


def summary(found: pd.DataFrame) -> str:
    """The mean reward of the first step and of the last, in words."""
    means = found.groupby("step")["score"].mean()
    first, last = (f"{means[step]:.3f} at step {step}" for step in (means.index[0], means.index[-1]))
    return f"policy: mean reward {first}, {last}"
