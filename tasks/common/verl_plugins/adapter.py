"""Save only the adapter of a LoRA checkpoint, in float32: `python -m verl_tasks.verl_plugins.adapter`.

It takes the options of `verl.model_merger`, which also saves the base model, all in bfloat16, and last the base model
that the adapter is to name.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
from verl.model_merger.base_model_merger import generate_config_from_args, parse_args
from verl.model_merger.fsdp_model_merger import FSDPModelMerger

from verl_tasks.verl_plugins.expect import expect

expect(FSDPModelMerger._load_and_merge_state_dicts, "tensor._local_tensor.bfloat16()", "tensor.bfloat16()")
expect(FSDPModelMerger.merge_and_save, "self.save_hf_model_and_tokenizer(merged_state_dict)")


class AdapterMerger(FSDPModelMerger):
    """verl's merger of FSDP shards, which writes an adapter in peft's form alone."""

    def save_hf_model_and_tokenizer(self, state_dict):
        folder = Path(self.config.target_dir)
        self.save_lora_adapter({name: tensor for name, tensor in state_dict.items() if "lora_" in name})
        for file in (folder / "lora_adapter").iterdir():
            file.rename(folder / file.name)
        (folder / "lora_adapter").rmdir()


def main() -> None:
    base = sys.argv.pop()
    config = generate_config_from_args(parse_args())
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):
        AdapterMerger(config).merge_and_save()
    # verl 0.6.1 writes lora_alpha 0, which turns the adapter off; verl_061/patches.py saved the value. It writes no
    # task_type either, and cannot save an adapter that it loaded without one.
    noted = json.loads(Path(config.local_dir, "lora_train_meta.json").read_text())
    known = {"lora_alpha": noted["lora_alpha"], "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    file = Path(config.target_dir, "adapter_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | known))


if __name__ == "__main__":
    main()
