"""Each prompt of a micro-batch once, with verl 0.9.1's FSDP engine on GPUs.

verl packs sequences into one row without padding, and computes a prompt as often as it was sampled. Here a micro-batch
has whole groups of responses to a prompt, as many as fit its tokens, and in its row the first response follows the
prompt, the others follow it. varlen_once.py is the attention to such a row; it is by its name, PROMPTS_ONCE, that a
training asks for this. Hidden states, and so logits, go on of the tokens alone that a response is predicted from: of
a prompt's last token once for each response.

Other than plain models (machine/memory.py), critics, SFT, shared sequences (SP), micro-batches of fixed size and
distillation from the teacher's most likely tokens go verl's way. patches.py loads this in every verl process.
"""

from dataclasses import dataclass
from functools import partial, wraps

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.device import get_device_id
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

import verl_tasks.verl_plugins.varlen_once  # noqa: F401  (the attention)
from verl_tasks.machine.memory import PROMPTS_ONCE, plain
from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.prompts import groups, outputs

MARK = "prompts_once"  # of a batch that goes this way

expect(
    transformer_impl.FSDPEngine.forward_backward_batch,
    "micro_batches, indices = prepare_micro_batches(",
    "same_micro_num_in_dp=True",  # a rank with another number of passes would wait for ever
    "return postprocess_batch_func(output_lst=output_lst, indices=indices",
)
expect(
    FSDPEngineWithLMHead.prepare_model_inputs,
    '"input_ids": input_ids_rmpad,',
    '"position_ids": position_ids_rmpad,',
    "input_ids_rmpad_rolled = torch.roll(input_ids_rmpad, shifts=-1, dims=1)",
    'extra_args["shift_labels"] = output_args["input_ids_rmpad_rolled"].unsqueeze(0)',
)

_prepare_micro_batches = transformer_impl.prepare_micro_batches
_forward_backward_batch = FSDPEngineWithLMHead.forward_backward_batch
_prepare_model_inputs = FSDPEngineWithLMHead.prepare_model_inputs
_prepare_model_outputs = FSDPEngineWithLMHead.prepare_model_outputs


def applies(engine: FSDPEngineWithLMHead, data: TensorDict) -> bool:
    """Whether ``engine`` computes each prompt of ``data`` once; the same on every GPU."""
    config, prompts = engine.module.config, data.get("prompts")
    if config._attn_implementation != PROMPTS_ONCE or isinstance(engine, FSDPEngineWithValueHead):
        return False
    if prompts is None or not prompts.is_nested or data["position_ids"].dim() != 2:
        return False
    packs = get_non_tensor_data(data, "use_remove_padding", True) and get_non_tensor_data(data, "use_dynamic_bsz", True)
    topk = get_non_tensor_data(data, "distillation_use_topk", False)
    alone = not engine.use_ulysses_sp and not engine.pad_to_length
    return packs and alone and not topk and plain(config.to_dict())


@wraps(_forward_backward_batch)  # ``expect`` of a later patch finds verl's lines
def forward_backward_batch(self, data: TensorDict, loss_function, forward_only=False):
    tensordict_utils.assign_non_tensor(data, prompts_once=applies(self, data))  # MARK
    return _forward_backward_batch(self, data, loss_function, forward_only)


# ---- micro-batches


def filled(prompts: list[list[int]], shared: list[int], own: list[int], most: int) -> list[list[int]]:
    """Rows in micro-batches of at most ``most`` tokens, each prompt of one counted once; a longer row stands alone.

    ``prompts``: the rows of each; ``shared`` and ``own``: of each row the tokens of its prompt and of its response. The
    longest rows of a prompt come first, and what does not fit becomes a part of its own; the largest parts come first,
    each into the first micro-batch that holds it.
    """
    parts: list[tuple[int, list[int]]] = []
    for rows in prompts:
        tokens, part = most, []
        for row in sorted(rows, key=lambda row: -own[row]):
            if not part or tokens + own[row] > most:
                tokens, part = shared[row], []
                parts.append((0, part))
            part.append(row)
            tokens += own[row]
            parts[-1] = tokens, part
    made: list[tuple[int, list[int]]] = []
    for tokens, part in sorted(parts, key=lambda each: -each[0]):
        place = next((n for n, (there, _) in enumerate(made) if there + tokens <= most), None)
        if place is None:
            made.append((tokens, part))
        else:
            made[place] = made[place][0] + tokens, made[place][1] + part
    return [rows for _, rows in made]


