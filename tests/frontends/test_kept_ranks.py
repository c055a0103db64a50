"""Ranks that stay across cells (`%%torchrun N --keep`, `%%ranks`, `%ranks`) in a real kernel, over gloo."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import jupyter_client
import pytest
from conftest import processes_of, wait_until
from kernels import SECONDS, Front
from places import ROOT

from labkit.frontends.magic.cell import CellError, Measured, RankOutput, Shown, check_body, merged, ranks_text
from labkit.frontends.magic.group import Group
from labkit.frontends.magic.kept import _chosen
from labkit.probe.values import NoValue, packed, unpacked
from labkit.record.folder import RunFolder

KEEP = "%%torchrun 3 --keep --device cpu\n"


# ---- one kernel and one group of ranks for all tests here; each of them leaves ranks that can be used, or none


@pytest.fixture(scope="module")
def kernel(tmp_path_factory, warm_server) -> Iterator[tuple[Front, Path]]:
    place = tmp_path_factory.mktemp("kept")
    runs = place / "runs"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": str(place / "ipython"),
        "OMP_NUM_THREADS": "1",
        "LABKIT_RUNS": str(runs),
    }
    warm_server()
    manager, client = jupyter_client.manager.start_new_kernel(cwd=str(place), env=environment)
    try:
        front = Front(manager, client)
        front.do("%load_ext labkit")
        yield front, runs
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        wait_until(lambda: not processes_of(str(runs)), 30)


@pytest.fixture
def front(kernel) -> Front:
    """The kernel, with three ranks that stay."""
    front, _ = kernel
    assert "ran on ranks 0–2" in front.shows(f"{KEEP}pass")
    return front


def test_before_there_are_ranks_each_magic_says_how_to_start_them(kernel):
    front, runs = kernel
    for code in ("%%ranks\n1", "%ranks", "%ranks stop", "%ranks pull x"):
        assert "no ranks stay here; %%torchrun 4 --keep starts them" in front.shows(code)
    assert not runs.exists()


def test_variables_and_the_process_group_live_across_cells(front):
    shown = front.shows(f"{KEEP}x = torch.full((2,), float(rank))\ndist.all_reduce(x)\nprint('sum ü')\nx")
    assert "── ranks 0–2 · " in shown and shown.count("sum ü") == 1, "what all ranks print is shown once"
    assert shown.count("tensor([3., 3.])") == 1 and "peak " in shown and "sent 11 B" in shown
    shown = front.shows("%%ranks\ny = x * rank\ny")
    assert "── rank 1 · " in shown and "tensor([6., 6.])" in shown.partition("── rank 2")[2]
    shown = front.shows("%%ranks 0,2\nprint('I am', rank, end='')")
    assert "I am 0" in shown and "I am 2" in shown and "rank 1" not in shown
    assert "I am" not in front.shows("%%ranks 0-1\nNone"), "the last line of the cell before has no newline"
    assert "(no output)" in front.shows("%%ranks\nx;")


def test_the_value_of_a_future_feature_and_of_a_huge_container(front):
    shown = front.shows("%%ranks 0\nfrom __future__ import annotations\nlist(range(10**6))")
    assert "… 1,000,000 items" in shown and len(shown) < 40_000
    shown = front.shows("%%ranks 0\nfor number in range(50_000): print('line', number)")
    assert "line 49999" in shown and "49,600 earlier lines" in shown


def test_pictures_of_ranks_are_shown(front):
    front.shows("%%ranks\nclass Dot:\n    def _repr_svg_(self):\n        return f'<svg><!-- {rank} --></svg>'")
    page = front.shows("%%ranks 0-1\ndisplay(Dot(), 7)\nDot()", "text/html")
    assert page.count("data:image/svg+xml;base64,") == 4 and "<svg" not in page
    assert 'alt="picture of rank 1"' in page and ">7<" in page


def test_tables_and_charts_of_ranks_are_shown_below_as_the_notebook_shows_its_own(front):
    table = "class Table:\n    def _repr_html_(self):\n        return f'<table><td>{len(\"ab\")}</td></table>'\n"
    front.shows(f"%%ranks\nimport plotly.graph_objects as go\n{table}")
    below = front.displays("%%ranks\ndisplay(go.Figure(go.Bar(y=[rank])))\nTable()")
    assert [bundle["text/html"] for bundle in below if "<table><td>2<" in bundle.get("text/html", "")]
    assert [
        bundle["application/vnd.plotly.v1+json"]["data"][0]["y"]
        for bundle in below
        if "application/vnd.plotly.v1+json" in bundle
    ] == [[0], [1], [2]]
    assert "ranks 0–2</b></div><table>" in "".join(
        bundle.get("text/html", "") for bundle in front.displays("%%ranks\nTable()")
    )


def test_magics_and_shell_commands_run_on_ranks_and_lines_stay_where_they_are(front):
    assert "\nvalue 1\n── rank 2" in front.shows("%%ranks\nvalue = rank\n\n!echo value {value}")
    assert "loop" in front.shows("%%ranks 0\n%timeit -n 3 -r 1 torch.ones(1)")
    assert "CPU times" in front.shows("%%ranks 0\n%%time\nlate = 6")
    assert "7" in front.shows("%%ranks 0\nlate + 1")
    assert "at line 4: ZeroDivisionError" in front.shows("%%ranks 0\n%time value\n\n1 / 0")
    assert "Docstring" in front.shows("%%ranks 0\nlen?")
    held = front.shows("%ranks")
    assert "value" in held and "get_ipython" not in held and "exit" not in held


def test_a_cell_of_comments_does_nothing(front):
    assert "ran on ranks 0–2" in front.shows("%%ranks\n# later")


def test_after_auto_cells_without_a_first_line_run_on_ranks(front):
    front.do("%ranks auto")
    try:
        assert "── rank 2" in front.shows("placed = rank\nplaced")
        assert "\nis 1\n" in front.shows("late = rank\n!echo is {late}")
        assert "failed at line 2: ZeroDivisionError" in front.shows("placed\n1 / 0")
        assert "does not parse, line 1" in front.shows("placed = (")
        assert "placed.bit_length" in front.completes("placed.bit_l")
        front.do("%ranks pull placed")
        assert front.do("%ranks auto off") and front.do("print(placed)") == "[0, 1, 2]\n"
    finally:
        front.do("%ranks auto off")
    assert "ran on" not in front.shows("placed")


def test_what_ipython_displays_on_ranks_is_shown(front):
    code = "%%ranks 0\nfrom IPython.display import HTML, clear_output, display\nprint('early')\nclear_output()\n"
    told = front.displays(f"{code}print('late')\ndisplay(HTML('<b>bold</b>'))")
    assert "early" not in told[0]["text/plain"] and "late" in told[0]["text/plain"]
    assert told[1]["text/html"].endswith("<b>bold</b>")
    code = "%%ranks 0\nplace = display(HTML('one'), display_id=True)\nplace.update(HTML('two'))"
    assert [bundle["text/html"][-3:] for bundle in front.displays(code)[1:]] == ["two"]


def test_widgets_of_ranks_have_their_model_on_the_rank(front):
    code = "%%ranks 1\nimport ipywidgets\nheard = []\nslider = ipywidgets.IntSlider(value=3)\n"
    told = front.displays(f"{code}slider.observe(lambda change: heard.append(change.new), 'value')\nslider")
    kind = "application/vnd.jupyter.widget-view+json"
    (view,) = [bundle[kind] for bundle in told if kind in bundle]
    change = {"method": "update", "state": {"value": 7}, "buffer_paths": []}
    moved = front.client.session.msg("comm_msg", {"comm_id": view["model_id"], "data": change})
    front.client.shell_channel.send(moved)
    assert "(7, [7])" in front.shows("%%ranks 1\nslider.value, heard")
    told = front.displays("%%ranks 0\nimport ipywidgets\nipywidgets.interact(lambda x: print('x is', x), x=4)")
    assert any("x is 4" in str(bundle.get("state")) for bundle in told)


def test_cells_may_await(front):
    code = "import asyncio\n\nasync def double(x):\n    await asyncio.sleep(0)\n    return 2 * x\n\n"
    assert "42" in front.shows(f"%%ranks\n{code}y = await double(20)\nawait double(21)")
    assert "── rank 1" in front.shows("%%ranks\nawait double(rank)")


def test_report_makes_a_table(front):
    from_ranks = front.shows("%%ranks 1-2\nreport(square=rank * rank)")
    assert from_ranks.splitlines()[-3:] == ["rank  square", "   1       1", "   2       4"]


def test_what_ranks_hold_is_a_table_and_the_run_is_listed(front, kernel):
    front.shows("%%ranks\nw = torch.zeros(3, 5, dtype=torch.float64)\nlayer = torch.nn.Linear(2, 3)\nn = rank")
    shown = front.shows("%ranks")
    assert "3 CPU ranks: waiting for a cell" in shown
    row = next(line for line in shown.splitlines() if line.startswith("w "))
    assert row.split() == ["w", "0–2", "Tensor", "[3,", "5]", "float64", "cpu", "120", "B"]
    assert "9 parameters" in shown
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("n ")] == ["0", "1", "2"]
    newest = RunFolder.all(kernel[1])[-1]
    assert stat.S_IMODE(newest.path.stat().st_mode) == 0o700


def test_values_travel_to_the_notebook_and_back(front):
    front.shows("%%ranks\nt = torch.arange(3, dtype=torch.bfloat16) + rank\nodd = object()")
    assert "t is a list of the values of ranks 0–2" in front.shows("%ranks pull t")
    assert front.do("print(len(t), t[2].dtype, t[2].tolist())") == "3 torch.bfloat16 [2.0, 3.0, 4.0]\n"
    front.shows("%ranks pull t 1")
    assert front.do("print(t.tolist())") == "[1.0, 2.0, 3.0]\n"
    front.do("given = {'a': (1, 'ü'), 'b': [t]}")
    assert "given is set on ranks 0, 2" in front.shows("%ranks push given 0,2")
    assert "{'a': (1, 'ü'), 'b': [tensor([1., 2., 3.], dtype=torch.bfloat16)]}" in front.shows("%%ranks 2\ngiven")
    assert "NameError" in front.shows("%%ranks 1\ngiven")
    assert "odd is of type object; numbers, strings" in front.shows("%ranks pull odd")
    assert "missing does not exist on rank 0" in front.shows("%ranks pull missing")
    assert "the notebook has no variable missing" in front.shows("%ranks push missing")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("%%ranks 7\n1", "the ranks here are 0–2, got '7'"),
        ("%%ranks 1-0\n1", "the ranks here are 0–2, got '1-0'"),
        ("%%ranks all\n1", "ranks are numbers and ranges"),
        ("%%ranks\nx = (", "line 2: '(' was never closed; nothing was started"),
        ("%%ranks\nx = 1\n%no_such_magic x", "UsageError: Line magic function `%no_such_magic` not found."),
        ("%%ranks\n ", "the cell is empty"),
        ("%%torchrun 2 --keep --device cpu\n1", "3 CPU ranks stay here already; use %%ranks, or end them first"),
        ("%%torchrun 3 --keep --as x\n1", "--as is for ranks that end with their cell"),
        ("%%torchrun 999 --keep\n1", "this machine has at most"),
        ("%ranks begin", "'begin' is not known; there are %ranks, %ranks stop"),
        ("%ranks pull x.y", "the name of a variable is needed, got 'x.y'"),
    ],
)
def test_what_is_not_possible_is_one_sentence(front, code, words):
    assert words in front.shows(code)


def test_an_exception_on_one_rank_frees_those_that_wait_for_it(front):
    front.shows("%%ranks\nheld = torch.ones(1) * rank")
    shown = front.shows(
        "%%ranks\ndef part():\n    if rank == 1:\n        raise ValueError('no <i>')\n    dist.all_reduce(held)\npart()"
    )
    assert shown.startswith("rank 1 failed at line 4: ValueError: no <i>")
    assert "ranks 0, 2 waited in all_reduce #" in shown and "at line 5; rank 1 raised an exception" in shown
    assert "line 6, in <module>" in shown and "train.py" not in shown and "cells.py" not in shown
    assert "the process group was made again, and all variables are there" in shown
    assert "tensor([3.])" in front.shows("%%ranks\ndist.all_reduce(held)\nheld")


def test_ranks_ask_one_after_the_other(front):
    prompts, shown = front.answers("%%ranks 0-1\nname = input('Who? ')\nname", "Ada", "Grace")
    assert sorted(prompts) == ["rank 0: Who? ", "rank 1: Who? "]
    assert "'Ada'" in shown and "'Grace'" in shown and "ran on ranks 0–1" in shown


LOOP = "%%ranks\ntotal = 0\nfor number in range(3):\n    if rank == 1 and number == 1:\n        breakpoint()\n"
LOOP += "    total += number\ndist.barrier()\ntotal"


def test_a_rank_stops_at_a_breakpoint_and_is_stepped_while_the_others_wait(front):
    prompts, shown = front.answers(LOOP, "p 10 * number", "!total = 40", "n", "p -total", "b 6", "c", "cl 1", "c")
    assert prompts == ["rank 1: (Pdb) "] * 8
    of_rank_1 = shown.partition("── rank 1")[2].partition("── rank")[0]
    assert of_rank_1.count("(6)<module>()\n-> total += number") == 2 and "> Cell In[" in of_rank_1
    assert "\n10\n" in of_rank_1 and "\n-41\n" in of_rank_1 and of_rank_1.rstrip().endswith("43")
    assert "ran on ranks 0–2" in shown
    assert "ran on ranks 0–2" in front.shows("%%ranks\nfor number in range(3):\n    total += number"), "nothing traces"


def test_the_debugger_can_be_left_or_interrupted_and_the_group_works(front):
    _, shown = front.answers(LOOP, "q")
    assert "rank 1 failed at line 6: BdbQuit: the debugger was left" in shown and "cells.py" not in shown
    request = front.begin(LOOP)
    assert front.client.get_stdin_msg(timeout=SECONDS)["content"]["prompt"] == "rank 1: (Pdb) "
    front.manager.interrupt_kernel()
    assert "variables are there" in front.end(request)
    prompts, shown = front.answers("%%ranks 2\ninput('again? ')", "yes")
    assert prompts == ["rank 2: again? "] and "'yes'" in shown


@pytest.mark.parametrize("call", ["input('?')", "breakpoint()"])
def test_where_nobody_answers_a_cell_that_asks_ends(front, call):
    request = front.client.execute(f"%%ranks\n{call}", allow_stdin=False)
    assert f"RuntimeError: {call.partition('(')[0]}() can ask nobody here" in front.end(request)


def test_the_place_of_an_exception_can_be_looked_at_until_the_next_cell(front):
    function = (
        "def part(n):\n    mine = torch.ones(2) * rank\n    if rank == 1:\n        raise ValueError\n    return mine\n"
    )
    shown = front.shows(f"%%ranks\n{function}def call(depth):\n    part(depth + 1)\ncall(4)")
    assert "rank 1 failed at line 5: ValueError" in shown
    listed = front.shows("%ranks debug")
    assert (
        "up 0: part, line 5 of Cell In" in listed and "mine: Tensor [2] float32 cpu" in listed and "n: int 5" in listed
    )
    assert "up 1: call, line 8 of" in listed and "up 2: <module>, line 9 of" in listed and "rank 0" not in listed
    shown = front.shows("%%ranks debug 1\nmine += 1\nfound = [n + extra for extra in (1, 2)]\n(mine, found, rank)")
    assert "(tensor([2., 2.]), [6, 7], 1)" in shown
    assert "NameError" in front.shows("%%ranks debug\nfound"), "a name that is set there is gone afterwards"
    assert "tensor([2., 2.])" in front.shows("%%ranks debug\nmine"), "an exception there changes no place"
    assert "\n4\n" in front.shows("%%ranks debug up\ndepth") + "\n"
    assert "there are 3 places; the last one is up 2" in front.shows("%%ranks debug 1 up 7\n1")
    assert "rank 0 raised no exception in the last cell; rank 1 did" in front.shows("%%ranks debug 0\n1")
    front.shows("%%ranks\npass")
    assert "no rank raised an exception in its last cell" in front.shows("%%ranks debug\nmine")


def test_a_cell_on_one_rank_does_not_wait_for_those_that_are_not_in_it(front):
    shown = front.shows("%%ranks 0\ndist.barrier()")
    assert "rank 0 waited in barrier" in shown
    assert "ranks 1–2 did not run the cell" in shown


def test_a_hang_says_who_waits_where_and_an_interrupt_ends_it(front):
    calls = "if rank == 0:\n    dist.all_reduce(torch.ones(1))\nelse:\n    dist.recv(torch.ones(1), 0)"
    request = front.begin(f"%%ranks\nkeep = rank\n{calls}")
    wait_until(
        lambda: front.sees("rank 0 waits in all_reduce") and front.sees("ranks 1–2 wait in recv at line 6"), SECONDS
    )
    front.manager.interrupt_kernel()
    shown = front.end(request)
    assert "the process group was made again" in shown and "── rank 0 · waited in all_reduce #" in shown
    assert "1" in front.shows("%%ranks\ndist.barrier()\nkeep").partition("── rank 1")[2]


def test_an_interrupt_of_python_code_keeps_the_variables_and_the_kernel(front):
    request = front.begin("%%ranks\nmine = rank\nprint('asleep', flush=True)\nwhile True: time.sleep(1)")
    wait_until(lambda: front.sees("asleep"), SECONDS)
    front.manager.interrupt_kernel()
    shown = front.end(request)
    assert shown.startswith("interrupted after") and "── ranks 0–2 · interrupted at line 4" in shown
    assert "2" in front.shows("%%ranks\nmine").partition("── rank 2")[2]
    assert front.do("print(1 + 1)") == "2\n"


def test_names_on_ranks_are_completed_in_their_cells(front):
    front.shows("%%ranks\nlearning_rate_of_rank = torch.ones(1)")
    code = "%%ranks\nlearning_r"
    assert "learning_rate_of_rank" in front.completes(code) and not front.completes("learning_r")
    assert "learning_rate_of_rank.untyped_storage" in front.completes("%%ranks\nlearning_rate_of_rank.untyped_")
    assert not front.completes("%%ranks\nmissing_on_ranks.untyped_")


def test_shift_tab_tells_of_what_ranks_hold(front):
    front.shows(
        "%%ranks\ndef doubled(x, by=2):\n    'Times two.'\n    return by * x\n\nspeed_of_rank = torch.ones(2, 3)"
    )
    told = front.inspects("%%ranks\ndoubled(")
    assert "Signature: doubled(x, by=2)" in told and "Times two." in told
    assert "shape: [2, 3]" in front.inspects("%%ranks\nspeed_of_rank")
    assert "On rank 0\nType: builtin_function_or_method" in front.inspects("%%ranks\ntorch.ones")
    assert not front.inspects("speed_of_rank") and not front.inspects("%%ranks\nmissing_on_ranks")


def test_restart_and_stop_say_that_variables_are_lost(front, kernel):
    front.shows("%%ranks\nlost = 1")
    assert "3 CPU ranks are there again" in (shown := front.shows("%ranks restart")) and "variables are lost" in shown
    assert "NameError" in front.shows("%%ranks\nlost")
    assert "ranks 0–2 ended (finished); their variables are lost" in front.shows("%ranks stop")
    wait_until(lambda: not processes_of(str(kernel[1])), 30)
    assert "no ranks stay here" in front.shows("%%ranks\n1")


@pytest.mark.parametrize("busy", [True, False])
def test_the_death_of_a_rank_ends_the_others_and_is_said(front, kernel, busy):
    pids = RunFolder.all(kernel[1])[-1].read_status().ranks
    if busy:
        request = front.begin("%%ranks\nprint('here', flush=True)\ntime.sleep(600)")
        wait_until(lambda: front.sees("here"), SECONDS)
        os.kill(pids[1], signal.SIGKILL)
        shown = front.end(request)
    else:
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: not processes_of(str(kernel[1])), SECONDS)
        shown = front.shows("%%ranks\n1")
    assert "the ranks have ended: failed (rank 1: " in shown and "their variables are lost" in shown
    assert "%%torchrun 3 --keep starts new ones" in shown
    wait_until(lambda: not processes_of(str(kernel[1])), 30)


def test_no_rank_outlives_the_kernel(front, kernel):
    assert processes_of(str(kernel[1]))
    front.manager.shutdown_kernel(now=True)
    wait_until(lambda: not processes_of(str(kernel[1])), 60)
    state = RunFolder.all(kernel[1])[-1].read_status()
    assert state.state == "stopped" and "the process that started it" in state.message


# ---- without ranks


def test_ranks_with_the_same_output_are_shown_together():
    alike = [RankOutput(rank, "a", measured=(Measured(rank / 10 + 0.1, 1 << 20, 0),)) for rank in range(3)]
    (block,) = merged(alike)
    assert (block.heading, block.took) == ("ranks 0–2", "0.10 s to 0.30 s · peak 1 MiB")
    differing = [RankOutput(rank, "a", value=str(rank == 1)) for rank in range(3)]
    assert [(output.name, output.stdout, output.value) for output in merged(differing)] == [
        ("ranks 0–2", "a", ""),
        ("ranks 0, 2", "", "False"),
        ("rank 1", "", "True"),
    ]
    assert ranks_text([5, 0, 1, 2, 7]) == "ranks 0–2, 5, 7"


def test_a_value_of_a_rank_is_text_and_no_markup():
    shown = Shown("ran", "good", [RankOutput(0, "", value="<b>x</b>", others=(1,))])
    assert "<b>x" not in shown.html() and 'aria-label="ranks 0–1"' in shown.html()


def test_a_line_of_a_magic_is_named():
    with pytest.raises(CellError, match="line 2: '!ls' is not Python"):
        check_body("!ls", "\n!ls", 1)


def test_values_that_cannot_travel_say_why():
    import numpy as np
    import torch

    for value in (True, None, 1.5, "ü", [1, (2, "x")], {1: {"a": None}}):
        assert unpacked(*packed(value)) == value
    half = torch.arange(6, dtype=torch.float16).reshape(2, 3).T
    assert torch.equal(unpacked(*packed(half)), half) and unpacked(*packed(torch.empty(0, 2))).shape == (0, 2)
    assert np.array_equal(unpacked(*packed(np.eye(2, dtype=">f4"))), np.eye(2))
    for value, words in (
        (object(), "is of type object"),
        ({(1,): 1}, "keys are not all"),
        (np.array([object()]), "array of object"),
        (torch.eye(2).to_sparse(), "only dense tensors"),
        ([[[[[[[[[1]]]]]]]]], "deeper than 8"),
    ):
        with pytest.raises(NoValue, match=words):
            packed(value)
    for tree in ({"tensor": 0, "dtype": "save", "shape": [1]}, {"tensor": 9, "dtype": "int8", "shape": [1]}, {"x": 1}):
        with pytest.raises(NoValue, match="did not arrive"):
            unpacked(tree, [b"\0"])


def test_ranks_are_chosen_by_numbers_and_ranges():
    group = Group.__new__(Group)
    group.spec = type("Spec", (), {"nproc": 4})
    assert _chosen("", group) == [0, 1, 2, 3] and _chosen("3, 0 - 1,1", group) == [0, 1, 3]
    for text in ("4", "0,", "1-9", "-1", "٣"):
        with pytest.raises(CellError):
            _chosen(text, group)
