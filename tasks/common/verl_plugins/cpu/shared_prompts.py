"""Each prompt of a micro-batch once, with verl 0.9.1's engines on a CPU.

verl computes a prompt as often as it was sampled, pads all rows to the longest, and takes the logits of every token,
its largest tensors. Here the rows of one prompt stand in one row: the prompt, then its responses one after the other,
each of which sees the prompt and itself. Logits are taken where a loss reads them.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.workers.engine.fsdp import transformer_impl

from verl_tasks.machine.memory import operations, plain, shapes
from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.prompts import groups, outputs

expect(
    transformer_impl.FSDPEngineWithLMHead.prepare_model_outputs,
    "logits_rmpad = output.logits.squeeze(0)  # (total_nnz, vocab_size)",
    "labels=input_ids_rmpad_rolled,",
    "log_probs = torch.nested.nested_tensor_from_jagged(log_probs, cu_seqlens)",
)
expect(transformer_impl.FSDPEngine.forward_backward_batch, "return postprocess_batch_func(output_lst=output_lst")


PROMPT, PADDING = -1, -2  # whose a token is that is of no sequence


@dataclass(frozen=True)
class Packed:
    """The sequences of a micro-batch in ``rows`` of ``longest`` tokens."""

    ids: torch.Tensor  # (rows, longest), int64
    positions: torch.Tensor  # (rows, longest), int64: of each token in its own sequence
    mask: torch.Tensor  # (rows, 1, longest, longest), bool: which tokens a token sees
    places: torch.Tensor  # (predicting,), of ``ids`` flattened: the tokens whose logits are taken
    sources: torch.Tensor  # (predicting,), the same tokens among the batch's, one sequence after another
    counts: torch.Tensor  # (sequences,): how many of ``places`` are of each sequence


def pack(sequences: list[torch.Tensor], shared: list[int], wanted: list[torch.Tensor], most: int = 2**30) -> Packed:
    """``sequences`` of ids; those that begin with the same ``shared`` tokens stand in one row, ``most`` at most, and
    these tokens once. A sequence that shares none stands alone.

    ``wanted``: of each sequence, the indices whose logits are taken, in order.
    """
    groups: dict[tuple, list[int]] = {}
    alike: Counter[tuple] = Counter()
    for number, (sequence, length) in enumerate(zip(sequences, shared, strict=True)):
        key = tuple(sequence[:length].tolist()) if length else (-number,)
        groups.setdefault((key, alike[key] // most), []).append(number)
        alike[key] += 1
    lengths = [len(sequence) for sequence in sequences]
    own = [length - prompt for length, prompt in zip(lengths, shared, strict=True)]
    longest = max(shared[members[0]] + sum(own[n] for n in members) for members in groups.values())
    ids = torch.zeros(len(groups), longest, dtype=torch.long)
    positions, owner = torch.zeros_like(ids), torch.full_like(ids, PADDING)
    places: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
    for row, members in enumerate(groups.values()):
        start = prompt = shared[members[0]]
        ids[row, :prompt], positions[row, :prompt] = sequences[members[0]][:prompt], torch.arange(prompt)
        owner[row, :prompt] = PROMPT
        for n in members:
            end = start + own[n]
            ids[row, start:end], positions[row, start:end] = sequences[n][prompt:], torch.arange(prompt, lengths[n])
            owner[row, start:end] = n
            places[n] = row * longest + wanted[n] + torch.where(wanted[n] < prompt, 0, start - prompt)
            start = end
    before = torch.ones(longest, longest, dtype=torch.bool).tril()
    seen = (owner[:, None] == owner[..., None]) | (owner[:, None] == PROMPT)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return Packed(
        ids=ids,
        positions=positions,
        mask=(before & seen)[:, None],  # padding sees padding: a softmax over nothing would be NaN
        places=torch.cat(places),
        sources=torch.cat([start + each for start, each in zip(starts[:-1], wanted, strict=True)]),
        counts=torch.tensor([len(each) for each in wanted]),
    )


def of_micro_batch(micro_batch: TensorDict, config: dict) -> Packed:
    """Of RL, each prompt once for several responses, and their tokens predicted; of SFT, what all rows begin with (the
    system prompt) once for several, and the tokens with a loss. As many stand in a row as is least work.
    ``config``: the model's config.json."""
    sequences = list(micro_batch["input_ids"].unbind())
    count = len(sequences)
    if micro_batch.get("prompts") is None:
        wanted = [mask[1:].nonzero()[:, 0] for mask in micro_batch["loss_mask"].unbind()]
        columns = zip(*(sequence.tolist() for sequence in sequences), strict=False)
        shared = [len([*takewhile(lambda column: len({*column}) == 1, columns)])] * count
    else:
        shared = [len(prompt) for prompt in micro_batch["prompts"].unbind()]
        wanted = [torch.arange(prompt - 1, len(s) - 1) for s, prompt in zip(sequences, shared, strict=True)]
    ways = [pack(sequences, shared, wanted, 2**power) for power in range(1, (count - 1).bit_length() + 1)]
    model = shapes(config)
    ways.append(pack(sequences, [0] * count, wanted))
    return min(ways, key=lambda packed: operations(model, *packed.ids.shape))


def by_prompt(data: TensorDict) -> list[int]:
    """The order of the rows in which those of one prompt follow one another."""
    return [row for rows in groups(data["prompts"]) for row in rows]


class SharedPrompts:
    """For a subclass of verl's FSDPEngineWithLMHead. Other than plain models (machine/memory.py) go verl's way."""

    def forward_backward_batch(self, data: TensorDict, loss_function, forward_only=False):
        # Micro-batches of fixed size; a loss is a sum over rows, whatever their order.
        prompts = data.get("prompts")
        if prompts is None or not prompts.is_nested or get_non_tensor_data(data, "use_dynamic_bsz", True):
            return super().forward_backward_batch(data, loss_function, forward_only)
        order = by_prompt(data)
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
        head = self.module.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, given: given[0].flatten(0, 1)[packed.places][None])
        arguments |= {"packed": packed, "hook": hook, "pad_size": 0}
        arguments["input_ids_rmpad_rolled"] = micro_batch["input_ids"].values()[packed.sources + 1]
        arguments["temperature_rmpad"] = arguments["temperature"].repeat_interleave(packed.counts)
        inputs |= {"input_ids": packed.ids, "position_ids": packed.positions, "attention_mask": packed.mask}
        return inputs, arguments

    def prepare_model_outputs(self, output, output_args, micro_batch: TensorDict, logits_processor_func):
        if "packed" not in output_args:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        packed = output_args["packed"]
        output_args["hook"].remove()
        verls, labels = super().prepare_model_outputs, output_args["input_ids_rmpad_rolled"]

        def of_predicted(predicted: TensorDict) -> dict:
            return verls(output, output_args, predicted, logits_processor_func)

        return outputs(of_predicted, micro_batch, labels, packed.counts, packed.sources)

    def _packs(self, micro_batch: TensorDict) -> bool:
        prompts = micro_batch.get("prompts")
        # Without prompts it is SFT's, whose mask is as long as its sequences.
        known = micro_batch["loss_mask"].is_nested if prompts is None else prompts.is_nested
        others = ("use_fused_kernels", "distillation_use_topk")
        packed_already = get_non_tensor_data(micro_batch, "use_remove_padding", True)
        asked = any(get_non_tensor_data(micro_batch, name, False) for name in others)
        possible = known and not packed_already and not asked
        return possible and plain(self.module.config.to_dict())
