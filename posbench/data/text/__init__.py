"""Prepare text once (documents -> splits -> tokenizer -> tokens on disk) and find it again in a cache."""
