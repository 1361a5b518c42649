"""What test_dpo.py runs in a process of its own, with the real DPOTrainer of TRL 1.16.0 or 0.29.1; prints JSON.

Two steps on the adapter of a very small model, on pairs of which a response was cut off, and a resume after the first.
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
import trl
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.adapters import saved
from tests.test_settings import VALUES
from verl_tasks.rows import Example, chat, dpo_row, dpo_schema, write_parquet
from verl_tasks.runs.run import read_metrics, tracker
from verl_tasks.settings import load_settings
from verl_tasks.training import trl_dpo


def main() -> None:
    base, folder = sys.argv[1], Path(sys.argv[2])
    tokenizer, texts = AutoTokenizer.from_pretrained(base), []
    examples = [
        Example(
            chat(f"q {i}"), {"chosen": f"yes {i}", "rejected": f"cut {i}", "truncated": ["rejected"] if i % 2 else []}
        )
        for i in range(12)
    ]
    pairs, adapter = folder / "pairs.parquet", str(saved(base, folder / "adapter"))
    write_parquet(map(dpo_row, examples), pairs, dpo_schema(truncated=True))

    class Watched(trl_dpo.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            real = inputs["attention_mask"].bool()
            if self.model.training:
                texts.extend(tokenizer.decode(ids[mask]) for ids, mask in zip(inputs["input_ids"], real, strict=True))
            return super().compute_loss(model, inputs, *args, **kwargs)

    trl_dpo.Trainer = Watched
    sizes = {"TRAIN_BATCH_SIZE": 4, "MICRO_BATCH_SIZE": 8, "LORA_RANK": 8, "LORA_ALPHA": 16, "LR": 1e-3}
    s = replace(load_settings(VALUES), **sizes, STEPS=2, SAVE_FREQ=1)

    def train(run_dir: Path, launch: str) -> dict[str, torch.Tensor]:
        (run_dir / "metrics").mkdir(parents=True, exist_ok=True)
        trl_dpo.train(s, adapter, str(pairs), run_dir, run_dir / f"metrics/{launch}.jsonl")
        return load_file(run_dir / "checkpoints/global_step_2/adapter_model.safetensors")

    whole = train(folder / "whole", "000")
    parts = folder / "parts"
    shutil.copytree(folder / "whole", parts)
    shutil.rmtree(parts / "checkpoints/global_step_2")
    tracker(parts).write_text("1")
    resumed = train(parts, "001")
    start = load_file(Path(adapter) / "adapter_model.safetensors")
    found = {
        "version": trl.__version__,
        "texts": texts[:16],
        "metrics": read_metrics(folder / "whole"),
        "same": all(torch.equal(whole[name], resumed[name]) for name in whole),
        "changed": [name for name in start if not torch.equal(start[name], whole[name])],
        "parameters": len(start),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
