"""`make report`: what stands on the page of a run's folder, read back from its HTML."""

import base64
import importlib.metadata
import json
import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests import results
from tests.helpers import make
from tests.test_records import make_run
from tests.test_settings import VALUES
from verl_tasks.evaluation import plots
from verl_tasks.evaluation.statistics import Estimate
from verl_tasks.reports import run_report
from verl_tasks.reports.samples import Sample
from verl_tasks.runs import launches
from verl_tasks.runs.folder import named
from verl_tasks.settings import SettingsError, load_settings

STEP = {"critic/score/mean": 0.25, "actor/entropy": 0.5, "actor/grad_norm": 1.5, "timing_s/gen": 2.0}
STEP |= {"timing_s/step": 3.0, "perf/throughput": 1234.0, "response_length/mean": 17.0}
ROLLOUT = {"input": "user\n2 and 3\nassistant\n", "output": "<answer>2+3</answer>", "gts": "5", "score": 1.0, "step": 2}
VOID = {"meta", "img", "br"}
RESULT, CODE = "Base → trained", "Data, code and packages"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))
    return load_settings(VALUES | {"INIT": "base", "MODEL": "/models/start"})


DRAWN: dict[str, bytes] = {}


@pytest.fixture(autouse=True)
def pictures_drawn_once(monkeypatch):
    """The pictures take most of a page's time, and are the same in most tests."""
    draw = plots.lines_svg

    def drawn(*what, **how) -> bytes:
        key = repr((what, how))
        if key not in DRAWN:
            DRAWN[key] = draw(*what, **how)
        return DRAWN[key]

    monkeypatch.setattr(plots, "lines_svg", drawn)


