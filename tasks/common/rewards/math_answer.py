"""The final answer of a worked solution: find it, read it as an exact number, compare it with the truth.

Plain numbers are read here, exactly (Fraction). Other LaTeX goes to math-verify in a sandbox: verl calls a reward in
threads, and math-verify's own time limits need the main thread and cannot interrupt C code.
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from verl_tasks.rewards.answers import after_thinking, in_ascii
from verl_tasks.rewards.sandbox import CallFailed, Sandbox

__all__ = ["compare", "find_answer", "read_number"]  # for tasks

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
_SENTENCE_END = re.compile(r"(?<!\\)[.!?][*_`\"')\]]*(?=\s|$)|[。！？\n]")
_LABEL = re.compile(r"\A(?:[A-Za-z][A-Za-z' ]{0,40}?(?:\bis\b|[:=])|(?:最终|最后)?答案[是为為:：=]{0,2})[*_`]*\s*")
_HEADING = re.compile(r"[*_\s]*\d{1,2}[.):]\s+[*_]*[A-Za-z][^\n]*[^.!?\n](?:\n|\Z)")  # "2. Check"
# Perhaps a heading: "2.1 Check", "(2) Check", "2 - Check", "2. 检查", "2、检查", "第2步", "2️⃣ Check".
_NUMBERED = re.compile(
    r"[*_\s]*(?:\(?\d{1,2}[.)\uff0e\uff09][\s*_]+[*_`\"'“]*[^\W\d_]|\d{1,2}(?:\.\d{1,2}){1,3}\.?\s+[*_]*[A-Z]"
    r"|\d{1,2}\s?[-–—]\s[*_]*[A-Z]|\d{1,2}、|第\s?\d{1,2}\s?[步章节節部]|\d\ufe0f?\u20e3)"
)
# What ends a text, as an end of line does: a closing tag, a special token. Other tags count for nothing.
_END = re.compile(
    r"</[A-Za-z][\w:.-]{0,30}>|<\|[A-Za-z_0-9]{1,30}\|>|<｜[^｜<>]{1,30}｜>|<(?:eos|pad|end_of_turn|turn\||br ?/?)>"
    r"|\[(?:EOS|/[A-Za-z_]{2,30})\]"
)
_STYLE = re.compile(
    r"</?(?:b|i|u|em|strong|code|span|mark|font)(?:\s[^<>]{0,99})?>|<[A-Za-z][\w:.-]{1,30}>|\[[A-Z_]{3,30}\]",
    re.IGNORECASE,
)
# Between two boxes of one list.
_LISTED = re.compile(
    r"(?=.*(?:[,;、和]|and))(?:[\s$,;、和]|\\[()\[\],;! ]|\\q?quad|and|\\text\s?\{[\s,]*(?:and)?[\s,]*\})*", re.DOTALL
)

_WRAPPER = re.compile(
    r"\\(?:text|textnormal|mathrm|mathbf|mathit|textbf|textit|boldsymbol|bm|mbox|underline|f?boxed)\s*\{([^{}]*)\}"
)
_TEXT = re.compile(r"\\(?:text|mbox|mathrm)\s?\{[^{}]*\}")
_PART = r"\s*(?:\{{\s*({sign}[\d.,]{{1,30}})\s*\}}|(\d))"
_FRACTION = re.compile(rf"\\[cdt]?frac{_PART.format(sign='-?')}{_PART.format(sign='')}")
_BOLD = re.compile(r"(?<![\w)])(\*{1,3}|_{1,3}|`)(?=\S)([^*_`]*)(?<=\S)\1(?![\w(])")
# Currency: Unicode's signs, "US$" and its like, and a code before the number.
_SIGN = r"\\?(?:\b(?:US|CA|AU|NZ|HK|NT|[ACRS]))?[$¢-¥\u20a0-\u20cf\u060b\u09f2\u09f3\u0e3f\u17db]"
_CODES = "USD|EUR|GBP|JPY|CNY|RMB|INR|KRW|CHF|CAD|AUD|NZD|HKD|SGD|SEK|NOK|DKK|PLN|CZK|RUB|TRY|BRL|MXN|ZAR"
_CURRENCY = re.compile(rf"{_SIGN}|\b(?:{_CODES}|Rs)\.?\s?(?=[-\d])")
_GROUPS = re.compile(r"(?<=\d)(?:\{,\}|,\\!\s?|\\,)(?=\d{3})")  # 1{,}000
_DEGREES = re.compile(r"\^\s*\{?\\circ\}?")

_NUMBER = (
    r"(?:(?:\d{1,3}(?:,\d{3}){1,6}|\d{1,2}(?:,\d{2}){1,6},\d{3})(?:\.\d{1,18})?|\d{1,18}(?:\.\d{1,18})?|\.\d{1,18})"
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_FLOAT = r"(?<=\d)[eE](?P<exponent>[-+]?\d{2})(?!\d)"  # 1e-05, as Python and JSON write a float; 2e-1 may be Euler's e
_POWER = r"\s{0,2}(?:[²³]|\^\s?\{?\s?-?[1-4]\s?\}?)"
_LENGTH = (
    r"(?:[kcdmnµμ]?m|yds?|mi|ft|in(?:ch(?:es)?)?|feet|foot|yards?|miles?|units?|(?:kilo|centi|milli)?met(?:er|re)s?)"
)
_SYMBOL = rf"(?:{_LENGTH}|[kmMµμ]?(?:[gsNJWVAKlL]|mol|Pa|Hz)|h|hrs?|mins?|secs?|lbs?|oz)"
_UNIT = rf"(?:{_LENGTH}{_POWER}|{_SYMBOL}(?:{_POWER})?(?:\s?[/*]\s?{_SYMBOL}(?:{_POWER})?|\s{_SYMBOL}{_POWER}){{1,4}}"
_UNIT += r"(?![\w^])|[℃℉㎡㎥㎞㎝㎜㎏]|k?Ω\b|[µμ][gmlLs]\b|"
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
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>\d{{1,18}})\s+(?=\d+\s*/))?(?P<number>{_NUMBER})"
    rf"(?:\s*/\s*(?P<denominator>{_NUMBER}))?\)?(?:\s*(?P<scale>(?i:{'|'.join(_SCALES)}))\b)?(?:\s*[%°])?"
    rf"(?:\s*\*\s*10\s*\^\s*\{{?\s*(?P<power>-?\d{{1,2}})\s*\}}?)?(?:{_FLOAT})?"
)
# What may follow it: a unit in words, without a second number, operator or LaTeX.
_REST = re.compile(
    rf"[\s.,;:?'\")\]}}]*|(?:{_UNIT}|[\s,(/]+{_NOT_A_UNIT}(?:{_LETTER}{{2,}}|{_UNIT}))[^\d=+*^\\<>|]*|\s*{_HAN_UNIT}[\s.,]*"
)
# A number that stands for itself: no exponent, base or part of 18:30, 1.000.000, 1 000, 1e-5, 7², 3½, 5M and 3 * 10^8.
_TOKEN = re.compile(
    rf"(?<![\w.,:'’^])(?<!\d[eE][-+])(?!(?<=\d\s)\d{{3}}(?!\d))(?:(?<![\d)\]%]\s)-)?"
    rf"(?:\d{{1,18}}\s(?=\d+\s?/\s?\d))?{_NUMBER}(?:\s?/\s?{_NUMBER})?"
    r"(?!\d|[.,:'’]\d|\s\d{3}(?!\d)|\s?\^|[eE][+-]?\d|\s?[²³¹⁰-⁹¼-¾⅐-⅞]|[kKMB]\b|\s?\*\s?10\s?\^)"
)
_ASIDE = re.compile(r"\((?=[^()]*[^\W\d_]{2})[^()]*\)")  # (from step 2)
_REFERENCE = re.compile(
    r"\b(?:steps?|equations?|eqs?\.?|parts?|lines?|cases?|rules?|problems?|questions?|examples?|figures?|tables?|sections?)"
    r"\s*#?\(?\d+(?:\.\d+)?\)?|第\s?\d+\s?[步章节式]|步骤\s?\d+|\[\d{1,2}\]",
    re.IGNORECASE,
)
# A formula between dollars or \( and \), and a sentence that is one: no words but LaTeX's (possessive: \text{1} can be
# read in two ways).
_INLINE = re.compile(r"\$(?=\S)([^$]+)(?<=\S)\$(?!\d)|\\\((.+?)\\\)")
_FORMULA = re.compile(
    r"(?:\\(?:text|mbox|mathrm|textbf|operatorname)\s?\{[^{}]*\}|\\(?:begin|end)\{[a-z]{1,20}\}|\\[A-Za-z]+|\\."
    r"|(?<![A-Za-z])[A-Za-z](?![A-Za-z])"
    r"|(?:sin|cos|tan|log|ln|exp|sqrt|pi)(?![A-Za-z])|[\d\s+\-*/^_=(){}\[\],.|!<>%&'±√π∞°·×÷−≤≥≠∪∩∈])++"
)
_NAME = re.compile(r"\\?[A-Za-z]+'{0,3}(?:_\{?\w{1,9}\}?)?(?:\([^()]*\))?")  # x, a_3, f(2)
_UNKNOWN = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_BASED = re.compile(r"(\d[\dA-Fa-f]{0,60})(?:_\{?(\d{1,2})\}?)?")  # 52_8
# What math-verify would multiply: 1 000 and 1.000.000 would be 0, 3 hours 20 minutes would be 20 hours 3 minutes.
_NO_FORMULA = re.compile(
    r"\d\s+\d|\d\.\d+\.\d|\d\s*(?!(?:and|or|mod|sin|cos|tan|log|ln|exp|sqrt|pi)\b)(?<![A-Za-z])[A-Za-z]{2,}\.?,?"
    r"\s+(?:and\s+)?\d"
)
_LITERAL = re.compile(r"\d+(?:\s?[:/-]\s?\d+){2,}")  # 1:2:3, 2024-01-15: no division, no difference
# A phrase with a word in it: three letters or more, with a vowel, or two with an o or an accent, or Cyrillic, which are
# hardly variables. Others may be a product, as abc, xyz, at and mgh.
_WORD = r"(?!(?:[a-d]+|[w-z]+|sin|cos|tan|log|exp|inf|infty|infinity)\b)"
_WORD += rf"(?:(?=[a-z]*[aeiouy])[a-z]{{3,}}|[a-z]o|o[a-z]|up|(?=[a-z]*[ß-ӿ]){_LETTER}{{2,}})"
_PHRASE = re.compile(rf"(?=(?:{_LETTER}+\s)*{_WORD}\b){_LETTER}+(?:\s{_LETTER}+)*")
_HALF_DAY = re.compile(r"(?<=\d)\s*([ap])\.?\s?m\b\.?", re.IGNORECASE)  # 1:30 pm
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
    for how, find in (("hashes", _after_hashes), ("boxed", _in_box), ("sentence", _in_sentence)):
        if found := find(text):
            return Answer(found, how)
    if flexible and (found := _last_number(text[-2000:], _REFERENCE)):
        return Answer(found, "last")
    return None


def _untagged(text: str) -> str:
    return _END.sub("\n", _STYLE.sub("", text))


def _first_sentence(text: str) -> str:
    """The first sentence of the first line that is not empty, at most MAX_ANSWER_CHARS."""
    text = _untagged(text[: 2 * MAX_ANSWER_CHARS]).lstrip()
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
    """What the last box holds; with the boxes before it that only ``,`` or ``and`` parts from it, as a list."""
    found: list[str] = []
    start = None
    for match in _last(_BOXED, text, ("\\boxed", "\\fbox")):
        content, end = _braced(text, match.end())
        if start is None and content:
            found, start = [content], match.start()
        elif start is not None:
            if not (content and end <= start < end + MAX_ANSWER_CHARS and _LISTED.fullmatch(text, end, start)):
                break
            found, start = [content, *found], match.start()
    return ", ".join(dict.fromkeys(found)) or None


def _braced(text: str, start: int) -> tuple[str, int]:
    """The text up to the brace that closes the one before ``start``, and where it ends; "" without one."""
    depth = 1
    for place in range(start, min(len(text), start + MAX_ANSWER_CHARS + 1)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
        if not depth:
            return _untagged(text[start:place]).strip(), place + 1
    return "", start


def _in_sentence(text: str) -> str | None:
    for match in _last(_SENTENCE, text, _ANSWER_WORDS):
        sentence = _first_sentence(text[match.end() : match.end() + 2 * MAX_ANSWER_CHARS].lstrip("*_`:：= \n"))
        if read_number(sentence) is not None:
            return sentence
        *_, formula = (None, *_INLINE.finditer(sentence))
        if formula and ("\\" in formula[0][2:-2] or not re.search(r"\d", sentence[formula.end() :])):
            return formula[1] or formula[2]
        if sentence and _FORMULA.fullmatch(sentence) and not _REFERENCE.search(sentence):
            return sentence
        if found := _last_number(sentence, _ASIDE, _REFERENCE):
            return found
    return None


def _last_number(text: str, *left_out: re.Pattern) -> str | None:
    """The last number that stands for itself; not in what is ``left_out``, if there is another."""
    text = tidy(_untagged(text))
    for each in left_out:
        shorter = each.sub(" ", text)
        text = shorter if _TOKEN.search(shorter) else text
    found = _TOKEN.findall(text)
    return found[-1] if found else None


def tidy(text: str) -> str:
    """``text`` without the markup, currency signs and LaTeX wrappers that do not change a number; ``\\frac{a}{b}`` as
    ``a/b`` where both are plain."""
    text = _DEGREES.sub("°", _GROUPS.sub(",", text))
    text = in_ascii(text).replace("\\%", "%").replace("~", " ").replace("\\approx", "≈")
    text = re.sub(r"\^\s?\{\s?(-?\d{1,2})\s?\}", r"^\1", text)
    for _ in range(3):  # nested wrappers
        text = _WRAPPER.sub(r" \1 ", text)
    text = _FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ", text)
    return _BOLD.sub(r"\2", _CURRENCY.sub("", text))


def read_number(text: str) -> Fraction | None:
    """The one number in ``text``, exactly; None if there is none, several, or a formula.

    Examples: 18, 18.00, 1,000, - 3, 36/2, 1 1/2, \\frac{36}{2}, $18, 18%, **18**, 3 million, 1.8 × 10^1, 1e-05,
    18 eggs, 18元, x = 18 and 9 * 2 = 18. A currency, ``%`` and a unit do not change the number: 18% is 18.
    """
    if len(text) > MAX_ANSWER_CHARS or _RELATION.search(text):
        return None
    exact, _, near = tidy(text).partition("≈")  # x = 1/3 ≈ 0.33, or x ≈ 18
    text = (exact if re.search(r"\d", exact) else near).rpartition("=")[2].strip(" *_`\"'()[]{},;:?\n")
    text = _LABEL.sub("", text)
    match = _PLAIN.match(text)
    if not match or not _REST.fullmatch(text, match.end()):
        return None
    whole = match["whole"]
    if whole and not re.fullmatch(r"\d+", match["number"] + (match["denominator"] or "/")):
        return None
    number, denominator = (Fraction((match[name] or "1").replace(",", "")) for name in ("number", "denominator"))
    if denominator == 0 or (whole and number >= denominator):  # 48 24/1 is a sum, left undone
        return None
    value = number / denominator + int(whole or 0)
    power = int(match["power"] or match["exponent"] or 0)
    value *= _SCALES.get((match["scale"] or "").lower(), 1) * Fraction(10) ** power
    return -value if match["sign"] == "-" else value


def _computes(text: str, how: str) -> bool:
    """Whether an unknown and ``how`` stand together before the last ``=``: in 2x = 36, not in x = 18 or 9 * 2 = 18."""
    left = (part.strip("$ ") for part in tidy(text).split("=")[:-1])
    return any(_UNKNOWN.search(each) and re.search(how, each) and not _NAME.fullmatch(each) for each in left)


def _is_no_formula(text: str) -> bool:
    return bool(_NO_FORMULA.search(_FRACTION.sub(" x ", _TEXT.sub(r"\\text", text))))


def _phrases(text: str) -> list[str]:
    """The phrases of a list, in alphabetical order; none where one may be a formula."""
    parts = re.split(r",|\b(?:and|or)\b", unicodedata.normalize("NFC", text.casefold()))
    parts = sorted(" ".join(part.strip(" .*_`\"'\n").split()) for part in parts)
    return parts if all(map(_PHRASE.fullmatch, parts)) else []


def compare(answer: str, truth: str) -> tuple[bool, bool]:
    """Whether ``answer`` is well-formed, and whether it equals ``truth``.

    Two plain numbers are compared exactly: 18.00 is 18, 0.33 is not 1/3. Anything else goes to math-verify, which
    compares values or formulas in LaTeX, decimals to 6 places. There an answer is well-formed if math-verify reads it
    within its limits of time and memory, and if it is a number where the truth is one. Dates and ratios of three are
    compared as they stand, and so are words, in lists of any order: act is not cat, as products of letters would be. A
    morning is no evening; 1 000 and 3 hours 20 minutes are neither numbers nor formulas.
    """
    if not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return False, False
    times = [tidy(text) for text in (answer, truth)]
    halves = [_HALF_DAY.findall(text.lower()) for text in times]
    if all(halves):
        if halves[0] != halves[1]:
            return True, False
        answer, truth = (_HALF_DAY.sub("", text) for text in times)
    number, true = read_number(answer), read_number(truth)
    if number is not None and true is not None and not _computes(truth, r"[\d+\-*/^]"):
        return True, number == true and not _computes(answer, r"[\d^]|^-")  # 2x = 18 does not say 18
    given, wanted = (tidy(text).strip("$ ") for text in (answer, truth))
    if words := _phrases(wanted):
        given = given.replace("\\", " ")  # \theta
        found = [_phrases(given), _phrases(_LABEL.sub("", given))]  # x = cat, the word is cat
        return any(found), words in found
    if (based := _BASED.fullmatch(wanted)) and based[2]:
        digits = _BASED.fullmatch(given)
        return bool(digits), bool(digits) and digits[1] == based[1] and digits[2] in (None, based[2])
    if any(map(_is_no_formula, (answer, truth))):
        return False, False
    if _LITERAL.fullmatch(wanted):
        return bool(_LITERAL.fullmatch(given)), given.replace(" ", "") == wanted.replace(" ", "")
    answer, truth = (re.sub(_FLOAT, r"\\times 10^{\1}", text) for text in (answer, truth))  # its e is not Euler's
    try:
        return _math_verify(answer, str(truth)[: 10 * MAX_ANSWER_CHARS])
    except CallFailed:  # not cached: the machine may have been slow
        return False, False


@functools.lru_cache(maxsize=4096)  # responses of a group repeat
def _math_verify(answer: str, truth: str) -> tuple[bool, bool]:
    well_formed, right = _sandbox.call(answer, truth)
    return well_formed, right


_sandbox = Sandbox("verl_tasks.rewards.math_answer:math_verify_judge", seconds=SECONDS)


def math_verify_judge() -> Callable[[str, str], tuple[bool, bool]]:
    """What the sandbox calls: (answer, truth) to (well formed, right), by math-verify."""
    import logging

    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Basic, Eq, MatrixBase

    logging.disable(logging.CRITICAL)
    # The LaTeX grammar alone: math-verify's other reader evaluates text as Python (sympy.parse_expr).
    reader = [LatexExtractionConfig()]

    def read(text: str):
        text = re.sub(r"\\mathrm\{([A-Za-z])\}", r"\1", text.replace("$", ""))  # e
        found = parse(f"${text}$", reader, parsing_timeout=None)
        return found[0] if found and isinstance(found[0], Basic | MatrixBase) else None

    def is_number(value) -> bool:
        value = value.rhs if isinstance(value, Eq) and value.lhs.is_Symbol else value
        return bool(getattr(value, "is_number", False)) and value.is_finite is not False

    also = {"allow_set_relation_comp": True}  # x > 2 for (2, oo)

    def judge(answer: str, truth: str) -> tuple[bool, bool]:
        given, true = read(answer), read(truth)
        well_formed = given is not None and (not is_number(true) or is_number(given))
        return well_formed, well_formed and true is not None and bool(verify(true, given, timeout_seconds=None, **also))

    judge("\\frac{1}{2}", "\\sqrt{4}")  # loads the grammar
    return judge
