"""Where a text states its final answer, in whatever form: tags, a box, GSM8K's marker, JSON, a sentence, a number."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from gkd.rewards.quantity import EXPONENT, FRACTION, SYMBOL, UNSIGNED, WIDE, spell_vulgar_fractions

MARKER = "####"  # GSM8K's, before the final answer
TAIL = 20_000  # characters at the end of a text in which its final answer is looked for
MOST_SENTENCES = 20  # of those that state what the answer is, from the end

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)(</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[-+]?[.0-9]|[-+]?\\[a-zA-Z]))")
_GAP = r"(?:[\s$]|\\q?quad\b|\\[()\[\] ])"
_CONJUNCTION = r"(?:\\text\{\s*)?\b(?:and|or)\b(?:\s*\})?"
_BETWEEN_BOXES = re.compile(rf"{_GAP}*(?:[,;]|{_CONJUNCTION})(?:{_GAP}|,|{_CONJUNCTION}|[a-zA-Z](?:_\{{?\w\}}?)?\s*=)*")
"""What stands between boxes of which each has a part of the answer: ``, and y =``."""
MOST_BETWEEN = 80  # characters
_BARE_END = re.compile(r"[.,;:!?]{0,3}(?:[\s$*]|\\[)\]]|\Z)")
_HEADING = re.compile(r"\d+[.)]\s+\D|[^\W\d_]{2,}")  # after "####", with text below: a heading in Markdown
_FIELD = re.compile(
    r'"(?:(?:final|correct|predicted|numeric|short)[_ ])?answer"\s{0,20}:\s{0,20}'
    r'(?:"(?P<text>(?:[^"\\]|\\.)*)"|(?P<number>-?[0-9][0-9.e+-]*)(?=\s*(?:,\s*"|\}|\Z)))',
    re.IGNORECASE | re.DOTALL,
)
_SENTENCE = re.compile(
    r"\b(?!(?<=\")answer\"\s{0,20}:)(?:answer|option|choice)s?\b[*_\"']*(?:\s+(?:to|for|of)\b[^.:\n]{0,80}?)?"
    r"(?:\s*(?::|=|\b(?:is|are)\b|\b(?:should|would|must|will)\s+be\b)[*_]*)+\s*"
    r"|答案(?:应该|应)?[是为选:\uff1a]+[*_]*\s*",
    re.IGNORECASE,
)
# "(B) is correct", "**B** is the best choice"
_CORRECT_CHOICE = re.compile(r"\(?\b([A-J])\b\)?(?:\*\*)?\s+is\s+(?:the\s+)?(?:correct|right|best)\b")
_DISPLAY = {"$$": "$$", "\\[": "\\]"}
_END = re.compile(
    r"[.!?](?=\s|$)|[\u3002\uff01\uff0c\uff1b\uff1f]|,?\s+(?:because|since|which|so|where|as|when|for)\b"
    r"|\s+\((?=[^)]{0,80}[a-z]{2})",
    re.IGNORECASE,
)
_END_IN_BOX = re.compile(
    _END.pattern.replace("[.!?]", r"(?:[.?]|(?:(?<!(?-i:[0-9a-z)}]))|(?<=[^\W\d_]{2}))!)"), _END.flags
)
"""As _END, but for n! and 5!, which are factorials there."""
_FINAL_NUMBER = re.compile(
    rf"(?<![\w.])(?<![0-9]:)(?<![\^_])(?<![\^_]\{{)"
    rf"(?:(?<![\w)\]}}])-)?{SYMBOL}?-?(?:[0-9]+\s(?=[0-9]+\s?/\s?[0-9]))?"
    rf"(?:{UNSIGNED})(?:{EXPONENT})?{FRACTION}(?!:[0-9])(?:\s?\\?%)?"
)
_DENIED = re.compile(
    r"(?:(?:\bnot|n't|\bnever)(?:\s+be)?|\bminus|[a-z]\s+\$?[0-9][0-9.,]*\s+or)\s+\S{0,2}$|(?:不是|并非|或)\s*$"
    r"|\w\s*(?:\\(?:[nlg]eq?|lt|gt)(?![a-zA-Z])|[≠≤≥])\s*$|\w\s+[<>]=?\s+$|\w\s*!=\s*$",
    re.IGNORECASE,
)  # "it is 5 or 6" denies 6, "is 3/5 = 0.6 or 60%" does not; nor is 4 an answer in "x > 4"
_WIDE_SCALE = re.compile(r"\s*[百千万亿]")
_NEGATIVE = re.compile(r"\N{MINUS SIGN}|\bnegative\s+(?=[0-9])", re.IGNORECASE)
_MATH_SPAN = re.compile(
    r"\$\$(.{1,1000}?)\$\$|\\\[(.{1,1000}?)\\\]|\\\((.{1,1000}?)\\\)"
    r"|(?<![\\0-9])\$([^$\n]{1,1000})(?<!\\)\$(?![0-9])",  # what closes a formula stands before no price
    re.DOTALL,
)
_PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}\s+[a-zA-Z]{2,}")


@dataclass(frozen=True, slots=True)
class Statement:
    """An answer and where in the text it is stated; no ``content`` where the text ends before it does.

    ``is_boxed``: it is a formula, which does not end with marks of a sentence's. ``parts``: of several boxes, which are
    a list, or ways to write one answer.
    """

    start: int
    end: int
    content: str
    is_boxed: bool = False
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Numeral:
    """A number as it is written, or the formula that it is part of, and the text after it."""

    text: str
    after: str


def find_stated(text: str, plausible: Callable[[str], bool] = lambda content: True) -> Statement | None:
    """Return the answer that ``text`` states last, without its marker; None for none, "" for an unfinished one.

    The last one counts, whatever its form, and one inside another (a box in a sentence) is taken out of it. A sentence
    ("the answer is ...") counts where what follows is ``plausible``. Of a text that reasons between ``<think>`` and
    ``</think>`` only what follows counts.
    """
    text = cut_reasoning(text)
    statements = [
        s for s in (_tag(text), _box(text), _marker(text), _field(text), _sentence(text, plausible)) if s is not None
    ]
    if not statements:
        return None
    last = max(statements, key=lambda s: (s.end, -s.start))
    inner = find_stated(last.content, plausible)
    return replace(last, content=last.content.strip()) if inner is None else inner


def with_opened_reasoning(prompt: str, response: str) -> str:
    """Return a response with the ``<think>`` that the prompt ends with, as some chat templates write it there.

    Else a response that the limit cut in its reasoning would be all answer.
    """
    return f"<think>{response}" if prompt.rstrip().endswith("<think>") else response


def without_reasoning(text: str) -> str:
    """Return what follows the reasoning between ``<think>`` and ``</think>``; "" where that does not end."""
    _, closing, after = text.rpartition("</think>")
    if closing:
        return after
    return "" if "<think>" in text else text


def cut_reasoning(text: str) -> str:
    """Return what follows the reasoning, as far as it is looked at, with one kind of minus sign."""
    return _NEGATIVE.sub("-", without_reasoning(text)[-TAIL:])


def _tag(text: str) -> Statement | None:
    tags = list(_TAG.finditer(text))
    return Statement(*tags[-1].span(), tags[-1][1] if tags[-1][2] else "") if tags else None


def _box(text: str) -> Statement | None:
    """Return the last box; of several with a comma or "and" between them the list of these."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    last = _read_box(text, boxes[-1])
    start, parts = last.start, [last.content]
    for box in reversed(boxes[:-1]):
        before = _read_box(text, box)
        between = text[before.end : start]
        if not (before.content and last.content and len(between) <= MOST_BETWEEN and _BETWEEN_BOXES.fullmatch(between)):
            break
        start, parts = before.start, [before.content, *parts]
    return last if len(parts) == 1 else Statement(start, last.end, ", ".join(parts), True, tuple(parts))