class Page(HTMLParser):
    """What a browser would see: per section its text, rows of cells, blocks and pictures; all tags, links and ids."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.links, self.rows, self.blocks, self.pictures = [], [], [], {}, {}, {}
        self.text, self.title = {"": ""}, ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        assert not [name for name in values if name.startswith("on")]
        self.links += [values[name] for name in ("src", "href", "srcset", "action", "data") if name in values]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "h2":
            self.title = ""
        elif tag == "tr":
            self.rows.setdefault(self.title, []).append([])
        elif tag in ("td", "th"):
            self.rows[self.title][-1].append("")
        elif tag == "pre":
            self.blocks.setdefault(self.title, []).append("")
        elif tag == "img":
            self.pictures.setdefault(self.title, []).append((values["alt"], values["src"]))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.text[self.title] = self.text.get(self.title, "") + " "

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.title += data
        elif self.open and self.open[-1] in ("td", "th"):
            self.rows[self.title][-1][-1] += data
        elif self.open and self.open[-1] == "pre":
            self.blocks[self.title][-1] += data
        elif "style" not in self.open:
            self.text[self.title] = self.text.get(self.title, "") + data

    def row(self, section: str, name: str) -> list[str]:
        return next(row for row in self.rows[section] if row[0] == name)


def report(run_dir) -> Page:
    path = run_report.write(run_dir)
    assert path.read_text() == run_report.page(run_dir)  # the same again
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    return Page(path.read_text())


def write_rollouts(run_dir, records, step=1):
    (run_dir / "rollouts").mkdir(exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    (run_dir / f"rollouts/{step}.jsonl").write_text("".join(lines))


def estimate(value):
    return {"value": value, "low": value - 0.0123, "high": value + 0.0456}


def summary(model, **metrics):
    values = {name.replace("_at_", "@"): estimate(value) for name, value in metrics.items()}
    return {"model": model, "prompts": 128, "samples": 4, "left_out": 0, "errors": 0, "metrics": values}


def checkpoint(run_dir, step=10):
    return f"/elsewhere/artifacts/runs/{run_dir.parent.name}/{run_dir.name}/checkpoints/global_step_{step}/actor/hf"


def evaluate(run_dir, name, model, sampling=None, paired=(), prompts=128, **metrics):
    """``paired``: a model, and the difference of accuracy to it."""
    folder = run_dir.parents[2] / f"eval/{run_dir.parent.name}/{name}"
    folder.mkdir(parents=True)
    found = summary(model, **metrics) | {"prompts": prompts}
    if paired:
        change = {"difference": estimate(paired[1]), "p_value": 0.0321, "test": "exact McNemar"}
        found["paired"] = {"to": paired[0], "metrics": {"accuracy": change}}
    (folder / "summary.json").write_text(json.dumps(found))
    meta = {"reward": "r", "model": model, "rows": "test.parquet", "limit": 0, "sampling": sampling or {"n": 4}}
    (folder / "rollouts.meta.json").write_text(json.dumps(meta))


def test_a_look_at_a_few_prompts_replaces_no_evaluation(settings):
    """make eval LIMIT=6, of the base and the trained model, after the one of all prompts."""
    run_dir = make_run(settings, metrics={1: STEP}, start="/models/start")
    for prompts, base, trained in ((128, 0.125, 0.375), (6, 0.5, 1.0)):
        evaluate(run_dir, f"base{prompts}", "/models/start", prompts=prompts, accuracy=base)
        evaluate(run_dir, f"of{prompts}", checkpoint(run_dir), prompts=prompts, accuracy=trained)
    shown = report(run_dir).row(RESULT, "accuracy")[1:3]
    assert shown == [str(Estimate(**estimate(value))) for value in (0.125, 0.375)]


# ---- a whole run


def test_a_run_with_all_has_every_section(settings):
    s = replace(settings, LR=3e-7)
    s.data_dir.mkdir(parents=True)
    (s.data_dir / "manifest.json").write_text(json.dumps({"seed": 77}))
    (s.data_dir / "train.parquet").write_bytes(b"rows")
    metrics = {1: STEP, 2: STEP | {"critic/score/mean": 0.5, "actor/entropy": 0.004}}
    run_dir = make_run(s, metrics=metrics, arguments=["trainer.test_freq=5"], start="/models/start")
    write_rollouts(run_dir, [ROLLOUT | {"score": score} for score in (0.0, 0.5, 1.0)])
    evaluate(run_dir, "base", "/models/start", accuracy=0.125)
    evaluate(run_dir, "trained", checkpoint(run_dir), paired=("/models/start", 0.25), accuracy=0.375)
    launch = launches.launches(run_dir)[-1]
    noted = json.loads((launch / "launch.json").read_text())
    noted["git"] = {"commit": "c0ffee" + "0" * 34, "uncommitted": ["tasks/x.py", "own.py (new)"]}
    noted["judge"] = {"JUDGE_MODEL": "a-judge"}
    (launch / "launch.json").write_text(json.dumps(noted))
    text = run_report.page(run_dir)
    DRAWN.clear()
    page = report(run_dir)
    assert run_report.page(run_dir) == text  # with pictures that were drawn again

    assert list(page.text) == ["", RESULT, "Curves", "Health", "Samples", "Settings", CODE]
    head = " ".join(page.text[""].split())
    for words in ("countdown: mine", "method grpo", "model start", "steps 2/10", "reward 0.500", "trained 6 s"):
        assert words in head, words

    before, after, change = (Estimate(**estimate(value)) for value in (0.125, 0.375, 0.25))
    assert str(after) == "0.375 [0.363, 0.421]"
    assert page.rows[RESULT][0] == ["metric", "base", "grpo", "grpo - base [95 % interval]", "p", "meaning"]
    table = page.row(RESULT, "accuracy")
    assert table[:5] == ["accuracy", str(before), str(after), f"+{change}", "0.0321 (exact McNemar)"]
    assert f"grpo - base: accuracy +{change}, p 0.0321 (exact McNemar): a gain" in page.text[RESULT]
    assert "grpo: mine-step10, 128 prompts, 4 samples each" in page.text[RESULT]

    drawn = [text.partition(": ")[0] for text, _ in page.pictures["Curves"]]
    assert drawn[:3] == ["reward", "entropy, nats", "gradient norm"] and "seconds of each phase" in drawn
    assert page.row("Curves", "critic/score/mean") == ["critic/score/mean", "0.25", "0.5", "0.25", "0.5", "1 to 2"]
    assert page.row("Curves", "perf/throughput")[1] == "1234"

    assert page.row("Health", "collapse")[1:4] == ["2", "1", "2"] and "0.0040" in page.row("Health", "collapse")[4]

    assert re.findall(r"score (?:is )?([\d.]+)", page.text["Samples"]) == ["0.500", "1", "0.5", "0"]
    assert page.blocks["Samples"][:3] == [ROLLOUT["input"], ROLLOUT["output"], ROLLOUT["gts"]]

    assert page.row("Settings", "LR") == ["LR", "3e-07", "1e-05"]
    assert page.rows["Settings"][0] == ["setting", "this run", "default today"]
    end = page.rows["Settings"].index(["setting", "value"])
    other = [row[0] for row in page.rows["Settings"][1:end]]
    assert {"LR", "TRAIN_SIZE", "MODEL"} <= set(other) and "STACK" not in other and "TOP_P" not in other
    every = [row[0] for row in page.rows["Settings"][end:]]
    assert {"STACK", "TOP_P", "LR"} <= set(every) and ["ARGS", "trainer.test_freq=5"] in page.rows["Settings"]
    assert page.row("Settings", "ARGS") == ["ARGS", "trainer.test_freq=5", "(none)"]
    assert page.row("Settings", "JUDGE_MODEL") == ["JUDGE_MODEL", "a-judge", "(none)"]

    found = dict(page.rows[CODE])
    assert found["sha256 of train.parquet"] == noted["data"]["train.parquet"] and len(noted["data"]) == 2
    assert found["commit"] == "c0ffee000000" and found["uncommitted changes"] == "tasks/x.py, own.py (new)"
    assert found["stack"] == "cpu" and found["last launch"] == noted["date"] and found["python"] == noted["python"]
    assert found["torch"] == importlib.metadata.version("torch") and len(found["task: reward.py"]) == 12


def test_the_numbers_of_a_real_training_are_those_of_its_file(settings):
    run_dir = make_run(settings)
    steps = results.metrics()["h200-countdown-two-numbers"]
    lines = [json.dumps({"step": step, "data": data}) + "\n" for step, data in steps.items()]
    (run_dir / "metrics/000.jsonl").write_text("".join(lines))
    records = [*steps.values()]
    page = report(run_dir)
    rows = {row[0]: row[1:] for row in page.rows["Curves"][1:]}
    phases = {name for name in records[0] if name.startswith("timing_s/")}
    assert phases | {"critic/score/mean", "response_length/clip_ratio"} <= rows.keys() and len(phases) > 4
    for name, cells in rows.items():
        values = [record[name] for record in records if name in record]
        assert cells[:4] == [f"{value:.4g}" for value in (values[0], values[-1], min(values), max(values))], name
    for text, source in page.pictures["Curves"]:
        kind, _, content = source.partition(";base64,")
        svg = base64.b64decode(content).decode()
        assert kind == "data:image/svg+xml" and "</svg>" in svg and "<script" not in svg
        assert not re.findall(r"(?:href|src)=\"(?!#)", svg), text


def test_a_curve_is_drawn_where_its_values_are():
    rising, falling = (
        run_report.plots.lines_svg({"a": values}, "t") for values in ({1: 0.0, 2: 1.0}, {1: 1.0, 2: 0.0})
    )
    ends = []
    for svg in (rising, falling):
        paths = re.findall(r'd="M ([\d.]+) ([\d.]+) \s*L ([\d.]+) ([\d.]+) \s*"', svg.decode())
        [line] = [path for path in paths if path[0] != path[2] and path[1] != path[3]]  # not of the grid
        ends.append([float(number) for number in line])
    assert ends[0][0] < ends[0][2] and ends[0][1] > ends[0][3]  # y grows downwards
    assert ends[1][0] < ends[1][2] and ends[1][1] < ends[1][3]


def test_the_pictures_of_many_steps_stay_small():
    values = {step: math.sin(step) for step in range(20_000)}
    few, many = (run_report.plots.lines_svg({"a": dict([*values.items()][:n])}, "t") for n in (500, 20_000))
    assert few.count(b"<use") > 500 > many.count(b"<use") and len(many) < 1_000_000


# ---- which evaluation


def test_evaluations_count_that_were_made_in_the_same_way(settings):
    run_dir = make_run(settings, metrics={1: STEP}, start="/models/start")
    evaluate(run_dir, "other", "/models/other", accuracy=0.9)
    evaluate(run_dir, "trained", checkpoint(run_dir), accuracy=0.5, pass_at_4=0.75)
    page = report(run_dir)
    assert page.rows[RESULT][0] == ["metric", "grpo", "meaning"]
    assert "no evaluation of its base on the same prompts" in page.text[RESULT]
    evaluate(run_dir, "base-hot", "/models/start", {"n": 64}, accuracy=0.8)
    assert page.rows == report(run_dir).rows
    evaluate(run_dir, "base", "/models/start", accuracy=0.25, pass_at_4=0.5)
    page = report(run_dir)
    assert page.rows[RESULT][0] == ["metric", "base", "grpo", "meaning"]
    before, after = (str(Estimate(**estimate(value))) for value in (0.25, 0.5))
    assert page.row(RESULT, "accuracy")[:3] == ["accuracy", before, after]
    evaluate(run_dir, "later", checkpoint(run_dir, 12), accuracy=0.625)
    assert report(run_dir).row(RESULT, "accuracy")[2] == str(Estimate(**estimate(0.625)))


def test_warm_up_and_rounds_stand_between_base_and_trained(settings):
    """artifacts/ was moved twice. Most of the way from base to trained was the warm-up's."""
    s = replace(settings, INIT="sft", MODEL="embedded")
    warm = "/a/artifacts/runs/countdown/sft-1/checkpoints/global_step_8/huggingface"
    first = make_run(s, "mine", metrics={1: STEP}, start=warm)
    start = str(first / "checkpoints/global_step_10/actor/huggingface")
    second = make_run(s, "mine-round2", metrics={1: STEP}, start=start)
    evaluate(first, "base", "/b/artifacts/models/" + run_report.embedded_folder().name, accuracy=0.1)
    evaluate(first, "sft", warm.replace("/a/", "/b/"), accuracy=0.2)
    evaluate(first, "round1", start, paired=(warm.replace("/a/", "/c/"), 0.01), accuracy=0.21)
    page = report(first)
    assert page.rows[RESULT][0][1:5] == ["base", "sft", "grpo", "grpo - sft [95 % interval]"]
    wanted = [str(Estimate(**estimate(value))) for value in (0.1, 0.2, 0.21)]
    assert page.row(RESULT, "accuracy")[1:4] == wanted
    assert "grpo - sft: accuracy +0.010 [-0.002, 0.056], p 0.0321 (exact McNemar): the interval in" in page.text[RESULT]
    evaluate(second, "round2", checkpoint(second), paired=(warm, 0.2), accuracy=0.3)
    page = report(second)
    header = ["metric", "base", "sft", "round1", "round2", "round2 - sft [95 % interval]", "p", "meaning"]
    assert page.rows[RESULT][0] == header and "round2 - sft: accuracy +0.200 [0.188, 0.246]" in page.text[RESULT]
    evaluate(second, "again", checkpoint(second), paired=("/models/other", 0.2), accuracy=0.3)
    assert "None" not in report(second).text[RESULT] and len(report(second).rows[RESULT][0]) == 6


