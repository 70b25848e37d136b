"""The watchers that write files about a running job: its status and its metrics, if requested."""

from __future__ import annotations

import hashlib
import os

from moelight.batch.metrics import MetricsFile
from moelight.batch.options import JobOptions
from moelight.batch.status import BatchFacts, StatusFile
from moelight.batch.time_left import TimeLeft


def file_watchers(options: JobOptions, eta: TimeLeft) -> list[StatusFile | MetricsFile]:
    """Return the watchers of the requested files; ``eta`` must receive every event before they do.

    Raises:
        InputError: a file cannot be written.
    """
    files: list[StatusFile | MetricsFile] = []
    if options.status is not None:
        output, errors = options.output, options.error_file
        facts = BatchFacts(
            id=f"batch_{hashlib.blake2b(os.fsencode(output or options.prompts), digest_size=12).hexdigest()}",
            input_file=str(options.prompts),
            output_file=None if output is None else str(output),
            error_file=None if errors is None else str(errors),
            model=options.model,
        )
        files.append(StatusFile(options.status, facts, eta))
    if options.metrics is not None:
        files.append(MetricsFile(options.metrics, options.model, eta))
    return files
