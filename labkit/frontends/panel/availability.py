"""Whether what a configuration needs is available: asked in a thread, because a disk or a network may take seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable

from labkit.plan.settling import check_available, takes_long
from labkit.plan.spec import Spec, SpecError


class Availability:
    """The answers for the configurations of a panel. `on_answer` is called in a thread when an answer arrives.

    A configuration that was available stays so. One that was not is asked again after the next change of the
    configuration; until then its refusal stays.
    """

    def __init__(self, on_answer: Callable[[], None]):
        self._on_answer = on_answer
        self._answers: dict[tuple[str | None, ...], SpecError | None] = {}
        self._asking: set[tuple[str | None, ...]] = set()
        self._lock = threading.Lock()

    def known(self, spec: Spec, ask: bool = True) -> bool:
        """Whether a Spec is known to be available; if it is not, `ask` asks in a thread. Raises the `SpecError` of the
        last answer if that was a refusal."""
        if not takes_long(spec):
            return True
        key = (spec.strategy, spec.workload, spec.data, spec.data_dir)
        with self._lock:
            answer = self._answers.get(key, ...)
            if ask and answer is not None and key not in self._asking:
                self._asking.add(key)
                threading.Thread(
                    target=self._ask, args=(key, spec), daemon=True, name="labkit availability of data"
                ).start()
        if isinstance(answer, SpecError):
            raise answer
        return answer is None

    def _ask(self, key: tuple[str | None, ...], spec: Spec) -> None:
        try:
            check_available(spec)
            answer = None
        except SpecError as error:
            answer = error
        with self._lock:
            self._answers[key] = answer
            self._asking.discard(key)
        self._on_answer()
