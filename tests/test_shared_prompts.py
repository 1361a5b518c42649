"""The cpu stack computes once what sequences begin with in common: what comes out is what verl computes row by row."""

from dataclasses import replace

import pytest
import torch

from tests.helpers import on_our_platform
from verl_tasks.machine.memory import EMBEDDED_CONFIG, Plan, begun_alike, least_work, passed, shapes

# A process with our platform: verl's engine computes each batch in its own way and with shared tokens once.
COMPARED = """
import json, sys
from types import SimpleNamespace
import torch, verl
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl_tasks.verl_plugins.cpu import shared_prompts
from verl_tasks.verl_plugins.cpu.verl_platform import CPUEngineWithLMHead
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32", attn_implementation="sdpa")
engine = object.__new__(CPUEngineWithLMHead)
config = SimpleNamespace(entropy_checkpointing=True, entropy_from_logits_with_chunking=False)
engine.__dict__.update(module=model, pad_to_length=False, use_ulysses_sp=False, engine_config=config)
engine.__dict__.update(_autocast_dtype=torch.float32, compute_entropy_from_logits=None)
engine.get_data_parallel_group = lambda: None
from verl.utils import torch_functional
engine.compute_entropy_from_logits = torch_functional.entropy_from_logits
packs = shared_prompts.SharedPrompts._packs
made = []
pack = shared_prompts.pack
shared_prompts.pack = lambda *given: made.append(pack(*given)) or made[-1]


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(prompts, responses, masks=None, unread=4, **options):
    sequences = [torch.cat(pair) for pair in zip(prompts, responses)]
    data = {"input_ids": nested(sequences), "position_ids": nested([torch.arange(len(s)) for s in sequences])}
    if masks is None:
        data |= {"prompts": nested(prompts), "responses": nested(responses)}
        data["loss_mask"] = nested([(r % 4 != unread).float() for r in responses])
    else:
        data["loss_mask"] = nested(masks)
    data = TensorDict(data, batch_size=len(sequences))
    tu.assign_non_tensor(data, use_remove_padding=False, use_fused_kernels=False, calculate_entropy=True, **options)
    return data


def computed(data, own):
    shared_prompts.SharedPrompts._packs = packs if own else lambda *_: False
    model.zero_grad()
    found = {}

    def loss(model_output, data, dp_group):
        found.update(model_output)
        mask = wanted(data)
        weights = torch.linspace(-1, 1, int(mask.sum()))
        return (model_output["log_probs"].values()[mask] * weights).sum(), {}

    total, _ = engine.forward_step(data, loss, forward_only=False)
    total.backward()
    mask = wanted(data)
    values = torch.stack([found[name].values().detach()[mask] for name in ("log_probs", "entropy")])
    others = found["log_probs"].values().detach()[~mask]
    return values, [p.grad.clone() for p in model.parameters()], others


def wanted(data):
    sequences = data["input_ids"].unbind()
    if data.get("prompts") is None:
        return torch.cat([torch.cat([m[1:], m.new_zeros(1)]) for m in data["loss_mask"].unbind()]).bool()
    marks = []
    for sequence, mask in zip(sequences, data["loss_mask"].unbind()):
        mark = torch.zeros(len(sequence), dtype=torch.bool)
        mark[len(sequence) - len(mask) - 1 : -1] = mask.bool()
        marks.append(mark)
    return torch.cat(marks)


def drawn(low, high):
    return torch.randint(5, 250, (int(torch.randint(low, high, (1,))),))


torch.manual_seed(0)
one, two, long = drawn(5, 9), drawn(5, 9), drawn(5, 9)
groups = [one, two, one, one, two, long]
responses = [drawn(1, 9) for _ in groups]
single = [drawn(3, 30) for _ in range(4)]
masks = [torch.cat([torch.zeros(len(p)), torch.randint(0, 2, (len(r),))]) for p, r in zip(groups, responses)]
later = [torch.cat([torch.zeros(len(one)), mask]) for mask in masks]
first = drawn(20, 30)
turns = [first, first[:10], first, drawn(20, 30), first]
answers = [drawn(3, 9) for _ in turns[1:]]
answers.insert(0, answers[1])  # the first episode is the third
temperatures = torch.tensor([0.7, 1.0, 1.3, 0.7, 2.0, 1.0])
cases = {
    "groups": batch(groups, responses, temperature=0.7),
    "a temperature a row": batch(groups, responses, temperature=1.0),
    "one group": batch([one] * 4, [drawn(1, 9) for _ in range(4)], temperature=1.0),
    "single rows": batch(single, [drawn(1, 9) for _ in single], temperature=1.0),
    "same first turns": batch([one] * 5, [torch.cat(both) for both in zip(turns, answers)], unread=0, temperature=0.9),
    "long responses": batch([one] * 4, [drawn(500, 600) for _ in range(4)], temperature=1.0),
    "sft": batch(groups, responses, masks, temperature=1.0),
    "sft, one system": batch([torch.cat([one, p]) for p in groups], responses, later, temperature=1.0),
}
cases["a temperature a row"]["temperature"] = temperatures
found = {}
for name, data in cases.items():
    made.clear()
    values, gradients, others = computed(data, own=True)
    shapes = [list(packed.ids.shape) for packed in made]
    ids = [row.tolist() for row in data["input_ids"].unbind()]
    beginnings = {tuple(row[:end]) for row in ids for end in range(1, len(row) + 1)}
    wanted_values, wanted_gradients, _ = computed(data, own=False)
    largest = max(g.abs().max() for g in wanted_gradients)
    off = max((a - b).abs().max() for a, b in zip(gradients, wanted_gradients)) / largest
    found[name] = {
        "log-probs": (values - wanted_values).abs().max().item(),
        "gradients": off.item(),
        "others": others.abs().max().item(),
        "rows": shapes,
        "lengths": [len(row) for row in ids],
        "beginnings": len(beginnings),
        "finite": bool(values.isfinite().all()),
    }

# The rows of a prompt come into one micro-batch, and the result back into the batch's order.
seen = []


def forward_backward_batch(self, data, loss_function, forward_only=False):
    seen.append([prompt.tolist() for prompt in data["prompts"].unbind()])
    return {"model_output": {"log_probs": data["input_ids"]}, "metrics": {}}


FSDPEngine.forward_backward_batch = forward_backward_batch
tu.assign_non_tensor(cases["groups"], use_dynamic_bsz=False)
output = engine.forward_backward_batch(cases["groups"], None)
found["order"] = [seen[0], sorted(prompt.tolist() for prompt in groups)]
back = output["model_output"]["log_probs"].unbind()
found["back"] = all(torch.equal(a, b) for a, b in zip(back, cases["groups"]["input_ids"].unbind(), strict=True))
print(json.dumps(found))
"""
CASES = ("groups", "a temperature a row", "one group", "single rows", "same first turns", "long responses", "sft")
CASES += ("sft, one system",)


