"""Output text in pieces: split characters, other decoders, stop strings across pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import END, USER, byte_tokenizer
from tokenizers import Tokenizer, decoders, models

from specdec.engine import Output, Round
from specdec.models.tokenizer import load_tokenizer
from specdec.serving.choices import Choice
from specdec.serving.text import Detokenizer, StopStrings, text_codec

TEXT = "삼겹살 🙂🙂 é"  # case S2
BYTES = text_codec(byte_tokenizer())


def pieces_of(decode, ids):
    """One piece a token, and the flush last."""
    text = Detokenizer(decode)
    return [text.push_(i) for i in ids] + [text.flush_()]


def in_chunks(decode, ids, size, stops=()):
    """The deltas of a choice whose tokens come `size` at a time."""
    choice, deltas = Choice(decode, stops), []
    for start in range(0, len(ids), size):
        tokens = tuple(ids[start : start + size])
        reason = "length" if start + size >= len(ids) else None
        deltas.append(choice.push_(Output(0, tokens, Round(4, len(tokens) - 1, size), reason)))
        if choice.finish_reason:
            break
    return deltas, choice


@pytest.mark.parametrize("size", range(1, 6))
def test_split_characters_are_held_back(size):
    ids = TEXT.encode()
    deltas, choice = in_chunks(BYTES.decode, ids, size)
    assert "".join(deltas) == TEXT
    assert not any("\ufffd" in delta for delta in deltas)
    assert choice.num_tokens == len(ids)


def test_split_characters_of_a_real_tokenizer(smollm2_path):
    codec = text_codec(load_tokenizer(smollm2_path))
    ids = codec.encode(TEXT)
    assert len(ids) > 8
    for size in range(1, 6):
        deltas, _ = in_chunks(codec.decode, ids, size)
        assert "".join(deltas) == TEXT
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("size", range(1, 6))
def test_a_truncated_tail_is_one_replacement_character(size):
    deltas, _ = in_chunks(BYTES.decode, b"ok " + b"\xf0\x9f", size)
    assert "".join(deltas) == "ok \ufffd"
    assert deltas[-1].endswith("\ufffd")
    assert not any("\ufffd" in delta for delta in deltas[:-1])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.integers(0, 255), st.sampled_from([END, USER]))))
def test_pieces_join_to_the_whole_text_of_any_bytes(ids):
    whole = bytes(i for i in ids if i < 256).decode(errors="replace")
    assert BYTES.decode(ids) == whole
    assert "".join(pieces_of(BYTES.decode, ids)) == whole


@settings(deadline=None, max_examples=50)
@given(st.text().filter(lambda text: "\ufffd" not in text))
def test_complete_text_needs_no_flush(text):
    pieces = pieces_of(BYTES.decode, text.encode())
    assert "".join(pieces) == text
    assert pieces[-1] == ""


def sentencepiece_decode(tokens):
    """`decode` of a vocabulary with `▁` for a blank and byte tokens, as Llama 2 has."""
    tokenizer = Tokenizer(
        models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=tokens[0])
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer.decode


def test_sentencepiece_blanks_and_byte_tokens():
    tokens = [
        "▁Hello",
        "▁",
        "wor",
        "ld",
        "<0xF0>",
        "<0x9F>",
        "<0x99>",
        "<0x82>",
        "<0xC3>",
        "<0xA9>",
    ]
    decode = sentencepiece_decode(tokens)
    ids = [0, 1, 2, 3, 1, 4, 5, 6, 7, 4, 5, 6, 7, 8, 9, 0]
    pieces = pieces_of(decode, ids)
    assert "".join(pieces) == decode(ids) == "Hello world 🙂🙂é Hello"
    assert not any("\ufffd" in piece for piece in pieces)


def test_wordpiece_blanks():
    tokens = ["un", "##able", "to", "go"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="un"))
    tokenizer.decoder = decoders.WordPiece()
    pieces = pieces_of(tokenizer.decode, [0, 1, 2, 3])
    assert pieces == ["un", "able", " to", " go", ""]


def test_the_window_stays_small():
    calls = []

    def decode(ids):
        calls.append(len(ids))
        return BYTES.decode(ids)

    pieces_of(decode, ("삼é🙂a" * 100).encode())
    assert max(calls) <= 8  # two characters of four bytes


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["END"], "one END two", "one "),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["abac"], "ababac!", "ab"),
        (["b", "abc"], "xabc", "xa"),  # complete first, though it begins later
        (["bc", "abc"], "xabc", "x"),  # complete together: the longer one
        (["🙂"], "so 🙂🙂", "so "),
        (["aaa"], "aa", "aa"),
        (["zz"], "no stop z", "no stop z"),
    ],
)
def test_stop_strings_cut_whatever_the_chunks(stops, text, shown):
    ids = text.encode()
    for size in range(1, len(ids) + 1):
        deltas, choice = in_chunks(BYTES.decode, ids, size, stops)
        assert "".join(deltas) == shown
        assert choice.finish_reason == ("stop" if shown != text else "length")
        cut = (
            min(text.index(stop) + len(stop) for stop in stops if stop in text)
            if shown != text
            else None
        )
        assert choice.num_tokens == len(text[:cut].encode())


def test_only_what_could_begin_a_stop_is_held_back():
    stops = StopStrings(["STOP", "halt"])
    assert stops.push_("one S") == ("one ", False)
    assert stops.push_("T") == ("", False)
    assert stops.push_("x h") == ("STx ", False)
    assert stops.push_("al") == ("", False)
    assert stops.flush_() == "hal"


def test_a_round_is_trimmed_at_the_stop():
    choice = Choice(BYTES.decode, ["b"])
    assert choice.push_(Output(0, tuple(b"a"), None, None)) == "a"
    assert choice.push_(Output(0, tuple(b"aabcd"), Round(4, 4, 5), None)) == "aa"
    assert choice.rounds == [Round(4, 3, 3)]
    assert choice.num_tokens == 4


def test_the_end_token_is_counted_and_is_no_text():
    choice = Choice(lambda ids: "".join(map(str, ids)), [])  # a decoder that shows every id
    assert choice.push_(Output(0, (1, 2, 3), Round(2, 2, 3), "stop")) == "12"
    assert choice.num_tokens == 3
    ignored = Choice(lambda ids: "".join(map(str, ids)), [])
    assert ignored.push_(Output(0, (1, 2, 3), Round(2, 2, 3), "length")) == "123"