# ---- what is not there


def test_the_report_says_what_a_run_lacks(settings):
    page = report(make_run(settings, metrics={1: {"training/epoch": 0}}, launched=False))
    said = {
        RESULT: "not evaluated: make eval TASK=countdown RUN=mine",
        "Health": "no rule fired",
        "Samples": "no rollouts in",
        CODE: "not known: there is no record in",
    }
    for section, words in said.items():
        assert words in page.text[section], section
    assert "img" not in page.tags


def test_a_run_of_an_older_version_and_a_task_that_is_gone(settings):
    made = make_run(settings, metrics={1: STEP | {"actor/entropy": 0.001}})
    run_dir = made.parent.rename(made.parents[1] / "was_here") / "mine"
    noted = json.loads((run_dir / "settings.json").read_text())
    del noted["settings"]["NNODES"]
    (run_dir / "settings.json").write_text(json.dumps(noted))
    page = report(run_dir)
    assert "the task's defaults are not known" in page.text["Settings"] and page.row("Settings", "LR")[1] == "3e-05"
    assert page.row("Health", "collapse")[1] == "1"


def test_dpo_and_a_warm_up_have_their_own_curves(settings):
    metrics = results.metrics()["h200-countdown-dpo"]
    held_out = {"val/loss": 0.6, "val/accuracy": 0.7, "val/margin": 0.1}
    metrics = metrics | {max(metrics): metrics[max(metrics)] | held_out}
    page = report(make_run(replace(settings, METHOD="dpo"), "dpo-1", metrics=metrics))
    wanted = {"train/loss", "dpo/rewards/accuracies", "timing_s/step", *held_out}
    assert wanted <= {row[0] for row in page.rows["Curves"]}
    page = report(make_run(settings, "sft-1", kind="sft", metrics={1: {"train/loss": 2.5}}))
    assert page.row("Curves", "train/loss")[1] == "2.5" and "the rules are about RL" in page.text["Health"]


