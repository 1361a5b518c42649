"""verl_plugins/zero_advantage.py: responses without an advantage go forward only, and the update stays what it was."""

import pytest
from omegaconf import OmegaConf

from tests.helpers import by_torchrun

WAYS = ("fixed", "dynamic")


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def found(request, tmp_path_factory) -> list[dict]:
    return by_torchrun("tests.zero_advantage", tmp_path_factory.mktemp("zero_advantage"), request.param)


@pytest.mark.parametrize("way", WAYS)
def test_the_update_is_that_of_all_responses(way, found):
    for each in (process[way] for process in found):
        every, some = each["metrics"]
        assert each["off"] < 1e-5 * each["size"]
        assert every.keys() == some.keys() > {"entropy", "rollout_corr/kl", "actor/pg_loss"}
        assert some == pytest.approx(every, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_how_many_tokens_are_clipped_is_told_of_all_responses(way, found):
    """Of old log-probs that differ from the present ones: a response without an advantage has none that is clipped."""
    for each in (process[f"{way}, ratios"] for process in found):
        every, some = each["metrics"]
        assert each["off"] < 1e-5 * each["size"]
        assert min(every["actor/pg_clipfrac"], every["actor/ppo_kl"]) > 0.01
        assert some == pytest.approx(every, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_only_responses_with_an_advantage_have_a_gradient(way, found):
    """Of the first process rows 0, 1, 4, 5 and the masked 6 have none, of the second 0, 1 and 6: as many of each, and
    an even number where two make a micro-batch."""
    trained = [process[way]["trained"] for process in found]
    assert all(every == [*range(8)] for every, _ in trained)
    without = [sorted({*every} - {*some}) for every, some in trained]
    if way == "dynamic":
        assert without == ([[0, 1, 4], [0, 1, 6]] if len(found) == 2 else [[0, 1, 4, 5, 6]])
    else:
        assert [*map(len, without)] == ([2, 2] if len(found) == 2 else [4])
        assert all({*rows} <= {*none} for rows, none in zip(without, ([0, 1, 4, 5, 6], [0, 1, 6]), strict=False))


@pytest.mark.parametrize("way", WAYS)
def test_where_no_response_has_an_advantage_some_have_a_gradient_of_0(way, found):
    """The backward of the last micro-batch brings the processes' gradients together."""
    for each in (process[f"{way}, none"] for process in found):
        assert each["size"] == each["off"] == 0
        assert len(each["trained"][1]) == (2 if way == "fixed" else 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"entropy_coeff": 0.001},
        {"use_kl_loss": True},
        {"policy_loss": {"loss_mode": "kl_cov"}},
        {"distillation": True},
    ],
)
def test_a_loss_with_another_term_has_all_gradients(changed):
    from verl_tasks.verl_plugins.zero_advantage import applies

    actor = {"entropy_coeff": 0, "use_kl_loss": False, "policy_loss": {"loss_mode": "vanilla"}}
    distilled = changed.pop("distillation", False)

    def config(actor: dict, enabled: bool):
        return OmegaConf.create({"actor_rollout_ref": {"actor": actor}, "distillation": {"enabled": enabled}})

    assert applies(config(actor, False)) and not applies(config(actor | changed, distilled))
