"""The gsm8k task: its reward, its data, its own metrics."""

import importlib.util
import json
import os
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.gsm8k import evaluate, prepare_data
from tasks.gsm8k.reward import compute_score
from verl_tasks import answers, math_answer, prepare

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared/data")) / "gsm8k"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no public GSM8K files here")
SMOLLM2 = ROOT / "artifacts/models/SmolLM2-135M-Instruct"
KEYS = {"score", "acc", "format", "marked", "boxed", "sentence"}


def result(response, truth="18", **kwargs):
    return compute_score("gsm8k", response, truth, **kwargs)


@pytest.mark.parametrize(
    "response, score, how",
    [
        ("9 * 2 = 18\n#### 18", 1.0, "marked"),
        ("#### $18.00.", 1.0, "marked"),
        ("#### **18** eggs a day", 1.0, "marked"),
        ("#### 18%", 1.0, "marked"),
        ("#### 9 * 2 = 18", 1.0, "marked"),
        ("#### 36/2", 1.0, "marked"),
        ("#### 1.8 \\times 10^1", 1.0, "marked"),
        ("#### 17\n#### 18", 1.0, "marked"),
        ("#### 18\n" + "This is long. 24 hours. " * 4000, 1.0, "marked"),
        ("The answer is \\boxed{\\frac{36}{2}}.", 1.0, "boxed"),
        ("The answer is 2 * 9 = 18 dollars.", 1.0, "sentence"),
        ("<think>#### 17</think>\n#### 18", 1.0, "marked"),
        ("#### 17", 0.0, "marked"),
        ("#### 0.18", 0.0, "marked"),
        ("#### -18", 0.0, "marked"),
        ("#### 18 million", 0.0, "marked"),
        ("#### 18\n#### 17", 0.0, "marked"),
        ("\\boxed{17}\nThe answer is 18.", 0.0, "boxed"),
        ("#### 18\n\n#### 2. Check", 1.0, "marked"),
        ("#### 18元", 1.0, "marked"),
        ("#### 18 m²<|im_end|>", 1.0, "marked"),
        ("答案是 18。", 1.0, "sentence"),
        ("#### 48 24/1", 0.0, None),
        ("#### $2\\sqrt{81}$", 0.0, None),
        ("#### 9\\sqrt{4}", 0.0, None),
        ("\\boxed{\\frac{9}{\\frac{1}{2}}}", 0.0, None),
        ("\\boxed{\\gcd(-18,-36)}", 0.0, None),
        ("\\boxed{\\max(18, 2)}", 0.0, None),
        ("#### \\sqrt{323}", 0.0, None),
        ("The answer is 18 or 19.", 0.0, "sentence"),  # of a sentence, the last number
        ("#### 18 or 19", 0.0, None),
        ("#### 17 18 19", 0.0, None),
        ("#### 17, 18, 19", 0.0, None),
        ("#### 17/18/19", 0.0, None),
        ("#### \\{17, 18\\}", 0.0, None),
        ("#### 18 \\; 19", 0.0, None),
        ("#### 18 or 19\n\\boxed{18}", 0.0, None),  # what cannot be read is not looked for elsewhere
        ("#### 9 * 2", 0.0, None),
        ("#### 9 \\times 2", 0.0, None),
        ("#### (9)(2)", 0.0, None),
        ("#### 20 - 2", 0.0, None),
        ("#### \\frac{9 + 9}{1}", 0.0, None),
        ("#### 324^{0.5}", 0.0, None),
        ("#### 18x", 0.0, None),
        ("#### x > 17", 0.0, None),
        ("#### \\infty", 0.0, None),
        ("#### eighteen", 0.0, None),
        ("#### 9**9**9**9", 0.0, None),
        ("<think>#### 18</think>", 0.0, None),
        ("<think>#### 18", 0.0, None),
        ("It makes 18 dollars.", 0.0, None),
        ("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18", 0.0, None),
        ("", 0.0, None),
    ],
)
def test_score(response, score, how):
    found = result(response)
    assert found["score"] == score
    assert found["acc"] == (score == 1.0)
    assert found["format"] == (how is not None)
    assert [name for name in ("marked", "boxed", "sentence") if found[name]] == ([how] if how else [])


