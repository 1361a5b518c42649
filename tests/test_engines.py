"""Entropy from the likeliest tokens, and vLLM's engine beside transformers on a real (very small) model; how many
engines share a GPU, and their end, also of one whose process would go on. An OpenAI-compatible endpoint
as an engine (`make eval BASE_URL=`).
"""

import json
import os
import shutil
import sys
import threading
import time
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import openai
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.adapters import saved
from tests.helpers import task_settings
from verl_tasks import openai_client
from verl_tasks.evaluation import endpoint, engine_pool, engines, sample, sampler
from verl_tasks.evaluation.engine_pool import EngineEnded, Hardware
from verl_tasks.evaluation.engines import LOGPROBS, Request, Sampling, log_probs, token_entropy
from verl_tasks.evaluation.sample import Job
from verl_tasks.machine.hardware import GPU, Nvidia, cpu_dtype
from verl_tasks.models.chat_template import prompt_ids
from verl_tasks.rows import rl_row, rl_schema, write_parquet
from verl_tasks.settings import SettingsError

HOW = Sampling(n=3, greedy=True, temperature=1.0, top_p=1.0, max_prompt_tokens=200, max_tokens=12, seed=0)


def exact(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


@given(st.lists(st.floats(0.001, 100), min_size=5, max_size=60), st.integers(1, 20))
def test_entropy_is_a_lower_bound_within_its_stated_error(weights, k):
    p = np.sort(np.array(weights) / sum(weights))[::-1]
    k = min(k, len(p))
    estimate = token_entropy(np.log(p[:k])[None])[0]
    rest = p[k:].sum()
    gap = rest * np.log((len(p) - k) * min(rest, p[k - 1]) / rest) if rest > 1e-6 else 1e-4
    assert estimate - 1e-6 <= exact(p) <= estimate + gap + 1e-4


def test_entropy_is_exact_for_all_tokens_for_a_uniform_and_for_a_certain_distribution():
    p = np.array([0.5, 0.25, 0.125, 0.125])
    assert token_entropy(np.log(p)[None])[0] == pytest.approx(exact(p))
    assert token_entropy(np.full((2, 20), -np.log(1000))) == pytest.approx([np.log(1000)] * 2)
    certain = np.full((1, 20), -np.inf)
    certain[0, 0] = 0.0
    assert token_entropy(certain)[0] == 0


def test_the_likeliest_tokens_are_read_from_both_forms_of_vllms_output():
    """Flat, and a dict for each token (vLLM 0.11.0), where the sampled one may be among the likeliest."""
    random = np.random.default_rng(0)
    top = -np.sort(random.exponential(size=(3, LOGPROBS)))
    sampled = [top[0, 4], -50.0, top[2, 0]]  # of the second token not among the likeliest
    flat = SimpleNamespace(logprobs=np.column_stack([sampled, top]).ravel().tolist())
    dicts = []
    for row, drawn in zip(top, sampled, strict=True):
        ids = {value: number for number, value in enumerate(row)}
        order = [drawn, *row]
        dicts.append(
            {ids.get(value, 99): SimpleNamespace(logprob=value, rank=ids.get(value, 98) + 1) for value in order}
        )
    assert [len(of) for of in dicts] == [LOGPROBS, LOGPROBS + 1, LOGPROBS]
    for output in (flat, dicts):
        own, likeliest = log_probs(output, [4, 99, 0])
        assert own == pytest.approx(sampled) and likeliest == pytest.approx(top)


# ---- a real engine

CHATS = [[{"role": "user", "content": "hello" * (i + 1)}] for i in range(5)]
REQUESTS = [Request(i, mode, chat) for i, chat in enumerate(CHATS) for mode in ("greedy", "sampled")]
DTYPES = sorted({cpu_dtype(), "float32"})


def asked(engine) -> dict:
    return {(r.index, r.mode): answers for r, answers in engine.generate(REQUESTS, HOW)}


def texts(answers: dict) -> dict:
    return {key: [each.response for each in of] for key, of in answers.items()}


def same(ours: dict, theirs: dict) -> int:
    """Requests with the same responses. One may differ: rounding depends on what is computed together, and now and then
    two tokens are as likely."""
    assert ours.keys() == theirs.keys()
    return sum(ours[key] == theirs[key] for key in ours)


def by_transformers(policy, tokenizer) -> dict:
    """The greedy response to each of CHATS and the mean of its tokens' exact entropies, token by token."""
    found = {}
    for index, messages in enumerate(CHATS):
        ids = prompt_ids(tokenizer, messages)
        start, entropies = len(ids), []
        while len(ids) < start + HOW.max_tokens and ids[-1:] != [tokenizer.eos_token_id]:
            with torch.inference_mode():
                logits = policy(torch.tensor([ids])).logits[0, -1].float()
            entropies.append(exact(logits.softmax(-1).numpy().astype(float)))
            ids.append(int(logits.argmax()))
        found[index] = tokenizer.decode(ids[start:], skip_special_tokens=True), np.mean(entropies)
    return found


def agreeing(ours: dict, theirs: dict) -> int:
    return sum(ours[index, "greedy"][0].response == text for index, (text, _) in theirs.items())


def other_weights(model, folder) -> str:
    """``model`` with other weights, in ``folder``."""
    changed = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.add_(3 * weight.std() * torch.randn_like(weight))  # also the head, which is tied to the embedding
    changed.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    config = folder / "config.json"  # verl writes the tokenizer's ends into it
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 3, "pad_token_id": 3}))
    return str(folder)


