"""Answers to the exercises of lab 07."""

from labkit import run

PP = {"workload": "gpt", "nproc": 2, "device": "cpu", "steps": 2, "samples": 32, "batch_size": 8}


def order(stage, stages, micro_batches):
    warm = min(micro_batches, stages - 1 - stage)
    done = [f"F{number}" for number in range(warm)]
    for number in range(micro_batches):
        done += ([f"F{warm + number}"] if warm + number < micro_batches else []) + [f"B{number}"]
    return done


def as_gpipe(stage, stages, micro_batches):
    return [f"{kind}{number}" for kind in "FB" for number in range(micro_batches)]


def _train(**options):
    return run("pp", **PP, options=options).wait()


RIGHT = {"order": order, "bubble": lambda: _train(schedule="Interleaved1F1B", micro_batches=4)}
WRONG = {
    "order": (as_gpipe, "entry 2 is 'F1'"),
    "bubble": (lambda: _train(schedule="1F1B", micro_batches=4), "what in the formula"),
}
