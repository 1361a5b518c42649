"""EGPO without a training: where the reasoning is, what its entropy adds. In a training: tests/test_numerics.py."""

import random
from functools import partial
from types import SimpleNamespace

import pytest

from tests.test_numerics import reasoning
from tests.test_verl_config import config_of
from verl_tasks.training.methods import egpo as method


@pytest.fixture(scope="module")
def egpo():
    from verl_tasks.verl_plugins import egpo  # here: importing verl takes seconds

    return egpo


def byte_level(merges: list[tuple[str, str]], special: list[str]):
    """A byte-level tokenizer: ``merges`` in its byte alphabet (Ġ: space, Ċ: line feed), ``special`` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_tokens(["<|im_end|>", *special], special_tokens=True)
    return fast


def byte_fallback():
    """As Llama 2's: one letter a token, a space before the text, other characters as the bytes of UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"<>/abcdefghijklmnopqrstuvwxyz."]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


# As SmolLM2 writes tags: "<" and "</" merge with what stands before, ">" with what follows.
SPLIT = [
    ("Ġ", "<"),
    ("<", "/"),
    ("i", "n"),
    ("t", "h"),
    ("in", "k"),
    ("th", "ink"),
    (".", "</"),
    (">", "</"),
    (">", "Ċ"),
]


@pytest.fixture(scope="module", params=["special", "split"])
def tokenizer(request):
    return byte_level([], ["<think>", "</think>"]) if request.param == "special" else byte_level(SPLIT, [])


def spanned(egpo, tokenizer, ids: list[int], opened: bool) -> str | None:
    """The text of the tokens that count."""
    span = egpo.reasoning_span(tokenizer, ids, opened)
    assert span is None or 0 <= span[0] <= span[1] <= len(ids)
    return None if span is None else tokenizer.decode(ids[slice(*span)])


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>abc</think>d", False, "abc"),
        ("say <think>abc</think>d <think>e</think>", False, "abc"),  # the first block
        ("abc</think>d", True, "abc"),
        ("</think>d", True, ""),
        ("\n<think>abc</think>d", True, "abc"),  # a model that repeats the tag of the template
        ("ab <think>c</think>d", True, "ab <think>c"),  # not repeated: no second block in a block
        ("<think></think>d", False, ""),
        ("<think>abc<|im_end|>", False, "abc<|im_end|>"),  # not closed
        ("abc", True, "abc"),
        ("<think>", False, ""),
        ("", True, ""),
        ("<think>你好</think>好", False, "你好"),
        ("naïve 🙂</think>🙂", True, "naïve 🙂"),
        ("abc", False, None),
        ("abc</think>d", False, "abc"),  # what opens it was left out
        ("abc</think>d <think>e", False, "abc"),
        ("abc d", False, None),
        ("< think>abc", False, None),
    ],
)
def test_the_reasoning_is_what_stands_between_the_tags(egpo, tokenizer, text, opened, expected):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert spanned(egpo, tokenizer, ids, opened) == expected


def test_a_token_counts_where_its_text_begins(egpo):
    tokenizer = byte_level(SPLIT, [])
    ids = tokenizer("a <think>\nb.</think>\nc")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "Ġ<", "think", ">Ċ", "b", ".</", "think", ">Ċ", "c"]
    assert egpo.reasoning_span(tokenizer, ids, False) == (4, 6)  # not the line feed of ">Ċ", all of ".</"
    assert egpo.reasoning_span(tokenizer, tokenizer("<think></think>")["input_ids"], False) == (3, 3)