def _read_box(text: str, box: re.Match[str]) -> Statement:
    """Return a box, without content where it does not end."""
    start, begin = box.span()
    bare = text[begin - 1] != "{"  # \boxed5, and what belongs to it up to a space
    depth = 0 if bare else 1
    for position in range(begin, len(text)):
        if bare and depth == 0 and _BARE_END.match(text, position):
            return Statement(start, position, text[begin:position], is_boxed=True)
        before = text[max(0, position - 9) : position]
        escaped = (len(before) - len(before.rstrip("\\"))) % 2 == 1  # \left\{ needs no \}
        depth += 0 if escaped else {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0 and not bare:
            return Statement(start, position + 1, text[begin:position], is_boxed=True)
    return Statement(start, len(text), text[begin:] if bare and depth == 0 else "", is_boxed=True)


def _marker(text: str) -> Statement | None:
    start = text.rfind(MARKER)
    if start < 0:
        return None
    lines = text[start + len(MARKER) :].strip().splitlines()
    content = lines[0] if lines else ""
    if len(lines) > 1 and _HEADING.match(content):
        return None
    return Statement(start, text.find(content, start) + len(content), content)


def _field(text: str) -> Statement | None:
    """Return the last field ``answer`` of an object in JSON, a text or a number; backslashes may be single ones."""
    fields = list(_FIELD.finditer(text))
    if not fields:
        return None
    content = fields[-1]["number"] or fields[-1]["text"].replace("\\\\", "\\").replace('\\"', '"')
    return Statement(*fields[-1].span(), content)


def _sentence(text: str, plausible: Callable[[str], bool]) -> Statement | None:
    """Return the last sentence that states the answer: the rest of its line, or the displayed formula after it."""
    matches = sorted([*_SENTENCE.finditer(text), *_CORRECT_CHOICE.finditer(text)], key=lambda match: match.end())
    for match in reversed(matches[-MOST_SENTENCES:]):
        if match.re is _CORRECT_CHOICE:
            return Statement(match.start(), match.end(), match[1])
        opening = text[match.end() : match.end() + 2]
        if opening in _DISPLAY:
            closing = text.find(_DISPLAY[opening], match.end() + 2)
            end = len(text) if closing < 0 else closing + 2
        else:
            end = text.find("\n", match.end())
            end = len(text) if end < 0 else end
        content = text[match.end() : end]
        if content.strip() and (plausible(content) or _BOX.search(content)):
            return Statement(match.start(), end, content)
    return None


def readings(stated: Statement) -> list[str]:
    """Return what a stated answer may be meant to be: all of it, or as far as its first sentence or clause."""
    content = " ".join(stated.content.split())  # what ends a clause is searched for from every space of a run of them
    first = (_END_IN_BOX if stated.is_boxed else _END).split(content, maxsplit=1)[0]
    return [content] if first == content or not first.strip() else [content, first]


def last_line(text: str) -> str:
    """Return the last line that is not blank."""
    lines = cut_reasoning(text).strip().splitlines()
    return lines[-1].strip() if lines else ""


def last_formula(text: str) -> str | None:
    """Return the last formula between LaTeX's delimiters."""
    spans = [next(group for group in match.groups() if group) for match in _MATH_SPAN.finditer(cut_reasoning(text))]
    formulas = [span for span in spans if not _PROSE.search(span)]  # two prices also stand between dollar signs
    return formulas[-1] if formulas else None


def last_number(text: str) -> Numeral | None:
    """Return the last number of ``text``; exponents and parts of a ratio are none.

    None where there is none, or where the text denies that it is the answer.
    """
    text = re.sub(f"([{WIDE}]+)", r" \1 ", spell_vulgar_fractions(cut_reasoning(text)))
    text = re.sub(r"(\\[a-zA-Z]+)(?=[0-9])", "\\1\t", text)  # \frac13; a tab, which ends no formula below
    text = re.sub(r"(?<=[0-9])(?:,\\!\s?|\{,\})(?=[0-9])", ",", text)  # 10{,}080
    text = re.sub(r"(?<==)\s?-\s(?=[0-9])", " -", text)  # x = - 5
    numbers = list(_FINAL_NUMBER.finditer(text))
    if not numbers:
        return None
    start, end = numbers[-1].span()
    for match in _MATH_SPAN.finditer(text):
        content = next(group for group in match.groups() if group)
        if match.start() < end and start < match.end() and not _PROSE.search(content):
            denied = _DENIED.search(text[: match.start()][-20:])
            return None if denied else Numeral(content, text[match.end() :])
    if _DENIED.search(text[:start][-20:]) or _WIDE_SCALE.match(text, end):
        return None
    after_command = re.search(r"\\[a-zA-Z]+\t$", text[:start][-20:])
    if after_command or re.match(r"[^\s.,;:!?)\"'*$%]|.?\}", text[end : end + 2]):  # a formula without delimiters
        start = max(text.rfind(space, 0, start) for space in " \n") + 1
        end = min(place for space in " \n" if (place := (text + " \n").find(space, end)) >= 0)
    return Numeral(text[start:end], text[end:])


def find_only_number(text: str) -> Numeral | None:
    """Return :func:`last_number` of prose that holds one number."""
    if "\\" in text or not _PROSE.search(text) or len(_FINAL_NUMBER.findall(text)) != 1:
        return None
    return last_number(text)
