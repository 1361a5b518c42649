"""verl's data sets and agent loop for our rows: prompts rendered with their tools, as in evaluation.

verl loads it (data.custom_cls, rollout.agent.agent_loop_config_path). verl's own has tools for a whole run, not per row
(verl/utils/dataset/rl_dataset.py), and renders a demonstration message by message, which the templates of thinking
models refuse (verl/utils/dataset/multiturn_sft_dataset.py). verl 0.9.1 renders a prompt in the agent loop, 0.6.1 in the
data set and again in the agent loop.
"""

from pathlib import Path
from uuid import uuid4

import torch
from torch.utils.data import Dataset
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.model import compute_position_id_with_mask
from verl.utils.profiler import simple_timer
from verl.utils.torch_functional import postprocess_data

from verl_tasks.models.chat_template import demonstration_ids, ends_turn, opens_thinking, prompt_ids
from verl_tasks.rows import decoded, demonstration, read_rows, tools_of

RENDERS_ONCE = hasattr(SingleTurnAgentLoop, "ct_build_initial_tokens")  # verl 0.9.1


class Prompts(RLHFDataset):
    """RL rows without prompts that are too long with their tools; the log counts these."""

    def maybe_filter_out_long_prompts(self, dataframe=None):
        if not self.filter_overlong_prompts:
            return dataframe
        lengths = [len(prompt_ids(self.tokenizer, decoded(row["prompt"]), tools_of(row))) for row in dataframe]
        kept = [index for index, length in enumerate(lengths) if length <= self.max_prompt_length]
        print(f"{len(lengths) - len(kept)} of {len(lengths)} prompts are longer than {self.max_prompt_length} tokens")
        return dataframe.select(kept)

    def _build_messages(self, example: dict, key: str = "prompt") -> list[dict]:
        return decoded(example[key])

    def __getitem__(self, item: int) -> dict:
        if RENDERS_ONCE:
            return super().__getitem__(item)
        row = self.dataframe[item]
        row["raw_prompt"] = self._build_messages(row, self.prompt_key)
        row["index"] = row["extra_info"]["index"]
        ids = torch.tensor([prompt_ids(self.tokenizer, row["raw_prompt"], tools_of(row))])
        ids, mask = postprocess_data(
            ids, torch.ones_like(ids), self.max_prompt_length, self.tokenizer.pad_token_id, truncation=self.truncation
        )
        tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": compute_position_id_with_mask(mask)}
        return row | {name: tensor[0] for name, tensor in tensors.items()}


class SingleTurnOfRow(SingleTurnAgentLoop):
    """verl's single turn with the tools of the row (extra_info.tools). verl makes one per rollout."""

    async def run(self, sampling_params, **kwargs):
        from vllm.sampling_params import RequestOutputKind  # SFT loads this file too, without vLLM

        self.row = kwargs
        # verl reads only finished responses; by default vLLM returns, and decodes, each token.
        sampling_params = {**sampling_params, "output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}
        if RENDERS_ONCE:
            return await super().run(sampling_params, **kwargs)
        sampling_params["response_length"] = self.response_length  # verl_plugins/verl_061/patches.py
        ids, metrics = self._prompt(list(kwargs["raw_prompt"])), {}
        with simple_timer("generate_sequences", metrics):
            output = await self.server_manager.generate(uuid4().hex, prompt_ids=ids, sampling_params=sampling_params)
        response = output.token_ids[: self.response_length]
        return AgentLoopOutput(
            prompt_ids=ids,
            response_ids=response,
            response_mask=[1] * len(response),
            response_logprobs=output.log_probs[: self.response_length] if output.log_probs else None,
            multi_modal_data={},
            num_turns=2,
            metrics=metrics,
        )

    async def ct_build_initial_tokens(self, messages, **kwargs) -> list[int]:
        return self._cap_text_prompt_length(self._prompt(messages))

    def _prompt(self, messages: list[dict]) -> list[int]:
        ids = prompt_ids(self.tokenizer, messages, tools_of(self.row))
        if opens_thinking(self.tokenizer, ids):
            self.row["extra_info"]["think_opened"] = True  # the reward gets the same object
        return ids


class SingleTurnUnlessTruncated(SingleTurnOfRow):
    """TRUNCATED=masked: a response that was cut off at the limit has no token in the loss."""

    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        ids = output.response_ids
        if len(ids) == self.response_length and not ends_turn(self.tokenizer, ids):
            output.response_mask = [0] * len(ids)
        return output


class Demonstrations(Dataset):
    """SFT rows: the model learns the last message, given all before it, or each of its turns in an episode.

    Rows longer than data.max_length tokens are left out; the log counts them. Raises ValueError when fewer than
    data.train_batch_size rows are left.
    """

    def __init__(self, parquet_files: str, tokenizer, config, **_):
        rows, limit, least = list(read_rows(Path(parquet_files))), config["max_length"], config["train_batch_size"]
        made = (demonstration_ids(tokenizer, *demonstration(row), tools_of(row)) for row in rows)
        self.tokens = [(ids, mask) for ids, mask in made if len(ids) <= limit]  # mask: 1 on what the model learns
        print(f"{len(rows) - len(self.tokens)} of {len(rows)} demonstrations are longer than {limit} tokens")
        if len(self.tokens) < least:
            raise ValueError(
                f"only {len(self.tokens)} of {len(rows)} demonstrations fit MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH = "
                f"{limit} tokens, less than SFT_BATCH_SIZE={least}; raise MAX_RESPONSE_LENGTH, or use INIT=base"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, mask = self.tokens[index]
        values = {"input_ids": torch.tensor(ids), "position_ids": torch.arange(len(ids))}
        return values | {"loss_mask": torch.tensor(mask)}
