"""Token ids back to text at UTF-8 borders: the bytes of a token, texts after a context, stop texts cut anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from moelight.engine.detokenizer import BadWords, StopMatcher, TokenTexts, cut_at_stop, without_unfinished
from moelight.engine.tokenizer import Tokenizer
from tests.engine.test_tokenizer import byte_level, sentence_piece_like

TEXTS = ["a fox", "🦊🏳️‍🌈 ok", "数える 世界", "e\u0301n\u0303 a\u030a", "\n\ttab", "naïve — “x”"]


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    if request.param == "byte-level":
        return Tokenizer.from_dir(byte_level(directory))
    if request.param == "byte-fallback":
        return Tokenizer.from_dir(sentence_piece_like(directory))
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁fo", "x", "n", "o", "k", "t", "b", "e"]
    inner = Inner(models.Unigram([(word, -float(rank)) for rank, word in enumerate(words)], 0, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    inner.save(str(directory / "tokenizer.json"))
    return Tokenizer.from_dir(directory)


def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        words = {token: tokenizer.token_bytes(token) for token in ids}
        plain = b"".join(words[token] for token in ids if token not in tokenizer.special_ids)
        assert plain.decode().removeprefix(" ") == text
        assert all(("\ufffd" in tokenizer.token_text(token)) == (not _whole(words[token])) for token in ids), text
    assert tokenizer.token_bytes(10**6) == b""


def test_an_unfinished_character_has_no_text_and_the_last_part_all_of_it(tokenizer: Tokenizer) -> None:
    """As in vLLM: texts of tokens join to the text of all, and what is unfinished at the end is left out."""
    for text in TEXTS:
        ids = [token for token in tokenizer.encode(text) if token not in tokenizer.special_ids]
        texts, joined = TokenTexts(tokenizer.token_bytes), ""
        for count, token in enumerate(ids, start=1):
            joined += texts.text(token)
            texts.follow(token)
            shown = without_unfinished(ids[:count], tokenizer.token_bytes, tokenizer.decode)
            assert "\ufffd" not in shown and joined.removeprefix(" ") == shown.removeprefix(" ")
        assert joined.removeprefix(" ") == text


def test_a_replacement_character_that_was_generated_stays(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x\ufffd")
    assert without_unfinished(ids, tokenizer.token_bytes, tokenizer.decode) == "x\ufffd"


def _whole(word: bytes) -> bool:
    try:
        word.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_a_text_goes_on_after_its_context(tokenizer: Tokenizer) -> None:
    """Wherever it is cut between characters, the two parts are the whole: no space is lost at the border."""
    for text in TEXTS:
        ids = tokenizer.encode("so " + text)
        full = tokenizer.decode(ids)
        for cut in range(1, len(ids)):
            before = tokenizer.decode(ids[:cut])
            if "\ufffd" not in before:
                assert before + tokenizer.decode_after(tokenizer.context(ids[:cut]), ids[cut:]) == full


def test_a_context_that_ends_in_the_middle_of_a_character_gives_no_text_twice(tokenizer: Tokenizer) -> None:
    ids = [token for token in tokenizer.encode("界x") if token not in tokenizer.special_ids]
    cut = next((at for at in range(1, len(ids)) if "\ufffd" in tokenizer.decode(ids[:at])), 0)
    if cut:
        after = tokenizer.decode_after(tokenizer.context(ids[:cut]), ids[cut:])
        assert after.endswith("x")
        assert len(after) <= len(ids) - cut


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("a 🦊🦊 b", ["🦊 b"]),
        ("a fox 世界", ["界"]),
        ("a fox 世界", [" 世"]),
        ("xe\u0301x", ["e\u0301"]),
        ("a fox", ["fo", "x"]),
        ("a fox", ["zz", "o"]),
    ],
)
def test_stop_texts_are_found_as_soon_as_they_are_there(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    ids = tokenizer.encode("so " + text)
    context, ids = ids[:3], ids[3:]
    matcher = StopMatcher(tokenizer.decode, stops, context=tokenizer.context(context))
    for count in range(1, len(ids) + 1):
        present = any(stop in tokenizer.decode_after(tokenizer.context(context), ids[:count]) for stop in stops)
        assert matcher.matches(ids[count - 1]) == present, count
        if present:
            return
    pytest.fail("never found")


def test_first_tokens_are_not_searched_but_a_stop_may_begin_there(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode("x")[-1], tokenizer.encode("aéo")[-1]] * 3
    for unsearched, expected in [(0, 2), (1, 2), (2, 4), (3, 4), (4, 6)]:
        matcher = StopMatcher(tokenizer.decode, ["xo"], unsearched=unsearched)
        assert next(n for n, token in enumerate(ids, start=1) if matcher.matches(token)) == expected


def test_a_stop_may_stay_or_begin_late() -> None:
    assert cut_at_stop("one two one", ["one"], include=True) == ("one", "one")
    assert cut_at_stop("one two one", ["one"], begin=1) == ("one two ", "one")
    assert cut_at_stop("one", ["one"], begin=-5) == ("", "one")


def test_bad_words_lose_the_token_that_completes_them() -> None:
    ids = {"fox": [7], " fox": [8], "red fox": [3, 8], " red fox": [4, 8], "ox": [5, 6], " ox": [9], "": [], " ": [2]}
    words = BadWords(ids.__getitem__, ["fox", " red fox", "ox", " "])
    # " ox" has another number of tokens than "ox", which is what vLLM asks for too
    expected = [(1, {7, 8}), (3, {7, 8}), (5, {6, 7, 8}), (5, {6, 7, 8}), (1, {7, 8})]
    assert words.forbidden() == {7, 8}
    for token, forbidden in expected:
        words.follow(token)
        assert words.forbidden() == forbidden, token


def test_a_bad_word_of_several_tokens_is_free_until_its_last() -> None:
    words = BadWords({"a b c": [1, 2, 3], " a b c": [4, 2, 3]}.__getitem__, ["a b c"])
    for token, forbidden in [(2, set()), (1, set()), (2, {3}), (5, set()), (4, set()), (2, {3})]:
        words.follow(token)
        assert words.forbidden() == forbidden
