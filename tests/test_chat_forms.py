"""Episodes by chat templates of the forms that models have: what ends a turn, how a result of a call is shown, what is
left out. The templates are short ones of the same form, written for these tests."""

import asyncio
import copy

import pytest

from tasks.calculator.environment import TOOLS, Environment
from tasks.calculator.prepare_data import SYSTEM
from verl_tasks.evaluation.certify import Chat, ends, template
from verl_tasks.models.chat_template import (
    answer_ids,
    demonstration_ids,
    end_of_turn,
    knows_tools,
    next_turn_ids,
    prompt_ids,
)
from verl_tasks.rewards.environment import tool_message
from verl_tasks.rewards.episode import Limits, Sampled, play
from verl_tasks.rewards.tool_calls import render_calls
from verl_tasks.rows import chat, rl_row

CALL = render_calls([{"name": "calculator", "arguments": {"expression": "347 * 58"}}])
ANSWER = "<answer>20126</answer>"
PROMPT = chat("What is 347 * 58?", SYSTEM)
EOS = "<|endoftext|>"
# The roles' tokens, messages one after another, and the tools in a first turn; ``{shown}`` is a message of a tool.
FORM = (
    "{{% if tools %}}<|system|>{{{{ tools | tojson }}}}<|end|>\n{{% endif %}}{{% for m in messages %}}"
    "{{% if m.role == 'tool' %}}{shown}{{% else %}}<|{{{{ m.role }}}}|>\n{{{{ m.content }}}}<|end|>\n{{% endif %}}"
    "{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>\n{{% endif %}}"
)
WHERE_CALLED = "{% if messages[loop.index0 - 1].tool_calls %}<|tool|>\n{{ m.content }}<|end|>\n{% endif %}"
TEMPLATES = {
    # An end of sequence at the end of a chat only, as in Phi-3's.
    "ends": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    # No end of a turn: the next one's token stops the model, as in GLM-4.5's.
    "opens": "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    # Results of calls that the template has rendered only, as in Gemma 4's; an error as in gpt-oss's and Mistral's.
    "where called": FORM.format(shown=WHERE_CALLED),
    "refuses": FORM.format(shown="{{ raise_exception('a tool without a call') }}"),
    # No generation prompt after a result without a call, as in DeepSeek-V3.2's.
    "no turn": "{% set own = namespace(turn=add_generation_prompt) %}"
    + FORM.format(shown="{% set own.turn = false %}<result>{{ m.content }}</result>").replace(
        "if add_generation_prompt", "if own.turn"
    ),
    # White space before the end, as in Llama 2's and Apriel's.
    "space": "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} {{ eos_token }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}<|end|>{% endif %}{% endfor %}",
    # Tokens before an answer that the generation prompt lacks, as in gpt-oss's and Command-R7B's.
    "channel": FORM.format(shown="").replace(
        "{{ m.content }}", "{{ '<|channel|>final<|message|>' if m.role == 'assistant' }}{{ m.content }}"
    ),
}
NATIVE = {"opens"}  # that show tools and results themselves


@pytest.fixture
def tokenizer(small_model, request):
    from transformers import AutoTokenizer

    own = copy.deepcopy(AutoTokenizer.from_pretrained(small_model))
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool", "observation", "end", "endoftext")]
    roles += ["<|channel|>", "<|message|>"]
    own.add_special_tokens({"additional_special_tokens": roles})
    own.eos_token = EOS
    own.chat_template = TEMPLATES.get(request.param, request.param)
    own.form = request.param
    return own


every = pytest.mark.parametrize("tokenizer", TEMPLATES, indirect=True)


def of_form(name: str):
    return pytest.mark.parametrize("tokenizer", [name], indirect=True)


