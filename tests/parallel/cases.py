"""The training runs that must be exact: every split and weight, then every loop and option."""

from __future__ import annotations

import functools
import itertools

from training import LONGEST, Case

import chronica_hvd

#: Steps of the long run: several blocks of 64.
LONG_STEPS = 200


@functools.cache
def cases(ranks: int) -> dict[str, Case]:
    """Return the runs for this number of ranks, by name."""
    every = [*_splits(ranks), *_loops(ranks), *_options(ranks), *_data_sets(ranks), *_micro_batches(ranks)]
    by_name = {case.name: case for case in every}
    assert len(by_name) == len(every)
    return by_name


def base(ranks: int, name: str = "base", **changes: object) -> Case:
    """Return a run whose last step has one sample, so that with several ranks some hold a filler."""
    return Case(**{"name": name, "samples": 4 * 4 * ranks + 1, "loss_weight": "sizes", **changes})


def micro_batched(ranks: int, name: str, **changes: object) -> Case:
    """Return a run whose steps have other numbers of micro-batches on every rank."""
    return base(ranks, name, **{"plan": {"micro_batches": "auto"}, "loop": "steps", "cut": 0, **changes})


def skipping(ranks: int, most: int) -> Case:
    """Return a run of 16 full steps, to skip some of."""
    return base(ranks, f"skipping{most}", samples=16 * 4 * ranks, plan={"micro_batches": most}, loop="steps")


def _splits(ranks: int) -> list[Case]:
    """Every model × loss weight × local batch × padding, with a last step of one sample and of some more."""
    product = itertools.product(
        ("mlp", "transformer"),
        ("samples", "sizes", "array"),
        ("free", "equal"),
        ("max", "none"),
        (1, ranks + 1),
    )
    return [
        base(
            ranks,
            f"{model}-{loss_weight}-{local_batch}-{padding}-tail{tail}",
            model=model,
            samples=4 * 4 * ranks + tail,
            loss_weight=loss_weight,
            plan={"local_batch": local_batch, "padding": padding},
        )
        for model, loss_weight, local_batch, padding, tail in product
    ]


def _loops(ranks: int) -> list[Case]:
    workers = {"num_workers": 2, "persistent_workers": True}
    return [
        base(ranks),
        base(ranks, "steps", loop="steps"),
        base(ranks, "workers", loader={"num_workers": 2}),
        base(ranks, "steps-workers", loop="steps", loader=workers),
        base(ranks, "ahead", loop="ahead", optimizer={"lookahead": 1}),
        base(ranks, "ahead-workers", loop="ahead", optimizer={"lookahead": 1}, loader=workers),
        base(ranks, "clip", update="clip"),
        base(ranks, "clip-steps", update="clip", loop="steps", model="transformer"),
        base(ranks, "scaler", update="scaler"),
        base(ranks, "scheduler", update="scheduler", broadcast=True),
        base(ranks, "fillers-without-backward", update="skip_fillers"),
    ]


def _options(ranks: int) -> list[Case]:
    speeds = (1.0, 0.5, 2.0)[:ranks]
    return [
        base(ranks, "sum", optimizer={"op": "Sum"}),
        base(ranks, "predivide", optimizer={"gradient_predivide_factor": 2.0}),
        base(ranks, "groups", optimizer={"groups": 2}),
        base(ranks, "sparse", model="bag"),
        base(ranks, "experts", model="experts"),
        base(ranks, "sparse-as-dense", model="bag", optimizer={"sparse_as_dense": True}),
        base(ranks, "speeds", speeds=speeds),
        base(ranks, "speeds-none", speeds=speeds, model="transformer", plan={"padding": "none"}),
        base(ranks, "speeds-equal", speeds=speeds, plan={"local_batch": "equal"}),
        base(ranks, "cost", plan={"cost": chronica_hvd.CostModel(fixed=3.0, per_sample=1.0, per_size2=0.5)}),
        base(ranks, "by-hand", by_hand=True),
        base(ranks, "seed", plan={"seed": 5}),
        base(ranks, "drop-last", plan={"drop_last": True}),
        base(ranks, "summed-losses", loss_weight="sum"),
    ]


