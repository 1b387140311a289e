"""Whether two answers are the same: as text, as choices, as numbers, as lists, or in mathematics."""

from __future__ import annotations

import re
from fractions import Fraction

from gkd.rewards.math_equality import are_math_equal
from gkd.rewards.quantity import (
    LONGEST,
    NO_UNITS,
    PROSE,
    SCALES,
    TIMES,
    Quantity,
    quantity,
    spell_vulgar_fractions,
    units_agree,
)

MOST_UNIT_WORDS = 3
"""After a formula: square feet per hour; more words are no unit but go on with the sentence."""
_LETTER = r"(?:(?i:option|choice|answer)\s+)?[(\[]?(?P<letter>[A-Ja-j])"
_CHOICE = re.compile(
    rf"{_LETTER}(?:[)\].:]+(?P<rest>\s.*|(?=$))|$|\s+(?=\((?![A-J]\))|(?:because|since|as)\b))", re.DOTALL
)
_BOLD = re.compile(r"(?<![^\s(\[])\*\*|\*\*(?![^\s.,:;)\]])")  # and not the power of 2**3
_OTHER_CHOICE = re.compile(r"[(\s][A-J]\)|\b(?:and|or)\s+\(?[A-J]\b")
_REJECTION = re.compile(r"is(?:\s+(?:wrong|incorrect|false)|(?:\s+not|n't)\s+(?:the\s+)?(?:correct|right|best))\b")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([0-9]+)\}\s*\{([0-9]+)\}|([0-9])\s*([0-9]))(?!\s*\.?[0-9])")
_REPEATING = re.compile(r"(?<![0-9,])([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{([0-9]+)\}")
_TEXT_COMMAND = r"\\(?:text|textnormal|textbf|textit|textrm|mathrm|mathbf|mbox)"
_TEXT = re.compile(rf"{_TEXT_COMMAND}\s*\{{([^{{}}]*)\}}")
_UNIT = re.compile(
    rf"(?:(?:(?:\s*/)?\s*{_TEXT.pattern}|(?<=[\s\d}}])(?:cm|mm|km|kg|mg|ml|ft|in|lbs?|oz|mph))(?:\^\{{?[23]\}}?)?)+$"
)
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_NAME = re.compile(r"(?<![\\a-zA-Z])(?![A-Z]+(?![a-zA-Z]))[a-zA-Z]{3,}")  # not the triangle ABC
_BEFORE_UNIT = re.compile(r"(?:\$([^$]+)\$|\\\((.+?)\\\))\s*([a-zA-Z]+)(?![a-zA-Z])([a-zA-Z .-]*(?:\^[23])?)")
FUNCTIONS = frozenset({"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "mod", "gcd", "lcm"})
FUNCTIONS |= {"max", "min", "det", "lim", "inf", "deg", "arcsin", "arccos", "arctan"}
_COMMAND = re.compile(r"\\(?:begin|end)\{[a-zA-Z]+\*?\}|\\[a-zA-Z]+")
_OPERATOR = re.compile(r"[\d\\^+*/=<>]|(?<![a-zA-Z])[a-zA-Z]?\s*-\s*[a-zA-Z](?![a-zA-Z])")  # p - q, and not so-so
_SPACING = re.compile(r"(?P<row>\\\\)|\\[,!;: ]|\\q?quad\b|~|\xa0")
_EN_DASH = re.compile("(?<=[0-9])\\s?\N{EN DASH}\\s?(?=[0-9])")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne)(?:q|qslant)?(?![a-zA-Z])")
_OR = re.compile(r"\bor\b")
_UNICODE = {"∞": "\\infty", "∅": "\\emptyset", "∈": "\\in", "\N{UNION}": "\\cup", "·": "\\cdot", TIMES: "\\times"}
_UNICODE |= {"\N{DEGREE CELSIUS}": "°C", "\N{DEGREE FAHRENHEIT}": "°F"}
_UNICODE |= {"π": "\\pi", "≤": "\\le", "≥": "\\ge", "≠": "\\ne", "≈": "\\approx", "±": "\\pm"}
_ASCII = {"<=": "\\le ", ">=": "\\ge ", "!=": "\\ne "}
_SYMBOLS = str.maketrans({character: f"{command} " for character, command in _UNICODE.items()})
_SUPERSCRIPTS = {ord(character): digit for character, digit in zip("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789", strict=True)}
_POWER = re.compile(r"\^\{(\w)\}(?!\w)")
_POWER_OF_TEN = re.compile(r"\A(?P<sign>[-+]?)10\s?\^\s?\{?(?P<n>-?[0-9]{1,3})\}?\Z")
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?|[a-zA-Z])\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?![a-zA-Z])|°)")
_THOUSANDS = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?=\}|\\[a-zA-Z])")  # \frac{1,000}{3}, 1,000\pi
_SEPARATOR = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_OF_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_ABOUT = re.compile(r"\\(?:approx|simeq)(?![a-zA-Z])")
_CONSTANT = r"(?:\\(?:pi|phi|varphi|gamma|ln|log|sin|cos|tan)|e)(?![a-zA-Z])"
_VARIABLE = re.compile(rf"(?!{_CONSTANT})\\?[a-zA-Z]+(?:_(?:\w|\{{[^{{}}]*\}}))?(?:\s*\([a-zA-Z]\))?")
_PLAIN_ROOT = re.compile(r"(?<![\\a-zA-Z])sqrt\s?\(([^()]*)\)")
_PI = re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])")
_ARGUMENT = r"\s*(\{(?:[^{}]|\{[^{}]*\})*\}|\\[a-zA-Z]+|[0-9a-zA-Z])"
_OPERATORS = "cdot|times|pm|le|ge|lt|gt|ne|cup|right|in|text|mathrm"
_FRACTION_BEFORE = re.compile(
    rf"(?<![\w.)}}\]^/])([0-9]+)/([0-9]+)(?=\s+[\\a-zA-Z(])(?!\s+\\(?:{_OPERATORS})\b)"
)  # 1/2 x is half of x; 1/2x may be 1/(2x)
_ANY_FRACTION = re.compile(rf"(\\sqrt\s*|\^)?\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}")
_JOINED = re.compile(r"\d+(?:\.\d+)?(?:-\d+(?:\.\d+)?)+|\d+(?:/\d+){2,}|\d+(?:[xX]\d+)+")
"""Numerals that are no arithmetic: a range or a score (3-1), a date (1/2/2020), a size (3x4)."""
_COMPOUND = re.compile(r"(?=\D*\d)(?:[A-Z][a-z]?\d*){2,}")
"""A chemical formula, such as Fe2O3."""
_TIME = re.compile(r"\d+:\d\d(?!\d)")
_BASE = re.compile(r"\d\s*_\s*(\{[^{}]*\}|\d+|\S)")
_IN_ANY_ORDER = {"", "{}", "±"}
"""Brackets of answers that are listed in no order: all solutions, a set, both signs."""
_GREEK = ["kappa", "xi", "zeta", "tau", "upsilon", "chi", "psi", "nu", "eta", "iota"]
_LETTERS = re.compile(r"\\(?:text|mathrm|operatorname|mathbb|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+|(?P<letter>[a-zA-Z])")
_BASES = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen"
_NAMED_BASE = re.compile(
    rf"(?<=[0-9a-zA-Z])\s*_\s*(?P<brace>\{{\s*)?(?P<command>{_TEXT_COMMAND}\s*\{{\s*)?(?P<name>{_BASES})(?![a-z])"
    r"\s*(?(command)\}\s*)(?(brace)\})"
)  # 101_{\text{two}}
_WRAPPED = [("__", "__"), ("`", "`"), ('"', '"')]
_WRAPPED += [("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")]


