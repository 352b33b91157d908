"""Check the sentences of docs/how-far-a-small-result-carries.md."""

import pytest
from how_far import PAGE, reversals, sentences


@pytest.mark.slow
def test_the_sentences_of_the_page_follow_from_the_packs():
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    for sentence in sentences():
        assert sentence in page, f"the packs say: {sentence}"
    of_kexue = [pair for pair in reversals() if "(kexue-10862:" in pair]
    assert (len(reversals()), len(of_kexue)) == (8, 7)
    assert "eight are [reversed]" in page and "seven of them kexue's" in page
