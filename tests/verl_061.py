"""What test_a100_stack.py runs in a process of its own, with the real verl 0.6.1 on the CPU; prints JSON.

PYTHONPATH=<the wheel's folder>:<the repository> python -m tests.verl_061 FOLDER
"""

import ast
import asyncio
import json
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import torch
import transformers

# verl 0.6.1 is made for transformers 4, which had the name.
transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText

from omegaconf import OmegaConf  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402
from verl import DataProto, __version__  # noqa: E402
from verl.trainer.main_ppo import create_rl_sampler  # noqa: E402
from verl.trainer.ppo import core_algos, ray_trainer  # noqa: E402
from verl.trainer.ppo.core_algos import agg_loss  # noqa: E402
from verl.trainer.ppo.ray_trainer import RayPPOTrainer  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch  # noqa: E402
from verl.utils import model as verl_model  # noqa: E402
from verl.utils.debug.metrics import calculate_debug_metrics  # noqa: E402
from verl.workers import fsdp_workers  # noqa: E402
from verl.workers.actor.dp_actor import DataParallelPPOActor  # noqa: E402
from verl.workers.config import FSDPActorConfig  # noqa: E402
from verl.workers.config import model as config_model  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine  # noqa: E402

from tests.exact_kl import gradients  # noqa: E402
from tests.verl_061_keep_best import trainings  # noqa: E402
from verl_tasks.verl_plugins.verl_061 import on_policy, order, patches  # noqa: E402

PROMPT, RESPONSE, ROWS = 5, 6, 8


# ---- the order of the prompts


def prompts(sampler: dict) -> StatefulDataLoader:
    """As RayPPOTrainer._create_dataloader makes it: 10 prompts, 4 a step, two steps an epoch."""
    rows = list(range(10))
    config = OmegaConf.create({"sampler": sampler, "shuffle": True, "seed": 3, "dataloader_num_workers": 0})
    return StatefulDataLoader(
        rows, batch_size=4, num_workers=0, drop_last=True, sampler=create_rl_sampler(config, rows)
    )


def steps(loader: StatefulDataLoader, count: int, state=None, save_after: int = 0):
    if state:
        loader.load_state_dict(state)
    taken, saved = [], None
    while True:
        for batch in loader:
            taken.append(batch.tolist())
            saved = loader.state_dict() if len(taken) == save_after else saved
            if len(taken) == count:
                return taken, saved


def resumes_where_it_was(sampler: dict, after: int) -> bool:
    whole, saved = steps(prompts(sampler), 9, save_after=after)
    return steps(prompts(sampler), 9 - after, saved)[0] == whole[after:]


# ---- a step of one update


def actor(micro: int = 4, **changes) -> DataParallelPPOActor:
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)
    sizes = {"ppo_mini_batch_size": ROWS, "ppo_micro_batch_size_per_gpu": micro, "ppo_epochs": 1, "rollout_n": 1}
    settings = FSDPActorConfig(strategy="fsdp", use_dynamic_bsz=False, use_torch_compile=False, **(sizes | changes))
    return DataParallelPPOActor(settings, model, torch.optim.SGD(model.parameters(), lr=0.1))


def batch() -> DataProto:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (ROWS, PROMPT + RESPONSE), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        mask[row, PROMPT + 2 + row % 4 :] = 0
    tensors = {
        "input_ids": ids,
        "responses": ids[:, PROMPT:].contiguous(),
        "attention_mask": mask,
        "position_ids": torch.arange(PROMPT + RESPONSE).repeat(ROWS, 1),
        "response_mask": mask[:, PROMPT:].contiguous(),
        "advantages": torch.randn(ROWS, 1, generator=generator).repeat(1, RESPONSE),
        "rollout_log_probs": -torch.rand(ROWS, RESPONSE, generator=generator),
    }
    return DataProto.from_dict(tensors, meta_info={"micro_batch_size": 4, "use_dynamic_bsz": False})


# Most ratios to the invented log-probs of the engine are small; a cap of 0.03 is met by some.
TOKENS = {"rollout_is": "token", "rollout_is_threshold": 0.03}