def strip_markup(text: str) -> str:
    """Return ``text`` without what surrounds an answer: Markdown, LaTeX's delimiters and spacing, a full stop."""
    text = re.sub(r"(?<=[0-9])(?:,\\!\s?|\{,\})(?=[0-9])", ",", text)
    text = re.sub(r"(?<=[0-9])\\[,!;: ](?=[0-9])", "", text)
    text = _SPACING.sub(lambda match: match["row"] or " ", text).replace("\N{MINUS SIGN}", "-")
    text = _EN_DASH.sub("-", text)
    text = _POWER.sub(r"^\1", _spell_symbols(text))
    text = _NAMED_BASE.sub(lambda match: f"_{{{_BASES.split('|').index(match['name']) + 2}}}", text)
    text = " ".join(re.sub(r"\\(?:left|right|displaystyle)\b", "", text).split())
    while True:
        before = text
        text = text.strip(" *").rstrip(".;,\u3002\uff0c\uff1b")
        if about := _ABOUT.match(text):
            text = text[about.end() :]
        for opening, closing in _WRAPPED:
            inside = text[len(opening) : len(text) - len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inside and closing not in inside:
                text = inside
        if text == before:
            return text


def _spell_symbols(text: str) -> str:
    """Return ``text`` with LaTeX's commands for relations in ASCII and for symbols and fractions of Unicode."""
    for symbol, command in _ASCII.items():
        text = text.replace(symbol, command)
    text = _PI.sub(r"\\pi ", _PLAIN_ROOT.sub(r"\\sqrt{\1}", text))
    if text.isascii():
        return text
    text = re.sub(r"√\s*(?:([0-9]+)|\(([^()]*)\))", lambda match: f"\\sqrt{{{match[1] or match[2]}}}", text)
    text = spell_vulgar_fractions(text).replace("√", "\\sqrt").translate(_SYMBOLS)
    powers = re.compile(f"[{''.join(map(chr, _SUPERSCRIPTS))}]+")
    return powers.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)


