"""Numbers as answers give them: with separators, fractions, percent signs, currencies and units."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 1000  # characters
CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "₹": "rupee", "¥": "yen"}
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

SYMBOL = f"[{''.join(CURRENCIES)}]"
UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
FRACTION = r"(?:\s?/\s?[0-9]+)?"
TIMES = "\N{MULTIPLICATION SIGN}"
EXPONENT = rf"(?:e|\s?(?:\\times|\\cdot|[{TIMES}·*x])\s?10\s?\^\s?)\{{?[-+]?[0-9]{{1,3}}\}}?"

WIDE = "\u3001-\u30ff\u3400-\u9fff\uac00-\ud7a3\uff01-\uff0f\uff1a-\uff5e"
"""Characters of Chinese, Japanese and Korean, in which no spaces part a number from words, but for their digits."""

NO_UNITS = frozenset({"and", "or", "to", "of", "not", "times", "plus", "minus", "over", "mod", "squared", "cubed"})
NO_UNITS |= {"pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "factorial"}
PROSE = frozenset({"is", "are", "was", "were", "less", "more", "fewer", "greater", "than", "divided", "multiplied"})
PROSE |= {"rounded", "if", "when", "where", "since", "because", "that", "which", "but"}
"""Words with which a sentence goes on after a formula in dollar signs; a unit has none of them."""
_ATTACHED = r"(?:cm|mm|km|kg|mg|ml|ft|in|lbs?|oz|mph|hrs?|mins?|secs?|am|pm|th|st|nd|rd)\b"  # 72cm; 72xy is a product
_APART = r"\s+(?=[a-z]{2}|(?-i:[mgshlLVWNJAC])\b)"
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?)\s?(?P<currency>{SYMBOL}?)\s?(?P<minus>-?)(?:(?P<whole>[0-9]+)\s(?=[0-9]+\s?/))?"
    rf"(?P<value>{UNSIGNED})(?P<exponent>{EXPONENT})?(?P<fraction>{FRACTION})\.?\s*(?P<after>{SYMBOL}?)"
    rf"(?P<percent>%|percent\b|(?:°|\\degree\b|\^\{{?\\circ\}}?)(?:\s*(?P<scale>(?-i:[CFK]))(?![a-z]))?)?"
    rf"(?P<unit>(?:(?={_ATTACHED})|{_APART}|(?=/[a-z]{{3}}))[a-z/][a-z .'/-]*(?:\^\{{?[23]\}}?)?"
    rf"|(?![百千万亿])[{WIDE}]{{1,6}})?",
    re.IGNORECASE,
)
_VULGAR = {c: unicodedata.normalize("NFKC", c).split("\N{FRACTION SLASH}") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"}
_VULGAR_FRACTION = re.compile(rf"(?:(?<=[0-9])\s)?([{''.join(_VULGAR)}])")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number, exactly, whether a percent sign follows it, and its unit in words or ""."""

    value: Fraction
    percent: bool
    unit: str

    def agrees(self, expected: Quantity) -> bool:
        """Return whether numbers are equal, where the units agree; 50% is 50 as well as 0.5."""
        if not units_agree(self.unit, expected.unit):
            return False
        if self.percent == expected.percent:
            return self.value == expected.value
        part = self.value / 100 if self.percent else self.value * 100
        return expected.value in (self.value, part)


def spell_vulgar_fractions(text: str) -> str:
    """Return ``text`` with characters such as ½ in LaTeX: ``3½`` and ``3 ½`` become ``3\\frac{1}{2}``."""
    if text.isascii():
        return text
    return _VULGAR_FRACTION.sub(lambda match: "\\frac{{{}}}{{{}}}".format(*_VULGAR[match[1]]), text)


def quantity(text: str) -> Quantity | None:
    """Return what ``text`` is as a whole: ``$1,000.00``, ``1 1/2``, ``50%``, ``3 million km``; None for no number."""
    match = _QUANTITY.fullmatch(text) if len(text) <= LONGEST else None
    words = " ".join(filter(None, match.group("scale", "unit"))).lower().replace(".", " ").split() if match else []
    if match is None or (words and words[0] in NO_UNITS) or (match["after"] and not PROSE.isdisjoint(words)):
        return None
    if words and words[0].startswith("/") and (not match["currency"] or words[0][1:] in {*NO_UNITS, *SCALES}):
        return None  # $18/day is a price, 18/xyz a quotient
    exponent = re.findall(r"[-+]?[0-9]+", match["exponent"] or "0")[-1]
    value = Fraction(f"{match['value'].replace(',', '')}e{exponent}")
    if match["fraction"]:
        if (divisor := int(match["fraction"].strip(" /"))) == 0:
            return None
        value = value / divisor + int(match["whole"] or 0)
    for word in [word for word in words[:2] if word in SCALES]:
        value *= SCALES[word]
        words.remove(word)
    if symbol := match["currency"] or match["after"]:
        words = [CURRENCIES[symbol], *words]
    sign = -1 if (match["sign"] == "-") != bool(match["minus"]) else 1
    return Quantity(sign * value, match["percent"] in ("%", "percent"), " ".join(words))


def units_agree(candidate: str, expected: str) -> bool:
    """Return whether one of two units is missing, or is how the other begins: "clips" and "clips in total"."""
    parts = [[word.rstrip("s") for word in unit.split()] for unit in (candidate, expected)]
    return all(a == b for a, b in zip(*parts, strict=False))
