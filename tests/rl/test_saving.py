"""States that are saved while the next steps run: those of a run that waits for each, or none."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.checkpoint import StateDamaged, StateDiskFull, StateStore, shards, verify_state
from tests.rl.training import STEPS, tensors, train_slice, trainer_of
from tests.support.processes import fork
from workflow.rl.saving import StateSaver
from workflow.rl.trainer import PPOTrainer

SECONDS = 60
"""After which a test gives up what it waits for."""


@contextmanager
def saving(
    model: Path, folder: Path, asynchronous: bool = True, may_publish: Callable[[], None] = lambda: None
) -> Iterator[tuple[PPOTrainer, StateSaver, StateStore]]:
    """A trainer before its first step, the saver of its states, and where they go."""
    config, _ = train_slice(folder, "algorithm.prompts_per_step=4")
    store = StateStore(folder / "states")
    with (
        trainer_of(config, model) as trainer,
        StateSaver(trainer, store, asynchronous, lambda step: None, may_publish) as saver,
    ):
        yield trainer, saver, store


@pytest.fixture
def let_write(monkeypatch) -> Iterator[threading.Event]:
    """While it is cleared, nothing is written in the background."""
    event, write = threading.Event(), shards.save_file

    def held(*arguments: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            event.wait(SECONDS)
        write(*arguments)

    monkeypatch.setattr(shards, "save_file", held)
    event.set()
    yield event
    event.set()


def until(action: Callable[[], object]) -> None:
    """Do it again and again, until it gives True or raises."""
    end = time.monotonic() + SECONDS
    while action() is not True:
        assert time.monotonic() < end
        time.sleep(0.01)


def steps_of(store: StateStore) -> list[int]:
    return [verify_state(path)["step"] for path in sorted(store.folder.glob("step*"))]


def still_publishing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("publish")]


def test_states_are_those_of_a_run_that_waits_for_each(model, tmp_path, let_write):
    found = {}
    for name in ("waited", "behind"):
        (tmp_path / name).mkdir()
        with saving(model, tmp_path / name, asynchronous=name == "behind") as (trainer, saver, store):
            for step in range(1, STEPS + 1):
                trainer.step()
                if name == "waited":
                    assert saver.save(wait=False)  # nothing else is chosen
                elif step % 2:
                    let_write.clear()
                    assert not saver.save(wait=False)
                else:  # this step changed every tensor before the first byte of its predecessor's state was written
                    saver.check()
                    assert step - 1 not in steps_of(store)
                    let_write.set()
        found[name] = dict(zip(steps_of(store), sorted(store.folder.iterdir()), strict=True))
    assert {name: list(states) for name, states in found.items()} == {
        "waited": [1, 2, 3, 4],
        "behind": [1, 3],
    }
    for step, path in found["behind"].items():
        waited = found["waited"][step]
        assert verify_state(path)["trainer"] == verify_state(waited)["trainer"]
        assert tensors(path) == tensors(waited)


def test_a_state_is_published_while_nobody_asks(model, tmp_path):
    with saving(model, tmp_path) as (trainer, saver, store):
        trainer.step()
        saver.save(wait=False)
        until(lambda: (store.folder / "step000001").exists())


def test_the_next_state_waits_for_the_one_before(model, tmp_path, let_write):
    with saving(model, tmp_path) as (trainer, saver, store):
        trainer.step()
        let_write.clear()
        saver.save(wait=False)
        threading.Timer(0.2, let_write.set).start()
        trainer.step()
        saver.save(wait=False)
        assert steps_of(store)[0] == 1
    assert steps_of(store) == [1, 2]
    assert saver.slowest >= 0.2  # what a job that is asked to stop may have to wait for


def _disk_fills_up(model: Path, folder: Path, monkeypatch, noticed_by: str) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with saving(model, folder) as (trainer, saver, _):
        trainer.step()
        saver.save()
        monkeypatch.setattr(shards, "save_file", fails)
        trainer.step()
        saver.save(wait=False)
        trainer.step()
        if noticed_by == "check":  # at once, but for the time that it takes to fail
            until(saver.check)
        elif noticed_by != "the end":
            getattr(saver, noticed_by)()


@pytest.mark.parametrize("noticed_by", ["check", "save", "finish", "the end"])
def test_what_keeps_a_state_from_being_written_is_raised(noticed_by, model, tmp_path, monkeypatch):
    with pytest.raises(StateDiskFull, match="No space left"):
        _disk_fills_up(model, tmp_path, monkeypatch, noticed_by)
    assert steps_of(StateStore(tmp_path / "states")) == [1]
    assert not still_publishing()


def _fails_to_publish(model: Path, folder: Path, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with saving(model, folder) as (trainer, saver, store):
        trainer.step()
        monkeypatch.setattr(store, "commit", fails)
        saver.save(wait=False)
        until(saver.check)


def test_what_keeps_a_state_from_being_published_is_raised(model, tmp_path, monkeypatch):
    with pytest.raises(OSError, match="Input/output"):
        _fails_to_publish(model, tmp_path, monkeypatch)
    assert steps_of(StateStore(tmp_path / "states")) == []


def _a_file_is_lost(model: Path, folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(shards, "save_file", lambda blocks, part: part.write_bytes(b""))
    monkeypatch.setattr(Path, "rename", lambda part, file: None)  # what a rank says it wrote is seen nowhere
    monkeypatch.setattr("workflow.rl.saving.UNSEEN_SECONDS", 0.2)
    with saving(model, folder) as (trainer, saver, _):
        trainer.step()
        saver.save()


def test_what_was_written_and_is_not_seen_is_no_reason_to_wait_for_ever(model, tmp_path, monkeypatch):
    with pytest.raises(StateDamaged, match="names files that were not written"):
        _a_file_is_lost(model, tmp_path, monkeypatch)


def test_what_another_node_wrote_may_be_seen_late(model, tmp_path, monkeypatch):
    seen, is_written = [], StateStore.is_written

    def late(store: StateStore, *arguments: object) -> bool:
        seen.append(is_written(store, *arguments))
        return seen[-1] and sum(seen) > 3

    monkeypatch.setattr(StateStore, "is_written", late)
    with saving(model, tmp_path) as (trainer, saver, store):
        trainer.step()
        saver.save()
        assert steps_of(store) == [1]
    assert sum(seen) == 4


def _training_fails(model: Path, folder: Path) -> None:
    with saving(model, folder) as (trainer, saver, _):
        trainer.step()
        saver.save(wait=False)
        raise ZeroDivisionError


def test_a_training_that_fails_does_not_wait_for_what_is_not_written(model, tmp_path, let_write):
    let_write.clear()
    with pytest.raises(ZeroDivisionError):
        _training_fails(model, tmp_path)
    assert steps_of(StateStore(tmp_path / "states")) == []
    assert not still_publishing()


class Left(BaseException):
    """Stands for the end of the process."""


def _leave() -> None:
    raise Left


def _folder_is_lost(model: Path, folder: Path, asynchronous: bool) -> None:
    with saving(model, folder, asynchronous, may_publish=_leave) as (trainer, saver, _):
        trainer.step()
        saver.save(wait=False)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_is_published_in_a_folder_that_is_another_s(model, tmp_path, asynchronous):
    with pytest.raises(Left):
        _folder_is_lost(model, tmp_path, asynchronous)
    assert steps_of(StateStore(tmp_path / "states")) == []


def _killed_while_writing(model: Path, folder: Path) -> None:
    write = shards.save_file

    def killed(*arguments: object) -> None:
        write(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    with saving(model, folder) as (trainer, saver, _):
        trainer.step()
        saver.save()
        trainer.step()
        shards.save_file = killed
        saver.save(wait=False)
        until(trainer.step)


def test_killed_while_a_state_is_written_the_one_before_is_used(model, tmp_path, caplog):
    process = fork(_killed_while_writing, model, tmp_path)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list((tmp_path / "states").glob(".step000002.*/*/*.part"))
    with saving(model, tmp_path) as (trainer, saver, store):
        trainer.load(store.newest())
        assert trainer.steps_done == 1
        trainer.step()
        saver.save(wait=False)
    assert sorted(path.name for path in store.folder.iterdir()) == ["step000001", "step000002"]
    assert not caplog.records
