"""ASYNC=separate: GPUs of their own sample; they get the weights, both sides tell their idle time, a run goes on."""

from types import SimpleNamespace
from unittest import mock

import pytest

from tests.helpers import kill_after_a_checkpoint, make, steps_logged
from tests.small_runs import COMMON, trained_parameters
from tests.test_settings import VALUES
from verl_tasks.launch import minutes, rehearse, train
from verl_tasks.machine import cluster, memory
from verl_tasks.runs.run import read_metrics
from verl_tasks.settings import SettingsError, load_settings
from verl_tasks.training import verl_checks, verl_config

TWO = VALUES | {"ASYNC": "separate", "N_GPUS": "2", "INIT": "base"}


@pytest.mark.parametrize(("gpus", "given", "train", "sample"), [(2, 0, 1, 1), (5, 0, 3, 2), (8, 2, 6, 2)])
def test_half_of_the_gpus_sample_unless_their_number_is_given(gpus, given, train, sample):
    changes = {"N_GPUS": str(gpus), "ROLLOUT_GPUS": str(given), "MINI_BATCH_SIZE": "12", "TRAIN_BATCH_SIZE": "12"}
    s = load_settings(TWO | changes)
    assert (s.training_gpus, s.sampling_gpus, s.world_size) == (train, sample, train)
    config = verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, "model", s.runs_dir))
    rollout = config.actor_rollout_ref.rollout
    assert (config.trainer.n_gpus_per_node, rollout.n_gpus_per_node, rollout.nnodes) == (train, sample, 1)
    assert verl_checks.samplers(config) == sample and not list(verl_checks._indivisible(config))
    assert cluster.held_cpus(s) >= 3 * gpus


def test_mini_batches_are_drawn_one_by_one_and_the_rate_rises_over_as_many_steps():
    s = load_settings(TWO | {"TRAIN_BATCH_SIZE": "8", "MINI_BATCH_SIZE": "2", "LR_WARMUP": "3", "STALENESS": "4"})
    config = verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, "model", s.runs_dir))
    own = config.trainer.v1.separate_async
    assert (own.parameter_sync_step, own.num_warmup_batches) == (4, 3)
    assert config.actor_rollout_ref.actor.optim.lr_warmup_steps == 12
    assert config.trainer.v1.sampler.max_off_policy_threshold == 5


def test_a_large_staleness_samples_no_more_than_the_steps_train_and_has_room_for_it():
    s = load_settings(TWO | {"STALENESS": "1000000", "STEPS": "20"})
    config = verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, "model", s.runs_dir))
    assert config.trainer.v1.separate_async.num_warmup_batches == 19
    assert config.transfer_queue.backend.SimpleStorage.total_storage_size is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"N_GPUS": "1"}, "ASYNC=separate: N_GPUS=1, and one trains while another samples"),
        ({"ROLLOUT_GPUS": "2"}, "ROLLOUT_GPUS=2: leaves none of N_GPUS=2 to train"),
        ({"STACK": "a100"}, "ASYNC=separate: is not in the trainer of STACK=a100"),
        ({"STACK": "current", "N_GPUS": "6", "TP": "2"}, "TP=2: must divide ROLLOUT_GPUS=3"),
        ({"STACK": "current", "N_GPUS": "6", "SP": "2"}, "SP=2: must divide N_GPUS - ROLLOUT_GPUS = 3"),
        ({"N_GPUS": "5"}, "N_GPUS - ROLLOUT_GPUS=3: must divide MINI_BATCH_SIZE x ROLLOUT_N"),
        ({"NNODES": "2"}, "ASYNC=separate: has not been tried on several machines"),
        ({"LORA_RANK": "8"}, "ASYNC=separate: verl would sample without the adapter that it trains"),
        ({"STACK": "current", "OFFLOAD": "1"}, "ASYNC=separate: OFFLOAD=1 makes room for vLLM"),
        ({"ASYNC": "colocate", "ROLLOUT_GPUS": "1"}, "ROLLOUT_GPUS=1: is for ASYNC=separate"),
        ({"REWARD_MODEL": "some/model"}, "ASYNC=separate: REWARD_MODEL scores whole batches"),
        ({"SELF_PLAY_ROUNDS": "2"}, "ASYNC=separate: a round of self-play"),
        ({"ROLLOUT_CORRECTION": "none"}, "ASYNC=separate: older samples need weights"),
        *(({"METHOD": name}, f"ASYNC=separate: METHOD={name} learns") for name in ("ppo", "egpo", "dapo")),
    ],
)
def test_what_cannot_be_sampled_apart_is_refused_in_one_line(changes, problem):
    with pytest.raises(SettingsError) as caught:
        load_settings(TWO | changes)
    assert str(caught.value).startswith(problem) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["dpo", "distill"])
