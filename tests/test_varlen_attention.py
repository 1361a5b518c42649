"""verl_plugins/varlen_attention.py: where sequences begin; on a GPU, the same as sdpa on each alone.

Shared sequences (SP=2): on two processes of a CPU, and on two GPUs, what whole ones give.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT


@pytest.fixture(scope="module")
def module():
    from verl_tasks.verl_plugins import varlen_attention

    return varlen_attention


def positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


@pytest.mark.parametrize("lengths", [(5,), (3, 1, 4), (1, 1, 1)])
def test_boundaries_of_packed_sequences(module, lengths):
    offsets, longest = module.boundaries(positions(*lengths))
    assert offsets.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert offsets.dtype == torch.int32 and longest == max(lengths)


def test_each_token_of_a_padded_row_s_padding_is_a_sequence(module):
    rows = torch.stack([torch.arange(4), torch.tensor([0, 1, 0, 0])])
    offsets, longest = module.boundaries(rows)
    assert offsets.tolist() == [0, 4, 6, 7, 8] and longest == 4


def test_boundaries_are_those_of_the_positions_at_hand(module):
    first, second = positions(2, 3), positions(4, 1)
    assert module.boundaries(first)[0].tolist() == [0, 2, 5]
    assert module.boundaries(second)[0].tolist() == [0, 4, 5]
    assert module.boundaries(first)[0].tolist() == [0, 2, 5]


def test_tokens_that_begin_within_a_sequence_are_refused(module):
    with pytest.raises(ValueError, match="first token is not the first of a sequence"):
        module.boundaries(torch.tensor([[3, 4, 0, 1]]))


@pytest.mark.parametrize("what", ["mask", "dropout", "cache"])
def test_what_it_does_not_do_is_refused(module, what):
    query = torch.zeros(1, 2, 3, 8)
    key = torch.zeros(1, 2, 4 if what == "cache" else 3, 8)
    mask = torch.ones(1, 3) if what == "mask" else None
    with pytest.raises(ValueError, match="packed sequences"):
        module.varlen(None, query, key, key, mask, position_ids=positions(3), dropout=0.1 if what == "dropout" else 0)


@pytest.mark.parametrize("what", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}])
def test_a_soft_cap_and_sinks_are_refused(module, what):
    query = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="no soft cap"):
        module.varlen(None, query, query, query, None, position_ids=positions(3), **what)


def test_transformers_knows_it(module):
    from transformers import AttentionInterface

    assert AttentionInterface()["varlen"] is module.varlen


@pytest.mark.gpu
def test_packed_sequences_are_as_each_alone_with_sdpa(module):
    """Log-probs and gradients of a random llama with 9 heads on 3 (as SmolLM2): no further from float32 than sdpa's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 1000}
    config = LlamaConfig(**shape, num_attention_heads=9, num_key_value_heads=3)
    torch.manual_seed(0)
    weights = LlamaForCausalLM(config).state_dict()
    lengths = [7, 130, 1, 64, 300]
    tokens = [torch.randint(0, 1000, (length,), device="cuda") for length in lengths]

    def run(attention: str, dtype: torch.dtype, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        config._attn_implementation = attention
        model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
        model.load_state_dict(weights)
        model.to("cuda", dtype)
        if packed:
            position_ids = positions(*lengths).cuda()
            logits = model(input_ids=torch.cat(tokens)[None], position_ids=position_ids, use_cache=False).logits[0]
        else:
            logits = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in tokens])
        log_probs = logits.float().log_softmax(-1).gather(-1, torch.cat(tokens)[:, None])[:, 0]
        log_probs.sum().backward()
        return log_probs.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.float()

    exact = run("sdpa", torch.float32, packed=False)
    sdpa, varlen = run("sdpa", torch.bfloat16, packed=False), run("varlen", torch.bfloat16, packed=True)
    for theirs, ours, right in zip(sdpa, varlen, exact, strict=True):
        assert (ours - right).norm() <= 1.2 * (theirs - right).norm()


def with_two_processes(folder: Path, stack: str) -> dict:
    """What tests/sequence_parallel.py writes on the hardware of ``stack``."""
    command = [sys.executable, "-m", "tests.benchmarks.many_gpus", "sp", str(folder / "out.json")]
    environment = os.environ | {"STACK": stack, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.long
def test_shared_sequences_give_what_whole_ones_give(tmp_path):
    found = with_two_processes(tmp_path, "cpu")
    errors = [error for pairs in found["relative"].values() for pair in pairs.values() for error in pair.values()]
    assert len(errors) == 4 * 3 * 3 and max(errors) < 1e-5
    assert min(pairs["SP=2 from exact"]["gradients"] for pairs in found["relative"].values()) > 0  # not the same run


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_two_gpus_share_sequences_no_further_from_exact_than_one(tmp_path):
    assert with_two_processes(tmp_path, "current")["holds"]
