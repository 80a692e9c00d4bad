"""Grades one completion: the tags, the number in the answer, the format. Standard library only.

A policy exploits whatever a grader gets wrong, so this one
  * compares exactly: as floats, 18.00000000000000001 would equal 18;
  * doesn't guess: "5 boxes of 12" isn't an answer, although one of its numbers is right;
  * takes linear time in the length of the completion, so 100 kB of commas can't stall the training.
"""

import ast
import functools
import operator
import re
from fractions import Fraction

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")

# characters of an answer; also the most digits int() accepts, since it's quadratic
MAX_LENGTH = 4300
MAX_EQUATION = 200  # characters; longer ones aren't evaluated
# the range of a double; "1e999999999", 11 characters, would be an integer of 400 MB
MAX_EXPONENT = 308

# %% Reading one number ----------------------------------------------------------------------------

_PLAIN = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}  # full-width to ASCII
# minus, hyphen, en dash
_PLAIN |= dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63"), "-")
_PLAIN |= dict.fromkeys(map(ord, "\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"))  # zero width

# thin or no-break, between digits
_DIGIT_SPACE = re.compile(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3})")

_NUMBER = re.compile(
    r"""(?P<sign> ^[-+]\s*+ | [-+] )?                         # "- 5" only at the very start
        (?: (?: [A-Z]{0,2}[$€£¥₹] | USD | EUR | GBP | Rs\.? ) \s? )?
        (?P<value> (?: (?!0)\d{1,3}(?:,\d{3})+(?!\d) | \d+ )  # 1,080 or 1080; of "1,00" only the 1
                   (?: \.\d* )?
                 | (?<![\w.])\.\d+ )                          # .5; in "No.5" the dot is a full stop
        (?: [eE](?P<exponent>[-+]?\d+) )?
        (?: [ ]?/[ ]?(?P<denominator>\d+) )?""",
    re.VERBOSE,
)
_POWER_OF_UNIT = re.compile(r"(?<![A-Za-z])(?:[ckm]?m|ft|in|yd|mi)\^?[23²³](?!\w|[.,/:]\d)")  # m^2
_LATEX = re.compile(
    r"\\(?:(?:text|textbf|mathrm|mathbf|boxed|left|right|quad)(?![A-Za-z])|[,;:!()\[\] ])"
)

