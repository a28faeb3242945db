"""Builds the configuration from the settings, or says in one line why it cannot."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from api.http.bodies import check_limits
from api.process.options import default_of, nested_fields
from api.process.settings import Unusable
from events.sockets.curve import load_curve, load_curve_client
from router.config import MEGABYTE, Kubernetes, RouterConfig
from router.members.discovery.collection import Cluster, in_cluster
from router.members.discovery.pods import check_selector
from router.members.discovery.pool import check_name
from router.members.spec import by_name, parse_replica, parse_replicas
from router.members.watched_file import WatchedFile
from router.process.settings import TABLE
from router.prompts.model_rewrites import parse_rewrites
from router.tenants.keys import keys_from_options, parse_keys
from router.workers.peer_names import parse_endpoint

KUBERNETES = ("kubernetes_pods", "kubernetes_pool")


def config_from(ctx: click.Context) -> RouterConfig:
    """Return the configuration from the options; raise a click error if they are invalid or contradict each other."""
    return config_of(ctx.params)


def config_of(given: Mapping[str, Any]) -> RouterConfig:
    """Return the configuration from these settings and the defaults of all others; raise as `config_from`."""
    usual: dict[str, Any] = {key: () if row.multiple else default_of(row, TABLE) for key, row in TABLE.all.items()}
    values = usual | dict(given)
    _check_together(values)
    _check_files(values)
    with _unusable("--replica"):
        replicas = tuple(map(parse_replica, values["replica"]))
        by_name(replicas)
        for spec in replicas:
            spec.source()
            spec.api_key(os.environ)
    kubernetes = None
    pods, pool = (values[key] for key in KUBERNETES)
    if pods is not None or pool is not None:
        namespace, api = values["kubernetes_namespace"], values["kubernetes_api"]
        with _unusable(_option(next(key for key in KUBERNETES if values[key] is not None))):
            if pods is not None:
                check_selector(pods)
            if pool is not None:
                check_name(pool)
            cluster = in_cluster(os.environ, namespace) if api is None else Cluster(api, namespace or "default")
        kubernetes = Kubernetes(cluster, pods, pool)
    return RouterConfig(
        **nested_fields(TABLE, values),
        replicas=replicas,
        kubernetes=kubernetes,
        model_dirs=(folders := _model_dirs(values["model_dir"])),
        chat_templates=_chat_templates(values["chat_template"], folders),
        keys=tuple(keys_from_options(values["api_key"], values["admin_key"])),
        demand_key=bool(values["api_key"] or values["api_keys"]),
        message_cache_bytes=int(values["message_cache_mb"] * MEGABYTE),
    )


@contextmanager
def _unusable(option: str) -> Iterator[None]:
    """Name the option in an error about its value."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise Unusable(f"{option}: {error}") from error


def _option(key: str) -> str:
    return TABLE.all[key].option


def _check_together(values: Mapping[str, Any]) -> None:
    if (values["tls_cert"] is None) != (values["tls_key"] is None):
        given, missing = ("--tls-cert", "--tls-key") if values["tls_cert"] else ("--tls-key", "--tls-cert")
        raise Unusable(f"{given} needs {missing} too")
    if values["admin_key"] in values["api_key"]:
        raise Unusable("--admin-key is one of the keys of --api-key; give administrators one of their own")
    check_limits(values)
    if values["log_prompts"] and not values["request_log"]:
        raise Unusable("--log-prompts is of no use alone; give --request-log too")
    watched = [_option(key) for key in KUBERNETES if values[key]]
    if len(watched) > 1:
        raise Unusable(
            f"{' and '.join(watched)} would name the same pods in two ways; give one of them "
            "(pods of several pools: a label that they share)"
        )
    for key in ("kubernetes_namespace", "kubernetes_api"):
        if values[key] and not watched:
            raise Unusable(f"{_option(key)} is of no use alone; give {' or '.join(map(_option, KUBERNETES))} too")
    if (values["curve_server"] is None) != (values["curve_secret"] is None):
        raise Unusable(
            "--curve-server and --curve-secret belong together: the file of the replicas' public key, "
            "and that of your own secret one"
        )
    if values["picker_listen"] and values["workers"] > 1:
        raise Unusable(
            f"--workers {values['workers']}: a gateway has few connections, which one process answers; leave it out "
            "beside --picker-listen, and give a gateway several routers that are peers"
        )
    if values["peer"] and not values["peer_listen"]:
        raise Unusable("--peer is of no use alone: routers tell each other; give --peer-listen too")
    if values["peer_keys"] and not values["peer_listen"]:
        raise Unusable("--peer-keys is of no use alone; give --peer-listen too")
    if values["peer_listen"] and parse_endpoint(values["peer_listen"]) is not None and not values["peer_keys"]:
        raise Unusable(
            f"--peer-listen {values['peer_listen']}: whoever reaches it could tell this router anything; give "
            "--peer-keys too (`warmroute events keygen NAME` makes them), or listen at ipc://PATH"
        )


def _check_files(values: Mapping[str, Any]) -> None:
    """Refuse to start with a broken file; a running router would keep the last good one."""
    for key, parse in (("replicas_file", parse_replicas), ("api_keys", parse_keys), ("model_rewrites", parse_rewrites)):
        path = values[key]
        if path is not None:
            with _unusable(_option(key)):
                parse(path, WatchedFile(path).read_if_changed() or "")
    if values["usage_db"] is not None and not Path(values["usage_db"]).absolute().parent.is_dir():
        raise Unusable(f"--usage-db: the folder of {values['usage_db']!r} does not exist; make it first")
    if values["curve_server"] is not None:
        with _unusable("--curve-server, --curve-secret"):
            load_curve_client(values["curve_server"], values["curve_secret"])
    if values["peer_keys"] is not None:
        with _unusable("--peer-keys"):
            load_curve(values["peer_keys"])


def _model_dirs(texts: Sequence[str]) -> dict[str, str]:
    folders: dict[str, str] = {}
    for text in texts:
        model, equals, folder = text.partition("=")
        if not equals or Path(text).is_dir():
            model = folder = text
        if not (Path(folder) / "tokenizer.json").is_file():
            raise Unusable(f"--model-dir: {folder!r} has no tokenizer.json; name the model's folder, or MODEL=DIR")
        if not model:
            raise Unusable(f"--model-dir: {text!r} names no model before the =; write MODEL=DIR, or DIR alone")
        if folders.setdefault(model, folder) != folder:
            raise Unusable(f"--model-dir: the model {model!r} has two folders, {folders[model]!r} and {folder!r}")
    return folders


def _chat_templates(texts: Sequence[str], folders: Mapping[str, str]) -> dict[str, str]:
    files: dict[str, str] = {}
    for text in texts:
        model, equals, file = text.partition("=")
        if not equals or Path(text).is_file():
            if len(folders) != 1:
                raise Unusable(f"--chat-template: {text!r} names no model; write MODEL=FILE")
            [model], file = folders, text
        if not model:
            raise Unusable(f"--chat-template: {text!r} names no model before the =; write MODEL=FILE")
        if not Path(file).is_file():
            raise Unusable(f"--chat-template: {file!r} is no file")
        if files.setdefault(model, file) != file:
            raise Unusable(f"--chat-template: the model {model!r} has two templates, {files[model]!r} and {file!r}")
    return files
