"""Answers to the exercises of lab 24: right and wrong ones."""

from itertools import combinations

from labkit.analysis.theory.batch_size import fitted
from labkit.analysis.theory.batch_size import steps as steps_of


def squared_norms(steps, *, weighted=True):
    """For each step the mean squared norm of the ranks' gradients, and that of their mean."""
    for step in steps:
        total = sum(samples if weighted else 1 for samples, _ in step)
        mean = sum((samples if weighted else 1) * gradient for samples, gradient in step) / total
        small = sum(gradient.square().sum().item() for _, gradient in step) / len(step)
        yield small, mean.square().sum().item()


def sizes(steps):
    """1 / samples of a rank's gradient, in the mean over ranks, and of the mean gradient."""
    step = steps[0]
    return sum(1 / samples for samples, _ in step) / len(step), 1 / sum(samples for samples, _ in step)


def parts(small, large, steps):
    """tr Σ and |G|²."""
    each, total = sizes(steps)
    noise = (small - large) / (each - total)
    return noise, large - total * noise


def means(pairs):
    return (sum(numbers) / len(numbers) for numbers in zip(*pairs))


def noise_scale(steps):
    noise, signal = parts(*means(squared_norms(steps)), steps)
    return noise / signal


def from_products(steps):
    """Another right estimate: |G|² is the mean product of the gradients of two ranks."""
    pairs = [pair for step in steps for pair in combinations([gradient for _, gradient in step], 2)]
    signal = sum((left * right).sum().item() for left, right in pairs) / len(pairs)
    excess = [samples * (gradient.square().sum().item() - signal) for step in steps for samples, gradient in step]
    return sum(excess) / len(excess) / signal


def mean_of_ratios(steps):
    ratios = [noise / signal for noise, signal in (parts(*norms, steps) for norms in squared_norms(steps))]
    return sum(ratios) / len(ratios)


def median_of_ratios(steps):
    ratios = sorted(noise / signal for noise, signal in (parts(*norms, steps) for norms in squared_norms(steps)))
    return (ratios[len(ratios) // 2 - 1] + ratios[len(ratios) // 2]) / 2


def biased(which):
    """Takes one of the squared norms for |G|²."""

    def answer(steps):
        norms = tuple(means(squared_norms(steps)))
        return parts(*norms, steps)[0] / norms[which]

    return answer


def without_sizes(steps):
    small, large = means(squared_norms(steps))
    return (small - large) / large


def mean_size(steps):
    total = sum(samples for samples, _ in steps[0])
    mean = total / len(steps[0])
    small, large = means(squared_norms(steps))
    noise = (small - large) / (1 / mean - 1 / total)
    return noise / (large - noise / total)


def mean_of_ranks(steps):
    noise, signal = parts(*means(squared_norms(steps, weighted=False)), steps)
    return noise / signal


MISTAKES_OF_NOISE = {
    "mean of ratios": (mean_of_ratios, "a ratio of two noisy numbers has no useful mean"),
    "large norm as signal": (biased(1), "which still contains the noise of all samples"),
    "small norm as signal": (biased(0), "contains the noise of its samples"),
    "without sizes": (without_sizes, "depends on the numbers of samples"),
    "mean size": (mean_size, "times the mean of 1 / samples"),
    "mean of ranks": (mean_of_ranks, "weighs each rank's gradient with its number of samples"),
}


def largest(steps_by_batch, batch, compute, transfer, limit):
    """The largest number of ranks within the limit of cost."""

    def cost(ranks):
        return ranks * steps_by_batch(ranks * batch) * (compute + transfer * 2 * (ranks - 1) / ranks)

    return max(ranks for ranks in range(1, 1025) if cost(ranks) <= limit * cost(1))


def most_ranks(pairs, *rest):
    least = fitted(pairs)
    return largest(lambda batch: steps_of(batch, *least), *rest)


def by_a_line(pairs, *rest):
    """Another right answer: samples are a straight line of the batch."""
    x, y = [batch for batch, _ in pairs], [batch * steps for batch, steps in pairs]
    middle = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - middle[0]) * (b - middle[1]) for a, b in zip(x, y)) / sum((a - middle[0]) ** 2 for a in x)
    return largest(lambda batch: slope + (middle[1] - slope * middle[0]) / batch, *rest)


def halves_forever(pairs, *rest):
    return largest(lambda batch: 1 / batch, *rest)


def never_fewer_steps(pairs, *rest):
    return largest(lambda batch: 1, *rest)


def without_transfer(pairs, batch, compute, transfer, limit):
    return most_ranks(pairs, batch, compute, 0, limit)


def fewest_measured(pairs, *rest):
    least = min(steps for _, steps in pairs), min(batch * steps for batch, steps in pairs)
    return largest(lambda batch: steps_of(batch, *least), *rest)


def only_measured(pairs, batch, compute, transfer, limit):
    right = most_ranks(pairs, batch, compute, transfer, limit)
    return max(measured // batch for measured, _ in pairs if measured // batch <= right)


MISTAKES_OF_RANKS = {
    "halves forever": (halves_forever, "are half the steps enough at every batch"),
    "never fewer steps": (never_fewer_steps, "the number of steps falls"),
    "without transfer": (without_transfer, "waits for its all-reduce"),
    "fewest measured": (fewest_measured, "both are limits, which a fit finds"),
    "only measured": (only_measured, "between the measured ones"),
}

RIGHT = {"noise": lambda: noise_scale, "ranks": lambda: most_ranks}
WRONG = {
    "noise": (lambda: mean_of_ratios, "a ratio of two noisy numbers has no useful mean"),
    "ranks": (lambda: halves_forever, "are half the steps enough at every batch"),
}
