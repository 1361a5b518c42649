"""Several engines: how many share a GPU, and their end, also of one whose process would go on."""

import json
import os
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import psutil
import pytest

from tests.helpers import exported
from verl_tasks.evaluation import engine_pool, engines, sample, sampler
from verl_tasks.evaluation.engine_pool import Hardware
from verl_tasks.evaluation.sample import Job
from verl_tasks.machine.hardware import GPU, Nvidia
from verl_tasks.rows import rl_row, rl_schema, write_parquet
from verl_tasks.settings import ROOT, SettingsError, load_settings


class Endless:
    """An engine whose process has a thread that goes on after close."""

    def __init__(self, *arguments):
        threading.Thread(target=time.sleep, args=(600,)).start()

    def close(self) -> None:
        pass


class Placed(Endless):
    """An engine that answers with what it sees of the machine."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def generate(self, requests: list, sampling, more=list):
        yield os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("SHARED_GPU"), self.arguments, len(requests)


@pytest.mark.parametrize(("count", "own_process", "closed"), [(1, "0", 0), (1, "1", 1), (2, "0", 1), (2, "1", 1)])
def test_sampling_closes_engines_in_other_processes_at_its_end(count, own_process, closed, monkeypatch, tmp_path):
    """One whose process does not end by itself would keep the sampling process."""
    calls = []
    engine = SimpleNamespace(close=lambda: calls.append("close"))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", own_process)
    monkeypatch.setattr(sampler, "load", lambda job, out, scoring: ([], []))
    monkeypatch.setattr(sampler, "sample", lambda *arguments: calls.append("sample"))
    monkeypatch.setattr(Hardware, "enough", lambda self, *needed: self)
    monkeypatch.setattr(Hardware, "engine", lambda self, *arguments: engine)
    job = Job("model", "rows", 0, engines.Sampling(1, False, 1.0, 1.0, 8, 8, 0), Hardware(count))
    sampler.complete({tmp_path / "out": Job.read(json.loads(json.dumps(asdict(job))))}, None)
    assert calls == ["sample"] + ["close"] * closed


@pytest.mark.medium
def test_a_process_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(engine_pool, "SECONDS_TO_END", 0.5)
    monkeypatch.setattr(engine_pool, "_serve", serve)
    pool = engine_pool.EnginePool(Hardware(2), (Endless,))
    processes = [psutil.Process(process.pid) for _, process in pool.engines]
    assert all(process.is_running() for process in processes)
    pool.close()
    assert not any(process.is_running() for process in processes)


_serve = engine_pool._serve


def serve(connection, arguments) -> None:
    """engine_pool's, with the first of the ``arguments`` as the engine."""
    engines.VLLMEngine, *own = arguments
    _serve(connection, own)


