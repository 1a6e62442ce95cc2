"""A router accepts the requests that KEDA would send for the manifest deploy/kubernetes/keda.yaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from router.codec.scaler import Target, target_of
from router.keda import externalscaler_pb2 as keda
from shard.vocabulary import OrgId, QueueName

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "deploy" / "kubernetes" / "keda.yaml"
# The names are those of KEDA's documentation of external-push.
AUTHENTICATION = {"caCert", "tlsClientCert", "tlsClientKey"}


def objects() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text())}


def test_a_router_takes_the_metadata_of_the_manifest() -> None:
    (trigger,) = objects()["ScaledObject"]["spec"]["triggers"]
    assert trigger["type"] == "external-push"
    # KEDA refuses values that are not strings.
    assert {type(value) for value in trigger["metadata"].values()} == {str}
    reference = keda.ScaledObjectRef(name="mail-workers", namespace="default", scalerMetadata=trigger["metadata"])
    assert target_of(reference) == Target(OrgId("shop"), QueueName("mail"), 10)


def test_the_objects_of_the_manifest_name_each_other() -> None:
    found = objects()
    (trigger,) = found["ScaledObject"]["spec"]["triggers"]
    assert trigger["authenticationRef"]["name"] == found["TriggerAuthentication"]["metadata"]["name"]
    parameters = {one["parameter"] for one in found["TriggerAuthentication"]["spec"]["secretTargetRef"]}
    assert parameters == AUTHENTICATION


def test_the_page_shows_the_manifest() -> None:
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "keda.md").read_text(), re.DOTALL | re.MULTILINE)
    assert MANIFEST.read_text().partition("\n")[2] == shown
