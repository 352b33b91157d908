"""The house: rooms in tiers, the upper first. An import runs down or sideways, never up."""

import ast
from pathlib import Path

import posbench

TIERS = """__main__ | cli | api | plan bench tune listing | reporting training | table | evaluation huggingface sampling
| tracking verify | sweep | composition | runs | size | model | layers | attention cross_entropy reference | schemes
| choices | data machine scheme_file | config console products | units | __init__ | version"""
TIER_OF = {room: number for number, tier in enumerate(TIERS.split("|")) for room in tier.split()}


def test_no_import_runs_up():
    folder = Path(posbench.__file__).parent
    for file in folder.rglob("*.py"):
        tier = TIER_OF[file.relative_to(folder).parts[0].removesuffix(".py")]  # KeyError: a room that is not listed
        tree = ast.parse(file.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]  # `if TYPE_CHECKING`
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "posbench":
                rooms = node.module.split(".")[1:2] or [name.name for name in node.names]
                assert min(TIER_OF[room] for room in rooms) >= tier, f"{file}, line {node.lineno}"
