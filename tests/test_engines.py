"""Entropy from the likeliest tokens, and both engines on a real (very small) model."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

from tasks.common.evaluation.engine_pool import EngineEnded
from tasks.common.evaluation.engines import (
    LOGPROBS,
    TEMPLATES,
    Request,
    Sampling,
    TransformersEngine,
    likeliest,
    token_entropy,
)
from tasks.common.evaluation.sample import Hardware
from tasks.common.machine.hardware import cpu_dtype
from tasks.common.models.chat_template import prompt_ids
from tests.adapters import saved

HOW = Sampling(n=3, greedy=True, temperature=1.0, top_p=1.0, max_prompt_tokens=200, max_tokens=12, seed=0)


def exact(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


@given(st.lists(st.floats(0.001, 100), min_size=5, max_size=60), st.integers(1, 20))
def test_entropy_is_a_lower_bound_within_its_stated_error(weights, k):
    p = np.sort(np.array(weights) / sum(weights))[::-1]
    k = min(k, len(p))
    estimate = token_entropy(np.log(p[:k])[None])[0]
    rest = p[k:].sum()
    gap = rest * np.log((len(p) - k) * min(rest, p[k - 1]) / rest) if rest > 1e-6 else 1e-4
    assert estimate - 1e-6 <= exact(p) <= estimate + gap + 1e-4


def test_entropy_is_exact_for_all_tokens_for_a_uniform_and_for_a_certain_distribution():
    p = np.array([0.5, 0.25, 0.125, 0.125])
    assert token_entropy(np.log(p)[None])[0] == pytest.approx(exact(p))
    assert token_entropy(np.full((2, 20), -np.log(1000))) == pytest.approx([np.log(1000)] * 2)
    certain = np.full((1, 20), -np.inf)
    certain[0, 0] = 0.0
    assert token_entropy(certain)[0] == 0


def test_the_likeliest_tokens_are_read_from_both_forms_of_vllms_output():
    """Flat, and a dict for each token (vLLM 0.11.0), where the sampled one may be among the likeliest."""
    random = np.random.default_rng(0)
    top = -np.sort(random.exponential(size=(3, LOGPROBS)))
    sampled = [top[0, 4], -50.0, top[2, 0]]  # of the second token not among the likeliest
    flat = SimpleNamespace(logprobs=np.column_stack([sampled, top]).ravel().tolist())
    dicts = []
    for row, drawn in zip(top, sampled, strict=True):
        ids = {value: number for number, value in enumerate(row)}
        order = [drawn, *row]
        dicts.append(
            {ids.get(value, 99): SimpleNamespace(logprob=value, rank=ids.get(value, 98) + 1) for value in order}
        )
    assert [len(of) for of in dicts] == [LOGPROBS, LOGPROBS + 1, LOGPROBS]
    assert likeliest(flat, 3) == pytest.approx(top)
    assert likeliest(dicts, 3) == pytest.approx(top)


def test_templates_end_where_the_assistant_begins(small_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    own = tokenizer.decode(prompt_ids(tokenizer, messages))
    own_template = TEMPLATES["chatml"][0]  # its own template is chatml
    assert own == tokenizer.decode(prompt_ids(tokenizer, messages, chat_template=own_template))
    assert own.endswith("<|im_start|>assistant\n")
    llama = tokenizer.decode(prompt_ids(tokenizer, messages, chat_template=TEMPLATES["llama"][0]))
    assert "<|start_header_id|>user<|end_header_id|>\n\nu<|eot_id|>" in llama
    assert llama.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert set(TEMPLATES) == {"default", "chatml", "llama"}
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        prompt_ids(tokenizer, messages)


def test_transformers_engine_samples_and_gives_the_exact_entropy(small_model):
    import torch

    engine = TransformersEngine(str(small_model), 300, 0, 0.5)
    requests = [
        Request(i, mode, [{"role": "user", "content": "x" * i}]) for i in (1, 5) for mode in ("greedy", "sampled")
    ]
    too_long = Request(9, "sampled", [{"role": "user", "content": "x" * 300}])
    results = {(r.index, r.mode): completions for r, completions in engine.generate([*requests, too_long], HOW)}
    assert results[9, "sampled"][0].finish_reason == "prompt_too_long"
    assert [len(results[i, "sampled"]) for i in (1, 5)] == [3, 3] and len(results[1, "greedy"]) == 1
    greedy = results[5, "greedy"][0]
    # Token by token, without padding, batches or a cache.
    ids = prompt_ids(engine.tokenizer, requests[2].messages)
    entropies = []
    for _ in range(greedy.tokens):
        logits = engine.model(torch.tensor([ids])).logits[0, -1].float()
        entropies.append(exact(logits.softmax(-1).detach().numpy().astype(float)))
        ids.append(int(logits.argmax()))
    assert greedy.entropy == pytest.approx(np.mean(entropies), abs=0.02)


def test_a_sample_of_transformers_depends_on_its_request_alone(small_model):
    """Not on its neighbours, which another number of engines would change; it is a draw of the model's distribution."""
    engine, how = TransformersEngine(str(small_model), 300, 0, 0.5), replace(HOW, temperature=0.7, top_p=0.9)
    engine.model.float()
    requests = [Request(i, "sampled", [{"role": "user", "content": "x" * i}]) for i in range(1, 12)]
    texts = [
        {
            r.index: [sample.response for sample in samples]
            for batch in batches
            for r, samples in engine.generate(batch, h)
        }
        for batches, h in (([requests], how), ([[r] for r in requests], how), ([requests], replace(how, seed=1)))
    ]
    assert texts[0] == texts[1]
    assert len({text for found in texts[1:] for of in found.values() for text in of}) > 60  # of 66 draws


