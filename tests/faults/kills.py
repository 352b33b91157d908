"""Runs killed by SIGKILL at any moment, given the same command again, and compared byte by byte with whole ones."""

import hashlib
import json
import random
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from posbench.catalogue.choices import choices
from posbench.composition.compose import compose
from posbench.config import Config
from posbench.runs import run_folder
from tests.conftest import small_run, write_documents
from tests.faults.children import LOG, Moments, import_all, in_child


@dataclass
class Whole:
    """A case run without interruption: what the others are compared with."""

    config: Config
    digest: dict[str, Any]
    moments: list[str]
    seconds: float


def digest(folder):
    """Return all that interruptions must not change: weights, moments, losses, stored windows, file names."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = [name for name in files if name != ".lock"]  # left by a process that died after the run was finished
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    manifest = json.loads((folder / "run.json").read_text())
    return {
        "files": files,
        "sums": {name: _sum(folder / name) for name in files if name.endswith((".safetensors", ".parquet", ".yaml"))},
        "rows": [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows],
        **{key: manifest[key] for key in ("status", "loss", "bits_per_byte", "skipped_steps", "fingerprints")},
    }


def _sum(file):
    content = file.read_bytes()
    if file.suffix == ".yaml":  # it contains the path of the run
        names = (b"experiment_name:", b"runs_dir:")
        content = b"\n".join(line for line in content.splitlines() if not line.startswith(names))
    return hashlib.sha256(content).hexdigest()


class Battery:
    """The cases, and their whole runs, made when first asked for."""

    def __init__(self, folder):
        self.folder = folder
        import_all()
        self.words = small_run(write_documents(folder / "documents"), folder / "cache", folder / "runs")
        self._whole = {}

    def cases(self, chosen):
        """Return every scheme in both number formats, one with accumulation and one without, in a random order."""
        cases = []
        for scheme in choices("scheme"):
            parts = [1, 2]
            chosen.shuffle(parts)
            for dtype, accumulation in zip(("float32", "bfloat16"), parts, strict=True):
                cases.append(f"scheme={scheme} train.dtype={dtype} train.accumulation={accumulation}")
        chosen.shuffle(cases)
        return cases

    def config(self, case, name):
        """Return the configuration of a case under a name of its own."""
        return compose([*self.words, *case.split(), f"experiment_name={name}"])

    def whole(self, case):
        """Return the case, run to its end without interruption."""
        if case not in self._whole:
            config = self.config(case, f"whole-{len(self._whole)}")
            listed = self.folder / "moments.json"
            began = time.perf_counter()
            if in_child(partial(train_here, config, None, listed), self.folder) != 0:
                raise RuntimeError(f"{case} does not run: see {self.folder / LOG}")
            seconds = time.perf_counter() - began
            self._whole[case] = Whole(config, digest(run_folder(config)), json.loads(listed.read_text()), seconds)
        return self._whole[case]

    def kill(self, count, seed):
        """Kill `count` processes, each run up to three times, and compare each run with its whole one.

        Returns: a line for each run that did not end with the same bytes.
        """
        chosen = random.Random(seed)
        cases, problems, killed, runs = self.cases(chosen), [], 0, 0
        while killed < count:
            case = cases[runs % len(cases)]
            whole = self.whole(case)
            config = replace(whole.config, experiment_name=f"killed-{seed}-{runs}")
            runs += 1
            strikes = []
            for _ in range(min(chosen.choice((1, 1, 2, 3)), count - killed)):
                at = chosen.randrange(len(whole.moments)) if chosen.random() < 0.5 else None
                seconds = chosen.uniform(0, whole.seconds) if at is None else None
                strikes.append(f"after {seconds:.3f} s" if at is None else f"{whole.moments[at]} ({at})")
                killed += in_child(partial(train_here, config, at), self.folder, seconds) == -9
            if differing := self.compare(config, whole):
                problems.append(f"{case}, killed {' and '.join(strikes)}: {differing}")
        print(f"{runs} runs were killed {killed} times: {len(problems)} did not end with the same bytes", flush=True)
        return problems

    def compare(self, config, whole):
        """Finish the run, and return its difference from the uninterrupted one, or ""."""
        status = in_child(partial(train_here, config), self.folder)
        if status != 0:
            return f"could not be resumed (exit status {status}, see {self.folder / LOG})"
        ended = digest(run_folder(config))
        return ", ".join(key for key in whole.digest if ended[key] != whole.digest[key])


def train_here(config, at=None, listed=None):
    """Train in this process; killed at the moment `at`, or with all moments written to `listed` at the end."""
    from posbench.training import train

    moments = Moments(at)
    if at is not None or listed is not None:
        moments.watch()
    train(config)
    if listed is not None:
        listed.write_text(json.dumps(list(moments.seen)))
