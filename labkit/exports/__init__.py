"""Exports of runs to tools that people already use: TensorBoard, trackio, Weights & Biases, MLflow, CSV, Parquet and
Perfetto.

`figures.py` has the one table of what is exported and under which names, and reads it from a run folder as `Row`s, all
at once or while the run is under way. `exporting.py` has the table of tools, writes the rows with each tool's own
client, and does an export, or follows a run in a thread of the process that started it; nothing of it runs in the
ranks. `trainjob.py` sends the progress of a run to Kubeflow Trainer; the supervisor uses it, in the pods of a TrainJob
only.

No export opens a network connection or needs an account, unless the user has configured the tool for one.
"""
