"""Runs killed by SIGKILL at any moment, given the same command again, and compared byte by byte with whole ones."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posbench.composition import choices, compose
from posbench.config import Config
from posbench.runs import Run, run_folder
from tests.conftest import small_run, write_documents
from tests.faults.children import LOG, Moments, import_all, in_child


@dataclass
class Whole:
    """A case run without interruption: what the others are compared with."""

    config: Config
    digest: dict[str, Any]
    moments: list[str]
    seconds: float


@dataclass
class Kills:
    """What came of the kills."""

    runs: int = 0
    at_random_times: int = 0
    at_chosen_moments: int = 0
    cases: set[str] = field(default_factory=set)
    kinds: Counter[str] = field(default_factory=Counter)
    unequal: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Processes that SIGKILL ended."""
        return self.at_random_times + self.at_chosen_moments

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in self.kinds.most_common())
        return (
            f"kills: {self.count} SIGKILLs ({self.at_random_times} at a random time, {self.at_chosen_moments} at a "
            f"chosen moment) in {self.runs} runs of {len(self.cases)} cases (scheme, dtype, accumulation); "
            f"{self.runs - len(self.unequal)} ended byte-equal, {len(self.unequal)} did not\nmoments: {kinds}"
        )


def digest(folder: Path) -> dict[str, Any]:
    """What interruptions must not change: weights, moments, losses, stored windows, and which files there are."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = [name for name in files if name != ".lock"]  # a dead process's, where the run was finished when it died
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    manifest = json.loads((folder / "run.json").read_text())
    return {
        "files": files,
        "sums": {name: _sum(folder / name) for name in files if name.endswith((".safetensors", ".parquet", ".yaml"))},
        "rows": [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows],
        **{key: manifest[key] for key in ("status", "loss", "bits_per_byte", "skipped_steps", "fingerprints")},
    }


def _sum(file: Path) -> str:
    content = file.read_bytes()
    if file.suffix == ".yaml":  # where the run is stands in it
        names = (b"experiment_name:", b"runs_dir:")
        content = b"\n".join(line for line in content.splitlines() if not line.startswith(names))
    return hashlib.sha256(content).hexdigest()


class Battery:
    """The cases, and their whole runs, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        import_all()
        self.words = small_run(write_documents(folder / "documents"), folder / "cache", folder / "runs")
        self._whole: dict[str, Whole] = {}

    def cases(self, chosen: random.Random) -> list[str]:
        """Every scheme in both number formats, one with accumulation and one without, in a random order."""
        cases = []
        for scheme in choices("scheme"):
            parts = [1, 2]
            chosen.shuffle(parts)
            for dtype, accumulation in zip(("float32", "bfloat16"), parts, strict=True):
                cases.append(f"scheme={scheme} train.dtype={dtype} train.accumulation={accumulation}")
        chosen.shuffle(cases)
        return cases

    def config(self, case: str, name: str) -> Config:
        """The configuration of a case under a name of its own."""
        return compose([*self.words, *case.split(), f"experiment_name={name}"])

    def whole(self, case: str) -> Whole:
        """The case, run to its end without interruption."""
        if case not in self._whole:
            config = self.config(case, f"whole-{len(self._whole)}")
            listed = self.folder / "moments.json"
            began = time.perf_counter()
            if in_child(lambda: train_here(config, Moments(), listed), self.folder) != 0:
                raise RuntimeError(f"{case} does not run: see {self.folder / LOG}")
            seconds = time.perf_counter() - began
            self._whole[case] = Whole(config, digest(run_folder(config)), json.loads(listed.read_text()), seconds)
        return self._whole[case]

    def go_on(self, config: Config) -> int:
        """The same command again, to its end. Returns the exit status."""
        return in_child(lambda: train_here(config), self.folder)

    def kill(self, count: int, seed: int) -> Kills:
        """Kill until `count` processes were, each run up to three times, and compare each with its whole one."""
        chosen = random.Random(seed)
        kills = Kills()
        cases = self.cases(chosen)
        while kills.count < count:
            case = cases[kills.runs % len(cases)]
            whole = self.whole(case)
            config = replace(whole.config, experiment_name=f"killed-{seed}-{kills.runs}")
            kills.runs += 1
            kills.cases.add(case)
            told = []
            for _ in range(chosen.choice((1, 1, 2, 3))):
                if kills.count == count:
                    break
                if chosen.random() < 0.5:
                    seconds = chosen.uniform(0, whole.seconds)
                    told.append(f"after {seconds:.3f} s")
                    ended = in_child(lambda: train_here(config), self.folder, kill_after=seconds)  # noqa: B023
                    kills.at_random_times += ended == -9
                else:
                    at = chosen.randrange(len(whole.moments))
                    told.append(f"{whole.moments[at]} ({at})")
                    ended = in_child(lambda: train_here(config, Moments(at)), self.folder)  # noqa: B023
                    kills.at_chosen_moments += ended == -9
                    kills.kinds[whole.moments[at]] += ended == -9
            compared = self.compare(config, whole)
            if compared:
                kills.unequal.append(f"{case}, killed {' and '.join(told)}: {compared}")
        return kills

    def compare(self, config: Config, whole: Whole) -> str:
        """Finish the run and say what differs from the whole one, if anything does."""
        status = self.go_on(config)
        if status != 0:
            return f"could not go on (exit status {status}, see {self.folder / LOG})"
        found = digest(Run(run_folder(config)).path)
        return ", ".join(key for key in whole.digest if found[key] != whole.digest[key])


def train_here(config: Config, moments: Moments | None = None, listed: Path | None = None) -> None:
    """Train in this process; where `moments` are given they are watched, and written to `listed` at the end."""
    from posbench.training import train

    if moments is not None:
        moments.watch()
    train(config)
    if moments is not None and listed is not None:
        seen = list(moments.seen)
        listed.write_text(json.dumps(seen))
