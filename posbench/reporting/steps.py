"""Show a chain of schemes with one change a step (`posbench report --chain a,b,c`): what each step does to the loss."""

from __future__ import annotations

from collections.abc import Sequence

from posbench.analysis.comparison import Comparison
from posbench.analysis.statistics import steps
from posbench.config import ConfigError
from posbench.evaluation.protocols.section import Format, Section, Table, half


def steps_section(c: Comparison, chain: Sequence[str]) -> list[Section]:
    """Return the section of a chain, or [] without one. Raises: ConfigError for a scheme without a finished run."""
    if not chain:
        return []
    if missing := [scheme for scheme in chain if scheme not in c.losses]:
        raise ConfigError(f"--chain {missing[0]} has no finished run here: choose of {', '.join(map(str, c.losses))}")
    # One scheme has no step, and a scheme that comes twice would make a step of 0.
    if len(set(chain)) < max(2, len(chain)):
        raise ConfigError(
            f"--chain {','.join(chain)}: give two schemes or more, each once, such as nope,k_rope,qk_rope"
        )
    changes = steps(c.losses[list(chain)])
    frame = changes[["left", "right", "seeds", "change", "p"]].rename(columns={"left": "from", "right": "to"})
    table = Table(frame, {"p": Format("p")})
    table.add("change", changes["change"], half(changes, "change"), sign=True)
    note = (
        "Change: the loss of the second scheme minus the first's, mean over the seeds that the whole chain has, ± half "
        "the 95 % interval. The last row is the sum of the steps. p: paired t-test at these rates, with Holm's "
        "correction over the steps."
    )
    return [Section("Step by step", table=table, note=note, files={"steps.csv": changes})]