@pytest.fixture(scope="module")
def found(small_model) -> dict:
    return on_our_platform(COMPARED, str(small_model))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_log_probs_entropy_and_gradients_are_verls(found, case):
    assert found[case]["finite"] and found[case]["log-probs"] < 1e-4
    assert found[case]["gradients"] < 1e-4
    assert found[case]["others"] == 0


@pytest.mark.medium
@pytest.mark.parametrize("case", [case for case in CASES if case != "long responses"])
def test_what_sequences_begin_with_stands_once(found, case):
    assert found[case]["rows"] == [[1, found[case]["beginnings"]]]


@pytest.mark.medium
def test_so_many_stand_in_a_row_that_it_is_least_work(found):
    turns = found["same first turns"]
    assert turns["beginnings"] < sum(turns["lengths"]) / 2
    long = found["long responses"]  # scores over all four would be more work
    assert long["rows"] == [[4, max(long["lengths"])]]


@pytest.mark.medium
def test_rows_of_a_prompt_share_a_micro_batch_and_results_come_back_in_order(found):
    got, wanted = found["order"]
    assert got == wanted and found["back"]


def test_a_token_sees_those_on_the_way_to_it():
    from verl_tasks.verl_plugins.cpu.shared_prompts import pack

    sequences = [torch.tensor(ids) for ids in ([7, 8, 1], [7, 8, 2, 3], [9, 4], [7, 8, 2, 3])]
    wanted = [torch.arange(1, 2), torch.arange(1, 3), torch.arange(0, 1), torch.arange(1, 3)]
    packed = pack(sequences, wanted, [[0, 1, 3], [2]])
    assert packed.ids.tolist() == [[7, 8, 1, 2, 3], [9, 4, 0, 0, 0]]
    assert packed.positions[0].tolist() == [0, 1, 2, 2, 3]
    assert packed.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert packed.mask.any(-1).all()  # padding too: a softmax over nothing is NaN
    assert packed.places.tolist() == [1, 1, 3, 5, 1, 3]  # of equal sequences the same
    assert packed.sources.tolist() == [1, 4, 5, 7, 10, 11] and packed.counts.tolist() == [1, 2, 1, 2]


def test_how_many_stand_in_a_row():
    sequences = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [7]]
    assert begun_alike(sequences) == [0, 3, 2, 0] and begun_alike([]) == [] and begun_alike([[1], [1]]) == [0, 1]
    lengths, alike = [4, 4, 3, 1], [0, 3, 2, 0]
    linear, quadratic = (replace(shapes(EMBEDDED_CONFIG), layer=layer, queries=1 - layer) for layer in (1, 0))
    assert least_work(linear, lengths, alike) == (7, 4)  # all in one row
    assert least_work(quadratic, lengths, alike) == (2 * 7**2, 4)
    assert least_work(quadratic, lengths, [0, 3, 0, 0]) == (2 * 2 * 5**2, 2)  # [1 2 3 4 | 5], [1 2 6 | 7]
    assert least_work(quadratic, lengths, [0, 0, 0, 0]) == (4 * 2 * 4**2, 1)


def test_the_estimate_of_memory_knows_it():
    short, long = Plan(on_cpu=True, tokens=16 * 192, sequence=192, response=64, group=8), Plan(tokens=9)
    model = shapes(EMBEDDED_CONFIG)
    assert passed(model, short) == (2 * (128 + 8 * 64), 16 * 64)
    assert passed(model, replace(short, tokens=4 * 192)) == (128 + 4 * 64, 4 * 64)  # half a group
    assert passed(model, replace(short, critic=True)) == (16 * 192, 16 * 64)  # a critic takes each row by itself
    assert passed(model, replace(short, response=0)) == (16 * 192, 16 * 192)  # DPO
    assert passed(model, replace(short, on_cpu=False)) == (16 * 192, 16 * 192)
    assert passed(model, long) == (9, 9)
    many = replace(short, tokens=8 * 8192, sequence=8192, response=8064)
    assert passed(model, many) == (8 * 8192, 8 * 8064)  # scores over all eight would be more work
    mamba = shapes(EMBEDDED_CONFIG | {"model_type": "other"}, parameters=model.parameters)
    assert passed(mamba, short) == (16 * 192, 16 * 192)