# ---- hostile input

HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></div></body><img src=http://evil.example/x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}&lt;b&gt;&amp;",
    "\x1b[31mred\x00\x08\u202eback\u2028\u061c" + "\ud800",
    "']\"><svg onload=alert(1)><a href='javascript:alert(1)'>",
]


def test_what_a_model_wrote_is_text_and_nothing_is_loaded(settings):
    run_dir = make_run(settings, metrics={1: STEP | {f"val-core/{HOSTILE[1]}$\\frac$/acc": 0.5}}, start=HOSTILE[0])
    write_rollouts(run_dir, [ROLLOUT | {"output": text, "input": text, "gts": text} for text in HOSTILE])
    raw = run_report.write(run_dir).read_text()
    page = Page(raw)
    allowed = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "h4", "dl", "div", "dt", "dd", "p"}
    allowed |= {"section", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre", "img"}
    assert set(page.tags) <= allowed
    assert page.links and all(link.startswith("data:image/") for link in page.links)
    assert not re.search(r"url\(|@import", raw)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]", raw)
    shown = page.blocks["Samples"][1::3]
    assert shown[:3] == HOSTILE[:3] and shown[3] == "[31mredback?" and shown[4] == HOSTILE[4]
    assert page.blocks["Samples"][0::3] == page.blocks["Samples"][2::3] == shown


