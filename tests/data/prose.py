"""Made-up documents."""

WORDS = ["the", "of", "and", "to", "in", "that", "was", "his", "he", "it", "with", "is", "for", "as", "had", "you"]


def prose(number, words=200):
    """Return a different document for each number."""
    return f"Chapter {number}. " + " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(words))
