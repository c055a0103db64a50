"""How many steps a larger batch saves: the gradient noise scale and the critical batch.

S. McCandlish, J. Kaplan, D. Amodei et al. (2018), "An Empirical Model of Large-Batch Training". A gradient g of B
samples is the true gradient G and noise with the covariance Σ / B, so that its squared norm is |G|² + tr Σ / B on
average.
"""

from __future__ import annotations

from collections.abc import Iterable


def noise_scale(small: float, large: float, batch: float, ranks: int) -> float:
    """tr Σ / |G|², in samples (McCandlish et al. 2018, appendix A.1), from two mean squared norms: `small` of the
    gradients of `batch` samples of one rank, `large` of their mean over at least 2 `ranks`. Infinite if nothing but
    noise was measured."""
    signal = (ranks * large - small) / (ranks - 1)
    noise = batch * (small - large) / (1 - 1 / ranks)
    return noise / signal if signal > 0 else float("inf")


def steps(batch: float, least_steps: float, least_samples: float) -> float:
    """Steps to a given loss with `batch` samples per step, each with its best learning rate (McCandlish et al. 2018,
    section 2.2). With S steps and E = S · batch samples, (S / least_steps − 1) · (E / least_samples − 1) = 1."""
    return least_steps + least_samples / batch


def fitted(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """`least_steps` and `least_samples` of `steps`, by least squares of the relative errors, from at least two pairs of
    batch and measured steps. Their ratio is the critical batch, with which a training takes twice the least number of
    steps and of samples.

    Raises `ValueError` if the pairs determine none, or none above 0.
    """
    ones = inverse = products = ones_right = inverse_right = 0.0
    for batch, measured in pairs:
        one, other = 1 / measured, 1 / (batch * measured)
        ones, inverse, products = ones + one * one, inverse + other * other, products + one * other
        ones_right, inverse_right = ones_right + one, inverse_right + other
    determinant = ones * inverse - products * products
    if determinant <= 1e-9 * ones * inverse:
        raise ValueError("the steps of at least two different batches are needed for a fit")
    least_steps = (ones_right * inverse - inverse_right * products) / determinant
    least_samples = (inverse_right * ones - ones_right * products) / determinant
    if least_steps <= 0 or least_samples <= 0:
        raise ValueError(
            "these steps are not those of a least number of steps and a least number of samples: measure smaller and"
            " larger batches"
        )
    return least_steps, least_samples