@pytest.fixture(scope="module", params=DTYPES)
def engine(request, small_model):
    from verl_tasks.evaluation.engines import VLLMEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setattr("verl_tasks.evaluation.engines.cpu_dtype", lambda: request.param)
        made = VLLMEngine(str(small_model), 300, HOW.seed, 0.2)
        yield made
        made.close()


@pytest.mark.slow
def test_vllm_agrees_with_transformers_also_with_the_weights_that_it_takes(engine, small_model, tmp_path):
    """Greedy text is the same; the entropy from 20 of 258 tokens is below the exact one and near it."""
    dtype = str(engine.llm.model_config.dtype).removeprefix("torch.")
    found = {}
    for model in (other_weights(small_model, tmp_path / "other"), str(small_model)):
        assert engine.load(model)
        found[model] = ours = asked(engine)
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        theirs = by_transformers(policy, engine.tokenizer)
        assert agreeing(ours, theirs) >= 4  # two tokens of a random model may be equally likely in bfloat16
        for index, (text, entropy) in theirs.items():
            if ours[index, "greedy"][0].response == text:
                assert entropy - 0.6 < ours[index, "greedy"][0].entropy <= entropy + 0.02
        drawn = [text for (_, mode), of in texts(ours).items() for text in of if mode == "sampled"]
        assert len(drawn) == 15 and len(set(drawn)) > 10 and same(texts(asked(engine)), texts(ours)) >= 9
    assert same(*map(texts, found.values())) == 0
    config = shutil.copytree(tmp_path / "other", tmp_path / "third") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 5.0, "num_hidden_layers": 1}))
    assert not engine.load(str(saved(small_model, tmp_path / "adapter"))) and not engine.load(str(config.parent))


