"""The final answer of a worked solution: find it, read it as an exact number, compare it with the truth.

Plain numbers are read here, exactly (Fraction). Other LaTeX goes to math-verify in a sandbox: verl calls a reward in
threads, and math-verify's own time limits need the main thread and cannot interrupt C code.
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from tasks.common.rewards.answers import after_thinking
from tasks.common.rewards.sandbox import CallFailed, Sandbox

MAX_ANSWER_CHARS = 200
MAX_CANDIDATES = 20  # most places of one form that are checked, the last first
SECONDS = 2.0  # of wall clock for one comparison; ordinary formulas take milliseconds

_HASHES = re.compile(r"(?<!#)####(?!#)")
_BOXED = re.compile(r"\\f?boxed\s*\{")
_ANSWER_WORDS = ("answer", "Answer", "ANSWER", "答案", "答え", "정답", "Antwort", "Ответ", "ответ")
_ANSWER_WORDS += tuple(f"{first}{rest}" for first in "Rr" for rest in ("espuesta", "éponse", "esposta", "isposta"))
_SENTENCE = re.compile(
    r"\banswers?\b[^.\n]{0,60}?(?:\bis\b|\bare\b|[:=])|(?:答案|答え|정답)[^。\n]{0,20}?[是为為は은:：=]"
    r"|\b(?:respuesta|réponse|resposta|risposta|antwort|ответ)\b[^.\n]{0,60}?(?:\b(?:es|est|é|è|ist|lautet)\b|[:=—])",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?][*_`\"')\]]*(?=\s|$)|[。！？\n]")
_LABEL = re.compile(r"\A(?:[A-Za-z][A-Za-z' ]{0,40}?(?:\bis\b|[:=])|(?:最终|最后)?答案[是为為:：=]{0,2})[*_`]*\s*")
_HEADING = re.compile(r"[*_\s]*\d{1,2}[.):]\s+[*_]*[A-Za-z][^\n]*[^.!?\n](?:\n|\Z)")  # "2. Check"
# Perhaps a heading: "2.1 Check", "(2) Check", "2 - Check", "2. 检查", "2、检查", "第2步", "2️⃣ Check".
_NUMBERED = re.compile(
    r"[*_\s]*(?:\(?\d{1,2}[.)\uff0e\uff09][\s*_]+[*_`\"'“]*[^\W\d_]|\d{1,2}(?:\.\d{1,2}){1,3}\.?\s+[*_]*[A-Z]"
    r"|\d{1,2}\s?[-–—]\s[*_]*[A-Z]|\d{1,2}、|第\s?\d{1,2}\s?[步章节節部]|\d\ufe0f?\u20e3)"
)
_END_OF_TURN = re.compile(
    r"(?:(?:<\|[A-Za-z_0-9]{1,30}\|>|<｜[^｜<>]{1,30}｜>|</s>|<(?:eos|pad|end_of_turn|turn\|)>|\[(?:EOS|/INST)\])"
    r"\s{0,9})+\Z"
)

_SPELLING = str.maketrans(
    "！＂＃＄％＆＇（）＊＋，－．／０１２３４５６７８９：；＜＝＞？～", "!\"#$%&'()*+,-./0123456789:;<=>?~"
)
_SPELLING |= str.maketrans(
    {"−": "-", "–": "-", "\t": " ", "￥": "¥", "￡": "£"}
    | dict.fromkeys("\u00a0\u2009\u202f\u3000", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")  # characters without a width
)
_WRAPPER = re.compile(
    r"\\(?:text|mathrm|mathbf|mathit|textbf|textit|boldsymbol|bm|mbox|underline|f?boxed)\s*\{([^{}]*)\}"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?[\d.,]{1,30})\s*\}\s*\{\s*([\d.,]{1,30})\s*\}|(\d)\s*(\d))")
_BOLD = re.compile(r"(?<![\w)])(\*{1,3}|_{1,3}|`)(?=\S)([^*_`]*)(?<=\S)\1(?![\w(])")
# Currency: Unicode's signs, "US$" and its like, and a code before the number.
_SIGN = r"\\?(?:\b(?:US|CA|AU|NZ|HK|NT|[ACRS]))?[$¢-¥\u20a0-\u20cf\u060b\u09f2\u09f3\u0e3f\u17db]"
_CODES = "USD|EUR|GBP|JPY|CNY|RMB|INR|KRW|CHF|CAD|AUD|NZD|HKD|SGD|SEK|NOK|DKK|PLN|CZK|RUB|TRY|BRL|MXN|ZAR"
_CURRENCY = re.compile(rf"{_SIGN}|\b(?:{_CODES}|Rs)\.?\s?(?=[-\d])")
_REMOVED = re.compile(r"\\[()\[\]]|\\[,!;: ]|\\(?:left|right|displaystyle|euro|pounds)(?![a-zA-Z])")
_DEGREES = re.compile(r"\^\s*\{?\\circ\}?")

_NUMBER = r"(?:\d{1,3}(?:,\d{3}){1,6}(?:\.\d{1,18})?|\d{1,18}(?:\.\d{1,18})?|\.\d{1,18})"
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNIT = r"(?:(?:m|km|cm|mm|ft|in)\s?(?:[²³]|\^\{?[23]\}?)|[℃℉㎡㎥㎞㎝㎜㎏]|k?Ω\b|[µμ][gmlLs]\b|"
_UNIT += rf"(?:{_CODES}|[gmhslLcCF]|km|cm|mm|kg|mg|ml|mL|lbs?|oz|ft|in|hrs?|mins?|secs?|mph)\b)"
# Units in Chinese, Japanese or Korean: no numeral, no "or", "to", "more than", and none of the words of arithmetic.
_NOT_HAN = "[一二三四五六七八九十零〇两百千万亿兆萬億半之或到至多余加减減乘除点點和与與及십백천만억조반또와과]"
_HAN_UNIT = rf"(?:(?!{_NOT_HAN})[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3]){{1,12}}"
# Words that change the number, also in the languages of _SENTENCE.
_NOT_A_UNIT = (
    r"(?!(?i:and|or|to|by|half|times|plus|minus|divided|over|squared|cubed|bn|mn|mil|mille|mio|mrd|tausend|mila"
    r"|und|oder|ou|et|или|тыс|тысяч\w{0,3}|млн|млрд"
    r"|(?:hundred|thousand|lakh|crore)s?|(?:mill|bill|trill|milli|милли)(?:i?on|ard|ón|ão|õ|он|ард)\w{0,4})\b)"
)
_LETTER = r"[A-Za-zÀ-ÖØ-öø-ɏЀ-ӿ]"
_PLAIN = re.compile(
    rf"(?:[≈~]\s*)?(?P<sign>[-+]?)\s*(?:(?P<whole>\d{{1,18}})\s+(?=\d+\s*/))?(?P<number>{_NUMBER})"
    rf"(?:\s*/\s*(?P<denominator>{_NUMBER}))?\)?(?:\s*(?P<scale>(?i:{'|'.join(_SCALES)}))\b)?(?:\s*[%°])?"
    rf"(?:\s*(?:×|\*|\\times|\\cdot)\s*10\s*\^\s*\{{?\s*(?P<power>-?\d{{1,2}})\s*\}}?)?"
)
# What may follow it: a unit in words, without a second number, operator or LaTeX.
_REST = re.compile(
    rf"[\s.,;:?'\")\]}}]*|(?:{_UNIT}|[\s,(/]+{_NOT_A_UNIT}(?:{_LETTER}{{2,}}|{_UNIT}))[^\d=+*^\\<>|]*|\s*{_HAN_UNIT}[\s.,]*"
)
_TOKEN = re.compile(rf"(?<![\w.,])(?:(?<![\d)\]%]\s)-)?{_NUMBER}(?:\s?/\s?{_NUMBER})?(?!\d)")
_RELATION = re.compile(r"[<>≤≥≠]|\\(?:[lg]eq?|neq?)(?![a-zA-Z])")


@dataclass(frozen=True)
class Answer:
    """The text of a final answer, and its mark: ``hashes``, ``boxed``, ``sentence``, or ``last`` (the last number of a
    response without a mark)."""

    text: str
    how: str


def find_answer(response: str, flexible: bool = False) -> Answer | None:
    """The final answer after any thinking: the text after the last ``####`` that is not a Markdown heading, else in the
    last ``\\boxed{}``, else the last number of the last "the answer is" sentence that has one; ``flexible``: else the
    last number. None without one. Text after the answer changes nothing."""
    text = after_thinking(response)
    text = text[:-200] + _END_OF_TURN.sub("", text[-200:].rstrip())
    for how, find in (("hashes", _after_hashes), ("boxed", _in_box), ("sentence", _in_sentence)):
        if found := find(text):
            return Answer(found, how)
    if flexible and (found := _last_number(text[-2000:])):
        return Answer(found, "last")
    return None


def _first_sentence(text: str) -> str:
    """The first sentence of the first line that is not empty, at most MAX_ANSWER_CHARS."""
    text = text[: 2 * MAX_ANSWER_CHARS].lstrip()
    end = _SENTENCE_END.search(text)
    return text[: end.start() if end else len(text)][:MAX_ANSWER_CHARS].strip()


def _last(pattern: re.Pattern, text: str, words: tuple[str, ...]) -> Iterator[re.Match]:
    """Matches of ``pattern`` at the last MAX_CANDIDATES places of ``words``, the last first: faster than over all."""
    places = []
    for word in words:
        place = len(text)
        for _ in range(MAX_CANDIDATES):
            if (place := text.rfind(word, 0, place)) < 0:
                break
            places.append(place)
    return filter(None, (pattern.match(text, place) for place in sorted(places, reverse=True)[:MAX_CANDIDATES]))


def _after_hashes(text: str) -> str | None:
    numbered = None
    for match in _last(_HASHES, text, ("####",)):
        if _HEADING.match(text, match.end(), match.end() + MAX_ANSWER_CHARS):
            continue
        line = _first_sentence(text[match.end() : match.end() + 2 * MAX_ANSWER_CHARS])
        line = _LABEL.sub("", _BOLD.sub(r"\2", line).strip("*_` "))
        if line and not re.match(r"#|[A-Za-z]{2}", _CURRENCY.sub("", line)):
            if not _NUMBERED.match(text, match.end()):
                return line
            numbered = numbered or line  # "18. That is all.", or a heading: only where there is nothing better
    return numbered


def _in_box(text: str) -> str | None:
    for match in _last(_BOXED, text, ("\\boxed", "\\fbox")):
        depth = 1
        for place in range(match.end(), min(len(text), match.end() + MAX_ANSWER_CHARS + 1)):
            if text[place] in "{}" and text[place - 1] != "\\":
                depth += 1 if text[place] == "{" else -1
            if not depth:
                return text[match.end() : place].strip() or None
    return None


def _in_sentence(text: str) -> str | None:
    for match in _last(_SENTENCE, text, _ANSWER_WORDS):
        sentence = _first_sentence(text[match.end() : match.end() + 2 * MAX_ANSWER_CHARS].lstrip("*_`:：= \n"))
        if read_number(sentence) is not None:
            return sentence
        formulas = [a or b for a, b in re.findall(r"\$([^$]+)\$|\\\((.+?)\\\)", sentence)]
        if formulas and "\\" in formulas[-1]:
            return formulas[-1]
        if found := _last_number(sentence):
            return found
    return None


def _last_number(text: str) -> str | None:
    found = _TOKEN.findall(tidy(text))
    return found[-1] if found else None


def tidy(text: str) -> str:
    """``text`` without the markup, currency signs and LaTeX wrappers that do not change a number; ``\\frac{a}{b}`` as
    ``a/b`` where both are plain."""
    text = text.translate(_SPELLING).replace("{,}", ",").replace("\\%", "%").replace("~", " ").replace("\\approx", "≈")
    text = _DEGREES.sub("°", text)
    for _ in range(3):  # nested wrappers
        text = _WRAPPER.sub(r" \1 ", text)
    text = _FRACTION.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]} ", text)
    return _BOLD.sub(r"\2", _REMOVED.sub("", _CURRENCY.sub("", text)))


def read_number(text: str) -> Fraction | None:
    """The one number in ``text``, exactly; None if there is none, several, or a formula.

    Examples: 18, 18.00, 1,000, - 3, 36/2, 1 1/2, \\frac{36}{2}, $18, 18%, **18**, 3 million, 1.8 × 10^1, 18 eggs a day,
    18元, x = 18 and 9 * 2 = 18. A currency, ``%`` and a unit do not change the number: 18% is 18, as in GSM8K.
    """
    if len(text) > MAX_ANSWER_CHARS or _RELATION.search(text):
        return None
    text = tidy(text).rpartition("=")[2].strip(" *_`\"'()[]{},;:?\n")
    text = _LABEL.sub("", text)
    match = _PLAIN.match(text)
    if not match or not _REST.fullmatch(text, match.end()):
        return None
    whole = match["whole"]
    if whole and not re.fullmatch(r"\d+", match["number"] + match["denominator"]):
        return None
    number, denominator = (Fraction((match[name] or "1").replace(",", "")) for name in ("number", "denominator"))
    if denominator == 0 or (whole and number >= denominator):  # 48 24/1 is a sum, left undone
        return None
    value = number / denominator + int(whole or 0)
    value *= _SCALES.get((match["scale"] or "").lower(), 1) * Fraction(10) ** int(match["power"] or 0)
    return -value if match["sign"] == "-" else value


def compare(answer: str, truth: str) -> tuple[bool, bool]:
    """Whether ``answer`` is well-formed, and whether it equals ``truth``.

    Two plain numbers are compared exactly: 18.00 is 18, 0.33 is not 1/3. Anything else goes to math-verify, which
    compares values or formulas in LaTeX, decimals to 6 places. There an answer is well-formed if math-verify reads it
    within its limits of time and memory, and if it is a number where the truth is one.
    """
    number, true = read_number(answer), read_number(truth)
    if number is not None and true is not None:
        return True, number == true
    if not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return False, False
    try:
        return _math_verify(answer, str(truth)[: 10 * MAX_ANSWER_CHARS])
    except CallFailed:  # not cached: the machine may have been slow
        return False, False


@functools.lru_cache(maxsize=4096)  # responses of a group repeat
def _math_verify(answer: str, truth: str) -> tuple[bool, bool]:
    well_formed, right = _sandbox.call(answer, truth)
    return well_formed, right


_sandbox = Sandbox("tasks.common.rewards.math_answer:math_verify_judge", seconds=SECONDS)


def math_verify_judge() -> Callable[[str, str], tuple[bool, bool]]:
    """What the sandbox calls: (answer, truth) to (well formed, right), by math-verify."""
    import logging

    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Basic, Eq

    logging.disable(logging.CRITICAL)
    # The LaTeX grammar alone: math-verify's other reader evaluates text as Python (sympy.parse_expr).
    reader = [LatexExtractionConfig()]

    def read(text: str):
        found = parse(f"${text.replace('$', '')}$", reader, parsing_timeout=None)
        return found[0] if found and isinstance(found[0], Basic) else None

    def is_number(value) -> bool:
        value = value.rhs if isinstance(value, Eq) else value
        return bool(getattr(value, "is_number", False)) and value.is_finite is not False

    def judge(answer: str, truth: str) -> tuple[bool, bool]:
        given, true = read(answer), read(truth)
        well_formed = given is not None and (not is_number(true) or is_number(given))
        return well_formed, well_formed and true is not None and bool(verify(true, given, timeout_seconds=None))

    judge("\\frac{1}{2}", "\\sqrt{4}")  # loads the grammar
    return judge
