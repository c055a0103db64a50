"""Answers to the exercises of lab 18."""


def flops(tokens, layers, width, sequence, vocabulary):
    return 3 * tokens * (24 * layers * width**2 + 4 * layers * sequence * width + 2 * vocabulary * width)


def six_nd(tokens, layers, width, sequence, vocabulary):
    return 6 * 12 * layers * width**2 * tokens


def least_seconds(flops, moved, peak, bandwidth):
    return max(flops / peak, moved / bandwidth)


def one_after_the_other(flops, moved, peak, bandwidth):
    return flops / peak + moved / bandwidth


AUTOCAST = dict.fromkeys(("fp32", "tf32", "bf16 autocast", "fp16 autocast", "bf16 with fp32 copy"), 16)

RIGHT = {"flops": flops, "mfu": 47.1, "least": least_seconds, "bytes": AUTOCAST | {"bf16 states": 8}}
WRONG = {
    "flops": (six_nd, "attention's scores and the head are missing"),
    "mfu": (15.7, "that counts forward only"),
    "least": (one_after_the_other, "they do not add up"),
    "bytes": (AUTOCAST | {"bf16 autocast": 8, "bf16 states": 8}, "keeps its type"),
}
