"""Stop strings are found at the very token that completes them, however text is cut into tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from roll_infer_hf.sequence import StopStrings


class ByteTokenizer:
    """Token `i` is byte `i`: every character of more than one byte spans tokens."""

    def decode(self, ids, **_):
        return bytes(ids).decode("utf-8", errors="replace")


class PieceTokenizer:
    """Like sentencepiece: words begin with a blank, which the first word of a text loses."""

    pieces = ("▁stop", "▁", "op", "▁st", "é", "x", "▁x.", ".", "")

    def decode(self, ids, **_):
        return "".join(self.pieces[i] for i in ids).replace("▁", " ").removeprefix(" ")


def first_stop(stops, ids):
    for end in range(1, len(ids) + 1):
        found = stops.match(ids[:end])
        if found is not None:
            return end, found
    return None


def expected_end(tokenizer, strings, ids):
    for end in range(1, len(ids) + 1):
        if any(each in tokenizer.decode(ids[:end]) for each in strings):
            return end
    return None


TEXT = st.text(alphabet="ab\n é漢🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n é漢🙂", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=200)
@given(TEXT, STOPS)
def test_unicode_bytes_stop_at_the_first_stop_in_the_text(text, strings):
    ids = list(text.encode())
    found = first_stop(StopStrings(ByteTokenizer(), strings), ids)
    assert (found and found[0]) == expected_end(ByteTokenizer(), strings, ids)


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, len(PieceTokenizer.pieces) - 1), min_size=1, max_size=40),
    st.lists(st.sampled_from(["stop", " stop", "x.", "t op", "é x", ". ", "  "]), min_size=1, max_size=3),
)
def test_pieces_stop_at_the_first_stop_in_the_text(ids, strings):
    found = first_stop(StopStrings(PieceTokenizer(), strings), ids)
    assert (found and found[0]) == expected_end(PieceTokenizer(), strings, ids)


def test_earlier_of_two_completed_stops_is_named():
    stops = StopStrings(ByteTokenizer(), ["b", "ab"])
    assert stops.match(list(b"xab")) == "ab"


@settings(max_examples=200)
@given(TEXT.filter(bool), STOPS)
def test_stop_before_the_last_token_is_not_matched_again(text, strings):
    """As after `min_new_tokens`: the strings of the first tokens ended nothing."""
    ids = list(text.encode())
    whole, before = (ByteTokenizer().decode(each) for each in (ids, ids[:-1]))
    completed = [each for each in strings if whole.count(each) > before.count(each)]
    repeated = [each for each in strings if each in whole[-len(each) :]]  # `count` skips overlaps
    found = StopStrings(ByteTokenizer(), strings).match(ids)
    assert found in ([None] if not completed and not repeated else [*completed, *repeated])


def test_equal_stops_match_only_at_tokens_that_complete_them():
    stops = StopStrings(ByteTokenizer(), ["ab"])
    text = b"ab-b-ab"
    assert [end for end in range(1, len(text) + 1) if stops.match(list(text[:end]))] == [2, 7]
