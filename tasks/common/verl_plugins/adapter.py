"""Save only the adapter of a LoRA checkpoint, in float32: `python -m tasks.common.verl_plugins.adapter`.

It takes the options of `verl.model_merger`, which also saves the base model, all in bfloat16.
"""

from pathlib import Path
from unittest import mock

import torch
from verl.model_merger.base_model_merger import generate_config_from_args, parse_args
from verl.model_merger.fsdp_model_merger import FSDPModelMerger

from tasks.common.verl_plugins.expect import expect

expect(FSDPModelMerger._load_and_merge_state_dicts, "tensor._local_tensor.bfloat16()", "tensor.bfloat16()")
expect(FSDPModelMerger.merge_and_save, "self.save_hf_model_and_tokenizer(merged_state_dict)")


class AdapterMerger(FSDPModelMerger):
    """verl's merger of FSDP shards, which writes ``lora_adapter/`` only."""

    def save_hf_model_and_tokenizer(self, state_dict):
        Path(self.config.target_dir).mkdir(parents=True, exist_ok=True)
        self.save_lora_adapter({name: tensor for name, tensor in state_dict.items() if "lora_" in name})


def main() -> None:
    merger = AdapterMerger(generate_config_from_args(parse_args()))
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):
        merger.merge_and_save()


if __name__ == "__main__":
    main()
