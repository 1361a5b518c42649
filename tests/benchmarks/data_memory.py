"""Time and memory of `json_to_parquet` on files of more and more rows.

    PYTHONPATH=. python tests/benchmarks/data_memory.py [--rows 10000 100000 1000000] [--suffix .json]

Each row has a question of about 300 characters and an answer. Every size runs in a process of its own; prints a
Markdown table of seconds and of the process's peak memory, beside that of a process which only imports.
"""

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

RUN = """
import resource, sys, time
from tasks.common.data.convert import convert, parse
start = time.perf_counter()
if len(sys.argv) > 1:
    convert(parse(sys.argv[1:]))
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def rows(count: int) -> Iterator[dict]:
    rng = random.Random(1)
    for number in range(count):
        digits = " ".join(str(rng.random()) for _ in range(15))
        yield {"question": f"Question {number}: {digits}", "answer": f"so it is {number} #### {number}"}


def write(path: Path, count: int) -> None:
    with path.open("w", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, ("question", "answer"))
            writer.writeheader()
            writer.writerows(rows(count))
            return
        array = path.suffix == ".json"
        file.write("[" if array else "")
        for index, row in enumerate(rows(count)):
            file.write(f"{',' if array and index else ''}{json.dumps(row)}\n")
        file.write("]" if array else "")


def measured(*arguments: str) -> tuple[float, float]:
    """Seconds, and MiB of memory at the peak."""
    result = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=True)
    seconds, mebibytes = map(float, result.stdout.split())
    return seconds, mebibytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--suffix", choices=(".json", ".jsonl", ".csv"), default=".json")
    options = parser.parse_args()
    print("| rows | file, MB | seconds | peak memory, MiB |\n|---|---|---|---|")
    print(f"| 0 (imports) | | | {measured()[1]:.0f} |", flush=True)
    for count in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"rows{options.suffix}"
            write(path, count)
            seconds, peak = measured(str(path), str(Path(folder) / "out"))
            print(f"| {count:,} | {path.stat().st_size / 1e6:.0f} | {seconds:.0f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
