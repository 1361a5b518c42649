"""New weights for vLLM: an update that it does not get ends the training (verl_plugins/weight_sync.py). Trainings at
once meet in no socket, and no other user of the machine reaches one (own_sockets.py).
"""

import pytest
import torch

from tests.helpers import SMALL, error_line, make
from verl_tasks.leftovers import LAUNCH


@pytest.fixture(scope="module")
def module():
    from verl_tasks.verl_plugins import weight_sync

    return weight_sync


def model(**tensors: torch.Tensor) -> torch.nn.Module:
    made = torch.nn.Module()
    for name, tensor in tensors.items():
        made.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return made


def sent_of(module, weights: dict[str, torch.Tensor], scaling: float = 1.0) -> dict:
    sums: dict = {}
    passed = dict(module.passing(weights.items(), torch.bfloat16, scaling, sums))
    assert all(passed[name] is weights[name] for name in weights)  # nothing is changed on the way
    return {name: (count, int(each)) for name, (count, each) in sums.items()}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 6, generator=generator) for name in ("a", "b", "c")}


def test_sums_are_the_same_for_the_same_numbers_in_any_order_and_differ_for_one_bit(module):
    tensor = torch.randn(100, 7).bfloat16()
    assert module.total(tensor) == module.total(tensor.flatten().flip(0))
    assert module.total(tensor) == module.total(torch.cat([tensor.flatten(), torch.zeros(9, dtype=torch.bfloat16)]))
    other = tensor.clone()
    other.view(torch.int16)[3, 4] += 1
    assert module.total(tensor) != module.total(other)


def test_the_trainers_float32_is_compared_in_vllms_numbers(module):
    trained = weights()
    engine = model(**{name: tensor.bfloat16() for name, tensor in trained.items()})
    assert module.compared(sent_of(module, trained), [module.of_model(engine)]) == {"a": True, "b": True, "c": True}


def test_shares_of_a_tensor_add_up_and_whole_copies_must_each_agree(module):
    trained = weights()
    halves = [
        {"a": part.bfloat16(), "b": trained["b"].bfloat16(), "fused": part.bfloat16()}
        for part in trained["a"].chunk(2, 1)
    ]
    told = [module.of_model(model(**half)) for half in halves]
    assert module.compared(sent_of(module, trained), told) == {"a": True, "b": True}
    halves[1]["b"] += 1
    told = [module.of_model(model(**half)) for half in halves]
    assert module.compared(sent_of(module, trained), told) == {"a": True, "b": False}


def test_names_are_compared_from_the_layer_on(module):
    assert module.name_of("model.language_model.layers.3.o_proj.weight") == "layers.3.o_proj.weight"
    assert module.name_of("base_model.model.model.layers.3.x.lora_A.weight") == "layers.3.x.lora_A.weight"
    assert module.name_of("model.norm.weight") == "model.norm.weight"


