"""The tables of measurements in the pages, from the committed CSV files: `make pages`.

A table goes between `<!-- table NAME -->` and `<!-- end -->`; [page.NAME] in its chapter's
study.toml describes it for both languages:

    csv = "compare.csv"         # in assets/
    by = ["changed"]            # a line of the table for each value of these columns
    columns = [                 # heading in English and in Chinese; the cell
      ["last policy", "最後的策略", "{mean_std eval_return .1f}"],
    ]

In a cell, {kind column format} is a figure of the line's rows. `@ column=value` (or !=, <=, >) at
its end takes some of the rows, 100*column is in percent. "{words}" is what the table `words` says
of the line's key.

A table `constants:FILE:CLASS` has the constants of a dataclass, or of several (A+B). Its remarks
are the comments beside or above them; the Chinese ones are written in the page.
"""

import ast
import json
import operator as op
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import scipy.stats

from measure import hosted, lock
from measure.columns import paired, read_csv

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"<!-- table (\S+) -->\n\n(.*?)\n\n<!-- end -->", re.S)
NUMBER = re.compile(r"-?\d+\.?\d*(e[-+]\d+)?")
Rows = Sequence[dict[str, str]]


def shown(value: float, form: str) -> str:
    """A number with a real minus sign."""
    text = f"{value:z{form}}"  # z: zero has no sign
    return "–" if text == "nan" else re.sub("^-", "−", text)


def values(rows: Rows, column: str) -> list[float]:
    """A column's numbers, of the rows that have it; `100*column` in percent."""
    factor, _, name = column.rpartition("*")
    return [float(factor or 1) * float(row[name]) for row in rows if name in row]


def spread(rows: Rows, column: str, form: str) -> str:
    """Mean ± sample standard deviation."""
    numbers = values(rows, column)
    return f"{shown(statistics.mean(numbers), form)} ± {statistics.stdev(numbers):{form}}"


def ends(rows: Rows, column: str, form: str) -> str:
    """Lowest and highest, or the one value that all have; a word where it is no number."""
    if not all(NUMBER.fullmatch(row[column]) for row in rows):
        return " … ".join(sorted({row[column] for row in rows}))
    numbers = values(rows, column)
    texts = [shown(value, form) for value in (min(numbers), max(numbers))]
    return " … ".join(dict.fromkeys(texts))


def comparable(text: str) -> float | str:
    """A number where it is one."""
    return float(text) if NUMBER.fullmatch(text) else text


def matching(rows: Rows, conditions: Sequence[str]) -> Rows:
    """The rows for which all of `column=value` (or !=, <=, >, >=) hold; a row of another table
    lacks it.
    """
    for condition in conditions:
        name, sign, value = re.fullmatch(r"([^!<>=]+)([!<>]?=|>)(.*)", condition).groups()
        holds = {"=": op.eq, "!=": op.ne, "<=": op.le, ">": op.gt, ">=": op.ge}[sign]
        rows = [
            row for row in rows if name in row and holds(comparable(row[name]), comparable(value))
        ]
    return rows


def count(rows: Rows, column: str, wanted: str) -> str:
    """How many rows of all have a value: `=500`, `>=475`, `=True`."""
    return f"{len(matching(rows, [column + wanted]))} / {len(rows)}"


def size(rows: Rows, column: str, _: str) -> str:
    """Bytes, in MB or GB; in GB where the network's weights fill one."""
    [unit, form] = (1e6, "{:.2f} MB") if values(rows, "weights")[0] < 1e9 else (1e9, "{:.1f} GB")
    return form.format(values(rows, column)[0] / unit)


def label(rows: Rows, column: str, _: str) -> str:
    """Constants as code; "unchanged" and nothing as they are."""
    text = rows[0][column]
    return text if text in ("", "unchanged") else f"`{text}`"


