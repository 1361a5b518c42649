"""DPO with TRL: `torchrun --nproc_per_node=N_GPUS -m verl_tasks.training.trl_dpo START PAIRS RUN_DIR`, with the
settings in the environment.

START, a folder or a hub id, is the policy's start and the reference. With LoRA the reference is the model without its
adapter; where START is an adapter, training continues it, and a copy of it is the reference. PAIRS is any file that
pairs.py reads. RUN_DIR gets checkpoints in verl's form; the same command continues from the last whole one. Metrics go
as JSON lines to the file that VERL_FILE_LOGGER_PATH names, in the form of verl's file logger.
"""

import faulthandler
import json
import math
import os
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import reduce
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import DPOConfig, DPOTrainer
from trl.trainer import dpo_trainer

from verl_tasks.alive import STACKS, beat
from verl_tasks.data.pairs import ANSWERS, TokenPair, pair_set
from verl_tasks.data.prepare import load_tokenizer
from verl_tasks.files import write_text
from verl_tasks.machine.hardware import cpu_dtype
from verl_tasks.models.attention import attention
from verl_tasks.models.merge import base_model, base_of, is_adapter
from verl_tasks.process import die_with_torchrun
from verl_tasks.runs import health, launches
from verl_tasks.runs.checkpoint import FirstSave
from verl_tasks.runs.run import Run, prune, tracker
from verl_tasks.settings import Settings, load_settings
from verl_tasks.training import tracking
from verl_tasks.training.methods import dpo
from verl_tasks.training.torchrun import listen_locally
from verl_tasks.training.verl_config import micro_batch

# The device of a process of several on the CPU is cpu:0 by accelerate, a place that torch.load does not know.
torch.serialization.register_package(0, lambda _: None, lambda storage, place: storage if place == "cpu:0" else None)

EVALUATIONS = 4  # on the held-out pairs, the last one after the last step


class Trainer(DPOTrainer):
    """TRL's trainer on rows that are token ids already, with checkpoints where runs/run.py looks for them."""

    def _prepare_dataset(self, dataset, *_):
        return dataset  # TRL's own tokens would not be those of evaluation and RL

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)  # the rows are in the order of training

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if not self.is_fsdp_enabled:
            return
        # Not reduced after each micro-batch, the gradients would be whole on each GPU until the last.
        self.accelerator.no_sync = lambda model: nullcontext()
        if self.args.bf16:
            # accelerate's own policy rounds what the model returns to bf16: a log-prob of -50 to a quarter.
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy

    def _send_telemetry(self):
        pass

    def create_model_card(self, *args, **kwargs):
        pass

    def _save(self, output_dir=None, state_dict=None):
        if state_dict is not None and self.model.config.tie_word_embeddings:  # gathered, tied weights are there twice
            tied = self.model._tied_weights_keys or ()
            state_dict = {name: tensor for name, tensor in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)

    def _save_checkpoint(self, model, trial):
        self.model.config.use_cache = True  # in the config that is saved: False would slow down generation
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # each process writes the state of its random numbers
        if self.is_world_process_zero():
            run_dir, step = Path(self.args.output_dir).parent, self.state.global_step
            # The reference's copy of the adapter. A resume would load it alone, and not the policy's adapter
            # (transformers/trainer.py, _load_from_checkpoint: adapter_subdirs).
            shutil.rmtree(run_dir / f"checkpoints/checkpoint-{step}/ref", ignore_errors=True)
            publish(run_dir, step, self.args.save_total_limit - 1)


def _reference_in_shards(model, accelerator):
    """The reference, sharded layer by layer as accelerate shards the policy. TRL's own has one shard for all layers:
    a forward pass would gather the whole model at once."""
    return fsdp2_prepare_model(accelerator, model).eval()


dpo_trainer.prepare_fsdp = _reference_in_shards


