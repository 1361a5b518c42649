"""Data, warm-up and training each start anew where something changes that they read, and say what."""

import ast
import json
import os
from dataclasses import replace

import pytest

from tests.helpers import ROOT, exported
from verl_tasks.data.prepare import prepare
from verl_tasks.digest import fingerprint, imported
from verl_tasks.files import write_text
from verl_tasks.launch import main
from verl_tasks.rows import Example
from verl_tasks.runs import folder
from verl_tasks.runs.folder import rl_run
from verl_tasks.settings import SettingsError, artifacts, code_digest, load_settings

SMALL = {"TRAIN_SIZE": "24", "TEST_SIZE": "8", "DEV_SIZE": "4", "SFT_SIZE": "24", "SFT_BATCH_SIZE": "4", "N_GPUS": "1"}
SMALL |= {"TRAIN_BATCH_SIZE": "4", "MINI_BATCH_SIZE": "4", "SOURCE": "toy", "MAX_PROMPT_LENGTH": "256"}


@pytest.fixture
def s(tmp_path, monkeypatch, small_model):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    return load_settings(
        exported(ROOT / "tasks/countdown/train.sh", {"N_GPUS": "1"}) | SMALL | {"MODEL": str(small_model)}
    )


def toy(changed: int = 0):
    """Sums; of the first ``changed`` training rows another demonstration of the same."""

    def rows(s):
        for number in range(1, 1000):
            end = " " if 12 < number <= 12 + changed else ""
            truth = {"numbers": [number, 2000], "target": number + 2000}
            yield Example(f"{number} and 2000", truth, f"<answer>{number} + 2000</answer>{end}")

    return {"toy": rows}


def marks(s) -> tuple[str, str]:
    return s.sft_fingerprint(), fingerprint(s.rl_parts([]))


@pytest.fixture
def code(monkeypatch):
    """A function: as if a file of the task had been edited."""

    def edited(name: str) -> None:
        def digest(program):
            return f"{program.name} edited" if program.name == name else code_digest(program)

        monkeypatch.setattr("verl_tasks.settings.code_digest", digest)

    return edited


def test_generated_rows_are_checked_again_before_a_training_once_the_reward_is_edited(s, code, monkeypatch):
    ran, s = [], replace(s, SOURCE="generate")
    prepare(s, {"generate": toy()["toy"]})
    monkeypatch.setattr(main, "script", lambda s, name: ran.append(name))
    assert main.data(main.Job("probe", s, None, [])).startswith("up to date: ") and not ran
    code("reward.py")
    main.data(main.Job("eval", s, None, []))
    assert not ran
    main.data(main.Job("probe", s, None, []))
    assert ran == ["prepare_data.py"]


def test_an_edit_of_the_reward_keeps_the_warm_up_also_where_the_data_imports_it(s, code):
    prepare(s, toy())
    warm_up, training = marks(s)
    code("reward.py")
    assert s.sft_fingerprint() == warm_up and fingerprint(s.rl_parts([])) != training
    code("prepare_data.py")  # or what it imports: the data are made again, and come out the same
    assert not s.made() and s.sft_fingerprint() != warm_up
    prepare(s, toy())
    assert marks(s) == (warm_up, training)


def test_a_setting_changes_what_reads_it(s):
    prepare(s, toy())
    before = marks(s)
    for changes, kept in (
        ({"MAX_RESPONSE_LENGTH": 96, "MAX_NEW_TOKENS": 96}, (True, False)),  # the warm-up, the training
        ({"GOLD": "error", "REWARD": ""}, (True, True)),
        ({"SFT_LR": 1e-3}, (False, False)),
        ({"LR": 1e-4}, (True, False)),
        ({"SAVE_FREQ": 3}, (True, True)),
        ({"SEED": 7}, (False, False)),  # other data
        ({"TEST_SIZE": 16}, (True, True)),
        ({"DEV_SIZE": 8}, (True, False)),  # on which it is validated
        ({"TRAIN_SIZE": 32}, (True, False)),
    ):
        other = replace(s, **changes)
        if not other.made():
            prepare(other, toy())
        assert tuple(mark == old for mark, old in zip(marks(other), before, strict=True)) == kept, changes


def test_a_length_that_leaves_demonstrations_out_changes_the_warm_up(s):
    manifest = prepare(s, toy())
    longest = int(manifest["contents"][f"longest of {s.MODEL}"])
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


@pytest.mark.parametrize("text", ["[]", "{nope", "[" * 100_000, "{}"])
def test_a_manifest_that_cannot_be_read_says_of_no_data_that_they_were_made(s, text):
    missing = s.contents()
    prepare(s, toy())
    assert s.made() and s.contents() != missing
    (s.data_dir / "manifest.json").write_text(text)
    assert s.made() == {} and s.contents() == missing


