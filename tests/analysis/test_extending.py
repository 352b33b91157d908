"""Check the figures of docs/extending.md."""

import re

from extending_tables import PAGE, ROOT, ROWS, fixed_pairs, losses, tokens_until_better


def test_the_pairs_and_sentences_follow_from_the_packs():
    pairs = dict(line.strip("| ").split(" | ", 1) for line in fixed_pairs()[2:])
    page = " ".join(PAGE.split())
    for other in ("nothing changed", "base 40,000"):
        difference, p = pairs[f"YaRN before {other}"].split(" | ")
        assert re.search(rf"{difference} (nats )?ahead of (changing nothing|{other}) \(p {p}\)", page), other
    undecided = (
        "YaRN before NTK",
        "YaRN before PI",
        *(f"{arm} before nothing changed" for arm in ("PI", "NTK", "base 40,000")),
    )
    assert {pair for pair, rest in pairs.items() if rest.endswith("(open)")} == set(undecided)
    yarn, plain = (tokens_until_better("extend-arms", f"qk_rope_{arm}") for arm in ("yarn", "plain"))
    assert f"after {yarn.min():.0f} thousand tokens" in page and yarn.min() == yarn.max()
    assert f"{plain.min():.0f} to {plain.max():.0f} thousand" in page
    best = {scheme: losses("extend-arms", scheme, 2048).mean() for experiment, scheme in ROWS if "arms" in experiment}
    kept = [scheme for scheme in best if scheme.startswith("qk_rope") and "dropped" not in scheme]
    assert min(kept, key=lambda scheme: best[scheme]) == "qk_rope_base_x4"
    long = losses("extend-long", "qk_rope", 1024).mean()
    assert all(losses("extend-arms", scheme, 1024).mean() < long for scheme in kept)


def test_the_results_quote_the_lead_of_yarn():
    [line] = [line for line in fixed_pairs() if line.startswith("| YaRN before nothing changed")]
    lead = line.split(" | ")[1]
    text = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    assert f"{lead} nats ahead of changing nothing" in text
    tables = (ROOT / "docs/lists/extending-tables.md").read_text(encoding="utf-8")
    [yarn] = re.findall(r"^\| YaRN \| (2\.\d+) ", tables, re.MULTILINE)
    [nothing] = re.findall(r"^\| nothing \| (\d\.\d+) ", tables, re.MULTILINE)
    assert f"from {nothing} to {yarn}" in text
