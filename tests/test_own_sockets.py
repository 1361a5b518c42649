"""verl_plugins/own_sockets.py: trainings at once meet in no socket, and no other user of the machine reaches one."""

import pytest

from verl_tasks.leftovers import LAUNCH

VERLS = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"


@pytest.fixture(scope="module")
def own_sockets():
    from verl_tasks.verl_plugins import own_sockets  # here: it imports vLLM

    return own_sockets


@pytest.mark.medium
def test_both_ends_have_the_address_in_the_launchs_folder(own_sockets, tmp_path, monkeypatch):

    def init(self):
        self.zmq_handle = VERLS

    monkeypatch.setattr(own_sockets.ServerAdapter, "__init__", init)
    monkeypatch.setattr(own_sockets.vLLMColocateWorkerExtension, "_get_zmq_handle", lambda self: VERLS)
    launches = [tmp_path / "verl-one", tmp_path / "verl-two"]
    for folder in launches:
        folder.mkdir()
        monkeypatch.setenv(LAUNCH, str(folder))
        address = f"ipc://{folder}/rl-colocate-zmq-01000000-replica-0-rank-0.sock"
        assert own_sockets.OwnSocketAdapter().zmq_handle == address
        assert object.__new__(own_sockets.OwnSocketExtension)._get_zmq_handle() == address
    monkeypatch.setenv(LAUNCH, str(tmp_path / "of another node"))
    assert own_sockets.own(VERLS) == VERLS
    monkeypatch.delenv(LAUNCH)
    assert own_sockets.own(VERLS) == VERLS


def test_verl_and_vllm_take_these_classes(own_sockets):
    from verl.workers.rollout.base import get_rollout_class

    import verl_tasks.verl_plugins.patches  # noqa: F401
    from verl_tasks.verl_plugins.cpu.kept_weights import CPUColocateWorkerExtension

    assert get_rollout_class("vllm", "async") is own_sockets.OwnSocketAdapter
    assert issubclass(CPUColocateWorkerExtension, own_sockets.OwnSocketExtension)
