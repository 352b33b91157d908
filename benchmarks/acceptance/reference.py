"""The reference table: `books_25m` with fewer tokens, every scheme of the published table, ALiBi and sinusoidal.

    python -m benchmarks.acceptance.reference train TOKENS SCHEME SEED FROM WORK OUT SHRUNK

A short sweep finds one learning rate for all schemes, on text that nothing is scored on (`posbench tune`). A run trains
and is evaluated in one process, a few of them side by side, so that one compiles while another trains; its tokens a
second are therefore not those of a GPU of its own (the stage `fast` has those).
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path

from benchmarks.acceptance import fast, text
from benchmarks.acceptance.items import Item, Results, emit, run_part
from benchmarks.acceptance.place import PACKAGE, TEXTS, Place, place_of

MODULE = f"{PACKAGE}.reference"
SCHEMES = (
    *("qk_rope", "nope", "qkvo_rope", "vo_rope", "alibi", "k_rope", "qkv_rope", "o_rope", "q_rope", "v_rope"),
    "sinusoidal",
)
STAGE, EXPERIMENT = "reference", "books_25m"
TOKENS, MORE_TOKENS, PILOT_TOKENS = 30_000_000, 100_000_000, 8_000_000  # of a run
PILOTS = ("qk_rope", "nope")
USUAL_RATE = 1e-3  # where no pilot finished
WITHIN = (
    "1024",
    "2048",
    "8192",
)  # tokens: the lengths of position and retrieval, which read four times as much as fixed
RATE = "rate"
AT_THE_END = "train.checkpoint_every=1000000"  # alone
VALIDATE = "train.validate_every=150"  # steps: half a million tokens each time, and 30 million are trained on
SECONDS, MORE_SECONDS = 75, 180
SHRUNK = (
    *("model.num_layers=1", "model.d_model=32", "model.num_heads=4", "model.head_dim=8", "model.ffn_dim=32"),
    *("train.context_length=32", "train.batch_size=2", "train.dtype=float32", "train.validation_tokens=64"),
    *("evaluation.lengths=[16,32,64]", "evaluation.windows=2", "evaluation.order_windows=2"),
    *("evaluation.max_tokens=256", "evaluation.passage=4", "evaluation.targets=8"),
)


def items(place: Place) -> list[Item]:
    """In order of worth: one seed of every scheme, two more, three times the tokens, two seeds more."""
    if place.shrunk:
        return [text.item(place), rate_item(place), _train(256, "nope", 0, 40, place)]
    return [
        text.item(place),
        rate_item(place),
        *(fast.warm("25m", scheme, place) for scheme in SCHEMES if scheme not in PILOTS),
        *(_train(TOKENS, scheme, seed, SECONDS, place) for seed in (0, 1, 2) for scheme in SCHEMES),
        *(_train(MORE_TOKENS, scheme, 0, MORE_SECONDS, place) for scheme in SCHEMES),
        *(_train(TOKENS, scheme, seed, SECONDS, place) for seed in (3, 4) for scheme in SCHEMES),
    ]


def rate_item(place: Place) -> Item:
    """Find the learning rate. All runs wait for it, so the stage `right`, which hardly uses the GPU, does it before.

    Room is left for it beside everything that this stage compiles, where that did not happen.
    """
    words, seconds = ("rate", *place.words), 40 if place.shrunk else 120
    return Item(RATE, "rate", MODULE, words, seconds, cores=3, after=(text.NAME,), is_of_machine=True)


def _train(tokens: int, scheme: str, seed: int, seconds: float, place: Place) -> Item:
    words = ("train", str(tokens), scheme, str(seed), *place.words)
    after = (RATE, f"compile {scheme} 25m")
    name = f"train {tokens // 1_000_000}M {scheme} {seed}"
    return Item(name, f"train {tokens}", MODULE, words, seconds, cores=1 if place.shrunk else 4, after=after)


def _words(place: Place, corpus: str) -> list[str]:
    shrunk = SHRUNK if place.shrunk else ()
    return [f"experiment={EXPERIMENT}", *place.run_words(corpus), *shrunk, f"train.device={place.device}"]


def rate(*place_words: str) -> None:
    """Find the learning rate: the best for two schemes' pilots together; prints it and all losses."""
    place = place_of(*place_words)
    texts = json.loads((place.source / "text" / TEXTS).read_text(encoding="utf-8"))
    schemes = PILOTS[:1] if place.shrunk else PILOTS
    words = [*_words(place, "tuning"), f"runs_dir={place.runs}", f"scheme={','.join(schemes)}"]
    words += [f"train.tokens={128 if place.shrunk else PILOT_TOKENS}", AT_THE_END]
    if not place.shrunk:
        words += [VALIDATE, "hydra/launcher=joblib", f"hydra.launcher.n_jobs={3 * len(PILOTS)}"]
    command = [sys.executable, "-m", "posbench", "tune", *words, f"--fraction={texts['tuning']['fraction']}"]
    status = subprocess.run(command).returncode
    emit(**_best_rate(place.runs / f"{EXPERIMENT}-tune" / "rates.csv", len(schemes)))
    if status:
        raise SystemExit(f"posbench tune ended with {status}")