def test_the_draws_of_transformers_have_the_models_distribution(small_model):
    engine, how = TransformersEngine(str(small_model), 300, 0, 0.5), replace(HOW, temperature=0.5, top_p=0.9)
    scores = torch.tensor([2.0, 1.5, 1.0, 0.0, -2.0, -1e9]).repeat(20_000, 1)
    draws = LogitsProcessorList(engine._draws(list(range(20_000)), how))(None, scores).argmax(-1)
    p = (scores[0] / 0.5).softmax(-1)[:3]  # 0.66, 0.24, 0.09: the first 0.9 of the mass ends in the third
    assert torch.bincount(draws, minlength=6) / 20_000 == pytest.approx([*(p / p.sum()).tolist(), 0, 0, 0], abs=0.015)


@pytest.mark.slow
def test_vllm_engine_agrees_with_transformers(small_model, monkeypatch):
    """Greedy text is the same; the entropy from 20 of 258 tokens is below the exact one and near it."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from tasks.common.evaluation.engines import VLLMEngine

    requests = [Request(i, "greedy", [{"role": "user", "content": "hello" * i}]) for i in range(4)]
    engine = VLLMEngine(str(small_model), 300, 0, 0.2)
    ours = {r.index: c[0] for r, c in engine.generate(requests, HOW)}
    streamed = "".join(engine.stream(requests[1].messages, HOW))
    engine.close()
    exact_ones = {r.index: c[0] for r, c in TransformersEngine(str(small_model), 300, 0, 0.5).generate(requests, HOW)}
    same = sum(ours[i].response == exact_ones[i].response for i in range(4))
    assert same >= 3  # two tokens of a random model may be equally likely in bfloat16
    for i in range(4):
        assert ours[i].entropy <= exact_ones[i].entropy + 0.02
        assert ours[i].entropy > exact_ones[i].entropy - 0.6
    assert isinstance(streamed, str) and streamed


def same(ours: dict, theirs: dict) -> int:
    """Requests with the same responses. One may differ: rounding depends on what is computed together, and now and then
    two tokens are as likely."""
    assert ours.keys() == theirs.keys()
    return sum(ours[key] == theirs[key] for key in ours)


def agreeing(ours: dict, theirs: dict) -> int:
    return sum(ours[index].response == theirs[index].response for index in ours)


def test_transformers_engine_samples_through_an_adapter(small_model, tmp_path):
    requests = [Request(i, "greedy", [{"role": "user", "content": "hello" * i}]) for i in range(4)]
    found = []
    for model in (saved(small_model, tmp_path / "adapter"), small_model):
        engine = TransformersEngine(str(model), 300, 0, 0.5)
        found.append({r.index: c[0] for r, c in engine.generate(requests, HOW)})
    assert agreeing(*found) == 0


@pytest.mark.slow
def test_vllm_engine_samples_through_an_adapter(small_model, tmp_path, monkeypatch):
    """Greedy text is that of peft's model, and not that of the base."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from tasks.common.evaluation.engines import VLLMEngine

    adapter = saved(small_model, tmp_path / "adapter")
    requests = [Request(i, "greedy", [{"role": "user", "content": "hello" * i}]) for i in range(4)]
    engine = VLLMEngine(str(adapter), 300, 0, 0.2)
    ours = {r.index: c[0] for r, c in engine.generate(requests, HOW)}
    streamed = "".join(engine.stream(requests[1].messages, HOW))
    engine.close()
    with_peft, base = (
        {r.index: c[0] for r, c in TransformersEngine(str(model), 300, 0, 0.5).generate(requests, HOW)}
        for model in (adapter, small_model)
    )
    assert agreeing(ours, with_peft) >= 3  # two tokens of a random model may be equally likely in bfloat16
    assert agreeing(ours, base) == 0 and streamed


