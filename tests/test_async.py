"""ASYNC=colocate: a response goes on over an update, its tokens are trained with weights, and a killed run goes on."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from omegaconf import OmegaConf

from tests.helpers import SMALL, kill_after_a_checkpoint, make, steps_logged, write_shards
from tests.test_settings import VALUES
from verl_tasks.runs.run import Run, read_metrics
from verl_tasks.settings import SettingsError, load_settings


def test_tokens_are_counted_by_the_age_of_the_weights_that_sampled_them():
    from verl_tasks.verl_plugins.staleness import figures

    assert figures([[(4, 10), (5, 30)], [(5, 0), (5, 40)]], 5) == {
        "staleness/mean": 10 / 80,
        "staleness/max": 1,
        "staleness/older_tokens": 10 / 80,
    }
    assert figures([[], [(3, 0)]], 5) == {}


def test_each_part_of_a_response_is_told_with_its_version(monkeypatch):
    import asyncio

    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    from verl_tasks.verl_plugins.staleness import VersionedClient

    answers = [([7, 8], 3, "aborted"), ([], 4, "aborted"), ([9], 5, "completed")]
    asked = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        ids, step, reason = answers[len(asked)]
        asked.append((prompt_ids, sampling_params["max_tokens"]))
        return TokenOutput(
            token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason=reason, extra_fields={"global_steps": step}
        )

    async def at_once(seconds):
        pass

    monkeypatch.setattr(LLMServerClient, "generate", generate)
    monkeypatch.setattr(asyncio, "sleep", at_once)
    client = object.__new__(VersionedClient)
    client.config = SimpleNamespace()
    found = asyncio.run(client.generate("one", prompt_ids=[1], sampling_params={"max_tokens": 10}))
    assert found.token_ids == [7, 8, 9] and found.extra_fields["versions"] == [(3, 2), (4, 0), (5, 1)]
    assert asked == [([1], 10), ([1, 7, 8], 8), ([1, 7, 8], 8)]


def test_a_step_tells_the_age_of_its_tokens():
    from verl_tasks.verl_plugins.async_trainer import AsyncTrainer
    from verl_tasks.verl_plugins.trainer import Sample

    trainer = object.__new__(AsyncTrainer)
    trainer.global_steps, trainer.config = 6, SimpleNamespace(data={})
    found = trainer._answers([Sample("a", (1, 2), {"score": 1.0}, [(4, 1), (5, 1)])])
    assert (found["staleness/mean"], found["staleness/max"], found["staleness/older_tokens"]) == (0.5, 1, 0.5)


@pytest.mark.slow  # imports vLLM
def test_an_update_does_not_wait_for_a_request_that_queues_in_vllm(monkeypatch):
    import asyncio

    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from verl_tasks.verl_plugins import admitted

    queues = []

    async def queued(self, request_id, prompt, params, **kwargs):
        """vLLM has the request and computes others."""
        queues.append(RequestOutputCollector(RequestOutputKind.FINAL_ONLY, request_id))
        return queues[-1]

    async def pause(**kwargs):
        """vLLM's abort: the only output of a request that never ran."""
        ended = CompletionOutput(0, "", [], None, [], finish_reason="abort")
        queues[-1].put(RequestOutput("one", None, [1, 2], None, [ended], finished=True))

    monkeypatch.setattr(admitted, "_add_request", queued)
    engine = object.__new__(AsyncLLM)
    engine.log_requests, engine.pause_generation = False, pause
    engine.output_processor = SimpleNamespace(request_states={})
    server = object.__new__(vLLMHttpServer)
    vars(server).update(_submission_paused=False, _rejecting=False, _admitting=0, _disaggregation_role="null")
    server.engine, server.node_rank, server.replica_rank, server.global_steps = engine, 0, 0, 3
    server.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
    server.config = mock.Mock(max_model_len=100, full_determinism=False, enable_rollout_routing_replay=False, mtp=None)
    server.config.get = lambda key, default: default

    async def update():
        server._resume_event = asyncio.Event()
        asked = asyncio.create_task(server.generate([1, 2], {"max_tokens": 5, "logprobs": True}, "one"))
        while not queues:
            await asyncio.sleep(0)
        await asyncio.wait_for(server.abort_all_requests(), 5)
        return await asked

    found = asyncio.run(update())
    assert (found.stop_reason, found.token_ids, found.log_probs) == ("aborted", [], [])
    assert vLLMReplica.max_concurrency > 10_000  # interrupted requests wait as calls; one more opens the gate