# Allowed next to the number: letters of any script, blanks, and these. Not "|", "\pm", "≤", "‰".
_BESIDE = re.compile(r"(?:[^\W\d_]|[\s.,:;'\"“”‘’«»()\[\]{}*_`#$€£¥₹¢%°℃=/?!…。、「」—-])*+")
_OPENING = " \t\n'\"“‘«([{*_`#「$€£¥₹"  # between a sign and its number: "-(5)"
# Of these, the ones that change the number or make it invalid. Before: "x5", "x 5", "-(5)", "/5",
# "more than 5", "point 5". After: "5k", "5 grand", "5!", "5 - tax", "5 and a quarter", "5-ish".
# Either side: "minus five", "a loss of 5", "2 million", "twice 5", "isn't 5", "5 or so", "base 5".
_SPOILT_BEFORE = re.compile(
    r"""(?:[-—/] | != | (?<!['’])\b[b-z]\s* | \bpoint
    | \b(?:than|least|most|over|under|below|above|beyond|times|nearly|almost|barely|hardly)
    | \b(?:down|but|less|subtract|(?:max|min)(?:imum)?(?:\ of)?\.?)
    | \b(?:in\ excess|upwards|short|shy|power|instead)\ of | \bcapped\ at
    | (?<!\badd\ )(?<!\badds\ )\bup\ to
    | \b(?:divided?|multipl(?:y|ied)|reduced|lower|off|short|bounded)\ by
    | \b(?:drop|fall|decrease|decline|reduction)(?:s|d|ped)?\ (?:of|by)
    | \b(?:square|cube|couple|multiple|factor|divisor|fraction|percent|floor|ceiling)s?\ of
    | \b(?:sqrt|cbrt|root|log|logarithm|ln|exp(?:onential)?|sine?|cos(?:ine)?|tan|abs
        |reciprocal|inverse|opposite|integral|derivative)(?:\ of)?
    )\Z""",
    re.I | re.VERBOSE,
)
_SPOILT_AFTER = re.compile(
    r"""\A(?:\s?(?:[kKMGBTxXb]|[bmt]n|mln)\b | \s?[eij]\b | \s?! | -(?![A-Za-z]) | \s+-
    | \s*/(?!\s?[A-Za-z]) | \s*打
    | \s*(?i:grand|gross|score|thou|m(?:il|ill|io|rd)|bil|tril|max|tops|maximum|minimum)\b
    | [\s-]*(?i:odd|ish|something|recurring|repeating|point|bar)\b
    | \s*(?i:below|under|at\ (?:least|most)|to\ the|(?:short|shy)\ of)\b)
    | [=;] | \b(?:and\ (?:an?|one|up|over|above|more|some|something|change|counting))\b""",
    re.VERBOSE,
)
# before a sign: "16 - 9", "x-5"; but "is -5" is a minus
_OPERATION = re.compile(r"(?:[\d)]\s*|\w)\Z")
_SPOILT_WORDS = re.compile(
    r"""\b(?: minus|neg(?:ative)?|plus|absolute|pi|squared|cubed|factorial|per\ ?mill?e?|ppm|bps
    | basis\ points? | mod(?:ulo)? | base(?!s)|hex(?:adecimal)?|octal|binary
    | half|halves|twice|thrice|(?:doubl|tripl|quadrupl|quintupl|halv)(?:ed?|ing)|\w*fold
    | an?\ (?:third|quarter|fifth|tenth)
    | thirds|(?:fif|six|seven|eigh|nin|ten|hundred|thousand|\w*illion)ths
    | (?:third|quarter|fifth|sixth|eighth|tenth|hundredth|thousandth)s?\ of
    | two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen
    | (?:twen|thir|for|fif|six|seven|eigh|nine)ty
    | dozen|hundred(?:weight)?|thousand|googol|lakh|crore|myriad|\w*illion
    | or|nor|not|never|neither|without|except|excluding|unless|cannot|wrong|incorrect|false
    | loss(?:es)?|los[te]|loses|losing|debt|deficit|ow(?:es?|ed|ing)|overdr\w+|shortfall
    | beneath|(?:below|under)\ (?:zero|par|sea)|in\ the\ red
    )s?\b | n['’]t\b | [π負负半倍虧亏損损欠賠赔] | 至少|至多|最多|超過|不到|不是|並非""",
    re.I | re.VERBOSE,
)

_ARITHMETIC = re.compile(r"[\d.+\-*/() ]+")
_SIGNS = {"×": "*", "·": "*", "÷": "/", "$": "", r"\times": "*", r"\cdot": "*", r"\div": "/"}
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


@functools.lru_cache(maxsize=8192)  # several rewards and the log read the same answer
def parse_number(text: str) -> Fraction | None:
    """The exact value of the one number in `text`; None if there's none, or any doubt.

    Reads "1,080", "$18.00", "-$5", "1/2", "1.8E+1", "18 apples", "x = 18", "The answer is 18.",
    "50%" (as 50), and "6 * 3 = 18" (as 18, because it's true). Refuses two numbers, wrong grouping
    ("1,5", "1,00"), a time ("10:30"), "0x12", "2 million", "twice 5", "|-5|", "1/0", unknown signs,
    exponents beyond MAX_EXPONENT, and texts longer than MAX_LENGTH after stripping.
    """
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return None
    text = _LATEX.sub(" ", text.translate(_PLAIN).replace(r"\$", "$").replace(r"\%", "%"))
    text = _DIGIT_SPACE.sub(",", text).strip()
    *sides, last = text.split("=") if len(text) <= MAX_EQUATION else [text]
    values = set(map(arithmetic, sides))
    if values and None not in values:
        value = parse_number(last)
        return value if values == {value} else None
    number = _NUMBER.search(text)
    if number is None:
        return None
    before, after = text[: number.start()], _POWER_OF_UNIT.sub("", text[number.end() :])
    if re.search(r"[A-Za-z_]\Z", before):
        return None
    rest = before + " " + after
    if _SPOILT_BEFORE.search(before.rstrip(_OPENING)) or _SPOILT_AFTER.search(after):
        return None
    # isnumeric() is wider than isdigit(): the ½ of "7½" and the 萬 (10,000) of "2萬" are numbers,
    # too.
    if any(map(str.isnumeric, rest)) or _SPOILT_WORDS.search(rest) or not _BESIDE.fullmatch(rest):
        return None

    exponent, denominator = int(number["exponent"] or 0), int(number["denominator"] or 1)
    if abs(exponent) > MAX_EXPONENT or denominator == 0:
        return None
    value = Fraction(number["value"].replace(",", "")) * Fraction(10) ** exponent / denominator
    return -value if (number["sign"] or "").startswith("-") else value


