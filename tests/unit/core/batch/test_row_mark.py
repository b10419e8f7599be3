"""Marks of a job's rows: written in the place of the origin, and shown to no reader."""

from __future__ import annotations

import pytest

from danube.core.batch.columns import BatchView, encode
from danube.core.batch.row_mark import RowMark, read_mark
from danube.server.messages.stream_messages import framed_messages


def view(origin: str) -> BatchView:
    return BatchView(encode([b"x"], publish_time_us=1, producer_name="p", origin=origin).to_bytes())


@pytest.mark.parametrize("mark", [RowMark("00ff" * 8, False), RowMark("00ff" * 8, True)])
def test_a_mark_is_read_as_it_was_written_and_is_no_origin(mark: RowMark) -> None:
    marked = view(mark.text)
    assert marked.row_mark == mark and marked.origin == ""
    assert marked.producer_name == "p"
    shown, plain = (framed_messages(one, "/default/t", 7) for one in (marked, view("")))
    assert shown == plain != framed_messages(view("broker:6650"), "/default/t", 7)


@pytest.mark.parametrize("origin", ["", "broker:6650", "http://rows:1"])
def test_an_address_is_no_mark(origin: str) -> None:
    assert read_mark(origin) is None
    assert view(origin).row_mark is None and view(origin).origin == origin
