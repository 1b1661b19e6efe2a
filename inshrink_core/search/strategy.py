"""Which strategy searches which space for what, in whole chains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from inshrink_core.chain import ChainConfig
from inshrink_core.errors import InputError
from inshrink_core.search.bracket import Bracket
from inshrink_core.search.chains import Chain, ChainBench
from inshrink_core.search.guided import GuidedExhaustive
from inshrink_core.search.neighbourhood import Grid, Random
from inshrink_core.search.space import Cube, CubePoint, LatticeLine, three_digits
from inshrink_core.search.strategies import Explored, Outcome, Strategy, explore

__all__ = ["STRATEGIES", "look_for_bounds", "look_for_ratio"]

STRATEGIES: Final = ("auto", "allocation", "bracket", "guided", "random", "grid")

_BRACKET_CHAINS: Final = 8
"""Most steps of the lattice that one bracketed search tries."""

_GUIDED_SHARE: Final = 0.15
"""Share of a cube that the guided search is expected to measure."""

_FRONTIER: Final = 12
"""Most points of a cube that are measured for a target ratio: what estimates call equally small."""

_SLACK: Final = 1.05
"""Estimated ratios are within five percent of the real ones."""

Plan = Callable[[int], None]
"""Told how many chains may be measured."""


def look_for_bounds(
    bench: ChainBench,
    space: Cube | LatticeLine,
    base: ChainConfig,
    strategy: str,
    budget: int | None,
    seed: int,
    *,
    informative: bool,
    plan: Plan,
) -> tuple[str, Chain | None, tuple[str, ...]]:
    """Return the strategy taken, the best chain that keeps the bounds, and what should be known.

    Parameters
    ----------
    bench
        Measures chains.
    space, base
        What is searched, and where the lattice's search begins.
    strategy
        One of `STRATEGIES`.
    budget
        Most chains; None for the strategy's own limit.
    seed
        Of ``random``.
    informative
        False where the stale copy keeps the bounds at every step: then nothing coarser than the start is
        tried.
    plan
        Told how many chains may follow.
    """
    name = _named(strategy, space)
    notes: tuple[str, ...] = ()
    if not informative:
        notes = ("the stale copy keeps the bounds at every step: they say nothing, and nothing is coarsened",)
    if isinstance(space, LatticeLine) and name in ("allocation", "bracket"):
        chain = _look_on_line(bench, space, _start(base), budget, plan, name, most=not informative)
        return name, chain, notes
    made = _strategy_of(name, space, bench, seed)
    plan(min(budget or 1 << 30, _expected(name, space)))
    explored: Explored[Any] = explore(made, bench.outcomes(space), budget=budget)
    best = explored.best
    return name, None if best is None else bench.chain(space.candidate(best.point)), notes


def _named(strategy: str, space: Cube | LatticeLine) -> str:
    """Return a strategy that suits the space.

    Raises
    ------
    InputError
        It searches another kind of space.
    """
    on_line = isinstance(space, LatticeLine)
    if strategy == "auto":
        return "allocation" if on_line else "guided"
    if strategy in (("guided",) if on_line else ("allocation", "bracket")):
        raise InputError(
            f"the strategy '{strategy}' does not search this codec",
            remedy="choose "
            + ("allocation, bracket, random or grid" if on_line else "guided, random or grid"),
        )
    return strategy


def _strategy_of(name: str, space: Cube | LatticeLine, bench: ChainBench, seed: int) -> Strategy[Any]:
    replicas = bench.runner.judge.replicas
    if name == "random":
        return Random(space=space, seed=seed, replicas=replicas)
    if name == "grid" or isinstance(space, LatticeLine):
        return Grid(space=space, replicas=replicas)
    cube = space

    def ratio_of(point: CubePoint) -> float:
        return bench.ratio(cube.candidate(point))

    return GuidedExhaustive(cube=cube, ratio_of=ratio_of, replicas=replicas)


def _expected(name: str, space: Cube | LatticeLine) -> int:
    n = len(space.points())
    return max(1, round(n * _GUIDED_SHARE)) if name == "guided" else n


def _start(base: ChainConfig) -> float:
    return three_digits(float(getattr(base.config, "coarseness", 1.0)))


def _look_on_line(
    bench: ChainBench,
    line: LatticeLine,
    start: float,
    budget: int | None,
    plan: Plan,
    name: str,
    *,
    most: bool,
) -> Chain | None:
    """Search the global step; then, for an allocation, once more with factors of the layer types."""
    limit = budget or _BRACKET_CHAINS
    bracket = Bracket(start=start, most=start) if most else Bracket(start=start)
    plan(limit * (2 if name == "allocation" else 1))
    explored: Explored[float] = explore(bracket, bench.outcomes(line), budget=limit)
    best = explored.best
    chain = None if best is None else bench.chain(line.candidate(best.point))
    left = limit if budget is None else budget - len(explored.outcomes)
    if name == "bracket" or best is None or most or left < 1 or line.factors:
        return chain
    factors = bench.allocation(line, best.point).factors
    if not factors:
        return chain
    plan(left)
    shaped = replace(line, factors=factors)
    again: Explored[float] = explore(Bracket(start=best.point), bench.outcomes(shaped), budget=left)
    other = None if again.best is None else bench.chain(shaped.candidate(again.best.point))
    return max((one for one in (chain, other) if one is not None), key=lambda one: one.ratio_weights)


def look_for_ratio(
    bench: ChainBench, space: Cube | LatticeLine, base: ChainConfig, target: float, plan: Plan
) -> Chain | None:
    """Return the chain of the smallest divergence, else drop, whose ratio is at least the target's."""
    if isinstance(space, LatticeLine):
        return _ratio_on_line(bench, space, _start(base), target, plan)
    candidates = {point: space.candidate(point) for point in space.points()}
    reaching = [p for p, one in candidates.items() if bench.ratio(one) * _SLACK >= target]
    finest = [p for p in reaching if not any(_is_finer(other, p) for other in reaching)]
    finest.sort(key=lambda point: bench.ratio(candidates[point]))
    plan(min(len(finest), _FRONTIER))
    chains = [bench.chain(candidates[point], to_the_end=True) for point in finest[:_FRONTIER]]
    return _most_faithful([chain for chain in chains if chain.ratio_weights >= target])


