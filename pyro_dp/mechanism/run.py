"""A run: the steps of an inference, one after the other, with a progress bar and callbacks."""

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from tqdm.auto import tqdm

from pyro_dp.mechanism.peers import Stopped
from pyro_dp.mechanism.run_result import (
    BY_CALLBACK,
    DONE,
    Callback,
    ReleasedStep,
    RunResult,
    require_callbacks,
    wants_to_stop,
)
from pyro_dp.utils.errors import warn_user


def walk(
    inference: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    progress: bool,
    callbacks: Sequence[Callback],
) -> RunResult:
    """Make the steps that are left; the arguments are those of ``IterativeMechanism.run``."""
    require_callbacks(callbacks)
    peers, interrupts = inference._releases.peers, inference._releases.interrupts
    with peers.together():
        num_steps = peers.step(partial(inference._planned, args, kwargs))
        inference._reservation.plan()
        result = RunResult(inference._name, inference._measure, inference._steps, num_steps)
        inference.last_run = result
        bar = tqdm(
            total=num_steps,
            initial=inference._steps,
            desc=f"Fitting with {inference._name}",
            unit="step",
            disable=not progress or inference.accountant.silent or not peers.counts,
        )
        with interrupts.installed(), result.timed(), bar:
            while not inference._finished:
                try:
                    with interrupts.within():
                        step = _timed_step(inference, result, args, kwargs)
                except Stopped:  # on another rank
                    result.stopped = BY_CALLBACK
                    break
                if not math.isnan(step.value):
                    text = f"{inference._measure} {step.value:.4g}"
                    bar.set_postfix_str(text, refresh=False)
                bar.update()
                stops = [wants_to_stop(callback, step) for callback in callbacks]
                if any(stops) and not inference._finished:
                    peers.stop()
                    result.stopped = BY_CALLBACK
                    result.read_clipped(step)
                    break
            else:
                result.stopped, result.num_steps = DONE, inference._steps
                bar.total = inference._steps
                bar.refresh()
            with interrupts.within():  # the result is written as a whole
                interrupts.hold()
                inference._conclude()
        inference._releases.forget()
        for warning in [*inference._warnings(), *peers.warnings()]:
            warn_user(warning)
        return result


def _timed_step(
    inference: Any, result: RunResult, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ReleasedStep:
    start = time.perf_counter()
    value = inference.step(*args, **kwargs)
    step = ReleasedStep(
        inference._steps,
        result.num_steps,
        value,
        inference._next_bound(),
        inference.noise_multiplier,
        inference._releases.noise,
        inference.accountant,
        lambda: getattr(inference, "clipped_fraction", None),
    )
    result.add(step, time.perf_counter() - start)
    return step
