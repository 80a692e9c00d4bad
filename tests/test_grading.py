"""The number reader refuses what it does not read whole; test_reward_func.py has the lists of cases."""

from fractions import Fraction

import pytest

from task.grading import parse_number

ANOTHER = (  # numbers other than 70, bounds, and several
    *(r"\sqrt{4900}", r"\pm 70", r"\mp70", r"x \leq 70", r"x \ge 70", r"x \neq 70", r"\approx 70"),
    *(r"70^\circ", r"70\pi", r"70\,000", r"7\ 0", r"\log 70", r"\lfloor 70.5 \rfloor", r"\frac{70}"),
    *("70bn", "70 bn", "70mn", "70 mln", "70tn", "70M", "70 G", "70X", "70e", "70 lakh", "70 crore"),
    *("twice 70", "70, twice", "thrice 70", "double 70", "tripled: triple 70", "tenfold 70", "70-fold"),
    *("|-70|", "|70|", "||70", "absolute value of -70", "sqrt(70)", "square root of 70", "cube root of 70"),
    *("log 70", "ln(70)", "sin 70", "exp of 70", "70 and a quarter", "70 and a half", "70 and one third"),
    *("70 apples and a pear", "70 or more", "70 or eighty", "70 and five", "seventy 70", "three 70s"),
    *("70 cubed", "factorial of 70", "half of 70", "70 halves", "70 or two", "nine 70s", "fifteen: 70"),
    *("a third of 70", "two thirds of 70", "one tenth of 70", "70 thirds", "70 hundredths", "a quarter: 70"),
    *("70‰", "70 permille", "70 per mille", "70 per mil", "70 ppm", "70π", "70²", "∛70", "∑70", "70∞"),
    *("at least 70", "at most 70", "more than 70", "less than 70", "over $70", "under 70", "not 70", "≈70"),
    *("~70", ">=70", "x != 70", "x ∈ 70", "&70", "70 & up", "70@", "<b>70</b>", "70′", "n times 70"),
    *("-(70)", "- (70)", "−[70]", "- **70**", "-\"70\"", "70 -", "70 -tax", "70-", "70/", "/70", "70 /"),
    *("負70", "70倍", "半70", "至少70", "不到70個", "—70", "70!", "⌊70⌋", "70\\", "70\\\\"),
)  # fmt: skip
SEVENTY = (
    *("70", " 70. ", "70.0", "+70", "(70)", "[70]", "{70}", "**70**", "`70`", "'70'", "“70”", "«70»"),
    *("$70", "70$", "70 €", "US$70", r"\$70", r"70\$", r"$\$70$", r"\(70\)", r"\[70\]", r"\boxed{70}"),
    *(r"$\boxed{70}$", r"70\%", r"\text{70}", r"70 \text{ apples}", r"\mathbf{70}", r"\left(70\right)"),
    *("70%", "70 percent", "70°", "70 degrees", "70 ℃", "70km", "70 km/h", "$70/hour", "70 m²"),
    *("70 apples", "70 pairs", "70 quarters", "70 times", "70th", "70 more", "70 logs", "70 seconds"),
    *("x = 70", "x=70", "answer: 70", "So: 70 in all!", "Is it 70?", "about 70", "It adds up to 70."),
    *("Tom has 70 more than Ann.", "a well-known 70", "70-year-old", "70 left over", "70 square feet"),
    *(r"70\,\text{m}", r"70\ \text{m}", "70 months", "#### 70", "35 * 2 = 70", "７０"),
    *("答案是70。", "共70個", "第70頁", "「70」"),
)  # fmt: skip


@pytest.mark.parametrize("text", ANOTHER)
def test_what_is_not_read_whole_is_refused(text):
    assert parse_number(text) is None


@pytest.mark.parametrize("text", SEVENTY)
def test_one_number_is_read_with_what_stands_beside_it(text):
    assert parse_number(text) == 70


@pytest.mark.parametrize(
    ("text", "number"),
    [(r"-\$70", -70), (r"\boxed{-70}", -70), ("- $70", -70), ("**-70**", -70), ("(-70)", -70), ("−70 %", -70),
     (r"\$1,080.50", Fraction(2161, 2)), ("3/4 of it", Fraction(3, 4))],
)  # fmt: skip
def test_a_sign_stays_with_its_number(text, number):
    assert parse_number(text) == number