def played(tokenizer, *ends: str):
    """The episode of a call and an answer, each sampled with one of ``ends``."""
    row = rl_row("calculator", PROMPT, {"answer": "20126"}, "test", 0, TOOLS)
    turns = iter(zip((CALL, ANSWER), ends, strict=True))

    async def sample(ids: list[int], most: int) -> Sampled:
        text, end = next(turns)
        return Sampled(tokenizer(text + end, add_special_tokens=False)["input_ids"], None, True)

    return asyncio.run(play(Environment, row, tokenizer, sample, Limits(9999, 9999, 9999, 4, 5)))


@every
def test_an_episode_shows_the_result_and_asks_for_the_next_turn(tokenizer):
    end = end_of_turn(tokenizer)
    episode = played(tokenizer, end, end)
    assert (episode.reward, episode.tool_errors, episode.ended) == (1.0, 0, "stop")
    own = [token for token, mine in zip(episode.sequence.response_ids, episode.sequence.mask, strict=True) if mine]
    assert tokenizer.decode(own) == CALL + end + ANSWER + end
    between = tokenizer.decode(
        [t for t, mine in zip(episode.sequence.response_ids, episode.sequence.mask, strict=True) if not mine]
    )
    assert "20126" in between and between.count(end) == (tokenizer.form not in ("space", "opens"))
    assert tokenizer.form == "space" or between.endswith("<|assistant|>\n")
    assert knows_tools(tokenizer) is (tokenizer.form in NATIVE)
    assert ("<|user|>" in between) is (tokenizer.form not in NATIVE)  # in words, results are the user's


@every
def test_a_demonstration_is_what_the_whole_chat_is_rendered_to(tokenizer):
    shown = [{"role": "assistant", "content": CALL}, tool_message("20126"), {"role": "assistant", "content": ANSWER}]
    found = template(tokenizer, [Chat("one", PROMPT + shown, len(PROMPT), TOOLS)])
    assert found.state == ("warning" if tokenizer.form == "space" else "ok"), found
    ids, mask = demonstration_ids(tokenizer, PROMPT + shown, len(PROMPT), TOOLS)
    assert ids[: mask.index(1)] == prompt_ids(tokenizer, PROMPT, TOOLS)


@of_form("ends")
def test_the_end_of_a_chat_is_no_end_of_a_turn(tokenizer):
    assert end_of_turn(tokenizer) == "<|end|>"
    assert tokenizer.decode(answer_ids(tokenizer, "4")) == "4<|end|>"