class MetricsFile(TrainerCallback):
    """One line of JSON for each step: ``{"step", "data"}``, loss, gradient norm and rate under ``train/``, what TRL
    measures of the pairs under ``dpo/``, the step's seconds as ``timing_s/step``; ``val/`` is of the held-out pairs."""

    def __init__(self, path: Path):
        self.path, self.started, self.data = path, 0.0, {}

    def on_train_begin(self, args, state, control, **_):
        state.save_steps = args.save_steps  # on a resume it is the one of the checkpoint

    def on_step_begin(self, args, state, control, **_):
        self.started = time.perf_counter()

    def on_substep_end(self, args, state, control, **_):
        beat()

    def on_prediction_step(self, args, state, control, **_):
        beat()

    def on_step_end(self, args, state, control, **_):
        beat()
        if args.eval_strategy != "no" and state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_log(self, args, state, control, logs, **_):
        if not state.is_world_process_zero:
            return
        if "eval_loss" in logs:
            names = {"loss": "loss", "margin": "rewards/margins", "accuracy": "rewards/accuracies"}
            self._write(state, self.data | {f"val/{ours}": logs[f"eval_{trls}"] for ours, trls in names.items()})
            return
        if "loss" not in logs:  # the last one, for the whole training
            return
        own = ("loss", "grad_norm", "learning_rate")
        data = {f"train/{name}": logs[name] for name in own}
        # Of the epoch (of all steps) and the tokens (since the launch) the logged value would mislead.
        data |= {f"dpo/{name}": value for name, value in logs.items() if name not in (*own, "epoch", "num_tokens")}
        data["timing_s/step"] = time.perf_counter() - self.started
        if control.should_evaluate:  # comes next
            self.data = data
        else:
            self._write(state, data)

    def _write(self, state, data: dict) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, "data": data}) + "\n")


class SaveFirst(TrainerCallback):
    """A first checkpoint as ``FirstSave`` says; each process has its own clock."""

    def __init__(self):
        self.first_save = FirstSave()

    def on_step_begin(self, args, state, control, **_):
        self.first_save.begin()

    def on_step_end(self, args, state, control, **_):
        due = torch.tensor(float(self.first_save.due()), device=args.device)
        control.should_save |= bool(reduce(due, "sum") > 0)

    def on_save(self, args, state, control, **_):
        self.first_save.saved = True


class AbortOn(TrainerCallback):
    """Ends the training at a loss or gradient that is not a number, without a checkpoint of such weights.

    Of the rules of ABORT_ON it is the only one that DPO's metrics can break. Every process is told the same.
    """

    def __init__(self, s: Settings):
        self.s, self.finding = s, None

    def on_log(self, args, state, control, logs, **_):
        row = {f"train/{name}": logs[name] for name in ("loss", "grad_norm") if name in logs}
        self.finding = self.finding or health.aborted_by(health.Health(self.s).findings(state.global_step, row), self.s)
        if self.finding:
            control.should_training_stop = True
            control.should_save = False


# ---- checkpoints


def publish(run_dir: Path, step: int, keep: int) -> None:
    """Give the checkpoint that transformers wrote, which is whole now, its name, then leave it and ``keep`` others."""
    folder = run_dir / "checkpoints"
    shutil.rmtree(folder / f"global_step_{step}", ignore_errors=True)  # of a killed run, unknown to the tracker
    (folder / f"checkpoint-{step}").rename(folder / f"global_step_{step}")
    write_text(tracker(run_dir), str(step))
    prune(run_dir, keep, {})


def remove_unfinished(run_dir: Path, keep: int) -> None:
    """Remove the checkpoints that a killed run left half-written or half-removed."""
    for path in run_dir.glob("checkpoints/checkpoint-*"):
        shutil.rmtree(path)
    prune(run_dir, keep, {})


# ---- training


