"""What travels to a GPU machine without network: wheels, and the text as tokens.

    python -m benchmarks.acceptance.prepare --train books/train.parquet --validation books/validation.parquet \\
        --test books/test.parquet --out .acceptance

Writes OUT/wheels, the packages that such a machine with PyTorch, pandas, matplotlib and Hugging Face's tokenizers still
lacks, and OUT/text: a corpus to train and evaluate on and a small one for the learning rate, uint16 tokens, packed. A
run of more tokens than the text has reads it several times, and its report says how often.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.acceptance.place import CHECKOUT, TEXTS

# Packages of Python alone, in the versions of constraints.txt; antlr4 comes as source and is built here.
WHEELS = ("hydra-core", "omegaconf", "hydra-joblib-launcher", "typer", "filelock")
SOURCES = ("antlr4-python3-runtime",)
TARGET = ("--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--platform", "any")
TOKENS, TUNING_TOKENS, FRACTION = 30_000_000, 4_000_000, 0.05  # of train; of the text to tune by, and its held-out part
# xz, with its literal and position bits set for numbers of two bytes.
PACKING = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 1, "lp": 1, "pb": 1}]


def wheels(out: Path) -> None:
    """Download the wheels that are not there. Raises: CalledProcessError with pip's own message."""
    out.mkdir(parents=True, exist_ok=True)
    lines = (CHECKOUT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.partition("==")[0]: line.partition(";")[0].strip() for line in lines if "==" in line}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    missing = [name for name in (*WHEELS, *SOURCES) if not list(out.glob(f"{name.replace('-', '_')}-*.whl"))]
    if binary := [pins[name] for name in missing if name in WHEELS]:
        subprocess.run([*pip, "download", "-q", "--no-deps", *TARGET, "-d", out, *binary], check=True)
    if source := [pins[name] for name in missing if name in SOURCES]:
        subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", out, *source], check=True)


def texts(
    out: Path,
    paths: dict[str, Path],
    tokens: int = TOKENS,
    tuning_tokens: int = TUNING_TOKENS,
    fraction: float = FRACTION,
    words: Sequence[str] = ("tokenizer.vocab_size=16384",),
) -> None:
    """Tokenise both corpora and pack them. Arguments: paths, of the text of each split; words, of the tokenizer.

    Raises: ConfigError for what posbench refuses.
    """
    from posbench import compose
    from posbench.data import prepare

    out.mkdir(parents=True, exist_ok=True)
    common = ["data=files", "data.path=null", *words]
    wanted = {
        "main": [*common, f"data.token_budget={tokens}"],
        "tuning": [*common, f"data.token_budget={tuning_tokens}", f"data.tuning_fraction={fraction}"],
    }
    here = [f"data.{split}_path={path}" for split, path in paths.items()]
    about = {}
    for name, asked in wanted.items():
        corpus = prepare(compose([*asked, *here, f"data.cache_dir={out.parent / 'cache'}"]))
        with (
            lzma.open(out / f"{name}.tar.xz", "wb", filters=PACKING) as file,
            tarfile.open(fileobj=file, mode="w") as packed,
        ):
            packed.add(corpus.folder, corpus.folder.name)
        about[name] = {"corpus": corpus.folder.name, "words": asked, "fraction": fraction}
    (out / TEXTS).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def sizes(out: Path) -> dict[str, int]:
    """Bytes of what travels: the checkout as git sees it, the wheels, the text."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=CHECKOUT, capture_output=True
    ).stdout.decode()
    files = {"checkout": [CHECKOUT / name for name in listed.split("\0") if name]}
    files |= {part: list((out / part).iterdir()) for part in ("wheels", "text")}
    return {part: sum(each.stat().st_size for each in of if each.is_file()) for part, of in files.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for split in ("train", "validation", "test"):
        parser.add_argument(f"--{split}", type=Path, required=True, help=f"the {split} text, of any kind of data=files")
    parser.add_argument("--out", type=Path, default=Path(".acceptance"))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of train text, about")
    parser.add_argument("--most-mib", type=float, default=64.0, help="that may travel; more is an error")
    given = parser.parse_args()
    wheels(given.out / "wheels")
    paths = {split: getattr(given, split) for split in ("train", "validation", "test")}
    texts(given.out / "text", paths, given.tokens)
    found = sizes(given.out)
    total = sum(found.values()) / 2**20
    print(", ".join(f"{part} {size / 2**20:.1f} MiB" for part, size in found.items()) + f"; {total:.1f} MiB in all")
    if total > given.most_mib:
        sys.exit(f"{total:.1f} MiB are more than --most-mib {given.most_mib:g}: give fewer --tokens")


if __name__ == "__main__":
    main()
