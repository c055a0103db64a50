"""The run folder: events and their fold (`RunState`), logs, status, replay. It is the only link between ranks and front
ends.

A folder may come from an untrusted source, so files are opened only below the folder, and values are checked once,
when they are read. The package never imports torch or plotly.

Untrusted input. A run folder can be mailed, and nothing in it is trusted. `RunFolder` in `record/folder.py` knows the
paths of a run and is the only reader (atomic writes; mode 0700). Everything is checked once, when it is read; after
that, code trusts the values.

- `record/files.py` opens files below the folder only (each component relative to the one above, no symbolic link),
  regular files only, up to a limit. A hard link cannot be distinguished from a file.
- `record/events.py` has a `msgspec.Struct` for each kind of event, `record/documents.py` one for each document
  (`spec.json`, `status.json`, …). It is the only definition: decoding checks every value against it, mypy checks the
  code with it, and `labkit schema` prints it as JSON Schema. Fields without a definition are ignored. Lines are
  parsed by Python's `json`, because it knows NaN and unpaired surrogates, which ranks write, and msgspec refuses
  both.
- An invalid event is a broken line, and is counted; an invalid `spec.json` or `status.json` makes the folder
  unreadable, and lists show the reason (`Unreadable`: the field, what it must be, and its value). An invalid
  `summary.json`, also one of an earlier version, is computed again from the events.

`tests/bench/fuzz.py` reads recorded runs in every way after mutations; a few hundred mutations are a test, ten
thousand a part of `labkit bench`. `tests/record/test_schema.py` puts values of any kind into every place of recorded
events and documents with hypothesis. `tests/recorded/` has folders of an earlier version, which must keep opening.

Events and steps. `record/writer.py` is what every rank imports, with the standard library only: the writer, which
keeps lines whole on a full disk, and the layout of the step file. `record/reader.py` reads both files of a rank in
one order, waits for half a line, and counts a broken one. `record/clock.py` is the clock of a run: Unix seconds at
its start, continued by the monotonic clock, the same in all of its processes. Rare events are JSON lines in
`events/rankN.jsonl`. Steps are binary records of 88 bytes in `events/rankN.steps`, whose columns are a numpy dtype
(`head -1` shows it), each appended in one write: 8 ranks × 100,000 steps take 70 MB and open in less than two seconds
of CPU time. Each line says how many records came before it, which gives both files one order. The columns
of a rank's steps are numpy arrays: the newest records are in memory and older ones are read from the file
again, so a state stops growing after some thousand steps; ten million open in 110 MB. The file is not mapped, because
a process that maps a file dies when another one truncates it. Folders of older versions, whose steps are JSON lines,
open as before. Everything else that is written regularly (profiled steps, traffic, samples from outside) becomes
rarer in a long run and grows with the logarithm of its length.

State. `RunState` in `record/state.py` is one fold over events, blocks of steps and documents, dispatched by their
type, and what they say: progress, words, failure. An unknown kind is ignored. `record/ranks.py` has the state of one
rank, and what only a comparison of ranks shows: which of them failed first, and in which way, and which read the same
samples, because each sample counts once in samples/s: the table of strategies knows it for the lab's scripts, and for
any other script it is inferred from digests of the first inputs, and the summary says so. What is derived from a
state is computed once per revision (`per_revision`), a number that grows with every change: findings, ledger, summary
and rows of a comparison cost nothing at a redraw without a new event. A state knows no clock. Its present is the
newest sample of the supervisor, an event like any other, and the length of a hang is what the waiting rank reports; a
test ensures that neither analysis nor figures read a clock. `record/state.py` also says what each rank has
reached before its first step. `record/follow.py` says what the status is now, also if no process is left to write it,
and keeps a state up to date with a folder, or plays a recorded run again; `LogTail` in `record/files.py` reads logs;
both from the position of the last read, at bounded cost.

`record/channel.py` is the one thing that is no file: what a notebook and ranks that stay send each other.
"""