def test_an_episode_is_shown_turn_by_turn_and_what_it_says_is_text(settings):
    run_dir = make_run(settings, metrics={1: STEP})
    turns = [HOSTILE[0], HOSTILE[1], HOSTILE[3]]
    write_rollouts(run_dir, [ROLLOUT | {"output": "all", "turns": turns}])
    raw = run_report.write(run_dir).read_text()
    page = Page(raw)
    assert page.blocks["Samples"][1:4] == [HOSTILE[0], HOSTILE[1], "[31mredback?"] and "script" not in page.tags
    heads = ["turn 1: model", "turn 1: environment", "turn 2: model"]
    assert [page.text["Samples"].count(head) for head in heads] == [1, 1, 1] and "all" not in page.blocks["Samples"]
    write_rollouts(run_dir, [ROLLOUT | {"turns": [f"said {place} " + "x" * 5000 for place in range(99)]}])
    blocks = report(run_dir).blocks["Samples"]
    assert len(blocks) == 2 + run_report.TURNS + 1 and "[… 75 messages left out …]" in blocks
    assert blocks[-2].startswith("said 98") and max(map(len, blocks)) < 1100
    for other in (["one"], "text", {"a": 1}, None, [1, None]):
        write_rollouts(run_dir, [ROLLOUT | {"turns": other}])
        assert len(report(run_dir).blocks["Samples"]) == (4 if other == [1, None] else 3)


