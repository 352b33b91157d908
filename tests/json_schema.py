"""Check what `--json` prints with docs/loops.schema.json, by the part of JSON Schema that it uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DEFINITIONS = json.loads((Path(__file__).parents[1] / "docs/loops.schema.json").read_text(encoding="utf-8"))["$defs"]
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def faults(value: Any, schema: Any, place: str = "") -> list[str]:
    """Return a line per fault of JSON data. Arguments: schema, a schema or the name of a definition."""
    if isinstance(schema, str):
        schema = DEFINITIONS[schema]
    if "$ref" in schema:
        return faults(value, schema["$ref"].rpartition("/")[2], place)
    if "anyOf" in schema:
        choices = [faults(value, choice, place) for choice in schema["anyOf"]]
        return [] if [] in choices else choices[0]
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{place}: {value!r} is not one of {schema['enum']}"]
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not any(isinstance(value, TYPES[name]) and isinstance(value, bool) == (name == "boolean") for name in types):
        return [f"{place}: {value!r} is not of type {types}"]
    if isinstance(value, list):
        return [fault for n, item in enumerate(value) for fault in faults(item, schema["items"], f"{place}[{n}]")]
    if not isinstance(value, dict):
        return []
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    lines = [f"{place}: {name} is missing" for name in schema.get("required", ()) if name not in value]
    lines += [f"{place}: {name} is unknown" for name in value if name not in properties and not others]
    for name, item in value.items():
        lines += (
            faults(item, properties.get(name, others or {}), f"{place}.{name}") if name in properties or others else []
        )
    return lines