@pytest.mark.slow
def test_a_model_with_recurrent_layers_is_sampled_and_takes_no_other_weights(small_model, tmp_path, monkeypatch):
    """On a CPU vLLM keeps no prompts of theirs, which it would want in parts; and it would keep some old weights."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr("verl_tasks.evaluation.engines.cpu_dtype", cpu_dtype)  # not what the fixture has put there
    from verl_tasks.evaluation.engines import VLLMEngine

    values = json.loads((small_model / "config.json").read_text())
    kept = {n: values[n] for n in values if n.endswith("_token_id") or n.startswith(("num_", "hidden_size", "vocab"))}
    mamba = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
    config = FalconH1Config(**kept | mamba, initializer_range=0.2, intermediate_size=96)
    model, other = (str(shutil.copytree(small_model, tmp_path / name)) for name in ("model", "other"))
    for folder in (model, other):
        FalconH1ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    engine = VLLMEngine(model, 300, HOW.seed, 0.2)
    dtype = str(engine.llm.model_config.dtype).removeprefix("torch.")
    theirs = by_transformers(AutoModelForCausalLM.from_pretrained(model, dtype=dtype), engine.tokenizer)
    found, taken = asked(engine), engine.load(other)
    engine.close()
    assert agreeing(found, theirs) >= 3 and not taken


@pytest.mark.slow
def test_a_prompt_that_is_too_long_is_not_sampled_and_an_answer_is_streamed(engine):
    ((_, (found,)),) = engine.generate([Request(9, "sampled", [{"role": "user", "content": "x" * 300}])], HOW)
    assert found.finish_reason == "prompt_too_long"
    assert "".join(engine.stream(CHATS[1], HOW))


@pytest.mark.long  # the pool with other engines is below
@pytest.mark.parametrize("engine", [cpu_dtype()], indirect=True)
def test_two_engines_answer_as_one_does_and_a_lost_one_is_told(engine, small_model, tmp_path):
    """The responses of a seeded request are the same, whichever engine samples it."""
    other, found = other_weights(small_model, tmp_path / "other"), []
    pool = Hardware(engines=2).engine(str(small_model), 300, HOW.seed)
    for each in (engine, pool):
        answers = []
        for model in (str(small_model), other):
            assert each.load(model)
            answers.append(texts(asked(each)))
        found.append(answers)
    pool.engines[1][1].kill()
    pool.engines[1][1].join()
    with pytest.raises(EngineEnded):
        list(pool.generate(REQUESTS, HOW))
    pool.close()
    assert same(found[0][0], found[1][0]) >= 9 and same(found[0][1], found[1][1]) >= 9


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (RuntimeError("causal_conv1d_weight_pack: support only width of 4"), True),  # LFM2 on some CPUs
        (AttributeError("'Lfm2Config' object has no attribute 'block_dim'"), True),
        (RuntimeError("Engine core initialization failed. See root cause above."), False),  # the log has it
        (OSError(28, "No space left on device"), False),
    ],
)
def test_a_model_with_which_vllm_does_not_start_is_one_line(monkeypatch, error, ours):
    def no_engine(*args, **kwargs):
        raise error

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=no_engine))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=None))
    monkeypatch.setattr(engines._Platform, "here", lambda model: engines._Platform("bfloat16", ""))
    with pytest.raises(SettingsError if ours else type(error)) as caught:
        engines.VLLMEngine("a/model", 300, 0, 0.2)
    if ours:
        said = f"MODEL=a/model: vLLM does not start with it: {type(error).__name__}: {error}"
        assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_vllm_samples_through_an_adapter_as_peft_does_and_refuses_what_it_does_not_know(
    small_model, tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from verl_tasks.evaluation.engines import VLLMEngine
    from verl_tasks.verl_plugins.certify import policy_of

    config = shutil.copytree(small_model, tmp_path / "unknown") / "config.json"
    for unknown in ({"architectures": ["NoSuchModel"]}, {"model_type": "NoSuchModel"}):
        config.write_text(json.dumps(json.loads(config.read_text()) | unknown))
        with pytest.raises(SettingsError, match=r"^MODEL=\S+/unknown: vLLM does not start with it: .*NoSuchModel"):
            VLLMEngine(str(config.parent), 300, 0, 0.2)
    adapter = str(saved(small_model, tmp_path / "adapter"))
    engine = VLLMEngine(adapter, 300, 0, 0.2)
    ours, streamed = asked(engine), "".join(engine.stream(CHATS[1], HOW))
    engine.close()
    with_peft, base = (by_transformers(policy_of(model), engine.tokenizer) for model in (adapter, str(small_model)))
    assert agreeing(ours, with_peft) >= 4 and agreeing(ours, base) == 0 and streamed


# ---- several engines


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
    hardware = Hardware.of(task_settings("countdown", given))
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
    s = task_settings("countdown", {"STACK": stack, "N_GPUS": "1"})
    on(SMALL, monkeypatch)
    job = Job.of(s, str(tmp_path), tmp_path / "rows", sample.sampling(s))
    assert (job.hardware.engines, job.hardware.sharing) == (engines, engines)


CALLED = Sampling(n=3, greedy=True, temperature=0.7, top_p=0.9, max_prompt_tokens=50, max_tokens=9, seed=1)
KEY = "sk-" + "NobodysBusiness0" * 3
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def asking(text: str, index: int = 0, mode: str = "sampled", tools=None) -> Request:
    return Request(index, mode, [{"role": "user", "content": text}], tools)


@pytest.fixture
def server():
    """Answers with the question and its seed; ``replies`` come first, each a status and a body."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.asked.append((self.headers["Authorization"], body))
            message = {"role": "assistant", "content": f"{body['messages'][-1]['content']} {body['seed']}"}
            answer = {
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "object": "chat.completion",
            }
            answer |= {
                "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
                "id": "1",
                "model": "m",
            }
            status, said = self.server.replies.pop(0) if self.server.replies else (200, answer)
            content = json.dumps(said if "choices" in said or status != 200 else answer | said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.server.write(self.wfile, content)

        def log_message(self, *what):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked, made.replies, made.write = [], [], lambda file, content: file.write(content)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def endpoint_engine(server, monkeypatch):
    monkeypatch.setenv(endpoint.KEY, KEY)
    made = endpoint.EndpointEngine(f"http://127.0.0.1:{server.server_port}/v1", "m")
    yield made
    made.close()


def test_each_sample_is_a_call_with_a_seed_of_its_own_and_greedy_is_one(endpoint_engine, server):
    found = list(endpoint_engine.generate([asking("a"), asking("b", 1), asking("b", 1, "greedy")], CALLED))
    assert sorted(len(completions) for _, completions in found) == [1, 3, 3]
    every = [each for _, completions in found for each in completions]
    of_a = {each.response for each in every if each.response.startswith("a")}
    assert len(of_a) == 3 and all(each.entropy is None and each.tokens == 2 for each in every)
    assert endpoint_engine.used == {"requests": 7, "prompt_tokens": 35, "response_tokens": 14}
    (greedy,) = [body for _, body in server.asked if body["temperature"] == 0]
    assert "top_p" not in greedy and all(body["max_tokens"] == 9 for _, body in server.asked)
    assert {key for key, _ in server.asked} == {f"Bearer {KEY}"}
    ((_, again),) = endpoint_engine.generate([asking("a")], CALLED)
    assert {each.response for each in again} == of_a


def test_a_busy_server_is_asked_again_and_a_refusal_is_one_line(endpoint_engine, server):
    server.replies += [(429, {"error": {"message": "slow down"}}), (503, {"error": {"message": "busy"}})]
    assert len(list(endpoint_engine.generate([asking("a", mode="greedy")], CALLED))) == 1
    assert len(server.asked) == 3
    server.replies.append((401, {"error": {"message": f"wrong key\n{KEY}"}}))
    with pytest.raises(SettingsError, match=r"^MODEL_NAME=m: AuthenticationError: [^\n]*$") as refused:
        list(endpoint_engine.generate([asking("a", mode="greedy")], CALLED))
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("said", ["more than", "does not end"])
def test_a_reply_without_an_end_ends(server, said, monkeypatch):
    def drip(file, content):
        for byte in content:
            file.write(bytes([byte]))
            file.flush()
            time.sleep(0.02)

    monkeypatch.setattr(openai_client, "MOST_BYTES", 5 if said == "more than" else 10**6)
    server.write = drip
    client = openai_client.openai_client(f"http://127.0.0.1:{server.server_port}/v1", "", 0.5, 0)
    began = time.monotonic()
    with pytest.raises((openai.APIConnectionError, openai.APITimeoutError)) as ended:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}], seed=1)
    assert said in str(ended.value.__cause__) and time.monotonic() - began < 3