def normalize_text(text: str) -> str:
    """Return :func:`strip_markup` with LaTeX's text commands and escapes undone."""
    plain = _TEXT.sub(lambda match: f" {match[1].strip()} ", strip_markup(text))
    plain = re.sub(r"(?<=[(\[])\s+|\s+(?=[)\]])", "", plain)
    return strip_markup(plain.replace(" ^", "^").replace("\\%", "%").replace("\\$", "$"))


def is_same_answer(response: str, expected: str) -> bool:
    """Return whether two answers, without what marks them, are the same."""
    response, expected = _mark_unit(strip_markup(response)), _mark_unit(strip_markup(expected))
    candidate, reference = normalize_text(response), normalize_text(expected)
    if is_same_text(candidate, reference) or not candidate or max(len(candidate), len(reference)) > LONGEST:
        return is_same_text(candidate, reference)
    options = choice(candidate), choice(reference)
    if options[1] is not None:
        return _is_same_choice(candidate, *options[1])
    if options[0] is not None and options[0][1] and choice(options[0][1]) is None:
        return is_same_answer(options[0][1], expected)
    sides = [_exact_and_rounded(text) for text in (response, expected)]
    if sides != [[response], [expected]]:
        return any(is_same_answer(side, other) for side in sides[0] for other in sides[1])
    return _is_same_mathematics(response, expected, candidate, reference)


def _exact_and_rounded(text: str) -> list[str]:
    r"""Return both ends of ``a \approx b``, of which either counts; nothing of numbers that no rounding makes equal."""
    sides = [side.strip() for side in _ABOUT.split(text) if side.strip()]
    listed = _items(_SEPARATOR.sub("", normalize_text(text)))
    if len(sides) < 2 or (listed is not None and listed[0] != "±"):  # a list's elements are looked at one by one
        return [text]
    if _VARIABLE.fullmatch(sides[0]):  # x \approx 3 states what x is, and no exact value
        return [sides[-1]]
    ends = [sides[0], sides[-1]]
    numbers = [number for side in ends if (number := number_of(normalize_text(side)))]
    values = [number.value / (100 if number.percent else 1) for number in numbers]
    return [] if len(values) == 2 and not (_is_rounded(*values) or _is_rounded(*values[::-1])) else ends


def _is_rounded(value: Fraction, rounded: Fraction) -> bool:
    """Return whether ``rounded`` is ``value`` to the last digit that it has."""
    digit = Fraction(1, 10**12)
    while rounded and rounded % (10 * digit) == 0:
        digit *= 10
    return abs(value - rounded) <= digit / 2


