"""The accuracy reward: which responses count as right."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import verify

from gkd.rewards.accuracy import agreement as accuracy
from gkd.rewards.math_equality import MathComparer, _compare

GSM8K = "She sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = 72.\n#### 72"
MATH = "Adding, $x^2 = 9$, so the roots are $\\pm 3$ and the larger is $\\boxed{3}$."

TEXT = [
    ("1 1 2 3", "1 1 2 3", True),
    (" 1 1  2 3\n", "1 1 2 3", True),
    ("1 1 2 4", "1 1 2 3", False),
    ("3", "1 1 2 3", False),
    ("1 1 2", "1 1 2 3", False),
    ("", "1 1 2 3", False),
    ("1 1 2 3 3", "1 1 2 3", False),
    ("2 1 1 3", "1 1 2 3", False),
    ("1123", "1 1 2 3", False),
    ("", "", True),
    ("Paris", "Paris", True),
    ("London", "Paris", False),
    ("there were 3", "they had 3", False),
    ("they had 3", "they had 3", True),
    ("The answer is Paris.", "Paris", True),
    ("The answer is paris", "Paris", True),
    ("The answer is not Paris.", "Paris", False),
    ("The capital of France is Paris", "Paris", False),
    ("Answer: **Paris**", "Paris", True),
    ("\\boxed{\\text{Paris}}", "Paris", True),
    ("\\boxed{Paris}. Wait, the answer is London.", "Paris", False),
    ("Let me think.\n\nParis.", "Paris", True),
    ("<answer>\nParis\n</answer>", "Paris", True),
    ("The answer is St. Louis.", "St. Louis", True),
    ("\\boxed{Tuesdya}", "Tuesday", False),
    ("Answer: True", "True", True),
    ("Answer: False", "True", False),
    ("Answer: yes, because 2 > 1.", "Yes", True),
    ("The answer is ab", "ba", False),
    ("\\boxed{2x+3}", "2y+3", False),
    ("\\boxed{\\text{no solution}}", "no solution", True),
]
AFTER_A_MARKER = [
    ("so it is\n#### 72", GSM8K, True),
    ("#### 72", GSM8K, True),
    ("#### 72.0", GSM8K, True),
    ("#### $72.", GSM8K, True),
    ("#### 72 clips", GSM8K, True),
    ("#### 71\n#### 72", GSM8K, True),
    ("#### 72\n#### 71", GSM8K, False),
    ("72 #### 71", GSM8K, False),
    ("#### ", GSM8K, False),
    ("72 and no marker", GSM8K, True),
    ("first 72 and then 71", GSM8K, False),
    ("it is \\boxed{72} of 100", GSM8K, True),
    ("it is \\boxed{7{2} of 10", GSM8K, False),
    ("no number", GSM8K, False),
    ("#### 1000", "#### 1,000", True),
    ("#### 1,000", "#### 1000", True),
    ("#### -5", "#### 5", False),
    ("#### 5", "#### -5", False),
    ("10-5", "#### -5", False),
    ("### Step 1\n48/2 = 24\n#### Step 2\n48 + 24 = 72", GSM8K, True),
    ("#### 3. Final answer\nIt is 72.", GSM8K, True),
    ("#### 3. Final answer\nIt is 71.", "#### 3", False),
    ("In all she sold 72 clips in April and May.", GSM8K, True),
    ("48 + 24 = 72", GSM8K, True),
    ("The answer is that she sold 72 clips.", GSM8K, True),
    ("The answer is not 72.", GSM8K, False),
    ("The answer is 72 or 71.", GSM8K, False),
    ("The answer is 71, not 72.", GSM8K, False),
    ("The answer is between 71 and 72.", "#### 71", False),
    ("The answer is 72 million.", GSM8K, False),
    ("It is 72 million", GSM8K, False),
    ("The answer is 48 + 24 = 72 clips.", GSM8K, True),
    ("It took 48 cm^2 and then 72 cm^2", GSM8K, True),
    ("the area is 9 x^2", "2", False),
    ("the ratio is 3:4", "4", False),
    ("H2", "2", False),
    ("The answer is $72$ clips.", GSM8K, True),
    ("The answer is \\(72\\) clips.", GSM8K, True),
    ("The answer is $72$ million.", GSM8K, False),
    ("The answer is $72$ or more.", GSM8K, False),
    ("The answer is $71$ clips.", GSM8K, False),
    ("The answer is $72$ is incorrect.", GSM8K, False),
    ("The answer is $\\frac{1}{2}$ less than x.", "\\frac{1}{2}", False),
    ("The answer is $n^2$ divided by two.", "n^2", False),
    ("The answer is $x+1$ if x is even.", "x+1", False),
    ("The answer is $\\frac{1}{2}$ square meters.", "\\frac{1}{2}", True),
    ("The answer is 72€.", GSM8K, True),
    ("The answer is 72€.", "72 dollars", False),
    ("The answer is 71 €.", GSM8K, False),
    ("#### 72\nQuestion: what is 1+1?", GSM8K, True),
    ("Therefore, the final answer is: $\\boxed{72}$. I hope it is correct.", GSM8K, True),
    ("\\boxed{72", GSM8K, False),
    ("<think>it is 72", GSM8K, False),
    ("<think>\\boxed{72}</think>It is 71.", GSM8K, False),
    ("<think>71</think>It is 72.", GSM8K, True),
]
NUMBERS = [
    ("0.5", "1/2", True),
    ("so it is 1/2.", "0.5", True),
    ("$\\frac{1}{2}$", "0.5", True),
    ("so it is \\frac{1}{2}.", "0.5", True),
    ("so it is $\\frac{1}{2}$.", "0.5", True),
    ("so it is \\frac{1}{2}", "2", False),
    ("so it is $\\frac{1}{2}$.", "2", False),
    ("\\boxed{1\\frac{1}{2}}", "1.5", True),
    ("Answer: 1 1/2", "1.5", True),
    ("Answer: 1 1/2", "0.5", False),
    ("So x = \N{MINUS SIGN}5", "-5", True),
    ("So x = \N{MINUS SIGN}5", "5", False),
    ("So 10 \N{MINUS SIGN} 5 is 5", "5", True),
    ("it takes 3 1/2 cups", "3.5", True),
    ("it takes 3 1/2 cups", "1/2", False),
    ("so it is -3 1/2", "-3.5", True),
    ("of these 3, 1/2 remain", "1/2", True),
    ("Answer: 1/0", "1", False),
    ("\\boxed{12}", "1 2", False),
    ("\\boxed{1 2}", "3", False),
    ("\\boxed{1 2}", "12", False),
    ("\\boxed{1\\,000}", "1000", True),
    ("\\boxed{1{,}000}", "1000", True),
    ("\\boxed{10,\\!000}", "10000", True),
    ("1,00", "100", False),
    ("Answer: 50%", "50", True),
    ("Answer: $50\\%$", "50%", True),
    ("\\boxed{0.5}", "50\\%", True),
    ("\\boxed{50}", "50\\%", True),
    ("\\boxed{5}", "50%", False),
    ("Answer: 0.5%", "50%", False),
    ("\\boxed{72 \\text{ cm}}", "72", True),
    ("\\boxed{72}", "72 cm", True),
    ("\\boxed{72 \\text{ m}}", "72 cm", False),
    ("\\boxed{72\\text{ square feet}}", "72 square meters", False),
    ("so it is 72 m", "72 cm", False),
    ("so it is 72 cm.", "72 cm", True),
    ("$72", "72 dollars", True),
    ("Answer: $72", "72 cents", False),
    ("Answer: \\$3 million", "3000000", True),
    ("\\boxed{90^\\circ}", "90", True),
    ("\\boxed{30\\degree}", "30^\\circ", True),
    ("\\boxed{30°}", "30\\degree", True),
    ("\\boxed{31\\degree}", "30", False),
    ("\\boxed{33\\frac13\\%}", "33\\frac{1}{3}", True),
    ("\\boxed{33\\frac{1}{3}\\%}", "\\frac13", True),
    ("\\boxed{33\\frac13\\%}", "33", False),
    ("\\boxed{\\frac{1}{2}3}", "1/23", False),
    ("\\boxed{0.\\overline{3}}", "\\frac13", True),
    ("\\boxed{1/3}", "0.\\overline{3}", True),
    ("\\boxed{-1.2\\overline{45}}", "-137/110", True),
    ("\\boxed{0.3}", "0.\\overline{3}", False),
    ("\\boxed{0.\\overline{12}}", "0.\\overline{21}", False),
    ("\\boxed{1,012.\\overline{3}}", "1,111/9", False),
    ("\\boxed{\\log_2 8}", "3", True),
    ("\\boxed{\\log_2 5}", "\\frac{\\ln 5}{\\ln 2}", True),
    ("\\boxed{\\log_2 5}", "5", False),
    ("\\boxed{72y}", "72", False),
    ("\\boxed{2\\pi}", "2", False),
    ("\\boxed{2pi}", "2", False),
    ("\\boxed{-\\frac{3}{4}}", "-0.75", True),
    ("Answer: 1.5e3", "1500", True),
    ("\\boxed{1.5 \\times 10^3}", "1500", True),
    ("\\boxed{p - q}", "p-q", True),
    ("\\boxed{q - p}", "p-q", False),
    ("\\boxed{\\text{well-known}}", "well known", False),
    ("The answer is so-so.", "so-so", True),
    ("\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", True),
    (
        "\\boxed{\\begin{pmatrix}0.5 & 3\\\\ \\,2 & 4\\end{pmatrix}}",
        "\\begin{pmatrix} \\frac12 & 3 \\\\ 2 & 4 \\end{pmatrix}",
        True,
    ),
    ("\\boxed{\\begin{pmatrix}2\\\\1\\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", False),
    ("\\boxed{25_8}", "25", False),
    ("\\boxed{25_8}", "25_8", True),
    ("\\boxed{0.333}", "1/3", False),
    ("\\boxed{x = 5}", "5", True),
    ("\\boxed{x = 3, y = 5}", "5", False),
    ("\\boxed{5}", "x = 5", True),
    ("the answer is 12", "12", True),
    ("the answer is 13", "12", False),
    ("x", "12", False),
    ("<answer>72</answer>", "72", True),
    ("<answer>72</answer> in 5 steps", "72", True),
    ("<answer>72</answer> or <answer>71</answer>", "72", False),
    ("<answer>7", "7", False),
    ("<answer>She sold 72 clips.</answer>", "72", True),
    ("<answer>It is not 72.</answer>", "72", False),
    ("<answer>71 or 72</answer>", "72", False),
    ("<answer>\\boxed{72}</answer>", "72", True),
    ("72", "<answer>72</answer>", True),
    ("9999999999999999999999", "9999999999999999999998", False),
    ("It cost $5 and then $72.", "72", True),
    ("The answer is 7*2.", "14", True),
    ("Answer: 3 - 10", "-7", True),
    ("\\boxed{72}.\n\nHope this helps!", "72", True),
    ("\\boxed{72} clips\n\n**Check**: 48+24=72, which is 3 more than 69.", "72", True),
    ("**Answer: 72**", "72", True),
    ("**Final Answer:** $\\boxed{72}$", "72", True),
    ("### Final Answer\n72", "72", True),
    ("Final answer: 72 dollars", "72", True),
    ("The total is $72.", "72", True),
    ("Answer: -72", "72", False),
    ("Answer: 0072", "72", True),
    ("Answer: 72.00", "72", True),
    ("Answer: 7.2e1", "72", True),
    ("Answer: ~72", "72", True),
    ("Answer: 72?", "72", True),
    ("Answer: 72!", "72", True),
    ("Answer: 5!", "120", True),
    ("Answer: five", "5", False),
    ("\\boxed{\\frac{72}{1}}", "72", True),
    ("\\boxed{144/2}", "72", True),
    ("\\boxed{\\text{72}}", "72", True),
    ("\\boxed{\\$72}", "72", True),
    ("\\boxed{72\\%}", "0.72", True),
    ("\\boxed{10^{-3}}", "0.001", True),
    ("\\boxed{5 \\text{ or } 6}", "5", False),
    ("\\boxed{1,2,...,100}", "100", False),
    ("Answer: 1, 2, 3, 4, 72", "72", False),
    ("1 2 3 4 5", "5", True),
    ("\\boxed{72,000}", "72", False),
    ("\\boxed{72.000}", "72", True),
    ("\\boxed{72k}", "72", False),
    ("Answer: 72k", "72", False),
    ("Answer: 72 k", "72", False),
    ("#### 72abc", "72", False),
    ("The answer is 72 hundred", "72", False),
    ("#### seventy-two", "72", False),
    ("#### 7 2", "72", False),
    ("#### 72/0", "72", False),
    ("#### 1/72", "72", False),
    ("#### 72%", "72", True),
    ("#### 72/1", "72", True),
    ("#### 72 = 72", "72", True),
    ("#### 71 = 72", "72", True),
    ("Answer: 2 pi", "2", False),
    ("Answer: 2 sqrt(3)", "2", False),
    ("\\boxed{2\\sqrt{3}}", "2", False),
    ("\\boxed{2i}", "2", False),
    ("so 2i", "2", False),
    ("Answer: 2x", "2", False),
    ("Answer: 2 x", "2", False),
    ("so it is 2x", "2", False),
    ("so it is 2\\pi", "2", False),
    ("so it is $2\\pi$.", "2", False),
    ("so it is 2pi", "2", False),
    ("about 2^5", "2", False),
    ("about 2^5", "32", True),
]
CHOICES = [
    ("\\boxed{B}", "B", True),
    ("\\boxed{\\text{B}}", "B", True),
    ("\\boxed{\\textbf{(B)}}", "(B)", True),
    ("The answer is B.", "B", True),
    ("Answer: (B)", "B", True),
    ("Answer: (B)", "(B)", True),
    ("(B)", "B", True),
    ("B", "(B)", True),
    ("**B**", "B", True),
    ("B.", "B", True),
    ("Answer: B) Paris", "B", True),
    ("The answer is B. Paris is a city.", "B", True),
    ("The correct option is (B), because A is wrong.", "B", True),
    ("Option B is correct.", "B", True),
    ("The answer is (C).", "B", False),
    ("Because A is wrong", "B", False),
    ("Boxed", "B", False),
    ("The answer is Because.", "B", False),
    ("The answer is A dog.", "A", False),
    ("The answer is A or B.", "A", False),
    ("Answer: A, B", "A", False),
    ("Answer: (A) and (B)", "A", False),
    ("The answer is not B.", "B", False),
    ("First B, then C.\nAnswer: C", "B", False),
    ("Answer: C\nNo. Answer: B", "B", True),
    ("The answer choices are: (A) 5 (B) 6", "A", False),
    ("Answer: b", "B", True),
    ("\\boxed{X}", "x", False),
    ("Final Answer:\n\n(B)", "B", True),
    ("Reasoning.\n(B)", "B", True),
    ("Answer: (B) Paris", "(B) Paris", True),
    ("Answer: B", "(B) Paris", True),
    ("Answer: Paris", "(B) Paris", True),
    ("Answer: (B) London", "(B) Paris", False),
    ("Answer: (C) Paris", "(B) Paris", False),
    ("(A) is wrong.", "A", False),
    ("Answer: (A) is not the right one", "A", False),
    ("(A) isn't correct", "(A)", False),
    ("(A) is correct", "A", True),
    ("Answer: (A) is a liquid", "A", True),
    ("Answer: A", "a", False),
    ("A: 5, B: 6", "B", False),
    ("I think it's B", "B", False),
    ("The answer is (B) and not (A).", "A", False),
    ("The answer is (B) and not (A).", "B", False),
    ("B is the correct answer.", "B", True),
    ("The correct answer is option B", "B", True),
    ("The correct answer is option (B): Paris", "B", True),
    ("Answer: Option A", "B", False),
    ("Option A is not correct. Option B is correct.", "A", False),
    ("Answer:B", "B", True),
    ("answer is:\n\n**B) Paris**", "B", True),
    ("Answer: I", "I", True),
    ("Answer: I don't know", "I", False),
    ("Answer: A.", "A", True),
    ("Answer: Apple", "A", False),
    ("Answer: A good choice", "A", False),
    ("Answer: e", "E", True),
    ("<answer> (B) </answer>", "B", True),
    ("<answer>B. Paris</answer>", "B", True),
    ("<answer></answer>", "B", False),
    ("<answer>A B C D</answer>", "B", False),
    ("<answer>A</answer><answer>B</answer>", "A", False),
]
LISTS = [
    ("\\boxed{5, 6}", "5, 6", True),
    ("\\boxed{5,6}", "5, 6", True),
    ("Answer: 5 and 6", "5, 6", True),
    ("\\boxed{(5, 6)}", "5, 6", True),
    ("\\boxed{6, 5}", "5, 6", False),
    ("\\boxed{\\{6, 5\\}}", "\\{5, 6\\}", True),
    ("\\boxed{\\{6, 6\\}}", "\\{5, 6\\}", False),
    ("\\boxed{5, 6}", "6", False),
    ("\\boxed{6}", "5, 6", False),
    ("\\boxed{5, 6, 7}", "5, 6", False),
    ("\\boxed{(6,5)}", "(5,6)", False),
    ("\\boxed{[5,6)}", "(5,6)", False),
    ("\\boxed{\\left(\\frac{1}{2}, 3\\right)}", "(0.5, 3)", True),
    ("\\boxed{3,-3}", "\\pm 3", True),
    ("\\boxed{56}", "5, 6", False),
    ("\\boxed{1,234}", "1, 234", False),
    ("\\boxed{(-\\infty, 5]}", "x \\le 5", True),
    ("[1, 2, 3]", "[1, 2, 3]", True),
    ("[1, 3, 2]", "[1, 2, 3]", False),
    ("3 and 5 and 6", "5, 6", False),
    ("The solutions are x = 5 and x = 6, so \\boxed{x=5, x=6}", "5, 6", True),
    ("\\boxed{5 \\text{ and } 6}", "5, 6", True),
    ("\\boxed{5,6,5,6}", "5, 6", False),
    ("\\boxed{\\{5,6,7\\}}", "\\{5,6\\}", False),
    ("\\boxed{2, 1}", "\\{1, 2\\}", True),
    ("\\boxed{2, 1, 1}", "\\{1, 2\\}", False),
    ("\\boxed{-3,3}", "\\pm 3", True),
    ("\\boxed{±3}", "3", False),
    ("\\boxed{\\frac{1\\pm\\sqrt5}{2}}", "\\frac{1-\\sqrt5}{2},\\frac{1+\\sqrt5}{2}", True),
    ("\\boxed{\\frac{1\\pm\\sqrt5}{2}}", "\\frac{1-\\sqrt3}{2},\\frac{1+\\sqrt3}{2}", False),
    ("\\boxed{x=\\pm 3}", "\\pm 3", True),
    ("\\boxed{(1,\\pm2)}", "(1,2),(1,-2)", True),
]
MATHEMATICS = [
    ("so it is \\boxed{\\frac{3}{4}}", "0.75", True),
    ("$x^2-1$", "$(x-1)(x+1)$", True),
    ("2^{1/2}", "\\sqrt{2}", True),
    ("$\\sqrt{3}$", "\\sqrt{2}", False),
    ("\\boxed{3}", MATH, True),
    ("\\boxed{-3}", MATH, False),
    ("so it is 3", MATH, True),
    ("hence $\\sqrt{12}$.", "2\\sqrt{3}", True),
    ("The answer is\n\\[\n2\\sqrt{3}\n\\]", "\\sqrt{12}", True),
    ("\\boxed{\\sqrt{2} \\text{ m}}", "\\sqrt{2} \\text{ cm}", False),
    ("\\boxed{\\sqrt{2} \\text{ cm}}", "\\sqrt{2}", True),
    ("\\boxed{y = 2x + 1}", "y = 1 + 2x", True),
    ("\\boxed{\\dfrac{a}{b}}", "\\frac{b}{a}", False),
    ("The answer is $x^2$, not $x^3$.", "x^3", False),
    ("\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", True),
    ("\\boxed{\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", False),
    ("\\boxed{\\boxed{7}}", "7", True),
    ("\\fbox{7}", "7", True),
    ("\\boxed{72^\\circ}", "72^\\circ", True),
    ("\\boxed{x \\in (0, 1)}", "(0,1)", True),
    ("\\boxed{(0,1) \\cup (2,3)}", "(0,1)\\cup(2,3)", True),
    ("\\boxed{(0,1) \\cup (2,4)}", "(0,1)\\cup(2,3)", False),
    ("\\boxed{\\frac{\\pi}{2}}", "\\pi/2", True),
    ("\\boxed{1.5708}", "\\pi/2", False),
    ("\\boxed{2x+3}", "3+2x", True),
    ("\\boxed{x^2+2x+1}", "(x+1)^2", True),
    ("\\boxed{\\sin x}", "\\sin x", True),
    ("\\boxed{\\cos x}", "\\sin x", False),
    ("\\boxed{12:30}", "12:30", True),
    ("\\boxed{12:30}", "12:45", False),
    ("\\boxed{10:30}", "4:12", False),
    ("\\boxed{10:30 \\text{ a.m.}}", "\\frac{1}{3}", False),
    ("\\boxed{10:30 \\text{ a.m.}}", "10:30\\text{ a.m.}", True),
    ("\\boxed{1:2}", "\\frac{1}{2}", True),
    ("\\boxed{\\emptyset}", "\\emptyset", True),
    ("\\boxed{\\infty}", "-\\infty", False),
    ("\\boxed{-\\infty}", "-\\infty", True),
    ("The answer is $\\frac{3}{4}$ of a cup.", "0.75", True),
    ("The answer is not $\\frac{3}{4}$ cup.", "3/4", False),
    ("The answer is $\\frac{3}{4}$ or $\\frac{1}{4}$ cup.", "1/4", False),
    ("The answer is $2\\sqrt{3}$ square units.", "2\\sqrt{3}", True),
    ("The answer is $2\\pi$ cm.", "2", False),
    ("\\boxed{\\frac{\\pi r^2 h}{3}}", "\\frac{1}{3}\\pi r^2 h", True),
    ("\\boxed{\\frac{1}{3}\\pi r^2}", "\\frac{1}{3}\\pi r^2 h", False),
    ("\\boxed{\\frac{ab}{2}}", "\\frac{1}{2}ab", True),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}ab", False),
    ("\\boxed{2 t}", "2", False),
    ("\\boxed{v_0}", "v_0 t", False),
    ("\\boxed{a^2 + b^2 - 2 a b}", "(a-b)^2", True),
    ("\\boxed{e^{x} + c}", "c + e^x", True),
    ("\\boxed{3\\sqrt{2} cm^2}", "3\\sqrt{2}", True),
    ("\\boxed{3\\sqrt{2}\\text{ mi}/\\text{hr}}", "3\\sqrt{2}", True),
    ("\\boxed{36\\pi}", "36\\pi \\text{ cm}^{3}", True),
]
NEARLY_EQUAL = [
    ("\\boxed{10^{-8}\\pi}", "10^{-9}\\pi", False),
    ("\\boxed{2^{-60}}", "2^{-61}", False),
    ("\\boxed{2^{-60}}", "\\frac{1}{2^{60}}", True),
    ("\\boxed{\\frac{\\pi}{10^{20}}}", "\\frac{\\pi}{10^{21}}", False),
    ("\\boxed{e^{-100}}", "e^{-101}", False),
    ("\\boxed{\\sqrt{2}\\sqrt{3}-\\sqrt{6}}", "0\\pi", True),
    ("\\boxed{2^{2024}}", "2\\cdot2^{2023}", True),
    ("\\boxed{2^{100}\\pi}", "2^{100}\\pi+1", False),
    ("\\boxed{x^2-0.25}", "(x-0.5)(x+0.5)", True),
    ("\\boxed{\\sqrt{x^2}}", "x", False),
    ("\\boxed{9999999!}", "9999999!\\cdot 2", False),
    ("\\boxed{4x+6y=12}", "2x+3y=6", True),
    ("\\boxed{xy=1}", "y=\\frac{1}{x}", True),
    ("\\boxed{x^2+y^2=25}", "x^2+y^2=5", False),
    ("\\boxed{y=2x}", "y=3x", False),
    ("\\boxed{f(x)=2x}", "f(x)=3x", False),
    ("\\boxed{[1,2]\\cup[2,3]}", "[1,3]", True),
    ("\\boxed{(1,2)\\cup(2,3)}", "(1,3)", False),
]
RELATIONS = [
    ("\\boxed{x^{100} = 1}", "1 = x^{100}", True),
    ("\\boxed{y - 1 = x^{60} + x}", "y = x^{60} + x + 1", True),
    ("\\boxed{x^{100} = 1}", "x^{100} = 2", False),
    ("\\boxed{0 \\le x < 1}", "[0,1)", True),
    ("\\boxed{0 \\le x < 1}", "(0,1)", False),
    ("\\boxed{[0,1)}", "0 \\le x < 1", True),
    ("\\boxed{1 \\ge x \\ge 0}", "[0,1]", True),
    ("\\boxed{x > 3}", "(3,\\infty)", True),
    ("\\boxed{x > 3}", "[3,\\infty)", False),
    ("\\boxed{x > 3}", "(-\\infty,3)", False),
    ("\\boxed{x > 3}", "3", False),
    ("\\boxed{x \\neq 2}", "(-\\infty,2)\\cup(2,\\infty)", True),
    ("\\boxed{x \\neq 2}", "\\mathbb{R}\\setminus\\{2\\}", True),
    ("\\boxed{x<1 \\text{ or } x>3}", "(-\\infty,1)\\cup(3,\\infty)", True),
    ("\\boxed{(-\\infty,1)\\cup(3,\\infty)}", "x<1 \\text{ or } x>3", True),
    ("\\boxed{x<1 or x>3}", "(-\\infty,1)\\cup(3,\\infty)", True),
    ("\\boxed{x<1 \\text{ or } x>4}", "(-\\infty,1)\\cup(3,\\infty)", False),
    ("\\boxed{x>3 \\text{ or } x<1}", "x<1 \\text{ or } x>3", True),
    ("\\boxed{x<1 \\text{ or } x>4}", "x<1 \\text{ or } x>3", False),
    ("x = 1 or x = 2", "1, 2", True),
    ("\\boxed{0<y<1}", "0<x<1", False),
    ("Answer: x >= 3", "[3,\\infty)", True),
    ("\\boxed{x <= 3}", "3", False),
    ("\\boxed{x >= 3}", "x \\le 3", False),
    ("\\boxed{x != 3}", "3", False),
]
NOTATION = [
    ("\\boxed5", "5", True),
    ("so $\\boxed 5$; 7 was wrong", "5", True),
    ("so $\\boxed5$; 7 was wrong", "7", False),
    ("\\boxed{4} and then \\boxed5.", "4", False),
    ("\\boxed\\frac{1}{2}", "0.5", True),
    ("\\(\\boxed-5\\)", "-5", True),
    ("\\boxed 1,000.", "1000", True),
    ("It is 5, without \\boxed or a sentence", "5", True),
    ("\\boxed{\\approx 0.33}", "0.33", True),
    ("\\boxed{0.33}", "\\approx 0.33", True),
    ("Answer: ≈ 0.33", "0.33", True),
    ("\\boxed{\\approx 0.33}", "\\frac{1}{3}", False),
    ("\\boxed{\\approx 0.34}", "0.33", False),
    ("\\boxed{\\sqrt{2} \\approx 1.414}", "\\sqrt{2}", True),
    ("\\boxed{\\sqrt{2} \\approx 1.414}", "1.414", True),
    ("\\boxed{\\sqrt{2} \\approx 1.414}", "1.5", False),
    ("\\boxed{13.7 \\approx 14}", "13.7", True),
    ("\\boxed{13.7 \\approx 14}", "14", True),
    ("\\boxed{9\\pi \\approx 28.27 \\approx 28.3}", "28.3", True),
    ("\\boxed{0.333 \\approx 33\\%}", "33%", True),
    ("\\boxed{1 \\approx 2 \\approx 3 \\approx 4}", "3", False),
    ("\\boxed{5 \\approx 6}", "6", False),
    ("\\boxed{5 \\approx 6}", "5", False),
    ("\\boxed{5\\text{ cm} \\approx 6\\text{ cm}}", "5", False),
    ("\\boxed{\\sim p}", "p", False),
    ("\\boxed{\\triangle ABC}", "\\triangle ABC \\sim \\triangle DEF", False),
    ("Answer: 6e23", "6\\times10^{23}", True),
    ("\\boxed{6 \\cdot 10^{23}}", "6e23", True),
    ("\\boxed{6 \\times 10^{22}}", "6e23", False),
    ("Answer: 6.02\N{MULTIPLICATION SIGN}10²³", "6.02e23", True),
    ("so it is 1.5 \\times 10^3 m/s", "1500 m/s", True),
    ("so it is 1.5 x 10^-3", "0.0015", True),
    ("so it is 1.5 x 10^3", "10", False),
    ("\\boxed{1.6\\times10^{-19}}", "9.1\\times10^{-31}", False),
    ("\\boxed{3 \\times 10^8 \\text{ m/s}}", "3e8", True),
    ("\\boxed{3*10^2x}", "300", False),
    ("\\boxed{\\frac\\pi2}", "\\frac{\\pi}{2}", True),
    ("\\boxed{\\frac{a}b}", "a/b", True),
    ("\\boxed{\\sqrt\\frac12}", "\\sqrt{1/2}", True),
    ("\\boxed{\\frac ab}", "\\frac{b}{a}", False),
    ("Answer: pi/2", "\\frac{\\pi}{2}", True),
    ("Answer: 2*pi", "2\\pi", True),
    ("Answer: sqrt(3)/2", "\\frac{\\sqrt{3}}{2}", True),
    ("Answer: x**2", "x^2", True),
    ("Answer: sqrt(9)", "3", True),
    ("\\boxed{√3}", "\\sqrt{3}", True),
    ("\\boxed{2√(12)}", "4\\sqrt{3}", True),
    ("\\boxed{√3}", "3", False),
    ("\\boxed{x²}", "x^2", True),
    ("Answer: 10²³", "10^{23}", True),
    ("\\boxed{2²}", "22", False),
    ("\\boxed{(-∞, 3]}", "(-\\infty,3]", True),
    ("\\boxed{∅}", "\\emptyset", True),
    ("\\boxed{\\varnothing}", "\\emptyset", True),
    ("\\boxed{5 cm²}", "5\\text{ cm}^2", True),
    ("so it is 5 km²", "5 km^{2}", True),
    ("so it is 5 km²", "5 km", False),
    ("\\boxed{101_2}", "101_3", False),
    ("\\boxed{101_{2}}", "101_2", True),
    ("\\boxed{101_{(2)}}", "101_2", True),
    ("\\boxed{101_{\\text{two}}}", "101_{\\text{three}}", False),
    ("\\boxed{\\angle ABC = 60^\\circ}", "60", True),
    ("\\boxed{\\angle ABC = 60^\\circ}", "61", False),
    ("\\boxed{\\textbf{(E)}\\ 27}", "27", True),
    ("Answer: (B) 5", "6", False),
    ("(A) 5 or (B) 6", "5", False),
    ("she makes $9 * 2 = $18 every day", "18", True),
    ("she makes $9 * 2 = $18 every day", "9", False),
    ("The answer is $18/day.", "18", True),
    ("The answer is 18/x.", "18", False),
    ("The answer is 18/xyz.", "18", False),
    ("The answer is 1/sin x.", "1", False),
    ("The answer is $18/dozen.", "18", False),
    ("It is negative 3", "3", False),
    ("It is negative 3", "-3", True),
    ("It is minus 3", "3", False),
    ("It is 5 or 6.", "6", False),
    ("The answer is either 5 or 6.", "6", False),
    ('{"answer": 18}', "18", True),
    ('{"reason": "17 + 1", "final_answer": "18"}', "18", True),
    ('{"wrong_answer": 6, "final_answer": 18}', "18", True),
    ('{"final_answer": 18, "wrong_answer": 6}', "6", False),
    ('```json\n{"answer": "\\\\frac{1}{2}",\n"reason": "2"}\n```', "0.5", True),
    ('{"answer": "18"}\nNo, the answer is 17.', "18", False),
    ('{"answer": 18', "18", True),
    ('{"answer":18,"reason":"17 + 1"}', "18", True),
    ('{"answer": 1/2}', "1", False),
    ('{"answer": 1,000}', "1", False),
    ('{"answer": 10:30}', "10", False),
    ('{"answer": 5 or 6}', "5", False),
    ('{"answer": "\\frac{1}{2}"}', "0.5", True),
    ('{"answer": null} 18', "17", False),
    ('The "answer" is 18.', "18", True),
    ("\\boxed{(\\text{C})}", "C", True),
    ("\\boxed{(\\mathrm {C}) }", "(C)", True),
    ("\\boxed{(\\text{C})}", "B", False),
    ("so she saved 210/350 = 0.60 or 60% of it", "60", True),
    ("that makes 6 * 30 = 180 rings, or 180 years", "180", True),
]
TABLES = [TEXT, AFTER_A_MARKER, NUMBERS, CHOICES, LISTS, MATHEMATICS, NEARLY_EQUAL, RELATIONS, NOTATION]


@pytest.mark.parametrize("cases", TABLES)
def test_accuracy(cases: list[tuple[str, str, bool]]) -> None:
    wrong = [(response, answer) for response, answer, right in cases if accuracy(response, answer) != float(right)]
    assert not wrong


@pytest.mark.parametrize("cases", TABLES)
def test_every_reference_is_right_as_its_own_response(cases: list[tuple[str, str, bool]]) -> None:
    """Also where it is stated in another form than the reference."""
    for answer in {answer for _, answer, _ in cases} - {"", GSM8K, MATH}:
        stated = answer.removeprefix("#### ").removeprefix("<answer>").removesuffix("</answer>")
        for response in (
            f"#### {stated}",
            f"So \\boxed{{{stated}}}.",
            f"<answer>{stated}</answer>",
            f"Answer: {stated}",
        ):
            assert accuracy(response, answer) == 1.0, (response, answer)


@pytest.mark.parametrize(
    "form",
    [
        "\\frac{{{n}+\\sqrt{{{n}}}}}{{7}}",
        "x^{{{n}}}-{n}",
        "y={n}x+\\sqrt{{3}}",
        "x^2+y^2={n}",
        "f(x)={n}x",
        "x \\le {n}",
        "(0,1)\\cup(2,{n})",
        "{n}\\pm\\sqrt{{{n}}}",
        "\\begin{{pmatrix}}1&2\\\\3&\\sqrt{{{n}}}\\end{{pmatrix}}",
    ],
)
def test_answers_of_other_numbers_need_no_proof(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 64 different answers to a question are compared in 2,016 pairs, and a proof takes a tenth of a second."""
    proofs: list[object] = []

    def prove(gold: object, own: object, **settings: object) -> bool:
        proofs.append(gold)
        return verify(gold, own, **settings)

    monkeypatch.setattr("math_verify.verify", prove)
    answers = [form.format(n=n) for n in range(3, 9)]
    assert not any(_compare(own, reference) for own, reference in combinations(answers, 2))
    assert not proofs
    assert _compare(answers[0], form.format(n="3 ")) and len(proofs) == 1


