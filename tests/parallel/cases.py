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
    every = [
        *_splits(ranks),
        *_loops(ranks),
        *_options(ranks),
        *_data_sets(ranks),
        *_micro_batches(ranks),
        *_amounts(ranks),
        *_passes(ranks),
        *_closures(ranks),
    ]
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


def process_sets(ranks: int) -> list[list[int]]:
    """Return the process sets of a job: the outer ranks, and those between (with two ranks: each alone)."""
    return [[0, 2], [1]] if ranks == 3 else [[0], [1]]


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
        base(ranks, "scaler-inf", update="scaler_inf"),
        base(ranks, "synchronized-twice", update="twice"),
        base(ranks, "adam", inner="adam"),
        base(ranks, "adam-broadcast", inner="adam", broadcast=True),
        base(ranks, "set-to-none", set_to_none=True),
        base(ranks, "set-to-zero", set_to_none=False),
    ]


def _options(ranks: int) -> list[Case]:
    speeds = (1.0, 0.5, 2.0)[:ranks]
    uneven = {"normalize": "epoch"}
    return [
        base(ranks, "sum", optimizer={"op": "Sum"}),
        base(ranks, "predivide", optimizer={"gradient_predivide_factor": 2.0}),
        base(ranks, "groups", optimizer={"groups": 2}),
        base(ranks, "groups-unused", optimizer={"groups": 2}, model="experts"),
        base(ranks, "groups-without-backward", optimizer={"groups": 3}, update="skip_fillers"),
        base(ranks, "fp16", optimizer={"compression": "fp16"}),
        base(ranks, "fp16-small-and-large", optimizer={"compression": "fp16"}, plan=uneven, loss_weight="uneven"),
        base(ranks, "small-and-large", plan=uneven, loss_weight="uneven"),
        base(ranks, "fp16-groups", optimizer={"compression": "fp16", "groups": 2}),
        base(ranks, "fp16-sparse", optimizer={"compression": "fp16"}, model="bag"),
        base(ranks, "bfloat16", model="half"),
        base(ranks, "bfloat16-groups", model="half", optimizer={"groups": 2}),
        base(ranks, "channels-last", model="convolution"),
        base(ranks, "channels-last-groups", model="convolution", optimizer={"groups": 2}),
        base(ranks, "channels-last-fp16", model="convolution", optimizer={"compression": "fp16"}),
        base(ranks, "sparse-without-backward", model="bag", update="skip_fillers"),
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


def _amounts(ranks: int) -> list[Case]:
    """Loss weights that are known only when a batch is read: set_weight()."""
    named = functools.partial(base, ranks, amounts=True)
    cut = functools.partial(micro_batched, ranks, amounts=True)
    return [
        named("amounts"),
        named("amounts-transformer", model="transformer", loss_weight="samples"),
        named("amounts-planned-zero", loss_weight="array"),
        named("amounts-sum", optimizer={"op": "Sum"}),
        named("amounts-predivide", optimizer={"gradient_predivide_factor": 2.0}),
        named("amounts-groups", optimizer={"groups": 2}),
        named("amounts-clip", update="clip"),
        named("amounts-scaler", update="scaler"),
        named("amounts-sparse", model="bag"),
        named("amounts-channels-last", model="convolution"),
        named("amounts-bfloat16", model="half"),
        named("amounts-without-backward", update="skip_fillers", batch_size=1, samples=24 * ranks + 1),
        named("amounts-ahead", loop="ahead", optimizer={"lookahead": 1}),
        named("amounts-epoch", plan={"normalize": "epoch"}, loss_weight="sizes"),
        named("amounts-long", samples=LONG_STEPS * 2 * ranks - 1, batch_size=2),
        cut("cut-amounts"),
        cut("cut-amounts-sum", optimizer={"op": "Sum"}),
        cut("cut-amounts-clip-groups", optimizer={"groups": 2}, update="clip"),
        cut("cut-amounts-steps-ahead", loop="steps_ahead", optimizer={"lookahead": 1}),
        cut("cut-amounts-transformer", model="transformer"),
    ]


def _passes(ranks: int) -> list[Case]:
    """backward_passes_per_step: several steps of the sampler in an update, or several losses of each micro-batch."""

    def passes(number: int, **options: object) -> dict[str, object]:
        return {"optimizer": {"backward_passes_per_step": number, **options}}

    cut = functools.partial(micro_batched, ranks)
    return [
        base(ranks, "accumulate", accumulate=2, **passes(2)),
        base(ranks, "accumulate-three", accumulate=3, **passes(3)),
        base(ranks, "accumulate-groups", accumulate=2, **passes(2, groups=2)),
        base(ranks, "accumulate-sum", accumulate=2, **passes(2, op="Sum")),
        base(ranks, "accumulate-clip", accumulate=1, update="clip", **passes(2)),
        base(ranks, "accumulate-ahead", accumulate=2, loop="ahead", **passes(2, lookahead=1)),
        base(ranks, "accumulate-without-backward", accumulate=2, update="skip_fillers", **passes(2)),
        base(ranks, "accumulate-sparse", accumulate=2, model="bag", **passes(2)),
        cut("cut-accumulate", accumulate=2, **passes(2)),
        cut("cut-accumulate-experts", accumulate=3, model="experts", **passes(3)),
        cut("cut-accumulate-groups", accumulate=2, model="experts", **passes(2, groups=2)),
        cut("cut-accumulate-steps-ahead", accumulate=2, loop="steps_ahead", **passes(2, lookahead=1)),
        base(ranks, "losses", losses=2, **passes(2)),
        base(ranks, "losses-transformer", losses=3, model="transformer", **passes(3)),
        base(ranks, "losses-scaler", losses=2, update="scaler", **passes(2)),
        cut("cut-losses", losses=2, **passes(2)),
        cut("cut-losses-three", losses=3, model="experts", **passes(3)),
        cut("cut-losses-groups", losses=2, **passes(2, groups=2)),
        cut("cut-losses-accumulate", losses=2, accumulate=2, **passes(4)),
    ]


def _closures(ranks: int) -> list[Case]:
    cut = functools.partial(micro_batched, ranks)
    return [
        base(ranks, "closure", update="closure"),
        base(ranks, "closure-amounts", update="closure", amounts=True),
        base(ranks, "closure-groups", update="closure", optimizer={"groups": 2}),
        base(ranks, "closure-lbfgs", update="closure", inner="lbfgs"),
        cut("cut-closure", update="closure"),
        cut("cut-closure-lbfgs", update="closure", inner="lbfgs"),
        cut("cut-closure-lbfgs-amounts", update="closure", inner="lbfgs", amounts=True),
    ]
