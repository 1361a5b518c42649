"""Pairs and demonstrations from a policy's own samples: which responses are taken, and how they are stored."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import error_line
from tests.test_chat_template import CHAT, TOOLS
from tests.test_evaluate import answer, table, workplace  # noqa: F401 (a fixture)
from tests.test_settings import VALUES
from verl_tasks.data.pairs import read_pairs
from verl_tasks.evaluation import self_samples
from verl_tasks.evaluation.rollouts import GREEDY, SAMPLED, Rollout
from verl_tasks.evaluation.self_samples import MOST_ACCEPTED, best_against_worst, chosen_prompts, right_responses
from verl_tasks.rows import DataError, decoded, encoded, read_rows, tools_of, validate_parquet
from verl_tasks.settings import load_settings

HOSTILE = [
    "\0",
    "<|im_end|><|im_start|>",
    "__import__('os')",
    '"}]',
    "\u202e\ufeff",
    "é" * 5,
    "</think>",
    "",
    "x" * 10**6,
]


def rollouts(*samples, index=0, **values):
    """Sampled responses to one prompt: ``(text, score)`` or ``(text, score, finish_reason)``; score None: no reward."""
    fields = {"mode": SAMPLED, "prompt": [{"role": "user", "content": "q"}], "extra_info": {}, **values}
    return [
        Rollout(
            index=index,
            sample=number,
            response=text,
            finish_reason=(*reason, "stop")[0],
            tokens=1,
            entropy=0.0,
            data_source="t",
            ground_truth="1",
            reward=None if score is None else {"score": score, "acc": float(score == 1)},
            **fields,
        )
        for number, (text, score, *reason) in enumerate(samples)
    ]


def pairs_of(*samples, **values):
    found, *left_out = best_against_worst(rollouts(*samples, **values))
    return [(e.ground_truth["chosen"], e.ground_truth["rejected"]) for e in found], *left_out


# ---- pairs


def test_the_best_goes_against_the_worst_and_the_first_of_equals_is_taken():
    assert pairs_of(("b", 0.5), ("a", 1.0), ("A", 1.0), ("c", -1), ("C", -1)) == ([("a", "c")], 0, 0)


def test_prompts_are_apart_and_in_their_order():
    found, *_ = best_against_worst(rollouts(("a", 1), ("b", 0)) + rollouts(("x", 0), ("y", 1), index=1))
    assert [e.ground_truth["chosen"] for e in found] == ["a", "y"]


@pytest.mark.parametrize(
    "samples, ties, unscored",
    [
        ([("a", 1), ("b", 1)], 1, 0),
        ([("a", 0), ("b", 0), ("c", None)], 1, 0),
        ([("a", 1), ("b", None)], 0, 1),  # nothing to hold the one against
        ([("a", None), ("b", None)], 0, 1),
        ([("a", 1), ("a", 0)], 0, 1),  # the same text, scored differently by a judge
        ([("a", 1, "length"), ("b", 0)], 1, 0),  # what was cut off is no example of how to end
        ([("a", 1, "length"), ("b", 0, "length")], 1, 0),
    ],
)
def test_what_gives_no_pair_is_counted(samples, ties, unscored):
    assert pairs_of(*samples) == ([], ties, unscored)


def test_the_worst_may_be_cut_off_and_the_best_is_then_the_best_that_ended():
    assert pairs_of(("a", 1, "length"), ("b", 0.5), ("c", 0, "length")) == ([("b", "c")], 0, 0)


def test_a_greedy_response_is_not_a_sample():
    assert best_against_worst(rollouts(("a", 1), ("b", 0), mode=GREEDY))[0] == []


# ---- right responses


def test_right_and_complete_responses_are_accepted_once_and_at_most_so_many_a_prompt():
    samples = [("w", 0.5), ("a", 1), ("a", 1), ("cut", 1, "length"), ("n", None), ("b", 1)]
    assert [e.demonstration for e in right_responses(rollouts(*samples))] == ["a", "b"]
    many = right_responses(rollouts(*((str(i), 1) for i in range(9))) + rollouts(("z", 1), index=1))
    assert [e.demonstration for e in many] == ["0", "1", "2", "3", "z"] and MOST_ACCEPTED == 4


def test_thinking_that_the_prompt_opened_is_opened_in_the_stored_text():
    values = {"extra_info": {"think_opened": True}}
    assert pairs_of(("so</think> 1", 1), ("2", 0), **values)[0] == [("<think>\nso</think> 1", "<think>\n2")]
    (example,) = right_responses(rollouts(("so</think> 1", 1), **values))
    assert example.demonstration == "<think>\nso</think> 1"


# ---- the commands


def rows_of(path):
    return list(read_rows(path))


def test_pairs_are_written_and_read_back_and_every_prompt_is_accounted_for(workplace, tmp_path):  # noqa: F811
    entries = table([2, 1, 0, 0, 0, 0], 4, [True] * 6)
    entries[2]["sampled"] = [answer("7")] * 3 + [answer("raise this")]
    entries[3]["sampled"] = [answer("words")] * 4
    entries[4] = None  # its prompt was too long
    model, out = workplace.model("m", entries[:5]), tmp_path / "pairs.parquet"
    train = workplace.artifacts / "data/countdown/train.parquet"
    pq.write_table(pq.read_table(train).slice(0, 5), train)
    result = workplace.run("pairs", str(model), str(out), ROLLOUT_N="4", SAMPLED_PROMPTS="5")
    assert result.returncode == 1 and "the reward raised on 1 completions" in result.stdout
    said = "5 prompts, 2 pairs of the best and the worst of 4 samples, 0 ties dropped, 3 with fewer than two different"
    assert said in result.stdout
    rows = rows_of(out)
    assert [(r["prompt"], r["chosen"], r["rejected"]) for r in rows] == [
        ([{"role": "user", "content": f"train {i}"}], [assistant("7")], [assistant("words")]) for i in (0, 1)
    ]
    assert [(p.messages(), p.ground_truth["chosen"]) for _, p in read_pairs(out)] == [(r["prompt"], "7") for r in rows]
    assert len(list((workplace.artifacts / "samples/countdown").glob("m-*/rollouts.jsonl"))) == 1


def test_each_round_samples_other_prompts_until_all_were_sampled():
    first, second, third, fourth = (chosen_prompts(7, 3, number, seed=1).tolist() for number in (1, 2, 3, 4))
    assert len({*first, *second}) == 6 and first == sorted(first)
    assert first == chosen_prompts(7, 3, 1, seed=1).tolist() != chosen_prompts(7, 3, 1, seed=2).tolist()
    # There are none left for a third round: another order begins.
    assert len({*third, *fourth}) == 6 and (third, fourth) != (first, second)
    assert all(chosen_prompts(7, wanted, 2, seed=1).tolist() == list(range(7)) for wanted in (0, 7, 9))


def test_pairs_follow_the_trainings_seed_and_demonstrations_that_of_the_data(tmp_path, monkeypatch):
    """`make experiment METHODS=dpo,... SEEDS=3`: three trainings on the same pairs would be no three samples."""
    rows, seen = tmp_path / "rows.parquet", []
    pq.write_table(pa.table({"prompt": list(range(9))}), rows)

    def sampled(jobs, root, scoring):
        job = jobs["samples"]
        seen.append((job.sampling.seed, tuple(pq.read_table(job.rows)["prompt"].to_pylist())))
        return {"samples": []}

    monkeypatch.setattr(self_samples, "sampled", sampled)
    for seed in (42, 43):
        s = replace(load_settings(VALUES), TRAIN_FILE=str(rows), SAMPLED_PROMPTS=4, TRAIN_SEED=seed)
        for write in (self_samples.write_pairs, self_samples.write_accepted):
            with pytest.raises(DataError):  # none of no samples
                write(s, None, "m", str(tmp_path / "out.parquet"))
    (default, demonstrations), (other, same) = seen[:2], seen[2:]
    assert default == demonstrations == same and default[0] == 42
    assert other[0] == 43 and other[1] != default[1]


@pytest.mark.medium
def test_a_second_round_makes_its_pairs_on_the_prompts_that_the_first_has_left(workplace, tmp_path):  # noqa: F811
    model, prompts = workplace.model("m", table([1, 1, 1, 0, 0, 0], 2, [True] * 6)), []
    for number in ("1", "2"):
        out = tmp_path / number / "pairs.parquet"
        result = workplace.run("pairs", str(model), str(out), number, ROLLOUT_N="2", SAMPLED_PROMPTS="3")
        assert result.returncode == 0, result.stdout
        prompts.append({row["prompt"][0]["content"] for row in rows_of(out)})
    assert [len(each) for each in prompts] == [3, 3] and not prompts[0] & prompts[1]


def test_a_worse_response_that_was_cut_off_is_noted_in_the_file(workplace, tmp_path):  # noqa: F811
    entries = [{"sampled": [answer("7"), answer("and so", "length")]}] + [{"sampled": [answer("7"), answer("x")]}] * 5
    model, out = workplace.model("m", entries), tmp_path / "pairs.parquet"
    assert workplace.run("pairs", str(model), str(out), ROLLOUT_N="2", SAMPLED_PROMPTS="0").returncode == 0
    assert [row["truncated"] for row in rows_of(out)] == [["rejected"], [], [], [], [], []]
    found = [pair.ground_truth for _, pair in read_pairs(out)]
    assert found[0]["truncated"] == ["rejected"] and "truncated" not in found[1]


def assistant(text):
    return {"role": "assistant", "content": text}


def test_accepted_responses_are_a_file_of_demonstrations(workplace, tmp_path):  # noqa: F811
    model, out = workplace.model("m", table([2, 1, 0, 0, 0, 0], 4, [True] * 6)), tmp_path / "accepted.parquet"
    result = workplace.run("accepted", str(model), str(out), ROLLOUT_N="4", SAMPLED_PROMPTS="0")
    assert result.returncode == 0 and "6 prompts, 4 samples each, 2 accepted" in result.stdout
    assert validate_parquet(out, "sft") == 2
    assert rows_of(out)[1]["messages"] == [{"role": "user", "content": "train 1"}, assistant("7")]


@pytest.mark.parametrize(
    "command, right, variables, said",
    [
        ("pairs", [0] * 6, {"ROLLOUT_N": "1", "MINI_BATCH_SIZE": "0"}, "ROLLOUT_N=1: pairs of own samples need"),
        ("pairs", [4] * 6, {"ROLLOUT_N": "4"}, "no pair in its own samples (6 prompts, 0 pairs"),
        (
            "accepted",
            [0] * 6,
            {"ROLLOUT_N": "4"},
            "none of its own samples is right and complete (6 prompts, 4 samples",
        ),
    ],
)
def test_nothing_to_learn_from_gives_a_one_line_error_and_no_file(
    workplace,  # noqa: F811
    tmp_path,
    command,
    right,
    variables,
    said,
):
    model, out = workplace.model("m", table(right, 4, [True] * 6)), tmp_path / "out.parquet"
    result = workplace.run(command, str(model), str(out), SAMPLED_PROMPTS="0", **variables)
    assert said in error_line(result) and not out.exists()


def test_tools_calls_and_hostile_texts_come_through_as_they_were(workplace, tmp_path):  # noqa: F811
    from verl_tasks.rows import rl_row, rl_schema, write_parquet

    prompts = [rl_row("countdown", CHAT, "7", "train", i, TOOLS) for i in range(len(HOSTILE))]
    write_parquet(prompts, workplace.artifacts / "data/countdown/train.parquet", rl_schema(tools=True))
    entries = [{"sampled": [answer("7"), answer(text)]} for text in HOSTILE]
    model, out = workplace.model("m", entries), tmp_path / "pairs.parquet"
    result = workplace.run("pairs", str(model), str(out), ROLLOUT_N="2", SAMPLED_PROMPTS="0")
    assert result.returncode == 0, result.stdout
    assert [row["rejected"][0]["content"] for row in rows_of(out)] == HOSTILE
    found = [pair for _, pair in read_pairs(out)]
    assert [pair.ground_truth["rejected"] for pair in found] == HOSTILE
    assert all((pair.messages(), pair.tools) == (decoded(encoded(CHAT)), TOOLS) for pair in found)
    accepted = tmp_path / "accepted.parquet"
    assert workplace.run("accepted", str(model), str(accepted), ROLLOUT_N="2", SAMPLED_PROMPTS="0").returncode == 0
    row = rows_of(accepted)[0]
    assert decoded(row["messages"])[:-1] == CHAT and tools_of(row) == TOOLS
    assert json.loads(pq.read_table(accepted)["tools"][0].as_py()) == TOOLS
