"""verl_plugins/on_policy.py: when the pass for the old log-probs is left out, and that the loss is then verl's.

In a real training, beside verl's own pass: test_numerics.py."""

from functools import partial, reduce

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from tests.test_verl_config import config_of
from verl_tasks.verl_plugins.one_update import applies, cap

PROMPTS, LENGTHS = (3, 5, 2), (4, 1, 6)


@pytest.fixture(scope="module")
def module():
    from verl_tasks.verl_plugins import on_policy  # here: importing verl takes seconds

    return on_policy


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.fixture
def batch(module):
    """A micro-batch as a worker has it, and of each of its tokens log-prob and entropy, as the model gives them out."""
    torch.manual_seed(0)
    rows = [prompt + length for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    data = TensorDict(
        {
            "prompts": nested([torch.ones(length, dtype=torch.int64) for length in PROMPTS]),
            "responses": nested([torch.ones(length, dtype=torch.int64) for length in LENGTHS]),
            "response_mask": nested([torch.ones(length, dtype=torch.int64) for length in LENGTHS]),
            "rollout_log_probs": nested([-torch.rand(length) for length in LENGTHS]),
            "advantages": nested([torch.randn(1).expand(length).clone() for length in LENGTHS]),
        },
        batch_size=len(rows),
    )
    counts = {"dp_size": 1, "batch_num_tokens": sum(LENGTHS), "global_batch_size": len(rows)}
    module.tensordict_utils.assign_non_tensor(data, **counts)
    values = {name: torch.rand(sum(rows), requires_grad=True) for name in ("log_probs", "entropy")}
    offsets = torch.tensor([0, *rows]).cumsum(0)
    output = {name: torch.nested.nested_tensor_from_jagged(-value, offsets) for name, value in values.items()}
    return data, output, values


def loss_of(function, config, batch):
    """The loss, its metrics, and its gradients for log-probs and entropies."""
    data, output, values = batch
    loss, metrics = function(config, output, data)
    gradients = torch.autograd.grad(loss, list(values.values()), allow_unused=True)
    return loss.item(), metrics, [torch.zeros(1) if gradient is None else gradient for gradient in gradients]


def actor_config(**changes):
    from verl.workers.config import FSDPActorConfig

    return FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **changes)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("coefficient", [0, 0.1])
def test_the_loss_is_verls_with_its_own_log_probs_as_the_old_ones(module, batch, coefficient, aggregation):
    data, output, _ = batch
    own = module.response_from_nested(output["log_probs"].detach(), data["response_mask"])
    config = actor_config(entropy_coeff=coefficient, loss_agg_mode=aggregation)
    wanted, _, gradients = loss_of(module._ppo_loss, config, (data.clone().set("old_log_probs", own), *batch[1:]))
    module.tensordict_utils.assign_non_tensor(data, **{module.ON_POLICY: True})
    loss, metrics, ours = loss_of(module.ppo_loss, config, batch)
    assert loss == pytest.approx(wanted) and wanted != 0
    for gradient, reference in zip(ours, gradients, strict=True):
        assert torch.allclose(gradient, reference)
    assert ours[0].any() and bool(ours[1].any()) == (coefficient > 0)
    assert metrics["actor/ppo_kl"].aggregate() == 0


def test_what_the_pass_would_have_measured(module, batch):
    data, output, _ = batch
    log_probs, entropies = (
        module.response_from_nested(output[name].detach(), data["response_mask"]).values()
        for name in ("log_probs", "entropy")
    )
    module.tensordict_utils.assign_non_tensor(data, **{module.ON_POLICY: True})
    config = actor_config(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=100)  # metrics are of a token
    _, metrics, _ = loss_of(module.ppo_loss, config, batch)
    difference = (log_probs.exp() - data["rollout_log_probs"].values().exp()).abs()
    assert metrics["entropy"].aggregate() == pytest.approx(entropies.mean().item())
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(difference.max().item())
    assert metrics["training/rollout_probs_diff_mean"].aggregate() == pytest.approx(difference.mean().item())
    kl = (data["rollout_log_probs"].values() - log_probs).mean().item()
    assert metrics["rollout_corr/kl"].aggregate() == pytest.approx(kl, abs=1e-6)


def part(batch, rows: list[int]):
    """Those ``rows`` of a batch as a micro-batch of it: the counts are still the batch's."""
    data, output, _ = batch
    chosen = {name: nested([tensor.unbind()[row] for row in rows]) for name, tensor in data.items() if row_wise(tensor)}
    others = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    made = TensorDict(chosen, batch_size=len(rows))
    offsets = output["log_probs"].offsets()
    values = {name: [output[name].values()[offsets[row] : offsets[row + 1]] for row in rows] for name in output}
    return made, others, {name: nested_of(parts) for name, parts in values.items()}


