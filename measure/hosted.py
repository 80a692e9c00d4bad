"""What the pages say of the course on the web: `make pages`, from `repository` in pyproject.toml.

    <!-- hosted -->   links to the site and its playground, up to `<!-- end -->`
    <!-- colab ppo pendulum -->   links that open these two notebooks in Colab, up to the same
    [...](...)<!-- playground room=grid -->   a link to the playground's grid; the mark follows it

While `repository` is empty, there are no such blocks, and the link leads to the section of the
front page that says how to open the playground.
"""

import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- (hosted|colab)([ \w]*) -->\n\n)(?:.*?\n\n)??(?=<!-- end -->)", re.S)
PLAYGROUND = re.compile(r"\]\([^)]*\)(?=<!-- playground (\S+) -->)")
HOSTED = (
    "Read the course as [a site]({site}) with a search, or go to [its playground]({room}).",
    "整門課也有可以搜尋的[網站]({site}zh/)，[互動頁]({room})就在裡面。",
)
OPEN = "▶ Open {file} in Colab", "▶ 在 Colab 打開 {file}"
TRY_IT = "README.md#try-it-right-now", "README_ch.md#現在就玩玩看"


def repository() -> str:
    """Where the course is on GitHub, OWNER/NAME, or nothing."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["course"]["repository"]


def filled(text: str, page: Path, where: str) -> str:
    """The text of a page, with its marked links and blocks for a course at `where`, OWNER/NAME or
    nothing.
    """
    chinese = page.stem.endswith("_ch")
    owner, _, name = where.partition("/")
    site = f"https://{owner}.github.io/{name}/"

    def room(address: str) -> str:
        language = "zh" if chinese else "en"
        return f"{site}5_GRPO_Maxtext/assets/playground.html#{address}&lang={language}"

    def opened(notebook: str) -> str:
        file = f"{notebook}{'_ch' * chinese}.ipynb"
        address = f"https://colab.research.google.com/github/{where}/blob/notebooks/{file}"
        return f"[{OPEN[chinese].format(file=file)}]({address})"

    def block(found: re.Match) -> str:
        mark, kind, notebooks = found.groups()
        if not where:
            return mark
        if kind == "hosted":
            shown = HOSTED[chinese].format(site=site, room=room("room=train"))
        else:
            shown = " · ".join(map(opened, notebooks.split()))
        return f"{mark}{shown}\n\n"

    def link(found: re.Match) -> str:
        here = f"{os.path.relpath(ROOT, page.parent)}/{TRY_IT[chinese]}"
        return f"]({room(found[1]) if where else here})"

    return PLAYGROUND.sub(link, BLOCK.sub(block, text))
