"""The standard error of a child: passed on once, remembered, bounded."""

import os
import subprocess
import sys

import pytest

from anabranch.runtime import last_words
from anabranch.runtime.last_words import LastWords


def child(words: LastWords, text: str) -> None:
    subprocess.run([sys.executable, "-c", f"import os; os.write(2, {text!r}.encode())"], stderr=words.fileno(), check=True)


def test_what_a_child_says_is_passed_on_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = LastWords()
    child(words, "one\n")
    words.pass_on()
    child(words, "two\n")
    words.pass_on()
    words.pass_on()
    assert capsys.readouterr().err == "one\ntwo\n"
    assert words.last_line() == "two"
    words.close()


def test_looking_does_not_move_the_place_where_the_child_writes() -> None:
    words = LastWords()
    for text in ("first\n", "second\n"):
        child(words, text)
        assert words.last_line() == text.strip()
    words.close()


def test_a_child_that_said_nothing_has_last_words_too() -> None:
    words = LastWords()
    assert words.last_line() == "it said nothing"
    words.close()


def test_a_child_that_complains_a_lot_fills_no_disk_and_loses_no_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(last_words, "MAX_BYTES", 100)
    words = LastWords()
    for i in range(50):
        os.write(words.fileno(), b"complaint %d\n" % i)
        words.pass_on()
        assert os.fstat(words.fileno()).st_size <= 100 + len("complaint 10\n")
    assert capsys.readouterr().err.splitlines() == [f"complaint {i}" for i in range(50)]
    words.close()
