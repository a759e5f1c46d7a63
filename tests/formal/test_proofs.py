"""ProVerif proves each query of the models, and finds the attack once a key or a check is gone."""

import pytest

from formal.prove import FOLDER, NO_PROVER, Scenario, prove, prover, queries, scenarios

DOCS = FOLDER.parents[1] / "docs" / "understand"


@pytest.mark.parametrize("scenario", scenarios(), ids=lambda scenario: scenario.name)
def test_queries_come_out_as_the_scenario_says(scenario: Scenario) -> None:
    program = prover()
    if program is None:
        pytest.skip(NO_PROVER)
    findings = prove(scenario, program)
    assert findings
    assert [f"{f.query}: {f.found}" for f in findings if not f.is_wanted] == []


def test_each_query_fails_in_some_scenario() -> None:
    """A query that no theft and no missing check breaks says nothing."""
    table = scenarios()
    for model in {scenario.model for scenario in table}:
        broken = {query for s in table if s.model == model for query in s.fails}
        proved = {query for query in queries(model) if not query.startswith("reached.")}
        assert proved <= broken, model


def test_the_documents_name_each_query() -> None:
    told = (DOCS / "formal.md").read_text()
    models = sorted(path.stem for path in FOLDER.glob("*.pv"))
    assert models == sorted({scenario.model for scenario in scenarios()})
    for model in models:
        for query in queries(model):
            assert query.startswith("reached.") or f"`{query}`" in told, f"{model}: {query}"
