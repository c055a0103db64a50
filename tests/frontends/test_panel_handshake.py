"""Widgets with our own JavaScript: opened again if messages from the kernel do not arrive in the page."""

from __future__ import annotations

from panels import sent_by

from labkit.frontends.panel.sources import Command


def test_a_widget_that_receives_no_messages_is_opened_again(monkeypatch):
    widget = Command(text="torchrun")
    sent = sent_by(widget, monkeypatch)
    widget._handle_custom_msg({"kind": "rendered"}, [])
    assert [message["kind"] for message in sent] == ["ping"]
    comm = widget.comm
    widget._handle_custom_msg({"kind": "lost"}, [])
    assert widget.comm is not comm, "it is another model in the page"
    assert widget.box.children == (widget,)
    assert widget.get_state()["text"] == "torchrun"
    widget._handle_custom_msg({"kind": "rendered"}, [])
    assert len(sent) == 2, "its messages still arrive"


def test_a_widget_that_no_message_ever_reaches_is_left_as_it_is():
    widget = Command(text="torchrun")
    for _ in range(20):
        comm = widget.comm
        widget._handle_custom_msg({"kind": "lost"}, [])
    assert widget.comm is comm
    assert widget.box.children == (widget,)