def _is_finer(point: CubePoint, than: CubePoint) -> bool:
    """Whether a point is at least as fine on every axis, and another one, under the same word."""
    same = point.word == than.word
    finer = all(a <= b for a, b in zip(point.place, than.place, strict=True))
    return same and finer and point.place != than.place


def _ratio_on_line(
    bench: ChainBench, line: LatticeLine, start: float, target: float, plan: Plan
) -> Chain | None:
    """Close in on the finest step that reaches the ratio, without the evaluator; then judge its chain."""

    def outcomes(points: Sequence[float]) -> list[Outcome[float]]:
        ratios = [bench.whole_ratio(line.candidate(point)) for point in points]
        return [
            Outcome(point, ratio < target, ratio, ratio / target)
            for point, ratio in zip(points, ratios, strict=True)
        ]

    plan(1)
    closing = Bracket(start=start, enough=1.0, power=1.0, tolerance=1.02, aim=1.005)
    explored = explore(closing, outcomes, budget=2 * _BRACKET_CHAINS)
    reaching = [one for one in explored.outcomes if not one.kept]
    if not reaching:
        return None
    finest = min(reaching, key=lambda one: one.point)
    return bench.chain(line.candidate(finest.point), to_the_end=True)


def _most_faithful(chains: Sequence[Chain]) -> Chain | None:
    """Return the chain of the smallest divergence, or drop where nothing diverges."""
    infinite = float("inf")

    def figures(chain: Chain) -> tuple[float, float]:
        divergence = infinite if chain.divergence is None else chain.divergence
        return divergence, infinite if chain.drop is None else chain.drop

    return min(chains, key=figures, default=None)
