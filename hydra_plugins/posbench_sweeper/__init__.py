"""Where Hydra finds the sweeper of posbench: it takes plug-ins from the namespace package `hydra_plugins` only."""

from posbench.composition.sweep import PosbenchSweeper as _PosbenchSweeper


class PosbenchSweeper(_PosbenchSweeper):
    """`hydra/sweeper: posbench`, the default of conf/config.yaml."""
