"""A model's folder may bring Python of its own: nothing runs it, and nothing asks on the terminal whether to."""

import ast
import json
import math
import shutil

import pytest

from tests.helpers import ROOT, SMALL, task_settings
from verl_tasks.evaluation import engines
from verl_tasks.launch import doctor
from verl_tasks.models import find, merge, thin
from verl_tasks.rows import DataError, chat, rl_row, rl_schema, write_parquet
from verl_tasks.settings import SettingsError

LOADERS = ("from_pretrained", "from_config")
STATED = ("trust_remote_code=False", "**EAGER", "**how")  # names of arguments that have it
VERLS = "trust_remote_code=trust_remote_code"  # of verl's config, where it is off
WITHOUT = ("PeftModel", "GenerationConfig")  # they load no code


def calls() -> dict[str, str]:
    """Where the package loads by a class of transformers, and the call."""
    found = {}
    for file in sorted((ROOT / "tasks/common").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            kind, _, name = ast.unparse(node.func).rpartition(".") if isinstance(node, ast.Call) else ("", "", "")
            if name in LOADERS and kind not in WITHOUT:
                found[f"{file.relative_to(ROOT)}:{node.lineno}"] = ast.unparse(node)
    return found


def test_each_loading_says_that_no_code_is_run():
    assert len(found := calls()) > 20
    assert {place: call for place, call in found.items() if not any(text in call for text in (*STATED, VERLS))} == {}


@pytest.fixture
def own_code(small_model, tmp_path, monkeypatch):
    """A model with code of its own, which writes a file when it is run; who asks on the terminal hears yes."""
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = shutil.copytree(small_model, tmp_path / "own")
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    for file, change in (
        ("config.json", {"model_type": "own", "auto_map": names}),
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}),
    ):
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    for generation in folder.glob("generation_config.json"):
        generation.unlink()
    yield folder
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("read", [engines.stop_ids, engines._kind], ids=["stop_ids", "kind"])
def test_an_engine_does_not_run_it(own_code, read):
    with pytest.raises(ValueError, match="contains custom code"):
        read(str(own_code))


def test_what_loads_a_model_refuses_it_in_one_line(own_code, small_model, tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    with pytest.raises(SettingsError, match=r"^TEACHER=.*: its config: .*custom code"):
        find.loaded(AutoConfig, "config", "TEACHER", str(own_code))
    with pytest.raises(SettingsError, match=r"^TEACHER=.*: its tokenizer: .*custom code"):
        find.loaded(AutoTokenizer, "tokenizer", "TEACHER", str(own_code))
    with pytest.raises(SettingsError, match=r"is not an adapter of .*custom code"):
        merge.merge_adapter(small_model, str(own_code), tmp_path / "merged")
    with pytest.raises(SettingsError, match=r"no thin model can be made of it: .*custom code"):
        thin.write(own_code, tmp_path / "thin", 0)


def test_certify_refuses_it_in_one_line(own_code, tmp_path):
    from verl_tasks.verl_plugins.certify import certified, policy_of

    with pytest.raises(DataError, match="custom code"):
        certified(task_settings("gsm8k", SMALL | {"ARTIFACTS": str(tmp_path)}), str(own_code), lambda: None)
    with pytest.raises(ValueError, match="custom code"):
        policy_of(str(own_code))


def test_doctor_tells_it_in_one_line(own_code, tmp_path):
    file = tmp_path / "own.parquet"
    write_parquet([rl_row("countdown", chat("x"), {"target": 1, "numbers": [1]}, "train", 0)], file, rl_schema())
    given = SMALL | {"ARTIFACTS": str(tmp_path), "MODEL": str(own_code), "TRAIN_FILE": str(file)}
    (found,) = doctor.lengths(task_settings("countdown", given), math.inf)
    assert found.state == "error" and "custom code" in found.text and "\n" not in found.text
