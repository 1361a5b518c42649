"""DAPO's bound on verl's own ReplayBuffer, with a store in place of TransferQueue. In a training: test_numerics.py."""

from types import SimpleNamespace

import pytest

BATCH = 4


@pytest.fixture(scope="module")
def module():
    from verl_tasks.verl_plugins import dynamic_sampling  # here: importing verl takes seconds

    return dynamic_sampling


class Store:
    """What the buffer asks of TransferQueue. ``signal(n)``: whether the n-th prompt's two samples differ."""

    def __init__(self, signal):
        self.signal, self.prompts, self.groups = signal, 0, {}

    def add(self, prompts: int) -> int:
        for _ in range(prompts):
            self.groups[f"p{self.prompts}"] = self.signal(self.prompts)
            self.prompts += 1
        return prompts

    def kv_list(self) -> dict:
        items = {}
        for name in self.groups:
            items[name] = {"is_prompt": True, "status": "finished", "global_steps": 1}
            items |= {f"{name}_{sample}_0": {"seq_len": 3} for sample in range(2)}
        return {"train": items}

    def kv_batch_get(self, keys, partition_id, select_fields) -> dict:
        scores = [float(self.groups[key.split("_")[0]] and key.split("_")[1] == "1") for key in keys]
        return {"extra_fields": [{"reward_extra_info": {"score": score}} for score in scores]}

    def kv_clear(self, partition_id, keys) -> None:
        for key in keys:
            self.groups.pop(key, None)


def step(module, monkeypatch, signal, batches: int, steps: int = 1) -> tuple[list[set[str]], list[dict], Store]:
    """The prompts that ``steps`` steps train on, and their metrics."""
    store = Store(signal)
    buffer = module.ReplayBuffer(
        "sync",
        {},
        None,
        "drop",
        {},
        poll_interval=0.001,
        refill_fn=store.add,
        filter_groups_metric="score",
        train_batch_size=BATCH,
        gen_batch_size=1,
    )
    module.bounded(buffer, batches)
    names = ("kv_list", "kv_batch_get", "kv_clear")
    monkeypatch.setattr(
        "verl.trainer.ppo.v1.replay_buffer.tq", SimpleNamespace(**{name: getattr(store, name) for name in names})
    )
    chosen, metrics = [], []
    for _ in range(steps):
        store.add(BATCH)  # the trainer, at the start of its step
        batch, found = buffer.sample(global_steps=1, partition_id="train", batch_size=BATCH)
        chosen.append({key.split("_")[0] for key in batch.keys})
        metrics.append({name: value for name, value in found.items() if name.startswith("dapo/")})
    return chosen, metrics, store


@pytest.mark.medium
def test_a_batch_has_signal_and_the_metrics_count_what_was_sampled_for_it(module, monkeypatch):
    (chosen,), (metrics,), store = step(module, monkeypatch, lambda n: n % 2 == 0, batches=10)
    assert len(chosen) == BATCH and all(int(name[1:]) % 2 == 0 for name in chosen)
    assert metrics["dapo/sampled"] == store.prompts > BATCH and metrics["dapo/bound_hit"] == 0
    assert metrics["dapo/sampled"] == metrics["dapo/dropped"] + metrics["dapo/surplus"] + BATCH


def test_without_any_signal_the_bound_fills_the_batch(module, monkeypatch):
    """verl's own would sample for ever."""
    (first, second), metrics, store = step(module, monkeypatch, lambda n: False, batches=3, steps=2)
    assert len(first) == len(second) == BATCH and not first & second
    assert [each["dapo/bound_hit"] for each in metrics] == [1, 1]  # each step begins with the filter on
    assert all(3 * BATCH <= each["dapo/sampled"] <= 4 * BATCH for each in metrics)
    assert store.prompts == sum(each["dapo/sampled"] for each in metrics)


@pytest.mark.medium
@pytest.mark.parametrize("batches", [0, -1])
def test_a_bound_that_is_not_positive_is_none_as_in_verl(module, monkeypatch, batches):
    (chosen,), (metrics,), _ = step(module, monkeypatch, lambda n: n % 8 == 0, batches)
    assert len(chosen) == BATCH and all(int(name[1:]) % 8 == 0 for name in chosen)
    assert metrics["dapo/bound_hit"] == 0 and metrics["dapo/sampled"] > 3 * BATCH


def test_all_with_signal_samples_one_batch(module, monkeypatch):
    _, (metrics,), store = step(module, monkeypatch, lambda n: True, batches=10)
    assert store.prompts == BATCH
    assert metrics == {"dapo/sampled": BATCH, "dapo/dropped": 0, "dapo/surplus": 0, "dapo/bound_hit": 0}