def test_without_rollouts_the_samples_are_of_the_evaluation(settings):
    run_dir = make_run(settings, metrics={1: STEP})
    evaluate(run_dir, "mine", checkpoint(run_dir, 1), accuracy=0.5)
    folder = run_dir.parents[2] / "eval/countdown/mine"
    made = {"index": 0, "mode": "greedy", "sample": 0, "finish_reason": "stop", "tokens": 1, "entropy": 0.0}
    made |= {"prompt": [{"role": "user", "content": HOSTILE[0]}], "response": "r", "data_source": "x", "extra_info": {}}
    made |= {"ground_truth": "3", "reward": {"score": 1.0}}
    roles = ("assistant", "tool", "tool")
    made["messages"] = [{"role": role, "content": text} for role, text in zip(roles, "abc", strict=True)]
    lines = [json.dumps(made) + "\n", json.dumps(made | {"reward": None}) + "\n"]
    (folder / "rollouts.jsonl").write_text("".join(lines))
    page = report(run_dir)
    assert page.blocks["Samples"] == [f"user: {HOSTILE[0]}", "a", "b\nc", "3"]
    assert "1 of 1 responses of the evaluation of step 1" in page.text["Samples"]
    (folder / "rollouts.jsonl").write_text("[1]\n")
    with pytest.raises(SettingsError, match=r"/mine: cannot be read \("):
        run_report.write(run_dir)


def test_long_texts_lose_their_middle(settings):
    run_dir = make_run(settings, metrics={1: STEP})
    text = "begin" + "x" * 100_000 + "end"
    write_rollouts(run_dir, [ROLLOUT | {"output": text, "input": text, "gts": {"a": text}}] * 100)
    page = report(run_dir)
    prompt, response, truth = page.blocks["Samples"][:3]
    for shown, limit in ((prompt, 1500), (response, 3000), (truth, 500)):
        assert limit < len(shown) < limit + 60 and "characters left out" in shown
    assert response.startswith("beginx") and response.endswith("xend")
    left_out = int(re.search(r"(\d+) characters", response)[1])
    assert left_out == len(text) - 3000
    assert len(page.blocks["Samples"]) == 3 * run_report.SAMPLES


def test_lines_that_are_no_rollout_are_skipped_and_the_last_step_that_has_any_is_taken(settings):
    run_dir = make_run(settings, metrics=dict.fromkeys((1, 9, 10, 11), STEP))
    write_rollouts(run_dir, [ROLLOUT | {"output": "of a launch that was lost"}], 12)
    (run_dir / "rollouts/².jsonl").touch()
    for step in (1, 9):
        write_rollouts(run_dir, [ROLLOUT | {"output": f"of step {step}"}], step)
    huge = {"output": "of step 10", "parts": 10**400}
    write_rollouts(run_dir, [ROLLOUT | huge, ROLLOUT | {"score": math.nan}, [1], {"score": 1}], 10)
    with (run_dir / "rollouts/10.jsonl").open("a") as file:
        file.write('{"input": "torn')
    page = report(run_dir)
    assert "1 of 1 rollouts of step 10" in page.text["Samples"]
    write_rollouts(run_dir, [], 11)
    assert report(run_dir).blocks["Samples"][1] == "of step 10"
    (run_dir / "rollouts/11.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(SettingsError, match=r"/mine: cannot be read \(RecursionError"):
        run_report.write(run_dir)


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        ([0] * 50 + [1], [1, 0, 0, 0, 0, 0]),
        (range(101), [100, 80, 60, 40, 20, 0]),
        ([0.25, 0.5], [0.5, 0.25]),
        ([1], [1]),
    ],
)
def test_samples_are_of_the_highest_the_lowest_and_scores_between(scores, shown):
    samples = [Sample("", [""], "", {"score": score}) for score in scores]
    assert [sample.rewards["score"] for sample in run_report.spread(samples)] == shown


