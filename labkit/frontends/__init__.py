"""The front ends: the panel, the terminal, the magics, handouts and `labkit doctor`.

They contain no logic and do not know each other.

- Panel. `frontends/panel/lab.py` is the panel with its choices; it asks in a thread whether their data are
  available. `frontends/panel/compare.py` is the tab that compares,
  `frontends/panel/recorded.py` has the recorded runs and their time line, `frontends/panel/predict.py` what is shown
  above the charts until there are steps: a prediction or the formulas, then the start of the ranks. It also has the
  button that predicts, in a thread; what is shown is looked up again when a prediction ends, so that one for an
  earlier choice is cached but not shown; and the fields of the learner's own prediction. `frontends/panel/view.py`
  has the one thread that reads a run and sets widgets; buttons in the kernel's thread and answers to pages read the
  same state under the same lock. `frontends/panel/charts.py` has the charts, also those of the tabs of timeline and
  memory, and knows what the page already has. The live chart is plotly.js in our anywidget: the whole chart once,
  then new points only, and the whole again when a page asks for it, as after a reload. If no page answers, the same
  charts are sent as SVG. `frontends/panel/widgets.py` opens each of our widgets again that no message from the kernel
  reaches: anywidget drops all messages to a widget that a busy page needs more than two seconds to start. When a run
  ends, a plain figure stays in the notebook.
- Class. `frontends/panel/class_view.py` shows a class, which a thread of its own reads again every few seconds, with
  the HTML of `course/classroom/page.py`, as on the page of `labkit class --html`.
- Terminal. `frontends/terminal.py` draws the same facts from RunState with rich.
- Magic. `frontends/magic/` is `%%torchrun`: `frontends/magic/cell.py` reads the cell and formats what is shown,
  `frontends/magic/torchrun.py` writes it to the `train.py` of the run folder and follows its run.
  `frontends/magic/kept.py` is `%%torchrun N --keep` and `%%ranks`: one run whose script, `probe/cells.py`, runs the
  cells that it is sent. `report` is the only part here that runs in the ranks.
- Handouts. `frontends/handout/execute.py` runs a lab in a kernel of this Python, over pipes, in a temporary folder,
  or with runs from a folder instead of new ones.
  `frontends/handout/page.py` lays out the results of a run and the cells of a lab, links terms to their definitions,
  and assembles the page with plotly.js in it once, gzipped. `frontends/handout/clean.py` sanitises the HTML of cells
  by lists, as the last step; what the lab writes itself is escaped and not sanitised. The content security policy of
  the page identifies its two programs by their hash.
- Doctor. `frontends/doctor.py` reports what the machine can do.
"""