def with_verls_pass(correction: dict) -> tuple[dict, list[torch.Tensor]]:
    """Metrics of verl's own step, those of its pass included, and the weights after it."""
    ours, data = actor(), batch()
    data.meta_info["temperature"] = 0.7
    data.batch["old_log_probs"], entropy = ours.compute_log_prob(data, calculate_entropy=True)
    data, found = compute_rollout_correction_and_add_to_batch(data, correction)
    metrics = found | on_policy._update_policy(ours, data) | calculate_debug_metrics(data)
    metrics["actor/entropy"] = agg_loss(entropy, data.batch["response_mask"], "token-mean")
    return metrics, list(ours.actor_module.parameters())


class Workers:
    """In place of the worker group: tells whether the pass was asked for."""

    def compute_log_prob(self, data: DataProto) -> str:
        return "verl's pass"


def trainer(**changes):
    """A trainer after init_workers, with a step of one update but for ``changes`` (dotted keys)."""
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "model": {"use_fused_kernels": True},
                "actor": {"ppo_mini_batch_size": ROWS, "ppo_epochs": 1},
                "rollout": {"n": 1, "calculate_log_probs": True, "temperature": 0.7},
            },
            "algorithm": {
                "use_kl_in_reward": False,
                "rollout_correction": {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_rs": None},
            },
            "trainer": {"critic_warmup": 0},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    made = object.__new__(RayPPOTrainer)
    made.config, made.actor_rollout_wg = config, Workers()
    on_policy._init_workers = lambda self: None  # Ray and the engines
    made.init_workers()
    return made


def without_pass(correction: dict) -> tuple[dict, list[torch.Tensor]]:
    data = batch()
    changes = {f"algorithm.rollout_correction.{name}": value for name, value in correction.items()}
    data = data.union(trainer(**changes).actor_rollout_wg.compute_log_prob(data))
    data.batch.pop("entropys")
    data, found = compute_rollout_correction_and_add_to_batch(
        data, correction
    )  # as RayPPOTrainer.fit, of unused values
    ours = actor()
    return found | ours.update_policy(data), list(ours.actor_module.parameters())


def compared(correction: dict) -> dict:
    """A step with verl's pass and one without it: their metrics, and whether they end at the same weights."""
    (wanted, weights), (found, other_weights) = with_verls_pass(correction), without_pass(correction)
    return {
        "same weights": all(torch.allclose(a, b, atol=1e-7) for a, b in zip(weights, other_weights, strict=True)),
        "first weights": weights[0].flatten()[:200].tolist(),
        "wanted": {name: float(torch.as_tensor(value).float().mean()) for name, value in wanted.items()},
        "found": {name: float(torch.as_tensor(value).float().mean()) for name, value in found.items()},
    }


def cut_off(first: int) -> dict[str, float]:
    """The metrics of a step without the pass where no token counts of the responses from ``first`` on."""
    ours, data = actor(), batch()
    data.meta_info |= {"temperature": 0.7, on_policy.ON_POLICY: True, on_policy.CAP: TOKENS["rollout_is_threshold"]}
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"]  # not used on policy
    data.batch["response_mask"][first:] = 0
    return {name: float(torch.as_tensor(value).mean()) for name, value in ours.update_policy(data).items()}


def none_counts() -> tuple[dict, dict]:
    """What ``fit`` measures and corrects of a whole batch in which no token counts: its own functions, by name."""
    from verl.trainer.ppo import rollout_corr_helper
    from verl.utils.debug import metrics

    data = batch()
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"]
    data.batch["response_mask"][:] = 0
    config = OmegaConf.create(TOKENS)
    return metrics.calculate_debug_metrics(data), rollout_corr_helper.compute_rollout_correction_and_add_to_batch(
        data, config
    )[1]


def drift(**changes) -> list[str]:
    """What a step of four mini-batches says of engine against trainer: with verl's pass before, or in bypass_mode."""
    ours, data = actor(2, ppo_mini_batch_size=2), batch()
    data.meta_info["temperature"] = 0.7
    made = trainer(**{"actor_rollout_ref.actor.ppo_mini_batch_size": 2, **changes})
    if not made.config.algorithm.rollout_correction.get("bypass_mode"):  # as RayPPOTrainer.fit
        assert made.actor_rollout_wg.compute_log_prob(data) == "verl's pass"
    data.batch["old_log_probs"], _ = ours.compute_log_prob(data, calculate_entropy=False)
    data.batch["rollout_log_probs"] = data.batch["old_log_probs"]
    return [name for name in ours.update_policy(data) if name.startswith("rollout_corr/")]


def kl_metric(micro: int, mini: int, marks: dict) -> float:
    """``actor/kl_loss`` of a step of Dr. GRPO, whose last three responses are cut off, as a share of a token's KL."""
    changes = {"ppo_mini_batch_size": mini, "use_kl_loss": True, "kl_loss_type": "low_var_kl+"}
    ours, data = actor(micro, loss_agg_mode="seq-mean-token-sum-norm", **changes), batch()
    ours.actor_optimizer.param_groups[0]["lr"] = 0.0
    data.meta_info |= {"temperature": 0.7, **marks}
    data.batch["response_mask"][-3:] = 0
    log_probs, _ = ours.compute_log_prob(data, calculate_entropy=False)
    ratio = data.batch["rollout_log_probs"]  # small: verl bounds a token's KL
    data.batch["old_log_probs"], data.batch["ref_log_prob"] = log_probs, log_probs + ratio
    found = ours.update_policy(data)["actor/kl_loss"]
    wanted = (ratio.exp() - ratio - 1)[data.batch["response_mask"].bool()].mean()
    return sum(found) / len(found) / float(wanted)  # reduce_metrics takes the mean


# ---- mini-batches


def mean_lengths(balance, gpus: int, step: int = 1) -> list[float]:
    """Mean lengths of the four mini-batches of 128 responses after ``balance``, as dp_actor.py splits them."""
    made = object.__new__(RayPPOTrainer)
    made.config, made.global_steps = OmegaConf.create({"data": {"seed": 42}}), step
    made.actor_rollout_wg = Workers()
    made.actor_rollout_wg.world_size = gpus
    lengths = torch.randint(10, 500, (128,), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(500) < lengths[:, None]).long()
    data = DataProto.from_dict({"attention_mask": mask})
    balance(made, data, metrics={})
    assert sorted(data.batch["attention_mask"].sum(1).tolist()) == sorted(lengths.tolist())
    each = [part.split(128 // gpus // 4) for part in data.chunk(gpus)]  # of each GPU
    return [
        DataProto.concat(list(mini)).batch["attention_mask"].sum(1).float().mean().item()
        for mini in zip(*each, strict=True)
    ]


# ---- what is drawn


def seeds_set() -> list[int]:
    """What torch is seeded with when the workers begin to build a model, SEED being 7."""
    os.environ["SEED"], found = "7", []
    for build in (
        fsdp_workers.ActorRolloutRefWorker._build_model_optimizer,
        fsdp_workers.CriticWorker._build_critic_model_optimizer,
        FSDPEngine._build_model_optimizer,
    ):
        torch.manual_seed(1)
        with suppress(AttributeError, TypeError):  # there is no worker, and it ends at once
            build(None)
        with suppress(AttributeError, TypeError):
            build(None, None)
        found.append(torch.initial_seed())
    return found


# ---- Dr. GRPO's loss


def dr_grpo(micro: int) -> float:
    """The loss of a step on policy, as it is summed up over its micro-batches."""
    ours, data = actor(micro, loss_agg_mode="seq-mean-token-sum-norm"), batch()
    data.meta_info["temperature"] = 0.7
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"]  # not used on policy
    return sum(ours.update_policy(data)["actor/pg_loss"])


# ---- the end of a response


def server() -> ModuleType:
    """verl's module of the rollout server with its ``generate`` alone: the rest imports what only vLLM 0.11.0 has."""
    path = Path(find_spec("verl").origin).parent / "workers/rollout/vllm_rollout/vllm_async_server.py"
    tree = ast.parse(path.read_text())
    base = next(node for node in tree.body if getattr(node, "name", "") == "vLLMHttpServerBase")
    base.body = [node for node in base.body if getattr(node, "name", "") == "generate"]
    module = ModuleType("server")
    names = ("TokensPrompt", "LoRARequest", "RequestOutput", "TokenOutput", "SamplingParams")
    vars(module).update({name: SimpleNamespace for name in names})
    vars(module).update(Any=Any, Optional=Optional, _qwen2_5_vl_dedup_image_tokens=lambda ids, processor: ids)
    exec(compile(ast.Module([base], []), str(path), "exec"), vars(module))
    sys.modules["server"] = module
    patches.end_at_response_length(module)
    return module


def sampled_for(prompt: int, response_length: int | None) -> int:
    """``max_tokens`` that verl's server asks vLLM for, with a prompt of ``prompt`` tokens in a window of 512."""
    asked = []

    class Engine:
        async def generate(self, prompt, sampling_params, **kwargs):
            asked.append(sampling_params.max_tokens)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1], logprobs=None)])

    config = SimpleNamespace(max_model_len=512, get=lambda name, default: default)
    model = SimpleNamespace(processor=None, lora_rank=0)
    how = {"temperature": 1.0} | ({"response_length": response_length} if response_length else {})
    generate = server().vLLMHttpServerBase.generate
    asyncio.run(generate(SimpleNamespace(config=config, model_config=model, engine=Engine()), [5] * prompt, how, "1"))
    return asked[0]


