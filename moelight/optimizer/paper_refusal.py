"""Explain why nothing fits the published memory rules: the memory that is too small, the missing bytes, and a fix."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from moelight.core.errors import BudgetError
from moelight.core.units import format_bytes
from moelight.hrm import paper
from moelight.hrm.paper import PaperSetting
from moelight.optimizer import paper_grid
from moelight.optimizer.paper_grid import Limits
from moelight.profiles.hardware import HardwareProfile
from moelight.profiles.model import ModelProfile


def published_infeasible_error(
    setting: PaperSetting, limits: Limits, hardware: HardwareProfile, model: ModelProfile
) -> BudgetError:
    """The error that names the memory too small for even the smallest cell, the missing bytes, and the least change
    that suffices."""
    mu = limits.micro_batch_size or 1
    n_ub = limits.num_micro_batches or max(1, (limits.batch_size or 1) // mu)
    device_needed = -(-_device_needed(setting, limits, mu, n_ub) // setting.gpus)
    enough = replace(setting, device_bytes=max(setting.device_bytes, device_needed * setting.gpus))
    host_needed = _host_needed(enough, limits, mu, n_ub)
    if enough.device_bytes > setting.device_bytes:
        tier, needed, capacity = "device", device_needed, setting.device_bytes // setting.gpus
        share = paper.DEVICE_SHARE
        also = host_needed > setting.host_bytes
        others = [f", and --host-memory {format_bytes(host_needed, round_up=True)}"] if also else []
    else:
        tier, needed, capacity, share = "host", host_needed, setting.host_bytes, paper.HOST_SHARE
        others = [_more_device(setting, limits, mu, n_ub)]
    short = needed - capacity
    return BudgetError(
        f"--{tier}-memory {format_bytes(capacity)} is too small for {model.name} on {hardware.name}: the paper "
        f"estimator uses {share:.0%} of it and needs at least {format_bytes(needed, round_up=True)} for "
        f"batch_size {mu * n_ub} and micro_batch_size {mu}, {format_bytes(short, round_up=True)} ({short} bytes) more"
        + "".join([*others, _fewer(setting, limits)]),
        tier=tier,
        needed_bytes=needed,
    )


def _device_needed(setting: PaperSetting, limits: Limits, mu: int, n_ub: int) -> int:
    """The least m_g with which the device's rules hold for some shares, in bytes."""
    rows = paper_grid.device_rows(setting, limits, mu, n_ub)
    ends = [(w, c) for w in limits.weights_host for c in limits.kv_host]
    least = min(max(float(row.base + row.weights * w + row.kv * c) for row in rows) for w, c in ends)
    return _capacity(least, paper.DEVICE_SHARE)


def _host_needed(setting: PaperSetting, limits: Limits, mu: int, n_ub: int) -> int:
    """The least m_c with which all rules hold for the given device, in bytes; 0 if the device's rules do not hold."""
    rows = paper_grid.device_rows(setting, limits, np.asarray(mu), np.asarray(n_ub))
    host = paper_grid.host_row(setting, limits, mu, n_ub)

    def use(weights_host: Any, kv_host: Any) -> Any:
        return host.base + host.weights * weights_host + host.kv * kv_host

    shares = paper_grid.least_shares(rows, limits, use)
    if not shares.feasible:
        return 0
    return _capacity(float(use(shares.weights_host, shares.kv_host)), paper.HOST_SHARE)


def _capacity(use: float, share: float) -> int:
    """The least whole capacity with ``share`` of it at least ``use``."""
    capacity = math.floor(use / share)
    while share * capacity < use:
        capacity += 1
    return capacity


def _more_device(setting: PaperSetting, limits: Limits, mu: int, n_ub: int) -> str:
    """A hint at the additional device memory that takes enough weights off the host; empty if none suffices."""
    host = paper_grid.host_row(setting, limits, mu, n_ub)
    low, high = limits.weights_host
    weights_host = min(high, float(host.room(limits.kv_host[0]) / host.weights))
    if weights_host < low:
        return ""
    rows = paper_grid.device_rows(setting, limits, mu, n_ub)
    kv_host = limits.kv_host[0]
    needed = max(float(row.base + row.weights * weights_host + row.kv * kv_host) for row in rows)
    more = -(-(_capacity(needed, paper.DEVICE_SHARE) - setting.device_bytes) // setting.gpus)
    return f"; or {format_bytes(more, round_up=True)} more --device-memory"


def _fewer(setting: PaperSetting, limits: Limits) -> str:
    """A hint at the largest batch that fits in place of the fixed one; empty if none fits."""
    if limits.batch_size is None and limits.num_micro_batches is None and limits.micro_batch_size is None:
        return ""
    one = np.array([1], dtype=np.int64)
    if not paper_grid.fits(setting, limits, one, one)[0]:
        return ""
    if limits.micro_batch_size is not None and limits.num_micro_batches is None:
        most = paper_grid.most_that_fit(lambda sizes: paper_grid.fits(setting, limits, sizes, one), one)
        return f"; or a micro_batch_size of at most {most[0]}"
    mu = one * (limits.micro_batch_size or 1)
    if not paper_grid.fits(setting, limits, mu, one)[0]:
        mu = one
    most = paper_grid.most_that_fit(lambda counts: paper_grid.fits(setting, limits, mu, counts), one)
    return f"; or a batch_size of at most {most[0] * mu[0]} in micro-batches of {mu[0]}"
