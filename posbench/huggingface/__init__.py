"""Exchange models with Hugging Face's transformers: export ours, score theirs, continue theirs.

`import posbench.huggingface` registers our class with `AutoConfig` and `AutoModelForCausalLM`. Models exported as a
class of transformers itself need no import.
"""

from __future__ import annotations

from posbench.config import ConfigError

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ModuleNotFoundError as error:
    raise ConfigError(
        f"the package {error.name} is not installed: pip install 'posbench[huggingface]' (in a "
        "checkout: pip install -e '.[huggingface]')"
    ) from error

from posbench.huggingface.export import Export, export_model, export_run
from posbench.huggingface.modeling import PosbenchConfig, PosbenchForCausalLM

__all__ = ["Export", "PosbenchConfig", "PosbenchForCausalLM", "export_model", "export_run"]

AutoConfig.register(PosbenchConfig.model_type, PosbenchConfig, exist_ok=True)
AutoModelForCausalLM.register(PosbenchConfig, PosbenchForCausalLM, exist_ok=True)
