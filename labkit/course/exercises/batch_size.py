"""Exercises of lab 24: the gradient noise scale from the gradients of ranks, and the number of ranks that pays off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

from labkit.analysis.theory.batch_size import fitted, noise_scale, steps
from labkit.common.units import counted
from labkit.course.answers import Wrong, explained, number_of, require_function, require_number, result_of
from labkit.course.exercises import Exercise, drawn

if TYPE_CHECKING:
    from torch import Tensor

_FAR = 0.3  # a case is drawn again until every mistake that has a name is at least as wrong as this (relative)

# ---- the noise scale from the gradients of ranks


_STEPS, _NUMBERS = 1000, 256  # steps of a case, numbers of a gradient
_FIRST, _LAST = 4.0, 0.1  # the squared norm of the true gradient, which shrinks as in a training
_NEAR = 0.15  # relative error of an estimate that is right
_SAFE = 0.06  # relative error of both right estimates of a case that is asked
_NAMED, _ROUNDED = 1e-3, 2e-5  # relative difference from a mistake that has a name, and what rounding may be of it


@dataclass(frozen=True)
class Gradients:
    """A case: for each step a pair per rank, of the number of samples and their gradient; the true noise scale; and
    the values of mistakes, with words, and `rounded` as they are in float32."""

    steps: list[list[tuple[int, Tensor]]]
    noise: float
    right: tuple[float, float]
    mistakes: tuple[tuple[float, str], ...]
    rounded: tuple[tuple[float, str], ...]


def draw_gradients(random: Random) -> Gradients:
    """A case in which every mistake can be told from the right estimates, in whatever order its sums are computed: a
    mean of ratios may depend on one step in which |G|² seems to be almost zero."""
    while True:
        case = _some_gradients(random)
        apart = all(abs(value / case.noise - 1) > _FAR for value, _ in case.mistakes)
        near = all(abs(value / case.noise - 1) < _SAFE for value in case.right)
        pairs = zip(case.mistakes, case.rounded)
        if apart and near and all(math.isclose(exact, value, rel_tol=_ROUNDED) for (exact, _), (value, _) in pairs):
            return case


def _some_gradients(random: Random) -> Gradients:
    import torch

    shares = random.sample((4, 8, 16, 32), random.randint(2, 4))
    total = sum(shares)
    generator = torch.Generator().manual_seed(random.getrandbits(48))
    norms = _FIRST * (_LAST / _FIRST) ** torch.linspace(0, 1, _STEPS)
    true = torch.nn.functional.normalize(torch.randn(_STEPS, _NUMBERS, generator=generator)) * norms.sqrt()[:, None]
    noise = total * random.uniform(0.8, 1.6)
    deviation = (noise * norms.mean() / _NUMBERS).sqrt()  # of a number of the gradient of one sample
    gradients = [true + deviation / share**0.5 * torch.randn(_STEPS, _NUMBERS, generator=generator) for share in shares]
    right, mistakes = _estimates(shares, [gradient.double() for gradient in gradients])
    given = [list(zip(shares, row)) for row in zip(*gradients)]
    return Gradients(given, noise, right, mistakes, _estimates(shares, gradients)[1])


def _estimates(
    shares: Sequence[int], gradients: Sequence[Tensor]
) -> tuple[tuple[float, float], tuple[tuple[float, str], ...]]:
    """The right estimates of the noise scale, and those of mistakes, with words."""
    import torch

    total, ranks = sum(shares), len(shares)
    together = torch.stack(list(gradients))
    by_rank = together.square().sum(2)
    mean = sum(share * gradient for share, gradient in zip(shares, gradients)) / total
    small, large, unweighted = by_rank.mean(0), mean.square().sum(1), together.mean(0).square().sum(1)
    harmonic, arithmetic = ranks / sum(1 / share for share in shares), total / ranks

    def parts(low: Tensor, high: Tensor, batch: float) -> tuple[Tensor, Tensor]:
        return (low - high) / (1 / batch - 1 / total), (total * high - batch * low) / (total - batch)

    def ratio(low: Tensor, high: Tensor, batch: float) -> float:
        noisy, signal = parts(low, high, batch)
        return float(noisy.mean() / signal.mean())

    noisy, signal = parts(small, large, harmonic)
    crossed = (together.sum(0).square().sum(1) - by_rank.sum(0)) / (ranks * (ranks - 1))
    dots = crossed.mean()  # the mean product of two ranks' gradients is |G|² as well
    pairs = torch.stack([share * (squares.mean() - dots) for share, squares in zip(shares, by_rank)]).mean() / dots
    mistakes = (
        (noisy / signal).mean(), "average tr Σ and |G|² over the steps first, and divide once: a ratio of two noisy"
        " numbers has no useful mean",
    ), (
        (noisy / signal).median(), "a median of ratios is not the ratio of averages: average tr Σ and |G|² over the"
        " steps first",
    ), (
        noisy.mean() / large.mean(), "|G|² is smaller than the squared norm of the mean, which still contains the noise"
        " of all samples of the step",
    ), (
        noisy.mean() / small.mean(), "|G|² is smaller than the squared norm of a rank's gradient, which contains the"
        " noise of its samples",
    ), (
        (small - large).mean() / large.mean(), "how much noise the mean over ranks removes depends on the numbers of"
        " samples; where are they?",
    ), (
        (small - large).mean() / signal.mean(), "the difference of the squared norms is not tr Σ yet: divide it by the"
        " difference of 1 / samples",
    ), (
        ratio(small, large, arithmetic), "the mean noise of the ranks' gradients is tr Σ times the mean of 1 / samples,"
        " not tr Σ over the mean number of samples",
    ), (
        ratio(small, unweighted, harmonic), "the mean over all samples weighs each rank's gradient with its number of"
        " samples",
    ), (
        ratio(small, unweighted, arithmetic), "the ranks have different numbers of samples, and this treats them as"
        " equal",
    ), (
        noise_scale(float(small.mean()), float(large.mean()), harmonic, ranks), "the ranks have different numbers of"
        " samples, and this treats them as equal",
    )  # fmt: skip
    right = float(noisy.mean() / signal.mean()), float(pairs)
    return right, tuple((float(value), words) for value, words in mistakes)


def _noise(answer: Any) -> str:
    require_function(answer, "noise_scale(steps)")
    random, said = drawn("batch_size.noise"), []
    for _ in range(2):
        case = draw_gradients(random)
        shares = [share for share, _ in case.steps[0]]
        call = f"noise_scale(steps), for ranks with {' and '.join(map(str, shares))} samples per step,"
        copied = [[(share, gradient.clone()) for share, gradient in step] for step in case.steps]
        given = result_of(call, answer, copied)
        given = given.item() if hasattr(given, "item") and getattr(given, "ndim", 1) == 0 else given
        require_number(given, f"of samples, from {call}")
        if not abs(given / case.noise - 1) <= _NEAR:
            raise Wrong(f"{call} returned {given:,.4g}; the true noise scale is {case.noise:,.0f}. {_why(given, case)}")
        said.append(f"{given:,.0f} of {case.noise:,.0f}")
    return (
        f"the estimates are near the true noise scales, with nothing but what the ranks have anyway: {', '.join(said)}"
    )


def _why(given: float, case: Gradients) -> str:
    otherwise = "which two squared norms do you have, and how much of each is tr Σ, on average?"
    words = explained(given, case.mistakes, otherwise, _NAMED)
    return words[0].upper() + words[1:]


# ---- how many ranks pay off


_ERROR = 0.01  # standard deviation of measured steps (relative)
_FEWEST, _MOST = 10, 200  # ranks that are right in a case
_ALL = 1024  # ranks that there are


@dataclass(frozen=True)
class Scaling:
    """A case: measured pairs of global batch and steps, the samples of a rank, the seconds that it computes for them
    and that all gradients take over its link, and the limit of cost."""

    pairs: list[tuple[int, int]]
    batch: int
    compute: float
    transfer: float
    limit: float
    least_steps: float
    least_samples: float

    @property
    def given(self) -> tuple[Any, ...]:
        """The arguments of the answer."""
        return list(self.pairs), self.batch, self.compute, self.transfer, self.limit

    def ranks(self, steps_of: Callable[[float], float], transfer: float | None = None) -> int:
        """The largest number of ranks within the limit of cost, for the steps by batch and another transfer."""
        moved = self.transfer if transfer is None else transfer
        once = steps_of(self.batch) * self.compute

        def within(ranks: int) -> bool:
            seconds = self.compute + moved * 2 * (ranks - 1) / ranks
            return ranks * steps_of(ranks * self.batch) * seconds <= self.limit * once

        low, high = 1, _ALL  # the cost grows with the number of ranks
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if within(middle) else (low, middle - 1)
        return low

    @property
    def best(self) -> int:
        """The number of ranks by the true steps."""
        return self.ranks(lambda batch: steps(batch, self.least_steps, self.least_samples))

    @property
    def right(self) -> tuple[int, ...]:
        """The number by fits of the measured steps: of relative errors, and by two straight lines."""
        samples = [(batch, batch * measured) for batch, measured in self.pairs]
        inverse = [(1 / batch, measured) for batch, measured in self.pairs]
        fits = fitted(self.pairs), _line(samples)[::-1], _line(inverse)
        return tuple(self.ranks(lambda batch, fit=fit: steps(batch, *fit)) for fit in fits)

    @property
    def mistakes(self) -> tuple[tuple[int, str], ...]:
        """The numbers of ranks by mistakes, with words."""
        least = min(measured for _, measured in self.pairs), min(batch * measured for batch, measured in self.pairs)
        fit = fitted(self.pairs)
        without = self.ranks(lambda batch: steps(batch, *fit), 0.0)
        measured = max(batch // self.batch for batch, _ in self.pairs if batch // self.batch <= self.best)
        return (
            (_ALL, "with twice the batch, are half the steps enough at every batch? Look at the measured pairs"),
            (self.ranks(lambda batch: self.least_steps), "the number of steps falls while the global batch grows"),
            (without, "each step of several ranks waits for its all-reduce"),
            (self.ranks(lambda batch: steps(batch, *least)), "the fewest measured steps are not the least number of"
             " steps, nor the fewest measured samples that of samples: both are limits, which a fit finds"),
            (measured, "numbers of ranks between the measured ones, and beyond, are possible: fit the"
             " steps by batch"),
        )  # fmt: skip


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope, by least squares."""
    middle = fmean(x for x, _ in points), fmean(y for _, y in points)
    slope = sum((x - middle[0]) * (y - middle[1]) for x, y in points) / sum((x - middle[0]) ** 2 for x, _ in points)
    return middle[1] - slope * middle[0], slope