def other_weights(model, folder) -> str:
    """``model`` with other weights, in ``folder``."""
    changed = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.add_(3 * weight.std() * torch.randn_like(weight))  # also the head, which is tied to the embedding
    changed.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sorted({cpu_dtype(), "float32"}))
def test_an_engine_that_takes_another_models_weights_samples_as_a_new_one(small_model, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr("tasks.common.evaluation.engines.cpu_dtype", lambda: dtype)
    from tasks.common.evaluation.engines import VLLMEngine

    other = other_weights(small_model, tmp_path / "other")
    chats = [[{"role": "user", "content": "hello" * i}] for i in range(4)]
    requests = [Request(i, mode, chat) for i, chat in enumerate(chats) for mode in ("greedy", "sampled")]

    def sampled(engine) -> dict:
        return {(r.index, r.mode): [c.response for c in found] for r, found in engine.generate(requests, HOW)}

    config = tmp_path / "other/config.json"  # verl writes the tokenizer's ends into it
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 3, "pad_token_id": 3}))
    engine = VLLMEngine(str(small_model), 300, HOW.seed, 0.2)
    first = sampled(engine)
    assert engine.load(other)
    second = sampled(engine)
    assert engine.load(str(small_model)) and same(sampled(engine), first) >= 7
    engine.close()
    new = VLLMEngine(other, 300, HOW.seed, 0.2)
    assert sampled(new) != first
    assert same(second, sampled(new)) >= 7 and same(second, first) == 0
    assert not new.load(str(saved(small_model, tmp_path / "adapter")))
    config = shutil.copytree(other, tmp_path / "third") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 5.0, "num_hidden_layers": 1}))
    assert not new.load(str(config.parent))
    new.close()


@pytest.mark.slow
def test_two_engines_answer_as_one_does_and_a_lost_one_is_told(small_model, tmp_path, monkeypatch):
    """The responses of a seeded request are the same, whichever engine samples it."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    chats = [[{"role": "user", "content": "hello" * (i + 1)}] for i in range(5)]
    requests = [Request(i, mode, chat) for i, chat in enumerate(chats) for mode in ("greedy", "sampled")]
    other = other_weights(small_model, tmp_path / "other")
    found = []
    for count in (1, 2):
        engine = Hardware(engines=count).engine("vllm", str(small_model), 300, HOW.seed)
        answers = []
        for model in (str(small_model), other):
            assert engine.load(model)
            answers.append({(r.index, r.mode): [c.response for c in a] for r, a in engine.generate(requests, HOW)})
        found.append(answers)
        if count == 2:
            engine.engines[1][1].kill()
            engine.engines[1][1].join()
            with pytest.raises(EngineEnded):
                list(engine.generate(requests, HOW))
        engine.close()
    for model in (0, 1):
        assert same(found[0][model], found[1][model]) >= 9
    assert found[0][0] != found[0][1] and len(found[0][0]) == 10
    sampled = [text for (_, mode), texts in found[0][0].items() for text in texts if mode == "sampled"]
    assert len(set(sampled)) > 10