@pytest.mark.parametrize("opened", [True, False])
def test_spans_agree_with_the_bytes_of_each_token(egpo, tokenizer, opened):
    """Random tokens: bytes that are no text, characters cut in two, tags in any order."""
    rng = random.Random(0)
    tags = [tokenizer(tag)["input_ids"] for tag in ("<think>", "</think>")]
    pieces = [[token] for token in range(len(tokenizer))] + tokenizer(["你", "🙂", ".", "<", " "])["input_ids"] * 5
    prompt = tokenizer("hi<think>\n" if opened else "hi\n")["input_ids"]
    if tokenizer.convert_ids_to_tokens(prompt)[-1] == ">Ċ":
        prompt = [*prompt[:-1], *tokenizer.convert_tokens_to_ids([">", "Ċ"])]
    kinds = set()
    for _ in range(400):
        drawn = [rng.choice(tags if rng.random() < 0.1 else pieces) for _ in range(rng.randrange(30))]
        ids = [token for piece in drawn for token in piece]
        kind, expected = reasoning(tokenizer, prompt, ids)
        kinds.add(kind)
        span = egpo.reasoning_span(tokenizer, ids, opened)
        assert (span is None) == (kind == "none")
        every = range(len(ids))
        found = every[slice(*(span or (0, None)))]
        assert found == every[expected], tokenizer.convert_ids_to_tokens(ids)
    assert kinds == (
        {"prompt", "prompt closed"} if opened else {"none", "response", "response closed", "nothing closed"}
    )


def test_characters_of_several_tokens_that_decode_to_more_than_one(egpo):
    """Of a character that is not whole yet, byte fallback makes one replacement character a byte."""
    tokenizer = byte_fallback()
    ids = tokenizer("x <think>a你</think>好")["input_ids"]
    assert tokenizer.decode(ids[:-1])[-2:] == "\ufffd" * 2
    assert spanned(egpo, tokenizer, ids, False) == "a你"
    assert spanned(egpo, tokenizer, tokenizer("你</think>你")["input_ids"][1:], True) == "你"


def test_a_long_response_takes_few_decodings(egpo):
    tokenizer, calls = byte_level([], []), []

    def decode(ids, **kwargs):
        calls.append(len(ids))
        return tokenizer.decode(ids, **kwargs)

    ids = tokenizer("y" * 3000 + "<think>" + "x" * 5000 + "</think>z")["input_ids"]
    assert egpo.reasoning_span(SimpleNamespace(decode=decode), ids, False) == (3007, 8007)
    assert len(calls) < 35


