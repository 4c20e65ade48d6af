"""The texts that come along: each with its origin and its terms."""

from __future__ import annotations

import pytest

from kvcli.bench.texts import FOLDER, TEXTS, text_of

SOURCES = (FOLDER / "SOURCES.md").read_text(encoding="utf-8")
SECTIONS = {part.partition(".txt\n")[0]: part for part in SOURCES.split("\n## ")[1:]}


def test_every_text_has_a_section_and_every_section_a_text():
    assert set(SECTIONS) == set(TEXTS) == {"article", "code", "manual", "prose"}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_free(name: str):
    said = SECTIONS[name]
    assert "public domain" in said or "Permission is hereby granted, free of charge" in said


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_long_whole_and_plain(name: str):
    text = text_of(name)
    assert 64_000 < len(text) < 90_000
    assert text.endswith("\n")
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert not any(mark in text for mark in ("\r", "\t", "\ufffd"))


def test_the_module_keeps_its_notice():
    notice = "Copyright (c) 2009-2024, Marcel Hellkamp."
    assert notice in text_of("code")[:1000]
    assert notice in SECTIONS["code"]
