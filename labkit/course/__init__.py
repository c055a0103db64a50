"""Course material used by the labs: self-grading exercises, claims that are tested, and teaching pictures.

This package never imports front ends.

A lab asks, draws, runs and compares with public names only; where it says *Predict*, the learner's number is compared
with the run that follows, if the run measures it. `course/pictures/` are pure functions to a plotly figure, by
topic; most draw a rule or a formula and say so (`course/pictures/pipeline.py` simulates pipelines,
`course/pictures/data_parallel.py` buckets, `analysis/theory/collectives.py` the messages of collectives), and
`pipeline.measured` and `mesh.by_axis` draw a run. `course/exercises/` has the exercises: each has a check, which says
what is right or wrong, and the teacher's solution; the package keeps the learner's record next to the run folders, and
reads from those how near the learner's predictions were. The task of some exercises is drawn for each learner
(`drawn`), from a number that is kept there as well. Where an answer is code that trains (`judged`), its source
runs on CPU ranks, as an ordinary run, in which `course/build/ranks/` records communication, operations, waits and live
memory with a dispatch mode of torch; an examiner, in a process of its own, draws the inputs and compares the results.
`course/build/criteria.py` judges these records, `course/grade.py` a folder of submissions. Most wrong answers of the
tests are mutations of the reference solutions in `course/build/solutions/`.
`course/claims/` is the table of common claims: a claim is a sentence, a function that judges it, and the jobs it needs,
which `course/claims/measured.py` runs in alternation; `course/claims/in_torch.py` has the experiments with torch, which
run in a separate process. `course/classroom/` reads what the learners of a class have left, for the teacher.
`course/glossary.json` is the table of the glossary, and `course/glossary.py` finds its terms by name and in a text."""
