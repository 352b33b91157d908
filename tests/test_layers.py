"""The house: rooms in tiers. An import runs down or sideways, never up, and files import each other in no circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import posbench

PACKAGE = Path(posbench.__file__).parent
TIERS = (
    "__main__",
    "cli",
    "api",
    "plan bench tune listing sweep_table",
    "reporting training",
    "table",
    "evaluation huggingface sampling",
    "tracking verify",
    "runs",
    "size",
    "model",
    "layers",
    "attention cross_entropy reference",
    "sweep",
    "composition",
    "schemes",
    "data machine scheme_file",
    "config console",
    "schedule units",
    "__init__",
    "version",
)
TIER_OF = {room: tier for tier, rooms in enumerate(TIERS) for room in rooms.split()}
MODULES = {
    "posbench." + ".".join(file.relative_to(PACKAGE).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")
}
MODULES = {name.removesuffix(".__init__") if name.count(".") > 1 else name: file for name, file in MODULES.items()}


def imports(name):
    """The modules that one imports, inside functions too; not those that are for the type checker alone."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for test in [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]:
        test.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from {n for alias in node.names if (n := f"{node.module}.{alias.name}") in MODULES} or {node.module}
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


ARROWS = {name: {to for to in imports(name) if to in MODULES and to != name} for name in MODULES}


def tier(name):
    return TIER_OF[name.split(".")[1]]


def test_no_import_runs_up():
    assert [f"{name} -> {to}" for name, targets in ARROWS.items() for to in targets if tier(to) < tier(name)] == []


def test_no_files_import_each_other_in_a_circle():
    list(TopologicalSorter(ARROWS).static_order())  # raises CycleError, which names the files


def test_the_list_of_rooms_is_whole():
    assert {name.split(".")[1] for name in MODULES} == set(TIER_OF)
