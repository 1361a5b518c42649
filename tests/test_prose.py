"""The prose of the documents: phrases that a reader must parse twice stay out, and sentences stay short on average."""

import re

import pytest

from tests.test_docs import CODE, FENCE, NAMES, ROOT

MEAN_WORDS = 20  # of a sentence, on average over a page
WORST = [
    r"of (?:before|then|above)",  # say which: the earlier run, the run above
    r"less (?:the(?! \w+er\b)|its|sft|warm-up|base)",  # "minus", or "without"
    r"what (?:is|was|has)\b[^.]{0,40} by then",
    r"comes? to grief",
    r"belongs? into",
    r"with nothing else on it",
    r"(?:there|where|here)(?:of|in|upon|with)",
    r"(?:seamless|blazing|cutting-edge|state-of-the-art|effortless|utili[sz]e|leverage)\w*",
]
BAD = re.compile(rf"\b(?:{'|'.join(WORST)})\b", re.I)
PAGES = [name for name in NAMES if not name.startswith("README.zh")]


def text_of(document: str) -> str:
    """Without blocks of code, tables, headings, comments, and the targets of links; inline code is one word."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", document), flags=re.S)
    text = re.sub(r"^(?:\||#|!\[).*$", "", text, flags=re.M)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"`[^`\n]+(?:\n[^`\n]+)?`", "`code`", text)


def sentences(document: str) -> list[str]:
    """The sentences of paragraphs and list items."""
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. ))", text_of(document))
    lines = [" ".join(part.split()) for part in parts]
    found = [re.split(r"(?<=[.!?])[)\]\"*]* (?=[A-Z`\"\[(*])", line) for line in lines]
    return [sentence for line in found for sentence in line if re.search(r"\w", sentence)]


def mean_words(document: str) -> float:
    """Words of a sentence on average; 0 for a page without prose."""
    counts = [len(sentence.split()) for sentence in sentences(document)]
    return sum(counts) / max(1, len(counts))


@pytest.mark.parametrize("name", PAGES)
def test_the_worst_phrases_stay_out(name):
    text = " ".join(CODE.sub("", FENCE.sub("", (ROOT / name).read_text())).split())
    assert [text[max(0, hit.start() - 40) : hit.end() + 20] for hit in BAD.finditer(text)] == []


@pytest.mark.parametrize("name", PAGES)
def test_sentences_are_short_on_average(name):
    assert mean_words((ROOT / name).read_text()) < MEAN_WORDS


def test_the_prose_check_finds_what_it_is_for():
    assert BAD.findall("the last three rows of the table, which are of before") == ["of before"]
    assert BAD.search("GRPO less\nthe warm-up".replace("\n", " ")) and BAD.search("what is left by then")
    assert not BAD.search("before the run; less memory; all of them then")
    page = "# A title\n\nOne two `three four`. Five six.\n\n- seven\n- eight [nine](x.md)\n\n| a | b |\n"
    assert sentences(page) == ["One two `code`.", "Five six.", "- seven", "- eight [nine]"]
    assert mean_words(page) == 2.5
