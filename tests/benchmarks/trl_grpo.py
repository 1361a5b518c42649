"""GRPO steps of TRL's GRPOTrainer with vLLM in its process, for training.py.

    python -m tests.benchmarks.trl_grpo MODEL STEPS FOLDER      with the settings in the environment

The phases of each step go to FOLDER/metrics/000.jsonl, in the form and under the names of verl's metrics. TRL 1.16
gets:

- the same as ours: prompts, reward, rollouts, one optimizer step a step, lengths, temperature, rate, clipping, weight
  decay, fp32 weights with bf16 computation, gradient checkpointing. TRL's own defaults are ours in the rest: a loss by
  tokens, advantages divided by the group's deviation, the norm of the gradient clipped at 1.
- attention: sdpa, TRL's default. Its documents advise FlashAttention, which has no wheel for torch 2.11; those of the
  kernel hub need a network.
- sequences a pass: as many as keep 16 GiB of checkpointed activations. TRL pads, and makes no logits (a fused head).
- vLLM's share of the GPU 0.3, TRL's default: the KV cache of 1,024 sequences of 512 tokens needs 12 GB with 135M, 19 GB
  with 3B. It sleeps in the update, as ours does.
- vLLM makes no text of the tokens, as ours: TRL decodes them itself.
- the correction for vLLM's log-probs, TRL's default. It needs a pass for the old log-probs.
"""

import argparse
import functools
import json
import os
import time
from collections import Counter
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from verl_tasks.data.prepare import load_tokenizer
from verl_tasks.launch.task import compute_score_of
from verl_tasks.machine.hardware import cpu_dtype
from verl_tasks.models.chat_template import prompt_ids
from verl_tasks.rows import decoded, read_rows, tools_of
from verl_tasks.settings import Settings, SettingsError, load_settings

CHECKPOINTED = 16 * 2**30  # bytes: a layer's input in fp32 for each token, of all layers


def check(s: Settings) -> None:
    """Raise SettingsError for what this benchmark does not compare."""
    if s.MINI_BATCH_SIZE != s.TRAIN_BATCH_SIZE or s.N_GPUS != 1 or s.multi_turn or s.KL_COEF or s.LORA_RANK:
        raise SettingsError("the variants trl: one GPU, one turn, one optimizer step a step, no KL term, no LoRA")


def sequences_a_pass(s: Settings, model: str) -> int:
    """The largest power of two that fits CHECKPOINTED and divides the rollouts."""
    config, length = AutoConfig.from_pretrained(model), s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH
    most = CHECKPOINTED // (4 * config.hidden_size * config.num_hidden_layers * length)
    rollouts = s.TRAIN_BATCH_SIZE * s.ROLLOUT_N
    return max(size for size in (2**n for n in range(20)) if size <= max(1, most) and rollouts % size == 0)