@pytest.mark.medium
def test_engines_that_share_a_gpu_divide_its_memory_and_the_requests(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    monkeypatch.setattr(engine_pool, "_serve", serve)
    pool = Hardware(2, 1, 0.5, sharing=2).engine(Placed, 300, 1)
    try:
        found = sorted(pool.generate([*range(5)], None), key=lambda placed: placed[3])
    finally:
        pool.close()
    assert found == [("4", "2", (300, 1, 0.25, 1), count) for count in (2, 3)]


class Joined(Endless):
    """An engine that answers each request with its process, once another one has joined it."""

    def generate(self, requests: list, sampling, more=list):
        deadline = time.monotonic() + 20
        found = [*requests]
        while len(found) == len(requests):
            assert time.monotonic() < deadline
            found += more()
        yield from ((request, os.getpid()) for request in found)


@pytest.mark.medium
def test_what_joins_an_episode_goes_to_the_engine_of_its_earlier_turns(monkeypatch):
    monkeypatch.setattr(engine_pool, "SECONDS_TO_END", 0.5)
    monkeypatch.setattr(engine_pool, "_serve", serve)
    pool = engine_pool.EnginePool(Hardware(2), (Joined,))
    first, then = ([engines.TurnRequest(n, "sampled", [], turn=turn) for n in range(3)] for turn in (0, 1))
    joins = iter([[], then])
    try:
        answers = [*pool.generate(first, None, lambda: next(joins, []))]
    finally:
        pool.close()
    assert sorted((request.turn, request.index) for request, _ in answers) == [(t, n) for t in (0, 1) for n in range(3)]
    assert len({(request.index, process) for request, process in answers}) == 3
    assert len({process for _, process in answers}) == 2


@pytest.fixture
def placed(monkeypatch) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each process that a pool starts, which none does."""
    found: list[str] = []
    process = SimpleNamespace(start=lambda: found.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    ends = type("Ends", (), {"close": lambda self: None, "recv": lambda self: None})()
    monkeypatch.setattr(engine_pool, "wait", lambda connections, seconds: connections)
    spawn = SimpleNamespace(Pipe=lambda: (ends, ends), Process=lambda **_: process)
    monkeypatch.setattr(engine_pool.multiprocessing, "get_context", lambda kind: spawn)
    return found


@pytest.mark.parametrize(
    ("gpus", "tp", "places"), [(4, 2, ["0,1", "2,3"]), (8, 4, ["0,1,2,3", "4,5,6,7"]), (2, 1, ["0", "1"])]
)
def test_each_engine_has_as_many_gpus_as_share_its_model(gpus, tp, places, placed, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    given = {"STACK": "current", "N_GPUS": str(gpus), "TP": str(tp)}
    hardware = Hardware.of(load_settings(exported(ROOT / "tasks/countdown/train.sh", given)))
    assert (hardware.engines, hardware.tensor_parallel) == (gpus // tp, tp)
    hardware.engine("model", 300, 1)
    assert placed == places
    placed.clear()
    replace(hardware, engines=2 * hardware.engines, sharing=2).engine("model", 300, 1)
    assert sorted(placed) == sorted(2 * places)


def test_engines_that_share_a_model_are_not_started_on_too_few_gpus(placed, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for count in (1, 2):
        with pytest.raises(SettingsError, match=r"^TP=2: visible GPUs: 1; set TP lower$"):
            Hardware(count, tensor_parallel=2).engine("model", 300, 1)
    assert placed == []
    engine_pool.EnginePool(Hardware(2), ())
    assert placed == ["3"]


@pytest.mark.parametrize(("visible", "places"), [(None, ["0", "1"]), ("", ["", ""]), ("-1", ["", ""])])
def test_engines_are_not_placed_on_gpus_that_are_hidden(visible, places, placed, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    engine_pool.EnginePool(Hardware(2), ())
    assert placed == places


def test_another_number_of_engines_goes_on_with_the_same_samples(tmp_path):
    message = [{"role": "user", "content": "?"}]
    rows, scoring = tmp_path / "test.parquet", sample.Scoring(lambda *_, **__: {"score": 1.0}, None, "mark")
    write_parquet([rl_row("countdown", message, "2", "test", n) for n in range(4)], rows, rl_schema())
    how = engines.Sampling(2, False, 1.0, 1.0, 8, 8, 0)
    one, four = (Job(str(tmp_path), str(rows), 0, how, Hardware(n, sharing=n)) for n in (1, 4))
    out = one.folder(tmp_path / "eval") / "rollouts.jsonl"
    assert four.folder(tmp_path / "eval") == out.parent
    _, missing = sample.load(one, out, scoring)
    answered = [engines.Completion("2", "stop", 1, 0.0)] * 2
    engine = SimpleNamespace(generate=lambda requests, sampling: ((each, answered) for each in requests))
    sampler.sample(engine, one, out, missing[:3], scoring)
    kept, missing = sample.load(four, out, scoring)
    assert [rollout.index for rollout in kept] == [0, 0, 1, 1, 2, 2] and [each.index for each in missing] == [3]


GB = 10**9
SMALL = {
    "weights": GB // 2,
    "cores": 16,
    "gpus": 1,
    "tensor_parallel": 1,
    "memory": 80 * GB,
    "ram": 64 * GB,
    "shared": "",
}


def on(machine: dict, monkeypatch) -> None:
    gpus = (GPU("H100", machine["memory"], machine["memory"]),) * machine["gpus"]
    monkeypatch.setattr(engine_pool, "nvidia", lambda: Nvidia("1", "13", gpus) if machine["memory"] else None)
    monkeypatch.setattr(engine_pool, "ram", lambda: (machine["ram"], 2 * machine["ram"]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(machine["cores"]))
    monkeypatch.setenv("SHARED_GPU", machine["shared"])


@pytest.mark.parametrize(
    ("other", "each"),
    [
        ({}, 4),
        ({"cores": 64}, 4),
        ({"cores": 8}, 2),
        ({"cores": 3}, 1),
        ({"ram": 24 * GB}, 3),
        ({"gpus": 2}, 2),
        ({"gpus": 2, "cores": 32}, 4),
        ({"weights": 3 * GB}, 3),
        ({"weights": 6 * GB}, 1),
        ({"weights": 0}, 1),  # not here yet
        ({"memory": 24 * GB}, 4),
        ({"memory": 8 * GB}, 2),
        ({"memory": 0}, 1),  # no GPU
        ({"tensor_parallel": 2, "gpus": 2}, 1),
        ({"shared": "4"}, 1),  # by other trainings
    ],
)
def test_engines_of_a_small_model_share_a_gpu(other, each, tmp_path, monkeypatch):
    has = SMALL | other
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(has["weights"])
    on(has, monkeypatch)
    groups = has["gpus"] // has["tensor_parallel"]
    hardware = Hardware(groups, has["tensor_parallel"], 0.5).shared(str(tmp_path))
    assert (hardware.engines, hardware.sharing) == (groups * each, each)


def test_few_samples_do_not_start_engines_that_share():
    four = Hardware(8, 1, 0.5, sharing=4)  # on two GPUs
    assert four.enough(1024, 8 * engine_pool.ENGINE_SAMPLES) == four
    assert four.enough(1024, 8 * engine_pool.ENGINE_SAMPLES - 1) == Hardware(2, 1, 0.5)
    assert four.enough(1, 1) == Hardware(1, 1, 0.5)
    assert Hardware(2).enough(1, 9999) == Hardware(1)


@pytest.mark.parametrize(("stack", "engines"), [("current", 4), ("cpu", 1)])
def test_only_engines_on_a_gpu_share_it(stack, engines, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    s = load_settings(exported(ROOT / "tasks/countdown/train.sh", {"STACK": stack, "N_GPUS": "1"}))
    on(SMALL, monkeypatch)
    job = Job.of(s, str(tmp_path), tmp_path / "rows", sample.sampling(s))
    assert (job.hardware.engines, job.hardware.sharing) == (engines, engines)