def arithmetic(text: str) -> Fraction | None:
    """The exact value of a short arithmetic expression, such as "6 * (4 - 1)"; else None."""
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).strip()
    if not _ARITHMETIC.fullmatch(text):
        return None

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp():
                return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
            case ast.UnaryOp():
                return _OPERATIONS[type(node.op)](value(node.operand))
        # not `node.value`: that is a float
        return Fraction(text[node.col_offset : node.end_col_offset])

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, KeyError, ValueError, ZeroDivisionError):  # "6 *", "2 ** 3", "()", "1 / 0"
        return None


# %% Finding and grading the answer ----------------------------------------------------------------


def extract_answer(completion: str) -> str | None:
    """The unstripped text of the last complete <answer>...</answer> in `completion`; None without
    one.

    A second <answer> starts over, so a tag mentioned in prose ("I will use <answer> tags") captures
    nothing.
    """
    # Search from the right, because a lazy regex takes quadratic time on "<answer><answer>...".
    before, _, _ = completion.rpartition("</answer>")
    _, opened, text = before.rpartition("<answer>")
    return text.partition("</answer>")[0] if opened else None


def extract_hash_answer(answer: str) -> str | None:
    """GSM8K's gold answer: the stripped text after a solution's last "####"; None if it isn't a
    number.

    ValueError if there are several, and they differ.
    """
    _, *golds = answer.split("####")
    lines = [gold.strip().partition("\n")[0] for gold in golds]
    # not "#### Step 1", a heading
    numbers = {parse_number(line) for line in lines if not re.search(r"[^\W\d]", line)} - {None}
    if len(numbers) > 1:
        raise ValueError("two right answers: it has several '#### N'")
    return golds[-1].strip() if golds and parse_number(golds[-1]) is not None else None


def is_close(completion: str, gold: str, ratio: float | str) -> bool:
    """Whether the last answer / gold is in [1 - ratio, 1 + ratio].

    0.1 and "0.1" both mean exactly one tenth. False if a number can't be parsed; only 0 is close to
    0.
    """
    guess, target = parse_number(extract_answer(completion) or ""), parse_number(gold)
    if guess is None or target is None:
        return False
    return abs(guess - target) <= Fraction(str(ratio)) * abs(target)  # no division: gold may be 0


def grade(completion: str, gold: str) -> bool:
    """Whether the last tagged answer is exactly the gold number; arguments as in `is_close`."""
    return is_close(completion, gold, 0)


def last_number(completion: str) -> Fraction | None:
    """The last number anywhere in `completion`; None if there's none.

    A minus sign counts unless it's an operation: the last number of "16-9" is 9.
    """
    text = _DIGIT_SPACE.sub(",", completion.translate(_PLAIN))
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    number = last.group()
    if last["sign"] and _OPERATION.search(text[: last.start()]):
        number = number.lstrip("+- ")
    return parse_number(number)


def grade_lenient(completion: str, gold: str) -> bool:
    """Whether `last_number` is exactly the gold number: lm-eval's "flexible-extract" for GSM8K."""
    number = last_number(completion)
    return number is not None and number == parse_number(gold)


def format_ok(completion: str, tags: tuple[str, str, str, str] = TAGS) -> bool:
    """Whether `completion` is one reasoning block and one answer block, neither empty, and nothing
    else.

    Whitespace around the blocks and stop tokens such as <|eot_id|> at the end are allowed.
    """
    if any(completion.count(tag) != 1 for tag in tags):
        return False
    # Each tag is there once, so a lazy group can only stop in one place, in linear time.
    form = r"\s*{}(.*?){}\s*{}(.*?){}\s*(?:<\|\w+\|>\s*)*".format(*tags)
    match = re.fullmatch(form, completion, re.DOTALL)
    return match is not None and all(block.strip() for block in match.groups())
