"""What the benchmarks compute of a run's files."""

import json
import sys

import pandas as pd
import pytest

from tests.benchmarks import fresh_prompts


def rows(**scores) -> str:
    """Rollouts as verl dumps them: the scores (float32) of each prompt."""
    lines = [
        {"input": f"system\nCount.\nuser\n{prompt}\nassistant\n", "output": "text", "score": score}
        for prompt, given in scores.items()
        for score in given
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "rollouts").mkdir()
    steps = {
        1: rows(a=[1.0, 0.30000001192092896], shown=[1.0, 1.0]),
        2: rows(a=[1.0, 1.0], b=[0.0, 0.1]),  # a again
        3: rows(c=[1.0, 0.0], d=[1.0, 1.0]),
        10: rows(e=[1.0, 1.0], f=[0.3, 1.0], ab=[1.0, 1.0]),
    }
    for step, text in steps.items():
        (tmp_path / f"rollouts/{step}.jsonl").write_text(text)
    message = [{"role": "system", "content": "Count."}, {"role": "user", "content": "shown"}]
    pd.DataFrame({"messages": [message]}).to_parquet(tmp_path / "sft.parquet")
    return tmp_path


def test_pass_1_is_of_prompts_that_were_not_seen_before(run_dir, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    given = [str(run_dir), "--without", str(run_dir / "sft.parquet"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["fresh_prompts.py", *given])
    fresh_prompts.main()
    result = json.loads(out.read_text())
    assert list(result) == ["1", "2", "3", "10", "1 to 10"]
    assert [found["prompts"] for found in result.values()] == [1, 1, 2, 3, 7]
    assert [found["responses"] for found in result.values()] == [2, 2, 4, 6, 14]
    means = [found["pass@1"]["value"] for found in result.values()]
    assert means == pytest.approx([0.5, 0.0, 0.75, 5 / 6, 4.5 / 7])
    last = result["1 to 10"]["pass@1"]
    assert 0 < last["low"] < last["value"] < last["high"] <= 1
    assert "3: 2 prompts, 0.750 [0.500, 1.000]" in capsys.readouterr().out


def test_demonstrations_count_where_they_are_not_named(run_dir):
    assert fresh_prompts.figures([right for _, right in fresh_prompts.by_step(run_dir / "rollouts")])["prompts"] == 8