def test_secrets_are_masked(settings):
    s = replace(settings, MODEL="https://me:pass123@host/model", LOGGER="wandb")
    run_dir = make_run(s, metrics={1: STEP}, start="https://me:pass123@host/model")
    noted = json.loads((run_dir / "settings.json").read_text())
    noted["arguments"] = ["+x.api_key=sk-12345", "+y.eos_token=kept"]  # of a version that did not mask
    noted["settings"]["HF_TOKEN"] = "hf_12345"
    (run_dir / "settings.json").write_text(json.dumps(noted))
    raw = run_report.write(run_dir).read_text()
    for secret in ("pass123", "sk-12345", "hf_12345"):
        assert secret not in raw, secret
    assert "+x.api_key=***" in raw and "eos_token=kept" in raw and "https://***@host/model" in raw


def test_numbers_that_are_none_or_huge_break_nothing(settings):
    steps = {1: STEP, 2: STEP | {"actor/grad_norm": None, "actor/entropy": 1e308, "training/x": "text"}}
    page = report(make_run(settings, metrics=steps | {3: {"actor/grad_norm": math.inf, "actor/entropy": -1e308}}))
    assert page.row("Curves", "actor/grad_norm") == ["actor/grad_norm", "1.5", "inf", "1.5", "1.5", "1 to 3"]
    assert page.row("Curves", "actor/entropy")[3:5] == ["-1e+308", "1e+308"]
    assert page.row("Health", "nan")[1:3] == ["3", "2"]


# ---- which run, and errors


def test_the_newest_run_of_rl_or_dpo_is_taken(settings):
    for name, date, kind in (("new", "2026-03-01", "rl"), ("old", "2026-01-01", "rl"), ("sft-1", "2026-05-01", "sft")):
        launch = launches.launches(make_run(settings, name, kind=kind, metrics={1: STEP}))[-1]
        noted = json.loads((launch / "launch.json").read_text())
        (launch / "launch.json").write_text(json.dumps(noted | {"date": f"{date}T00:00:00+00:00"}))
    make_run(settings, "failed")  # begun today, and ended before its first step
    assert run_report.chosen("countdown", "").name == "new"
    assert run_report.chosen("countdown", "sft-1").name == "sft-1"
    with pytest.raises(SettingsError, match=r"^no RL or DPO run in [^\n]*gsm8k yet: run `make train TASK=gsm8k`$"):
        run_report.chosen("gsm8k", "")


@pytest.mark.medium
def test_make_report_prints_the_path_or_one_line_of_error(settings):
    where = {"ARTIFACTS": os.environ["ARTIFACTS"], "STACK": "cpu", "TASK": "countdown"}
    with pytest.raises(SettingsError, match=r"^RUN=empty: has no metrics in "):
        run_report.write(make_run(settings, "empty"))
    broken = make_run(settings, "broken")
    (broken / "metrics/000.jsonl").write_text("{no json\n")
    make_run(settings, "good", metrics={1: STEP})
    result = make("report", RUN="broken", **where)
    lines = [line for line in result.stdout.splitlines() if not line.startswith("make: ***")]
    assert result.returncode and len(lines) == 1 and "000.jsonl: line 1 is not JSON; remove that line" in lines[0]
    assert not (settings.runs_dir.parents[1] / "reports").exists()
    result = make("report", RUN="good", LR="0.5", **where)  # what is given for a training says nothing of this run
    path = settings.runs_dir.parents[1] / "reports/countdown/good/report.html"
    assert (result.returncode, result.stdout) == (0, f"{path}\n")
    assert path.read_text() == run_report.page(named("good"))
