"""The cpu stack's sampling: the right shares, never an impossible token, and a seed's tokens whatever is beside it. Its
engine and worker leave the cores to each other."""

import threading
import time

import pytest
import torch

pytestmark = pytest.mark.slow  # imports vLLM


@pytest.fixture(scope="module")
def sampler():
    from verl_tasks.verl_plugins.cpu import sampling

    return sampling


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seeded", [False, True])
def test_tokens_have_their_probabilities(sampler, seeded):
    shares, rows = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05]), 20_000
    torch.manual_seed(0)
    generators = {row: generator(row) for row in range(rows)} if seeded else {}
    found = sampler.sample(shares.expand(rows, -1), generators)
    counts = torch.bincount(found, minlength=5) / rows
    assert counts[1] == 0
    assert ((counts - shares).abs() <= 4 * (shares * (1 - shares) / rows).sqrt()).all(), counts


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_ends_of_the_interval_are_possible_tokens(sampler, monkeypatch, uniform, token):
    monkeypatch.setattr(torch, "rand", lambda *size, **kwargs: torch.full(size, uniform, dtype=torch.float64))
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, 2.0, -torch.inf]]).expand(3, -1)
    assert sampler.sample(logits.softmax(-1), {1: generator(0)}).tolist() == [token] * 3


def test_a_row_with_a_seed_does_not_depend_on_the_others(sampler):
    probs = torch.randn(8, 49152, generator=generator(1)).softmax(-1)
    alone = [int(sampler.sample(probs[row : row + 1], {0: generator(row)})) for row in range(8)]
    together = sampler.sample(probs, {row: generator(row) for row in range(0, 8, 2)})
    assert together[::2].tolist() == alone[::2] and len(set(alone)) > 4


@pytest.mark.parametrize("kept", ["raw_logprobs", "processed_logits", "processed_logprobs"])
def test_vllm_samples_by_it(sampler, kept):
    module = sampler.TopKTopPSampler(kept)
    assert sampler.topk_topp_sampler.random_sample is sampler.sample
    logits = torch.randn(4, 100, generator=generator(2))
    tokens, returned = module.forward(logits.clone(), {}, torch.tensor([1] * 4), None)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert (returned is None) == (kept == "raw_logprobs")
    if kept == "processed_logprobs":
        assert returned.exp().sum(-1).allclose(torch.ones(4))


def test_ranks_are_counted_without_compiling(sampler):
    rank = sampler.vllm_sampler.batched_count_greater_than
    assert not hasattr(rank, "__wrapped__")
    assert rank(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[2.0]])).tolist() == [2]


@pytest.fixture
def queue():
    """Both ends of the queue between vLLM's engine and its worker."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    from verl_tasks.verl_plugins.cpu import asleep  # noqa: F401

    writer = MessageQueue(1, 1, max_chunk_bytes=1000)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=reader.wait_until_ready)
    ready.start()
    writer.wait_until_ready()
    ready.join()
    return writer, reader


def test_the_engine_waits_for_its_worker_asleep(queue):
    writer, reader = queue
    writer.enqueue("a step")
    assert reader.dequeue(timeout=10) == "a step"
    threading.Timer(0.5, writer.enqueue, ["its tokens"]).start()
    began = time.thread_time()
    assert reader.dequeue(timeout=10) == "its tokens"
    assert time.thread_time() - began < 0.05


def test_who_sleeps_is_woken_by_a_message_soon_after_another(queue):
    writer, reader = queue
    read = []

    def reads():
        for _ in range(1000):
            read.append(reader.dequeue(timeout=10))

    threading.Thread(target=reads, daemon=True).start()
    for number in range(1000):
        while len(read) < number:
            time.sleep(0.0001)
        began = time.monotonic()
        if number % 2:
            time.sleep(0.0002)  # it sleeps again
        writer.enqueue(number)
        while len(read) == number:
            time.sleep(0.0001)
        assert time.monotonic() - began < 3  # vLLM's reader looks by itself after 5 s