@of_form("ends")
def test_an_end_of_two_tokens_stops_at_the_last(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>\n{% endfor", "<|end|><|tool|>\n{% endfor")
    assert end_of_turn(tokenizer) == "<|end|><|tool|>"
    last = tokenizer.convert_tokens_to_ids("<|tool|>")
    assert [ends(tokenizer, {stop}, [], []).state for stop in (last, last - 1)] == ["ok", "failed"]


@of_form("opens")
@pytest.mark.parametrize(("stop", "rest"), [("<|observation|>", ""), ("<|user|>", "<|observation|>")])
def test_a_token_that_stops_a_turn_and_opens_the_next_stands_once(tokenizer, stop, rest):
    episode = played(tokenizer, stop, EOS)
    result = f"{rest}\n<tool_response>\n20126\n</tool_response><|assistant|>\n"
    assert tokenizer.decode(episode.sequence.response_ids) == CALL + stop + result + ANSWER + EOS


@of_form("opens")
def test_a_demonstration_ends_with_the_token_that_opens_what_follows(tokenizer):
    turns = [{"role": "assistant", "content": "a"}, tool_message("1"), {"role": "assistant", "content": "b"}]
    turns += [{"role": "user", "content": "2"}, {"role": "assistant", "content": "c"}]
    ids, mask = demonstration_ids(tokenizer, PROMPT + turns, len(PROMPT), TOOLS)
    learned = tokenizer.decode([token for token, mine in zip(ids, mask, strict=True) if mine])
    assert learned == "a<|observation|>b<|user|>c<|user|>"


@of_form("channel")
def test_an_answer_has_the_tokens_that_the_template_puts_before_it(tokenizer):
    assert tokenizer.decode(answer_ids(tokenizer, "4")) == "<|channel|>final<|message|>4<|end|>"
    hostile = tokenizer.convert_tokens_to_ids("<|channel|>")
    assert answer_ids(tokenizer, "<|channel|>4").count(hostile) == 1


@of_form("channel")
def test_an_answer_has_nothing_that_the_generation_prompt_gives(tokenizer):
    """As in Aya's template, and an empty thought, as in Qwen3's, is the model's own."""
    given, opened = tokenizer.chat_template, "<|assistant|>\n"
    tokenizer.chat_template = given.replace(opened, f"{opened}<|channel|>final<|message|>")
    assert tokenizer.decode(answer_ids(copy.deepcopy(tokenizer), "4")) == "4<|end|>"
    tokenizer.chat_template = given.replace("<|channel|>final<|message|>", "<think></think>")
    assert tokenizer.decode(answer_ids(copy.deepcopy(tokenizer), "4")) == "4<|end|>"


@of_form("ends")
def test_thinking_that_a_template_adds_to_earlier_turns_is_a_warning(tokenizer):
    adds = "{% if m.role == 'assistant' %}<think></think>\n{% endif %}{{ m.content }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", adds)
    turns = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    chats = [Chat("one", [*PROMPT, *turns, turns[0]], len(PROMPT))]
    assert template(tokenizer, chats).text.startswith("rewrites thinking or white space: one: turn 1")
    tokenizer.chat_template = tokenizer.chat_template.replace("<think></think>", "<think></think>Well: ")
    assert template(tokenizer, chats).state == "failed"


def test_templates_for_chats_with_tools_and_without_are_not_mixed(small_model):
    """As in Hermes's tokenizers."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(small_model)
    with_tools = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}" + own.chat_template.replace(
        "m['content']", "('RESULT ' if m['role'] == 'tool' else '') + m['content']"
    )
    own.chat_template = {"default": own.chat_template, "tool_use": with_tools}
    assert own.decode(next_turn_ids(own, [1], [tool_message("5")], TOOLS)).startswith("\n<|im_start|>tool\nRESULT 5")
    own.chat_template = with_tools  # alone it needs tools
    with pytest.raises(ValueError, match="refuses this conversation: 'NoneType' object is not iterable"):
        prompt_ids(own, PROMPT)


def leaving_out(small_model, role: str):
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(small_model)
    own.chat_template = own.chat_template.replace("m['content']", f"(m['content'] if m['role'] != '{role}' else '')")
    return own


def test_a_template_that_leaves_out_the_user_is_refused(small_model):
    with pytest.raises(ValueError, match="leaves out messages of the role user"):
        prompt_ids(leaving_out(small_model, "user"), PROMPT[1:])


@pytest.mark.parametrize("how", ["leaves out", "refuses", "alternates"])
def test_a_template_without_a_system_message_has_it_in_the_users_first(small_model, how):
    """Gemma 2's refuses the role, Mixtral's wants the user first."""
    own = leaving_out(small_model, "system")
    plain = leaving_out(small_model, "").chat_template
    refusals = {"refuses": "messages[0].role == 'system'", "alternates": "messages[0].role != 'user'"}
    if how in refusals:
        own.chat_template = f"{{% if {refusals[how]} %}}{{{{ raise_exception('no') }}}}{{% endif %}}{plain}"
    told = [{"role": "user", "content": f"{SYSTEM}\n\nWhat is 347 * 58?"}]
    assert prompt_ids(own, PROMPT) == prompt_ids(own, told)
    assert prompt_ids(own, PROMPT[:1]) == prompt_ids(own, [{"role": "user", "content": SYSTEM}])
    with_tools = own.decode(prompt_ids(own, PROMPT, TOOLS))
    assert SYSTEM in with_tools and "<tools>" in with_tools and "system\n" not in with_tools