def test_a_broken_manifest_one_without_its_rows_and_a_missing_parquet_are_made_again(s, monkeypatch):
    made = prepare(s, toy())
    manifest, train = s.data_dir / "manifest.json", s.data_dir / "train.parquet"
    before = train.read_bytes()
    monkeypatch.setattr(main, "script", lambda s, name: prepare(s, toy()))
    for text in ("[]", json.dumps(made | {"rows": 3}), ""):
        manifest.write_text(text) if text else train.unlink()
        assert not main.data(main.Job("eval", s, None, [])).startswith("up to date: ")
        assert json.loads(manifest.read_text()) == made and train.read_bytes() == before


def test_a_line_says_what_starts_anew_and_why(s, code, capsys):
    def begin(kind, s):
        run = folder.sft_run(s) if kind == "sft" else rl_run(s, [])
        folder.note(run, kind, s, "start")
        return run.folder.name, capsys.readouterr().out

    prepare(s, toy())
    (sft, first), (rl, _) = begin("sft", s), begin("rl", s)
    assert first == ""
    prepare(s, toy(12))
    assert begin("sft", s)[1] == f"  sft starts anew: demonstrations changed since {sft}\n"
    prepare(s, toy())
    assert begin("rl", replace(s, RUN="again")) == ("again", "")  # the user's name alone is new
    os.utime(artifacts() / "runs/countdown/again/settings.json", (0, 0))
    code("reward.py")
    names = (f"{rl}-step1-0a", f"{rl}-step2-0b", "another-model-0c")  # from the oldest on
    stored = [artifacts() / f"eval/countdown/{name}/rollouts.jsonl" for name in names]
    for time, file in enumerate(stored):
        write_text(file, "")
        os.utime(file, (time, time))
    out = begin("rl", replace(s, LR=1e-4))[1]
    assert f"  train starts anew: LR changed from {s.LR} to 0.0001, reward changed since {rl}\n" in out
    assert f"`make rescore TASK=countdown ROLLOUTS={stored[1]}` scores its samples again" in out


def test_a_named_run_is_not_refused_before_its_data_are_there(s):
    s = replace(s, RUN="mine")
    prepare(s, toy())
    run_dir, parts = rl_run(s, []).folder, s.rl_parts([])
    folder.record(run_dir, "rl", fingerprint(parts), s, "start", [], reads=parts)
    os.remove(s.data_dir / "manifest.json")
    assert rl_run(s, []).folder == run_dir
    with pytest.raises(SettingsError, match=r"RUN=mine: exists with other settings \(LR\)"):
        rl_run(replace(s, LR=1e-4), [])
    prepare(s, toy())
    assert rl_run(s, []).folder == run_dir


def test_the_data_are_made_by_the_dialogues_and_not_by_the_benchmark():
    script = ROOT / "tasks/tool_calling/prepare_data.py"
    names = {str(path.relative_to(ROOT)) for path in imported(ast.parse(script.read_bytes()), script)}
    assert "tasks/tool_calling/dialogues.py" in names and "tasks/common/data/prepare.py" in names
    assert "tasks/tool_calling/bfcl.py" not in names


LOADED = {
    "by its name": "import importlib\nhelper = importlib.import_module('helper')",
    "by a name that is made": "import importlib\nhelper = importlib.import_module('lib.' + 'hel' + 'per')",
    "from its file": "from importlib import util\nspec = util.spec_from_file_location('x', HERE / 'lib' / 'helper.py')",
    "by __import__": "helper = __import__('hel' + 'per')",
    "by runpy": "import runpy\nhelper = runpy.run_path(f'{HERE}/helper.py')",
    "relative": "from . import helper",
    "of a package beside": "from .lib.helper import score",
    "of a package beside, by its name alone": "from lib import helper",
}


@pytest.mark.parametrize("how", LOADED)
def test_a_helper_that_a_reward_loads_is_part_of_it(tmp_path, how):
    def digest(name: str, text: str) -> str:
        folder = tmp_path / name
        (folder / "lib").mkdir(parents=True)
        (folder / "reward.py").write_text(LOADED[how])
        (folder / "test_reward.py").write_text(text)
        helper = folder / ("lib/helper.py" if "lib" in LOADED[how] else "helper.py")
        helper.write_text(text if name != "tests edited" else "score = 1")
        return code_digest(folder / "reward.py")

    before = digest("before", "score = 1")
    assert digest("same", "score = 1") == digest("tests edited", "score = 2") == before != digest("after", "score = 2")
