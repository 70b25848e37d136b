"""``moelight optimize``: the fastest policy for a machine, a model and a workload, and the reason; or machines beside
each other, with what the job would cost on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelight.cli import planning_options as ask
from moelight.cli.options import check_output, option, with_options, write_output
from moelight.cli.tables import open_console, print_json
from moelight.core.errors import ConfigError
from moelight.core.small_files import read_error_text, read_object
from moelight.core.units import format_bytes
from moelight.observe.number_format import rate_or_count, seconds_text

if TYPE_CHECKING:
    from moelight.core.policy import Policy
    from moelight.optimizer.plan import Plan
    from moelight.profiles.hardware import HardwareProfile


QUALITY_FILE = "quality.json"  # of `compare -o`, in the directory of the model that was measured
ALL = "all"
DEFAULT_PRICES = "examples"
MOST_NODES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonOptions:
    """Options that set the machines of ``--hw``, all or several, beside each other."""

    prices: str | None = option(
        "Price file; compares the machines of --hw, all or NAME,NAME; defaults to examples.", metavar="FILE"
    )
    nodes: str | None = option("Numbers of machines to compare, e.g. 1,2,4; defaults to 1.", metavar="N,N")
    plot: Path | None = option("File to draw time and price to: .png, .svg or .pdf.", metavar="FILE")


@with_options()
def optimize_command(
    *,
    model: ask.Model,
    asked: ask.PlanningOptions,
    comparison: ComparisonOptions,
    output: Path | None = option(
        "File to write the policy to, for generate --policy.", "--output", "-o", metavar="POLICY.yaml"
    ),
    acceptance: ask.Acceptance = None,
    tp: str | None = option(
        "Number of ranks that compute the model together; auto is one for each GPU or NUMA node, if they gain.",
        metavar="N|auto",
    ),
    as_json: ask.Json = False,
) -> None:
    """Find the fastest policy that fits the memory, and explain it.

    The answer states how much faster another policy is at most, by the cost model. With --hw all or NAME,NAME: which
    of the machines to rent, by the prices of --prices.
    """
    from moelight.batch.output import STANDARD_OUTPUT

    if asked.hw == ALL or "," in asked.hw or comparison != ComparisonOptions():
        if output is not None:
            raise ConfigError(f"--output {output}: a policy is for one machine; name one with --hw, without prices")
        if tp is not None:
            raise ConfigError(f"--tp {tp}: ranks are those of one machine; name one with --hw, without prices")
        _compare(model, asked, comparison, as_json=as_json)
        return
    check_output(output, as_json=as_json)
    question = ask.read_question(model, asked)
    ranks = None if tp is None else question.plan_ranks(tp, nodes=ask.count_nodes(asked.hw))
    plan = question.plan() if ranks is None else ranks.plan
    quality = measured_quality(model, plan.policy)
    gain = None
    if acceptance is not None:
        from moelight.optimizer.simulation import SimulationSetup

        gain = SimulationSetup(plan.policy, question.model, question.hardware, question.workload).drafts(acceptance)
    if output is not None:
        write_output(output, [policy_file(plan)])
    if as_json:
        from moelight.optimizer.plan import plan_as_dict

        more = {"quality": quality, "drafts": None if gain is None else asdict(gain)}
        more |= {} if ranks is None else ranks.as_dict()
        print_json(plan_as_dict(plan) | {name: value for name, value in more.items() if value})
    elif output != STANDARD_OUTPUT:
        from moelight.cli.plan_view import print_plan

        measured = quality_words(quality) if quality else ""
        print_plan(
            open_console(),
            plan,
            workload_name=question.workload_name,
            quality=measured,
            ranks="" if ranks is None else ask.ranks_text(ranks),
        )
        if gain is not None:
            open_console().print(ask.draft_text(gain), soft_wrap=True)


def _compare(model: str, asked: ask.PlanningOptions, comparison: ComparisonOptions, *, as_json: bool) -> None:
    """Print which machines to rent for the job."""
    from moelight.optimizer.offers import make_offers, offers_as_dict
    from moelight.profiles.prices import load_prices

    if comparison.plot is not None:
        from moelight.batch.output import check_writable
        from moelight.observe.plots import check_suffix

        check_suffix(comparison.plot)
        check_writable(comparison.plot, label="plot")
    nodes = _node_counts(comparison.nodes)
    job = ask.read_job(model, asked)
    machines = _machines(asked.hw, model)
    prices = load_prices(comparison.prices or DEFAULT_PRICES, [machine.name for machine in machines])
    with _progress() as tell:
        offers = make_offers(
            machines,
            job.model,
            job.workload,
            lambda machine: job.on(machine).options,
            name=job.name,
            nodes=nodes,
            prices=prices,
            tell=tell,
        )
    if comparison.plot is not None:
        from moelight.observe.price_plot import write_offers

        write_offers(comparison.plot, offers, title=f"{job.name}: time and price", currency=prices.currency)
    if as_json:
        print_json({"model": job.name, **offers_as_dict(offers, job.workload, prices)})
        return
    from moelight.cli.plan_view import print_offers

    print_offers(open_console(), job, offers, prices, plot=comparison.plot)


def _node_counts(counts: str | None) -> tuple[int, ...]:
    """The numbers of machines in ``counts``, ascending."""
    parts = [part.strip() for part in (counts or "1").split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part[:9]) <= MOST_NODES for part in parts):
        raise ConfigError(f"--nodes {counts}: must be whole numbers from 1 to {MOST_NODES:,}, separated by commas")
    return tuple(sorted({int(part) for part in parts}))


def _machines(hw: str, model: str) -> list[HardwareProfile]:
    """The machines that ``hw`` names, once each."""
    from moelight.profiles.files import profile_names

    names = profile_names("hardware") if hw == ALL else dict.fromkeys(name.strip() for name in hw.split(","))
    return [ask.load_machine(name, model) for name in names]


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What shows the name of the machine that is planned on a terminal at stderr, as planning many takes a while."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False, markup=False).status("planning") as status:
        yield lambda name: status.update(f"planning {name}")


def measured_quality(model: str, policy: Policy) -> dict[str, Any] | None:
    """The comparison kept in the directory ``model`` if it was measured with the cache and the activations of
    ``policy``: its ``reference``, ``kl`` (nats a token) and ``top1`` (share of tokens). None without one; raises
    ConfigError for another file of that name."""
    path = Path(model).expanduser() / QUALITY_FILE
    if not path.is_file():
        return None
    try:
        quality = read_object(path)
        if (quality["kv_dtype"], quality.get("activations", "auto")) != (policy.kv_dtype, policy.activations):
            return None
        return {
            "reference": str(quality["reference"]),
            "kl": float(quality["kl"]["value"]),
            "top1": float(quality["top1"]["value"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = read_error_text(error) if isinstance(error, (OSError, ValueError)) else "a figure is missing"
        raise ConfigError(f"{path}: is not what `moelight compare -o` writes ({reason})") from None


def quality_words(quality: dict[str, Any]) -> str:
    """One line."""
    return (
        f"quality against {quality['reference']}: {quality['kl']:.3g} nats a token of KL divergence, the same "
        f"likeliest token {100 * quality['top1']:.4g} % of the time"
    )


def policy_file(plan: Plan) -> str:
    """Return the policy file of ``plan`` as text; workload, estimate and reason are comments at the top."""
    from moelight.profiles.policy_files import policy_text

    return policy_text(plan.policy, comments=_comments(plan))


def _comments(plan: Plan) -> Iterator[str]:
    from moelight import __version__

    work, estimate = plan.workload, plan.estimate
    yield (
        f"{plan.policy.model} on {plan.hardware}: {work.num_requests} prompts of {work.prompt_len} tokens (at most "
        f"{work.max_prompt_len}), {work.gen_len} generated each. Planned by moelight {__version__} ({plan.estimator})."
    )
    yield (
        f"Estimate: {rate_or_count(estimate.tokens_per_s)} tokens/s end to end, "
        f"{rate_or_count(estimate.decode_tokens_per_s)} while decoding; a decode pass takes "
        f"{seconds_text(estimate.pass_s)}; {estimate.binding} binds."
    )
    used = (f"{use.tier} {format_bytes(use.total_bytes)} of {format_bytes(use.capacity_bytes)}" for use in plan.memory)
    yield f"Memory: {', '.join(used)}."
    yield f"Why: {plan.why}"
    if plan.runs:
        yield "Run it: moelight generate PROMPTS.jsonl --policy THIS_FILE --model DIRECTORY_OF_THE_CHECKPOINT"
    else:
        yield f"It cannot be run yet: {'; '.join(plan.why_not)}."