def exported() -> dict:
    """What a config says after verl changed it."""
    config = transformers.LlamaConfig()
    for module in (verl_model, config_model):
        module.update_model_config(config, {"attn_implementation": "flash_attention_2", "pad_token_id": 5})
    return {name: value for name, value in config.to_dict().items() if "attn" in name or name == "pad_token_id"}


def main() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    own = {"class_path": "pkg://verl_tasks.verl_plugins.verl_061.order", "class_name": "Shuffled"}
    none = {"class_path": None, "class_name": None}
    made_with = [
        {"actor_rollout_ref.actor.ppo_epochs": 2},
        {"actor_rollout_ref.actor.ppo_mini_batch_size": 4},
        {"actor_rollout_ref.rollout.calculate_log_probs": False},
        {"actor_rollout_ref.model.use_fused_kernels": False},
        {"algorithm.rollout_correction.rollout_is": "sequence"},
        {"algorithm.rollout_correction.rollout_rs": "geometric"},
        {"algorithm.use_kl_in_reward": True},
        {"trainer.critic_warmup": 2},
    ]
    advantages, mask = batch().batch["advantages"], batch().batch["response_mask"]
    result = {
        "dr_grpo losses": [dr_grpo(micro) for micro in (2, 4, 8)],
        "dr_grpo wanted": float(-(advantages * mask).sum() / RESPONSE / ROWS),
        "entropy": float(ray_trainer.agg_loss(advantages, mask, "seq-mean-token-sum-norm")),
        "entropy wanted": float((advantages * mask).sum() / mask.sum()),
        "version": __version__,
        "exported": exported(),
        "resumes": {
            name: [resumes_where_it_was(s, n) for n in range(1, 6)] for name, s in (("own", own), ("verl", none))
        },
        "sampled": [sampled_for(60, 256), sampled_for(400, 256), sampled_for(60, None)],
        "seeds": seeds_set(),
        "none": compared({}),
        "token": compared(TOKENS),
        "cut off": [cut_off(first) for first in (ROWS, 4, 0)],
        "none counts": none_counts(),
        "drift": [
            drift(),
            drift(**{"actor_rollout_ref.model.use_fused_kernels": False}),
            drift(**{"algorithm.rollout_correction.bypass_mode": True}),
        ],
        "kl metric": [
            kl_metric(micro, mini, marks)
            for micro, mini in ((8, 8), (2, 8), (2, 4))
            for marks in ({}, {on_policy.ON_POLICY: True, on_policy.CAP: 0})
            if mini == ROWS or not marks
        ],
        "lengths": {
            "verl": mean_lengths(order._balance_batch, 2),
            "own": mean_lengths(RayPPOTrainer._balance_batch, 2),
            "next step": mean_lengths(RayPPOTrainer._balance_batch, 2, step=2),
        },
        "kl": {
            kind: [tensor.tolist() for tensor in gradients(core_algos.kl_penalty, kind)]
            for kind in ("low_var_kl", "low_var_kl+")
        },
        "equal rewards": [
            bool(estimate(torch.full((8, 1), 0.8), torch.ones(8, 1), index=["prompt"] * 8)[0].any())
            for estimate in (core_algos.compute_grpo_outcome_advantage, core_algos.get_adv_estimator_fn("rloo"))
        ],
        "pass": [
            trainer(**changes).actor_rollout_wg.compute_log_prob(batch()) == "verl's pass" for changes in made_with
        ],
        "trainings": trainings(Path(sys.argv[1])),  # last: they set the variables of a training
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