KINDS: dict[str, Callable[[Rows, str, str], str]] = {
    "label": label,
    "size": size,
    "text": lambda rows, column, _: rows[0][column],
    "number": lambda rows, column, form: shown(values(rows, column)[0], form),
    "yes": lambda rows, column, _: "yes" if rows[0][column] == "True" else "no",
    "mean": lambda rows, column, form: shown(statistics.mean(values(rows, column)), form),
    "low": lambda rows, column, form: shown(min(values(rows, column)), form),
    "mean_std": spread,
    "range": ends,
    "count": count,
}


def cell(template: str, rows: Rows, words: str, number: str) -> str:
    """A cell's text."""

    def figure(found: re.Match) -> str:
        spec, _, conditions = found[1].partition(" @ ")
        kind, column, form = (*spec.split(), "", "")[:3]
        if kind in ("words", "row"):
            return words if kind == "words" else number
        chosen = matching(rows, conditions.split())
        return KINDS[kind](chosen, column, form) if chosen else "–"

    return re.sub(r"\{([^}]*)\}", figure, template)


def described(folder: Path, page: dict[str, Any], language: int) -> list[list[str]]:
    """Heading and lines of the table of a [page.NAME]; language 0 is English, 1 Chinese."""
    names = [page["csv"]] if isinstance(page["csv"], str) else page["csv"]
    rows = [row for name in names for row in read_csv(folder / "assets" / name)]
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in matching(rows, page.get("where", [])):
        groups.setdefault(tuple(row[name] for name in page["by"]), []).append(row)
    if "rows" in page:
        groups = {(name,): groups[name,] for name in page["rows"]}
    columns = [(c[language], c[3] if language and len(c) > 3 else c[2]) for c in page["columns"]]
    lines = [[heading for heading, _ in columns]]
    pairs = read_csv(folder / "assets" / page["paired"]) if "paired" in page else []
    pairs = {pair["changed"]: pair for pair in pairs if pair["against"] == next(iter(groups))[0]}
    for i, (key, mine) in enumerate(groups.items(), start=1):
        words = page.get("words", {}).get(key[0], ["", ""])[language]
        texts = [template for _, template in columns]
        # the first line is what the others are paired with
        if "paired" in page and key[0] not in pairs:
            texts[-1] = ""
        mine = [row | pairs.get(key[0], {}) for row in mine]
        lines.append([cell(text, mine, words, f"{page.get('number', '')}{i}") for text in texts])
    if language:
        lines = [["從未" if text == "never" else text for text in line] for line in lines]
    if "total" in page:
        lines.append([page["total"][language], *(cell(t, rows, "", "") for t in page["totals"])])
    return lines


# %% Tables that are more than figures by row; study.toml has the headings that are missing here ---
def measured_when(folder: Path, language: int) -> list[list[str]]:
    """When and where each file was measured that's the folder's, or that its book links from
    benchmarks/. From lock.json.
    """
    headings = "file date commit machine minutes state", "檔案 日期 commit 機器 分鐘 狀態"
    lines = [headings[language].split()]
    book = (folder / "MEASUREMENTS.md").read_text()
    for name, entry in lock.read().items():
        own = name.startswith(f"{folder.name}/") or f"(../{name})" in book
        if own and name.endswith((".csv", ".json")):
            state = ("out of date", "已過時") if "stale" in entry else ("current", "最新")
            if checked := "stale" not in entry and entry.get("checked"):
                when = f"{checked['date']}, {checked['commit']}"
                state = f"first row made anew, equal ({when})", f"第一列重做過，相同（{when}）"
                if "short_runs" in checked:  # of the code then and of today's
                    state = (
                        f"code rebuilt, short runs equal ({when})",
                        f"程式重寫過，短跑結果相同（{when}）",
                    )
            minutes = entry["minutes"]
            lines.append(
                [
                    f"[`{Path(name).name}`]({Path(name).relative_to(folder.name, walk_up=True)})",
                    entry["date"],
                    entry["commit"],
                    entry["machine"] or "–",
                    f"{minutes:g}" if minutes is not None else "–",
                    state[language],
                ]
            )
    return lines