def draw_scaling(random: Random) -> Scaling:
    """A case in which every mistake can be told from the right numbers of ranks."""
    while True:
        batch, least_steps = random.choice((4, 8, 16, 32)), random.uniform(500, 5000)
        least_samples = least_steps * batch * random.uniform(8, 60)
        batches = [batch * 2**power for power in range(random.randint(6, 8))]
        random.shuffle(batches)
        pairs = [(size, round(steps(size, least_steps, least_samples) * random.gauss(1, _ERROR))) for size in batches]
        compute = random.uniform(0.05, 0.5)
        times = compute, compute * random.uniform(0.05, 0.2), random.uniform(1.8, 3.5)
        case = Scaling(pairs, batch, *times, least_steps, least_samples)
        best = case.best
        apart = all(abs(ranks / best - 1) > _FAR for ranks, _ in case.mistakes)
        apart = apart and all(abs(size / batch / best - 1) > 1.3 * _NEAR for size in batches)  # no measured number
        ordered = sorted(ranks for ranks, _ in case.mistakes)
        apart = apart and all(high > 1.2 * low for low, high in pairwise(ordered))
        if apart and _FEWEST <= best <= _MOST and all(abs(ranks / best - 1) < _SAFE for ranks in case.right):
            return case


def draw_scalings(random: Random) -> list[Scaling]:
    """Three cases of which no number of ranks is right for all."""
    while True:
        cases = [draw_scaling(random) for _ in range(3)]
        best = [case.best for case in cases]
        if max(best) > 2 * min(best):
            return cases