def test_methods_that_do_not_sample_from_their_own_policy_alone_are_refused(name):
    with pytest.raises(SettingsError):
        load_settings(TWO | {"METHOD": name})


def test_the_trainers_gpu_has_no_engine_and_the_samplers_no_optimizer():
    model = memory.shapes(memory.EMBEDDED_CONFIG)
    shared, apart = memory.Plan(), memory.Plan(samplers=1)
    together, alone = (memory.estimate(model, each, 80e9) for each in (shared, apart))
    assert "optimizer" in together.sampling and {*alone.sampling} == {"vLLM", "contexts"}
    assert "optimizer" in alone.update and "vLLM" not in alone.update
    assert "on each GPU that trains" in memory.summary(model, apart, 80e9)
    # What the state leaves too little room for on one GPU fits on two.
    tight = sum(together.sampling.values()) - 1e6
    found = [bool(memory.too_much(model, each, tight, 0, 80e9)) for each in (shared, apart)]
    assert found == [True, False]


def test_a_rehearsal_plays_the_form_of_one_process_and_says_so():
    s = load_settings(TWO | {"N_GPUS": "4", "ROLLOUT_GPUS": "2", "MODEL": "some/model"})
    played = rehearse.smaller(s)
    assert (played["ASYNC"], played["N_GPUS"], played["ROLLOUT_GPUS"]) == ("colocate", "1", "0")
    assert rehearse.not_played(s) == "N_GPUS=4, ROLLOUT_GPUS=2, ASYNC=separate"


def test_timed_passes_say_nothing_of_sampling_beside_the_update(monkeypatch):
    monkeypatch.setattr(minutes.subprocess, "run", mock.Mock(side_effect=AssertionError("timed")))
    assert minutes.timed(load_settings(TWO | {"STEPS": "1000"})) == {}
    with pytest.raises(AssertionError, match="timed"):
        minutes.timed(load_settings(TWO | {"STEPS": "1000", "ASYNC": "off", "ARTIFACTS": "none"}))


def test_a_server_without_a_request_is_idle(monkeypatch):
    from verl_tasks.verl_plugins import separate_trainer

    clock = [0.0]
    monkeypatch.setattr(separate_trainer.time, "monotonic", lambda: clock[0])
    balancer = separate_trainer.IdleClock({"a": None, "b": None})
    for clock[0], asked in ((1.0, "one"), (2.0, "two")):
        balancer.acquire_server(asked)  # the server with the fewest requests
    first, second = balancer._request_id_to_server["one"], balancer._request_id_to_server["two"]
    assert {first, second} == {"a", "b"} and balancer.idle_seconds() == (1 + 2) / 2
    clock[0] = 5.0
    balancer.acquire_server("one")
    balancer.release_server(first)  # it has another
    balancer.release_server(second)
    clock[0] = 9.0
    assert balancer.idle_seconds() == (1 + 2 + 4) / 2


def test_a_step_tells_the_idle_seconds_of_both_sides(monkeypatch):
    from verl_tasks.verl_plugins import separate_trainer

    trainer = object.__new__(separate_trainer.SeparateTrainer)
    trainer._idle = mock.Mock(side_effect=[10.0, 12.5, 20.0])  # the last: a validation after the step
    for name in ("_compute_metrics", "on_step_begin", "on_step_end"):
        monkeypatch.setattr(separate_trainer.OlderSamples, name, lambda *args, **kwargs: None)
    trainer.on_step_begin()
    trainer.on_step_end()
    metrics = {}
    trainer._compute_metrics(None, metrics, {"gen": 3.0}, global_steps=1, epoch=0)
    assert metrics == {"idle/sampler": 2.5, "idle/trainer": 3.0}
    said = train.idle({1: metrics | {"timing_s/step": 10.0}, 2: {"timing_s/step": 5.0}})
    assert said == "of 10 s the trainer waited 3 s for samples, and vLLM was without a request 2 s"
    assert train.idle({1: {"timing_s/step": 5.0}}) == ""


def test_the_weights_of_old_log_probs_stay_as_they_were(monkeypatch):
    import torch

    from verl_tasks.verl_plugins.cpu import verl_platform

    weight = torch.zeros(2)
    monkeypatch.setattr(verl_platform, "_sharded_save", lambda model: ({"weight": (weight, "own")}, "of all"))
    shards, spec = verl_platform._copied(None)
    weight += 1  # the next mini-batch's update
    assert shards["weight"][0].tolist() == [0, 0] and (shards["weight"][1], spec) == ("own", "of all")