def test_an_adapter_is_compared_with_its_second_matrix_scaled(module):
    from types import SimpleNamespace

    a, b = torch.randn(4, 16), torch.randn(16, 4)
    name = "base_model.model.model.layers.0.mlp.down_proj"
    sent = sent_of(module, {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, scaling=0.75)
    theirs = SimpleNamespace(lora_a=a.bfloat16(), lora_b=b.bfloat16() * 0.75)
    fused = SimpleNamespace(lora_a=[a, a], lora_b=[b, b])
    told = module.of_adapter({"model.layers.0.mlp.down_proj": theirs, "model.layers.0.self_attn.qkv_proj": fused})
    assert module.compared(sent, [told]) == dict.fromkeys(sent, True) and len(sent) == 2
    theirs.lora_b = b.bfloat16()
    assert not all(module.compared(sent, [module.of_adapter({"model.layers.0.mlp.down_proj": theirs})]).values())


class Syncs:
    """A trainer's syncs with an engine that has ``engine``'s numbers each time."""

    def __init__(self, module):
        self.module, self.agreement = module, module.Agreement()

    def __call__(self, trained: dict, engine: dict, step: int) -> str:
        told = self.module.of_model(model(**{name: tensor.bfloat16() for name, tensor in engine.items()}))
        return self.agreement.check(sent_of(self.module, trained), [told], step)


def test_an_engine_that_drops_the_update_ends_the_training(module):
    sync, start = Syncs(module), weights()
    assert sync(start, start, 0) == "" and sync.agreement.due
    with pytest.raises(module.WeightSyncError, match=r"after step 1 .* 3 of 3 tensors differ \(a, b, c\)"):
        sync(weights(1), start, 1)


def test_an_engine_that_never_got_any_weights_ends_the_training(module):
    with pytest.raises(module.WeightSyncError, match="after step 0"):
        Syncs(module)(weights(), weights(5), 0)


def test_it_is_compared_until_an_update_was_seen_to_arrive(module):
    sync, start = Syncs(module), weights()
    sync(start, start, 0)
    assert sync(start, start, 1) == "" and sync.agreement.due  # a step that moved nothing shows nothing
    assert "3 had changed" in sync(weights(1), weights(1), 2)
    assert not sync.agreement.due


def test_a_tensor_that_vllm_changes_by_itself_does_not_count(module):
    sync, start = Syncs(module), weights()
    assert sync(start, start | {"c": -start["c"]}, 0) == ""
    later = weights(1)
    assert "2 had changed" in sync(later, later | {"c": -later["c"]}, 1)


def test_an_engine_without_a_tensor_of_that_name_is_said_not_to_be_compared(module):
    agreement = module.Agreement()
    assert "not compared" in agreement.check(sent_of(module, weights()), [{"other": (1, 1)}], 0)
    assert not agreement.due


@pytest.mark.long  # that real ones are compared: test_end_to_end.py
def test_a_real_engine_that_drops_the_update_ends_the_training_in_one_line(tmp_path, small_model, digits_checkout):

    dropping = (
        "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=tests.dropping_worker.DroppingExtension"
    )
    given = SMALL | {"TASK": "digits", "INIT": "base", "STEPS": "2", "MODEL": str(small_model), "KL_COEF": "0.01"}
    given |= {"ARTIFACTS": str(tmp_path), "LR": "1e-4"}
    result = make("train", f"ARGS={dropping}", cwd=digits_checkout, **given)
    assert "WeightSyncError: after step 1" in error_line(result)


# ---- the socket


VERLS = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"


@pytest.fixture(scope="module")
def own_sockets():
    from verl_tasks.verl_plugins import own_sockets  # here: it imports vLLM

    return own_sockets


@pytest.mark.medium
def test_both_ends_have_the_address_in_the_launchs_folder(own_sockets, tmp_path, monkeypatch):

    def init(self):
        self.zmq_handle = VERLS

    monkeypatch.setattr(own_sockets.ServerAdapter, "__init__", init)
    monkeypatch.setattr(own_sockets.vLLMColocateWorkerExtension, "_get_zmq_handle", lambda self: VERLS)
    launches = [tmp_path / "verl-one", tmp_path / "verl-two"]
    for folder in launches:
        folder.mkdir()
        monkeypatch.setenv(LAUNCH, str(folder))
        address = f"ipc://{folder}/rl-colocate-zmq-01000000-replica-0-rank-0.sock"
        assert own_sockets.OwnSocketAdapter().zmq_handle == address
        assert object.__new__(own_sockets.OwnSocketExtension)._get_zmq_handle() == address
    monkeypatch.setenv(LAUNCH, str(tmp_path / "of another node"))
    assert own_sockets.own(VERLS) == VERLS
    monkeypatch.delenv(LAUNCH)
    assert own_sockets.own(VERLS) == VERLS


@pytest.mark.medium
@pytest.mark.parametrize(("kind", "tied"), [("gemma2", True), ("llama", False), ("mistral3", False)])
def test_a_head_that_is_tied_is_not_sent(own_sockets, monkeypatch, kind, tied):
    """vLLM's Gemma 2 has none of its own, and refuses it. Mistral 3's text model has one, whatever the whole says."""
    import asyncio
    from types import SimpleNamespace

    from transformers import AutoConfig

    sent = []

    async def update(self, weights, **kwargs):
        sent.extend(name for name, _ in weights)

    monkeypatch.setattr(own_sockets.ServerAdapter, "update_weights", update)
    monkeypatch.setattr(own_sockets, "waits_for", lambda *words: None)
    adapter = object.__new__(own_sockets.OwnSocketAdapter)
    adapter.model_config = SimpleNamespace(hf_config=AutoConfig.for_model(kind))
    adapter.replica_rank, adapter._agreement = 0, SimpleNamespace(due=False)
    own = {"model.embed_tokens.weight": 1, "lm_head.weight": 1}
    asyncio.run(adapter.update_weights(iter(own.items()), 0))
    assert sent == [*own][: 2 - tied]


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["mixtral", "phimoe", "qwen3_moe", "llama"])
def test_weights_are_sent_by_the_names_that_a_checkpoint_has(module, kind, tmp_path):
    """vLLM's Mixtral on a GPU: KeyError 'mlp.gate.weight', then, as verl had cut it, 'experts.0.gate_proj.weight'."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_tasks.verl_plugins.patches import transformer_impl

    of_experts = {"qwen3_moe": {"num_experts": 4}, "llama": {}}.get(kind, {"num_local_experts": 4})
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=32, num_key_value_heads=2, **sizes, **of_experts)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    published = load_file(tmp_path / "model.safetensors")
    from_verl = transformer_impl.unfuse_moe_params(iter(model.state_dict().items()), kind)
    sent = dict(module.as_published(from_verl, config))
    assert set(sent) == set(published)
    assert all(torch.equal(sent[name], published[name]) for name in sent)


@pytest.mark.medium
def test_weights_that_are_broadcast_get_these_names_too(own_sockets, monkeypatch):
    """ASYNC=separate: they come one by one, from other GPUs, and each is sent on before the next comes."""
    import asyncio
    from types import SimpleNamespace

    from transformers import AutoConfig

    from verl_tasks.verl_plugins import broadcast

    place = "model.layers.0.mlp"
    here = {f"{place}.gate.weight": torch.ones(4, 6), f"{place}.experts.gate_up_proj": torch.ones(4, 10, 6)}
    engine, order = broadcast.Broadcast(1), []
    texts = [*(broadcast.header(*each).encode() for each in here.items()), broadcast.LAST.encode()]

    def get(key):
        order.append("asked")
        return texts.pop(0)

    engine._store = SimpleNamespace(get=get)
    engine._group = SimpleNamespace(broadcast=lambda tensor, rank: SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(broadcast, "get_torch_device", lambda: SimpleNamespace(current_device=lambda: "cpu"))

    async def update(self, weights, **kwargs):
        order.extend(name for name, _ in weights)

    monkeypatch.setattr(own_sockets.ServerAdapter, "update_weights", update)
    monkeypatch.setattr(own_sockets, "waits_for", lambda *words: None)
    adapter = object.__new__(own_sockets.OwnSocketAdapter)
    adapter.model_config = SimpleNamespace(hf_config=AutoConfig.for_model("mixtral", num_local_experts=4))
    adapter.config, adapter._has_server = SimpleNamespace(dtype="bfloat16"), False
    adapter.replica_rank, adapter._agreement = 0, SimpleNamespace(due=True)
    asyncio.run(adapter.update_weights(engine.receive_weights(), 0))
    experts = [f"experts.{number}.{part}" for part in ("w1", "w3") for number in range(4)]
    names = [f"model.layers.0.block_sparse_moe.{each}.weight" for each in ("gate", *experts)]
    assert order == ["asked", names[0], "asked", *names[1:], "asked"]


def test_verl_and_vllm_take_these_classes(own_sockets):
    from verl.workers.rollout.base import get_rollout_class

    import verl_tasks.verl_plugins.patches  # noqa: F401
    from verl_tasks.verl_plugins.cpu.kept_weights import CPUColocateWorkerExtension

    assert get_rollout_class("vllm", "async") is own_sockets.OwnSocketAdapter
    assert issubclass(CPUColocateWorkerExtension, own_sockets.OwnSocketExtension)
