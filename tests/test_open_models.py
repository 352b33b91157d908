"""The list of open models: each twelfth family, those of each kind, and one that is not read, are checked again."""

from pathlib import Path

import generated
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PAGE = Path(__file__).parents[1] / "docs" / "lists" / "open-models.md"
KINDS = (
    "gemma4_text",
    "gpt_oss",
    "lfm2",
    "llama4_text",
    "deepseek_v3",
    "ministral3",
    "recurrent_gemma",
    "beam",
    "bert",
)


@pytest.mark.slow
def test_the_list_of_open_models_is_what_posbench_positions_says():
    page = PAGE.read_text(encoding="utf-8")
    families = (*KINDS, *sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[::12])
    read, failed = generated.open_models.census(tuple(dict.fromkeys(families)))
    for family, (answer, source) in read.items():
        cells = generated.open_models.row(family, answer, source)
        shown = cells if cells[1] else [cells[0], *cells[2:4], cells[-1]]
        assert "| " + " | ".join(shown) + " |" in page, "python docs/site/generated.py"
    assert all(f"| `{family}` | " in page for family in failed) and "beam" in failed
    assert "bert" not in {*read, *failed} and "`bert`" not in page
    listed = [line for line in page.splitlines() if line.startswith("| `")]
    assert f"Of {len(listed)} families" in page
