"""Check what `--json` prints with docs/loops.schema.json."""

import json
from pathlib import Path

from jsonschema import Draft202012Validator

SCHEMA = json.loads((Path(__file__).parents[1] / "docs/loops.schema.json").read_text(encoding="utf-8"))
DEFINITIONS = SCHEMA["$defs"]


def faults(value, name):
    """Return a line per fault of JSON data. Arguments: name, of the definition that the data must follow."""
    validator = Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": DEFINITIONS})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]
