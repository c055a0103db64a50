"""The notebook's end of widgets on ranks: passes messages between the model on a rank and its view in the browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import comm


class Widgets:
    """The widgets of a group of ranks. `tell(rank, buffers, **message)` sends to a rank."""

    def __init__(self, tell: Callable[..., None]):
        self._tell = tell
        self._comms: dict[str, Any] = {}

    def hear(self, rank: int, message: dict[str, Any], buffers: Sequence[bytes]) -> None:
        """A message of the model of a widget on a rank, in any thread."""
        name, content, metadata = message["id"], message["content"], message["metadata"]
        if message["kind"] == "comm_open":
            opened = comm.create_comm(
                comm_id=name,
                target_name=message["target_name"],
                data=content,
                metadata=metadata,
                buffers=[*buffers],
            )
            opened.on_msg(lambda said: self._pass_on(rank, name, said))
            self._comms[name] = opened
        elif (known := self._comms.get(name)) is not None and message["kind"] == "comm_msg":
            known.send(data=content, metadata=metadata, buffers=[*buffers])
        elif known is not None:
            del self._comms[name]
            known.close(data=content)

    def _pass_on(self, rank: int, name: str, said: dict[str, Any]) -> None:
        buffers = [bytes(buffer) for buffer in said.get("buffers") or ()]
        self._tell(rank, buffers, id=name, content=said["content"]["data"])