@pytest.mark.parametrize(("drawn", "single"), [(1, True), (2, False)])
def test_a_mini_batch_that_is_drawn_alone_is_not_taken_for_a_whole_step(monkeypatch, drawn, single):
    from verl_tasks.verl_plugins import trainer as module

    trainer = object.__new__(module.TaskTrainer)
    trainer.parameter_sync_step, trainer.config = drawn, mock.MagicMock()
    monkeypatch.setattr(module.one_update, "applies", lambda config, responses: True)
    monkeypatch.setattr(module, "_tensors", lambda batch: batch)
    passed = mock.Mock()
    monkeypatch.setattr(module.PPOTrainerSync, "_compute_old_log_prob", passed)
    trainer._compute_old_log_prob([1], {})
    assert trainer._on_policy == single and passed.called != single


def test_weights_arrive_as_they_were_sent_update_after_update(monkeypatch):
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from verl_tasks.verl_plugins import broadcast

    monkeypatch.setattr(broadcast.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(broadcast, "get_device_name", lambda: "cpu")
    monkeypatch.setattr(
        broadcast, "get_torch_device", lambda: SimpleNamespace(current_device=lambda: "cpu", synchronize=lambda: None)
    )
    sender, silent, *receivers = engines = [broadcast.Broadcast(1, is_master=number == 0) for number in range(4)]

    def update(weights):
        metadata = [engine.prepare() for engine in engines]
        assert metadata[1:] == [None] * 3
        trains, samples = broadcast.Broadcast.build_topology(2, 2, metadata)
        joins = [
            {name: values[number] for name, values in side.items()} for side in (trains, samples) for number in (0, 1)
        ]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda engine, given: engine.init_process_group(**given), engines, joins))
            sent = [pool.submit(lambda e: asyncio.run(e.send_weights(iter(weights))), e) for e in (sender, silent)]
            got = [pool.submit(lambda e: [(n, t.clone()) for n, t in e.receive_weights()], e) for e in receivers]
            for each in sent:
                each.result(60)
            found = [each.result(60) for each in got]
        for engine in engines:
            engine.finalize()
        return found

    weights = [("a", torch.arange(6.0).view(2, 3).t()), ("layers.0.b", torch.ones(3, dtype=torch.bfloat16))]
    for factor in (1, 3):
        for found in update([(name, factor * tensor) for name, tensor in weights]):
            assert [name for name, _ in found] == [name for name, _ in weights]
            pairs = zip(found, weights, strict=True)
            assert all(torch.equal(got, factor * sent) and got.dtype == sent.dtype for (_, got), (_, sent) in pairs)
    keys = sender._store.num_keys()
    update(weights)
    assert sender._store.num_keys() == keys  # names of earlier updates are forgotten


@pytest.mark.parametrize("text", ['["a", "load", [1]]', '["a", "__name__", [1]]'])
def test_what_is_no_type_of_numbers_makes_no_tensor(text):
    from verl_tasks.verl_plugins import broadcast

    with pytest.raises(ValueError, match="is no type of numbers"):
        broadcast.empty(text, "cpu")


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_run_goes_on_while_a_second_process_samples(digits_checkout, small_model, tmp_path):
    """A random model's responses end after 258 tokens in the mean, each at another time. Each step has two updates,
    and a KL to the start."""
    own = {"MODEL": str(small_model), "ARTIFACTS": str(tmp_path), "ASYNC": "separate", "N_GPUS": "2", "LR": "1e-3"}
    variables = COMMON | own | {"cwd": digits_checkout, "MAX_RESPONSE_LENGTH": "1500", "TEST_FREQ": "2"}
    saved = kill_after_a_checkpoint("train", "runs/digits/grpo-*", **variables | {"STEPS": "1000"})
    last = saved + 4
    result = make("train", **variables | {"STEPS": str(last)})
    assert result.returncode == 0 and f"resuming from step {saved}" in result.stdout, result.stdout
    assert "the trainer waited" in result.stdout and "of the tokens by an older policy" in result.stdout
    (run,) = tmp_path.glob("runs/digits/grpo-*")
    assert sorted(set(steps_logged(run))) == list(range(1, last + 1))
    steps = read_metrics(run)
    assert all(step["staleness/max"] <= 2 and step["rollout_corr/k3_kl"] < 0.01 for step in steps.values())
    assert any(step["staleness/older_tokens"] > 0 for step in steps.values())
    assert all(step["idle/trainer"] >= 0 and step["idle/sampler"] >= 0 for step in steps.values())
    assert all({"actor/kl_loss", "actor/grad_norm"} <= step.keys() for step in steps.values())
    validated = {number for number, step in steps.items() if any(name.startswith("val-core/") for name in step)}
    assert {number for number in range(saved + 1, last + 1) if number % 2 == 0} <= validated
    logs = "".join(log.read_text() for log in run.glob("logs/*.log"))
    assert "vLLM has the trainer's weights after step" in logs and trained_parameters(variables, run)
