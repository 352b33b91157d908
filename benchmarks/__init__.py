"""Speed beside peers; not run by the tests."""
