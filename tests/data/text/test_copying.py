"""The share of a text that a copier predicts equals a loop that follows the definition word by word."""

import numpy as np

from posbench.data.text.copying import DISTANCES, MATCHES, copied_share
from posbench.data.text.corpus import Split

LENGTH = 48


def split_of(tokens):
    ends = np.array([0, len(tokens)])
    return Split("train", tokens.astype(np.uint16), ends, ends[1:], None)


def predicted(window, distance, least):
    """Predict the last token by the longest match in the window before it."""
    *context, target = window.tolist()
    best = (-1, -1)
    for place in range(len(context) - distance):
        match = 0
        while match < place and context[place - 1 - match] == context[-1 - match]:
            match += 1
        best = max(best, (match, place))
    return best[0] >= least and context[best[1]] == target


def test_the_share_is_that_of_a_plain_loop():
    tokens = np.random.default_rng(0).integers(0, 3, 5 * 2 * LENGTH)
    tokens[60:90] = tokens[40:70]
    windows = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH + 1)
    targets = [start + n for start in range(0, len(tokens), 2 * LENGTH) for n in range(LENGTH)]
    share = copied_share(split_of(tokens), LENGTH)
    for m, least in enumerate(MATCHES):
        for n, distance in enumerate(DISTANCES[:2]):
            hits = [predicted(windows[start], distance, least) for start in targets]
            assert share[m, n] == np.mean(hits), (least, distance)
    assert share[0, 0] > 0.1 and not share[:, 2:].any()  # 64 tokens back is out of sight


def test_text_shorter_than_two_contexts_has_no_share():
    assert not copied_share(split_of(np.arange(30)), LENGTH).any()
