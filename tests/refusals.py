"""Check what is refused: by an error that a user can fix."""

import pytest

from posbench.config import ConfigError


def refuses(message, function, *arguments, **options):
    """Assert that the call raises a ConfigError whose text matches `message`."""
    with pytest.raises(ConfigError, match=message):
        function(*arguments, **options)