@pytest.mark.parametrize(
    "response, strict, flexible",
    [
        ("It makes 18 dollars.", 0.0, 1.0),
        ("It makes 17 dollars.", 0.0, 0.0),
        ("18 dollars for 9 eggs", 0.0, 0.0),
        ("#### 17, not 18", 0.0, 0.0),
        ("#### 17\n18", 0.0, 0.0),
        ("#### 18\n17", 1.0, 1.0),
        ("18</think>", 0.0, 0.0),
    ],
)
def test_variants(response, strict, flexible):
    assert result(response)["score"] == result(response, variant="strict")["score"] == strict
    assert result(response, variant="flexible")["score"] == flexible


@pytest.mark.parametrize("variant", ["strict", "flexible"])
def test_an_answer_inside_a_thought_that_the_prompt_opened_is_none(variant):
    opened = {"think_opened": True}
    for response in ("#### 18", "Wait. \\boxed{18}", "The answer is 18.", "18", "x" * 200_000 + "#### 18"):
        assert result(response, extra_info=opened, variant=variant)["score"] == 0.0
    assert result("9 * 2</think>\n#### 18", extra_info=opened, variant=variant)["score"] == 1.0


@pytest.mark.parametrize("truth", ["1080", "1,080", "1080.0", 1080])
def test_the_ground_truth_may_be_written_in_several_ways(truth):
    assert result("#### $1,080.", truth)["score"] == 1.0


@pytest.mark.parametrize("truth", ["", "eighteen", "17 18", None, {}])
def test_a_ground_truth_that_is_not_a_number_is_an_error(truth):
    with pytest.raises(answers.RewardError, match="ground truth is not a number"):
        result("#### 18", truth)


def test_an_unknown_variant_is_an_error():
    with pytest.raises(answers.RewardError, match=r"variant=lenient .REWARD.: must be one of strict, flexible"):
        result("#### 18", variant="lenient")


FRAGMENTS = (
    "#### \\boxed{ } { answer is \\frac \\text \\sqrt <think> </think> $ \\ % , . - 18 1/2 ** _ = ( ) million e ^ !"
)
FRAGMENTS = [*FRAGMENTS.split(" "), " ", "\n", "9" * 30, "é", "²", "١٨", "\x00", "\ud800"]
responses = st.one_of(st.text(max_size=200), st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join))


@given(responses, st.integers(-(10**9), 10**9), st.sampled_from(["strict", "flexible"]))
def test_any_response_gets_a_score(response, truth, variant):
    found = result(response, str(truth), variant=variant)
    assert found.keys() == KEYS
    assert found["score"] in (0.0, 1.0)
    assert all(value in (0.0, 1.0) for name, value in found.items() if name != "score")
    assert found["marked"] + found["boxed"] + found["sentence"] == found["format"]
    assert (found["score"] == 1.0) == (found["acc"] == 1.0)


@given(st.integers(0, 10**9), st.text("0123456789 ,.$*\n", max_size=60))
def test_text_after_the_answers_line_changes_nothing(number, after):
    assert result(f"#### {number}\n{after}", str(number))["score"] == 1.0


# ---- data


def settings(**changes):
    return SimpleNamespace(**{"SEED": 42, "DIFFICULTY": "easy", "SOURCE": "auto", "FILE": ""} | changes)


@pytest.mark.medium
@pytest.mark.parametrize("difficulty, wanted", [("easy", 128 + 512), ("hard", 512 + 8192)])
def test_generated_problems(difficulty, wanted):
    examples = list(islice(prepare_data.generate(settings(DIFFICULTY=difficulty)), 2 * wanted))
    assert len({example.prompt for example in examples}) > wanted
    for example in examples:
        assert example.ground_truth.isdecimal()
        assert example.demonstration.endswith(f"\n#### {example.ground_truth}")
        assert result(example.demonstration, example.ground_truth)["score"] == 1.0
        assert example.prompt.endswith(prepare_data.INSTRUCTION)


def test_generated_problems_depend_on_the_seed_alone():
    def first(seed):
        return [e.prompt for e in islice(prepare_data.generate(settings(SEED=seed)), 20)]

    assert first(1) == first(1) != first(2)


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="the embedded model is not unpacked")
def test_easy_problems_fit_a_small_model():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    for example in islice(prepare_data.generate(settings()), 1000):
        prompt = tokenizer.apply_chat_template(example.messages(), add_generation_prompt=True, tokenize=False)
        assert len(tokenizer(prompt, add_special_tokens=False).input_ids) <= 192
        assert len(tokenizer(example.demonstration).input_ids) < 96  # and the end