def _data_sets(ranks: int) -> list[Case]:
    return [
        base(ranks, "fewer-samples-than-ranks", samples=max(1, ranks - 1), batch_size=8),
        base(ranks, "as-many-samples-as-ranks", samples=ranks, batch_size=8),
        base(ranks, "858-samples", samples=858, batch_size=8, loss_weight="samples"),
        base(ranks, "long", samples=LONG_STEPS * 2 * ranks - 1, batch_size=2),
    ]


def _micro_batches(ranks: int) -> list[Case]:
    """Plans with micro-batches, and plans cut anew so that ranks and steps have other numbers of them."""
    product = itertools.product(
        ("mlp", "transformer"),
        ("samples", "sizes", "array"),
        (("max", 3, 1), ("max", "auto", ranks + 1), ("max", "cut", 1), ("none", "cut", ranks + 1)),
    )
    splits = [
        base(
            ranks,
            f"micro-{model}-{loss_weight}-{padding}-{most}-tail{tail}",
            model=model,
            samples=4 * 4 * ranks + tail,
            loss_weight=loss_weight,
            plan={"padding": padding, "micro_batches": "auto" if most == "cut" else most},
            loop="steps",
            cut=tail if most == "cut" else None,
        )
        for model, loss_weight, (padding, most, tail) in product
    ]
    automatic = {"micro_batches": "auto"}
    workers = {"num_workers": 2, "persistent_workers": True}
    ahead = {"lookahead": 1}
    cut = functools.partial(micro_batched, ranks)
    return [
        *splits,
        base(ranks, "micro-capped", loop="steps", plan={**automatic, "padding": "none", "max_size": LONGEST}),
        cut("cut"),
        cut("cut-again", cut=100),
        cut("cut-workers", loader=workers),
        cut("cut-ahead", loop="ahead", optimizer=ahead),
        cut("cut-ahead-workers", loop="ahead", optimizer=ahead, loader=workers, model="transformer"),
        cut("cut-steps-ahead", loop="steps_ahead", optimizer=ahead),
        cut("cut-steps-ahead-groups", loop="steps_ahead", optimizer={**ahead, "groups": 2}),
        cut("cut-clip", update="clip"),
        cut("cut-scaler", update="scaler"),
        cut("cut-scheduler", update="scheduler", broadcast=True),
        cut("cut-fillers-without-backward", update="skip_fillers"),
        cut("cut-sum", optimizer={"op": "Sum"}),
        cut("cut-predivide", optimizer={"gradient_predivide_factor": 2.0}),
        cut("cut-groups", optimizer={"groups": 2}),
        cut("cut-groups-clip", optimizer={"groups": 3}, update="clip", model="transformer"),
        cut("cut-sparse", model="bag"),
        cut("cut-sparse-as-dense", model="bag", optimizer={"sparse_as_dense": True}),
        cut("cut-experts", model="experts"),
        cut("cut-experts-ahead", model="experts", loop="ahead", optimizer=ahead),
        cut("cut-speeds", speeds=(1.0, 0.5, 2.0)[:ranks], plan={**automatic, "local_batch": "equal"}),
        cut("cut-summed-losses", loss_weight="sum"),
        cut("cut-fewer-samples-than-ranks", samples=max(1, ranks - 1), batch_size=8),
        cut("cut-fillers-of-two", plan={**automatic, "min_local_batch": 2}),
        cut("cut-fillers-of-two-ahead", plan={**automatic, "min_local_batch": 2}, loop="steps_ahead", optimizer=ahead),
        cut(
            "cut-fillers-of-two-without-backward",
            plan={**automatic, "min_local_batch": 2},
            update="skip_fillers",
            pieces=2,
        ),
        cut("cut-long", samples=LONG_STEPS * 2 * ranks - 1, batch_size=2),
    ]
