"""Widgets with our own JavaScript: opened again if messages from the kernel do not arrive in the page."""

from __future__ import annotations

import ipywidgets
from panels import sent_by

from labkit.frontends.panel.code import Command
from labkit.frontends.panel.handshake import reopen_until_connected


def test_a_widget_that_receives_no_messages_is_opened_again(monkeypatch):
    late, good = Command(text="torchrun"), Command()
    sent = [sent_by(one, monkeypatch) for one in (late, good)]
    for one in (late, good):
        one._handle_custom_msg({"kind": "rendered"}, [])
    assert [[message["kind"] for message in messages] for messages in sent] == [["ping"]] * 2
    good._handle_custom_msg({"kind": "pong"}, [])
    box = ipywidgets.HBox([good, late])
    comms = good.comm, late.comm
    reopen_until_connected(ipywidgets.VBox([box]), waits=(0.0, 0.0)).join(30)
    assert box.children == (good, late)
    assert good.comm is comms[0]
    assert late.comm is not comms[1], "it is another model in the page"
    assert late.get_state()["text"] == "torchrun"
    late._handle_custom_msg({"kind": "pong"}, [])
    assert late.connected, "its messages still arrive"
