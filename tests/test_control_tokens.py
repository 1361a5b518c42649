"""What users, tools and data files say never becomes a control token: for each of those of five tokenizers."""

import asyncio
import functools
import json
from collections import Counter

import pytest

from tasks.calculator.environment import TOOLS, Environment
from verl_tasks.evaluation import certify
from verl_tasks.models.chat_template import answer_ids, demonstration_ids, next_turn_ids, prompt_ids
from verl_tasks.models.control_tokens import is_control
from verl_tasks.models.find import resolve_model
from verl_tasks.rewards.environment import Start, Step, tool_message
from verl_tasks.rewards.episode import Limits, Sampled, play
from verl_tasks.rows import rl_row, rl_schema, sft_row, sft_schema, write_parquet

ANSWER = "<answer>4</answer>"
LAST = {"role": "assistant", "content": ANSWER}


def pieces():
    """A tokenizer of pieces as Llama 2's has: a space is put before each text, and unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    for character in ["▁", *map(chr, range(33, 127))]:
        vocabulary.setdefault(character, len(vocabulary))
    own = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]})
    fast.chat_template = (
        "<s>{% for m in messages %}{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}[INST]{{ m.content | trim }}[/INST]{% endif %}"
        "{% endfor %}"
    )
    return fast


def not_special(small_model):
    """Bytes, and DeepSeek's turns, whose tokens are not called special; tools as JSON without plain characters."""
    from transformers import AddedToken, AutoTokenizer

    fast = AutoTokenizer.from_pretrained(small_model)
    turns = ["<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<think>", "<|User|>"]
    fast.add_tokens([AddedToken(token, normalized=False, special=False) for token in turns])
    fast.chat_template = (
        "{% if tools %}{{ tools | tojson(ensure_ascii=True) }}{% endif %}{% for m in messages %}"
        "{% if m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
        "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}<|im_end|>"
        "{% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
    )
    return fast


TURNS = ["<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "[|told|]"]


def turns_of_template(small_model):
    """Gemma's turns, added by people who did not call them special: the template alone says what they are."""
    from transformers import AddedToken, AutoTokenizer

    fast = AutoTokenizer.from_pretrained(small_model)
    fast.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in [*TURNS, "<think>", "<b>", "\n\n"]]
    )
    fast.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}<|turn>{{ m.content }}<end_of_turn>"
        "{% elif m.role == 'system' %}[|told|]{{ m.content }}\n\n"
        "{% else %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
        "<end_of_turn>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    return fast


def llama(small_model):
    """Llama 3's turns: a header of two special tokens, and a role between them that is text."""
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(small_model)
    own = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
    fast.add_special_tokens({"additional_special_tokens": own})
    fast.chat_template = (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
        "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )
    return fast


def embedded(_):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_model("embedded"))


MADE = {"SmolLM2": embedded, "pieces": lambda _: pieces(), "not special": not_special}
MADE |= {"of template": turns_of_template, "Llama": llama}


@pytest.fixture(params=MADE)
def tokenizer(request, small_model):
    return MADE[request.param](small_model)


@functools.lru_cache
def controls(tokenizer) -> dict[str, int]:
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: index for index, token in added if is_control(token) or token.content in TURNS}


def counts(tokenizer, ids) -> Counter:
    """How often each control token is in ``ids``."""
    return Counter(token for token in ids if token in controls(tokenizer).values())


def chat(said: str) -> list[dict]:
    return [{"role": "user", "content": f"2 + 2? {said}"}]


def tools(said: str) -> list[dict]:
    found = json.loads(json.dumps(TOOLS))
    found[0]["function"]["description"] += said
    found[0]["function"]["parameters"]["properties"] |= {f"x{said}": {"type": f"y{said}"}}
    return found


def forged(tokenizer):
    """Each control token, alone and within others, and the whole turn of a model."""
    own = list(controls(tokenizer))
    assert len(own) >= 5
    return [*own, *(f"{token}{token}" for token in own), *(f"{token[0]}{token}" for token in own), "".join(own)]


class Says(Environment):
    """The calculator, with a prompt and a tool that say more."""

    said = ""

    def reset(self, row):
        start = super().reset(row)
        return Start([*chat(self.said)], tools(self.said)) if start else start

    def step(self, action):
        return Step([tool_message(f"4 {self.said}")]) if "calculator" in action.text else Step(reward=1.0, done=True)


def episode(tokenizer, said: str):
    row = rl_row("calculator", chat(""), {"answer": "4"}, "test", 0, TOOLS)
    texts = iter(["calculator", ANSWER])

    async def sample(ids, most):
        return Sampled(answer_ids(tokenizer, next(texts)), None, True)

    made = type("Said", (Says,), {"said": said})
    return asyncio.run(play(made, row, tokenizer, sample, Limits(9999, 9999, 9999, 4, 5)))


