"""Entropy from the likeliest tokens, and vLLM's engine beside transformers on a real (very small) model."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.adapters import saved
from verl_tasks.evaluation.engine_pool import EngineEnded, Hardware
from verl_tasks.evaluation.engines import LOGPROBS, Request, Sampling, log_probs, token_entropy
from verl_tasks.machine.hardware import cpu_dtype
from verl_tasks.models.chat_template import prompt_ids
from verl_tasks.settings import SettingsError

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
    for output in (flat, dicts):
        own, likeliest = log_probs(output, [4, 99, 0])
        assert own == pytest.approx(sampled) and likeliest == pytest.approx(top)


# ---- a real engine

CHATS = [[{"role": "user", "content": "hello" * (i + 1)}] for i in range(5)]
REQUESTS = [Request(i, mode, chat) for i, chat in enumerate(CHATS) for mode in ("greedy", "sampled")]
DTYPES = sorted({cpu_dtype(), "float32"})


def asked(engine) -> dict:
    return {(r.index, r.mode): answers for r, answers in engine.generate(REQUESTS, HOW)}


def texts(answers: dict) -> dict:
    return {key: [each.response for each in of] for key, of in answers.items()}


def same(ours: dict, theirs: dict) -> int:
    """Requests with the same responses. One may differ: rounding depends on what is computed together, and now and then
    two tokens are as likely."""
    assert ours.keys() == theirs.keys()
    return sum(ours[key] == theirs[key] for key in ours)


def by_transformers(policy, tokenizer) -> dict:
    """The greedy response to each of CHATS and the mean of its tokens' exact entropies, token by token."""
    found = {}
    for index, messages in enumerate(CHATS):
        ids = prompt_ids(tokenizer, messages)
        start, entropies = len(ids), []
        while len(ids) < start + HOW.max_tokens and ids[-1:] != [tokenizer.eos_token_id]:
            with torch.inference_mode():
                logits = policy(torch.tensor([ids])).logits[0, -1].float()
            entropies.append(exact(logits.softmax(-1).numpy().astype(float)))
            ids.append(int(logits.argmax()))
        found[index] = tokenizer.decode(ids[start:], skip_special_tokens=True), np.mean(entropies)
    return found


def agreeing(ours: dict, theirs: dict) -> int:
    return sum(ours[index, "greedy"][0].response == text for index, (text, _) in theirs.items())


def other_weights(model, folder) -> str:
    """``model`` with other weights, in ``folder``."""
    changed = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.add_(3 * weight.std() * torch.randn_like(weight))  # also the head, which is tied to the embedding
    changed.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    config = folder / "config.json"  # verl writes the tokenizer's ends into it
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 3, "pad_token_id": 3}))
    return str(folder)


@pytest.fixture(scope="module", params=DTYPES)
def engine(request, small_model):
    from verl_tasks.evaluation.engines import VLLMEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setattr("verl_tasks.evaluation.engines.cpu_dtype", lambda: request.param)
        made = VLLMEngine(str(small_model), 300, HOW.seed, 0.2)
        yield made
        made.close()


@pytest.mark.slow
def test_vllm_agrees_with_transformers_also_with_the_weights_that_it_takes(engine, small_model, tmp_path):
    """Greedy text is the same; the entropy from 20 of 258 tokens is below the exact one and near it."""
    dtype = str(engine.llm.model_config.dtype).removeprefix("torch.")
    found = {}
    for model in (other_weights(small_model, tmp_path / "other"), str(small_model)):
        assert engine.load(model)
        found[model] = ours = asked(engine)
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        theirs = by_transformers(policy, engine.tokenizer)
        assert agreeing(ours, theirs) >= 4  # two tokens of a random model may be equally likely in bfloat16
        for index, (text, entropy) in theirs.items():
            if ours[index, "greedy"][0].response == text:
                assert entropy - 0.6 < ours[index, "greedy"][0].entropy <= entropy + 0.02
        drawn = [text for (_, mode), of in texts(ours).items() for text in of if mode == "sampled"]
        assert len(drawn) == 15 and len(set(drawn)) > 10 and same(texts(asked(engine)), texts(ours)) >= 9
    assert same(*map(texts, found.values())) == 0
    config = shutil.copytree(tmp_path / "other", tmp_path / "third") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 5.0, "num_hidden_layers": 1}))
    assert not engine.load(str(saved(small_model, tmp_path / "adapter"))) and not engine.load(str(config.parent))


@pytest.mark.slow
def test_a_prompt_that_is_too_long_is_not_sampled_and_an_answer_is_streamed(engine):
    ((_, (found,)),) = engine.generate([Request(9, "sampled", [{"role": "user", "content": "x" * 300}])], HOW)
    assert found.finish_reason == "prompt_too_long"
    assert "".join(engine.stream(CHATS[1], HOW))


@pytest.mark.long  # test_engine_pool.py has the pool with other engines
@pytest.mark.parametrize("engine", [cpu_dtype()], indirect=True)
def test_two_engines_answer_as_one_does_and_a_lost_one_is_told(engine, small_model, tmp_path):
    """The responses of a seeded request are the same, whichever engine samples it."""
    other, found = other_weights(small_model, tmp_path / "other"), []
    pool = Hardware(engines=2).engine(str(small_model), 300, HOW.seed)
    for each in (engine, pool):
        answers = []
        for model in (str(small_model), other):
            assert each.load(model)
            answers.append(texts(asked(each)))
        found.append(answers)
    pool.engines[1][1].kill()
    pool.engines[1][1].join()
    with pytest.raises(EngineEnded):
        list(pool.generate(REQUESTS, HOW))
    pool.close()
    assert same(found[0][0], found[1][0]) >= 9 and same(found[0][1], found[1][1]) >= 9


@pytest.mark.slow
def test_vllm_samples_through_an_adapter_as_peft_does_and_refuses_what_it_does_not_know(
    small_model, tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from verl_tasks.evaluation.engines import VLLMEngine
    from verl_tasks.verl_plugins.certify import policy_of

    config = shutil.copytree(small_model, tmp_path / "unknown") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["NoSuchModel"]}))
    with pytest.raises(SettingsError, match=r"^MODEL=\S+/unknown: vLLM does not start with it: .*NoSuchModel"):
        VLLMEngine(str(config.parent), 300, 0, 0.2)
    adapter = str(saved(small_model, tmp_path / "adapter"))
    engine = VLLMEngine(adapter, 300, 0, 0.2)
    ours, streamed = asked(engine), "".join(engine.stream(CHATS[1], HOW))
    engine.close()
    with_peft, base = (by_transformers(policy_of(model), engine.tokenizer) for model in (adapter, str(small_model)))
    assert agreeing(ours, with_peft) >= 4 and agreeing(ours, base) == 0 and streamed
