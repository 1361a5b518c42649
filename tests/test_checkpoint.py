"""Which folders are whole checkpoints, and that verl resumes from the last of them whatever its tracker says."""

import json
import shutil

import pytest

from tests.helpers import write_checkpoint, write_shards
from verl_tasks.models.merge import has_weights
from verl_tasks.runs.checkpoint import ranks, whole
from verl_tasks.runs.run import Run, last_step, mend_tracker, tracker, whole_steps


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(params=["rl", "critic", "sft"])
def saved(request, tmp_path):
    """A checkpoint of two ranks as verl leaves it."""
    folder = tmp_path / "checkpoints/global_step_4"
    write_checkpoint(folder, 2)
    if request.param == "critic":
        write_shards(folder / "critic", 2)
    if request.param == "sft":
        for file in files(folder / "actor"):
            file.rename(folder / file.name)
        (folder / "actor").rmdir()
        (folder / "data.pt").rename(folder / "data_0.pt")
    return folder


def test_a_checkpoint_counts_only_with_every_file_and_every_file_to_its_end(saved):
    assert whole(saved) and last_step(saved.parents[1]) == 4
    for file in files(saved):
        kept = file.read_bytes()
        file.unlink()
        assert not whole(saved), file
        file.write_bytes(kept[:-1])
        assert not whole(saved) and last_step(saved.parents[1]) == 0, file
        file.write_bytes(kept)
    assert whole(saved)


def test_the_names_of_the_shards_tell_how_many_processes_wrote_them(tmp_path):
    write_shards(tmp_path / "sft", 12)
    (tmp_path / "sft/data_0.pt").touch()
    assert (ranks(tmp_path / "sft"), ranks(tmp_path), ranks(tmp_path / "absent")) == (12, 0, 0)


def test_only_empty_folders_are_no_checkpoint(tmp_path):
    (tmp_path / "actor/huggingface").mkdir(parents=True)
    (tmp_path / "actor/huggingface/config.json").touch()
    assert not whole(tmp_path) and not whole(tmp_path / "absent")


@pytest.mark.parametrize("optimizer", [("optimizer.pt",), ("optimizer.bin", "pytorch_model_fsdp.bin")])
def test_a_checkpoint_of_dpo_has_a_model_and_all_that_resumes_it(tmp_path, optimizer):
    names = ("config.json", "model.safetensors", *optimizer, "scheduler.pt", "trainer_state.json")
    for name in names:
        (tmp_path / name).touch()
    assert whole(tmp_path)
    for name in names:
        (tmp_path / name).unlink()
        assert not whole(tmp_path), name
        (tmp_path / name).touch()


def test_a_model_in_parts_is_whole_with_all_of_them(tmp_path):
    (tmp_path / "config.json").touch()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    assert not has_weights(tmp_path)
    (tmp_path / "model-2.safetensors").touch()
    assert has_weights(tmp_path)


@pytest.mark.parametrize("said", ["", "\0", "6", "8", "4x", None])
def test_verl_resumes_from_the_last_whole_checkpoint(tmp_path, said):
    """6 was removed in part, 8 was being written: neither is whole."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    folder = tmp_path / "checkpoints"
    for step in (2, 4, 6, 8):
        write_checkpoint(folder / f"global_step_{step}")
    shutil.rmtree(folder / "global_step_6/actor")
    (folder / "global_step_8/data.pt").unlink()
    if said is not None:
        tracker(tmp_path).write_text(said)
    mend_tracker(Run.read(tmp_path))
    assert find_latest_ckpt_path(str(folder)) == str(folder / "global_step_4")
    assert [*whole_steps(tmp_path)] == [2, 4]


def test_verl_starts_anew_where_no_checkpoint_is_whole(tmp_path):
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    (tmp_path / "checkpoints/global_step_1").mkdir(parents=True)
    tracker(tmp_path).write_text("")
    mend_tracker(Run.read(tmp_path))
    assert find_latest_ckpt_path(str(tmp_path / "checkpoints")) is None


def test_a_tracker_that_names_a_whole_checkpoint_is_followed_and_kept(tmp_path):
    for step in (2, 4):
        write_checkpoint(tmp_path / f"checkpoints/global_step_{step}")
    tracker(tmp_path).write_text("2")
    mend_tracker(Run.read(tmp_path))
    assert last_step(tmp_path) == 2 and [*whole_steps(tmp_path)] == [2] and tracker(tmp_path).read_text() == "2"