def _best_rate(file: Path, schemes: int) -> dict[str, object]:
    """Of the rates at which every scheme has a pilot that finished, the one with the lowest mean loss."""
    losses: dict[float, list[float]] = {}
    if file.exists():
        with file.open(encoding="utf-8") as rows:
            for row in csv.DictReader(rows):
                if row["loss"]:
                    losses.setdefault(float(row["lr"]), []).append(float(row["loss"]))
    means = {lr: sum(found) / len(found) for lr, found in losses.items() if len(found) == schemes}
    if not means:
        return {}
    return {"lr": min(means, key=lambda lr: means[lr]), "losses": {f"{lr:g}": found for lr, found in losses.items()}}


def _settled_rate(place: Place) -> float:
    """That of the runs that are done, for one table; else the one that was found; else the usual one."""
    results, of_machine = Results(place.out / f"{STAGE}.jsonl"), Results(place.of_machine)
    found = [row["result"].get("lr") for row in results.rows.values() if row["kind"].startswith("train ")]
    return float(next((lr for lr in [*found, of_machine.result(RATE).get("lr")] if lr), USUAL_RATE))


def train(tokens: str, scheme: str, seed: str, *words: str) -> None:
    """Train one run and score it at every length; prints its losses. The learning rate is that of `rate`."""
    import posbench

    place = place_of(*words)
    lr = _settled_rate(place)
    name = EXPERIMENT if int(tokens) == MORE_TOKENS else f"{EXPERIMENT}-{int(tokens) // 1_000_000}M"
    run = posbench.train(
        posbench.compose(
            [
                *_words(place, "main"),
                f"experiment_name={name}",
                f"train.tokens={tokens}",
                f"train.lr={lr!r}",
                AT_THE_END,
                VALIDATE,
                "evaluation.protocols=[fixed,position,order,retrieval]",
                f"scheme={scheme}",
                f"seed={seed}",
                f"runs_dir={place.runs}",
            ]
        )
    )
    manifest = run.manifest
    costs = manifest.costs
    emit(
        experiment=name,
        scheme=scheme,
        seed=int(seed),
        lr=lr,
        loss=manifest.loss,
        epochs=manifest.epochs,
        tokens_per_second=costs.tokens_per_second if costs else None,
        first_step_seconds=costs.first_step_seconds if costs else None,
    )
    frame = posbench.evaluate(run, protocols=["fixed", "order"], quiet=True)
    posbench.evaluate(
        run, protocols=["position", "retrieval"], lengths=("32", "64") if place.shrunk else WITHIN, quiet=True
    )
    fixed = frame[frame["protocol"] == "fixed"]
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)  # half a gigabyte a run, and scored
    emit(perplexities={str(length): float(p) for length, p in zip(fixed["length"], fixed["perplexity"], strict=True)})


def pack(place: Place) -> None:
    """All runs of WORK without their weights, and the pilots' losses, as one file of OUT: what is brought home."""
    experiments = [folder for folder in place.runs.glob(f"{EXPERIMENT}*") if folder.is_dir()]
    if not experiments:
        return
    file = place.out / f"reference-{place.mark}.tar.xz"
    beside = file.with_suffix(".tmp")
    with tarfile.open(beside, "w:xz", preset=2) as packed:  # sees 2 MB back, so that one tokenizer serves all runs
        for folder in experiments:
            is_tuned = folder.name.endswith("-tune")
            files = [folder / "rates.csv"] if is_tuned else sorted(folder.rglob("*"))
            for each in files:
                if each.is_file() and "checkpoints" not in each.parts:
                    with suppress(FileNotFoundError):  # a run beside this moved it
                        packed.add(each, each.relative_to(place.runs))
    beside.replace(file)


if __name__ == "__main__":
    run_part({"rate": rate, "train": train})
