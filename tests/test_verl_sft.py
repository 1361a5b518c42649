"""tasks/common/verl_plugins/sft.py on the real SFT trainer of both versions of verl."""

import socket

import pytest

from tests.wheels import VERLS, found_with

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=VERLS)
def result(request) -> dict:
    """What tests/verl_sft.py found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # 0.9.1 asks its platform for the memory; 0.6.1 knows no platforms.
    loaded = "" if request.param == "0.6.1" else "verl_tasks.verl_plugins.cpu.verl_platform"
    environment = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": loaded}
    return found_with(f"verl=={request.param}", "verl_sft", port, **environment)


def test_a_resume_goes_on_with_the_rows_that_come_next_also_at_an_epochs_end(result):
    assert result["own"] == [True] * 4
    # What the class is for: verl's own skips an epoch where one had ended, after steps 2 and 4.
    assert result["verl"] == [True, False, True, False]


def test_the_order_follows_the_seed(result):
    first, other, again = result["orders"]["own"]
    assert first == again != other
    first, other, again = result["orders"]["verl"]
    assert first == other  # verl reads trainer.seed nowhere