def test_works_off_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(accuracy, "$\\frac{1}{2}$", "0.5").result(60) == 1.0


def test_an_expression_that_would_never_end_is_wrong_and_the_next_one_is_still_compared() -> None:
    comparer = MathComparer(seconds=0.5)
    try:
        assert comparer.are_equal("1/2", "0.5")
        assert not comparer.are_equal("$2^{2^{2^{2^{2^2}}}}$", "3")
        assert comparer.are_equal("1/2", "0.5")
    finally:
        comparer.close()


def test_a_child_that_ended_between_questions_costs_no_answer() -> None:
    comparer = MathComparer()
    try:
        assert comparer.are_equal("1/2", "0.5")
        for _ in range(2):
            assert comparer._child is not None
            comparer._child.kill()
            comparer._child.wait()
            assert comparer.are_equal("1/2", "0.5")
    finally:
        comparer.close()


def test_closing_leaves_no_child() -> None:
    comparer = MathComparer()
    comparer.are_equal("1", "1")
    child = comparer._child
    assert isinstance(child, subprocess.Popen)
    comparer.close()
    assert child.poll() is not None


def test_very_long_responses_are_answered() -> None:
    assert accuracy("9" * 2_000_000, "#### 7") == 0.0
    assert accuracy("\\boxed{" * 300_000, "#### 7") == 0.0
    assert accuracy("(" * 2_000_000, "0.5") == 0.0
    assert accuracy(f"The answer is $5$ {'a' * 15_000}1", "5") == 0.0
    for text in ("\\[ ", "answer is ( (", "<answer>", "1,", "the answer is: the ", "\\frac{1}{", "answer to ", "1/"):
        for answer in ("7", "Paris", "B", "5, 6", "\\sqrt{2}"):
            assert accuracy(text * 10_000, answer) == 0.0


@pytest.mark.parametrize("space", [" ", "\t", "\n"])
def test_a_long_run_of_white_space_in_an_answer_costs_no_time(space: str) -> None:
    began = time.process_time()
    assert accuracy(f"<answer>x{space * 19_000}x</answer>", "5") == 0.0
    assert accuracy(f"\\boxed{{5{space * 19_000}, since 2 + 3 is that}}", "5") == 1.0
    assert time.process_time() - began < 2.0


@settings(max_examples=60)
@given(response=st.text(alphabet=st.characters()), answer=st.text(alphabet=st.characters()))
def test_odd_texts_never_raise(response: str, answer: str) -> None:
    assert accuracy(response, answer) in (0.0, 1.0)
    assert accuracy(response, "#### " + answer) in (0.0, 1.0)
