"""Decoding methods: each writes several continuations of one prompt and answers with one of them."""
