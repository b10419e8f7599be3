"""Principals: their spelling, and kinds that no text can claim."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.security.principals import ANONYMOUS, GIVEN_KINDS, INTERNAL, Principal
from danube.errors import CallerError, InvalidArgument, InvalidName


@given(st.sampled_from(GIVEN_KINDS), st.text("aZ09:.-_ @/ü€", min_size=1, max_size=40))
def test_a_principal_is_read_as_it_is_written(kind: str, name: str) -> None:
    principal = Principal(kind, name)
    assert Principal.parse(str(principal)) == principal


@pytest.mark.parametrize(
    "text",
    [
        "",
        "anna",
        ":anna",
        "User:anna",
        "broker_internal:2",
        "anonymous:",
        "anonymous",
        "admin:anna",
        "user anna",
    ],
)
def test_kinds_that_no_text_can_claim(text: str) -> None:
    with pytest.raises(InvalidArgument, match="principal"):
        Principal.parse(text)


@pytest.mark.parametrize("text", ["user:", "user:a\nb", "service_account:" + "x" * 300])
def test_names_that_cannot_be(text: str) -> None:
    with pytest.raises(InvalidName, match="principal"):
        Principal.parse(text)


@given(st.text("users_vicaon:\n\x00ü\ud800 ", max_size=60))
def test_any_text_is_a_principal_or_an_error(text: str) -> None:
    try:
        assert str(Principal.parse(text)) == text
    except CallerError:
        pass


def test_the_fixed_identities() -> None:
    assert (str(ANONYMOUS.principal), ANONYMOUS.how) == ("anonymous", "none")
    assert (str(INTERNAL.principal), INTERNAL.how) == ("broker_internal", "internal")
