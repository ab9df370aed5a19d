"""Sizes are measured once, by all ranks together, kept, and measured anew where they are not those of the data."""

from __future__ import annotations

import functools
import io
import logging
import math
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inprocess import RanksError, run_ranks
from torch.utils.data import Subset

import chronica_hvd as chronica
from chronica_hvd import sizes as module
from chronica_hvd.sizes_key import cache_key

MEASURED_ANEW = module.PROBES


class Words:
    """A data set of words of some lengths that notes what was read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sample: int) -> str:
        self.read.append(sample)
        return "x" * self.lengths[sample]


def some(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 99, count).tolist()  # type: ignore[no-any-return]


def measure(dataset: Any, size_fn: Callable[[Any], Any] = len, **options: Any) -> Any:
    return chronica.measure_sizes(dataset, size_fn, **{"progress": False, **options})


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample a round, each kept at once."""
    monkeypatch.setattr(module, "ROUND_S", 0.0)
    monkeypatch.setattr(module, "KEEP_S", 0.0)
    monkeypatch.setattr(module, "KEEP_TIMES", 0.0)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "made" / "sizes"


def beside(cache: Path) -> list[str]:
    """Return what else lies there."""
    return sorted(path.name for path in cache.parent.iterdir() if path != cache)


# What is measured. ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 4, 17])
@pytest.mark.parametrize("is_kept", [False, True])
def test_every_sample_is_read_once_by_all_ranks_together(ranks: int, count: int, is_kept: bool, cache: Path) -> None:
    every = [Words(some(count)) for _ in range(ranks)]
    results = run_ranks(ranks, lambda rank: measure(every[rank], cache=cache if is_kept else None), seed=count)
    for sizes in results:
        assert sizes.dtype == np.int64
        assert sizes.tolist() == some(count)
    assert sorted(sample for words in every for sample in words.read) == list(range(count))
    assert max(len(words.read) for words in every) - min(len(words.read) for words in every) <= 1


@pytest.mark.parametrize("of", [float, np.float32, np.int16, np.uint64, torch.tensor, np.array, int])
def test_numbers_of_any_type(of: Any) -> None:
    sizes = measure([0, 3, 2**53], lambda size: of(min(size, 9)))
    assert sizes.dtype == np.int64
    assert sizes.tolist() == [0, 3, 9]


def test_sizes_that_are_no_whole_numbers() -> None:
    for results in (
        run_ranks(2, lambda rank: measure([1, 2, 3], lambda size: size / 2)),
        [measure([0.5, 1, 1.5], abs)],
    ):
        for sizes in results:
            assert sizes.dtype == np.float64
            assert sizes.tolist() == [0.5, 1.0, 1.5]
    assert measure([2**53], int).tolist() == [2**53]


def test_without_horovod_or_before_init_one_process_reads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod.torch", types.ModuleType("half installed"))
    assert measure(["a", "bb"]).tolist() == [1, 2]
    monkeypatch.delitem(sys.modules, "horovod.torch")
    assert measure(["a", "bb"]).tolist() == [1, 2]


