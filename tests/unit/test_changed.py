"""Which tests a change chooses, in this very repository."""

from __future__ import annotations

import pytest

from tests.changed import Repository, within

NEAR, FAR = "tests/integration/test_store_claiming.py", "tests/e2e/test_cli.py"


@pytest.fixture(scope="module")
def repository() -> Repository:
    return Repository()


def test_a_statement_touches_the_tests_of_the_module_that_runs_it(repository: Repository) -> None:
    assert repository.modules_of("shard/queue/sql/claim.sql") == {"shard.queue.claim"}
    distances = repository.touched(["shard/queue/sql/claim.sql"])
    assert distances[NEAR] < distances["tests/integration/test_router.py"]


def test_a_migration_touches_all_of_its_room(repository: Repository) -> None:
    for file in ("migrations/0001_queue.sql", "functions/org_ids.sql"):
        assert "shard.postgres.schema" in repository.modules_of(f"shard/postgres/{file}")


def test_a_module_that_is_started_as_a_program_touches_who_starts_it(repository: Repository) -> None:
    assert "tests.routers" in repository.dependents["router"]
    assert "tests/integration/test_reload.py" in repository.touched(["router/process/child.py"])


def test_a_page_touches_the_tests_that_read_it_and_a_new_page_those_that_read_its_folder(
    repository: Repository,
) -> None:
    assert "tests/e2e/test_operations.py" in repository.touched(["docs/operations.md"])
    assert "tests/integration/test_deploy.py" in repository.touched(["deploy/compose/new.toml"])
    # This name occurs only in this file.
    assert repository.touched(["NOTICE"]) == {"tests/unit/test_changed.py": 0}


def test_a_contract_touches_the_tests_of_what_is_generated_from_it(repository: Repository) -> None:
    assert "tests/unit/test_wire.py" in repository.touched(["proto/windrow/v1/queue.proto"])


def test_a_conftest_touches_who_uses_its_fixtures(repository: Repository) -> None:
    touched = repository.touched(["tests/unit/conftest.py"])
    assert "tests/unit/test_client_calls.py" in touched
    assert "tests/unit/test_fields.py" not in touched


def test_tests_of_whole_programs_are_chosen_only_by_themselves_and_by_what_proves(repository: Repository) -> None:
    assert FAR not in repository.touched(["cli/jobs.py"])
    assert repository.touched([FAR])[FAR] == 0
    assert "tests/fault/test_cut_streams.py" in repository.touched(["proof/proxy.py"])


def test_every_test_file_has_something_that_touches_it(repository: Repository) -> None:
    tests = {source.path for source in repository.sources.values() if "/test_" in source.path}
    assert tests <= set(repository.touched(tests)), "unknown to the import graph"


def test_the_nearest_are_run_first_and_what_has_changed_is_always_run() -> None:
    distances = {"changed": 0, "near": 1, "slow": 2, "far": 3}
    seconds = {"changed": 100.0, "near": 1.0, "slow": 50.0}
    assert within(distances, seconds, budget_s=110) == ["changed", "near", "far"]
    assert within(distances, seconds, budget_s=10) == ["changed"]