def row_wise(tensor) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_nested


def nested_of(parts: list[torch.Tensor]) -> torch.Tensor:
    offsets = torch.tensor([0, *map(len, parts)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)


CAP = 1.2  # met by some of the tokens


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "gpg", "cispo"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_the_tokens_weights_are_those_of_verls_own_pass(module, batch, aggregation, loss):
    """Loss, gradient and metrics of two micro-batches against verl's path: its weights of the whole batch, before."""
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    data, output, values = batch
    config = actor_config(loss_agg_mode=aggregation, policy_loss={"loss_mode": loss})
    own = module.response_from_nested(output["log_probs"].detach(), data["response_mask"])
    padded = data.select("response_mask", "rollout_log_probs").set("old_log_probs", own).to_padded_tensor()
    correction = {"rollout_is": "token", "rollout_is_threshold": CAP}
    verls, metrics = compute_rollout_correction_and_add_to_batch(DataProto(batch=padded), correction)
    weights = module.response_to_nested(verls.batch["rollout_is_weights"], data["response_mask"])
    whole = data.clone().set("old_log_probs", own)
    plain, _, _ = loss_of(module._ppo_loss, config, (whole.clone(), output, values))
    wanted, _, gradients = loss_of(module._ppo_loss, config, (whole.set("rollout_is_weights", weights), output, values))
    assert wanted != pytest.approx(plain) and 0 < metrics["rollout_corr/rollout_is_ratio_fraction_high"] < 1

    total, found = 0, []
    for rows in ([0, 2], [1]):
        made, counts, outputs = part(batch, rows)
        module.tensordict_utils.assign_non_tensor(made, **counts, **{module.ON_POLICY: True, module.CAP: CAP})
        part_loss, part_metrics = module.ppo_loss(config, outputs, made)
        total, found = total + part_loss, [*found, part_metrics]
    (gradient,) = torch.autograd.grad(total, values["log_probs"])
    assert total.item() == pytest.approx(wanted) and torch.allclose(gradient, gradients[0])
    for name in module.OVER_TOKENS[:-1]:
        together = reduce(lambda a, b: a.extend(b) or a, [each[name] for each in found])
        assert together.aggregate() == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
    for name, end in (("rollout_corr/rollout_is_max", max), ("rollout_corr/rollout_is_min", min)):
        assert end(each[name] for each in found) == pytest.approx(metrics[name])
    assert set(metrics) <= set(found[0])


@pytest.mark.parametrize("cap", [0, CAP])
def test_metrics_of_two_gpus_are_of_all_tokens_where_a_micro_batch_has_none(module, batch, cap):
    """TRUNCATED=masked, the second response cut off. verl wants as many values of a metric from either GPU."""
    from verl.utils.py_functional import append_to_dict

    data, _, _ = batch
    masks = [*data["response_mask"].unbind()]
    data["response_mask"] = nested([masks[0], torch.zeros_like(masks[1]), masks[2]])
    _, counts, _ = part(batch, [0, 2, 0])
    counts["batch_num_tokens"] = sum(LENGTHS[row] for row in (0, 2, 0))

    def metrics_of(rows: list[int], gpus: int) -> dict:
        made, _, outputs = part(batch, rows)
        marks = {module.ON_POLICY: True, module.CAP: cap}
        module.tensordict_utils.assign_non_tensor(made, **counts | {"dp_size": gpus}, **marks)
        return module.ppo_loss(actor_config(), outputs, made)[1]

    gpus = {}, {}
    for gpu, rows in zip(gpus, ([0, 1], [2, 0]), strict=True):
        for row in rows:
            append_to_dict(gpu, metrics_of([row], 2))
    wanted = {name: value for name, value in metrics_of([0, 2, 0], 1).items() if name in module.OVER_TOKENS}
    assert any("rollout_is" in name for name in gpus[0]) == bool(cap) and "rollout_corr/k3_kl" in wanted
    for name, value in wanted.items():
        found = module.Metric.aggregate_dp([gpu[name] for gpu in gpus])
        assert found == pytest.approx(value.aggregate(), rel=1e-4), name


def test_other_batches_keep_their_old_log_probs(module, batch):
    data, _, _ = batch
    old = nested([-torch.rand(length) for length in LENGTHS])
    data = data.set("old_log_probs", old)
    results = [loss_of(f, actor_config(), (data.clone(), *batch[1:])) for f in (module.ppo_loss, module._ppo_loss)]
    assert results[0][0] == results[1][0] and set(results[0][1]) == set(results[1][1])
    assert results[0][1]["actor/ppo_kl"].aggregate() != 0


@pytest.mark.parametrize("cap", [0, CAP])
@pytest.mark.parametrize("on_policy", [True, False])
def test_a_mini_batch_without_a_token_has_the_loss_0(module, batch, on_policy, cap):
    """TRUNCATED=masked, all responses cut off. verl's own loss is 0 / 0, and it has no weights of no token."""
    data, _, _ = batch
    data["response_mask"] = nested([torch.zeros(length, dtype=torch.int64) for length in LENGTHS])
    data["old_log_probs"] = nested([-torch.rand(length) for length in LENGTHS])
    module.tensordict_utils.assign_non_tensor(
        data, batch_num_tokens=0, **{module.ON_POLICY: on_policy, module.CAP: cap}
    )
    loss, _, gradients = loss_of(module.ppo_loss, actor_config(), batch)
    assert loss == 0 and not any(gradient.any() for gradient in gradients)


def test_the_critics_loss_of_a_mini_batch_without_a_token_is_0(module, batch):
    from verl.workers.config import CriticConfig

    data, _, _ = batch
    values = nested([torch.rand(length) for length in LENGTHS])
    data = data.set("values", values).set("returns", nested([torch.ones(length) for length in LENGTHS]))
    config = CriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1)
    losses = [
        f(config, {"values": batch[1]["log_probs"]}, data.clone())[0] for f in (module.value_loss, module._value_loss)
    ]
    assert losses[0] == losses[1] > 0
    data["response_mask"] = nested([torch.zeros(length, dtype=torch.int64) for length in LENGTHS])
    module.tensordict_utils.assign_non_tensor(data, batch_num_tokens=0)
    assert torch.isnan(module._value_loss(config, {"values": batch[1]["log_probs"]}, data.clone())[0])
    assert module.value_loss(config, {"values": batch[1]["log_probs"]}, data)[0] == 0


