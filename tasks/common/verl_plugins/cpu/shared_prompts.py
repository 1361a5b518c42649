"""What sequences of a micro-batch begin with in common is computed once, with verl 0.9.1's engines on a CPU.

verl computes a prompt as often as it was sampled, pads all rows to the longest, and takes the logits of every token,
its largest tensors. Here several sequences stand in one row, as a tree: what one begins with as another does stands
once, whether prompt, system prompt or the same first turns, and each token sees those on the way to it. Logits are
taken where a loss reads them, and once for several sequences that have a token and all before it in common.
"""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.workers.engine.fsdp import transformer_impl

from verl_tasks.machine.memory import begun_alike, least_work, plain, shapes
from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.prompts import outputs

expect(transformer_impl.FSDPEngine.forward_backward_batch, "return postprocess_batch_func(output_lst=output_lst")


@dataclass(frozen=True)
class Packed:
    """The sequences of a micro-batch in ``rows`` of ``longest`` tokens."""

    ids: torch.Tensor  # (rows, longest), int64
    positions: torch.Tensor  # (rows, longest), int64: of each token in its own sequence
    mask: torch.Tensor  # (rows, 1, longest, longest), bool: which tokens a token sees
    places: torch.Tensor  # (predicting,), of ``ids`` flattened: the tokens whose logits are taken
    sources: torch.Tensor  # (predicting,), the same tokens among the batch's, one sequence after another
    counts: torch.Tensor  # (sequences,): how many of ``places`` are of each sequence
    targets: torch.Tensor  # (predicted,), of ``ids`` flattened: the tokens after ``places``, which are predicted


def pack(sequences: list[torch.Tensor], wanted: list[torch.Tensor], rows: list[list[int]]) -> Packed:
    """``sequences`` of ids in ``rows``, which say whose stand in each: what one begins with as the one before it in its
    row stands once.

    ``wanted``: of each sequence, the indices whose logits are taken, in order.
    """
    ways: list[torch.Tensor] = [torch.empty(0)] * len(sequences)  # where the tokens of each stand in its row
    alike = [0] * len(sequences)
    for members in rows:
        end, way = 0, torch.empty(0, dtype=torch.long)
        for n, common in zip(members, begun_alike([sequences[n].tolist() for n in members]), strict=True):
            new = len(sequences[n]) - common
            ways[n] = way = torch.cat([way[:common], torch.arange(end, end + new)])
            end, alike[n] = end + new, common
    lengths = [len(sequence) for sequence in sequences]
    longest = max(int(way.max()) + 1 for way in ways)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    positions = torch.zeros_like(ids)
    # Padding sees itself: a softmax over nothing would be NaN.
    mask = torch.eye(longest, dtype=torch.bool).repeat(len(rows), 1, 1)
    places: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
    targets = places.copy()
    for row, members in enumerate(rows):
        for n in members:
            way, new = ways[n], alike[n]
            ids[row, way], positions[row, way] = sequences[n], torch.arange(lengths[n])
            mask[row, way[new:, None], way] = torch.ones(lengths[n], lengths[n], dtype=torch.bool).tril()[new:]
            places[n], targets[n] = (row * longest + way[wanted[n] + after] for after in (0, 1))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return Packed(
        ids=ids,
        positions=positions,
        mask=mask[:, None],
        places=torch.cat(places),
        sources=torch.cat([start + each for start, each in zip(starts[:-1], wanted, strict=True)]),
        counts=torch.tensor([len(each) for each in wanted]),
        targets=torch.cat(targets),
    )


def in_order(sequences: list[torch.Tensor]) -> list[int]:
    """The numbers of ``sequences`` in the order of their ids: each then begins with most tokens as one beside it."""
    return sorted(range(len(sequences)), key=[sequence.tolist() for sequence in sequences].__getitem__)


