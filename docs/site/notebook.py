"""Writes docs/first-ablation.ipynb from docs/first-ablation.md: `python docs/site/notebook.py`.

Commands are cells, and everything between them is text as it is. Three cells are of the notebook alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "first-ablation.md"
INSTALL = """# The address that the README names. A GPU is used where there is one.
REPOSITORY = "URL"
!git clone --quiet $REPOSITORY posbench-code && pip install --quiet ./posbench-code"""
TEXT = """# Here 120 files of Python's own source. Or put a folder of your text in its place.
import shutil, sysconfig
from pathlib import Path

Path("notes").mkdir(exist_ok=True)
for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]:
    shutil.copy(file, f"notes/{file.stem}.txt")"""
PICTURE = """from IPython.display import SVG

SVG("runs/mine/report/gaps.svg")"""


def cells(page: str) -> list[tuple[str, str]]:
    """Kind (`code` or `markdown`) and text of each cell."""
    title, *parts = re.split(r"```sh\n(.*?)```\n", page, flags=re.DOTALL)
    title = re.sub(r"\[The same as a notebook\][^.]*\.ipynb\)[^.]*\.", "", title)
    found = [("markdown", title), ("code", INSTALL), ("code", TEXT)]
    for number, part in enumerate(parts):
        if number % 2:
            found.append(("markdown", part))
        else:
            found.append(("code", re.sub(r"^posbench", "!posbench", part.replace(" --open", ""), flags=re.MULTILINE)))
        if "--open" in part:
            found.append(("code", PICTURE))
    return [(kind, text.strip("\n")) for kind, text in found]


def notebook(page: str) -> str:
    """Return the page as a notebook, JSON."""
    written: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(page)):
        of_code = {"execution_count": None, "outputs": []} if kind == "code" else {}
        lines = text.splitlines(keepends=True)
        written.append({"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines, **of_code})
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    content = {"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(PAGE.read_text("utf-8")), encoding="utf-8")
