"""Try one candidate in a loop (docs/loops.md): `python try.py FILE.py:Class NAME`."""

import json
import subprocess
import sys

place, name = sys.argv[1:]
judge = ["posbench", "judge", "loop", "--scheme", name, "--family", "20", "--json"]
commands = [["posbench", "train", "-m", "experiment=demo", f"scheme={place}", "seed=0,1", "experiment_name=loop"]]
if subprocess.run(["posbench", "verify", place]).returncode:
    sys.exit(1)
while commands:
    # A list, so that every command runs.
    has_errors = any([subprocess.run(command).returncode for command in commands])  # noqa: C419
    subprocess.run(["posbench", "eval", "loop", "--length", "512"])
    judged = subprocess.run(judge, stdout=subprocess.PIPE)
    if judged.returncode not in (0, 10, 11, 12, 13):
        sys.exit(judged.returncode)
    judgement = json.loads(judged.stdout)
    if has_errors and judgement["verdict"] != "failed":
        sys.exit(1)  # not the scheme's fault: the disk or the memory is full
    commands = judgement["next_commands"]
sys.exit(judged.returncode)
