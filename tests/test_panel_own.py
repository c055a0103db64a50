"""Our own widgets: asked for an answer, and opened again in a page that does not hear them."""

from __future__ import annotations

import ipywidgets
from panels import sent_by

from labkit.frontends.panel.code import Command
from labkit.frontends.panel.own import open_until_heard


def test_a_widget_that_does_not_hear_is_opened_again(monkeypatch):
    late, good = Command(text="torchrun"), Command()
    sent = [sent_by(one, monkeypatch) for one in (late, good)]
    for one in (late, good):
        one._handle_custom_msg({"kind": "here"}, [])
    assert [[message["kind"] for message in messages] for messages in sent] == [["hello"]] * 2
    good._handle_custom_msg({"kind": "heard"}, [])
    box = ipywidgets.HBox([good, late])
    comms = good.comm, late.comm
    open_until_heard(ipywidgets.VBox([box]), waits=(0.0, 0.0)).join(30)
    assert box.children == (good, late)
    assert good.comm is comms[0]
    assert late.comm is not comms[1], "it is another model in the page"
    assert late.get_state()["text"] == "torchrun"
    late._handle_custom_msg({"kind": "heard"}, [])
    assert late.heard, "its messages still arrive"
