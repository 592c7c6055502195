"""`coli doctor`: what is wrong here, and what to do about it."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from coli.cli.flags import settings_options
from coli.cli.json_output import STDOUT, write_json
from coli.cli.model_path import model_path
from coli.cli.streams import Streams, one_line
from coli.errors import OptionError
from coli.options import EngineOptions, kernel_cache, model_home, resolve

SETTINGS = ("model", "home", "threads", "simd", "kernel_cache", "quiet", "verbose", "color", "debug")
FAILED = 1


@click.command("doctor")
@click.argument("model", metavar="MODEL", required=False, type=str)
@click.option("--deep", is_flag=True, help="read every byte of the model and compare its digests")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead")
@settings_options(*[name for name in SETTINGS if name != "model"])
def command(model: str | None, deep: bool, as_json: bool, **flags: Any) -> None:
    """Look for what is wrong with this machine, this installation and MODEL, and say what to do.

    The exit status is 1 when something fails, 0 when there are at most warnings. Without MODEL the one of COLI_MODEL is
    looked at, else the demo model.
    """
    settings = resolve(flags, names=SETTINGS)
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    from coli.tools.doctor import Finding, Machine, install_findings, machine_findings, model_findings, space_finding

    options = EngineOptions(threads=settings["threads"], simd=settings["simd"], kernel_cache=kernel_cache(settings))
    machine = Machine.here(options)
    findings = [*machine_findings(machine), *install_findings(), *space_finding(model_home(settings))]
    try:
        path = model_path(settings, lambda line: None, model)
    except OptionError as error:
        findings.append(Finding("model", "files", "failure", str(error), "`coli pull` fetches a model"))
    else:
        streams.progress(f"looking at {path}")
        findings += model_findings(path, machine, deep=deep)
        streams.clear_progress()
    failures = sum(finding.level == "failure" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if as_json:
        facts = [dataclasses.asdict(finding) for finding in findings]
        write_json(STDOUT, {"failures": failures, "warnings": warnings, "findings": facts})
    else:
        for finding in findings:
            streams.text(one_line(f"{finding.level:8} {finding.area} {finding.what}: {finding.found}") + "\n")
            if finding.remedy:
                streams.text(one_line(f"         -> {finding.remedy}") + "\n")
        streams.text(f"{failures} failures, {warnings} warnings\n")
    if failures:
        click.get_current_context().exit(FAILED)