def fsdp_config() -> dict:
    """What DPOConfig gets for FSDP2. Each process loads the whole model, for nothing would send the reference's weights
    from the first to the others. transformers 4 has no fields for what stands in the environment."""
    os.environ |= {"FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    config = {"version": 2, "reshard_after_forward": True, "cpu_ram_efficient_loading": False}
    return config | {"state_dict_type": "FULL_STATE_DICT"}


def arguments(s: Settings, run_dir: Path, held_out: int) -> DPOConfig:
    """The settings as TRL's, for a training of STEPS with so many pairs held out."""
    pairs = s.TRAIN_BATCH_SIZE // s.N_GPUS
    micro = micro_batch(max(1, s.MICRO_BATCH_SIZE // 2), pairs)  # a pair is two sequences
    on_cpu, in_shards = s.STACK == "cpu", s.N_GPUS > 1 and dpo.sharded(s)
    return DPOConfig(
        output_dir=str(run_dir / "checkpoints"),
        run_name=run_dir.name,
        project=tracking.project(s),
        beta=s.DPO_BETA,
        max_steps=s.STEPS,
        learning_rate=s.LR,
        warmup_steps=s.LR_WARMUP,
        lr_scheduler_type="linear",  # to 0 at the last step
        eval_strategy="steps" if held_out else "no",
        eval_steps=math.ceil(s.STEPS / EVALUATIONS),
        per_device_eval_batch_size=micro_batch(micro, held_out // s.N_GPUS) if held_out else micro,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=pairs // micro,
        max_length=None,  # longer pairs are dropped, none is cut
        seed=s.SEED,
        bf16=not on_cpu or cpu_dtype() == "bfloat16",
        model_init_kwargs={"device_map": None},
        gradient_checkpointing=not on_cpu,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would show the mean of other steps in place of a loss that is NaN
        save_strategy="steps",
        save_steps=s.SAVE_FREQ,
        save_total_limit=s.KEEP + 1,
        report_to=tracking.loggers(s),
        disable_tqdm=True,
        fsdp="full_shard auto_wrap" if in_shards else "",
        fsdp_config=fsdp_config() if in_shards else None,
    )


def training_order(pairs: int, batch: int, steps: int, seed: int) -> np.ndarray:
    """Indices of the pairs in the order of training, (steps x batch,): each epoch in an order of its own, without the
    rest that fills no batch. The order does not depend on ``steps``, so a longer run continues a shorter one."""
    generator = np.random.default_rng(seed)
    in_epoch = pairs // batch
    epochs = [generator.permutation(pairs)[: in_epoch * batch] for _ in range(math.ceil(steps / in_epoch))]
    return np.concatenate(epochs)[: steps * batch]


def _columns(pairs: list[TokenPair]) -> Dataset:
    """As TRL's collator reads them."""
    names = ("prompt", *ANSWERS)
    return Dataset.from_dict({f"{name}_ids": [getattr(pair, name) for pair in pairs] for name in names})


def loaded(start: str) -> dict[str, str]:
    """How the model of START is loaded. Without an attention transformers takes that of config.json, which it may not
    know."""
    return {"dtype": "float32", "attn_implementation": attention(base_model(start))}


def policy(start: str):
    """START for TRL: its name, or the adapter on its base, both in fp32."""
    if not is_adapter(Path(start)):
        return start
    base = AutoModelForCausalLM.from_pretrained(base_of(Path(start)), trust_remote_code=False, **loaded(start))
    return PeftModel.from_pretrained(base, start, is_trainable=True)


def train(s: Settings, start: str, pairs: str, run_dir: Path, metrics: Path) -> None:
    """Train to step STEPS, from the last whole checkpoint of ``run_dir`` if there is one.

    Raises DataError when START has no chat template, when PAIRS cannot be read, or has too few pairs.
    """
    tokenizer = load_tokenizer(base_model(start))
    chosen = pair_set(s, pairs, tokenizer)
    order = training_order(len(chosen.train), s.TRAIN_BATCH_SIZE, s.STEPS, s.SEED)
    config, model, abort = arguments(s, run_dir, len(chosen.held_out)), policy(start), AbortOn(s)
    config.model_init_kwargs |= loaded(start)
    adapter = {"r": s.LORA_RANK, "lora_alpha": s.LORA_ALPHA, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    trainer = Trainer(
        model=model,
        args=config,
        train_dataset=_columns(chosen.train).select(order),
        eval_dataset=_columns(chosen.held_out) if chosen.held_out else None,
        processing_class=tokenizer,
        callbacks=[MetricsFile(metrics), SaveFirst(), *([abort] if s.ABORT_ON else [])],
        peft_config=LoraConfig(**adapter) if s.LORA_RANK and model == start else None,
    )
    if trainer.is_world_process_zero():
        for launch in launches.launches(run_dir)[-1:]:
            launches.write_config(launch, config.to_dict())
        print(f"{pairs}: {chosen.said}", flush=True)
        remove_unfinished(run_dir, s.KEEP)
    step = Run.read(run_dir).last
    trainer.train(resume_from_checkpoint=str(run_dir / f"checkpoints/global_step_{step}") if step else None)
    if abort.finding:
        health.abort(run_dir, f"ABORT_ON={abort.finding}")


if __name__ == "__main__":
    die_with_torchrun()
    faulthandler.register(STACKS, file=2)
    listen_locally()
    start, pairs, run_dir = sys.argv[1:]
    train(load_settings(), start, pairs, Path(run_dir), Path(os.environ["VERL_FILE_LOGGER_PATH"]))
