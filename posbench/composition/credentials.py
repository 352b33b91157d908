"""What may leave the machine: plain values without the credentials that may have strayed into them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from posbench.composition.choices import conf_dir

REMOVED = "[removed]"
_NAME = re.compile(r"(^|[_.-])(api_?key|key|token|secret|pass(word|wd|phrase)?|credentials?|auth)$", re.IGNORECASE)
_FORMS = (
    r"(?<=://)[^/\s@]+(?=@)",  # user:password@ of an address
    r"(?<=[?&])[\w-]*(?:token|key|signature|sig|secret|credential)=[^&\s]+",  # a signed address
    r"\bhf_[A-Za-z0-9]{16,}",
    r"\bwandb_v\d_\w{16,}",
    r"\bsk-[\w-]{16,}",
    r"\b(?:gh[a-z]_|github_pat_)\w{16,}",
    r"\bAKIA[A-Z0-9]{12,}",
    r"\beyJ[\w-]{8,}\.[\w.-]{8,}",  # a JSON web token
)
_FORM = re.compile("|".join(_FORMS), re.IGNORECASE)
_SHORTEST = 8  # characters; a shorter value of the environment would blot out ordinary words
# The variables whose values may be written to files. Every other one may hold a secret, whatever it is called.
_PUBLIC = {
    *("HOST", "HOSTNAME", "LANG", "LANGUAGE", "LOGNAME", "USER", "USERNAME"),
    *("DESKTOP_SESSION", "TERM", "TERM_PROGRAM", "XDG_CURRENT_DESKTOP", "XDG_SESSION_DESKTOP"),
    *("CONDA_DEFAULT_ENV", "CONDA_PROMPT_MODIFIER", "PYTEST_CURRENT_TEST", "VIRTUAL_ENV_PROMPT"),
    *("EXPERIMENT", "MAKEFLAGS", "MFLAGS"),  # of make reproduce-table
    *("LSB_JOBID", "LSB_JOBNAME", "PBS_JOBID", "PBS_JOBNAME", "SLURM_ARRAY_JOB_ID", "SLURM_JOBID", "SLURM_JOB_ID"),
    *("SLURM_CLUSTER_NAME", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION", "SLURM_NODELIST"),
    *("WANDB_ENTITY", "WANDB_MODE", "WANDB_PROJECT"),
}
_PUBLIC_FAMILY = "LC_"  # of the language


def scrub(value: Any) -> Any:
    """`value` (dicts, lists, plain values) without text that looks like a credential.

    Taken out: text under a telling name (`api_key`), in a telling form (`hf_...`, `user:password@`), and the value of a
    variable of the environment (`variables_in`). A guard against accidents, not a proof.
    """
    if isinstance(value, Mapping):
        return {key: _scrub_under(str(key), inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(inner) for inner in value]
    return _scrub_text(value) if isinstance(value, str) else value


def has_telling_form(text: str) -> bool:
    """Whether some of it has the form of a credential, such as `hf_...`."""
    return _FORM.search(text) is not None


def variables_in(text: str) -> list[str]:
    """The variables of the environment whose values stand in `text`, and may be secrets.

    Not asked: those of the list above, values of fewer than 8 characters, paths that begin in a folder that exists, and
    what the files of conf/ say too.
    """
    return [
        name
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST
        and value in text
        and name not in _PUBLIC
        and not name.startswith(_PUBLIC_FAMILY)
        and not all(map(_is_path, filter(None, value.split(os.pathsep))))
        and value not in _shipped()
    ]


def _scrub_under(name: str, value: Any) -> Any:
    return REMOVED if isinstance(value, str) and _NAME.search(name) else scrub(value)


def _scrub_text(text: str) -> str:
    for name in variables_in(text):
        text = text.replace(os.environ[name], REMOVED)
    return _FORM.sub(REMOVED, text)


def _is_path(word: str) -> bool:
    """Whether its first part is there: `/scratch/new`, `runs/new`."""
    path = Path(word)
    try:
        return path.parts != ("/",) and Path(*path.parts[: 2 if path.is_absolute() else 1]).exists()
    except (OSError, ValueError):
        return False


@cache
def _shipped() -> str:
    """Everything that the files of conf/ say."""
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(conf_dir().rglob("*.yaml")))