def test_a_row_of_the_public_set():
    solution = "She sells 2*540=<<2*540=1080>>1,080 eggs.\n#### 1,080"
    (example,) = prepare_data.from_record({"question": " How many? ", "answer": solution})
    assert example.prompt == f"How many?\n{prepare_data.INSTRUCTION}"
    assert example.ground_truth == "1080"
    assert example.demonstration == "She sells 2*540=1,080 eggs.\n#### 1,080"


ROW = {"question": "How many?", "answer": "Two.\n#### 2"}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_folder_keeps_its_splits_and_can_be_read_again(tmp_path):
    write_lines(tmp_path / "train.jsonl", [ROW, {**ROW, "question": "And now?"}])
    write_lines(tmp_path / "test.jsonl", [{**ROW, "question": "And then?"}])
    examples = prepare_data.from_file(settings(FILE=str(tmp_path)))
    assert [e.split for e in examples] == [e.split for e in examples] == ["train", "train", "test"]


def test_one_file_has_no_split(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", [ROW])
    assert [e.split for e in prepare_data.from_file(settings(FILE=str(file)))] == [None]


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"question": "How many?"}, "needs the texts `question` and `answer`"),
        ({"question": "", "answer": "#### 2"}, "needs the texts `question` and `answer`"),
        ({"question": 1, "answer": "#### 2"}, "needs the texts `question` and `answer`"),
        ({"question": "How many?", "answer": "2"}, "must end with `#### ` and a number"),
        ({"question": "How many?", "answer": "#### 1,5"}, "must end with `#### ` and a number"),
        ({"question": "How many?", "answer": "#### two"}, "must end with `#### ` and a number"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, problem):
    file = write_lines(tmp_path / "rows.jsonl", [ROW, row])
    with pytest.raises(prepare.DataError, match=f"rows.jsonl: line 2: .*{problem}"):
        list(prepare_data.from_file(settings(FILE=str(file))))


@pytest.mark.medium
@needs_shared
def test_the_public_files():
    examples = list(prepare_data.from_file(settings(FILE=str(SHARED))))
    assert [sum(e.split == split for e in examples) for split in ("train", "test")] == [7473, 1319]
    for example in examples:
        assert "<<" not in example.demonstration
        assert math_answer.read_number(example.ground_truth) is not None
        assert result(example.demonstration, example.ground_truth)["score"] == 1.0


# ---- evaluation and the table of the docs


def scored(response, truth="18"):
    return {"response": response, "ground_truth": truth, "reward": result(response, truth)}


@pytest.mark.parametrize(
    "responses, expected",
    [
        (["9 * 2 = 18\n#### 18"], (1, 0)),
        (["#### 18"], (1, 1)),
        (["<think>9 * 2 = 18</think>#### 18"], (1, 0)),
        (["it makes 18"], (0, 0)),
        (["#### 18 or 19"], (1, 0)),
        (["9 * 2 = $18\n#### 18", "it makes 18", "#### 17", ""], (0.5, 0.25)),
    ],
)
def test_metrics(responses, expected):
    found = evaluate.metrics([scored(response) for response in responses])
    assert tuple(found[name] for name in ("hashes", "no_working")) == expected


@pytest.fixture(scope="module")
def benchmark():
    path = ROOT / "tests/benchmarks/gsm8k_agreement.py"
    spec = importlib.util.spec_from_file_location("gsm8k_agreement", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_shared
def test_the_table_of_the_docs_on_a_few_rows(benchmark):
    with (SHARED / "test.jsonl").open() as file:
        shares = benchmark.measure([json.loads(line)["answer"] for line in islice(file, 20)])["called_right"]
    assert len(benchmark.RIGHT) == 10
    assert all(shares["ours, strict"][style] == 1 for style in benchmark.RIGHT)
    assert all(shares[ours][style] == 0 for style in benchmark.WRONG for ours in ("ours, strict", "ours, flexible"))


def test_the_docs_show_the_table_that_the_script_wrote(benchmark):
    written = json.loads((ROOT / "docs/results/gsm8k-agreement.json").read_text())
    assert benchmark.markdown(written) in (ROOT / "tasks/gsm8k/README.md").read_text()