def test_advantages_are_whitened_where_two_tokens_count():
    from verl_tasks.verl_plugins import advantages

    values, mask = torch.randn(2, 4), torch.ones(2, 4)
    assert torch.equal(advantages.masked_whiten(values, mask), advantages._masked_whiten(values, mask))
    for counted in (0, 1):
        mask = torch.zeros(2, 4)
        mask[0, :counted] = 1
        with pytest.raises(ValueError, match="mask"):
            advantages._masked_whiten(values, mask)
        assert not advantages.masked_whiten(values, mask).any()


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("aggregation", ["seq-mean-token-sum-norm", "seq-mean-token-mean", "token-mean"])
def test_the_metric_of_the_kl_is_of_a_token_whatever_the_loss(module, batch, aggregation, on_policy):
    """Of two micro-batches, the second without a token (TRUNCATED=masked); the loss is verl's."""
    data, output, _ = batch
    own = module.response_from_nested(output["log_probs"].detach(), data["response_mask"])
    masks = [*data["response_mask"].unbind()]
    data["response_mask"] = nested([masks[0], torch.zeros_like(masks[1]), masks[2]])
    data["ref_log_prob"] = nested([-torch.rand(length) for length in LENGTHS])
    data["old_log_probs"] = own
    _, counts, _ = part(batch, [0])
    counts["batch_num_tokens"] = LENGTHS[0] + LENGTHS[2]
    config = actor_config(
        loss_agg_mode=aggregation, loss_scale_factor=100, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="low_var_kl+"
    )
    kls = []
    for rows in ([0, 2], [1]):
        made, _, outputs = part(batch, rows)
        module.tensordict_utils.assign_non_tensor(made, **counts, **{module.ON_POLICY: on_policy, module.CAP: 0})
        wanted, _ = module._ppo_loss(config, outputs, made.clone())
        loss, metrics = module.ppo_loss(config, outputs, made)
        assert loss.item() == pytest.approx(wanted.item())
        kls.append(metrics["kl_loss"])
    ratio = data["ref_log_prob"].values() - own.values()
    k3 = (ratio.exp() - ratio - 1)[data["response_mask"].values().bool()]
    kls[0].extend(kls[1])
    assert kls[0].aggregate() == pytest.approx(k3.mean().item(), rel=1e-4)


def test_metrics_of_the_pass_have_the_names_of_verl(module):
    metrics = {"actor/training/rollout_probs_diff_max": 1, "actor/rollout_corr/kl": 2, "actor/entropy": 3, "perf/x": 4}
    assert list(module.taken_out(metrics)) == [
        "training/rollout_probs_diff_max",
        "rollout_corr/kl",
        "actor/entropy",
        "perf/x",
    ]


def test_a_value_is_set_for_a_block_alone(module):
    config = OmegaConf.create({"a": 1})
    OmegaConf.set_struct(config, True)
    with pytest.raises(RuntimeError), module.set_to(config, "a", 2):
        assert config.a == 2
        raise RuntimeError
    assert config.a == 1


composed = partial(config_of, STACK="current", TRAIN_BATCH_SIZE="8", ROLLOUT_N="4")


