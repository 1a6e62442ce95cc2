"""What the command shows of a job and of a schedule's jobs."""

from __future__ import annotations

import re

import pytest

from cli.messages import OTHER_TEXTS, job_facts, job_json
from cli.schedule_output import print_schedule, schedule_json
from windrow.v1 import job_pb2, schedules_pb2


@pytest.mark.parametrize("name", OTHER_TEXTS)
def test_each_text_of_a_job_is_shown_under_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    title = name.replace("_", " ")
    job, leased, template = job_pb2.Job(), job_pb2.LeasedJob(), job_pb2.JobTemplate()
    job.retry.fixed.SetInParent()
    for one in (job, leased):
        assert job_json(one, payloads=False)[name] is None
        setattr(one, name, "a text")
        assert job_json(one, payloads=False)[name] == "a text"
        assert (title, "a text") in job_facts(one)
    setattr(template, name, "a text")
    schedule = schedules_pb2.ScheduleInfo(job=template)
    assert schedule_json(schedule)[name] == "a text"
    print_schedule(schedule, as_json=False)
    assert re.search(rf"^{title} +a text$", capsys.readouterr().out, re.MULTILINE)


def test_an_exported_job_has_its_group_under_the_same_name() -> None:
    assert job_json({"group_key": "g"}, payloads=False) == {"group": "g"}
