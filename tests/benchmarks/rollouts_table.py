"""Models beside one another, from the rollouts.jsonl that an evaluation left: an experiment that was cut short.

PYTHONPATH=. python tests/benchmarks/rollouts_table.py OUT.json start=FILE grpo=FILE ...   the first is the start
"""

import sys
from dataclasses import asdict
from pathlib import Path

from tasks.common.evaluation.rollouts import read_rollouts
from tasks.common.evaluation.summary import differences, summarize
from tasks.common.evaluation.tables import comparison_table, markdown_table, p_text
from tasks.common.files import write_json


def main(out: str, *named: str) -> None:
    files = dict(each.split("=", 1) for each in named)
    rollouts = {label: read_rollouts(Path(file))[0] for label, file in files.items()}
    start = next(iter(rollouts))
    summaries = {label: summarize(found, None) for label, found in rollouts.items()}
    pairs = {
        f"{label} - {start}": differences(rollouts[start], found, None)
        for label, found in rollouts.items()
        if label != start
    }
    changes = {
        pair: {
            name: asdict(each.difference) | {"p_value": each.p_value, "test": each.test} for name, each in found.items()
        }
        for pair, found in pairs.items()
    }
    write_json(Path(out), {"summaries": summaries, "differences": changes})
    print(markdown_table(*comparison_table(summaries)))
    rows = [
        [pair, name, each.difference.signed(), p_text(each.p_value)]
        for pair, found in pairs.items()
        for name, each in found.items()
    ]
    print(markdown_table(["pair", "metric", "difference", "p"], rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
