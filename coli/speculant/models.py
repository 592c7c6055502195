"""From the name in a configuration to a model folder, and fetching one that is not here yet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from coli.builtin import DEMO_MODEL
from coli.errors import OptionError
from coli.options import model_home, resolve
from coli.speculant.configs import GraphConfig, VerifierConfig
from coli.tools.pulled import named_model

Notice = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Where notices go that nobody else wants."""
    print(line, file=sys.stderr)


def model_folder(name: str | None, origin: str) -> Path:
    """The folder of a container, a pulled name or a pulled hub id; None: the built-in model. Raises OptionError with
    the `coli pull` line to type."""
    return DEMO_MODEL if name is None else named_model(name, _home(), origin)


def pull(config: GraphConfig | VerifierConfig, notice: Notice = to_stderr) -> Path:
    """Fetch and convert the hub model of `config` with its token and download mode; returns the container's folder.

    Nothing is fetched when it is here. Raises what `coli pull` does.
    """
    name = config.tokenizer_name if isinstance(config, GraphConfig) else config.model_name
    if name is None:
        return DEMO_MODEL
    home = _home()
    if home is None:
        raise OptionError("COLI_HOME: there is no home folder to keep models in: set it to a folder")
    try:
        return named_model(name, home, "model")
    except OptionError:
        if "/" not in name:
            raise
    from coli.tools.pull import pull as fetch
    from coli.tools.repository import PullOptions

    options = PullOptions(token=config.hf_token, download_mode=config.download_mode)
    return fetch(f"hf:{name}", home, options, notice, lambda done, total: None, lambda done, total: None).path


def _home() -> Path | None:
    return model_home(resolve({}, names=["home"]))
