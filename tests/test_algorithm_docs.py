"""docs/algorithms.md lists every algorithm with its defaults, and every key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from aoffpolicy import algorithms
from aoffpolicy.config import Algorithm, Config
from aoffpolicy.registry import ALGORITHMS
from aoffpolicy.trainer.metrics import OFF_POLICY

PAGE = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text()
TABLE, KEYS = PAGE.split("\n## Keys\n")


def rows(table: str) -> dict[str, list[str]]:
    """Cells of a row by each name in its first cell."""
    lines = [re.split(r"\s*\|\s*", line.strip("| \n")) for line in table.splitlines() if line.startswith("| `")]
    return {name: cells for cells in lines for name in re.findall(r"`(\w+)`", cells[0])}


def config_of(name: str) -> Config:
    return Config.model_validate(
        {"model": {"path": "m"}, "data": {"source": "d"}, "algorithm": {"name": name}, "rollout": {"max_tokens": 50}}
    )


def test_every_algorithm_and_every_key_has_its_row() -> None:
    assert rows(TABLE).keys() == ALGORITHMS.keys()
    assert rows(KEYS).keys() == Algorithm.model_fields.keys()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_row_says_what_the_recipe_does(name: str) -> None:
    recipe = algorithms.build(config_of(name))
    _, paper, _, loss, clip, aggregation = rows(TABLE)[name]
    arxiv = re.search(r"\[([\d.]+)\]", paper)
    assert arxiv and arxiv[1] in recipe_source(name)
    assert aggregation.split("`")[1] == recipe.aggregation
    assert ("correction `token`" in loss) == (recipe.correction == "token")
    assert ("replaced" in rows(TABLE)[name][2]) == recipe.filter_zero_variance
    for bound in re.findall(r"\d[\d.e-]*", clip.split("(")[0]):
        assert bound in recipe_source(name)


def recipe_source(name: str) -> str:
    module = ALGORITHMS[name].split(":")[0].split(".")[-1]
    return (Path(algorithms.__file__).parent / f"{module}.py").read_text()


def test_the_example_of_an_own_algorithm_works() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["clipped_rloo"](config_of("rloo")).aggregation == "token_mean"


def test_the_metrics_of_off_policyness_are_named() -> None:
    assert all(f"`{name}`" in PAGE for name in (*OFF_POLICY, "importance_ratio_max"))
