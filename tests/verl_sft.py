"""What test_verl_patches.py runs in its own process, with the real SFT trainer of verl 0.9.1 or 0.6.1; prints JSON.

Real: the trainer, its loader, sampler and checkpoints of the data. The engine notes which rows it is given.
"""

import gc
import json
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import peft  # noqa: F401  (replaces the module transformers, so first)
import torch
import transformers

# verl 0.6.1 is made for transformers 4, which had the name.
transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText

from hydra import compose, initialize_config_dir  # noqa: E402
from verl import __version__  # noqa: E402
from verl.trainer import sft_trainer  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402

from verl_tasks.verl_plugins.sft import SFTTrainer  # noqa: E402

ROWS, BATCH = 5, 2  # two steps an epoch

# 0.6.1 has eight processes that load, which would take most of the time here.
LOADER = sft_trainer.StatefulDataLoader
sft_trainer.StatefulDataLoader = lambda *args, **kwargs: LOADER(*args, **{**kwargs, "num_workers": 0})


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([row]), "position_ids": torch.tensor([0]), "loss_mask": torch.tensor([1])}


class Engine:
    """As one process of verl's engines, without a model."""

    def __init__(self):
        self.seen = []
        self.initialize = self.reset = self.step_profile = self.load_checkpoint = lambda *_: None
        self.train_mode = nullcontext

    is_mp_src_rank_with_outputs = staticmethod(lambda: True)
    get_data_parallel_rank = staticmethod(lambda: 0)
    get_data_parallel_size = staticmethod(lambda: 1)
    get_data_parallel_group = staticmethod(lambda: None)
    lr_scheduler_step = staticmethod(lambda: 0.0)

    def save_checkpoint(self, local_path, **_):
        os.makedirs(local_path)

    def train_batch(self, data, loss_function=None):
        self.seen.append(data["input_ids"].values().tolist())
        # 0.6.1 asks the engine, 0.9.1 a worker around it, which adds up the losses.
        if loss_function:
            return {"metrics": {"loss": [0.0], "grad_norm": 0.0}}
        return tensordict_utils.get_tensordict({}, {"metrics": {"loss": 0.0, "grad_norm": 0.0}})


def trained(trainer: type, folder: str, steps: int, seed: int = 3) -> list[list[int]]:
    """The rows of each step that a launch in ``folder`` trains on, up to ``steps``; it goes on where one has ended."""
    engine = Engine()

    class WithoutModel(trainer):
        def _build_config(self):
            hf_config = SimpleNamespace(model_type="none")
            self.model_config = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0), hf_config=hf_config)
            self.optimizer_config = SimpleNamespace()

        def _build_dataset(self):
            self.train_dataset, self.val_dataset = Rows(), None

        def _build_engine(self):
            self.engine = self.training_client = engine
            self.start_profile_step = self.end_profile_step = -1

    overrides = {"default_local_dir": folder, "total_training_steps": steps, "save_freq": 1, "seed": seed}
    overrides |= {"total_epochs": 100, "device": "cpu", "logger": "[]"}
    with initialize_config_dir(str(Path(sft_trainer.__file__).parent / "config"), version_base=None):
        config = compose(
            "sft_trainer_engine",
            [f"data.train_batch_size={BATCH}", *(f"trainer.{name}={value}" for name, value in overrides.items())],
        )
    made = WithoutModel(config)
    made.flops_counter = SimpleNamespace(estimate_flops=lambda *_: (0, 1))
    made.fit()
    return engine.seen


def resumed(trainer: type, after: int) -> bool:
    """Whether a training that ends after so many steps and goes on sees the rows of one that does not end."""
    with tempfile.TemporaryDirectory() as folder:
        whole = trained(trainer, f"{folder}/whole", 6)
        return trained(trainer, f"{folder}/parts", after) + trained(trainer, f"{folder}/parts", 6) == whole


def main() -> None:
    gc.freeze()  # else verl collects all that was imported at each checkpoint, which took most of the time
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        orders = {
            name: [trained(trainer, f"{folder}/{name}{n}", 2, seed) for n, seed in enumerate((3, 4, 3))]
            for name, trainer in (("own", SFTTrainer), ("verl", sft_trainer.SFTTrainer))
        }
    result = {
        "version": __version__,
        "orders": orders,
        "own": [resumed(SFTTrainer, after) for after in range(1, 5)],
        "verl": [resumed(sft_trainer.SFTTrainer, after) for after in range(1, 5)],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