def test_it_needs_no_torch() -> None:
    program = """
import sys
sys.modules["torch"] = sys.modules["horovod"] = None
import chronica_hvd
print(chronica_hvd.measure_sizes(["a", "bb"], len, progress=False))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[1 2]\n"


# What goes wrong. -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "kind", "message"),
    [
        (math.nan, ValueError, "size_fn of sample 3 must be finite, not nan"),
        (math.inf, ValueError, "size_fn of sample 3 must be finite, not inf"),
        (-1, ValueError, "size_fn of sample 3 must be at least 0, not -1"),
        (2**53 + 2, ValueError, r"size_fn of sample 3 must be at most 2\^53, not 9.0072e\+15"),
        ("5", TypeError, "size_fn of sample 3 must be a number, not '5' of type str"),
        (True, TypeError, "size_fn of sample 3 must be a number, not True of type bool"),
        (None, TypeError, "size_fn of sample 3 must be a number, not None of type NoneType"),
        (torch.ones(2), TypeError, r"size_fn of sample 3 must be a number, not tensor\(\[1., 1.\]\) of type Tensor"),
        (torch.tensor(True), TypeError, r"size_fn of sample 3 must be a number, not tensor\(True\) of type Tensor"),
        ([5], TypeError, r"size_fn of sample 3 must be a number, not \[5\] of type list"),
        (KeyError("a\udcffé"), RuntimeError, "size_fn failed on sample 3: KeyError: 'a.*é'"),
        (StopIteration(), RuntimeError, "size_fn failed on sample 3: StopIteration: "),
        (OSError("x" * 9999), RuntimeError, "size_fn failed on sample 3: OSError: xxx"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_wrong_sizes_are_errors_on_every_rank(
    returned: Any, kind: type[Exception], message: str, ranks: int, cache: Path
) -> None:
    def size(sample: int) -> Any:
        if sample == 3 and isinstance(returned, Exception):
            raise returned
        return returned if sample == 3 else sample

    def run(rank: int) -> str:
        with pytest.raises(kind, match=message) as caught:
            measure(range(9), size, cache=cache)
        assert type(caught.value) is kind
        return str(caught.value)

    messages = run_ranks(ranks, run)
    assert len(set(messages)) == 1
    assert ranks == 1 or messages[0].startswith(f"on rank {3 % ranks}, ")
    kept = np.concatenate([read_part(path) for path in cache.parent.glob("sizes.part-*")])
    assert sorted(kept[:, 0]) >= [0.0, 1.0]
    assert 3.0 not in kept[:, 0]


def read_part(path: Path) -> np.ndarray:
    return np.frombuffer(path.read_bytes().split(b"\n", 1)[1], "<f8").reshape(-1, 2)


def test_samples_that_cannot_be_read() -> None:
    class Broken(Words):
        def __getitem__(self, sample: int) -> str:
            if sample in (1, 2):
                raise OSError(f"no file {sample}")
            return super().__getitem__(sample)

    def run(rank: int) -> str:
        with pytest.raises(RuntimeError, match="reading sample") as caught:
            measure(Broken(some(8)))
        return str(caught.value)

    assert run_ranks(1, run) == ["reading sample 1 failed: OSError: no file 1"]
    assert set(run_ranks(4, run, seed=3)) == {
        "on rank 1, reading sample 1 failed: OSError: no file 1; rank 2 failed as well"
    }


def test_arguments_that_one_rank_gives_wrongly_are_errors_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_text("name,size\n")
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"dataset": iter([])}, TypeError, "dataset must have a length and samples"),
        ({"dataset": range(4)}, ValueError, r"dataset must be the whole one on every rank; .* are \(9, 9, 4\)"),
        ({"size_fn": 1}, TypeError, "size_fn must be a function of a sample, not 1 of type int"),
        ({"cache": tmp_path}, ValueError, "cache must be the name of a file, not of a folder"),
        ({"cache": tmp_path / "foreign"}, ValueError, "foreign' holds something else, and is left as it is"),
        ({"key": 1}, TypeError, "key must be a string, not 1 of type int"),
        ({"progress": 1}, TypeError, "progress must be True or False, not 1"),
    ]
    for changes, kind, message in wrong:

        def run(rank: int, changes: dict[str, Any] = changes) -> None:
            chosen = changes if rank == 2 else {}
            measure(**{"dataset": range(9), "size_fn": abs, **chosen})

        with pytest.raises(RanksError) as failed:
            run_ranks(3, run)
        for rank in range(3):
            with pytest.raises(kind, match=message):
                raise failed.value.errors[rank]
    assert (tmp_path / "foreign").read_text() == "name,size\n"
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


# What is kept. --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_of_a_cache_only_a_few_are_measured_again(ranks: int, cache: Path) -> None:
    lengths = some(200)
    run_ranks(2, lambda rank: measure(Words(lengths), cache=str(cache)))
    every = [Words(lengths) for _ in range(ranks)]
    for sizes in run_ranks(ranks, lambda rank: measure(every[rank], cache=cache)):
        assert sizes.tolist() == lengths
    assert MEASURED_ANEW <= sum(len(words.read) for words in every) < MEASURED_ANEW + ranks
    assert beside(cache) == []


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 1), (2, 5)])
def test_an_interrupted_measurement_goes_on_at_any_number_of_ranks(before: int, after: int, cache: Path) -> None:
    lengths = some(100)

    def interrupt(rank: int) -> None:
        words = Words(lengths)
        words.read = Ending(40 // before)
        measure(words, cache=cache)

    with pytest.raises(RanksError):
        run_ranks(before, interrupt)
    kept = np.concatenate([read_part(path) for path in cache.parent.glob("sizes.part-*")])
    assert len(kept) >= 40 - 2 * before
    assert len(beside(cache)) == before
    every = [Words(lengths) for _ in range(after)]
    for sizes in run_ranks(after, lambda rank: measure(every[rank], cache=cache)):
        assert sizes.tolist() == lengths
    probes = after * math.ceil(MEASURED_ANEW / after)
    assert sum(len(words.read) for words in every) == 100 - len(kept) + min(probes, len(kept))
    assert beside(cache) == []


class Ending(list[int]):
    """What was read, until this is interrupted."""

    def __init__(self, most: int) -> None:
        self.most = most

    def append(self, sample: int) -> None:
        if len(self) == self.most:
            raise KeyboardInterrupt
        super().append(sample)


#: A file's content as accidents leave it.
DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    **{
        f"cut-{length}": lambda content, length=length: content[:length]
        for length in (1, 20, 21, 30, 40, 60, 80, -1, -16)
    },
    **{f"flipped-{at}": lambda content, at=at: flipped(content, at) for at in (30, 36, 50, 68, 69, 70, 90, -1)},
    "longer": lambda content: content + bytes(16),
    "twice": lambda content: content * 2,
    "zeros": lambda content: content[:100] + bytes(len(content) - 100),
}


def flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_damaged_files_are_measured_anew(name: str, ranks: int, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    lengths = some(70)
    measure(Words(lengths), cache=cache)
    content = cache.read_bytes()
    cache.write_bytes(DAMAGED[name](content))
    every = [Words(lengths) for _ in range(ranks)]
    for sizes in run_ranks(ranks, lambda rank: measure(every[rank], cache=cache)):
        assert sizes.tolist() == lengths
    assert sorted(sample for words in every for sample in words.read) == list(range(70))
    (message,) = caplog.messages
    assert "sizes' is damaged; the sizes in it are measured anew" in message or "are of another data set" in message
    assert cache.read_bytes() == content


def test_a_damaged_part_file_costs_only_what_it_held(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    lengths = some(100)
    with pytest.raises(RanksError):
        run_ranks(2, lambda rank: measure(ending(lengths, 30), cache=cache))
    first, second = sorted(cache.parent.iterdir())
    kept = len(read_part(second))
    first.write_bytes(first.read_bytes()[:-5])
    words = Words(lengths)
    assert measure(words, cache=cache).tolist() == lengths
    assert len(words.read) == 100 - kept + min(kept, MEASURED_ANEW)
    assert [message.split("; ")[-1] for message in caplog.messages] == ["the sizes in it are measured anew"]


def ending(lengths: list[int], most: int) -> Words:
    words = Words(lengths)
    words.read = Ending(most)
    return words


@pytest.mark.parametrize(
    "content", [b"name,size\n", b"\0", b"chronica_hvd_sizes", b"chronica_hvd sizes 2 ", b"PK\3\4" * 99]
)
def test_files_of_something_else_are_left_as_they_are(content: bytes, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_bytes(content)
    with pytest.raises(ValueError, match=r"cache must be a file that measure_sizes made, or none yet; .* another name"):
        measure(["a"], cache=cache)
    assert cache.read_bytes() == content
    assert beside(cache) == []


def test_a_file_that_appears_meanwhile_is_left_as_it_is(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    def size(sample: int) -> int:
        cache.parent.mkdir(exist_ok=True)
        cache.write_text("something else")
        return sample

    assert measure(range(3), size, cache=cache).tolist() == [0, 1, 2]
    assert cache.read_text() == "something else"
    assert ["cannot be kept in" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_nothing_can_be_kept_sizes_are_measured_all_the_same(
    ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for sizes in run_ranks(ranks, lambda rank: measure(Words(some(20)), cache=tmp_path / "file" / "sizes")):
        assert sizes.tolist() == some(20)
    (message,) = caplog.messages
    assert "cannot be kept in" in message
    assert "they are measured all the same" in message


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    measure(Words(some(5)), cache=tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").is_file()


# Ranks that see different folders. ------------------------------------------------------------------------------------


def test_ranks_without_a_shared_disk_tell_one_another(tmp_path: Path) -> None:
    lengths = some(90)
    of_rank = [tmp_path / str(rank) / "sizes" for rank in range(3)]
    with pytest.raises(RanksError):
        run_ranks(3, lambda rank: measure(ending(lengths, 20), cache=of_rank[rank]))
    kept = sum(len(read_part(path)) for path in tmp_path.glob("*/sizes.part-*"))
    every = [Words(lengths) for _ in range(3)]
    for sizes in run_ranks(3, lambda rank: measure(every[rank], cache=of_rank[rank])):
        assert sizes.tolist() == lengths
    assert sum(len(words.read) for words in every) == 90 - kept + 33
    assert len({cache.read_bytes() for cache in of_rank}) == 1
    assert [beside(cache) for cache in of_rank] == [[], [], []]


@pytest.mark.parametrize("holder", [0, 2])
def test_one_rank_that_has_the_file_is_enough(holder: int, tmp_path: Path) -> None:
    lengths = some(90)
    of_rank: list[Path | None] = [tmp_path / str(rank) / "sizes" for rank in range(2)]
    of_rank.insert(1, None)  # has no disk
    measure(Words(lengths), cache=of_rank[holder])
    every = [Words(lengths) for _ in range(3)]
    run_ranks(3, lambda rank: measure(every[rank], cache=of_rank[rank]))
    assert sum(len(words.read) for words in every) == 33
    assert len(list(tmp_path.glob("*/sizes"))) == 2


def test_files_that_contradict_one_another_are_the_same_array_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has other data of the same number, type and key; which few samples cannot show."""
    monkeypatch.setattr(module, "PROBES", 0)
    of_rank = [tmp_path / str(rank) / "sizes" for rank in range(2)]
    for rank in range(2):
        with pytest.raises(KeyboardInterrupt):
            measure(ending(some(50, seed=rank), 20), cache=of_rank[rank])
    results = run_ranks(2, lambda rank: measure(Words(some(50)), cache=of_rank[rank]))
    assert results[0].tolist() == results[1].tolist() == some(50)


