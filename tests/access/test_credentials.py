"""What a key looks like, and that nobody sees it."""

from __future__ import annotations

import copy
import hashlib
import hmac
import pickle
import re
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.cred.credentials import ICredentials
from zope.interface.verify import verifyObject

from llmgw.access.credentials import (
    ApiKey,
    IApiKey,
    Secret,
    digest,
    import_fault,
    is_mistyped,
    new_id,
    new_key,
)

HIDDEN = "correct-horse-battery-staple"


def test_a_secret_shows_itself_as_stars_everywhere() -> None:
    secret = Secret(HIDDEN)
    shown = [
        repr(secret),
        str(secret),
        f"{secret}",
        f"{secret!r:>5}",
        f"{secret:>30}",
        "{}".format(secret),  # noqa: UP032 (one more way in)
        str([secret]),
    ]
    assert not any(HIDDEN in text for text in shown)
    assert repr(secret) == "***"
    assert not hasattr(secret, "__dict__")


def test_a_secret_is_revealed_only_on_demand() -> None:
    assert Secret(HIDDEN).reveal() == HIDDEN


@pytest.mark.parametrize("leak", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_secret_is_not_pickled_or_copied(leak: object) -> None:
    with pytest.raises(TypeError, match="not to be pickled"):
        leak(Secret(HIDDEN))  # type: ignore[operator]


def test_secrets_compare_by_their_text_and_with_nothing_else() -> None:
    assert Secret("é\udc80") == Secret("é\udc80")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a"), Secret("b")}) == 2


def test_an_api_key_is_a_credential_and_does_not_show_its_secret() -> None:
    key = ApiKey(HIDDEN, "10.0.0.1")
    verifyObject(IApiKey, key)
    assert ICredentials.providedBy(key)
    assert repr(key) == "<ApiKey from 10.0.0.1>"
    assert HIDDEN not in repr([key])


def test_an_api_key_does_not_show_in_a_traceback() -> None:
    try:
        raise ValueError(ApiKey(HIDDEN, "10.0.0.1"))
    except ValueError:
        assert HIDDEN not in traceback.format_exc()


def test_a_new_key_has_its_id_in_front_and_256_random_bits() -> None:
    made = {new_key("k7m2p9xa") for _ in range(200)}
    assert len(made) == 200
    for key in made:
        assert re.fullmatch(r"lgw_k7m2p9xa_[A-Za-z0-9_-]{49}", key)
        assert not is_mistyped(key)
        assert import_fault(key) is None


def test_new_ids_are_short_lower_case_and_unlike() -> None:
    made = {new_id() for _ in range(500)}
    assert len(made) == 500
    assert all(re.fullmatch("[a-km-np-z2-9]{8}", key_id) for key_id in made)


SOME_KEY = new_key("k7m2p9xa")


@given(st.data())
def test_a_typo_in_a_key_is_told(data: st.DataObject) -> None:
    key = SOME_KEY  # one for all examples: hypothesis wants nothing random but its own
    place = data.draw(st.integers(4, len(key) - 1))
    letter = data.draw(st.sampled_from("abcXYZ019_-é \udc80").filter(lambda letter: letter != key[place]))
    assert is_mistyped(key[:place] + letter + key[place + 1 :])


@pytest.mark.parametrize("cut", [1, 6, 30, 49, 50])
def test_a_key_that_was_not_copied_whole_is_told(cut: int) -> None:
    key = new_key("k7m2p9xa")
    assert is_mistyped(key[:-cut])
    assert is_mistyped(key + "A" * cut)


@pytest.mark.parametrize("foreign", ["", "lgw", "sk-1234567890abcdef", "x" * 60])
def test_foreign_keys_are_not_called_mistyped(foreign: str) -> None:
    assert not is_mistyped(foreign)


@pytest.mark.parametrize(
    ("secret", "fault"),
    [
        ("x" * 19, "it has 19 characters"),
        ("", "it has 0 characters"),
        ("x" * 20, None),
        ("sk-with a blank inside it", None),
        ("!\"#$%&'()*+,-./:;<=>?@[]", None),
        (" " + "x" * 20, "begins or ends with a blank"),
        ("x" * 20 + "\t", "printable ASCII"),
        ("xxxxxxxxxx\nxxxxxxxxxx", "printable ASCII"),
        ("é" * 20, "printable ASCII"),
        ("lgw_k7m2p9xa_wrong-wrong-wrong", "checksum"),
    ],
)
def test_what_may_be_imported(secret: str, fault: str | None) -> None:
    found = import_fault(secret)
    if fault is None:
        assert found is None
    else:
        assert found is not None
        assert fault in found
        assert not secret or secret not in found


def test_digest_is_sha256_or_hmac_under_a_pepper() -> None:
    assert digest(HIDDEN) == hashlib.sha256(HIDDEN.encode()).digest()
    assert digest(HIDDEN, b"pepper") == hmac.new(b"pepper", HIDDEN.encode(), "sha256").digest()


@given(st.text())
def test_any_text_has_a_digest(text: str) -> None:
    assert len(digest(text)) == len(digest(text + "\udc80", b"p")) == 32