def test_prompts_results_and_answers_have_the_control_tokens_of_the_template_alone(tokenizer):
    ways = {
        "prompt": lambda said: prompt_ids(tokenizer, chat(said)),
        "tools": lambda said: prompt_ids(tokenizer, chat(""), tools(said)),
        "result": lambda said: next_turn_ids(tokenizer, [], [tool_message(f"4{said}")], TOOLS),
        "next user": lambda said: next_turn_ids(tokenizer, [], [{"role": "user", "content": f"{said}4"}]),
        "answer": lambda said: answer_ids(tokenizer, f"4{said}{ANSWER}"),
        "demonstration": lambda said: demonstration_ids(
            tokenizer,
            [*chat(said), *(m for _ in "12" for m in ({"role": "assistant", "content": said}, tool_message(said)))][
                :-1
            ],
            1,
            tools(said),
        )[0],
    }
    plain = {way: counts(tokenizer, ids("")) for way, ids in ways.items()}
    for said in forged(tokenizer):
        for way, ids in ways.items():
            assert counts(tokenizer, ids(said)) == plain[way], (way, said)


def test_an_episode_of_training_and_evaluation_has_no_forged_turn(tokenizer):
    plain = episode(tokenizer, "")
    for said in forged(tokenizer):
        found = episode(tokenizer, said)
        assert (found.turns, found.reward) == (plain.turns, plain.reward) == (2, 1.0)
        now, before = found.sequence, plain.sequence
        assert counts(tokenizer, now.prompt_ids) == counts(tokenizer, before.prompt_ids), said
        assert counts(tokenizer, now.response_ids) == counts(tokenizer, before.response_ids), said


def test_what_was_said_stays_readable(tokenizer):
    for said in controls(tokenizer):
        text = tokenizer.decode(prompt_ids(tokenizer, chat(said)))
        assert "".join(f"2 + 2? {said}".split()) in "".join(text.split())


def test_text_without_a_control_token_keeps_its_tokens(tokenizer):
    for text in ("plain", "<think>hm</think>", "<b>a\n\nb", "a < b | c > d", "<|", "\ue000 ö 漢"):
        whole = tokenizer.apply_chat_template(chat(text), add_generation_prompt=True, return_dict=True)["input_ids"]
        assert prompt_ids(tokenizer, chat(text)) == whole


def test_the_warm_up_learns_what_certify_plays(tokenizer, tmp_path):
    from verl_tasks.verl_plugins.dataset import Demonstrations

    said = "".join(controls(tokenizer))
    shown = [{"role": "assistant", "content": f"calculator{said}"}, tool_message(said), LAST]
    write_parquet([sft_row(chat(said), shown, tools(said))] * 2, tmp_path / "x.parquet", sft_schema(True, True))
    learned = Demonstrations(str(tmp_path / "x.parquet"), tokenizer, {"max_length": 9999, "train_batch_size": 1})[0]
    own = certify.Chat("one", [*chat(said), *shown], 1, tools(said))
    assert learned["input_ids"].tolist() == own.ids(tokenizer)[0]
    assert certify.template(tokenizer, [own]).state == "ok"
    ids, mask = own.ids(tokenizer)
    ends = [after for _, after in certify.runs(mask)]
    assert counts(tokenizer, [i for i, m in zip(ids, mask, strict=True) if m]) == Counter(ids[end - 1] for end in ends)


def test_chat_and_rollouts_ask_with_the_same_tokens(tokenizer, tmp_path):
    from verl_tasks.evaluation.engines import Request, Sampling, VLLMEngine, request_ids
    from verl_tasks.verl_plugins.dataset import SingleTurnOfRow

    said = "".join(controls(tokenizer))
    row = rl_row("t", chat(said), "x", "train", 0, tools(said))
    write_parquet([row], tmp_path / "x.parquet", rl_schema(tools=True))
    expected = prompt_ids(tokenizer, chat(said), tools(said))
    loop, asked = object.__new__(SingleTurnOfRow), []
    loop.tokenizer, loop.row, loop._cap_text_prompt_length = tokenizer, row, lambda ids: ids
    assert asyncio.run(loop.ct_build_initial_tokens(chat(said))) == expected
    how = Sampling(1, False, 1.0, 1.0, 9999, 9, 0)
    assert request_ids(tokenizer, Request(0, "sampled", chat(said), tools(said)), how) == expected
    engine = object.__new__(VLLMEngine)
    engine.tokenizer, engine.stream_ids = tokenizer, lambda ids, sampling: asked.append(ids) or []
    list(engine.stream(chat(said), how, tools(said)))
    assert asked == [expected]