def _is_same_mathematics(response: str, expected: str, candidate: str, reference: str) -> bool:
    """Return whether two answers, and what they are without text commands, are the same number, list or formula."""
    numbers = number_of(candidate), number_of(reference)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0].agrees(numbers[1])
    compounds = find_compound(candidate), find_compound(reference)
    if None not in compounds:
        return compounds[0] == compounds[1]
    lists = _items(candidate), _items(reference)
    if lists[0] is not None and lists[1] is not None:
        return _is_same_list(*lists[0], *lists[1])
    left, equals, right = response.rpartition("=")
    if equals and "=" not in reference and lists[0] is None and not _NAME.search(_TEXT.sub("", left)):
        return is_same_answer(right, expected)
    return _is_same_formula(response, expected)


def number_of(text: str) -> Quantity | None:
    r"""Return the number that ``text`` is, also as LaTeX: ``33\frac13\%`` and ``0.\overline{3}``; None for none."""
    text = _REPEATING.sub(lambda match: _spell_repeating(*match.groups()), _POWER_OF_TEN.sub(r"\g<sign>1e\g<n>", text))
    return quantity(_FRACTION.sub(lambda match: f" {match[1] or match[3]}/{match[2] or match[4]}", text).strip())


def _spell_repeating(whole: str, fixed: str, period: str) -> str:
    """Return a repeating decimal as a fraction."""
    nines = 10 ** len(period) - 1
    return f"{int(whole + fixed or '0') * nines + int(period)}/{nines * 10 ** len(fixed)}"


def is_same_text(candidate: str, reference: str) -> bool:
    """Return whether texts are equal, of words also without regard to capitals."""
    spelt = [re.sub(r"\\(?=(?:pi|sqrt)(?![a-zA-Z]))", "", text).casefold() for text in (candidate, reference)]
    words = all("\\" not in text and re.search(r"[^\W\d_]{2}", text) for text in spelt)
    candidate, reference = (re.sub(r"(?!\s[-+][0-9])\s*([-+=<>])\s*", r"\1", text) for text in (candidate, reference))
    return candidate == reference or (words and spelt[0] == spelt[1])


def choice(text: str) -> tuple[str, str] | None:
    """Return letter and text of a reference that is a choice, such as ``B``, ``(B)`` or ``(B) Paris``, A to J."""
    match = re.fullmatch(r"[(\[]?([A-J])[)\]]?\.?|[(\[]?([A-J])[)\]]\s+(.+)", text, re.DOTALL)
    return match and (match[1] or match[2], match[3] or "")


def _is_same_choice(response: str, letter: str, text: str) -> bool:
    response = _BOLD.sub("", response)  # option **B**, **B)** Paris
    if text and response.casefold() == text.casefold():
        return True
    match = _CHOICE.match(response)
    if match is None or match["letter"].upper() != letter or _OTHER_CHOICE.search(response[match.end("letter") + 1 :]):
        return False
    rest = (match["rest"] or "").strip()
    if _REJECTION.match(rest):
        return False
    return not (text and rest) or rest.casefold() == text.casefold()


def _items(text: str) -> tuple[str, list[str]] | None:
    """Return brackets and elements of a list, ± for the two of a formula with that sign; None for what is none."""
    if quantity(text) is not None or (_RELATION.search(text) and _OR.search(text)):
        return None
    if text.count("\\pm") == 1:
        return "±", [text.replace("\\pm", "+"), text.replace("\\pm", "-")]
    brackets = ""
    match = re.fullmatch(r"(\\\{|[(\[{])(.*?)(\\\}|[)\]}])", text, re.DOTALL)
    if match and not re.search(r"[()\[\]]", match[2]):
        brackets, text = (match[1] + match[3]).replace("\\", ""), match[2]
    text = re.sub(r"\s*,?\s+(?:and|or)\s+", ", ", text)
    items, depth = [""], 0
    for character in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return (brackets, [item.strip() for item in items]) if len(items) > 1 else None


