"""The fabricated experiments of the tests of the analysis."""

from tests.analysis.conftest import _losses_only, analysis, experiment, experiment_copy

__all__ = ["_losses_only", "analysis", "experiment", "experiment_copy"]
