"""Fixtures of the tests."""

import fcntl
import gc
import os
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is imported: two workers share the cores
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


class TellsFailuresAtOnce:
    """pytest tells which tests failed at its end, which a run that a time limit ends does not reach."""

    def __init__(self, reporter):
        self.reporter = reporter

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.reporter.write_line(f"\nfailed: {report.nodeid} ({report.when}) {report.longreprtext[-300:]}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if "WARM_PYTHON" not in os.environ:  # the workers of pytest-xdist have their parent's
        from tests.warm_python import install

        folder = tempfile.TemporaryDirectory(prefix="warm-python-")
        config.add_cleanup(folder.cleanup)
        os.environ["WARM_PYTHON"] = str(install(Path(folder.name) / "bin"))  # before tests.helpers is imported
        if config.getoption("numprocesses", None):  # its imports and the workers' collection take turns on the cores
            config.add_cleanup(subprocess.Popen([os.environ["WARM_PYTHON"], "-c", "'cookiecutter'"]).wait)
    if reporter := config.pluginmanager.get_plugin("terminalreporter"):  # not in the workers of pytest-xdist
        config.pluginmanager.register(TellsFailuresAtOnce(reporter))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The garbage collector looks at all that was imported again and again: half of the time that it takes to collect
    the tests. What they import stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# Of the fast tests, longest first.
LONGEST_FILES = ("test_template.py", "test_verl_config.py", "test_rehearse.py", "test_make.py", "test_evaluate.py")
LONGEST_FILES += ("test_gym.py", "test_bad_input.py", "test_attack.py", "test_verl_generations.py")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    """Longest files first, so that two workers end together: those with the most trainings, then LONGEST_FILES."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: (-slow[item.path], places.get(item.path.name, len(places))))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Tests of tests/faults, which kills processes, and those marked `fresh` start their commands as a user does. In
    the others the imports would add up. No test leaves the variables behind that vLLM sets as it is imported: the next
    test's commands would not be forked."""
    from tests.warm_python import EARLY

    before = {name: value for name, value in os.environ.items() if name.startswith(EARLY)}
    if item.get_closest_marker("fresh") or "faults" in item.path.parts:
        os.environ["FRESH_PYTHON"] = "1"
    try:
        return (yield)
    finally:
        for name in {"FRESH_PYTHON", *(name for name in os.environ if name.startswith(EARLY))}:
            os.environ.pop(name, None)
        os.environ.update(before)
        if item.get_closest_marker("slow"):
            gc.freeze()  # vLLM thaws all at its engine's end


@pytest.fixture(autouse=True)
def artifacts_stay_where_they_are():
    """A test that leaves ARTIFACTS changed, as `main.main` does in its process, moves a later test's files."""
    before = os.environ.get("ARTIFACTS")
    yield
    assert os.environ.get("ARTIFACTS") == before


@pytest.fixture(scope="session", autouse=True)
def compose_verls_config_once():
    """Composing takes half a second, and hundreds of tests do."""
    from tests import composed_once

    with pytest.MonkeyPatch.context() as patch:
        composed_once.install(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def embedded_model_unpacked_once(tmp_path_factory):
    """Unpacking takes ten seconds, and a hundred tests have ARTIFACTS of their own."""
    from verl_tasks.models import find

    own = tmp_path_factory.getbasetemp()
    unpack, shared = find.embedded_model, (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "unpacked"
    shared.mkdir(exist_ok=True)  # of all workers

    def linked(variable: str = "MODEL") -> Path:
        folder = find.embedded_folder()
        if not folder.is_dir():
            with (shared / ".lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
                fcntl.flock(lock, fcntl.LOCK_EX)
                patch.setenv("ARTIFACTS", str(shared))
                once = unpack(variable)
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.unlink(missing_ok=True)  # the link of an earlier session
            folder.symlink_to(once)
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "embedded_model", linked)
        yield


@pytest.fixture(autouse=True)
def passes_are_compared_in_their_own_tests(request, monkeypatch):
    """A comparison takes 20 seconds, and hundreds of tests look at a GPU stack; test_parity.py makes real ones."""
    if request.path.name != "test_parity.py":
        from verl_tasks.training import parity

        right = {"nats": 1e-6, "gradient": 1e-6, "agrees": True}
        found = {"paths": {"packed, fused head": right}, "noise": {}}
        monkeypatch.setattr(parity, "_asked", lambda request: found)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> Path:
    """A random Llama of 0.3 M parameters with a byte-level tokenizer: two heads of size 32, as vLLM on a CPU needs."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("small-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[1], pad_token=special[1])
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(small_model):
    """The small model's, for tests that leave it as it is."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(small_model)


@pytest.fixture(scope="session")
def digits_checkout(tmp_path_factory) -> Path:
    """A copy of the checkout with the task `digits`, whose reward a random model can get: the digits it writes."""
    from tests.helpers import change_reward, checkout_with

    checkout = checkout_with("digits", tmp_path_factory.mktemp("digits"))
    counted = "sum(c in '0123456789' for c in solution_str) / 10"
    counted = f"return {{'score': {counted}, 'acc': float('#### ' in solution_str), 'format': 0.0}}"
    change_reward(checkout / "tasks/digits", counted)
    return checkout
