"""Answers to the exercises of lab 18; the numbers are those of the learner."""

from labkit.course.exercises import draw_number, one_device


def flops(tokens, layers, width, inner, groups, sequence, vocabulary):
    matrices = 2 * width**2 * (2 + 2 / groups) + 6 * width * inner
    return 3 * tokens * (layers * (matrices + 4 * sequence * width) + 2 * vocabulary * width)


def without_groups(tokens, layers, width, inner, groups, sequence, vocabulary):
    return flops(tokens, layers, width, inner, 1, sequence, vocabulary)


def drawn(name):
    """The question of this learner."""
    draws = {"mfu": one_device._training, "least": one_device._product, "bytes": one_device._recipe}
    return draw_number(f"one_device.{name}", draws[name])


RIGHT = {
    "flops": flops,
    "mfu": lambda: drawn("mfu").right,
    "least": lambda: drawn("least").right,
    "bytes": lambda: drawn("bytes").right,
}
WRONG = {
    "flops": (without_groups, "keys and values are not as wide as queries"),
    "mfu": (lambda: drawn("mfu").right / 3, "that counts forward only"),
    "least": (lambda: drawn("least").mistakes[0][0], "they do not add up"),
    "bytes": (16, "yours is another recipe"),
}
