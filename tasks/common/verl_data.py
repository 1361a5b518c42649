"""verl's data sets and agent loop with our rows: prompts rendered with their tools, as evaluation renders them.

Loaded by verl (data.custom_cls, rollout.agent.agent_loop_config_path). verl 0.9.1 knows tools for a whole run only,
not for a row (verl/utils/dataset/rl_dataset.py), and splits a demonstration into messages that it renders one by one,
which the templates of thinking models refuse (verl/utils/dataset/multiturn_sft_dataset.py).
"""

import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.dataset.rl_dataset import RLHFDataset

from tasks.common.chat_template import answer_ids, opens_thinking, prompt_ids
from tasks.common.data import decoded, tools_of


class Prompts(RLHFDataset):
    """RL rows; too long ones are left out, and counted in the log, after rendering with their tools."""

    def maybe_filter_out_long_prompts(self, dataframe=None):
        if not self.filter_overlong_prompts:
            return dataframe
        lengths = [len(prompt_ids(self.tokenizer, decoded(row["prompt"]), tools_of(row))) for row in dataframe]
        kept = [index for index, length in enumerate(lengths) if length <= self.max_prompt_length]
        print(f"{len(lengths) - len(kept)} of {len(lengths)} prompts are longer than {self.max_prompt_length} tokens")
        return dataframe.select(kept)

    def _build_messages(self, example: dict, key: str) -> list[dict]:
        return decoded(example[key])


class SingleTurnOfRow(SingleTurnAgentLoop):
    """verl's single turn with the tools of the row (extra_info.tools). verl makes one for each rollout."""

    async def run(self, sampling_params, **kwargs):
        from vllm.sampling_params import RequestOutputKind  # not for SFT, which loads this file too

        self.row = kwargs
        # verl reads the tokens of a finished response; by default vLLM hands over, and decodes, each as it comes.
        sampling_params = {**sampling_params, "output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}
        return await super().run(sampling_params, **kwargs)

    async def ct_build_initial_tokens(self, messages, **kwargs) -> list[int]:
        ids = prompt_ids(self.tokenizer, messages, tools_of(self.row))
        if opens_thinking(self.tokenizer, ids):
            self.row["extra_info"]["think_opened"] = True  # the reward is given the same object
        return self._cap_text_prompt_length(ids)


class Demonstrations(Dataset):
    """SFT rows: the last message is learned, given all before it. Built as verl builds its MultiTurnSFTDataset.

    Rows longer than data.max_length tokens are left out, and counted in the log. Raises ValueError when that leaves
    less than data.train_batch_size.
    """

    def __init__(self, parquet_files, tokenizer, config, processor=None, max_samples: int = -1):
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        rows = rows[:max_samples] if max_samples > 0 else rows
        limit, least = config.get("max_length", 1024), config.get("train_batch_size", 1)
        self.tokens = [
            tokens for tokens in (_demonstration(tokenizer, row) for row in rows) if sum(map(len, tokens)) <= limit
        ]
        print(f"{len(rows) - len(self.tokens)} of {len(rows)} demonstrations are longer than {limit} tokens")
        if len(self.tokens) < least:
            raise ValueError(
                f"only {len(self.tokens)} of {len(rows)} demonstrations fit MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH = "
                f"{limit} tokens, less than SFT_BATCH_SIZE={least}; raise MAX_RESPONSE_LENGTH, or use INIT=base"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        prompt, response = self.tokens[index]
        return {
            "input_ids": torch.tensor(prompt + response),
            "position_ids": torch.arange(len(prompt) + len(response)),
            "loss_mask": torch.tensor([0] * len(prompt) + [1] * len(response)),
        }


def _demonstration(tokenizer, row: dict) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the answer."""
    *chat, answer = decoded(row["messages"])
    prompt = prompt_ids(tokenizer, chat, tools_of(row))
    return prompt, answer_ids(tokenizer, answer["content"], opens_thinking(tokenizer, prompt))
