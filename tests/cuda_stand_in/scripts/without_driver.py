"""Two runs from a warm server, the second of them of a model of torchvision, and the devices that the panel offers."""

import json
import time

from labkit import Lab, run
from labkit.launch.warm import client

RUNS = (
    {"workload": "mlp", "batch_size": 16, "steps": 3},
    {"workload": "resnet18", "batch_size": 2, "steps": 1, "samples": 16},
)


def main() -> None:
    client.prepare()
    while isinstance(client.about(), client.Cold):
        time.sleep(0.2)
    runs = [run("ddp", nproc=2, **fields).wait() for fields in RUNS]
    states = [one.state for one in runs]
    print(
        json.dumps(
            {
                "starts": [state.status["start"] for state in states],
                "ends": [one.words for one in runs],
                "devices": [one.summary()["device"] for one in runs],
                "panel": [value for _, value in Lab(strategy="ddp")._choices.device.options],
            }
        )
    )


if __name__ == "__main__":
    main()