def sixty_paired(folder: Path, language: int) -> list[list[str]]:
    """Folder 2: sixty other seeds, each row against the first, seed by seed."""
    rows = [row | {"changed": row["command"]} for row in read_csv(folder / "assets" / "seeds.csv")]
    first, *others = dict.fromkeys(
        row["command"] for row in rows if "EVAL_EPISODES=30" in row["command"]
    )
    lines = []
    for other in others:
        pair = paired(rows, other, first)
        mean, low, high = (shown(pair[name], ".1f") for name in ("mean_difference", "low", "high"))
        lines.append([f"`{other.removeprefix(first).strip()}`", f"{mean} [{low}, {high}]"])
    return lines


def group_sizes(folder: Path, language: int) -> list[list[str]]:
    """Folder 4: rows with other G, and the cosine of one update's gradient with the exact one."""
    compare, gradient = (
        read_csv(folder / "assets" / f"{name}.csv") for name in ("compare", "gradient")
    )
    lines = []
    for size in dict.fromkeys(row["num_generations"] for row in gradient):
        rows = [row for row in compare if row["changed"].startswith(f"NUM_GENERATIONS={size} ")]
        cosine = {
            row["advantage"]: row["cosine"] for row in gradient if row["num_generations"] == size
        }
        lines.append(
            [
                size,
                label(rows, "changed", ""),
                spread(rows, "100*test_accuracy", ".2f"),
                *(KINDS["mean"](rows, name, ".2f") for name in ("zero_variance", "advantage_std")),
                *(
                    f"{float(cosine[n]):.2f}"
                    for n in ("group_std", "group", "batch_mean", "leave_one_out")
                ),
            ]
        )
    return lines


def peers(folder: Path, language: int) -> list[list[str]]:
    """Ours beside other libraries. Seconds are the commands' mean, ± is the sample standard
    deviation.

    The interval is Student's, 95 % for the mean over the seeds: wide for three, and blind to the
    fact that no return exceeds 500. Steps and seconds to the threshold are the median of the seeds
    that reach it.
    """
    name = "dqn" if folder.name.startswith("2") else "ppo"
    rows, lines = pd.read_csv(ROOT / "benchmarks" / f"{name}_against_peers.csv"), []
    for who, own in rows.groupby("who", sort=False):
        mean, std = own.eval_return.mean(), own.eval_return.std()
        half = scipy.stats.t.ppf(0.975, len(own) - 1) * std / len(own) ** 0.5
        times = [own[name].mean() for name in ("seconds", "processor_seconds", "compile_seconds")]
        times = ["-" if pd.isna(value) else f"{value:.1f} s" for value in times]
        reached = own.dropna(subset="env_steps_to_threshold")
        steps = reached.env_steps_to_threshold.median()
        seconds = reached.seconds_to_threshold.median()
        lines.append(
            [
                who,
                f"{own.env_steps.iloc[0]:,}",
                f"{len(own)} {'together' if own.seeds_together.iloc[0] > 1 else 'in turn'}",
                *times,
                f"{shown(mean, '.1f')} ± {std:.1f}",
                f"{shown(mean - half, '.1f')} … {shown(mean + half, '.1f')}",
                f"{len(reached)} / {len(own)}",
                *((f"{steps:,.0f}", f"{seconds:.1f} s") if len(reached) else ("-", "−")),
            ]
        )
    return lines


def methods(folder: Path, language: int) -> list[list[str]]:
    """Folder 5: every method. The CSV file has more columns."""
    import methods as study

    files = [folder / "assets" / f"methods{name}.csv" for name in ("", "_curves")]
    names, *lines = study.table(*map(pd.read_csv, files))
    kept = [
        names.index(name) for name in ("method", "answers graded", "pass@1", "pass@64", "greedy")
    ]
    return [[*(line[i] for i in kept), line[-1]] for line in lines]  # minus its counterpart's


def transcript(folder: Path, language: int) -> list[list[str]]:
    """The front page: eight answers to one question, with their rewards and advantages."""
    group = json.loads((ROOT / "5_GRPO_Maxtext" / "assets" / "eight_answers.json").read_text())
    lines = [(["answer", "reward", "advantage"], ["回答", "獎勵", "優勢"])[language]]
    for answer in group["before"]:
        advantage = f"{answer['advantage']:+.2f}".replace("-", "−")
        lines.append([f"`{answer['text']}`", f"{answer['reward']:.1f}", advantage])
    return lines