def arguments(s: Settings, model: str, steps: int, folder: Path) -> GRPOConfig:
    """What the docstring above says."""
    on_cpu, micro = s.STACK == "cpu", sequences_a_pass(s, model)
    return GRPOConfig(
        output_dir=str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=s.TRAIN_BATCH_SIZE * s.ROLLOUT_N // micro,
        num_generations=s.ROLLOUT_N,
        max_completion_length=s.MAX_RESPONSE_LENGTH,
        temperature=s.TEMPERATURE,
        learning_rate=s.LR,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=s.LR_WARMUP,
        weight_decay=0.01,
        epsilon=s.CLIP_LOW,
        epsilon_high=s.CLIP_HIGH,
        beta=0.0,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH,
        vllm_enable_sleep_mode=not on_cpu,
        generation_kwargs={"detokenize": False},
        bf16=not on_cpu or cpu_dtype() == "bfloat16",
        model_init_kwargs={"dtype": "float32", "device_map": None},
        gradient_checkpointing=True,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        seed=s.SEED,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def prompts(s: Settings, tokenizer) -> Dataset:
    """The rows of train.parquet that are not too long, as TRL takes them: messages, and what the reward needs."""
    rows = []
    for row in read_rows(s.train_file):
        messages = decoded(row["prompt"])
        if tools_of(row):
            raise SettingsError(f"TASK={s.TASK}: its prompts have tools of their own, which GRPOTrainer does not take")
        if len(prompt_ids(tokenizer, messages)) <= s.MAX_PROMPT_LENGTH:
            columns = {"source": row["data_source"], "truth": row["reward_model"]["ground_truth"]}
            rows.append({"prompt": messages, "extra": row["extra_info"], **columns})
    return Dataset.from_list(rows)


def reward(s: Settings):
    """The task's own reward as TRL calls it."""
    compute_score, given = compute_score_of(s), {"variant": s.REWARD} if s.REWARD else {}

    def score(completions, source, truth, extra, **_) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [compute_score(*each, **given)["score"] for each in zip(source, texts, truth, extra, strict=True)]

    return score


def synchronized() -> float:
    """The time when the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Phases(TrainerCallback):
    """Writes a line a step: the seconds of its phases, tokens, score, peak of memory.

    The GPU is waited for at the ends of the phases before the update, a few times a step. `update_actor` is the rest of
    the step: forward, backward and optimizer. `adv` is the rest before it: rendering, padding, advantages.
    """

    def __init__(self, file: Path):
        self.file, self.seconds, self.tokens, self.ended, self.others = file, Counter(), 0, 0.0, 0

    def watch(self, trainer: GRPOTrainer) -> None:
        """Time the methods of ``trainer`` that are phases."""
        self._time(trainer, "_generate_and_score_completions", "rollout")
        self._time(trainer, "_calculate_rewards", "reward")
        # It computes the log-probs of the loss as well, then with gradients.
        self._time(trainer, "_get_per_token_logps_and_entropies", "old_log_prob", lambda: not torch.is_grad_enabled())
        if trainer.use_vllm:
            self._time(trainer.vllm_generation, "generate", "gen")
            self._time(trainer.vllm_generation, "sync_weights", "update_weights")
        else:
            self._time(trainer, "_generate_single_turn", "gen")
        if torch.cuda.is_available():  # torch counts vLLM's memory too, also while it sleeps
            own = sum(parameter.nbytes for parameter in trainer.model.parameters())
            self.others = torch.cuda.memory_allocated() - own

    def _time(self, owner, name: str, phase: str, counts=lambda: True) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args, **kwargs):
            if not counts():
                return inner(*args, **kwargs)
            started = synchronized()
            result = inner(*args, **kwargs)
            self.seconds[phase] += synchronized() - started
            return result

        setattr(owner, name, timed)

    def on_train_begin(self, args, state, control, **_):
        self.ended = synchronized()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args, state, control, **_):
        now = synchronized()
        self.seconds["step"] = now - self.ended
        self.ended = now

    def on_log(self, args, state, control, logs, **_):
        if "reward" not in logs:  # the last one, for the whole training
            return
        tokens, before = logs["num_tokens"] - self.tokens, self.seconds["rollout"]
        spent = {phase: self.seconds[phase] for phase in ("gen", "reward", "old_log_prob", "update_weights")}
        spent |= {"adv": before - sum(spent.values()), "update_actor": self.seconds["step"] - before}
        spent["step"] = self.seconds["step"]
        data = {f"timing_s/{phase}": seconds for phase, seconds in spent.items()}
        data |= {"perf/total_num_tokens": tokens, "perf/throughput": tokens / spent["step"]}
        data |= {"response_length/mean": logs["completions/mean_length"], "critic/score/mean": logs["reward"]}
        data |= {name: logs[name] for name in ("loss", "grad_norm", "entropy")}
        if torch.cuda.is_available():
            data["perf/max_memory_allocated_gb"] = (torch.cuda.max_memory_allocated() - self.others) / 2**30
        with self.file.open("a") as file:
            file.write(json.dumps({"step": state.global_step, "data": data}) + "\n")
        self.seconds, self.tokens = Counter(), logs["num_tokens"]


def train(s: Settings, model: str, config: GRPOConfig, file: Path) -> None:
    """Train as ``config`` says, and write a line a step to ``file``."""
    check(s)
    tokenizer, phases = load_tokenizer(model), Phases(file)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward(s),
        args=config,
        train_dataset=prompts(s, tokenizer),
        processing_class=tokenizer,
        callbacks=[phases],
    )
    phases.watch(trainer)
    trainer.train()


def keep_weights() -> None:
    """For a rehearsal on a CPU: vLLM keeps the weights that it packed there, or TRL would find none to load into. It
    samples with the packed ones, so with those of the start."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, remove_weight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("steps", type=int)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    s = load_settings()
    if s.STACK == "cpu":
        keep_weights()
    else:  # as for ours: another program on the GPU may take memory while vLLM falls asleep
        from verl_tasks.verl_plugins import shared_gpu  # noqa: F401
    config = arguments(s, given.model, given.steps, given.folder)
    train(s, given.model, config, given.folder / "metrics/000.jsonl")
    os._exit(0)  # what ends vLLM in this process is not measured, and may fail


if __name__ == "__main__":
    main()