# What tells data apart. -----------------------------------------------------------------------------------------------


def test_other_data_of_the_same_kind_are_noticed(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    measure(Words(some(100)), cache=cache)
    with pytest.raises(RanksError):
        run_ranks(2, lambda rank: measure(ending(some(100, seed=1), 50), cache=cache))
    assert len(beside(cache)) == 2
    assert not cache.exists(), "else it could be joined with what was measured since"
    (message,) = caplog.messages
    assert "as in the cache of measure_sizes: the data or what size_fn calls have changed" in message
    assert measure(Words(some(100, seed=1)), cache=cache).tolist() == some(100, seed=1)
    assert measure(Words(some(100, seed=1)), cache=cache).tolist() == some(100, seed=1)
    assert len(caplog.messages) == 1


def test_another_length_function_or_key_is_noticed(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    measure(Words([5] * 40), cache=cache)
    for changes in ({"dataset": Words([5] * 41)}, {"size_fn": lambda word: len(word) + 0}, {"key": "2"}, {}):
        caplog.clear()
        words = Words([5] * 40)
        options: dict[str, Any] = {"dataset": words, "size_fn": len, "cache": cache, **changes}
        measure(**options)
        assert sorted(options["dataset"].read) == list(range(len(options["dataset"])))
        (message,) = caplog.messages
        assert "are of another data set, another function or another key" in message


LARGEST = 512


def clipped(word: str) -> int:
    return min(len(word), LARGEST)


def calls_another(word: str) -> int:
    return sum(clipped(part) for part in word.split())


class Callable_:  # noqa: N801
    def __init__(self, largest: int) -> None:
        self.largest = largest

    def __call__(self, word: str) -> int:
        return min(len(word), self.largest)

    def method(self, word: str) -> int:
        return self(word)


def closure(largest: Any) -> Callable[[str], int]:
    return lambda word: min(len(word), largest)


def default(largest: Any) -> Callable[[str], int]:
    def size(word: str, largest: Any = largest, *, least: Any = largest) -> int:
        return max(min(len(word), largest), least)

    return size


@pytest.mark.parametrize(
    "make",
    [
        closure,
        default,
        Callable_,
        lambda largest: Callable_(largest).method,
        lambda largest: functools.partial(max, largest),
        lambda largest: functools.partial(max, key=largest),
        lambda largest: closure(closure(largest)),
        lambda largest: functools.lru_cache(closure(largest)),
        lambda largest: closure((largest, "a")),
    ],
)
def test_values_that_a_function_was_made_with_count(make: Callable[[Any], Any]) -> None:
    assert cache_key([], make(5), 3, "") == cache_key([], make(5), 3, "")
    assert cache_key([], make(5), 3, "") != cache_key([], make(6), 3, "")


def test_what_a_function_names_of_its_own_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    of_both = [cache_key([], function, 3, "") for function in (clipped, calls_another)]
    assert of_both == [cache_key([], function, 3, "") for function in (clipped, calls_another)]
    monkeypatch.setattr(sys.modules[__name__], "LARGEST", 513)
    for function, before in zip((clipped, calls_another), of_both, strict=True):
        assert cache_key([], function, 3, "") != before


def test_data_sets_are_told_apart_by_type_and_choice() -> None:
    class Others(Words):
        def __getitem__(self, sample: int) -> str:
            return "x"

    words = Words(some(9))
    every = [[], (), words, Others([]), Subset(words, [0, 1]), Subset(words, [1, 0]), Subset(Others([]), [1, 0])]
    assert len({cache_key(dataset, len, 3, "") for dataset in every}) == len(every)
    assert cache_key(Words([]), len, 3, "") == cache_key(words, len, 3, "")


def test_anything_that_can_be_called_has_a_key() -> None:
    recursive = closure(None)
    recursive.__closure__[0].cell_contents = recursive  # type: ignore[index]
    itself: list[Any] = []
    itself.append(itself)
    for function in (recursive, closure(itself), torch.nn.Linear(2, 2), torch.sum, np.sum, str, str.upper, "a".count):
        assert cache_key([], function, 3, "\udcff") == cache_key([], function, 3, "\udcff")


def test_functions_of_a_large_module_that_call_one_another() -> None:
    def key(last: int) -> str:
        namespace: dict[str, Any] = {"__name__": "large"}
        for number in range(3000):
            exec(f"def f{number}(word): return f{number + 1}(word)", namespace)
        exec(f"def f3000(word): return len(word) + {last}", namespace)
        return cache_key([], namespace["f0"], 3, "")

    assert key(1) == key(1)
    assert key(1) != key(2)


def test_another_process_finds_the_same_key() -> None:
    program = """
import chronica_hvd.sizes_key, torch, functools, sys
def size(word): return len({1, "a", "b", (2, "c")} & set(word)) if word in {"u", "v", "w", 1.5} else 1
def outer(largest): return lambda word: [size(part) for part in word] and object and largest
print(chronica_hvd.sizes_key.cache_key(torch.utils.data.TensorDataset(torch.ones(3)), outer(("a", 5)), 3, "k"))
print(chronica_hvd.sizes_key.cache_key([], torch.nn.Linear(2, 2), 3, "k"))
"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(3)
    }
    assert len(printed) == 1


# What is shown. -------------------------------------------------------------------------------------------------------


def test_a_bar_on_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, lambda rank: measure(Words(some(8)), progress=True))
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "sizes: 100%" in shown.splitlines()[-1]
    assert "8/8" in shown
    measure(Words(some(8)))
    assert capsys.readouterr().err == ""


def test_of_a_cache_nothing_is_shown(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    for _ in range(2):
        capsys.readouterr()
        measure(Words(some(8)), progress=True, cache=cache)
    assert capsys.readouterr().err == ""


def test_lines_without_tqdm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(module, "LINE_S", 0.0)
    measure(Words(some(3)), progress=True)
    assert capsys.readouterr().err.splitlines() == [f"measure_sizes: {n} of 3 samples" for n in range(4)]


@pytest.mark.parametrize("has_tqdm", [False, True])
def test_where_nothing_can_be_shown_sizes_are_measured_all_the_same(
    has_tqdm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_tqdm:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(module, "LINE_S", 0.0)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    results = run_ranks(2, lambda rank: measure(Words(some(8)), progress=True))
    assert [sizes.tolist() for sizes in results] == [some(8)] * 2


def test_what_is_noted_is_a_warning_of_our_log(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.mkdir()
    cache.touch()
    measure(["a"], cache=cache)
    assert [(record.name, record.levelno) for record in caplog.records] == [("chronica_hvd", logging.WARNING)]
