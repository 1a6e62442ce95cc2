"""The cluster file: its valid contents, and the messages about invalid ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from shard.placement.cluster_file import Cluster, ClusterFileError, ShardState, parse_cluster, read_cluster
from shard.vocabulary import ShardName

PASSWORD = "hunter2-very-secret"
DSN = f"postgresql://windrow:{PASSWORD}@db1/windrow?sslmode=verify-full"
ONE = f'[[shard]]\nname = "s1"\ndsn = "{DSN}"\n'


def parse(text: str, **environ: str) -> Cluster:
    return parse_cluster(text, source="cluster.toml", environ=environ)


def test_one_shard_with_a_dsn_is_a_cluster() -> None:
    cluster = parse(ONE)
    assert cluster.name == "windrow"
    (shard,) = cluster.shards
    assert (shard.name, shard.dsn, shard.weight) == ("s1", DSN, 1.0)
    assert (shard.state, shard.labels) == (ShardState.ACTIVE, {})
    assert (cluster.catalog_dsn, cluster.catalog_shard) == (DSN, "s1")
    assert cluster.shard("s1") is shard
    assert cluster.shard("s2") is None


def test_every_key_is_read() -> None:
    cluster = parse(
        f"""
        [cluster]
        name = "production"
        [[shard]]
        name = "s1"
        dsn = "{DSN}"
        weight = 2
        [[shard]]
        name = "s2"
        dsn_env = "S2_DSN"
        weight = 0.5
        state = "read_only"
        labels = {{ region = "eu", disk = "slow" }}
        [catalog]
        dsn = "host=db9 dbname=catalog sslmode=require"
        [router]
        listen = "0.0.0.0:7500"
        """,
        S2_DSN="host=db2 sslmode=require",
    )
    assert cluster.name == "production"
    assert [(shard.name, shard.dsn, shard.weight) for shard in cluster.shards] == [
        ("s1", DSN, 2.0),
        ("s2", "host=db2 sslmode=require", 0.5),
    ]
    assert cluster.shards[1].state is ShardState.READ_ONLY
    assert cluster.shards[1].labels == {"region": "eu", "disk": "slow"}
    assert (cluster.catalog_dsn, cluster.catalog_shard) == ("host=db9 dbname=catalog sslmode=require", None)
    assert cluster.tables["router"] == {"listen": "0.0.0.0:7500"}


def test_a_dsn_may_come_from_a_file_and_loses_its_last_line_break(tmp_path: Path) -> None:
    secret = tmp_path / "s1"
    secret.write_text(f"{DSN}\n")
    cluster = parse(f'[[shard]]\nname = "s1"\ndsn_file = "{secret}"')
    assert cluster.shards[0].dsn == DSN
    assert cluster.dsn_files == (secret,)


def test_a_dsn_may_name_several_hosts() -> None:
    dsn = "postgresql://windrow@db1,db2:6432/windrow?target_session_attrs=read-write&sslmode=require"
    assert parse(f'[[shard]]\nname = "s1"\ndsn = "{dsn}"').shards[0].dsn == dsn


def test_a_file_is_read_from_disk_and_has_the_digest_that_sha256sum_begins_with(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    written = ONE.replace("\n", "\r\n").encode()
    path.write_bytes(written)
    cluster = read_cluster(path)
    assert [shard.name for shard in cluster.shards] == [ShardName("s1")]
    assert cluster.digest == hashlib.sha256(written).hexdigest()[:12]


@pytest.mark.parametrize(
    ("state", "serves"),
    [
        # The values are: whether the shard takes enqueues, gives jobs, and takes changes; and its weight.
        ("active", (True, True, True, 2.0)),
        ("draining", (True, True, True, 0.0)),
        ("enqueue_only", (True, False, True, 2.0)),
        ("dequeue_only", (False, True, True, 2.0)),
        ("read_only", (False, False, False, 2.0)),
        ("off", (False, False, False, 2.0)),
    ],
)
def test_a_state_says_what_a_shard_does(state: str, serves: tuple[bool, bool, bool, float]) -> None:
    entry = parse(two_shards(f'weight = 2\nstate = "{state}"')).shards[1]
    assert (entry.state.takes_enqueues, entry.state.gives_jobs, entry.state.takes_changes, entry.share) == serves


def test_a_file_that_is_not_there_is_named_with_the_ways_to_name_another(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    with pytest.raises(ClusterFileError) as caught:
        read_cluster(path)
    assert str(caught.value) == f"{path}: No such file or directory; name another with --config or WINDROW_CONFIG"


def shard_with(line: str) -> str:
    return f'[[shard]]\nname = "s1"\ndsn = "{DSN}"\n{line}\n'


def two_shards(line: str) -> str:
    """Returns a file with two shards. The second shard has this extra line."""
    return f'{ONE}[[shard]]\nname = "s2"\ndsn = "host=db2 sslmode=require"\n{line}\n'


BAD = {
    "not TOML": ("[[shard]\n", "cluster.toml: not TOML: "),
    "unknown table": (ONE + "[routr]\n", "cluster.toml: unknown key 'routr'; did you mean 'router'?"),
    "unlike any table": (
        ONE + "[zzz]\n",
        "cluster.toml: unknown key 'zzz'; "
        "known are archiver, audit, auth, balancer, catalog, cluster, router, shard, tls",
    ),
    "unknown key of cluster": (
        '[cluster]\nnmae = "x"\n' + ONE,
        "cluster.toml: [cluster]: unknown key 'nmae'; did you mean 'name'?",
    ),
    "unknown key of a shard": (
        shard_with("wieght = 2"),
        "cluster.toml: [[shard]] number 1 (s1): unknown key 'wieght'; did you mean 'weight'?",
    ),
    "unknown key of catalog": (
        ONE + '[catalog]\ndns = "x"\n',
        "cluster.toml: [catalog]: unknown key 'dns'; did you mean 'dsn'?",
    ),
    "empty": ("", "cluster.toml: no [[shard]]: a cluster needs one or more"),
    "no shards": ("shard = []", "cluster.toml: no [[shard]]: a cluster needs one or more"),
    "one table instead of many": (
        f'[shard]\nname = "s1"\ndsn = "{DSN}"\n',
        "cluster.toml: no [[shard]]: a cluster needs one or more",
    ),
    "shards that are no tables": ("shard = [1]", "cluster.toml: [[shard]] number 1: must be a table"),
    "cluster is no table": ('cluster = "x"\n' + ONE, "cluster.toml: cluster must be a table, [cluster]"),
    "router is no table": ('router = "x"\n' + ONE, "cluster.toml: router must be a table, [router]"),
    "catalog is no table": ('catalog = "x"\n' + ONE, "cluster.toml: catalog must be a table, [catalog]"),
    "empty cluster name": (
        '[cluster]\nname = ""\n' + ONE,
        "cluster.toml: [cluster] name: must be text of 1 to 63 printable characters, not ''",
    ),
    "no shard name": (f'[[shard]]\ndsn = "{DSN}"\n', "cluster.toml: [[shard]] number 1: has no name"),
    "shard name that is a number": (
        f'[[shard]]\nname = 1\ndsn = "{DSN}"\n',
        "cluster.toml: [[shard]] number 1: name: must be text of 1 to 63 printable characters, not 1",
    ),
    "shard name with a line break": (
        f'[[shard]]\nname = "a\\nb"\ndsn = "{DSN}"\n',
        "cluster.toml: [[shard]] number 1: name: must be text of 1 to 63 printable characters, not 'a\\nb'",
    ),
    "shard with the catalog's name": (
        f'[[shard]]\nname = "catalog"\ndsn = "{DSN}"\n',
        "cluster.toml: [[shard]] number 1: name: 'catalog' means the catalog's own database; choose another name",
    ),
    "weight below zero": (
        shard_with("weight = -1"),
        "cluster.toml: [[shard]] number 1 (s1): weight must be a number from 0 to 1000000, not -1",
    ),
    "weight that is no number": (
        shard_with("weight = true"),
        "cluster.toml: [[shard]] number 1 (s1): weight must be a number from 0 to 1000000, not True",
    ),
    "weight that is not a number": (
        shard_with("weight = nan"),
        "cluster.toml: [[shard]] number 1 (s1): weight must be a number from 0 to 1000000, not nan",
    ),
    "all weights zero": (
        shard_with("weight = 0"),
        "cluster.toml: every shard has weight 0 or is draining; at least one must take slots",
    ),
    "nothing but draining": (
        shard_with('state = "draining"'),
        "cluster.toml: every shard has weight 0 or is draining; at least one must take slots",
    ),
    "state that is nearly one": (
        two_shards('state = "enqueueonly"'),
        "cluster.toml: [[shard]] number 2 (s2): unknown state 'enqueueonly'; did you mean 'enqueue_only'?",
    ),
    "state that is unlike any": (
        shard_with("state = 7"),
        "cluster.toml: [[shard]] number 1 (s1): unknown state 7; known are active, draining, enqueue_only, "
        "dequeue_only, read_only, off",
    ),
    "state that is a list": (
        shard_with('state = ["off"]'),
        "cluster.toml: [[shard]] number 1 (s1): unknown state ['off']; did you mean 'off'?",
    ),
    "labels that are no table": (
        shard_with('labels = "eu"'),
        "cluster.toml: [[shard]] number 1 (s1): labels must be a table, such as { region = \"eu\" }, not 'eu'",
    ),
    "a label that is no text": (
        two_shards("labels = { region = 1 }"),
        "cluster.toml: [[shard]] number 2 (s2): label region: must be text of 1 to 63 printable characters, not 1",
    ),
    "a label without a name": (
        shard_with('labels = { "" = "x" }'),
        "cluster.toml: [[shard]] number 1 (s1): label: must be text of 1 to 63 printable characters, not ''",
    ),
    "a label that is long": (
        shard_with(f'labels = {{ region = "{"x" * 64}" }}'),
        "cluster.toml: [[shard]] number 1 (s1): label region: must be text of 1 to 63 printable characters, "
        f"not '{'x' * 64}'",
    ),
    "too many labels": (
        shard_with("labels = {" + ", ".join(f'l{at} = "x"' for at in range(17)) + "}"),
        "cluster.toml: [[shard]] number 1 (s1): 17 labels; a shard has 16 at most",
    ),
    "no dsn": (
        '[[shard]]\nname = "s1"\n',
        "cluster.toml: [[shard]] number 1 (s1): needs exactly one of dsn, dsn_env and dsn_file, and has none",
    ),
    "two dsns": (
        shard_with('dsn_env = "X"'),
        "cluster.toml: [[shard]] number 1 (s1): needs exactly one of dsn, dsn_env and dsn_file, "
        "and has dsn and dsn_env",
    ),
    "dsn that is no text": (
        '[[shard]]\nname = "s1"\ndsn = 5\n',
        "cluster.toml: [[shard]] number 1 (s1): dsn must be text",
    ),
    "variable that is not set": (
        '[[shard]]\nname = "s1"\ndsn_env = "S1_DSN"\n',
        "cluster.toml: [[shard]] number 1 (s1): the environment variable S1_DSN (dsn_env) is not set",
    ),
    "file that is not there": (
        '[[shard]]\nname = "s1"\ndsn_file = "/nowhere/s1"\n',
        "cluster.toml: [[shard]] number 1 (s1): dsn_file /nowhere/s1: No such file or directory",
    ),
    "variable that is the dsn": (
        f'[[shard]]\nname = "s1"\ndsn_env = "{DSN}"\n',
        "cluster.toml: [[shard]] number 1 (s1): dsn_env names where the DSN is stored, but this is a DSN itself: "
        "use the key dsn",
    ),
    "file that is the dsn": (
        f'[[shard]]\nname = "s1"\ndsn_file = "host=db1 password={PASSWORD}"\n',
        "cluster.toml: [[shard]] number 1 (s1): dsn_file names where the DSN is stored, but this is a DSN itself: "
        "use the key dsn",
    ),
    "password with an @": (
        f'[[shard]]\nname = "s1"\ndsn = "postgresql://u:x@{PASSWORD}@db1,db2/x"\n',
        "cluster.toml: [[shard]] number 1 (s1): dsn has a host with an @ in it: in a URI, an @ of the password is %40",
    ),
    "password with a /": (
        f'[[shard]]\nname = "s1"\ndsn = "postgresql://u:{PASSWORD}/x@db1/x?sslmode=require"\n',
        "cluster.toml: [[shard]] number 1 (s1): dsn has no role, and a database with an @ in it: in a URI, a / of the "
        "password is %2F",
    ),
    "password with a percent sign": (
        f'[[shard]]\nname = "s1"\ndsn = "postgresql://u:{PASSWORD}%x@db1/x"\n',
        "cluster.toml: [[shard]] number 1 (s1): dsn is not a libpq connection string or postgresql:// URI; in a URI, "
        "write % of the password as %25, a blank as %20, / as %2F, @ as %40",
    ),
    "dsn that libpq cannot read": (
        f'[[shard]]\nname = "s1"\ndsn = "postgresql://u:{PASSWORD}@db1:notaport:5/x?bad"\n',
        "cluster.toml: [[shard]] number 1 (s1): dsn is not a libpq connection string or postgresql:// URI; in a URI, "
        "write % of the password as %25, a blank as %20, / as %2F, @ as %40",
    ),
    "dsn of the catalog that libpq cannot read": (
        ONE + f'[catalog]\ndsn = "password={PASSWORD} nosuchkey=1"\n',
        "cluster.toml: [catalog]: dsn is not a libpq connection string or postgresql:// URI",
    ),
    "the same name twice": (ONE + ONE, "cluster.toml: shard name 's1' appears twice"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_a_file_that_cannot_be_used_is_refused_with_the_place_the_fault_and_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ClusterFileError) as caught:
        parse(text)
    # After the colon comes the TOML parser's own message.
    assert str(caught.value) == message or (message.endswith(": ") and str(caught.value).startswith(message))


@pytest.mark.parametrize("text", [text for text, _ in BAD.values()], ids=BAD.keys())
def test_no_message_shows_a_password(text: str) -> None:
    with pytest.raises(ClusterFileError) as caught:
        parse(text)
    error: BaseException | None = caught.value
    while error is not None:
        assert PASSWORD not in str(error)
        assert PASSWORD not in repr(error)
        # The parser's message is not shown, so it must not appear in the exception chain either.
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.parametrize(("secret", "fault"), [(b" \n", "is empty"), (b"\xff" + DSN.encode(), "is not UTF-8")])
def test_a_secret_that_is_being_written_is_no_dsn(tmp_path: Path, secret: bytes, fault: str) -> None:
    path = tmp_path / "s1"
    path.write_bytes(secret)
    with pytest.raises(ClusterFileError) as caught:
        parse(f'[[shard]]\nname = "s1"\ndsn_file = "{path}"')
    assert str(caught.value) == f"cluster.toml: [[shard]] number 1 (s1): dsn_file {path}: {fault}"


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(ONE.encode() + b"\xff")
    with pytest.raises(ClusterFileError) as caught:
        read_cluster(path)
    assert str(caught.value) == f"{path}: not TOML: not UTF-8 at byte {len(ONE)}"


def test_a_dsn_whose_secret_came_from_elsewhere_is_not_shown_either(tmp_path: Path) -> None:
    broken = f"postgresql://u:{PASSWORD}@db1:notaport:5/x?bad"
    secret = tmp_path / "s1"
    secret.write_text(broken)
    for line in ('dsn_env = "S1_DSN"', f'dsn_file = "{secret}"'):
        with pytest.raises(ClusterFileError) as caught:
            parse(f'[[shard]]\nname = "s1"\n{line}', S1_DSN=broken)
        assert "is not a libpq connection string" in str(caught.value)
        assert PASSWORD not in str(caught.value)


def test_no_repr_shows_a_password() -> None:
    cluster = parse(ONE + f'[catalog]\ndsn = "{DSN}"\n')
    assert PASSWORD not in repr(cluster)
    assert PASSWORD not in repr(cluster.shards[0])
    assert "s1" in repr(cluster)


def test_all_faults_of_a_file_are_told_at_once() -> None:
    text = (
        "nope = 1\n[cluster]\nname = ''\nnmae = 'x'\n[[shard]]\nname = 's1'\nweight = -1\nstate = 'of'\n"
        "[[shard]]\ndsn = 'dbname=x'\n[router]\n[catalog]\ndns = 'dbname=x'\n"
    )
    with pytest.raises(ClusterFileError) as refused:
        parse(text)
    places = [line.removeprefix("cluster.toml: ").partition("; ")[0] for line in str(refused.value).splitlines()]
    assert places == [
        "unknown key 'nope'",
        "[cluster]: unknown key 'nmae'",
        "[cluster] name: must be text of 1 to 63 printable characters, not ''",
        "[catalog]: unknown key 'dns'",
        "[[shard]] number 1 (s1): needs exactly one of dsn, dsn_env and dsn_file, and has none",
        "[[shard]] number 1 (s1): weight must be a number from 0 to 1000000, not -1",
        "[[shard]] number 1 (s1): unknown state 'of'",
        "[[shard]] number 2: has no name",
    ]


def test_shards_whose_names_collide_in_lease_tokens_are_refused() -> None:
    # These two names have the same xxh32. They were found by a search through s0, s1, …
    one, other = "s81740", "s245405"
    text = "".join(f'[[shard]]\nname = "{name}"\ndsn = "{DSN}"\n' for name in (one, other))
    with pytest.raises(ClusterFileError) as caught:
        parse(text)
    message = f"cluster.toml: shard name {other!r} collides with {one!r} in lease tokens; rename one"
    assert str(caught.value) == message
