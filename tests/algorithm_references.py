"""Every algorithm once more, from its paper, in loops over padded float64 rows; shares no code with the package.

A loss here takes `logp` and, where a paper has a stop-gradient, `frozen`: the same numbers, which finite differences do
not move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, prod, sqrt

import numpy as np


@dataclass(frozen=True)
class Row:
    """One completion, padded; tokens outside the mask are of no account."""

    prompt: int
    reward: float
    mask: np.ndarray
    logp: np.ndarray
    behaviour: np.ndarray
    proximal: np.ndarray
    reference: np.ndarray
    frozen: np.ndarray
    advantage: np.ndarray

    @property
    def trained(self) -> list[int]:
        return [t for t in range(len(self.mask)) if self.mask[t]]


Rows = Sequence[Row]
Term = Callable[[Row, int], float]


def prompts(rows: Rows) -> list[list[Row]]:
    return [[row for row in rows if row.prompt == p] for p in sorted({row.prompt for row in rows})]


# --- Rewards and advantages ----------------------------------------------------------------------------------------


def dapo_reward(row: Row, longest: int, cache: int) -> float:
    """arXiv:2503.14476, equation 13."""
    length = len(row.trained)
    if length <= longest - cache:
        return row.reward
    if length <= longest:
        return row.reward + ((longest - cache) - length) / cache
    return row.reward - 1


def k1(row: Row, t: int) -> float:
    return float(row.behaviour[t] - row.reference[t])


def penalised(row: Row, beta: float) -> float:
    return row.reward - beta * sum(k1(row, t) for t in row.trained)


def grpo_advantages(rows: Rows, beta: float = 0.0, *, divide: bool = True) -> list[np.ndarray]:
    advantages = []
    for row in rows:
        group = [penalised(other, beta) for other in rows if other.prompt == row.prompt]
        mean = sum(group) / len(group)
        deviation = sqrt(sum((r - mean) ** 2 for r in group) / len(group))
        advantage = (penalised(row, beta) - mean) / ((deviation + 1e-4) if divide else 1.0)
        advantages.append(np.full(len(row.mask), advantage))
    return advantages


def rloo_advantages(rows: Rows, beta: float = 0.0) -> list[np.ndarray]:
    advantages = []
    for i, row in enumerate(rows):
        others = [penalised(o, beta) for j, o in enumerate(rows) if o.prompt == row.prompt and j != i]
        baseline = sum(others) / len(others) if others else 0.0
        advantages.append(np.full(len(row.mask), penalised(row, beta) - baseline))
    return advantages


def reinforce_advantages(rows: Rows, beta: float = 0.0, *, baseline: bool = False) -> list[np.ndarray]:
    raw = []
    for row in rows:
        group = [other.reward for other in rows if other.prompt == row.prompt]
        start = row.reward - (sum(group) / len(group) if baseline else 0.0)
        own = np.zeros(len(row.mask))
        for t in row.trained:
            own[t] = start - beta * sum(k1(row, i) for i in row.trained if i >= t)
        raw.append(own)
    tokens = [own[t] for row, own in zip(rows, raw, strict=True) for t in row.trained]
    if not tokens:
        return raw
    mean = sum(tokens) / len(tokens)
    deviation = sqrt(sum((value - mean) ** 2 for value in tokens) / len(tokens))
    return [(own - mean) / (deviation + 1e-8) for own in raw]


# --- What a token counts -------------------------------------------------------------------------------------------


def ppo(row: Row, t: int, old: np.ndarray, low: float, high: float) -> float:
    ratio = exp(row.logp[t] - old[t])
    return min(ratio * row.advantage[t], min(max(ratio, 1 - low), 1 + high) * row.advantage[t])


def gspo(row: Row, t: int, low: float, high: float) -> float:
    """arXiv:2507.18071, equation 7: (product of ratios) to the power 1 / length."""
    ratio = prod(exp(row.logp[i] - row.behaviour[i]) for i in row.trained) ** (1 / len(row.trained))
    return min(ratio * row.advantage[t], min(max(ratio, 1 - low), 1 + high) * row.advantage[t])


def cispo(row: Row, t: int, high: float) -> float:
    weight = min(exp(row.frozen[t] - row.behaviour[t]), 1 + high)
    return weight * row.advantage[t] * row.logp[t]


def k3(row: Row, t: int) -> float:
    gap = row.reference[t] - row.logp[t]
    return exp(gap) - gap - 1


def importance(row: Row, t: int, new: np.ndarray, level: str) -> float:
    """Ratio of `new` to the behaviour policy, by which a token is weighted or judged."""
    if level == "token":
        return exp(new[t] - row.behaviour[t])
    ratio = prod(exp(new[i] - row.behaviour[i]) for i in row.trained)
    return ratio if level == "sequence" else ratio ** (1 / len(row.trained))


# --- Losses of a batch ---------------------------------------------------------------------------------------------


def mean_of_samples(rows: Rows, term: Term) -> float:
    """Mean over prompts of 1/G sum_i 1/|o_i| sum_t, negated."""
    total = 0.0
    for group in prompts(rows):
        for row in group:
            total += sum(term(row, t) for t in row.trained) / max(1, len(row.trained)) / len(group)
    return -total / len(prompts(rows))


def sum_of_samples(rows: Rows, term: Term, constant: float = 1.0) -> float:
    total = 0.0
    for group in prompts(rows):
        for row in group:
            total += sum(term(row, t) for t in row.trained) / constant / len(group)
    return -total / len(prompts(rows))


def mean_of_tokens(rows: Rows, term: Term) -> float:
    terms = [term(row, t) for row in rows for t in row.trained]
    return -sum(terms) / max(1, len(terms))


def grpo_loss(rows: Rows, beta: float = 0.0) -> float:
    return mean_of_samples(rows, lambda row, t: ppo(row, t, row.behaviour, 0.2, 0.2) - beta * k3(row, t))


def dr_grpo_loss(rows: Rows, longest: int) -> float:
    return sum_of_samples(rows, lambda row, t: ppo(row, t, row.behaviour, 0.2, 0.2), longest)


def rloo_loss(rows: Rows, cap: float | None = 2.0) -> float:
    def term(row: Row, t: int) -> float:
        weight = 1.0 if cap is None else min(exp(row.frozen[t] - row.behaviour[t]), cap)
        return weight * row.advantage[t] * row.logp[t]

    return sum_of_samples(rows, term)


def reinforce_loss(rows: Rows) -> float:
    return mean_of_tokens(rows, lambda row, t: ppo(row, t, row.behaviour, 0.2, 0.2))


def dapo_loss(rows: Rows) -> float:
    return mean_of_tokens(rows, lambda row, t: ppo(row, t, row.behaviour, 0.2, 0.28))


def gspo_loss(rows: Rows) -> float:
    return mean_of_samples(rows, lambda row, t: gspo(row, t, 3e-4, 4e-4))


def cispo_loss(rows: Rows) -> float:
    return mean_of_tokens(rows, lambda row, t: cispo(row, t, 4.0))


def decoupled_loss(rows: Rows, level: str, cap: float | None) -> float:
    """arXiv:2110.00641, section 3.2: the ratio against the proximal policy, the weight from it to the behaviour."""

    def term(row: Row, t: int) -> float:
        weight = 1.0 if level == "none" else importance(row, t, row.proximal, level)
        return (weight if cap is None else min(weight, cap)) * ppo(row, t, row.proximal, 0.2, 0.2)

    return mean_of_samples(rows, term)


def masked_loss(rows: Rows, level: str, low: float, high: float) -> float:
    def term(row: Row, t: int) -> float:
        inside = low <= importance(row, t, row.frozen, level) <= high
        return ppo(row, t, row.behaviour, 0.2, 0.2) if inside else 0.0

    return mean_of_samples(rows, term)


def gradient(rows: Rows, loss: Callable[[Rows], float], step: float = 1e-6) -> list[np.ndarray]:
    """Central differences by every token's log-probability; everything frozen stays where it is."""
    gradients = []
    for i, row in enumerate(rows):
        own = np.zeros(len(row.mask))
        for t in row.trained:
            ends = []
            for sign in (1, -1):
                moved = row.logp.copy()
                moved[t] += sign * step
                ends.append(loss([*rows[:i], replace(row, logp=moved), *rows[i + 1 :]]))
            own[t] = (ends[0] - ends[1]) / (2 * step)
        gradients.append(own)
    return gradients
