"""Bad files and models: one clear line, a non-zero exit, and nothing lost. No engine starts in these tests."""

import json
import re
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import tasks
from tests.helpers import PYTHON, ROOT, checkout_with, error_line, make, outside_make, refused, with_embedded
from tests.test_settings import VALUES
from verl_tasks import errors
from verl_tasks.data import prepare
from verl_tasks.launch.task import compute_score_of
from verl_tasks.models.find import resolve_model
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rows import DataError
from verl_tasks.settings import SettingsError, load_settings

SIZES = {"TASK": "countdown", "STACK": "cpu", "TRAIN_SIZE": "32", "TEST_SIZE": "8", "SFT_SIZE": "32"}


@pytest.fixture
def variables(tmp_path) -> dict[str, str]:
    return {**SIZES, "ARTIFACTS": str(tmp_path / "artifacts")}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Artifacts with the data of SIZES."""
    artifacts = with_embedded(tmp_path_factory.mktemp("prepared") / "artifacts")
    assert make("data", **SIZES, ARTIFACTS=str(artifacts)).returncode == 0
    return artifacts


@pytest.fixture
def data_dir(variables, prepared) -> Path:
    shutil.copytree(prepared, variables["ARTIFACTS"], symlinks=True)
    return Path(variables["ARTIFACTS"]) / "data/countdown"


def test_a_corrupt_parquet_is_named(variables, data_dir):
    (data_dir / "train.parquet").write_bytes(b"PAR1 not really PAR1")
    error = refused("data", **variables)
    assert str(data_dir / "train.parquet") in error and "make data" in error


@pytest.mark.parametrize("text", ["[]", "null", '"text"', "{nope", "[" * 100_000, '{"fingerprint": 1, "rows": 3}'])
def test_a_manifest_that_is_none_counts_as_no_data(text, variables, data_dir):
    (data_dir / "manifest.json").write_text(text)
    error = refused("train", **variables, FROM="train", MODEL="some/model", INIT="base")
    assert "run `make data TASK=countdown`" in error


def test_a_training_file_is_checked_where_the_data_stage_is_left_out(variables, data_dir):
    own = str(data_dir / "test.parquet")
    given = {**variables, "MODEL": "some/model", "INIT": "base", "TRAIN_FILE": own}
    for first in ("model", "train"):
        error = refused("train", **given, FROM=first)
        assert re.search(rf"TRAIN_FILE={own}: \d+ of its prompts are in test\.parquet; remove them", error)


def test_an_unknown_stage_is_refused_before_anything_is_made(variables):
    environment = outside_make() | variables
    command = [PYTHON, "-m", "verl_tasks.launch.main", "evel"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode != 0 and result.stderr.startswith("error: STAGE=evel: no such stage; there are: all, ")
    assert len(result.stderr.splitlines()) == 1 and not Path(variables["ARTIFACTS"]).exists()


@pytest.mark.medium
def test_a_reward_that_cannot_be_loaded_is_named_before_anything_starts(variables, tmp_path):
    checkout = checkout_with("unloadable", tmp_path)
    (checkout / "tasks/unloadable/reward.py").write_text("def compute_score(:")
    for command in ("probe", "eval", "rescore"):
        error = error_line(make(command, cwd=checkout, **{**variables, "TASK": "unloadable"}, ROLLOUTS="x"))
        assert "unloadable/reward.py: cannot be loaded: SyntaxError" in error


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("A = missing", r"loaded: NameError: name 'missing' is not defined \(tasks/unsafe/reward.py:1, in <module>"),
        ("def compute_score(*a): return 1.0", "compute_score has no decorator; write @reward_function above it"),
    ],
)
def test_a_reward_that_nothing_checks_is_refused_and_an_error_at_its_import_has_its_line(
    code, said, tmp_path, monkeypatch
):
    folder = tmp_path / "tasks/unsafe"
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(code)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(folder.parent)])
    monkeypatch.setattr(errors, "ROOT", tmp_path)
    with pytest.raises(RewardError, match=said):
        compute_score_of(replace(load_settings(VALUES), TASK="unsafe"))


@pytest.mark.medium
def test_a_training_file_that_cannot_be_used_is_named(variables, data_dir, tmp_path):
    for file, said in ((tmp_path / "none.parquet", "no such file"), (data_dir / "sft.parquet", "column data_source")):
        error = refused("data", **variables, TRAIN_FILE=str(file))
        assert str(file) in error and said in error
    for name, count in (("test", 8), ("dev", 32)):
        error = refused("data", **variables, TRAIN_FILE=str(data_dir / f"{name}.parquet"))
        assert f"{count} of its prompts are in {name}.parquet" in error
    own_file = tmp_path / "own.parquet"
    pq.write_table(pq.read_table(data_dir / "train.parquet").slice(0, 12), own_file)
    error = refused("data", **variables, TRAIN_FILE=str(own_file), TRAIN_BATCH_SIZE="16")
    assert "12 prompts, less than TRAIN_BATCH_SIZE=16" in error
    result = make("data", **variables, TRAIN_FILE=str(own_file))
    assert result.returncode == 0 and f"training on {own_file}" in result.stdout


@pytest.mark.medium
def test_a_model_without_weights_and_one_without_config_are_named(variables, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    error = error_line(make("train", **variables, MODEL=str(folder)))
    assert f"MODEL={folder}: the folder has no config.json, so it is not a model" in error and "is one" not in error
    inner = folder / "actor/huggingface"  # as in a checkpoint
    inner.mkdir(parents=True)
    (inner / "config.json").write_text("{}")
    assert f"; {inner} is one" in error_line(make("train", **variables, MODEL=str(folder)))
    (folder / "config.json").write_text("{}")
    error = error_line(make("train", **variables, MODEL=str(folder)))
    assert f"MODEL={folder}" in error and "no weights" in error


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: cut(folder / "config.json"), "config.json is not JSON"),
        (lambda folder: cut(folder / "model.safetensors"), "model.safetensors is no whole file of weights"),
        (lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs"), "is no whole file"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.st"}}'),
            "model-2.st is missing, which model.safetensors.index.json names",
        ),
        (lambda folder: cut(folder / "tokenizer.json"), "tokenizer.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json is no JSON object"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json is not JSON"),
        *(
            (
                lambda folder, found=found: (folder / "model.safetensors.index.json").write_text(found),
                "model.safetensors.index.json names no files",
            )
            for found in ("{}", '{"weight_map": null}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}')
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "the folder has no tokenizer"),
    ],
)
def test_a_model_that_was_not_downloaded_whole_is_refused(damage, said, small_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(small_model, folder)
    assert resolve_model(str(folder)) == str(folder)
    damage(folder)
    with pytest.raises(SettingsError, match=f"MODEL={folder}: .*{said}.*; download or copy the folder again"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"max_position_embeddings": None}),
        ("tokenizer.json", {"added_tokens": None}),
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}),
    ],
)
def test_a_tokenizer_that_transformers_refuses_is_one_line(file, change, small_model, tmp_path, monkeypatch):
    """It raises classes of its own. Of a model's own code it asks on the terminal, and would run it."""
    monkeypatch.setattr("builtins.input", lambda *question: pytest.fail("asked"))
    shutil.copytree(small_model, folder := tmp_path / "model")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with pytest.raises(DataError, match=f"MODEL={folder}: no tokenizer to count prompt tokens"):
        prepare.load_tokenizer(str(folder))
    assert prepare._tokenizer_here(str(folder)) is None


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.medium
def test_a_model_whose_checkpoints_do_not_fit_on_the_disk_is_refused(variables, small_model, tmp_path):
    folder = shutil.copytree(small_model, tmp_path / "model")  # its tokenizer
    (folder / "config.json").write_text("{}")
    size = 2 * 10**12
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (folder / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        f.truncate(8 + len(header) + size)  # sparse: takes no space
    error = error_line(make("train", **variables, MODEL=str(folder), INIT="base"))
    assert "GB free" in error and "ARTIFACTS" in error
