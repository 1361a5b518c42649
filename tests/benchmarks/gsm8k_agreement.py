"""GSM8K's reward beside verl's own gsm8k scorer and math-verify, on the public test set's answers in several styles.

    PYTHONPATH=. python tests/benchmarks/gsm8k_agreement.py path/to/test.jsonl [--out docs/results/gsm8k-agreement.json]

Each row's worked solution gets its own final answer in ten styles that are right, and in six that must not count.
Prints a Markdown table of what each scorer calls right, and its speed. Writes JSON, with the agreement with ours too.
"""

import argparse
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from math_verify import parse, verify
from verl.utils.reward_score import gsm8k as verl_gsm8k

from tasks.gsm8k.reward import compute_score
from verl_tasks.data.records import Records
from verl_tasks.files import write_json

AFTER = " This follows from the steps above, each of which can be checked on its own." * 5

# The number is written as GSM8K has it (1,080) where {n} stands, without commas where {plain} stands.
RIGHT = {
    "as in the data: `#### 1,080`": "{steps}\n#### {n}",
    "no commas: `#### 1080`": "{steps}\n#### {plain}",
    "decimals: `#### 1080.00`": "{steps}\n#### {plain}.00",
    "currency: `#### $1,080`": "{steps}\n#### ${n}",
    "bold, unit, period: `#### **1,080** dollars.`": "{steps}\n#### **{n}** dollars.",
    "per cent: `#### 1080%`": "{steps}\n#### {plain}%",
    "text of 379 characters after `#### 1,080`": "{steps}\n#### {n}\n{after}",
    "`$\\boxed{1080}$`": "{steps}\nTherefore the final result is $\\boxed{{{plain}}}$.",
    "`\\boxed{\\frac{2160}{2}}`": "{steps}\nTherefore the final result is \\boxed{{\\frac{{{double}}}{{2}}}}.",
    "`The answer is $1,080.`": "{steps}\nThe answer is ${n}.",
}
WRONG = {
    "another number: `#### 1081`": "{steps}\n#### {next}",
    "a list: `#### 1079 1080 1081`": "{steps}\n#### {previous} {plain} {next}",
    "a choice: `#### 1080 or 1081`": "{steps}\n#### {plain} or {next}",
    "corrected: `#### 1080`, then `#### 1081`": "{steps}\n#### {plain}\nNo, once more.\n#### {next}",
    "a sum still to do: `#### 540 + 540`": "{steps}\n#### {half} + {rest}",
    "in the thinking alone: `#### 1080</think>`": "<think>{steps}\n#### {plain}</think>\nI am not sure.",
}


def responses(answer: str) -> tuple[str, dict[str, str]]:
    """The ground truth (without commas) and the response in each style."""
    steps, _, n = answer.rpartition("####")
    plain = n.strip().replace(",", "")
    value = int(plain)
    fields = {
        "steps": re.sub(r"<<[^<>]*>>", "", steps).strip(),
        "n": n.strip(),
        "plain": plain,
        "double": 2 * value,
        "half": value // 2,
        "rest": value - value // 2,
        "next": value + 1,
        "previous": value - 1,
        "after": AFTER.strip(),
    }
    return plain, {name: style.format(**fields) for name, style in {**RIGHT, **WRONG}.items()}


def by_math_verify(response: str, truth: str) -> bool:
    return verify(parse(f"${truth}$"), parse(response))


SCORERS: dict[str, Callable[[str, str], bool]] = {
    "ours, strict": lambda response, truth: compute_score("gsm8k", response, truth)["acc"] == 1,
    "ours, flexible": lambda response, truth: compute_score("gsm8k", response, truth, variant="flexible")["acc"] == 1,
    "verl, strict": lambda response, truth: verl_gsm8k.compute_score(response, truth, "strict") == 1,
    "verl, flexible": lambda response, truth: verl_gsm8k.compute_score(response, truth, "flexible") == 1,
    "math-verify": by_math_verify,
}


def measure(answers: list[str]) -> dict:
    """Shares called right and shares that agree with ours (strict), by style and scorer; seconds by scorer."""
    rows = [responses(answer) for answer in answers]
    compute_score("gsm8k", "#### \\sqrt{4}", "2")  # both start what they start once
    by_math_verify("\\boxed{\\sqrt{4}}", "2")
    verdicts: dict[str, dict[str, list[bool]]] = {}
    speed = {}
    for scorer, judge in SCORERS.items():
        verdicts[scorer] = {style: [] for style in {**RIGHT, **WRONG}}
        times = []
        for truth, texts in rows:
            for style, text in texts.items():
                start = time.perf_counter()
                verdicts[scorer][style].append(bool(judge(text, truth)))
                times.append(time.perf_counter() - start)
        speed[scorer] = {
            "rows_per_second": len(times) / sum(times),
            "p50_ms": 1e3 * statistics.median(times),
            "p99_ms": 1e3 * statistics.quantiles(times, n=100)[98],
            "max_ms": 1e3 * max(times),
        }
    ours = verdicts["ours, strict"]
    called_right = {s: {style: sum(v) / len(v) for style, v in by.items()} for s, by in verdicts.items()}
    agreement = {
        s: {style: sum(a == b for a, b in zip(v, ours[style], strict=True)) / len(v) for style, v in by.items()}
        for s, by in verdicts.items()
    }
    return {"rows": len(answers), "called_right": called_right, "agreement_with_strict": agreement, "speed": speed}


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def markdown(result: dict) -> str:
    """The table of tasks/gsm8k/README.md: what each scorer calls right, in %, where they differ, and its speed."""
    called = result["called_right"]
    scorers = [scorer for scorer in SCORERS if scorer != "ours, flexible"]  # as ours, strict, in all these styles
    rows = []
    for counts, styles in (("yes", RIGHT), ("no", WRONG)):
        for style in styles:
            shares = [called[scorer][style] for scorer in scorers]
            if max(shares) - min(shares) > 0.02:
                rows.append([style, counts, *(f"{100 * share:.1f}" for share in shares)])
    speed = [f"{result['speed'][scorer]['rows_per_second']:,.0f}" for scorer in scorers]
    return table(["answer", "right?", *scorers], [*rows, ["rows per second", "", *speed]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="GSM8K's test.jsonl")
    parser.add_argument("--out", type=Path, default=Path("docs/results/gsm8k-agreement.json"))
    parser.add_argument("--limit", type=int, help="the first so many rows")
    arguments = parser.parse_args()
    result = measure([row["answer"] for row in Records(arguments.data)][: arguments.limit])
    result["versions"] = {name: version(name) for name in ("verl", "math-verify", "latex2sympy2_extended", "sympy")}
    result["machine"] = {"cpus": os.cpu_count(), "python": platform.python_version(), "processor": platform.machine()}
    write_json(arguments.out, result)
    print(markdown(result))


if __name__ == "__main__":
    main()
