"""`make export`: a folder for the hub, whose model card has the run's facts and nothing of this machine."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.test_records import make_run
from tests.test_run_report import STEP, checkpoint, evaluate
from tests.test_settings import VALUES
from verl_tasks.reports import export
from verl_tasks.settings import Command, SettingsError, load_settings

TOKEN = "hf_" + "NobodysBusiness0" * 2


@pytest.fixture
def s(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return load_settings(VALUES | {"INIT": "base", "MODEL": "owner/start", "TASK": "countdown"})


@pytest.fixture
def run_dir(s):
    made = make_run(s, metrics={1: STEP, 2: STEP | {"critic/score/mean": 0.75}}, start="owner/start")
    evaluate(made, "0", "owner/start", accuracy=0.1)
    evaluate(made, "1", checkpoint(made), paired=("owner/start", 0.3), accuracy=0.4)
    return made


def command(output: Path, **given) -> Command:
    return load_settings({"OUTPUT": str(output)} | given, cls=Command)


def test_a_whole_model_is_copied_with_a_card_that_its_validator_reads(s, run_dir, small_model, tmp_path):
    source = shutil.copytree(small_model, tmp_path / "checkpoint")
    (source / "optim_world_size_1_rank_0.pt").write_bytes(b"the trainer's own")
    said = export.export(s, command(tmp_path / "out"), run_dir, str(source))
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"README.md", "reward.py", "curves.svg", "config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not [name for name in names if name.endswith(".pt")]
    assert "licence is not known" in said  # of a model that is only an id here
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.base_model == "owner/start" and card.data.library_name == "transformers"
    assert [(each.metric_type, each.metric_value) for each in card.data.eval_results] == [("accuracy", 0.4)]
    assert "| accuracy |" in card.text and "0.300" in card.text and "reward.py" in card.text and "2 steps" in card.text
    assert "| torch |" in card.text and "| numpy |" not in card.text and len(card.text) < 8000
    everything = card.content + (tmp_path / "out/curves.svg").read_text()
    assert str(tmp_path) not in everything and str(Path.home()) not in everything and TOKEN not in everything


def test_the_card_is_about_the_checkpoint_that_is_exported(s, run_dir, small_model, tmp_path):
    """Of steps 1 and 2; steps 1 and 10 were evaluated."""
    evaluate(run_dir, "2", checkpoint(run_dir, 1), accuracy=0.6)
    for number in (1, 2):
        shutil.copytree(small_model, folder := run_dir / f"checkpoints/global_step_{number}/actor/hf")
        export.export(s, command(tmp_path / str(number)), run_dir, str(folder))
    first, second = (ModelCard.load(tmp_path / number / "README.md") for number in "12")
    assert [(each.metric_type, each.metric_value) for each in first.data.eval_results] == [("accuracy", 0.6)]
    assert "0.600 [" in first.text and "0.400 [" not in first.text and "`: 1 step, 0 minutes" in first.text
    assert "not evaluated: make eval TASK=countdown RUN=mine STEP=2" in second.text and not second.data.eval_results
    assert "`: 2 steps, 0 minutes" in second.text


def test_the_reward_is_the_one_that_the_run_was_trained_with(s, run_dir, small_model, tmp_path):
    (recorded,) = run_dir.glob("launches/*/task/reward.py")
    recorded.write_text("# of the training\n")
    export.export(s, command(tmp_path / "a"), run_dir, str(small_model))
    assert (tmp_path / "a/reward.py").read_text() == "# of the training\n"
    recorded.unlink()
    export.export(s, command(tmp_path / "b"), run_dir, str(small_model))
    assert (tmp_path / "b/reward.py").read_bytes() == s.reward_file.read_bytes()


def test_sampling_of_the_base_model_that_differs_from_the_evaluations_is_said(s, run_dir, small_model, tmp_path):
    source = shutil.copytree(small_model, tmp_path / "checkpoint")
    assert "generation_config" not in export.export(s, command(tmp_path / "a"), run_dir, str(source))
    own = {"temperature": 0.7, "top_k": 20, "top_p": s.TOP_P, "min_p": None, "repetition_penalty": 1.1}
    (source / "generation_config.json").write_text(json.dumps(own))
    said = export.export(s, command(tmp_path / "b"), run_dir, str(source))
    assert "has the base model's temperature=0.7, top_k=20, repetition_penalty=1.1, by which others" in said


@pytest.mark.parametrize("home", ["/", ""])
def test_a_home_that_is_no_folder_of_a_user_changes_no_text(home, s, monkeypatch):
    """HOME=/ is what a container has for a user that its image does not know."""
    monkeypatch.setenv("HOME", home)
    said = f"A whole model. https://host/a: 1 / 2, {s.runs_dir.parents[1]}/x."
    assert export.without_paths(said) == "A whole model. https://host/a: 1 / 2, artifacts/x."


def test_a_run_whose_base_model_is_gone_is_exported(s, run_dir, small_model, tmp_path):
    made = json.loads((run_dir / "settings.json").read_text())
    (run_dir / "settings.json").write_text(json.dumps(made | {"start": str(tmp_path / "gone")}))
    assert "licence is not known" in export.export(s, command(tmp_path / "out"), run_dir, str(small_model))
    assert "base_model" not in (tmp_path / "out/README.md").read_text()


def test_what_cannot_be_read_is_one_line_and_leaves_no_folder(s, run_dir, small_model, tmp_path):
    torn = shutil.copytree(small_model, tmp_path / "checkpoint")
    (torn / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(
        SettingsError, match=r"checkpoint: model.safetensors is no whole file of weights .*; take another STEP"
    ):
        export.export(s, command(tmp_path / "out"), run_dir, str(torn))
    for file in run_dir.parents[2].glob("eval/*/*/summary.json"):  # as another version may write them
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "left_out"}))
    with pytest.raises(SettingsError, match=r"/mine: cannot be read \(KeyError: 'left_out'\); correct or remove it"):
        export.export(s, command(tmp_path / "out"), run_dir, str(small_model))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("header", "known"), [("license: mit", "mit"), ("title: a: b", "unknown"), ("\tx: 1", "unknown"), ("", "unknown")]
)
def test_the_licence_is_what_the_base_models_card_can_say(tmp_path, header, known):
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\nThe model.")
    assert export.licence("owner/base", str(tmp_path)) == known


def test_an_adapter_names_its_base_as_others_find_it(s, run_dir, tmp_path):
    (adapter := tmp_path / "adapter").mkdir()
    config = {"base_model_name_or_path": "/data/models/Base-7B", "r": 8, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    said = export.export(s, command(tmp_path / "a"), run_dir, str(adapter))
    assert json.loads((tmp_path / "a/adapter_config.json").read_text())["base_model_name_or_path"] == "Base-7B"
    assert "Base-7B is a folder of this machine: others need its hub id" in said
    export.export(s, command(tmp_path / "b", BASE="owner/Base-7B"), run_dir, str(adapter))
    assert json.loads((tmp_path / "b/adapter_config.json").read_text())["base_model_name_or_path"] == "owner/Base-7B"
    card = ModelCard.load(tmp_path / "b/README.md")
    assert card.data.base_model == "owner/Base-7B" and card.data.library_name == "peft"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"OUTPUT": ""}, "OUTPUT is empty"),
        ({"OUTPUT": "."}, "exists already"),
        ({"OUTPUT": "new", "PUSH": "no-owner"}, "is no hub id"),
        ({"OUTPUT": "new", "PUSH": "owner/name"}, "needs a terminal"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_written(given, said, run_dir):
    with pytest.raises(SettingsError, match=said):
        export.check(load_settings(given, cls=Command), run_dir)
    with pytest.raises(SettingsError, match="no trained model yet"):
        export.check(load_settings({"OUTPUT": "new"}, cls=Command), None)


def test_an_upload_asks_first_and_what_the_hub_refuses_is_one_line(s, run_dir, small_model, tmp_path, monkeypatch):
    export.export(s, command(tmp_path / "out"), run_dir, str(small_model))
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert export.push(tmp_path / "out", "owner/name") == "not uploaded"
    monkeypatch.setattr("builtins.input", lambda question: "y")

    def unreachable(card):  # a test must reach no hub where there is one
        raise ConnectionError(f"no route; token {TOKEN}")

    monkeypatch.setattr(ModelCard, "validate", unreachable)
    with pytest.raises(SettingsError, match=r"^PUSH=owner/name: [^\n]+ stays$") as refused:
        export.push(tmp_path / "out", "owner/name")
    assert TOKEN not in str(refused.value)
