"""Prompts with tools, by templates that know them and by those that do not; and what verl is given of our rows."""

import asyncio
import copy
import json
import types

import pytest

from verl_tasks.models.chat_template import answer_ids, in_words, opens_thinking, prompt_ids
from verl_tasks.rows import decoded, rl_row, rl_schema, sft_row, sft_schema, write_parquet

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Köln?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "rain", "name": "weather"},
    {"role": "tool", "content": "sun"},
    {"role": "user", "content": "And tomorrow?"},
]
# As the templates of Qwen do it: the tools in a system turn, arguments with tojson, tool results in user turns.
KNOWS_TOOLS = (
    "{% if tools %}<|im_start|>system\nTOOLS:{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer(small_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(small_model)


def text_of(tokenizer, messages, tools=None, **kwargs):
    return tokenizer.decode(prompt_ids(tokenizer, messages, tools, **kwargs))


def test_a_template_that_knows_tools_gets_them_and_the_calls_as_objects(tokenizer):
    tokenizer.chat_template = KNOWS_TOOLS
    text = text_of(tokenizer, CHAT, TOOLS)
    assert f"TOOLS:{json.dumps(TOOLS[0])}" in text.replace("\\u00f6", "ö")
    assert 'CALL weather {"city": "Köln", "days": 2}' in text
    assert "<tools>" not in text
    assert "TOOLS" not in text_of(tokenizer, CHAT)


def test_a_template_without_tools_gets_them_in_words(tokenizer):
    text = text_of(tokenizer, CHAT, TOOLS)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions")
    assert json.dumps(TOOLS[0]) in text
    assert text.count('<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>') == 2
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_a_model_without_a_template_is_refused(tokenizer):
    base = copy.deepcopy(tokenizer)
    base.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        prompt_ids(base, CHAT)


def test_in_words_leaves_the_chat_that_it_was_given_alone():
    before = json.dumps(CHAT)
    roles = [message["role"] for message in in_words(CHAT, TOOLS)]
    assert roles == ["system", "user", "assistant", "user", "user"]
    assert [m["role"] for m in in_words(CHAT[1:2], TOOLS)] == ["system", "user"]
    assert json.dumps(CHAT) == before


@pytest.mark.parametrize(
    "end, opened", [("<think>\n", True), ("<think>", True), ("", False), ("<think></think>\n", False)]
)
def test_thinking_that_the_prompt_opened_is_seen(tokenizer, end, opened):
    tokenizer.chat_template = KNOWS_TOOLS.replace("assistant\n{% endif %}", "assistant\n" + end + "{% endif %}")
    assert opens_thinking(tokenizer, prompt_ids(tokenizer, CHAT)) is opened


def test_stored_messages_come_back_as_they_were(tmp_path):
    from verl_tasks.rows import read_rows, tools_of, validate_parquet

    rows = [rl_row("t", CHAT, "x", "train", 0, TOOLS), rl_row("t", CHAT[:2], "x", "train", 1, [])]
    write_parquet(rows, tmp_path / "x.parquet", rl_schema(tools=True))
    assert validate_parquet(tmp_path / "x.parquet") == 2
    found = list(read_rows(tmp_path / "x.parquet"))
    assert [decoded(row["prompt"]) for row in found] == [CHAT, CHAT[:2]]
    assert [tools_of(row) for row in found] == [TOOLS, []]


@pytest.mark.parametrize(
    "change", [{"tools": "not json"}, {"tools": json.dumps({"a": 1})}, {"tools": json.dumps([{"function": {}}])}]
)
def test_tools_that_are_none_are_refused(tmp_path, change):
    from verl_tasks.rows import DataError, validate_parquet

    row = rl_row("t", CHAT, "x", "train", 0, TOOLS)
    row["extra_info"] |= change
    write_parquet([row], tmp_path / "x.parquet", rl_schema(tools=True))
    with pytest.raises(DataError, match=r"extra_info\.tools"):
        validate_parquet(tmp_path / "x.parquet")


# ---- what verl is given


def test_verl_leaves_out_prompts_that_are_too_long_with_their_tools(tmp_path, tokenizer):
    from omegaconf import OmegaConf

    from verl_tasks.verl_plugins.dataset import Prompts

    rows = [rl_row("t", CHAT, "x", "train", 0, TOOLS), rl_row("t", CHAT[:2], "x", "train", 1, [])]
    write_parquet(rows, tmp_path / "x.parquet", rl_schema(tools=True))
    length = len(prompt_ids(tokenizer, CHAT, TOOLS))
    for limit, kept in ((length, [0, 1]), (length - 1, [1])):
        config = OmegaConf.create({"max_prompt_length": limit, "cache_dir": str(tmp_path / "cache")})
        prompts = Prompts(str(tmp_path / "x.parquet"), tokenizer, config)
        assert [prompts[i]["index"] for i in range(len(prompts))] == kept
    assert prompts[0]["raw_prompt"] == CHAT[:2]


@pytest.mark.parametrize("opened", [False, True])
def test_rollouts_get_the_prompt_of_evaluation(tokenizer, opened):
    from verl_tasks.verl_plugins.dataset import SingleTurnOfRow

    if opened:
        tokenizer.chat_template = KNOWS_TOOLS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    loop = SingleTurnOfRow.__new__(SingleTurnOfRow)
    loop.tokenizer = tokenizer
    loop.rollout_config = types.SimpleNamespace(prompt_length=10_000)
    loop.row = rl_row("t", CHAT, "x", "train", 0, TOOLS)
    assert asyncio.run(loop.ct_build_initial_tokens(CHAT)) == prompt_ids(tokenizer, CHAT, TOOLS)
    assert loop.row["extra_info"].get("think_opened", False) is opened


def test_a_demonstration_learns_its_answer_alone(tmp_path, tokenizer):
    from verl_tasks.verl_plugins.dataset import Demonstrations

    answer = "<think>rain</think>\n<tool_call>x</tool_call>"
    write_parquet([sft_row(CHAT, answer, TOOLS)], tmp_path / "x.parquet", sft_schema(tools=True))
    prompt, response = prompt_ids(tokenizer, CHAT, TOOLS), answer_ids(tokenizer, answer)
    limit = len(prompt) + len(response)
    rows = Demonstrations(str(tmp_path / "x.parquet"), tokenizer, {"max_length": limit, "train_batch_size": 1})
    assert len(rows) == 1
    assert rows[0]["input_ids"].tolist() == prompt + response
    assert tokenizer.decode(rows[0]["input_ids"][rows[0]["loss_mask"] == 1]) == answer + "<|im_end|>"
    with pytest.raises(ValueError, match="only 0 of 1 demonstrations fit"):
        Demonstrations(str(tmp_path / "x.parquet"), tokenizer, {"max_length": limit - 1, "train_batch_size": 1})


@pytest.mark.parametrize(
    ("response", "opened", "learned"),
    [
        ("<think>so</think> 7", False, "<think>so</think> 7<|im_end|>"),
        ("<think>so</think> 7", True, "so</think> 7<|im_end|>"),
        ("7", True, "\n</think>\n\n7<|im_end|>"),
    ],
)
def test_an_answer_goes_on_where_the_prompt_ended(tokenizer, response, opened, learned):
    tokenizer.eos_token = "<|im_start|>"  # the template's end of a turn, not the tokenizer's end of a text
    assert tokenizer.decode(answer_ids(tokenizer, response, opened)) == learned


def test_transformers_does_not_speak_of_spaces(tokenizer, caplog):
    """It warns where a tokenizer, as SmolLM2's, asks to clean up spaces, which the text of a BPE does not get."""
    import logging

    from transformers.utils import logging as theirs

    changed = copy.deepcopy(tokenizer)
    changed.clean_up_tokenization_spaces = True
    getattr(logging.Logger.warning_once, "cache_clear", lambda: None)()
    theirs.get_logger("transformers").addHandler(caplog.handler)
    try:
        assert not opens_thinking(changed, prompt_ids(changed, [{"role": "user", "content": "hi"}]))
    finally:
        theirs.get_logger("transformers").removeHandler(caplog.handler)
    assert caplog.messages == []
