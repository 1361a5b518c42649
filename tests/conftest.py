"""Shared by the tests: the repository, a task's environment, a very small model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def task_environment(tmp_path):
    """The variables that tasks/countdown/train.sh exports on the cpu stack, with artifacts in ``tmp_path``."""
    return exported(ROOT / "tasks/countdown/train.sh", {"ARTIFACTS": str(tmp_path / "artifacts")})


def exported(train_sh: Path, changes: dict[str, str]) -> dict[str, str]:
    """Environment that ``train_sh`` hands to the launcher: its own text, with `env` in place of the launcher."""
    script = train_sh.read_text().rpartition("exec bash")[0]
    # stack.sh finds the task by the file that sources it, so the copy stands where the original does.
    copy = train_sh.with_name(f".{train_sh.stem}.{os.getpid()}.sh")
    copy.write_text(script + "env -0\n")
    try:
        clean = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR")}
        result = subprocess.run(
            ["bash", str(copy)], env={**clean, "STACK": "cpu", **changes}, capture_output=True, text=True, check=True
        )
    finally:
        copy.unlink()
    return dict(line.split("=", 1) for line in result.stdout.split("\0") if "=" in line)


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
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
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
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    """Run make with the environment's Python installed already; standard output and error in one text."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments, *(f"{k}={v}" for k, v in variables.items())],
        cwd=cwd,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def cookiecutter(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run cookiecutter's command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "cookiecutter", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