def test_prompts_that_failed_are_sampled_again_after_a_resume(monkeypatch):
    """Also one that failed while the step before was saved, and which the checkpoint so has as failed."""
    from verl_tasks.verl_plugins import async_trainer

    trainer, put, again = object.__new__(async_trainer.AsyncTrainer), mock.Mock(), mock.Mock()
    tags = {"a": "failure", "b": "running", "c": "finished"}
    saved = {name: {"is_prompt": True, "status": status, "global_steps": 3} for name, status in tags.items()}
    saved |= {name: {"status": "success"} for name in ("a_0_0", "c_1_0", "trained_0_0", "trained_1_0")}
    monkeypatch.setattr(async_trainer.tq, "kv_list", lambda partition: {partition: saved})
    monkeypatch.setattr(async_trainer.tq, "kv_batch_put", put)
    monkeypatch.setattr(async_trainer.tq, "kv_clear", clear := mock.Mock())
    monkeypatch.setattr(async_trainer.PPOTrainer, "_reissue_inflight_prompts", again)
    trainer._reissue_inflight_prompts()
    assert put.call_args.kwargs == {"keys": ["a"], "partition_id": "train", "tags": [{"status": "pending"}]}
    # Else each resume would leave a step's responses in the memory and in all later checkpoints.
    clear.assert_called_once_with(keys=["trained_0_0", "trained_1_0"], partition_id="train")
    again.assert_called_once()  # verl's, which begins those that are pending
    trainer.train_dataloader = loader = object()
    trainer._rewind({})
    assert trainer.train_dataloader is loader  # its prompts are in the checkpoint


@pytest.mark.parametrize("broken", ["prompts", "weights", ""])
def test_a_checkpoint_that_is_whole_has_its_prompts_under_way(tmp_path, monkeypatch, broken):
    """verl writes them last. A first checkpoint without them was not resumed from, though its weights were there."""
    from verl_tasks.verl_plugins import async_trainer

    def full(*args, **kwargs):
        raise OSError(28, "full")

    def prompts(path, metadata):
        assert not path.exists() and metadata == {"global_steps": 2}
        path.mkdir(parents=True)

    trainer, workers = object.__new__(async_trainer.AsyncTrainer), mock.Mock()
    workers.save_checkpoint = full if broken == "weights" else lambda path, *args, **kwargs: write_shards(Path(path))
    own = {"default_local_dir": str(tmp_path / "checkpoints"), "default_hdfs_dir": None}
    trainer.config = OmegaConf.create({"trainer": own, "actor_rollout_ref": {"actor": {}}})
    trainer.actor_rollout_wg, trainer.use_critic, trainer.global_steps = workers, False, 2
    trainer.train_dataloader, trainer.checkpoint_callback = mock.Mock(state_dict=dict), mock.Mock()
    monkeypatch.setattr(async_trainer.tq, "save_checkpoint", full if broken == "prompts" else prompts)
    monkeypatch.setattr("verl_tasks.verl_plugins.trainer.prune", lambda *args: None)
    monkeypatch.setenv("KEEP", "1")
    with pytest.raises(OSError, match="full") if broken else nullcontext():
        trainer._save_checkpoint()
    assert trainer.trainer_mode == "colocate_async" and Run.read(tmp_path).last == (0 if broken else 2)
    assert (tmp_path / "checkpoints/global_step_2/transfer_queue").is_dir() == (broken != "prompts")


def test_a_step_that_failed_does_not_draw_its_prompts_twice(monkeypatch):
    """Else each failure would let one batch more wait, and samples become older than STALENESS."""
    from verl_tasks.verl_plugins import async_trainer

    trainer, drawn = object.__new__(async_trainer.AsyncTrainer), []
    v1 = {"colocate_async": SimpleNamespace(num_warmup_batches=1)}
    trainer.config = SimpleNamespace(data=SimpleNamespace(train_batch_size=4), trainer=SimpleNamespace(v1=v1))
    monkeypatch.setattr(async_trainer.PPOTrainer, "_add_batch_to_generate", lambda self: drawn.append(4))
    for trainer._restored_tq_prompt_count, first in ((0, [4]), (4, [4]), (8, [])):
        drawn.clear()
        trainer.prepare_step()
        assert drawn == first
        trainer.prepare_step()
        assert drawn == [*first, 4]


