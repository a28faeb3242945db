"""The place of a model's files: a folder, a GGUF file, the Hugging Face hub, or the demo model that is made here."""

import os
import re
from pathlib import Path

DEMO = "demo"
SMOLLM2 = "smollm2"
HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", re.ASCII)
PATH_PREFIXES = ("/", "./", "../", "~")
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
# Folders hold other formats (onnx, original), consolidated* the same weights once more.
UNWANTED = ["*/*", "consolidated*"]


def locate(model: str) -> Path | None:
    """The folder of a model: of "demo" or a GGUF file, made if needed, of a folder, or of a hub id ("org/name").

    None for a plain name. ValueError, with a way out, for what looks like a model and cannot be had.
    """
    if model == DEMO:
        from replica.model.demo import demo_folder

        return demo_folder()
    if (file := Path(os.path.expanduser(model))).is_file():
        from replica.model.gguf.folder import gguf_folder

        return gguf_folder(file)
    folder = local_folder(model)
    if folder is None:
        if not HUB_ID.fullmatch(model):
            return None
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's, by its version

        # The snapshot lies in the cache of the hub. HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN count.
        try:
            folder = Path(snapshot_download(model, allow_patterns=WANTED, ignore_patterns=UNWANTED))
        except (OSError, ValueError, HTTPError) as error:
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise ValueError(f"cannot get {model!r} from the hub: {reason}; give a folder") from error
    if (folder / "config.json").is_file():
        return folder
    if others := sorted(file.name for file in folder.glob("*.gguf")):
        raise ValueError(f"{folder} has no config.json, but {others[0]}; name that file itself")
    raise ValueError(f"{folder} has no config.json; name the folder of a model in Hugging Face's layout")


def short_name(model: str) -> str:
    """Return what clients ask for: of a path its last part, and anything else as it is given, ORG/NAME too."""
    path = os.path.abspath(os.path.expanduser(model))
    if os.path.isdir(path):
        return os.path.basename(path) or model
    return Path(path).stem if os.path.isfile(path) else model


def local_folder(model: str) -> Path | None:
    """The folder that it names; ValueError for what can only be a path and is no folder."""
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{model} is a file; name the folder of a model in Hugging Face's layout")
    if model.startswith(PATH_PREFIXES):
        raise ValueError(f"{model} does not exist; name the folder of a model, or a hub id such as org/name")
    return None
