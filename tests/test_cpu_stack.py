"""The cpu stack: verl runs on our platform and engines, and a patch stops when its line of verl has changed. vLLM
samples the right shares, never an impossible token, and a seed's tokens whatever is beside it; its engine and
worker leave the cores to each other.
"""

import importlib
import threading
import time
import types

import pytest
import torch

from tests.helpers import on_our_platform
from tests.test_settings import VALUES
from verl_tasks.machine import hardware
from verl_tasks.machine.hardware import cpu_dtype, number_bytes
from verl_tasks.settings import load_settings
from verl_tasks.stacks import cpu
from verl_tasks.training import verl_config

SHAPES = [(2, 7), (3, 256), (700,)]
FOUND = f"""
import json
import torch
import verl
from verl.utils import model
from verl_tasks.verl_plugins.cpu.verl_platform import expect
from verl.plugin.platform import get_platform
from verl.utils import torch_functional as f
from verl.workers.engine.base import EngineRegistry

device = get_platform().current_device()
found = {{
    "device": [str(torch.ones(1).to(device).device), f"cpu:{{device}}", get_platform().is_ipc_supported()],
    "engine": EngineRegistry.get_engine_cls("language_model", "fsdp2").__module__,
    "patched": [f.logprobs_from_logits_v2.__module__, f.entropy_from_logits.__module__],
}}

torch.manual_seed(0)
logits = 5 * torch.randn(2, 7, 50)
labels = torch.randint(0, 50, (2, 7))
log_probs = f.logprobs_from_logits(logits, labels)
exact = logits.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
found["log-probs"] = [list(log_probs.shape), (log_probs - exact).abs().max().item()]

for shape in {SHAPES}:
    logits = (5 * torch.randn(*shape, 50)).requires_grad_()
    entropy = f.entropy_from_logits(logits)
    exact = torch.distributions.Categorical(logits=logits.double()).entropy()
    (gradient,), (wanted,) = (torch.autograd.grad(e.sum(), logits) for e in (entropy, exact))
    errors = [(a - b).abs().max().item() for a, b in ((entropy, exact), (gradient, wanted))]
    found[str(shape)] = [entropy.shape == exact.shape, *errors]
try:
    expect(model.load_valuehead_model, "a line that verl never had")
except RuntimeError as error:
    found["expect"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict:
    """What one process with verl and our platform found."""
    return on_our_platform(FOUND)


@pytest.mark.medium
def test_verl_runs_on_our_platform_and_engines(found):
    assert found["device"] == ["cpu", "cpu:0", False]
    assert found["engine"] == "verl_tasks.verl_plugins.cpu.verl_platform"


@pytest.mark.medium
def test_a_patch_stops_in_one_line_when_its_line_of_verl_has_changed(found):
    said = "verl.utils.model.load_valuehead_model no longer contains `a line that verl never had`"
    assert said in found["expect"] and "\n" not in found["expect"]


@pytest.mark.medium
def test_log_probs_of_verl_are_taken_in_one_operation(found):
    assert found["patched"][0] == "verl_tasks.verl_plugins.cpu.verl_platform"
    shape, error = found["log-probs"]
    assert shape == [2, 7] and error < 1e-6


@pytest.mark.medium
@pytest.mark.parametrize("shape", SHAPES)
def test_the_entropy_of_verl_is_taken_in_parts(shape, found):
    assert found["patched"][1] == "verl_tasks.verl_plugins.cpu.verl_platform"
    same_shape, error, error_of_gradient = found[str(shape)]
    assert same_shape and error < 1e-5 and error_of_gradient < 1e-5


@pytest.mark.parametrize(
    "flags, dtype",
    [
        ("flags\t\t: fpu avx avx2 avx512f avx512bw avx512_bf16 avx512_fp16", "bfloat16"),
        ("flags : avx2 amx_bf16 amx_tile", "bfloat16"),
        ("Features\t: fp asimd sve bf16 i8mm", "bfloat16"),  # ARM
        ("flags : fpu avx avx2 avx512f avx512bw avx512vl", "float32"),
        ("flags : fpu avx avx2", "float32"),
        ("Features : fp asimd", "float32"),
    ],
)
def test_a_cpu_without_instructions_for_bfloat16_computes_in_float32(tmp_path, flags, dtype):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: some CPU\n{flags}\nbogomips : 5399.99\n")
    assert cpu_dtype(tmp_path / "cpuinfo") == dtype
    assert cpu_dtype(tmp_path / "none") == "float32"


@pytest.fixture(params=["bfloat16", "float32"])
def dtype(request, monkeypatch) -> str:
    """The cpu stack as on a CPU that computes in it."""
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "cpu_dtype", lambda: request.param)
        importlib.reload(cpu)
        yield request.param
    importlib.reload(cpu)


@pytest.mark.parametrize("stage", ["train", "all", "eval", "compare"])
def test_in_float32_an_evaluation_takes_half_of_the_test_prompts(dtype, stage):
    given = {"TASK": "countdown", "STACK": "cpu", "STAGE": stage}
    tested = {"bfloat16": 0, "float32": 64}[dtype]
    assert tested == load_settings(given).LIMIT
    assert not load_settings(given | {"LIMIT": "0"}).LIMIT
    assert not load_settings(given | {"STAGE": "batch"}).LIMIT


def test_trainers_and_engines_of_the_cpu_stack_have_its_type(tmp_path):
    s, dtype = load_settings(VALUES), cpu_dtype()
    config = verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, "model", tmp_path))
    policy, rewards = config.actor_rollout_ref, config.reward.reward_model
    trained = (policy.actor.fsdp_config, policy.ref.fsdp_config, config.critic.fsdp)
    assert {each.mixed_precision.param_dtype for each in trained} == {dtype}
    assert {policy.rollout.dtype, rewards.rollout.dtype} == {dtype}
    overrides = verl_config.sft_overrides(s, "model", tmp_path, tmp_path / "sft.parquet")
    assert verl_config.compose("sft_trainer_engine", overrides).engine.mixed_precision.param_dtype == dtype
    assert verl_config.memory_plan(config).number == number_bytes(on_cpu=True) == (4 if dtype == "float32" else 2)
    assert number_bytes(on_cpu=False) == 2


# ---- vLLM's sampling, which imports it


@pytest.fixture(scope="module")
def sampler():
    from verl_tasks.verl_plugins.cpu import sampling

    return sampling


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeded", [False, True])
def test_tokens_have_their_probabilities(sampler, seeded):
    shares, rows = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05]), 20_000
    torch.manual_seed(0)
    generators = {row: generator(row) for row in range(rows)} if seeded else {}
    found = sampler.sample(shares.expand(rows, -1), generators)
    counts = torch.bincount(found, minlength=5) / rows
    assert counts[1] == 0
    assert ((counts - shares).abs() <= 4 * (shares * (1 - shares) / rows).sqrt()).all(), counts


@pytest.mark.slow
@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_ends_of_the_interval_are_possible_tokens(sampler, monkeypatch, uniform, token):
    monkeypatch.setattr(torch, "rand", lambda *size, **kwargs: torch.full(size, uniform, dtype=torch.float64))
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, 2.0, -torch.inf]]).expand(3, -1)
    assert sampler.sample(logits.softmax(-1), {1: generator(0)}).tolist() == [token] * 3


@pytest.mark.slow
def test_a_row_with_a_seed_does_not_depend_on_the_others(sampler):
    probs = torch.randn(8, 49152, generator=generator(1)).softmax(-1)
    alone = [int(sampler.sample(probs[row : row + 1], {0: generator(row)})) for row in range(8)]
    together = sampler.sample(probs, {row: generator(row) for row in range(0, 8, 2)})
    assert together[::2].tolist() == alone[::2] and len(set(alone)) > 4


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["raw_logprobs", "processed_logits", "processed_logprobs"])
def test_vllm_samples_by_it(sampler, kept):
    module = sampler.TopKTopPSampler(kept)
    assert sampler.topk_topp_sampler.random_sample is sampler.sample
    logits = torch.randn(4, 100, generator=generator(2))
    tokens, returned = module.forward(logits.clone(), {}, torch.tensor([1] * 4), None)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert (returned is None) == (kept == "raw_logprobs")
    if kept == "processed_logprobs":
        assert returned.exp().sum(-1).allclose(torch.ones(4))


@pytest.mark.slow
def test_ranks_are_counted_without_compiling(sampler):
    rank = sampler.vllm_sampler.batched_count_greater_than
    assert not hasattr(rank, "__wrapped__")
    assert rank(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[2.0]])).tolist() == [2]


@pytest.fixture
def queue():
    """Both ends of the queue between vLLM's engine and its worker."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    from verl_tasks.verl_plugins.cpu import asleep  # noqa: F401

    writer = MessageQueue(1, 1, max_chunk_bytes=1000)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=reader.wait_until_ready)
    ready.start()
    writer.wait_until_ready()
    ready.join()
    return writer, reader


