"""`shardplan doctor [--config C]`: find what would make a run on this host fail or slow, before it is started."""

import socket
from collections.abc import Sequence

from shardplan.commands.inputs import input_paths
from shardplan.commands.output import check_outputs, side_stream, write_json
from shardplan.config import parse_config
from shardplan.config.command_flags import DoctorCommand
from shardplan.doctor.findings import Check, Level
from shardplan.doctor.run import checks_of, run_checks
from shardplan.doctor.subject import read_subject
from shardplan.errors import ConfigError


def main(argv: Sequence[str]) -> None:
    """Run `shardplan doctor` with the arguments `argv`."""
    config = parse_config(argv, DoctorCommand)
    check_outputs(input_paths(config), json=config.json)
    from shardplan.report.console import console
    from shardplan.report.doctor import findings_json, print_findings
    from shardplan.runtime.progress import Progress, show_progress

    host, subject = socket.gethostname(), read_subject(config)
    total = len(checks_of(subject))
    with show_progress(Progress("checking", "checks", total)) as progress:

        def on_done(running: set[Check]) -> None:
            progress.done = total - len(running)
            progress.set_note(f"waiting for {', '.join(sorted(running))}")

        findings = run_checks(subject, on_done)
    if config.json is not None:
        write_json(findings_json(host, findings), config.json)
    print_findings(host, findings, console(side_stream(config.json)))
    failed = [check for check, each in findings.items() if any(finding.level is Level.ERROR for finding in each)]
    if failed:
        raise ConfigError(f"{host} is not ready for a run ({', '.join(failed)}); what to do is in the lines above")