def remark_on(node: ast.AnnAssign, source: Sequence[str]) -> str:
    """A constant's comment: behind its value, or else on the lines above it, as tyro reads it."""
    behind = source[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    if behind.strip():
        return behind.strip(" #")
    above: list[str] = []
    for line in reversed(source[: node.lineno - 1]):
        if not line.lstrip().startswith("#") or line.lstrip().startswith("# ---"):
            break
        above.insert(0, line.strip(" #"))
    return " ".join(above)


def constants(source: str, kinds: Sequence[str], old: str, language: int) -> list[list[str]]:
    """The dataclasses `kinds` in a script's source; `old`, the table on the page, has the Chinese
    remarks.
    """
    written = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", old, re.M))
    blocks = [node for node in ast.parse(source).body if getattr(node, "name", "") in kinds]
    nodes = [node for block in blocks for node in block.body if isinstance(node, ast.AnnAssign)]
    source_lines = source.splitlines()
    two = any(isinstance(node.value, ast.Call) for node in nodes)  # pair(small=..., large=...)
    headings = (
        ("constant small large remark", "常數 小模型 大模型 說明"),
        ("constant value remark", "常數 值 說明"),
    )
    lines = [headings[not two][language].split()]
    for node in nodes:
        name, value = node.target.id, node.value
        pair = (
            [word.value for word in value.keywords]
            if isinstance(value, ast.Call)
            else [value] * (1 + two)
        )
        texts = [str(ast.literal_eval(each)).replace("\n", "\\n") or "empty" for each in pair]
        texts = ["in the script" if len(text) > 70 else text for text in texts]
        remark = remark_on(node, source_lines)
        if ast.unparse(node.annotation).startswith("Literal"):
            remark += f"; one of {', '.join(map(str, ast.literal_eval(node.annotation.slice)))}"
        remark = re.sub(r"\S*<\w+>\S*", r"`\g<0>`", remark)  # Markdown would take it for HTML
        lines.append([f"`{name}`", *texts, written.get(name, remark) if language else remark])
    return lines


SPECIAL = {
    f.__name__: f for f in (measured_when, sixty_paired, group_sizes, peers, methods, transcript)
}


# %% Pages -----------------------------------------------------------------------------------------
def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    rule = "|" + "---|" * len(lines[0])
    first, *others = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([first, rule, *others]).replace("|  |", "| |")


def filled(page: Path) -> str:
    """A page's text with every marked table and link as its source has it."""
    folder = ROOT / page.relative_to(ROOT).parts[0]
    pages = (
        tomllib.loads((folder / "study.toml").read_text()).get("page", {})
        if folder.is_dir()
        else {}
    )
    language = int(page.stem.endswith("_ch"))

    def table(found: re.Match) -> str:
        name = found[1]
        if name.startswith("constants:"):
            _, file, kinds = name.split(":")
            lines = constants((folder / file).read_text(), kinds.split("+"), found[2], language)
        elif name in SPECIAL:
            heading = [column[language] for column in pages.get(name, {}).get("columns", [])]
            lines = [*[heading] * bool(heading), *SPECIAL[name](folder, language)]
        else:
            lines = described(folder, pages[name], language)
        return f"<!-- table {name} -->\n\n{markdown(lines)}\n\n<!-- end -->"

    return hosted.filled(MARKED.sub(table, page.read_text()), page, hosted.repository())


def all_pages() -> list[Path]:
    """Every page of the course."""
    places = ("*.md", "[1-9]_*/*.md", "[1-9]_*/docs/*/*.md")
    return sorted(page for place in places for page in ROOT.glob(place))


if __name__ == "__main__":
    sys.path.append(str(ROOT / "benchmarks"))
    for path in all_pages():
        if (text := filled(path)) != path.read_text():
            path.write_text(text)
            print(path.relative_to(ROOT))
