"""Notebooks, outputs and runs, also hostile ones, for the tests of handouts."""

from __future__ import annotations

from pathlib import Path

import nbformat
from fabricate import FakeRun
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.frontends.handout.page import page_of
from labkit.record.folder import RunFolder

PLOTLY = "application/vnd.plotly.v1+json"

HOSTILE = (
    "</script><script>window.hurt = 1</script>",
    "<img src=x onerror='window.hurt = 2'>",
    "</pre></main><svg onload='window.hurt = 3'>",
    "<a href='javascript:window.hurt=4'>click</a>",
    "<iframe srcdoc='<script>parent.hurt = 5</script>'></iframe>",
    "<details open ontoggle='window.hurt = 6'>",
    "<style>main{display:none}</style><meta http-equiv=refresh content='0;url=//host.example'>",
)


def finished_run(runs: Path) -> FakeRun:
    """A finished run of two ranks."""
    run = FakeRun(runs, steps=30)
    run.start()
    run.step(30)
    run.say(0, "step 20: loss 1.0\n")
    run.say(1, "hello\n")
    run.end()
    run.close()
    return run


def hostile_run(runs: Path) -> RunFolder:
    """A run in which all free text is hostile."""
    evil = "".join(HOSTILE)
    run = FakeRun(runs, steps=10, script=f"{evil}.py", strategy=None, args=[evil])
    run.start()
    run.step(10)
    for rank in range(2):
        for stream in ("stdout", "stderr"):
            run.say(rank, "\n".join(HOSTILE) + "\n", stream)
        run.writers[rank].write("metric", step=3, name=evil, value=1.0)
    run.writers[0].write("error", type=evil, message=evil, traceback=evil)
    run.end("failed", message=evil, failures={"0": {"type": evil, "message": evil}}, exit_code=1)
    run.close()
    run.folder.script.write_text(f'"""{evil}"""\nprint({evil!r})\n', encoding="utf-8")
    run.folder.command.write_text(evil, encoding="utf-8")
    (run.folder.logs / "torchrun.log").write_text(evil, encoding="utf-8")
    return RunFolder(run.folder.path.rename(run.folder.path.with_name(evil.replace("/", "")[:200])))


def notebook(*cells) -> nbformat.NotebookNode:
    return new_notebook(cells=[new_markdown_cell("# A lab\n\nWhy?"), *cells])


def code(source: str, *outputs, **metadata) -> nbformat.NotebookNode:
    return new_code_cell(source, outputs=list(outputs), metadata=metadata)


def shown(**data) -> nbformat.NotebookNode:
    return new_output("display_data", {name.replace("__", "/"): value for name, value in data.items()})


def printed(text: str, name: str = "stdout") -> nbformat.NotebookNode:
    return new_output("stream", name=name, text=text)


def figure(title: str = "one line") -> dict:
    return {
        "data": [{"type": "scatter", "x": [1, 2], "y": [3, 1], "name": title}],
        "layout": {"title": {"text": title}, "height": 240},
    }


def page(*cells, runs: Path = Path("none"), **settings) -> str:
    return page_of(notebook(*cells), Path("labs/99_test.py"), runs, **settings).body


def ask(*argv: str) -> int:
    """The exit code of a command."""
    try:
        return act(cli.parse(argv))
    except SystemExit as refused:
        return refused.code