def _ranks(answer: Any) -> str:
    require_function(answer, "most_ranks(pairs, batch, compute, transfer, limit)")
    said = []
    for case in draw_scalings(drawn("batch_size.ranks")):
        call = f"most_ranks(pairs, {case.batch}, {case.compute:.3f}, {case.transfer:.4f}, {case.limit:.2f})"
        given = number_of(call, "of ranks", answer, *case.given)
        if not abs(given / case.best - 1) <= _NEAR:
            raise Wrong(f"{call} with pairs = {case.pairs} returned {given:g}: {_why_not(given, case)}")
        said.append(counted(case.best, "rank"))
    return f"{', '.join(said)} are the most here: beyond that, ranks mostly compute samples that save no steps"


def _why_not(given: float, case: Scaling) -> str:
    otherwise = (
        "compare ranks × steps × seconds per step with those of one rank; the steps are those of the global batch"
    )
    return explained(given, case.mistakes, otherwise, _SAFE)


EXERCISES: dict[str, Exercise] = {
    "batch_size.noise": Exercise(
        "The noise scale from the gradients of ranks",
        _noise,
        "Per step, with the numbers of samples bᵢ of n ranks and B = Σ bᵢ: `small`, the mean over ranks of |gᵢ|², is"
        " |G|² + tr Σ · c on average, with c = mean(1 / bᵢ); `large` = |Σ bᵢ gᵢ / B|² is |G|² + tr Σ / B. With both"
        " averaged over the steps, tr Σ = (small − large) / (c − 1 / B), |G|² = large − tr Σ / B, and the noise scale"
        " is their ratio.",
    ),
    "batch_size.ranks": Exercise(
        "How many ranks pay off",
        _ranks,
        "Fit `steps = least_steps + least_samples / batch` to the pairs (a straight line of batch × steps by batch is"
        " enough), then raise n while `n * steps(n * batch) * (compute + transfer * 2 * (n - 1) / n)` is at most"
        " `limit` times `steps(batch) * compute`.",
    ),
}