def split(micro_batches: list[list[int]], count: int) -> list[list[int]]:
    """``count`` micro-batches: those with most rows are halved. Raises ValueError for more than there are rows."""
    made = list(micro_batches)
    if count > sum(map(len, made)):
        raise ValueError(f"{count} micro-batches of {sum(map(len, made))} rows: the GPUs have unequal numbers of rows")
    while len(made) < count:
        made.sort(key=len)
        rows = made.pop()
        made += [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return made


@wraps(_prepare_micro_batches)
def prepare_micro_batches(data: TensorDict, dp_group=None, **how):
    """As verl's (workers/engine/utils.py); as many on every GPU, which gather weights together."""
    if not get_non_tensor_data(data, MARK, False):
        return _prepare_micro_batches(data, dp_group, **how)
    shared = data["prompts"].offsets().diff().tolist()
    whole = data["input_ids"].offsets().diff().tolist()
    own = [length - prompt for length, prompt in zip(whole, shared, strict=True)]
    made = filled(groups(data["prompts"]), shared, own, data["max_token_len_per_gpu"])
    count = torch.tensor(len(made), device=get_device_id())
    torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX, group=dp_group)
    made = split(made, count.item())
    return [tensordict_utils.index_select_tensor_dict(data, rows) for rows in made], made


# ---- a micro-batch's row


@dataclass(frozen=True)
class Packed:
    """The row of a micro-batch; "the batch's tokens" are those of all sequences, one after another."""

    tokens: torch.Tensor  # (row,), int64: which of the batch's tokens stand in the row
    places: torch.Tensor  # (predicted,), int64: from which tokens of the row a response's tokens are predicted
    sources: torch.Tensor  # (predicted,), int64: the same tokens among the batch's
    counts: torch.Tensor  # (sequences,), int64: how many of them are of each sequence


def pack(prompts: list[list[int]], shared: list[int], lengths: list[int]) -> Packed:
    """``prompts``: the rows of each; ``shared`` and ``lengths``: of each row the tokens of its prompt and in all.

    Something is predicted of each sequence: without any the loss of a micro-batch would have no gradient.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    tokens, places, sources = [], [torch.empty(0)] * len(lengths), [torch.empty(0)] * len(lengths)
    at = 0  # how many tokens stand in the row
    for rows in prompts:
        prompt = shared[rows[0]]
        last = torch.tensor([at + prompt - 1])
        for number, row in enumerate(rows):
            begin, end = starts[row], starts[row + 1]
            kept = torch.arange(begin + prompt if number else begin, end)
            tokens.append(kept)
            at += len(kept)
            own = at - (end - begin - prompt)  # where the response begins; of an empty one the next token is predicted
            places[row] = torch.cat([last, torch.arange(own, max(own, at - 1))])
            sources[row] = torch.arange(begin + prompt - 1, max(begin + prompt, end - 1))
    counts = torch.tensor([len(each) for each in sources])
    return Packed(torch.cat(tokens), torch.cat(places), torch.cat(sources), counts)


def of_micro_batch(micro_batch: TensorDict) -> Packed:
    prompts, sequences = micro_batch["prompts"], micro_batch["input_ids"]
    lengths = [each.offsets().diff().tolist() for each in (prompts, sequences)]
    packed = pack(groups(prompts), *lengths)
    return Packed(*(each.to(sequences.device) for each in vars(packed).values()))


@wraps(_prepare_model_inputs)
def prepare_model_inputs(self, micro_batch: TensorDict):
    inputs, arguments = _prepare_model_inputs(self, micro_batch)
    if not get_non_tensor_data(micro_batch, MARK, False):
        return inputs, arguments
    packed = of_micro_batch(micro_batch)
    for name in ("input_ids", "position_ids"):
        inputs[name] = inputs[name][:, packed.tokens]
    for name in ("input_ids_rmpad_rolled", "temperature_rmpad"):
        arguments[name] = arguments[name][packed.sources]
    if "shift_labels" in inputs:  # of the fused head
        inputs["shift_labels"] = arguments["input_ids_rmpad_rolled"][None]

    def predicting(module, given, output):
        output.last_hidden_state = output.last_hidden_state[:, packed.places]
        return output

    hook = self.module.get_decoder().register_forward_hook(predicting)
    return inputs, arguments | {MARK: (packed, hook)}


@wraps(_prepare_model_outputs)
def prepare_model_outputs(self, output, output_args, micro_batch: TensorDict, logits_processor_func):
    if MARK not in output_args:
        return _prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func)
    packed, hook = output_args[MARK]
    hook.remove()
    verls = partial(_prepare_model_outputs, self, output, output_args, logits_processor_func=logits_processor_func)
    labels = output_args["input_ids_rmpad_rolled"]
    return outputs(lambda predicted: verls(micro_batch=predicted), micro_batch, labels, packed.counts, packed.sources)


transformer_impl.prepare_micro_batches = prepare_micro_batches
FSDPEngineWithLMHead.forward_backward_batch = forward_backward_batch
FSDPEngineWithLMHead.prepare_model_inputs = prepare_model_inputs
FSDPEngineWithLMHead.prepare_model_outputs = prepare_model_outputs