def _is_same_list(own_brackets: str, candidate: list[str], brackets: str, reference: list[str]) -> bool:
    """Return whether lists are equal: in order where they have brackets, or one of them names what it lists.

    That is x = 1, y = 2. Brackets but those of sets count where the reference has them.
    """
    allowed = _IN_ANY_ORDER if brackets in ("{}", "±") else {brackets} if brackets else {"()", "[]", *_IN_ANY_ORDER}
    names = _names(candidate), _names(reference)
    if brackets == "()" and own_brackets == "" and len(names[0]) == len(candidate) and not names[1]:
        own_brackets = "()"  # x = 1, y = 2 is the point (1, 2)
    if len(candidate) != len(reference) or own_brackets not in allowed:
        return False
    both = len(names[0]) == len(names[1]) == len(candidate) == len(reference)  # each under a name of its own
    if own_brackets not in _IN_ANY_ORDER or (not both and any(len(side_names) > 1 for side_names in names)):
        return all(map(is_same_answer, candidate, reference))
    left = list(reference)
    for item in candidate:
        match = next((i for i, other in enumerate(left) if is_same_answer(item, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _names(items: list[str]) -> set[str]:
    """Return the names of what is listed; numbered ones, x_1 and x_2, are one."""
    left = [item.partition("=")[0].strip() for item in items if "=" in item]
    names = [re.sub(r"\s*_\s*\{?\s*([1-9])\s*\}?$", r"_\1", name) for name in left]
    numbered = {name[:-2] for name in names if re.search(r"_[1-9]$", name)}
    in_a_row = len(numbered) == 1 and sorted(name[-1] for name in names) == [str(i + 1) for i in range(len(items))]
    return numbered if in_a_row else set(names)


def is_formula(text: str) -> bool:
    """Return whether math-verify may compare it: no prose, and no numbers side by side, which it would add.

    A subscript is none of these numbers, as in a logarithm's base. A chemical formula is text.
    """
    text = _TEXT.sub(" ", text)
    if find_compound(text) is not None:
        return False
    words = [word for word in _WORD.findall(_COMMAND.sub(" ", text)) if word.lower() not in FUNCTIONS]
    return not words and bool(_OPERATOR.search(text)) and not re.search(r"(?<!_)\d\s+[\d.]", text)


def _is_same_formula(candidate: str, reference: str) -> bool:
    if not (is_formula(candidate) and is_formula(reference)):
        return False
    texts = [" ".join(_TEXT.findall(text)).lower() for text in (candidate, reference)]
    scales = [SCALES.keys() & text.split() for text in texts]
    bases = [
        [base.strip("{()} ") for base in _BASE.findall(_TEXT.sub(lambda match: match[1], text))]
        for text in (candidate, reference)
    ]  # 25 in base 8 is not 25
    times = [_TIME.findall(text) for text in (candidate, reference)]  # 10:30 is no 4:12, as quotients they are equal
    if not units_agree(*texts) or scales[0] != scales[1] or bases[0] != bases[1] or times[0] != times[1]:
        return False
    candidate, reference = _without_unit(candidate), _without_unit(reference)
    if (joined := _find_joined(reference)) is not None:
        return _find_joined(candidate) == joined
    ratios = _find_ratio(candidate), _find_ratio(reference)
    if ratios[0] and ratios[1]:
        return _is_same_ratio(ratios[0], ratios[1])
    candidate, reference = _as_latex(candidate), _as_latex(reference)
    spelt_alike = re.sub("(?<!,) ", "", candidate) == re.sub("(?<!,) ", "", reference)
    return spelt_alike or are_math_equal(*_tell_cases_apart(candidate, reference))


def _tell_cases_apart(*formulas: str) -> list[str]:
    """Return formulas with a Greek letter for every capital beside whose small letter it stands, as in R^2 - r^2.

    To math-verify both are one variable.
    """
    letters = [{match["letter"] for match in _LETTERS.finditer(formula)} - {None} for formula in formulas]
    capitals = sorted({c for alphabet in letters for c in alphabet if c.isupper() and c.lower() in alphabet})
    free = [name for name in _GREEK if not any(name in formula for formula in formulas)]
    names = {capital: f"\\{name} " for capital, name in zip(capitals, free, strict=False)}
    return [_LETTERS.sub(lambda match: names.get(match["letter"], match[0]), formula) for formula in formulas]


def _strip_name(text: str) -> str:
    """Return what stands after ``x =``, without one pair of brackets around it."""
    text = text.rpartition("=")[2].strip()
    inside = re.fullmatch(r"\(([^()]*)\)|\[([^\[\]]*)\]", text)
    return text if inside is None else (inside[1] or inside[2] or "").strip()


def _find_joined(text: str) -> list[Fraction] | None:
    """Return the numerals of a range, a score, a date or a size; None for anything else."""
    plain = _SEPARATOR.sub("", re.sub(r"\\?[$%]", "", _strip_name(text)))
    plain = re.sub(r"\s*(?:([-/x])|\bto\b)\s*", lambda match: match[1] or "-", plain.strip(), flags=re.IGNORECASE)
    numerals = [Fraction(part) for part in re.split(r"[-/xX]", plain)] if _JOINED.fullmatch(plain) else None
    return [Fraction(0), *numerals] if numerals and "x" in plain.lower() else numerals  # 3x1 is no 3-1


def _find_ratio(text: str) -> list[str]:
    """Return the parts of a ratio of three or more; empty for anything else."""
    parts = [part.strip() for part in _strip_name(text).split(":")]
    return parts if len(parts) > 2 and all(parts) else []


def _is_same_ratio(candidate: list[str], reference: list[str]) -> bool:
    """Return whether a : b : c is the other, up to one factor."""
    place = next((i for i, part in enumerate(reference) if part.strip("0.")), 0)  # of one that is not 0
    if len(candidate) != len(reference) or not candidate[place].strip("0."):
        return False
    by = reference[place], candidate[place]
    products = [
        [f"({_as_latex(a)}) \\cdot ({_as_latex(b)})" for a, b in zip(pair, by, strict=True)]
        for pair in zip(candidate, reference, strict=True)
    ]
    return all(are_math_equal(*pair) for pair in products)


def find_compound(text: str) -> list[str] | None:
    """Return the parts of a chemical formula, in which what stands side by side is not multiplied; None for others."""
    plain = "".join(normalize_text(text).split())
    parts = re.findall(r"[A-Z][a-z]?\d*", plain)
    if not _COMPOUND.fullmatch(plain):
        return None
    return sorted(parts) if len({*parts}) == len(parts) else parts  # CH3COOH is no HCOOCH3


def _as_latex(formula: str) -> str:
    """Return a formula with all that math-verify does not read spelt out: ``\\frac\\pi2``, ``pi``, ``x**2``."""
    if _OF_ANGLE.search(formula):
        formula = _DEGREES.sub(r"{(\\frac{\1\\pi}{180})}", formula)
    formula = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), formula)
    formula = _PI.sub(r"\\pi ", formula.replace("**", "^").replace("\\varnothing", "\\emptyset"))
    formula = _FRACTION_BEFORE.sub(r"\\frac{\1}{\2}", formula)
    return _ANY_FRACTION.sub(_brace_fraction, formula)


def _brace_fraction(match: re.Match[str]) -> str:
    parts = [part if part.startswith("{") else f"{{{part}}}" for part in match.groups()[1:]]
    fraction = f"\\frac{parts[0]}{parts[1]}"
    return fraction if match[1] is None else f"{match[1].strip()}{{{fraction}}}"


def _mark_unit(text: str) -> str:
    """Return a formula in delimiters with a unit after them as one formula, the unit a text in it."""
    match = _BEFORE_UNIT.fullmatch(text)
    words = [] if match is None else f"{match[3]}{match[4]}".lower().split()
    if match is None or len(words) > MOST_UNIT_WORDS or not {*words}.isdisjoint(NO_UNITS - {"of"} | PROSE):
        return text
    return f"{match[1] or match[2]}\\text{{ {match[3]}{match[4]}}}"


def _without_unit(formula: str) -> str:
    """Return a formula without the unit after it: a text, or a word that is no product of variables."""
    return _UNIT.sub("", formula).strip() or formula