@pytest.mark.parametrize(
    ("changes", "weighed"),
    [
        ({}, 2.0),
        ({"ROLLOUT_CORRECTION": "none"}, 0),
        ({"KL_COEF": "0.01"}, 2.0),
        ({"LORA_RANK": "8"}, 2.0),
        ({"METHOD": "ppo", "MINI_BATCH_SIZE": "8"}, 2.0),
    ],
)
def test_there_is_no_pass_where_a_step_is_one_update(module, changes, weighed):
    config = composed(**changes)
    assert applies(config, 32) and cap(config) == weighed


@pytest.mark.parametrize(
    ("overrides", "changes", "responses"),
    [
        ([], {"MINI_BATCH_SIZE": "4"}, 32),
        ([], {"METHOD": "gspo"}, 32),
        ([], {}, 40),  # a rollout of several turns can be several rows: then there are two updates
        (["actor_rollout_ref.actor.ppo_epochs=2"], {}, 32),
        (["actor_rollout_ref.rollout.calculate_log_probs=False"], {}, 32),
        ([], {"ROLLOUT_CORRECTION": "sequence"}, 32),
        (["algorithm.rollout_correction.rollout_is=sequence"], {}, 32),
        (["algorithm.rollout_correction.rollout_is_batch_normalize=True"], {}, 32),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], {}, 32),
        (["algorithm.rollout_correction.bypass_mode=True"], {}, 32),
        (["distillation.enabled=True"], {}, 32),
        ([], {"METHOD": "ppo", "MINI_BATCH_SIZE": "8", "KL_COEF": "0.01"}, 32),
    ],
)
def test_there_is_a_pass_where_something_wants_it(module, overrides, changes, responses):
    assert not applies(composed(*overrides, **changes), responses)


def distilling(module, batch):
    """distilled.py and a config of METHOD=distill; ``batch`` gets log-probs of a teacher, and its own as old ones."""
    from verl.workers.config import DistillationConfig, DistillationLossConfig

    from verl_tasks.verl_plugins import distilled

    data, output, _ = batch
    offsets, values = output["log_probs"].offsets(), torch.randn(len(output["log_probs"].values()), 1)
    data["old_log_probs"] = module.response_from_nested(output["log_probs"].detach(), data["response_mask"])
    data["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(values, offsets)
    loss = DistillationLossConfig(loss_mode="k1", use_policy_gradient=True, use_task_rewards=False)
    return distilled, DistillationConfig(distillation_loss=loss)


def test_distillation_takes_the_importance_weights_of_tokens(module, batch):
    """verl's own loss fails on them: they are nested, and what it weighs is padded."""
    distilled, config = distilling(module, batch)
    data, output, _ = batch
    losses = {}
    for weight in (None, 1.0, 0.5):
        if weight:
            data["rollout_is_weights"] = nested([torch.full((length,), weight) for length in LENGTHS])
            if weight == 1.0:
                with pytest.raises(ValueError, match="NestedTensor"):
                    distilled._distillation_loss(actor_config(), config, output, data)
        loss, _ = distilled.losses.distillation_ppo_loss(actor_config(), config, output, data)
        losses[weight] = loss.item()
        assert "rollout_is_weights" not in data or data["rollout_is_weights"].is_nested
    assert losses[None] != 0 and losses[1.0] == pytest.approx(losses[None])
    assert losses[0.5] == pytest.approx(losses[None] / 2)


@pytest.mark.parametrize("tokens", [sum(LENGTHS), 0])  # of the other micro-batches, if any
def test_distillation_of_a_micro_batch_without_a_token_has_the_loss_0(module, batch, tokens):
    """TRUNCATED=masked, ROLLOUT_CORRECTION=sequence: verl's own loss looks for the smallest of none."""
    distilled, config = distilling(module, batch)
    data, output, values = batch
    data["rollout_is_weights"] = nested([torch.ones(length) for length in LENGTHS])
    loss_of_distillation = distilled.losses.distillation_ppo_loss
    _, wanted = loss_of_distillation(actor_config(), config, output, data)
    data["response_mask"] = nested([torch.zeros(length, dtype=torch.int64) for length in LENGTHS])
    module.tensordict_utils.assign_non_tensor(data, batch_num_tokens=tokens)
    loss, metrics = loss_of_distillation(actor_config(), config, output, data)
    (gradient,) = torch.autograd.grad(loss, values["log_probs"])
    assert loss == 0 and not gradient.any()
    # verl wants as many parts of a metric from every GPU.
    kinds = [{name: getattr(each, "aggregation", None) for name, each in found.items()} for found in (wanted, metrics)]
    assert kinds[0] == kinds[1] and kinds[0]["distillation/loss_min"] == module.AggregationType.MIN
    numbers = {name: each.aggregate() if kinds[1][name] else each for name, each in metrics.items()}
    assert set(numbers.values()) == {0}