def of_micro_batch(micro_batch: TensorDict, config: dict) -> Packed:
    """The tokens with a loss are predicted; of none the last ones, for a loss that is 0. As many sequences stand in a
    row as is least work. ``config``: the model's config.json."""
    sequences, wanted = list(micro_batch["input_ids"].unbind()), []
    for sequence, mask in zip(sequences, micro_batch["loss_mask"].unbind(), strict=True):  # of RL that of the response
        before = len(sequence) - len(mask) + mask.nonzero()[:, 0] - 1
        wanted.append(before[before >= 0])
    if not any(map(len, wanted)):
        wanted = [torch.tensor([len(sequence) - 2]) for sequence in sequences]
    order = in_order(sequences)
    alike = begun_alike([sequences[n].tolist() for n in order])
    _, most = least_work(shapes(config), [len(sequences[n]) for n in order], alike)
    return pack(sequences, wanted, [order[at : at + most] for at in range(0, len(order), most)])


class SharedPrompts:
    """For a subclass of verl's FSDPEngineWithLMHead. Other than plain models (machine/memory.py) go verl's way."""

    def forward_backward_batch(self, data: TensorDict, loss_function, forward_only=False):
        # Micro-batches of fixed size; a loss is a sum over rows, whatever their order.
        prompts = data.get("prompts")
        if prompts is None or not prompts.is_nested or get_non_tensor_data(data, "use_dynamic_bsz", True):
            return super().forward_backward_batch(data, loss_function, forward_only)
        order = in_order(list(data["input_ids"].unbind()))
        ordered = tensordict_utils.index_select_tensor_dict(data, order)
        output = super().forward_backward_batch(ordered, loss_function, forward_only)
        for name, rows in (output.get("model_output") or {}).items():
            own = dict(zip(order, rows.unbind(), strict=True))
            rows = [own[number] for number in range(len(order))]
            output["model_output"][name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return output

    def prepare_model_inputs(self, micro_batch: TensorDict):
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        if not self._packs(micro_batch):
            return inputs, arguments
        packed = of_micro_batch(micro_batch, self.module.config.to_dict())
        temperatures = arguments["temperature"].repeat_interleave(packed.counts)
        # What several sequences have in common is predicted once, at each temperature.
        _, same = torch.stack([packed.targets, temperatures.double()]).unique(dim=1, return_inverse=True)
        first = torch.empty(int(same.max()) + 1, dtype=torch.long).scatter(0, same, torch.arange(len(same)))
        places = packed.places[first]
        head = self.module.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, given: given[0].flatten(0, 1)[places][None])
        arguments |= {"packed": packed, "same": same, "hook": hook, "pad_size": 0}
        arguments["input_ids_rmpad_rolled"] = packed.ids.flatten()[packed.targets[first]]
        arguments["temperature_rmpad"] = temperatures[first]
        inputs |= {"input_ids": packed.ids, "position_ids": packed.positions, "attention_mask": packed.mask}
        return inputs, arguments

    def prepare_model_outputs(self, output, output_args, micro_batch: TensorDict, logits_processor_func):
        if "packed" not in output_args:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        packed = output_args["packed"]
        output_args["hook"].remove()
        verls, labels = super().prepare_model_outputs, output_args["input_ids_rmpad_rolled"]

        def of_predicted(predicted: TensorDict) -> dict:
            offsets = predicted["input_ids"].offsets()
            ends = torch.full_like(offsets, len(labels)).index_fill(0, torch.tensor([0]), 0)
            predicted["input_ids"] = torch.nested.nested_tensor_from_jagged(labels, ends)
            found = verls(output, output_args, predicted, logits_processor_func)
            each = {name: values.values()[output_args["same"]] for name, values in found.items()}
            return {name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, values in each.items()}

        return outputs(of_predicted, micro_batch, labels[output_args["same"]], packed.counts, packed.sources)

    def _packs(self, micro_batch: TensorDict) -> bool:
        prompts = micro_batch.get("prompts")
        known = micro_batch["loss_mask"].is_nested and (prompts is None or prompts.is_nested)
        others = ("use_fused_kernels", "distillation_use_topk")
        packed_already = get_non_tensor_data(micro_batch, "use_remove_padding", True)
        asked = any(get_non_tensor_data(micro_batch, name, False) for name in others)
        possible = known and not packed_already and not asked
        return possible and plain(self.module.config.to_dict())