@pytest.mark.slow
def test_the_engine_waits_for_its_worker_asleep(queue):
    writer, reader = queue
    writer.enqueue("a step")
    assert reader.dequeue(timeout=10) == "a step"
    threading.Timer(0.5, writer.enqueue, ["its tokens"]).start()
    began = time.thread_time()
    assert reader.dequeue(timeout=10) == "its tokens"
    assert time.thread_time() - began < 0.05


@pytest.mark.slow
def test_who_sleeps_is_woken_by_a_message_soon_after_another(queue):
    writer, reader = queue
    read = []

    def reads():
        for _ in range(1000):
            read.append(reader.dequeue(timeout=10))

    threading.Thread(target=reads, daemon=True).start()
    for number in range(1000):
        while len(read) < number:
            time.sleep(0.0001)
        began = time.monotonic()
        if number % 2:
            time.sleep(0.0002)  # it sleeps again
        writer.enqueue(number)
        while len(read) == number:
            time.sleep(0.0001)
        assert time.monotonic() - began < 3  # vLLM's reader looks by itself after 5 s


@pytest.mark.slow
def test_new_weights_of_a_convolution_reach_what_its_layer_reads(monkeypatch):
    """As in Falcon-H1 and Granite 4, whose layers read a view of the original, and Qwen3.5, whose read the packed."""
    from verl_tasks.verl_plugins.cpu import kept_weights

    def receives(worker):
        assert layer.weight.shape == (32, 1, 4)
        layer.weight.data.copy_(new)
        kept_weights._keep_weight(layer, remove_weight=True)  # verl's step 3

    layer, new = torch.nn.Module(), torch.randn(32, 1, 4).bfloat16()
    layer.weight = torch.nn.Parameter(torch.zeros(32, 1, 4, dtype=torch.bfloat16), requires_grad=False)
    read = layer.weight.view(32, 4)
    monkeypatch.setattr(kept_weights.OwnSocketExtension, "update_weights_from_ipc", receives)
    worker = object.__new__(kept_weights.CPUColocateWorkerExtension)
    worker.model_runner = types.SimpleNamespace(model=torch.nn.Sequential(layer))
    kept_weights._keep_weight(layer, remove_weight=True)
    for _ in range(2):
        new = torch.randn(32, 1, 4).bfloat16()
        worker.update_weights_from_ipc()
        assert torch.equal(read, new[:, 0])
    packs = torch.cpu._is_avx512_bf16_supported()
    assert (layer.weight.shape == (32, 1, 4)) == (not packs)
    assert torch.equal(layer.weight.flatten().sort()[0], new.flatten().sort()[0])
