"""The pipeline: in order, never further ahead than permitted, and the same steps made whatever the timing."""

import gc
import threading
import time
import traceback
import weakref
from contextlib import closing

import pytest

from gsplit.loading.pipeline import Pipeline


class _Maker:
    """Counts what it makes; may be slow, and may fail at a step."""

    def __init__(self, *, seconds: float = 0.0, fails_at: int | None = None) -> None:
        self.made: list[int] = []
        self.threads: dict[int, str] = {}
        self._seconds, self._fails_at = seconds, fails_at

    def __call__(self, step: int) -> str:
        time.sleep(self._seconds)
        if step == self._fails_at:
            raise OSError(f"step {step} cannot be read")
        self.threads[step] = threading.current_thread().name
        self.made.append(step)
        return f"item {step}"


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gsplit-loader")]


@pytest.mark.parametrize("depth, threads", [(0, 1), (1, 1), (3, 1), (50, 1), (2, 2), (4, 3), (8, 8), (50, 20)])
def test_items_come_in_order_and_once(depth: int, threads: int) -> None:
    maker = _Maker()
    with closing(Pipeline(maker, range(5, 17), depth, threads)) as pipeline:
        assert [pipeline.take() for _ in range(12)] == [f"item {step}" for step in range(5, 17)]
    assert sorted(maker.made) == list(range(5, 17))
    for number in range(threads):
        of_thread = [step for step in maker.made if step % threads == number]
        assert of_thread == sorted(of_thread)
        assert len({maker.threads[step] for step in of_thread}) <= 1
    assert not _threads()


def test_threads_make_steps_at_the_same_time() -> None:
    """Each of three steps waits for the other two."""
    together = threading.Barrier(3)
    with closing(Pipeline(lambda step: together.wait(60), range(3), 3, 3)) as pipeline:
        assert sorted(pipeline.take() for _ in range(3)) == [0, 1, 2]


@pytest.mark.parametrize("depth, threads", [(0, 1), (1, 1), (2, 1), (4, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("num_taken", [1, 3, 9, 10])
@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_what_is_made_depends_on_what_was_taken_alone(depth: int, threads: int, num_taken: int, seconds: float) -> None:
    """Ranks of any speed that leave the loop at the same step have made the same steps."""
    maker = _Maker(seconds=seconds)
    with closing(Pipeline(maker, range(10), depth, threads)) as pipeline:
        for _ in range(num_taken):
            pipeline.take()
    assert sorted(maker.made) == list(range(min(num_taken + depth, 10)))
    assert not _threads()


def test_it_runs_ahead_and_no_further() -> None:
    maker = _Maker()
    with closing(Pipeline(maker, range(100), 3)) as pipeline:
        pipeline.take()
        pipeline.drain()
        assert maker.made == [0, 1, 2, 3]
        time.sleep(0.05)
        assert maker.made == [0, 1, 2, 3]


def test_nothing_is_made_before_the_first_is_wanted() -> None:
    maker = _Maker()
    with closing(Pipeline(maker, range(5), 2)):
        pass
    assert maker.made == []


@pytest.mark.parametrize("depth", [1, 4])
def test_an_error_comes_with_its_traceback_where_its_step_would_have(depth: int) -> None:
    maker = _Maker(fails_at=2)
    with closing(Pipeline(maker, range(6), depth)) as pipeline:
        assert [pipeline.take(), pipeline.take()] == ["item 0", "item 1"]
        with pytest.raises(OSError, match="step 2 cannot be read") as caught:
            pipeline.take()
        assert "__call__" in "".join(traceback.format_tb(caught.value.__traceback__))
        with pytest.raises(OSError, match="step 2"):  # and again, not a wait for ever
            pipeline.take()
        pipeline.drain()
    assert maker.made == [0, 1]
    assert not _threads()


def test_an_item_is_not_held_once_it_was_taken() -> None:
    class Item:
        pass

    with closing(Pipeline(lambda step: Item(), range(10), 1)) as pipeline:
        pipeline.take()
        pipeline.drain()
        last = weakref.ref(pipeline._made[1])  # what the thread made last: it waits now
        pipeline._made.clear()
        gc.collect()
        assert last() is None


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_other_threads_make_what_is_permitted_after_an_error_in_one(seconds: float) -> None:
    """Whatever the timing: peers without the error make these steps, too."""
    maker = _Maker(seconds=seconds, fails_at=4)
    with closing(Pipeline(maker, range(20), 5, 3)) as pipeline:
        assert [pipeline.take() for _ in range(4)] == [f"item {step}" for step in range(4)]
        for _ in range(2):
            with pytest.raises(OSError, match="step 4 cannot be read"):
                pipeline.take()
        pipeline.drain()
        assert sorted(maker.made) == [0, 1, 2, 3, 5, 6, 8, 9]  # of 0..10, without 4 and what its thread makes later
    assert not _threads()


def test_a_closed_pipeline_gives_nothing_and_never_waits() -> None:
    pipeline = Pipeline(_Maker(), range(10), 2)
    pipeline.take()
    pipeline.close()
    with pytest.raises(RuntimeError, match="closed"):
        pipeline.take()


def test_it_lives_as_long_as_whoever_takes_and_goes_on_for_another() -> None:
    maker, items = _Maker(), list[str]()
    with closing(Pipeline(maker, range(6), 2)) as pipeline:
        for number in (1, 3, 2):  # three threads, one after the other, each gone when the next comes
            taker = threading.Thread(
                target=lambda count: items.extend(pipeline.take() for _ in range(count)), args=(number,)
            )
            taker.start()
            taker.join(300)
            time.sleep(0.5)
            assert not _threads()
    assert items == [f"item {step}" for step in range(6)] and maker.made == list(range(6))
