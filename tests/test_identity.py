"""Data, warm-up and training each start anew where something changes that they read, and say what."""

import json
import os
from dataclasses import replace

import pytest

from tasks.common.data.prepare import prepare
from tasks.common.launch import train
from tasks.common.rows import Example
from tasks.common.runs import folder
from tasks.common.settings import SettingsError, code_digest, load_settings
from tests.helpers import ROOT, exported

SMALL = {"TRAIN_SIZE": "24", "TEST_SIZE": "8", "DEV_SIZE": "4", "SFT_SIZE": "24", "SFT_BATCH_SIZE": "4", "N_GPUS": "1"}
SMALL |= {"TRAIN_BATCH_SIZE": "4", "MINI_BATCH_SIZE": "4", "SOURCE": "toy", "MODEL": "embedded"}


@pytest.fixture
def s(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    return load_settings(exported(ROOT / "tasks/countdown/train.sh", {"N_GPUS": "1"}) | SMALL)


def toy(changed: int = 0):
    """Sums; of the first ``changed`` training rows another demonstration of the same."""

    def rows(s):
        for number in range(1, 1000):
            end = " " if 12 < number <= 12 + changed else ""
            truth = {"numbers": [number, 2000], "target": number + 2000}
            yield Example(f"{number} and 2000", truth, f"<answer>{number} + 2000</answer>{end}")

    return {"toy": rows}


def marks(s) -> tuple[str, str]:
    return s.sft_fingerprint(), s.rl_fingerprint([])


@pytest.fixture
def code(monkeypatch):
    """A function: as if a file of the task had been edited."""

    def edited(name: str) -> None:
        def digest(program):
            return f"{program.name} edited" if program.name == name else code_digest(program)

        monkeypatch.setattr("tasks.common.settings.code_digest", digest)

    return edited


def test_an_edit_of_the_reward_keeps_the_warm_up_also_where_the_data_imports_it(s, code):
    prepare(s, toy())
    warm_up, training = marks(s)
    code("reward.py")
    assert s.sft_fingerprint() == warm_up and s.rl_fingerprint([]) != training
    code("prepare_data.py")  # or what it imports: the data are made again, and come out the same
    assert not s.data_is_made() and s.sft_fingerprint() != warm_up
    prepare(s, toy())
    assert marks(s) == (warm_up, training)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"MAX_RESPONSE_LENGTH": 96, "MAX_NEW_TOKENS": 96}, "warm-up"),
        ({"GOLD": "error", "REWARD": ""}, "warm-up training"),
        ({"SFT_LR": 1e-3}, ""),
        ({"SEED": 7}, ""),
        ({"LR": 1e-4}, "warm-up"),
        ({"SAVE_FREQ": 3}, "warm-up training"),
    ],
)
def test_a_setting_changes_what_reads_it(s, changes, kept):
    prepare(s, toy())
    warm_up, training = marks(s)
    other = replace(s, **changes)
    if not other.data_is_made():
        prepare(other, toy())
    assert ((other.sft_fingerprint() == warm_up), (other.rl_fingerprint([]) == training)) == (
        "warm-up" in kept,
        "training" in kept,
    )


def test_a_length_that_leaves_demonstrations_out_changes_the_warm_up(s):
    manifest = prepare(s, toy())
    longest = int(manifest["contents"]["longest of embedded"])
    marks_of = {}
    for room in (longest + 50, longest, longest - 1):
        each = replace(s, MAX_PROMPT_LENGTH=room - 40, MAX_RESPONSE_LENGTH=40)
        prepare(each, toy())
        marks_of[room - longest] = each.sft_fingerprint()
    assert marks_of[50] == marks_of[0] != marks_of[-1]


def test_the_test_set_alone_changes_no_training(s):
    prepare(s, toy())
    before = marks(s)
    file = s.data_dir / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {"contents": manifest["contents"] | {"test": "other"}}))
    assert marks(s) == before


def begun(s, kind, parts):
    """A run with a record of what it read."""
    mark = s.sft_fingerprint() if kind == "sft" else s.rl_fingerprint([])
    run_dir = folder.sft_dir(s) if kind == "sft" else folder.rl_dir(s, [])
    folder.record(run_dir, kind, mark, s, "start", [], reads=parts)
    return run_dir


def test_a_line_says_what_starts_anew_and_why(s, code, capsys):
    prepare(s, toy())
    sft, rl = folder.sft_dir(s), folder.rl_dir(s, [])
    train._tell_anew(s, sft, "sft", s.sft_parts(), s.data_dir / "sft.parquet")
    assert capsys.readouterr().out == ""  # the first one
    begun(s, "sft", s.sft_parts())
    begun(s, "rl", s.rl_parts([]))
    prepare(s, toy(12))
    train._tell_anew(s, folder.sft_dir(s), "sft", s.sft_parts(), s.data_dir / "sft.parquet")
    assert capsys.readouterr().out == f"  sft starts anew: 12 demonstrations changed since {sft.name}\n"
    prepare(s, toy())
    stored = s.data_dir.parents[1] / "eval/countdown/m-1/rollouts.jsonl"
    stored.parent.mkdir(parents=True)
    stored.touch()
    code("reward.py")
    other = replace(s, LR=1e-4)
    train._tell_anew(other, folder.rl_dir(other, []), "rl", other.rl_parts([]))
    out = capsys.readouterr().out
    assert f"  train starts anew: LR changed from {s.LR} to 0.0001, reward changed since {rl.name}\n" in out
    assert f"`make rescore TASK=countdown ROLLOUTS={stored}`" in out


def test_a_named_run_is_not_refused_before_its_data_are_there(s):
    s = replace(s, RUN="mine")
    prepare(s, toy())
    run_dir = begun(s, "rl", s.rl_parts([]))
    os.remove(s.data_dir / "manifest.json")
    assert folder.rl_dir(s, []) == run_dir
    with pytest.raises(SettingsError, match=r"RUN=mine: exists with other settings \(LR\)"):
        folder.rl_dir(replace(s, LR=1e-4), [])
    prepare(s, toy())
    assert folder.rl_dir(s, []) == run_dir
