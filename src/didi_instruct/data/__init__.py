"""Tokenizers, corpora, packed token shards and the oracle language."""