@pytest.mark.parametrize(("staleness", "ahead", "draws"), [(1, 1, 1), (2, 1, 1), (3, 2, 1), (4, 3, 2), (8, 7, 4)])
def test_no_sample_becomes_older_than_staleness(monkeypatch, staleness, ahead, draws):
    """In verl's own buffer, with half of the responses much longer than the others."""
    from random import Random

    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    from verl_tasks.verl_plugins import async_trainer

    size, lengths, clock = 2, Random(0), [0]
    buffer = ReplayBufferAsync("separate_async", {}, staleness + 1, "wait", {})
    trainer = object.__new__(async_trainer.AsyncTrainer)
    trainer.parameter_sync_step = draws
    monkeypatch.setattr(async_trainer.CheckedTrainer, "_build_replay_buffer", lambda self: buffer)
    assert trainer._build_replay_buffer() is buffer
    begun, ends = {}, {}

    def look():
        clock[0] += 1
        assert clock[0] < 10_000, "waits for ever"
        for name, keys in (("pending", {}), ("running", {k for k in ends if ends[k] > clock[0]})):
            getattr(buffer, f"{name}_keys")["train"] = set(keys)
        buffer.finished_keys["train"] = {key for key in ends if ends[key] <= clock[0]}
        buffer.prompt_global_steps["train"] = begun

    def begin(count, step):
        for number in range(len(begun), len(begun) + count):
            begun[number], ends[number] = step, clock[0] + lengths.choice([1, 50])

    buffer._sync_metadata_from_transfer_queue, buffer._wait_for_next_poll = look, lambda *args: 0
    begin(ahead * draws * size, 1)
    ages = []
    for step in range(1, 80):
        begin(draws * size, step)
        for trainer.local_trigger_step in range(draws):
            complete, _ = buffer.wait_for_sampleable(step, "train", size)
            for key in buffer._select_prompt_uids("train", complete, size)[0]:
                ages.append(step - begun[key])
                del ends[key]
    assert max(ages) == staleness


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"METHOD": "ppo"}, "METHOD=ppo learns from its present policy's samples; take one of "),
        ({"METHOD": "dapo"}, "METHOD=dapo learns"),
        ({"METHOD": "egpo"}, "METHOD=egpo learns"),
        ({"ROLLOUT_CORRECTION": "none"}, "take ROLLOUT_CORRECTION=token"),
        ({"REWARD_MODEL": "some/model"}, "REWARD_MODEL scores whole batches"),
        ({"SELF_PLAY_ROUNDS": "2"}, "self-play"),
        ({"STACK": "a100"}, "STACK=a100 (verl 0.6.1); take STACK=current"),
    ],
)
def test_what_cannot_learn_from_older_samples_is_refused(changes, problem):
    with pytest.raises(SettingsError, match="ASYNC=colocate: ") as caught:
        load_settings(VALUES | {"ASYNC": "colocate"} | changes)
    assert problem in str(caught.value)


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_asynchronous_run_goes_on_and_responses_span_updates(small_model, tmp_path):
    """A random model's responses end after 258 tokens in the mean, each at another time."""
    own = {"MODEL": str(small_model), "ARTIFACTS": str(tmp_path), "INIT": "base", "ASYNC": "colocate"}
    variables = SMALL | own | {"MAX_RESPONSE_LENGTH": "1500", "TEST_FREQ": "0"}
    saved = kill_after_a_checkpoint("train", "runs/countdown/grpo-*", **variables, STEPS="1000")
    last = saved + 4
    result = make("train", **variables, STEPS=str(last))
    assert result.returncode == 0 and f"resuming from step {saved}" in result.stdout, result.stdout
    (run,) = tmp_path.glob("runs/countdown/grpo-*")
    assert sorted(set(steps_logged(run))) == list(range(1, last + 1))
    steps = read_metrics(run)
    assert any(step["training/off_policy/trajectory_spans/max"] > 1 for step in steps.values())
    assert all(0 <= step["staleness/older_tokens"] <= 1 and step["staleness/max"] <= 2 for step in steps.values())
    assert any(0 < step["staleness/older_tokens"] < 1 for step in steps.values())
    assert all(step["rollout_corr/k3_kl"] < 0.01 for step in steps.values())