def test_a_prompt_that_the_model_cannot_hold_is_counted_and_not_asked_again(endpoint_engine, server):
    server.replies.append((400, {"error": {"message": "maximum context length is 50 tokens"}}))
    ((_, (skipped,)),) = endpoint_engine.generate([asking("a", mode="greedy")], CALLED)
    assert skipped.finish_reason == "prompt_too_long" and len(server.asked) == 1


def test_thought_and_calls_stand_as_a_model_writes_them(endpoint_engine, server):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    server.replies.append((200, {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}))
    ((_, (found,)),) = endpoint_engine.generate([asking("a", mode="greedy", tools=TOOLS)], CALLED)
    text = '<think>\nhm\n</think>\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    assert found.response == text and found.finish_reason == "stop"
    assert server.asked[0][1]["tools"] == TOOLS


def test_the_pace_is_kept():
    pace, began = endpoint.Pace(600), time.monotonic()
    for _ in range(4):
        pace.wait()
    assert 0.3 <= time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("url", "name", "said"),
    [
        ("host/v1", "m", "must be http"),
        ("file:///etc/passwd", "m", "must be http"),
        ("https://me:secret@host/v1", "m", "a key goes into OPENAI_API_KEY"),
        ("https://host/v1?key=secret", "m", "a key goes into OPENAI_API_KEY"),
        ("https://host/v1", "", "MODEL_NAME is empty"),
    ],
)
def test_what_cannot_be_asked_is_refused_without_its_secret(url, name, said):
    with pytest.raises(SettingsError, match=said) as refused:
        endpoint.check(url, name)
    assert "secret" not in str(refused.value)
