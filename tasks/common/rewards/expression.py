"""Answers that are an arithmetic expression: parse and compute them exactly, run nothing."""

import ast
import operator
import re
from collections.abc import Iterator
from fractions import Fraction

from verl_tasks.rewards.answers import in_ascii

__all__ = ["MAX_DIGITS", "as_number", "calculations", "parse_expression"]  # for tasks

MAX_EXPRESSION_CHARS = 200
# A number has up to 9 digits on each side of its point, an expression up to 100 numbers: exact fractions stay small.
MAX_DIGITS = 9

_ALLOWED, _WITH_POINTS = re.compile(r"[0-9+\-*/() ]+"), re.compile(r"(?:[0-9+\-*/() ]|\.(?=[0-9]))+")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_SIGNS = {ast.UAdd: operator.pos, ast.USub: operator.neg}

MOST_STEPS, READ = 20, 2000  # calculations that are looked at, and the last characters of their text
_STEP = re.compile(r"([0-9(][0-9+*/() -]{2,80}?)= ?(\(?-?[0-9]{1,9}(?:/[0-9]{1,9})?\)?)(?![0-9])")


def as_number(value) -> int | float:
    """A number of the ground truth, which an own file may have as a text of digits. Raises ValueError for another."""
    return int(value) if isinstance(value, str) else value


def calculations(text: str) -> Iterator[list[Fraction]]:
    """The numbers of each true calculation at the end of ``text``, its result left out: 3 and 5 of ``3*5=15``."""
    for left, right in _STEP.findall(in_ascii(text[-READ:]))[:MOST_STEPS]:
        made = parse_expression(left) or parse_expression(left.removeprefix("("))  # (3*5=15), and LaTeX's
        said = parse_expression(right.strip("()"), signs_and_points=True)
        if made and said and len(made[1]) > 1 and made[0] == said[0]:
            yield made[1]


def parse_expression(text: str, signs_and_points: bool = False) -> tuple[Fraction, list[Fraction]] | None:
    """Value and numbers of an arithmetic expression over + - * / and parentheses, or None if it is not one.

    With ``signs_and_points`` also -5, -(2 + 3), 0.5 and .5. ``expr = target`` counts as ``expr``. Signs of other
    scripts and LaTeX's count as ASCII's (answers.in_ascii); ``$`` and backticks may stand around. The text is parsed to
    a syntax tree and walked; nothing is evaluated as code, and no float occurs. A division by zero gives None.
    """
    if len(text) > MAX_EXPRESSION_CHARS:
        return None
    text = in_ascii(text).replace("\n", " ").strip("$` ")
    expression, _, right = text.partition("=")
    if right and not re.fullmatch(r"\s*-?[0-9]+\s*", right):
        return None
    expression = expression.strip()
    allowed = _WITH_POINTS if signs_and_points else _ALLOWED
    if not allowed.fullmatch(expression) or re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}|(?<![0-9.])0[0-9]", expression):
        return None
    try:
        tree = ast.parse(expression, mode="eval").body
        if not signs_and_points and any(isinstance(node, ast.UnaryOp) for node in ast.walk(tree)):
            return None
        numbers: list[Fraction] = []
        return _value(tree, expression, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST, text: str, numbers: list[Fraction]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        numbers.append(Fraction(text[node.col_offset : node.end_col_offset]))  # as written: a float is rounded
        return numbers[-1]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = (_value(side, text, numbers) for side in (node.left, node.right))
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.operand, text, numbers))
    raise ValueError(f"{type(node).__name__} is not allowed")
