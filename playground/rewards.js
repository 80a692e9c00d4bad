// The four reward functions of 5_GRPO_Maxtext/reward_func.py, for what the tiny Llama's 76 tokens can write.
//
// A number is read as task/grading.py reads it, as an exact fraction. That file's signs, units and
// words beyond the 76 tokens (currencies, LaTeX, exponents, "half", "dozen") are left out; a test compares both
// on random texts of these tokens.

export const TAGS = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"];
export const POINTS = {
  format: 3, tag: 0.5, right: 3, whitespace: 1.5, close: 0.5, near: 0.25, wrong: -1, number: 1.5, token: 0,
};

const NUMBER = /(^[-+]\s*|[-+])?((?:(?!0)\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|(?<![\w.])\.\d+)/;
const BESIDE = /^(?:[A-Za-z]|[\s.,=?*-])*$/; // not +
const OPENING = /[ *]+$/; // between a sign and its number
const INCHES = /(?<![A-Za-z])in[23](?!\w|[.,]\d)/g; // " in" and "2" are tokens, and in2 is a unit
const SPOILT_AFTER = /^(?:-(?![A-Za-z])|\s+-)|=/;

/** The exact value of a decimal numeral, { n, d }: n / d, BigInt. */
function fraction(numeral) {
  const [whole, decimals = ""] = numeral.split(".");
  return { n: BigInt(whole + decimals || "0"), d: 10n ** BigInt(decimals.length) };
}
const equal = (a, b) => a.n * b.d === b.n * a.d;

/** The value of a short sum or product of plain numbers, as Python would read it; null if it is none. */
export function arithmetic(text) {
  text = text.replace(/(?<=\d),(?=\d{3}(?!\d))/g, "").trim();
  if (!/^[\d.+\-* ]+$/.test(text)) return null;
  const parts = text.match(/(?:\d+\.?\d*|\.\d+)|[+\-*]/g);
  if (!parts || parts.join("") !== text.replaceAll(" ", "")) return null; // a dot without a digit
  let at = 0;
  const number = () => {
    const part = parts[at++];
    if (part === "-" || part === "+") {
      const value = number();
      return value && (part === "-" ? { n: -value.n, d: value.d } : value);
    }
    if (part === undefined || part === "*") return null;
    if (/^0\d*[1-9]\d*$/.test(part)) return null; // Python refuses 08
    return fraction(part);
  };
  const product = () => {
    let value = number();
    while (value && parts[at] === "*") {
      at++;
      const next = number();
      value = next && { n: value.n * next.n, d: value.d * next.d };
    }
    return value;
  };
  let value = product();
  while (value && (parts[at] === "+" || parts[at] === "-")) {
    const sign = parts[at++] === "-" ? -1n : 1n, next = product();
    value = next && { n: value.n * next.d + sign * next.n * value.d, d: value.d * next.d };
  }
  return at === parts.length ? value : null;
}

/** The exact value of the one number in `text`, or null where there is any doubt. */
export function parseNumber(text) {
  text = text.trim();
  const sides = text.split("="), last = sides.pop(), values = sides.map(arithmetic);
  if (values.length && values.every(Boolean) && text.length <= 200) {
    const value = parseNumber(last);
    return value && values.every((side) => equal(side, value)) ? value : null;
  }
  const found = NUMBER.exec(text);
  if (!found) return null;
  const before = text.slice(0, found.index), after = text.slice(found.index + found[0].length).replace(INCHES, "");
  if (/[A-Za-z]$/.test(before) || /-$/.test(before.replace(OPENING, "")) || SPOILT_AFTER.test(after)) return null;
  const rest = `${before} ${after}`;
  if (/\d/.test(rest) || /\b(?:twice|loses)\b/.test(rest) || !BESIDE.test(rest)) return null;
  const value = fraction(found[2].replaceAll(",", ""));
  return (found[1] || "").startsWith("-") ? { n: -value.n, d: value.d } : value;
}

/** The text of the last complete answer pair; null without one. */
export function extractAnswer(completion) {
  const end = completion.lastIndexOf("</answer>");
  const start = end < 0 ? -1 : completion.lastIndexOf("<answer>", end - "<answer>".length);
  return start < 0 ? null : completion.slice(start + "<answer>".length, end).split("</answer>")[0];
}

/** Whether the answer lies within percent / 100 of the gold number, both ends included. */
export function isClose(completion, gold, percent) {
  const guess = parseNumber(extractAnswer(completion) ?? ""), target = parseNumber(gold);
  if (!guess || !target) return false;
  const off = guess.n * target.d - target.n * guess.d; // over guess.d * target.d
  const size = (x) => (x < 0n ? -x : x);
  return size(off) * 100n <= BigInt(percent) * size(target.n) * guess.d;
}
export const isRight = (completion, gold) => isClose(completion, gold, 0);

const times = (text, part) => text.split(part).length - 1;
const FORM = /^\s*<reasoning>(.*?)<\/reasoning>\s*<answer>(.*?)<\/answer>\s*$/s;

export function formatOk(completion) {
  if (TAGS.some((tag) => times(completion, tag) !== 1)) return false;
  const form = FORM.exec(completion);
  return form !== null && form[1].trim() !== "" && form[2].trim() !== "";
}

/** Points by each reward function; `points` as POINTS, `tokens` the answer's length. */
export function reward(completion, gold, points, tokens) {
  const answer = extractAnswer(completion), right = isRight(completion, gold);
  let check = points.wrong;
  if (answer === null) check = 0;
  else if (right) check = answer !== gold && answer.trim() === gold.trim() ? points.whitespace : points.right;
  else if (isClose(completion, gold, 10)) check = points.close;
  else if (isClose(completion, gold, 20)) check = points.near;
  return {
    match_format_exactly: formatOk(completion) ? points.format : 0,
    match_format_approximately: TAGS.reduce((sum, tag) => sum + (times(completion, tag) === 1 ? 1 : -1), 0) * points.tag,
    check_answer: check,
    check_numbers: right ? points.number : 0,
    ...(points.token ? { length: points.token * tokens } : {}),
  };
}
export const total = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);

/**
 * What an answer got right, whatever points are paid: "right", "untagged" (the number is right, the form isn't),
 * "wrong" or "none" (no number at all).
 */
export function judged(completion, gold) {
  if (isRight(completion, gold)) return formatOk(completion) ? "right" : "untagged";
  const answer = extractAnswer(completion) ?? completion.replace(/<[^>]*>/g, " ").match(/-?\d[\d,]*(?:\.\d+)?/g)?.at(-1) ?? "";
  if (!/\d/.test(answer)) return "none";
  return isClose(`<answer>${answer}</answer>`, gold, 0) ? "untagged" : "wrong";
}
