"""The command as a person uses it: real files, a real catalog, adapters that PEFT wrote."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import Result

from stencilpress.cli import main
from stencilpress.engine.settings import EngineSettings
from stencilpress.gateway.settings import GatewaySettings
from stencilpress.serving import ENGINE_OPTIONS
from stencilpress.settings import default_data_dir
from tests.integration.conftest import Cli
from tests.tiny import BASE_ID

ROOT = Path(__file__).parents[2]
SUPERVISED = (
    "engine_fd",
    "engine_socket",
    "http_fd",
    "lifeline_fd",
    "heartbeat_fd",
    "peer_fd",
    "peers",
    "gateway",
    "generation",
)
INTERNAL = {"model_dir", "adapters_dir", *SUPERVISED}
"""Settings that `serve` and the supervisor make; an operator has no use for them."""


@pytest.fixture
def stocked(cli: Cli, base_folder: Path) -> Cli:
    """A data folder with the tiny base and a tenant."""
    cli("pull", base_folder, "--base-id", BASE_ID)
    cli("tenant", "add", "acme")
    return cli


def rows(result: Result) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(result.stdout)
    return listed


def test_importing_the_command_loads_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "sqlalchemy", "alembic", "aiohttp", "huggingface_hub", "tokenizers", "jinja2")
    code = f"import sys, stencilpress.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tenants_are_added_listed_and_disabled(cli: Cli) -> None:
    cli("tenant", "add", "acme", "--max-rank", "16", "--target-module", "q_proj", "--target-module", "v_proj")
    cli("tenant", "add", "zoo", "--weight", "2.5", "--max-adapters", "3", "--max-adapter-bytes", "5000")
    cli("tenant", "disable", "zoo")
    acme, zoo = rows(cli("tenant", "list", "--json"))
    assert (acme["name"], acme["max_rank"], acme["target_modules"]) == ("acme", 16, ["q_proj", "v_proj"])
    assert (zoo["weight"], zoo["max_adapters"], zoo["max_adapter_bytes"]) == (2.5, 3, 5000)
    assert acme["disabled_at"] is None
    assert zoo["disabled_at"] is not None
    assert "salt" not in cli("tenant", "list", "--json").output
    assert cli("tenant", "list").stdout.splitlines()[0].split()[0] == "NAME"


def test_a_tenants_limits_are_changed_and_taken_away(cli: Cli) -> None:
    quota = ("--requests-per-minute", "60", "--tokens-per-day", "1000000", "--time-zone", "Europe/Vienna")
    made = json.loads(cli("tenant", "add", "acme", *quota, "--quota-shadow", "--json").stdout)
    assert (made["requests_per_minute"], made["tokens_per_day"], made["quota_shadow"]) == (60, 1_000_000, True)
    changes = ("--requests-per-minute", "none", "--target-module", "q_proj", "--no-quota-shadow", "--max-tokens", "9")
    assert cli("tenant", "set", "acme", *changes).stdout.startswith("changed ")
    shown = json.loads(cli("tenant", "show", "acme", "--json").stdout)
    expected = {"requests_per_minute": None, "target_modules": ["q_proj"], "quota_shadow": False, "max_tokens": 9}
    assert shown == {**made, **expected}
    cli("tenant", "set", "acme", "--all-target-modules")
    lines = dict(line.split(maxsplit=1) for line in cli("tenant", "show", "acme").stdout.splitlines())
    assert (lines["target_modules"], lines["max_tokens"], lines["time_zone"]) == ("-", "9", "Europe/Vienna")


def test_a_tenant_is_deleted_and_restored(cli: Cli) -> None:
    cli("tenant", "add", "acme")
    cli("tenant", "disable", "acme")
    cli("tenant", "enable", "acme")
    cli("tenant", "delete", "acme")
    assert rows(cli("tenant", "list", "--json")) == []
    assert [row["name"] for row in rows(cli("tenant", "list", "--deleted", "--json"))] == ["acme"]
    assert "does not exist" in cli("key", "create", "acme", code=1).stderr
    assert "keeps its name" in cli("tenant", "add", "acme", code=1).stderr
    cli("tenant", "restore", "acme")
    assert [row["name"] for row in rows(cli("tenant", "list", "--prefix", "ac", "--json"))] == ["acme"]
    assert "not deleted" in cli("tenant", "purge", "acme", "--yes", code=1).stderr
    cli("tenant", "delete", "acme")
    assert "Aborted" in cli("tenant", "purge", "acme", code=1).stderr
    assert json.loads(cli("tenant", "purge", "acme", "--yes", "--json").stdout)["tenant"] == "acme"
    assert rows(cli("tenant", "list", "--deleted", "--json")) == []
    cli("tenant", "add", "acme")


def test_a_key_is_scoped_changed_and_rotated(cli: Cli) -> None:
    cli("tenant", "add", "acme")
    scopes = ("--role", "admin", "--model", "helper", "--model", "base", "--route", "/v1/models")
    made = json.loads(cli("key", "create", "acme", *scopes, "--json").stdout)
    assert (made["role"], made["models"], made["routes"]) == ("admin", ["helper", "base"], ["/v1/models"])
    cli(
        "key",
        "set",
        made["id"],
        "--label",
        "ci",
        "--expires-in-days",
        "3",
        "--all-models",
        "--route",
        "/v1/completions",
    )
    shown = json.loads(cli("key", "show", made["id"], "--json").stdout)
    assert (shown["label"], shown["models"], shown["routes"]) == ("ci", None, ["/v1/completions"])
    assert shown["expires_at"] is not None
    cli("key", "set", made["id"], "--expires-in-days", "none", "--all-routes")
    rotated = cli("key", "rotate", made["id"], "--overlap-minutes", "5").stdout.strip()
    assert rotated.split("_")[1] == made["id"]
    assert rotated != made["token"]
    shown = json.loads(cli("key", "show", made["id"], "--json").stdout)
    assert (shown["last_four"], shown["expires_at"], shown["routes"]) == (rotated[-4:], None, None)
    assert shown["previous_expires_at"] is not None


def test_every_change_is_in_the_audit_log(cli: Cli) -> None:
    cli("tenant", "add", "acme")
    cli("tenant", "set", "acme", "--max-rank", "8")
    cli("key", "create", "acme", "--label", "ci")
    made, changed = rows(cli("audit", "list", "--tenant", "acme", "--json"))[:2]
    assert (made["action"], made["after"]["label"]) == ("key.create", "ci")
    assert (changed["action"], changed["before"], changed["after"]) == (
        "tenant.change",
        {"max_rank": 64},
        {"max_rank": 8},
    )
    assert changed["actor"].startswith("cli:")
    assert changed["role"] == "operator"
    assert [
        row["action"] for row in rows(cli("audit", "list", "--target", "tenant:acme", "--limit", "1", "--json"))
    ] == ["tenant.change"]
    assert cli("audit", "list").stdout.splitlines()[0].split()[:2] == ["AT", "ACTOR"]


def test_a_catalog_goes_to_another_folder(cli: Cli, tmp_path: Path) -> None:
    cli("tenant", "add", "acme", "--max-rank", "8")
    cli("key", "create", "acme")
    file, other = tmp_path / "catalog.ndjson", tmp_path / "other"
    assert cli("catalog", "export", file).stdout == f"wrote 2 rows to {file}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "already" in cli("catalog", "import", file, code=1).stderr
    assert "left as they are: acme" in cli("catalog", "import", file, "--skip-existing").stderr
    done = cli("catalog", "import", file, "--data", other, "--json")
    assert json.loads(done.stdout)["rows"] == {"tenants": 1, "api_keys": 1}
    assert (
        cli("tenant", "show", "acme", "--json", "--data", other).stdout
        == cli("tenant", "show", "acme", "--json").stdout
    )
    assert cli("key", "list", "acme", "--json", "--data", other).stdout == cli("key", "list", "acme", "--json").stdout
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_a_key_is_shown_once(cli: Cli, data: Path) -> None:
    cli("tenant", "add", "acme")
    token = cli("key", "create", "acme", "--label", "ci", "--expires-in-days", "30").stdout.strip()
    [listed] = rows(cli("key", "list", "acme", "--json"))
    _, public_id, secret = token.split("_")
    assert (listed["id"], listed["label"], listed["last_four"]) == (public_id, "ci", token[-4:])
    assert listed["expires_at"] > listed["created_at"]
    for output in (cli("key", "list", "acme").output, cli("key", "list", "acme", "--json").output):
        assert secret not in output
    assert secret.encode() not in b"".join(file.read_bytes() for file in (data / "v1").iterdir() if file.is_file())
    cli("key", "revoke", public_id)
    assert rows(cli("key", "list", "acme", "--json"))[0]["revoked_at"] is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tenant", "add", "Acme"], "Error: tenant: 'Acme' is not allowed"),
        (["tenant", "add", "acme", "--max-rank", "0"], "Error: max_rank: must be between 1 and"),
        (["tenant", "add", "acme", "--target-module", "q_porj"], "did you mean q_proj?"),
        (["tenant", "add", "acme", "--time-zone", "Mars"], "time_zone: 'Mars' is no time zone"),
        (["key", "show", "nothing"], "key: 'nothing' does not exist"),
        (["catalog", "import", "/dev/null"], "file: has a line that is not one of its kind"),
        (["tenant", "disable", "nobody"], "Error: tenant: 'nobody' does not exist"),
        (["key", "create", "' OR '1'='1"], "Error: tenant: \"' OR '1'='1\" does not exist"),
        (["key", "revoke", "'; DROP TABLE api_keys; --"], "does not exist"),
        (["adapter", "list", "--tenant", "nobody"], "Error: tenant: 'nobody' does not exist"),
        (["adapter", "promote", "helper", "--tenant", "acme"], "expected name@number such as helper@3"),
        (["adapter", "add", ".", "--tenant", "acme", "--name", "helper"], "no base model in the data folder"),
        (["migrate", "--to", "9999"], "Error: schema revision '9999' is unknown; known: base, 0001"),
        (["pull", "nothing"], "'nothing' is neither"),
        (
            ["tenant", "list", "--database-url", "postgresql://nobody:hush@127.0.0.1:1/x"],
            "The catalog is not available",
        ),
    ],
)
def test_a_refusal_is_one_clear_line_and_exit_code_1(cli: Cli, arguments: list[str], message: str) -> None:
    result = cli(*arguments, code=1)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "hush" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tenant", "add"], "Missing argument 'NAME'"),
        (["tenant", "set", "acme"], "nothing to change"),
        (["tenant", "set", "acme", "--tokens-per-day", "few"], "'few' is not a valid integer"),
        (["tenant", "set", "acme", "--target-module", "q_proj", "--all-target-modules"], "exclude each other"),
        (["key", "create", "acme", "--role", "king"], "'king' is not one of"),
        (["key", "set", "ab12cd34ef56"], "nothing to change"),
        (["serve", "--port", "99999"], "'--port' (env var: 'STENCILPRESS_PORT'): 99999 is not in the range"),
        (["serve", "--threads", "1000000"], "Expected `int` <= 1024 - at STENCILPRESS_THREADS"),
        (["serve", "--max-lora-rank", "0"], "Expected `int` >= 1 - at STENCILPRESS_MAX_LORA_RANK"),
        (["serve", "--device", "abacus"], "STENCILPRESS_DEVICE"),
        (["tenant", "list", "--database-url", "mysql://x"], "STENCILPRESS_DATABASE_URL: 'mysql' is not supported"),
        (["adapter", "add", "/nowhere", "--tenant", "a", "--name", "b"], "does not exist"),
        (["nonsense"], "No such command"),
    ],
)
def test_wrong_usage_is_named_and_exits_with_2(cli: Cli, arguments: list[str], message: str) -> None:
    assert message in cli(*arguments, code=2).stderr


@pytest.mark.parametrize("variable", ["PORT", "DEMO", "MAX_LORA_RANK", "MAX_BODY_BYTES", "DRAIN_S"])
def test_a_bad_variable_stops_serve_before_anything_is_fetched(
    cli: Cli, data: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(f"STENCILPRESS_{variable}", "many")
    assert f"STENCILPRESS_{variable}" in cli("serve", code=2).stderr
    assert not (data / "v1" / "models").exists()


def test_a_flag_overrides_a_variable(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENCILPRESS_DATA", str(tmp_path / "by-variable"))
    cli("tenant", "add", "acme", "--data", tmp_path / "by-flag")
    assert (tmp_path / "by-flag" / "v1" / "catalog.db").exists()
    assert not (tmp_path / "by-variable").exists()


def test_the_data_folder_is_closed_to_others_and_a_newer_one_is_refused(cli: Cli, data: Path) -> None:
    cli("migrate")
    assert stat.S_IMODE((data / "v1").stat().st_mode) == 0o700
    (data / "v2").mkdir()
    assert "holds v2, written by a newer version" in cli("tenant", "list", code=1).stderr


def test_the_data_folder_follows_the_xdg_specification(tmp_path: Path) -> None:
    assert default_data_dir({"XDG_DATA_HOME": "/srv/x"}, tmp_path) == Path("/srv/x/stencilpress")
    for environ in ({}, {"XDG_DATA_HOME": ""}, {"XDG_DATA_HOME": "relative"}):
        assert default_data_dir(environ, tmp_path) == tmp_path / ".local/share/stencilpress"


def test_a_newer_catalog_is_refused_by_every_command(cli: Cli, data: Path) -> None:
    newest = cli("migrate").stdout.split()[-1]
    assert f"revision {newest}" in cli("migrate", "--to", newest).stdout
    cli("tenant", "add", "acme")
    with closing(sqlite3.connect(data / "v1" / "catalog.db")) as raw, raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    for arguments in (["tenant", "list"], ["key", "create", "acme"], ["migrate"]):
        assert "schema 9999, newer than this version" in cli(*arguments, code=1).stderr
    with closing(sqlite3.connect(data / "v1" / "catalog.db")) as raw, raw:
        raw.execute("UPDATE alembic_version SET version_num = ?", (newest,))
    assert len(rows(cli("tenant", "list", "--json"))) == 1


def test_an_adapter_is_added_versioned_and_promoted(stocked: Cli, adapters: Path, data: Path) -> None:
    add = ("--tenant", "acme", "--name", "helper")
    assert stocked("adapter", "add", adapters / "helper", *add).stdout == "helper@1, now prod\n"
    assert stocked("adapter", "add", adapters / "helper", *add).stdout == "helper@1 (its content was there already)\n"
    assert stocked("adapter", "add", adapters / "poet", *add).stdout == "helper@2\n"
    assert stocked("adapter", "promote", "helper@2", "--tenant", "acme").stdout == "helper@prod is helper@2\n"
    stocked("adapter", "promote", "helper@1", "--tenant", "acme", "--alias", "stable")
    first, second = rows(stocked("adapter", "list", "--tenant", "acme", "--json"))
    assert (first["version"], first["aliases"], first["ranks"]) == ("helper@1", ["stable"], [4])
    assert (second["version"], second["aliases"], second["target_modules"]) == (
        "helper@2",
        ["prod"],
        ["o_proj", "up_proj"],
    )
    for row in (first, second):
        blob = data / "v1" / "adapters" / row["digest"]
        assert {"adapter_config.json", "adapter_model.safetensors"} < {file.name for file in blob.iterdir()}
    assert list((data / "v1" / "staging").iterdir()) == []


def test_promotion_can_be_forced_or_held_back(stocked: Cli, adapters: Path) -> None:
    add = ("--tenant", "acme", "--name", "helper")
    assert stocked("adapter", "add", adapters / "helper", *add, "--no-promote").stdout == "helper@1\n"
    assert stocked("adapter", "add", adapters / "poet", *add, "--promote").stdout == "helper@2, now prod\n"


def test_an_adapter_that_names_no_base_needs_its_owners_word(stocked: Cli, adapters: Path) -> None:
    add = ("adapter", "add", adapters / "orphan", "--tenant", "acme", "--name", "orphan")
    refused = stocked(*add, code=1).stderr.splitlines()
    assert refused[0] == "Error: The adapter cannot be served."
    assert [line.split(":")[0].strip() for line in refused[1:]] == ["base_model_name_or_path"]
    assert stocked(*add, "--assert-base").stdout == "orphan@1, now prod\n"
    assert rows(stocked("adapter", "list", "--tenant", "acme", "--json"))[0]["base_asserted"] is True


def test_findings_are_printed_one_a_line_and_nothing_stays(
    stocked: Cli, adapters: Path, data: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(adapters / "helper", bad)
    config = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps({**config, "r": 0, "use_dora": True, "bias": "all"}))
    refused = stocked("adapter", "add", bad, "--tenant", "acme", "--name", "bad", code=1).stderr.splitlines()
    assert {line.split(":")[0].strip() for line in refused[1:]} >= {"r", "use_dora", "bias"}
    (bad / "adapter_model.safetensors").unlink()
    missing = stocked("adapter", "add", bad, "--tenant", "acme", "--name", "bad", code=1).stderr
    assert missing == "Error: adapter_model.safetensors: not in the adapter's folder\n"
    assert rows(stocked("adapter", "list", "--tenant", "acme", "--json")) == []
    assert list((data / "v1" / "staging").iterdir()) == list((data / "v1" / "adapters").iterdir()) == []


def _a_pipe(file: Path) -> None:
    os.mkfifo(file)


def _nested(file: Path) -> None:
    file.write_text('{"a":' * 100_000)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (Path.mkdir, "is not a regular file"),
        (_a_pipe, "is not a regular file"),
        (lambda file: file.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda file: file.symlink_to(file.name), "cannot be read: Too many levels of symbolic links"),
        (lambda file: file.symlink_to("nowhere"), "not in the adapter's folder"),
        (_nested, "is nested too deeply"),
    ],
    ids=["folder", "pipe", "device", "loop", "dangling", "nested"],
)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_is_no_file_of_an_adapter_is_told_at_once(
    stocked: Cli, adapters: Path, tmp_path: Path, spoil: Callable[[Path], object], told: str, name: str
) -> None:
    folder = shutil.copytree(adapters / "helper", tmp_path / "spoilt")
    (folder / name).unlink()
    spoil(folder / name)
    refused = stocked("adapter", "add", folder, "--tenant", "acme", "--name", "spoilt", code=1).stderr
    if spoil is not _nested or name == "adapter_config.json":
        assert f"{name}: {told}" in refused


def test_an_adapter_of_links_is_taken(stocked: Cli, adapters: Path, tmp_path: Path) -> None:
    folder = tmp_path / "linked"
    folder.mkdir()
    for file in (adapters / "helper").iterdir():
        (folder / file.name).symlink_to(file)
    assert stocked("adapter", "add", folder, "--tenant", "acme", "--name", "linked").stdout == "linked@1, now prod\n"


def test_what_a_killed_upload_left_goes_with_the_next(stocked: Cli, adapters: Path, data: Path) -> None:
    left = data / "v1" / "staging" / "0123456789abcdef"
    left.mkdir(parents=True)
    (left / "adapter_model.safetensors").write_bytes(bytes(1000))
    stocked("adapter", "add", adapters / "helper", "--tenant", "acme", "--name", "helper")
    assert not left.exists()


def test_a_data_folder_may_have_any_name(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "da?ta #1 é%20&x=y"
    cli("tenant", "add", "acme", "--data", folder)
    assert (folder / "v1" / "catalog.db").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name]


def test_a_model_that_cannot_be_stored_is_told(cli: Cli, base_folder: Path, data: Path) -> None:
    (data / "v1").mkdir(parents=True)
    (data / "v1" / "models").write_text("in the way")
    refused = cli("pull", base_folder, "--base-id", BASE_ID, code=1).stderr
    assert refused == f"Error: the model cannot be stored in {data / 'v1' / 'models'}: File exists\n"


def test_a_tenants_limits_name_field_and_limit(cli: Cli, base_folder: Path, adapters: Path) -> None:
    cli("pull", base_folder, "--base-id", BASE_ID)
    cli("tenant", "add", "small", "--max-rank", "2", "--target-module", "q_proj")
    cli("tenant", "add", "tiny", "--max-adapter-bytes", "3000")
    cli("tenant", "add", "none", "--max-adapters", "0")

    def refusal(tenant: str) -> str:
        return cli("adapter", "add", adapters / "helper", "--tenant", tenant, "--name", "helper", code=1).stderr

    assert re.search(r"rank.* 2\b", refusal("small"))
    assert "v_proj" in refusal("small")
    assert "adapter_model.safetensors" in refusal("tiny")
    assert "3000" in refusal("tiny")
    assert "max_adapters is 0" in refusal("none")


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_the_catalog_may_be_in_postgresql(
    stocked: Cli, adapters: Path, data: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STENCILPRESS_DATABASE_URL", database_url)
    assert rows(stocked("tenant", "list", "--json")) == []
    stocked("tenant", "add", "zoo")
    stocked("key", "create", "zoo")
    assert stocked("adapter", "add", adapters / "helper", "--tenant", "zoo", "--name", "helper").exit_code == 0
    assert [row["version"] for row in rows(stocked("adapter", "list", "--tenant", "zoo", "--json"))] == ["helper@1"]


def test_the_bases_names_are_taken(stocked: Cli, adapters: Path) -> None:
    for name in ("base", "tiny-llama"):
        refused = stocked("adapter", "add", adapters / "helper", "--tenant", "acme", "--name", name, code=1)
        assert refused.stderr == f"Error: name: '{name}' is the base model's name\n"


def test_the_base_is_the_one_that_the_adapter_names(
    stocked: Cli, base_folder: Path, adapters: Path, tmp_path: Path
) -> None:
    stocked("pull", base_folder, "--base-id", "acme/Other")
    added = stocked("adapter", "add", adapters / "helper", "--tenant", "acme", "--name", "helper")
    assert added.stdout.startswith("helper@1")
    add = ("adapter", "add", adapters / "orphan", "--tenant", "acme", "--name", "orphan", "--assert-base")
    assert "--model: name the base of this adapter, one of acme/Other, acme/Tiny-Llama" in stocked(*add, code=1).stderr
    stocked(*add, "--model", "acme/Other")
    assert rows(stocked("adapter", "list", "--tenant", "acme", "--json"))[1]["base"] == "acme/Other"
    assert "bring it in with `stencilpress pull`" in stocked(*add, "--model", "acme/Absent", code=1).stderr


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_command_option_and_setting_is_documented() -> None:
    text = "".join((ROOT / "docs" / file).read_text() for file in ("cli.md", "operations.md"))
    for name, command in commands(main):
        section = re.search(rf"^#+ `stencilpress {name}\b.*?(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
        assert section, f"no section for `stencilpress {name}`"
        for option in command.params:
            place = text if option.name in ("data", "database_url", "as_json") else section[0]
            for flag in (*option.opts, *option.secondary_opts):
                assert not flag.startswith("-") or re.search(rf"`[^`\n]*{flag}\b", place), f"{name} {flag}"
            assert option.envvar is None or f"`{option.envvar}`" in text, f"{name} {option.envvar}"
    for settings in (EngineSettings, GatewaySettings):
        for field in set(settings.__struct_fields__) - INTERNAL:
            assert f"`STENCILPRESS_{field.upper()}`" in text, field


def test_serve_offers_every_setting_of_the_engine() -> None:
    assert set(ENGINE_OPTIONS) == set(EngineSettings.__struct_fields__) - INTERNAL - {"log_format"}
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineSettings)}
    text = (ROOT / "docs" / "cli.md").read_text()
    for name in ENGINE_OPTIONS:
        row = next(line for line in text.splitlines() if f"`STENCILPRESS_{name.upper()}`" in line)
        assert f"| {defaults[name]} |" in row, row
