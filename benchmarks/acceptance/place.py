"""Where everything lies, and what the processes of items are given: folders, environment, the words of the text.

FROM/wheels/*.whl, FROM/text/      what `prepare` wrote, and what travels
WORK/site/                         the wheels, installed
WORK/cache/, WORK/text/            the token cache of this machine, and files that stand for the text
WORK/runs/                         runs, with their checkpoints
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = "benchmarks.acceptance"
# To compile: so many times as long as others.
SLOW = {"fire": 5.0, "transformer_xl": 2.0, "shaw": 2.0}
TEXTS = "texts.json"  # in FROM/text: what each corpus is called and which words ask for it


@dataclass(frozen=True)
class Place:
    """The folders of one acceptance, and whether it is the rehearsal: tiny models on a CPU."""

    source: Path  # FROM
    work: Path
    out: Path  # where results are
    shrunk: bool = False
    plain_steps: bool = False  # training steps as they are, not as CUDA graphs: where the graphs turn out to be wrong

    @property
    def step_words(self) -> list[str]:
        """The words of posbench that say how a training step runs."""
        return ["train.cuda_graph=false"] if self.plain_steps else []

    @property
    def device(self) -> str:
        return "cpu" if self.shrunk else "cuda"

    @property
    def runs(self) -> Path:
        return self.work / "runs"

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of an item's process that say all this again (`place_of`)."""
        return str(self.source), str(self.work), str(self.out), str(int(self.shrunk)), str(int(self.plain_steps))

    @property
    def wheels(self) -> list[Path]:
        return sorted((self.source / "wheels").glob("*.whl"))

    @property
    def of_machine(self) -> Path:
        """The results of items that prepare this machine."""
        return self.work / "machine.jsonl"

    @property
    def mark(self) -> str:
        """Of this machine: what it brings home goes to files of its own."""
        file = self.work / "mark"
        if not file.exists():
            file.write_text(secrets.token_hex(4), encoding="utf-8")
        return file.read_text(encoding="utf-8")

    def bring_home(self) -> None:
        """Copy the results of items that prepare this machine to OUT: what does not compile is said there alone."""
        if self.of_machine.exists():
            shutil.copyfile(self.of_machine, self.out / f"machine-{self.mark}.jsonl")

    def check(self) -> None:
        """Raises: SystemExit where the text did not travel: what needs it would fail, and not be tried again."""
        wheels, text = self.source / "wheels", self.source / "text"
        if not (text / TEXTS).exists():
            what = f"bring {wheels} and {text}, which `python -m {PACKAGE}.prepare` writes"
            raise SystemExit(f"{text / TEXTS} is missing: {what}")

    def install(self) -> None:
        """Install the wheels into WORK/site, unless they are there. Raises: SystemExit with what pip said."""
        site, done = self.work / "site", self.work / "installed"
        names = " ".join(wheel.name for wheel in self.wheels)
        if not names or (done.exists() and done.read_text(encoding="utf-8") == names):
            return
        options = ("-q", "--no-index", "--no-deps", "--no-cache-dir", "--upgrade", "--target", str(site))
        command = [sys.executable, "-m", "pip", "install", *options, *map(str, self.wheels)]
        installed = subprocess.run(command, capture_output=True, text=True)
        if installed.returncode:
            raise SystemExit(f"the wheels of {self.source / 'wheels'} cannot be installed: {installed.stderr[-2000:]}")
        done.write_text(names, encoding="utf-8")

    def variables(self) -> dict[str, str]:
        """The environment of items: the checkout and the wheels on the path, caches of compiled code in WORK."""
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.shrunk else {}
        path = [str(CHECKOUT), str(CHECKOUT / self.work / "site"), os.environ.get("PYTHONPATH", "")]
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(CHECKOUT / self.work / "inductor"),
            "TRITON_CACHE_DIR": str(CHECKOUT / self.work / "triton"),
            "WANDB_MODE": "disabled",
            "HF_HUB_OFFLINE": "1",
            "POSBENCH_TRACEBACK": "1",
            "PYTHONFAULTHANDLER": "1",
            **hidden,
        }

    def run_words(self, corpus: str) -> list[str]:
        """The words of every run, on a corpus which `prepare` wrote, once it is unpacked here."""
        texts = json.loads((self.source / "text" / TEXTS).read_text(encoding="utf-8"))
        files = [f"data.{split}_path={self.work / 'text' / split}.txt" for split in ("train", "validation", "test")]
        where = [f"data.cache_dir={self.work / 'cache'}", "tracking=none"]
        return [*texts[corpus]["words"], *files, *where, *self.step_words]


def place_of(source: str, work: str, out: str, shrunk: str, plain_steps: str) -> Place:
    """The place that `Place.words` describe."""
    return Place(Path(source), Path(work), Path(out), shrunk == "1", plain_steps == "1")


def within_checkout(path: Path) -> Path:
    """The path, relative where it lies in the checkout: stored runs then name no path of a machine."""
    whole = path.resolve()
    return whole.relative_to(CHECKOUT) if whole.is_relative_to(CHECKOUT) else whole


def schemes() -> list[str]:
    """All of conf/scheme."""
    return sorted(file.stem for file in (CHECKOUT / "conf" / "scheme").glob("*.yaml"))


def code_digest(place: Place) -> str:
    """Of all code and configuration, wheels among them: what failed under other code is tried again."""
    made_with = [*(wheel.name for wheel in place.wheels), *place.step_words]
    total = hashlib.sha256(" ".join(made_with).encode())
    for folder in ("posbench", "conf", "benchmarks", "hydra_plugins"):
        for file in sorted((CHECKOUT / folder).rglob("*")):
            if file.suffix in (".py", ".yaml"):
                total.update(str(file.relative_to(CHECKOUT)).encode() + file.read_bytes())
    return total.hexdigest()[:16]


def device_of(place: Place, dtype: str, compiled: bool) -> Any:
    """The device of an item, as posbench chooses it. Raises: ConfigError without a GPU where one is needed."""
    from posbench import compose
    from posbench.machine.device import choose_device

    words = [f"train.device={place.device}", f"train.dtype={dtype}", f"train.compile={compiled}"]
    return choose_device(compose(words).train)