def test_the_entropy_is_the_mean_over_the_reasoning(egpo):
    import torch

    entropy = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, float("nan")], [5.0, 6.0, 7.0, 8.0], [9.0, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
    spans = [(1, 3), None, (0, 3), (0, 1)]
    assert egpo.reasoning_entropy(entropy, mask, spans).tolist() == [2.5, 2.0, 6.0, 0.0]
    assert egpo.reasoning_entropy(entropy, mask, [(2, 2), (0, 1), (1, 3), None]).tolist() == [0.0, 1.0, 7.0, 0.0]


def test_the_term_is_clipped_to_the_advantage(egpo):
    import torch

    advantages = torch.tensor([[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0], [0.2, 0.2, 0.2], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    entropy = torch.tensor([0.25, 3.0, 3.0, 3.0])
    term = egpo.entropy_term(advantages, entropy, mask, weight=0.5, alpha=2.0)
    expected = [[0.125, 0.125, 0.0], [0.25] * 3, [0.05] * 3, [0.0] * 3]
    assert torch.allclose(term, torch.tensor(expected), atol=1e-7)


@pytest.fixture
def step(egpo, monkeypatch):
    """``step(λ)``: advantages before and after, and metrics, of a batch without verl's engines: three responses and
    one that verl added as padding."""
    import torch

    tokenizer = byte_level([], ["<think>", "</think>"])
    texts = [("q<think>\n", "ab</think>c"), ("q", "abc"), ("q", "<think></think>"), ("<|im_end|>", "<|im_end|>")]
    prompts, responses = ([tokenizer(text)["input_ids"] for text in side] for side in zip(*texts, strict=True))
    values = [0.5, -0.5, 0.1, 0.0]

    def nested(rows):
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    def run(weight: float, trainer=None):
        store = {
            "prompts": nested(prompts),
            "responses": nested(responses),
            "response_mask": nested([[int(i < 3)] * len(ids) for i, ids in enumerate(responses)]),
            "entropy": nested([[float(at) for at in range(len(ids))] for ids in responses]),
            # What verl writes where the mask is 0 is -0.0 after a negative score.
            "advantages": nested(
                [[value] * len(ids) for value, ids in zip([*values[:3], -0.0], responses, strict=True)]
            ),
        }
        before = store["advantages"].values().clone()

        def get(keys, partition_id, select_fields):
            from tensordict import TensorDict

            return TensorDict({name: store[name] for name in select_fields}, batch_size=len(keys))

        def put(keys, partition_id, fields):
            store.update(fields.items())

        monkeypatch.setattr(egpo.tq, "kv_batch_get", get)
        monkeypatch.setattr(egpo.tq, "kv_batch_put", put)
        monkeypatch.setattr(egpo.TaskTrainer, "_compute_advantage", lambda self, batch, metrics: batch)
        if trainer is None:
            trainer = object.__new__(egpo.EGPOTrainer)
            trainer.tokenizer, trainer._said_no_block = tokenizer, False
        settings = SimpleNamespace(egpo_lambda=weight, egpo_alpha=0.1)
        trainer.config = SimpleNamespace(trainer=SimpleNamespace(v1=SimpleNamespace(egpo=settings)))

        class Batch(SimpleNamespace):
            def __len__(self):
                return len(self.keys)

        metrics = {}
        trainer._compute_advantage(Batch(keys=["a", "b", "c", "d"], partition_id="train"), metrics)
        return before, store["advantages"].values(), metrics, trainer

    return run


def test_a_step_adds_the_term_and_leaves_padding_alone(step, capsys):
    _, after, metrics, trainer = step(1.0)
    # H: of "ab" 0.5, of all of "abc" 1, of an empty block 0.
    expected = [0.5 + 0.5] * 4 + [-0.5 + 1.0] * 3 + [0.1] * 2 + [0.0]
    assert after.tolist() == pytest.approx(expected, abs=1e-7)
    assert metrics["egpo/entropy_reasoning"] == pytest.approx(0.5)
    assert metrics["egpo/term"] == pytest.approx(0.5)
    assert metrics["egpo/no_reasoning_block"] == pytest.approx(1 / 3)
    step(1.0, trainer)
    said = capsys.readouterr().out
    assert said.startswith("warning: EGPO: 1 of 3 responses have no <think> block;") and said.count("\n") == 1


def test_without_weight_every_bit_stays(step):
    before, after, metrics, _ = step(0.0)
    assert after.numpy().tobytes() == before.numpy().tobytes()
    assert metrics["egpo/term"] == 0 and metrics["egpo/entropy_reasoning"] > 0


def test_the_trainer_is_registered(egpo):
    from verl.trainer.ppo.v1 import get_trainer_cls

    from verl_tasks.verl_plugins.trainer import TaskTrainer

    assert get_trainer_cls("egpo") is egpo.EGPOTrainer and issubclass(egpo.EGPOTrainer, TaskTrainer)


composed = partial(config_of, STACK="cpu", METHOD="egpo", EGPO_LAMBDA="0.3", EGPO_ALPHA="1.5")


def test_the_settings_reach_the_trainer():
    config = composed()
    assert method.problem(config) is None
    assert dict(config.trainer.v1.egpo) == {"egpo_lambda": 0.3, "egpo_alpha": 1.5}
    assert config.algorithm.adv_estimator == "grpo" and config.algorithm.norm_adv_by_std_in_grpo


@pytest.mark.parametrize(
    "argument",
    [
        "algorithm.rollout_correction.bypass_mode=True",
        "trainer.v1.egpo.egpo_alpha=0",
    ],
)
def test_what_would_train_without_the_entropy_is_refused_in_one_line(argument):
    problem = method.problem(composed(argument))
    assert argument in problem and "\n" not in problem
